"""The public function and module, and the choice between kernels and the portable path."""

import operator
from typing import TYPE_CHECKING, Any, Literal, Protocol, overload

import torch
from torch import Tensor, nn

from quackish.device import choose
from quackish.device.kernel_device import expects_kernels, refuse_portable, report_portable, why_unsupported
from quackish.device.modes import (
    are_plain,
    autocast_dtype,
    is_compiling,
    is_plain,
    is_transformed,
    traced_as_constant,
)
from quackish.errors import UnsupportedError, check_bool
from quackish.ops.linear_cross_entropy import memory, operators, portable
from quackish.ops.linear_cross_entropy.calls import Call, LossPlan, grads_needed, problem_fields, requires_grad
from quackish.ops.linear_cross_entropy.checks import (
    FP32,
    Inputs,
    Options,
    check_options,
    check_tensors,
    make_inputs,
    make_options,
    refuse_grad,
    resolve_compute_dtype,
)
from quackish.ops.linear_cross_entropy.gemm_problems import GEMM_SPEC
from quackish.ops.linear_cross_entropy.layout import config_of
from quackish.ops.linear_cross_entropy.reference import LinearCrossEntropyStats
from quackish.ops.linear_cross_entropy.warm_up import prepare
from quackish.ops.shared.arguments import check_sizes, check_tensor
from quackish.ops.shared.buffers import check_buffer
from quackish.types import Backend, Device, LinearCrossEntropyOptions, LossCallOptions, Reduction, Schedule

if TYPE_CHECKING:
    from typing_extensions import Unpack


@overload
def linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, return_lse: Literal[False] = False,
    return_stats: Literal[False] = False, **options: "Unpack[LinearCrossEntropyOptions]",
) -> Tensor: ...  # fmt: skip
@overload
def linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, return_lse: Literal[True],
    return_stats: Literal[False] = False, **options: "Unpack[LinearCrossEntropyOptions]",
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, return_lse: Literal[False] = False,
    return_stats: Literal[True], **options: "Unpack[LinearCrossEntropyOptions]",
) -> tuple[Tensor, LinearCrossEntropyStats]: ...  # fmt: skip
@overload
def linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, return_lse: bool = False,
    return_stats: bool = False, **options: "Unpack[LinearCrossEntropyOptions]",
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, LinearCrossEntropyStats]: ...  # fmt: skip
def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
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
    """Cross entropy of `input @ linear_weight.T + linear_bias` with `target`, one chunk of rows at a time.

        z = input @ linear_weight.T + linear_bias,   a = logit_scale * softcap * tanh(z / softcap)
        loss = cross_entropy(a, target) + z_loss * logsumexp(a)**2,   0 for an ignored row

    The arguments before `softcap` have the names and meaning of `F.linear_cross_entropy`. Kernels are bitwise
    reproducible, and a row's loss does not depend on other rows. No input except `grad_weight_out` is written, and
    nothing synchronizes with the host. Schedules, memory, numerics and edge cases: docs/guides/linear_cross_entropy.md.

    Args:
        input: (..., H) bf16, fp16, fp32 or fp64, any strides.
        linear_weight: (V, H) in input's dtype unless autocast is on, any strides.
        target: (...) int32 or int64: classes or `ignore_index`. Class probabilities are not supported.
        linear_bias: (V,) in input's dtype or fp32, added to the fp32 logits. -inf masks a class.
        weight: (V,) floating class weights. They get no gradient: with grad enabled, requiring one is an error.
        reduction: "mean", "sum" or "none". "mean" divides by the sum of the live rows' class weights, or `num_items`.
        ignore_index: rows with this target have loss 0 and no gradient. None: -100.
        label_smoothing: in [0, 1], as in F.cross_entropy, including class weights.
        softcap: positive. None or inf: no cap.
        logit_scale: the inverse of a temperature: a positive number, or a 0-dim floating tensor, which is never copied
            to the host. Gets no gradient, as class weights. None: 1.
        z_loss: finite, not negative. Class weights do not scale it; "mean" divides it like the other terms.
        num_items: int or 0-dim tensor that replaces the divisor of "mean". A tensor is never copied to the host.
        return_lse: return (loss, lse). lse is differentiable; in ignored rows it is 0 without gradient.
        return_stats: return (loss, stats), a named tuple: lse, log_prob of the target, entropy of softmax(a) in nats,
            and predicted, the first class with the largest logit. All except predicted are differentiable.
        grad_weight_out: (V, H) buffer, fp32 or in linear_weight's dtype. Each backward adds linear_weight's gradient to
            it and returns None to autograd. Not supported for parameters that FSDP shards: use .grad.
        schedule: what is kept between forward and backward: "chunked" (the gradients), "stored" (the exponentials of
            all logits), "recompute" (nothing), or "auto", which depends on shapes and options only.
        chunk_size: rows per chunk; kernels round it up to a multiple of 128. None: chosen from V, H and dtype. Kernels
            hold 16-bit exponentials of a chunk's logits; up to 8192 rows are one chunk.
        memory_limit: maximum bytes for forward and backward, excluding inputs and returned gradients. Runs the fastest
            schedule and chunk size that fit. Independent of free memory.
        backend: "auto" runs kernels if they exist (Hopper, Blackwell; bf16 or fp16; H a multiple of 8), else the
            portable PyTorch path: silently on CPU, with one warning per reason on a GPU. "cute" runs kernels or raises.
            "reference" runs the portable path. torch.func transforms and forward-mode AD compute full logits.

    Returns:
        loss: fp32 (fp64 for fp64): 0-dim, or target's shape with reduction "none". lse and stats have target's shape
        and loss's dtype; predicted is int64.

    Raises:
        ValueError, TypeError: invalid shape, value, device or dtype of an argument; `memory_limit` is too small.
        IndexError: on CPU, a target that is neither a class nor `ignore_index`. On a GPU that row's loss is NaN.
        UnsupportedError: `backend="cute"` and no kernel covers the call; `grad_weight_out` under FSDP or torch.func.
        RuntimeError: backward with create_graph=True.
    """
    inputs: Inputs = make_inputs(
        input, linear_weight, target, linear_bias=linear_bias, weight=weight, logit_scale=logit_scale,
        num_items=num_items, grad_weight_out=grad_weight_out,
    )  # fmt: skip
    options: Options = make_options(
        reduction=reduction, ignore_index=ignore_index, label_smoothing=label_smoothing, softcap=softcap, z_loss=z_loss,
        return_lse=return_lse, return_stats=return_stats, schedule=schedule, chunk_size=chunk_size,
        memory_limit=memory_limit, backend=backend,
    )  # fmt: skip
    eager = is_plain() and are_plain(inputs)  # else custom operators run
    call = call_for(inputs, options) if eager else make_call(inputs, options)
    if not eager and is_transformed():
        loss, *stats = _run_transformed(call, options)
    else:
        if grad_weight_out is not None and not is_compiling():
            check_buffer(
                "linear_cross_entropy", grad_weight_out=grad_weight_out, linear_weight=linear_weight, input=input
            )
        loss, *stats = operators.run(call)
    if return_stats:
        return loss, LinearCrossEntropyStats(*stats)
    return (loss, stats[0]) if return_lse else loss


class LossCall(Protocol):
    """The type of LinearCrossEntropyLoss's call and forward."""

    @overload
    def __call__(
        self, input: Tensor, target: Tensor, *,
        return_lse: Literal[False] = False, return_stats: Literal[False] = False, **options: "Unpack[LossCallOptions]",
    ) -> Tensor: ...  # fmt: skip
    @overload
    def __call__(
        self, input: Tensor, target: Tensor, *,
        return_lse: Literal[True], return_stats: Literal[False] = False, **options: "Unpack[LossCallOptions]",
    ) -> tuple[Tensor, Tensor]: ...  # fmt: skip
    @overload
    def __call__(
        self, input: Tensor, target: Tensor, *,
        return_lse: Literal[False] = False, return_stats: Literal[True], **options: "Unpack[LossCallOptions]",
    ) -> tuple[Tensor, LinearCrossEntropyStats]: ...  # fmt: skip
    @overload
    def __call__(
        self, input: Tensor, target: Tensor, *,
        return_lse: bool = False, return_stats: bool = False, **options: "Unpack[LossCallOptions]",
    ) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, LinearCrossEntropyStats]: ...  # fmt: skip


def with_overloads(forward: Any) -> LossCall:
    return forward


class LinearCrossEntropyLoss(nn.Module):
    """`linear_cross_entropy` as a module, with torch.nn.LinearCrossEntropyLoss's arguments and state.

    State: `linear.weight` (num_classes, in_features); `linear.bias` (num_classes,) with bias=True; the buffer `weight`
    (num_classes,) if class weights are given. `softcap` and later arguments are quackish's own. num_items, return_lse,
    return_stats and grad_weight_out are arguments of the call.
    """

    weight: Tensor | None
    __call__: LossCall  # nn.Module's returns Any

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        out_features: tuple[int, ...] = (),
        bias: bool = False,
        device: Device = None,
        dtype: torch.dtype | None = None,
        reduction: Reduction = "mean",
        weight: Tensor | None = None,
        ignore_index: int | None = None,
        label_smoothing: float = 0.0,
        options: None = None,
        softcap: float | None = None,
        logit_scale: float | Tensor | None = None,
        z_loss: float = 0.0,
        schedule: Schedule = "auto",
        chunk_size: int | None = None,
        memory_limit: int | None = None,
        backend: Backend = "auto",
    ) -> None:
        super().__init__()
        who = type(self).__name__
        check_sizes(who, in_features=in_features, num_classes=num_classes)
        check_bool(who, bias=bias)
        if out_features != () and out_features != []:
            raise UnsupportedError(
                f"{who}: out_features is {out_features}, expected (): K-dimensional losses are not "
                "supported; use torch.nn.LinearCrossEntropyLoss."
            )
        if options is not None:
            raise UnsupportedError(
                f"{who}: options configures torch's chunking, expected None; use schedule and chunk_size instead."
            )
        check_tensor(who, "weight", weight, optional=True)
        if weight is not None and weight.shape != (num_classes,):
            raise ValueError(f"{who}: weight has shape {tuple(weight.shape)}, expected ({num_classes},)")
        if weight is not None and not weight.is_floating_point():
            raise TypeError(f"{who}: weight is {weight.dtype}, expected bfloat16, float16, float32 or float64")
        refuse_grad(who, weight=weight)
        options = Options(
            reduction=reduction, ignore_index=ignore_index, label_smoothing=label_smoothing, softcap=softcap,
            z_loss=z_loss, schedule=schedule, chunk_size=chunk_size, memory_limit=memory_limit, backend=backend,
        )  # fmt: skip
        check_options(options, logit_scale, device=getattr(logit_scale, "device", None), who=who)
        self.logit_scale = logit_scale
        self.linear = nn.Linear(in_features, num_classes, bias=bias, device=device, dtype=dtype)
        self.register_buffer("weight", weight)
        for name in MODULE_OPTIONS:
            setattr(self, name, getattr(options, name))

    @with_overloads
    def forward(
        self,
        input: Tensor,
        target: Tensor,
        *,
        num_items: int | Tensor | None = None,
        return_lse: bool = False,
        return_stats: bool = False,
        grad_weight_out: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, LinearCrossEntropyStats]:
        """input (..., in_features), target (...). Returns as `linear_cross_entropy`."""
        return linear_cross_entropy(
            input, self.linear.weight, target, linear_bias=self.linear.bias, weight=self.weight,
            logit_scale=self.logit_scale, num_items=num_items, return_lse=return_lse, return_stats=return_stats,
            grad_weight_out=grad_weight_out,
            **{name: getattr(self, name) for name in MODULE_OPTIONS},
        )  # fmt: skip

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in (*MODULE_OPTIONS, "logit_scale"))


MODULE_OPTIONS = [name for name in Options._fields if name not in ("return_lse", "return_stats")]
_MAX_CALLS = 4096  # the cache is cleared when full: with packed sequences, shapes may be new in every step
_calls: dict[tuple, tuple] = {}  # the fields of a Call after `inputs`


def call_for(inputs: Inputs, options: Options) -> Call:
    """The call in plain eager mode. Its fields after `inputs` are computed once, and imply that arguments are valid."""
    try:
        key = choose.epoch, key_of(inputs, options)
        found = _calls.get(key)
    except (AttributeError, TypeError, ValueError):  # neither tensor nor number, or not hashable: make_plan raises
        key, found = None, None
    if found is None:
        if len(_calls) >= _MAX_CALLS:
            _calls.clear()
        call = make_call(inputs, options, eager=True)
        if call.kernels is not None:
            prepare(call)
            call = call._replace(fields=problem_fields(inputs, call.plan))
        found = call[1:]
        if key is not None:
            found = _calls.setdefault(key, found)  # of threads that race, the first one's
    return Call(inputs, *found)


def make_call(inputs: Inputs, options: Options, eager: bool = False) -> Call:
    """The call after its checks. Without `eager` it runs custom operators, which find their kernels themselves."""
    plan, device = make_plan(inputs, options, eager), inputs.input.device
    kernels = operators.kernels_on(device) if eager and plan.why_portable is None else None
    needed = grads_needed(inputs, plan, requires_grad(inputs))
    return Call(inputs, plan, needed, kernels, device, options.return_lse, eager)


def key_of(inputs: Inputs, options: Options) -> tuple:
    """Everything but the epoch that a cached call depends on. For invalid arguments may raise or be unhashable."""
    return (
        torch.is_grad_enabled(),  # without it, class weights may require grad
        *options,
        *map(type, options),  # 1, 1.0 and True are equal
        *[
            None if t is None else (t.shape, t.dtype, t.device, t.requires_grad) if isinstance(t, Tensor) else _range(t)
            for t in inputs
        ],
        autocast_dtype(inputs.input.device.type),
        options.memory_limit is None or memory.tensor_metadata(inputs),
    )


def _range(number: float) -> tuple:
    """Everything that the validity of a number depends on, but not its value."""
    return type(number), 0 <= number < 2**63, FP32.tiny <= number <= FP32.max


@traced_as_constant
def _why_unsupported(device: torch.device) -> str:
    return why_unsupported("linear_cross_entropy", GEMM_SPEC, device)


def make_plan(inputs: Inputs, options: Options, eager: bool = False) -> LossPlan:
    """Checks the arguments and chooses path, schedule and chunks from shapes, dtypes, device and options."""
    check_tensors(inputs)
    check_options(options, inputs.logit_scale, inputs.num_items, inputs.input.device)
    device, (v, h), m = inputs.input.device, inputs.linear_weight.shape, inputs.target.numel()
    backend, softcap, memory_limit = options.backend, options.softcap, options.memory_limit
    softcap = None if softcap is None or softcap > FP32.max else float(softcap)  # infinite in fp32: no cap
    compute_dtype = resolve_compute_dtype(inputs)
    why_portable = ""
    if m > 0 and backend != "reference":  # without rows, the portable path is enough
        why_portable = _why_unsupported(device)
        why_portable = why_portable or _not_covered(compute_dtype, h) or None
    if why_portable:
        refuse_portable(why_portable, device, backend)
    if why_portable is not None and not expects_kernels(device):
        why_portable = ""
    plan = LossPlan(
        ignore_index=-100 if options.ignore_index is None else options.ignore_index,
        label_smoothing=options.label_smoothing, softcap=softcap, z_loss=options.z_loss, reduction=options.reduction,
        return_stats=options.return_stats, compute_dtype=compute_dtype, why_portable=why_portable,
    )  # fmt: skip
    if memory_limit is None or device.type == "meta":
        problem = memory.problem_for(plan, v, h, options.return_lse, inputs.grad_weight_out is not None)
        return plan.with_config(config_of(problem, m, options.schedule, options.chunk_size))
    request = memory.request_for(inputs, plan, options.return_lse, eager)
    limit, rows = (None if n is None else operator.index(n) for n in (memory_limit, options.chunk_size))
    return plan.with_config(memory.choose_within_limit(limit, request, options.schedule, rows))


def _run_transformed(call: Call, options: Options) -> tuple[Tensor, ...]:
    """Runs the reference, whose operations torch.func and forward-mode AD can differentiate."""
    reason = "linear_cross_entropy: torch.func transforms and forward-mode AD run the reference, with all logits"
    if options.backend == "cute":
        raise UnsupportedError(f'{reason}; expected none of them with backend="cute"')
    if call.inputs.grad_weight_out is not None:
        raise UnsupportedError(f"{reason}; expected no grad_weight_out, which only backward() adds to")
    if options.memory_limit is not None:
        raise UnsupportedError(f"{reason}; expected no memory_limit")
    if options.backend == "auto":
        report_portable(reason, call.device, options.backend)
    return portable.run_full_logits(call)


def _not_covered(compute_dtype: torch.dtype, h: int) -> str:
    """Why no kernel covers this dtype and h; "" if one does."""
    if compute_dtype not in (torch.bfloat16, torch.float16):
        return _no_kernel_for(f"{compute_dtype}; supported: torch.bfloat16, torch.float16")
    return _no_kernel_for(f"linear_weight with {h} columns; supported: multiples of 8") if h % 8 else ""


def _no_kernel_for(reason: str) -> str:
    return f'linear_cross_entropy: no kernel for {reason}. backend="auto" runs the portable path.'
