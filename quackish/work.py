"""What a launch has to move and multiply at least: plain arithmetic on problem and sizes.

Sizes are what a kernel is told at run time: rows, classes, tiles. `KERNELS` says which arguments of a call are sizes.
Bytes are those of device memory that no kernel can do without: each input once, each output once; scratch that stays in
the L2 is not in them, nor, beside the matrix of a GEMM, a few numbers per row or column. All rows count as live and all
groups as used: only the device knows better.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from quackish import kernels
from quackish.configs import gemm, grouped_gemm, lce_cublas, lce_rows, rms_norm
from quackish.gpu import Roofs

LAUNCH_US = 2.0  # about what an empty kernel takes from start to end; not measured per GPU
SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}
_ITEMSIZE = {None: 0, "bfloat16": 2, "float16": 2, "float32": 4, "float64": 8, "int32": 4, "int64": 8}

Sizes = Mapping[str, int]


@dataclasses.dataclass(frozen=True)
class Work:
    bytes_read: int
    bytes_written: int
    flops: int
    note: str = ""  # what the device alone knows, and what it changes
    depends_on_data: bool = False  # all of it does: these are the bytes of a launch that leaves at once

    @property
    def bytes(self) -> int:
        return self.bytes_read + self.bytes_written


@dataclasses.dataclass(frozen=True)
class Floor:
    """No launch with this work takes less."""

    us: float
    bound: str  # "memory", "tensor cores", or "launch": what takes longest


def floor(work: Work, roofs: Roofs) -> Floor:
    bandwidth = roofs.add if work.bytes_read >= 2 * work.bytes_written else roofs.copy
    bounds = {
        "memory": 1e6 * work.bytes / bandwidth,
        "tensor cores": 1e6 * work.flops / roofs.gemm,
        "launch": LAUNCH_US,
    }
    bound = max(bounds, key=bounds.__getitem__)
    return Floor(bounds[bound], bound)


def _leaves_at_once(note: str) -> Work:
    """Of a launch that reads a flag, and does nothing unless it is set."""
    return Work(4, 0, 0, note, depends_on_data=True)


# Per kernel ----------------------------------------------------------------------------------------------------------


def _rms_norm_fwd(p: rms_norm.RmsNormFwdProblem, s: Sizes) -> Work:
    elements = s["m"] * p.n
    read = elements * _bytes(p.x_dtype, p.residual_dtype) + p.heads * p.n * _bytes(p.weight_dtype, p.bias_dtype)
    written = elements * _bytes(p.y_dtype, p.res_dtype or p.residual_dtype) + s["m"] * 4  # rstd
    each = 3 + sum(d is not None for d in (p.weight_dtype, p.bias_dtype, p.residual_dtype))  # square, add, times rstd
    return Work(read, written, elements * each)


def _rms_norm_bwd(p: rms_norm.RmsNormBwdProblem, s: Sizes) -> Work:
    elements = s["m"] * p.n
    parameter = p.heads * p.n
    read = elements * _bytes(p.x_dtype, p.dy_dtype, p.dres_dtype) + parameter * _bytes(p.weight_dtype) + s["m"] * 4
    written = elements * _bytes(p.dx_dtype, p.dresidual_dtype) + parameter * _bytes(p.dweight_dtype, p.dbias_dtype)
    if p.add_dweight:
        read += parameter * _bytes(p.dweight_dtype)
    each = 1  # xhat
    if p.dx_dtype is not None:
        # the row's sum of xhat * dy * weight; then (dy * weight - xhat * mean) * rstd + dres
        each += 2 + 3 + 2 * (p.weight_dtype is not None) + (p.dres_dtype is not None)
    each += 2 * (p.dweight_dtype is not None) + (p.dbias_dtype is not None)
    return Work(read, written, elements * each)


def _lce_gemm(p: gemm.GemmProblem, s: Sizes) -> Work:
    m, n, k = s["m"], s["n"], s["k"]
    if p.recompute_flagged:
        return _leaves_at_once("returns at once if no row was flagged")
    read = (m * k + n * k) * _bytes(p.dtype)
    written = m * n * _bytes(p.out_dtype)
    if p.accumulate:
        read += written
    if p.epilogue == "softmax":
        # sums of each row and tile
        written += m * _ceil_div(n, gemm.SOFTMAX_TILE_N) * 4 * (1 + p.smoothing + p.return_stats)
    if p.rounding_residual:
        written += min(m, k) * n * 2  # at most so many rows
    return Work(read, written, 2 * m * n * k)


def _grouped_gemm(p: grouped_gemm.GroupedGemmProblem, s: Sizes) -> Work:
    rows, n = s["rows"], s["n"]
    if p.along == "k":
        d = s["groups"] * s["m"] * n * _bytes(p.out_dtype)
        return Work(rows * (s["m"] + n) * _bytes(p.dtype) + d * p.accumulate, d, 2 * rows * s["m"] * n)
    preactivation = n * (1 + p.gated)
    b_rows, k = n, s["k"]
    if p.epilogue == "up":
        b_rows = preactivation
    elif p.b_in_two:
        k *= 2
    read, written = rows * k + s["groups"] * b_rows * k, rows * n
    if p.epilogue == "down_backward":  # beside the preactivation's gradient, the activation
        read += rows * preactivation
        written += rows * preactivation
    elif p.keeps:
        written += rows * preactivation
    parts = rows * _ceil_div(n, grouped_gemm.DSCALES_COLUMNS) * 4 if p.epilogue == "down_backward" and p.scaled else 0
    return Work(read * _bytes(p.dtype), written * _bytes(p.dtype) + parts, 2 * rows * b_rows * k)


def _lce_compact(p: lce_rows.LceCompactProblem, s: Sizes) -> Work:
    note = "one CTA: the targets are read from the L2 a second time"
    return Work(s["m"] * _bytes(p.target_dtype), s["m"] * 4, s["m"], note)


def _lce_gather(p: lce_rows.LceGatherProblem, s: Sizes) -> Work:
    rows, targets = s["rows"], min(s["rows"], s["v"])  # at most so many rows of w
    row_bytes = p.h * _bytes(p.dtype)
    return Work((rows + targets) * row_bytes, rows * row_bytes, 2 * rows * p.h)


def _lce_rows(p: lce_rows.LceRowsProblem, s: Sizes) -> Work:
    rows, row_bytes = s["rows"], p.h * _bytes(p.dtype)  # h is 0 if no rows are scaled
    sums = rows * s["tiles"] * (1 + p.label_smoothing + p.return_stats) if p.stats else 0
    written = rows * (row_bytes + 3 * 4 * p.stats + 16 * (p.grads == "coefs"))  # with stats: loss, lse, row_sum
    return Work(4 * sums + rows * row_bytes, written, sums + rows * p.h)


def _lce_sort(p: lce_rows.LceSortProblem, s: Sizes) -> Work:
    note = "" if p.presorted else "compares each row's class with all others', from the L2"
    return Work(s["rows"] * 14, s["rows"] * 14, s["rows"], note)  # class, row, scale, exp_logits at the target


def _lce_targets(p: lce_rows.LceTargetsProblem, s: Sizes) -> Work:
    rows, classes = s["rows"], min(s["rows"], s["v1"] - s["v0"])  # at most so many rows of dw
    read = p.h * (rows * _bytes(p.dtype) + classes * (_bytes(p.dw_dtype) + 2 * p.rounding_residual))
    return Work(read, p.h * classes * _bytes(p.dw_dtype), 2 * rows * p.h, "fewer bytes where rows share a target")


def _lce_bias(p: lce_rows.LceBiasProblem, s: Sizes) -> Work:
    rows, n = s["rows"], s["n"]
    return Work(n * (rows * _bytes(p.dtype) + 4 * p.accumulate), n * 4, rows * n * (1 + p.row_scale))


def _lce_scatter(p: lce_rows.LceScatterProblem, s: Sizes) -> Work:
    elements = s["rows"] * p.h
    return Work(elements * 4, elements * _bytes(p.dx_dtype), elements * p.row_scale)


def _lce_scale(p: lce_rows.LceScaleProblem, s: Sizes) -> Work:
    return _leaves_at_once("leaves at once where the gradient that arrives is 1; else it reads and writes all of it")


def _lce_exp(p: lce_cublas.LceExpProblem, s: Sizes) -> Work:
    rows, n = s["rows"], s["n"]
    written = rows * n * _bytes(p.out_dtype)
    if p.kind == "softmax":
        written += (
            rows * 2 * _ceil_div(n, lce_cublas.TILE_N) * 4 * (1 + p.smoothing + p.return_stats)
        )  # sums and shifts of each row and tile
    return Work(rows * n * 4, written, 3 * rows * n)


def _lce_rescale(p: lce_cublas.LceRescaleProblem, s: Sizes) -> Work:
    sums = s["rows"] * _ceil_div(s["n"], lce_cublas.TILE_N) * 4
    return Work(sums, sums, 0, "reads and writes exp_logits of flagged rows too")


def _lce_clear(p: lce_cublas.LceClearProblem, s: Sizes) -> Work:
    return _leaves_at_once("writes the rows that are ignored, if any")


# The table -----------------------------------------------------------------------------------------------------------


class Kernel(NamedTuple):
    """A kernel as its callers see it. `sizes`: which arguments of a call are sizes, as fields of its NamedTuple, or by
    position if the call has no such tuple."""

    sizes: tuple[str, ...] | Mapping[str, int]
    work: Callable[[Any, Sizes], Work]


KERNELS = {
    "rms_norm_fwd": Kernel({"m": -3}, _rms_norm_fwd),
    "rms_norm_bwd": Kernel({"m": -3}, _rms_norm_bwd),
    "lce_gemm": Kernel(("m", "n", "k"), _lce_gemm),
    "grouped_gemm": Kernel(("rows", "m", "n", "k", "groups"), _grouped_gemm),
    "lce_compact": Kernel(("v", "m"), _lce_compact),
    "lce_gather": Kernel(("rows", "v"), _lce_gather),
    "lce_rows": Kernel(("v", "tiles", "rows"), _lce_rows),
    "lce_sort": Kernel(("rows",), _lce_sort),
    "lce_targets": Kernel(("v0", "v1", "rows"), _lce_targets),
    "lce_bias": Kernel(("rows", "n"), _lce_bias),
    "lce_scatter": Kernel(("rows",), _lce_scatter),
    "lce_scale": Kernel(("n", "n2"), _lce_scale),
    "lce_exp": Kernel(("rows", "n"), _lce_exp),
    "lce_rescale": Kernel(("rows", "n"), _lce_rescale),
    "lce_clear": Kernel(("rows",), _lce_clear),
}
_NAMES = {where.rpartition(":")[2]: name for name, (where, _) in kernels.TABLE.items()}  # by class


def kernel_of(class_name: str) -> str | None:
    """The name in `KERNELS` of a kernel class; None for one that is not described here."""
    return _NAMES.get(class_name)


def sizes_of(kernel: str, args: Sequence[Any]) -> dict[str, int]:
    """The sizes among the arguments of a call, without absent ones."""
    sizes = KERNELS[kernel].sizes
    if isinstance(sizes, tuple):
        return {name: size for name in sizes if (size := getattr(args[0], name)) is not None}
    return {name: args[at] for name, at in sizes.items()}


def work(kernel: str, problem: Any, sizes: Sizes) -> Work:
    return KERNELS[kernel].work(problem, sizes)


def describe(problem: Any, sizes: Sizes) -> str:
    """Sizes and problem in a line: "m=16384 n=4096 x=bf16 y=bf16"; fields at their defaults are left out."""
    words = [f"{name}={value}" for name, value in sizes.items()]
    for field in dataclasses.fields(problem) if dataclasses.is_dataclass(problem) else ():
        name, value = field.name.removesuffix("_dtype"), getattr(problem, field.name)
        if value != field.default and value is not None:
            words.append(name if value is True else f"{name}={SHORT.get(value, value)}")
    return " ".join(words)


def _bytes(*dtypes: str | None) -> int:
    return sum(_ITEMSIZE[dtype] for dtype in dtypes)


def _ceil_div(n: int, d: int) -> int:
    return -(-n // d)
