"""Providers of scaled_dot_product_attention: quackish, PyTorch's SDPA, FlexAttention, cuEquivariance, FlashAttention 4.

A provider takes query, key, value (b, h, l, d), attn_bias (b or 1, h or 1, l, l) or None, attn_mask (b, 1, l or 1, l)
bool or None, and is_causal. It returns o (b, h, l, d), for autograd.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from quackish import scaled_dot_product_attention
from quackish.bench.cells import OURS
from quackish.bench.measure import imported

Attention = Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, bool], Tensor]

ABOUT = {
    "torch-math": "`F.scaled_dot_product_attention` with SDPBackend.MATH",
    "torch-efficient": "the same with SDPBackend.EFFICIENT_ATTENTION",
    "torch-cudnn": "the same with SDPBackend.CUDNN_ATTENTION, which refuses a bias that needs a gradient",
    "flex": "compiled FlexAttention; bias and mask are captured by score_mod. Causality is a BlockMask",
    "flex-block-mask": "the same, with the mask as a BlockMask, which is made outside of the measured calls",
    "cuequivariance": "cuEquivariance 0.13's triangle attention",
    "fa4": "flash-attn-4, which has no gradient of a bias and no dense mask",
}


def ours(**options: Any) -> Attention:
    def attention(query, key, value, attn_bias, attn_mask, is_causal):
        return scaled_dot_product_attention(
            query, key, value, attn_mask, is_causal=is_causal, attn_bias=attn_bias, **options
        )

    return attention


# PyTorch --------------------------------------------------------------------------------------------------------------


def sdpa(backend: SDPBackend) -> Attention:
    """SDPA takes one mask or bias, which must have query's dtype: mask and bias are combined in every call."""

    def attention(query, key, value, attn_bias, attn_mask, is_causal):
        combined = attn_mask
        if is_causal and (attn_bias is not None or attn_mask is not None):
            causal = _causal(query.shape[2], query.device)
            combined = causal if attn_mask is None else attn_mask & causal
        if attn_bias is not None:
            bias = attn_bias.to(query.dtype)
            combined = bias if combined is None else torch.where(combined, bias, -torch.inf)
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(query, key, value, combined, is_causal=is_causal and combined is None)

    return attention


@functools.lru_cache(maxsize=1)
def _causal(length: int, device: torch.device) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool, device=device).tril()


class Flex:
    """FlexAttention, compiled for each shape on a GPU. On a CPU, where backward does not compile, it runs eagerly."""

    def __init__(self, block_mask: bool = False):
        from torch.nn.attention import flex_attention

        self.module, self.use_block_mask = flex_attention, block_mask
        self.on_gpu = torch.compile(flex_attention.flex_attention, dynamic=False)
        self.masks: tuple[Any, Any] = (None, None)  # the last mask and its BlockMask
        config: Any = torch._dynamo.config
        config.recompile_limit = config.accumulated_recompile_limit = 1024

    def __call__(self, query, key, value, attn_bias, attn_mask, is_causal):
        if self.use_block_mask and attn_mask is None:
            raise ValueError("there is no mask; expected one")
        flex = self.on_gpu if query.is_cuda else self.module.flex_attention
        in_scores = None if self.use_block_mask else attn_mask
        blocks = self._blocks(query, None if in_scores is not None else attn_mask, is_causal)
        return flex(query, key, value, score_mod=score_mod(attn_bias, in_scores), block_mask=blocks)

    def _blocks(self, query: Tensor, mask: Tensor | None, is_causal: bool) -> Any:
        """The BlockMask of mask and causality; None without both."""
        if mask is None and not is_causal:
            return None
        asked = (mask, is_causal, query.shape)
        by_row = mask is not None and mask.shape[2] > 1
        if not (self.masks[0] and mask is self.masks[0][0] and asked[1:] == self.masks[0][1:]):

            def mask_mod(b, h, i, j):
                keep = i >= j if is_causal else i >= 0
                return keep if mask is None else keep & mask[b, 0, i if by_row else 0, j]

            batch, length = None if mask is None else query.shape[0], query.shape[2]
            made = self.module.create_block_mask(mask_mod, batch, None, length, length, device=query.device)
            self.masks = asked, made
        return self.masks[1]


def score_mod(bias: Tensor | None, mask: Tensor | None) -> Callable[..., Tensor] | None:
    """Adds the bias, and excludes keys that the mask does not keep. Dimensions of size 1 are not indexed."""
    if bias is None and mask is None:
        return None
    mask_by_row = mask is not None and mask.shape[2] > 1
    by_batch, by_head = bias is not None and bias.shape[0] > 1, bias is not None and bias.shape[1] > 1
    if bias is not None:
        bias = bias if by_head else bias.squeeze(1)
        bias = bias if by_batch else bias.squeeze(0)

    def modified(score, b, h, i, j):
        if bias is not None:
            if by_batch and by_head:
                score = score + bias[b, h, i, j]
            elif by_batch:
                score = score + bias[b, i, j]
            else:
                score = score + (bias[h, i, j] if by_head else bias[i, j])
        return score if mask is None else torch.where(mask[b, 0, i if mask_by_row else 0, j], score, -torch.inf)

    return modified


# cuEquivariance -------------------------------------------------------------------------------------------------------


def _cuequivariance() -> Attention:
    """A bias that all batches share, and a mask of keys: its (1, N, H, L, D) are our (N, H, L, D)."""
    from cuequivariance_ops_torch import triangle_attention

    def attention(query, key, value, attn_bias, attn_mask, is_causal):
        by_row = attn_mask is not None and attn_mask.shape[2] > 1
        if is_causal or by_row or attn_bias is None or attn_bias.shape[0] > 1:
            raise ValueError("cuEquivariance has a bias that all batches share, and a mask of keys")
        mask = None if attn_mask is None else attn_mask[None]
        return triangle_attention(query[None], key[None], value[None], attn_bias[None], mask)[0]

    return attention


# FlashAttention 4 -----------------------------------------------------------------------------------------------------


def _fa4() -> Attention:
    from flash_attn.cute import flash_attn_func

    def attention(query, key, value, attn_bias, attn_mask, is_causal):
        if attn_bias is not None or attn_mask is not None:
            raise ValueError("flash-attn-4 has no gradient of a bias, and no dense mask")
        out = flash_attn_func(*(t.transpose(1, 2) for t in (query, key, value)), causal=is_causal)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return attention


PROVIDERS: dict[str, Callable[[], Attention]] = {
    OURS: ours,
    "torch-math": functools.partial(sdpa, SDPBackend.MATH),
    "torch-efficient": functools.partial(sdpa, SDPBackend.EFFICIENT_ATTENTION),
    "torch-cudnn": functools.partial(sdpa, SDPBackend.CUDNN_ATTENTION),
    "flex": Flex,
    "flex-block-mask": functools.partial(Flex, block_mask=True),
    "cuequivariance": _cuequivariance,
    "fa4": _fa4,
}


def load(name: str) -> Attention:
    """The provider `name`, or the user's "module:attribute"."""
    return imported(name) if ":" in name else PROVIDERS[name]()
