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

from quackish.configs import choose, lce_args, lce_rows
from quackish.configs.gemm import NUM_TICKETS, SOFTMAX_TILE_N, GemmProblem, splits_dw_tail
from quackish.gpu import Gpu, gpu_of
from quackish.ops import cuda, workspace
from quackish.ops.kernel_for import Kernel, KernelFor, kernel_for

Args = TypeVar("Args", bound=tuple)  # a NamedTuple


# Memory ---------------------------------------------------------------------------------------------------------------

I32, F32 = torch.int32, torch.float32
Vector = Tensor | int  # a number per row, or one number: 4 bytes each, contiguous; or its address


def empty(like: Tensor, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    if like.is_cuda:  # the current device, which is like's
        return cuda.empty(shape, strides, dtype)
    return like.new_empty_strided(shape, strides, dtype=dtype)


def vector(like: Tensor, n: int, dtype: torch.dtype) -> Tensor:
    return empty(like, (n,), (1,), dtype)


def matrix(like: Tensor, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    return empty(like, (rows, columns), (columns, 1), dtype)


def padded(like: Tensor, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """A matrix whose rows start on 128 bytes."""
    if columns % 8:  # the last row's padding must exist: it is read, 16 bytes at a time, but not used
        return padded(like, rows, -(-columns // 8) * 8, dtype)[:, :columns]
    return empty(like, (rows, columns), padded_strides(columns), dtype)


def padded_strides(columns: int) -> tuple[int, int]:
    return -(-columns // 64) * 64, 1


def inside(of: Tensor, offset: int, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """A matrix `offset` bytes into the storage of `of`, which is contiguous and has a storage of its own."""
    if of.dtype != dtype:
        of = of.view(-1).view(dtype)
    return of.as_strided((rows, columns), (columns, 1), offset // dtype.itemsize)


class ExpLogits(NamedTuple):
    """exp_logits of a chunk, or their gradients: one matrix, or two that share its columns."""

    first: Tensor | None  # (rows, split) bf16, or (rows, v) without second; None: not stored
    split: int = 0
    second: Tensor | None = None  # (rows, v - split)

    def blocks(self, v: int) -> list[tuple[Tensor | None, int, int]]:
        """(matrix, first class, end of the classes)"""
        if self.second is None:
            return [(self.first, 0, v)]
        return [(self.first, 0, self.split), (self.second, self.split, v)]

    @property
    def strides(self) -> tuple[int, int]:
        first, second = self.first, self.second
        return 0 if first is None else first.stride(0), 0 if second is None else second.stride(0)


NOT_STORED = ExpLogits(None)


class RowState(NamedTuple):
    """What forward finds out about rows and backward needs: lse, and addresses in one allocation, `memory`."""

    lse: Tensor  # (m,) fp32; apart, since users may get it
    memory: Tensor  # (RowState.size(m),) int32
    tickets: int  # (NUM_TICKETS,) int32: 0 unless a GEMM runs
    num_live: int  # (1,) int32
    inv_divisor: Vector  # (1,) fp32
    order: int  # (m,) int32: the row of each slot, live rows first
    slot_target: int  # (m,) int32
    row_max_bits: int  # (m,) int32
    target_logit: int  # (m,) fp32
    row_sum: int  # (m,) fp32

    @staticmethod
    def size(m: int) -> int:
        return NUM_TICKETS + 4 + 5 * -(-m // 4) * 4

    @classmethod
    def new(cls, like: Tensor) -> "RowState":
        """For the rows of `like`; `compact` and the forward of a schedule fill it."""
        m = like.shape[0]
        return cls.of(vector(like, m, F32), vector(like, cls.size(m), I32))

    @classmethod
    def of(cls, lse: Tensor, memory: Tensor) -> "RowState":
        tickets, step = memory.data_ptr(), -(-lse.shape[0] // 4) * 16  # each vector starts on 16 bytes
        num_live = tickets + 4 * NUM_TICKETS
        order = num_live + 16
        slot_target = order + step
        row_max_bits = slot_target + step
        target_logit = row_max_bits + step
        return cls(
            lse, memory, tickets, num_live, num_live + 4, order, slot_target, row_max_bits, target_logit,
            target_logit + step,
        )  # fmt: skip

    def tensor(self, address: int, n: int, dtype: torch.dtype = I32) -> Tensor:
        first = (address - self.tickets) // 4
        return self.memory[first : first + n].view(dtype)


class Chunk(NamedTuple):
    """Slots [start, start + rows): addresses of parts of RowState's vectors, and of vectors in `memory`."""

    start: int
    rows: int
    live_x: Tensor | None  # (rows, h): their rows of x
    exp_logits: ExpLogits
    slot_target: int
    row_max_bits: int
    target_logit: int
    row_sum: int
    memory: Tensor
    row_shift: int  # (rows,) fp32
    row_scale: int  # (rows,) fp32
    # What live rows have at their targets, by class. Their part of dw is sorted_grad * x[sorted_row].
    sorted_target: int  # (rows,) int32
    sorted_row: int  # (rows,) int32
    sorted_grad: int  # (rows,) fp32: row_scale * exp_logits at the target
    flags: int  # (1 + ceil(rows / lce_rows.ROW_TILE),) int32

    @classmethod
    def of(
        cls, state: RowState, start: int, rows: int, live_x: Tensor | None = None, exp_logits: ExpLogits = NOT_STORED
    ) -> "Chunk":
        padded_rows, at = -(-rows // 4) * 4, 4 * start
        memory = vector(state.lse, 5 * padded_rows + 1 + -(-rows // lce_rows.ROW_TILE), I32)
        own, step = memory.data_ptr(), 4 * padded_rows
        return cls(
            start, rows, live_x, exp_logits, state.slot_target + at, state.row_max_bits + at, state.target_logit + at,
            state.row_sum + at, memory, own, own + step, own + 2 * step, own + 3 * step, own + 4 * step, own + 5 * step,
        )  # fmt: skip


# Launches -------------------------------------------------------------------------------------------------------------


class RowKernels:
    """The kernels around the GEMMs, of one device. A kernel is compiled, or loaded, by its first call.

    Their arguments are those of the kernels (configs/lce_args.py) with tensors in place of addresses, and `softcap` 0
    for none. See each kernel's module for what it does.
    """

    def __init__(self, device: torch.device, gpu: Gpu | None = None, kernel_for: KernelFor = kernel_for):
        self.device, self.gpu, self.kernel_for = device, gpu or gpu_of(device.index), kernel_for
        self.stream = cuda.current_stream_of(device)
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

    def launch(self, args: Args, *options: Any) -> None:
        """Launches the kernel around the GEMMs that `args` are of, see `_ROW_KERNELS`."""
        name, problem, fields = _ROW_KERNELS[type(args)]
        kernel = self._kernel(name, problem, *fields(args, *options))
        kernel.launch(addresses(args), self.stream())

    def compact(
        self, target: Tensor, class_weight: Tensor | None, num_items: float | Tensor | None, ignore_index: int, v: int,
        mean: bool, state: RowState,
    ) -> None:  # fmt: skip
        """Lists the live rows (target != ignore_index) first in state.order, each part ascending, and counts them.

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
        args = lce_args.CompactArgs(
            target, class_weight, items_at, state.order, state.inv_divisor, state.tickets, state.num_live, items,
            ignore_index, v, target.shape[0],
        )  # fmt: skip
        self.launch(args, divisor)

    def scale(self, out: Tensor, factor: Tensor, out2: Tensor | None = None) -> None:
        """out *= factor (one fp32 number), and out2 of out's dtype, in place; leaves at once if the factor is 1."""
        n, n2 = out.numel(), 0 if out2 is None else out2.numel()
        if n + n2 == 0:
            return
        kernel = self._kernel("lce_scale", lce_rows.LceScaleProblem, out.dtype)
        num_ctas = kernel.config.num_ctas(max(n, n2) * out.itemsize, self.gpu.sm_count)
        args = lce_args.ScaleArgs(out, out if out2 is None else out2, factor, n, n2, num_ctas)
        kernel.launch(addresses(args), self.stream())


def _dtype(t: Tensor | None) -> torch.dtype | None:
    return None if t is None else t.dtype


def _is_aligned(x: Tensor) -> bool:
    """Whether each row starts on 16 bytes."""
    return not (x.data_ptr() | x.stride(0) * 2) & 15


def _gather_fields(a: lce_args.GatherArgs) -> tuple:
    x = a.x
    dtypes = x.dtype, a.target.dtype, _dtype(a.bias), _dtype(a.dx)
    return x.shape[1], *dtypes, a.softcap > 0, a.loss is not None, _is_aligned(x)


def _rows_fields(a: lce_args.RowsArgs) -> tuple:
    scale, grad_loss, live_x = a.exp_logits is not None, a.grad_loss, a.live_x
    return (
        a.part_sum is not None, "scale" if scale else "none" if a.coefs is None else "coefs",
        0 if live_x is None else live_x.shape[1], _dtype(live_x), _dtype(a.class_weight), a.label_smoothing > 0,
        scale and a.softcap > 0, "one" if grad_loss is None else "rows" if grad_loss.dim() else "scalar",
        a.grad_lse is not None, a.exp_logits2 is not None, a.first_slot_of_class is not None,
    )  # fmt: skip


def _sort_fields(a: lce_args.SortArgs) -> tuple:
    return a.exp_logits2 is not None, a.first_slot_of_class is not None, a.index is not None


def _targets_fields(a: lce_args.TargetsArgs) -> tuple:
    return a.x.shape[1], a.x.dtype, a.dw.dtype, _is_aligned(a.x), a.rounding_residual is not None


# The name of the kernel with these arguments, its problem, and the problem's fields by the arguments and options.
_ROW_KERNELS: dict[type, tuple[str, type, Callable[..., tuple]]] = {
    lce_args.CompactArgs: (
        "lce_compact", lce_rows.LceCompactProblem, lambda a, divisor: (a.target.dtype, _dtype(a.class_weight), divisor),
    ),
    lce_args.GatherArgs: ("lce_gather", lce_rows.LceGatherProblem, _gather_fields),
    lce_args.RowsArgs: ("lce_rows", lce_rows.LceRowsProblem, _rows_fields),
    # `lce_sort` is not to be launched right after the launch that writes slot_target.
    lce_args.SortArgs: ("lce_sort", lce_rows.LceSortProblem, _sort_fields),
    # The launch right before `lce_targets` may write dw and rounding_residual, but no other argument.
    lce_args.TargetsArgs: ("lce_targets", lce_rows.LceTargetsProblem, _targets_fields),
    lce_args.BiasArgs: (
        "lce_bias", lce_rows.LceBiasProblem,
        lambda a, accumulate: (a.exp_logits.dtype, a.row_scale is not None, accumulate, a.n >= lce_rows.WIDE_BIAS),
    ),
    lce_args.ScatterArgs: (
        "lce_scatter", lce_rows.LceScatterProblem, lambda a: (a.acc.shape[1], a.dx.dtype, a.row_scale is not None),
    ),
}  # fmt: skip


# make(GemmArgs, (a, ...)) is GemmArgs(a, ...), which takes 0.2 us longer; `_replace` takes 0.8.
make = tuple.__new__
# isinstance alone takes 76 ns for one of these, and a launch has some 20
_NO_TENSORS = {
    int, float, type(None), lce_args.TailArgs, lce_args.SoftmaxArgs, lce_args.RowsOutArgs, lce_args.ResidualArgs,
}  # fmt: skip


def addresses(args: Args) -> Args:
    """With the addresses of tensors in their place."""
    return make(type(args), [a if type(a) in _NO_TENSORS or not isinstance(a, Tensor) else a.data_ptr() for a in args])


class LceKernels(RowKernels):
    """All kernels of a Hopper GPU.

    The GEMMs' operands are bf16 or fp16 with unit stride along their columns, rows a multiple of 8 elements apart. All
    sums run over live rows only, chunk rows [0, num_live - start), which the device counts. Epilogues are those of
    configs/lce_args.py, with tensors in place of addresses.
    """

    keeps_residual = True  # `dw` can keep what its rounding drops

    def num_tiles(self, v: int) -> int:
        """How many partial sums a row of `part_sum` has."""
        return -(-v // SOFTMAX_TILE_N)

    def logits(
        self, live_x: Tensor, w: Tensor, out: ExpLogits, epilogue: lce_args.SoftmaxArgs, num_live: Vector, start: int
    ) -> None:
        """exp_logits = exp(logits - row_shift) * d; their sums without d per row and tile; the targets' logits.

        live_x (rows, h), w (v, h). A logit far above row_shift raises row_max_bits and flags its tile;
        `recompute_flagged` must follow.
        """
        self._softmax(live_x, w, out, epilogue, num_live, start, recompute=False)

    def recompute_flagged(
        self, live_x: Tensor, w: Tensor, out: ExpLogits, epilogue: lce_args.SoftmaxArgs, num_live: Vector, start: int
    ) -> None:
        """Recomputes the tiles that `logits` flagged, shifted by row_max_bits. Returns at once if there are none."""
        epilogue = make(lce_args.SoftmaxArgs, (*epilogue[:2], None, *epilogue[3:]))  # without row_shift
        self._softmax(live_x, w, out, epilogue, num_live, start, recompute=True)

    def _softmax(self, live_x, w, out, epilogue, num_live, start, recompute) -> None:
        kernel = self._kernel(
            "lce_gemm", _gemm_problem, "softmax", live_x.dtype, _dtype(out.first), _dtype(epilogue.bias),
            epilogue.softcap > 0, epilogue.part_wsum is not None, epilogue.class_weight is not None, recompute,
            out.second is not None,
        )  # fmt: skip
        sizes = live_x.shape[0], *w.shape
        self._multiply(
            kernel, (live_x, w, out.first), epilogue, sizes, num_live, start, out.second, out.split,
            wave_sync=not recompute,
        )  # fmt: skip

    def dlogits(
        self, live_x: Tensor, w: Tensor, out: Tensor, epilogue: lce_args.DlogitsArgs, smoothing: bool, num_live: Vector,
        start: int,
    ) -> None:  # fmt: skip
        """out (rows, n) = the gradient of the logits of the n classes of w: kernels/common/epilogue_dlogits.py."""
        kernel = self._kernel(
            "lce_gemm", _gemm_problem, "dlogits", live_x.dtype, out.dtype, _dtype(epilogue.bias), epilogue.softcap > 0,
            smoothing, epilogue.class_weight is not None,
        )  # fmt: skip
        self._multiply(kernel, (live_x, w, out), epilogue, (live_x.shape[0], *w.shape), num_live, start)

    def dx(
        self,
        e: ExpLogits,  # (rows, n); split at a multiple of the GEMM's step along k
        w: Tensor,  # (n, h)
        num_live: Vector,
        start: int,
        out: Tensor,  # contiguous: (rows, h) fp32, or (m, h) with an epilogue
        accumulate: bool = False,  # without epilogue
        tickets: Vector | None = None,  # (NUM_TICKETS,) int32, 0 before and after; with an epilogue
        epilogue: lce_args.RowsOutArgs | None = None,
    ) -> None:
        """out = (or += with `accumulate`) e @ w; with an epilogue row i, scaled, goes to row order[start + i] of out.

        Without it, rows up to the end of a tile with live rows are written too. With tickets, tiles of a partly filled
        last wave are split along the classes, which takes 17 MB of scratch, or 69 MB for deep tiles.
        """
        kernel = self._kernel(
            "lce_gemm", _gemm_problem, "store" if epilogue is None else "rows", e.first.dtype, out.dtype,
            e.second is not None, accumulate, tickets is not None,
        )  # fmt: skip
        (n, h), rows = w.shape, e.first.shape[0]
        self._multiply(kernel, (e.first, w, out), epilogue, (rows, h, n), num_live, start, e.second, e.split, tickets)

    def dw(
        self,
        e: Tensor,  # (rows, n): exp_logits or dlogits
        scaled_x: Tensor,  # (rows, h)
        num_live: Vector,
        start: int,
        out: Tensor,  # (n, h) contiguous; fp32 to accumulate, bf16 with ResidualArgs, which do not accumulate
        accumulate: bool,
        tickets: Vector | None = None,  # as in `dx`, along the rows; used where there are few tiles
        epilogue: lce_args.ScaledArgs | lce_args.ResidualArgs | None = None,
    ) -> None:
        """out = (or += with `accumulate`) e.T @ scaled_x, times a factor, or with the residual of its rounding kept."""
        (rows, h), n = scaled_x.shape, e.shape[1]
        if tickets is not None and not splits_dw_tail(n, h, self.gpu.sm_count):
            tickets = None
        scaled, residual = type(epilogue) is lce_args.ScaledArgs, type(epilogue) is lce_args.ResidualArgs
        kernel = self._kernel(
            "lce_gemm", _gemm_problem, "dw", e.dtype, out.dtype, accumulate, tickets is not None, scaled, residual
        )
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
            tail = addresses(make(lce_args.TailArgs, (partials, tickets, splits)))
        if wave_sync:
            ticket, _, _kept = workspace.take(self.device.index, stream, 0) if self.device.type == "cuda" else (0, 0, 0)
        if epilogue is not None:
            epilogue = addresses(epilogue)
        # t.stride()[0] is t.stride(0), which takes twice as long
        args = make(lce_args.GemmArgs, (
            a, second, b, d, epilogue, tail, ticket, num_live, m, n, k, 0 if second is None else split, start,
            a.stride()[0], 0 if second is None else second.stride()[0], b.stride()[0],
            0 if d is None else d.stride()[0], clusters,
        ))  # fmt: skip
        kernel.launch(addresses(args), stream)


# The problems of the GEMMs: what each has always, and the fields that differ from launch to launch.
_GEMMS: dict[str, tuple[dict[str, str], tuple[str, ...]]] = {
    "softmax": ({}, ("bias_dtype", "softcap", "smoothing", "weighted", "recompute_flagged", "d_in_two")),
    "dlogits": ({}, ("bias_dtype", "softcap", "smoothing", "weighted")),
    "rows": (dict(b_major="n"), ("a_in_two", "accumulate", "split_k_tail")),
    "store": (dict(b_major="n"), ("a_in_two", "accumulate", "split_k_tail")),
    "dw": (
        dict(epilogue="store", a_major="m", b_major="n", live="k"),
        ("accumulate", "split_k_tail", "scaled", "rounding_residual"),
    ),
}


def _gemm_problem(name: str, dtype: str, out_dtype: str | None, *fields: Any) -> GemmProblem:
    always, names = _GEMMS[name]
    differing = dict(zip(names, fields, strict=True))
    return GemmProblem(**{"epilogue": name, "dtype": dtype, "out_dtype": out_dtype, **always, **differing})
