"""Linear cross entropy for torch: function, module, custom operators and autograd.

Both directions run the chunk loop of the portable path. `mean` is the sum divided outside of the operators, so they
know only "none" and "sum".
"""

import functools

import torch
from torch import Tensor, nn

from quackish import kernels
from quackish.configs.linear_cross_entropy import LinearCrossEntropyProblem, linear_cross_entropy_config
from quackish.errors import UnsupportedError, warn_once
from quackish.gpu import gpu_of
from quackish.ops.linear_cross_entropy_checks import check_options, check_shapes, check_targets, compute_dtype_of
from quackish.ops.linear_cross_entropy_chunks import ChunkLoop
from quackish.reference.linear_cross_entropy import (
    RowOptions,
    accumulate_dtype,
    mean_divisor,
    rows_of,
)

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


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
        schedule: what is kept between forward and backward. All give the same numbers.
            "chunked": gradients are made in forward, chunk by chunk, and scaled in backward. Holds fp32 (M, H) and
            (V, H). Where a gradient arrives at lse (compiled code always has one for an lse it returns) backward makes
            them anew. With reduction "none" a row's gradient is not known in forward: this is "recompute" there.
            "recompute": nothing is kept, and the logits are multiplied again in backward: 4 GEMMs for 3.
            "stored": all logits are kept in fp32: M * V * 4 bytes.
            "auto": "chunked"; with reduction "none" or `return_lse`, "stored" up to 1.5 GiB of logits, "recompute"
            above. Ask for "chunked" where lse is only looked at, in eager code.
        chunk_size: rows a chunk. None: a multiple of 128 that keeps a chunk within 1.5 GiB, from V and dtype alone.
        backend: "auto", "reference" (the portable path, without a warning) or "cute" (a kernel, or UnsupportedError).

    Returns:
        loss: fp32 (fp64 for fp64): 0-dim, or target's shape with reduction "none". With `return_lse`, also lse, in the
        same dtype and target's shape.

    Memory beyond inputs, gradients and what the schedule keeps: chunk * V * (4 + 2) bytes for 16-bit inputs, 4 for
    fp32, 8 for fp64, with softcap 4 (8) more, and the fp32 (V, H) accumulator of the weight gradient. Off CUDA 16-bit
    operands are multiplied as fp32, and linear_weight is held once more in fp32.

    Numbers: softmax on fp32 logits, p - 1 formed in fp32, weight gradient summed in fp32 over chunks in order and
    rounded once, with the gradient that arrives already in it. Under autocast operands are rounded to its dtype as
    F.linear's are, and gradients go from fp32 to their parameter's dtype at once. fp32 GEMMs follow torch's TF32
    setting.

    Bitwise, as far as the library's GEMM repeats itself: the loss is the same with and without grad and by every
    schedule, and so are the gradients of two backwards over one graph. A row's softmax does not depend on the other
    rows. Its logits do where the GEMM picks its kernel by the chunk's rows; with `chunk_size` None these are the same
    for every M but in the last chunk.

    Edges: where every target is ignored (or M is 0) "mean" is 0 and all gradients are 0. NaN or Inf in an ignored row
    of input reaches nothing. NaN in a live row makes its loss, its dinput and dlinear_weight NaN. A target that is
    neither a class nor `ignore_index` raises IndexError on CPU; elsewhere nothing is synchronised: that row's loss and
    dinput are NaN (so dlinear_weight is), and the other rows' dinput is as if that row were ignored.

    Raises:
        ValueError, TypeError: a shape, value, device or dtype that does not fit. IndexError: see above.
        UnsupportedError: `backend="cute"`, until a kernel exists.
        RuntimeError: backward with create_graph=True.
    """
    ignore_index = -100 if ignore_index is None else ignore_index
    check_shapes(input, linear_weight, target, linear_bias, weight, grad_weight_out)
    check_options(reduction, label_smoothing, softcap, z_loss, num_items, schedule, chunk_size, backend, input.device)
    compute_dtype = compute_dtype_of(input, linear_weight, linear_bias)
    if backend == "cute":
        raise UnsupportedError(_why_portable(input.device))

    x = input.reshape(-1, input.shape[-1])
    problem = LinearCrossEntropyProblem(
        v=linear_weight.shape[0],
        x_dtype=str(compute_dtype).removeprefix("torch."),
        reduction=reduction,
        softcap=softcap is not None,
        return_lse=return_lse,
    )
    config = linear_cross_entropy_config(problem, x.shape[0], schedule, chunk_size)
    flat_target = target.reshape(-1)
    grad = torch.is_grad_enabled()
    loss, lse = _forward_op(
        x,
        linear_weight,
        flat_target,
        linear_bias,
        weight,
        grad_weight_out,
        ignore_index,
        label_smoothing,
        softcap,
        z_loss,
        "none" if reduction == "none" else "sum",
        config.schedule,
        config.chunk_rows,
        compute_dtype,
        [grad and t is not None and t.requires_grad for t in (input, linear_weight, linear_bias)],
        backend,
    )[:2]
    if reduction == "mean":
        rows = rows_of(flat_target, linear_weight.shape[0], weight, ignore_index, loss.dtype)
        loss = loss / mean_divisor(rows, num_items).detach()
    elif reduction == "none":
        loss = loss.reshape(target.shape)
    return (loss, lse.reshape(target.shape)) if return_lse else loss


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
        check_options(reduction, label_smoothing, softcap, z_loss, None, schedule, chunk_size, backend, None)
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


@functools.cache
def _why_portable(device: torch.device) -> str:
    """Why no kernel runs on `device`: always an answer, until there is one to run."""
    if device.type != "cuda":
        return f'linear_cross_entropy: no kernel for {device.type}. backend="auto" runs the portable path.'
    try:
        kernels.find("linear_cross_entropy", gpu_of(device.index))
    except UnsupportedError as error:
        return str(error)
    raise AssertionError("a kernel is listed for linear_cross_entropy, but nothing here calls it")


# --- operators ---


@torch.library.custom_op("quackish::linear_cross_entropy_fwd", mutates_args=())
def _forward_op(
    x: Tensor,  # (m, h)
    w: Tensor,  # (v, h)
    target: Tensor,  # (m,)
    bias: Tensor | None,  # (v,)
    class_weight: Tensor | None,  # (v,)
    grad_weight_out: Tensor | None,  # (v, h): here only so that backward gets it
    ignore_index: int,
    label_smoothing: float,
    softcap: float | None,
    z_loss: float,
    reduction: str,  # "none" or "sum"
    schedule: str,
    chunk_rows: int,
    compute_dtype: torch.dtype,
    needs: list[bool],  # of x, w, bias: who asks for a gradient
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """loss () or (m,), lse (m,), then what backward starts from, empty where it does not: unit dx, dw, db, logits.

    "Unit" gradients are those of the plain sum, unscaled and in fp32: fp16 gradients of a mean would underflow before
    a loss scale arrives in backward.
    """
    if x.device.type == "cpu":
        check_targets(target, w.shape[0], ignore_index)
    if x.device.type == "cuda" and backend == "auto":
        warn_once(_why_portable(x.device))
    now = needs if _gradients_in_forward(schedule, reduction) else [False] * 3
    options = RowOptions(label_smoothing, softcap, z_loss)
    loop = ChunkLoop(x, w, target, bias, class_weight, ignore_index, options, chunk_rows, compute_dtype, now)
    keep = schedule == "stored" and any(needs)
    logits = loop.loss.new_empty((x.shape[0], w.shape[0]) if keep else 0)
    loop.run(keep_logits_in=logits if keep else None)
    return loop.loss.sum() if reduction == "sum" else loop.loss, loop.lse, loop.dx, loop.dw, loop.db, logits


def _gradients_in_forward(schedule: str, reduction: str) -> bool:
    return schedule == "chunked" and reduction == "sum"


@_forward_op.register_fake
def _(
    x,
    w,
    target,
    bias,
    class_weight,
    grad_weight_out,
    ignore_index,
    label_smoothing,
    softcap,
    z_loss,
    reduction,
    schedule,
    chunk_rows,
    compute_dtype,
    needs,
    backend,
):
    (m, h), v, dtype = x.shape, w.shape[0], accumulate_dtype(compute_dtype)
    now = needs if _gradients_in_forward(schedule, reduction) else [False] * 3
    return (
        x.new_empty(() if reduction == "sum" else (m,), dtype=dtype),
        x.new_empty(m, dtype=dtype),
        x.new_empty((m, h) if now[0] else 0, dtype=dtype),
        x.new_empty((v, h) if now[1] else 0, dtype=dtype),
        x.new_empty(v if now[2] else 0, dtype=dtype),
        x.new_empty((m, v) if schedule == "stored" and any(needs) else 0, dtype=dtype),
    )


@torch.library.custom_op("quackish::linear_cross_entropy_bwd", mutates_args=())
def _backward_op(
    grad_rows: Tensor | None,  # (m,) gradient of each row's loss; None is 1
    grad_lse: Tensor | None,  # (m,); None is 0
    x: Tensor,
    w: Tensor,
    target: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    logits: Tensor | None,  # (m, v) where they were stored
    ignore_index: int,
    label_smoothing: float,
    softcap: float | None,
    z_loss: float,
    chunk_rows: int,
    compute_dtype: torch.dtype,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """dx (m, h), dw (v, h), db (v,) in fp32 (fp64 for fp64), empty where nobody asks."""
    options = RowOptions(label_smoothing, softcap, z_loss)
    loop = ChunkLoop(x, w, target, bias, class_weight, ignore_index, options, chunk_rows, compute_dtype, needs)
    loop.run(grad_rows=grad_rows, grad_lse=grad_lse, logits=logits)
    return loop.dx, loop.dw, loop.db


@_backward_op.register_fake
def _(
    grad_rows,
    grad_lse,
    x,
    w,
    target,
    bias,
    class_weight,
    logits,
    ignore_index,
    label_smoothing,
    softcap,
    z_loss,
    chunk_rows,
    compute_dtype,
    needs,
):
    dtype = accumulate_dtype(compute_dtype)
    return (
        x.new_empty(x.shape if needs[0] else 0, dtype=dtype),
        x.new_empty(w.shape if needs[1] else 0, dtype=dtype),
        x.new_empty(w.shape[0] if needs[2] else 0, dtype=dtype),
    )


# --- autograd ---


def _setup_context(ctx, inputs, output) -> None:
    x, w, target, bias, class_weight, grad_weight_out, *rest = inputs
    ctx.save_for_backward(x, w, target, bias, class_weight, *output[2:])
    # not saved: another graph's backward may add to it first, which is no error here
    ctx.grad_weight_out = grad_weight_out
    (
        ctx.ignore_index,
        ctx.label_smoothing,
        ctx.softcap,
        ctx.z_loss,
        ctx.reduction,
        ctx.schedule,
        ctx.chunk_rows,
        ctx.compute_dtype,
        ctx.needs,
        _,
    ) = rest
    ctx.set_materialize_grads(False)


def _scaled(unit: Tensor, factor: Tensor | None, dtype: torch.dtype) -> Tensor:
    """unit * factor in `dtype`, rounded once and in one pass; `unit` is not written: a second backward wants it."""
    if factor is None:
        return unit.to(dtype)
    return torch.mul(unit, factor, out=torch.empty_like(unit, dtype=dtype))


def _backward(ctx, grad_loss, grad_lse, *_):
    if torch.is_grad_enabled():
        raise RuntimeError("linear_cross_entropy: create_graph=True (double backward) is not supported")
    nothing = (None,) * 11
    if grad_loss is None and grad_lse is None:
        return (*(None,) * 5, *nothing)
    x, w, target, bias, class_weight, dx, dw, db, logits = ctx.saved_tensors
    plain_sum = ctx.reduction == "sum" and grad_lse is None
    factor = grad_loss if plain_sum else None
    if not (plain_sum and _gradients_in_forward(ctx.schedule, ctx.reduction)):
        if plain_sum:
            grad_rows = None
        else:
            grad_rows = torch.zeros_like(grad_lse) if grad_loss is None else grad_loss.expand(target.shape)
        dx, dw, db = _backward_op(
            grad_rows,
            grad_lse,
            x,
            w,
            target,
            bias,
            class_weight,
            logits if ctx.schedule == "stored" else None,
            ctx.ignore_index,
            ctx.label_smoothing,
            ctx.softcap,
            ctx.z_loss,
            ctx.chunk_rows,
            ctx.compute_dtype,
            ctx.needs,
        )
    need_dx, need_dw, need_db = ctx.needs
    if need_dw and ctx.grad_weight_out is not None:
        if factor is None:
            ctx.grad_weight_out.add_(dw)
        else:
            ctx.grad_weight_out.addcmul_(dw, factor)
        need_dw = False
    return (
        _scaled(dx, factor, x.dtype) if need_dx else None,
        _scaled(dw, factor, w.dtype) if need_dw else None,
        None,
        _scaled(db, factor, bias.dtype) if need_db else None,
        None,
        *nothing,
    )


_forward_op.register_autograd(_backward, setup_context=_setup_context)
