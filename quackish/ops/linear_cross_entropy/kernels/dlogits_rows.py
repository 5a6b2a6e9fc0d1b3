"""The gradient of a logit: shared by the epilogues of the logits GEMMs of all GPUs."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from quackish.ops.linear_cross_entropy.kernels.exponents import LEAST_LOG2


class DlogitsRows:
    """Methods of an epilogue. Its spec is a Dlogits."""

    @cute.jit
    def gradient(
        self, a: Float32, coefs, coef_entropy: Float32, r: cutlass.Constexpr[int], column: Int32, target: Int32,
        w, scale_log2, inverse: Float32,
    ):  # fmt: skip
        """The gradient of logit a in the thread's row r. coefs: see DlogitsSm90. w(): class weight; None: 1."""
        coef, log2 = coefs[1, r], (a - coefs[0, r]) * scale_log2
        if const_expr(self.spec.entropy):
            coef = coef + coef_entropy * cute.arch.fmax(log2, LEAST_LOG2)
        grad = coef * cute.math.exp2(log2, fastmath=True)
        if const_expr(self.spec.smoothing):
            grad = grad - (coefs[3, r] if const_expr(w is None) else coefs[3, r] * w())
        if column == target:
            grad = grad - coefs[2, r]
        if const_expr(self.spec.softcap):
            grad = grad * (1.0 - (a * inverse) * (a * inverse))
        return grad
