"""Linear cross entropy over several GPUs: the classes (the vocabulary) are sharded over the ranks of a group.

Each rank runs the one-GPU operation on its shard: reduction "none", with lse. A target of another rank is mapped to
some class of the shard, whose loss gets no gradient. The ranks exchange these numbers, and each computes the same loss
from them (combine.py). Backward gives the rank's own numbers their gradients, and sums the gradient of input over
ranks.
"""

import contextlib
import sys
import weakref
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from quackish.errors import UnsupportedError
from quackish.ops.buffers import check_buffer
from quackish.ops.linear_cross_entropy import LinearCrossEntropyLoss, LinearCrossEntropyStats
from quackish.ops.linear_cross_entropy.api import MODULE_OPTIONS, key_of, plan_for
from quackish.ops.linear_cross_entropy.autograd import (
    NO_SECOND_DERIVATIVES,
    backward_of,
    forward_of,
    grads_needed,
    is_batched,
    scale_of,
    shaped,
)
from quackish.ops.linear_cross_entropy.calls import GradsNeeded, Plan
from quackish.ops.linear_cross_entropy.checks import Inputs, Options, check_options, check_tensors
from quackish.ops.modes import are_plain, check_memory, is_compiling, is_transformed
from quackish.parallel.collectives import gathered, summed
from quackish.parallel.combine import NO_CLASSES, Formula, Parts, combine, row_gradients
from quackish.reference.linear_cross_entropy import mean_divisor, rows_of

_WHO = "parallel.linear_cross_entropy"
_IGNORED = -100
_PREDICTED_ROWS = 1024  # bounds the memory of the predicted classes' rows of weight


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
    reduction: str = "mean",
    ignore_index: int | None = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    logit_scale: float | Tensor | None = None,
    z_loss: float = 0.0,
    num_items: int | Tensor | None = None,
    return_lse: bool = False,
    return_stats: bool = False,
    grad_weight_out: Tensor | None = None,
    schedule: str = "auto",
    chunk_size: int | None = None,
    memory_limit: int | None = None,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, LinearCrossEntropyStats]:
    """`quackish.linear_cross_entropy` with the classes sharded over the ranks of a group, each of which calls this.

    Loss and statistics are of all classes, with the same bits on every rank. Arguments that are not explained here have
    the meaning that they have there. docs/parallel.md has memory, numerics, errors and recipes.

    Args:
        input: (..., H), the same on all ranks. Its gradient is summed over ranks, so it is the same too.
        weight_shard: (v, H), this rank's rows of the weight. They follow those of lower ranks; v may differ between
            ranks, and be 0. Or a DTensor with Shard(0) over one dimension of its mesh.
        target: (...), classes among those of all ranks, the same on all ranks. One that is neither a class nor
            `ignore_index` makes its row's loss and gradients NaN, on a CPU too.
        group: the ranks. None is the DTensor's dimension of the mesh, else the default group.
        vocab_start: if given, checked: the first class of this shard, which is the number of classes of lower ranks.
        sequence_parallel: input is this rank's part of dimension 0, which must divide evenly, and so is its gradient.
            Targets, and the outputs with one number per row, are of all rows.
        deterministic: the gradient of input is summed in rank order, so that its bits do not depend on the algorithm
            of the communication library.
        linear_bias, weight, grad_weight_out: (v,), (v,), (v, H), of this shard.
        schedule: what is kept until backward. "stored" (the exponentials of all logits of the shard) and "recompute"
            (nothing), of which "auto" takes one as with `reduction="none"`. "chunked" is "recompute".

    Raises:
        As `quackish.linear_cross_entropy`. ValueError on all ranks where they disagree about shapes, dtypes or options
        at the first call with such arguments.
    """
    inputs = Inputs(input, weight_shard, linear_bias, target, weight, logit_scale, num_items, grad_weight_out)
    options = Options(
        reduction, ignore_index, label_smoothing, softcap, z_loss, return_lse, return_stats, schedule, chunk_size,
        memory_limit, backend,
    )  # fmt: skip
    run = torch._dynamo.disable(_run) if is_compiling() else _run  # compiled code calls it as eager code does
    loss, *stats = run(inputs, options, group, vocab_start, sequence_parallel, deterministic)
    if return_stats:
        return loss, LinearCrossEntropyStats(*stats)
    return (loss, *stats) if return_lse else loss


class VocabParallelHead(LinearCrossEntropyLoss):
    """`LinearCrossEntropyLoss` whose weight may be sharded: place `ColwiseParallel()` on its submodule "linear".

    Where the weight is no DTensor it is LinearCrossEntropyLoss. State and arguments are the same, but for
    sequence_parallel and deterministic. The class weights, in the buffer `weight`, are those of all ranks.
    """

    def __init__(
        self, in_features: int, num_classes: int, *, sequence_parallel: bool = False, deterministic: bool = False,
        **options: Any,
    ) -> None:  # fmt: skip
        """options: those of LinearCrossEntropyLoss."""
        super().__init__(in_features, num_classes, **options)
        self.sequence_parallel, self.deterministic = sequence_parallel, deterministic

    def forward(self, input: Tensor, target: Tensor, **options: Any):
        """input (..., in_features), target (...). options: those of LinearCrossEntropyLoss's forward."""
        linear, weight = self.linear, self.weight
        if not _is_dtensor(linear.weight):
            return super().forward(input, target, **options)
        if weight is not None:
            group = _group_of(linear.weight)
            shards = weight.chunk(group.size())  # as DTensor's; it leaves out empty ones
            weight = shards[group.rank()] if group.rank() < len(shards) else weight[:0]
        return linear_cross_entropy(
            input, linear.weight, target, sequence_parallel=self.sequence_parallel, deterministic=self.deterministic,
            linear_bias=linear.bias, weight=weight, logit_scale=self.logit_scale,
            **{name: getattr(self, name) for name in MODULE_OPTIONS}, **options,
        )  # fmt: skip


# DTensors -------------------------------------------------------------------------------------------------------------


def _is_dtensor(t: Any) -> bool:
    module = sys.modules.get("torch.distributed.tensor")  # not imported: it takes long
    return module is not None and isinstance(t, module.DTensor)


def _group_of(weight) -> dist.ProcessGroup:
    sharded = [dim for dim, placement in enumerate(weight.placements) if not placement.is_replicate()]
    if len(sharded) != 1 or not weight.placements[sharded[0]].is_shard(0):
        raise ValueError(
            f"{_WHO}: weight_shard is a DTensor with placements {weight.placements}, expected Shard(0) for one "
            "dimension of the mesh and Replicate() for others"
        )
    return weight.device_mesh.get_group(sharded[0])


def _without_dtensors(
    inputs: Inputs, group: dist.ProcessGroup | None, sequence_parallel: bool
) -> tuple[Inputs, dist.ProcessGroup]:
    """With the local parts of the weight, and of what is sharded as the weight is, and with all of other tensors."""
    if _is_dtensor(inputs.linear_weight):
        of_weight = _group_of(inputs.linear_weight)
        if group not in (None, of_weight):
            raise ValueError(f"{_WHO}: group is not the group of the DTensor weight_shard; leave it out")
        group = of_weight
    sharded = "linear_weight", "linear_bias", "weight", "grad_weight_out", *(["input"] if sequence_parallel else [])
    plain = {
        name: t.to_local() if name in sharded else t.full_tensor()
        for name, t in inputs._asdict().items()
        if _is_dtensor(t)
    }
    return inputs._replace(**plain), group or dist.group.WORLD


# What the ranks agree on ----------------------------------------------------------------------------------------------


class _Ranks(NamedTuple):
    group: dist.ProcessGroup
    sequence_parallel: bool
    deterministic: bool


class _Shards(NamedTuple):
    """The layout of all shards, cached for each kind of arguments."""

    start: int  # this rank's first class
    num_classes: int  # of all ranks
    ends: Tensor  # (ranks,) int64: where the ranks' classes end


_known: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple, _Shards]] = weakref.WeakKeyDictionary()
_MAX_KNOWN = 4096


def _shards_of(
    inputs: Inputs, options: Options, ranks: _Ranks, vocab_start: int | None, weight_shape: torch.Size
) -> _Shards:
    """Checks the arguments, and that the ranks' fit together, at the first call with such arguments.

    weight_shape: of the whole weight if it is a DTensor.
    """
    known = _known.setdefault(ranks.group, {})
    try:
        key = (*key_of(inputs, options), _needs(inputs)[0], *ranks[1:], vocab_start, weight_shape)
        shards = known.get(key)
    except (AttributeError, TypeError):  # as in plan_for
        key, shards = None, None
    if shards is None:
        if len(known) >= _MAX_KNOWN:
            known.clear()
        shards = known[key] = _agree(inputs, options, ranks, vocab_start)
    return shards


def _agree(inputs: Inputs, options: Options, ranks: _Ranks, vocab_start: int | None) -> _Shards:
    """The ranks tell each other about their arguments, or their errors. If one rank raises, all do."""
    group, everyone = ranks.group, [None] * ranks.group.size()
    try:
        mine, error = {**_description(inputs, options, ranks), "vocab_start": vocab_start}, None
    except Exception as raised:
        mine, error = str(raised).replace("linear_weight", "weight_shard"), raised
    dist.all_gather_object(everyone, mine, group=group)
    if error is not None:
        raise type(error)(mine) from error
    for rank, its in enumerate(everyone):
        if isinstance(its, str):
            raise ValueError(f"{_WHO}: rank {rank} of the group refuses its arguments: {its}")
    sizes, start = [its.pop("classes") for its in everyone], 0
    for rank, its in enumerate(everyone):
        given = its.pop("vocab_start")
        if given not in (None, start):
            raise ValueError(
                f"{_WHO}: vocab_start is {given} on rank {rank} of the group, expected {start}: shards follow each "
                f"other in rank order, and have {sizes} classes"
            )
        start += sizes[rank]
        for name, first in everyone[0].items():
            if its[name] != first:
                raise ValueError(
                    f"{_WHO}: {name} is {first} on rank 0 of the group and {its[name]} on rank {rank}; expected the "
                    "same on all ranks"
                )
    if start == 0:
        raise ValueError(f"{_WHO}: weight_shard has no rows on any rank, expected at least one class")
    ends = torch.tensor(sizes).cumsum(0).to(inputs.input.device)
    return _Shards(sum(sizes[: group.rank()]), start, ends)


def _description(inputs: Inputs, options: Options, ranks: _Ranks) -> dict[str, Any]:
    """Checks the arguments; what ranks compare."""
    whole = _with_a_class(inputs._replace(input=_whole_input(inputs.input, ranks)))
    check_tensors(whole)
    check_options(options, inputs.logit_scale, inputs.num_items, inputs.input.device)
    _, plan, needed = _of_shard(inputs, options, ranks, 0)
    return {
        "target's shape": tuple(inputs.target.shape),
        "the number of input's columns": inputs.input.shape[-1],
        "input's dtype": inputs.input.dtype,
        "the dtype of matrix products": plan.compute_dtype,
        "the dtype of input's gradient": needed.dx,
        "whether class weights are given": inputs.weight is not None,
        "input's device": inputs.input.device.type,
        "num_items": "a tensor" if isinstance(inputs.num_items, Tensor) else inputs.num_items,
        "logit_scale": "a tensor" if isinstance(inputs.logit_scale, Tensor) else inputs.logit_scale,
        **dict(zip(Options._fields[:7], options[:7], strict=True)),
        **dict(zip(_Ranks._fields[1:], ranks[1:], strict=True)),
        "classes": inputs.linear_weight.shape[0],
    }


def _whole_input(x: Any, ranks: _Ranks) -> Any:
    """A stand-in for the input of all ranks if this is one rank's part."""
    if not ranks.sequence_parallel or not isinstance(x, Tensor) or x.dim() < 2:
        return x
    whole = x.new_empty(()).expand(x.shape[0] * ranks.group.size(), *x.shape[1:])
    return whole.requires_grad_(x.requires_grad)


def _with_a_class(inputs: Inputs) -> Inputs:
    """In place of an empty shard, one class, of weight 0; what it adds to the loss is left out."""
    if not isinstance(inputs.linear_weight, Tensor) or inputs.linear_weight.shape[:1] != (0,):
        return inputs
    names = "linear_weight", "linear_bias", "weight"
    one = {name: t.new_zeros((1, *t.shape[1:])) for name in names if (t := getattr(inputs, name)) is not None}
    return inputs._replace(**one, grad_weight_out=None)


def _needs(inputs: Inputs) -> tuple[bool, ...]:
    grad = torch.is_grad_enabled()
    return tuple(grad and t is not None and t.requires_grad for t in inputs[:3])


# One rank's part ------------------------------------------------------------------------------------------------------


def _of_shard(inputs: Inputs, options: Options, ranks: _Ranks, start: int) -> tuple[Inputs, Plan, GradsNeeded]:
    """The operation on the shard, on flat rows. Its loss is nll, or with label smoothing the smooth part.

    A target of another rank is mapped to some class of the shard. They are spread over classes, because rows of dw are
    summed by class.
    """
    smooth, v, target = options.label_smoothing > 0, inputs.linear_weight.shape[0], inputs.target.reshape(-1).long()
    stats = smooth or options.return_stats
    inputs = _with_a_class(inputs)._replace(
        input=_whole_input(inputs.input, ranks).reshape(-1, inputs.input.shape[-1]),
        target=(target - start).remainder_(max(v, 1)).masked_fill_(target == _ignored(options), _IGNORED),
        num_items=None,
    )
    inputs = inputs if smooth else inputs._replace(weight=None)
    options = options._replace(
        reduction="none", ignore_index=_IGNORED, label_smoothing=1.0 if smooth else 0.0, z_loss=0.0,
        return_lse=not stats, return_stats=stats,
    )  # fmt: skip
    plan = plan_for(inputs, options)
    if inputs.logit_scale is not None:
        inputs = inputs._replace(logit_scale=scale_of(inputs, plan))
    return inputs, plan, grads_needed(inputs, plan, _needs(inputs))


def _ignored(options: Options) -> int:
    return _IGNORED if options.ignore_index is None else options.ignore_index


def _run(
    inputs: Inputs, options: Options, group: dist.ProcessGroup | None, vocab_start: int | None, sequence_parallel: bool,
    deterministic: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """loss, and what is asked for of lse, log_prob, entropy and predicted."""
    weight_shape = getattr(inputs.linear_weight, "shape", None)
    inputs, group = _without_dtensors(inputs, group, sequence_parallel)
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(
            f"{_WHO}: group is {group!r}, expected a process group that this rank is in; torch.distributed."
            "init_process_group makes the default one"
        )
    if is_transformed() or not are_plain(inputs):
        raise UnsupportedError(f"{_WHO}: torch.func, forward-mode AD and tensor subclasses but DTensor are not covered")
    ranks = _Ranks(group, sequence_parallel, deterministic)
    with torch.cuda.device_of(inputs.input) if isinstance(inputs.input, Tensor) else contextlib.nullcontext():
        shards = _shards_of(inputs, options, ranks, vocab_start, weight_shape)
        x, w, dw_out = inputs.input, inputs.linear_weight, inputs.grad_weight_out
        check_memory(_WHO, input=x, weight_shard=w)
        if dw_out is not None:
            check_buffer(_WHO, grad_weight_out=dw_out, weight_shard=w, input=x)
        of_shard = _of_shard(inputs, options, ranks, shards.start)
        return _VocabParallel.apply(*inputs[:3], inputs, options, ranks, shards, of_shard)


class _VocabParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input, weight_shard, linear_bias, inputs, options, ranks, shards, of_shard):
        # autograd has to see the first three
        (shard, plan, needed), shape = of_shard, inputs.target.shape
        x = input.reshape(-1, input.shape[-1])
        if ranks.sequence_parallel:
            x = gathered(x.to(plan.compute_dtype), ranks.group)  # what autocast rounds is rounded before
        shard = shard._replace(input=x)
        *outputs, state, live_x, exp_logits, _, _, _ = forward_of(shard, plan, needed)

        parts = _parts(shard, plan, inputs, options, shards.start, *outputs)
        everyone = parts.unstacked(gathered(parts.stacked(), ranks.group))
        target, num_classes, dtype = inputs.target.reshape(-1), shards.num_classes, parts.lse.dtype
        rows = rows_of(target, num_classes, None, _ignored(options), dtype)
        owner = torch.searchsorted(shards.ends, rows.index, right=True)
        formula = Formula(options.label_smoothing, options.z_loss, num_classes)
        needs_lse = options.return_lse or options.return_stats
        c = combine(everyone, ranks.group.rank(), owner, rows, formula, needs_lse)

        divisor = mean_divisor(c.rows, inputs.num_items) if options.reduction == "mean" else None
        loss = shaped(c.loss, shape) if options.reduction == "none" else c.loss.sum()
        outputs = [loss if divisor is None else loss / divisor]
        if options.return_stats:
            outputs += [shaped(t, shape) for t in (c.lse.clone(), c.log_prob, c.entropy.clone(), c.predicted)]
            ctx.mark_non_differentiable(outputs[-1])
        elif options.return_lse:
            outputs.append(shaped(c.lse.clone(), shape))
        ctx.save_for_backward(*shard[:6], state, live_x, exp_logits)
        c = c._replace(loss=None, log_prob=None, predicted=None)  # these are the user's
        ctx.kept = plan, needed, ranks, formula, c, divisor, shard.grad_weight_out
        ctx.input_shape, ctx.per_row, ctx.is_empty = input.shape, options.reduction == "none", not len(weight_shard)
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    def backward(ctx, grad_loss, *row_grads):
        if torch.is_grad_enabled():
            raise RuntimeError(NO_SECOND_DERIVATIVES)
        if any(map(is_batched, (grad_loss, *row_grads))):
            raise RuntimeError(f"{_WHO}: vmap over gradients (is_grads_batched=True) is not supported")
        *tensors, state, live_x, exp_logits = ctx.saved_tensors
        plan, needed, ranks, formula, combined, divisor, dw_out = ctx.kept
        shard, kept = Inputs(*tensors, None, dw_out), (state, live_x, exp_logits)
        row_grads = [None if grad is None else grad.reshape(-1) for grad in (*row_grads, None, None, None)[:3]]
        if grad_loss is not None:
            grad_loss = grad_loss.reshape(-1) if ctx.per_row else grad_loss
            grad_loss = grad_loss if divisor is None else grad_loss / divisor
        arriving = row_gradients(combined, formula, shard.linear_weight.shape[0], grad_loss, *row_grads)

        dx, dw, db = backward_of(shard, plan, needed, arriving, kept)
        if dx is not None:
            dx = summed(dx, *ranks).view(ctx.input_shape)
        if dw is not None and dw_out is not None:
            dw_out.add_(dw)
            dw = None
        if ctx.is_empty:
            dw, db = (None if t is None else torch.empty_like(t[:0]) for t in shard[1:3])
        return dx, dw, db, *(None,) * 5


def _parts(
    shard: Inputs, plan: Plan, inputs: Inputs, options: Options, start: int, loss: Tensor, lse: Tensor,
    log_prob: Tensor | None, entropy: Tensor | None, predicted: Tensor | None,
) -> Parts:  # fmt: skip
    """What the ranks exchange, from the results of the operation on the shard."""
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
        return Parts(lse, nll, weight, smooth, total_weight)
    highest = _highest_logits(shard, plan, predicted, lse.dtype) if v else lse
    return Parts(lse, nll, weight, smooth, total_weight, entropy, highest, (predicted + start).to(lse.dtype))


def _highest_logits(shard: Inputs, plan: Plan, predicted: Tensor, dtype: torch.dtype) -> Tensor:
    """(m,) the logits of the predicted classes, before logit_scale. Equal rows of weight have equal logits."""
    (x, w, bias), classes = shard[:3], predicted.clamp(min=0)
    highest = x.new_empty(classes.shape, dtype=dtype)
    for start in range(0, len(classes), _PREDICTED_ROWS):
        part = slice(start, start + _PREDICTED_ROWS)
        rows, columns = (t.to(plan.compute_dtype).to(dtype) for t in (x[part], w[classes[part]]))
        torch.sum(rows * columns, 1, out=highest[part])
    if bias is not None:
        highest += bias[classes]
    return highest if plan.softcap is None else plan.softcap * torch.tanh(highest / plan.softcap)
