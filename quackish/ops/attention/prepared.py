"""What the launches of a call need besides addresses. It depends on shapes, strides, dtypes and options only."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quackish.device.arguments import by_name
from quackish.device.cuda import dtype_name, name_of
from quackish.device.work import ceil_div
from quackish.ops.attention.arguments import BLOCK, ScoreArgs, Strided
from quackish.ops.attention.config import cluster_of_keys, parts_of_workers, resident_clusters
from quackish.ops.attention.mask_plan import contiguous_strides, layout_of_plan
from quackish.ops.attention.problems import AttentionMaskProblem, AttentionOrderProblem, AttentionRowsProblem
from quackish.ops.attention.reference import Inputs, Options, strides_like
from quackish.ops.attention.score_problems import (
    AttentionForwardProblem,
    AttentionKeysProblem,
    AttentionProblem,
    AttentionQueriesProblem,
)
from quackish.ops.attention.small_problems import AttentionSmallBackwardProblem, AttentionSmallForwardProblem

UNBOUNDED = 1 << 30

Problem = AttentionProblem | AttentionMaskProblem | AttentionOrderProblem | AttentionRowsProblem
Sizes = tuple[int, ...]
strided_at, _score_args = by_name(Strided), by_name(ScoreArgs)


class Kernel(NamedTuple):
    problem: Any  # a Problem
    launch: Callable[..., None]


class Result(NamedTuple):
    memory: tuple[Sizes, Sizes, torch.dtype]  # arguments of `KernelDevice.empty`
    strides: Sizes  # of `Strided`

    @classmethod
    def like(cls, t: Tensor) -> "Result":
        shape, strides = tuple(t.shape), strides_like(t, t.shape[3])
        return cls((shape, strides, t.dtype), legal_strides(shape, strides))


class Prepared:
    """A call whose q, k and v kernels can read in place. Forward and backward share it."""

    def __init__(
        self, inputs: Inputs, options: Options, find: Callable[[Problem], Kernel], max_ctas: int, bias_aligned: bool,
        mask_aligned: bool,
    ) -> None:  # fmt: skip
        """bias_aligned, mask_aligned: their addresses are multiples of 16 bytes."""
        q, k, v, bias, mask = inputs
        (batch, heads, num_q, d), (_, k_heads, num_k, _) = q.shape, k.shape
        bias_aligned, mask_aligned = (
            t is None or (is_aligned and has_aligned_rows(t.shape, t.stride(), t.itemsize, num_q, num_k))
            for t, is_aligned in ((bias, bias_aligned), (mask, mask_aligned))
        )
        self._find = find
        self._kernels: dict[tuple, Kernel] = {}
        self.d, of_keys = (d + 31) // 32 * 32, mask_of_keys(inputs)
        plain = self.d == 32 and bias_aligned and (mask is None or of_keys)
        plain = plain and options.softcap is None and not options.has_band and (bias is None or bias.itemsize == 2)
        wide_q, wide_k = (plain and _tile_rows(n, 3) <= _tile_rows(n, 2) for n in (num_q, num_k))
        self._wide = {
            AttentionForwardProblem: wide_q, AttentionQueriesProblem: wide_q, AttentionKeysProblem: wide_k,
        }  # fmt: skip
        self._fields: dict[str, Any] = dict(
            dtype=name_of(q.dtype), d=self.d, bias_dtype=dtype_name(bias), bias_aligned=bias_aligned,
            mask=mask is not None, mask_aligned=mask_aligned or of_keys, softcap=options.softcap is not None,
            band=options.has_band, mask_of_keys=of_keys,
        )  # fmt: skip

        # small calls
        self._of_small = dict(mask_aligned=of_keys, pairs=max(num_q, num_k) <= BLOCK)
        self.is_small, self.is_small_forward = is_small(inputs, options), is_small_forward(inputs, options)
        batches, heads_of_bias = (batch, heads) if bias is None else bias.shape[:2]
        workers = max_ctas * (2 if self._of_small["pairs"] else 1)
        summed = batch // batches * (heads // heads_of_bias)
        parts = parts_of_workers(summed, batches * heads_of_bias, workers)
        self.items = dict(parts=parts, batches=batches, heads_of_bias=heads_of_bias)  # of `SmallForwardArgs`
        self.owns_bias = (batches, heads_of_bias) == (batch, heads)  # it is not broadcast

        # dq and the gradient of a broadcast bias in one kernel
        is_broadcast = bias is not None and not self.owns_bias
        cluster = cluster_of_keys(num_k) if plain and is_broadcast and not self.is_small else None
        self.clusters = None  # or (CTAs of each, blocks of keys of a CTA, parts)
        if cluster is not None:
            tiles = batches * heads_of_bias * ceil_div(num_q, 2 * BLOCK)
            self.clusters = *cluster, parts_of_workers(summed, tiles, resident_clusters(cluster[0], max_ctas))

        # results
        self.o, self.dk, self.dv = Result.like(q), Result.like(k), Result.like(v)
        self.rows = tuple(q.shape[:3]), contiguous_strides(q.shape[:3]), torch.float32
        self.stats_row = (num_q + 3) // 4 * 4
        stats = 4, batch, heads, self.stats_row
        self.stats = stats, contiguous_strides(stats), torch.float32

        # arguments
        self._strides = [legal_strides(t.shape, t.stride()) for t in (q, k, v)]
        self._of_bias = None if bias is None else broadcast_strides(bias.shape, bias.stride(), bias_aligned)
        self._of_mask, self._of_small_mask = (
            None if mask is None else broadcast_strides(mask.shape, mask.stride(), by_tma)
            for by_tma in (mask_aligned and not of_keys, False)
        )
        self._plan = None if mask is None else layout_of_plan(tuple(mask.shape), num_q, num_k)
        self._ordered = mask is not None and not options.has_band and not of_keys
        bounds = (_bounded(options.left), _bounded(options.right)) if options.has_band else (None, None)
        self._numbers = (
            options.scale, options.softcap, *bounds, batch, heads, heads // k_heads, num_q, num_k, d, max_ctas,
        )  # fmt: skip

    def kernel(self, kind: type, **fields: Any) -> Kernel:
        """The kernel for the problem of class `kind` with these fields, and with its other fields that all share."""
        key = kind, *fields.values()
        found = self._kernels.get(key)
        if found is None:
            names = {field.name for field in dataclasses.fields(kind)}
            shared = {name: value for name, value in self._fields.items() if name in names}
            shared |= {"wide": self._wide[kind] and not fields.get("dbias")} if kind in self._wide else {}
            found = self._kernels[key] = self._find(kind(**shared | fields))
        return found

    def small_forward(self) -> Kernel:
        return self.kernel(AttentionSmallForwardProblem, **self._of_small)

    def small_backward(self, dlse: bool, dbias_dtype: torch.dtype | None) -> Kernel:
        f = self._fields
        ds_is_dbias = dbias_dtype is not None and self.owns_bias and name_of(dbias_dtype) == f["dtype"]
        return self.kernel(
            AttentionSmallBackwardProblem, dlse=dlse, dbias_dtype=dbias_dtype and name_of(dbias_dtype),
            ds_is_dbias=ds_is_dbias, **self._of_small,
        )  # fmt: skip

    def scores(self, inputs: Inputs, plan: Tensor | None, small: bool = False) -> ScoreArgs:
        """What the scores depend on, with the order of queries' tiles. small: for a kernel of small calls."""
        q, k, v, bias, mask = inputs
        of_q, of_k, of_v = self._strides
        of_mask = classes = order = None
        if mask is not None:
            of_mask = strided_at(mask.data_ptr(), *(self._of_small_mask if small else self._of_mask))
        if mask is not None and not small:
            classes = strided_at(plan.data_ptr() + self._plan.classes, *self._plan.of_classes)
            order = self.order(plan) if self._ordered else None
        return _score_args(
            strided_at(q.data_ptr(), *of_q), strided_at(k.data_ptr(), *of_k), strided_at(v.data_ptr(), *of_v),
            None if bias is None else strided_at(bias.data_ptr(), *self._of_bias), of_mask, classes, order,
            *self._numbers,
        )  # fmt: skip

    def order(self, plan: Tensor, of_keys: bool = False) -> Strided:
        batches, heads = self._plan.tensors
        tiles, start = self._plan.tiles[of_keys], plan.data_ptr() + of_keys * self._plan.of_keys
        return Strided(start, 0 if batches == 1 else heads * tiles, 0 if heads == 1 else tiles, 1)


def _tile_rows(n: int, num_wgs: int) -> int:
    """The rows of all tiles of n rows."""
    return ceil_div(n, num_wgs * BLOCK) * num_wgs * BLOCK


def is_small(inputs: Inputs, options: Options) -> bool:
    """True if the whole backward is one kernel."""
    q, k = inputs.q, inputs.k
    fits = q.shape[3] <= 32 and max(q.shape[2], k.shape[2]) <= 2 * BLOCK
    return fits and q.shape[1] == k.shape[1] and options.softcap is None


def is_small_forward(inputs: Inputs, options: Options) -> bool:
    """True if forward has the kernel for small calls: always for one block, else where it is faster.

    Forward of 64, 32, 128, 24 with a bias of its own takes 67 us with it, and 52 without (H200, behind GEMMs).
    """
    num_q, num_k = inputs.q.shape[2], inputs.k.shape[2]
    return is_small(inputs, options) and (max(num_q, num_k) <= BLOCK or num_k % 8 != 0)


def mask_of_keys(inputs: Inputs) -> bool:
    """True if the mask is the same for all queries, and for the heads that share a head of keys."""
    q, k, mask = inputs.q, inputs.k, inputs.mask
    return mask is not None and mask.shape[2] == 1 and (mask.shape[1] == 1 or k.shape[1] == q.shape[1])


# Strides --------------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=4096)
def legal_strides(shape: Sizes, strides: Sizes) -> Sizes | None:
    """Strides of batch, head and row; None if TMA cannot read such a tensor of 16 bits.

    The stride of a dimension of size 1 is not used, but must be legal.
    """
    used = tuple(stride if size > 1 else 8 for stride, size in zip(strides[:3], shape, strict=False))
    return used if strides[3] == 1 and all(stride > 0 and stride % 8 == 0 for stride in used) else None


def strided(t: Tensor) -> Strided:
    """A tensor that has `legal_strides`."""
    return strided_at(t.data_ptr(), *legal_strides(t.shape, t.stride()))


def has_aligned_rows(shape: Sizes, strides: Sizes, itemsize: int, num_q: int, num_k: int) -> bool:
    """True if TMA can load tiles of such a bias or mask whose address is aligned."""
    batch, head, row, column = strides
    used = [s * itemsize for s, size in ((batch, shape[0]), (head, shape[1]), (row, num_q)) if size > 1]
    return (
        shape[2:] == (num_q, num_k) and column == 1 and row > 0 and min(used, default=0) >= 0
        and all(stride % 16 == 0 for stride in used)
    )  # fmt: skip


def broadcast_strides(shape: Sizes, strides: Sizes, is_aligned: bool) -> tuple[int | None, ...]:
    """Strides of a bias or a mask: 0 where it is broadcast, and no column if TMA loads it."""
    *used, column = (0 if size == 1 else stride for size, stride in zip(shape, strides, strict=True))
    return *used, None if is_aligned else column


def _bounded(n: int | None) -> int:
    return UNBOUNDED if n is None else min(n, UNBOUNDED)
