"""The problems of attention's kernels that compute scores or take their gradients."""

import dataclasses
from typing import ClassVar

from quackish.device.arguments import ALIGNED_F32, Ptr
from quackish.ops.attention.arguments import (
    BLOCK,
    MAX_D,
    BiasArgs,
    ForwardArgs,
    KeysArgs,
    ProductArgs,
    QueriesArgs,
    ScoreArgs,
    Strided,
)

STATS_BYTES = 8  # of a query, in backward: the shift of its scores, and delta


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
    # The mask is the same for all queries, and for the heads that share a head of keys. `mask_aligned` is True.
    mask_of_keys: bool = False
    # Tiles of three warp groups need no more rows than tiles of two, at d 32, without causality, window, softcap, a
    # mask but one of keys, a bias that is fp32 or unaligned, and dbias of the kernel for dk and dv, which would spill
    # registers. Forward and backward of B 768, H 4, L 768 take 5.24 ms with three and 5.70 with two (H200).
    wide: bool = False

    # What differs between the kernels
    own: ClassVar[tuple[str, ...]]  # tensors of d columns whose tiles a warp group keeps during an item
    loaded: ClassVar[tuple[str, ...]]  # tensors of d columns whose tiles are loaded per stage
    num_wgs: ClassVar[tuple[int, ...]] = (2, 3)  # legal values of `AttentionConfig.num_wgs`
    tiles: ClassVar[tuple[int, ...]] = (128, 64)  # of `AttentionConfig.tile`
    min_stages: ClassVar[int] = 1
    max_stages: ClassVar[int] = 4  # of the rule
    preferred: ClassVar[tuple[tuple[int, int], ...]]  # (tile, smallest number of stages), the best first

    @property
    def choices(self) -> tuple[tuple[int, int], ...]:
        """What the rule takes of `preferred`."""
        return self.preferred

    @property
    def own_stages(self) -> tuple[int, ...]:
        """Legal values of `AttentionConfig.own_stages`."""
        return (1, 2) if self.own_bytes(BLOCK, BLOCK) else (1,)

    @property
    def ordered(self) -> bool:
        """True if tiles start in an order that depends on the mask: where some have fewer tiles of the other side."""
        return self.mask and not self.band and not self.mask_of_keys

    @property
    def bias_by_tma(self) -> bool:
        return self.bias_dtype is not None and self.bias_aligned

    @property
    def mask_by_tma(self) -> bool:
        return self.mask and self.mask_aligned and not self.mask_of_keys

    @property
    def has_unaligned(self) -> bool:
        """True if values of the bias or the mask are loaded into registers, many at a time."""
        return not (self.bias_aligned and self.mask_aligned)

    @property
    def bias_bytes(self) -> int:
        """Bytes per element of a bias that TMA loads."""
        return (4 if self.bias_dtype == "float32" else 2) * self.bias_by_tma

    def own_bytes(self, rows: int, tile: int) -> int:
        """Shared memory for what a CTA keeps during an item. rows: those of its own tile."""
        return len(self.own) * rows * self.d * 2

    def stage_bytes(self, rows: int, tile: int) -> int:
        """Shared memory per stage of loaded tiles. rows: those of a CTA's own tile."""
        of_tiles = len(self.loaded) * tile * self.d * 2
        return of_tiles + rows * tile * (self.bias_bytes + self.mask_by_tma)

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
            mask = Strided(Ptr("uint8", self.mask_by_tma), column=None if self.mask_by_tma else "int64")
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
    def choices(self) -> tuple[tuple[int, int], ...]:
        most = BLOCK if self.d == 32 or self.mask_of_keys else max(self.tiles)  # larger tiles spill registers
        if self.mask_of_keys and self.d == MAX_D:
            most = BLOCK // 2
        return tuple((tile, stages) for tile, stages in self.preferred if tile <= most)

    @property
    def ds_is_dbias(self) -> bool:
        """True if dbias holds ds as dq and dk are computed from it."""
        return self.dbias and self.bias_dtype == self.dtype and not self.softcap

    @property
    def dbias_by_tma(self) -> bool:
        """True if TMA stores dbias, from shared memory. In fp32, threads store it."""
        return self.dbias and self.bias_dtype != "float32"

    def stage_bytes(self, rows: int, tile: int) -> int:
        return super().stage_bytes(rows, tile) + tile * STATS_BYTES

    def result_bytes(self, rows: int, tile: int) -> int:
        return 2 * rows * tile * self.dbias_by_tma

    def live_registers(self, tile: int) -> int:
        is_wide = self.has_unaligned or self.bias_dtype == "float32"
        masked = self.mask and not self.mask_of_keys
        of_scores = 0 if tile == 32 else 56 if is_wide else masked * (16 + 8 * self.band)
        of_scores += 8 * (self.d == 32)  # `SwizzledTile.load_fp32`
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

    def own_bytes(self, rows: int, tile: int) -> int:
        return super().own_bytes(rows, tile) + rows * STATS_BYTES

    def live_registers(self, tile: int) -> int:
        of_scores = tile // 4 * self.has_unaligned + tile // 2 * self.softcap
        return tile + tile // 4 + self.d // 2 + 40 + of_scores

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

    def own_bytes(self, rows: int, tile: int) -> int:
        return rows * tile * self.bias_bytes  # the same for all heads that are summed

    def stage_bytes(self, rows: int, tile: int) -> int:
        of_rows = rows * (2 * self.d * 2 + STATS_BYTES)  # q, do, statistics
        return super().stage_bytes(rows, tile) - self.own_bytes(rows, tile) + of_rows

    def live_registers(self, tile: int) -> int:
        is_complex = self.softcap or (self.mask and self.band) or self.has_unaligned
        return tile + tile // 2 + 40 + 16 * is_complex

    @property
    def args(self) -> BiasArgs:
        dbias = Strided(ALIGNED_F32 if self.in_parts else Ptr(self.bias_dtype, aligned=True))
        return BiasArgs(scores=self._scores(), do=self._operand(), dbias=dbias)


@dataclasses.dataclass(frozen=True)
class AttentionQueriesBiasProblem(AttentionBiasProblem):
    """dq too, for d 32, a bias of 16 bits that TMA can load, no softcap or band, and no mask but one of keys."""

    ctas: int = 2  # of a cluster, which together have all keys
    blocks: int = 2  # of keys of a CTA

    num_wgs = (2,)
    tiles = (BLOCK,)
    preferred = ((BLOCK, 3), (BLOCK, 2), (BLOCK, 1))

    own_stages = (1,)  # a CTA has one item

    def own_bytes(self, rows: int, tile: int) -> int:
        return rows * self.blocks * BLOCK * self.bias_bytes

    def stage_bytes(self, rows: int, tile: int) -> int:
        return rows * (2 * self.d * 2 + STATS_BYTES) + self.blocks * BLOCK * 2 * self.d * 2

    def result_bytes(self, rows: int, tile: int) -> int:
        return rows * self.d * 4 * self.ctas * (self.ctas > 1)

    def live_registers(self, tile: int) -> int:
        return tile + self.blocks * tile // 2 + tile // 4 + self.d // 2 + 32

    @property
    def args(self) -> BiasArgs:
        return super().args._replace(dq=self._operand())
