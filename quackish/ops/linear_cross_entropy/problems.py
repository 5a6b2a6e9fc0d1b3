"""The kernels of linear cross entropy: those of its GEMMs, and those around them."""

from quackish.ops.linear_cross_entropy.gemm_problems import GEMM_SPEC
from quackish.ops.linear_cross_entropy.row_problems import ROW_SPECS

SPECS = (GEMM_SPEC, *ROW_SPECS)
