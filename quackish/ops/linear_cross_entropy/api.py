"""Linear cross entropy for torch: the function and the module, and which path a call takes."""

import operator
from collections.abc import Callable

import torch
from torch import Tensor, nn

from quackish import kernels, toolchain
from quackish.configs import choose
from quackish.configs.linear_cross_entropy import config_of
from quackish.errors import UnsupportedError, warn_once
from quackish.gpu import gpu_of
from quackish.ops.linear_cross_entropy import autograd, memory, portable
from quackish.ops.linear_cross_entropy.calls import Plan
from quackish.ops.linear_cross_entropy.checks import (
    FP32,
    Inputs,
    Options,
    check_buffer,
    check_options,
    check_tensors,
    compute_dtype_of,
)
from quackish.ops.linear_cross_entropy.warm_up import prepare
from quackish.ops.modes import are_plain, autocast_dtype, is_compiling, is_plain, is_transformed
from quackish.reference.linear_cross_entropy import LinearCrossEntropyStats


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
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
    """Cross entropy of `input @ linear_weight.T + linear_bias` with `target`; the full logits are never materialized.

    The arguments before `softcap` have the names and meaning of `F.linear_cross_entropy`. With the logits
    a = logit_scale * softcap * tanh(z / softcap), a live row's loss is F.cross_entropy's plus z_loss * logsumexp(a)**2,
    an ignored row's is 0. docs/linear_cross_entropy.md has the formulas, schedules, memory, numerics and edge cases.

    Args:
        input: (..., H) bf16, fp16, fp32 or fp64, any strides.
        linear_weight: (V, H) in input's dtype unless autocast is on, any strides.
        target: (...) int32 or int64: classes or `ignore_index`. Class probabilities are not supported.
        linear_bias: (V,) in input's dtype or fp32, added to the fp32 logits. -inf masks a class out.
        weight: (V,) floating class weights, without gradient.
        reduction: "mean", "sum" or "none". "mean" divides by the sum of the live rows' class weights, or `num_items`.
        ignore_index: rows with this target have loss 0 and no gradient; None is -100.
        label_smoothing: in [0, 1], as in F.cross_entropy, class weights included.
        softcap: positive, or None. inf is None.
        logit_scale: positive number or 0-dim floating tensor (never read back to the host), without gradient: the
            inverse of a temperature. None is 1.
        z_loss: finite, not negative; independent of the row's class weight, divided by "mean" like the other terms.
        num_items: int or 0-dim tensor (never read back to the host) that replaces the divisor of "mean".
        return_lse: return (loss, lse); lse is differentiable, and 0 without gradient in ignored rows.
        return_stats: return (loss, stats), a named tuple: lse, log_prob of the target, entropy of softmax(a) in nats,
            and predicted, the first class with the largest logit. All but predicted are differentiable.
        grad_weight_out: (V, H) buffer, fp32 or in linear_weight's dtype. Each backward adds linear_weight's gradient to
            it, and autograd gets None instead. Not for parameters that FSDP shards: use .grad there.
        schedule: what is kept between forward and backward: "chunked" (the gradients), "stored" (the exponentials of
            all logits), "recompute" (nothing), or "auto", which chooses by shapes and options.
        chunk_size: rows per chunk; kernels round it up to a multiple of 128. None chooses from V, H and dtype alone.
        memory_limit: bytes that a forward and its backward may take beside inputs and the gradients returned. Of the
            `schedule` ("auto") and `chunk_size` (None) that fit, the fastest run; if none fits, ValueError says how
            many bytes would do. Independent of free memory.
        backend: "auto" runs kernels where they exist (Hopper, Blackwell; bf16 or fp16; H a multiple of 8), else the
            portable PyTorch path: silently on CPU, with one warning per reason on a GPU. "cute" runs kernels or raises.
            "reference" runs the portable path. torch.func transforms and forward-mode AD run it with full logits.

    Returns:
        loss: fp32 (fp64 for fp64): 0-dim, or target's shape with reduction "none". lse and stats have target's shape
        and loss's dtype; predicted is int64.

    Raises:
        ValueError, TypeError: the shape, value, device or dtype of an argument.
        IndexError: on CPU, a target that is neither a class nor `ignore_index`. On a GPU that row's loss is NaN.
        UnsupportedError: `backend="cute"` and no kernel covers the call; `grad_weight_out` under FSDP or torch.func.
        RuntimeError: backward with create_graph=True.
    """
    inputs = Inputs(input, linear_weight, linear_bias, target, weight, logit_scale, num_items, grad_weight_out)
    options = Options(
        reduction, ignore_index, label_smoothing, softcap, z_loss, return_lse, return_stats, schedule, chunk_size,
        memory_limit, backend,
    )  # fmt: skip
    eager = is_plain() and are_plain(inputs)  # else operators run
    plan = plan_for(inputs, options) if eager else make_plan(inputs, options, no_kernel_on)
    if not eager and is_transformed():
        loss, lse, *stats = _run_transformed(inputs, plan, options)
    else:
        if grad_weight_out is not None and not is_compiling():
            check_buffer(inputs)
        loss, lse, *stats = autograd.run(inputs, plan, return_lse, eager)
    if return_stats:
        return loss, LinearCrossEntropyStats(lse, *stats)
    return (loss, lse) if return_lse else loss


class LinearCrossEntropyLoss(nn.Module):
    """`linear_cross_entropy` with its projection: torch.nn.LinearCrossEntropyLoss's arguments and state dict.

    State: `linear.weight` (num_classes, in_features), `linear.bias` (num_classes,) with bias=True, and the buffer
    `weight` (num_classes,) where class weights are given. `softcap` and what follows it are quackish's own; what
    belongs to one call (num_items, return_lse, return_stats, grad_weight_out) is an argument of the call.
    """

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        out_features: tuple[int, ...] = (),
        bias: bool = False,
        device=None,
        dtype=None,
        reduction: str = "mean",
        weight: Tensor | None = None,
        ignore_index: int | None = None,
        label_smoothing: float = 0.0,
        options: None = None,
        softcap: float | None = None,
        logit_scale: float | Tensor | None = None,
        z_loss: float = 0.0,
        schedule: str = "auto",
        chunk_size: int | None = None,
        memory_limit: int | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        if tuple(out_features) != ():
            raise UnsupportedError(
                f"LinearCrossEntropyLoss: out_features is {out_features}, expected (): K-dimensional losses are not "
                "covered; torch.nn.LinearCrossEntropyLoss has them."
            )
        if options is not None:
            raise UnsupportedError(
                "LinearCrossEntropyLoss: options are torch's own chunking, expected None; "
                "use schedule and chunk_size instead."
            )
        if weight is not None and weight.shape != (num_classes,):
            raise ValueError(
                f"LinearCrossEntropyLoss: weight has shape {tuple(weight.shape)}, expected ({num_classes},)"
            )
        options = Options(
            reduction, ignore_index, label_smoothing, softcap, z_loss, False, False, schedule, chunk_size, memory_limit,
            backend,
        )  # fmt: skip
        check_options(options, logit_scale, device=getattr(logit_scale, "device", None))
        self.logit_scale = logit_scale
        self.linear = nn.Linear(in_features, num_classes, bias=bias, device=device, dtype=dtype)
        self.register_buffer("weight", weight)
        for name in MODULE_OPTIONS:
            setattr(self, name, getattr(options, name))

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
        """input (..., in_features), target (...): what `linear_cross_entropy` returns."""
        return linear_cross_entropy(
            input, self.linear.weight, target, linear_bias=self.linear.bias, weight=self.weight,
            logit_scale=self.logit_scale, num_items=num_items, return_lse=return_lse, return_stats=return_stats,
            grad_weight_out=grad_weight_out,
            **{name: getattr(self, name) for name in MODULE_OPTIONS},
        )  # fmt: skip

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in (*MODULE_OPTIONS, "logit_scale"))


MODULE_OPTIONS = [name for name in Options._fields if name not in ("return_lse", "return_stats")]
_MAX_PLANS = 4096  # shapes may be new in every step (packed sequences): then plans are forgotten now and then
_plans: dict[tuple, Plan] = {}


def plan_for(inputs: Inputs, options: Options) -> Plan:
    """The plan that was made for arguments like these, which proves them valid; or a new one."""
    try:
        key = key_of(inputs, options)
        plan = _plans.get(key)
    except (AttributeError, TypeError):  # not a tensor, or not hashable: an error will say so
        key, plan = None, None
    if plan is None:
        plan = make_plan(inputs, options, no_kernel_on, eager=True)
        if inputs.input.is_cuda and plan.why_portable is None:
            prepare(inputs, plan)
        if len(_plans) >= _MAX_PLANS:
            _plans.clear()
        _plans[key] = plan
    return plan


def key_of(inputs: Inputs, options: Options) -> tuple:
    """All that plans and checks depend on. Of arguments that are not valid it may raise, or not be hashable."""
    *tensors, scale, items, out = inputs
    return (
        *options,
        *map(type, options),  # 1, 1.0 and True are equal
        *[None if t is None else (t.shape, t.dtype, t.device) for t in (*tensors, out)],
        out is None or out.requires_grad,
        _kind_of(scale),
        _kind_of(items),
        autocast_dtype(tensors[0].device.type),
        options.memory_limit is None or (memory.described(inputs), choose.epoch),
    )


def _kind_of(number: float | Tensor | None) -> tuple | None:
    """What decides whether a number is valid, without its value."""
    if number is None:
        return None
    if isinstance(number, Tensor):
        return number.shape, number.dtype, number.device, number.requires_grad
    return type(number), number >= 0, FP32.tiny <= number <= FP32.max


def make_plan(
    inputs: Inputs, options: Options, no_kernel_on: Callable[[torch.device], str], eager: bool = False
) -> Plan:
    """Which path runs, and how, by shapes, dtypes, device and options; after checking them."""
    check_tensors(inputs)
    check_options(options, inputs.logit_scale, inputs.num_items, inputs.input.device)
    (
        reduction, ignore_index, label_smoothing, softcap, z_loss, return_lse, return_stats, schedule, chunk_size,
        memory_limit, backend,
    ) = options  # fmt: skip
    device, (v, h), m = inputs.input.device, inputs.linear_weight.shape, inputs.target.numel()
    softcap = None if softcap is None or softcap > FP32.max else float(softcap)  # fp32's infinity caps nothing
    compute_dtype = compute_dtype_of(inputs)
    why_portable = ""
    if m > 0 and backend != "reference":  # of no rows, either path makes the same nothing
        why_portable = no_kernel_on(device) or _not_covered(compute_dtype, h) or None
    if why_portable and backend == "cute":
        raise UnsupportedError(why_portable)
    if why_portable is not None and device.type != "cuda":
        why_portable = ""
    ignore_index = -100 if ignore_index is None else ignore_index
    fixed = ignore_index, label_smoothing, softcap, z_loss, reduction, return_stats, compute_dtype
    if memory_limit is None or device.type == "meta":
        given_out, on_kernels = inputs.grad_weight_out is not None, why_portable is None
        problem = memory.problem_of(fixed, v, h, return_lse, given_out, on_kernels)
        how = config_of(problem, m, schedule, chunk_size)
        chosen = how.schedule, how.chunk_rows, how.dx_in_forward, how.dw_in_chunks
    else:
        # numbers on which memory does not depend are left out: torch.compile may have made them symbols
        smoothing, cap, z = float(label_smoothing > 0), None if softcap is None else 1.0, float(z_loss > 0)
        given = 0, smoothing, cap, z, reduction, return_stats, compute_dtype
        has_scale = inputs.logit_scale is not None
        request = memory.described(inputs), given, why_portable, return_lse, has_scale, device, eager
        limit, rows = (None if n is None else operator.index(n) for n in (memory_limit, chunk_size))
        chosen = memory.within(limit, request, schedule, rows)
    return Plan(*fixed, *chosen, why_portable)


def _run_transformed(inputs: Inputs, plan: Plan, options: Options) -> tuple[Tensor, ...]:
    """Under torch.func and forward-mode AD: the reference, whose operations all have their derivatives."""
    reason = "linear_cross_entropy: torch.func transforms and forward-mode AD run the reference, with all logits"
    if options.backend == "cute":
        raise UnsupportedError(f'{reason}; expected none of them with backend="cute"')
    if inputs.grad_weight_out is not None:
        raise UnsupportedError(f"{reason}; expected no grad_weight_out, which only backward() adds to")
    if options.memory_limit is not None:
        raise UnsupportedError(f"{reason}; expected no memory_limit")
    if inputs.input.device.type == "cuda" and options.backend == "auto":
        warn_once(reason)
    return portable.run_reference(inputs, plan)


def _not_covered(compute_dtype: torch.dtype, h: int) -> str:
    """Why no kernel covers these; "" where one does."""
    if compute_dtype not in (torch.bfloat16, torch.float16):
        return _no_kernel_for(f"{compute_dtype}; supported: torch.bfloat16, torch.float16")
    return _no_kernel_for(f"linear_weight with {h} columns; supported: multiples of 8") if h % 8 else ""


def _no_kernel_for(reason: str) -> str:
    return f'linear_cross_entropy: no kernel for {reason}. backend="auto" runs the portable path.'


def no_kernel_on(device: torch.device) -> str:
    """Why no kernel runs on `device`; "" where they do."""
    if device.type != "cuda" or torch.version.hip:  # ROCm's devices are "cuda" too
        return _no_kernel_for("AMD GPUs" if device.type == "cuda" else device.type)
    try:
        kernels.find("lce_rows", gpu_of(device.index))  # with our GEMM or cuBLAS's: see kernels_on
    except UnsupportedError as error:
        return str(error).replace("lce_rows", "linear_cross_entropy")  # what the user called
    try:
        toolchain.find()
    except UnsupportedError as error:
        return f'linear_cross_entropy: {error} backend="auto" runs the portable path.'
    return ""


# What torch.compiler.assume_constant_result does, which would import the compiler first, Triton included.
no_kernel_on._dynamo_marked_constant = True
