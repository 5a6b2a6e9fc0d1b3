"""Vocabulary-parallel linear cross entropy: the classes are sharded over the ranks of a process group.

Each rank runs the one-GPU operation on its shard with reduction "none" and lse. Targets owned by another rank are
mapped to an arbitrary class of the shard, and their losses get no gradient. The ranks all-gather the row statistics,
and each computes the same loss from them (combine.py). Backward runs the one-GPU backward and sums the gradient of
input over ranks.
"""

import contextlib
import math
import sys
import weakref
from typing import Any, Literal, NamedTuple, overload

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import Unpack

from quackish.device.kernel_device import check_same_device, device_of
from quackish.device.modes import are_plain, check_memory, is_compiling, is_plain, is_transformed
from quackish.errors import UnsupportedError, check_bool, refuse_unknown
from quackish.ops.linear_cross_entropy.api import (
    MODULE_OPTIONS,
    LinearCrossEntropyLoss,
    call_for,
    key_of,
    with_overloads,
)
from quackish.ops.linear_cross_entropy.calls import (
    Call,
    GradOutputs,
    Grads,
    LossPlan,
    Outputs,
    Saved,
    requires_grad,
    reshaped,
    unpack,
)
from quackish.ops.linear_cross_entropy.checks import (
    Inputs,
    Options,
    check_options,
    check_tensors,
    make_inputs,
    make_options,
)
from quackish.ops.linear_cross_entropy.operators import (
    backward,
    backward_operator,
    forward,
    forward_operator,
    logit_scale_tensor,
    save_call,
    saved_call,
)
from quackish.ops.linear_cross_entropy.reference import LinearCrossEntropyStats, mean_divisor, rows_of
from quackish.ops.linear_cross_entropy.sharded.collectives import all_gather, sum_over_ranks
from quackish.ops.linear_cross_entropy.sharded.combine import (
    NO_CLASSES,
    LossOptions,
    ShardStats,
    combine,
    row_gradients,
)
from quackish.ops.operator import refuse_second_derivatives
from quackish.ops.shared.arguments import shown
from quackish.ops.shared.buffers import check_buffer
from quackish.types import Backend, LinearCrossEntropyOptions, LossModuleOptions, Reduction, Schedule

_WHO = "parallel.linear_cross_entropy"
_IGNORED = -100
# The options that must be the same on all ranks.
_SAME_OPTIONS = [name for name in Options._fields if name not in ("schedule", "chunk_size", "memory_limit", "backend")]
_MAX_LOGIT_CHUNK = 1024  # rows at a time in _max_logits, which bounds its memory


class _ParallelOptions(LinearCrossEntropyOptions, total=False):
    group: dist.ProcessGroup | None
    vocab_start: int | None
    sequence_parallel: bool
    deterministic: bool


@overload
def linear_cross_entropy(
    input: Tensor, weight_shard: Tensor, target: Tensor, *, return_lse: Literal[False] = False,
    return_stats: Literal[False] = False, **options: Unpack[_ParallelOptions],
) -> Tensor: ...  # fmt: skip
@overload
def linear_cross_entropy(
    input: Tensor, weight_shard: Tensor, target: Tensor, *, return_lse: Literal[True],
    return_stats: Literal[False] = False, **options: Unpack[_ParallelOptions],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def linear_cross_entropy(
    input: Tensor, weight_shard: Tensor, target: Tensor, *, return_lse: Literal[False] = False,
    return_stats: Literal[True], **options: Unpack[_ParallelOptions],
) -> tuple[Tensor, LinearCrossEntropyStats]: ...  # fmt: skip
@overload
def linear_cross_entropy(
    input: Tensor, weight_shard: Tensor, target: Tensor, *, return_lse: bool = False,
    return_stats: bool = False, **options: Unpack[_ParallelOptions],
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, LinearCrossEntropyStats]: ...  # fmt: skip
def linear_cross_entropy(
    input: Tensor,
    weight_shard: Tensor,
    target: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    vocab_start: int | None = None,
    sequence_parallel: bool = False,
    deterministic: bool = False,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: Reduction = "mean",
    ignore_index: int | None = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    logit_scale: float | Tensor | None = None,
    z_loss: float = 0.0,
    num_items: int | Tensor | None = None,
    return_lse: bool = False,
    return_stats: bool = False,
    grad_weight_out: Tensor | None = None,
    schedule: Schedule = "auto",
    chunk_size: int | None = None,
    memory_limit: int | None = None,
    backend: Backend = "auto",
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, LinearCrossEntropyStats]:
    """`quackish.linear_cross_entropy` with the classes sharded over the ranks of a group.

    All ranks must call it. Loss and statistics cover all classes and have the same bits on every rank. Arguments not
    listed here are those of `quackish.linear_cross_entropy`. docs/guides/parallel.md has recipes and errors.

    Args:
        input: (..., H), the same on all ranks. Its gradient is summed over ranks, so it is the same too. Or a DTensor,
            whose gradient has the same placements.
        weight_shard: (v, H), this rank's rows of the weight, in rank order. v may differ between ranks and may be 0.
            Or a DTensor with Shard(0) over one mesh dimension.
        target: (...), classes counted over all ranks, the same on all ranks. A target that is neither a class nor
            `ignore_index` makes its row's loss and gradients NaN, on a CPU too.
        group: the ranks. None: the mesh dimension of the DTensor, or the default group.
        vocab_start: the first class of this shard, which is the number of classes on lower ranks. Only checked.
        sequence_parallel: a plain input is this rank's shard of dimension 0, which must divide evenly, and so is its
            gradient. target and the outputs with one number per row cover all rows. A DTensor's placements say this.
        deterministic: sum the gradient of input in rank order, so that its bits do not depend on the algorithm of the
            communication library.
        linear_bias, weight, grad_weight_out: (v,), (v,), (v, H), of this shard.
        schedule: what is kept until backward: "stored" (the exponentials of the shard's logits) or "recompute"
            (nothing). "auto" chooses between them as with `reduction="none"`. "chunked" runs "recompute".

    Raises:
        ValueError: shapes, dtypes or options differ between ranks. At the first call with them, all ranks raise.

    It also raises what `quackish.linear_cross_entropy` raises.
    """
    inputs: Inputs = make_inputs(
        input, weight_shard, target, linear_bias=linear_bias, weight=weight, logit_scale=logit_scale,
        num_items=num_items, grad_weight_out=grad_weight_out,
    )  # fmt: skip
    options: Options = make_options(
        reduction=reduction, ignore_index=_IGNORED if ignore_index is None else ignore_index,
        label_smoothing=label_smoothing, softcap=softcap, z_loss=z_loss, return_lse=return_lse,
        return_stats=return_stats, schedule=schedule, chunk_size=chunk_size, memory_limit=memory_limit, backend=backend,
    )  # fmt: skip
    check_bool(_WHO, sequence_parallel=sequence_parallel, deterministic=deterministic)
    run = torch._dynamo.disable(_run) if is_compiling() else _run  # runs eagerly in compiled code
    loss, *stats = run(inputs, options, group, vocab_start, sequence_parallel, deterministic)
    if return_stats:
        return loss, LinearCrossEntropyStats(*stats)
    return (loss, *stats) if return_lse else loss


class VocabParallelHead(LinearCrossEntropyLoss):
    """`LinearCrossEntropyLoss` that supports `ColwiseParallel()` on its submodule "linear".

    Without a DTensor weight it behaves as LinearCrossEntropyLoss. It has the same state, and two more arguments:
    sequence_parallel and deterministic. The buffer `weight` has the class weights of all ranks.
    """

    def __init__(
        self, in_features: int, num_classes: int, *, sequence_parallel: bool = False, deterministic: bool = False,
        **options: Unpack[LossModuleOptions],
    ) -> None:  # fmt: skip
        """options: those of LinearCrossEntropyLoss."""
        refuse_unknown("VocabParallelHead", options, LossModuleOptions.__annotations__)
        check_bool("VocabParallelHead", sequence_parallel=sequence_parallel, deterministic=deterministic)
        super().__init__(in_features, num_classes, **options)
        self.sequence_parallel, self.deterministic = sequence_parallel, deterministic

    @with_overloads
    def forward(self, input: Tensor, target: Tensor, **options: Any) -> Any:
        """input (..., in_features), target (...). options: those of LinearCrossEntropyLoss's forward."""
        linear, weight = self.linear, self.weight
        if not _is_dtensor(linear.weight):
            return super().forward(input, target, **options)
        if weight is not None:
            group = _group_of(linear.weight)
            shards = weight.chunk(group.size())  # the same shards as DTensor's, without empty ones
            weight = shards[group.rank()] if group.rank() < len(shards) else weight[:0]
        return linear_cross_entropy(
            input, linear.weight, target, sequence_parallel=self.sequence_parallel, deterministic=self.deterministic,
            linear_bias=linear.bias, weight=weight, logit_scale=self.logit_scale,
            **{name: getattr(self, name) for name in MODULE_OPTIONS}, **options,
        )  # fmt: skip


# DTensors -------------------------------------------------------------------------------------------------------------


def _is_dtensor(t: Any) -> bool:
    module = sys.modules.get("torch.distributed.tensor")  # importing it is slow
    return module is not None and isinstance(t, module.DTensor)


def _group_of(weight, name: str = "weight_shard") -> dist.ProcessGroup:
    sharded = [dim for dim, placement in enumerate(weight.placements) if not placement.is_replicate()]
    if len(sharded) != 1 or not weight.placements[sharded[0]].is_shard(0):
        raise ValueError(
            f"{_WHO}: {name} is a DTensor with placements {weight.placements}, expected Shard(0) in one mesh dimension "
            "and Replicate() in all others, as of ColwiseParallel(). Under fully_shard, call it in the forward of the "
            "module that owns the weight. If no rank has a part of the classes, use quackish.linear_cross_entropy"
        )
    return weight.device_mesh.get_group(sharded[0])


def _without_dtensors(
    inputs: Inputs, group: dist.ProcessGroup | None, sequence_parallel: bool
) -> tuple[Inputs, dist.ProcessGroup, int | None]:
    """Inputs as plain tensors, the group, and the dimension in which input is sharded, or None.

    Tensors sharded by class become local shards. Other DTensors are gathered, except an input that is sharded equally.
    """
    if _is_dtensor(inputs.linear_weight):
        weight_group = _group_of(inputs.linear_weight)
        if group not in (None, weight_group):
            raise ValueError(f"{_WHO}: group is not the group of the DTensor weight_shard; leave it out")
        group = weight_group
    group = group or dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(
            f"{_WHO}: group is {shown(group)}, expected a process group that this rank is in; torch.distributed."
            "init_process_group creates the default group"
        )
    plain, sharded_dim = {}, 0 if sequence_parallel else None
    for name, t in inputs._asdict().items():
        if not _is_dtensor(t):
            continue
        if name in ("linear_weight", "linear_bias", "weight", "grad_weight_out"):
            _group_of(t, name)  # checks its placements
            plain[name] = t.to_local()
        elif name == "input":
            sharded_dim = _sharded_dim(t, group)
            plain[name] = t.full_tensor() if sharded_dim is None else t.to_local()
        else:
            plain[name] = t.full_tensor()
    return inputs._replace(**plain), group, sharded_dim


def _sharded_dim(x, group: dist.ProcessGroup) -> int | None:
    """The dimension in which each rank of the group has an equal part of x's rows; None if x must be gathered."""
    from torch.distributed.tensor import Shard

    sharded = [dim for dim, placement in enumerate(x.placements) if not placement.is_replicate()]
    if len(sharded) != 1 or type(x.placements[sharded[0]]) is not Shard:
        return None
    dim = x.placements[sharded[0]].dim
    if dim == x.dim() - 1 or x.shape[dim] % group.size():
        return None
    x_group = x.device_mesh.get_group(sharded[0])
    return dim if dist.get_process_group_ranks(x_group) == dist.get_process_group_ranks(group) else None


# Agreement between ranks ----------------------------------------------------------------------------------------------


class _Ranks(NamedTuple):
    group: dist.ProcessGroup
    sharded_dim: int | None  # of input
    deterministic: bool


class _Shards(NamedTuple):
    """How classes are sharded over ranks."""

    start: int  # this rank's first class
    num_classes: int  # of all ranks
    ends: Tensor  # (ranks,) int64: one past each rank's last class


_checked: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple, _Shards]] = weakref.WeakKeyDictionary()
_MAX_CHECKED = 4096


def _shards_of(inputs: Inputs, options: Options, ranks: _Ranks, vocab_start: int | None, given: Inputs) -> _Shards:
    """The shards. The first call with such arguments checks them and compares them between ranks.

    given: inputs with DTensors.
    """
    checked = _checked.setdefault(ranks.group, {})
    try:
        whole_shape = getattr(given.linear_weight, "shape", None)
        key = (*key_of(inputs, options), requires_grad(inputs)[0], *ranks[1:], vocab_start, whole_shape)
        shards = checked.get(key)
    except (AttributeError, TypeError):  # as in call_for
        key, shards = None, None
    if shards is None:
        if len(checked) >= _MAX_CHECKED:
            checked.clear()
        shards = checked[key] = _check_between_ranks(inputs, options, ranks, vocab_start, given)
    return shards


def _check_between_ranks(
    inputs: Inputs, options: Options, ranks: _Ranks, vocab_start: int | None, given: Inputs
) -> _Shards:
    """Compares the arguments of all ranks. If one rank raises, all ranks do."""
    group = ranks.group
    descriptions: list[Any] = [None] * group.size()
    try:
        own, error = {**_description(inputs, options, ranks, given), "vocab_start": vocab_start}, None
    except Exception as raised:
        own, error = str(raised).replace("linear_weight", "weight_shard"), raised
        if own.startswith("linear_cross_entropy: "):
            own = f"parallel.{own}"
    dist.all_gather_object(descriptions, own, group=group)
    if error is not None:
        raise type(error)(own) from error
    for rank, description in enumerate(descriptions):
        if isinstance(description, str):
            raise ValueError(f"{_WHO}: the arguments on rank {rank} of the group are invalid: {description}")
    sizes, start = [description.pop("classes") for description in descriptions], 0
    for rank, description in enumerate(descriptions):
        given_start = description.pop("vocab_start")
        if given_start not in (None, start):
            raise ValueError(
                f"{_WHO}: vocab_start is {given_start!r} on rank {rank} of the group, expected {start}: shards are in "
                f"rank order and have {sizes} classes"
            )
        start += sizes[rank]
        for name, expected in descriptions[0].items():
            if description[name] != expected:
                raise ValueError(
                    f"{_WHO}: {name} is {expected} on rank 0 of the group and {description[name]} on rank {rank}; "
                    "expected the same on all ranks"
                )
    if start == 0:
        raise ValueError(f"{_WHO}: weight_shard has no rows on any rank, expected at least one class")
    ends = torch.tensor(sizes).cumsum(0).to(inputs.input.device)
    return _Shards(sum(sizes[: group.rank()]), start, ends)


def _description(inputs: Inputs, options: Options, ranks: _Ranks, given: Inputs) -> dict[str, Any]:
    """Checks the arguments of this rank. Returns those that ranks compare."""
    x = _whole_input(inputs.input, ranks)
    _check_target(inputs.target, x, given.input, ranks)
    check_tensors(_with_a_class(inputs._replace(input=x)))
    check_options(options, inputs.logit_scale, inputs.num_items, inputs.input.device)
    call = _make_shard_call(inputs, options, ranks, 0)
    return {
        "target's shape": tuple(inputs.target.shape),
        "the number of input's columns": inputs.input.shape[-1],
        "input's dtype": inputs.input.dtype,
        "the dtype of matrix products": call.plan.compute_dtype,
        "the dtype of input's gradient": call.needed.dx,
        "whether class weights are given": inputs.weight is not None,
        "input's device": inputs.input.device.type,
        "num_items": "a tensor" if isinstance(inputs.num_items, Tensor) else inputs.num_items,
        "logit_scale": "a tensor" if isinstance(inputs.logit_scale, Tensor) else inputs.logit_scale,
        **{name: getattr(options, name) for name in _SAME_OPTIONS},
        "the sharded dimension of input": ranks.sharded_dim,
        "deterministic": ranks.deterministic,
        "classes": inputs.linear_weight.shape[0],
    }


def _check_target(target: Any, x: Any, given_x: Any, ranks: _Ranks) -> None:
    """Raises a clearer error about target's shape than `check_tensors` if each rank has a part of the input."""
    if not isinstance(target, Tensor) or not isinstance(x, Tensor) or target.shape == x.shape[:-1]:
        return
    expected = f"{_WHO}: target has shape {tuple(target.shape)}, expected {tuple(x.shape[:-1])}, all rows:"
    if _is_dtensor(given_x):
        raise ValueError(
            f"{expected} input is a DTensor of shape {tuple(x.shape)} with placements {given_x.placements}. For the "
            "loss of some of these rows, pass a DTensor over the mesh dimension of weight_shard alone"
        )
    if ranks.sharded_dim is not None:
        raise ValueError(
            f"{expected} with sequence_parallel=True, input {tuple(given_x.shape)} is this rank's part of dimension 0. "
            "If ranks have parts of another dimension, as under SequenceParallel, pass a DTensor with this placement, "
            "such as DTensor.from_local(input, mesh, [Shard(1)])"
        )


def _whole_input(x: Any, ranks: _Ranks) -> Any:
    """x; if each rank has a part of the input, a placeholder with the shape of the whole input."""
    dim = ranks.sharded_dim
    if dim is None or not isinstance(x, Tensor) or x.dim() < 2:
        return x
    whole = x.new_empty(()).expand(*x.shape[:dim], x.shape[dim] * ranks.group.size(), *x.shape[dim + 1 :])
    return whole.requires_grad_(x.requires_grad)


def _in_gathered_order(t: Tensor, shape: torch.Size, ranks: _Ranks) -> Tensor:
    """t (..., m) has one number per row in the order of a target of this shape. Returns them grouped by rank."""
    return _with_blocks_swapped(t, math.prod(shape[: ranks.sharded_dim or 0]), ranks.group.size())


def _in_target_order(t: Tensor, shape: torch.Size, ranks: _Ranks) -> Tensor:
    """The inverse of `_in_gathered_order`."""
    return _with_blocks_swapped(t, ranks.group.size(), math.prod(shape[: ranks.sharded_dim or 0]))


def _with_blocks_swapped(t: Tensor, outer: int, inner: int) -> Tensor:
    """Transposes the first two of the dimensions (outer, inner, rows) that t's last dimension has."""
    if 1 in (outer, inner) or t.numel() == 0:
        return t
    return t.unflatten(-1, (outer, inner, -1)).transpose(-3, -2).flatten(-3)


def _with_a_class(inputs: Inputs) -> Inputs:
    """Replaces an empty shard by one class with zero weights. `_shard_stats` leaves it out."""
    if not isinstance(inputs.linear_weight, Tensor) or inputs.linear_weight.shape[:1] != (0,):
        return inputs
    names = "linear_weight", "linear_bias", "weight"
    placeholders = {name: t.new_zeros((1, *t.shape[1:])) for name in names if (t := getattr(inputs, name)) is not None}
    return inputs._replace(**placeholders, grad_weight_out=None)


# The operation on one shard, and the autograd function ---------------------------------------------------------------


def _make_shard_call(inputs: Inputs, options: Options, ranks: _Ranks, start: int) -> Call:
    """The call of the one-GPU operation on this shard.

    Its loss is nll, or with label smoothing the smooth term of combine.py. A target owned by another rank becomes
    target modulo v. That spreads these targets over classes, because dw adds the rows of one class sequentially.
    """
    smooth, v = options.label_smoothing > 0, inputs.linear_weight.shape[0]
    target = _in_gathered_order(inputs.target.reshape(-1).long(), inputs.target.shape, ranks)
    stats = smooth or options.return_stats
    inputs = _with_a_class(inputs)._replace(
        input=_whole_input(inputs.input, ranks).reshape(-1, inputs.input.shape[-1]),
        target=(target - start).remainder(max(v, 1)).masked_fill(target == options.ignore_index, _IGNORED),
        num_items=None,
    )
    inputs = inputs if smooth else inputs._replace(weight=None)
    options = options._replace(
        reduction="none", ignore_index=_IGNORED, label_smoothing=1.0 if smooth else 0.0, z_loss=0.0,
        return_lse=not stats, return_stats=stats,
    )  # fmt: skip
    call = call_for(inputs, options)
    if inputs.logit_scale is not None:
        inputs = inputs._replace(logit_scale=logit_scale_tensor(inputs, call.plan))
    return call._replace(inputs=inputs)


def _run(
    inputs: Inputs, options: Options, group: dist.ProcessGroup | None, vocab_start: int | None, sequence_parallel: bool,
    deterministic: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """(loss, then the requested ones of lse, log_prob, entropy and predicted)."""
    given = inputs
    inputs, group, sharded_dim = _without_dtensors(inputs, group, sequence_parallel)
    if is_transformed() or not are_plain(inputs):
        raise UnsupportedError(
            f"{_WHO}: torch.func, forward-mode AD and tensor subclasses except DTensor are not supported"
        )
    ranks = _Ranks(group, sharded_dim, deterministic)
    # also without a kernel: the current device exchanges Python objects among ranks
    with torch.cuda.device_of(inputs.input) if isinstance(inputs.input, Tensor) else contextlib.nullcontext():
        shards = _shards_of(inputs, options, ranks, vocab_start, given)
        x, w, dw_out = inputs.input, inputs.linear_weight, inputs.grad_weight_out
        check_memory(_WHO, input=x, weight_shard=w)
        if dw_out is not None:
            check_buffer(_WHO, grad_weight_out=dw_out, weight_shard=w, input=x)
        shard_call = _make_shard_call(inputs, options, ranks, shards.start)
        return _VocabParallel.apply(*inputs.parameters(), shard_call, inputs, options, ranks, shards)


class _VocabParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input, weight_shard, linear_bias, call, inputs, options, ranks, shards):
        # Only the first three arguments need autograd.
        plan, shape = call.plan, inputs.target.shape
        x = input.reshape(-1, input.shape[-1])
        if ranks.sharded_dim is not None:
            x = all_gather(x.to(plan.compute_dtype), ranks.group)  # cast first: fewer bytes to send
        call = call._replace(inputs=call.inputs._replace(input=x))
        outputs, saved = _forward_of_shard(call)

        own = _shard_stats(call.inputs, plan, inputs, options, shards.start, outputs)
        stats = own.unstack(all_gather(_in_target_order(own.stacked(), shape, ranks), ranks.group))
        rows = rows_of(inputs.target.reshape(-1), shards.num_classes, None, options.ignore_index, own.lse.dtype)
        owner = torch.searchsorted(shards.ends, rows.index, right=True)
        smoothing = options.label_smoothing
        loss_options = LossOptions(smoothing, options.z_loss, smoothing / shards.num_classes)
        needs_lse = options.return_lse or options.return_stats
        combined = combine(stats, ranks.group.rank(), owner, rows, loss_options, needs_lse)

        divisor = mean_divisor(combined.rows, inputs.num_items) if options.reduction == "mean" else None
        loss = reshaped(combined.loss, shape) if options.reduction == "none" else combined.loss.sum()
        outputs = [loss if divisor is None else loss / divisor]
        if options.return_stats:
            lse, entropy = combined.lse.clone(), combined.entropy.clone()  # backward reads these two
            outputs += [reshaped(t, shape) for t in (lse, combined.log_prob, entropy, combined.predicted)]
            ctx.mark_non_differentiable(outputs[-1])
        elif options.return_lse:
            outputs.append(reshaped(combined.lse.clone(), shape))
        save_call(ctx, call, saved)
        combined = combined._replace(loss=None, log_prob=None, predicted=None)  # outputs, which users may write to
        ctx.saved = ranks, loss_options, combined, divisor
        ctx.own_shape, ctx.target_shape = input.shape, shape
        ctx.per_row, ctx.is_empty = options.reduction == "none", not len(weight_shard)
        ctx.has_buffer = inputs.grad_weight_out is not None
        ctx.device = device_of(input.device)
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    def backward(ctx, grad_loss, *row_grads):
        refuse_second_derivatives(_WHO, grad_loss, *row_grads)
        ranks, loss_options, combined, divisor = ctx.saved
        check_same_device(_WHO, ctx.device, combined.log_share.device)
        call, saved, _ = saved_call(ctx)
        shard = call.inputs
        row_grads = [None if grad is None else grad.reshape(-1) for grad in row_grads]
        if grad_loss is not None:
            grad_loss = grad_loss.reshape(-1) if ctx.per_row else grad_loss
            grad_loss = grad_loss if divisor is None else grad_loss / divisor
        grads, _ = unpack((grad_loss, *row_grads), GradOutputs)  # predicted has none
        grads = row_gradients(combined, loss_options, shard.linear_weight.shape[0], *grads)
        grads = GradOutputs(*(t if t is None else _in_gathered_order(t, ctx.target_shape, ranks) for t in grads))

        dx, dw, db = _backward_of_shard(call._replace(grad_outputs=grads), saved)
        if dx is not None:
            scatter = ranks.sharded_dim is not None
            dx = sum_over_ranks(dx, ranks.group, scatter, ranks.deterministic).view(ctx.own_shape)
        if ctx.is_empty:
            dw, db = (None if t is None else torch.empty_like(t[:0]) for t in (shard.linear_weight, shard.linear_bias))
            dw = None if ctx.has_buffer else dw
        return dx, dw, db, *(None,) * (len(ctx.needs_input_grad) - len(Grads._fields))


def _forward_of_shard(call: Call) -> tuple[Outputs, Saved]:
    """`forward`, or for dispatch modes its operator."""
    if is_plain():
        outputs, saved, _ = forward(call)
        return Outputs(*outputs), saved
    outputs, saved, _ = unpack(forward_operator(*call.inputs, *call.plan, call.needed.as_bools()), Outputs, Saved)
    return outputs, saved


def _backward_of_shard(call: Call, saved: Saved) -> Grads:
    """`backward`, or for dispatch modes its operator."""
    if is_plain():
        return backward(call, saved)
    inputs, needed = call.inputs, call.needed
    if needed.dx is not None:  # the operator's dx has its input's dtype, which an all-gather may have rounded
        inputs = inputs._replace(input=inputs.input.to(needed.dx))
    grads = Grads(*backward_operator(*call.grad_outputs, *saved, *inputs, *call.plan, needed.as_bools()))
    return grads.with_dw_added_to(inputs.grad_weight_out)


def _shard_stats(
    shard: Inputs, plan: LossPlan, inputs: Inputs, options: Options, start: int, outputs: Outputs
) -> ShardStats:
    """The statistics that the ranks exchange, from the results of the one-GPU operation."""
    loss, lse, log_prob, entropy, predicted = outputs
    v, class_weight, nll = inputs.linear_weight.shape[0], inputs.weight, loss
    weight = smooth = total_weight = None
    if v == 0:
        lse = torch.full_like(lse, NO_CLASSES)
    if class_weight is not None:
        class_weight = class_weight.to(lse.dtype)
        weight = class_weight[shard.target.clamp(min=0)] if v else lse
    if options.label_smoothing:
        nll, smooth = -log_prob, loss * shard.linear_weight.shape[0]
        total_weight = torch.ones_like(lse) * (v if class_weight is None else class_weight.sum())
    if not options.return_stats:
        return ShardStats(lse, nll, weight, smooth, total_weight)
    max_logits = _max_logits(shard, plan, predicted, lse.dtype) if v else lse
    return ShardStats(lse, nll, weight, smooth, total_weight, entropy, max_logits, (predicted + start).to(lse.dtype))


def _max_logits(shard: Inputs, plan: LossPlan, predicted: Tensor, dtype: torch.dtype) -> Tensor:
    """(m,) the logits of the predicted classes before logit_scale. Bitwise equal for equal rows of weight."""
    (x, w, bias), classes = shard.parameters(), predicted.clamp(min=0)
    chunks = [x.new_empty(0, dtype=dtype)]
    for start in range(0, len(classes), _MAX_LOGIT_CHUNK):
        chunk = slice(start, start + _MAX_LOGIT_CHUNK)
        rows, columns = (t.to(plan.compute_dtype).to(dtype) for t in (x[chunk], w[classes[chunk]]))
        chunks.append((rows * columns).sum(1))
    max_logits = torch.cat(chunks)
    if bias is not None:
        max_logits = (max_logits + bias[classes]).to(dtype)
    return max_logits if plan.softcap is None else plan.softcap * torch.tanh(max_logits / plan.softcap)
