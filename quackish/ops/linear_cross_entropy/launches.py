"""Launches of linear cross entropy's kernels: torch tensors in, work on the current stream of their device.

A chunk is a range [start, start + rows) of slots, indices into `order`, which lists live rows first. Buffers of a chunk
are counted from 0: their row i is slot start + i. They may come from torch.empty: what a GEMM may read after the last
live row is written. Tensors are contiguous unless stated, and start on 16 bytes where they have h or v columns; h is a
multiple of 8. None of this is checked here.
"""

from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from quackish.configs import choose
from quackish.configs.gemm import SOFTMAX_TILE_N, GemmConfig, GemmProblem, splits_dw_tail
from quackish.configs.lce_args import (
    BiasArgs,
    CompactArgs,
    DlogitsArgs,
    GatherArgs,
    GemmArgs,
    ResidualArgs,
    RowsArgs,
    RowsOutArgs,
    ScaleArgs,
    ScaledArgs,
    ScatterArgs,
    SoftmaxArgs,
    SortArgs,
    TailArgs,
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
from quackish.gpu import Gpu, gpu_of
from quackish.ops import workspace
from quackish.ops.cuda import address, current_stream_of, dtype_name
from quackish.ops.kernel_for import Kernel, KernelFor, kernel_for
from quackish.ops.linear_cross_entropy.exp_logits import RowState

Args = TypeVar("Args", bound=tuple)  # a NamedTuple


class LogitsArgs(NamedTuple):
    """What `logits` and `recompute_flagged` take."""

    live_x: Tensor  # (rows, h)
    w: Tensor  # (v, h)
    bias: Tensor | None  # (v,)
    class_weight: Tensor | None  # (v,) fp32; with part_wsum
    row_shift: Tensor  # (rows,) fp32
    slot_target: Tensor  # (rows,) int32
    num_live: Tensor  # (1,) int32
    start: int
    softcap: float  # 0: none
    exp_logits: Tensor | None  # (rows, v_split) bf16, or (rows, v) without exp_logits2; None: not stored
    exp_logits2: Tensor | None  # (rows, v - v_split)
    v_split: int  # with exp_logits2, a multiple of 64
    part_sum: Tensor  # (rows, num_tiles(v)) fp32
    part_wsum: Tensor | None  # as part_sum; with label smoothing
    target_logit: Tensor  # (rows,) fp32
    row_max_bits: Tensor  # (rows,) int32
    flags: Tensor  # (1 + ceil(rows / 128),) int32


class RowKernels:
    """The kernels around the GEMMs, of one device. A kernel is compiled, or loaded, by its first call.

    Their arguments are those of the kernels (configs/lce_args.py) with tensors in place of addresses, and `softcap` 0
    for none. See each kernel's module for what it does.
    """

    def __init__(self, device: torch.device, gpu: Gpu | None = None, kernel_for: KernelFor = kernel_for):
        self.device, self.gpu, self.kernel_for = device, gpu or gpu_of(device.index), kernel_for
        self.stream = current_stream_of(device)
        # the epoch of the choices, and the kernels chosen in it; keys are flat tuples: cheap to look up
        self._kernels: tuple[int, dict[tuple, Kernel]] = choose.epoch, {}

    def _find(self, key: tuple) -> Kernel | None:
        epoch, kernels = self._kernels
        if epoch != choose.epoch:
            self._kernels = choose.epoch, {}
            return None
        return kernels.get(key)

    def _add(self, key: tuple, name: str, problem: Any) -> Kernel:
        _, kernels = self._kernels  # read before choosing: a change of epoch meanwhile drops them
        kernel = kernels[key] = self.kernel_for(name, problem, self.gpu)
        return kernel

    def compact(
        self,
        target: Tensor,  # (m,) int32 or int64
        class_weight: Tensor | None,  # (v,) fp32, bf16 or fp16
        num_items: float | Tensor | None,
        ignore_index: int,
        v: int,
        mean: bool,
        state: RowState,  # order, num_live, inv_divisor and tickets are written
    ) -> None:
        """Lists the live rows (target != ignore_index) first in `order`, each part ascending, and counts them.

        inv_divisor: with `mean` 1 / num_items, or without that 1 / (sum of the class weights of live rows whose target
        is a class); 1 if no row has a class, and without `mean`.
        """
        divisor, items, items_at = "weights" if mean else "one", 1.0, None
        if mean and isinstance(num_items, Tensor) and num_items.is_cuda:
            divisor, items_at = "tensor", num_items.to(torch.float32)
        elif mean and num_items is not None:
            divisor, items = "float", float(num_items)
        if divisor != "weights":
            class_weight = None
        key = "compact", target.dtype, _dtype(class_weight), divisor
        kernel = self._find(key) or self._add(
            key, "lce_compact", LceCompactProblem(dtype_name(target), dtype_name(class_weight), divisor)
        )
        args = CompactArgs(
            target, class_weight, items_at, state.order, state.inv_divisor, state.tickets, state.num_live, items,
            ignore_index, v, target.shape[0],
        )  # fmt: skip
        kernel.launch(addresses(args), self.stream())

    def gather(self, a: GatherArgs) -> None:
        h, aligned = a.x.shape[1], _is_aligned(a.x)
        key = (
            "gather", h, a.x.dtype, a.target.dtype, _dtype(a.bias), _dtype(a.dx), a.softcap > 0, a.loss is None, aligned
        )  # fmt: skip
        kernel = self._find(key)
        if kernel is None:
            dtypes = map(dtype_name, (a.x, a.target, a.bias, a.dx))
            problem = LceGatherProblem(h, *dtypes, a.softcap > 0, a.loss is not None, aligned)
            kernel = self._add(key, "lce_gather", problem)
        kernel.launch(addresses(a), self.stream())

    def rows(self, a: RowsArgs) -> None:
        """With part_sum the statistics, and the gradients in coefs, or in exp_logits, scaled_x and row_scale."""
        scale, grad_loss = a.exp_logits is not None, a.grad_loss
        h, dtype = (0, None) if a.live_x is None else (a.live_x.shape[1], a.live_x.dtype)
        key = (
            "rows",
            a.part_sum is not None,
            "scale" if scale else "none" if a.coefs is None else "coefs",
            h,
            dtype,
            _dtype(a.class_weight),
            a.label_smoothing > 0,
            scale and a.softcap > 0,
            "one" if grad_loss is None else "rows" if grad_loss.dim() else "scalar",
            a.grad_lse is not None,
            a.exp_logits2 is not None,
            a.first_slot_of_class is not None,
        )
        kernel = self._find(key)
        if kernel is None:
            problem = LceRowsProblem(*key[1:4], dtype_name(a.live_x), dtype_name(a.class_weight), *key[6:])
            kernel = self._add(key, "lce_rows", problem)
        kernel.launch(addresses(a), self.stream())

    def sort(self, a: SortArgs) -> None:
        """Not to be launched right after the launch that writes slot_target."""
        key = "sort", a.exp_logits2 is not None, a.first_slot_of_class is not None, a.index is not None
        kernel = self._find(key) or self._add(key, "lce_sort", LceSortProblem(*key[1:]))
        kernel.launch(addresses(a), self.stream())

    def targets(self, a: TargetsArgs) -> None:
        """The launch right before this one may write dw and rounding_residual, but no other argument."""
        h, aligned, residual = a.x.shape[1], _is_aligned(a.x), a.rounding_residual is not None
        key = "targets", h, a.x.dtype, a.dw.dtype, aligned, residual
        kernel = self._find(key) or self._add(
            key, "lce_targets", LceTargetsProblem(h, dtype_name(a.x), dtype_name(a.dw), aligned, residual)
        )
        kernel.launch(addresses(a), self.stream())

    def bias_sum(
        self,
        e: Tensor,  # (rows, >= n) bf16 or fp16: exp_logits or dlogits, row stride a multiple of 8
        row_scale: Tensor | None,  # (rows,) fp32; None is 1
        num_live: Tensor,  # (1,) int32
        start: int,
        db: Tensor,  # (n,) fp32
        accumulate: bool,
    ) -> None:
        """db = (or += with `accumulate`) the sum over the live rows i of the chunk of row_scale[i] * e[i, :n]."""
        n = db.shape[0]
        key = "bias", e.dtype, row_scale is not None, accumulate, n >= WIDE_BIAS
        kernel = self._find(key) or self._add(key, "lce_bias", LceBiasProblem(dtype_name(e), *key[2:]))
        args = BiasArgs(e, row_scale, db, num_live, e.stride(0), start, e.shape[0], n)
        kernel.launch(addresses(args), self.stream())

    def scatter(
        self,
        acc: Tensor,  # (rows, h) fp32
        row_scale: Tensor | None,  # (rows,) fp32; None is 1
        order: Tensor,  # (m,) int32
        num_live: Tensor,  # (1,) int32
        start: int,
        dx: Tensor,  # (m, h) bf16, fp16 or fp32
    ) -> None:
        """dx[order[start + i]] = row_scale[i] * acc[i] for the live rows of the chunk."""
        rows, h = acc.shape
        key = "scatter", h, dx.dtype, row_scale is not None
        kernel = self._find(key) or self._add(key, "lce_scatter", LceScatterProblem(h, dtype_name(dx), key[3]))
        args = ScatterArgs(acc, row_scale, order, dx, num_live, start, rows)
        kernel.launch(addresses(args), self.stream())

    def scale(
        self,
        out: Tensor,  # bf16, fp16 or fp32, any shape
        factor: Tensor,  # (1,) fp32
        out2: Tensor | None = None,  # as out
    ) -> None:
        """out *= factor, and out2, in place; leaves at once if the factor is 1."""
        n, n2 = out.numel(), 0 if out2 is None else out2.numel()
        if n + n2 == 0:
            return
        key = "scale", out.dtype
        kernel = self._find(key) or self._add(key, "lce_scale", LceScaleProblem(dtype_name(out)))
        num_ctas = kernel.config.num_ctas(max(n, n2) * out.itemsize, self.gpu.sm_count)
        args = ScaleArgs(out, out if out2 is None else out2, factor, n, n2, num_ctas)
        kernel.launch(addresses(args), self.stream())


# make(GemmArgs, (a, ...)) is GemmArgs(a, ...), which takes 0.2 us longer.
make = tuple.__new__


def addresses(args: Args) -> Args:
    """With the addresses of tensors in their place."""
    return make(type(args), [a.data_ptr() if isinstance(a, Tensor) else a for a in args])


def _dtype(t: Tensor | None) -> torch.dtype | None:
    return None if t is None else t.dtype


def _is_aligned(x: Tensor) -> bool:
    """Whether each row starts on 16 bytes."""
    return not (x.data_ptr() | x.stride(0) * 2) & 15


class LceKernels(RowKernels):
    """All kernels of a Hopper GPU.

    The GEMMs' operands are bf16 or fp16 with unit stride along their columns, rows a multiple of 8 elements apart. All
    sums run over live rows only, chunk rows [0, num_live - start), which the device counts.
    """

    keeps_residual = True  # `dw` can keep what its rounding drops

    def num_tiles(self, v: int) -> int:
        """How many partial sums a row of `part_sum` has."""
        return -(-v // SOFTMAX_TILE_N)

    def logits(self, a: LogitsArgs) -> None:
        """exp_logits = exp(logits - row_shift) * d; their sums without d per row and tile; the targets' logits.

        A logit far above row_shift raises row_max_bits and flags its tile; `recompute_flagged` must follow.
        """
        self._softmax(a, recompute=False)

    def recompute_flagged(self, a: LogitsArgs) -> None:
        """Recomputes the tiles that `logits` flagged, shifted by row_max_bits. Returns at once if there are none."""
        self._softmax(a, recompute=True)

    def _softmax(self, a: LogitsArgs, recompute: bool) -> None:
        (rows, h), n, split = a.live_x.shape, a.w.shape[0], a.exp_logits2 is not None
        options = a.softcap > 0, a.part_wsum is not None, a.class_weight is not None, recompute, split
        key = ("softmax", a.live_x.dtype, a.exp_logits is None, _dtype(a.bias), *options)
        kernel = self._find(key)
        if kernel is None:
            softcap, smoothing, weighted, _, _ = options
            kernel = self._add_gemm(
                key, epilogue="softmax", dtype=dtype_name(a.live_x), out_dtype=dtype_name(a.exp_logits),
                bias_dtype=dtype_name(a.bias), softcap=softcap, smoothing=smoothing, weighted=weighted,
                recompute_flagged=recompute, d_in_two=split,
            )  # fmt: skip
        epilogue = make(SoftmaxArgs, (
            address(a.bias), address(a.class_weight), None if recompute else a.row_shift.data_ptr(),
            a.slot_target.data_ptr(), a.row_max_bits.data_ptr(), a.flags.data_ptr(), a.part_sum.data_ptr(),
            a.target_logit.data_ptr(), address(a.part_wsum), a.softcap, a.part_sum.shape[1],
        ))  # fmt: skip
        out, out2 = a.exp_logits, a.exp_logits2
        stream, ticket, _kept = (self.stream(), None, None) if recompute else self._stream_and_ticket()
        args = make(GemmArgs, (
            a.live_x.data_ptr(), address(out2), a.w.data_ptr(), address(out), epilogue, None, ticket,
            a.num_live.data_ptr(), rows, n, h, a.v_split if split else 0, a.start, a.live_x.stride(0),
            out2.stride(0) if split else 0, a.w.stride(0), 0 if out is None else out.stride(0), self._clusters(kernel),
        ))  # fmt: skip
        kernel.launch(args, stream)

    def dlogits(
        self,
        live_x: Tensor,  # (rows, h)
        w: Tensor,  # (n, h): classes v0 and up
        bias: Tensor | None,  # (n,)
        coefs: Tensor,  # (rows, 4) fp32: row_shift, coef_softmax / sum, coef_target, coef_smooth
        slot_target: Tensor,  # (rows,) int32
        num_live: Tensor,  # (1,) int32
        start: int,
        class_weight: Tensor | None,  # (v,) fp32; with smoothing
        softcap: float,  # 0: none
        smoothing: bool,
        v0: int,
        out: Tensor,  # (rows, n) as live_x
    ) -> None:
        """The gradient of the logits: see kernels/common/epilogue_dlogits.py."""
        (rows, h), n = live_x.shape, w.shape[0]
        key = (
            "dlogits", live_x.dtype, out.dtype, _dtype(bias), softcap > 0, smoothing, class_weight is not None
        )  # fmt: skip
        kernel = self._find(key) or self._add_gemm(
            key, epilogue="dlogits", dtype=dtype_name(live_x), out_dtype=dtype_name(out), bias_dtype=dtype_name(bias),
            softcap=softcap > 0, smoothing=smoothing, weighted=class_weight is not None,
        )  # fmt: skip
        epilogue = make(
            DlogitsArgs,
            (address(bias), address(class_weight), coefs.data_ptr(), slot_target.data_ptr(), softcap, v0),
        )
        stream, ticket, _kept = self._stream_and_ticket()
        args = make(GemmArgs, (
            live_x.data_ptr(), None, w.data_ptr(), out.data_ptr(), epilogue, None, ticket, num_live.data_ptr(), rows, n,
            h, 0, start, live_x.stride(0), 0, w.stride(0), out.stride(0), self._clusters(kernel),
        ))  # fmt: skip
        kernel.launch(args, stream)

    def dx(
        self,
        e: Tensor,  # (rows, v_split), or (rows, n) without e2: exp_logits or dlogits
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
        key = "dx", e.dtype, out.dtype, scattered, e2 is None, accumulate, tickets is None
        kernel = self._find(key) or self._add_gemm(
            key, epilogue="rows" if scattered else "store", dtype=dtype_name(e), out_dtype=dtype_name(out), b_major="n",
            a_in_two=e2 is not None, accumulate=accumulate, split_k_tail=tickets is not None,
        )  # fmt: skip
        clusters = self._clusters(kernel)
        tail, _scratch = _tail(tickets, kernel.config, rows, h, n, clusters)
        epilogue = make(RowsOutArgs, (row_scale.data_ptr(), order.data_ptr())) if scattered else None
        split, stride2 = (0, 0) if e2 is None else (v_split, e2.stride(0))
        stream, ticket, _kept = self._stream_and_ticket()
        args = make(GemmArgs, (
            e.data_ptr(), address(e2), w.data_ptr(), out.data_ptr(), epilogue, tail, ticket, num_live.data_ptr(), rows,
            h, n, split, start, e.stride(0), stride2, w.stride(0), out.stride(0), clusters,
        ))  # fmt: skip
        kernel.launch(args, stream)

    def dw(
        self,
        e: Tensor,  # (rows, n): exp_logits or dlogits
        scaled_x: Tensor,  # (rows, h)
        num_live: Tensor,  # (1,) int32
        start: int,
        out: Tensor,  # (n, h) contiguous; fp32 to accumulate
        accumulate: bool,
        tickets: Tensor | None = None,  # as in `dx`, along the rows; used where there are few tiles
        first_slots: Tensor | None = None,  # (n,) int32; NO_SLOT for none
        residual: Tensor | None = None,  # (any, h) int16; both or none, for a bf16 out that is not added to
        factor: Tensor | None = None,  # (1,) fp32; None is 1; not with residual
    ) -> None:
        """out = (or += with `accumulate`) factor * e.T @ scaled_x.

        residual[first_slots[i]]: the bits that rounding drops from row i, if it has a slot.
        """
        (rows, h), n = scaled_x.shape, e.shape[1]
        if tickets is not None and not splits_dw_tail(n, h, self.gpu.sm_count):
            tickets = None
        key = "dw", e.dtype, out.dtype, accumulate, tickets is None, residual is None, factor is None
        kernel = self._find(key) or self._add_gemm(
            key, epilogue="store", dtype=dtype_name(e), out_dtype=dtype_name(out), a_major="m", b_major="n", live="k",
            accumulate=accumulate, split_k_tail=tickets is not None, scaled=factor is not None,
            rounding_residual=residual is not None,
        )  # fmt: skip
        clusters = self._clusters(kernel)
        tail, _scratch = _tail(tickets, kernel.config, n, h, rows, clusters)
        epilogue = None if factor is None else make(ScaledArgs, (factor.data_ptr(),))
        if residual is not None:
            epilogue = make(ResidualArgs, (first_slots.data_ptr(), residual.data_ptr()))
        stream, ticket, _kept = self._stream_and_ticket()
        args = make(GemmArgs, (
            e.data_ptr(), None, scaled_x.data_ptr(), out.data_ptr(), epilogue, tail, ticket, num_live.data_ptr(), n, h,
            rows, 0, start, e.stride(0), 0, scaled_x.stride(0), out.stride(0), clusters,
        ))  # fmt: skip
        kernel.launch(args, stream)

    def _add_gemm(self, key: tuple, **fields: Any) -> Kernel:
        return self._add(key, "lce_gemm", GemmProblem(**fields))

    def _clusters(self, kernel: Kernel) -> int:
        return kernel.config.max_clusters(self.gpu.sm_count)

    def _stream_and_ticket(self) -> tuple[int, int, Any]:
        """The current stream, the ticket of a launch on it, and an object to keep alive until the launch."""
        stream = self.stream()
        if self.device.type != "cuda":
            return stream, 0, None
        ticket, _, kept = workspace.take(self.device.index, stream, 0)
        return stream, ticket, kept


def _tail(
    tickets: Tensor | None, config: GemmConfig, m: int, n: int, k: int, clusters: int
) -> tuple[TailArgs | None, Tensor | None]:
    """The arguments of split-K, and the scratch, to keep alive until the launch."""
    if tickets is None:
        return None, None
    splits, floats = config.tail_room(m, n, k, clusters)
    partials = tickets.new_empty(floats, dtype=torch.float32)
    return make(TailArgs, (partials.data_ptr(), tickets.data_ptr(), splits)), partials
