"""The steps of `reference.py` with kernels, one launch per step: bf16 and fp16.

Matrices have unit stride along columns and row strides that are multiples of 8, and start on 16 bytes. Logits and their
gradients have the row stride `padded(V)`.
"""

import functools
import math
from typing import Any

import torch
from torch import Tensor

from quackish.device import choose, cuda
from quackish.device.arguments import by_name
from quackish.device.cuda import address
from quackish.device.kernel_device import KernelDevice
from quackish.device.kernel_for import CompiledKernel
from quackish.once import once
from quackish.ops.linear_divergence import reference
from quackish.ops.linear_divergence.problems import (
    MAX_CLASSES,
    DivergenceRowsProblem,
    RowsArgs,
    Side,
    padded,
)
from quackish.ops.shared.launches import launches_of

_ALIGNMENT = 8  # elements
_LOG2_E = math.log2(math.e)


def why_unsupported(dtype: torch.dtype, classes: int, widths: tuple[int, ...]) -> str:
    """Why kernels do not cover these sizes; "" if they do."""
    if dtype not in (torch.bfloat16, torch.float16):
        why = f"{dtype}; supported: torch.bfloat16, torch.float16"
    elif any(h % _ALIGNMENT for h in widths):
        why = f"hidden states of {' and '.join(map(str, widths))} columns; expected multiples of {_ALIGNMENT}"
    elif classes > MAX_CLASSES:
        why = f"{classes} classes; expected at most {MAX_CLASSES}"
    else:
        return ""
    return f'linear_divergence: no kernel for {why}. backend="auto" runs the portable path.'


class KernelSteps:
    """The steps on one device, with the names and arguments of the functions in `reference.py`."""

    def __init__(self, device: KernelDevice):
        self.device, self.stream, self.shared = device, device.stream, launches_of(device)
        self._kernel = functools.lru_cache(maxsize=1024)(self._find_kernel)

    def logits(self, x: Tensor, w: Tensor, num_live: Tensor | None, start: int) -> Tensor:
        rows, classes = x.shape[0], w.shape[0]
        out = self.matrix(rows, classes, torch.float32, x.device)
        self.shared.logits(x, w, out, num_live, start)
        return out

    def rows(
        self, student, teacher, student_side, teacher_side, options, row_grads, num_live, start, out
    ) -> reference.RowResults:
        rows, v = student.shape
        loss = self.device.vector(rows, torch.float32)
        entropy = self.device.vector(rows, torch.float32) if options.entropy else None
        dlogits = out if options.dlogits else None
        beta = options.beta
        problem = DivergenceRowsProblem(
            v, "forward" if beta == 0 else "reverse" if beta == 1 else "between",
            None if dlogits is None else cuda.name_of(dlogits.dtype), student_side.bias is not None,
            teacher_side.bias is not None, student_side.softcap is not None, teacher_side.softcap is not None,
            options.entropy, row_grads is not None, num_live is not None,
        )  # fmt: skip
        sides, biases = [], [_padded_bias(side.bias) for side in (student_side, teacher_side)]
        for logits, side, bias in zip((student, teacher), (student_side, teacher_side), biases, strict=True):
            to_log2 = _LOG2_E / options.temperature
            cap = side.softcap
            factor, limit = (side.scale * to_log2, 1.0) if cap is None else (side.scale / cap, cap * to_log2)
            sides.append(by_name(Side)(logits=logits.data_ptr(), bias=address(bias), factor=factor, limit=limit))
        args = by_name(RowsArgs)(
            student=sides[0], teacher=sides[1], row_grads=address(row_grads), num_live=address(num_live),
            loss=loss.data_ptr(), entropy=address(entropy), dlogits=address(dlogits), beta=beta,
            grad_factor=options.boost * student_side.scale / options.temperature, start=start, rows=rows,
        )  # fmt: skip
        self._kernel(choose.epoch, problem).launch(args, self.stream())
        return reference.RowResults(loss, entropy, dlogits)

    def dx(self, dlogits, w, num_live, start, factor, dtype) -> Tensor:
        out = self.device.matrix(dlogits.shape[0], w.shape[1], dtype)
        self.shared.dx(dlogits, w, out, num_live, start, factor)
        return out

    def dw(self, dlogits, x, num_live, start, factor, out, accumulate) -> None:
        self.shared.dw(dlogits, x, out, num_live, start, factor, accumulate)

    def matrix(self, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self.device.matrix(rows, padded(columns), dtype)[:, :columns]  # the last row has its padding too

    def _find_kernel(self, epoch: int, problem: Any) -> CompiledKernel:
        return self.device.kernel_for(problem, self.device.gpu)


def steps_of(device: KernelDevice) -> KernelSteps:
    """The steps that the calls on a device share."""
    return once(device.cache, "linear_divergence", KernelSteps, device)


def _padded_bias(bias: Tensor | None) -> Tensor | None:
    """The bias in fp32, with room for whole vectors."""
    return None if bias is None else torch.nn.functional.pad(bias.float(), (0, padded(len(bias)) - len(bias)))


def operand(t: Tensor) -> Tensor:
    """A matrix that a GEMM reads in place, or a copy of it."""
    in_place = t.stride(1) == 1 and t.stride(0) >= t.shape[1] and t.stride(0) % _ALIGNMENT == 0
    return t if in_place and t.data_ptr() % 16 == 0 else t.clone(memory_format=torch.contiguous_format)
