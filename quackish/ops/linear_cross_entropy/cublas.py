"""Linear cross entropy with cuBLAS GEMMs, for GPUs without a GEMM kernel of ours.

cuBLAS writes fp32 logits of all rows for `logit_columns` classes at a time; a kernel turns them into exp_logits or
dlogits. GEMMs include all rows of a chunk, because only the device knows the number of live rows.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from quackish.configs.lce_args import ClearArgs, ExpArgs, RescaleArgs, ScatterArgs
from quackish.configs.lce_cublas import TILE_N, logit_columns, product_rows
from quackish.configs.linear_cross_entropy import round_up
from quackish.ops.cuda import address, dtype_of
from quackish.ops.linear_cross_entropy.launches import ExpLogits, RowKernels
from quackish.ops.linear_cross_entropy.portable import addmm
from quackish.reference.linear_cross_entropy import mm


class CublasKernels(RowKernels):
    """The methods of LceKernels, which documents the arguments. Differences are stated here.

    Rows after the last live one may be uninitialized, but cuBLAS reads them. So `logits` and `dlogits`
    write zeros to these rows, and `dw` clears those of scaled_x.
    """

    keeps_residual = False

    def num_tiles(self, v: int) -> int:
        """Twice the tiles: sums, then their shifts, which end as zeros."""
        return 2 * -(-v // TILE_N)

    def logits(self, live_x, w, out, epilogue, bias, state, start) -> None:
        """A tile with a logit far above row_shift uses its own maximum as the shift, to avoid overflow.

        Flagged rows need no second GEMM: a kernel multiplies their exp_logits and sums by
        exp(tile's shift - decode(row_max_bits)).
        """
        a, rows, tiles = epilogue, live_x.shape[0], epilogue.tiles // 2
        weighted, stats, blocks = a.class_weight is not None, a.part_elog is not None, out.blocks(w.shape[0])
        scaled = a.logit_scale is not None
        problem = "softmax", dtype_of(out.first), bias, a.softcap > 0, a.part_wsum is not None, weighted, scaled, stats
        for block, v0, v1 in blocks:
            for c0, c1, z in self._logit_products(live_x, w[v0:v1]):
                first = v0 + c0
                args = ExpArgs(
                    z.data_ptr(), _offset(address(block), c0, live_x.dtype), _offset(a.bias, first, bias),
                    _offset(a.class_weight, first), a.slot_target, state.num_live, a.row_shift, a.row_max_bits, a.flags,
                    a.part_sum, a.part_wsum, a.part_elog, a.argmax_bits, a.target_logit, first // TILE_N, tiles, None,
                    None, z.stride(0), 0 if block is None else block.stride(0), a.softcap, first, start, rows, c1 - c0,
                    a.logit_scale,
                )  # fmt: skip
                self.launch(args, "lce_exp", *problem)
        for block, v0, v1 in blocks:
            args = RescaleArgs(
                address(block), a.part_sum, a.part_elog, a.row_max_bits, a.flags, state.num_live,
                0 if block is None else block.stride(0), v0 // TILE_N, tiles, start, rows, v1 - v0, a.logit_scale,
            )  # fmt: skip
            self.launch(args, "lce_rescale", block is not None, scaled, stats)

    def dlogits(self, live_x, w, out, epilogue, bias, smoothing, state, start) -> None:
        a = epilogue
        weighted, scaled, entropy = a.class_weight is not None, a.logit_scale is not None, a.coef_entropy is not None
        problem = "dlogits", out.dtype, bias, a.softcap > 0, smoothing, weighted, scaled, False, entropy
        for c0, c1, z in self._logit_products(live_x, w):
            first = a.v0 + c0
            args = ExpArgs(
                z.data_ptr(), _offset(out.data_ptr(), c0, out.dtype), _offset(a.bias, c0, bias),
                _offset(a.class_weight, first), a.slot_target, state.num_live, *(None,) * 8, 0, 0, a.coefs,
                a.coef_entropy, z.stride(0), out.stride(0), a.softcap, first, start, live_x.shape[0], c1 - c0,
                a.logit_scale,
            )  # fmt: skip
            self.launch(args, "lce_exp", *problem)

    def dx(self, e, w, state, start, out, accumulate=False, split_tail=False, epilogue=None) -> None:
        """Without epilogue, all rows are written."""
        if epilogue is None:
            return _multiply_w(e, w, out, accumulate)
        rows, h = e.first.shape[0], w.shape[1]
        step = min(product_rows(h), rows)
        products = e.first.new_empty((step, h), dtype=torch.float32)
        for r0, n in self.ranges(rows, step):
            r1 = r0 + n
            acc = products[: r1 - r0]
            part = ExpLogits(e.first[r0:r1], e.split, None if e.second is None else e.second[r0:r1])
            _multiply_w(part, w, acc, False)
            args = ScatterArgs(
                acc.data_ptr(), _offset(epilogue.row_scale, r0), epilogue.order, out.data_ptr(), state.num_live,
                start + r0, r1 - r0,
            )  # fmt: skip
            self.launch(args, "lce_scatter", h, out.dtype, True)

    def dw(self, e, scaled_x, state, start, out, accumulate, split_tail=False, factor=None, residual=None) -> None:
        """cuBLAS rounds a 16-bit out, and partial sums too if it uses split-K.

        `torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction` controls the latter, as in PyTorch's GEMMs.
        """
        rows, h = scaled_x.shape
        # cuBLAS also reads ignored rows, and 0 * NaN would reach every class
        self.launch(ClearArgs(scaled_x.data_ptr(), state.num_live, start, rows), "lce_clear", h, scaled_x.dtype)
        if factor is None:
            (addmm if accumulate else mm)(e.t(), scaled_x, out)
        else:  # cuBLAS takes factors only from the host
            product = scaled_x.new_empty(out.shape, dtype=torch.float32)
            mm(e.t(), scaled_x, product)
            product.mul_(factor)
            out.add_(product) if accumulate else out.copy_(product)

    def _logit_products(self, live_x: Tensor, w: Tensor) -> Iterator[tuple[int, int, Tensor]]:
        """Yields c0, c1 and fp32 live_x @ w[c0:c1].T, in a buffer of whole tiles that each step overwrites."""
        rows, n = live_x.shape[0], w.shape[0]
        step = min(logit_columns(rows), round_up(n, TILE_N))
        z = live_x.new_empty((rows, step), dtype=torch.float32)
        for c0, columns in self.ranges(n, step):
            mm(live_x, w[c0 : c0 + columns].t(), z[:, :columns])
            yield c0, c0 + columns, z


def _offset(address: int | None, first: int, dtype: torch.dtype | None = torch.float32) -> int | None:
    """The address of element `first`, given the address of element 0."""
    return None if address is None else address + first * dtype.itemsize


def _multiply_w(e: ExpLogits, w: Tensor, out: Tensor, accumulate: bool) -> None:
    """out = (+= with `accumulate`) e @ w, fp32."""
    for part, v0, v1 in e.blocks(w.shape[0]):
        (addmm if accumulate or v0 else mm)(part, w[v0:v1], out)
