"""Linear cross entropy for torch: the function and the module, and which path a call takes."""

import functools

import torch
from torch import Tensor, nn

from quackish import kernels, toolchain
from quackish.configs.linear_cross_entropy import (
    KernelProblem,
    LinearCrossEntropyProblem,
    kernel_config,
    linear_cross_entropy_config,
)
from quackish.errors import UnsupportedError, warn_once
from quackish.gpu import gpu_of
from quackish.ops.linear_cross_entropy import autograd as on_kernels
from quackish.ops.linear_cross_entropy import portable
from quackish.ops.linear_cross_entropy.checks import (
    check_buffer,
    check_options,
    check_shapes,
    compute_dtype_of,
    effective_softcap,
)
from quackish.ops.linear_cross_entropy.warm_up import prepare
from quackish.ops.modes import are_plain, autocast_dtype, is_compiling, is_plain, is_transformed


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
    z_loss: float = 0.0,
    num_items: int | Tensor | None = None,
    return_lse: bool = False,
    grad_weight_out: Tensor | None = None,
    schedule: str = "auto",
    chunk_size: int | None = None,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """The cross entropy of `input @ linear_weight.T + linear_bias` with `target`, the logits never held whole.

    With z the logits, a = softcap * tanh(z / softcap) (a = z without), lse = logsumexp(a), w = weight (1 without) and
    q = w * ((1 - label_smoothing) * onehot(target) + label_smoothing / V), a live row's loss is

        sum_j q_j * (lse - a_j) + z_loss * lse**2

    and an ignored row's is 0. The arguments before `softcap` mean what they mean in
    `F.linear_cross_entropy`.

    Args:
        input: (..., H) bf16, fp16, fp32 or fp64, any strides.
        linear_weight: (V, H), input's dtype unless autocast says otherwise, any strides.
        target: (...) int32 or int64: a class or `ignore_index`. Class probabilities are not taken.
        linear_bias: (V,) in input's dtype or fp32. It is added to the fp32 logits. -inf masks a class out.
        weight: (V,) floating class weights; no gradient flows to them.
        reduction: "mean", "sum" or "none". "mean" divides the sum of the rows by the sum of the live rows' class
            weights, as F.cross_entropy does, or by `num_items`.
        ignore_index: rows with this target have loss 0 and no gradient; None is -100.
        label_smoothing: in [0, 1], as in F.cross_entropy, class weights included.
        softcap: positive, or None.
        z_loss: not negative. Added once to each live row whatever its class weight, and divided by "mean" like the
            rest of the row.
        num_items: int or 0-dim tensor (never read back to the host) that replaces the divisor of "mean".
        return_lse: return (loss, lse); lse is differentiable, and 0 without gradient in ignored rows.
        grad_weight_out: (V, H) fp32 or linear_weight's dtype. Each backward adds linear_weight's gradient to it, once,
            where linear_weight requires one, and autograd gets None instead.
        schedule: what is kept between forward and backward.
            "chunked": gradients are made in forward, chunk by chunk, and scaled in backward. Where a gradient arrives
            at lse (compiled code always has one for an lse it returns) backward makes them anew. With reduction "none"
            a row's gradient is not known in forward: this is "recompute" there.
            "recompute": no logit is kept, and backward multiplies them again: up to 4 GEMMs for 3. On kernels the
            input's gradient is made in forward where "chunked" could make it and no lse is returned; without bias
            gradient and `chunk_size` so is a part of the weight's, in whose storage exponentials lie meanwhile:
            H / (M + H) of the classes or so, of which backward needs no logits.
            "stored": all logits are kept, or on kernels what gradients start from.
            "auto": "chunked"; with reduction "none" or `return_lse`, "stored" while that is small (1.5 GiB; kernels:
            2 GiB), "recompute" above. With `grad_weight_out` kernels do the same, because forward may not add to it.
            Ask for "chunked" where lse is only looked at, in eager code.
            On kernels fp16 and label smoothing are always "recompute".
        chunk_size: rows a chunk. None: a multiple of 128 that keeps a chunk within 1.5 GiB (kernels: 4 GiB), from V and
            dtype alone; on kernels at most H rows where "recompute" makes gradients in forward. Kernels round it up to
            a multiple of 128; and such a "recompute", where the weight's gradient is returned, takes memory for so
            many rows of input beside the gradients, and works in that of gradients to come. 128 is the leanest.
        backend: "auto" runs kernels where there are some (Hopper, and Blackwell around cuBLAS's GEMMs; bf16 or fp16,
            after autocast; H a multiple of 8) and otherwise the portable PyTorch path: silently on CPU, with one
            warning per reason on a GPU. "cute" runs kernels or raises. "reference" runs the portable path.

    Returns:
        loss: fp32 (fp64 for fp64): 0-dim, or target's shape with reduction "none". With `return_lse`, also lse, in the
        same dtype and target's shape.

    Memory beyond inputs and gradients, on kernels: the live rows of a chunk (of all rows, with "stored"), and
        "chunked": chunk * V * 2 bytes and the weight gradient in fp32, (V, H); where one chunk has all rows, just
        M * V * 2 * M / (M + H) for a 16-bit weight, as the rest lies where its gradient comes to be (above 64 MiB).
        "stored": M * V * 2, kept. "recompute": M * H * 2 and 96 MiB or M * 5632 (256 MiB where no weight gradient is
        returned), or M * H * 4 and 32 MiB where the input's gradient is made in backward, or M * H * 4 and up to 69 MB
        where forward begins a 16-bit weight gradient; with a chunk_size just chunk * H * 2.5 (or chunk * H * 2 and
        128 KiB) + M * 44, but chunk * V * 2 where the weight's gradient has no room for a quarter of these rows' V
        exponentials (H below chunk / 4 or so). Gradients that forward makes, or begins, are held from then on.
        "chunked" and "stored" lend their GEMMs 17 to 69 MB, and M * H * 2 where one of them makes a 16-bit weight
        gradient at once.
        `grad_weight_out` in fp32 is added to in a GEMM, with no buffer ("chunked" has one). Around cuBLAS's GEMMs
        256 MiB more, or M * 1024 where that is more. Where one chunk has all rows and 128 MiB are enough for all
        that forward needs for a while, it takes that at once when a step repeats: 17 MB more, say.
    On the portable path: chunk * V * (4 + 2) bytes for 16-bit inputs, 4 for fp32, 8 for fp64, with softcap 4 (8) more,
    fp32 (M, H) and (V, H) sums, and M * V * 4 kept by "stored". Off CUDA 16-bit operands are multiplied as fp32, and
    linear_weight is held once more in fp32.

    Numbers: softmax on fp32 logits, p - 1 formed in fp32, weight gradient summed in fp32 over chunks in order. It is
    rounded once, with the gradient that arrives already in it; but what kernels make in forward, before that. Under
    autocast operands are rounded to its dtype as F.linear's are, and gradients go from fp32 to their parameter's dtype
    at once. fp32 GEMMs follow torch's TF32 setting. On kernels a weight gradient that is made of exponentials has a
    row's gradient at its target times that row of input added in fp32, neither of them rounded; all gradients are as
    exact as torch's in bf16 on random data, and 8 times more so on confident rows. (Around cuBLAS's GEMMs a weight
    gradient that is 16 bits wide has its rows of input rounded once more: up to 1.5 times torch's error on random data,
    2.5 with few rows.) Kernels' tanh is within 2^-22: a softcap c leaves logits within about 2^-22 * c.

    Bitwise: the loss is the same with and without grad and by every schedule, and so are the gradients of two backwards
    over one graph; on the portable path and with cuBLAS as far as the library's GEMM repeats itself. A row's loss does
    not depend on the other rows, nor on how many there are; there its logits do where the GEMM picks its kernel by the
    chunk's rows, which with `chunk_size` None are the same for every M but in the last chunk. (Their sum is torch's.)

    Edges: where every target is ignored (or M is 0) "mean" is 0 and all gradients are 0. NaN or Inf in an ignored row
    of input reaches nothing. NaN in a live row makes its loss, its dinput and dlinear_weight NaN. A target that is
    neither a class nor `ignore_index` raises IndexError on CPU; elsewhere nothing is synchronised: that row's loss and
    dinput are NaN (so dlinear_weight is), and the other rows' dinput is as if that row were ignored.

    Raises:
        ValueError, TypeError: a shape, value, device or dtype that does not fit. IndexError: see above.
        UnsupportedError: `backend="cute"` where no kernel covers the call.
        RuntimeError: backward with create_graph=True.
    """
    tensors = input, linear_weight, target, linear_bias, weight, grad_weight_out, num_items
    options = (
        reduction, ignore_index, label_smoothing, softcap, z_loss, return_lse, schedule, chunk_size, backend,
    )  # fmt: skip
    eager = is_plain() and are_plain(tensors[:-1])  # else operators run
    key, plan = _find_plan(tensors, options) if eager else (None, None)
    new = plan is None
    if new:
        plan = _make_plan(*tensors, *options)
    if is_transformed():
        loss, lse = _run_transformed(*tensors, plan, backend)
        return (loss, lse) if return_lse else loss
    if grad_weight_out is not None and not is_compiling():
        check_buffer(grad_weight_out, input, linear_weight)
    if isinstance(plan, on_kernels.KernelPlan):
        inputs = on_kernels.Inputs(input, linear_weight, linear_bias, target, weight, num_items)
        if new and eager and input.is_cuda:
            prepare(inputs, plan, grad_weight_out)
        loss, lse = on_kernels.run(inputs, plan, grad_weight_out, return_lse, eager)
    else:
        loss, lse = portable.run(input, linear_weight, target, linear_bias, weight, num_items, grad_weight_out, plan)
    if new and key is not None:  # not before it has run: what raises is checked again
        if len(_plans) >= _MAX_PLANS:
            _plans.clear()
        _plans[key] = plan
    return (loss, lse) if return_lse else loss


class LinearCrossEntropyLoss(nn.Module):
    """`linear_cross_entropy` with its projection: torch.nn.LinearCrossEntropyLoss's arguments and state dict.

    State: `linear.weight` (num_classes, in_features), `linear.bias` (num_classes,) with bias=True, and the buffer
    `weight` (num_classes,) where class weights are given. `softcap` and what follows it are quackish's own; what
    belongs to one call (num_items, return_lse, grad_weight_out) is an argument of the call.
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
        z_loss: float = 0.0,
        schedule: str = "auto",
        chunk_size: int | None = None,
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
        check_options(
            reduction=reduction, ignore_index=ignore_index, label_smoothing=label_smoothing, softcap=softcap,
            z_loss=z_loss, schedule=schedule, chunk_size=chunk_size, backend=backend,
        )  # fmt: skip
        self.linear = nn.Linear(in_features, num_classes, bias=bias, device=device, dtype=dtype)
        self.register_buffer("weight", weight)
        self.reduction = reduction
        self.ignore_index = ignore_index
        self.label_smoothing = label_smoothing
        self.softcap = softcap
        self.z_loss = z_loss
        self.schedule = schedule
        self.chunk_size = chunk_size
        self.backend = backend

    def forward(
        self,
        input: Tensor,
        target: Tensor,
        *,
        num_items: int | Tensor | None = None,
        return_lse: bool = False,
        grad_weight_out: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """input (..., in_features), target (...): what `linear_cross_entropy` returns."""
        return linear_cross_entropy(
            input,
            self.linear.weight,
            target,
            linear_bias=self.linear.bias,
            weight=self.weight,
            reduction=self.reduction,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            softcap=self.softcap,
            z_loss=self.z_loss,
            num_items=num_items,
            return_lse=return_lse,
            grad_weight_out=grad_weight_out,
            schedule=self.schedule,
            chunk_size=self.chunk_size,
            backend=self.backend,
        )

    def extra_repr(self) -> str:
        names = "reduction ignore_index label_smoothing softcap z_loss schedule chunk_size backend".split()
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in names)


Plan = on_kernels.KernelPlan | portable.PortablePlan
_MAX_PLANS = 4096  # shapes may be new in every step (packed sequences): then plans are forgotten now and then
_plans: dict[tuple, Plan] = {}


def _find_plan(tensors: tuple, options: tuple) -> tuple[tuple | None, Plan | None]:
    """(what `_make_plan` looks at, the plan that was made for it); finding one proves the arguments valid."""
    input, linear_weight, target, linear_bias, weight, grad_weight_out, num_items = tensors
    try:
        key = (
            *options,
            *map(type, options),  # 1, 1.0 and True are equal
            input.shape, input.dtype, input.device,
            linear_weight.shape, linear_weight.dtype, linear_weight.device,
            target.shape, target.dtype, target.device,
            None if linear_bias is None else (linear_bias.shape, linear_bias.dtype, linear_bias.device),
            None if weight is None else (weight.shape, weight.dtype, weight.device),
            None if grad_weight_out is None else
            (grad_weight_out.shape, grad_weight_out.dtype, grad_weight_out.device, grad_weight_out.requires_grad),
            num_items is None or ((num_items.shape, num_items.device, num_items.requires_grad)
                                  if isinstance(num_items, Tensor) else (type(num_items), num_items >= 0)),
            autocast_dtype(input.device.type),
        )  # fmt: skip
        return key, _plans.get(key)
    except (AttributeError, TypeError):  # not a tensor, or not hashable: an error will say so
        return None, None


def _make_plan(
    input, linear_weight, target, linear_bias, weight, grad_weight_out, num_items, reduction, ignore_index,
    label_smoothing, softcap, z_loss, return_lse, schedule, chunk_size, backend,
) -> Plan:  # fmt: skip
    """Which path runs, and how, by shapes, dtypes, device and options; after checking them."""
    check_shapes(input, linear_weight, target, linear_bias, weight, grad_weight_out)
    check_options(
        reduction=reduction, ignore_index=ignore_index, label_smoothing=label_smoothing, softcap=softcap, z_loss=z_loss,
        num_items=num_items, return_lse=return_lse, schedule=schedule, chunk_size=chunk_size, backend=backend,
        device=input.device,
    )  # fmt: skip
    softcap = effective_softcap(softcap)
    compute_dtype = compute_dtype_of(input, linear_weight, linear_bias)
    ignore_index = -100 if ignore_index is None else ignore_index
    v, h = linear_weight.shape
    m, dtype = target.numel(), str(compute_dtype).removeprefix("torch.")
    reason = ""
    if m > 0 and backend != "reference":  # of no rows, either path makes the same nothing
        reason = _why_portable(input.device, compute_dtype, h)
        if reason and backend == "cute":
            raise UnsupportedError(reason)
        if not reason:
            given_out, smoothing = grad_weight_out is not None, label_smoothing > 0
            problem = KernelProblem(v, h, dtype, reduction, return_lse, given_out, smoothing)
            how = kernel_config(problem, m, schedule, chunk_size)
            return on_kernels.KernelPlan(
                ignore_index, label_smoothing, softcap, z_loss, reduction, how.schedule, how.chunk_rows, how.early_dx,
                how.lean, compute_dtype,
            )  # fmt: skip
    problem = LinearCrossEntropyProblem(v, dtype, reduction, softcap is not None, return_lse)
    how = linear_cross_entropy_config(problem, m, schedule, chunk_size)
    return portable.PortablePlan(
        ignore_index, label_smoothing, softcap, z_loss, reduction, how.schedule, how.chunk_rows, compute_dtype,
        reason if input.device.type == "cuda" else "",
    )  # fmt: skip


def _run_transformed(
    input, linear_weight, target, linear_bias, weight, grad_weight_out, num_items, plan, backend
) -> tuple[Tensor, Tensor]:
    """Under torch.func and forward-mode AD: the reference, whose operations all have their derivatives."""
    reason = "linear_cross_entropy: torch.func transforms and forward-mode AD run the reference, with all logits"
    if backend == "cute":
        raise UnsupportedError(f'{reason}; expected none of them with backend="cute"')
    if grad_weight_out is not None:
        raise UnsupportedError(f"{reason}; expected no grad_weight_out, which only backward() adds to")
    if input.device.type == "cuda" and backend == "auto":
        warn_once(reason)
    return portable.run_reference(input, linear_weight, target, linear_bias, weight, num_items, plan)


def _why_portable(device: torch.device, compute_dtype: torch.dtype, h: int) -> str:
    """Why no kernel covers these; "" where one does."""
    reason = no_kernel_on(device)
    if reason:
        return reason
    if compute_dtype not in (torch.bfloat16, torch.float16):
        reason = f"{compute_dtype}; supported: torch.bfloat16, torch.float16"
    elif h % 8:
        reason = f"linear_weight with {h} columns; supported: multiples of 8"
    return f'linear_cross_entropy: no kernel for {reason}. backend="auto" runs the portable path.' if reason else ""


def no_kernel_on(device: torch.device) -> str:
    """Why no kernel runs on `device`; "" where they do."""
    return _no_kernel_on(device)  # torch.compile warns of caches that it sees


# What torch.compiler.assume_constant_result does, which would import the compiler first, Triton included.
no_kernel_on._dynamo_marked_constant = True


@functools.cache
def _no_kernel_on(device: torch.device) -> str:
    end = 'backend="auto" runs the portable path.'
    if device.type != "cuda" or torch.version.hip:  # ROCm's devices are "cuda" too
        kind = "AMD GPUs" if device.type == "cuda" else device.type
        return f"linear_cross_entropy: no kernel for {kind}. {end}"
    try:
        kernels.find("lce_rows", gpu_of(device.index))  # between GEMMs of ours, or cuBLAS's: see gemms_of
    except UnsupportedError as error:
        return str(error).replace("lce_rows", "linear_cross_entropy")  # what the user called
    try:
        toolchain.find()
    except UnsupportedError as error:
        return f"linear_cross_entropy: {error} {end}"
    except ModuleNotFoundError as error:
        install = "pip install nvidia-cutlass-dsl"
        return f"linear_cross_entropy: nvidia-cutlass-dsl is not installed ({error}); {install}, or {end}"
    return ""
