"""What `quackish tune` tries for RMSNorm's kernels.

A config cannot compete if it has less than half of the analytical choice's bytes in flight per SM, which bound the
bandwidth.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from quackish.device.spec import Tuning
from quackish.gpu import Gpu
from quackish.kernels.row_layout import columns_per_cta
from quackish.ops.rms_norm.plans import BackwardPlan, ForwardPlan, NormPlan
from quackish.ops.rms_norm.problems import (
    CLUSTERS,
    RmsNormBwdConfig,
    RmsNormBwdProblem,
    RmsNormFwdConfig,
    RmsNormFwdProblem,
    elements_per_thread,
)
from quackish.tune.data import MakeRun, Run, dtype_of, normal

_THREADS_PER_ROW = (8, 16, 32, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 1024)


def _row_shapes(problem: RmsNormFwdProblem | RmsNormBwdProblem, base: Any) -> Iterator[tuple[int, int, int]]:
    """(threads, threads_per_row, split_n) with half to twice as many elements per thread, and few idle threads."""
    elements = elements_per_thread(problem, base)
    for split_n in {base.split_n, base.split_n // 2, base.split_n * 2} & set(CLUSTERS):
        vectors = -(-columns_per_cta(problem.n, problem.vec, split_n) // problem.vec)
        for per_row in {*_THREADS_PER_ROW, base.threads_per_row}:
            per_thread = -(-vectors // per_row)
            if not elements <= 2 * per_thread * problem.vec <= 4 * elements:
                continue
            if per_row * per_thread > 1.25 * vectors + 8:
                continue
            for rows in {1, 2, 4, 8, 16, base.threads // base.threads_per_row}:
                threads = per_row * rows
                if threads == per_row or 64 <= threads <= 512:
                    yield threads, per_row, split_n


def _forward_configs(problem: RmsNormFwdProblem, base: RmsNormFwdConfig, gpu: Gpu) -> Iterator[RmsNormFwdConfig]:
    for shape in _row_shapes(problem, base):
        yield RmsNormFwdConfig(*shape)


def _backward_configs(problem: RmsNormBwdProblem, base: RmsNormBwdConfig, gpu: Gpu) -> Iterator[RmsNormBwdConfig]:
    stages = {base.num_stages, 2, 3, 4, 6, 8} if problem.aligned else {0}
    for (threads, per_row, split_n), num_stages, ctas in itertools.product(
        _row_shapes(problem, base), stages, (1, 2, 3, 4)
    ):
        if 128 <= threads * ctas <= 1024:
            yield RmsNormBwdConfig(threads, per_row, num_stages, ctas, split_n)


def _forward_elements_in_flight(problem: RmsNormFwdProblem, config: RmsNormFwdConfig) -> int:
    """Elements of x in flight per SM: a thread loads its part of a row at once."""
    return config.ctas_per_sm * config.threads * elements_per_thread(problem, config)


def _backward_bytes_in_flight(problem: RmsNormBwdProblem, config: RmsNormBwdConfig) -> float:
    """Bytes in flight per SM while a tile is computed; without stages, the bytes of the tile itself."""
    rows = config.threads // config.threads_per_row * config.ctas_per_sm
    return max(config.num_stages - 1, 1) * rows * problem.row_bytes / config.split_n


# Data ----------------------------------------------------------------------------------------------------------------


def _forward_data(p: RmsNormFwdProblem, sizes: Mapping[str, int], device: torch.device) -> MakeRun:
    shape = sizes["m"], p.n
    x, residual = normal(device, p.x_dtype, *shape), normal(device, p.residual_dtype, *shape)
    weight, bias = (normal(device, dtype, *_parameter(p)) for dtype in (p.weight_dtype, p.bias_dtype))
    options = None, 1e-6, 0.0, dtype_of(p.res_dtype), dtype_of(p.y_dtype)
    return _norm(ForwardPlan, p, (x, weight, bias, residual), options)


def _backward_data(p: RmsNormBwdProblem, sizes: Mapping[str, int], device: torch.device) -> MakeRun:
    shape = sizes["m"], p.n
    x, dy, dres = (normal(device, dtype, *shape) for dtype in (p.x_dtype, p.dy_dtype, p.dres_dtype))
    weight, rstd = normal(device, p.weight_dtype, *_parameter(p)), x.float().square().mean(-1).rsqrt()
    dweight_out = normal(device, p.dweight_dtype, *_parameter(p)) if p.add_dweight else None
    dtypes = [dtype_of(dtype) for dtype in (p.dx_dtype, p.dresidual_dtype, p.dweight_dtype, p.dbias_dtype)]
    return _norm(BackwardPlan, p, (dy, x, weight, rstd, dres, dweight_out), (0.0, *dtypes))


def _parameter(p: RmsNormFwdProblem | RmsNormBwdProblem) -> tuple[int, ...]:
    return (p.n,) if p.heads == 1 else (p.heads, p.n)


def _norm(kind: Callable[..., NormPlan], problem: Any, tensors: tuple, options: tuple) -> MakeRun:
    def make() -> Run:
        plan = kind(*tensors, *options, "cute")
        assert plan.problem == problem, (plan.problem, problem)
        return lambda: plan.run(*tensors)

    return make


FORWARD = Tuning(_forward_configs, _forward_elements_in_flight, 0.5, _forward_data)
BACKWARD = Tuning(_backward_configs, _backward_bytes_in_flight, 0.5, _backward_data)
