"""Linear cross entropy's GEMMs by cuBLAS, with CuTe DSL kernels behind them: for GPUs that have no GEMM of ours.

The logits come as fp32 products, some columns of all rows at a time (`logit_columns`), and a kernel turns them into E
or gradients. A chunk's rows are all multiplied: how many of them the device counts as live, the host does not know.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from quackish.configs import choose
from quackish.configs.lce_args import ClearArgs, ExpArgs, RescaleArgs, ScatterArgs
from quackish.configs.lce_cublas import (
    TILE_N,
    LceClearProblem,
    LceExpProblem,
    LceRescaleProblem,
    logit_columns,
    product_rows,
)
from quackish.configs.lce_rows import LceScatterProblem
from quackish.gpu import Gpu, gpu_of
from quackish.ops.cuda import current_stream_of, dtype_name
from quackish.ops.kernel_for import KernelFor, kernel_for
from quackish.ops.linear_cross_entropy.portable import addmm, mm


class CublasGemms:
    """The methods of GemmLaunches, where each argument is explained; what differs is said here.

    Behind the live rows memory may hold anything, as there; these rows of E are written, zeros, and `dw` clears those
    of xs.
    """

    keeps_rest = False

    def __init__(self, device: torch.device, gpu: Gpu | None = None, kernel_for: KernelFor = kernel_for):
        self.device, self.gpu, self.kernel_for = device, gpu or gpu_of(device.index), kernel_for
        self.stream = current_stream_of(device)
        self._kernels: dict[tuple, Callable[..., None]] = {}
        self._epoch = choose.epoch  # of the choices that these follow from

    def num_tiles(self, v: int) -> int:
        """Twice the tiles: behind the sums are what they refer to, and after `redo` zeros."""
        return 2 * _ceil_div(v, TILE_N)

    def logits(
        self, xc, w, bias, class_weight, row_shift, slot_target, num_live, start, softcap, e, e2, v_split, part_sum,
        part_wsum, target_logit, row_max_bits, flags,
    ) -> None:  # fmt: skip
        """A tile with a logit far above row_shift uses its own maximum, so that nothing overflows; `redo` follows."""
        rows, tiles = xc.shape[0], part_sum.shape[1] // 2
        kernel = self._exp("softmax", e, bias, softcap, part_wsum is not None, class_weight)
        for v0, v1, part in _parts(e, e2, v_split, w.shape[0]):
            for c0, c1, z in _products(xc, w[v0:v1]):
                args = ExpArgs(
                    z.data_ptr(),
                    None if part is None else part[:, c0:c1].data_ptr(),
                    None if bias is None else bias[v0 + c0 :].data_ptr(),
                    None if class_weight is None else class_weight[v0 + c0 :].data_ptr(),
                    slot_target.data_ptr(),
                    num_live.data_ptr(),
                    row_shift.data_ptr(),
                    row_max_bits.data_ptr(),
                    flags.data_ptr(),
                    part_sum.data_ptr(),
                    None if part_wsum is None else part_wsum.data_ptr(),
                    target_logit.data_ptr(),
                    (v0 + c0) // TILE_N,
                    tiles,
                    None,
                    z.stride(0),
                    0 if part is None else part.stride(0),
                    1.0 if softcap is None else softcap,
                    v0 + c0,
                    start,
                    rows,
                    c1 - c0,
                )
                kernel(args, self.stream())

    def redo(
        self, xc, w, bias, class_weight, row_shift, slot_target, num_live, start, softcap, e, e2, v_split, part_sum,
        part_wsum, target_logit, row_max_bits, flags,
    ) -> None:  # fmt: skip
        """No GEMM: multiplies exp_logits and sums of flagged rows by exp(their tile's shift - decode(row_max_bits))."""
        kernel = self._find(("rescale", e is None), "lce_rescale", LceRescaleProblem(e is not None))
        rows, tiles = xc.shape[0], part_sum.shape[1] // 2
        for v0, v1, part in _parts(e, e2, v_split, w.shape[0]):
            args = RescaleArgs(
                None if part is None else part.data_ptr(),
                part_sum.data_ptr(),
                row_max_bits.data_ptr(),
                flags.data_ptr(),
                num_live.data_ptr(),
                0 if part is None else part.stride(0),
                v0 // TILE_N,
                tiles,
                start,
                rows,
                v1 - v0,
            )
            kernel(args, self.stream())

    def dlogits(
        self, xc, w, bias, coefs, slot_target, num_live, start, class_weight, softcap, smoothing, v0, e
    ) -> None:
        if not smoothing:
            class_weight = None
        kernel = self._exp("dlogits", e, bias, softcap, smoothing, class_weight)
        for c0, c1, z in _products(xc, w):
            args = ExpArgs(
                z.data_ptr(),
                e[:, c0:c1].data_ptr(),
                None if bias is None else bias[c0:c1].data_ptr(),
                None if class_weight is None else class_weight[v0 + c0 :].data_ptr(),
                slot_target.data_ptr(),
                num_live.data_ptr(),
                *(None,) * 6,  # row_shift to target_logit
                0,
                0,
                coefs.data_ptr(),
                z.stride(0),
                e.stride(0),
                1.0 if softcap is None else softcap,
                v0 + c0,
                start,
                xc.shape[0],
                c1 - c0,
            )
            kernel(args, self.stream())

    def dx(self, e, e2, v_split, w, row_scale, order, num_live, start, out, accumulate, tickets=None) -> None:
        """Without order, all rows are written."""
        if order is None:
            return _times_w(e, e2, v_split, w, out, accumulate)
        rows, h = e.shape[0], w.shape[1]
        problem = LceScatterProblem(h, dtype_name(out), row_scale=True)
        kernel = self._find(("scatter", h, out.dtype), "lce_scatter", problem)
        step = min(product_rows(h), rows)
        products = e.new_empty((step, h), dtype=torch.float32)
        for r0 in range(0, rows, step):
            r1 = min(r0 + step, rows)
            acc = products[: r1 - r0]
            _times_w(e[r0:r1], None if e2 is None else e2[r0:r1], v_split, w, acc, False)
            at = acc.data_ptr(), row_scale[r0:r1].data_ptr(), order.data_ptr(), out.data_ptr(), num_live.data_ptr()
            kernel(ScatterArgs(*at, start + r0, r1 - r0), self.stream())

    def dw(self, e, xs, num_live, start, out, accumulate, tickets=None, places=None, rest=None, factor=None) -> None:
        """A 16-bit out is rounded by cuBLAS, which may round on the way where it splits the sum over rows.

        `torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction` is asked, as by any GEMM of PyTorch's.
        """
        rows, h = xs.shape
        kernel = self._find(("clear", h, xs.dtype), "lce_clear", LceClearProblem(h, dtype_name(xs)))
        # 0 * NaN would reach every class
        kernel(ClearArgs(xs.data_ptr(), num_live.data_ptr(), start, rows), self.stream())
        if factor is None:
            (addmm if accumulate else mm)(e.t(), xs, out)
        else:  # which cuBLAS takes from the host alone
            product = xs.new_empty(out.shape, dtype=torch.float32)
            mm(e.t(), xs, product)
            product.mul_(factor)
            out.add_(product) if accumulate else out.copy_(product)

    def _exp(self, kind, e, bias, softcap, smoothing, class_weight) -> Callable[..., None]:
        out_dtype, bias_dtype = None if e is None else e.dtype, None if bias is None else bias.dtype
        options = softcap is not None, smoothing, class_weight is not None
        problem = LceExpProblem(kind, dtype_name(e), dtype_name(bias), *options)
        return self._find((kind, out_dtype, bias_dtype, *options), "lce_exp", problem)

    def _find(self, key: tuple, name: str, problem) -> Callable[..., None]:
        epoch = choose.epoch
        kernel = self._kernels.get((epoch, key))
        if kernel is None:
            if self._epoch != epoch:
                self._kernels, self._epoch = {}, epoch
            kernel = self._kernels[epoch, key] = self.kernel_for(name, problem, self.gpu).launch
        return kernel


def _parts(e: Tensor | None, e2: Tensor | None, v_split: int, v: int) -> list[tuple[int, int, Tensor | None]]:
    """(first class, end of the classes, their columns of E)"""
    return [(0, v, e)] if e2 is None else [(0, v_split, e), (v_split, v, e2)]


def _products(xc: Tensor, w: Tensor) -> Iterator[tuple[int, int, Tensor]]:
    """xc @ w.T in fp32, classes [c0, c1) of w at a time, in rows of whole tiles; each is overwritten by the next."""
    rows, n = xc.shape[0], w.shape[0]
    step = min(logit_columns(rows), _ceil_div(n, TILE_N) * TILE_N)
    z = xc.new_empty((rows, step), dtype=torch.float32)
    for c0 in range(0, n, step):
        c1 = min(c0 + step, n)
        mm(xc, w[c0:c1].t(), z[:, : c1 - c0])
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
