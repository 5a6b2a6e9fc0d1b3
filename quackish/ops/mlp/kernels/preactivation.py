"""The matrices of the epilogues that compute an activation, on all GPUs."""

import cutlass.cute as cute
from cutlass import Int32, const_expr


class Preactivation:
    """Methods of an epilogue whose spec is an Activated."""

    @property
    def num_parts(self) -> int:
        """gate and up, or one part."""
        return 1 + self.spec.gated

    @cute.jit
    def parts(self, z: cute.Pointer, n: Int32):
        """The parts of a matrix like the preactivation, as `GroupEpilogue.outputs`."""
        return [(z + part * n, n * self.num_parts) for part in range(self.num_parts)]


class UpMatrices(Preactivation):
    @cute.jit
    def outputs(self, args, d: cute.Pointer, n: Int32):
        if const_expr(self.spec.keeps):
            return [(d, n), *self.parts(args.preactivation, n)]
        return [(d, n)]


class DownBackwardMatrices(Preactivation):
    @cute.jit
    def outputs(self, args, d: cute.Pointer, n: Int32):
        return [(args.act, n), *self.parts(d, n)]

    @cute.jit
    def inputs(self, args, n: Int32):
        return self.parts(args.preactivation, n)
