"""What `quackish tune` tries for grouped GEMMs, and how it times them."""

import functools
import itertools
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from quackish.device.kernel_device import require_device
from quackish.device.spec import Tuning
from quackish.gpu import Gpu
from quackish.kernels.gemm.grouped_problem import GroupedGemmArgs
from quackish.kernels.gemm.grouped_sm100_config import grouped_gemm_sm100_smem_bytes
from quackish.kernels.gemm.sm90_config import GemmConfig
from quackish.kernels.gemm.tuning import (
    MIN_MERIT,
    multiplications_per_load,
    multiplications_per_load_sm100,
    sm100_configs,
)
from quackish.ops.mlp.gemm_problems import DSCALES_COLUMNS, Activated, DownBackward, MlpGemmProblem, Up
from quackish.tune.data import MakeRun, Run, addresses, dtype_of, epilogue_args, matrix, normal


def _grouped_configs(problem: MlpGemmProblem, base: GemmConfig, gpu: Gpu) -> Iterator[GemmConfig]:
    fields = (128, 192), (128, 192, 256), (1, 2), (1, 2), (3, 4, 5, 6, 7), (4, 8, 16), ("m",), (False, True)
    for values in itertools.product(*fields):
        config = GemmConfig(*values)
        if config.cluster_m * config.cluster_n <= 2:
            yield config


# Data ----------------------------------------------------------------------------------------------------------------


def _data(p: MlpGemmProblem, sizes: Mapping[str, int], device: torch.device) -> MakeRun:
    """All groups have the same size. Accumulating kernels add to their output in every run."""
    rows, n, groups, m, k = (sizes.get(name) for name in ("rows", "n", "groups", "m", "k"))
    is_up, is_backward = isinstance(p.epilogue, Up), isinstance(p.epilogue, DownBackward)
    gated = isinstance(p.epilogue, Activated) and p.epilogue.gated
    width, parts, second = n * (1 + gated), -(-n // DSCALES_COLUMNS), None
    if p.along == "k":
        a, b = normal(device, p.dtype, rows, m), normal(device, p.dtype, rows, n)
        d_shape = groups, m, n
    else:  # sums around 1
        a = normal(device, p.dtype, rows, k * p.k_parts)
        b = normal(device, p.dtype, groups, width if is_up and not p.b_in_two else n, k).mul_(k**-0.5)
        second = normal(device, p.dtype, groups, n, k).mul_(k**-0.5) if p.b_in_two else None
        d_shape = rows, width if is_backward else n
    d = torch.zeros(d_shape, dtype=dtype_of(p.out_dtype), device=device)
    offs = (torch.arange(1, groups + 1, device=device) * rows // groups).int() if p.max_groups > 1 else None
    makers = {
        "preactivation": lambda: normal(device, p.dtype, rows, width),
        "bias": lambda: torch.randn(groups, width if is_up else n, device=device),
        "residual": lambda: normal(device, p.dtype, rows, n),
        "scales": lambda: torch.rand(rows, device=device),
        "act": lambda: torch.zeros(rows, n, dtype=dtype_of(p.dtype), device=device),
        "dscales_parts": lambda: torch.zeros(parts, rows, device=device),
    }
    epilogue, on = epilogue_args(p.args.epilogue, makers), require_device("tune", device)
    names = ("act", "dscales_parts", *["preactivation"] * is_up)
    written = d, *(getattr(epilogue, name, None) for name in names)

    def make() -> Run:
        kernel = on.kernel_for(p, on.gpu)
        clusters = kernel.config.max_clusters(on.gpu.sm_count)

        def run() -> tuple[Tensor | None, ...]:
            args = GroupedGemmArgs(
                a=a, b=b, second=second, d=d, offs=offs, epilogue=epilogue, a_stride=m, rows=rows, m=m, n=n, k=k,
                groups=groups, max_clusters=clusters,
            )  # fmt: skip
            kernel.launch(addresses(args), on.stream())
            return written

        return run

    return make


def cublas(p: MlpGemmProblem, sizes: Mapping[str, int], device: torch.device) -> tuple[Tensor, Tensor]:
    """A batch of products, with groups of equal size."""
    rows, groups, n = sizes["rows"], sizes["groups"], sizes["n"]
    options, each = dict(dtype=getattr(torch, p.dtype), device=device), max(1, rows // groups)
    if p.along == "k":
        return matrix(sizes["m"], each, False, groups, **options), matrix(each, n, True, groups, **options)
    n, k = n * (1 + p.epilogue.has_pairs), sizes["k"] * p.k_parts
    return matrix(each, k, True, groups, **options), matrix(k, n, p.b_major == "n", groups, **options)


GEMM = Tuning(_grouped_configs, multiplications_per_load, MIN_MERIT, _data)
_sm100 = functools.partial(sm100_configs, grouped_gemm_sm100_smem_bytes)
GEMM_SM100 = Tuning(_sm100, multiplications_per_load_sm100, MIN_MERIT, _data)
