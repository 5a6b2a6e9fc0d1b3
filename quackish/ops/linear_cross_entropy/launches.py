"""Launches of linear cross entropy's kernels on the current stream of their device.

A chunk is a range [start, start + rows) of slots, which are indices into `order`, where live rows come first. Row i of
a chunk's buffer is slot start + i. Buffers may come from torch.empty: the kernels write all rows that a GEMM reads.
Matrices are passed as tensors, vectors of rows and single numbers as addresses. Tensors are contiguous unless stated.
Those with h or v columns are aligned to 16 bytes; h is a multiple of 8. None of this is checked here.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quackish.configs import choose
from quackish.configs.gemm import NUM_TICKETS, SOFTMAX_TILE_N, GemmProblem, splits_dw_tail
from quackish.configs.lce_args import (
    CompactArgs,
    DlogitsArgs,
    GemmArgs,
    ResidualArgs,
    RowsOutArgs,
    ScaleArgs,
    ScaledArgs,
    SoftmaxArgs,
    TailArgs,
)
from quackish.ops import cuda
from quackish.ops.cuda import address, dtype_of, empty_on, vector
from quackish.ops.device import Device
from quackish.ops.kernel_for import Kernel

# Memory ---------------------------------------------------------------------------------------------------------------

I32, F32 = torch.int32, torch.float32


def padded_matrix(like: Tensor, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """A matrix whose rows are aligned to 128 bytes."""
    if columns % 8:  # kernels read 16 bytes at a time: the last row needs allocated padding
        return padded_matrix(like, rows, -(-columns // 8) * 8, dtype)[:, :columns]
    return empty_on(like, (rows, columns), padded_strides(columns), dtype)


def padded_strides(columns: int) -> tuple[int, int]:
    return -(-columns // 64) * 64, 1


def view_into(owner: Tensor, offset: int, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """A matrix `offset` bytes into the storage of `owner`, which is contiguous at storage offset 0."""
    if owner.dtype != dtype:
        owner = owner.view(-1).view(dtype)
    return owner.as_strided((rows, columns), (columns, 1), offset // dtype.itemsize)


def row_slice(t: Tensor, first: int, last: int) -> Tensor:
    """t[first:last]; t itself if that is all of it, because slicing takes a microsecond."""
    return t if last - first == t.shape[0] else t[first:last]


class ExpLogits(NamedTuple):
    """exp_logits or dlogits of a chunk: one matrix, or two that split its columns."""

    first: Tensor | None  # (rows, split) bf16; (rows, v) if `second` is None; None: not stored
    split: int = 0
    second: Tensor | None = None  # (rows, v - split)

    def rows(self, n: int) -> "ExpLogits":
        """The first n rows."""
        if self.first is None or n == self.first.shape[0]:
            return self
        return ExpLogits(self.first[:n], self.split, None if self.second is None else self.second[:n])

    def blocks(self, v: int) -> list[tuple[Tensor | None, int, int]]:
        """(matrix, first class, end of its classes) of each matrix."""
        if self.second is None:
            return [(self.first, 0, v)]
        return [(self.first, 0, self.split), (self.second, self.split, v)]

    @property
    def strides(self) -> tuple[int, int]:
        first, second = self.first, self.second
        return 0 if first is None else first.stride(0), 0 if second is None else second.stride(0)


NOT_STORED = ExpLogits(None)


class RowState(NamedTuple):
    """Addresses of vectors with one number per row, in one allocation. Forward fills them, backward reads them."""

    memory: Tensor  # (RowState.size(m),) int32: the allocation
    tickets: int  # (NUM_TICKETS,) int32, for split_k_tail; the last one for wave_sync. 0 between GEMMs
    num_live: int  # (1,) int32
    inv_divisor: int  # (1,) fp32
    order: int  # (m,) int32: the row of each slot, live rows first
    lse: int  # (m,) fp32, by row; the vectors below are by slot
    slot_target: int  # int32
    row_max_bits: int  # int32
    target_logit: int  # fp32
    row_sum: int  # fp32
    # Backward does not read these: it recomputes them.
    row_shift: int  # fp32
    row_scale: int  # fp32
    # The target terms of live rows, sorted by class: sorted_grad * x[sorted_row] is added to dw[sorted_target].
    sorted_target: int  # int32
    sorted_row: int  # int32
    sorted_grad: int  # fp32
    flags: int  # (1 + ceil(rows / ROW_TILE),) int32 of a chunk: whether any tile of rows is flagged, then which ones
    # By row, and only with return_stats. Backward reads the entropy.
    log_prob: int  # fp32
    entropy: int  # fp32
    predicted: int  # int32

    @staticmethod
    def size(m: int, return_stats: bool = False) -> int:
        return NUM_TICKETS + 4 + (15 if return_stats else 12) * -(-m // 4) * 4

    @classmethod
    def new(cls, like: Tensor, return_stats: bool = False) -> "RowState":
        """Uninitialized state for the rows of `like`."""
        m = like.shape[0]
        return cls.from_memory(vector(like, cls.size(m, return_stats), I32), m)

    @classmethod
    def from_memory(cls, memory: Tensor, m: int) -> "RowState":
        tickets, step = memory.data_ptr(), -(-m // 4) * 16  # each vector is aligned to 16 bytes
        num_live = tickets + 4 * NUM_TICKETS
        return cls(memory, tickets, num_live, num_live + 4, *range(num_live + 16, num_live + 16 + 15 * step, step))

    def tensor(self, address: int, n: int, dtype: torch.dtype = I32) -> Tensor:
        first = (address - self.tickets) // 4
        return self.memory[first : first + n].view(dtype)


# Loops ----------------------------------------------------------------------------------------------------------------

Loop = Callable[[Sequence[Any]], Iterator[Any]]


def representatives(items: Sequence[Any]) -> Iterator[tuple[Any, int]]:
    """(item, the number of items that it stands for) of a schedule's loop, so that dry runs of long loops are short.

    items: the starts of equal ranges, of which the last may be shorter, or Blocks. The first item stands for itself
    only, because an iteration may add to the results of earlier ones.
    """
    if isinstance(items, range):
        sizes = [len(items) - 1, 1] if items else []
    else:
        alike = itertools.groupby(items, lambda block: (block.v1 - block.v0, block.offset is None))
        sizes = [sum(1 for _ in group) for _, group in alike]
    start = 0
    for size in sizes:
        if size > 0:
            yield items[start], 1
        if size > 1:
            yield items[start + 1], size - 1
        start += size


# Launches -------------------------------------------------------------------------------------------------------------


class RowKernels:
    """The kernels around the GEMMs, on one device. The first call of a kernel compiles or loads it.

    Arguments are those of the kernels (configs/lce_args.py); `softcap` 0 means none. Each kernel's module documents it.
    """

    def __init__(self, device: Device, loop: Loop = iter):
        """loop: the iterations of a loop that are run; a dry run needs only its `representatives`."""
        self.device, self.gpu, self.stream, self.loop = device, device.gpu, device.stream, loop
        # the epoch of tuned configs, and the kernels chosen in it
        self._kernels: tuple[int, dict[tuple, Kernel]] = choose.epoch, {}

    def kernel(self, name: str, *fields: Any) -> Kernel:
        """The kernel for the problem with these fields. torch dtypes are converted to their names."""
        epoch, kernels = self._kernels
        if epoch != choose.epoch:
            _, kernels = self._kernels = choose.epoch, {}
        key = name, fields
        kernel = kernels.get(key)
        if kernel is None:  # if the epoch changes now, this dictionary is dropped
            fields = [cuda.name_of(f) if isinstance(f, torch.dtype) else f for f in fields]
            problem = (_gemm_problem if name == "lce_gemm" else choose.FIXED[name][0])(*fields)
            kernel = kernels[key] = self.device.kernel_for(name, problem, self.gpu)
        return kernel

    def launch(self, args: tuple, name: str, *fields: Any) -> None:
        self.kernel(name, *fields).launch(args, self.stream())

    def ranges(self, n: int, size: int) -> Iterator[tuple[int, int]]:
        """(start, size) of consecutive ranges that cover range(n); only the last may be smaller than `size`."""
        return ((start, min(size, n - start)) for start in self.loop(range(0, n, size)))

    def compact(
        self, target: Tensor, class_weight: Tensor | None, num_items: float | Tensor | None, ignore_index: int, v: int,
        mean: bool, state: RowState,
    ) -> None:  # fmt: skip
        """Writes state.order, live rows (target != ignore_index) first, both parts ascending, and state.num_live.

        Also writes state.inv_divisor: with `mean` 1 / num_items, or without num_items 1 / (sum of class weights of
        live rows whose target is a class); 1 without `mean` or if no row has a class.
        """
        divisor, items, items_tensor = "weights" if mean else "one", 1.0, None
        if mean and isinstance(num_items, Tensor) and num_items.is_cuda:
            divisor, items_tensor = "tensor", num_items.to(F32)
        elif mean and num_items is not None:
            divisor, items = "float", float(num_items)
        if divisor != "weights":
            class_weight = None
        args = CompactArgs(
            target.data_ptr(), address(class_weight), address(items_tensor), state.order, state.inv_divisor,
            state.tickets, state.num_live, items, ignore_index, v, target.shape[0],
        )  # fmt: skip
        self.launch(args, "lce_compact", target.dtype, dtype_of(class_weight), divisor)

    def scale(self, out: Tensor, factor: Tensor, out2: Tensor | None = None) -> None:
        """out *= factor, out2 *= factor in place; equal dtypes, one fp32 factor. The kernel returns at once for 1."""
        n, n2 = out.numel(), 0 if out2 is None else out2.numel()
        if n + n2 == 0:
            return
        kernel = self.kernel("lce_scale", out.dtype)
        num_ctas = kernel.config.num_ctas(max(n, n2) * out.itemsize, self.gpu.sm_count)
        first = out.data_ptr()
        args = ScaleArgs(first, first if out2 is None else out2.data_ptr(), factor.data_ptr(), n, n2, num_ctas)
        kernel.launch(args, self.stream())


class LceKernels(RowKernels):
    """All kernels on a Hopper GPU.

    GEMM operands are bf16 or fp16, with unit stride along columns and row strides that are multiples of 8 elements.
    Sums include live rows only: chunk rows [0, num_live - start), where num_live is on the device.
    """

    keeps_residual = True  # `dw` can keep the rounding residual

    def num_tiles(self, v: int) -> int:
        """Partial sums per row of `part_sum`."""
        return -(-v // SOFTMAX_TILE_N)

    def logits(
        self, live_x: Tensor, w: Tensor, out: ExpLogits, epilogue: SoftmaxArgs, bias: torch.dtype | None,
        state: RowState, start: int,
    ) -> None:  # fmt: skip
        """exp_logits = exp(logits - row_shift) * softcap's derivative; sums of the exponentials; target logits.

        live_x (rows, h), w (v, h); bias: its dtype. A logit far above row_shift raises row_max_bits and flags its tile.
        A second launch recomputes flagged tiles with row_max_bits as the shift; it returns at once if there are none.
        """
        sizes = live_x.shape[0], *w.shape
        for recompute in (False, True):
            kernel = self.kernel(
                "lce_gemm", "softmax", live_x.dtype, dtype_of(out.first), bias, epilogue.softcap > 0,
                epilogue.part_wsum is not None, epilogue.class_weight is not None, epilogue.logit_scale is not None,
                epilogue.part_elog is not None, recompute, out.second is not None,
            )  # fmt: skip
            if recompute:
                epilogue = epilogue._replace(row_shift=None, argmax_bits=None)
            operands = live_x, w, out.first, out.second, out.split
            self._multiply(kernel, operands, epilogue, sizes, state, start, wave_sync=not recompute)

    def dlogits(
        self, live_x: Tensor, w: Tensor, out: Tensor, epilogue: DlogitsArgs, bias: torch.dtype | None, smoothing: bool,
        state: RowState, start: int,
    ) -> None:  # fmt: skip
        """out (rows, n) = dlogits of the n classes of w: see kernels/common/epilogue_dlogits.py."""
        kernel = self.kernel(
            "lce_gemm", "dlogits", live_x.dtype, out.dtype, bias, epilogue.softcap > 0, smoothing,
            epilogue.class_weight is not None, epilogue.logit_scale is not None, epilogue.coef_entropy is not None,
        )  # fmt: skip
        self._multiply(kernel, (live_x, w, out), epilogue, (live_x.shape[0], *w.shape), state, start)

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
        kernel = self.kernel(
            "lce_gemm", "store" if epilogue is None else "rows", e.first.dtype, out.dtype, e.second is not None,
            accumulate, split_tail,
        )  # fmt: skip
        (n, h), operands = w.shape, (e.first, w, out, e.second, e.split)
        self._multiply(kernel, operands, epilogue, (e.first.shape[0], h, n), state, start, split_tail)

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
        split_tail = split_tail and splits_dw_tail(n, h, self.gpu.sm_count)
        kernel = self.kernel(
            "lce_gemm", "dw", e.dtype, out.dtype, accumulate, split_tail, factor is not None, residual is not None
        )  # fmt: skip
        epilogue = residual if factor is None else ScaledArgs(factor.data_ptr())
        self._multiply(kernel, (e, scaled_x, out), epilogue, (n, h, rows), state, start, split_tail)

    def _multiply(
        self,
        kernel: Kernel,
        operands: tuple,  # A, B, D, and `second` and `split` of GemmArgs
        epilogue: tuple | None,
        sizes: tuple[int, int, int],  # m, n, k
        state: RowState,
        start: int,
        split_tail: bool = False,
        wave_sync: bool = True,
    ) -> None:
        """Launches a GEMM. The arguments are those of GemmArgs."""
        (a, b, d, second, split), (m, n, k) = operands if len(operands) == 5 else (*operands, None, 0), sizes
        clusters, tail = kernel.config.max_clusters(self.gpu.sm_count), None
        if split_tail:
            splits, floats = kernel.config.tail_room(m, n, k, clusters)
            partials = vector(a, floats, F32)
            tail = TailArgs(partials.data_ptr(), state.tickets, splits)
        ticket = state.tickets + 4 * (NUM_TICKETS - 1) if wave_sync else None
        args = GemmArgs(
            a.data_ptr(), address(second), b.data_ptr(), address(d), epilogue, tail, ticket, state.num_live, m, n, k,
            0 if second is None else split, start, a.stride(0), 0 if second is None else second.stride(0), b.stride(0),
            0 if d is None else d.stride(0), clusters,
        )  # fmt: skip
        kernel.launch(args, self.stream())


_LOGIT_FIELDS = "bias_dtype", "softcap", "smoothing", "weighted", "logit_scale"
# Per GEMM: constant fields of its GemmProblem, and the fields given at launch.
_GEMMS: dict[str, tuple[dict[str, str], tuple[str, ...]]] = {
    "softmax": ({}, (*_LOGIT_FIELDS, "return_stats", "recompute_flagged", "d_in_two")),
    "dlogits": ({}, (*_LOGIT_FIELDS, "entropy")),
    "rows": (dict(b_major="n"), ("a_in_two", "accumulate", "split_k_tail")),
    "store": (dict(b_major="n"), ("a_in_two", "accumulate", "split_k_tail")),
    "dw": (
        dict(epilogue="store", a_major="m", b_major="n", live="k"),
        ("accumulate", "split_k_tail", "scaled", "rounding_residual"),
    ),
}


def _gemm_problem(name: str, dtype: str, out_dtype: str | None, *fields: Any) -> GemmProblem:
    constants, names = _GEMMS[name]
    given = dict(zip(names, fields, strict=True))
    return GemmProblem(**{"epilogue": name, "dtype": dtype, "out_dtype": out_dtype, **constants, **given})
