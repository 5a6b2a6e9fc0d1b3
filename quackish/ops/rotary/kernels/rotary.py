"""Rotary position embeddings: rotates the pairs of each row of q and k, and copies the elements after `rotary_dim`.

A thread has the same 2 * `pairs` elements of a token's row in `config.batch` heads, whose loads are in flight together.
It loads their cos and sin once.
"""

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, const_expr

from quackish.kernels.arguments import fake_args
from quackish.kernels.memory import vector_at
from quackish.ops.rotary.problems import RotaryArgs, RotaryConfig, RotaryProblem


class Rotary:
    def __init__(self, problem: RotaryProblem, config: RotaryConfig):
        self.problem, self.config, self.pairs = problem, config, problem.pairs
        self.reads_adjacent, self.writes_adjacent, self.table_is_adjacent = problem.adjacent
        self.copies = problem.d > problem.rotary_dim
        self.has_tail = (problem.d - problem.rotary_dim) % (2 * problem.pairs) != 0

    def fake_args(self):
        return fake_args(self.problem)

    @cute.jit
    def __call__(self, args: RotaryArgs, stream: CUstream):
        tiles = cute.ceil_div(args.tokens * self.problem.threads_per_token, self.config.threads)
        self.kernel(args).launch(
            grid=[tiles * self.groups(args), 1, 1], block=[self.config.threads, 1, 1], stream=stream
        )

    @cute.jit
    def groups(self, args: RotaryArgs) -> Int32:
        """Groups of `config.batch` heads of q, then of k."""
        return cute.ceil_div(args.q_heads + args.k_heads, self.config.batch)

    @cute.kernel
    def kernel(self, args: RotaryArgs):
        groups = self.groups(args)
        cta, _, _ = cute.arch.block_idx()
        tile, group = cta // groups, cta % groups  # neighbors have the same tokens, whose heads are close in memory
        thread = tile * self.config.threads + cute.arch.thread_idx()[0]
        threads_per_token = const_expr(self.problem.threads_per_token)
        token, part = thread // threads_per_token, thread % threads_per_token
        if token < args.tokens:
            batch = token // args.length
            row = token - batch * args.length

            # cos and sin of this thread's pairs
            rCos = self.load_table(start(args.cos, args.cos_strides, batch, row), part)
            rSin = self.load_table(start(args.sin, args.sin_strides, batch, row), part)

            # heads first to last, those of q before those of k
            first = group * self.config.batch
            last = first + self.config.batch
            begin, end = first, cutlass.min(last, args.q_heads)
            q, q_out = start(args.q, args.q_strides, batch, row), start(args.q_out, args.q_out_strides, batch, row)
            self.rotate(q, q_out, args.q_strides.head, args.q_out_strides.head, begin, end, part, rCos, rSin)
            begin, end = cutlass.max(first - args.q_heads, 0), cutlass.min(last - args.q_heads, args.k_heads)
            k, k_out = start(args.k, args.k_strides, batch, row), start(args.k_out, args.k_out_strides, batch, row)
            self.rotate(k, k_out, args.k_strides.head, args.k_out_strides.head, begin, end, part, rCos, rSin)

    @cute.jit
    def load_table(self, row: cute.Pointer, part: Int32) -> cute.Tensor:
        """As fp32: a column per pair of a half table, else two, at the positions of the forward's result."""
        if const_expr(self.copies):
            part = cutlass.min(part, self.problem.rotating_threads - 1)  # threads that copy do not use it
        if const_expr(self.problem.half_table):
            out = cute.make_rmem_tensor((self.pairs,), Float32)
            out.store(vector_at(row, part * self.pairs, self.pairs).load().to(Float32))
        else:
            raw = cute.make_rmem_tensor((2 * self.pairs,), row.dtype)
            self.load(row, *self.positions(part, self.table_is_adjacent), self.table_is_adjacent, raw)
            out = cute.make_rmem_tensor((2 * self.pairs,), Float32)
            out.store(raw.load().to(Float32))
        return out

    @cute.jit
    def rotate(self, x, out, x_stride, out_stride, begin: Int32, end: Int32, part: Int32, rCos, rSin):
        """Rotates this thread's elements in heads begin to end."""
        batch = const_expr(self.config.batch)
        raw = cute.make_rmem_tensor((2 * self.pairs, batch), x.dtype)
        reads = self.positions(part, self.reads_adjacent)
        writes = self.positions(part, self.writes_adjacent)
        if begin < end:
            for b in cutlass.range_constexpr(batch):  # heads past the last one repeat it and store nothing
                head = cutlass.min(begin + b, end - 1)
                self.load(x + Int64(head) * x_stride, *reads, self.reads_adjacent, raw[None, b])
            for b in cutlass.range_constexpr(batch):
                if const_expr(self.copies):
                    if part < self.problem.rotating_threads:
                        self.rotate_pairs(raw[None, b], rCos, rSin)
                else:
                    self.rotate_pairs(raw[None, b], rCos, rSin)
                if begin + b < end:
                    self.store(raw[None, b], out + Int64(begin + b) * out_stride, *writes)

    @cute.jit
    def rotate_pairs(self, raw: cute.Tensor, rCos: cute.Tensor, rSin: cute.Tensor):
        """With explicit multiply-adds, so that the bits are the same for all alignments."""
        values = cute.make_rmem_tensor((2 * self.pairs,), Float32)
        values.store(raw.load().to(Float32))
        out = cute.make_rmem_tensor((2 * self.pairs,), Float32)
        for i in cutlass.range_constexpr(self.pairs):
            x0, x1 = (values[self.index(i, second, self.reads_adjacent)] for second in (0, 1))
            c0, c1 = (rCos[self.column(i, second)] for second in (0, 1))
            s0, s1 = (rSin[self.column(i, second)] for second in (0, 1))
            if const_expr(self.problem.transpose):
                y0 = cute.math.fma(x0, c0, x1 * s1)
                y1 = cute.math.fma(x1, c1, -(x0 * s0))
            else:
                y0 = cute.math.fma(x0, c0, -(x1 * s0))
                y1 = cute.math.fma(x1, c1, x0 * s1)
            out[self.index(i, 0, self.writes_adjacent)] = y0
            out[self.index(i, 1, self.writes_adjacent)] = y1
        raw.store(out.load().to(raw.element_type))

    # Positions of a thread's elements ---------------------------------------------------------------------------------

    @cute.jit
    def positions(self, part: Int32, adjacent: cutlass.Constexpr[bool]):
        """Where the first and the second `pairs` elements are in a row."""
        first = 2 * self.pairs * part
        second = first + self.pairs
        if const_expr(not adjacent):
            if const_expr(self.copies):
                rotates = part < self.problem.rotating_threads
                first = part * self.pairs if rotates else first
                second = first + self.problem.rotary_dim // 2 if rotates else second
            else:
                first = part * self.pairs
                second = first + self.problem.rotary_dim // 2
        return first, second

    def index(self, i: int, second: int, adjacent: bool) -> int:
        """The index of an element of pair i among the thread's."""
        return 2 * i + second if adjacent else second * self.pairs + i

    def column(self, i: int, second: int) -> int:
        return i if self.problem.half_table else self.index(i, second, self.table_is_adjacent)

    @cute.jit
    def load(self, row: cute.Pointer, first: Int32, second: Int32, adjacent: cutlass.Constexpr[bool], out: cute.Tensor):
        if const_expr(adjacent and self.pairs > 1):
            out.store(vector_at(row, first, 2 * self.pairs).load())
        else:
            if const_expr(self.has_tail):
                second = cutlass.min(second, self.problem.d - self.pairs)
            halves = cute.logical_divide(out, cute.make_layout(self.pairs))
            halves[None, 0].store(vector_at(row, first, self.pairs).load())
            halves[None, 1].store(vector_at(row, second, self.pairs).load())

    @cute.jit
    def store(self, values: cute.Tensor, row: cute.Pointer, first: Int32, second: Int32):
        if const_expr(self.writes_adjacent and self.pairs > 1):
            vector_at(row, first, 2 * self.pairs).store(values.load())
        else:
            halves = cute.logical_divide(values, cute.make_layout(self.pairs))
            vector_at(row, first, self.pairs).store(halves[None, 0].load())
            if const_expr(self.has_tail):
                if second < self.problem.d:
                    vector_at(row, second, self.pairs).store(halves[None, 1].load())
            else:
                vector_at(row, second, self.pairs).store(halves[None, 1].load())


@cute.jit
def start(base: cute.Pointer, strides, batch: Int32, row: Int32) -> cute.Pointer:
    """A row of a table, or of head 0."""
    return base + (Int64(batch) * strides.batch + Int64(row) * strides.row)
