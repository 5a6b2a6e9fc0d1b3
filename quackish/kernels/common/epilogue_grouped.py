"""The epilogues of grouped GEMMs: a step of an MLP each, on 64 rows of a tile of one group."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync

from quackish.configs.grouped_gemm import DSCALES_COLUMNS, DownArgs, DownBackwardArgs, UpArgs, grouped_gemm_buffers
from quackish.kernels.common.activations import factor, value
from quackish.kernels.common.group_walk import uniform
from quackish.kernels.common.rows import vector_at
from quackish.kernels.common.tile_store import TileStore, column_of, row_of, thread_rows

# One TMA tensor for the rows of all groups: address(r, c, i, j) = base + r * ld + c + i * (2^34 - ld) + j * ld. With
# i = EXTENT, i * 2^34 wraps to 0 in 64 bits, which leaves (r - EXTENT + j) * ld + c. With j = begin + length and
# r = EXTENT - length + row that is the group's row `row`, and rows past the group's end are past the extent: loads
# return 0 there, and nothing is stored.
EXTENT, UNBOUNDED = 2**30, 2**31 - 1

BATCH = 16  # values of the preactivation that a thread loads at once


@cute.jit
def ragged(base: cute.Pointer, cols: Int32, ld: Int64, rows_first: cutlass.Constexpr[bool]):
    """A (rows, cols, i, j) or (cols, rows, i, j) tensor."""
    ld = cute.assume(ld, divby=8)
    back = cute.assume(Int64(2**34) - ld, divby=8)
    if const_expr(rows_first):
        return cute.make_tensor(base, cute.make_layout((EXTENT, cols, UNBOUNDED, UNBOUNDED), stride=(ld, 1, back, ld)))
    return cute.make_tensor(base, cute.make_layout((cols, EXTENT, UNBOUNDED, UNBOUNDED), stride=(1, ld, back, ld)))


@cute.jit
def prefetch(at: cute.Pointer):
    cute.arch.inline_ptx("prefetch.global.L2 [{$r0}];", read_only_args=[at.toint()])


class GroupBlock(NamedTuple):
    """64 rows of a tile, of which one consumer warp group has the accumulator, and a thread of that warp group."""

    row0: Int32  # along m: in the group; along k: of D[group]
    col0: Int32  # of D, and of its gate and of its up columns
    begin: Int32  # the group's first row
    length: Int32  # its rows
    group: Int32
    groups: Int32
    is_filled: Boolean  # D is `fill` before the activation: rows of no group, or illegal offsets
    fill: Float32
    n: Int32  # columns of D, or of gate
    wg: Int32  # from 1
    thread: Int32


class GroupOutput(NamedTuple):
    d_atoms: list  # of one output
    staging: cute.Tensor


class GroupStore(TileStore):
    """Stores tiles of a group's rows, or of its matrix D[group]."""

    def __init__(self, problem, config):
        super().__init__(problem.out_dtype, config, problem.accumulate)
        self.along_m = problem.along == "m"
        self.num_buffers = grouped_gemm_buffers(problem, config)

    @cute.jit
    def copy_out(self, out: GroupOutput, buffer: Int32, block: GroupBlock, j: cutlass.Constexpr[int]):
        atom, coordinates = out.d_atoms[0]
        row, col = block.row0, block.col0 + j * self.piece_n
        if const_expr(self.along_m):
            rows = coordinates[None, None, EXTENT, block.begin + block.length]
            row += EXTENT - block.length
        else:
            rows = coordinates[None, None, block.group]
        gD = cute.local_tile(cute.domain_offset((row, col), rows), (64, self.piece_n), (0, 0))
        sD, gD = cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(out.staging, 0, 2), cute.group_modes(gD, 0, 2)
        )
        cute.copy(atom, sD[None, buffer], gD)


class GroupEpilogue:
    """Along k, and "down": stores D, plus a bias along m."""

    def __init__(self, problem, config):
        self.problem, self.config, self.output = problem, config, GroupStore(problem, config)
        self.tile_cols = config.tile_n // (2 if self.pairs else 1)  # of D

    @property
    def pairs(self) -> bool:
        """Whether a tile has gate and up columns, each half of it."""
        return self.problem.epilogue == "up" and self.problem.gated

    @cute.jit
    def outputs(self, args, d: cute.Pointer, n: Int32):
        """The output matrices of (rows, n) along m: [(base, leading dimension)]."""
        return [(d, n)]

    @cute.jit
    def add_bias(self, acc, bias: cute.Pointer, width: Int32, first: Int32, block: GroupBlock, half: cutlass.Constexpr):
        """Adds bias[group, first + column], of `width` columns, to part `half` of acc, as wide as D's tile."""
        row = Int64(cutlass.min(block.group, block.groups - 1)) * width + first
        values = const_expr(self.tile_cols // 2)
        for q in cutlass.range_constexpr(values // 4):
            col = cutlass.min(block.col0 + column_of(4 * q, block.thread), block.n - 2)
            two = vector_at(bias, row + col, 2).load()
            for v in cutlass.range_constexpr(4):
                i = const_expr(half * values + 4 * q + v)
                acc[i] = acc[i] + two[v % 2]

    def prepare(self, args, block: GroupBlock):
        """Called before the products."""

    @cute.jit
    def __call__(self, acc, args: DownArgs, outs: list, staging, block: GroupBlock):
        if const_expr(self.problem.biased):
            self.add_bias(acc, args.bias, block.n, 0, block, 0)
        if block.is_filled:
            acc.fill(block.fill)
        for j in cutlass.range_constexpr(self.output.num_pieces):
            self.output(acc, j, GroupOutput([outs[0]], staging), block)

    @cute.jit
    def row_scales(self, scales: cute.Pointer, block: GroupBlock):
        """Of the thread's two rows; 0 where they are not in a group."""
        s = cute.make_rmem_tensor((2,), Float32)
        for r in cutlass.range_constexpr(2):
            s[r] = Float32(0.0)
            row = block.row0 + thread_rows(block.thread) + 8 * r
            if row < block.length and not block.is_filled:
                s[r] = (scales + (block.begin + row)).load()
        return s


class Up(GroupEpilogue):
    """Stores the preactivation, with `keeps`, and its scaled activation."""

    @cute.jit
    def outputs(self, args: UpArgs, d: cute.Pointer, n: Int32):
        """act, and the preactivation's gate and up."""
        found = [(d, n)]
        if const_expr(self.problem.keeps):
            p, width = args.preactivation, n * 2 if const_expr(self.problem.gated) else n
            found.append((p, width))
            if const_expr(self.problem.gated):
                found.append((p + n, width))
        return found

    @cute.jit
    def __call__(self, acc, args: UpArgs, outs: list, staging, block: GroupBlock):
        p, gated = self.problem, const_expr(self.problem.gated)
        half = const_expr(cute.size(acc) // (2 if gated else 1))
        pieces = const_expr(self.tile_cols // self.output.piece_n)
        if const_expr(p.biased):
            width = block.n * 2 if gated else block.n
            self.add_bias(acc, args.bias, width, 0, block, 0)
            if const_expr(gated):
                self.add_bias(acc, args.bias, width, block.n, block, 1)
        if block.is_filled:
            acc.fill(block.fill)
        if const_expr(p.keeps):
            for j in cutlass.range_constexpr(self.output.num_pieces):
                part = block._replace(col0=block.col0 - (j // pieces) * self.tile_cols)
                self.output(acc, j, GroupOutput([outs[1 + j // pieces]], staging), part, j)
        scales = None
        if const_expr(p.scaled):
            scales = self.row_scales(args.scales, block)
        for v in cutlass.range_constexpr(half):
            a, _ = value(acc[v], p.activation)
            if const_expr(gated):
                u, _ = factor(acc[half + v], p.activation)
                a = a * u
            if const_expr(p.scaled):
                a = a * scales[row_of(v)]
            acc[v] = a
        turn = const_expr(self.output.num_pieces if p.keeps else 0)
        for j in cutlass.range_constexpr(pieces):
            self.output(acc, j, GroupOutput([outs[0]], staging), block, turn + j)


class DownBackward(GroupEpilogue):
    """From dact, the gradient of the scaled activation: the preactivation's gradient, the scaled activation once more,
    and per row and tile the sum of dact * activation."""

    @cute.jit
    def outputs(self, args: DownBackwardArgs, d: cute.Pointer, n: Int32):
        """act, and the gradients of gate and up."""
        width = n * 2 if const_expr(self.problem.gated) else n
        found = [(args.act, n), (d, width)]
        if const_expr(self.problem.gated):
            found.append((d + n, width))
        return found

    @cute.jit
    def __call__(self, acc, args: DownBackwardArgs, outs: list, staging, block: GroupBlock):
        if block.is_filled:
            acc.fill(block.fill)
        p, gated = self.problem, const_expr(self.problem.gated)
        per_piece = const_expr(self.output.piece_n // 2)  # of a thread's values
        scales, sums = None, None
        if const_expr(p.scaled):
            scales = self.row_scales(args.scales, block)
            sums = cute.make_rmem_tensor((2,), Float32)
        grads = [cute.make_rmem_tensor(acc.layout, self.output.dtype) for _ in range(2 if gated else 1)]
        rows = self.rows_of(args.preactivation, block)
        columns = uniform(block.n - block.col0)
        for j in cutlass.range_constexpr(self.output.num_pieces):
            if const_expr(p.scaled):
                sums.fill(0.0)
            for v in cutlass.range_constexpr(j * per_piece, (j + 1) * per_piece):
                if const_expr(v % BATCH == 0):
                    z = [self.preactivation(of_part, v, columns, block.thread) for of_part in rows]
                r, dact = const_expr(row_of(v)), acc[v]
                scaled = dact * scales[r] if const_expr(p.scaled) else dact
                f, df = value(z[0][v % BATCH].to(Float32), p.activation)
                if const_expr(gated):
                    u, du = factor(z[1][v % BATCH].to(Float32), p.activation)
                    grads[1][v] = (scaled * (f * du)).to(self.output.dtype)
                    df, f = df * u, f * u
                grads[0][v] = (scaled * df).to(self.output.dtype)
                if const_expr(p.scaled):
                    sums[r] = sums[r] + dact * f
                    f = f * scales[r]
                acc[v] = f
            if const_expr(p.scaled):
                self.store_sums(sums, args.dscales_parts, block, block.col0 + j * DSCALES_COLUMNS)
            for k, t in enumerate([acc, *grads]):
                self.output(t, j, GroupOutput([outs[k]], staging), block, j * (1 + len(grads)) + k)

    @cute.jit
    def prepare(self, args: DownBackwardArgs, block: GroupBlock):
        """Brings the preactivation into the L2: two threads per row."""
        row = cutlass.min(block.row0 + block.thread // 2, block.length - 1)
        width = block.n * 2 if const_expr(self.problem.gated) else block.n
        start = Int64(block.begin + row) * width + block.col0
        for part in cutlass.range_constexpr(2 if self.problem.gated else 1):
            for col in cutlass.range_constexpr(0, self.tile_cols, 128):
                at = col + block.thread % 2 * 64
                if block.col0 + at < block.n:
                    prefetch(args.preactivation + (start + part * block.n + at))

    @cute.jit
    def preactivation(self, rows: list, first: cutlass.Constexpr[int], columns: Int32, thread: Int32):
        """BATCH values of the thread from value `first` on, 0 past the matrix. rows: where its two rows start."""
        z = cute.make_rmem_tensor((BATCH,), rows[0].dtype)
        for q in cutlass.range_constexpr(BATCH // 2):
            v = const_expr(first + 2 * q)  # and v + 1: two columns of a row
            z[2 * q], z[2 * q + 1] = z.element_type(0.0), z.element_type(0.0)
            if v // 4 * 8 < columns:  # a multiple of 8; uniform, as in StoreWithResidual
                two = vector_at(rows[row_of(v)], v // 4 * 8, 2).load()
                z[2 * q], z[2 * q + 1] = two[0], two[1]
        return z

    @cute.jit
    def rows_of(self, z: cute.Pointer, block: GroupBlock):
        """Where the thread's two rows start, past the group's end its last row: of gate, and of up."""
        width = block.n * 2 if const_expr(self.problem.gated) else block.n
        col = block.col0 + column_of(0, block.thread)
        rows = []
        for part in cutlass.range_constexpr(2 if self.problem.gated else 1):
            of_part = []
            for r in cutlass.range_constexpr(2):
                row = cutlass.min(block.row0 + thread_rows(block.thread) + 8 * r, block.length - 1)
                of_part.append(z + (Int64(block.begin + row) * width + (part * block.n + col)))
            rows.append(of_part)
        return rows

    @cute.jit
    def store_sums(self, sums, parts: cute.Pointer, block: GroupBlock, col: Int32):
        """Stores a row's partial sum from column col on: that of the four threads that share the row."""
        for r in cutlass.range_constexpr(2):
            total = sums[r]
            for offset in (1, 2):
                total = total + cute.arch.shuffle_sync_bfly(total, offset=offset)
            row = block.row0 + thread_rows(block.thread) + 8 * r
            if block.thread % 4 == 0 and row < block.length and col < block.n:
                at = Int64(block.begin + row) * cute.ceil_div(block.n, DSCALES_COLUMNS) + col // DSCALES_COLUMNS
                (parts + at).store(total)


def make_group_epilogue(problem, config) -> GroupEpilogue:
    return {"up": Up, "down": GroupEpilogue, "down_backward": DownBackward, "store": GroupEpilogue}[problem.epilogue](
        problem, config
    )
