"""Linear cross entropy with cuBLAS GEMMs, for GPUs without a GEMM kernel of ours.

cuBLAS writes fp32 logits of all rows for `logit_columns` classes at a time; a kernel turns them into exp_logits or
dlogits. GEMMs include all rows of a chunk, because only the device knows the number of live rows.
"""

from collections.abc import Iterator

from torch import Tensor

from quackish.configs.arguments import by_name
from quackish.configs.lce_cublas import TILE_N, ClearArgs, ExpArgs, RescaleArgs, logit_columns, product_rows
from quackish.configs.lce_rows import ScatterArgs
from quackish.configs.linear_cross_entropy import round_up
from quackish.ops.cuda import address, dtype_of
from quackish.ops.linear_cross_entropy.buffers import F32, ExpLogits
from quackish.ops.linear_cross_entropy.launches import RowKernels
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

    def logits(self, live_x, w, out, epilogue, shared, state, start) -> None:
        """A tile with a logit far above row_shift uses its own maximum as the shift, to avoid overflow.

        Flagged rows need no second GEMM: a kernel multiplies their exp_logits and sums by
        exp(tile's shift - decode(row_max_bits)).
        """
        rows, blocks = live_x.shape[0], out.blocks(w.shape[0])
        for block, v0, v1 in blocks:
            problem = dict(kind="softmax", out_dtype=dtype_of(block))
            for c0, c1, z in self._logit_products(live_x, w[v0:v1]):
                self._exp(z, block, epilogue, shared, problem, state, c0, v0 + c0, start, c1 - c0)
        for block, v0, v1 in blocks:
            args = by_name(RescaleArgs)(
                state=state.address, exp_logits=address(block), part_sum=epilogue.part_sum,
                part_elog=epilogue.part_elog, exp_logits_stride=0 if block is None else block.stride(0), first=v0,
                tiles=epilogue.tiles, m=state.m, start=start, rows=rows, n=v1 - v0, logit_scale=epilogue.logit_scale,
            )  # fmt: skip
            self.launch(args, "lce_rescale", shared, stored=block is not None)

    def dlogits(self, live_x, w, out, epilogue, shared, state, start) -> None:
        entropy = epilogue.coef_entropy is not None
        problem = dict(kind="dlogits", out_dtype=out.dtype, return_stats=False, entropy=entropy)
        for c0, c1, z in self._logit_products(live_x, w):
            self._exp(z, out, epilogue, shared, problem, state, c0, c0, start, c1 - c0)

    def _exp(self, z, out, epilogue, shared, problem, state, column, first, start, n) -> None:
        """z: columns [first, first + n) of the logits; its exponentials go to out[:, column : column + n]."""
        args = by_name(ExpArgs)(
            z=z.data_ptr(), out=None if out is None else out.data_ptr() + column * out.itemsize, epilogue=epilogue,
            num_live=state.parts.num_live, z_stride=z.stride(0), out_stride=0 if out is None else out.stride(0),
            first=first, start=start, rows=z.shape[0], n=n,
        )  # fmt: skip
        self.launch(args, "lce_exp", shared, **problem)

    def dx(self, e, w, state, start, out, accumulate=False, split_tail=False, epilogue=None) -> None:
        """Without epilogue, all rows are written."""
        if epilogue is None:
            return _multiply_w(e, w, out, accumulate)
        rows, h = e.first.shape[0], w.shape[1]
        step = min(product_rows(h), rows)
        products = self.device.matrix(step, h, F32)
        for r0, n in self.ranges(rows, step):
            r1 = r0 + n
            acc = products[: r1 - r0]
            part = ExpLogits(e.first[r0:r1], e.split, None if e.second is None else e.second[r0:r1])
            _multiply_w(part, w, acc, False)
            args = by_name(ScatterArgs)(
                state=state.address, acc=acc.data_ptr(), dx=out.data_ptr(), m=state.m, start=start + r0, rows=n
            )
            self.launch(args, "lce_scatter", h=h, dx_dtype=out.dtype, row_scale=True)

    def dw(self, e, scaled_x, state, start, out, accumulate, split_tail=False, factor=None, residual=None) -> None:
        """cuBLAS rounds a 16-bit out, and partial sums too if it uses split-K.

        `torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction` controls the latter, as in PyTorch's GEMMs.
        """
        rows, h = scaled_x.shape
        # cuBLAS also reads ignored rows, and 0 * NaN would reach every class
        args = by_name(ClearArgs)(out=scaled_x.data_ptr(), num_live=state.parts.num_live, start=start, rows=rows)
        self.launch(args, "lce_clear", h=h, dtype=scaled_x.dtype)
        if factor is None:
            (addmm if accumulate else mm)(e.t(), scaled_x, out)
        else:  # cuBLAS takes factors only from the host
            product = self.device.matrix(out.shape[0], h, F32)
            mm(e.t(), scaled_x, product)
            product.mul_(factor)
            out.add_(product) if accumulate else out.copy_(product)

    def _logit_products(self, live_x: Tensor, w: Tensor) -> Iterator[tuple[int, int, Tensor]]:
        """Yields c0, c1 and fp32 live_x @ w[c0:c1].T, in a buffer of whole tiles that each step overwrites."""
        rows, n = live_x.shape[0], w.shape[0]
        step = min(logit_columns(rows), round_up(n, TILE_N))
        z = self.device.matrix(rows, step, F32)
        for c0, columns in self.ranges(n, step):
            mm(live_x, w[c0 : c0 + columns].t(), z[:, :columns])
            yield c0, c0 + columns, z


def _multiply_w(e: ExpLogits, w: Tensor, out: Tensor, accumulate: bool) -> None:
    """out = (+= with `accumulate`) e @ w, fp32."""
    for part, v0, v1 in e.blocks(w.shape[0]):
        (addmm if accumulate or v0 else mm)(part, w[v0:v1], out)
