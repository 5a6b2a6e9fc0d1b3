"""How Blackwell's GEMMs of grouped_mlp run. What they compute is in grouped_gemm.py, as for Hopper."""

import dataclasses

from quackish.gpu import Gpu
from quackish.kernels.gemm.grouped_problem import GroupedGemmProblem
from quackish.kernels.gemm.sm100_config import (
    BUFFERS,
    EPILOGUE_WARPS,
    STAGED_BYTES,
    GemmSm100Config,
    sm100_fields_why_illegal,
    sm100_space_why_illegal,
)

# The config of each tile of a cluster, rows x columns. Not tuned: no Blackwell GPU has run them.
CONFIGS = {"256x256": GemmSm100Config(group=16), "128x256": GemmSm100Config(ctas=1, num_stages=4, group=16)}


def grouped_gemm_sm100_config(problem: GroupedGemmProblem, gpu: Gpu) -> GemmSm100Config:
    config = CONFIGS[problem.cluster_tile]
    room = gpu.smem_bytes - grouped_gemm_sm100_smem_bytes(problem, dataclasses.replace(config, num_stages=0))
    return dataclasses.replace(config, num_stages=min(config.num_stages, room // config.stage_bytes))


def grouped_gemm_sm100_buffers(problem: GroupedGemmProblem) -> int:
    """The output buffers of an epilogue warp."""
    if problem.epilogue == "down_backward":  # the activation's, and two sets for gate and up
        return 1 + 2 * (1 + problem.gated)
    return BUFFERS


def grouped_gemm_sm100_smem_bytes(problem: GroupedGemmProblem, config: GemmSm100Config) -> int:
    buffers = grouped_gemm_sm100_buffers(problem) * EPILOGUE_WARPS * STAGED_BYTES
    return config.num_stages * config.stage_bytes + buffers + 8 * (problem.max_groups + 2) + 1024 + 256


def grouped_gemm_sm100_why_illegal(problem: GroupedGemmProblem, config: GemmSm100Config, gpu: Gpu) -> str | None:
    if reason := sm100_fields_why_illegal(config):
        return reason
    if problem.along == "m" and config.tile_n != 256:
        return f"tile_n is {config.tile_n}; expected 256, because epilogues assume its pieces"
    return sm100_space_why_illegal(config, grouped_gemm_sm100_smem_bytes(problem, config), gpu)
