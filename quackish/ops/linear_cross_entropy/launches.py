"""Launches of linear cross entropy's kernels: torch tensors in, work on the current stream of their device.

A chunk is a range [start, start + rows) of compact positions: places in `order`, live rows first. Its own buffers are
counted from 0: chunk row i is position start + i. Only what a GEMM may read behind the last live row is written there,
so buffers may come from torch.empty.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from quackish import kernels
from quackish.configs import choose
from quackish.configs.gemm import SOFTMAX_TILE_N, GemmConfig, GemmProblem, splits_dw_tail
from quackish.configs.lce_args import (
    BiasArgs,
    CompactArgs,
    GatherArgs,
    RowsArgs,
    ScaleArgs,
    ScatterArgs,
    SortArgs,
    TargetsArgs,
)
from quackish.configs.lce_rows import (
    WIDE_BIAS,
    LceBiasProblem,
    LceCompactProblem,
    LceGatherProblem,
    LceRowsProblem,
    LceScaleProblem,
    LceScatterProblem,
    LceSortProblem,
    LceTargetsProblem,
)
from quackish.errors import UnsupportedError
from quackish.gpu import Gpu, gpu_of
from quackish.ops import workspace
from quackish.ops.cuda import address, current_stream_of, dtype_name
from quackish.ops.kernel_for import Kernel, KernelFor, kernel_for
from quackish.ops.linear_cross_entropy.cublas import CublasGemms

# GEMMs ----------------------------------------------------------------------------------------------------------------


class GemmLaunches:
    """Operands are bf16 or fp16 with unit stride along their columns, rows a multiple of 8 elements apart.

    All sums run over the live rows alone, chunk rows [0, num_live - start), which the device counts.
    """

    keeps_rest = True  # `dw` may keep what its rounding takes

    def __init__(self, device: torch.device, gpu: Gpu | None = None, kernel_for: KernelFor = kernel_for):
        self.device, self.gpu, self.kernel_for = device, gpu or gpu_of(device.index), kernel_for
        self.stream = current_stream_of(device)
        # a kernel, how many clusters it runs in, and its config
        self._gemms: dict[tuple, tuple[Callable[..., None], int, GemmConfig]] = {}
        self._epoch = choose.epoch  # of the choices that these follow from

    def num_tiles(self, v: int) -> int:
        """How many partial sums a row of `part_sum` has."""
        return -(-v // SOFTMAX_TILE_N)

    def logits(
        self,
        xc: Tensor,  # (rows, h)
        w: Tensor,  # (v, h)
        bias: Tensor | None,  # (v,)
        class_weight: Tensor | None,  # (v,) fp32; with part_wsum
        row_shift: Tensor,  # (rows,) fp32
        slot_target: Tensor,  # (rows,) int32
        num_live: Tensor,  # (1,) int32
        start: int,
        softcap: float | None,
        e: Tensor | None,  # (rows, v_split) bf16, or (rows, v) without e2
        e2: Tensor | None,  # (rows, v - v_split)
        v_split: int,  # with e2; a multiple of 64
        part_sum: Tensor,  # (rows, num_tiles(v)) fp32
        part_wsum: Tensor | None,  # as part_sum; with label smoothing
        target_logit: Tensor,  # (rows,) fp32
        row_max_bits: Tensor,  # (rows,) int32
        flags: Tensor,  # (1 + ceil(rows / 128),) int32
    ) -> None:
        """e = exp(a - row_shift) * d for the logits a; part_sum: its sums per row and tile, without d; target_logit.

        A logit far above row_shift raises row_max_bits and flags its tile; `redo` must follow.
        """
        self._softmax(
            False, xc, w, bias, class_weight, row_shift, slot_target, num_live, start, softcap, e, e2, v_split,
            part_sum, part_wsum, target_logit, row_max_bits, flags,
        )  # fmt: skip

    def redo(self, *args) -> None:
        """Recomputes the tiles that `logits` flagged, with the same arguments, shifted by row_max_bits.

        It is always launched, and returns at once if no tile is flagged.
        """
        self._softmax(True, *args)

    def _softmax(
        self, redo, xc, w, bias, class_weight, row_shift, slot_target, num_live, start, softcap, e, e2, v_split,
        part_sum, part_wsum, target_logit, row_max_bits, flags,
    ) -> None:  # fmt: skip
        (rows, h), n = xc.shape, w.shape[0]
        bias_dtype, weighted = None if bias is None else bias.dtype, class_weight is not None
        smoothing, split = part_wsum is not None, e2 is not None
        options = softcap is None, smoothing, weighted, split
        key = (choose.epoch, "softmax", redo, xc.dtype, e is None, bias_dtype, *options)
        kernel, clusters, _ = self._gemms.get(key) or self._compile(
            key,
            epilogue="softmax",
            dtype=dtype_name(xc),
            out_dtype=dtype_name(e),
            bias_dtype=dtype_name(bias),
            softcap=softcap is not None,
            smoothing=smoothing,
            weighted=weighted,
            redo=redo,
            split_n=split,
        )
        given = (
            address(bias),
            address(class_weight),
            None if redo else row_shift.data_ptr(),
            slot_target.data_ptr(),
            row_max_bits.data_ptr(),
            flags.data_ptr(),
            part_sum.data_ptr(),
            target_logit.data_ptr(),
            address(part_wsum),
            1.0 if softcap is None else softcap,
            part_sum.shape[1],
        )
        strides = xc.stride(0), e2.stride(0) if split else 0, w.stride(0), 0 if e is None else e.stride(0)
        stream, ticket, _kept = (self.stream(), None, None) if redo else self.stream_and_ticket()
        kernel(
            xc.data_ptr(), address(e2), w.data_ptr(), address(e), given, None, ticket, num_live.data_ptr(),
            (rows, n, h, v_split if split else 0, start), strides, clusters, stream,
        )  # fmt: skip

    def dlogits(
        self,
        xc: Tensor,  # (rows, h)
        w: Tensor,  # (n, h): classes v0 and up
        bias: Tensor | None,  # (n,)
        coefs: Tensor,  # (rows, 4) fp32: row_shift, coef_softmax / sum, coef_target, coef_smooth
        slot_target: Tensor,  # (rows,) int32
        num_live: Tensor,  # (1,) int32
        start: int,
        class_weight: Tensor | None,  # (v,) fp32; used with smoothing
        softcap: float | None,
        smoothing: bool,
        v0: int,
        e: Tensor,  # (rows, n) as xc
    ) -> None:
        """The gradient of the logits: see kernels/common/epilogue_dlogits.py."""
        (rows, h), n = xc.shape, w.shape[0]
        if not smoothing:
            class_weight = None
        bias_dtype, weighted = None if bias is None else bias.dtype, class_weight is not None
        key = (choose.epoch, "dlogits", xc.dtype, e.dtype, bias_dtype, softcap is None, smoothing, weighted)
        kernel, clusters, _ = self._gemms.get(key) or self._compile(
            key,
            epilogue="dlogits",
            dtype=dtype_name(xc),
            out_dtype=dtype_name(e),
            bias_dtype=dtype_name(bias),
            softcap=softcap is not None,
            smoothing=smoothing,
            weighted=weighted,
        )
        capped = 1.0 if softcap is None else softcap
        given = address(bias), address(class_weight), coefs.data_ptr(), slot_target.data_ptr(), capped, v0
        strides = xc.stride(0), 0, w.stride(0), e.stride(0)
        stream, ticket, _kept = self.stream_and_ticket()
        kernel(
            xc.data_ptr(), None, w.data_ptr(), e.data_ptr(), given, None, ticket, num_live.data_ptr(),
            (rows, n, h, 0, start), strides, clusters, stream,
        )  # fmt: skip

    def dx(
        self,
        e: Tensor,  # (rows, v_split), or (rows, n) without e2
        e2: Tensor | None,  # (rows, n - v_split)
        v_split: int,  # with e2; a multiple of the GEMM's step along k
        w: Tensor,  # (n, h)
        row_scale: Tensor | None,  # (rows,) fp32; with order
        order: Tensor | None,  # (m,) int32
        num_live: Tensor,  # (1,) int32
        start: int,
        out: Tensor,  # (m, h) with order, else (rows, h) fp32; contiguous
        accumulate: bool,  # without order
        tickets: Tensor | None = None,  # (NUM_TICKETS,) int32, 0 before and after; with order
    ) -> None:
        """Row i of e @ w, times row_scale, to row order[start + i] of out; without order to row i, or added to it.

        Without order, rows up to the end of a tile with live rows are written too. With tickets, tiles of a
        partly filled last wave are split along the classes, which takes 17 MB of scratch, or 69 MB for deep tiles.
        """
        (n, h), rows = w.shape, e.shape[0]
        scattered = order is not None
        key = (choose.epoch, "dx", e.dtype, out.dtype, scattered, e2 is None, accumulate, tickets is None)
        kernel, clusters, config = self._gemms.get(key) or self._compile(
            key,
            epilogue="rows" if scattered else "store",
            dtype=dtype_name(e),
            out_dtype=dtype_name(out),
            b_major="n",
            split_k=e2 is not None,
            accumulate=accumulate,
            split_k_tail=tickets is not None,
        )
        shared, _scratch = _shared(tickets, config, rows, h, n, clusters)
        given = (row_scale.data_ptr(), order.data_ptr()) if scattered else None
        sizes = rows, h, n, 0 if e2 is None else v_split, start
        strides = e.stride(0), 0 if e2 is None else e2.stride(0), w.stride(0), out.stride(0)
        stream, ticket, _kept = self.stream_and_ticket()
        kernel(
            e.data_ptr(), address(e2), w.data_ptr(), out.data_ptr(), given, shared, ticket, num_live.data_ptr(), sizes,
            strides, clusters, stream,
        )  # fmt: skip

    def dw(
        self,
        e: Tensor,  # (rows, n)
        xs: Tensor,  # (rows, h)
        num_live: Tensor,  # (1,) int32
        start: int,
        out: Tensor,  # (n, h) contiguous; fp32 to accumulate
        accumulate: bool,
        tickets: Tensor | None = None,  # as in `dx`, along the rows; used where there are few tiles
        places: Tensor | None = None,  # (n,) int32; NO_SLOT for none
        rest: Tensor | None = None,  # (any, h) int16; both or none, for a bf16 out that is not added to
        factor: Tensor | None = None,  # (1,) fp32; None is 1; not with rest
    ) -> None:
        """out = (or += with `accumulate`) factor * e.T @ xs.

        rest[places[i]]: the bits that rounding cut off row i, if it is listed.
        """
        (rows, h), n = xs.shape, e.shape[1]
        if tickets is not None and not splits_dw_tail(n, h, self.gpu.sm_count):
            tickets = None
        key = (choose.epoch, "dw", e.dtype, out.dtype, accumulate, tickets is None, rest is None, factor is None)
        kernel, clusters, config = self._gemms.get(key) or self._compile(
            key,
            epilogue="store",
            dtype=dtype_name(e),
            out_dtype=dtype_name(out),
            a_major="m",
            b_major="n",
            live="k",
            accumulate=accumulate,
            split_k_tail=tickets is not None,
            scaled=factor is not None,
            rest=rest is not None,
        )
        shared, _scratch = _shared(tickets, config, n, h, rows, clusters)
        given = None if factor is None else (factor.data_ptr(),)
        if rest is not None:
            given = places.data_ptr(), rest.data_ptr()
        sizes, strides = (n, h, rows, 0, start), (e.stride(0), 0, xs.stride(0), out.stride(0))
        stream, ticket, _kept = self.stream_and_ticket()
        kernel(
            e.data_ptr(), None, xs.data_ptr(), out.data_ptr(), given, shared, ticket, num_live.data_ptr(), sizes,
            strides, clusters, stream,
        )  # fmt: skip

    def stream_and_ticket(self) -> tuple[int, int, tuple | None]:
        """The current stream, where the clusters of a launch on it meet, and what must be kept until then."""
        stream = self.stream()
        if self.device.type != "cuda":
            return stream, 0, None
        ticket, _, kept = workspace.take(self.device.index, stream, 0)
        return stream, ticket, kept

    def _compile(self, key: tuple, **fields) -> tuple[Callable[..., None], int, GemmConfig]:
        problem = GemmProblem(**fields)
        if self._epoch != key[0]:
            self._gemms, self._epoch = {}, key[0]
        kernel, config = self.kernel_for("lce_gemm", problem, self.gpu)
        clusters = config.max_clusters(self.gpu.sm_count)
        made = self._gemms[key] = kernel, clusters, config
        return made


def _shared(
    tickets: Tensor | None, config: GemmConfig, m: int, n: int, k: int, clusters: int
) -> tuple[tuple[int, int, int] | None, Tensor | None]:
    """What clusters that share tiles are given, and what must be kept until the launch."""
    if tickets is None:
        return None, None
    splits, floats = config.tail_room(m, n, k, clusters)
    partials = tickets.new_empty(floats, dtype=torch.float32)
    return (partials.data_ptr(), tickets.data_ptr(), splits), partials


# All kernels ----------------------------------------------------------------------------------------------------------


def gemms_of(
    device: torch.device, gpu: Gpu | None = None, kernel_for: KernelFor = kernel_for
) -> GemmLaunches | CublasGemms:
    """Our GEMM kernel if the table of kernels has one for the GPU, else cuBLAS."""
    gpu = gpu or gpu_of(device.index)
    try:
        kernels.find("lce_gemm", gpu)
    except UnsupportedError:
        return CublasGemms(device, gpu, kernel_for)
    return GemmLaunches(device, gpu, kernel_for)


class LceKernels:
    """All kernels of one device; a kernel is compiled, or loaded, by its first call.

    Tensors are contiguous where nothing else is said, and start on 16 bytes where they have h or v columns; h is a
    multiple of 8. Nothing of this is checked here, and nothing is synchronised.
    """

    def __init__(self, device: torch.device, gemms: GemmLaunches | CublasGemms | None = None):
        gemms = gemms_of(device) if gemms is None else gemms
        self.kernel_for = gemms.kernel_for
        self.device, self.gpu, self.num_tiles = device, gemms.gpu, gemms.num_tiles
        self.keeps_rest = gemms.keeps_rest
        self.logits, self.redo, self.dlogits, self.dx, self.dw = (
            gemms.logits, gemms.redo, gemms.dlogits, gemms.dx, gemms.dw,
        )  # fmt: skip
        self.stream = gemms.stream
        self._rows_kernels: dict[tuple, Callable[..., None]] = {}  # keys are flat tuples: cheap to look up
        self._scale_kernels: dict[tuple, Kernel] = {}
        self._epoch = choose.epoch  # of the choices that these follow from

    def _find(self, key: tuple, name: str, problem) -> Callable[..., None]:
        self._forget_old(key[0])
        kernel = self._rows_kernels[key] = self.kernel_for(name, problem, self.gpu).launch
        return kernel

    def _forget_old(self, epoch: int) -> None:
        if self._epoch != epoch:
            self._rows_kernels, self._scale_kernels, self._epoch = {}, {}, epoch

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
        args = CompactArgs(
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
        )
        kernel(args, self.stream())

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
        slot_target: Tensor,  # (rows,) int32
        row_shift: Tensor,  # (rows,) fp32
        row_max_bits: Tensor,  # (rows,) int32
        flags: Tensor,  # (1 + ceil(rows / 128),) int32
        dx: Tensor | None,  # (m, h)
        loss: Tensor | None,  # (m,) fp32
        lse: Tensor | None,  # (m,) fp32; both or none
    ) -> None:
        """Gathers the live rows of a chunk and computes their row_shift; zeros dx, loss and lse of its ignored rows.

        kernels/linear_cross_entropy/gather.py has the details.
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
        args = GatherArgs(
            x.data_ptr(),
            w.data_ptr(),
            None if bias is None else bias.data_ptr(),
            target.data_ptr(),
            order.data_ptr(),
            num_live.data_ptr(),
            xc.data_ptr(),
            slot_target.data_ptr(),
            row_shift.data_ptr(),
            row_max_bits.data_ptr(),
            flags.data_ptr(),
            None if dx is None else dx.data_ptr(),
            None if loss is None else loss.data_ptr(),
            None if lse is None else lse.data_ptr(),
            stride,
            1.0 if softcap is None else softcap,
            start,
            slot_target.shape[0],
            v,
        )
        kernel(args, self.stream())

    def rows(
        self,
        stats: bool,
        grads: str,  # "none", "scale" or "coefs"
        *,
        slot_target: Tensor,  # (rows,)
        order: Tensor,  # (m,)
        num_live: Tensor,  # (1,)
        start: int,
        v: int,
        row_max_bits: Tensor,  # (rows,) int32
        lse: Tensor,  # (m,) fp32: written with stats, else read
        row_sum: Tensor,  # (rows,) fp32: as lse
        inv_divisor: Tensor,  # (1,) fp32
        # stats, with part_sum
        part_sum: Tensor | None = None,  # (rows, tiles) fp32
        part_wsum: Tensor | None = None,  # (rows, tiles) fp32, with label_smoothing: sums of class weight * a
        loss: Tensor | None = None,  # (m,) fp32
        target_logit: Tensor | None = None,  # (rows,) fp32; stats and "scale"
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
        """Statistics of the live rows (`stats`) and their gradients as `grads` says. Arguments not needed are not used.

        kernels/linear_cross_entropy/rows.py has the formulas.
        """
        # What the kernel has no use for is left out, as it was compiled without it.
        scale, smoothing, loss_kind, tiles, h, strides = grads == "scale", label_smoothing != 0, "one", 0, 0, (0, 0)
        if not stats:
            part_sum = part_wsum = loss = None
            if not scale:
                target_logit = None
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
        args = RowsArgs(
            slot_target.data_ptr(),
            order.data_ptr(),
            num_live.data_ptr(),
            address(part_sum),
            address(part_wsum),
            address(target_logit),
            row_max_bits.data_ptr(),
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
            1.0 if softcap is None else softcap,
            z_loss,
            label_smoothing,
            *strides,
            v_split,
            v,
            tiles,
            start,
            slot_target.shape[0],
        )
        kernel(args, self.stream())

    def sort(
        self,
        slot_target: Tensor,  # (rows,) int32
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
        places: Tensor | None = None,  # (v,) int32: NO_SLOT
        index: Tensor | None = None,  # (rows,) int64: `order_by_class`, where there are more than MOST_ROWS_COUNTED
    ) -> None:
        """Takes the target's element out of each live row of E, if it has that class, and lists the rows by class, then
        by position: sorted_grad = row_scale * that element (0 without), of row sorted_row of x; in E it is 0 from then.

        places[t] = the first place of class t; other classes' are left alone. slot_target is not of the
        launch right before this one.
        """
        key = (choose.epoch, "sort", e2 is not None, places is not None, index is not None)
        kernel = self._rows_kernels.get(key)
        if kernel is None:
            kernel = self._find(key, "lce_sort", LceSortProblem(*key[2:]))
        args = SortArgs(
            slot_target.data_ptr(),
            order.data_ptr(),
            num_live.data_ptr(),
            row_scale.data_ptr(),
            e.data_ptr(),
            address(e2),
            e.stride(0),
            0 if e2 is None else e2.stride(0),
            v_split,
            sorted_cls.data_ptr(),
            sorted_row.data_ptr(),
            sorted_grad.data_ptr(),
            address(places),
            address(index),
            e.shape[1] if e2 is None else v_split + e2.shape[1],
            start,
            slot_target.shape[0],
        )
        kernel(args, self.stream())

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
        args = TargetsArgs(
            x.data_ptr(), sorted_cls.data_ptr(), sorted_row.data_ptr(), sorted_grad.data_ptr(), num_live.data_ptr(),
            dw.data_ptr(), address(rest), stride, v0, v0 + n, start, sorted_cls.shape[0],
        )  # fmt: skip
        kernel(args, self.stream())

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
        args = BiasArgs(
            e.data_ptr(), address(row_scale), db.data_ptr(), num_live.data_ptr(), e.stride(0), start, e.shape[0], n
        )
        kernel(args, self.stream())

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
        args = ScatterArgs(acc.data_ptr(), None, order.data_ptr(), dx.data_ptr(), num_live.data_ptr(), start, rows)
        kernel(args, self.stream())

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
        key = (choose.epoch, out.dtype)
        kernel = self._scale_kernels.get(key)
        if kernel is None:
            self._forget_old(key[0])
            kernel = self.kernel_for("lce_scale", LceScaleProblem(dtype_name(out)), self.gpu)
            self._scale_kernels[key] = kernel
        launch, config = kernel
        num_ctas = config.num_ctas(max(n, n2) * out.itemsize, self.gpu.sm_count)
        second = out if out2 is None else out2
        args = ScaleArgs(out.data_ptr(), second.data_ptr(), factor.data_ptr(), n, n2, num_ctas)
        launch(args, self.stream())
