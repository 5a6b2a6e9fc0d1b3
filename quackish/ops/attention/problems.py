"""What is asked of attention's kernels on Hopper, with a bias or a mask, and the descriptions of these kernels."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

from quackish.device.arguments import ALIGNED_F32, F32, Ptr
from quackish.device.spec import KernelSpec, on_hopper
from quackish.device.work import Sizes, Work, bytes_of, ceil_div
from quackish.ops.attention.arguments import (
    BLOCK,
    ORDERED,
    BiasArgs,
    ForwardArgs,
    KeysArgs,
    MaskArgs,
    OrderArgs,
    ProductArgs,
    QueriesArgs,
    RowsArgs,
    ScoreArgs,
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


@dataclasses.dataclass(frozen=True)
class AttentionProblem:
    """What all kernels that compute scores depend on."""

    dtype: str  # of q, k, v, o and their gradients: "bfloat16" or "float16"
    d: int  # columns of q, k and v, rounded up: 32, 64, 96 or 128
    bias_dtype: str | None = None  # "bfloat16", "float16" or "float32"
    bias_aligned: bool = True  # its rows start on 16 bytes, so that TMA can load it
    mask: bool = False
    mask_aligned: bool = True
    band: bool = False  # causality or a window
    softcap: bool = False

    # What differs between the kernels
    own: ClassVar[tuple[str, ...]]  # tensors of d columns whose tiles a warp group keeps during an item
    loaded: ClassVar[tuple[str, ...]]  # tensors of d columns whose tiles are loaded per stage
    tiles: ClassVar[tuple[int, ...]] = (128, 64)  # legal values of `AttentionConfig.tile`
    min_stages: ClassVar[int] = 1
    max_stages: ClassVar[int] = 4  # of the rule
    preferred: ClassVar[tuple[tuple[int, int], ...]]  # (tile, smallest number of stages), the best first

    @property
    def own_stages(self) -> tuple[int, ...]:
        """Legal values of `AttentionConfig.own_stages`."""
        return (1, 2) if self.own else (1,)

    @property
    def ordered(self) -> bool:
        """True if tiles start in an order that depends on the mask; with a band, it depends on the band."""
        return self.mask and not self.band

    @property
    def bias_by_tma(self) -> bool:
        return self.bias_dtype is not None and self.bias_aligned

    @property
    def mask_by_tma(self) -> bool:
        return self.mask and self.mask_aligned

    @property
    def has_unaligned(self) -> bool:
        """True if values of the bias or the mask are loaded into registers, many at a time."""
        return not (self.bias_aligned and self.mask_aligned)

    def stage_bytes(self, rows: int, tile: int) -> int:
        """Shared memory per stage of loaded tiles. rows: those of a CTA's own tile."""
        of_bias = (4 if self.bias_dtype == "float32" else 2) * self.bias_by_tma
        return len(self.loaded) * tile * self.d * 2 + rows * tile * (of_bias + self.mask_by_tma)

    def result_bytes(self, rows: int, tile: int) -> int:
        """Shared memory for a result before TMA stores it."""
        return 0

    def live_registers(self, tile: int) -> int:
        """About how many registers a consumer thread needs: accumulators and operands that are live at once, and more.

        Configs up to the limit compile without spills (`tests/attention/test_config.py`).
        """
        raise NotImplementedError

    def _operand(self) -> Strided:
        return Strided(Ptr(self.dtype, aligned=True))

    def _scores(self) -> ScoreArgs:
        operand, bias, mask, classes, order = self._operand(), None, None, None, None
        if self.bias_dtype is not None:
            bias = Strided(Ptr(self.bias_dtype, self.bias_aligned), column=None if self.bias_aligned else "int64")
        if self.mask:
            mask = Strided(Ptr("uint8", self.mask_aligned), column=None if self.mask_aligned else "int64")
            classes = Strided(Ptr("uint8", aligned=False), column="int64")
        if self.ordered:
            order = Strided(Ptr("int32", aligned=False))
        bound = "int32" if self.band else None
        return ScoreArgs(
            q=operand, k=operand, v=operand, bias=bias, mask=mask, classes=classes, order=order,
            softcap="float32" if self.softcap else None, left=bound, right=bound,
        )  # fmt: skip


# The times below are ms in bf16 at B 4, H 16, L 2048, with a bias (B, H, L, L), measured before own tiles were kept in
# registers. Each is named (tile, num_stages), with num_wgs 2.


@dataclasses.dataclass(frozen=True)
class AttentionForwardProblem(AttentionProblem):
    own, loaded = ("q",), ("k", "v")
    # H100, fastest run:
    #   d 64    (128, 3) 0.227    (128, 2) 0.227    (64, 4) 0.240
    #   d 128   (128, 2) 0.285    (64, 3) 0.302
    preferred = ((128, 2), (64, 2))

    def live_registers(self, tile: int) -> int:
        return tile // 2 + tile // 4 + self.d // 2 + 40 + tile * self.has_unaligned

    @property
    def args(self) -> ForwardArgs:
        return ForwardArgs(scores=self._scores(), o=self._operand())


@dataclasses.dataclass(frozen=True)
class AttentionKeysProblem(AttentionProblem):
    """dk and dv, and dbias if the bias is not broadcast."""

    dbias: bool = False

    own, loaded = ("k", "v"), ("q", "do")
    tiles = (128, 64, 32)
    # H200, fastest run of the whole backward pass, with dbias:
    #   d 64    (128, 2) 0.524    (64, 4) 0.532    (64, 5) 0.535
    #   d 128   (64, 3) 0.674     (64, 2) 0.706
    # With own tiles in registers, (64, 4) is still slower at d 64: a step of forward and backward takes 0.885 ms with
    # it on an H100, and 0.874 ms with (128, 2).
    preferred = ((128, 2), (64, 2), (64, 1), (32, 2))

    @property
    def ds_is_dbias(self) -> bool:
        """True if dbias holds ds as dq and dk are computed from it."""
        return self.dbias and self.bias_dtype == self.dtype and not self.softcap

    @property
    def dbias_by_tma(self) -> bool:
        """True if TMA stores dbias, from shared memory. In fp32, threads store it."""
        return self.dbias and self.bias_dtype != "float32"

    def stage_bytes(self, rows: int, tile: int) -> int:
        return super().stage_bytes(rows, tile) + 8 * tile  # shift and delta of the loaded rows

    def result_bytes(self, rows: int, tile: int) -> int:
        return 2 * rows * tile * self.dbias_by_tma

    def live_registers(self, tile: int) -> int:
        is_wide = self.has_unaligned or self.bias_dtype == "float32"
        of_scores = 0 if tile == 32 else 56 if is_wide else 16 * self.mask + 8 * (self.mask and self.band)
        return tile + tile // 4 + self.d + 16 + of_scores + tile // 2 * self.softcap

    @property
    def args(self) -> KeysArgs:
        dbias = Strided(Ptr(self.bias_dtype, aligned=True)) if self.dbias else None
        return KeysArgs(
            scores=self._scores(), do=self._operand(), dk=self._operand(), dv=self._operand(), dbias=dbias
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class AttentionQueriesProblem(AttentionProblem):
    """dq, with ds computed again."""

    own, loaded = ("q", "do"), ("k", "v")
    min_stages = 2  # the kernel releases a stage after it has the next one
    # With a mask, 3 stages leave room for a second stage of own tiles, and a step of forward and backward takes 1.45
    # instead of 1.48 ms (H100, d 64, a random half of the keys). With neither bias nor mask they were not measured.
    max_stages = 3
    # H200, median, of a kernel that also stored dbias:
    #   d 64    (64, 4) 0.356    (128, 2) 0.376
    #   d 128   (64, 3) 0.513    (64, 2) 0.565
    preferred = ((128, 3), (64, 2))

    def live_registers(self, tile: int) -> int:
        return tile + tile // 4 + self.d // 2 + 40 + tile // 4 * self.has_unaligned + tile // 2 * self.softcap

    @property
    def args(self) -> QueriesArgs:
        return QueriesArgs(scores=self._scores(), do=self._operand(), dq=self._operand())


@dataclasses.dataclass(frozen=True)
class AttentionProductProblem(AttentionProblem):
    """dq from ds in memory. With a mask only the classes of its blocks are read."""

    own, loaded = (), ("k",)
    # H200, median of the whole backward pass, with an older kernel for dk and dv:
    #   d 64    (128, 3) 0.547    (64, 4) 0.549
    #   d 128   (128, 3) 0.827    (64, 4) 0.831
    preferred = ((128, 2), (64, 2))
    mask_by_tma = False

    def stage_bytes(self, rows: int, tile: int) -> int:
        return super().stage_bytes(rows, tile) + 2 * rows * tile  # ds

    def live_registers(self, tile: int) -> int:
        return self.d // 2 + 40

    @property
    def args(self) -> ProductArgs:
        return ProductArgs(scores=self._scores()._replace(mask=None), ds=self._operand(), dq=self._operand())


@dataclasses.dataclass(frozen=True)
class AttentionBiasProblem(AttentionProblem):
    """The gradient of a bias that is broadcast over batch, heads or both."""

    in_parts: bool = False  # in fp32, to be summed; else one part, in the dtype of the bias

    own, loaded = (), ("k", "v")  # tiles of q and do, of a CTA's rows, are loaded too
    preferred = ((128, 2), (64, 2), (64, 1))  # not measured
    ordered = False

    def stage_bytes(self, rows: int, tile: int) -> int:
        return super().stage_bytes(rows, tile) + 2 * rows * self.d * 2 + 8 * rows  # q, do, shift and delta

    def live_registers(self, tile: int) -> int:
        is_complex = self.softcap or (self.mask and self.band) or self.has_unaligned
        return tile + tile // 2 + 40 + 16 * is_complex

    @property
    def args(self) -> BiasArgs:
        dbias = Strided(ALIGNED_F32 if self.in_parts else Ptr(self.bias_dtype, aligned=True))
        return BiasArgs(scores=self._scores(), do=self._operand(), dbias=dbias)


# Descriptions --------------------------------------------------------------------------------------------------------


def _scores_work(p: AttentionProblem, s: Sizes, matmuls: int, rows: int) -> Work:
    """matmuls: of Lq x Lk x d. rows: tensors like q that are read and written, besides k and v."""
    scores = s["batch"] * s["heads"] * s["num_q"] * s["num_k"]
    of_bias, of_mask = (_matrices(s, of) * s["num_q"] * s["num_k"] for of in ("bias", "mask"))
    of_q, of_k = (s["batch"] * s["heads"] * s[n] * s["d"] * bytes_of(p.dtype) for n in ("num_q", "num_k"))
    read = of_bias * bytes_of(p.bias_dtype) + of_mask * p.mask + (rows - 1) * of_q + 2 * of_k // s["group"]
    notes = ["fewer bytes of a bias or mask that is the same for all queries or keys"] * (of_bias + of_mask > 0)
    notes += ["less work with causality or a window"] * p.band
    notes += ["less work where a mask leaves a tile empty"] * p.mask
    return Work(read, of_q, 2 * matmuls * scores * s["d"], "; ".join(notes))


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
    return dataclasses.replace(work, bytes_read=work.bytes_read + ds - v)


def _bias_work(p: AttentionBiasProblem, s: Sizes) -> Work:
    work = _scores_work(p, s, matmuls=2, rows=3)  # q, do
    itemsize = 4 if p.in_parts else bytes_of(p.bias_dtype)
    written = itemsize * s["parts"] * _matrices(s, "bias") * s["num_q"] * s["num_k"]
    return dataclasses.replace(work, bytes_written=written)


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
)  # fmt: skip
