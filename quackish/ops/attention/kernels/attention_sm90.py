"""What the kernels of attention share: tensors, MMAs, loads and results. Other files have items, own tiles and scores.

A CTA has a tile of queries and walks over tiles of keys, or the reverse. The accumulator of q k^T has rows of queries
(`rows_are_queries`) or of keys.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, const_expr, pipeline
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers as sm90

from quackish.kernels.arguments import DTYPES, fake_args
from quackish.kernels.memory import vector_at
from quackish.ops.attention.kernels.items import AttentionItems, Head
from quackish.ops.attention.kernels.own_tiles import OwnTiles
from quackish.ops.attention.kernels.scores import AttentionScores, Block, ScoreTiles, pair_rows
from quackish.ops.attention.kernels.swizzled_tile import SwizzledTile
from quackish.ops.attention.problems import BLOCK, REGISTERS, AttentionConfig, ScoreArgs, Strided, own_in_registers

# L2 cache policies as encoded by PTX's `createpolicy`
EVICT_NORMAL, EVICT_FIRST = 0x10F0_0000_0000_0000, 0x12F0_0000_0000_0000
PINGPONG = 4  # the first of the barriers for it


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


class AttentionSm90(AttentionItems, OwnTiles, AttentionScores):
    rows_are_queries: bool
    pingpong = False

    def __init__(self, problem, config: AttentionConfig):
        self.problem, self.config = problem, config
        self.dtype, self.d = DTYPES[problem.dtype], problem.d
        self.own_in_registers = own_in_registers(problem, config)
        rows, other = config.rows, config.tile
        self.tile_q, self.tile_k = (rows, other) if self.rows_are_queries else (other, rows)
        self.own = SwizzledTile(self.dtype, BLOCK, self.d)  # a warp group's rows of q, k, v or do
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

    @property
    def registers(self) -> tuple[int, int]:
        """(registers per thread of the producer, registers per thread of the consumers)"""
        return REGISTERS[self.config.num_wgs]

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
