"""The epilogue of the logits GEMM that backward repeats: the gradients of the logits."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from quackish.kernels.common.lce import LOG2_E
from quackish.kernels.common.logits import Logits, shared_column
from quackish.kernels.common.rows import fake_pointer, vector_at
from quackish.kernels.common.tile_store import column_of, row_of, thread_rows


class Dlogits(Logits):
    """The gradient of the logits a, for classes c of row i with target t:

        (coef_softmax / sum * exp(a - row_shift) - coef_smooth * class_weight[c] - (c == t) * coef_target) * d

    coefs (rows, 4) holds row_shift, coef_softmax / sum, coef_target and coef_smooth of each row.
    """

    def fake_args(self):
        p = self.problem
        weights = fake_pointer("float32" if p.weighted else None, aligned=False)
        return (
            fake_pointer(p.bias_dtype, False), weights, fake_pointer("float32"), fake_pointer("int32", aligned=False),
            Float32(1), Int32(0),
        )  # fmt: skip

    @cute.jit
    def prepare(self, kept, args, row0: Int32, col0: Int32, m, live, start, thread: Int32):
        _, _, coefs, slot_target, _, v0 = args
        rC, target = kept
        for r in cutlass.range_constexpr(2):
            i = row0 + thread_rows(thread) + 8 * r
            rC[None, r].fill(0.0)
            target[r] = Int32(-1)
            if i < m:
                rC[None, r].store(vector_at(coefs, Int64(i) * 4, 4).load())
                target[r] = (slot_target + i).load() - v0 - col0

    @cute.jit
    def __call__(self, acc, kept, args, out, d, row0: Int32, col0: Int32, m, n, ldd, wg: Int32, thread: Int32):
        bias, weights, _, _, softcap, v0 = args
        rC, target = kept
        for j in cutlass.range_constexpr(self.num_pieces):
            self.logits(acc, j, self.columns(bias, j, col0, n, thread), softcap, col0, n, thread)
            its_weights = self.columns(weights, j, v0 + col0, v0 + n, thread)
            for v in self.values(j):
                self.value(acc, v, rC, target, its_weights, 1.0 / softcap, thread)
            self.output(acc, j, out, row0, col0, wg, thread)

    @cute.jit
    def value(self, acc, v: cutlass.Constexpr[int], rC, target, weights, inverse: Float32, thread: Int32):
        """In place: accumulator value v, a logit, becomes its gradient."""
        r = row_of(v)
        a = acc[v]
        z = rC[1, r] * cute.math.exp2((a - rC[0, r]) * LOG2_E, fastmath=True)
        if const_expr(self.problem.smoothing):
            w = Float32(1.0)
            if const_expr(weights is not None):
                w = shared_column(weights, v, thread)
            z = z - rC[3, r] * w
        if column_of(v, thread) == target[r]:
            z = z - rC[2, r]
        if const_expr(self.problem.softcap):
            z = z * (1.0 - (a * inverse) * (a * inverse))
        acc[v] = z
