"""The order in which attention's kernels start tiles of queries and of keys under a mask: those with most work first.

A tile has ORDERED queries or keys, and its work is the number of its blocks that are not EMPTY. Each CTA ranks the
tiles of one (Lq, Lk) matrix of the mask, or up to RANKED of them: longer matrices are in order in parts.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Int32, Int64

from quackish.kernels.arguments import fake_args
from quackish.kernels.dependent_launch import after_previous
from quackish.kernels.memory import load_at, store_at
from quackish.ops.attention.arguments import BLOCK, EMPTY, ORDERED, OrderArgs
from quackish.ops.attention.config import AttentionOrderConfig
from quackish.ops.attention.problems import AttentionOrderProblem

RANKED = 1024


class Side(NamedTuple):
    """A (num_rows, num_columns) matrix of a mask, whose tiles of rows are ranked: the mask's own or its transpose."""

    classes: cute.Pointer  # of blocks
    down: Int64  # strides of classes
    across: Int64
    num_rows: Int32
    num_columns: Int32
    out: cute.Pointer  # (matrices, tiles) int32


class AttentionOrder:
    def __init__(self, problem: AttentionOrderProblem, config: AttentionOrderConfig):
        self.problem, self.config = problem, config

    def fake_args(self):
        return fake_args(self.problem)

    @cute.jit
    def __call__(self, args: OrderArgs, stream: CUstream):
        parts = cute.ceil_div(cutlass.max(args.num_q, args.num_k), ORDERED * RANKED)
        self.kernel(args).launch(
            grid=[args.heads * args.batches, 2, parts], block=[self.config.threads, 1, 1], stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, args: OrderArgs):
        tid, _, _ = cute.arch.thread_idx()
        matrix, side, part = cute.arch.block_idx()
        smem = cutlass.memory.SmemAllocator()
        work = smem.allocate_tensor(Int32, cute.make_layout((RANKED,)), 16)
        after_previous()

        t = args.classes
        base = t.base + (Int64(matrix // args.heads) * t.batch + Int64(matrix % args.heads) * t.head)
        if side == 0:
            queries = Side(
                classes=base, down=t.row, across=t.column, num_rows=args.num_q, num_columns=args.num_k,
                out=args.of_queries,
            )  # fmt: skip
            self.order(work, queries, matrix, part, tid)
        else:
            keys = Side(
                classes=base, down=t.column, across=t.row, num_rows=args.num_k, num_columns=args.num_q,
                out=args.of_keys,
            )  # fmt: skip
            self.order(work, keys, matrix, part, tid)

    @cute.jit
    def order(self, work: cute.Tensor, side: Side, matrix: Int32, part: Int32, tid: Int32):
        """Ranks tiles of rows. work: (RANKED,) int32 in shared memory."""
        tiles, threads = cute.ceil_div(side.num_rows, ORDERED), self.config.threads
        rows, columns = cute.ceil_div(side.num_rows, BLOCK), cute.ceil_div(side.num_columns, BLOCK)
        first = part * RANKED
        count = cutlass.min(tiles - first, RANKED)
        for i in cutlass.range(tid // 32, count, threads // 32, unroll=1):
            blocks = Int32(0)
            for j in cutlass.range(tid % 32, columns, 32, unroll=4):
                for r in cutlass.range_constexpr(ORDERED // BLOCK):
                    row = (first + i) * (ORDERED // BLOCK) + r
                    if row < rows:
                        blocks += Int32(load_at(side.classes, Int64(row) * side.down + Int64(j) * side.across) != EMPTY)
            blocks = cute.arch.warp_reduction_sum(blocks)
            if tid % 32 == 0:
                work[i] = blocks
        cute.arch.barrier()
        for i in cutlass.range(tid, count, threads, unroll=1):
            own, rank = work[i], Int32(0)
            for j in cutlass.range(count, unroll=8):
                rank += Int32((work[j] > own) | ((work[j] == own) & (j < i)))
            store_at(side.out, Int64(matrix) * tiles + (first + rank), first + i)
