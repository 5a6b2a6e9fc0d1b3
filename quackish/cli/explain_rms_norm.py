"""`explain` for RMSNorm: the problem that ops would ask for, the config that is chosen, and one launch each way."""

import argparse

import torch

from quackish import kernels
from quackish.cli.dry_run import Buffer, Step, Trace
from quackish.cli.explained import Explained
from quackish.configs.choose import choose
from quackish.configs.rms_norm import RmsNormBwdProblem, RmsNormFwdProblem
from quackish.errors import UnsupportedError
from quackish.gpu import Gpu
from quackish.ops.rms_norm import _dx_dtypes
from quackish.ops.rms_norm_plans import BackwardPlan, ForwardPlan, check_problem
from quackish.work import work

_NAMES = {"rms_norm_fwd": "rms_norm_forward", "rms_norm_bwd": "rms_norm_backward"}


def explain(args: argparse.Namespace, shape: list[int], gpu: Gpu | None) -> Explained:
    m, n = shape
    wanted = {name: p for name, p in _problems(args, m, n).items() if args.op in ("rms_norm", _NAMES[name])}
    about = dict(op=args.op, shape=f"{m}x{n}", dtype=args.dtype, gpu=gpu)
    reasons = {name: _why_portable(name, p, m, gpu) for name, p in wanted.items()}
    if all(reasons.values()):
        return Explained(**about, portable=next(iter(reasons.values())))
    plan, steps, buffers = {}, [], []
    for name, problem in wanted.items():
        phase = _NAMES[name].removeprefix("rms_norm_")
        if reasons[name]:
            plan[f"Path of {phase}"] = f"the portable path, in plain PyTorch: {reasons[name]}"
            continue
        choice = choose(name, problem, gpu)
        done = work(name, problem, {"m": m})
        steps.append(Step(phase, name, problem, choice, {"m": m}, done))
        buffers.append(Buffer(f"results of {phase}", done.bytes_written))
        if name == "rms_norm_bwd" and problem.num_sums:
            floats = choice.config.scratch_floats(problem, choice.config.num_ctas(m, gpu.sm_count))
            buffers.append(Buffer("scratch of the sums over CTAs, kept for the stream", 4 * floats))
    trace = Trace(steps, sum(buffer.bytes for buffer in buffers), buffers)
    return Explained(**about, portable=None, plan=plan, trace=trace)


def _problems(args: argparse.Namespace, m: int, n: int) -> dict[str, RmsNormFwdProblem | RmsNormBwdProblem]:
    """What ops ask the kernels for, forward and backward, of tensors like these; their plans know."""
    dtype = getattr(torch, args.dtype)

    def of(name: str | None) -> torch.dtype | None:
        if name in (None, "same"):
            return dtype
        return None if name == "none" else getattr(torch, name)

    def tensor(dtype: torch.dtype | None, *shape: int) -> torch.Tensor | None:
        return None if dtype is None else torch.empty(shape, dtype=dtype, device="meta")

    weight_dtype, out_dtype = of(args.weight_dtype), of(args.out_dtype)
    residual_dtype = None if args.residual is None else of(args.residual)
    bias_dtype = (weight_dtype or dtype) if args.bias else None
    x, residual = tensor(dtype, m, n), tensor(residual_dtype, m, n)
    weight, bias = tensor(weight_dtype, n), tensor(bias_dtype, n)
    forward = ForwardPlan(x, weight, bias, residual, 1e-6, 0.0, out_dtype, "auto")
    res = x if residual is None else residual
    rstd = tensor(torch.float64 if torch.float64 in (dtype, weight_dtype, residual_dtype) else torch.float32, m)
    dx_dtypes = _dx_dtypes(True, residual is not None, dtype, res.dtype)
    dy, dres = tensor(out_dtype, m, n), tensor(residual_dtype, m, n)
    backward = BackwardPlan(dy, res, weight, rstd, dres, 0.0, *dx_dtypes, weight_dtype, bias_dtype, "auto")
    return {"rms_norm_fwd": forward.problem, "rms_norm_bwd": backward.problem}


def _why_portable(name: str, problem, m: int, gpu: Gpu | None) -> str | None:
    """None where a kernel runs."""
    if gpu is None:
        return 'rms_norm: no kernel for cpu tensors. backend="auto" runs the portable path.'
    try:
        check_problem(problem, m)
        kernels.find(name, gpu)
        choose(name, problem, gpu)
    except ModuleNotFoundError:  # the compiler is not installed here
        pass
    except UnsupportedError as error:
        return str(error)
    return None
