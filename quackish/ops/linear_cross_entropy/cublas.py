"""Linear cross entropy's GEMMs by cuBLAS, with CuTe DSL kernels after them: for GPUs that have no GEMM of ours.

The logits come as fp32 products, some classes of all rows at a time (`logit_columns`), and a kernel turns them into
exp_logits or dlogits. All rows of a chunk are multiplied: the number of live rows is known on the device only.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from quackish.configs.lce_args import ClearArgs, ExpArgs, RescaleArgs
from quackish.configs.lce_cublas import (
    TILE_N,
    LceClearProblem,
    LceExpProblem,
    LceRescaleProblem,
    logit_columns,
    product_rows,
)
from quackish.ops.kernel_for import Kernel
from quackish.ops.linear_cross_entropy.exp_logits import Vector
from quackish.ops.linear_cross_entropy.launches import DlogitsCall, LogitsCall, RowKernels, addresses
from quackish.ops.linear_cross_entropy.portable import addmm, mm


class CublasKernels(RowKernels):
    """The methods of LceKernels, where each argument is explained; differences are stated here.

    After the live rows memory may hold anything, as there; these rows of exp_logits are written, zeros, and `dw` clears
    those of scaled_x.
    """

    keeps_residual = False

    def num_tiles(self, v: int) -> int:
        """Twice the tiles: the sums are followed by their shifts, and after `recompute_flagged` by zeros."""
        return 2 * _ceil_div(v, TILE_N)

    def logits(self, a: LogitsCall) -> None:
        """A tile with a logit far above row_shift uses its own maximum, so that nothing overflows."""
        rows, tiles = a.live_x.shape[0], a.part_sum.shape[1] // 2
        kernel = self._exp("softmax", a.exp_logits, a.bias, a.softcap, a.part_wsum is not None, a.class_weight)
        for part, v0, v1 in a.blocks:
            for c0, c1, z in _products(a.live_x, a.w[v0:v1]):
                first = v0 + c0
                args = ExpArgs(
                    z, _from(part, c0, 1), _from(a.bias, first), _from(a.class_weight, first), a.slot_target,
                    a.num_live, a.row_shift, a.row_max_bits, a.flags, a.part_sum, a.part_wsum, a.target_logit,
                    first // TILE_N, tiles, None, z.stride(0), 0 if part is None else part.stride(0), a.softcap, first,
                    a.start, rows, c1 - c0,
                )  # fmt: skip
                kernel.launch(addresses(args), self.stream())

    def recompute_flagged(self, a: LogitsCall) -> None:
        """No GEMM: multiplies exp_logits and sums of flagged rows by exp(their tile's shift - decode(row_max_bits))."""
        stored = a.exp_logits is not None
        kernel = self._kernel("lce_rescale", LceRescaleProblem, stored)
        rows, tiles = a.live_x.shape[0], a.part_sum.shape[1] // 2
        for part, v0, v1 in a.blocks:
            args = RescaleArgs(
                part, a.part_sum, a.row_max_bits, a.flags, a.num_live, part.stride(0) if stored else 0, v0 // TILE_N,
                tiles, a.start, rows, v1 - v0,
            )  # fmt: skip
            kernel.launch(addresses(args), self.stream())

    def dlogits(self, a: DlogitsCall) -> None:
        kernel = self._exp("dlogits", a.out, a.bias, a.softcap, a.smoothing, a.class_weight)
        for c0, c1, z in _products(a.live_x, a.w):
            args = ExpArgs(
                z, _from(a.out, c0, 1), _from(a.bias, c0), _from(a.class_weight, a.v0 + c0), a.slot_target, a.num_live,
                *(None,) * 6, 0, 0, a.coefs, z.stride(0), a.out.stride(0), a.softcap, a.v0 + c0, a.start,
                a.live_x.shape[0], c1 - c0,
            )  # fmt: skip
            kernel.launch(addresses(args), self.stream())

    def dx(self, e, e2, v_split, w, row_scale, order, num_live, start, out, accumulate, tickets=None) -> None:
        """Without order, all rows are written."""
        if order is None:
            return _times_w(e, e2, v_split, w, out, accumulate)
        rows, h = e.shape[0], w.shape[1]
        step = min(product_rows(h), rows)
        products = e.new_empty((step, h), dtype=torch.float32)
        for r0 in range(0, rows, step):
            r1 = min(r0 + step, rows)
            acc = products[: r1 - r0]
            _times_w(e[r0:r1], None if e2 is None else e2[r0:r1], v_split, w, acc, False)
            self.scatter(acc, _rows_from(row_scale, r0), order, num_live, start + r0, out)

    def dw(
        self, e, scaled_x, num_live, start, out, accumulate, tickets=None, first_slots=None, residual=None, factor=None
    ) -> None:
        """A 16-bit out is rounded by cuBLAS, which may also round partial sums if it splits the sum over rows.

        `torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction` governs that, as for any GEMM of PyTorch's.
        """
        rows, h = scaled_x.shape
        kernel = self._kernel("lce_clear", LceClearProblem, h, scaled_x.dtype)
        # cuBLAS also reads ignored rows, and 0 * NaN would reach every class
        kernel.launch(addresses(ClearArgs(scaled_x, num_live, start, rows)), self.stream())
        if factor is None:
            (addmm if accumulate else mm)(e.t(), scaled_x, out)
        else:  # cuBLAS takes factors from the host only
            product = scaled_x.new_empty(out.shape, dtype=torch.float32)
            mm(e.t(), scaled_x, product)
            product.mul_(factor)
            out.add_(product) if accumulate else out.copy_(product)

    def _exp(self, kind, out, bias, softcap, smoothing, class_weight) -> Kernel:
        dtypes = [None if t is None else t.dtype for t in (out, bias)]
        return self._kernel("lce_exp", LceExpProblem, kind, *dtypes, softcap > 0, smoothing, class_weight is not None)


def _from(t: Tensor | None, first: int, dim: int = 0) -> Tensor | None:
    return None if t is None else t.narrow(dim, first, t.shape[dim] - first)


def _rows_from(v: Vector, first: int) -> Vector:
    return v[first:] if isinstance(v, Tensor) else v + 4 * first


def _products(live_x: Tensor, w: Tensor) -> Iterator[tuple[int, int, Tensor]]:
    """live_x @ w.T in fp32, classes [c0, c1) of w at a time, in rows of whole tiles; each overwrites the last one."""
    rows, n = live_x.shape[0], w.shape[0]
    step = min(logit_columns(rows), _ceil_div(n, TILE_N) * TILE_N)
    z = live_x.new_empty((rows, step), dtype=torch.float32)
    for c0 in range(0, n, step):
        c1 = min(c0 + step, n)
        mm(live_x, w[c0:c1].t(), z[:, : c1 - c0])
        yield c0, c1, z


def _times_w(e: Tensor, e2: Tensor | None, v_split: int, w: Tensor, out: Tensor, accumulate: bool) -> None:
    """out = (or += with `accumulate`) e @ w, fp32; the columns from v_split on are e2."""
    if e2 is None:
        (addmm if accumulate else mm)(e, w, out)
    else:
        (addmm if accumulate else mm)(e, w[:v_split], out)
        addmm(e2, w[v_split:], out)


def _ceil_div(n: int, d: int) -> int:
    return -(-n // d)
