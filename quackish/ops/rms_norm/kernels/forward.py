"""RMSNorm forward: res = x + residual, rstd = rsqrt(mean(res^2) + eps), y = res * rstd * (weight_offset + weight) + b.

`threads_per_row` threads load a whole row at once, to have enough bytes in flight, and keep it in fp32 registers. They
sum the squares and write the result. Rows too long for one CTA are split over a cluster.
"""

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, const_expr

from quackish.kernels.arguments import fake_args
from quackish.kernels.rows import RowMap, RowSum, row_start
from quackish.ops.rms_norm.problems import ForwardArgs, RmsNormFwdConfig, RmsNormFwdProblem


class RmsNormFwd:
    def __init__(self, problem: RmsNormFwdProblem, config: RmsNormFwdConfig):
        self.problem, self.config = problem, config
        self.rows = RowMap(problem.n, problem.vec, config.threads, config.threads_per_row, config.split_n)
        self.row_sum = RowSum(self.rows)

    def fake_args(self):
        return fake_args(self.problem)

    @cute.jit
    def __call__(self, args: ForwardArgs, stream: CUstream):
        mRstd = cute.make_tensor(args.rstd, cute.make_layout((args.m,)))
        self.kernel(args._replace(rstd=mRstd, m=None, num_ctas=None)).launch(
            grid=[args.num_ctas, 1, 1],
            block=[self.config.threads, 1, 1],
            cluster=[self.config.split_n, 1, 1] if self.config.split_n > 1 else None,
            # at most 64 registers per thread, so that an SM holds 1024 threads with enough loads in flight
            min_blocks_per_mp=self.config.ctas_per_sm,
            preferred_smem_carveout=10,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, args: ForwardArgs):
        """args: without m and num_ctas; rstd is a tensor."""
        x, weight, bias, residual, y, res, rstd = args[: args._fields.index("rstd") + 1]
        rows, n = self.rows, self.rows.n
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        slots, mbars = self.row_sum.allocate(cutlass.memory.SmemAllocator())
        if const_expr(rows.split_n > 1):  # all CTAs have initialized their mbarriers before a peer's sum arrives
            cute.arch.cluster_arrive_relaxed()
            cute.arch.cluster_wait()
        rank, lane = cta % rows.split_n, tid % rows.threads_per_row
        columns, col0 = rows.columns_of(rank), rank * rows.n_cta
        row = (cta // rows.split_n) * rows.tile_m + tid // rows.threads_per_row
        source = cutlass.min(row, rstd.shape[0] - 1)  # past the end: load the last row, store nothing
        out_start = Int64(row) * n + col0

        # load x, weight and bias; with a residual, x becomes res = x + residual, rounded to res's dtype
        rX = rows.load(x + (row_start(source, args.x_rows, n) + col0), lane, columns)
        if const_expr(residual is not None):
            rR = rows.load(residual + (row_start(source, args.residual_rows, n) + col0), lane, columns)
            rX.store((rX.load() + rR.load()).to(res.dtype).to(Float32))
            if row < rstd.shape[0]:
                self.rows.store(rX, res + out_start, lane, columns)
        param_start = col0
        if const_expr(self.problem.heads > 1):
            param_start = Int64(source % self.problem.heads) * n + col0
        if const_expr(weight is not None):
            rW = rows.load(weight + param_start, lane, columns)
        if const_expr(bias is not None):
            rB = rows.load(bias + param_start, lane, columns)

        # rstd from the row's sum of squares
        squares = cute.make_rmem_tensor((rows.vec,), Float32)
        squares.fill(0.0)
        for v in cutlass.range_constexpr(rows.num_vecs):
            squares.store(squares.load() + rX[None, v].load() * rX[None, v].load())
        partial = squares.load().reduce(cute.ReductionOp.ADD, init_val=Float32(0.0), reduction_profile=0)
        mean = self.row_sum(partial, slots, mbars, Int32(0)) * Float32(1.0 / n)
        rs = cute.math.rsqrt(mean + args.eps)

        # normalize and write
        out = rX.load() * rs
        if const_expr(weight is not None):
            out = out * (rW.load() + args.weight_offset)
        if const_expr(bias is not None):
            out = out + rB.load()
        rX.store(out)
        if row < rstd.shape[0]:
            self.rows.store(rX, y + out_start, lane, columns)
            if lane == 0 and rank == 0:
                rstd[row] = rs
