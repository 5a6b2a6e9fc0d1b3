"""Reads a bool mask once and classifies its blocks of 64 queries x 64 keys: EMPTY, MIXED or FULL.

A warp has two adjacent blocks: whole lines of 128 bytes, 8 KiB in flight. Rows and columns past the end are read as
the last ones, which changes no class.
"""

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Int32, Int64, const_expr

from quackish.kernels.arguments import fake_args
from quackish.kernels.dependent_launch import after_previous
from quackish.kernels.memory import load_at, store_at, vector_at
from quackish.ops.attention.arguments import BLOCK, EMPTY, FULL, MIXED, MaskArgs
from quackish.ops.attention.config import AttentionMaskConfig
from quackish.ops.attention.problems import AttentionMaskProblem

TRUE = 0x01010101  # four elements


class AttentionMask:
    def __init__(self, problem: AttentionMaskProblem, config: AttentionMaskConfig):
        self.problem, self.config = problem, config

    def fake_args(self):
        return fake_args(self.problem)

    @cute.jit
    def __call__(self, args: MaskArgs, stream: CUstream):
        pairs = cute.ceil_div(args.columns, 2 * BLOCK) * cute.ceil_div(args.rows, BLOCK) * args.heads * args.batches
        ctas = cute.ceil_div(pairs, self.config.num_warps)
        self.kernel(args, pairs).launch(
            grid=[ctas, 1, 1], block=[32 * self.config.num_warps, 1, 1], stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, args: MaskArgs, pairs: Int32):
        cta, _, _ = cute.arch.block_idx()
        warp, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()
        after_previous()
        pair = cta * self.config.num_warps + warp
        if pair < pairs:
            across, down = cute.ceil_div(args.columns, 2 * BLOCK), cute.ceil_div(args.rows, BLOCK)
            column, row, head = pair % across * 2, pair // across % down, pair // across // down
            mask = args.mask
            base = mask.base + (Int64(head // args.heads) * mask.batch + Int64(head % args.heads) * mask.head)
            if const_expr(self.problem.by_vectors):
                some, every = self.read_vectors(base, args, row * BLOCK, column * BLOCK, lane)
            else:
                some, every = self.read_elements(base, args, row * BLOCK, column * BLOCK, lane)
            blocks = cute.ceil_div(args.columns, BLOCK)
            for i in cutlass.range_constexpr(2):
                if lane == 0 and column + i < blocks:
                    found = Int32(FULL) if every[i] else (Int32(MIXED) if some[i] else Int32(EMPTY))
                    store_at(args.classes, (Int64(head) * down + row) * blocks + (column + i), found)

    @cute.jit
    def read_vectors(self, base: cute.Pointer, args: MaskArgs, row0: Int32, column0: Int32, lane: Int32):
        """(some, every) of two blocks, if any and if all elements are true. A lane reads 16 columns of each 4th row."""
        column = cutlass.min(column0 + lane % 8 * 16, args.columns - 16)
        raw = cute.make_rmem_tensor((16, BLOCK // 4), base.dtype)
        for i in cutlass.range_constexpr(BLOCK // 4):
            row = cutlass.min(row0 + lane // 8 + 4 * i, args.rows - 1)
            raw[None, i].store(vector_at(base, Int64(row) * args.mask.row + column, 16).load())
        words = cute.recast_tensor(raw, Int32)
        some, every = Int32(0), Int32(TRUE)
        for i in cutlass.range_constexpr(cute.size(words)):
            some, every = some | words[i], every & words[i]
        some = cute.arch.vote_ballot_sync(some != 0)
        every = cute.arch.vote_ballot_sync(every == TRUE)
        lanes = 0x0F0F0F0F  # of the first block
        return (
            [(some >> 4 * i) & lanes != 0 for i in range(2)],
            [(every >> 4 * i) & lanes == lanes for i in range(2)],
        )

    @cute.jit
    def read_elements(self, base: cute.Pointer, args: MaskArgs, row0: Int32, column0: Int32, lane: Int32):
        """The same for masks of any strides. A lane reads each 32nd column."""
        found = cute.make_rmem_tensor((2, 2), Int32)
        for i in cutlass.range_constexpr(2):
            found[i, 0], found[i, 1] = Int32(0), Int32(1)
        for r in cutlass.range(cutlass.min(args.rows - row0, BLOCK), unroll=4):
            of_row = base + Int64(row0 + r) * args.mask.row
            for j in cutlass.range_constexpr(4):
                column = cutlass.min(column0 + lane + 32 * j, args.columns - 1)
                keep = load_at(of_row, Int64(column) * args.mask.column).to(Int32)
                found[j // 2, 0], found[j // 2, 1] = found[j // 2, 0] | keep, found[j // 2, 1] & keep
        return (
            [cute.arch.vote_any_sync(found[i, 0] != 0) for i in range(2)],
            [cute.arch.vote_all_sync(found[i, 1] != 0) for i in range(2)],
        )
