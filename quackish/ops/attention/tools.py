"""Attention with a learned bias and a mask for the tools."""

from typing import TYPE_CHECKING

from quackish.ops.attention.problems import FORWARD_SPEC
from quackish.ops.shared.argument_types import one_of
from quackish.ops.shared.for_tools import (
    DTYPES,
    Args,
    Imported,
    Maker,
    Operation,
    Options,
    SelfTest,
    flag,
    no_grad,
    value,
)

if TYPE_CHECKING:
    from torch import Tensor

BIASES = {"B,H": (False, False), "1,H": (True, False), "B,1": (False, True), "1,1": (True, True)}  # is the size 1
MASKS = ("half", "top", "blocks")
MOST_KEYS = 2048  # per row, by the mask "top"
MASK_BLOCK = 128  # rows and columns of a block of the mask "blocks"


def _make(new: Maker, shape: tuple[int, ...], options: Options) -> Args:
    """The scores with the bias have standard deviation 2**0.5."""
    batch, heads, length, _ = shape
    names = ("query", "key", "value")
    args: Args = {name: new.rows(*shape, seed=seed) for seed, name in enumerate(names)}
    bias, dtype = options.get("attn_bias", "B,H"), options.get("bias_dtype")
    if bias != "none":
        sizes = [1 if is_one else size for is_one, size in zip(BIASES[bias], (batch, heads), strict=True)]
        args["attn_bias"] = new.rows(*sizes, length, length, seed=3, dtype=dtype)
    elif dtype is not None:
        raise ValueError("--bias-dtype is given, but --attn-bias is none: there is no bias")
    if "attn_mask" in options and "key_mask" in options:
        raise ValueError("--attn-mask and --key-mask are given; expected one of them")
    if "attn_mask" in options:
        args["attn_mask"] = mask(new, options["attn_mask"], batch, length)
    return args


def mask(new: Maker, kind: str, batch: int, length: int) -> "Tensor":
    """(B, 1, L, L) bool, True for keys that take part.

    "half": a random half of the keys. "top": of each row, a random quarter, at most MOST_KEYS. "blocks": the blocks on
    the diagonal, and a random quarter of all blocks.
    """
    import torch

    if kind == "blocks":
        blocks = -(-length // MASK_BLOCK)
        keep = new.rows(batch, 1, blocks, blocks, seed=4) > 0.6745  # the upper quartile
        keep |= torch.eye(blocks, dtype=torch.bool, device=new.device)
        for dim in (2, 3):
            keep = keep.repeat_interleave(MASK_BLOCK, dim, output_size=blocks * MASK_BLOCK)
        return keep[..., :length, :length].contiguous()
    scores = new.rows(batch, 1, length, length, seed=4, dtype="float32")
    if kind == "half":
        return scores > 0
    lowest = scores.topk(max(1, min(MOST_KEYS, length // 4)), -1).values[..., -1:]
    return scores >= lowest


def key_mask(new: Maker, batch: int, heads: int, length: int, d: int) -> "Tensor":
    """(B, 1, 1, L) bool: without padding of up to an eighth of the keys."""
    import torch

    padding = 7 * torch.arange(batch, device=new.device) % (length // 8 + 1)
    return (torch.arange(length, device=new.device) < length - padding[:, None])[:, None, None]


ATTENTION = Operation(
    name="scaled_dot_product_attention",
    title="Attention with a learned bias",
    function=Imported("quackish.ops.attention.api", "scaled_dot_product_attention"),
    results=("o", "lse"),
    leaves=("query", "key", "value", "attn_bias"),
    spec=FORWARD_SPEC,
    dims=("B", "H", "L", "D"),
    example="4x16x2048x64",
    small=(2, 2, 130, 64),
    make=_make,
    options={
        "attn_bias": value(
            None,
            "batch and heads of the bias: B,H (the default), 1,H, B,1, 1,1; none: no bias",
            type=one_of({name.lower(): name for name in (*BIASES, "none")}),
            metavar="SIZES",
            example="1,H",
        ),
        "bias_dtype": value(
            None, "dtype of the bias, if not --dtype", type=one_of(DTYPES), metavar="DTYPE", example="float32"
        ),
        "attn_mask": value(
            None,
            f"with a bool mask (B, 1, L, L): half of the keys, the top quarter of a row (at most {MOST_KEYS}), or "
            f"blocks of {MASK_BLOCK} keys; one of {', '.join(MASKS)}",
            type=one_of({name: name for name in MASKS}),
            metavar="KIND",
            example="top",
        ),
        "key_mask": flag("attn_mask", "with a bool mask of keys (B, 1, 1, L): padding of up to an eighth", key_mask),
        "causal": flag("is_causal", "with a causal mask"),
        "softcap": value("softcap", type=float, metavar="C", example=30.0),
        "return_lse": flag("return_lse", "also return lse, and backpropagate through it"),
        "no_grad": no_grad(),
    },
    bench_options=("attn_bias", "bias_dtype", "attn_mask", "key_mask", "causal"),
    bounds={"lse": 1e-4},
    self_tests={
        "shared bias and mask": SelfTest((2, 3, 300, 128), dict(attn_bias="1,H", attn_mask="half", return_lse=True)),
        "causal": SelfTest((2, 2, 257, 40), dict(causal=True, softcap=30.0), "float16"),
        "fp32 bias of a batch entry": SelfTest(
            (3, 2, 200, 96), dict(attn_bias="B,1", bias_dtype="float32", attn_mask="blocks")
        ),
        "keys": SelfTest((3, 2, 200, 32), dict(attn_bias="1,H", key_mask=True)),
        "windows": SelfTest((3, 2, 49, 32), dict(attn_bias="1,H")),
        "mask alone": SelfTest((2, 2, 520, 128), dict(attn_bias="none", attn_mask="top")),
    },
    large_tests=[SelfTest((4, 16, 2048, 64))],
)
FUNCTIONS = (ATTENTION,)
