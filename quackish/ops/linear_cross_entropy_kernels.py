"""Launches of linear cross entropy's kernels: torch tensors in, work on the current stream of their device.

A chunk is a range [start, start + rows) of compact positions: places in `order`, live rows first. Its own buffers are
counted from 0: chunk row i is position start + i. Only what a GEMM may read behind the last live row is written there,
so buffers may come from torch.empty.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from quackish import kernels, launch
from quackish.configs import choose
from quackish.configs.lce_rows import (
    WIDE_BIAS,
    LceBiasProblem,
    LceCompactProblem,
    LceGatherProblem,
    LceRowsProblem,
    LceScaleConfig,
    LceScaleProblem,
    LceScatterProblem,
    LceSortProblem,
    LceTargetsProblem,
)
from quackish.errors import UnsupportedError
from quackish.gpu import gpu_of
from quackish.ops.cuda import address, dtype_name
from quackish.ops.linear_cross_entropy_cublas import CublasGemms
from quackish.ops.linear_cross_entropy_gemms import GemmLaunches


def gemms_of(device: torch.device) -> GemmLaunches | CublasGemms:
    """GEMMs of ours where the table of kernels has one for the GPU, else cuBLAS's."""
    try:
        kernels.find("lce_gemm", gpu_of(device.index))
    except UnsupportedError:
        return CublasGemms(device)
    return GemmLaunches(device)


class LceKernels:
    """All kernels of one device; a kernel is compiled, or loaded, by its first call.

    Tensors are contiguous where nothing else is said, and start on 16 bytes where they have h or v columns; h is a
    multiple of 8. Nothing of this is checked here, and nothing is synchronised.
    """

    def __init__(self, device: torch.device, gemms: GemmLaunches | CublasGemms | None = None):
        gemms = gemms_of(device) if gemms is None else gemms
        self.device, self.gpu, self.num_tiles = device, gemms.gpu, gemms.num_tiles
        self.keeps_rest = gemms.keeps_rest
        self.logits, self.redo, self.dlogits, self.dx, self.dw = (
            gemms.logits, gemms.redo, gemms.dlogits, gemms.dx, gemms.dw,
        )  # fmt: skip
        self.stream = gemms.stream
        self._rows_kernels: dict[tuple, Callable[..., None]] = {}  # by what selects one, flat: cheap to look up
        self._scale_configs: dict[tuple, LceScaleConfig] = {}
        self._epoch = choose.epoch  # of the choices that these follow from

    def _find(self, key: tuple, name: str, problem) -> Callable[..., None]:
        if self._epoch != key[0]:
            self._rows_kernels, self._scale_configs, self._epoch = {}, {}, key[0]
        config = choose.choose(name, problem, self.gpu).config
        kernel = self._rows_kernels[key] = launch.get(kernels.find(name, self.gpu), problem, config, self.gpu.target)
        return kernel

    def compact(
        self,
        target: Tensor,  # (m,) int32 or int64
        class_weight: Tensor | None,  # (v,) fp32, bf16 or fp16
        num_items: float | Tensor | None,
        ignore_index: int,
        v: int,
        mean: bool,
        order: Tensor,  # (m,) int32
        num_live: Tensor,  # (1,) int32
        inv_divisor: Tensor,  # (1,) fp32
        tickets: Tensor,  # (NUM_TICKETS,) int32
    ) -> None:
        """order: numbers of the live rows (target != ignore_index) ascending, then of the others; num_live: how many.

        inv_divisor: with `mean` 1 / num_items, or without that 1 / (sum of the class weights of live rows whose target
        is a class); 1 where no row has a class, and without `mean`. tickets: 0.
        """
        divisor, items, items_at = ("weights" if mean else "one"), 1.0, None
        if not mean or divisor == "one":
            class_weight = None
        elif isinstance(num_items, Tensor) and num_items.is_cuda:
            divisor, num_items = "tensor", num_items.to(torch.float32)
            class_weight, items_at = None, num_items.data_ptr()
        elif num_items is not None:
            divisor, class_weight, items = "float", None, float(num_items)
        key = (choose.epoch, "compact", target.dtype, None if class_weight is None else class_weight.dtype, divisor)
        kernel = self._rows_kernels.get(key)
        if kernel is None:
            problem = LceCompactProblem(dtype_name(target), dtype_name(class_weight), divisor)
            kernel = self._find(key, "lce_compact", problem)
        kernel(
            target.data_ptr(),
            None if class_weight is None else class_weight.data_ptr(),
            items_at,
            order.data_ptr(),
            inv_divisor.data_ptr(),
            tickets.data_ptr(),
            num_live.data_ptr(),
            items,
            ignore_index,
            v,
            target.shape[0],
            self.stream(),
        )

    def gather(
        self,
        x: Tensor,  # (m, h) bf16 or fp16; stride 1 along h, any other
        w: Tensor,  # (v, h) as x
        bias: Tensor | None,  # (v,) fp32, bf16 or fp16
        target: Tensor,  # (m,)
        order: Tensor,  # (m,)
        num_live: Tensor,  # (1,)
        start: int,
        v: int,
        softcap: float | None,
        xc: Tensor,  # (rows, h) as x
        cls: Tensor,  # (rows,) int32
        ref: Tensor,  # (rows,) fp32
        top: Tensor,  # (rows,) int32
        flags: Tensor,  # (1 + ceil(rows / 128),) int32
        dx: Tensor | None,  # (m, h)
        loss: Tensor | None,  # (m,) fp32
        lse: Tensor | None,  # (m,) fp32; both or none
    ) -> None:
        """Live rows: xc = x[order], cls = target or -1, ref = the target's logit (class 0's for cls -1), top = ref.

        Ignored rows of the chunk: dx, loss and lse 0, cls -1, ref so high that exp(a - ref) is 0; xc 0 up to the end of
        the GEMM tile. flags 0.
        """
        stride = x.stride(0)
        aligned = not (x.data_ptr() | stride * 2) & 15
        bias_dtype = None if bias is None else bias.dtype
        dx_dtype = None if dx is None else dx.dtype
        capped, rows_out = softcap is not None, loss is not None
        dtypes = x.dtype, target.dtype, bias_dtype, dx_dtype
        key = (choose.epoch, "gather", x.shape[1], *dtypes, capped, rows_out, aligned)
        kernel = self._rows_kernels.get(key)
        if kernel is None:
            dtypes = dtype_name(x), dtype_name(target), dtype_name(bias), dtype_name(dx)
            problem = LceGatherProblem(x.shape[1], *dtypes, capped, rows_out, aligned)
            kernel = self._find(key, "lce_gather", problem)
        kernel(
            x.data_ptr(),
            w.data_ptr(),
            None if bias is None else bias.data_ptr(),
            target.data_ptr(),
            order.data_ptr(),
            num_live.data_ptr(),
            xc.data_ptr(),
            cls.data_ptr(),
            ref.data_ptr(),
            top.data_ptr(),
            flags.data_ptr(),
            None if dx is None else dx.data_ptr(),
            None if loss is None else loss.data_ptr(),
            None if lse is None else lse.data_ptr(),
            stride,
            1.0 if softcap is None else softcap,
            start,
            cls.shape[0],
            v,
            self.stream(),
        )

    def rows(
        self,
        stats: bool,
        grads: str,  # "none", "scale" or "coefs"
        *,
        cls: Tensor,  # (rows,)
        order: Tensor,  # (m,)
        num_live: Tensor,  # (1,)
        start: int,
        v: int,
        top: Tensor,  # (rows,) int32
        lse: Tensor,  # (m,) fp32: written with stats, else read
        row_sum: Tensor,  # (rows,) fp32: as lse
        inv_divisor: Tensor,  # (1,) fp32
        # stats, with part_sum
        part_sum: Tensor | None = None,  # (rows, tiles) fp32
        part_wsum: Tensor | None = None,  # (rows, tiles) fp32, with label_smoothing: sums of class weight * a
        loss: Tensor | None = None,  # (m,) fp32
        zt: Tensor | None = None,  # (rows,) fp32; stats and "scale"
        # options
        class_weight: Tensor | None = None,  # (v,) fp32, bf16 or fp16
        total_weight: Tensor | None = None,  # 0-dim fp32: its sum; with label_smoothing
        softcap: float | None = None,
        z_loss: float = 0.0,
        label_smoothing: float = 0.0,
        # "scale" and "coefs"
        grad_loss: Tensor | None = None,  # fp32, 0-dim or (m,) of any stride; None is 1
        grad_lse: Tensor | None = None,  # (m,) fp32 of any stride; None is 0
        # "scale"
        e: Tensor | None = None,  # (rows, >= v_split) bf16, stride 1 along columns
        e2: Tensor | None = None,  # as e: columns from v_split on
        v_split: int = 0,  # with e2
        xc: Tensor | None = None,  # (rows, h) bf16 or fp16
        xs: Tensor | None = None,  # as xc, and may be xc; both or none
        row_scale: Tensor | None = None,  # (rows,) fp32
        # "coefs"
        coefs: Tensor | None = None,  # (rows, 4) fp32
        places: Tensor | None = None,  # (v,) int32
    ) -> None:
        """stats: loss[r], times inv_divisor; lse[r], row_sum[i]. "coefs": (ref, ca / row_sum, cb, cs) of each row, with
        ref from top; dlogits is (ca / row_sum * exp(a - ref) - cs * class weight - onehot * cb) * d. "scale": E at the
        target so that dlogits is row_scale * E; row_scale; xs = xc * row_scale. places, if given: NO_PLACE. What else
        is given is not used.

        Ignored rows up to the end of the GEMM tile: row_scale and xs 0; coefs (2e38, 0, 0, 0), so exp(a - ref) is 0.
        """
        # What the kernel has no use for is left out, as it was compiled without it.
        scale, smoothing, loss_kind, tiles, h, strides = grads == "scale", label_smoothing != 0, "one", 0, 0, (0, 0)
        if not stats:
            part_sum = part_wsum = loss = None
            if not scale:
                zt = None
        else:
            tiles = part_sum.shape[1]
            if not smoothing:
                part_wsum = None
        if not smoothing or class_weight is None:
            total_weight = None
        if grads == "none":
            grad_loss = grad_lse = None
        if grads != "coefs":
            coefs = None
        if scale:
            strides = e.stride(0), 0 if e2 is None else e2.stride(0)
            if xc is not None:
                h = xc.shape[1]
        else:
            e = e2 = xc = xs = row_scale = None
        if grad_loss is not None:
            if grad_loss.dim() == 0 or grad_loss.stride(0) == 0:
                loss_kind = "scalar"
            else:
                loss_kind, grad_loss = "rows", grad_loss.contiguous()
        if grad_lse is not None:
            grad_lse = grad_lse.contiguous()
        key = (
            choose.epoch,
            "rows",
            stats,
            grads,
            h,
            None if xc is None else xc.dtype,
            None if class_weight is None else class_weight.dtype,
            smoothing,
            scale and softcap is not None,
            loss_kind,
            grad_lse is not None,
            e2 is not None,
            places is not None,
        )
        kernel = self._rows_kernels.get(key)
        if kernel is None:
            problem = LceRowsProblem(*key[2:5], dtype_name(xc), dtype_name(class_weight), *key[7:])
            kernel = self._find(key, "lce_rows", problem)
        kernel(
            address(part_sum),
            address(part_wsum),
            address(zt),
            top.data_ptr(),
            cls.data_ptr(),
            order.data_ptr(),
            num_live.data_ptr(),
            address(class_weight),
            address(total_weight),
            address(loss),
            lse.data_ptr(),
            row_sum.data_ptr(),
            address(grad_loss),
            inv_divisor.data_ptr(),
            address(grad_lse),
            address(e),
            address(e2),
            address(xc),
            address(xs),
            address(row_scale),
            address(coefs),
            address(places),
            *strides,
            v_split,
            1.0 if softcap is None else softcap,
            z_loss,
            label_smoothing,
            v,
            tiles,
            start,
            cls.shape[0],
            self.stream(),
        )

    def sort(
        self,
        cls: Tensor,  # (rows,) int32
        order: Tensor,  # (m,)
        num_live: Tensor,  # (1,)
        start: int,
        row_scale: Tensor,  # (rows,) fp32
        e: Tensor,  # as in `rows`
        e2: Tensor | None,
        v_split: int,
        sorted_cls: Tensor,  # (rows,) int32
        sorted_row: Tensor,  # (rows,) int32
        sorted_grad: Tensor,  # (rows,) fp32
        places: Tensor | None = None,  # (v,) int32: NO_PLACE
        index: Tensor | None = None,  # (rows,) int64: `order_by_class`, where there are more than MOST_ROWS_COUNTED
    ) -> None:
        """Takes the target's element out of each live row of E, if it has that class, and lists the rows by class, then
        by position: sorted_grad = row_scale * that element (0 without), of row sorted_row of x; in E it is 0 from then.

        places[t] = the first place of class t; other classes' are left alone. cls is not of the
        launch right before this one.
        """
        key = (choose.epoch, "sort", e2 is not None, places is not None, index is not None)
        kernel = self._rows_kernels.get(key)
        if kernel is None:
            kernel = self._find(key, "lce_sort", LceSortProblem(*key[2:]))
        kernel(
            cls.data_ptr(),
            order.data_ptr(),
            num_live.data_ptr(),
            row_scale.data_ptr(),
            e.data_ptr(),
            address(e2),
            sorted_cls.data_ptr(),
            sorted_row.data_ptr(),
            sorted_grad.data_ptr(),
            address(places),
            address(index),
            e.stride(0),
            0 if e2 is None else e2.stride(0),
            v_split,
            e.shape[1] if e2 is None else v_split + e2.shape[1],
            start,
            cls.shape[0],
            self.stream(),
        )

    def targets(
        self,
        x: Tensor,  # (m, h) as in `gather`
        sorted_cls: Tensor,
        sorted_row: Tensor,
        sorted_grad: Tensor,
        num_live: Tensor,  # (1,)
        start: int,
        v0: int,
        dw: Tensor,  # (n, h): classes v0 and up; contiguous; bf16, fp16 or fp32
        rest: Tensor | None = None,  # (rows, h) int16, as `dw` leaves it; for a bf16 dw
    ) -> None:
        """dw[t - v0] += the sum of sorted_grad * x[sorted_row] over the rows with sorted_cls t, in a set order; after
        it was given back what its rounding cut off, rest at the first of these places. The launch right before this one
        may write dw and rest, and none of the others."""
        (n, h), stride = dw.shape, x.stride(0)
        aligned = not (x.data_ptr() | stride * 2) & 15
        key = (choose.epoch, "targets", h, x.dtype, dw.dtype, aligned, rest is not None)
        kernel = self._rows_kernels.get(key)
        if kernel is None:
            problem = LceTargetsProblem(h, dtype_name(x), dtype_name(dw), aligned, rest is not None)
            kernel = self._find(key, "lce_targets", problem)
        at = x.data_ptr(), sorted_cls.data_ptr(), sorted_row.data_ptr(), sorted_grad.data_ptr(), num_live.data_ptr()
        kernel(*at, dw.data_ptr(), address(rest), stride, v0, v0 + n, start, sorted_cls.shape[0], self.stream())

    def bias_sum(
        self,
        e: Tensor,  # (rows, >= n) bf16 or fp16; stride 1 along columns, the other and rows a multiple of 8
        row_scale: Tensor | None,  # (rows,) fp32; None is 1
        num_live: Tensor,  # (1,)
        start: int,
        db: Tensor,  # (n,) fp32
        accumulate: bool,
    ) -> None:
        """db = (or += with `accumulate`) the sum over the live rows i of the chunk of row_scale[i] * e[i, :n]."""
        n = db.shape[0]
        key = (choose.epoch, "bias", e.dtype, row_scale is not None, accumulate, n >= WIDE_BIAS)
        kernel = self._rows_kernels.get(key)
        if kernel is None:
            problem = LceBiasProblem(dtype_name(e), *key[3:])
            kernel = self._find(key, "lce_bias", problem)
        rows = e.shape[0]
        at = e.data_ptr(), address(row_scale), db.data_ptr(), num_live.data_ptr()
        kernel(*at, e.stride(0), start, rows, n, self.stream())

    def scatter(
        self,
        acc: Tensor,  # (rows, h) fp32
        order: Tensor,  # (m,)
        num_live: Tensor,  # (1,)
        start: int,
        dx: Tensor,  # (m, h) bf16, fp16 or fp32
    ) -> None:
        """dx[order[start + i]] = acc[i] for the live rows of the chunk."""
        rows, h = acc.shape
        key = (choose.epoch, "scatter", h, dx.dtype)
        kernel = self._rows_kernels.get(key)
        if kernel is None:
            kernel = self._find(key, "lce_scatter", LceScatterProblem(h, dtype_name(dx)))
        at = acc.data_ptr(), None, order.data_ptr(), dx.data_ptr(), num_live.data_ptr()
        kernel(*at, start, rows, self.stream())

    def scale(
        self,
        out: Tensor,  # bf16, fp16 or fp32, any shape
        factor: Tensor,  # (1,) fp32
        out2: Tensor | None = None,  # as out
    ) -> None:
        """out *= factor, and out2, in place; leaves at once where the factor is 1."""
        n, n2 = out.numel(), 0 if out2 is None else out2.numel()
        if n + n2 == 0:
            return
        key = (choose.epoch, "scale", out.dtype)
        kernel, config = self._rows_kernels.get(key), self._scale_configs.get(key)
        if kernel is None or config is None:
            problem = LceScaleProblem(dtype_name(out))
            kernel = self._find(key, "lce_scale", problem)
            config = self._scale_configs[key] = choose.choose("lce_scale", problem, self.gpu).config
        num_ctas = config.num_ctas(max(n, n2) * out.itemsize, self.gpu.sm_count)
        second = out if out2 is None else out2
        kernel(out.data_ptr(), second.data_ptr(), factor.data_ptr(), n, n2, num_ctas, self.stream())
