"""quackish.scaled_dot_product_attention as an attention implementation of Transformers."""

import functools
import importlib
import inspect
import re
import sys
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import quackish
from quackish.errors import UnsupportedError
from quackish.integrations.transformers.masks import REMEDY, is_causality, plain, quackish_mask


def register_attention(name: str = "quackish") -> None:
    """Registers quackish's attention in Transformers, for `attn_implementation="quackish"`.

        register_attention()
        model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="quackish")
        model.set_attn_implementation("quackish")    # or for an existing model

    Position biases (T5), softcaps (Gemma 2), masks and windows run quackish.scaled_dot_product_attention, with grouped
    queries in place. Calls with none of these, and single queries, run PyTorch's SDPA, as with "sdpa".

    A model with attention code of its own raises UnsupportedError, when it is built or when that code uses a mask.
    So do attention sinks, dropout, output_attentions, and arguments of the attention that quackish does not know.
    """
    if torch.__version__.startswith("2.14."):
        # compiled code with a guarded mask as its input raises in this check of custom operators
        importlib.import_module("torch._functorch.config").check_custom_op_aliasing = False
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, quackish_mask)
    if name not in _names:
        _names.add(name)
        if len(_names) == 1:
            _check_models_when_built()


_names: set[str] = set()  # the names under which quackish's attention is registered


def _check_models_when_built() -> None:
    """Makes models with attention code of their own raise UnsupportedError when they are built.

    Transformers asks every model, also a part of another, whether it supports its config's implementation.
    """
    theirs = PreTrainedModel.get_correct_attn_implementation

    @functools.wraps(theirs)
    def checked(self, requested_attention, *args, **options):
        if requested_attention in _names and _has_own_attention(type(self).__module__):
            raise UnsupportedError(
                f"{type(self).__name__} has attention code of its own, which does not call "
                f'attn_implementation="{requested_attention}"; {REMEDY}'
            )
        return theirs(self, requested_attention, *args, **options)

    PreTrainedModel.get_correct_attn_implementation = checked


@functools.cache
def _has_own_attention(module: str) -> bool:
    """True if a module has attention classes that do not dispatch, or a dict of them by implementation.

    This is for an early and clear message. The masks refuse what it does not find, as in a module without source.
    """
    found = sys.modules.get(module)
    if found is None:  # such as a class that was unpickled by value
        return False
    if any(name.endswith("_ATTENTION_CLASSES") for name in vars(found)):
        return True
    try:
        source = inspect.getsource(found)
    except (OSError, TypeError):
        return False
    has_attention = re.search(r"^class \w*Attention\w*\(nn\.Module\):", source, re.MULTILINE)
    return bool(has_attention) and "ALL_ATTENTION_FUNCTIONS" not in source


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
    """Called by Transformers' attention modules. Returns (o, None), without attention weights.

    query: (B, Hq, Lq, D); key, value: (B, Hkv, Lk, D); o: (B, Lq, Hq, D).
    """
    _refuse(module, dropout, options)
    num_queries = query.shape[2]
    if attention_mask is not None:
        if is_causality(attention_mask, num_queries, key.shape[2]):
            attention_mask, is_causal = None, True
        else:
            attention_mask = plain(attention_mask)
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    sequences = _same_sequence(query, key, options)
    if num_queries == 1 and softcap is None and position_bias is None and sequences is None:  # generation
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, is_causal=is_causal, **options
        )
    bias = position_bias
    if attention_mask is not None and not attention_mask.dtype.is_floating_point:
        mask = attention_mask.bool()
    else:  # an additive mask of the user
        mask, bias = None, attention_mask if bias is None else bias if attention_mask is None else bias + attention_mask
    # The first operand of `and` is the number of queries, as in "sdpa", for torch.compile with dynamic shapes.
    is_causal = num_queries > 1 and attention_mask is None and is_causal
    if sequences is not None:
        mask = sequences if mask is None else mask & sequences
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


def _same_sequence(query: Tensor, key: Tensor, options: dict[str, Any]) -> Tensor | None:
    """The mask of packed sequences, (B, 1, Lq, Lk), True inside a sequence; None if none are packed."""
    names = [name for name in ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx") if options.get(name) is not None]
    if not names:
        return None
    if query.shape[2] != key.shape[2]:
        raise UnsupportedError(
            f"{' and '.join(names)} come with {query.shape[2]} queries and {key.shape[2]} keys; quackish's attention "
            "expects all tokens of the packed batch in one call, without a cache"
        )
    if names != ["seq_idx"]:
        if names[:2] != ["cu_seq_lens_q", "cu_seq_lens_k"]:
            raise UnsupportedError(f"{names[0]} is given alone; expected both cu_seq_lens_q and cu_seq_lens_k")

        def sequence(x: Tensor, starts: Tensor) -> Tensor:  # (B, L) from starts of the sequences in B * L tokens
            tokens = torch.arange(x.shape[0] * x.shape[2], dtype=starts.dtype, device=starts.device)
            return torch.bucketize(tokens, starts[1:], right=True).view(x.shape[0], x.shape[2])

        of_queries, of_keys = sequence(query, options["cu_seq_lens_q"]), sequence(key, options["cu_seq_lens_k"])
    else:
        of_queries = of_keys = options["seq_idx"]
    return (of_queries[:, :, None] == of_keys[:, None, :])[:, None]


# Arguments that do not change attention. Windows and positions are in the mask, or in query and key. Sequences are in
# the mask of _same_sequence. Models pass on arguments of their own forward.
_IRRELEVANT = frozenset(
    "sliding_window position_ids cache_position cu_seq_lens_q cu_seq_lens_k max_length_q max_length_k seq_idx "
    "use_cache output_hidden_states output_router_logits num_items_in_batch labels shift_labels logits_to_keep "
    "token_type_ids mm_token_type_ids return_dict deterministic".split()
)


def _refuse(module: nn.Module, dropout: float, options: dict[str, Any]) -> None:
    """Raises UnsupportedError for what would change results."""
    what = None
    for name, value in options.items():
        if name in _IRRELEVANT or value is None or value is False:
            continue
        if name in ("s_aux", "sinks"):
            what = f"has attention sinks ({name})"
        elif name == "output_attentions":
            what = "is asked for output_attentions, but never has the weights"
        else:
            what = f"passes the argument {name!r} to its attention"
        remedy = REMEDY
    if dropout:
        what, remedy = f"has dropout {dropout}", "set it to 0 in the model's config, such as attention_dropout=0.0"
    if what:
        raise UnsupportedError(f"{type(module).__name__} {what}, which quackish's attention does not support; {remedy}")
