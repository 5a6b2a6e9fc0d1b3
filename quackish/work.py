"""The bytes and FLOPs of a launch, computed from its problem and sizes, and an estimate of its time.

Sizes are run-time arguments such as rows, classes and tiles; `KERNELS` lists them. Bytes are device memory traffic:
each input read once, each output written once. Scratch that stays in the L2 is not counted, nor are a few numbers per
row or column of a GEMM. All rows count as live and all groups as used: only the GPU knows their numbers.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from quackish import kernels
from quackish.configs import attention, gemm, grouped_gemm, lce_rows, rms_norm, token_rows
from quackish.gpu import Roofs

LAUNCH_US = 2.0  # about the time of an empty kernel; not measured per GPU
SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}
_ITEMSIZE = {None: 0, "bfloat16": 2, "float16": 2, "float32": 4, "float64": 8, "int32": 4, "int64": 8}

Sizes = Mapping[str, int]


@dataclasses.dataclass(frozen=True)
class Work:
    bytes_read: int
    bytes_written: int
    flops: int
    note: str = ""  # how the data affects the work
    depends_on_data: bool = False  # the launch often returns at once; these are its bytes then

    @property
    def bytes(self) -> int:
        return self.bytes_read + self.bytes_written


@dataclasses.dataclass(frozen=True)
class Estimate:
    """The time of a launch at given speeds of memory and tensor cores. Short GEMMs can be faster: see `Roofs`."""

    us: float
    bound: str  # what takes this time: "memory", "tensor cores" or "launch"


def estimate(work: Work, roofs: Roofs) -> Estimate:
    bandwidth = roofs.add if work.bytes_read >= 2 * work.bytes_written else roofs.copy
    bounds = {
        "memory": 1e6 * work.bytes / bandwidth,
        "tensor cores": 1e6 * work.flops / roofs.gemm,
        "launch": LAUNCH_US,
    }
    bound = max(bounds, key=bounds.__getitem__)
    return Estimate(bounds[bound], bound)


def _returns_at_once(note: str) -> Work:
    """The work of a launch that reads a flag and does nothing unless it is set."""
    return Work(4, 0, 0, note, depends_on_data=True)


# Per kernel ----------------------------------------------------------------------------------------------------------


def _rms_norm_fwd(p: rms_norm.RmsNormFwdProblem, s: Sizes) -> Work:
    elements = s["m"] * p.n
    read = elements * _bytes(p.x_dtype, p.residual_dtype) + p.heads * p.n * _bytes(p.weight_dtype, p.bias_dtype)
    written = elements * _bytes(p.y_dtype, p.res_dtype or p.residual_dtype) + s["m"] * 4  # rstd
    per_element = 3  # square, add, times rstd
    per_element += sum(d is not None for d in (p.weight_dtype, p.bias_dtype, p.residual_dtype))
    return Work(read, written, elements * per_element)


def _rms_norm_bwd(p: rms_norm.RmsNormBwdProblem, s: Sizes) -> Work:
    elements = s["m"] * p.n
    parameter = p.heads * p.n
    read = elements * _bytes(p.x_dtype, p.dy_dtype, p.dres_dtype) + parameter * _bytes(p.weight_dtype) + s["m"] * 4
    written = elements * _bytes(p.dx_dtype, p.dresidual_dtype) + parameter * _bytes(p.dweight_dtype, p.dbias_dtype)
    if p.add_dweight:
        read += parameter * _bytes(p.dweight_dtype)
    per_element = 1  # xhat
    if p.dx_dtype is not None:
        # the row's sum of xhat * dy * weight; then (dy * weight - xhat * mean) * rstd + dres
        per_element += 2 + 3 + 2 * (p.weight_dtype is not None) + (p.dres_dtype is not None)
    per_element += 2 * (p.dweight_dtype is not None) + (p.dbias_dtype is not None)
    return Work(read, written, elements * per_element)


def _lce_gemm(p: gemm.GemmProblem, s: Sizes) -> Work:
    m, n, k = s["m"], s["n"], s["k"]
    if p.recompute_flagged:
        return _returns_at_once("returns at once if no row was flagged")
    read = (m * k + n * k) * _bytes(p.dtype)
    written = m * n * _bytes(p.out_dtype)
    if p.accumulate:
        read += written
    if p.epilogue == "softmax":
        # sums per row and tile of Hopper; Blackwell's are wider
        written += m * _ceil_div(n, gemm.SOFTMAX_TILE_N["sm_90"]) * 4 * (1 + p.smoothing + p.return_stats)
    if p.rounding_residual:
        written += min(m, k) * n * 2  # for at most min(m, k) rows
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
    if p.epilogue == "down_backward":  # writes the activation and the preactivation's gradient
        read += rows * preactivation
        written += rows * preactivation
    elif p.keeps:
        written += rows * preactivation
    parts = rows * _ceil_div(n, grouped_gemm.DSCALES_COLUMNS) * 4 if p.epilogue == "down_backward" and p.scaled else 0
    return Work(read * _bytes(p.dtype), written * _bytes(p.dtype) + parts, 2 * rows * b_rows * k)


def _token_rows(p: token_rows.TokenRowsProblem, s: Sizes) -> Work:
    rows = s["tokens"] * s["k"]
    of_tokens, of_rows = s["tokens"] * p.n * _bytes(p.dtype), rows * p.n * _bytes(p.dtype)
    read, written = (of_tokens, of_rows) if p.op == "copy" else (of_rows, of_tokens)
    return Work(read + 8 * rows, written, rows * p.n * (p.op == "sum"))


def _lce_compact(p: lce_rows.LceCompactProblem, s: Sizes) -> Work:
    note = "one CTA, which reads the targets a second time from the L2"
    return Work(s["m"] * _bytes(p.target_dtype), s["m"] * 4, s["m"], note)


def _lce_gather(p: lce_rows.LceGatherProblem, s: Sizes) -> Work:
    rows, row_bytes = s["rows"], p.h * _bytes(p.dtype)
    targets = 0 if p.only_live_x else min(rows, s["v"])  # the most rows of w
    return Work((rows + targets) * row_bytes, rows * row_bytes, 0 if p.only_live_x else 2 * rows * p.h)


def _lce_rows(p: lce_rows.LceRowsProblem, s: Sizes) -> Work:
    rows, row_bytes = s["rows"], p.h * _bytes(p.dtype)  # h is 0 if no rows are scaled
    sums = rows * s["tiles"] * (1 + p.label_smoothing + p.return_stats) if p.stats else 0
    written = rows * (row_bytes + 3 * 4 * p.stats + 16 * (p.grads == "coefs"))  # with stats: loss, lse, row_sum
    return Work(4 * sums + rows * row_bytes, written, sums + rows * p.h)


def _lce_sort(p: lce_rows.LceSortProblem, s: Sizes) -> Work:
    note = "" if p.presorted else "compares the classes of all pairs of rows, from the L2"
    return Work(s["rows"] * 14, s["rows"] * 14, s["rows"], note)  # class, row, scale, exp_logits at the target


def _lce_targets(p: lce_rows.LceTargetsProblem, s: Sizes) -> Work:
    rows, classes = s["rows"], min(s["rows"], s["v1"] - s["v0"])  # classes: the most rows of dw
    read = p.h * (rows * _bytes(p.dtype) + classes * (_bytes(p.dw_dtype) + 2 * p.rounding_residual))
    return Work(read, p.h * classes * _bytes(p.dw_dtype), 2 * rows * p.h, "fewer bytes if rows share a target")


def _lce_bias(p: lce_rows.LceBiasProblem, s: Sizes) -> Work:
    rows, n = s["rows"], s["n"]
    return Work(n * (rows * _bytes(p.dtype) + 4 * p.accumulate), n * 4, rows * n * (1 + p.row_scale))


def _lce_scatter(p: lce_rows.LceScatterProblem, s: Sizes) -> Work:
    elements = s["rows"] * p.h
    return Work(elements * 4, elements * _bytes(p.dx_dtype), 0)


def _lce_scale(p: lce_rows.LceScaleProblem, s: Sizes) -> Work:
    return _returns_at_once("returns at once if grad_output is 1; otherwise it reads and writes the gradients")


def _attention(p: attention.AttentionProblem, s: Sizes, matmuls: int, rows: int) -> Work:
    """matmuls: of Lq x Lk x d. rows: tensors like q that are read and written, besides k and v."""
    scores = s["batch"] * s["heads"] * s["num_q"] * s["num_k"]
    of_bias, of_mask = (_matrices(s, of) * s["num_q"] * s["num_k"] for of in ("bias", "mask"))
    of_q, of_k = (s["batch"] * s["heads"] * s[n] * s["d"] * _bytes(p.dtype) for n in ("num_q", "num_k"))
    read = of_bias * _bytes(p.bias_dtype) + of_mask * p.mask + (rows - 1) * of_q + 2 * of_k // s["group"]
    notes = ["fewer bytes of a bias or mask that is the same for all queries or keys"] * (of_bias + of_mask > 0)
    notes += ["less work with causality or a window"] * p.band
    notes += ["less work where a mask leaves a tile empty"] * p.mask
    return Work(read, of_q, 2 * matmuls * scores * s["d"], "; ".join(notes))


def _attention_mask(p: attention.AttentionMaskProblem, s: Sizes) -> Work:
    read = s["batches"] * s["heads"] * s["rows"] * s["columns"]
    blocks = _ceil_div(s["rows"], attention.BLOCK) * _ceil_div(s["columns"], attention.BLOCK)
    return Work(read, s["batches"] * s["heads"] * blocks, 0)


def _attention_order(p: attention.AttentionOrderProblem, s: Sizes) -> Work:
    blocks_q, blocks_k = (_ceil_div(s[n], attention.BLOCK) for n in ("num_q", "num_k"))
    tiles = sum(_ceil_div(s[n], attention.ORDERED) for n in ("num_q", "num_k"))
    matrices = s["batches"] * s["heads"]
    return Work(matrices * blocks_q * blocks_k, 4 * matrices * tiles, 0)


def _attention_fwd(p: attention.AttentionForwardProblem, s: Sizes) -> Work:
    return _attention(p, s, matmuls=2, rows=2)  # q, o


def _attention_bwd_rows(p: attention.AttentionRowsProblem, s: Sizes) -> Work:
    rows = s["batch"] * s["heads"] * s["num_q"]
    return Work(rows * (2 * s["d"] * _bytes(p.dtype) + 4 + 4 * p.dlse), 8 * rows, 2 * rows * s["d"])


def _attention_bwd_keys(p: attention.AttentionKeysProblem, s: Sizes) -> Work:
    work = _attention(p, s, matmuls=4, rows=3)  # q, do
    of_k = s["batch"] * s["heads"] // s["group"] * s["num_k"] * s["d"] * _bytes(p.dtype)
    dbias = s["batch"] * s["heads"] * s["num_q"] * s["num_k"] * _bytes(p.bias_dtype) if p.dbias else 0
    return dataclasses.replace(work, bytes_written=2 * of_k + dbias)  # dk, dv


def _attention_bwd_queries(p: attention.AttentionQueriesProblem, s: Sizes) -> Work:
    return _attention(p, s, matmuls=3, rows=3)  # q, do, dq


def _attention_bwd_product(p: attention.AttentionProductProblem, s: Sizes) -> Work:
    work = _attention(p, s, matmuls=1, rows=1)  # dq
    ds, v = (s["batch"] * heads * s["num_k"] * columns * _bytes(p.dtype)
             for heads, columns in ((s["heads"], s["num_q"]), (s["heads"] // s["group"], s["d"])))  # fmt: skip
    return dataclasses.replace(work, bytes_read=work.bytes_read + ds - v)


def _attention_bwd_bias(p: attention.AttentionBiasProblem, s: Sizes) -> Work:
    work = _attention(p, s, matmuls=2, rows=3)  # q, do
    itemsize = 4 if p.in_parts else _bytes(p.bias_dtype)
    written = itemsize * s["parts"] * _matrices(s, "bias") * s["num_q"] * s["num_k"]
    return dataclasses.replace(work, bytes_written=written)


def _matrices(s: Sizes, of: str) -> int:
    """The number of matrices (num_q, num_k) of a bias or a mask."""
    return s.get(f"{of}_batch", 0) * s.get(f"{of}_heads", 0)


def _broadcast_sizes(scores: Any) -> Iterator[tuple[str, int]]:
    """Batch and heads of the bias and the mask, whose strides are 0 where they are broadcast."""
    for name in ("bias", "mask"):
        if hasattr(t := getattr(scores, name), "batch"):
            yield f"{name}_batch", scores.batch if t.batch else 1
            yield f"{name}_heads", scores.heads if t.head else 1


# The table -----------------------------------------------------------------------------------------------------------


class Kernel(NamedTuple):
    # Fields of the call's NamedTuple, or of the first one in it that has them; {name: position} without a NamedTuple.
    sizes: tuple[str, ...] | Mapping[str, int]
    work: Callable[[Any, Sizes], Work]  # (problem, sizes) -> Work


_ATTENTION = ("batch", "heads", "group", "num_q", "num_k", "d")
# Kernels that compute scores, and the arguments that they write. `sizes_of` also gives the sizes of bias and mask.
ATTENTION_RESULTS = {
    "attention_fwd": ("o", "lse"),
    "attention_bwd_keys": ("dk", "dv", "dbias"),
    "attention_bwd_queries": ("dq",),
    "attention_bwd_product": ("dq",),
    "attention_bwd_bias": ("dbias",),
}
KERNELS = {
    "rms_norm_fwd": Kernel({"m": -3}, _rms_norm_fwd),
    "rms_norm_bwd": Kernel({"m": -3}, _rms_norm_bwd),
    "lce_gemm": Kernel(("m", "n", "k"), _lce_gemm),
    "grouped_gemm": Kernel(("rows", "m", "n", "k", "groups"), _grouped_gemm),
    "attention_mask": Kernel(("batches", "heads", "rows", "columns"), _attention_mask),
    "attention_order": Kernel(("batches", "heads", "num_q", "num_k"), _attention_order),
    "attention_fwd": Kernel(_ATTENTION, _attention_fwd),
    "attention_bwd_rows": Kernel(("batch", "heads", "num_q", "d"), _attention_bwd_rows),
    "attention_bwd_keys": Kernel(_ATTENTION, _attention_bwd_keys),
    "attention_bwd_queries": Kernel(_ATTENTION, _attention_bwd_queries),
    "attention_bwd_product": Kernel(_ATTENTION, _attention_bwd_product),
    "attention_bwd_bias": Kernel((*_ATTENTION, "parts"), _attention_bwd_bias),
    "token_rows": Kernel({"tokens": -3, "k": -2}, _token_rows),
    "lce_compact": Kernel(("v", "m"), _lce_compact),
    "lce_gather": Kernel(("rows", "v"), _lce_gather),
    "lce_rows": Kernel(("v", "tiles", "rows"), _lce_rows),
    "lce_sort": Kernel(("rows",), _lce_sort),
    "lce_targets": Kernel(("v0", "v1", "rows"), _lce_targets),
    "lce_bias": Kernel(("rows", "n"), _lce_bias),
    "lce_scatter": Kernel(("rows",), _lce_scatter),
    "lce_scale": Kernel(("n", "n2"), _lce_scale),
}
_NAMES = {  # {class: name}
    path.rpartition(":")[2]: name for name, paths in kernels.TABLE.items() for path in paths.values()
}


def kernel_of(class_name: str) -> str | None:
    """The name of a kernel class in `KERNELS`; None for other classes."""
    return _NAMES.get(class_name)


def sizes_of(kernel: str, args: Sequence[Any]) -> dict[str, int]:
    """The sizes among a call's arguments, without those that are None."""
    sizes = KERNELS[kernel].sizes
    if isinstance(sizes, tuple):
        parts = [part._asdict() for part in (args[0], *args[0]) if hasattr(part, "_asdict")]
        found = {name: next(part[name] for part in parts if name in part) for name in sizes}
        if kernel in ATTENTION_RESULTS:
            found |= dict(_broadcast_sizes(args[0].scores))
        return {name: size for name, size in found.items() if size is not None}
    return {name: args[at] for name, at in sizes.items()}


def work(kernel: str, problem: Any, sizes: Sizes) -> Work:
    return KERNELS[kernel].work(problem, sizes)


def describe(problem: Any, sizes: Sizes) -> str:
    """Sizes and problem in one line, without default values: "m=16384 n=4096 x=bf16 y=bf16"."""
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
