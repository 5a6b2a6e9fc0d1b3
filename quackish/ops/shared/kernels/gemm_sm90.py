"""Hopper's GEMM that only stores its result."""

from typing import ClassVar

from quackish.kernels.gemm.epilogue_store import StoreSm90
from quackish.kernels.gemm.problem import Store
from quackish.kernels.gemm.sm90 import GemmSm90


class StoreGemmSm90(GemmSm90):
    epilogues: ClassVar = {Store: StoreSm90}
