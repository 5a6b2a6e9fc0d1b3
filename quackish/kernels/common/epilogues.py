"""GEMM epilogues, one class each: they consume the fp32 accumulator of 64 rows of a consumer warp group.

`prepare` issues the loads for a tile's rows before its products; `__call__` is the epilogue itself.
The epilogues on logits are in `epilogue_softmax.py` and `epilogue_dlogits.py`.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int16, Int32, Int64

from quackish.configs.lce_rows import NO_SLOT
from quackish.kernels.common.epilogue_dlogits import Dlogits
from quackish.kernels.common.epilogue_softmax import Softmax
from quackish.kernels.common.rows import fake_pointer, vector_at
from quackish.kernels.common.tile_store import RowStore, TileStore, column_of, row_of, thread_rows


def make_epilogue(problem, config):
    store = StoreAndRest if problem.rest else StoreScaled if problem.scaled else Store
    return {"softmax": Softmax, "dlogits": Dlogits, "rows": Rows, "store": store}[problem.epilogue](problem, config)


class Store:
    """Stores D, rounded to the output dtype, or adds it to an fp32 output, where one CTA adds to each element."""

    stages_output = True

    def __init__(self, problem, config):
        self.output = TileStore(problem.out_dtype, config, problem.accumulate)
        self.store_atom, self.allocate, self.finish = self.output.store_atom, self.output.allocate, self.output.finish

    def fake_args(self):
        return None

    def begin(self):
        return None

    def prepare(self, kept, args, row0, col0, m, live, start, thread):
        pass

    @cute.jit
    def __call__(self, acc, kept, args, out, d, row0, col0, m, n, ldd, wg: Int32, thread: Int32):
        for j in cutlass.range_constexpr(self.output.num_pieces):
            self.output(acc, j, out, row0, col0, wg, thread)


class StoreScaled(Store):
    """Store of D times a factor."""

    def fake_args(self):
        return (fake_pointer("float32", False),)

    @cute.jit
    def __call__(self, acc, kept, args, out, d, row0, col0, m, n, ldd, wg: Int32, thread: Int32):
        factor = args[0].load()
        for v in cutlass.range_constexpr(cute.size(acc)):
            acc[v] = acc[v] * factor
        for j in cutlass.range_constexpr(self.output.num_pieces):
            self.output(acc, j, out, row0, col0, wg, thread)


class StoreAndRest(Store):
    """Store that also keeps the bf16 rounding residual of each row that has a place: rest[place]."""

    def fake_args(self):
        return fake_pointer("int32", False), fake_pointer("int16")

    def begin(self):
        return cute.make_rmem_tensor((2,), Int32)

    @cute.jit
    def prepare(self, kept, args, row0: Int32, col0, m, live, start, thread: Int32):
        for r in cutlass.range_constexpr(2):
            row = row0 + thread_rows(thread) + 8 * r
            kept[r] = (args[0] + cutlass.min(row, m - 1)).load()  # used after the products

    @cute.jit
    def __call__(self, acc, kept, args, out, d, row0: Int32, col0: Int32, m: Int32, n: Int32, ldd, wg, thread: Int32):
        for j in cutlass.range_constexpr(self.output.num_pieces):
            self.output(acc, j, out, row0, col0, wg, thread)
        two = cute.make_rmem_tensor((2,), Int16)
        columns = cute.arch.make_warp_uniform(n - col0)  # a multiple of 8; uniform, or ptxas syncs each store
        for r in cutlass.range_constexpr(2):
            if kept[r] != NO_SLOT and row0 + thread_rows(thread) + 8 * r < m:
                row = args[1] + (Int64(kept[r]) * n + col0)
                for q in cutlass.range_constexpr(cute.size(acc) // 4):
                    i = 4 * q + 2 * r  # values alternate between the two rows, in pairs of columns
                    two[0], two[1] = cut_off(acc[i]), cut_off(acc[i + 1])
                    if 8 * q < columns:
                        vector_at(row, column_of(i, thread), 2).store(two.load())


@cute.jit
def cut_off(x: Float32) -> Int16:
    """Rounding residual of bf16: bits of x minus bits of x rounded to bf16.

    A tie rounded down has the residual 2**15, which int16 cannot hold; x is lowered by one unit then. In integer
    arithmetic, as float differences took 4.4 % of the dw GEMM instead of 2.6 (1024 rows, H200).
    """
    bits = x.bitcast(Int32)
    if (bits & 0x1FFFF) == 0x8000:
        bits -= 1
    return bits.to(Int16)


class Rows:
    """Stores row i < live, times its factor, to row order[start + i] of the output."""

    stages_output = False

    def __init__(self, problem, config):
        self.output = RowStore(problem.out_dtype, config)
        self.allocate, self.finish = self.output.allocate, self.output.finish

    def fake_args(self):
        return fake_pointer("float32", False), fake_pointer("int32", False)

    def begin(self):
        return cute.make_rmem_tensor((2,), Float32), cute.make_rmem_tensor((4,), Int32)

    @cute.jit
    def prepare(self, kept, args, row0: Int32, col0, m, live, start, thread: Int32):
        (scale, order), (factors, rows) = args, kept
        for r in cutlass.range_constexpr(2):
            factors[r] = (scale + cutlass.min(row0 + thread_rows(thread) + 8 * r, m - 1)).load()
        for k in cutlass.range_constexpr(4):
            i = row0 + thread // 8 + 16 * k
            rows[k] = Int32(-1)
            if i < live:
                rows[k] = (order + (start + i)).load()

    @cute.jit
    def __call__(self, acc, kept, args, out, d, row0, col0: Int32, m, n, ldd, wg: Int32, thread: Int32):
        (factors, rows), (_, _, staging) = kept, out
        for v in cutlass.range_constexpr(cute.size(acc)):
            acc[v] = acc[v] * factors[row_of(v)]
        self.output(acc, d, staging, rows, col0, n, ldd, wg, thread)
