"""The steps of `reference.py` with kernels: bf16 and fp16 on Hopper, with a bias or a mask.

Kernels read tensors in place if columns are contiguous and all rows start on 16 bytes; other q, k and v are copied. A
bias or mask of any strides is read in place, but slower.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quackish.device import choose
from quackish.device.arguments import by_name
from quackish.device.cuda import address, dtype_name, name_of
from quackish.device.kernel_device import KernelDevice
from quackish.once import once
from quackish.ops.attention.arguments import (
    BLOCK,
    MAX_D,
    MIXED,
    ORDERED,
    BiasArgs,
    ForwardArgs,
    KeysArgs,
    MaskArgs,
    OrderArgs,
    ProductArgs,
    QueriesArgs,
    RowsArgs,
    ScoreArgs,
    Strided,
)
from quackish.ops.attention.config import bias_parts
from quackish.ops.attention.problems import (
    AttentionMaskProblem,
    AttentionOrderProblem,
    AttentionRowsProblem,
)
from quackish.ops.attention.reference import Gradients, Inputs, Options, strides_like
from quackish.ops.attention.score_problems import (
    AttentionBiasProblem,
    AttentionForwardProblem,
    AttentionKeysProblem,
    AttentionProblem,
    AttentionProductProblem,
    AttentionQueriesProblem,
)

Problem = AttentionProblem | AttentionMaskProblem | AttentionOrderProblem | AttentionRowsProblem

_UNBOUNDED = 1 << 30
_OF_PRODUCT: dict[str, Any] = dict(bias_dtype=None, bias_aligned=True, mask_aligned=False, paired=False, short=False)


def why_unsupported(inputs: Inputs, need_dbias: bool = False) -> str:
    """Why kernels do not cover these tensors; "" if they do."""
    q, k, v, bias, _ = inputs
    d = q.shape[3]
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"{q.dtype}; supported: torch.bfloat16, torch.float16"
    if d != v.shape[3]:
        return f"head dimensions {d} of query and {v.shape[3]} of value; expected equal ones"
    if d > MAX_D or d % 8:
        return f"a head dimension of {d}; expected a multiple of 8 up to {MAX_D}"
    if bias is not None and bias.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"a bias of {bias.dtype}; supported: torch.bfloat16, torch.float16, torch.float32"
    if q.shape[2] <= 1:
        return "a single query"
    if max(q.shape[2], k.shape[2]) >= _UNBOUNDED:
        return f"{max(q.shape[2], k.shape[2])} queries or keys; expected fewer than 2**30"
    if need_dbias and bias.shape[2:] != (q.shape[2], k.shape[2]):
        return "the gradient of a bias that is the same for all queries or keys"
    return ""


class AttentionSteps:
    """The steps on one device, with the names, arguments and results of the functions in `reference.py`.

    Both also take `plan`, the result of the method of this name, which forward keeps for backward.
    """

    def __init__(self, device: KernelDevice):
        self.device, self.stream, self.empty = device, device.stream, device.empty
        self._kernel = functools.lru_cache(maxsize=1024)(self._find_kernel)

    def plan(self, inputs: Inputs, options: Options) -> Tensor | None:
        """What kernels read about a mask, in memory as `layout_of_plan` says.

        For each block, whether no key, some keys or all keys take part; and the order in which tiles start, unless it
        depends on causality or a window, or the mask is one of keys.
        """
        mask = inputs.mask
        if mask is None:
            return None
        num_q, num_k = inputs.q.shape[2], inputs.k.shape[2]
        layout = layout_of_plan(mask.shape, num_q, num_k)
        plan = self._contiguous((layout.bytes,), torch.uint8)
        batches, heads, rows, columns = mask.shape
        start = plan.data_ptr()

        # classes of blocks
        by_vectors = _is_aligned(mask, rows, columns) and columns % 16 == 0
        of_mask = by_name(MaskArgs)(
            mask=_broadcast(mask, by_vectors), classes=start + layout.classes, batches=batches, heads=heads, rows=rows,
            columns=columns,
        )  # fmt: skip
        self._launch(AttentionMaskProblem(by_vectors), of_mask)

        # order of tiles
        if options.has_band or mask_of_keys(inputs):  # no kernel reads it
            return plan
        if layout.tiles == (1, 1):  # such as many small windows
            plan[: layout.classes].zero_()
            return plan
        of_order = by_name(OrderArgs)(
            classes=Strided(start + layout.classes, *layout.of_classes), of_queries=start,
            of_keys=start + layout.of_keys, batches=batches, heads=heads, num_q=num_q, num_k=num_k,
        )  # fmt: skip
        self._launch(AttentionOrderProblem(), of_order)
        return plan

    def forward(self, inputs: Inputs, options: Options, plan: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Launches one kernel."""
        inputs = _readable(inputs)
        q = inputs.q
        out, (lse, residual) = self._like(q), (self._contiguous(q.shape[:3], torch.float32) for _ in range(2))
        problem = AttentionForwardProblem(**_problem(inputs, options))
        args = by_name(ForwardArgs)(
            scores=self._scores(inputs, plan, options, problem), o=_strided(out), lse=lse.data_ptr(),
            lse_residual=residual.data_ptr(),
        )  # fmt: skip
        self._launch(problem, args)
        return out, lse, residual

    def backward(
        self, do: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, residual: Tensor, inputs: Inputs,
        options: Options, need_dbias: bool, plan: Tensor | None,
    ) -> Gradients:  # fmt: skip
        """Launches a kernel for statistics of rows, one for dk and dv, one for dq, and one for a broadcast bias."""
        q, k, v, bias, _ = inputs = _readable(inputs)
        do, out, lse, residual = _aligned(do), _aligned(out), lse.contiguous(), residual.contiguous()
        dlse = None if dlse is None else dlse.float().contiguous()
        batch, heads, num_q, d = q.shape
        need_dbias = need_dbias and bias is not None
        in_place = need_dbias and bias.shape[:2] == q.shape[:2]  # not broadcast
        dbias = self._dbias(inputs, options) if in_place else None
        stats_row = (num_q + 3) // 4 * 4
        stats = self._contiguous((4, batch, heads, stats_row), torch.float32)
        dq, dk, dv = self._like(q), self._like(k), self._like(v)
        fields, grad, at_stats = _problem(inputs, options), _strided(do), stats.data_ptr()

        # statistics of rows
        of_rows = by_name(RowsArgs)(
            o=_strided(out), do=grad, lse=lse.data_ptr(), lse_residual=residual.data_ptr(), dlse=address(dlse),
            stats=at_stats, stats_row=stats_row, batch=batch, heads=heads, num_q=num_q, d=d,
        )  # fmt: skip
        self._launch(AttentionRowsProblem(fields["dtype"], dlse is not None), of_rows)

        # dk, dv, and dbias in place. No launch follows before dq's, which relies on what this kernel waited for.
        problem = AttentionKeysProblem(**fields, dbias=in_place)
        scores = self._scores(inputs, plan, options, problem)
        ds = None if dbias is None else _strided(dbias)
        of_keys = by_name(KeysArgs)(
            scores=scores._replace(order=_order(inputs, plan, problem, of_keys=True)), do=grad, stats=at_stats,
            stats_row=stats_row, dk=_strided(dk), dv=_strided(dv), dbias=ds,
        )  # fmt: skip
        self._launch(problem, of_keys)

        # dq: from ds if dbias holds it, else with ds computed again
        if problem.ds_is_dbias:
            product = AttentionProductProblem(**fields | _OF_PRODUCT)
            without = scores._replace(bias=None, mask=None)
            self._launch(product, by_name(ProductArgs)(scores=without, ds=ds, dq=_strided(dq)))
        else:
            of_queries = by_name(QueriesArgs)(
                scores=scores, do=grad, stats=at_stats, stats_row=stats_row, dq=_strided(dq)
            )
            self._launch(AttentionQueriesProblem(**fields), of_queries)

        if need_dbias and not in_place:
            unfilled = by_name(BiasArgs)(
                scores=scores._replace(order=None), do=grad, stats=at_stats, stats_row=stats_row
            )
            dbias = self._broadcast_dbias(bias, unfilled, fields)
        return Gradients(dq, dk, dv, dbias)

    def _dbias(self, inputs: Inputs, options: Options) -> Tensor:
        """Memory for the gradient of a bias that is not broadcast."""
        dbias = self._rows_of_16_bytes(inputs.bias.shape, inputs.bias.dtype)[..., : inputs.bias.shape[-1]]
        # The kernel writes only tiles with keys that take part.
        writes_all = inputs.mask is None and options.left is None and options.right is None
        return dbias if writes_all else dbias.zero_()

    def _broadcast_dbias(self, bias: Tensor, args: BiasArgs, fields: dict[str, Any]) -> Tensor:
        """The gradient of a bias that is broadcast over batch or heads. args: without what describes dbias."""
        scores, (batch, heads) = args.scores, bias.shape[:2]
        shape = (batch, heads, scores.num_q, scores.num_k)
        summed = scores.batch // batch * (scores.heads // heads)
        d, sm_count = fields["d"], self.device.gpu.sm_count
        parts = bias_parts(summed, batch * heads, scores.num_q, scores.num_k, d, sm_count)
        sums = self._rows_of_16_bytes((parts, *shape), torch.float32 if parts > 1 else bias.dtype)
        part, *strides = sums.stride()[:-1]
        args = args._replace(
            dbias=Strided(sums.data_ptr(), *strides), part=part, parts=parts, batches=batch, bias_heads=heads
        )
        in_parts = parts > 1 and bias.dtype != torch.float32  # in fp32 both are one kernel
        self._launch(AttentionBiasProblem(**fields | dict(paired=False, short=False), in_parts=in_parts), args)
        total = sums.sum(0) if parts > 1 else sums[0]
        return total[..., : scores.num_k].to(bias.dtype)

    def _scores(self, inputs: Inputs, plan: Tensor | None, options: Options, problem: AttentionProblem) -> ScoreArgs:
        """What the scores depend on, with the order of queries' tiles."""
        q, k, v, bias, mask = inputs
        left = right = None
        if problem.band:
            left, right = _bounded(options.left), _bounded(options.right)
        batch, heads, num_q, d = q.shape
        classes = None
        if mask is not None:
            layout = layout_of_plan(mask.shape, num_q, k.shape[2])
            classes = Strided(plan.data_ptr() + layout.classes, *layout.of_classes)
        return ScoreArgs(
            q=_strided(q), k=_strided(k), v=_strided(v), bias=_broadcast(bias, problem.bias_aligned),
            mask=_broadcast(mask, problem.mask_by_tma), classes=classes,
            order=_order(inputs, plan, problem, of_keys=False), scale=options.scale, softcap=options.softcap,
            left=left, right=right, batch=batch, heads=heads, group=heads // k.shape[1], num_q=num_q,
            num_k=k.shape[2], d=d, max_ctas=self.device.gpu.sm_count,
        )  # fmt: skip

    def _rows_of_16_bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory with more columns than `shape`, if its rows would not start on 16 bytes."""
        *sizes, columns = shape
        return self._contiguous((*sizes, (columns + 7) // 8 * 8), dtype)

    # Memory and launches

    def _contiguous(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return self.empty(tuple(shape), _contiguous_strides(shape), dtype)

    def _like(self, t: Tensor) -> Tensor:
        return self.empty(tuple(t.shape), strides_like(t, t.shape[3]), t.dtype)

    def _launch(self, problem: Problem, args: tuple) -> None:
        self._kernel(choose.epoch, problem)(args, self.stream())

    def _find_kernel(self, epoch: int, problem: Problem) -> Callable[..., None]:
        return self.device.kernel_for(problem, self.device.gpu).launch


@functools.lru_cache(maxsize=4096)
def _contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def steps_of(device: KernelDevice) -> AttentionSteps:
    """The steps that the calls on a device share."""
    return once(device.cache, "attention", AttentionSteps, device)


# The plan of a mask ---------------------------------------------------------------------------------------------------


class PlanLayout(NamedTuple):
    """Where the parts of a plan are, in bytes: the order of queries' tiles, that of keys' tiles, and classes.

    Orders are int32 (batches, heads, tiles), with the batches and heads of the mask. Classes are uint8 (batches, heads,
    blocks of queries, blocks of keys): one block in a dimension in which the mask has size 1.
    """

    bytes: int
    of_keys: int
    classes: int
    tiles: tuple[int, int]  # of queries and of keys
    of_classes: tuple[int, ...]  # strides


@functools.lru_cache(maxsize=4096)
def layout_of_plan(mask: tuple[int, ...], num_q: int, num_k: int) -> PlanLayout:
    """mask: its shape."""
    batches, heads, rows, columns = mask
    tiles_q, tiles_k = (_ceil_div(n, ORDERED) for n in (num_q, num_k))
    of_keys = 4 * batches * heads * tiles_q
    classes = of_keys + 4 * batches * heads * tiles_k
    strides = _contiguous_strides((batches, heads, _ceil_div(rows, BLOCK), _ceil_div(columns, BLOCK)))
    strides = tuple(0 if size == 1 else stride for size, stride in zip(mask, strides, strict=True))
    return PlanLayout(plan_bytes(mask, num_q, num_k), of_keys, classes, (tiles_q, tiles_k), strides)


def plan_bytes(mask: Sequence[int], num_q: int, num_k: int) -> int:
    """mask: its shape. Sizes may be symbolic."""
    batches, heads, rows, columns = mask
    tiles = _ceil_div(num_q, ORDERED) + _ceil_div(num_k, ORDERED)
    return batches * heads * (4 * tiles + _ceil_div(rows, BLOCK) * _ceil_div(columns, BLOCK))


def _ceil_div(a: int, b: int) -> int:
    return (a + b - 1) // b


def unknown_plan(inputs: Inputs) -> Tensor | None:
    """What the portable path keeps, which reads no plan: MIXED is right for every block, and any order of all tiles."""
    mask = inputs.mask
    if mask is None:
        return None
    layout = layout_of_plan(mask.shape, inputs.q.shape[2], inputs.k.shape[2])
    plan = mask.new_full((layout.bytes,), MIXED, dtype=torch.uint8)
    for start, end, tiles in zip((0, layout.of_keys), (layout.of_keys, layout.classes), layout.tiles, strict=True):
        orders = plan[start:end].view(torch.int32).view(-1, max(1, tiles))
        orders.copy_(torch.arange(orders.shape[1], dtype=torch.int32, device=mask.device))
    return plan


def _order(inputs: Inputs, plan: Tensor | None, problem: AttentionProblem, of_keys: bool) -> Strided | None:
    if not problem.ordered:
        return None
    batches, heads = inputs.mask.shape[:2]
    layout = layout_of_plan(inputs.mask.shape, inputs.q.shape[2], inputs.k.shape[2])
    tiles = layout.tiles[of_keys]
    start = plan.data_ptr() + of_keys * layout.of_keys
    return Strided(start, 0 if batches == 1 else heads * tiles, 0 if heads == 1 else tiles, 1)


# Operands -------------------------------------------------------------------------------------------------------------


def _readable(inputs: Inputs) -> Inputs:
    q, k, v, bias, mask = inputs
    return Inputs(_aligned(q), _aligned(k), _aligned(v), bias, mask)


def _aligned(t: Tensor) -> Tensor:
    """t, or a copy if TMA cannot read it."""
    if t.data_ptr() % 16 == 0 and _strides(t.shape, t.stride()) is not None:
        return t
    return t.clone(memory_format=torch.contiguous_format)


def _strided(t: Tensor) -> Strided:
    """t of `_aligned`."""
    return Strided(t.data_ptr(), *_strides(t.shape, t.stride()))


# What depends on shapes and strides alone is kept: without that, forward and backward took 1.4 times the CPU time.


@functools.lru_cache(maxsize=4096)
def _strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...] | None:
    """Strides of batch, head and row; None if TMA cannot read such a tensor of 16 bits.

    The stride of a dimension of size 1 is not used, but must be legal.
    """
    used = tuple(stride if size > 1 else 8 for stride, size in zip(strides[:3], shape, strict=False))
    return used if strides[3] == 1 and all(stride > 0 and stride % 8 == 0 for stride in used) else None


@functools.lru_cache(maxsize=4096)
def _has_aligned_rows(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int, num_q: int, num_k: int) -> bool:
    batch, head, row, column = strides
    used = [s * itemsize for s, size in ((batch, shape[0]), (head, shape[1]), (row, num_q)) if size > 1]
    return (
        shape[2:] == (num_q, num_k) and column == 1 and row > 0 and min(used, default=0) >= 0
        and all(stride % 16 == 0 for stride in used)
    )  # fmt: skip


@functools.lru_cache(maxsize=4096)
def _broadcast_strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(0 if size == 1 else stride for size, stride in zip(shape, strides, strict=True))


def _is_aligned(t: Tensor | None, num_q: int, num_k: int) -> bool:
    """True if TMA can load tiles of a bias or mask."""
    if t is None:
        return True
    return t.data_ptr() % 16 == 0 and _has_aligned_rows(t.shape, t.stride(), t.itemsize, num_q, num_k)


def _broadcast(t: Tensor | None, aligned: bool) -> Strided | None:
    """A bias or a mask."""
    if t is None:
        return None
    batch, head, row, column = _broadcast_strides(t.shape, t.stride())
    return Strided(t.data_ptr(), batch, head, row, None if aligned else column)


def mask_of_keys(inputs: Inputs) -> bool:
    """True if the mask is the same for all queries, and for the heads that share a head of keys."""
    q, k, mask = inputs.q, inputs.k, inputs.mask
    return mask is not None and mask.shape[2] == 1 and (mask.shape[1] == 1 or k.shape[1] == q.shape[1])


def _bounded(n: int | None) -> int:
    return _UNBOUNDED if n is None else min(n, _UNBOUNDED)


def _problem(inputs: Inputs, options: Options) -> dict[str, Any]:
    q, k, _, bias, mask = inputs
    num_q, num_k = q.shape[2], k.shape[2]
    of_keys, d = mask_of_keys(inputs), (q.shape[3] + 31) // 32 * 32
    bias_aligned = _is_aligned(bias, num_q, num_k)
    paired = d == 32 and bias is not None and bias_aligned and bias.shape[0] < q.shape[0] and (mask is None or of_keys)
    return dict(
        dtype=name_of(q.dtype), d=d, bias_dtype=dtype_name(bias),
        bias_aligned=bias_aligned, mask=mask is not None,
        mask_aligned=of_keys or _is_aligned(mask, num_q, num_k), softcap=options.softcap is not None,
        band=options.has_band, mask_of_keys=of_keys, paired=paired, short=paired and max(num_q, num_k) <= BLOCK,
    )  # fmt: skip
