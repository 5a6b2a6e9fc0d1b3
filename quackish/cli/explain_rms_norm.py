"""`explain` for RMSNorm: the problem that ops would ask for, the config that is chosen, and one launch each way."""

import argparse

import torch

from quackish import kernels
from quackish.cli.dry_run import Buffer, Step, Trace
from quackish.cli.explained import Explained
from quackish.configs.choose import choose
from quackish.configs.rms_norm import ITEMSIZE, MAX_M, RmsNormBwdProblem, RmsNormFwdProblem
from quackish.errors import UnsupportedError
from quackish.gpu import Gpu
from quackish.ops.rms_norm import _dx_dtypes
from quackish.ops.rms_norm_plans import BackwardPlan, ForwardPlan
from quackish.work import work


def explain(args: argparse.Namespace, shape: list[int], gpu: Gpu | None) -> Explained:
    m, n = shape
    wanted = {name: p for name, p in _problems(args, m, n).items() if args.op in ("rms_norm", _name_of(name))}
    about = dict(op=args.op, shape=f"{m}x{n}", dtype=args.dtype, gpu=gpu)
    reasons = {name: _why_portable(name, p, m, gpu) for name, p in wanted.items()}
    if all(reasons.values()):
        return Explained(**about, portable=next(iter(reasons.values())))
    plan, steps, buffers = {}, [], []
    for name, problem in wanted.items():
        phase = _name_of(name).removeprefix("rms_norm_")
        if reasons[name]:
            plan[f"Path of {phase}"] = f"the portable path, in plain PyTorch: {reasons[name]}"
            continue
        choice = choose(name, problem, gpu)
        sizes = {"m": m, "num_ctas": choice.config.num_ctas(m, gpu.sm_count)}
        done = work(name, problem, sizes)
        steps.append(Step(phase, name, problem, choice, sizes, done))
        buffers.append(Buffer(f"results of {phase}", done.bytes_written))
        if name == "rms_norm_bwd" and problem.num_sums:
            floats = choice.config.scratch_floats(problem, sizes["num_ctas"])
            buffers.append(Buffer("scratch of the sums over CTAs, kept for the stream", 4 * floats))
    trace = Trace(steps, sum(buffer.bytes for buffer in buffers), len(steps), buffers)
    return Explained(**about, portable=None, plan=plan, trace=trace)


def _name_of(kernel: str) -> str:
    """The operation's."""
    return kernel.replace("_fwd", "_forward").replace("_bwd", "_backward")


def _problems(args: argparse.Namespace, m: int, n: int) -> dict[str, RmsNormFwdProblem | RmsNormBwdProblem]:
    """What ops ask the kernels for, forward and backward, of tensors like these; their plans know."""
    dtype = getattr(torch, args.dtype)
    of = {None: dtype, "same": dtype, "none": None}
    residual_dtype = None if args.residual is None else of.get(args.residual) or getattr(torch, args.residual)
    weight_dtype = of[args.weight_dtype] if args.weight_dtype in of else getattr(torch, args.weight_dtype)
    out_dtype = of[args.out_dtype] if args.out_dtype in of else getattr(torch, args.out_dtype)
    bias_dtype = (weight_dtype or dtype) if args.bias else None

    def tensor(kind: torch.dtype | None, *shape: int) -> torch.Tensor | None:
        return None if kind is None else torch.empty(shape, dtype=kind, device="meta")

    x, residual = tensor(dtype, m, n), tensor(residual_dtype, m, n)
    weight, bias = tensor(weight_dtype, n), tensor(bias_dtype, n)
    forward = ForwardPlan(x, weight, bias, residual, 1e-6, 0.0, out_dtype, "auto")
    res = x if residual is None else residual
    rstd = tensor(torch.float64 if torch.float64 in (dtype, weight_dtype, residual_dtype) else torch.float32, m)
    dx_dtypes = _dx_dtypes(True, residual is not None, dtype, res.dtype)
    dres = None if residual is None else tensor(residual_dtype, m, n)
    backward = BackwardPlan(
        tensor(out_dtype, m, n), res, weight, rstd, dres, 0.0, *dx_dtypes, weight_dtype, bias_dtype, "auto"
    )
    return {"rms_norm_fwd": forward.problem, "rms_norm_bwd": backward.problem}


def _why_portable(name: str, problem, m: int, gpu: Gpu | None) -> str | None:
    """None where a kernel runs."""
    end = 'backend="auto" runs the portable path.'
    if gpu is None:
        return f"rms_norm: no kernel for cpu tensors. {end}"
    for field in vars(problem):
        dtype = getattr(problem, field)
        if field.endswith("_dtype") and dtype is not None and dtype not in ITEMSIZE:
            supported = ", ".join(ITEMSIZE)
            return f"rms_norm: no kernel for {field.removesuffix('_dtype')} in {dtype}; supported: {supported}. {end}"
    if m > MAX_M:
        return f"rms_norm: no kernel for {m} rows of {problem.n}; at most {MAX_M} rows. {end}"
    try:
        kernels.find(name, gpu)
        choose(name, problem, gpu)
    except ModuleNotFoundError:  # the compiler is not installed here
        pass
    except UnsupportedError as error:
        return str(error)
    return None
