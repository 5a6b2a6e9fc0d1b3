"""Blackwell's GEMMs of linear cross entropy."""

from typing import ClassVar

from quackish.kernels.gemm.epilogue_store_sm100 import StoreSm100
from quackish.kernels.gemm.problem import Store
from quackish.kernels.gemm.sm100 import GemmSm100
from quackish.ops.linear_cross_entropy.gemm_problems import Dlogits, RowsOut, Softmax, StoreWithResidual
from quackish.ops.linear_cross_entropy.kernels.epilogue_gradients_sm100 import RowsOutSm100, StoreWithResidualSm100
from quackish.ops.linear_cross_entropy.kernels.epilogue_logits_sm100 import DlogitsSm100, SoftmaxSm100


class LceGemmSm100(GemmSm100):
    epilogues: ClassVar = {
        Softmax: SoftmaxSm100,
        Dlogits: DlogitsSm100,
        RowsOut: RowsOutSm100,
        Store: StoreSm100,
        StoreWithResidual: StoreWithResidualSm100,
    }
