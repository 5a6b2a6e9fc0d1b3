"""A call of linear cross entropy on its way down: its plan, inputs, gradients, and the memory that launches share."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quackish.device.arguments import by_name
from quackish.device.cuda import address
from quackish.device.kernel_device import KernelDevice
from quackish.device.modes import check_memory
from quackish.ops.linear_cross_entropy import row_state
from quackish.ops.linear_cross_entropy.checks import Inputs
from quackish.ops.linear_cross_entropy.reference import accumulate_dtype
from quackish.ops.linear_cross_entropy.row_problems import ExpLogitsArgs
from quackish.ops.linear_cross_entropy.row_state import RowStateParts


class LossPlan(NamedTuple):
    """Options of a call that are not tensors. The fields from `schedule` on are the LinearCrossEntropyConfig."""

    ignore_index: int
    label_smoothing: float
    softcap: float | None
    z_loss: float
    reduction: str
    return_stats: bool
    compute_dtype: torch.dtype
    why_portable: str | None  # None: kernels run. Else the reason to warn of once; "": no warning
    schedule: str = ""
    chunk_rows: int = 0
    dx_in_forward: bool = False
    dw_in_chunks: bool = False
    keeps_first: bool = False

    @property
    def options(self) -> tuple:
        """The fields before the config."""
        return self[:_NUM_OPTIONS]

    @property
    def config(self) -> tuple:
        return self[_NUM_OPTIONS:]

    def with_config(self, config: tuple) -> "LossPlan":
        fields: Any = *self[:_NUM_OPTIONS], *config
        return LossPlan(*fields)


_NUM_OPTIONS = LossPlan._fields.index("schedule")  # torch.compile of PyTorch 2.9 cannot trace this


class GradOutputs(NamedTuple):
    """The gradients of the outputs, fp32."""

    loss: Tensor | None = None  # 0-dim, or (m,) contiguous; None: 1
    lse: Tensor | None = None  # (m,) contiguous; None: 0, as for the next two
    log_prob: Tensor | None = None
    entropy: Tensor | None = None

    def has_row_grads(self) -> bool:
        """Whether lse, log_prob or entropy has a gradient."""
        return self.lse is not None or self.log_prob is not None or self.entropy is not None


NO_GRADS = GradOutputs()


class GradsNeeded(NamedTuple):
    """The dtypes of the gradients to compute, None for those not needed; dbias is fp32."""

    dx: torch.dtype | None
    dw: torch.dtype | None
    db: bool

    def any(self) -> bool:
        return self.dx is not None or self.dw is not None or self.db

    def as_bools(self) -> list[bool]:
        return [self.dx is not None, self.dw is not None, self.db]

    def without(self, grads: "Grads") -> "GradsNeeded":
        """The gradients that are not in `grads`."""
        dx, dw, db = grads
        return GradsNeeded(
            None if dx is not None else self.dx, None if dw is not None else self.dw, self.db and db is None
        )


class Grads(NamedTuple):
    dx: Tensor | None = None  # (m, h)
    dw: Tensor | None = None  # (v, h)
    db: Tensor | None = None  # (v,) fp32

    def with_dw_added_to(self, out: Tensor | None) -> "Grads":
        """Without dw, which is added to `out`; unchanged if there is no `out`."""
        if out is None or self.dw is None:
            return self
        out.add_(self.dw)
        return self._replace(dw=None)

    def fill_missing(self, other: "Grads") -> "Grads":
        return Grads(*(theirs if ours is None else ours for ours, theirs in zip(self, other, strict=True)))


class ProblemFields(NamedTuple):
    """Fields that problems of several kernels have, with the same value in all launches of a call."""

    h: int
    dtype: torch.dtype
    target_dtype: torch.dtype
    bias_dtype: torch.dtype | None
    class_weight_dtype: torch.dtype | None
    softcap: bool
    smoothing: bool
    weighted: bool
    logit_scale: bool
    return_stats: bool
    x_aligned: bool  # each row of x starts on 16 bytes


class Call(NamedTuple):
    """A call from the public function to the kernels or the portable path; of forward or backward."""

    inputs: Inputs  # the user's; logit_scale as a tensor
    plan: LossPlan
    needed: GradsNeeded
    kernels: Any  # LceKernels, whose module imports this one; None on the portable path
    device: torch.device  # of the inputs; in a dry run, which has meta tensors, the simulated one
    return_lse: bool
    eager: bool  # kernels are launched directly; else by a custom operator, which returns all that backward needs
    grad_outputs: GradOutputs = NO_GRADS  # of forward, which computes gradients for a loss's gradient of 1
    fields: ProblemFields | None = None  # `problem_fields`, if they are already known

    def num_outputs(self) -> int:  # PyTorch 2.9 cannot trace a property of a NamedTuple
        """How many of `Outputs` are returned."""
        return len(Outputs._fields) if self.plan.return_stats else 1 + self.return_lse


class Outputs(NamedTuple):
    loss: Tensor
    lse: Tensor | None = None
    log_prob: Tensor | None = None
    entropy: Tensor | None = None
    predicted: Tensor | None = None


class Saved(NamedTuple):
    """What forward returns for backward."""

    state: Tensor | None = None  # RowState.memory; on the portable path the divisor of "mean"
    live_x: Tensor | None = None  # (layout.kept, h), the live rows of x
    # (layout.kept, v) with padded row stride; on the portable path the logits (m, v), in fp32 or fp64
    exp_logits: Tensor | None = None


class ForwardGrads(NamedTuple):
    """The gradients that forward has computed, for a loss's gradient of 1."""

    grads: Grads = Grads()
    dw: Tensor | None = None  # (v, h) with its first `dw_classes` rows computed; `recompute` on kernels in eager mode
    dw_classes: int = 0


def requires_grad(inputs: Inputs) -> list[bool]:
    """Whether input, linear_weight and linear_bias need gradients."""
    enabled = torch.is_grad_enabled()
    return [enabled and t is not None and t.requires_grad for t in inputs.parameters()]


def grads_needed(inputs: Inputs, plan: LossPlan, needs: Sequence[bool]) -> GradsNeeded:
    """The gradients to compute. In the parameter's dtype if our GEMM can write it, else in fp32 (fp64 for fp64)."""
    dx, dw, fp32 = inputs.input.dtype, inputs.linear_weight.dtype, accumulate_dtype(plan.compute_dtype)
    direct = (plan.compute_dtype,) if plan.why_portable is None else ()
    dw_out = inputs.grad_weight_out
    if dw_out is not None and dw_out.dtype in (*direct, fp32):
        dw = dw_out.dtype
    dx, dw = dx if dx in direct else fp32, dw if dw in direct else fp32
    needs_dx, needs_dw, needs_db = needs
    return GradsNeeded(dx if needs_dx else None, dw if needs_dw else None, needs_db)


def unpack(values: tuple, *types: Any) -> list:
    """The values as one NamedTuple of each type, and the remaining values."""
    parts, first = [], 0
    for kind in types:
        last = first + len(kind._fields)
        parts.append(kind(*values[first:last]))
        first = last
    return [*parts, values[first:]]


def reshaped(t: Tensor, shape: torch.Size) -> Tensor:
    """t in another shape, but not as an autograd view: users may write to it."""
    return t if t.shape == shape else torch.ops.aten._unsafe_view(t, shape)


# Memory of kernels ----------------------------------------------------------------------------------------------------

I32, F32 = torch.int32, torch.float32


def padded_matrix(device: KernelDevice, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """A matrix whose rows are aligned to 128 bytes."""
    if columns % 8:  # kernels read 16 bytes at a time: the last row needs allocated padding
        return padded_matrix(device, rows, -(-columns // 8) * 8, dtype)[:, :columns]
    return device.empty((rows, columns), padded_strides(columns), dtype)


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

    def args(self) -> ExpLogitsArgs:
        first, second = self.first, self.second
        return _exp_logits_args(
            first=first.data_ptr(), second=address(second), first_stride=first.stride()[0],
            second_stride=0 if second is None else second.stride()[0], split=self.split,
        )  # fmt: skip


NOT_STORED = ExpLogits(None)
_exp_logits_args = by_name(ExpLogitsArgs)


# PyTorch's allocator returns the same addresses in each step.
_parts_at = functools.lru_cache(maxsize=1024)(row_state.parts_at)
_DTYPES = {name: getattr(torch, part.dtype) for name, part in row_state.DESCRIPTIONS._asdict().items()}


class RowState(NamedTuple):
    """Numbers per row in one allocation, and the addresses of its parts. Forward fills it, backward reads it."""

    memory: Tensor  # (row_state.size(m, return_stats),) int32
    m: int
    parts: RowStateParts

    @classmethod
    def new(cls, device: KernelDevice, m: int, return_stats: bool = False) -> "RowState":
        """Uninitialized state for m rows."""
        return cls.from_memory(device.vector(row_state.size(m, return_stats), I32), m)

    @classmethod
    def from_memory(cls, memory: Tensor, m: int) -> "RowState":
        return cls(memory, m, _parts_at(memory.data_ptr(), m))

    @property
    def address(self) -> int:
        return self.parts.tickets

    def tensor(self, name: str, n: int | None = None) -> Tensor:
        """The first n numbers of a part, by default m."""
        first = (getattr(self.parts, name) - self.address) // 4
        return self.memory[first : first + (self.m if n is None else n)].view(_DTYPES[name])


# Calls on kernels -----------------------------------------------------------------------------------------------------


class KernelCall(NamedTuple):
    """A call in the form that kernels take: arguments shared by all launches of a forward or a backward pass."""

    kernels: Any  # LceKernels
    device: KernelDevice  # of the kernels
    plan: LossPlan
    state: RowState  # filled by forward, read by backward
    m: int
    h: int
    v: int
    x: Tensor  # (m, h) compute dtype, unit stride along h
    w: Tensor  # (v, h) compute dtype, contiguous
    target: Tensor  # (m,) contiguous
    bias: Tensor | None  # (v,) contiguous, compute dtype or fp32
    class_weight: Tensor | None  # (v,) contiguous, fp32
    total_weight: Tensor | None  # 0-dim, the sum of class_weight; with label smoothing
    num_items: float | Tensor | None  # 0-dim
    softcap: float  # 0: none
    logit_scale: Tensor | None  # 0-dim fp32
    dw_out: Tensor | None  # (v, h): dw is added to it instead of returned
    fields: ProblemFields
    grad_outputs: GradOutputs


class Chunk(NamedTuple):
    """Slots [start, start + rows)."""

    start: int
    rows: int
    live_x: Tensor | None  # (rows, h): the rows of x in these slots
    exp_logits: ExpLogits


def prepare(call: Call, state: RowState | None = None) -> KernelCall:
    """The call, with the user's tensors in the dtypes, strides and alignment that the kernels take.

    state: in backward, forward's.
    """
    plan, kernels, dtype = call.plan, call.kernels, call.plan.compute_dtype
    x, w, target, bias, class_weight, logit_scale, num_items, dw_out = call.inputs
    v, h = w.shape
    has_options = not (bias is class_weight is logit_scale is num_items is None)
    if has_options or not (x.data_ptr() and w.data_ptr() and target.data_ptr()):
        check_memory(
            "linear_cross_entropy", input=x, linear_weight=w, linear_bias=bias, target=target, weight=class_weight,
            logit_scale=logit_scale, num_items=num_items if isinstance(num_items, Tensor) else None,
        )  # fmt: skip
    if x.dim() != 2:
        x = x.reshape(-1, h)
    if x.dtype != dtype:
        x = x.to(dtype)
    if x.stride()[1] != 1:
        x = x.contiguous()
    # a single class is contiguous with any stride
    if w.dtype != dtype or not w.is_contiguous() or w.stride()[0] != h or w.data_ptr() % 16:
        w = w.new_empty(w.shape, dtype=dtype).copy_(w)
    fields, total_weight = call.fields or problem_fields(call.inputs, plan), None
    if bias is not None:
        bias = (bias if bias.dtype == fields.bias_dtype else bias.to(fields.bias_dtype)).contiguous()
    if class_weight is not None:
        class_weight = class_weight.to(torch.float32).contiguous()
        if fields.smoothing:
            total_weight = class_weight.sum()
    if target.dim() != 1 or not target.is_contiguous():
        target = target.reshape(-1).contiguous()
    is_aligned = not (x.data_ptr() | x.stride()[0] * 2) & 15
    if not is_aligned or target.dtype != fields.target_dtype:  # a saved-tensor hook may have changed the dtype
        fields = fields._replace(x_aligned=is_aligned, target_dtype=target.dtype)
    m, device = x.shape[0], kernels.device
    return _kernel_call((
        kernels, device, plan, state or RowState.new(device, m, plan.return_stats), m, h, v, x, w, target, bias,
        class_weight, total_weight, num_items, plan.softcap or 0.0, logit_scale, dw_out, fields, _prepare_grads(call),
    ))  # fmt: skip


_kernel_call = KernelCall._make


def problem_fields(inputs: Inputs, plan: LossPlan) -> ProblemFields:
    """The fields of a call whose rows of x start on 16 bytes."""
    dtype, bias, weighted = plan.compute_dtype, inputs.linear_bias, inputs.weight is not None
    smoothing = plan.label_smoothing > 0
    return ProblemFields(
        h=inputs.linear_weight.shape[1], dtype=dtype, target_dtype=inputs.target.dtype,
        bias_dtype=None if bias is None else dtype if bias.dtype == dtype else torch.float32,
        class_weight_dtype=torch.float32 if weighted else None, softcap=plan.softcap is not None, smoothing=smoothing,
        weighted=smoothing and weighted, logit_scale=inputs.logit_scale is not None, return_stats=plan.return_stats,
        x_aligned=True,
    )  # fmt: skip


def _prepare_grads(call: Call) -> GradOutputs:
    """The output gradients in the shapes of KernelCall: of the loss 0-dim or (m,), the others (m,)."""
    grads = call.grad_outputs
    if grads is NO_GRADS:
        return grads
    (loss, *row_grads), have_rows = grads, grads.has_row_grads()
    if have_rows:
        row_grads = [None if grad is None else grad.reshape(-1).contiguous() for grad in row_grads]
    if loss is None:
        loss = next(grad for grad in row_grads if grad is not None).new_zeros(())
    elif call.plan.reduction == "none":
        loss = loss.reshape(-1)
        loss = loss[0] if loss.stride(0) == 0 else loss.contiguous()
    elif not have_rows:
        return grads
    return GradOutputs(loss, *row_grads)
