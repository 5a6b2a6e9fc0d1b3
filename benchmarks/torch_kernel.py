"""PyTorch's CuTe kernel of linear cross entropy (2.15) under an older PyTorch: its file, and a loop around it.

    pip download --no-deps torch==2.15.0
    unzip -j torch-2.15.0-*.whl torch/_native/ops/linear_cross_entropy/fused_grad_logits_kernel.py
    quackish bench linear_cross_entropy --shapes 8192x4096x128256 \\
        --providers quackish benchmarks.torch_kernel:rows_256 benchmarks.torch_kernel:rows_4096

The file must be in the current folder. Needs QuACK. Where PyTorch runs its kernel itself, the providers torch-cute-256,
-1024 and -4096 measure it.
"""

import functools
import importlib.util
import sys
import types
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from quackish.errors import UnsupportedError

FILE = Path("fused_grad_logits_kernel.py")


@functools.cache
def load() -> Callable[..., None]:
    """The function of the kernel's file that computes a chunk's losses, and its dlogits in place of the logits.

    Two imports of the file exist only in PyTorch 2.15. One logs compilations, the other is in QuACK under that name.
    """
    if not FILE.exists():
        raise UnsupportedError(f"{FILE} is not in this folder; benchmarks/torch_kernel.py says how to get it")
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
        spec = importlib.util.spec_from_file_location(FILE.stem, FILE)
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


def _in_chunks(rows: int, x: Tensor, w: Tensor, target: Tensor) -> Tensor:
    if not torch.is_grad_enabled():
        raise UnsupportedError("PyTorch's kernel computes gradients; PyTorch does not run it without grad")
    return Loop.apply(rows, load(), x, w, target)


rows_256, rows_1024, rows_4096 = (functools.partial(_in_chunks, rows) for rows in (256, 1024, 4096))
