"""Which configs of grouped GEMMs are legal on Blackwell. What they compute is in grouped_problem.py, as for Hopper."""

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


def grouped_gemm_sm100_buffers(problem: GroupedGemmProblem) -> int:
    """The output buffers of an epilogue warp."""
    return problem.epilogue.num_buffers or BUFFERS


def grouped_gemm_sm100_smem_bytes(problem: GroupedGemmProblem, config: GemmSm100Config) -> int:
    buffers = grouped_gemm_sm100_buffers(problem) * EPILOGUE_WARPS * STAGED_BYTES
    return config.num_stages * config.stage_bytes + buffers + 8 * (problem.max_groups + 2) + 1024 + 256


def grouped_gemm_sm100_why_illegal(problem: GroupedGemmProblem, config: GemmSm100Config, gpu: Gpu) -> str | None:
    if reason := sm100_fields_why_illegal(config):
        return reason
    if problem.along == "m" and config.tile_n != 256:
        return f"tile_n is {config.tile_n}; expected 256, because epilogues assume its pieces"
    if reason := problem.epilogue.why_illegal(problem, config, gpu):
        return reason
    return sm100_space_why_illegal(config, grouped_gemm_sm100_smem_bytes(problem, config), gpu)
