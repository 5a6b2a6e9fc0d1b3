"""Linear cross entropy on kernels, for autograd and torch.compile.

In plain eager a torch.autograd.Function runs the schedules. `chunked` has its gradients ready before backward knows
what arrives; backward hands these buffers out once, scaled in place, and makes them anew when it is asked again.
Whatever wants to see operators gets those at the end of this file: they run by the same schedules, and hand out copies.
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from quackish.configs.linear_cross_entropy import ROOMY_BYTES, first_classes, whole_tiles
from quackish.ops import cuda
from quackish.ops.linear_cross_entropy import schedules
from quackish.ops.linear_cross_entropy.exp_logits import padded, padded_strides
from quackish.ops.linear_cross_entropy.launches import LceKernels
from quackish.ops.linear_cross_entropy.schedules import Call, Forward, GradOutputs, Grads, GradsNeeded, RowState
from quackish.ops.modes import as_plain, check_memory

_NO_SECOND_DERIVATIVES = "linear_cross_entropy: create_graph=True (double backward) is not supported"
_NONE = GradsNeeded(None, None, False)
_NOTHING = Forward(None, None, None)


@functools.cache
def kernels_of(device: torch.device) -> LceKernels:
    return LceKernels(device)


class Inputs(NamedTuple):
    """The user's tensors, as they came."""

    input: Tensor  # (..., h)
    linear_weight: Tensor  # (v, h)
    linear_bias: Tensor | None  # (v,)
    target: Tensor  # (...)
    weight: Tensor | None  # (v,)
    num_items: int | Tensor | None


class KernelPlan(NamedTuple):
    """Everything else."""

    ignore_index: int
    label_smoothing: float
    softcap: float | None
    z_loss: float
    reduction: str
    schedule: str  # one that the kernels have for the rest
    chunk_rows: int
    dx_in_forward: bool  # with `recompute`: dx is made in forward
    dw_in_chunks: bool  # ... and dw in backward, chunk by chunk if there are several
    compute_dtype: torch.dtype

    def call(self, inputs: Inputs) -> Call:
        """What the kernels take: their dtypes, strides and alignment."""
        x, w, bias, target, class_weight, num_items = inputs
        dtype = self.compute_dtype
        items = num_items if isinstance(num_items, Tensor) else None
        given = dict(input=x, linear_weight=w, linear_bias=bias, target=target, weight=class_weight)
        check_memory("linear_cross_entropy", **given, num_items=items)
        if x.dim() != 2:
            x = x.reshape(-1, w.shape[1])
        if x.dtype != dtype:
            x = x.to(dtype)
        if x.stride(1) != 1:
            x = x.contiguous()
        if w.dtype != dtype:
            w = w.to(dtype)
        if not w.is_contiguous():
            w = w.contiguous()
        if w.stride(0) != w.shape[1]:  # a single class is contiguous with any stride
            w = w.clone(memory_format=torch.contiguous_format).view(-1).view(w.shape)
        if w.data_ptr() % 16:
            w = w.clone()
        if bias is not None:
            if bias.dtype not in (dtype, torch.float32):
                bias = bias.to(torch.float32)
            bias = bias.contiguous()
        total_weight = None
        if class_weight is not None:
            class_weight = class_weight.to(torch.float32).contiguous()
            if self.label_smoothing:
                total_weight = class_weight.sum()
        return Call(
            x,
            w,
            target if target.dim() == 1 and target.is_contiguous() else target.reshape(-1).contiguous(),
            bias,
            class_weight,
            total_weight,
            num_items,
            self.ignore_index,
            self.label_smoothing,
            self.softcap,
            self.z_loss,
            self.reduction == "mean",
        )

    def wanted(self, inputs: Inputs, needs: tuple[bool, bool, bool], dw_out: Tensor | None) -> GradsNeeded:
        """Gradients are made in their own dtypes where a GEMM can, else in fp32."""
        x, w, fp32 = inputs.input.dtype, inputs.linear_weight.dtype, torch.float32
        if dw_out is not None and dw_out.dtype in (self.compute_dtype, fp32):
            w = dw_out.dtype
        dx, dw = x if x == self.compute_dtype else fp32, w if w == self.compute_dtype else fp32
        return GradsNeeded(dx if needs[0] else None, dw if needs[1] else None, needs[2])

    def forward(self, k, call: Call, wanted: GradsNeeded, own_dw: bool, may_begin: bool = True) -> Forward:
        """`own_dw`: backward returns a dw. `may_begin`: with `recompute` a part of it may be made already, in storage
        that backward is to be given."""
        made = wanted
        if self.schedule == "recompute":
            made = self.made_in_forward(wanted)
            if own_dw and may_begin and self.begins_dw(k, call, wanted):
                return schedules.recompute_forward(k, call, wanted)
        if not made.any():
            return schedules.statistics(k, call, self.chunk_rows)
        if self.schedule == "stored":
            return schedules.stored(k, call)
        return schedules.chunked(k, call, self.rows_in_forward(call, wanted), made, self.sums_dw(call))

    def made_in_forward(self, wanted: GradsNeeded) -> GradsNeeded:
        """The gradients that are ready before backward, up to a factor."""
        if self.schedule == "chunked":
            return wanted
        return GradsNeeded(wanted.dx if self.dx_in_forward else None, None, False)

    def begins_dw(self, k, call: Call, wanted: GradsNeeded) -> bool:
        both = wanted.dx is not None and wanted.dw is not None
        if not (both and self.dx_in_forward and k.keeps_rest) or self.sums_dw(call) or wanted.db:
            return False
        return first_classes(call.x.shape[0], *call.w.shape, wanted.dw.itemsize) is not None

    def sums_dw(self, call: Call) -> bool:
        return self.dw_in_chunks and call.x.shape[0] > self.chunk_rows

    def rows_in_forward(self, call: Call, wanted: GradsNeeded) -> int:
        """The rows of a chunk. With `recompute` its E is as large as dw; of a frozen weight there is none to come."""
        if not self.dx_in_forward or self.dw_in_chunks or wanted.dw:
            return self.chunk_rows
        return min(self.chunk_rows, whole_tiles(ROOMY_BYTES, call.w.shape[0]))

    def loss(self, out: Forward, target: Tensor) -> Tensor:
        if self.reduction == "none":
            return _shaped(out.loss, target.shape)
        return out.loss.sum()

    def incoming(self, grad_loss: Tensor | None, grad_lse: Tensor | None) -> GradOutputs:
        """At least one of them is there."""
        if grad_lse is not None:
            grad_lse = grad_lse.reshape(-1)
        if grad_loss is None:
            grad_loss = grad_lse.new_zeros(())
        elif self.reduction == "none":
            grad_loss = grad_loss.reshape(-1)
        return GradOutputs(grad_loss, grad_lse)

    def backward(
        self, k, call: Call, kept: Forward, incoming: GradOutputs, wanted: GradsNeeded, dw_out: Tensor | None
    ) -> Grads:
        """The gradients for what arrives, from what forward kept; dw added to dw_out where there is one."""
        if self.schedule == "stored":
            return schedules.stored_backward(k, call, kept, incoming, wanted, dw_out)
        grads = Grads()
        if incoming.lse is None:  # as forward made them
            early = self.made_in_forward(wanted)
            if early.any():
                made = self.forward(k, call, wanted, dw_out is None)
                kept = kept._replace(dw=made.dw, classes=made.classes)
                grads = scaled(k, made, incoming.loss, dw_out)
            wanted = wanted.but(early)
        if self.sums_dw(call) and wanted.dx is None and wanted.dw and dw_out is None:
            rest = schedules.recompute_dw_in_chunks(k, call, kept, incoming, wanted, self.chunk_rows)
        elif wanted.any():
            rest = schedules.recompute_backward(k, call, kept, incoming, wanted, dw_out)
        else:
            rest = Grads()
        return grads.and_also(rest)


def scaled(k, made: Forward, factor: Tensor, dw_out: Tensor | None) -> Grads:
    """In place: the gradients that forward made, for a factor of 1."""
    factor, grads = factor.view(1), made.grads
    there = [grad for grad in grads if grad is not None]
    if made.dw is not None:
        there.append(made.dw[: made.classes])
    while there:
        grad, *there = there
        second = there.pop(0) if there and there[0].dtype == grad.dtype else None
        k.scale(grad, factor, second)
    if dw_out is not None and grads.dw is not None:
        dw_out.add_(grads.dw)
        return grads._replace(dw=None)
    return grads


def run(
    inputs: Inputs, plan: KernelPlan, grad_weight_out: Tensor | None, return_lse: bool, eager: bool
) -> tuple[Tensor, Tensor | None]:
    """(loss, lse) of checked arguments; `eager`: nobody but autograd has to see what is computed."""
    if not eager:
        return _run_ops(inputs, plan, grad_weight_out)
    device = inputs.input.device
    if device.type == "cuda" and cuda.current_device() != device.index:  # where memory comes from, and launches go
        with torch.cuda.device(device):
            return run(inputs, plan, grad_weight_out, return_lse, eager)
    needs = torch.is_grad_enabled() and (
        inputs.input.requires_grad
        or inputs.linear_weight.requires_grad
        or (inputs.linear_bias is not None and inputs.linear_bias.requires_grad)
    )
    if needs:
        out = _apply(*inputs[:3], inputs, grad_weight_out, plan, return_lse)
        return out if return_lse else (out, None)
    with torch.no_grad():
        out = plan.forward(kernels_of(device), plan.call(inputs), _NONE, False)
        return plan.loss(out, inputs.target), _shaped(out.lse, inputs.target.shape)


def _shaped(t: Tensor, shape: torch.Size) -> Tensor:
    """t in another shape, no view to autograd: users may write to it."""
    return t if t.shape == shape else torch.ops.aten._unsafe_view(t, shape)


# Autograd in plain eager ---------------------------------------------------------------------------------------------


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input, linear_weight, linear_bias, inputs, grad_weight_out, plan, return_lse):
        # The first three are inputs', for autograd to see: it takes its time for each argument.
        target, num_items = inputs.target, inputs.num_items
        wanted = plan.wanted(inputs, ctx.needs_input_grad[:3], grad_weight_out)
        out = plan.forward(kernels_of(input.device), plan.call(inputs), wanted, grad_weight_out is None)
        items = num_items if isinstance(num_items, Tensor) else None
        loss, lse = plan.loss(out, target), _shaped(out.lse, target.shape)
        kept_lse = lse.clone() if return_lse else lse  # users may write to theirs
        ctx.save_for_backward(*inputs[:5], items, kept_lse, out.xc, out.e)
        # What only backward sees is kept, not saved. grad_weight_out is neither a part of the graph nor saved: another
        # graph's backward may add to it first, which is no error here.
        made = Forward(None, None, None, out.grads, dw=out.dw, classes=out.classes)
        ctx.plan, ctx.wanted, ctx.rows, ctx.made = plan, wanted, out.rows, made
        ctx.num_items, ctx.grad_weight_out = None if items is not None else num_items, grad_weight_out
        ctx.shape, ctx.dtypes = input.shape, _dtypes(inputs)
        ctx.set_materialize_grads(False)
        return (loss, lse) if return_lse else loss

    @staticmethod
    def backward(ctx, grad_loss, grad_lse=None):
        if torch.is_grad_enabled():
            raise RuntimeError(_NO_SECOND_DERIVATIVES)
        if _is_batched(grad_loss) or _is_batched(grad_lse):
            raise RuntimeError("linear_cross_entropy: vmap over gradients (is_grads_batched=True) is not supported")
        if grad_loss is None and grad_lse is None:
            return (None,) * 7
        grad_loss, grad_lse = (as_plain("linear_cross_entropy", grad) for grad in (grad_loss, grad_lse))
        check_memory("linear_cross_entropy", grad_loss=grad_loss, grad_lse=grad_lse)
        plan, wanted, dw_out = ctx.plan, ctx.wanted, ctx.grad_weight_out
        if wanted.dw is None:
            dw_out = None
        made = ctx.__dict__.pop("made", _NOTHING)  # handed out once, whichever thread asks first
        incoming = plan.incoming(grad_loss, grad_lse)
        k = kernels_of((grad_lse if grad_loss is None else grad_loss).device)
        grads = Grads()
        if grad_lse is None and any(grad is not None for grad in made.grads):
            grads = scaled(k, made, incoming.loss, dw_out)
            wanted = wanted.but(plan.made_in_forward(wanted))
        begun = made.dw, made.classes
        del made  # the memory may serve what follows
        if wanted.any():
            *tensors, items, lse, xc, e = ctx.saved_tensors
            call = plan.call(Inputs(*tensors, ctx.num_items if items is None else items))
            kept = Forward(None, lse.view(-1), _own(ctx.rows), Grads(), xc, _scratch_of(e), *begun)
            grads = grads.and_also(plan.backward(k, call, kept, incoming, wanted, dw_out))
        return *_as_inputs(grads, ctx.dtypes, ctx.shape), None, None, None, None


# As in rms_norm: past Python frames of torch that have nothing to do here.
_apply = super(torch.autograd.Function, _LinearCrossEntropy).apply
_LinearCrossEntropy._backward_cls.apply = _LinearCrossEntropy.backward


def _scratch_of(e: Tensor | None) -> Tensor | None:
    """`e`, which was saved and which backward writes to, or a copy where anybody may read it again.

    That is where the graph is retained (another backward may even run beside this one) or autograd is not running.
    """
    if e is None or not _is_graph_kept():
        return e
    return padded(e, *e.shape, e.dtype).copy_(e)


def _own(rows: RowState) -> RowState:
    """`rows`, with tickets of their own where another backward may run at the same time, as in `_scratch_of`."""
    return rows._replace(tickets=torch.zeros_like(rows.tickets)) if _is_graph_kept() else rows


_is_graph_kept = torch._C._autograd._get_current_graph_task_keep_graph


def _is_batched(grad: Tensor | None) -> bool:
    return grad is not None and (
        torch._C._functorch.is_batchedtensor(grad) or torch._C._functorch.is_legacy_batchedtensor(grad)
    )


def _dtypes(inputs: Inputs) -> tuple[torch.dtype | None, ...]:
    bias = inputs.linear_bias
    return inputs.input.dtype, inputs.linear_weight.dtype, None if bias is None else bias.dtype


def _as_inputs(grads: Grads, dtypes: tuple, shape: torch.Size) -> tuple[Tensor | None, ...]:
    """In the inputs' dtypes and shapes, which most of them have already."""
    dx, dw, db = [g if g is None or g.dtype == dtype else g.to(dtype) for g, dtype in zip(grads, dtypes, strict=True)]
    return dx if dx is None or dx.shape == shape else dx.view(shape), dw, db


# Operators: functional, absent results None -------------------------------------------------------------------------

_lib = torch.library.Library("quackish", "FRAGMENT")
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)
_INPUTS = "Tensor input, Tensor linear_weight, Tensor? linear_bias, Tensor target, Tensor? weight, Tensor? num_items"
_PLAN = (
    "int ignore_index, float label_smoothing, float? softcap, float z_loss, str reduction, str schedule, "
    "SymInt chunk_rows, bool dx_in_forward, bool dw_in_chunks, ScalarType compute_dtype"
)
_GRADS = "Tensor dx, Tensor dw, Tensor db"
_ROWS = ", ".join(f"Tensor {name}" for name in RowState._fields)
_NUM_ROWS = len(RowState._fields)
_lib.define(
    f"linear_cross_entropy_kernels_fwd({_INPUTS}, Tensor? grad_weight_out, {_PLAN}, bool[] needs) "
    f"-> (Tensor loss, Tensor lse, {_ROWS}, {_GRADS}, Tensor xc, Tensor e)",
    tags=_TAGS,
)
# `e` is scratch to backward where it is not read again, see `_scratch_of`; no operator but this one ever reads it.
_lib.define(
    f"linear_cross_entropy_kernels_bwd(Tensor? grad_loss, Tensor? grad_lse, Tensor lse, {_ROWS}, Tensor? xc, "
    f"Tensor? e, {_INPUTS}, Tensor? grad_weight_out, {_PLAN}, bool[] needs) -> ({_GRADS})",
    tags=_TAGS,
)
_lib.define("linear_cross_entropy_kernels_scaled(Tensor grad, Tensor factor) -> Tensor", tags=_TAGS)
_fwd_op = torch.ops.quackish.linear_cross_entropy_kernels_fwd.default
_bwd_op = torch.ops.quackish.linear_cross_entropy_kernels_bwd.default
_scaled_op = torch.ops.quackish.linear_cross_entropy_kernels_scaled.default


def _run_ops(inputs: Inputs, plan: KernelPlan, grad_weight_out: Tensor | None) -> tuple[Tensor, Tensor]:
    *tensors, num_items = inputs
    if num_items is not None and not isinstance(num_items, Tensor):
        # a tensor, so that compiled code takes any number
        num_items = torch.full((), num_items, dtype=torch.float32, device=inputs.input.device)
    grad = torch.is_grad_enabled()
    needs = [grad and t is not None and t.requires_grad for t in inputs[:3]]
    loss, lse, *_ = _fwd_op(*tensors, num_items, grad_weight_out, *plan, needs)
    return loss, lse


def _sorted(args) -> tuple[Inputs, Tensor | None, KernelPlan, list[bool]]:
    first = len(Inputs._fields)
    return Inputs(*args[:first]), args[first], KernelPlan(*args[first + 1 : -1]), args[-1]


def _fwd_impl(*args):
    inputs, grad_weight_out, plan, needs = _sorted(args)
    wanted = plan.wanted(inputs, needs, grad_weight_out)
    out = plan.forward(kernels_of(inputs.input.device), plan.call(inputs), wanted, grad_weight_out is None, False)
    loss, lse = plan.loss(out, inputs.target), out.lse.view(inputs.target.shape)
    return loss, lse, *out.rows, *out.grads, out.xc, out.e


def _bwd_impl(grad_loss, grad_lse, lse, *args):
    rows, (xc, e), args = RowState(*args[:_NUM_ROWS]), args[_NUM_ROWS : _NUM_ROWS + 2], args[_NUM_ROWS + 2 :]
    inputs, grad_weight_out, plan, needs = _sorted(args)
    wanted = plan.wanted(inputs, needs, grad_weight_out)
    call = plan.call(inputs)
    kept = Forward(None, lse.view(-1), _own(rows), Grads(), xc, _scratch_of(e))
    incoming = plan.incoming(grad_loss, grad_lse)
    return tuple(plan.backward(kernels_of(inputs.input.device), call, kept, incoming, wanted, None))


def _scaled_impl(grad, factor):
    grad = grad.clone()
    kernels_of(grad.device).scale(grad, factor.view(1))
    return grad


def _fake_grads(inputs: Inputs, wanted: GradsNeeded) -> tuple[Tensor | None, ...]:
    x, w = inputs.input, inputs.linear_weight
    h = w.shape[1]
    return (
        x.new_empty((x.numel() // h, h), dtype=wanted.dx) if wanted.dx else None,
        w.new_empty(w.shape, dtype=wanted.dw) if wanted.dw else None,
        w.new_empty(w.shape[0], dtype=torch.float32) if wanted.db else None,
    )


def _fwd_fake(*args):
    inputs, grad_weight_out, plan, needs = _sorted(args)
    x, target, (v, h) = inputs.input, inputs.target, inputs.linear_weight.shape
    m = x.numel() // h
    wanted = plan.wanted(inputs, needs, grad_weight_out)
    grads, xc, e = (None, None, None), None, None
    if plan.schedule != "stored":
        grads = _fake_grads(inputs, plan.made_in_forward(wanted))
    elif wanted.any():
        xc = x.new_empty((m, h), dtype=plan.compute_dtype)
        e = x.new_empty_strided((m, v), padded_strides(v), dtype=plan.compute_dtype)
    loss = x.new_empty(target.shape if plan.reduction == "none" else (), dtype=torch.float32)
    lse = x.new_empty(target.shape, dtype=torch.float32)
    return loss, lse, *RowState.make(m, lambda n, dtype: x.new_empty(n, dtype=dtype)), *grads, xc, e


def _bwd_fake(grad_loss, grad_lse, lse, *args):
    inputs, grad_weight_out, plan, needs = _sorted(args[_NUM_ROWS + 2 :])
    return _fake_grads(inputs, plan.wanted(inputs, needs, grad_weight_out))


def _on_its_device(impl):
    """Memory comes from the current device, and launches go there; tensors are plain ones."""

    @functools.wraps(impl)
    def on_device(*args):
        args = [as_plain("linear_cross_entropy", a) if isinstance(a, Tensor) else a for a in args]
        device = next(t for t in args if isinstance(t, Tensor) and t.dim() > 0).device
        if device.type != "cuda":
            return impl(*args)
        with torch.cuda.device(device):
            return impl(*args)

    return on_device


for _op, _impl, _fake in (
    ("fwd", _fwd_impl, _fwd_fake),
    ("bwd", _bwd_impl, _bwd_fake),
    ("scaled", _scaled_impl, lambda grad, factor: torch.empty_like(grad)),
):
    _lib.impl(f"linear_cross_entropy_kernels_{_op}", _on_its_device(_impl), "CompositeExplicitAutograd")
    torch.library.register_fake(f"quackish::linear_cross_entropy_kernels_{_op}", _fake, lib=_lib)


def _setup_context(ctx, inputs, output):
    ctx.grad_weight_out, ctx.args = inputs[6], inputs[7:]
    _, *kept = output
    ctx.mark_non_differentiable(*(t for t in kept[1:] if t is not None))
    ctx.save_for_backward(*inputs[:6], *kept)
    ctx.set_materialize_grads(False)


def _op_backward(ctx, grad_loss, grad_lse, *_):
    if torch.is_grad_enabled():
        raise RuntimeError(_NO_SECOND_DERIVATIVES)
    if grad_loss is None and grad_lse is None:
        return (None,) * 18
    saved = ctx.saved_tensors
    given, lse, rows, (dx, dw, db, xc, e) = saved[:6], saved[6], saved[7:-5], saved[-5:]
    inputs, plan, needs = Inputs(*given), KernelPlan(*ctx.args[:-1]), ctx.args[-1]
    dw_out = ctx.grad_weight_out if needs[1] else None
    ready = [None if grad_lse is not None else g for g in (dx, dw, db)]
    grads = Grads(*(None if g is None else _scaled_op(g, grad_loss) for g in ready))
    rest = [need and g is None for need, g in zip(needs, ready, strict=True)]
    if any(rest):
        more = _bwd_op(grad_loss, grad_lse, lse, *rows, xc, e, *given, dw_out, *plan, rest)
        grads = grads.and_also(Grads(*more))
    if dw_out is not None:
        dw_out.add_(grads.dw)
        grads = grads._replace(dw=None)
    return *_as_inputs(grads, _dtypes(inputs), inputs.input.shape), *(None,) * 15


torch.library.register_autograd(
    "quackish::linear_cross_entropy_kernels_fwd", _op_backward, setup_context=_setup_context, lib=_lib
)
