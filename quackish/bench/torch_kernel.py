"""PyTorch's CuTe kernel of linear cross entropy (2.15 and newer): if PyTorch runs it, and a loop around its file.

PyTorch runs its CuTe kernels only with some versions of nvidia-cutlass-dsl, and otherwise plain code without a message.
To measure the kernel under an older PyTorch, take `FILE` from a wheel of 2.15 and name it in QUACKISH_TORCH_KERNEL.
"""

import functools
import importlib
import importlib.util
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quackish import variables
from quackish.bench.environment import version
from quackish.errors import UnsupportedError

FILE = "torch/_native/ops/linear_cross_entropy/fused_grad_logits_kernel.py"
_OPERATOR = "_linear_cross_entropy_batch_chunked"


class Status(NamedTuple):
    exists: bool  # this version of PyTorch has such kernels
    is_on: bool = False
    why: str = ""  # why it is off
    versions: tuple[str, ...] = ()  # versions of nvidia-cutlass-dsl that would turn it on


@functools.cache
def status() -> Status:
    """Says if PyTorch runs its own CuTe kernels in F.linear_cross_entropy and F.rms_norm."""
    try:
        importlib.import_module("torch._native.ops.linear_cross_entropy")
        native = importlib.import_module("torch._native.cutedsl_utils")
    except ImportError:
        return Status(False, False, f"PyTorch {torch.__version__} has none; 2.15 does")
    registry: Any = torch.backends.python_native
    if _OPERATOR in registry.get_dsl_operations("cutedsl", "torch_nn"):
        return Status(True, True)
    if os.environ.get("TORCH_DISABLE_NATIVE_JIT") == "1":
        return Status(True, False, "TORCH_DISABLE_NATIVE_JIT=1 turns them off")
    if torch.version.cuda is None:
        return Status(True, False, f"PyTorch {torch.__version__} is built without CUDA")
    accepted = tuple(map(str, sorted(getattr(native, "_CUTEDSL_REQUIRED_VERSIONS", ()))))
    installed = version("nvidia-cutlass-dsl") or "none"
    return Status(
        True, False, f"they need nvidia-cutlass-dsl {' or '.join(accepted)}; installed: {installed}", accepted
    )


def note() -> str:
    """Says if PyTorch runs its CuTe kernels, in the column "note" of results."""
    if not status().exists:
        return ""
    name = "PyTorch " + ".".join(torch.__version__.split(".")[:2])
    return f"{name} CuTe" if status().is_on else f"{name}, CuTe kernels off: {status().why}"


# The kernel's file ----------------------------------------------------------------------------------------------------


@functools.cache
def load() -> Callable[..., None]:
    """The function of the kernel's file that computes a chunk's losses, and its dlogits in place of the logits.

    Two imports of the file exist only in PyTorch 2.15. One logs compilations, the other is in QuACK under that name.
    """
    path = variables.get(variables.TORCH_KERNEL)
    if not path:
        raise UnsupportedError(
            f"PyTorch's CuTe kernel does not run here: {status().why}. To measure it without, set "
            f"{variables.TORCH_KERNEL} to {Path(FILE).name} from a wheel of PyTorch 2.15: "
            f"`pip download --no-deps torch==2.15.0 && unzip -j torch-2.15.0-*.whl {FILE}`."
        )
    from quack.reduce import block_reduce

    logging, reduce = (
        types.ModuleType(name) for name in ("torch._native.instrumentation", "torch._vendor.quack.reduce")
    )
    vars(logging)["instrumented_cutedsl_cache"] = lambda name, key_fn: functools.cache
    vars(reduce)["block_reduce"] = block_reduce
    replaced = {module.__name__: module for module in (logging, reduce)}
    before = {name: sys.modules[name] for name in replaced if name in sys.modules}
    sys.modules.update(replaced)
    try:
        spec = importlib.util.spec_from_file_location(Path(path).stem, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        for name in replaced:
            del sys.modules[name]
        sys.modules.update(before)
    return module.fused_grad_logits_into


class Loop(torch.autograd.Function):
    """Loss and gradients chunk by chunk: fp32 logits by cuBLAS, the kernel, two GEMMs. dW is rounded after each chunk.

    Backward multiplies the gradients by the incoming one in place.
    """

    @staticmethod
    def forward(ctx, rows: int, kernel: Callable[..., None], x: Tensor, w: Tensor, target: Tensor) -> Tensor:
        live = target != -100
        scale = live / live.sum()
        target = torch.where(live, target, 0)
        dx, dw = torch.empty_like(x), torch.empty_like(w)
        losses = torch.empty_like(scale)
        buffer = x.new_empty(min(rows, len(x)), len(w), dtype=torch.float32)
        for start in range(0, len(x), rows):
            chunk = slice(start, start + rows)
            logits = buffer[: len(x[chunk])]
            torch.mm(x[chunk], w.t(), out_dtype=torch.float32, out=logits)
            dlogits = logits.view(w.dtype)[:, : len(w)]
            kernel(dlogits, losses[chunk], logits, scale[chunk], target[chunk])
            torch.mm(dlogits, w, out=dx[chunk])
            if start:
                dw.addmm_(dlogits.t(), x[chunk])
            else:
                torch.mm(dlogits.t(), x[chunk], out=dw)
        ctx.grads = dx, dw
        return losses.sum()

    @staticmethod
    def backward(ctx, dloss: Tensor) -> tuple[Tensor | None, ...]:
        dx, dw = ctx.grads
        return None, None, dx.mul_(dloss), dw.mul_(dloss), None
