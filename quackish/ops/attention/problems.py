"""The problems of attention's kernels on Hopper besides those of scores, and the descriptions of all."""

import dataclasses
from collections.abc import Callable
from typing import Any

from quackish.device.arguments import F32, Ptr
from quackish.device.spec import KernelSpec, on_hopper
from quackish.device.work import Sizes, Work, bytes_of, ceil_div
from quackish.ops.attention.arguments import (
    BLOCK,
    ORDERED,
    MaskArgs,
    OrderArgs,
    RowsArgs,
    Strided,
)
from quackish.ops.attention.config import (
    AttentionConfig,
    AttentionMaskConfig,
    AttentionOrderConfig,
    AttentionRowsConfig,
    attention_config,
    attention_why_illegal,
)
from quackish.ops.attention.score_problems import (
    AttentionBiasProblem,
    AttentionForwardProblem,
    AttentionKeysProblem,
    AttentionProblem,
    AttentionProductProblem,
    AttentionQueriesBiasProblem,
    AttentionQueriesProblem,
)
from quackish.ops.attention.small_problems import AttentionSmallBackwardProblem, AttentionSmallForwardProblem


@dataclasses.dataclass(frozen=True)
class AttentionMaskProblem:
    """The classes of a mask's blocks."""

    by_vectors: bool  # its rows start on 16 bytes, and have a multiple of 16 columns

    @property
    def args(self) -> MaskArgs:
        return MaskArgs(Strided(Ptr("uint8", self.by_vectors), column=None if self.by_vectors else "int64"))


@dataclasses.dataclass(frozen=True)
class AttentionOrderProblem:
    """The order in which tiles of queries and of keys start: those with most blocks that are not EMPTY first."""

    @property
    def args(self) -> OrderArgs:
        return OrderArgs()


@dataclasses.dataclass(frozen=True)
class AttentionRowsProblem:
    """Numbers per row for the other kernels of backward: the shift of its scores, and delta."""

    dtype: str
    dlse: bool = False

    @property
    def args(self) -> RowsArgs:
        operand = Strided(Ptr(self.dtype, aligned=True))
        return RowsArgs(o=operand, do=operand, dlse=F32 if self.dlse else None)


# Descriptions --------------------------------------------------------------------------------------------------------


def _scores_work(p: AttentionProblem, s: Sizes, matmuls: int, rows: int) -> Work:
    """matmuls: of Lq x Lk x d. rows: tensors like q that are read and written, besides k and v."""
    scores = s["batch"] * s["heads"] * s["num_q"] * s["num_k"]
    of_bias = _matrices(s, "bias") * s["num_q"] * s["num_k"]
    of_mask = _matrices(s, "mask") * (1 if p.mask_of_keys else s["num_q"]) * s["num_k"]
    of_q, of_k = (s["batch"] * s["heads"] * s[n] * s["d"] * bytes_of(p.dtype) for n in ("num_q", "num_k"))
    read = of_bias * bytes_of(p.bias_dtype) + of_mask * p.mask + (rows - 1) * of_q + 2 * of_k // s["group"]
    notes = ["fewer bytes of a bias or mask that is the same for all queries or keys"] * (of_bias + of_mask > 0)
    notes += ["less work with causality or a window"] * p.band
    notes += ["less work where a mask leaves a tile empty"] * p.mask
    padded = s["batch"] * s["heads"] * BLOCK * ceil_div(s["num_q"], BLOCK) * BLOCK * ceil_div(s["num_k"], BLOCK)
    return Work(read, of_q, 2 * matmuls * scores * s["d"], "; ".join(notes), exponentials=padded)


def _mask_work(p: AttentionMaskProblem, s: Sizes) -> Work:
    read = s["batches"] * s["heads"] * s["rows"] * s["columns"]
    blocks = ceil_div(s["rows"], BLOCK) * ceil_div(s["columns"], BLOCK)
    return Work(read, s["batches"] * s["heads"] * blocks, 0)


def _order_work(p: AttentionOrderProblem, s: Sizes) -> Work:
    blocks_q, blocks_k = (ceil_div(s[n], BLOCK) for n in ("num_q", "num_k"))
    tiles = sum(ceil_div(s[n], ORDERED) for n in ("num_q", "num_k"))
    matrices = s["batches"] * s["heads"]
    return Work(matrices * blocks_q * blocks_k, 4 * matrices * tiles, 0)


def _forward_work(p: AttentionForwardProblem, s: Sizes) -> Work:
    return _scores_work(p, s, matmuls=2, rows=2)  # q, o


def _rows_work(p: AttentionRowsProblem, s: Sizes) -> Work:
    rows = s["batch"] * s["heads"] * s["num_q"]
    return Work(rows * (2 * s["d"] * bytes_of(p.dtype) + 4 + 4 * p.dlse), 8 * rows, 2 * rows * s["d"])


def _keys_work(p: AttentionKeysProblem, s: Sizes) -> Work:
    work = _scores_work(p, s, matmuls=4, rows=3)  # q, do
    of_k = s["batch"] * s["heads"] // s["group"] * s["num_k"] * s["d"] * bytes_of(p.dtype)
    dbias = s["batch"] * s["heads"] * s["num_q"] * s["num_k"] * bytes_of(p.bias_dtype) if p.dbias else 0
    return dataclasses.replace(work, bytes_written=2 * of_k + dbias)  # dk, dv


def _queries_work(p: AttentionQueriesProblem, s: Sizes) -> Work:
    return _scores_work(p, s, matmuls=3, rows=3)  # q, do, dq


def _product_work(p: AttentionProductProblem, s: Sizes) -> Work:
    work = _scores_work(p, s, matmuls=1, rows=1)  # dq
    ds, v = (s["batch"] * heads * s["num_k"] * columns * bytes_of(p.dtype)
             for heads, columns in ((s["heads"], s["num_q"]), (s["heads"] // s["group"], s["d"])))  # fmt: skip
    return dataclasses.replace(work, bytes_read=work.bytes_read + ds - v, exponentials=0)


def _bias_work(p: AttentionBiasProblem, s: Sizes) -> Work:
    work = _scores_work(p, s, matmuls=2, rows=3)  # q, do
    itemsize = 4 if p.in_parts else bytes_of(p.bias_dtype)
    written = itemsize * s["parts"] * _matrices(s, "bias") * s["num_q"] * s["num_k"]
    return dataclasses.replace(work, bytes_written=written)


def _small_forward_work(p: AttentionSmallForwardProblem, s: Sizes) -> Work:
    return _scores_work(p, s, matmuls=2, rows=2)  # q, o


def _small_backward_work(p: AttentionSmallBackwardProblem, s: Sizes) -> Work:
    """All heads have their own keys."""
    work = _scores_work(p, s, matmuls=5, rows=4)  # q, do, o
    of_q, of_k = (s["batch"] * s["heads"] * s[n] * s["d"] * bytes_of(p.dtype) for n in ("num_q", "num_k"))
    of_rows = s["batch"] * s["heads"] * s["num_q"] * (4 + 4 * p.dlse)  # lse and its gradient
    matrices = s["parts"] * s["batches"] * s["heads_of_bias"] if p.dbias_dtype else 0
    written = of_q + 2 * of_k + matrices * s["num_q"] * s["num_k"] * bytes_of(p.dbias_dtype)
    return dataclasses.replace(work, bytes_read=work.bytes_read + of_rows, bytes_written=written)


def _queries_bias_work(p: AttentionQueriesBiasProblem, s: Sizes) -> Work:
    work = _scores_work(p, s, matmuls=3, rows=3)  # q, do
    of_q = s["batch"] * s["heads"] * s["num_q"] * s["d"] * bytes_of(p.dtype)
    return dataclasses.replace(work, bytes_written=of_q + _bias_work(p, s).bytes_written)


def _matrices(s: Sizes, of: str) -> int:
    """The number of matrices (num_q, num_k) of a bias or a mask."""
    return s.get(f"{of}_batch", 0) * s.get(f"{of}_heads", 0)


def _broadcast_sizes(args: Any) -> dict[str, int]:
    """Batch and heads of the bias and the mask, whose strides are 0 where they are broadcast."""
    sizes, scores = {}, args.scores
    for name in ("bias", "mask"):
        if hasattr(t := getattr(scores, name), "batch"):
            sizes[f"{name}_batch"] = scores.batch if t.batch else 1
            sizes[f"{name}_heads"] = scores.heads if t.head else 1
    return sizes


def _spec(kernel: str, name: str, sizes: tuple[str, ...], work: Any, sample: Any, *results: str) -> KernelSpec:
    """A kernel that computes scores. kernel: "module:class" in `kernels`. results: the arguments that it writes."""
    on = on_hopper(
        f"quackish.ops.attention.kernels.{kernel}",
        AttentionConfig,
        attention_config,
        attention_why_illegal,
        "quackish.ops.attention.tuning:TUNING",
    )
    return KernelSpec(name, WHO, type(sample), on, sizes, work, [sample], more_sizes=_broadcast_sizes, results=results)


def _small(
    kernel: str, name: str, sizes: tuple[str, ...], work: Any, sample: Any, config: Callable[[], Any]
) -> KernelSpec:
    """A kernel with one config."""
    on = on_hopper(f"quackish.ops.attention.kernels.{kernel}", config, lambda problem, gpu: config())
    return KernelSpec(name, WHO, type(sample), on, sizes, work, [sample])


WHO = "scaled_dot_product_attention"  # in messages
_SIZES = ("batch", "heads", "group", "num_q", "num_k", "d")
_B, _F = "bfloat16", "float32"
FORWARD_SPEC = _spec(
    "forward_sm90:AttentionForwardSm90", "attention_fwd", _SIZES, _forward_work,
    AttentionForwardProblem(_B, 64, mask=True, mask_aligned=False), "o", "lse",
)  # fmt: skip
SPECS = (
    _small(
        "mask_classes:AttentionMask", "attention_mask", ("batches", "heads", "rows", "columns"), _mask_work,
        AttentionMaskProblem(by_vectors=False), AttentionMaskConfig,
    ),
    _small(
        "tile_order:AttentionOrder", "attention_order", ("batches", "heads", "num_q", "num_k"), _order_work,
        AttentionOrderProblem(), AttentionOrderConfig,
    ),
    FORWARD_SPEC,
    _small(
        "backward_rows:AttentionRows", "attention_bwd_rows", ("batch", "heads", "num_q", "d"), _rows_work,
        AttentionRowsProblem(_B, dlse=True), AttentionRowsConfig,
    ),
    _spec(
        "backward_keys_sm90:AttentionKeysSm90", "attention_bwd_keys", _SIZES, _keys_work,
        AttentionKeysProblem(_B, 64, _F, band=True, softcap=True, dbias=True), "dk", "dv", "dbias",
    ),
    _spec(
        "backward_queries_sm90:AttentionQueriesSm90", "attention_bwd_queries", _SIZES, _queries_work,
        AttentionQueriesProblem(_B, 64, _F, softcap=True), "dq",
    ),
    _spec(
        "backward_product_sm90:AttentionProductSm90", "attention_bwd_product", _SIZES, _product_work,
        AttentionProductProblem(_B, 64), "dq",
    ),
    _spec(
        "backward_bias_sm90:AttentionBiasSm90", "attention_bwd_bias", (*_SIZES, "parts"), _bias_work,
        AttentionBiasProblem(_B, 64, _B), "dbias",
    ),
    _spec(
        "backward_queries_bias_sm90:AttentionQueriesBiasSm90", "attention_bwd_queries_bias", (*_SIZES, "parts"),
        _queries_bias_work, AttentionQueriesBiasProblem(_B, 32, _B), "dq", "dbias",
    ),
    _spec(
        "small_forward_sm90:AttentionSmallForwardSm90", "attention_small_fwd", _SIZES, _small_forward_work,
        AttentionSmallForwardProblem(_B, 32, _B, False), "o", "lse",
    ),
    _spec(
        "small_backward_sm90:AttentionSmallBackwardSm90", "attention_small_bwd",
        (*_SIZES, "parts", "batches", "heads_of_bias"), _small_backward_work,
        AttentionSmallBackwardProblem(_B, 32, _F, False, dbias_dtype=_F), "dq", "dk", "dv", "dbias",
    ),
)  # fmt: skip
