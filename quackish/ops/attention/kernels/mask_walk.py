"""The walk of attention's kernels over tiles of scores, without those that a mask leaves empty.

The classes of the mask's blocks are in memory. The producer reads those of 32 tiles at once, one per lane, and takes
the tiles to do in order. It tells the consumers in shared memory which tile a stage has, and whether the mask leaves
all its keys: then the mask is not loaded. Of a mask of keys, it tells them a bit for each key. An item's tiles are
counted before it starts, by the warp that loads its own tiles, or else by the consumers.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from quackish.kernels.memory import load_at
from quackish.ops.attention.arguments import BLOCK, EMPTY, FULL, ScoreArgs
from quackish.ops.attention.kernels.cta import Cta


class WalkTiles(NamedTuple):
    """Up to 32 tiles of a walk. Bit i is that of tile `start` + i."""

    start: Int32
    to_do: Int32  # the mask leaves some keys
    full: Int32  # the mask leaves all keys


class LoadedTile(NamedTuple):
    """What a consumer knows of the tile in a stage."""

    n: Int32  # the tile
    is_full: Int32 | None = None  # 1 if the mask leaves all keys, else 0; None if unknown
    kept: Any = None  # of a mask of keys: bit i of word j is 1 if it leaves key 32 j + i; or of `kept_by_lane`


@cute.jit
def first_of(tiles: WalkTiles):
    """(the first tile to do, 1 if it is full, else 0)"""
    i = cute.arch.popc((tiles.to_do & -tiles.to_do) - 1)
    return tiles.start + i, (tiles.full >> i) & 1


@cute.jit
def class_of(s: ScoreArgs, batch: Int32, head: Int32, q0: Int32, k0: Int32, shape: cutlass.Constexpr):
    """(Boolean, Boolean): if the mask leaves some keys, and all keys, of a tile of `shape` at query q0 and key k0."""
    t = s.classes
    base = t.base + (Int64(batch) * t.batch + Int64(head) * t.head)
    least, most = Int32(FULL), Int32(EMPTY)
    for i in cutlass.range_constexpr(-(-shape[0] // BLOCK)):
        for j in cutlass.range_constexpr(-(-shape[1] // BLOCK)):
            q, k = q0 // BLOCK + i, k0 // BLOCK + j
            if (q * BLOCK < s.num_q) & (k * BLOCK < s.num_k):
                found = load_at(base, Int64(q) * t.row + Int64(k) * t.column).to(Int32)
                least, most = cutlass.min(least, found), cutlass.max(most, found)
    return most != EMPTY, least == FULL


@cute.jit
def read_word(shared: cute.Tensor, stage: Int32) -> Int32:
    """What a producer wrote, for a warp that will release the stage."""
    word = Int32(0)
    if cute.arch.lane_idx() == 0:  # the lane that releases the stage: racecheck ignores the warp barrier
        word = shared[stage]
    return cute.arch.shuffle_sync(word, 0)


class MaskWalk:
    """For kernels with items that have tiles [first, last) of tile_q queries x tile_k keys."""

    @cute.jit
    def place(self, n: Int32, item, args):
        """(batch and heads, first query, first key) of the n-th tile of an item: here a tile of keys."""
        return item.head, item.tile * self.tile_q, n * self.tile_k

    @cute.jit
    def tiles_at(self, start: Int32, item, args) -> WalkTiles:
        """Tiles start to start + 31, for a whole warp. args: those of the kernel."""
        n = start + cute.arch.lane_idx()
        head, q0, k0 = self.place(cutlass.min(n, item.last - 1), item, args)
        some, every = class_of(args.scores, head.batch, head.query_head, q0, k0, (self.tile_q, self.tile_k))
        return WalkTiles(
            start, cute.arch.vote_ballot_sync(some & (n < item.last)), cute.arch.vote_ballot_sync(every)
        )  # fmt: skip

    @cute.jit
    def count(self, item, args) -> Int32:
        """The number of an item's tiles to do, for a whole warp."""
        count = Int32(0)
        for start in cutlass.range(item.first, item.last, 32, unroll=1):
            count = count + cute.arch.popc(self.tiles_at(start, item, args).to_do)
        return count

    @cute.jit
    def load_item(self, cta: Cta, item, state):
        """Loads an item's tiles by the kernel's `load_tile`, and returns the pipeline state after them."""
        loaded = cta.loaded
        if const_expr(self.walks):
            done = Int32(0)
            for start in cutlass.range(item.first, item.last, 32, unroll=1):
                walk = self.tiles_at(start, item, cta.args)
                to_do, full = walk.to_do, walk.full
                if const_expr(self.least_tiles == 1):
                    if (start + 32 >= item.last) & (done == 0) & (to_do == 0):
                        to_do = Int32(1)
                while to_do != 0:
                    n, is_full = first_of(WalkTiles(start, to_do, full))
                    self.acquire(cta, item, state, n, is_full)
                    self.load_tile(cta, item, n, state, is_full)
                    state.advance()
                    to_do = to_do & (to_do - 1)
                    done = Int32(1)
        else:
            for n in cutlass.range(item.first, item.last, unroll=1):
                loaded.producer_acquire(state)
                self.load_tile(cta, item, n, state, None)
                state.advance()
        return state

    @cute.jit
    def last_of(self, item, args) -> Int32:
        """Where the loop of a consumer from item.first ends, so that it has as many tiles as `load_item` loads.

        For a whole warp.
        """
        if const_expr(not self.walks):
            return item.last
        return item.first + cutlass.max(self.count(item, args), self.least_tiles)

    # What producers tell the consumers

    @property
    def tells_keys(self) -> bool:
        """True if producers tell which keys a mask of keys leaves; else consumers load it by `kept_by_lane`."""
        return self.walks and self.problem.mask_of_keys

    @property
    def knows_full(self) -> bool:
        """True if consumers leave out a mask where all keys are kept: not where a branch around it spills registers."""
        return True

    @property
    def words_of_keys(self) -> int:
        return self.tile_k // 32 if self.tells_keys else 0

    def allocate_walk(self, smem):
        """(words, stages), or None without a mask. Allocated first: then it fits in front of the first aligned tile."""
        if not self.walks:
            return None
        return smem.allocate_tensor(Int32, cute.make_layout((1 + self.words_of_keys, self.config.num_stages)), 16)

    @cute.jit
    def acquire(self, cta: Cta, item, state, n: Int32, is_full: Int32):
        """`producer_acquire` for tile n of an item, without the bytes of a mask that is not loaded."""
        loaded, walk, num_bytes = cta.loaded, cta.walk, self.stage_bytes
        loaded.sync_object_empty.wait(state.index, state.phase)
        if const_expr(self.mask is not None):
            num_bytes = num_bytes - is_full * self.mask.bytes
        if const_expr(self.tells_keys):
            self.tell_keys(walk[None, state.index], item, n, is_full, cta.args)
        with cute.arch.elect_one():
            walk[0, state.index] = n * 2 + is_full
            cute.arch.mbarrier_arrive_and_expect_tx(loaded.producer_get_barrier(state), num_bytes)

    @cute.jit
    def tell_keys(self, words: cute.Tensor, item, n: Int32, is_full: Int32, args):
        """Stores `LoadedTile.kept` of tile n of an item as words 1..., for a whole warp."""
        head, _, k0 = self.place(n, item, args)
        if is_full == 0:
            for j in cutlass.range(self.words_of_keys, unroll=2):  # more loads at once spill registers
                keep = self.keep(args.scores, head, k0 + (32 * j + cute.arch.lane_idx()))
                word = cute.arch.vote_ballot_sync(keep != 0)
                with cute.arch.elect_one():
                    words[1 + j] = word
        else:
            with cute.arch.elect_one():
                for j in cutlass.range_constexpr(self.words_of_keys):
                    words[1 + j] = Int32(-1)

    @cute.jit
    def release(self, loaded, state):
        """`consumer_release`, for a warp whose lanes have read what is in shared memory, such as a mask."""
        cute.arch.sync_warp()
        loaded.consumer_release(state)

    @cute.jit
    def loaded_tile(self, walk, stage: Int32, n: Int32) -> LoadedTile:
        """What a stage has; without a mask it is tile n."""
        if const_expr(walk is None):
            return LoadedTile(n)
        word = read_word(walk[0, None], stage)
        if const_expr(self.tells_keys):
            return LoadedTile(word >> 1, None, [read_word(walk[1 + j, None], stage) for j in range(self.words_of_keys)])
        return LoadedTile(word >> 1, word & 1 if const_expr(self.knows_full) else None)
