"""Hopper's GEMMs of grouped_mlp."""

from typing import ClassVar

from quackish.kernels.gemm.grouped_sm90 import GroupedGemmSm90
from quackish.ops.mlp.gemm_problems import Down, DownBackward, Store, Up
from quackish.ops.mlp.kernels.epilogue_grouped import DownSm90, UpSm90
from quackish.ops.mlp.kernels.epilogue_grouped_backward import DownBackwardSm90


class MlpGemmSm90(GroupedGemmSm90):
    epilogues: ClassVar = {Up: UpSm90, Down: DownSm90, DownBackward: DownBackwardSm90, Store: DownSm90}
