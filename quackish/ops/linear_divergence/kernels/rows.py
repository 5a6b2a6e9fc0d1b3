"""The divergence of each row of logits, its gradient, and the student's entropy: see reference.py.

A cluster has a row. Its threads read both models' logits once and keep them in registers, as u = log2(e) * logit /
temperature. Two exchanges between their warps follow: of both maxima and sums of exponentials, which give the
log-sum-exps, and of the sums that the loss consists of. Then the gradient is written.
"""

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, const_expr

from quackish.kernels.arguments import fake_args
from quackish.kernels.math import LN_2, tanh
from quackish.kernels.memory import load_at, store_at, vector_at
from quackish.kernels.rows import RowMap
from quackish.ops.linear_divergence.problems import DivergenceRowsConfig, DivergenceRowsProblem, RowsArgs, Side, padded

VEC = 4  # logits per access
LEAST = -3.0e38  # above -inf, whose difference to itself is NaN
MAX_RATIO_LOG2 = 120.0  # where a probability is 2^120 times the other one, the smaller one does not count


class Exchange:
    """Gives `count` numbers of each warp of a cluster to all its warps, once."""

    def __init__(self, rows: RowMap, count: int):
        self.rows, self.count = rows, count
        self.num_slots = rows.num_warps * rows.split_n

    @cute.jit
    def allocate(self, smem):
        """(slots, mbarrier). With split_n > 1 the cluster must synchronize before the call."""
        slots = smem.allocate_tensor(Float32, cute.make_layout(self.num_slots * self.count), byte_alignment=16)
        mbar = smem.allocate_array(Int64, 1)
        if const_expr(self.rows.split_n > 1):
            if cute.arch.thread_idx()[0] == 0:
                cute.arch.mbarrier_init(mbar, 1)
            cute.arch.mbarrier_init_fence()
        return slots, mbar

    @cute.jit
    def __call__(self, values: tuple, slots: cute.Tensor, mbar: cute.Pointer):
        """Fills slots: number i of warp w of CTA c is at (c * num_warps + w) * count + i."""
        warp, lane = cute.arch.warp_idx(), cute.arch.lane_idx()
        if const_expr(self.rows.split_n > 1):
            first = (cute.arch.block_idx_in_cluster() * self.rows.num_warps + warp) * self.count
            if cute.arch.thread_idx()[0] == 0:
                cute.arch.mbarrier_arrive_and_expect_tx(mbar, self.num_slots * self.count * 4)
            if lane < self.rows.split_n:
                for i in cutlass.range_constexpr(self.count):
                    slot = slots.iterator + (first + i)
                    cute.arch.store_async_dsmem(slot, values[i].bitcast(Int32), mbar, lane)
            cute.arch.mbarrier_wait(mbar, 0)
        else:
            if lane == 0:
                for i in cutlass.range_constexpr(self.count):
                    slots[warp * self.count + i] = values[i]
            cute.arch.sync_threads()

    @cute.jit
    def at(self, slots: cute.Tensor, step: cutlass.Constexpr[int], i: cutlass.Constexpr[int], absent) -> Float32:
        """Number i of slot step * 32 + lane; `absent` if there is none."""
        slot = step * 32 + cute.arch.lane_idx()
        value = Float32(absent)
        if slot < self.num_slots:
            value = slots[slot * self.count + i]
        return value

    @cute.jit
    def total(self, slots: cute.Tensor, i: cutlass.Constexpr[int]) -> Float32:
        """The sum of all warps' number i, in a fixed order."""
        total = Float32(0.0)
        for step in cutlass.range_constexpr(-(-self.num_slots // 32)):
            total += self.at(slots, step, i, 0.0)
        return cute.arch.warp_reduction_sum(total)


class DivergenceRows:
    def __init__(self, problem: DivergenceRowsProblem, config: DivergenceRowsConfig):
        self.problem, self.config = problem, config
        self.stride = padded(problem.v)
        self.rows = RowMap(self.stride, VEC, config.threads, config.threads, config.split_n)
        self.statistics, self.sums = Exchange(self.rows, 4), Exchange(self.rows, problem.num_sums)

    def fake_args(self):
        return fake_args(self.problem)

    @cute.jit
    def __call__(self, args: RowsArgs, stream: CUstream):
        split_n = self.config.split_n
        self.kernel(args._replace(rows=None)).launch(
            grid=[args.rows * split_n, 1, 1],
            block=[self.config.threads, 1, 1],
            cluster=[split_n, 1, 1] if split_n > 1 else None,
            min_blocks_per_mp=self.config.ctas_per_sm,
            preferred_smem_carveout=10,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, args: RowsArgs):
        split_n = const_expr(self.config.split_n)
        cta = cute.arch.block_idx()[0]
        smem = cutlass.memory.SmemAllocator()
        statistics, sums = self.statistics.allocate(smem), self.sums.allocate(smem)
        if const_expr(split_n > 1):  # all CTAs have initialized their mbarriers before a peer's numbers arrive
            cute.arch.cluster_arrive_relaxed()
            cute.arch.cluster_wait()
        row, rank = cta // split_n, cta % split_n
        if const_expr(self.problem.live):
            if args.start + row < load_at(args.num_live, 0):
                self.live_row(row, rank, args, statistics, sums)
            else:
                self.dead_row(row, rank, args)
        else:
            self.live_row(row, rank, args, statistics, sums)

    @cute.jit
    def live_row(self, row: Int32, rank: Int32, args: RowsArgs, statistics: tuple, sums: tuple):
        rows, p = self.rows, self.problem
        lane = cute.arch.thread_idx()[0]
        columns, col0 = rows.columns_of(rank), rank * rows.n_cta
        at = Int64(row) * self.stride + col0

        # load
        rS = self.load(args.student, p.bias, p.softcap, at, col0, lane, columns)
        rT = self.load(args.teacher, p.teacher_bias, p.teacher_softcap, at, col0, lane, columns)

        # log-sum-exps, in log2 units
        max_s, sum_s = self.max_and_sum(rS)
        max_t, sum_t = self.max_and_sum(rT)
        self.statistics((max_s, sum_s, max_t, sum_t), *statistics)
        lse_s, lse_t = self.log_sum_exp(statistics[0], 0), self.log_sum_exp(statistics[0], 2)

        # the sums of the loss
        self.sums(self.sums_of(rS, rT, lse_s, lse_t, args.beta), *sums)
        total = self.sums.total(sums[0], 0)
        loss = total * LN_2
        if const_expr(p.kind == "between"):
            loss = LN_2 * ((1.0 - args.beta) * total + args.beta * self.sums.total(sums[0], 1))
        if const_expr(p.entropy):
            entropy = -LN_2 * self.sums.total(sums[0], p.num_sums - 1)
            if (lane == 0) & (rank == 0):
                store_at(args.entropy, row, entropy)
        if (lane == 0) & (rank == 0):
            store_at(args.loss, row, loss)

        # the gradient
        if const_expr(args.dlogits is not None):
            factor = args.grad_factor
            if const_expr(p.row_grads):
                factor = factor * load_at(args.row_grads, row)
            if const_expr(p.kind == "between"):
                total += 0.0 * lse_t  # NaN for a teacher that is not finite: the bounds of `to_mixture` drop it
            self.gradients(rS, rT, lse_s, total, args.beta, factor * self.scale_of(p), args.student.limit)
            for v in cutlass.range_constexpr(rows.num_vecs):
                if rows.live(v, lane, columns):
                    self.store(rS[None, v], args.dlogits, at, v, lane)

    def scale_of(self, p) -> float:
        """What the gradient in log2 units is multiplied by."""
        return 1.0 if p.kind == "forward" else LN_2

    @cute.jit
    def dead_row(self, row: Int32, rank: Int32, args: RowsArgs):
        rows, lane = self.rows, cute.arch.thread_idx()[0]
        if (lane == 0) & (rank == 0):
            store_at(args.loss, row, Float32(0.0))
            if const_expr(self.problem.entropy):
                store_at(args.entropy, row, Float32(0.0))
        if const_expr(args.dlogits is not None):
            columns, at = rows.columns_of(rank), Int64(row) * self.stride + rank * rows.n_cta
            zero = cute.make_rmem_tensor((VEC,), Float32)
            zero.fill(0.0)
            for v in cutlass.range_constexpr(rows.num_vecs):
                if rows.live(v, lane, columns):
                    self.store(zero, args.dlogits, at, v, lane)

    @cute.jit
    def load(
        self, side: Side, bias: cutlass.Constexpr[bool], softcap: cutlass.Constexpr[bool], at: Int64, col0, lane,
        columns,
    ) -> cute.Tensor:  # fmt: skip
        """This thread's u of a row; -inf past the last class."""
        rows = self.rows
        rU = rows.load(side.logits + at, lane, columns)
        if const_expr(bias):
            rB = rows.load(side.bias + col0, lane, columns)
            rU.store(rU.load() + rB.load())
        rU.store(rU.load() * side.factor)
        if const_expr(softcap):
            for i in cutlass.range_constexpr(cute.size(rU)):
                rU[i] = side.limit * tanh(rU[i])
        for v in cutlass.range_constexpr(rows.num_vecs):
            for k in cutlass.range_constexpr(VEC):
                column = col0 + rows.column(v, lane) + k
                # columns of a later CTA of the cluster are no columns of this thread
                if (column >= self.problem.v) | (rows.column(v, lane) >= columns):
                    rU[k, v] = -Float32.inf
        return rU

    @cute.jit
    def max_and_sum(self, rU: cute.Tensor):
        """The maximum of a warp's u, at least LEAST, and the sum of 2^(u - maximum)."""
        largest = cute.arch.fmax(rU.load().reduce(cute.ReductionOp.MAX, -Float32.inf, 0), LEAST)
        largest = cute.arch.warp_reduction_max(largest)
        e = cute.math.exp2(rU.load() - largest, fastmath=True)
        total = e.reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
        return largest, cute.arch.warp_reduction_sum(total)

    @cute.jit
    def log_sum_exp(self, slots: cute.Tensor, i: cutlass.Constexpr[int]) -> Float32:
        """log2 of the sum of all warps' 2^u. Their maxima are number i, their sums number i + 1."""
        exchange, largest, total = self.statistics, Float32(LEAST), Float32(0.0)
        steps = const_expr(-(-exchange.num_slots // 32))
        for step in cutlass.range_constexpr(steps):
            largest = cute.arch.fmax(largest, exchange.at(slots, step, i, LEAST))
        largest = cute.arch.warp_reduction_max(largest)
        for step in cutlass.range_constexpr(steps):
            scale = cute.math.exp2(exchange.at(slots, step, i, LEAST) - largest, fastmath=True)
            total += exchange.at(slots, step, i + 1, 0.0) * scale
        return largest + cute.math.log2(cute.arch.warp_reduction_sum(total), fastmath=True)

    @cute.jit
    def sums_of(self, rS: cute.Tensor, rT: cute.Tensor, lse_s: Float32, lse_t: Float32, beta: Float32) -> tuple:
        """A warp's parts of the sums, in log2 units. Replaces the teacher's u by what the gradient needs.

        The first is of t * log(t / s) for "forward", of s * log(s / t) for "reverse", and of s * log(s / m) for
        "between", whose second is of t * log(t / m). The last is of s * log(s), for the entropy. The gradient needs t
        for "forward", log(s / t) for "reverse", and log(s / m) for "between".
        """
        p = self.problem
        first, second, entropy = (cute.make_rmem_tensor((VEC,), Float32) for _ in range(3))
        for total in (first, second, entropy):
            total.fill(0.0)
        for v in cutlass.range_constexpr(self.rows.num_vecs):
            log_s, log_t = rS[None, v].load() - lse_s, rT[None, v].load() - lse_t
            s, t = cute.math.exp2(log_s, fastmath=True), cute.math.exp2(log_t, fastmath=True)
            if const_expr(p.kind == "forward"):
                first.store(first.load() + product(t, log_t - log_s))
                rT[None, v].store(t)
            elif const_expr(p.kind == "reverse"):
                first.store(first.load() + product(s, log_s - log_t))
                rT[None, v].store(log_s - log_t)
            else:
                ratio, to_mixture = self.to_mixture(log_s, log_t, beta)
                first.store(first.load() + product(s, to_mixture))
                second.store(second.load() + product(t, to_mixture + ratio))
                rT[None, v].store(to_mixture)
            if const_expr(p.entropy):
                entropy.store(entropy.load() + product(s, log_s))
        used = [first, *([second] if p.kind == "between" else []), *([entropy] if p.entropy else [])]
        return tuple(
            cute.arch.warp_reduction_sum(total.load().reduce(cute.ReductionOp.ADD, Float32(0.0), 0)) for total in used
        )

    def to_mixture(self, log_s, log_t, beta: Float32):
        """(log2(t / s), log2(s / m)), m = (1 - beta) * s + beta * t."""
        ratio = log_t - log_s
        ratio = cute.where(ratio < MAX_RATIO_LOG2, ratio, MAX_RATIO_LOG2)
        ratio = cute.where(ratio > -MAX_RATIO_LOG2, ratio, -MAX_RATIO_LOG2)
        # of a number near 1 where s and t are close, whose log2 is exact in absolute terms
        m = (1.0 - beta) + cute.math.exp2(ratio, fastmath=True) * beta
        return ratio, cute.math.log2(m, fastmath=True) * -1.0

    @cute.jit
    def gradients(
        self, rS: cute.Tensor, rT: cute.Tensor, lse_s: Float32, total: Float32, beta: Float32, factor: Float32,
        limit: Float32,
    ):  # fmt: skip
        """Replaces the student's u by dlogits. rT: of `sums_of`."""
        p = self.problem
        if const_expr(p.kind == "between"):
            factor = factor * (1.0 - beta)
        for v in cutlass.range_constexpr(self.rows.num_vecs):
            u = rS[None, v].load()
            s = cute.math.exp2(u - lse_s, fastmath=True)
            if const_expr(p.kind == "forward"):
                g = s - rT[None, v].load()
            else:
                g = product(s, rT[None, v].load() - total)
            g = g * factor
            if const_expr(p.softcap):
                tangent = u * (1.0 / limit)
                g = product(g, 1.0 - tangent * tangent)  # past the last class, u is -inf
            rS[None, v].store(g)

    @cute.jit
    def store(self, values: cute.Tensor, dlogits: cute.Pointer, at: Int64, v: cutlass.Constexpr[int], lane):
        vector_at(dlogits, at + self.rows.column(v, lane), VEC).store(values.load().to(dlogits.dtype))


def product(p, x):
    """p * x, and 0 where p is 0, whatever x is."""
    return cute.where(p == 0.0, 0.0, p * x)
