"""RMSNorm's kernels: arguments, what to compute (Problem), how (Config), and their descriptions (KernelSpec).

Problems and configs are independent of M, the number of rows.
The number of threads per row determines the summation order. It depends only on the problem, so a row has the same bits
in any batch. Numbers in comments were measured on an H200, bf16, M 4096 to 65536 (`benchmarks/results`).
"""

import dataclasses
import math
from typing import Any, NamedTuple

from quackish.device.arguments import F32, Ptr, optional
from quackish.device.spec import KernelSpec, on_all
from quackish.device.work import Sizes, Work, bytes_of
from quackish.errors import UnsupportedError
from quackish.gpu import H100, Gpu
from quackish.kernels.row_layout import columns_per_cta

# Bytes per element by dtype name, as in torch and the DSL.
ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4}
MAX_N = 262_144  # a cluster of 16 CTAs, 16,384 columns each
MAX_M = 2**31 - 2**20  # row indices are 32-bit, up to a few tiles past the last row
MAX_N_TWO_SUMS = 131_072  # with both dweight and dbias: limited by a thread's registers


class _Rows:
    """Base class of the problems. Subclasses have `aligned` and `_row_dtypes`, the dtypes of all (M, N) tensors."""

    aligned: bool

    @property
    def _row_dtypes(self) -> tuple[str | None, ...]:
        raise NotImplementedError

    @property
    def num_sums(self) -> int:
        """The number of requested gradients that are sums over rows."""
        return 0

    @property
    def itemsize(self) -> int:
        """Bytes per element of the widest (M, N) tensor."""
        return max(ITEMSIZE[dtype] for dtype in self._row_dtypes if dtype)

    @property
    def vec(self) -> int:
        """Elements per vector access: 16 bytes of the widest dtype; 1 if the rows are not aligned."""
        return 16 // self.itemsize if self.aligned else 1

    def _pointer(self, dtype: str | None) -> Ptr | None:
        return optional(dtype, self.aligned)


class Rows(NamedTuple):
    """Row r starts at element (r // m1) * s0 + (r % m1) * s1. Absent for packed rows, which start at r * n."""

    m1: Any = "int32"
    s0: Any = "int64"
    s1: Any = "int64"


class ForwardArgs(NamedTuple):
    x: Any = None  # (m, n)
    weight: Any = None  # (n,) or (heads, n)
    bias: Any = None  # as weight
    residual: Any = None  # (m, n)
    y: Any = None  # (m, n), written
    res: Any = None  # (m, n), written; with a residual
    rstd: Any = F32  # (m,), written
    x_rows: Any = None  # Rows
    residual_rows: Any = None
    eps: Any = "float32"
    weight_offset: Any = "float32"
    m: Any = "int32"
    num_ctas: Any = "int32"


class BackwardArgs(NamedTuple):
    x: Any = None  # (m, n): the normalized tensor
    weight: Any = None  # (n,) or (heads, n)
    dy: Any = None  # (m, n)
    dres: Any = None  # (m, n)
    rstd: Any = F32  # (m,)
    dx: Any = None  # (m, n), written
    dresidual: Any = None  # (m, n), written
    dweight: Any = None  # as weight, written or added to
    dbias: Any = None  # as weight, written
    scratch: Any = None  # (config.scratch_floats,) fp32
    tickets: Any = None  # (2 * config.split_n,) int32: 0 before and after
    x_rows: Any = None  # Rows
    dy_rows: Any = None
    dres_rows: Any = None
    weight_offset: Any = "float32"
    m: Any = "int32"
    num_ctas: Any = "int32"


@dataclasses.dataclass(frozen=True)
class RmsNormFwdProblem(_Rows):
    """y = norm(res) * (weight_offset + weight) + bias, res = x + residual; dtypes by name, None if absent."""

    n: int
    x_dtype: str
    y_dtype: str
    weight_dtype: str | None = None
    bias_dtype: str | None = None
    residual_dtype: str | None = None
    packed: bool = True  # row r of x and residual starts at r * n, else at (r // m1) * s0 + (r % m1) * s1
    aligned: bool = True  # every row of every tensor starts and ends on a 16-byte boundary
    heads: int = 1  # rows of weight and bias: row r of x has row r % heads
    res_dtype: str | None = None  # only if different from residual's

    @property
    def _row_dtypes(self) -> tuple[str | None, ...]:
        return self.x_dtype, self.residual_dtype, self.res_dtype, self.y_dtype

    @property
    def args(self) -> ForwardArgs:
        rows, has_residual = None if self.packed else Rows(), self.residual_dtype is not None
        return ForwardArgs(
            x=self._pointer(self.x_dtype), weight=self._pointer(self.weight_dtype), bias=self._pointer(self.bias_dtype),
            residual=self._pointer(self.residual_dtype), y=self._pointer(self.y_dtype),
            res=self._pointer(self.res_dtype or self.residual_dtype), x_rows=rows,
            residual_rows=rows if has_residual else None,
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class RmsNormBwdProblem(_Rows):
    """The backward pass. The dtype of a gradient is None if it is not requested."""

    n: int
    x_dtype: str  # of the normalized tensor: x, or res with a residual
    dy_dtype: str
    weight_dtype: str | None = None
    dres_dtype: str | None = None  # of res's incoming gradient
    dx_dtype: str | None = None
    dresidual_dtype: str | None = None  # only if different from dx's; else dx is also dresidual
    dweight_dtype: str | None = None
    dbias_dtype: str | None = None
    packed: bool = True
    aligned: bool = True
    heads: int = 1  # rows of weight, dweight and dbias
    add_dweight: bool = False  # accumulate into dweight

    @property
    def _row_dtypes(self) -> tuple[str | None, ...]:
        return self.x_dtype, self.dy_dtype, self.dres_dtype, self.dx_dtype, self.dresidual_dtype

    @property
    def num_sums(self) -> int:
        return (self.dweight_dtype is not None) + (self.dbias_dtype is not None)

    @property
    def row_bytes(self) -> int:
        """Bytes loaded per row."""
        return self.n * sum(ITEMSIZE[d] for d in (self.x_dtype, self.dy_dtype, self.dres_dtype) if d)

    @property
    def args(self) -> BackwardArgs:
        rows, has_sums = None if self.packed else Rows(), self.num_sums > 0
        return BackwardArgs(
            x=self._pointer(self.x_dtype), weight=self._pointer(self.weight_dtype), dy=self._pointer(self.dy_dtype),
            dres=self._pointer(self.dres_dtype), dx=self._pointer(self.dx_dtype),
            dresidual=self._pointer(self.dresidual_dtype), dweight=self._pointer(self.dweight_dtype),
            dbias=self._pointer(self.dbias_dtype), scratch=Ptr("float32", aligned=True) if has_sums else None,
            tickets=Ptr("int32", aligned=True) if has_sums else None, x_rows=rows, dy_rows=rows,
            dres_rows=rows if self.dres_dtype else None,
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class RmsNormFwdConfig:
    threads: int
    threads_per_row: int
    split_n: int = 1  # CTAs of a cluster that share a row

    @property
    def ctas_per_sm(self) -> int:
        """CTAs whose registers fit an SM, with MAX_FWD_ELEMENTS registers per thread, as the kernel is compiled for."""
        return H100.registers_per_sm // (self.threads * MAX_FWD_ELEMENTS)  # the same on every GPU with kernels

    def num_ctas(self, m: int, sm_count: int, heads: int = 1) -> int:
        """One tile of rows per CTA, for m >= 1 rows."""
        return -(-m // (self.threads // self.threads_per_row)) * self.split_n


@dataclasses.dataclass(frozen=True)
class RmsNormBwdConfig:
    """How the backward kernel runs, including the order of its sums over rows (dweight, dbias).

    A thread sums its rows, `num_ctas` tiles apart, and a CTA sums the rows of its tile. Then groups of threads sum
    interleaved shares of the CTAs' sums, and a tree sums the groups. With a weight per head, the rows of a tile have
    different heads, so the groups sum all threads' sums instead. The order depends on the number of CTAs, and so on M
    and the GPU.
    """

    threads: int
    threads_per_row: int
    num_stages: int  # tiles of rows in shared memory; 0: rows are read from global memory
    ctas_per_sm: int
    split_n: int = 1  # CTAs of a cluster that share a row

    def max_clusters(self, sm_count: int) -> int:
        """Clusters that are resident at once."""
        clusters = sm_count * self.ctas_per_sm // self.split_n
        if self.split_n > 2:
            # A cluster must fit in one GPC, and GPCs differ in size: an H200 (132 SMs) held 30 clusters of 4, 15 of 8
            # and 7 of 16 at one CTA per SM. With one more, a cooperative launch fails and another takes twice as long.
            clusters = clusters * 7 // 8
        return max(clusters, 1)

    def clusters_of_heads(self, heads: int) -> int:
        """The smallest number of clusters whose tiles hold a multiple of `heads` rows.

        If the number of clusters is a multiple of it, all rows of a thread have the same head.
        """
        return heads // math.gcd(heads, self.threads // self.threads_per_row)

    def num_ctas(self, m: int, sm_count: int, heads: int = 1) -> int:
        """Persistent CTAs for m >= 1 rows: the fewest that need no more rounds than all resident CTAs would."""
        unit, tiles = self.clusters_of_heads(heads), -(-m // (self.threads // self.threads_per_row))
        rounds = -(-tiles // (self.max_clusters(sm_count) // unit * unit))
        return -(-tiles // (rounds * unit)) * unit * self.split_n

    def scratch_floats(self, problem: RmsNormBwdProblem, num_ctas: int) -> int:
        """The fp32 elements of scratch for the sums over CTAs."""
        n_cta = columns_per_cta(problem.n, problem.vec, self.split_n)
        parts = num_ctas * (1 if problem.heads == 1 else self.threads // self.threads_per_row)
        return parts * problem.num_sums * (-(-n_cta // 4) * 4)


def rms_norm_fwd_config(problem: RmsNormFwdProblem, gpu: Gpu) -> RmsNormFwdConfig:
    """Raises UnsupportedError for n > MAX_N."""
    p = problem
    # A thread keeps its part of x, weight, residual and bias in registers. 16 bf16 elements per thread were fastest up
    # to n = 4096, and 32 above. These fit only without residual and bias, and if the weight is no wider than x.
    narrow_weight = p.weight_dtype is None or ITEMSIZE[p.weight_dtype] <= p.itemsize
    wide = p.aligned and narrow_weight and p.residual_dtype is None and p.bias_dtype is None
    elements = 32 // p.itemsize * (2 if wide and p.n * p.itemsize > 8192 else 1)
    split_n = 1
    if p.n > 512 * elements:  # 8192 bf16 columns per CTA: 135 us at 4096 x 32768; 16,384: 141 us
        split_n = _split(p.n, (256 if wide else 512) * elements, MAX_N)
    n_cta = columns_per_cta(p.n, p.vec, split_n)
    most = 48 // p.itemsize if wide and elements * p.itemsize == 32 else elements
    threads_per_row = _threads_per_row(n_cta, p.vec, elements, most, 512 if n_cta <= 512 * elements else 1024)
    return RmsNormFwdConfig(_threads(threads_per_row, 128), threads_per_row, split_n)


def rms_norm_bwd_config(problem: RmsNormBwdProblem, gpu: Gpu) -> RmsNormBwdConfig:
    """Raises UnsupportedError for n > MAX_N (MAX_N_TWO_SUMS with both dweight and dbias) and for too many heads."""
    # Rows up to 2 KB: two CTAs per SM, 16 bf16 elements per thread. Up to 10 KB: one CTA per SM, 32 elements, about
    # 32 KB per stage. Above: one row per stage, 16 elements. Fastest in a sweep over threads, stages and CTAs at n from
    # 256 to 8192. More rows in flight gain nothing: 65536 x 4096 took 377 us with 3 stages, 379 with 4.
    p = problem
    row = p.n * p.itemsize
    split_n = 1 if row <= 16_384 else _split(p.n, 16_384 // p.itemsize, MAX_N_TWO_SUMS if p.num_sums == 2 else MAX_N)
    elements = (64 if 2048 < row <= 10_240 else 32) // p.itemsize
    # Unpacking fp16, unlike bf16, uses the FMA pipe, so more threads help: 8192 x 4096 in fp16 took 58.8 us with 128
    # threads per row, 58.2 with 256.
    halves = p.x_dtype == "float16" and 4096 < row <= 10_240
    if halves:
        elements //= 2
    most = min(elements * 3 // 2, 64 // p.itemsize)
    threads_per_row = _threads_per_row(columns_per_cta(p.n, p.vec, split_n), p.vec, elements, most, at_most=512)
    threads = threads_per_row if row > 10_240 else _threads(threads_per_row, 512 if halves else 256)
    ctas_per_sm, num_stages = (2, 4) if row <= 2048 else (1, 3) if row <= 10_240 else (1, 4) if split_n == 1 else (1, 6)
    if p.num_sums == 2:  # the second set of sums takes the registers of a second CTA
        ctas_per_sm = 1
    stage_bytes = p.row_bytes // split_n * (threads // threads_per_row)
    num_stages = min(num_stages, (gpu.smem_bytes_per_sm // ctas_per_sm - 8192) // stage_bytes)
    if not p.aligned or num_stages < 2:
        num_stages = 0
    config = RmsNormBwdConfig(threads, threads_per_row, num_stages, ctas_per_sm, split_n)
    if reason := _heads_why_illegal(p, config, gpu):
        raise UnsupportedError(f'rms_norm: no kernel for {reason}. backend="auto" runs the portable path.')
    return config


# Legality ------------------------------------------------------------------------------------------------------------

CLUSTERS = (1, 2, 4, 8, 16)
MAX_FWD_ELEMENTS = 64  # of a row per thread: the number of registers that the kernel is compiled for
Problem = RmsNormFwdProblem | RmsNormBwdProblem
Config = RmsNormFwdConfig | RmsNormBwdConfig


def rms_norm_fwd_why_illegal(problem: RmsNormFwdProblem, config: RmsNormFwdConfig, gpu: Gpu) -> str | None:
    """Why `config` cannot run `problem`: the field, its value and the legal values. None if it can."""
    if reason := _shape_why_illegal(problem, config):
        return reason
    elements = elements_per_thread(problem, config)
    if elements > MAX_FWD_ELEMENTS:
        return (
            f"threads_per_row is {config.threads_per_row} with split_n {config.split_n}, {elements} elements of a row "
            f"per thread; expected more threads, so that it is at most {MAX_FWD_ELEMENTS}"
        )
    return None


def rms_norm_bwd_why_illegal(problem: RmsNormBwdProblem, config: RmsNormBwdConfig, gpu: Gpu) -> str | None:
    """Same as rms_norm_fwd_why_illegal."""
    if reason := _shape_why_illegal(problem, config) or _heads_why_illegal(problem, config, gpu):
        return reason
    c = config
    most = gpu.threads_per_sm // c.threads
    if c.ctas_per_sm not in range(1, most + 1):
        return f"ctas_per_sm is {c.ctas_per_sm} with threads {c.threads}; expected 1 to {most}"
    if c.num_stages != 0 and c.num_stages < 2:
        return f"num_stages is {c.num_stages}; expected 0, or at least 2: one is loaded while another is read"
    if c.num_stages and not problem.aligned:
        return f"num_stages is {c.num_stages}; expected 0, as the rows do not start and end on 16 bytes"
    available = min(gpu.smem_bytes, gpu.smem_bytes_per_sm // c.ctas_per_sm - 1024)  # the system reserves 1 KB per CTA
    needed = rms_norm_bwd_smem_bytes(problem, c)
    if needed > available:
        return (
            f"num_stages is {c.num_stages} with threads {c.threads}, threads_per_row {c.threads_per_row} and "
            f"ctas_per_sm {c.ctas_per_sm}, {needed} bytes of shared memory per CTA; expected at most {available} on "
            f"{gpu.name}"
        )
    # A thread keeps at least the weight and the sums in registers.
    kept = (1 + problem.num_sums) * elements_per_thread(problem, c)
    registers = min(255, gpu.registers_per_sm // (c.threads * c.ctas_per_sm))
    if kept > registers:
        return (
            f"threads_per_row is {c.threads_per_row} with threads {c.threads} and ctas_per_sm {c.ctas_per_sm}, {kept} "
            f"values per thread for {registers} registers; expected more threads per row, or fewer threads per SM"
        )
    return None


def elements_per_thread(problem: Problem, config: Config) -> int:
    """Columns of a row per thread."""
    n_cta = columns_per_cta(problem.n, problem.vec, config.split_n)
    return -(-n_cta // (config.threads_per_row * problem.vec)) * problem.vec


def rms_norm_bwd_smem_bytes(problem: RmsNormBwdProblem, config: RmsNormBwdConfig) -> int:
    """Shared memory per CTA: stages, which the sums over rows reuse, barriers, and the slots of RowSum."""
    n_cta = columns_per_cta(problem.n, problem.vec, config.split_n)
    tile_m = config.threads // config.threads_per_row
    stages = config.num_stages * tile_m * (problem.row_bytes // problem.n * n_cta)
    sums = 0
    if problem.num_sums:
        sums = 4 * (tile_m * problem.num_sums * -(-n_cta // 4) * 4 + config.threads * 4)
    barriers = -(-8 * max(config.num_stages, 1) // 16) * 16
    slots = 2 * 4 * (config.threads // 32) * config.split_n
    return -(-max(stages, sums, 16) // 16) * 16 + barriers + -(-slots // 8) * 8 + 16


def _heads_why_illegal(problem: RmsNormBwdProblem, config: RmsNormBwdConfig, gpu: Gpu) -> str | None:
    unit, clusters = config.clusters_of_heads(problem.heads), config.max_clusters(gpu.sm_count)
    if unit <= clusters:
        return None
    return (
        f"{problem.heads} heads of {problem.n} columns, which take {unit} resident clusters of {config.split_n} CTAs; "
        f"at most {clusters} on {gpu.name}"
    )


def _shape_why_illegal(problem: Problem, config: Config) -> str | None:
    """Checks of threads, threads_per_row and split_n, for both directions."""
    c, p = config, problem
    if c.threads not in range(32, 1025, 32):
        return f"threads is {c.threads}; expected a multiple of 32, up to 1024"
    if c.threads_per_row not in (8, 16) and c.threads_per_row not in range(32, 1025, 32):
        return f"threads_per_row is {c.threads_per_row}; expected 8, 16 or a multiple of 32, up to 1024"
    if c.threads % c.threads_per_row:
        return f"threads is {c.threads}; expected a multiple of threads_per_row {c.threads_per_row}"
    if c.split_n not in CLUSTERS:
        return f"split_n is {c.split_n}; expected one of {CLUSTERS}"
    if c.split_n > 1 and c.threads != c.threads_per_row:
        return (
            f"threads is {c.threads} with split_n {c.split_n}; expected threads_per_row {c.threads_per_row}, as CTAs "
            "that share a row process one row at a time"
        )
    if (c.split_n - 1) * columns_per_cta(p.n, p.vec, c.split_n) >= p.n:
        return f"split_n is {c.split_n}; expected fewer CTAs, as {p.n} columns are too few for each to have some"
    return None


# Parts of the analytical choices -------------------------------------------------------------------------------------


def _split(n: int, n_cta: int, max_n: int) -> int:
    """The smallest cluster size, a power of two up to 16, with at most about n_cta columns per CTA."""
    if n > max_n:
        raise UnsupportedError(
            f'rms_norm: no kernel for rows of {n} elements; at most {max_n}. backend="auto" runs the portable path.'
        )
    split_n = 1
    while split_n < 16 and split_n * n_cta < n:
        split_n *= 2
    return split_n


def _threads_per_row(n: int, vec: int, elements: int, most: int, at_most: int) -> int:
    """Threads per row: 8, 16 or whole warps, up to at_most, with about `elements` per thread and few idle threads.

    If possible, no thread has more than `most` elements, which would spill.
    """
    vectors, target = -(-n // vec), max(1, elements // vec)

    def cost(threads: int) -> float:
        per_thread = -(-vectors // threads)
        return threads * per_thread / vectors * (1 + 0.2 * max(per_thread / target, target / per_thread))

    threads = [t for t in (8, 16, *range(32, at_most + 1, 32)) if -(-vectors // t) * vec <= max(most, vec)]
    return min(threads, key=cost, default=at_most)


def _threads(threads_per_row: int, about: int) -> int:
    """Threads per CTA for a whole number of rows: the multiple of threads_per_row nearest to `about`."""
    return threads_per_row * max(1, round(about / threads_per_row))


# Descriptions --------------------------------------------------------------------------------------------------------


def _forward_work(p: RmsNormFwdProblem, s: Sizes) -> Work:
    elements = s["m"] * p.n
    read = elements * bytes_of(p.x_dtype, p.residual_dtype) + p.heads * p.n * bytes_of(p.weight_dtype, p.bias_dtype)
    written = elements * bytes_of(p.y_dtype, p.res_dtype or p.residual_dtype) + s["m"] * 4  # rstd
    per_element = 3  # square, add, times rstd
    per_element += sum(d is not None for d in (p.weight_dtype, p.bias_dtype, p.residual_dtype))
    return Work(read, written, elements * per_element)


def _backward_work(p: RmsNormBwdProblem, s: Sizes) -> Work:
    elements = s["m"] * p.n
    parameter = p.heads * p.n
    read = elements * bytes_of(p.x_dtype, p.dy_dtype, p.dres_dtype) + parameter * bytes_of(p.weight_dtype) + s["m"] * 4
    written = elements * bytes_of(p.dx_dtype, p.dresidual_dtype) + parameter * bytes_of(p.dweight_dtype, p.dbias_dtype)
    if p.add_dweight:
        read += parameter * bytes_of(p.dweight_dtype)
    per_element = 1  # xhat
    if p.dx_dtype is not None:
        # the row's sum of xhat * dy * weight; then (dy * weight - xhat * mean) * rstd + dres
        per_element += 2 + 3 + 2 * (p.weight_dtype is not None) + (p.dres_dtype is not None)
    per_element += 2 * (p.dweight_dtype is not None) + (p.dbias_dtype is not None)
    return Work(read, written, elements * per_element)


FORWARD_SPEC = KernelSpec(
    name="rms_norm_fwd",
    operation="rms_norm",
    problem=RmsNormFwdProblem,
    on=on_all(
        "quackish.ops.rms_norm.kernels.forward:RmsNormFwd",
        RmsNormFwdConfig,
        rms_norm_fwd_config,
        rms_norm_fwd_why_illegal,
        "quackish.ops.rms_norm.tuning:FORWARD",
    ),
    sizes=("m",),
    work=_forward_work,
    samples=[RmsNormFwdProblem(4096, "bfloat16", "bfloat16", "bfloat16")],
)
BACKWARD_SPEC = KernelSpec(
    name="rms_norm_bwd",
    operation="rms_norm",
    problem=RmsNormBwdProblem,
    on=on_all(
        "quackish.ops.rms_norm.kernels.backward:RmsNormBwd",
        RmsNormBwdConfig,
        rms_norm_bwd_config,
        rms_norm_bwd_why_illegal,
        "quackish.ops.rms_norm.tuning:BACKWARD",
    ),
    sizes=("m",),
    work=_backward_work,
    samples=[RmsNormBwdProblem(4096, "bfloat16", "bfloat16", "bfloat16", dx_dtype="bfloat16")],
)
SPECS = FORWARD_SPEC, BACKWARD_SPEC
