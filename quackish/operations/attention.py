"""Attention with a learned bias for the tools."""

from quackish.operations.table import Args, Maker, Operation, Options, flag, no_grad, value
from quackish.ops.attention import scaled_dot_product_attention


def _make(new: Maker, shape: tuple[int, ...], options: Options) -> Args:
    batch, length, heads, d = shape
    names = ("query", "key", "value")
    args: Args = {name: new.rows(batch, heads, length, d, seed=seed) for seed, name in enumerate(names)}
    entries = 1 if "shared_bias" in options else batch
    return args | {"attn_bias": new.rows(entries, heads, length, length, seed=3)}


ATTENTION = Operation(
    name="scaled_dot_product_attention",
    title="Attention with a learned bias",
    function=scaled_dot_product_attention,
    results=("o", "lse"),
    leaves=("query", "key", "value", "attn_bias"),
    kernel="attention_fwd",
    dims=("B", "L", "H", "D"),
    example="4x2048x16x64",
    small=(2, 130, 2, 64),
    model_shapes=lambda model, tokens: {},
    make=_make,
    options={
        "shared_bias": flag(None, "one bias (1, H, L, L) for the whole batch"),
        "mask": flag(
            "attn_mask",
            "with a bool mask (B, 1, L, L)",
            lambda new, b, length, *_: new.rows(b, 1, length, length, seed=4) > 0,
        ),
        "causal": flag("is_causal", "with a causal mask"),
        "softcap": value("softcap", type=float, metavar="C"),
        "return_lse": flag("return_lse", "also return lse, and backpropagate through it"),
        "no_grad": no_grad(),
    },
)
