"""How attention's kernels load tiles into shared memory, by TMA."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync

from quackish.ops.attention.arguments import ScoreArgs, Strided
from quackish.ops.attention.kernels.cta import Cta, TmaTensor
from quackish.ops.attention.kernels.items import Head
from quackish.ops.attention.kernels.swizzled_tile import SwizzledTile

# L2 cache policies as encoded by PTX's `createpolicy`
EVICT_NORMAL, EVICT_FIRST = 0x10F0_0000_0000_0000, 0x12F0_0000_0000_0000


class Part(NamedTuple):
    """The tiles of one head of a tensor, and where in shared memory they go."""

    atom: cute.CopyAtom
    shared: cute.Tensor  # (tile, stages)
    tiles: cute.Tensor  # (tile, tiles along rows, tiles along columns)


class TileLoads:
    # Host: tensors and TMA atoms

    def tensor(self, t: Strided, rows: Int32, columns: Int32, heads: Int32, batch: Int32):
        """(rows, columns, heads, batch), with 1 head or 1 batch where t is broadcast."""
        per_16_bytes = 128 // t.base.dtype.width
        row, head, batch_stride = (cute.assume(stride, divby=per_16_bytes) for stride in (t.row, t.head, t.batch))
        layout = cute.make_layout((rows, columns, heads, batch), stride=(row, 1, head, batch_stride))
        return cute.make_tensor(t.base, layout)

    def like_q(self, t: Strided, s: ScoreArgs):
        return self.tensor(t, s.num_q, s.d, s.heads, s.batch)

    def like_k(self, t: Strided, s: ScoreArgs):
        return self.tensor(t, s.num_k, s.d, s.heads // s.group, s.batch)

    def like_scores(self, t: Strided, s: ScoreArgs):
        return self.tensor(t, s.num_q, s.num_k, s.heads, s.batch)

    @cute.jit
    def broadcast_scores(self, t: Strided, s: ScoreArgs):
        heads = s.heads if t.head != 0 else Int32(1)
        batch = s.batch if t.batch != 0 else Int32(1)
        return self.tensor(t, s.num_q, s.num_k, heads, batch)

    def tma(self, tile: SwizzledTile, tensor: cute.Tensor, stores: bool = False) -> TmaTensor:
        """Loads tiles of a tensor (rows, columns, heads, batch), or stores them."""
        box = cute.slice_(tile.layout(1), (None, None, 0))
        op = cpasync.CopyBulkTensorTileS2GOp() if stores else cpasync.CopyBulkTensorTileG2SOp()
        return TmaTensor(*cpasync.make_tiled_tma_atom(op, tensor, box, (tile.rows, tile.columns)))

    # Device

    def part(self, cta: Cta, name: str, head: Int32, batch: Int32) -> Part:
        """The tiles of one head of the tensor that `PerTensor` calls `name`."""
        tma, tile = getattr(cta.tma, name), self.tiles[name].tile
        tensor = tma.coordinates[None, None, head, batch]
        tiles = cute.local_tile(tensor, (tile.rows, tile.columns), (None, None))
        return self._part(tma.atom, getattr(cta.shared, name), tiles, 2)

    def _part(self, atom: cute.CopyAtom, shared: cute.Tensor, tiles: cute.Tensor, dims: int) -> Part:
        """dims: the first ones of both tensors are those of a tile."""
        shared, tiles = (cute.group_modes(t, 0, dims) for t in (shared, tiles))
        return Part(atom, *cpasync.tma_partition(atom, 0, cute.make_layout(1), shared, tiles))

    def load(self, part: Part, row, column, stage, barrier, cache_policy=None):
        """Loads the tile at (row, column), counted in tiles. `barrier` counts the bytes that arrive."""
        cute.copy(
            part.atom, part.tiles[None, row, column], part.shared[None, stage], tma_bar_ptr=barrier,
            cache_policy=cache_policy,
        )  # fmt: skip

    @cute.jit
    def load_scores(self, cta: Cta, head: Head, tile_q: Int32, tile_k: Int32, state, is_full):
        """Loads a tile of the bias and the mask, those that TMA can load.

        is_full: 1 if the mask is not needed, else 0; None without a mask.
        """
        s, barrier = cta.args.scores, cta.loaded.producer_get_barrier(state)
        if const_expr(self.bias is not None and not self.keeps_bias):
            part = self.part_of_scores(cta, "bias", s.bias, head)
            self.load(part, tile_q, tile_k, state.index, barrier, cta.bias_policy)
        if const_expr(self.mask is not None):
            part = self.part_of_scores(cta, "mask", s.mask, head)
            if is_full == 0:
                self.load(part, tile_q, tile_k, state.index, barrier)

    @cute.jit
    def part_of_scores(self, cta: Cta, name: cutlass.Constexpr[str], t: Strided, head: Head) -> Part:
        """The tiles of one head of a bias or a mask, which may be broadcast."""
        query_head = head.query_head if t.head != 0 else Int32(0)
        batch = head.batch if t.batch != 0 else Int32(0)
        return self.part(cta, name, query_head, batch)

    @cute.jit
    def bias_policy(self, args: ScoreArgs):
        """The L2 cache policy for a bias that TMA loads: one that is not broadcast is read once."""
        if const_expr(self.bias is None):
            return None
        t = args.bias
        return Int64(EVICT_NORMAL) if t.head == 0 or t.batch == 0 else Int64(EVICT_FIRST)

    # Statistics of rows: the shift of the scores, and delta. 0 for queries past the last one.

    @cute.jit
    def tma_of_stats(self, args) -> TmaTensor:
        """Loads one of the two for the queries of a tile. Its coordinates: (queries, batch and heads, 2)."""
        s = args.scores
        row, heads = cute.assume(args.stats_row, divby=4), s.batch * s.heads
        layout = cute.make_layout((s.num_q, heads, 2), stride=(1, row, cute.assume(row * heads, divby=4)))
        box, op = cute.make_layout((self.rows_of_stats,)), cpasync.CopyBulkTensorTileG2SOp()
        return TmaTensor(
            *cpasync.make_tiled_tma_atom(op, cute.make_tensor(args.stats, layout), box, (self.rows_of_stats,))
        )  # fmt: skip

    @cute.jit
    def load_stats(self, cta: Cta, head: Head, tile: Int32, stage, barrier):
        """Loads both of a tile of queries."""
        s = cta.args.scores
        for i in cutlass.range_constexpr(2):
            stats = cta.tma.stats.coordinates[None, head.batch * s.heads + head.query_head, i]
            tiles = cute.local_tile(stats, (self.rows_of_stats,), (None,))
            part = self._part(cta.tma.stats.atom, cta.shared.stats[None, i, None], tiles, 1)
            cute.copy(part.atom, part.tiles[None, tile], part.shared[None, stage], tma_bar_ptr=barrier)
