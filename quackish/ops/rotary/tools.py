"""Rotary position embeddings for the tools."""

from quackish.ops.rotary.problems import LAYOUTS, SPEC
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


def _make(new: Maker, shape: tuple[int, ...], options: Options) -> Args:
    """q and k as projections give them, (B, L, heads, D) in memory. The tables are full and of random angles."""
    import torch

    batch, q_heads, k_heads, length, d = shape
    rotary_dim = options.get("rotary_dim") or d
    q, k = (new.rows(batch, length, heads, d, seed=i).transpose(1, 2) for i, heads in enumerate((q_heads, k_heads)))
    columns = rotary_dim // 2
    angles = new.rows(batch if "batch" in options else 1, length, columns, seed=2, dtype="float32") * 10
    if "half_table" not in options:
        angles = torch.cat([angles, angles], -1)
    dtype = getattr(torch, options["table_dtype"]) if "table_dtype" in options else new.dtype
    return {"q": q, "k": k, "cos": angles.cos().to(dtype), "sin": angles.sin().to(dtype)}


ROTARY = Operation(
    name="rotary",
    title="Rotary position embeddings",
    function=Imported("quackish.ops.rotary.api", "rotary"),
    results=("q", "k"),
    leaves=("q", "k"),
    spec=SPEC,
    dims=("B", "H", "K", "L", "D"),
    example="4x32x8x4096x128",
    small=(2, 3, 2, 70, 64),
    make=_make,
    options={
        "layout": value(
            "layout",
            f"which elements are a pair: {', '.join(LAYOUTS)}",
            type=one_of({name: name for name in LAYOUTS}),
            metavar="LAYOUT",
            example="interleaved",
        ),
        "rotary_dim": value("rotary_dim", "rotate the first R of D elements", type=int, metavar="R", example=32),
        "half_table": flag(None, "cos and sin with a column per pair"),
        "table_dtype": value(
            None, "dtype of cos and sin, if not --dtype", type=one_of(DTYPES), metavar="DTYPE", example="float32"
        ),
        "batch": flag(None, "cos and sin of their own for each batch entry"),
        "no_grad": no_grad(),
    },
    self_tests={
        "": SelfTest((2, 3, 2, 70, 64)),
        "many heads": SelfTest((3, 40, 10, 257, 128), dict(table_dtype="float32", batch=True)),
        "interleaved": SelfTest((2, 5, 1, 130, 80), dict(layout="interleaved", rotary_dim=32, half_table=True)),
        "interleaved to halves": SelfTest((2, 9, 1, 65, 64), dict(layout="interleaved_to_halves"), "float16"),
        "odd": SelfTest((1, 3, 3, 37, 81), dict(rotary_dim=30), "float32"),
    },
    large_tests=[SelfTest((8, 32, 8, 2048, 64))],
)
FUNCTIONS = (ROTARY,)
