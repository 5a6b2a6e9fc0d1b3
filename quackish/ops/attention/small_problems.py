"""The problems of attention's kernels for d 32 and at most 2 * BLOCK queries and keys."""

import dataclasses

from quackish.device.arguments import F32, Ptr
from quackish.ops.attention.arguments import BLOCK, ScoreArgs, SmallBackwardArgs, SmallForwardArgs, Strided
from quackish.ops.attention.score_problems import STATS_BYTES, AttentionProblem


@dataclasses.dataclass(frozen=True)
class SmallAttentionProblem(AttentionProblem):
    """Threads load a mask and a bias that is not aligned. `mask_aligned` is False, unless the mask is one of keys."""

    pairs: bool = False  # at most BLOCK queries and keys: a CTA has two matrices of scores at a time

    own = ()
    num_wgs = (2,)
    ordered = False
    needs_stats = False

    def _scores(self) -> ScoreArgs:
        return super()._scores()._replace(classes=None)

    @property
    def blocks(self) -> int:
        """How many blocks of queries, and of keys, a matrix of scores has."""
        return 1 if self.pairs else 2

    def stage_bytes(self, rows: int, tile: int) -> int:
        of_bias = 2 * self.blocks * BLOCK**2 * self.bias_bytes
        return len(self.loaded) * 2 * BLOCK * self.d * 2 + of_bias

    def result_bytes(self, rows: int, tile: int) -> int:
        keeps_values = self.bias_dtype is not None and not self.bias_aligned
        return 2 * BLOCK * self.blocks * BLOCK * 4 * keeps_values


@dataclasses.dataclass(frozen=True)
class AttentionSmallForwardProblem(SmallAttentionProblem):
    loaded = ("q", "k", "v")
    max_stages = 3

    @property
    def tiles(self) -> tuple[int, ...]:  # type: ignore[override]
        return (self.blocks * BLOCK,)

    @property
    def preferred(self) -> tuple[tuple[int, int], ...]:  # type: ignore[override]
        return ((self.blocks * BLOCK, 1),)

    def live_registers(self, tile: int) -> int:
        return tile // 2 + tile // 4 + self.d // 2 + 40

    @property
    def args(self) -> SmallForwardArgs:
        return SmallForwardArgs(scores=self._scores(), o=self._operand())


@dataclasses.dataclass(frozen=True)
class AttentionSmallBackwardProblem(SmallAttentionProblem):
    """The whole backward, and the gradient of the bias or parts of it."""

    dlse: bool = False
    dbias_dtype: str | None = None  # of dbias as it is written: fp32 if it is in parts
    ds_is_dbias: bool = False  # the bias is not broadcast and has q's dtype

    loaded = ("q", "do", "o", "k", "v")
    tiles = (BLOCK,)
    max_stages = 2
    preferred = ((BLOCK, 1),)
    needs_stats = True

    @property
    def sums(self) -> bool:
        return self.dbias_dtype is not None and not self.ds_is_dbias

    def result_bytes(self, rows: int, tile: int) -> int:
        ds_and_stats = 2 * BLOCK * (self.blocks * BLOCK * 2 + STATS_BYTES)
        return super().result_bytes(rows, tile) + ds_and_stats

    def live_registers(self, tile: int) -> int:
        of_scores = tile * (1 + self.blocks * self.sums / 2) + tile // 2  # x, dp, sums; p, ds
        return int(of_scores) + self.d + 40

    @property
    def args(self) -> SmallBackwardArgs:
        operand = self._operand()
        dbias = None
        if self.dbias_dtype is not None:
            dbias = Strided(Ptr(self.dbias_dtype, aligned=True))
        return SmallBackwardArgs(
            scores=self._scores(), do=operand, o=operand, dlse=F32 if self.dlse else None, dq=operand, dk=operand,
            dv=operand, dbias=dbias,
        )  # fmt: skip
