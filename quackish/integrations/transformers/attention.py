"""quackish.scaled_dot_product_attention as an attention implementation of Transformers."""

from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

import quackish
from quackish.errors import UnsupportedError


def register_attention(name: str = "quackish") -> None:
    """Registers quackish's attention in Transformers, for `attn_implementation="quackish"`.

        register_attention()
        model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="quackish")
        model.set_attn_implementation("quackish")    # or for an existing model

    Position biases (T5), softcaps (Gemma 2), masks and windows run quackish.scaled_dot_product_attention, with grouped
    queries in place. Calls with none of these, and single queries, run PyTorch's SDPA, as with "sdpa". Masks are those
    of "sdpa": bool, or None for causality alone.

    Models raise UnsupportedError in forward if they have attention sinks or dropout, or return attention weights.
    """
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, sdpa_mask)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    softcap: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Called by Transformers' attention modules: query (B, Hq, Lq, D) -> (o (B, Lq, Hq, D), None)."""
    _refuse(module, dropout, options)
    num_queries = query.shape[2]
    if num_queries == 1 and softcap is None and position_bias is None:  # generation
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, is_causal=is_causal, **options
        )
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    bias = position_bias
    if attention_mask is not None and not attention_mask.dtype.is_floating_point:
        mask = attention_mask.bool()
    else:  # an additive mask of the user
        mask, bias = None, attention_mask if bias is None else bias if attention_mask is None else bias + attention_mask
    # The first operand of `and` is the number of queries, as in "sdpa", for torch.compile with dynamic shapes.
    is_causal = num_queries > 1 and attention_mask is None and is_causal
    out = quackish.scaled_dot_product_attention(
        query,
        key,
        value,
        mask,
        is_causal=is_causal,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
        attn_bias=bias,
        softcap=softcap,
    )
    return out.transpose(1, 2).contiguous(), None


def _refuse(module: nn.Module, dropout: float, options: dict[str, Any]) -> None:
    """Raises UnsupportedError for what would change results."""
    reason = None
    if options.get("s_aux") is not None:
        reason = "has attention sinks (s_aux)", 'load the model with attn_implementation="eager"'
    elif dropout:
        reason = f"has dropout {dropout}", "set it to 0 in the model's config, such as attention_dropout=0.0"
    elif options.get("output_attentions"):
        reason = "is asked for output_attentions, but never has the weights", 'use attn_implementation="eager"'
    if reason:
        what, remedy = reason
        raise UnsupportedError(f"{type(module).__name__} {what}, which quackish's attention does not support; {remedy}")
