"""Attention with a learned bias and a mask: what users call."""

from typing import Literal, overload

from torch import Tensor
from torch.nn import functional

from quackish.device.kernel_device import refuse_portable
from quackish.errors import UnsupportedError
from quackish.ops.attention.checks import WHO, check, is_causal_bias
from quackish.ops.attention.operators import attention
from quackish.ops.operator import refuse_transforms
from quackish.types import Backend

Window = tuple[int | None, int | None]


@overload
def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False, *, attn_bias: Tensor | None = None,
    window: Window | None = None, softcap: float | None = None, return_lse: Literal[False] = False,
    backend: Backend = "auto",
) -> Tensor: ...  # fmt: skip
@overload
def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False, *, attn_bias: Tensor | None = None,
    window: Window | None = None, softcap: float | None = None, return_lse: Literal[True], backend: Backend = "auto",
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    attn_bias: Tensor | None = None,
    window: Window | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
    backend: Backend = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """F.scaled_dot_product_attention with a bias that learns beside a mask: see docs/guides/attention.md.

        o = softmax(softcap * tanh(scale * query @ key.T / softcap) + attn_bias) @ value    over keys that take part

    Args:
        query: (..., Hq, Lq, D) bf16, fp16, fp32 or fp64, any strides.
        key, value: (..., Hk, Lk, D) and (..., Hk, Lk, Dv). Hk is Hq, or with enable_gqa a divisor of it.
        attn_mask: bool, True for keys that take part, or an additive bias; (..., Hq, Lq, Lk) or 1 in any dimension.
            torch.nn.attention.bias.CausalBias counts as no mask: only PyTorch's own function takes it.
        dropout_p: 0.0.
        is_causal: key j takes part in row i if j <= i; beside a mask and a bias too.
        scale: D**-0.5 unless given.
        attn_bias: as an additive attn_mask, but beside a bool one: bf16, fp16, fp32 or fp64, whatever query is. With
            five or more dimensions it is copied, unless those before the last three are all 1 or all query's.
        window: (left, right): key j takes part in row i if i - left <= j <= i + right. None is no limit.
        softcap: a number above 0; without it the scores are scale * query @ key.T.
        return_lse: also return the logarithm of the softmax's denominator, which has a gradient.
        backend: "auto" runs kernels if they cover the call, else the portable PyTorch path: silently on CPU, with one
            warning per reason on a GPU. "cute" runs kernels or raises. "reference" runs the portable path.

    Returns:
        o (..., Hq, Lq, Dv) in query's dtype, or with return_lse (o, lse), lse (..., Hq, Lq) in fp32 (fp64 for fp64).

    A row with no key left has o 0, lse -inf and gradients 0. Results and gradients are the same on every run. A row of
    o and of query's gradient does not depend on other rows, heads or batch entries; the sums of key's, value's and the
    bias's gradients have a fixed order. A call takes the memory of its gradients and O(batch * heads * length). If Lk
    is not a multiple of 8, the bias's gradient may take twice its memory. Nothing is read back from a GPU. A call with
    neither bias, mask, window, softcap nor return_lse is PyTorch's own function.

    Raises:
        ValueError, TypeError: the shape, value, device or dtype of an argument.
        UnsupportedError: dropout; backend="cute" and no kernel covers the call; torch.func and forward-mode AD.
        RuntimeError: backward with create_graph=True, or after an argument was modified in place.
    """
    causal_bias = is_causal_bias(attn_mask)
    tensors = query, key, value, None if causal_bias else attn_mask, attn_bias
    call = check(tensors, dropout_p, is_causal, scale, enable_gqa, window, softcap, return_lse, backend)
    has_mask = attn_mask is not None and not causal_bias
    is_plain_call = not has_mask and attn_bias is None and window is None and softcap is None and not return_lse
    if is_plain_call and backend != "reference":
        remedy = ' Expected backend="auto".' if backend == "cute" else ""
        why = f"{WHO}: a call without bias and mask runs PyTorch's own kernels.{remedy}"
        refuse_portable(why, query.device, backend)
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if causal_bias:
        raise UnsupportedError(
            f"{WHO}: attn_mask is a CausalBias, which only PyTorch's own function takes; expected a bool mask or "
            'is_causal=True beside attn_bias, window, softcap, return_lse and backend="reference"'
        )
    refuse_transforms(WHO)
    out, lse = attention(call.inputs, call.options, backend)
    if len(call.shape) != 4:
        out, lse = out.reshape(call.shape), lse.reshape(call.shape[:-1])
    return (out, lse) if return_lse else out
