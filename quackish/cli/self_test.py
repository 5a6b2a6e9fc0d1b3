"""`doctor`'s self-test: each operation against its formula in fp64, and the compiler on a kernel."""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from quackish import kernels, linear_cross_entropy, rms_norm, toolchain
from quackish.cli.examine import PORTABLE, Problem, devices, linear_cross_entropy_path, rms_norm_path
from quackish.configs.lce_rows import LceScaleConfig, LceScaleProblem
from quackish.errors import UnsupportedError
from quackish.gpu import H200, gpu_of
from quackish.launch import objects
from quackish.launch.compile import compile_kernel, lock
from quackish.reference import linear_cross_entropy as lce_reference
from quackish.reference import rms_norm as rms_norm_reference
from quackish.testing import inputs
from quackish.testing.errors import error, same_bits

# Norm-wise, of bf16 results: 1 to 4 times its unit roundoff. The loss is fp32.
_BOUNDS = {"y": 0.004, "dx": 0.008, "dweight": 0.008, "loss": 1e-4}
_REPORT = "Please report it, with the output of `python -m quackish doctor --json`."


def operations(problems: list[Problem]) -> list[dict[str, Any]]:
    """A row for each operation on one device of each kind; on the CPU only where there is nothing else."""
    rows = []
    for device in _one_of_each_kind():
        for op, (make, truth, path) in _OPERATIONS.items():
            row = _test(op, device, make(device), truth, path(device)[0])
            rows.append(row)
            where = f"{op} on {device} ({row['path']})"
            if row["failure"]:
                problems.append(Problem(f"{where} does not run: {row['failure']}", _REPORT))
            elif row["wrong"]:
                problems.append(Problem(f"{where} gives wrong results: {', '.join(row['wrong'])}", _REPORT))
            elif not row["ok"]:
                problems.append(Problem(f"{where} gives other bits in a second run", _REPORT))
    return rows


def compiler(problems: list[Problem]) -> dict[str, str]:
    """Compiles and loads a small kernel, past the cache, for the GPU here or else an H200."""
    try:
        toolchain.find()
    except (ModuleNotFoundError, UnsupportedError):
        return {}  # which `examine.compiler` has told
    gpu = next((gpu_of(d.index) for d in devices() if d.type == "cuda" and _compiles_for(d)), H200)
    started = time.perf_counter()
    try:
        with lock:
            compiled = compile_kernel(
                kernels.find("lce_scale", gpu), LceScaleProblem("bfloat16"), LceScaleConfig(), gpu.target
            )
        objects.load(objects.export(compiled), "self-test")
    except Exception as failure:
        problems.append(
            Problem(
                f"the compiler does not work: {type(failure).__name__}: {str(failure).splitlines()[0]}",
                "`pip install --force-reinstall nvidia-cutlass-dsl`; and see that TMPDIR can be written to.",
            )
        )
        return {}
    seconds = time.perf_counter() - started
    return {"a kernel": f"compiled for {gpu.target} and loaded in {seconds:.1f} s, the compiler's import included"}


def _compiles_for(device: torch.device) -> bool:
    try:
        kernels.find("lce_scale", gpu_of(device.index))
    except UnsupportedError:
        return False
    return True


def _one_of_each_kind() -> list[torch.device]:
    gpus = {torch.cuda.get_device_name(device): device for device in reversed(devices()[:-1])}
    return list(reversed(gpus.values())) or devices()


def _test(op: str, device: torch.device, args: tuple, truth: Callable, path: str) -> dict[str, Any]:
    row = dict(op=op, device=str(device), path=path, ok=False, errors={}, wrong=[], same_bits=None)
    row |= dict(first_ms=None, again_ms=None, failure="")
    try:
        first, row["first_ms"] = _timed(_CALLS[op], args, device)
        again, row["again_ms"] = _timed(_CALLS[op], args, device)
        for name, wanted in truth(*(t.detach().double() if t.is_floating_point() else t for t in args)).items():
            row["errors"][name] = error(first[name].double(), wanted).norm
            if not row["errors"][name] <= _BOUNDS[name]:
                row["wrong"].append(f"{name} is off by {row['errors'][name]:.1e}, at most {_BOUNDS[name]:.0e} expected")
        row["same_bits"] = all(same_bits(first[name], again[name]) for name in first)
    except Exception as failure:
        row["failure"] = f"{type(failure).__name__}: {str(failure).splitlines()[0] if str(failure) else ''}"
        return row
    # the portable path repeats itself as far as the library's GEMMs do
    row["ok"] = not row["wrong"] and (row["same_bits"] or path == PORTABLE)
    return row


def _timed(call: Callable, args: tuple, device: torch.device) -> tuple[dict[str, Tensor], float]:
    started = time.perf_counter()
    results = call(*args)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return results, 1e3 * (time.perf_counter() - started)


# The operations ------------------------------------------------------------------------------------------------------


def _rms_norm_args(device: torch.device) -> tuple[Tensor, ...]:
    bf16 = dict(dtype=torch.bfloat16, device=device)
    x, dy = inputs.rows((257, 1024), **bf16), inputs.rows((257, 1024), seed=2, **bf16)
    return x.requires_grad_(), inputs.weights(1024, **bf16).requires_grad_(), dy


def _rms_norm(x: Tensor, weight: Tensor, dy: Tensor) -> dict[str, Tensor]:
    y = rms_norm(x, weight, eps=1e-6)
    dx, dweight = torch.autograd.grad(y, (x, weight), dy)
    return {"y": y.detach(), "dx": dx, "dweight": dweight}


def _rms_norm_truth(x: Tensor, weight: Tensor, dy: Tensor) -> dict[str, Tensor]:
    y, _, rstd = rms_norm_reference.rms_norm_fwd(x, weight, None, None, 1e-6)
    dtypes = dict(dx_dtype=torch.float64, dweight_dtype=torch.float64)
    dx, _, dweight, _ = rms_norm_reference.rms_norm_bwd(dy, x, weight, rstd, None, **dtypes)
    return {"y": y, "dx": dx, "dweight": dweight}


def _lce_args(device: torch.device) -> tuple[Tensor, ...]:
    bf16 = dict(dtype=torch.bfloat16, device=device)
    x, weight = inputs.rows((200, 256), **bf16), inputs.rows((1000, 256), seed=1, **bf16) / 16
    target = torch.arange(200, device=device) * 7 % 1000
    target[::9] = -100
    return x.requires_grad_(), weight.requires_grad_(), target


def _lce(x: Tensor, weight: Tensor, target: Tensor) -> dict[str, Tensor]:
    loss = linear_cross_entropy(x, weight, target)
    dx, dweight = torch.autograd.grad(loss, (x, weight))
    return {"loss": loss.detach(), "dx": dx, "dweight": dweight}


def _lce_truth(x: Tensor, weight: Tensor, target: Tensor) -> dict[str, Tensor]:
    loss, _ = lce_reference.linear_cross_entropy_forward(x, weight, target)
    one = torch.ones((), dtype=torch.float64, device=x.device)
    dx, dweight, _ = lce_reference.linear_cross_entropy_backward(one, None, x, weight, target)
    return {"loss": loss, "dx": dx, "dweight": dweight}


_CALLS = {"rms_norm": _rms_norm, "linear_cross_entropy": _lce}
_OPERATIONS = {
    "rms_norm": (_rms_norm_args, _rms_norm_truth, rms_norm_path),
    "linear_cross_entropy": (_lce_args, _lce_truth, linear_cross_entropy_path),
}
