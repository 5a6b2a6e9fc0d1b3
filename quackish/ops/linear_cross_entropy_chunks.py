"""The chunk loop of linear cross entropy's portable path: the logits of `chunk_rows` rows at a time.

It runs in forward (loss, and with the schedule `chunked` the gradients of the loss's plain sum too) and in backward
(the gradients for what arrived).
"""

import torch
from torch import Tensor

from quackish.reference.linear_cross_entropy import Rows, accumulate_dtype, chunk_of_rows, rows_of


def _gemm_dtype(compute_dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """What GEMM operands are given as: 16-bit only where torch's GEMM delivers fp32 from them, which is CUDA's."""
    widening = device.type == "cuda" and torch.version.hip is None
    return compute_dtype if widening else accumulate_dtype(compute_dtype)


def mm(a: Tensor, b: Tensor, out: Tensor) -> None:
    """out = a @ b, in out's dtype from the accumulator on."""
    torch.mm(a, b, out=out) if a.dtype == out.dtype else torch.mm(a, b, out_dtype=out.dtype, out=out)


def addmm(a: Tensor, b: Tensor, out: Tensor) -> None:
    """out += a @ b, inside of the GEMM: no second buffer of out's size."""
    if a.dtype == out.dtype:
        torch.addmm(out, a, b, out=out)
    else:
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)


class ChunkLoop:
    """One pass over the rows: everything that is the same for each chunk, and the results it fills."""

    def __init__(self, x, w, target, bias, class_weight, ignore_index, options, chunk_rows, compute_dtype, needs):
        dtype = accumulate_dtype(compute_dtype)
        self.x, self.bias, self.options = x, None if bias is None else bias.to(dtype), options
        self.compute_dtype, self.gemm_dtype = compute_dtype, _gemm_dtype(compute_dtype, x.device)
        w = w.to(compute_dtype).to(self.gemm_dtype)
        self.w = w if 1 in w.stride() else w.contiguous()  # else each chunk's GEMM would make its own copy
        self.class_weight = None if class_weight is None else class_weight.to(dtype)
        self.rows: Rows = rows_of(target, w.shape[0], self.class_weight, ignore_index, dtype)
        m, v, h = x.shape[0], *w.shape
        self.starts = range(0, m, chunk_rows)
        self.chunk_rows = chunk_rows
        self.needs = needs
        self.loss = x.new_empty(m, dtype=dtype)
        self.lse = x.new_empty(m, dtype=dtype)
        self.dx = x.new_empty((m, h) if needs[0] else 0, dtype=dtype)
        self.dw = x.new_zeros((v, h) if needs[1] else 0, dtype=dtype)
        self.db = x.new_zeros(v if needs[2] else 0, dtype=dtype)

    def run(self, grad_rows=None, grad_lse=None, keep_logits_in=None, logits=None) -> None:
        """Gradients where `needs` asks: for a gradient of 1 a row, or `grad_rows` and `grad_lse` (m,).

        `keep_logits_in` (m, v) is filled with the logits; `logits` (m, v) are such ones, used and not written.
        """
        # Operators run with the caller's autocast on; it would round the fp32 operands here.
        with torch.autocast(self.x.device.type, enabled=False):
            for start in self.starts:
                part = slice(start, start + self.chunk_rows)
                given = (grad_rows, grad_lse, keep_logits_in, logits)
                self._chunk(part, *(None if t is None else t[part] for t in given))

    def _chunk(self, part, grad_rows, grad_lse, keep_logits_in, logits) -> None:
        # A function of its own: what a chunk allocates is gone before the next one allocates.
        rows = self.rows[part]
        # an ignored row of x is zeroed, or its NaN would reach dw as 0 * NaN
        x = self.x[part].masked_fill(~rows.live[:, None], 0.0).to(self.compute_dtype).to(self.gemm_dtype)
        if logits is not None:
            z = logits.clone()
        else:
            z = self.loss.new_empty((x.shape[0], self.w.shape[0]))
            mm(x, self.w.t(), out=z)
            if self.bias is not None:
                z.add_(self.bias)
        if keep_logits_in is not None:
            keep_logits_in.copy_(z)
        self.loss[part], self.lse[part], dlogits = chunk_of_rows(
            z, rows, self.class_weight, self.options, any(self.needs), grad_rows, grad_lse
        )
        if self.needs[2]:
            self.db.add_(dlogits.sum(0))
        if self.needs[0] or self.needs[1]:
            dlogits = dlogits.to(self.gemm_dtype)
        if self.needs[0]:
            mm(dlogits, self.w, out=self.dx[part])
        if self.needs[1]:
            addmm(dlogits.t(), x, out=self.dw)
