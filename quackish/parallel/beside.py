"""The GEMM of the weight's gradient beside a sum over ranks, whose kernels need SMs.

A persistent GEMM assigns tiles at launch. Clusters on SMs that communication holds start late, so the whole GEMM ends
late, and nothing is hidden. So the first classes are computed on fewer SMs, for about as long as the sum takes, and the
other classes on all: 19.9 ms instead of 20.6 (two H200s, M 8192, H 4096, V 128256).
"""

from torch import Tensor

from quackish.configs.lce_args import ResidualArgs
from quackish.ops.linear_cross_entropy.launches import LceKernels, RowState

COMMUNICATING_SMS = 32  # what NCCL takes at most
# Their products take 0.42 ms of 100 SMs at M 8192, H 4096, where the sum over 4 H200 takes 0.33. Both times grow with
# M * H.
FIRST_CLASSES = 3072


class BesideCommunication:
    """LceKernels whose `dw` computes the first classes on fewer SMs."""

    def __init__(self, k: LceKernels):
        self.k, self.fewer = k, k.leaving(COMMUNICATING_SMS)

    def __getattr__(self, name: str):
        return getattr(self.k, name)

    def dw(
        self, e: Tensor, scaled_x: Tensor, state: RowState, start: int, out: Tensor, accumulate: bool,
        split_tail: bool = False, factor: Tensor | None = None, residual: ResidualArgs | None = None,
    ) -> None:  # fmt: skip
        n = FIRST_CLASSES
        if out.shape[0] <= 2 * n:
            return self.k.dw(e, scaled_x, state, start, out, accumulate, split_tail, factor, residual)
        self.fewer.dw(e[:, :n], scaled_x, state, start, out[:n], accumulate, split_tail, factor, residual)
        if residual is not None:
            residual = residual._replace(first_slot_of_class=residual.first_slot_of_class + 4 * n)
        self.k.dw(e[:, n:], scaled_x, state, start, out[n:], accumulate, split_tail, factor, residual)
