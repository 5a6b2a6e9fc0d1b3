"""What the kernels of attention share: tensors, tiles, loads, and scores with bias, mask, causality and window.

A CTA has a tile of queries and walks over tiles of keys, or the reverse. The accumulator of q k^T has rows of queries
(`rows_are_queries`) or of keys. Scores are x = softcap(scale * q k^T) + bias, and -inf for keys that take no part. With
a shift, as in backward, they are in units of log2: log2(e) * x - shift.
"""

from typing import NamedTuple, Optional

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32, Int64, const_expr, pipeline
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers as sm90

from quackish.configs.attention import BLOCK, REGISTERS, AttentionConfig, ScoreArgs, Strided, own_in_registers
from quackish.kernels.common.arguments import DTYPES, fake_args
from quackish.kernels.common.mask_walk import MaskWalk, read_word
from quackish.kernels.common.math import LOG2_E, tanh
from quackish.kernels.common.memory import load_at, vector_at
from quackish.kernels.common.swizzled_tile import SwizzledTile

# L2 cache policies as encoded by PTX's `createpolicy`
EVICT_NORMAL, EVICT_FIRST = 0x10F0_0000_0000_0000, 0x12F0_0000_0000_0000
PINGPONG = 4  # the first of the barriers for it


class Head(NamedTuple):
    """The batch and the head of a tile."""

    batch: Int32
    query_head: Int32
    key_head: Int32


class Block(NamedTuple):
    """A warp group's part of a tile of scores, and a thread of the warp group."""

    head: Head
    q0: Int32  # first query and key of the part
    k0: Int32
    queries: int  # their numbers
    keys: int
    wg: Int32  # from 0
    thread: Int32


class Item(NamedTuple):
    """A CTA's unit of work: its tile of a head, and the tiles [first, last) of the other side."""

    head: Head
    tile: Int32
    first: Int32
    last: Int32


class ScoreTiles(NamedTuple):
    """Tiles of bias and mask in shared memory, per stage; None if they are not loaded."""

    bias: Optional[cute.Tensor]
    mask: Optional[cute.Tensor]


@cute.jit
def pair_rows(thread: Int32) -> Int32:
    """The first of the thread's two rows of an accumulator, which are 8 apart."""
    return thread // 32 * 16 + thread % 32 // 4


@cute.jit
def transpose(words: cute.Tensor, lane: Int32):
    """Word i of lane j becomes word j of lane i, for four lanes."""
    for bit in cutlass.range_constexpr(1, 3):
        is_upper = (lane & bit) != 0
        for a in cutlass.range_constexpr(4):
            if const_expr(a & bit == 0):
                lower, upper = words[a], words[a + bit]
                received = cute.arch.shuffle_sync_bfly(lower if is_upper else upper, offset=bit)
                words[a] = received if is_upper else lower
                words[a + bit] = upper if is_upper else received


class AttentionSm90(MaskWalk):
    rows_are_queries: bool
    pingpong = True

    def __init__(self, problem, config: AttentionConfig):
        self.problem, self.config = problem, config
        self.dtype, self.d = DTYPES[problem.dtype], problem.d
        self.own_in_registers = own_in_registers(problem, config)
        rows, other = config.rows, config.tile
        self.tile_q, self.tile_k = (rows, other) if self.rows_are_queries else (other, rows)
        self.own = SwizzledTile(self.dtype, BLOCK, self.d)  # a warp group's rows of q, k, v, do, and of results
        self.other = SwizzledTile(self.dtype, config.tile, self.d)  # a loaded tile of them
        self.bias = self.mask = None
        if problem.bias_by_tma:
            self.bias = SwizzledTile(DTYPES[problem.bias_dtype], self.tile_q, self.tile_k)
        if problem.mask_by_tma:
            self.mask = SwizzledTile(cutlass.Uint8, self.tile_q, self.tile_k)

    def fake_args(self):
        return fake_args(self.problem)

    # Host: tensors and TMA atoms

    def tensor(self, t: Strided, rows: Int32, columns: Int32, heads: Int32, batch: Int32):
        """(rows, columns, heads, batch), with 1 head or 1 batch where t is broadcast."""
        per_16_bytes = 128 // t.base.dtype.width
        row, head, batch_stride = (cute.assume(stride, divby=per_16_bytes) for stride in (t.row, t.head, t.batch))
        layout = cute.make_layout((rows, columns, heads, batch), stride=(row, 1, head, batch_stride))
        return cute.make_tensor(t.base, layout)

    def load_atom(self, tile: SwizzledTile, tensor: cute.Tensor):
        """(TMA atom, coordinates)"""
        box = cute.slice_(tile.layout(1), (None, None, 0))
        op = cpasync.CopyBulkTensorTileG2SOp()
        atom, coordinates = cpasync.make_tiled_tma_atom(op, tensor, box, (tile.rows, tile.columns))
        return atom, coordinates

    def store_atom(self, tile: SwizzledTile, tensor: cute.Tensor):
        box = cute.slice_(tile.layout(1), (None, None, 0))
        op = cpasync.CopyBulkTensorTileS2GOp()
        atom, coordinates = cpasync.make_tiled_tma_atom(op, tensor, box, (tile.rows, tile.columns))
        return atom, coordinates

    @cute.jit
    def score_atoms(self, args: ScoreArgs) -> list:
        """Atoms of bias and mask, those that are loaded."""
        atoms = []
        for tile, t in ((self.bias, args.bias), (self.mask, args.mask)):
            if const_expr(tile is not None):
                heads = args.heads if t.head != 0 else Int32(1)
                batch = args.batch if t.batch != 0 else Int32(1)
                atoms.append(self.load_atom(tile, self.tensor(t, args.num_q, args.num_k, heads, batch)))
        return atoms

    def launch_options(self, args, stream):
        ctas = cutlass.min(self.items(args), args.scores.max_ctas)
        return dict(
            grid=[ctas, 1, 1], block=[self.config.threads, 1, 1], min_blocks_per_mp=1, stream=stream, use_pdl=True
        )

    # MMAs of one warp group

    def mma_of_scores(self, n: int, accumulate: bool, in_registers: bool = False):
        """(BLOCK, k) @ (n, k)^T, in shared memory with contiguous k; the first one may be in registers."""
        source = warpgroup.OperandSource.RMEM if in_registers else warpgroup.OperandSource.SMEM
        mma = sm90.make_trivial_tiled_mma(
            self.dtype, self.dtype, OperandMajorMode.K, OperandMajorMode.K, Float32, (1, 1, 1), tiler_mn=(BLOCK, n),
            a_source=source,
        )  # fmt: skip
        mma.set(warpgroup.Field.ACCUMULATE, accumulate)
        return mma

    def mma_from_registers(self):
        """(BLOCK, k) in registers @ (k, d) in shared memory with contiguous d, added to the accumulator."""
        mma = sm90.make_trivial_tiled_mma(
            self.dtype, self.dtype, OperandMajorMode.K, OperandMajorMode.MN, Float32, (1, 1, 1),
            tiler_mn=(BLOCK, self.d), a_source=warpgroup.OperandSource.RMEM,
        )  # fmt: skip
        mma.set(warpgroup.Field.ACCUMULATE, True)
        return mma

    def transposed(self, tiles: cute.Tensor, count: int):
        """(d, rows, count) of loaded tiles (rows, d, count)."""
        layout = sm90.make_smem_layout_b(LayoutEnum.COL_MAJOR, (BLOCK, self.d, self.config.tile), self.dtype, count)
        return cute.make_tensor(tiles.iterator, layout.outer)

    def accumulator(self, n: int):
        return cute.make_rmem_tensor(self.mma_of_scores(n, True).get_slice(0).partition_shape_C((BLOCK, n)), Float32)

    def operand(self, k: int):
        """Registers for a (BLOCK, k) operand. Value i is that of an accumulator of k columns."""
        shape = self.mma_from_registers().get_slice(0).partition_shape_A((BLOCK, k))
        return cute.make_rmem_tensor(shape, self.dtype)

    @cute.jit
    def round_to_operand(self, operand: cute.Tensor, acc: cute.Tensor):
        """operand = acc. The compiler would move its own conversions past the fence of the WGMMA that reads them."""
        words = cute.recast_tensor(operand, Int32)
        for i in cutlass.range_constexpr(cute.size(words)):
            words[i] = cute.arch.inline_ptx(
                "cvt.rn.%sx2.f32 {$w0}, {$r0}, {$r1};" % ("bf16" if self.dtype is BFloat16 else "f16"),
                write_only_types=[Int32], read_only_args=[acc[2 * i + 1], acc[2 * i]],
            )  # fmt: skip

    def multiply(self, acc, mmas, rA, rB):
        """Issues acc = A @ B for fragments (.., k blocks); mmas: [overwrite, add] or [add]."""
        warpgroup.fence()
        for kb in range(cute.size(rA, mode=[2])):
            cute.gemm(mmas[0] if kb == 0 else mmas[-1], acc, rA[None, None, kb], rB[None, None, kb], acc)
        warpgroup.commit_group()

    # Ping-pong: warp groups issue the WGMMAs of scores one after another, so that one has the tensor cores while the
    # other has its exponentials. All have equally many tiles.

    @cute.jit
    def start_pingpong(self, wg: Int32):
        if wg == self.config.num_wgs - 1:
            self.let_next_issue(wg)

    @cute.jit
    def wait_to_issue(self, wg: Int32):
        if const_expr(self.pingpong):
            cute.arch.barrier(barrier_id=PINGPONG + wg, number_of_threads=256)

    @cute.jit
    def let_next_issue(self, wg: Int32):
        if const_expr(self.pingpong):
            cute.arch.barrier_arrive(barrier_id=PINGPONG + (wg + 1) % self.config.num_wgs, number_of_threads=256)

    @cute.jit
    def end_pingpong(self, wg: Int32):
        if wg == 0:
            self.wait_to_issue(wg)

    # Device: items. Here, and unless a kernel has others, they are tiles of queries. `args` are the kernel's.

    @cute.jit
    def items(self, args) -> Int32:
        s = args.scores
        return cute.ceil_div(s.num_q, self.tile_q) * s.heads * s.batch

    @cute.jit
    def turns(self, args) -> Int32:
        """How many items this CTA does."""
        items, (ctas, _, _) = self.items(args), cute.arch.grid_dim()
        return items // ctas + Int32(self.in_turn(items // ctas) < items)

    @cute.jit
    def in_turn(self, turn: Int32) -> Int32:
        """The number of this CTA's item in a turn. Every second turn goes backwards, because items may get shorter."""
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        return turn * ctas + (cta if turn % 2 == 0 else ctas - 1 - cta)

    @cute.jit
    def item(self, turn: Int32, args):
        rank, head = self.rank_and_head(self.in_turn(turn), args.scores)
        return self.item_at(self.tile_of(rank, head, args.scores), head, args.scores)

    @cute.jit
    def rank_and_head(self, i: Int32, s: ScoreArgs):
        """(rank of the tile in its head, head) of the i-th item, where the first ranks have most work.

        If work differs, all heads of a rank come before the next rank.
        """
        tiles, heads = cute.ceil_div(s.num_q, self.tile_q), s.heads * s.batch
        if const_expr(self.problem.band or self.problem.mask):
            rank, head = i // heads, i % heads
        else:
            rank, head = i % tiles, i // tiles
        head = heads - 1 - head  # in backward, ds of the last heads may still be in the L2; not measured alone
        return rank, Head(head // s.heads, head % s.heads, head % s.heads // s.group)

    @cute.jit
    def tile_of(self, rank: Int32, head: Head, s: ScoreArgs) -> Int32:
        if const_expr(self.problem.ordered):
            return load_at(self.start(s.order, head), Int64(rank) * s.order.row)
        if const_expr(self.problem.band and self.rows_are_queries):
            return cute.ceil_div(s.num_q, self.tile_q) - 1 - rank  # with causality, the last tiles have most keys
        return rank

    @cute.jit
    def item_at(self, tile: Int32, head: Head, s: ScoreArgs) -> Item:
        first, last = self.key_tiles(s, tile * self.tile_q, self.tile_q, self.tile_k)
        return Item(head, tile, first, last)

    @cute.jit
    def key_tiles(self, args: ScoreArgs, q0: Int32, queries: cutlass.Constexpr[int], tile: cutlass.Constexpr[int]):
        """[first, last) tile of keys with keys that take part in queries q0...; at least one."""
        first, end = Int32(0), args.num_k
        if const_expr(self.problem.band):
            first = cutlass.max(q0 - args.left, 0)
            end = cutlass.min(cutlass.min(q0 + queries, args.num_q) + args.right, args.num_k)
        first = cutlass.min(first, args.num_k - 1) // tile
        return first, cutlass.max(cute.ceil_div(cutlass.max(end, 0), tile), first + 1)

    @cute.jit
    def query_tiles(self, args: ScoreArgs, k0: Int32, keys: cutlass.Constexpr[int], tile: cutlass.Constexpr[int]):
        """The same for tiles of queries, but maybe none."""
        first, end = Int32(0), args.num_q
        if const_expr(self.problem.band):
            first = cutlass.max(k0 - args.right, 0)
            end = cutlass.max(cutlass.min(cutlass.min(k0 + keys, args.num_k) + args.left, args.num_q), first)
        return first // tile, first // tile if end == first else cute.ceil_div(end, tile)

    # Device: loads

    def part(self, atom, shared, tensor, tile: SwizzledTile):
        """(shared memory per stage, tiles of `tensor` along rows and columns), for `load`."""
        tiles = cute.local_tile(tensor, (tile.rows, tile.columns), (None, None))
        return cpasync.tma_partition(
            atom[0], 0, cute.make_layout(1), cute.group_modes(shared, 0, 2), cute.group_modes(tiles, 0, 2)
        )

    def load(self, atom, part, row, column, stage, barrier, cache_policy=None):
        shared, tiles = part
        cute.copy(
            atom[0], tiles[None, row, column], shared[None, stage], tma_bar_ptr=barrier, cache_policy=cache_policy
        )

    @cute.jit
    def of_head(self, coordinates: cute.Tensor, head: Int32, batch: Int32):
        return coordinates[None, None, head, batch]

    @cute.jit
    def score_parts(self, atoms: list, tiles: ScoreTiles, args: ScoreArgs, head: Head) -> list:
        parts = []
        for tile, shared, t in ((self.bias, tiles.bias, args.bias), (self.mask, tiles.mask, args.mask)):
            if const_expr(tile is not None):
                h = head.query_head if t.head != 0 else Int32(0)
                b = head.batch if t.batch != 0 else Int32(0)
                atom = atoms[len(parts)]
                parts.append(self.part(atom, shared, self.of_head(atom[1], h, b), tile))
        return parts

    @cute.jit
    def load_scores(self, atoms: list, parts: list, tile_q, tile_k, stage, barrier, policy, is_full):
        """Loads bias and mask. policy: of the bias; is_full: 1 if the mask is not needed, else 0; None without one."""
        if const_expr(self.bias is not None):
            self.load(atoms[0], parts[0], tile_q, tile_k, stage, barrier, policy)
        if const_expr(self.mask is not None):
            if is_full == 0:
                self.load(atoms[-1], parts[-1], tile_q, tile_k, stage, barrier)

    @cute.jit
    def bias_policy(self, args: ScoreArgs):
        """The L2 cache policy for a bias: one that is not broadcast is read once."""
        if const_expr(self.bias is None):
            return None
        t = args.bias
        return Int64(EVICT_NORMAL) if t.head == 0 or t.batch == 0 else Int64(EVICT_FIRST)

    # Statistics of rows: the shift of the scores, and delta. 0 for queries past the last one.

    @cute.jit
    def stats_atom(self, stats: cute.Pointer, row: Int64, args: ScoreArgs):
        """Loads one of the two for the queries of a tile."""
        row, heads = cute.assume(row, divby=4), args.batch * args.heads
        layout = cute.make_layout((args.num_q, heads, 2), stride=(1, row, cute.assume(row * heads, divby=4)))
        box, op = cute.make_layout((self.tile_q,)), cpasync.CopyBulkTensorTileG2SOp()
        atom, coordinates = cpasync.make_tiled_tma_atom(op, cute.make_tensor(stats, layout), box, (self.tile_q,))
        return atom, coordinates

    def allocate_stats(self, smem):
        """(queries, 2, stages)"""
        return smem.allocate_tensor(Float32, cute.make_layout((self.tile_q, 2, self.config.num_stages)), 128)

    @cute.jit
    def load_stats(self, atom, shared: cute.Tensor, args: ScoreArgs, head: Head, tile: Int32, stage: Int32, barrier):
        for i in cutlass.range_constexpr(2):
            stats = atom[1][None, head.batch * args.heads + head.query_head, i]
            tiles = cute.local_tile(stats, (self.tile_q,), (None,))
            part = cpasync.tma_partition(
                atom[0], 0, cute.make_layout(1), cute.group_modes(shared[None, i, None], 0, 1),
                cute.group_modes(tiles, 0, 1),
            )  # fmt: skip
            cute.copy(atom[0], part[1][None, tile], part[0][None, stage], tma_bar_ptr=barrier)

    @property
    def score_bytes(self) -> int:
        return sum(tile.bytes for tile in (self.bias, self.mask) if tile is not None)

    def score_layouts(self) -> list:
        return [tile.layout(self.config.num_stages) for tile in (self.bias, self.mask) if tile is not None]

    def allocate_scores(self, smem, layouts: list) -> ScoreTiles:
        shared, i = [], 0
        for tile in (self.bias, self.mask):
            shared.append(tile.allocate(smem, layouts[i]) if tile is not None else None)
            i += tile is not None
        return ScoreTiles(*shared)

    def pipeline(self, num_stages: int, num_bytes: int, num_wgs: int | None = None):
        """num_wgs: the warp groups that read each stage; None for all."""
        warps = 4 * (self.config.num_wgs if num_wgs is None else num_wgs)
        return pipeline.PipelineTmaAsync.create(
            num_stages=num_stages, tx_count=num_bytes, cta_layout_vmnk=cute.make_layout((1, 1, 1, 1)),
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, warps), defer_sync=True,
        )  # fmt: skip

    def allocate_items(self, smem):
        """(words, warp groups): what `produce_own` tells a warp group of its item. In front of the first tile."""
        words = len(Head._fields) + 2
        return smem.allocate_tensor(Int32, cute.make_layout((words, self.config.num_wgs)), 16)

    def own_pipeline(self, tiles: int):
        """Each warp group has a stage, for its `tiles` own tiles of an item, and waits for no other warp group."""
        return self.pipeline(self.config.num_wgs, tiles * self.own.bytes, 1)

    @cute.jit
    def produce_own(self, loads, own, sItems, args, at_least: cutlass.Constexpr[int]):
        """Loads the own tiles of all items. loads: [(atom, shared memory)]; at_least: see `last_of`."""
        wgs = self.config.num_wgs
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, wgs)
        for turn in cutlass.range(self.turns(args), unroll=1):
            item = self.item(turn, args)
            words = (*item.head, item.tile, self.last_of(item, args, at_least))
            head = item.head.query_head if const_expr(self.rows_are_queries) else item.head.key_head
            parts = [self.part(atom, to, self.of_head(atom[1], head, item.head.batch), self.own) for atom, to in loads]
            for w in cutlass.range_constexpr(wgs):
                own.sync_object_empty.wait(state.index, state.phase)
                with cute.arch.elect_one():
                    for i in cutlass.range_constexpr(len(words)):
                        sItems[i, w] = words[i]
                    barrier = own.producer_get_barrier(state)
                    cute.arch.mbarrier_arrive_and_expect_tx(barrier, len(loads) * self.own.bytes)
                for a in cutlass.range_constexpr(len(loads)):
                    self.load(loads[a][0], parts[a], item.tile * wgs + w, 0, w, own.producer_get_barrier(state))
                state.advance()
        own.producer_tail(state)

    def own_state(self, wg: Int32):
        """A consumer's state in `own_pipeline`."""
        return pipeline.PipelineState(self.config.num_wgs, Int32(0), wg, Int32(0))

    @cute.jit
    def own_item(self, args, sItems: cute.Tensor, own, state):
        """A consumer's next item, once its own tiles are loaded; its last tile is that of `last_of`."""
        own.consumer_wait(state)
        *head, tile, last = (read_word(sItems[i, None], state.index) for i in range(len(Head._fields) + 2))
        return self.item_at(tile, Head(*head), args.scores)._replace(last=last)

    def own_operands(self, n: int, shared: list, wg: Int32) -> list:
        """[(MMAs of n columns, operand)] for own tiles: as many as fit in registers, for `load_own`."""
        operands = []
        for i, tiles in enumerate(shared):
            in_registers = i < self.own_in_registers
            mmas = [self.mma_of_scores(n, add, in_registers) for add in (False, True)]
            if in_registers:
                operands.append((mmas, self.operand(self.d)))
            else:
                fragments = mmas[0].make_fragment_A(mmas[0].get_slice(0).partition_A(tiles))
                operands.append((mmas, fragments[None, None, None, wg]))
        return operands

    @cute.jit
    def load_own(self, operands: list, shared: list, wg: Int32, thread: Int32, own, state):
        """Loads own tiles into registers. Gives them back if these are all."""
        for (_, operand), tiles in zip(operands[: self.own_in_registers], shared, strict=False):
            base = self.own.rows_base(tiles[None, None, wg].iterator, Int32(0), thread)
            for j in cutlass.range_constexpr(0, self.d // 8, 2):
                values = self.own.load(self.own.rows_at(base, j), False)
                for i in cutlass.range_constexpr(8):
                    operand[4 * j + i] = values[i]
        if const_expr(self.own_in_registers == len(shared)):
            state = self.release_own(own, state)
        return state

    @cute.jit
    def finish_own(self, shared: list, own, state):
        """Gives own tiles back, unless `load_own` did."""
        if const_expr(self.own_in_registers < len(shared)):
            state = self.release_own(own, state)
        return state

    @cute.jit
    def release_own(self, own, state):
        """Returns the state for the next item."""
        self.release(own, state)
        for _ in cutlass.range_constexpr(self.config.num_wgs):
            state.advance()
        return state

    @property
    def registers(self) -> tuple[int, int]:
        """(registers per thread of the producer, registers per thread of the consumers)"""
        return REGISTERS[self.config.num_wgs]

    # Device: scores

    @cute.jit
    def position(self, block: Block, i: cutlass.Constexpr[int]):
        """(query, key) of value i of an accumulator."""
        row = pair_rows(block.thread) + i // 2 % 2 * 8
        column = block.thread % 4 * 2 + (i // 4 * 8 + i % 2)
        if const_expr(self.rows_are_queries):
            return block.q0 + row, block.k0 + column
        return block.q0 + column, block.k0 + row

    @cute.jit
    def scores(
        self, acc: cute.Tensor, args: ScoreArgs, tiles: ScoreTiles, stage: Int32, block: Block, shift, tanhs,
        is_full=None,
    ):  # fmt: skip
        """acc = log2(e) * x - shift for acc = q k^T; or x / `unit_of_scores` without a shift.

        shift, and tanhs for the softcap's tanh, are tensors like acc, or None. is_full: 1 if the mask leaves all keys,
        else 0; None if unknown.
        """
        unit = 1.0 if const_expr(shift is None) else LOG2_E
        factor = args.scale * unit
        if const_expr(self.problem.softcap):
            inner, factor = args.scale / args.softcap, args.softcap * unit
            for i in cutlass.range_constexpr(cute.size(acc)):
                acc[i] = tanh(acc[i] * inner)
                if const_expr(tanhs is not None):
                    tanhs[i] = acc[i]
        if const_expr(self.are_scaled_later and shift is None):
            if args.scale <= 0.0:
                for i in cutlass.range_constexpr(cute.size(acc)):
                    acc[i] = acc[i] * factor
        elif const_expr(self.problem.bias_dtype is None):
            for i in cutlass.range_constexpr(cute.size(acc)):
                acc[i] = acc[i] * factor - (0.0 if const_expr(shift is None) else shift[i])
        elif const_expr(self.bias is None):
            self.add_global_bias(acc, factor, args, block, shift)
        elif const_expr(self.bias.itemsize == 2):
            self.add_bias(acc, factor, tiles.bias[None, None, stage].iterator, block, shift)
        else:
            self.add_fp32_bias(acc, factor, tiles.bias[None, None, stage].iterator, block, shift)
        if const_expr(self.problem.mask and is_full is None):
            self.mask_out(acc, args, tiles, stage, block)
        elif const_expr(self.problem.mask):
            if is_full == 0:
                self.mask_out(acc, args, tiles, stage, block)
        if self.cuts(args, block):
            for i in cutlass.range_constexpr(cute.size(acc)):
                if not self.takes_part(args, *self.position(block, i)):
                    acc[i] = -Float32.inf

    @property
    def are_scaled_later(self) -> bool:
        """True if forward multiplies by the scale where it multiplies by log2(e), which takes no instructions."""
        return self.problem.bias_dtype is None and not self.problem.softcap

    @cute.jit
    def unit_of_scores(self, args: ScoreArgs) -> Float32:
        """Positive, so that a row's largest value is that of its largest score."""
        if const_expr(not self.are_scaled_later):
            return Float32(1.0)
        return Float32(1.0) if args.scale <= 0.0 else args.scale

    @cute.jit
    def cuts(self, args: ScoreArgs, block: Block) -> Boolean:
        """True if some keys of the block take no part for another reason than the mask."""
        last_k = block.k0 + block.keys - 1
        cut = last_k >= args.num_k
        if const_expr(self.problem.band):
            last_q = block.q0 + block.queries - 1
            cut = cut | (block.k0 + args.left < last_q) | (last_k > block.q0 + args.right)
        return cut

    @cute.jit
    def takes_part(self, args: ScoreArgs, q: Int32, k: Int32) -> Boolean:
        part = k < args.num_k
        if const_expr(self.problem.band):
            part = part & (k + args.left >= q) & (k <= q + args.right)
        return part

    def fragment(self, tile: SwizzledTile, pointer, block: Block):
        """A function from an even j to the address of columns 8 j to 8 j + 15 of the accumulator."""
        if self.rows_are_queries:
            base = tile.rows_base(pointer, block.wg * BLOCK, block.thread)
            return lambda j: tile.rows_at(base, j)
        base = tile.columns_base(pointer, block.wg * BLOCK, block.thread)
        return lambda j: tile.columns_at(base, j)

    @cute.jit
    def add(self, acc: cute.Tensor, i: cutlass.Constexpr[int], factor: Float32, bias: Float32, shift):
        added = bias
        if const_expr(shift is not None):
            added = bias * LOG2_E - shift[i]
        acc[i] = acc[i] * factor + added

    @cute.jit
    def add_bias(self, acc: cute.Tensor, factor: Float32, bias: cute.Pointer, block: Block, shift):
        address = self.fragment(self.bias, bias, block)
        for j in cutlass.range_constexpr(0, cute.size(acc) // 4, 2):
            values = self.bias.load(address(j), not self.rows_are_queries).to(Float32)
            for i in cutlass.range_constexpr(8):
                self.add(acc, 4 * j + i, factor, values[i], shift)

    @cute.jit
    def add_fp32_bias(self, acc: cute.Tensor, factor: Float32, bias: cute.Pointer, block: Block, shift):
        row, column = pair_rows(block.thread), block.thread % 4 * 2
        for i in cutlass.range_constexpr(0, cute.size(acc), 2):
            r, c = row + i // 2 % 2 * 8 + block.wg * BLOCK, column + i // 4 * 8
            if const_expr(self.rows_are_queries):
                values = self.bias.element(bias, r, c, 2)
                for n in cutlass.range_constexpr(2):
                    self.add(acc, i + n, factor, values[n], shift)
            else:
                for n in cutlass.range_constexpr(2):
                    self.add(acc, i + n, factor, self.bias.element(bias, c + n, r, 1)[0], shift)

    @cute.jit
    def add_global_bias(self, acc: cute.Tensor, factor: Float32, args: ScoreArgs, block: Block, shift):
        base = self.start(args.bias, block.head)
        for i in cutlass.range_constexpr(cute.size(acc)):
            q, k = self.position(block, i)
            bias = Float32(0.0)
            if (q < args.num_q) & (k < args.num_k):
                bias = load_at(base, Int64(q) * args.bias.row + Int64(k) * args.bias.column).to(Float32)
            self.add(acc, i, factor, bias, shift)

    def per_row(self, values: cute.Tensor):
        """(2,) values of the thread's two rows, as a tensor like an accumulator."""
        return cute.make_tensor(values.iterator, cute.make_layout((2, 2, self.config.tile // 8), stride=(0, 1, 0)))

    def per_column(self, values: cute.Pointer, thread: Int32):
        """Values of an accumulator's columns, as a tensor like an accumulator."""
        layout = cute.make_layout((2, 2, self.config.tile // 8), stride=(1, 0, 8))
        return cute.make_tensor(values + thread % 4 * 2, layout)

    @cute.jit
    def start(self, t: Strided, head: Head) -> cute.Pointer:
        return t.base + (Int64(head.batch) * t.batch + Int64(head.query_head) * t.head)

    @cute.jit
    def mask_out(self, acc: cute.Tensor, args: ScoreArgs, tiles: ScoreTiles, stage: Int32, block: Block):
        if const_expr(self.mask is None):
            base = self.start(args.mask, block.head)
            for i in cutlass.range_constexpr(cute.size(acc)):
                q, k = self.position(block, i)
                keep = Int32(0)
                if (q < args.num_q) & (k < args.num_k):
                    keep = load_at(base, Int64(q) * args.mask.row + Int64(k) * args.mask.column).to(Int32)
                if keep == 0:
                    acc[i] = -Float32.inf
        else:
            mask = tiles.mask[None, None, stage].iterator
            row, column = pair_rows(block.thread), block.thread % 4 * 2
            for i in cutlass.range_constexpr(0, cute.size(acc), 2):
                r, c = row + i // 2 % 2 * 8 + block.wg * BLOCK, column + i // 4 * 8
                if const_expr(self.rows_are_queries):
                    pair = cute.recast_tensor(self.mask.element(mask, r, c, 2), cutlass.Uint16)[0].to(Int32)
                    keeps = [pair & 0xFF, pair & 0xFF00]
                else:
                    keeps = [self.mask.element(mask, c + n, r, 1)[0] for n in range(2)]
                for n in cutlass.range_constexpr(2):
                    if keeps[n] == 0:
                        acc[i + n] = -Float32.inf

    # Device: results

    @cute.jit
    def write_rows(self, acc: cute.Tensor, to: cute.Pointer, stride: Int64, num_rows: Int32, d: Int32, thread: Int32):
        """Rounds an accumulator of d columns and stores its first num_rows rows, from registers: row 0 at `to`.

        Four lanes have two columns of each 8 columns of a row. They exchange them, so that each stores 16 bytes.
        """
        lane = thread % 4
        for r in cutlass.range_constexpr(2):
            row = pair_rows(thread) + 8 * r
            for j in cutlass.range_constexpr(0, self.d // 8, 4):
                values = cute.make_rmem_tensor((8,), self.dtype)
                for i in cutlass.range_constexpr(8):
                    values[i] = acc[4 * (j + i // 2) + 2 * r + i % 2].to(self.dtype)
                words = cute.recast_tensor(values, Int32)
                transpose(words, lane)
                if (row < num_rows) & (8 * (j + lane) < d):
                    vector_at(to, row * stride + 8 * (j + lane), 8).store(values.load())

    @cute.jit
    def write_queries(self, acc: cute.Tensor, to: Strided, args: ScoreArgs, block: Block):
        """Stores an accumulator as the block's rows of a tensor like q."""
        base = self.start(to, block.head) + Int64(block.q0) * to.row
        self.write_rows(acc, base, to.row, args.num_q - block.q0, args.d, block.thread)
