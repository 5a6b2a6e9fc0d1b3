"""Launches of linear cross entropy's kernels on the current stream of their device; schedules.py explains the terms.

LceKernels finds and launches kernels. The functions below it are the steps of schedules, each one or a few launches.

A chunk is a range [start, start + rows) of slots, which are indices into `order`, where live rows come first. Row i of
a chunk's buffer is slot start + i. Buffers may come from torch.empty: the kernels write all rows that a GEMM reads.
Matrices are passed as tensors, vectors of rows and single numbers as addresses. Tensors are contiguous unless stated.
Those with h or v columns are aligned to 16 bytes; h is a multiple of 8. None of this is checked here.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quackish.device import choose
from quackish.device.arguments import by_name
from quackish.device.cuda import address, dtype_of
from quackish.device.kernel_device import KernelDevice
from quackish.device.kernel_for import CompiledKernel
from quackish.device.modes import check_memory
from quackish.kernels.gemm.problem import NUM_TICKETS, GemmArgs, ScaledArgs, TailArgs
from quackish.kernels.gemm.sm90_config import splits_tails
from quackish.ops.linear_cross_entropy import launch_problems as problems
from quackish.ops.linear_cross_entropy.calls import (
    F32,
    I32,
    NO_GRADS,
    NOT_STORED,
    Chunk,
    ExpLogits,
    Grads,
    GradsNeeded,
    KernelCall,
    ProblemFields,
    RowState,
    row_slice,
)
from quackish.ops.linear_cross_entropy.gemm_problems import (
    SOFTMAX_TILE_N,
    DlogitsArgs,
    ResidualArgs,
    RowsOutArgs,
    SoftmaxArgs,
)
from quackish.ops.linear_cross_entropy.layout import Layout
from quackish.ops.linear_cross_entropy.row_problems import (
    MOST_ROWS_COUNTED,
    WIDE_BIAS,
    BiasArgs,
    CompactArgs,
    GatherArgs,
    GradsArgs,
    LossArgs,
    RowsArgs,
    SortArgs,
    StatsArgs,
    TargetsArgs,
)
from quackish.ops.shared.launches import launches_of
from quackish.ops.shared.problems import splits_dw_tail

Loop = Callable[[Sequence[Any]], Iterator[Any]]

_gemm_args, _tail_args, _residual_args = by_name(GemmArgs), by_name(TailArgs), by_name(ResidualArgs)
_softmax_args, _dlogits_args, _rows_out_args = by_name(SoftmaxArgs), by_name(DlogitsArgs), by_name(RowsOutArgs)
_compact_args, _gather_args, _bias_args = by_name(CompactArgs), by_name(GatherArgs), by_name(BiasArgs)
_rows_args, _loss_args, _stats_args, _grads_args = map(by_name, (RowsArgs, LossArgs, StatsArgs, GradsArgs))
_sort_args, _targets_args = by_name(SortArgs), by_name(TargetsArgs)


class _Gemm(NamedTuple):
    """A kernel, and arguments that depend on sizes only."""

    launch: Callable[..., None]
    m: int
    n: int
    k: int
    max_clusters: int
    max_splits: int = 0
    floats: int = 0  # of scratch, with split_k_tail


class LceKernels:
    """The kernels on one device. The first call of a kernel compiles or loads it.

    Arguments are those of the kernels (row_problems.py, gemm_problems.py); `softcap` 0 means none. Each kernel's
    module documents it.

    GEMM operands are bf16 or fp16, with unit stride along columns and row strides that are multiples of 8 elements.
    Sums include live rows only: chunk rows [0, num_live - start), where num_live is on the device.
    """

    def __init__(self, device: KernelDevice, loop: Loop = iter):
        """loop: the iterations of a loop that are run. A dry run needs only some."""
        self.device, self.gpu, self.stream, self.loop = device, device.gpu, device.stream, loop
        self.scale = launches_of(device).scale
        self._kernel = functools.lru_cache(maxsize=1024)(self._find_kernel)
        self._gemm = functools.lru_cache(maxsize=1024)(self._find_gemm)

    def _find_kernel(self, epoch: int, make: Callable[..., Any], *values: Any) -> CompiledKernel:
        """The kernel for the problem make(*values), see launch_problems.py. epoch: `choose.epoch`."""
        return self.device.kernel_for(make(*values), self.gpu)

    def _find_gemm(
        self, epoch: int, m: int, n: int, k: int, split_tail: bool, make: Callable[..., Any], *values: Any
    ) -> _Gemm:
        """The kernel for the problem make(*values), on m, n and k of GemmArgs. split_tail: its `split_k_tail`."""
        launch, config = self._kernel(epoch, make, *values)
        clusters = config.max_clusters(self.gpu.sm_count)
        return _Gemm(launch, m, n, k, clusters, *(config.tail_room(m, n, k, clusters) if split_tail else ()))

    def launch(self, args: tuple, make: Callable[..., Any], *values: Any) -> None:
        """Launches the kernel for the problem make(*values): see `_find_kernel`."""
        self._kernel(choose.epoch, make, *values).launch(args, self.stream())

    def ranges(self, n: int, size: int) -> Iterator[tuple[int, int]]:
        """(start, size) of consecutive ranges that cover range(n); only the last may be smaller than `size`."""
        if 0 < n <= size:  # the usual case
            return iter(((0, n),))
        return ((start, min(size, n - start)) for start in self.loop(range(0, n, size)))

    def compact(
        self, target: Tensor, class_weight: Tensor | None, num_items: float | Tensor | None, ignore_index: int, v: int,
        mean: bool, state: RowState,
    ) -> None:  # fmt: skip
        """Writes the state's order, live rows (target != ignore_index) first, both parts ascending, and num_live.

        Also writes its inv_divisor: with `mean` 1 / num_items, or without num_items 1 / (sum of class weights of
        live rows whose target is a class); 1 without `mean` or if no row has a class.
        """
        divisor, items, items_tensor = "weights" if mean else "one", 1.0, None
        if mean and isinstance(num_items, Tensor) and num_items.device == target.device:
            divisor, items_tensor = "tensor", num_items.to(F32)
        elif mean and num_items is not None:
            divisor, items = "float", float(num_items)
        if divisor != "weights":
            class_weight = None
        args = _compact_args(
            state=state.address, target=target.data_ptr(), class_weight=address(class_weight),
            num_items_at=address(items_tensor), num_items=items, ignore_index=ignore_index, v=v, m=state.m,
        )  # fmt: skip
        self.launch(args, problems.compact, target.dtype, dtype_of(class_weight), divisor)

    # GEMMs

    def num_tiles(self, v: int) -> int:
        """Partial sums per row of `part_sum`."""
        return -(-v // SOFTMAX_TILE_N[self.gpu.family])

    def logits(
        self, live_x: Tensor, w: Tensor, out: ExpLogits, epilogue: SoftmaxArgs, shared: ProblemFields, state: RowState,
        start: int,
    ) -> None:  # fmt: skip
        """exp_logits = exp(logits - row_shift) * softcap's derivative; sums of the exponentials; target logits.

        live_x (rows, h), w (v, h). A logit far above row_shift raises row_max_bits and flags its tile. A second launch
        recomputes flagged tiles with row_max_bits as the shift; it returns at once if there are none.
        """
        (v, h), rows = w.shape, live_x.shape[0]
        values = shared, dtype_of(out.first), out.second is not None
        gemm = self._gemm(choose.epoch, rows, v, h, False, problems.logits, *values, False)
        args = self._multiply(gemm, live_x, w, out.first, state, start, epilogue, out.second, out.split)
        gemm = self._gemm(choose.epoch, rows, v, h, False, problems.logits, *values, True)  # recompute_flagged
        if gemm.max_clusters != args.max_clusters:
            args = args._replace(max_clusters=gemm.max_clusters)
        gemm.launch(args, self.stream())

    def dlogits(
        self, live_x: Tensor, w: Tensor, out: Tensor, epilogue: DlogitsArgs, shared: ProblemFields, state: RowState,
        start: int,
    ) -> None:  # fmt: skip
        """out (rows, n) = dlogits of the n classes of w: see kernels/epilogue_dlogits.py."""
        (n, h), rows, entropy = w.shape, live_x.shape[0], epilogue.coef_entropy is not None
        gemm = self._gemm(choose.epoch, rows, n, h, False, problems.dlogits, shared, out.dtype, entropy)
        self._multiply(gemm, live_x, w, out, state, start, epilogue)

    def dx(
        self,
        e: ExpLogits,  # (rows, n), split at a multiple of the GEMM's k tile
        w: Tensor,  # (n, h)
        state: RowState,
        start: int,
        out: Tensor,  # contiguous: (rows, h) fp32, or (m, h) with an epilogue
        accumulate: bool = False,  # only without an epilogue
        split_tail: bool = False,  # only with an epilogue
        epilogue: RowsOutArgs | None = None,
    ) -> None:
        """out = (+= with `accumulate`) e @ w. With an epilogue, row i is scaled and written to row order[start + i].

        Without one, all rows of the last live row's tile are written. `split_tail` splits the tiles of a partly filled
        last wave along the classes, which takes 17 MB of scratch, or 69 MB for deep tiles.
        """
        (n, h), rows, split_tail = w.shape, e.first.shape[0], split_tail and splits_tails(self.gpu)
        gemm = self._gemm(
            choose.epoch, rows, h, n, split_tail, problems.dx, e.first.dtype, out.dtype, e.second is not None,
            split_tail, epilogue is not None, accumulate,
        )  # fmt: skip
        self._multiply(gemm, e.first, w, out, state, start, epilogue, e.second, e.split)

    def dw(
        self,
        e: Tensor,  # (rows, n): exp_logits or dlogits
        scaled_x: Tensor,  # (rows, h)
        state: RowState,
        start: int,
        out: Tensor,  # (n, h) contiguous; fp32 if `accumulate`, bf16 with `residual`
        accumulate: bool,  # not with `residual`
        split_tail: bool = False,  # as in `dx`, along the rows; ignored if there are many tiles
        factor: Tensor | None = None,  # (1,) fp32
        residual: ResidualArgs | None = None,
    ) -> None:
        """out = (+= with `accumulate`) factor * e.T @ scaled_x. `residual` keeps what rounding out drops."""
        (rows, h), n = scaled_x.shape, e.shape[1]
        split_tail = split_tail and splits_dw_tail(n, h, self.gpu)
        gemm = self._gemm(
            choose.epoch, n, h, rows, split_tail, problems.dw, e.dtype, out.dtype, split_tail, residual is not None,
            factor is not None, accumulate,
        )  # fmt: skip
        epilogue = residual if factor is None else ScaledArgs(factor.data_ptr())
        self._multiply(gemm, e, scaled_x, out, state, start, epilogue)

    def _multiply(
        self, gemm: _Gemm, a: Tensor, b: Tensor, d: Tensor | None, state: RowState, start: int,
        epilogue: tuple | None, second: Tensor | None = None, split: int = 0,
    ) -> GemmArgs:  # fmt: skip
        """Launches a GEMM. Arguments and result are those of GemmArgs."""
        (launch, m, n, k, clusters, splits, floats), parts, tail = gemm, state.parts, None
        if floats:
            partials = self.device.vector(floats, F32)
            tail = _tail_args(partials.data_ptr(), parts.tickets, splits)
        args = _gemm_args(  # by position: 18 keywords take 1 us more
            a.data_ptr(), address(second), b.data_ptr(), address(d), epilogue, tail,
            parts.tickets + 4 * (NUM_TICKETS - 1), parts.num_live, m, n, k, 0 if second is None else split, start,
            a.stride()[0], 0 if second is None else second.stride()[0], b.stride()[0],
            0 if d is None else d.stride()[0], clusters,
        )  # fmt: skip
        launch(args, self.stream())
        return args


# Logits and row statistics --------------------------------------------------------------------------------------------


def start_forward(call: KernelCall) -> Tensor:
    """Lists the live rows. Returns an (m,) fp32 buffer for the rows' losses."""
    plan = call.plan
    call.kernels.compact(
        call.target, call.class_weight, call.num_items, plan.ignore_index, call.v, plan.reduction == "mean", call.state
    )
    return call.device.vector(call.m, F32)


def allocate_grads(call: KernelCall, needed: GradsNeeded, owns_dw: bool = True) -> Grads:
    """Buffers for the gradients; for dw only with `owns_dw`."""
    m, h, v, device = call.m, call.h, call.v, call.device
    return Grads(
        device.matrix(m, h, needed.dx) if needed.dx else None,
        device.matrix(v, h, needed.dw) if needed.dw and owns_dw else None,
        device.vector(v, F32) if needed.db else None,
    )


def allocate_live_x(call: KernelCall, rows: int) -> Tensor:
    return call.device.matrix(min(rows, call.m), call.h, call.x.dtype)


def chunks(
    call: KernelCall, layout: Layout, live_x: Tensor, exp_logits: ExpLogits = NOT_STORED, first: int = 0
) -> Iterator[Chunk]:
    """The chunks of the slots from `first` on, in order. They share the same buffers."""
    for start, rows in call.kernels.ranges(call.m - first, layout.chunk_rows):
        yield Chunk(first + start, rows, row_slice(live_x, 0, rows), exp_logits.rows(rows))


class PartialSums(NamedTuple):
    """What the logits GEMM computes for `launch_rows`: sums per row and tile of classes, and each row's argmax."""

    part_sum: Tensor  # (rows, tiles) fp32
    part_wsum: Tensor | None  # as part_sum; with label smoothing
    part_elog: Tensor | None  # as part_sum; with return_stats
    argmax_bits: Tensor | None  # (rows,) int64; with return_stats


def compute_loss(
    call: KernelCall, chunk: Chunk, loss: Tensor, dx: Tensor | None = None, scale: bool = False,
    scaled_x: Tensor | None = None, first_slots: Tensor | None = None,
) -> None:  # fmt: skip
    """Computes chunk.live_x, chunk.exp_logits and the row statistics. `scale` and later arguments: of `launch_rows`.

    Zeroes the outputs and dx of the chunk's ignored rows.
    """
    kernels, plan, parts, offset = call.kernels, call.plan, call.state.parts, 4 * chunk.start
    device, rows, tiles, smoothing = call.device, chunk.rows, kernels.num_tiles(call.v), plan.label_smoothing > 0
    sums = by_name(PartialSums)(
        part_sum=device.matrix(rows, tiles, F32),
        part_wsum=device.matrix(rows, tiles, F32) if smoothing else None,
        part_elog=device.matrix(rows, tiles, F32) if plan.return_stats else None,
        argmax_bits=device.vector(rows, torch.int64) if plan.return_stats else None,
    )
    gather(call, chunk, loss, dx, sums.argmax_bits)
    epilogue = _softmax_args(
        bias=address(call.bias), class_weight=address(call.class_weight) if smoothing else None,
        row_shift=parts.row_shift + offset, slot_target=parts.slot_target + offset,
        row_max_bits=parts.row_max_bits + offset, flags=parts.flags, part_sum=sums.part_sum.data_ptr(),
        target_logit=parts.target_logit + offset, part_wsum=address(sums.part_wsum), part_elog=address(sums.part_elog),
        argmax_bits=address(sums.argmax_bits), softcap=call.softcap, tiles=tiles, logit_scale=address(call.logit_scale),
    )  # fmt: skip
    kernels.logits(chunk.live_x, call.w, chunk.exp_logits, epilogue, call.fields, call.state, chunk.start)
    launch_rows(call, chunk, sums, loss=loss, scale=scale, scaled_x=scaled_x, first_slots=first_slots)


def gather(call: KernelCall, chunk: Chunk, loss: Tensor, dx: Tensor | None, argmax_bits: Tensor | None) -> None:
    x = call.x
    args = _gather_args(
        state=call.state.address, x=x.data_ptr(), live_x=chunk.live_x.data_ptr(), w=call.w.data_ptr(),
        bias=address(call.bias), target=call.target.data_ptr(), dx=address(dx), loss=loss.data_ptr(),
        argmax_bits=address(argmax_bits), x_stride=x.stride()[0], softcap=call.softcap, m=call.m, start=chunk.start,
        rows=chunk.rows, v=call.v,
    )  # fmt: skip
    call.kernels.launch(args, problems.gather, call.fields, dtype_of(dx))


def regather_live_x(call: KernelCall, start: int, live_x: Tensor) -> None:
    """Gathers the rows of x of slots `start` and up into live_x."""
    x = call.x
    args = _gather_args(
        state=call.state.address, x=x.data_ptr(), live_x=live_x.data_ptr(), x_stride=x.stride(0), softcap=0.0,
        m=call.m, start=start, rows=live_x.shape[0], v=call.v,
    )  # fmt: skip
    call.kernels.launch(args, problems.regather, call.h, x.dtype, call.fields.x_aligned)


def launch_rows(
    call: KernelCall, chunk: Chunk, sums: PartialSums | None = None, *, loss: Tensor | None = None, scale: bool = False,
    scaled_x: Tensor | None = None, first_slots: Tensor | None = None, coefs: Tensor | None = None,
    coef_entropy: Tensor | None = None,
) -> None:  # fmt: skip
    """Launches `lce_rows`, which computes, depending on the arguments given:

    sums: the row statistics loss, lse and row_sum; with return_stats also log_prob, entropy and predicted.
    scale: row_scale, the target entries of exp_logits, and scaled_x = row_scale * live_x.
    coefs: the coefficients of dlogits, and coef_entropy if the entropy has a gradient.
    """
    plan, state, grads, stats_args, grads_args = call.plan, call.state, call.grad_outputs, None, None
    options = _loss_args(
        class_weight=address(call.class_weight), total_weight=address(call.total_weight),
        logit_scale=address(call.logit_scale), softcap=call.softcap, z_loss=plan.z_loss,
        label_smoothing=plan.label_smoothing, inv_divisor=state.parts.inv_divisor,
    )  # fmt: skip
    if sums is not None:
        stats_args = _stats_args(
            part_sum=sums.part_sum.data_ptr(), part_wsum=address(sums.part_wsum), part_elog=address(sums.part_elog),
            argmax_bits=address(sums.argmax_bits), loss=loss.data_ptr(),
        )  # fmt: skip
    if grads.loss is not None:
        grads_args = _grads_args(
            loss=grads.loss.data_ptr(), lse=address(grads.lse), log_prob=address(grads.log_prob),
            entropy=address(grads.entropy),
        )  # fmt: skip
    args = _rows_args(
        state=state.address, options=options, stats=stats_args, grads=grads_args,
        exp_logits=chunk.exp_logits.args() if scale else None,
        live_x=None if scaled_x is None else chunk.live_x.data_ptr(), scaled_x=address(scaled_x), coefs=address(coefs),
        coef_entropy=address(coef_entropy), first_slot_of_class=address(first_slots), v=call.v,
        tiles=0 if sums is None else sums.part_sum.shape[1], m=call.m, start=chunk.start, rows=chunk.rows,
    )  # fmt: skip
    call.kernels.launch(
        args, problems.rows, call.fields, sums is not None, scale, coefs is not None, scaled_x is not None,
        scale and chunk.exp_logits.second is not None, first_slots is not None,
        "one" if grads.loss is None else "rows" if grads.loss.dim() else "scalar",
        grads.lse is not None, grads.log_prob is not None, coef_entropy is not None,
    )  # fmt: skip


Coefs = tuple[Tensor, Tensor | None]  # (m, 4) fp32; coef_entropy, (m,) fp32, if the entropy has a gradient


def compute_coefs(call: KernelCall) -> Coefs:
    """The coefficients of dlogits, for all rows."""
    coefs = call.device.matrix(call.m, 4, F32)
    coef_entropy = None if call.grad_outputs.entropy is None else call.device.vector(call.m, F32)
    launch_rows(call, Chunk(0, call.m, None, NOT_STORED), coefs=coefs, coef_entropy=coef_entropy)
    return coefs, coef_entropy


def compute_dlogits(call: KernelCall, start: int, live_x: Tensor, coefs: Coefs, v0: int, v1: int, out: Tensor) -> None:
    """out = dlogits of classes [v0, v1) for the rows of live_x, which are the slots from `start` on."""
    bias, (coefs, coef_entropy) = call.bias, coefs
    epilogue = _dlogits_args(
        bias=None if bias is None else bias.data_ptr() + bias.itemsize * v0,
        class_weight=address(call.class_weight) if call.plan.label_smoothing > 0 else None,
        coefs=coefs.data_ptr() + 16 * start, slot_target=call.state.parts.slot_target + 4 * start,
        coef_entropy=None if coef_entropy is None else coef_entropy.data_ptr() + 4 * start, softcap=call.softcap, v0=v0,
        logit_scale=address(call.logit_scale),
    )  # fmt: skip
    call.kernels.dlogits(live_x, call.w[v0:v1], out, epilogue, call.fields, call.state, start)


# Gradients from exp_logits --------------------------------------------------------------------------------------------


def compute_grads(
    call: KernelCall, chunk: Chunk, grads: Grads, scaled_x: Tensor | None = None, first_slots: Tensor | None = None,
    split_tail: bool = False,
) -> None:  # fmt: skip
    """Writes `grads`; after the first chunk, adds to dw and db. dw comes last, because it modifies exp_logits.

    split_tail: as in LceKernels.dx. first_slots: of `allocate_first_slots`, filled with NO_SLOT.
    """
    state, exp_logits, (dx, dw, db) = call.state, chunk.exp_logits, grads
    row_scale = state.parts.row_scale + 4 * chunk.start
    if dx is not None:
        epilogue = _rows_out_args(row_scale=row_scale, order=state.parts.order)
        call.kernels.dx(exp_logits, call.w, state, chunk.start, dx, False, split_tail, epilogue)
    if db is not None:
        for block, v0, v1 in exp_logits.blocks(call.v):
            compute_db(call, block, row_scale, chunk.start, row_slice(db, v0, v1))
    if dw is not None:
        _compute_dw(call, chunk, scaled_x, dw, first_slots)


def compute_db(call: KernelCall, block: Tensor, row_scale: int | None, start: int, db: Tensor) -> None:
    """db = (+= after the first chunk) the sum of row_scale * block over live rows."""
    n = db.shape[0]
    args = _bias_args(
        exp_logits=block.data_ptr(), row_scale=row_scale, db=db.data_ptr(), num_live=call.state.parts.num_live,
        exp_logits_stride=block.stride(0), start=start, rows=block.shape[0], n=n,
    )  # fmt: skip
    call.kernels.launch(args, problems.bias, block.dtype, row_scale is not None, start > 0, n >= WIDE_BIAS)


def _compute_dw(call: KernelCall, chunk: Chunk, scaled_x: Tensor, dw: Tensor, first_slots: Tensor | None) -> None:
    """dw of the first dw.shape[0] classes.

    The target terms are added in fp32, because they are most of the gradient of a class with few rows.
    """
    (v, h), state, kept, residual = dw.shape, call.state, None, None
    separate_targets = first_slots is not None or dw.dtype == F32
    if separate_targets:
        extract_targets(call, chunk, v, first_slots)
    if first_slots is not None:
        residual = call.device.matrix(chunk.rows, h, torch.int16)
    for block, v0, v1 in chunk.exp_logits.blocks(v):
        if residual is not None:
            kept = _residual_args(
                first_slot_of_class=first_slots.data_ptr() + 4 * v0, rounding_residual=residual.data_ptr()
            )
        out = row_slice(dw, v0, v1)
        call.kernels.dw(block, scaled_x, state, chunk.start, out, chunk.start > 0, True, residual=kept)
    if separate_targets:
        add_targets(call, chunk, dw, 0, residual)


def allocate_first_slots(call: KernelCall, v: int, dw_dtype: torch.dtype | None) -> Tensor | None:
    """(v,) int32, the first slot of each class, where a 16-bit dw keeps its rounding residual.

    None for an fp32 dw, of which rounding drops nothing, and without dw.
    """
    return call.device.vector(v, I32) if dw_dtype not in (None, F32) else None


def extract_targets(call: KernelCall, chunk: Chunk, v: int, first_slots: Tensor | None = None) -> None:
    """Moves the target entries of exp_logits to state.sorted_grad, and zeroes them in exp_logits.

    Must not directly follow the launch that writes slot_target.
    """
    n, state, exp_logits, index = chunk.rows, call.state, chunk.exp_logits, None
    if n > MOST_ROWS_COUNTED:
        classes = state.tensor("slot_target")[chunk.start : chunk.start + n]
        index = order_by_class(classes, state.tensor("num_live", 1), chunk.start)
    args = _sort_args(
        state=state.address, exp_logits=exp_logits.args(), first_slot_of_class=address(first_slots),
        index=address(index), v=v, m=call.m, start=chunk.start, rows=n,
    )  # fmt: skip
    call.kernels.launch(args, problems.sort, exp_logits.second is not None, first_slots is not None, index is not None)


def order_by_class(classes: Tensor, num_live: Tensor, start: int) -> Tensor:
    """A chunk's slots sorted by class with PyTorch's stable sort, dead slots last: (rows,) int64."""
    n = classes.shape[0]
    slots = torch.arange(start, start + n, dtype=I32, device=classes.device)
    return classes.masked_fill(slots >= num_live, torch.iinfo(I32).max).sort(stable=True).indices


def add_targets(call: KernelCall, chunk: Chunk, dw: Tensor, v0: int, residual: Tensor | None = None) -> None:
    """Adds `residual`, then the target terms, to dw (n, h) of classes v0 and up.

    The previous launch may write dw and the residual, but no other argument.
    """
    x = call.x
    args = _targets_args(
        state=call.state.address, x=x.data_ptr(), dw=dw.data_ptr(), rounding_residual=address(residual),
        x_stride=x.stride(0), v0=v0, v1=v0 + dw.shape[0], m=call.m, start=chunk.start, rows=chunk.rows,
    )  # fmt: skip
    call.kernels.launch(args, problems.targets, call.h, x.dtype, dw.dtype, call.fields.x_aligned, residual is not None)


def add_to_dw_out(
    call: KernelCall, dlogits: Tensor, scaled_x: Tensor, out: Tensor, targets: Chunk | None = None,
    factor: Tensor | None = None, start: int = 0,
) -> None:  # fmt: skip
    """out += factor * dlogits.T @ scaled_x of slots `start` on, plus target terms of `targets`. out: the user's."""
    if not out.is_meta:
        check_memory("linear_cross_entropy", grad_weight_out=out)
    kernels, state = call.kernels, call.state
    dense = out.is_contiguous() and out.stride(0) == out.shape[1]  # a single row is contiguous with any stride
    if out.dtype == F32 and dense and out.data_ptr() % 16 == 0:  # the GEMM can add to it with TMA
        kernels.dw(dlogits, scaled_x, state, start, out, True, True, factor)
        if targets is not None:
            add_targets(call, targets, out, 0)
        torch.autograd.graph.increment_version(out)
        return
    for v0, n in kernels.ranges(out.shape[0], 4096):  # bounds the memory of dw
        dw = call.device.matrix(n, out.shape[1], F32)
        kernels.dw(dlogits[:, v0 : v0 + n], scaled_x, state, start, dw, False, True, factor)
        if targets is not None:
            add_targets(call, targets, dw, v0)
        out[v0 : v0 + n].add_(dw)


def common_factor(call: KernelCall) -> tuple[Tensor | None, KernelCall]:
    """(the factor common to all rows, the call without it); (None, call) if rows have gradients of their own.

    In fp16, p - onehot divided by the number of rows would be mostly subnormal. So the common factor is applied to the
    fp32 accumulators instead. It includes the largest coefficient of a live row, so that coefficients are at most 1.
    The returned call's inv_divisor points into the factor's memory: keep the factor alive.
    """
    plan, state, weight, grad_loss = call.plan, call.state, call.class_weight, call.grad_outputs.loss
    if call.grad_outputs.has_row_grads() or grad_loss.dim():
        return None, call
    largest = grad_loss.new_ones(())
    if weight is not None:  # only of classes that are targets: other weights may have any value
        target = state.tensor("slot_target")
        weights = weight[target.clamp(0, weight.shape[0] - 1).long()].abs().masked_fill(target < 0, 0.0)
        largest = _finite(weights).amax()
        if plan.label_smoothing:
            spread = plan.label_smoothing / call.v
            largest = torch.maximum(largest, spread * _finite(weight.abs()).amax())
    if plan.z_loss:
        lse = state.tensor("lse")
        largest = torch.maximum(largest, 2 * plan.z_loss * _finite(lse.abs()).amax())
    if call.logit_scale is not None:
        largest = largest * call.logit_scale
    largest = largest.clamp(min=torch.finfo(F32).tiny).view(1)
    both = call.device.vector(2, F32)  # not in the state: a backward that ran out of memory may run again
    torch.mul(state.tensor("inv_divisor", 1) * grad_loss, largest, out=both[:1])
    torch.reciprocal(largest, out=both[1:])
    state = state._replace(parts=state.parts._replace(inv_divisor=both.data_ptr() + 4))
    return both[:1], call._replace(state=state, grad_outputs=NO_GRADS)


def _finite(t: Tensor) -> Tensor:
    return t.nan_to_num(0.0, 0.0, 0.0)
