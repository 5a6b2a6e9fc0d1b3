"""Launches of linear cross entropy's kernels on the current stream of their device.

A chunk is a range [start, start + rows) of slots, which are indices into `order`, where live rows come first. Row i of
a chunk's buffer is slot start + i. Buffers may come from torch.empty: the kernels write all rows that a GEMM reads.
Matrices are passed as tensors, vectors of rows and single numbers as addresses. Tensors are contiguous unless stated.
Those with h or v columns are aligned to 16 bytes; h is a multiple of 8. None of this is checked here.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quackish.device import choose, cuda
from quackish.device.arguments import by_name
from quackish.device.cuda import address, dtype_of
from quackish.device.kernel_device import KernelDevice
from quackish.device.kernel_for import CompiledKernel
from quackish.kernels.gemm.problem import NUM_TICKETS, EpilogueSpec, GemmArgs, ScaledArgs, Store, TailArgs
from quackish.kernels.gemm.sm90_config import splits_tails
from quackish.ops.linear_cross_entropy.buffers import F32, ExpLogits, RowState
from quackish.ops.linear_cross_entropy.calls import ProblemFields
from quackish.ops.linear_cross_entropy.gemm_problems import (
    SOFTMAX_TILE_N,
    Dlogits,
    DlogitsArgs,
    LceGemmProblem,
    ResidualArgs,
    RowsOut,
    RowsOutArgs,
    Softmax,
    SoftmaxArgs,
    StoreWithResidual,
    splits_dw_tail,
)
from quackish.ops.linear_cross_entropy.row_problems import CompactArgs, LceCompactProblem, LceScaleProblem, ScaleArgs

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


class _Product(NamedTuple):
    """Fields of LceGemmProblem."""

    a_major: str = "k"
    b_major: str = "n"
    live: str = "m"


_DX, _DW = _Product(), _Product(a_major="m", live="k")
_ROWS_OUT, _WITH_RESIDUAL = RowsOut(), StoreWithResidual()
_store = functools.cache(Store)


@functools.lru_cache(maxsize=1024)
def _softmax(shared: ProblemFields) -> tuple[Softmax, Softmax]:
    """The epilogues of the two launches of the logits."""
    return made(Softmax, shared, {}), made(Softmax, shared, {"recompute_flagged": True})


@functools.lru_cache(maxsize=1024)
def _dlogits(shared: ProblemFields, entropy: bool) -> Dlogits:
    return made(Dlogits, shared, {"entropy": entropy})


def made(kind: type, shared: Any, fields: dict[str, Any]) -> Any:
    """A dataclass of class `kind` with these fields, and with its other fields that `shared` has.

    torch dtypes become their names.
    """
    if shared is not None:
        names = {field.name for field in dataclasses.fields(kind)}
        fields = {name: value for name, value in shared._asdict().items() if name in names} | fields
    return kind(**{name: cuda.name_of(f) if isinstance(f, torch.dtype) else f for name, f in fields.items()})


class LceKernels:
    """The kernels on one device. The first call of a kernel compiles or loads it.

    Arguments are those of the kernels (row_problems.py, gemm_problems.py); `softcap` 0 means none. Each kernel's
    module documents it.

    GEMM operands are bf16 or fp16, with unit stride along columns and row strides that are multiples of 8 elements.
    Sums include live rows only: chunk rows [0, num_live - start), where num_live is on the device.
    """

    def __init__(self, device: KernelDevice, loop: Loop = iter):
        """loop: the iterations of a loop that are run; a dry run needs only its `representatives`."""
        self.device, self.gpu, self.stream, self.loop = device, device.gpu, device.stream, loop
        # the epoch of tuned configs, and the kernels chosen in it
        self._kernels: tuple[int, dict[tuple, CompiledKernel]] = choose.epoch, {}

    def kernel(self, kind: type, shared: Any, fields: dict[str, Any]) -> CompiledKernel:
        """The kernel for the problem of class `kind` with these fields, which override `shared`: see `made`."""
        epoch, kernels = self._kernels
        if epoch != choose.epoch:
            _, kernels = self._kernels = choose.epoch, {}
        key = kind, shared, *fields, *fields.values()
        kernel = kernels.get(key)
        if kernel is None:  # if the epoch changes now, this dictionary is dropped
            kernel = kernels[key] = self.device.kernel_for(made(kind, shared, fields), self.gpu)
        return kernel

    def launch(self, args: tuple, kind: type, shared: Any = None, **fields: Any) -> None:
        self.kernel(kind, shared, fields).launch(args, self.stream())

    def ranges(self, n: int, size: int) -> Iterator[tuple[int, int]]:
        """(start, size) of consecutive ranges that cover range(n); only the last may be smaller than `size`."""
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
        args = by_name(CompactArgs)(
            state=state.address, target=target.data_ptr(), class_weight=address(class_weight),
            num_items_at=address(items_tensor), num_items=items, ignore_index=ignore_index, v=v, m=state.m,
        )  # fmt: skip
        self.launch(
            args,
            LceCompactProblem,
            target_dtype=target.dtype,
            class_weight_dtype=dtype_of(class_weight),
            divisor=divisor,
        )

    def scale(self, out: Tensor, factor: Tensor, out2: Tensor | None = None) -> None:
        """out *= factor, out2 *= factor in place; equal dtypes, one fp32 factor. The kernel returns at once for 1."""
        n, n2 = out.numel(), 0 if out2 is None else out2.numel()
        if n + n2 == 0:
            return
        kernel = self.kernel(LceScaleProblem, None, {"dtype": out.dtype})
        num_ctas = kernel.config.num_ctas(max(n, n2) * out.itemsize, self.gpu.sm_count)
        args = by_name(ScaleArgs)(
            out=out.data_ptr(), out2=(out if out2 is None else out2).data_ptr(), factor=factor.data_ptr(), n=n, n2=n2,
            num_ctas=num_ctas,
        )  # fmt: skip
        kernel.launch(args, self.stream())

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
        first, again = _softmax(shared)
        fields = dict(
            epilogue=first, dtype=shared.dtype, out_dtype=dtype_of(out.first), d_in_two=out.second is not None
        )
        kernel = self.kernel(LceGemmProblem, None, fields)
        args = self._multiply(
            kernel, live_x, w, out.first, rows, v, h, state, start, epilogue, second=out.second, split=out.split
        )
        kernel = self.kernel(LceGemmProblem, None, fields | dict(epilogue=again))
        clusters = kernel.config.max_clusters(self.gpu.sm_count)
        args = args if clusters == args.max_clusters else args._replace(max_clusters=clusters)
        kernel.launch(args, self.stream())

    def dlogits(
        self, live_x: Tensor, w: Tensor, out: Tensor, epilogue: DlogitsArgs, shared: ProblemFields, state: RowState,
        start: int,
    ) -> None:  # fmt: skip
        """out (rows, n) = dlogits of the n classes of w: see kernels/epilogue_dlogits.py."""
        fields = dict(epilogue=_dlogits(shared, epilogue.coef_entropy is not None), dtype=shared.dtype)
        kernel = self.kernel(LceGemmProblem, None, fields | dict(out_dtype=out.dtype))
        (n, h), rows = w.shape, live_x.shape[0]
        self._multiply(kernel, live_x, w, out, rows, n, h, state, start, epilogue)

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
        split_tail = split_tail and splits_tails(self.gpu)
        spec: EpilogueSpec = _ROWS_OUT if epilogue is not None else _store(accumulate=accumulate)
        kernel = self.kernel(LceGemmProblem, _DX, dict(
            epilogue=spec, dtype=e.first.dtype, out_dtype=out.dtype, a_in_two=e.second is not None,
            split_k_tail=split_tail,
        ))  # fmt: skip
        (n, h), rows = w.shape, e.first.shape[0]
        self._multiply(
            kernel, e.first, w, out, rows, h, n, state, start, epilogue, split_tail,
            second=e.second, split=e.split,
        )  # fmt: skip

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
        spec: EpilogueSpec = _WITH_RESIDUAL
        if residual is None:
            spec = _store(scaled=factor is not None, accumulate=accumulate)
        kernel = self.kernel(LceGemmProblem, _DW, dict(
            epilogue=spec, dtype=e.dtype, out_dtype=out.dtype, split_k_tail=split_tail
        ))  # fmt: skip
        epilogue = residual if factor is None else by_name(ScaledArgs)(factor=factor.data_ptr())
        self._multiply(kernel, e, scaled_x, out, n, h, rows, state, start, epilogue, split_tail)

    def _multiply(
        self, kernel: CompiledKernel, a: Tensor, b: Tensor, d: Tensor | None, m: int, n: int, k: int, state: RowState,
        start: int, epilogue: tuple | None, split_tail: bool = False, *, second: Tensor | None = None, split: int = 0,
    ) -> GemmArgs:  # fmt: skip
        """Launches a GEMM. Arguments and result are those of GemmArgs."""
        parts, clusters, tail = state.parts, kernel.config.max_clusters(self.gpu.sm_count), None
        if split_tail:
            splits, floats = kernel.config.tail_room(m, n, k, clusters)
            partials = self.device.vector(floats, F32)
            tail = by_name(TailArgs)(partials=partials.data_ptr(), tickets=parts.tickets, max_splits=splits)
        args = by_name(GemmArgs)(
            a.data_ptr(), address(second), b.data_ptr(), address(d), epilogue, tail,
            ticket=parts.tickets + 4 * (NUM_TICKETS - 1), num_live=parts.num_live, m=m, n=n, k=k,
            split=0 if second is None else split, start=start, a_stride=a.stride(0),
            second_stride=0 if second is None else second.stride(0), b_stride=b.stride(0),
            d_stride=0 if d is None else d.stride(0), max_clusters=clusters,
        )  # fmt: skip
        kernel.launch(args, self.stream())
        return args
