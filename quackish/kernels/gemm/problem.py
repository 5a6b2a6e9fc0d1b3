"""The GEMMs of linear cross entropy: what to compute (Problem) and how (Config)."""

import dataclasses
import functools
from typing import Any, NamedTuple

from quackish.device.arguments import ALIGNED_F32, ALIGNED_I16, F32, I32, I64, Ptr, optional
from quackish.gpu import Gpu

# `split_k_tail` uses one counter per warp group of a split tile, at most 4 per CTA; `wave_sync` uses the last counter.
NUM_TICKETS = 1024

BLOCK_M = 64  # rows of the accumulator of a warp group; an epilogue handles this many at a time
ROW_TILE = 128  # buffers are zero from the last live row to the end of its tile of ROW_TILE rows
TILE_K = 64  # 128 bytes, the swizzle span. Two stages of 128 took 50 % longer (H200).
PRODUCER_REGISTERS = 24
SOFTMAX_TILE_N = {"sm_90": 192, "sm_100": 256, "sm_103": 256}  # classes per partial sum of the softmax


class GemmArgs(NamedTuple):
    """D[m, n] = sum over k of A[m, k] * B[n, k]. In the arguments of its epilogues, too, m, n and k are these sizes.

    Strides are leading dimensions, multiples of 8.
    """

    a: Any = None  # (m, split or k) bf16 or fp16
    second: Any = None  # the columns from `split` on: of A with a_in_two, of D with d_in_two
    b: Any = None  # (n, k) as a
    d: Any = None  # (m, split or n) bf16, fp16 or fp32, written or added to; absent without out_dtype
    epilogue: Any = None  # SoftmaxArgs, DlogitsArgs, RowsOutArgs, ScaledArgs, ResidualArgs; absent for a plain store
    tail: Any = None  # TailArgs; with split_k_tail
    ticket: Any = I32  # (1,) of wave_sync, 0 before and after; not used with recompute_flagged
    num_live: Any = I32  # (1,)
    m: Any = "int32"
    n: Any = "int32"
    k: Any = "int32"
    split: Any = "int32"  # a multiple of 64; used with a_in_two or d_in_two
    start: Any = "int32"
    a_stride: Any = "int64"
    second_stride: Any = "int64"
    b_stride: Any = "int64"
    d_stride: Any = "int64"
    max_clusters: Any = "int32"  # resident at once


class SoftmaxArgs(NamedTuple):
    bias: Any = None  # (n,) fp32, bf16 or fp16; absent without bias
    class_weight: Any = None  # (n,) fp32; with class weights and label smoothing
    row_shift: Any = F32  # (m,); not used with recompute_flagged
    slot_target: Any = I32  # (m,)
    row_max_bits: Any = I32  # (m,), updated; only read with recompute_flagged
    flags: Any = I32  # (1 + ceil(m / 128),), set; only read with recompute_flagged
    part_sum: Any = F32  # (m, tiles), written
    target_logit: Any = F32  # (m,), written
    part_wsum: Any = None  # (m, tiles) fp32, written; with label smoothing
    part_elog: Any = None  # (m, tiles) fp32, written; with return_stats
    argmax_bits: Any = None  # (m,) int64, updated unless recompute_flagged; with return_stats
    softcap: Any = "float32"
    tiles: Any = "int32"
    logit_scale: Any = None  # 0-dim fp32


class DlogitsArgs(NamedTuple):
    bias: Any = None  # (n,) fp32, bf16 or fp16; absent without bias
    class_weight: Any = None  # (v0 + n,) fp32; with class weights and label smoothing
    coefs: Any = ALIGNED_F32  # (m, 4)
    slot_target: Any = I32  # (m,)
    coef_entropy: Any = None  # (m,) fp32; if the entropy has a gradient
    softcap: Any = "float32"
    v0: Any = "int32"  # the class of the first column
    logit_scale: Any = None  # 0-dim fp32


class RowsOutArgs(NamedTuple):
    row_scale: Any = F32  # (m,)
    order: Any = I32  # (start + m,)


class ScaledArgs(NamedTuple):
    factor: Any = F32  # (1,)


class ResidualArgs(NamedTuple):
    first_slot_of_class: Any = I32  # (m,), NO_SLOT for classes without a slot
    rounding_residual: Any = ALIGNED_I16  # (slots, n), written: row first_slot_of_class[i] for row i of D


class TailArgs(NamedTuple):
    partials: Any = ALIGNED_F32  # (GemmConfig.tail_room,), written: partial sums
    tickets: Any = I32  # (NUM_TICKETS,), 0 before and after
    max_splits: Any = "int32"  # capacity of `partials`, in splits


@dataclasses.dataclass(frozen=True)
class GemmProblem:
    """D[m, n] = sum over k of A[m, k] * B[n, k] in fp32, followed by an epilogue.

    `epilogue`:
    - "softmax": D are logits. Stores exp_logits, sums of exp(logit - row_shift) per row and tile, the targets' logits.
    - "dlogits": D are logits. Stores their gradient, from known statistics.
    - "rows": output[order[start + i]] = row_scale[i] * D[i].
    - "store": stores D or D times a factor, or adds it to an fp32 output.
    `live`: the dimension, "m" or "k", whose size is the number of live rows, read on the device.
    """

    epilogue: str
    dtype: str  # of A and B: "bfloat16" or "float16"
    out_dtype: str | None  # None: softmax stores only statistics
    a_major: str = "k"  # "m" or "k": A's contiguous dimension
    b_major: str = "k"  # "n" or "k"
    live: str = "m"
    bias_dtype: str | None = None  # softmax, dlogits
    softcap: bool = False  # softmax, dlogits
    smoothing: bool = False  # softmax: also row sums of class weight * logit; dlogits: the smoothed target
    weighted: bool = False  # class weights, with smoothing
    return_stats: bool = False  # softmax: also sums of e * log2(e) and the argmax
    entropy: bool = False  # dlogits: the entropy has a gradient
    recompute_flagged: bool = False  # softmax: only tiles that a first launch flagged, shifted by the rows' maxima
    accumulate: bool = False  # store: D is added to the output
    scaled: bool = False  # store: D is multiplied by a number in device memory
    rounding_residual: bool = False  # store, bf16: also stores the rounding residual of rows that have a slot
    a_in_two: bool = False  # the columns of A are in two buffers
    d_in_two: bool = False  # softmax: the columns of D are in two buffers
    split_k_tail: bool = False  # rows, store: split-K for the tiles of a partly filled last wave
    logit_scale: bool = False  # softmax, dlogits

    @property
    def args(self) -> GemmArgs:
        operand, out = Ptr(self.dtype, aligned=True), optional(self.out_dtype, aligned=True)
        return GemmArgs(
            a=operand, second=operand if self.a_in_two else out if self.d_in_two else None, b=operand, d=out,
            epilogue=self._epilogue_args(), tail=TailArgs() if self.split_k_tail else None,
        )  # fmt: skip

    def _epilogue_args(self) -> tuple | None:
        if self.epilogue in ("softmax", "dlogits"):
            return logits_args(self.epilogue, self)
        if self.epilogue == "rows":
            return RowsOutArgs()
        if self.rounding_residual:
            return ResidualArgs()
        return ScaledArgs() if self.scaled else None


def logits_args(kind: str, p: "GemmProblem") -> SoftmaxArgs | DlogitsArgs:
    """The arguments of epilogue `kind` of the logits."""
    shared = dict(
        bias=optional(p.bias_dtype), class_weight=F32 if p.weighted else None,
        logit_scale=F32 if p.logit_scale else None,
    )  # fmt: skip
    if kind == "dlogits":
        return DlogitsArgs(**shared, coef_entropy=F32 if p.entropy else None)
    return SoftmaxArgs(
        **shared, part_wsum=F32 if p.smoothing else None, part_elog=F32 if p.return_stats else None,
        argmax_bits=I64 if p.return_stats else None,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class GemmConfig:
    """Tiles of tile_m x tile_n, TILE_K deep, computed by consumer warp groups; one producer warp group loads.

    Cooperative: each consumer warp group has 64 rows of the tile. `pingpong`: each of two consumer warp groups has its
    own tile, and one runs its mainloop while the other runs its epilogue. (A `recompute_flagged` problem ignores
    `pingpong`, which cannot skip tiles.)

    The CTAs of a cluster of cluster_m x cluster_n multicast their loads. Tiles are processed in groups of `group`
    clusters along `group_along` ("m" or "n"), each group along the whole other dimension, for L2 hits within a group.
    """

    tile_m: int = 128
    tile_n: int = 256
    cluster_m: int = 2
    cluster_n: int = 1
    num_stages: int = 4
    group: int = 8
    group_along: str = "m"
    pingpong: bool = False

    @property
    def num_wgs(self) -> int:
        """Consumer warp groups."""
        return 2 if self.pingpong else self.tile_m // BLOCK_M

    @property
    def row_blocks(self) -> int:
        """Blocks of 64 rows per consumer warp group and tile."""
        return self.tile_m // BLOCK_M if self.pingpong else 1

    @property
    def num_buffers(self) -> int:
        """Output buffers of at most 64 columns per warp group.

        One with ping-pong: stores overlap with the other warp group's mainloop, so a stage is a better use of the
        memory. One also if a tile has an odd number of pieces: the next tile would start with the buffer in use.
        """
        return 1 if self.pingpong or self.tile_n % 128 else 2

    @property
    def cluster_rows(self) -> int:
        """Rows of a cluster's tile."""
        return self.tile_m * self.cluster_m

    @property
    def threads(self) -> int:
        return 128 * (1 + self.num_wgs)

    @property
    def consumer_registers(self) -> int:
        """Registers per consumer thread: the SM's registers minus the producer's, at most 240."""
        return {1: 240, 2: 240, 3: 160, 4: 112}[self.num_wgs]

    def max_clusters(self, sm_count: int) -> int:
        """Clusters that are resident at once, with one CTA per SM."""
        return sm_count // (self.cluster_m * self.cluster_n)

    def tail_room(self, m: int, n: int, k: int, clusters: int) -> tuple[int, int]:
        """(splits, floats) of `split_k_tail`'s scratch: enough if all rows are live, and at least one per cluster.

        With fewer live rows, the kernel makes no more splits than fit.
        """
        cluster_m, cluster_n = self.tile_m * self.cluster_m, self.tile_n * self.cluster_n
        tiles = -(-m // cluster_m) * -(-n // cluster_n)
        splits = max(clusters, num_tail_splits(tiles, -(-k // TILE_K), clusters))
        return splits, splits * cluster_m * cluster_n


def gemm_config(problem: GemmProblem, gpu: Gpu) -> GemmConfig:
    """Independent of the shape, so that a row's partial sums and loss do not depend on M."""
    # bf16, M 8192, H 4096, V 128256, in ms (in parentheses cuBLAS's GEMM without epilogue):
    #                    H100            H200
    # logits ping-pong   11.88 (12.37)   12.43 (12.81)
    # dx cooperative     12.01 (11.96)   12.46 (12.25)
    # dw ping-pong       11.73 (12.65)   12.22 (12.69)
    #    groups of 8     12.92           12.52
    #    cooperative     12.44           12.68
    # Logits: exponentials take as long as a mainloop with K = 256, and ping-pong overlaps them. dx: the loads of
    # ping-pong's narrower tiles cost more than it gains. Groups are 2048 rows or columns wide: dw takes up to 5 %
    # longer in groups of 4096 columns, and 44 % in groups of 1024 with 16,384 rows (H100).
    if problem.epilogue in ("softmax", "dlogits"):
        pingpong = _has_registers(problem) and not problem.recompute_flagged
        return GemmConfig(tile_n=SOFTMAX_TILE_N[gpu.family], num_stages=5, pingpong=pingpong)
    if problem.live == "k" and not problem.split_k_tail:
        return DW_PINGPONG
    return GemmConfig(group_along="n")


DW_PINGPONG = GemmConfig(tile_m=192, tile_n=128, num_stages=5, group=16, group_along="n", pingpong=True)
MAX_IDLE = 0.06  # fraction of the clusters' time, which is the gain of ping-pong for dw


def splits_tails(gpu: Gpu) -> bool:
    """True if the GPU's GEMM has `split_k_tail`. Its constants were fitted on Hopper."""
    return gpu.family == "sm_90"


@functools.lru_cache(maxsize=1024)
def splits_dw_tail(m: int, n: int, gpu: Gpu) -> bool:
    """True if split-K in the tail of dw (m, n) is faster than ping-pong, as for few tiles. Independent of K."""
    if not splits_tails(gpu):
        return False
    c = DW_PINGPONG
    tiles = -(-m // (c.tile_m * c.cluster_m)) * -(-n // (c.tile_n * c.cluster_n))
    clusters = c.max_clusters(gpu.sm_count)
    return -tiles % clusters > MAX_IDLE * tiles


def _has_registers(problem: GemmProblem) -> bool:
    """True if ping-pong leaves enough registers for the epilogue; otherwise 8 to 264 bytes spill."""
    if problem.smoothing and problem.out_dtype:
        return False
    if problem.return_stats and problem.bias_dtype and (problem.out_dtype or problem.weighted):
        return False
    if problem.entropy and (problem.softcap or problem.bias_dtype):
        return False
    return not ((problem.softcap or problem.logit_scale) and problem.bias_dtype and problem.out_dtype)


# Split-K in the tail -------------------------------------------------------------------------------------------------

MIN_STEPS = 4  # along k, per split
MAX_SPLITS = 8  # per tile, in several rounds
MAX_ROUNDS = 4  # limits the scratch to 69 MB on an H200
MIN_GAIN = 32  # steps that additional rounds must save


def steps_of_splits(splits, tail, k_tiles, clusters):
    """Estimated time of `tail` tiles with `splits` splits each, in steps along k of 0.7 us.

    Splitting costs 14 steps, a round 3, a split 1 (fitted on an H200).
    """
    rounds = (tail * splits + clusters - 1) // clusters
    return rounds * ((k_tiles + splits - 1) // splits + 3) + splits + 14


@functools.lru_cache(maxsize=1024)
def num_tail_splits(tiles: int, k_tiles: int, clusters: int) -> int:
    """The total number of splits of a GEMM's tail tiles, as the kernel chooses with all rows live.

    dx takes 0.98 of its unsplit time at M 8192 and at M 16384 (H200, H 4096, V 128256).
    """
    tail, splits, steps = tiles % clusters, 1, k_tiles
    if tail == 0:
        return 0
    n = clusters // tail
    if k_tiles >= MIN_STEPS * n and (n_steps := steps_of_splits(n, tail, k_tiles, clusters)) < steps:
        splits, steps = n, n_steps
    for n in range(2, MAX_SPLITS + 1):
        n_steps = steps_of_splits(n, tail, k_tiles, clusters)
        if n * tail <= MAX_ROUNDS * clusters and n_steps + MIN_GAIN <= steps:
            splits, steps = n, n_steps
    return tail * splits


# Legality ------------------------------------------------------------------------------------------------------------

MIN_REGISTERS = 40  # per consumer thread, in addition to the accumulator; fewer were not tried
STAGED_BYTES = BLOCK_M * 128  # per output buffer: 128 bytes of each row of a warp group


def gemm_smem_bytes(problem: GemmProblem, config: GemmConfig) -> int:
    """Shared memory per CTA: stages of A and B, output buffers, barriers and alignment."""
    stages = config.num_stages * (config.tile_m + config.tile_n) * TILE_K * 2
    output = STAGED_BYTES * config.num_buffers * config.num_wgs if problem.out_dtype is not None else 0
    return stages + output + 4 * config.num_wgs * problem.split_k_tail + 1024


def gemm_why_illegal(problem: GemmProblem, config: GemmConfig, gpu: Gpu) -> str | None:
    """Why `config` cannot run `problem`: the field, its value and the legal values. None if it can."""
    p, c = problem, config
    if reason := fields_why_illegal(c):
        return reason
    if c.pingpong and (p.split_k_tail or p.epilogue not in ("softmax", "dlogits", "store")):
        return "pingpong is True; expected False, as the problem splits tiles along k or scatters their rows"

    # assumptions of other kernels
    if reason := softmax_why_illegal(p, c, gpu):
        return reason
    if p.epilogue in ("softmax", "dlogits") and c.tile_m * c.cluster_m % ROW_TILE:
        return (
            f"tile_m is {c.tile_m} with cluster_m {c.cluster_m}, {c.tile_m * c.cluster_m} rows per cluster; expected a "
            f"multiple of {ROW_TILE}, the number of rows that are flagged and cleared together"
        )
    return space_why_illegal(c, gemm_smem_bytes(p, c), gpu)


def softmax_why_illegal(p: GemmProblem, c: Any, gpu: Gpu) -> str | None:
    expected = SOFTMAX_TILE_N[gpu.family]
    if p.epilogue == "softmax" and c.tile_n != expected:
        return (
            f"tile_n is {c.tile_n}; expected {expected}, the number of classes per partial sum of the softmax, which "
            "other kernels add up"
        )
    return None


def fields_why_illegal(c: GemmConfig) -> str | None:
    """The checks of `gemm_why_illegal` that do not depend on the problem."""
    return raster_why_illegal(c, {
        "tile_m": (64, 128, 192, 256), "tile_n": (128, 192, 256), "cluster_m": (1, 2, 4), "cluster_n": (1, 2),
        "group_along": ("m", "n"),
    })  # fmt: skip


def raster_why_illegal(c: Any, legal: dict[str, tuple]) -> str | None:
    """Why a config's tiles or their order are illegal. legal: the values of its fields."""
    for field, values in legal.items():
        if getattr(c, field) not in values:
            return f"{field} is {getattr(c, field)!r}; expected one of {', '.join(map(repr, values))}"
    if c.num_stages < 2:
        return f"num_stages is {c.num_stages}; expected at least 2"
    if not 1 <= c.group <= 256:  # kernels multiply it by the clusters of the other dimension, in 32 bits
        return f"group is {c.group}; expected from 1 to 256"
    return None


def space_why_illegal(c: GemmConfig, smem_bytes: int, gpu: Gpu) -> str | None:
    """The checks of `gemm_why_illegal` for registers and shared memory."""
    accumulators = c.row_blocks * c.tile_n // 2
    if accumulators + MIN_REGISTERS > c.consumer_registers:
        return (
            f"tile_n is {c.tile_n} with tile_m {c.tile_m}, {accumulators} accumulator registers; expected at most "
            f"{c.consumer_registers - MIN_REGISTERS}, as a thread has {c.consumer_registers} registers"
        )
    if smem_bytes > gpu.smem_bytes:
        return (
            f"num_stages is {c.num_stages} with tiles of {c.tile_m} x {c.tile_n} x {TILE_K}, {smem_bytes} bytes of "
            f"shared memory; expected at most {gpu.smem_bytes} on {gpu.name}"
        )
    return None
