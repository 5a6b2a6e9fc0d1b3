"""Hopper's GEMMs of linear cross entropy."""

from typing import ClassVar

from quackish.kernels.gemm.epilogue_store import StoreSm90
from quackish.kernels.gemm.problem import Store
from quackish.kernels.gemm.sm90 import GemmSm90
from quackish.ops.linear_cross_entropy.gemm_problems import Dlogits, RowsOut, Softmax, StoreWithResidual
from quackish.ops.linear_cross_entropy.kernels.epilogue_dlogits import DlogitsSm90
from quackish.ops.linear_cross_entropy.kernels.epilogue_residual import StoreWithResidualSm90
from quackish.ops.linear_cross_entropy.kernels.epilogue_rows import RowsOutSm90
from quackish.ops.linear_cross_entropy.kernels.epilogue_softmax import SoftmaxSm90


class LceGemmSm90(GemmSm90):
    epilogues: ClassVar = {
        Softmax: SoftmaxSm90,
        Dlogits: DlogitsSm90,
        RowsOut: RowsOutSm90,
        Store: StoreSm90,
        StoreWithResidual: StoreWithResidualSm90,
    }
