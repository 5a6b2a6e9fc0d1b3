"""Blackwell's GEMMs of grouped_mlp."""

from typing import ClassVar

from quackish.kernels.gemm.grouped_sm100 import GroupedGemmSm100
from quackish.ops.mlp.gemm_problems import Down, DownBackward, Store, Up
from quackish.ops.mlp.kernels.epilogue_grouped_sm100 import DownBackwardSm100, DownSm100, UpSm100


class MlpGemmSm100(GroupedGemmSm100):
    epilogues: ClassVar = {Up: UpSm100, Down: DownSm100, DownBackward: DownBackwardSm100, Store: DownSm100}
