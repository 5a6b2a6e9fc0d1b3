"""The online softmax of attention's forward kernels, and its results."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64, const_expr

from quackish.kernels.math import LN_2, LOG2_E
from quackish.ops.attention.arguments import LARGE, ForwardArgs
from quackish.ops.attention.kernels.scores import ScoreBlock, pair_rows


class Softmax:
    """top and total (2,): the largest score of each row, divided by `unit`, and the sum of its exponentials."""

    @cute.jit
    def exponentials(self, x: cute.Tensor, top: cute.Tensor, total: cute.Tensor, unit: Float32):
        """x = exp(unit (x - top)) with the rows' new maxima; returns the factors for what was summed before."""
        factor = unit * LOG2_E
        rescale = cute.make_rmem_tensor((2,), Float32)
        for r in cutlass.range_constexpr(2):
            new = top[r]
            for i in cutlass.range_constexpr(cute.size(x)):
                if const_expr(i // 2 % 2 == r):
                    new = cute.arch.fmax(new, x[i])
            for offset in (1, 2):
                new = cute.arch.fmax(new, cute.arch.shuffle_sync_bfly(new, offset=offset))
            base = Float32(0.0) if new == -Float32.inf else new
            shift = base * factor
            rescale[r] = cute.math.exp2(top[r] * factor - shift, fastmath=True)
            # x * factor - shift is one multiply-add. It is not 0 where x is the maximum, because only shift is rounded:
            # too far from 0 if x is large.
            is_large = (shift > LARGE) | (shift < -LARGE)
            if cute.arch.vote_any_sync(is_large):
                subtracted = base if is_large else Float32(0.0)
                for i in cutlass.range_constexpr(cute.size(x)):
                    if const_expr(i // 2 % 2 == r):
                        x[i] = x[i] - subtracted
                if is_large:
                    rescale[r], shift = cute.math.exp2((top[r] - base) * factor, fastmath=True), Float32(0.0)
            top[r] = new
            added = Float32(0.0)
            for i in cutlass.range_constexpr(cute.size(x)):
                if const_expr(i // 2 % 2 == r):
                    x[i] = cute.math.exp2(x[i] * factor - shift, fastmath=True)
                    added = added + x[i]
            total[r] = total[r] * rescale[r] + added
        return rescale

    @cute.jit
    def finish(self, o: cute.Tensor, top, total, unit: Float32, args: ForwardArgs, block: ScoreBlock):
        """Divides by the sums, and stores o, lse and its residual."""
        s, head = args.scores, block.head
        for r in cutlass.range_constexpr(2):
            for offset in (1, 2):
                total[r] = total[r] + cute.arch.shuffle_sync_bfly(total[r], offset=offset)
            divided = Float32(1.0) / total[r]
            for i in cutlass.range_constexpr(cute.size(o)):
                if const_expr(i // 2 % 2 == r):
                    o[i] = Float32(0.0) if total[r] == 0.0 else o[i] * divided
            row = block.q0 + pair_rows(block.thread) + 8 * r
            if block.thread % 4 == 0 and row < s.num_q:
                lse = top[r] * unit + cute.math.log2(total[r]) * LN_2
                at = (Int64(head.batch) * s.heads + head.query_head) * s.num_q + row
                (args.lse + at).store(-Float32.inf if total[r] == 0.0 else lse)
                residual = cute.math.fma(top[r], unit, -lse) + cute.math.log2(total[r]) * LN_2
                is_large = (total[r] > 0.0) & ((lse > LARGE) | (lse < -LARGE))
                (args.lse_residual + at).store(residual if is_large else Float32(0.0))
        self.write_queries(o, args.o, s, block)
