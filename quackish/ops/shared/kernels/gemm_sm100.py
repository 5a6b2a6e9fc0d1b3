"""Blackwell's GEMM that only stores its result."""

from typing import ClassVar

from quackish.kernels.gemm.epilogue_store_sm100 import StoreSm100
from quackish.kernels.gemm.problem import Store
from quackish.kernels.gemm.sm100 import GemmSm100


class StoreGemmSm100(GemmSm100):
    epilogues: ClassVar = {Store: StoreSm100}
