"""Copies each token to its k rows, or sums them. rows[t, j] is the index of token t's j-th row.

- "copy": out[rows[t, j]] = x[t]. A token is read once, not k times.
- "sum": out[t] = sum over j of x[rows[t, j]], in fp32, in order of j, rounded once.
"""

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, const_expr

from quackish.kernels.arguments import fake_args
from quackish.kernels.memory import vector_at
from quackish.ops.mlp.problems import TokenRowsArgs, TokenRowsConfig, TokenRowsProblem


class TokenRows:
    def __init__(self, problem: TokenRowsProblem, config: TokenRowsConfig):
        self.problem, self.config = problem, config
        self.ctas_per_token = config.ctas_per_token(problem.n)

    def fake_args(self):
        return fake_args(self.problem)

    @cute.jit
    def __call__(self, args: TokenRowsArgs, stream: CUstream):
        self.kernel(args.x, args.rows, args.out, args.k).launch(
            grid=[args.tokens * self.ctas_per_token, 1, 1], block=[self.config.threads, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, x: cute.Pointer, rows: cute.Pointer, out: cute.Pointer, k: Int32):
        n, columns_per_cta = self.problem.n, 8 * self.config.threads
        cta, _, _ = cute.arch.block_idx()
        tid, _, _ = cute.arch.thread_idx()
        token = cta // self.ctas_per_token
        column = cta % self.ctas_per_token * columns_per_cta + tid * 8
        offset = Int64(token) * n + column
        if column < n:
            mRows = cute.make_tensor(rows + Int64(token) * k, cute.make_layout(k))
            if const_expr(self.problem.op == "copy"):
                rX = vector_at(x, offset, 8).load()
                for j in cutlass.range(k, unroll=4):
                    vector_at(out, mRows[j] * n + column, 8).store(rX)
            else:
                total = cute.make_rmem_tensor((8,), Float32)
                total.fill(0.0)
                for j in cutlass.range(k, unroll=4):
                    total.store(total.load() + vector_at(x, mRows[j] * n + column, 8).load().to(Float32))
                vector_at(out, offset, 8).store(total.load().to(out.dtype))
