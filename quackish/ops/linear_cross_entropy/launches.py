"""Launches of linear cross entropy's kernels: torch tensors in, work on the current stream of their device.

A chunk is a range [start, start + rows) of slots, indices into `order`, which lists live rows first. Buffers of a chunk
are counted from 0: their row i is slot start + i. They may come from torch.empty: what a GEMM may read after the last
live row is written. Tensors are contiguous unless stated, and start on 16 bytes where they have h or v columns; h is a
multiple of 8. Vectors of rows, and single numbers, may be addresses instead (`Vector`). None of this is checked here.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from quackish.configs import choose
from quackish.configs.gemm import SOFTMAX_TILE_N, GemmProblem, splits_dw_tail
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
from quackish.ops.cuda import current_stream_of
from quackish.ops.kernel_for import Kernel, KernelFor, kernel_for
from quackish.ops.linear_cross_entropy.exp_logits import RowState, Vector, vector

Args = TypeVar("Args", bound=tuple)  # a NamedTuple


class LogitsCall(NamedTuple):
    """What `logits` and `recompute_flagged` take."""

    live_x: Tensor  # (rows, h)
    w: Tensor  # (v, h)
    bias: Tensor | None  # (v,)
    class_weight: Tensor | None  # (v,) fp32; with part_wsum
    row_shift: Vector  # (rows,) fp32
    slot_target: Vector  # (rows,) int32
    num_live: Vector  # (1,) int32
    start: int
    softcap: float  # 0: none
    exp_logits: Tensor | None  # (rows, v_split) bf16, or (rows, v) without exp_logits2; None: not stored
    exp_logits2: Tensor | None  # (rows, v - v_split)
    v_split: int  # with exp_logits2, a multiple of 64
    part_sum: Tensor  # (rows, num_tiles(v)) fp32
    part_wsum: Tensor | None  # as part_sum; with label smoothing
    target_logit: Vector  # (rows,) fp32
    row_max_bits: Vector  # (rows,) int32
    flags: Vector  # (1 + ceil(rows / 128),) int32

    @property
    def blocks(self) -> list[tuple[Tensor | None, int, int]]:
        """(exp_logits, first class, end of the classes)"""
        split, v = self.v_split, self.w.shape[0]
        if self.exp_logits2 is None:
            return [(self.exp_logits, 0, v)]
        return [(self.exp_logits, 0, split), (self.exp_logits2, split, v)]


class DlogitsCall(NamedTuple):
    """What `dlogits` takes."""

    live_x: Tensor  # (rows, h)
    w: Tensor  # (n, h): classes v0 and up
    bias: Tensor | None  # (n,)
    coefs: Tensor  # (rows, 4) fp32: row_shift, coef_softmax / sum, coef_target, coef_smooth
    slot_target: Vector  # (rows,) int32
    num_live: Vector  # (1,) int32
    start: int
    class_weight: Tensor | None  # (v,) fp32; with smoothing
    softcap: float  # 0: none
    smoothing: bool
    v0: int
    out: Tensor  # (rows, n) as live_x


class RowKernels:
    """The kernels around the GEMMs, of one device. A kernel is compiled, or loaded, by its first call.

    Their arguments are those of the kernels (configs/lce_args.py) with tensors in place of addresses, and `softcap` 0
    for none. See each kernel's module for what it does.
    """

    def __init__(self, device: torch.device, gpu: Gpu | None = None, kernel_for: KernelFor = kernel_for):
        self.device, self.gpu, self.kernel_for = device, gpu or gpu_of(device.index), kernel_for
        self.stream = current_stream_of(device)
        # the epoch of the choices, and the kernels chosen in it
        self._kernels: tuple[int, dict[tuple, Kernel]] = choose.epoch, {}

    def _kernel(self, name: str, problem: Callable[..., Any], *fields: Any) -> Kernel:
        """The kernel `name` for `problem(*fields)`; dtypes are torch's, their names go into the problem."""
        epoch, kernels = self._kernels
        if epoch != choose.epoch:
            _, kernels = self._kernels = choose.epoch, {}
        key = problem, *fields
        kernel = kernels.get(key)
        if kernel is None:  # if the epoch changes while one is chosen, these kernels are dropped
            made = problem(*(str(f).removeprefix("torch.") if isinstance(f, torch.dtype) else f for f in fields))
            kernel = kernels[key] = self.kernel_for(name, made, self.gpu)
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
        kernel = self._kernel("lce_compact", LceCompactProblem, target.dtype, _dtype(class_weight), divisor)
        args = CompactArgs(
            target, class_weight, items_at, state.order, state.inv_divisor, state.tickets, state.num_live, items,
            ignore_index, v, target.shape[0],
        )  # fmt: skip
        kernel.launch(addresses(args), self.stream())

    def gather(self, a: GatherArgs) -> None:
        x = a.x
        kernel = self._kernel(
            "lce_gather", LceGatherProblem, x.shape[1], x.dtype, a.target.dtype, _dtype(a.bias), _dtype(a.dx),
            a.softcap > 0, a.loss is not None, _is_aligned(x),
        )  # fmt: skip
        kernel.launch(addresses(a), self.stream())

    def rows(self, a: RowsArgs) -> None:
        """With part_sum the statistics, and the gradients in coefs, or in exp_logits, scaled_x and row_scale."""
        scale, grad_loss = a.exp_logits is not None, a.grad_loss
        h, dtype = (0, None) if a.live_x is None else (a.live_x.shape[1], a.live_x.dtype)
        kernel = self._kernel(
            "lce_rows", LceRowsProblem, a.part_sum is not None,
            "scale" if scale else "none" if a.coefs is None else "coefs", h, dtype, _dtype(a.class_weight),
            a.label_smoothing > 0, scale and a.softcap > 0,
            "one" if grad_loss is None else "rows" if grad_loss.dim() else "scalar", a.grad_lse is not None,
            a.exp_logits2 is not None, a.first_slot_of_class is not None,
        )  # fmt: skip
        kernel.launch(addresses(a), self.stream())

    def sort(self, a: SortArgs) -> None:
        """Not to be launched right after the launch that writes slot_target."""
        options = a.exp_logits2 is not None, a.first_slot_of_class is not None, a.index is not None
        self._kernel("lce_sort", LceSortProblem, *options).launch(addresses(a), self.stream())

    def targets(self, a: TargetsArgs) -> None:
        """The launch right before this one may write dw and rounding_residual, but no other argument."""
        fields = a.x.shape[1], a.x.dtype, a.dw.dtype, _is_aligned(a.x), a.rounding_residual is not None
        self._kernel("lce_targets", LceTargetsProblem, *fields).launch(addresses(a), self.stream())

    def bias_sum(
        self,
        e: Tensor,  # (rows, >= n) bf16 or fp16: exp_logits or dlogits, row stride a multiple of 8
        row_scale: Vector | None,  # (rows,) fp32; None is 1
        num_live: Vector,  # (1,) int32
        start: int,
        db: Tensor,  # (n,) fp32
        accumulate: bool,
    ) -> None:
        """db = (or += with `accumulate`) the sum over the live rows i of the chunk of row_scale[i] * e[i, :n]."""
        n = db.shape[0]
        kernel = self._kernel("lce_bias", LceBiasProblem, e.dtype, row_scale is not None, accumulate, n >= WIDE_BIAS)
        args = BiasArgs(e, row_scale, db, num_live, e.stride(0), start, e.shape[0], n)
        kernel.launch(addresses(args), self.stream())

    def scatter(
        self,
        acc: Tensor,  # (rows, h) fp32
        row_scale: Vector | None,  # (rows,) fp32; None is 1
        order: Vector,  # (m,) int32
        num_live: Vector,  # (1,) int32
        start: int,
        dx: Tensor,  # (m, h) bf16, fp16 or fp32
    ) -> None:
        """dx[order[start + i]] = row_scale[i] * acc[i] for the live rows of the chunk."""
        rows, h = acc.shape
        kernel = self._kernel("lce_scatter", LceScatterProblem, h, dx.dtype, row_scale is not None)
        args = ScatterArgs(acc, row_scale, order, dx, num_live, start, rows)
        kernel.launch(addresses(args), self.stream())

    def scale(
        self,
        out: Tensor,  # bf16, fp16 or fp32, any shape
        factor: Tensor,  # one fp32 number
        out2: Tensor | None = None,  # as out
    ) -> None:
        """out *= factor, and out2, in place; leaves at once if the factor is 1."""
        n, n2 = out.numel(), 0 if out2 is None else out2.numel()
        if n + n2 == 0:
            return
        kernel = self._kernel("lce_scale", LceScaleProblem, out.dtype)
        num_ctas = kernel.config.num_ctas(max(n, n2) * out.itemsize, self.gpu.sm_count)
        args = ScaleArgs(out, out if out2 is None else out2, factor, n, n2, num_ctas)
        kernel.launch(addresses(args), self.stream())


# make(GemmArgs, (a, ...)) is GemmArgs(a, ...), which takes 0.2 us longer.
make = tuple.__new__
_NUMBERS = {int, float, type(None)}  # isinstance alone takes 76 ns for one, and a launch has some 20


def addresses(args: Args) -> Args:
    """With the addresses of tensors in their place."""
    return make(type(args), [a if type(a) in _NUMBERS or not isinstance(a, Tensor) else a.data_ptr() for a in args])


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

    def logits(self, a: LogitsCall) -> None:
        """exp_logits = exp(logits - row_shift) * d; their sums without d per row and tile; the targets' logits.

        A logit far above row_shift raises row_max_bits and flags its tile; `recompute_flagged` must follow.
        """
        self._softmax(a, recompute=False)

    def recompute_flagged(self, a: LogitsCall) -> None:
        """Recomputes the tiles that `logits` flagged, shifted by row_max_bits. Returns at once if there are none."""
        self._softmax(a, recompute=True)

    def _softmax(self, a: LogitsCall, recompute: bool) -> None:
        out, out2, class_weight = a.exp_logits, a.exp_logits2, a.class_weight
        kernel = self._kernel(
            "lce_gemm", _softmax_problem, a.live_x.dtype, _dtype(out), _dtype(a.bias), a.softcap > 0,
            a.part_wsum is not None, class_weight is not None, recompute, out2 is not None,
        )  # fmt: skip
        epilogue = make(SoftmaxArgs, (
            a.bias, class_weight, None if recompute else a.row_shift, a.slot_target, a.row_max_bits, a.flags,
            a.part_sum, a.target_logit, a.part_wsum, a.softcap, a.part_sum.shape[1],
        ))  # fmt: skip
        self._multiply(
            kernel, (a.live_x, a.w, out), epilogue, (a.live_x.shape[0], *a.w.shape), a.num_live, a.start, out2,
            a.v_split, wave_sync=not recompute,
        )  # fmt: skip

    def dlogits(self, a: DlogitsCall) -> None:
        """The gradient of the logits: see kernels/common/epilogue_dlogits.py."""
        kernel = self._kernel(
            "lce_gemm", _dlogits_problem, a.live_x.dtype, a.out.dtype, _dtype(a.bias), a.softcap > 0, a.smoothing,
            a.class_weight is not None,
        )  # fmt: skip
        epilogue = make(DlogitsArgs, (a.bias, a.class_weight, a.coefs, a.slot_target, a.softcap, a.v0))
        sizes = a.live_x.shape[0], *a.w.shape
        self._multiply(kernel, (a.live_x, a.w, a.out), epilogue, sizes, a.num_live, a.start)

    def dx(
        self,
        e: Tensor,  # (rows, v_split), or (rows, n) without e2: exp_logits or dlogits
        e2: Tensor | None,  # (rows, n - v_split)
        v_split: int,  # with e2; a multiple of the GEMM's step along k
        w: Tensor,  # (n, h)
        row_scale: Vector | None,  # (rows,) fp32; with order
        order: Vector | None,  # (m,) int32
        num_live: Vector,  # (1,) int32
        start: int,
        out: Tensor,  # (m, h) with order, else (rows, h) fp32; contiguous
        accumulate: bool,  # without order
        tickets: Vector | None = None,  # (NUM_TICKETS,) int32, 0 before and after; with order
    ) -> None:
        """Row i of e @ w, times row_scale, to row order[start + i] of out; without order to row i, or added to it.

        Without order, rows up to the end of a tile with live rows are written too. With tickets, tiles of a
        partly filled last wave are split along the classes, which takes 17 MB of scratch, or 69 MB for deep tiles.
        """
        scattered = order is not None
        kernel = self._kernel(
            "lce_gemm", _dx_problem, e.dtype, out.dtype, scattered, e2 is not None, accumulate, tickets is not None
        )
        epilogue = make(RowsOutArgs, (row_scale, order)) if scattered else None
        (n, h), rows = w.shape, e.shape[0]
        self._multiply(kernel, (e, w, out), epilogue, (rows, h, n), num_live, start, e2, v_split, tickets)

    def dw(
        self,
        e: Tensor,  # (rows, n): exp_logits or dlogits
        scaled_x: Tensor,  # (rows, h)
        num_live: Vector,  # (1,) int32
        start: int,
        out: Tensor,  # (n, h) contiguous; fp32 to accumulate
        accumulate: bool,
        tickets: Vector | None = None,  # as in `dx`, along the rows; used where there are few tiles
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
        kernel = self._kernel(
            "lce_gemm", _dw_problem, e.dtype, out.dtype, accumulate, tickets is not None, factor is not None,
            residual is not None,
        )  # fmt: skip
        epilogue = None if factor is None else make(ScaledArgs, (factor,))
        if residual is not None:
            epilogue = make(ResidualArgs, (first_slots, residual))
        self._multiply(kernel, (e, scaled_x, out), epilogue, (n, h, rows), num_live, start, tickets=tickets)

    def _multiply(
        self,
        kernel: Kernel,
        operands: tuple[Tensor, Tensor, Tensor | None],  # A, B, D
        epilogue: tuple | None,
        sizes: tuple[int, int, int],  # m, n, k
        num_live: Vector,
        start: int,
        second: Tensor | None = None,
        split: int = 0,  # with second
        tickets: Vector | None = None,
        wave_sync: bool = True,
    ) -> None:
        """Launches a GEMM: see GemmArgs."""
        (a, b, d), (m, n, k), config, stream = operands, sizes, kernel.config, self.stream()
        clusters = config.max_clusters(self.gpu.sm_count)
        tail = ticket = None
        if tickets is not None:
            splits, floats = config.tail_room(m, n, k, clusters)
            partials = vector(a, floats, torch.float32)
            tail = addresses(make(TailArgs, (partials, tickets, splits)))
        if wave_sync:
            ticket, _, _kept = workspace.take(self.device.index, stream, 0) if self.device.type == "cuda" else (0, 0, 0)
        if epilogue is not None:
            epilogue = addresses(epilogue)
        # t.stride()[0] is t.stride(0), which takes twice as long
        args = make(GemmArgs, (
            a, second, b, d, epilogue, tail, ticket, num_live, m, n, k, 0 if second is None else split, start,
            a.stride()[0], 0 if second is None else second.stride()[0], b.stride()[0],
            0 if d is None else d.stride()[0], clusters,
        ))  # fmt: skip
        kernel.launch(addresses(args), stream)


# The problems of the GEMMs, by the fields that differ from launch to launch.


def _softmax_problem(dtype, out_dtype, bias_dtype, softcap, smoothing, weighted, recompute_flagged, d_in_two):
    return GemmProblem(
        "softmax", dtype, out_dtype, bias_dtype=bias_dtype, softcap=softcap, smoothing=smoothing, weighted=weighted,
        recompute_flagged=recompute_flagged, d_in_two=d_in_two,
    )  # fmt: skip


def _dlogits_problem(dtype, out_dtype, bias_dtype, softcap, smoothing, weighted):
    return GemmProblem(
        "dlogits", dtype, out_dtype, bias_dtype=bias_dtype, softcap=softcap, smoothing=smoothing, weighted=weighted
    )


def _dx_problem(dtype, out_dtype, scattered, a_in_two, accumulate, split_k_tail):
    return GemmProblem(
        "rows" if scattered else "store", dtype, out_dtype, b_major="n", a_in_two=a_in_two, accumulate=accumulate,
        split_k_tail=split_k_tail,
    )  # fmt: skip


def _dw_problem(dtype, out_dtype, accumulate, split_k_tail, scaled, rounding_residual):
    return GemmProblem(
        "store", dtype, out_dtype, a_major="m", b_major="n", live="k", accumulate=accumulate, split_k_tail=split_k_tail,
        scaled=scaled, rounding_residual=rounding_residual,
    )  # fmt: skip
