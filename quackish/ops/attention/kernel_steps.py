"""The steps of `reference.py` with kernels: bf16 and fp16 on Hopper, with a bias or a mask.

Kernels read tensors in place if columns are contiguous and all rows start on 16 bytes; other q, k and v are copied. A
bias or mask of any strides is read in place, but slower.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from quackish.device import choose
from quackish.device.arguments import by_name
from quackish.device.cuda import address
from quackish.device.kernel_device import KernelDevice
from quackish.once import once
from quackish.ops.attention.arguments import (
    MAX_D,
    BiasArgs,
    ForwardArgs,
    KeysArgs,
    MaskArgs,
    OrderArgs,
    ProductArgs,
    QueriesArgs,
    RowsArgs,
    ScoreArgs,
    SmallBackwardArgs,
    SmallForwardArgs,
    Strided,
)
from quackish.ops.attention.config import bias_parts
from quackish.ops.attention.mask_plan import contiguous_strides, layout_of_plan
from quackish.ops.attention.prepared import (
    UNBOUNDED,
    Kernel,
    Prepared,
    Problem,
    broadcast_strides,
    has_aligned_rows,
    is_small_forward,
    legal_strides,
    mask_of_keys,
    strided,
    strided_at,
)
from quackish.ops.attention.problems import (
    AttentionMaskProblem,
    AttentionOrderProblem,
    AttentionRowsProblem,
)
from quackish.ops.attention.reference import Gradients, Inputs, Options, empty_like
from quackish.ops.attention.score_problems import (
    AttentionBiasProblem,
    AttentionForwardProblem,
    AttentionKeysProblem,
    AttentionProductProblem,
    AttentionQueriesBiasProblem,
    AttentionQueriesProblem,
)
from quackish.ops.shared.signatures import PerSignature

_OF_PRODUCT: dict[str, Any] = dict(bias_dtype=None, bias_aligned=True, mask_aligned=False)


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
    if max(q.shape[2], k.shape[2]) >= UNBOUNDED:
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
        self._prepared = PerSignature(self._prepare)

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
        plan = self.empty((layout.bytes,), (1,), torch.uint8)
        if is_small_forward(inputs, options):  # no kernel reads it
            return plan
        batches, heads, rows, columns = mask.shape
        start = plan.data_ptr()

        # classes of blocks
        by_vectors = mask.data_ptr() % 16 == columns % 16 == 0
        by_vectors = by_vectors and has_aligned_rows(mask.shape, mask.stride(), 1, rows, columns)
        strides = broadcast_strides(mask.shape, mask.stride(), by_vectors)
        of_mask = by_name(MaskArgs)(
            mask=strided_at(mask.data_ptr(), *strides), classes=start + layout.classes, batches=batches, heads=heads,
            rows=rows, columns=columns,
        )  # fmt: skip
        self._launch(self._kernel(choose.epoch, AttentionMaskProblem(by_vectors)), of_mask)

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
        self._launch(self._kernel(choose.epoch, AttentionOrderProblem()), of_order)
        return plan

    def forward(self, inputs: Inputs, options: Options, plan: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Launches one kernel."""
        inputs, call = self._prepare_call(inputs, options)
        out, lse, residual = self.empty(*call.o.memory), self.empty(*call.rows), self.empty(*call.rows)
        results: dict[str, Any] = dict(
            o=strided_at(out.data_ptr(), *call.o.strides), lse=lse.data_ptr(), lse_residual=residual.data_ptr()
        )
        if call.is_small_forward:
            scores = call.scores(inputs, plan, small=True)
            args = by_name(SmallForwardArgs)(scores=scores, **results, **call.items)
            self._launch(call.small_forward(), args)
        else:
            args = by_name(ForwardArgs)(scores=call.scores(inputs, plan), **results)
            self._launch(call.kernel(AttentionForwardProblem), args)
        return out, lse, residual

    def backward(
        self, do: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, residual: Tensor, inputs: Inputs,
        options: Options, need_dbias: bool, plan: Tensor | None,
    ) -> Gradients:  # fmt: skip
        """Launches one kernel if the call `is_small`.

        Otherwise: one for statistics of rows, one for dk and dv, and one or two for dq and a broadcast bias.
        """
        inputs, call = self._prepare_call(inputs, options)
        q, _, _, bias, _ = inputs
        do, out, lse, residual = _aligned(do), _aligned(out), lse.contiguous(), residual.contiguous()
        dlse = None if dlse is None else dlse.float().contiguous()
        if call.is_small:
            return self._small_backward(do, dlse, out, lse, residual, inputs, need_dbias, plan, call)
        batch, heads, num_q, d = q.shape
        need_dbias = need_dbias and bias is not None
        in_place = need_dbias and bias.shape[:2] == q.shape[:2]  # not broadcast
        dbias = self._dbias(inputs, options) if in_place else None
        stats_row, stats = call.stats_row, self.empty(*call.stats)
        dq, dk, dv = self.empty(*call.o.memory), self.empty(*call.dk.memory), self.empty(*call.dv.memory)
        grad, at_stats = strided(do), stats.data_ptr()
        of_dq = strided_at(dq.data_ptr(), *call.o.strides)

        # statistics of rows
        of_rows = by_name(RowsArgs)(
            o=strided(out), do=grad, lse=lse.data_ptr(), lse_residual=residual.data_ptr(), dlse=address(dlse),
            stats=at_stats, stats_row=stats_row, batch=batch, heads=heads, num_q=num_q, d=d,
        )  # fmt: skip
        self._launch(call.kernel(AttentionRowsProblem, dlse=dlse is not None), of_rows)

        # dk, dv, and dbias in place. No launch follows before dq's, which relies on what this kernel waited for.
        keys, scores = call.kernel(AttentionKeysProblem, dbias=in_place), call.scores(inputs, plan)
        ds = None if dbias is None else strided(dbias)
        of_keys = by_name(KeysArgs)(
            scores=scores if scores.order is None else scores._replace(order=call.order(plan, of_keys=True)), do=grad,
            stats=at_stats, stats_row=stats_row, dk=strided_at(dk.data_ptr(), *call.dk.strides),
            dv=strided_at(dv.data_ptr(), *call.dv.strides), dbias=ds,
        )  # fmt: skip
        self._launch(keys, of_keys)

        # dq: together with dbias, from ds if dbias holds it, else with ds computed again
        if need_dbias and call.clusters is not None:
            return Gradients(dq, dk, dv, self._queries_and_bias(bias, scores, grad, stats, of_dq, call))
        if keys.problem.ds_is_dbias:
            product = call.kernel(AttentionProductProblem, **_OF_PRODUCT)
            without = scores._replace(bias=None, mask=None)
            self._launch(product, by_name(ProductArgs)(scores=without, ds=ds, dq=of_dq))
        else:
            of_queries = by_name(QueriesArgs)(
                scores=scores, do=grad, stats=at_stats, stats_row=stats_row, dq=of_dq
            )  # fmt: skip
            self._launch(call.kernel(AttentionQueriesProblem), of_queries)

        if need_dbias and not in_place:
            dbias = self._broadcast_dbias(bias, scores._replace(order=None), grad, stats, call)
        return Gradients(dq, dk, dv, dbias)

    def _dbias(self, inputs: Inputs, options: Options) -> Tensor:
        """Memory for the gradient of a bias that is not broadcast."""
        dbias = self._rows_of_16_bytes(inputs.bias.shape, inputs.bias.dtype)
        # The kernel writes only tiles with keys that take part.
        writes_all = inputs.mask is None and options.left is None and options.right is None
        return dbias if writes_all else dbias.zero_()

    def _queries_and_bias(
        self, bias: Tensor, scores: ScoreArgs, do: Strided, stats: Tensor, dq: Strided, call: Prepared
    ) -> Tensor:  # fmt: skip
        """Computes dq, and the gradient of a broadcast bias."""
        ctas, blocks, parts = call.clusters
        batches, heads = bias.shape[:2]
        sums = self._sums(bias, parts)
        args = by_name(BiasArgs)(
            scores=scores, do=do, stats=stats.data_ptr(), stats_row=call.stats_row, dq=dq,
            dbias=Strided(sums.data_ptr(), *sums.stride()[-4:-1]), part=sums.stride(0), parts=parts, batches=batches,
            heads_of_bias=heads,
        )  # fmt: skip
        in_parts = parts > 1
        self._launch(call.kernel(AttentionQueriesBiasProblem, in_parts=in_parts, ctas=ctas, blocks=blocks), args)
        return sums.sum(0).to(bias.dtype) if parts > 1 else sums

    def _sums(self, bias: Tensor, parts: int) -> Tensor:
        """Memory for the gradient of a bias, or for its parts in fp32."""
        shape = (*[parts] * (parts > 1), *bias.shape)
        return self._rows_of_16_bytes(shape, torch.float32 if parts > 1 else bias.dtype)

    def _broadcast_dbias(
        self, bias: Tensor, scores: ScoreArgs, do: Strided, stats: Tensor, call: Prepared
    ) -> Tensor:  # fmt: skip
        """The gradient of a bias that is broadcast over batch or heads."""
        batch, heads = bias.shape[:2]
        summed = scores.batch // batch * (scores.heads // heads)
        sm_count = self.device.gpu.sm_count
        parts = bias_parts(summed, batch * heads, scores.num_q, scores.num_k, call.d, sm_count)
        sums = self._sums(bias, parts)
        args = by_name(BiasArgs)(
            scores=scores, do=do, stats=stats.data_ptr(), stats_row=call.stats_row,
            dbias=Strided(sums.data_ptr(), *sums.stride()[-4:-1]), part=sums.stride(0), parts=parts, batches=batch,
            heads_of_bias=heads,
        )  # fmt: skip
        in_parts = parts > 1 and bias.dtype != torch.float32  # in fp32 both are one kernel
        self._launch(call.kernel(AttentionBiasProblem, in_parts=in_parts), args)
        return sums.sum(0).to(bias.dtype) if parts > 1 else sums

    def _small_backward(
        self, do: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, residual: Tensor, inputs: Inputs,
        need_dbias: bool, plan: Tensor | None, call: Prepared,
    ) -> Gradients:  # fmt: skip
        bias, parts, sums = inputs.bias, call.items["parts"], None
        if need_dbias and bias is not None and parts > 1:
            shape = (parts, *bias.shape)
            sums = self.empty(shape, contiguous_strides(shape), torch.float32)
        elif need_dbias and bias is not None:
            sums = self._rows_of_16_bytes(bias.shape, bias.dtype)
        dq, dk, dv = self.empty(*call.o.memory), self.empty(*call.dk.memory), self.empty(*call.dv.memory)
        args = by_name(SmallBackwardArgs)(
            scores=call.scores(inputs, plan, small=True), do=strided(do), o=strided(out), lse=lse.data_ptr(),
            lse_residual=residual.data_ptr(), dlse=address(dlse), dq=strided_at(dq.data_ptr(), *call.o.strides),
            dk=strided_at(dk.data_ptr(), *call.dk.strides), dv=strided_at(dv.data_ptr(), *call.dv.strides),
            dbias=None if sums is None else Strided(sums.data_ptr(), *sums.stride()[-4:-1]),
            part=0 if sums is None else sums.stride(0), **call.items,
        )  # fmt: skip
        self._launch(call.small_backward(dlse is not None, None if sums is None else sums.dtype), args)
        dbias = sums if sums is None or parts == 1 else sums.sum(0).to(bias.dtype)
        return Gradients(dq, dk, dv, dbias)

    def _rows_of_16_bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Uninitialized memory whose rows start on 16 bytes: if their sizes do not, there is more between them."""
        *sizes, columns = shape
        wide = *sizes, (columns + 7) // 8 * 8
        memory = self.empty(wide, contiguous_strides(wide), dtype)
        return memory if wide[-1] == columns else memory[..., :columns]

    # Calls and launches

    def _prepare_call(self, inputs: Inputs, options: Options) -> tuple[Inputs, Prepared]:
        """(the inputs, of which kernels can read q, k and v, what their launches need)"""
        q, k, v, bias, mask = inputs
        q, k, v = _aligned(q), _aligned(k), _aligned(v)
        inputs = Inputs(q, k, v, bias, mask)
        at_16_bytes = bias is None or bias.data_ptr() % 16 == 0, mask is None or mask.data_ptr() % 16 == 0
        return inputs, self._prepared(inputs, options, choose.epoch, *at_16_bytes)

    def _prepare(self, inputs: Inputs, options: Options, epoch: int, *at_16_bytes: bool) -> Prepared:
        return Prepared(inputs, options, functools.partial(self._kernel, epoch), self.device.gpu.sm_count, *at_16_bytes)

    def _find_kernel(self, epoch: int, problem: Problem) -> Kernel:
        return Kernel(problem, self.device.kernel_for(problem, self.device.gpu).launch)

    def _launch(self, kernel: Kernel, args: tuple) -> None:
        kernel.launch(args, self.stream())


def steps_of(device: KernelDevice) -> AttentionSteps:
    """The steps that the calls on a device share."""
    return once(device.cache, "attention", AttentionSteps, device)


# Operands -------------------------------------------------------------------------------------------------------------


def _aligned(t: Tensor) -> Tensor:
    """t, or if TMA cannot read it a copy with the same order of heads and rows, from which results take theirs."""
    if t.data_ptr() % 16 == 0 and (t.is_contiguous() or legal_strides(t.shape, t.stride()) is not None):
        return t
    return empty_like(t, t.shape[3]).copy_(t)
