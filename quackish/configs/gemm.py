"""The GEMMs of linear cross entropy: what is asked (Problem) and how it is done (Config)."""

import dataclasses
import functools

from quackish.configs.lce_rows import ROW_TILE
from quackish.gpu import Gpu

# `cut_last`: counters that are 0 before and after, one for each warp group of a tile that is cut: 4 a CTA at most.
NUM_TICKETS = 1024

TILE_K = 64  # 128 bytes, the span of a swizzle. Two stages of 128 took 50 % longer (H200).
PRODUCER_REGISTERS = 24
SOFTMAX_TILE_N = 192  # how many classes a partial sum of the softmax runs over


@dataclasses.dataclass(frozen=True)
class GemmProblem:
    """D[m, n] = sum over k of A[m, k] * B[n, k], in fp32, and what becomes of it.

    `epilogue`:
    - "softmax": A is rows of the input, B classes. Of the logits a: exp_logits = exp(a - row_shift) * d, their sum per
      row and tile, and the target's logit.
    - "dlogits": A is rows of the input, B classes. The gradient of the logits, from statistics computed before.
    - "rows": row i of D, scaled, to row order[i] of the output.
    - "store": D as it is, or times a factor; or added to an fp32 output.
    `live`: which dimension ends at the number of live rows that the device counted: "m", or "k".
    """

    epilogue: str
    dtype: str  # of A and B: "bfloat16" or "float16"
    out_dtype: str | None  # None: nothing is stored but statistics
    a_major: str = "k"  # "k" or "m": the dimension that is contiguous in A
    b_major: str = "k"  # "k" or "n"
    live: str = "m"
    bias_dtype: str | None = None  # softmax, dlogits
    softcap: bool = False  # softmax, dlogits
    smoothing: bool = False  # softmax: row sums of class weight * logit too; dlogits: the smoothed target
    weighted: bool = False  # class weights, where there is smoothing
    redo: bool = False  # softmax: only the tiles that a first launch flagged, with their rows' maxima for row_shift
    accumulate: bool = False  # store: D is added to the output
    scaled: bool = False  # store: D is multiplied by a number that the device has
    rest: bool = False  # store, bf16: the bits that rounding cuts off rows that have a place are kept
    split_k: bool = False  # A lies in two buffers: its first columns, and the others
    split_n: bool = False  # softmax: D does
    cut_last: bool = False  # rows, store: a last wave that would leave clusters idle is cut along k


@dataclasses.dataclass(frozen=True)
class GemmConfig:
    """Tiles of tile_m x tile_n, tile_k deep; a warp group of four warps has 64 rows of a tile, another one loads.

    Clusters of cluster_m x cluster_n CTAs share what they load. Tiles are walked in groups of `group` clusters along
    `group_along` ("m" or "n"), all of the other dimension for each, so that what a group reads again is in the L2.
    With `pingpong` two warp groups have a tile each, all of its rows, by turns: one multiplies, while the other works
    on its sums. (Not where tiles are done again: these are found one by one.)
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
        return 2 if self.pingpong else self.tile_m // 64

    @property
    def row_blocks(self) -> int:
        """Blocks of 64 rows that a warp group has of a tile."""
        return self.tile_m // 64 if self.pingpong else 1

    @property
    def num_buffers(self) -> int:
        """Pieces of the output, 64 columns or fewer, that a warp group has on their way at a time.

        One where the other warp group multiplies meanwhile, which leaves room for a stage more; and where a tile has
        an odd number of them: the next tile would begin with the buffer that is still being read.
        """
        return 1 if self.pingpong or self.tile_n % 128 else 2

    @property
    def threads(self) -> int:
        return 128 * (1 + self.num_wgs)

    @property
    def consumer_registers(self) -> int:
        """Registers of a thread that multiplies: what the producer's leave of an SM's, at most 240."""
        return {1: 240, 2: 240, 3: 160, 4: 112}[self.num_wgs]

    @property
    def launch_registers(self) -> int:
        """A thread's, when it starts: what there is for each, but no more than the warps that multiply ask for."""
        return min(65_536 // self.threads // 8 * 8, self.consumer_registers)  # allocated in eights

    def max_clusters(self, sm_count: int) -> int:
        """Clusters that run at a time: one CTA fits an SM."""
        return sm_count // (self.cluster_m * self.cluster_n)

    def last_wave_room(self, m: int, n: int, k: int, clusters: int) -> tuple[int, int]:
        """Pieces of tiles that `cut_last` has scratch for, one a cluster at least, and how many floats that is.

        `m`, or `k`, with all rows live: of fewer, no more are made.
        """
        m_tile, n_tile = self.tile_m * self.cluster_m, self.tile_n * self.cluster_n
        tiles = -(-m // m_tile) * -(-n // n_tile)
        pieces = max(clusters, last_wave_pieces(tiles, -(-k // TILE_K), clusters))
        return pieces, pieces * m_tile * n_tile


def gemm_config(problem: GemmProblem, gpu: Gpu) -> GemmConfig:
    """The same for every shape: a row's partial sums, and so its loss, must not depend on M.

    An H200, bf16, ms with cuBLAS's plain GEMM in brackets, in random order in runs that keep the card at its power
    limit. "Together": tiles of 128 x 256, both warp groups on one, stored under the next one's products.
        softmax              with pingpong   without E  together   dlogits  together
        1024, 4096, 128256   1.525 (1.591)   1.512      1.573      1.519    1.576
        4096, 2048, 32000    0.757 (0.828)   0.764      0.836      0.764    0.834
        8192, 2048, 151936   7.10 (7.58)     7.08       7.78       7.13     7.79
        8192, 4096, 128256   12.27 (12.43)   12.03      12.47      12.15    12.37
        dw                   192 x 128       128 x 192  together
        1024, 4096, 128256   1.501 (1.729)   1.562      1.651
        2048, 4096, 128256   2.976 (3.241)   3.078      3.191
        4096, 4096, 128256   6.022 (6.251)   6.115      6.305
        4096, 2048, 32000    0.798 (0.812)   0.786      0.820
        4096, 1024, 50304    0.595 (0.608)   0.667      0.625
        8192, 2048, 151936   7.12 (7.07)     7.36       7.27
        8192, 4096, 128256   12.16 (12.59)   12.57      12.21
        rows (dx)            together, without waiting; its last wave is cut
        1024, 4096, 128256   1.542 (1.522)
        4096, 2048, 32000    0.768 (0.772)
        8192, 2048, 151936   7.22 (7.28)
        8192, 4096, 128256   11.86 (12.11)
    Exponentials take as long as products 256 deep, at MUFU's rate of 16 a cycle, and without pingpong all clusters
    write their tiles while none multiplies. What it loads more, for narrower tiles, costs dx more than it has to gain:
    10 to 50 %, the last wave not cut. Of logits by turns `group` 4 and
    16, along m or n, and clusters of 1 x 2 are within 2 % of this, or up to 4 % slower; rows take 1 % less along n with
    H 2048. L2 eviction hints, first or last, for A, B and D gained nothing (together; logits, dx; 4096, 2048, 32000).
    A dw in fp32, added to or not, is no better together either; whole steps, of those by turns: 65536, 4096, 128256 by
    16384 rows 0.998, 16384 by 8192 1.00, 8192 at once 1.015, 8192, 2048, 32000 by 2048 1.04; "recompute" by 128 0.994.
    """
    if problem.epilogue in ("softmax", "dlogits"):
        by_turns = _has_registers(problem) and not problem.redo
        return GemmConfig(tile_n=SOFTMAX_TILE_N, num_stages=5, pingpong=by_turns)
    if problem.live == "k" and not problem.cut_last:
        return DW_BY_TURNS
    return GemmConfig(group_along="n")


DW_BY_TURNS = GemmConfig(tile_m=192, tile_n=128, num_stages=5, group_along="n", pingpong=True)
MOST_IDLE = 0.06  # of what they could do: what dw gains by turns, see `gemm_config`


@functools.lru_cache(maxsize=1024)
def cuts_dw(m: int, n: int, sm_count: int) -> bool:
    """Whether dw (m, n), of few tiles, is better cut in its last wave than made by turns. k has no say."""
    c = DW_BY_TURNS
    tiles = -(-m // (c.tile_m * c.cluster_m)) * -(-n // (c.tile_n * c.cluster_n))
    clusters = c.max_clusters(sm_count)
    return -tiles % clusters > MOST_IDLE * tiles


def _has_registers(problem: GemmProblem) -> bool:
    """Whether an epilogue on logits works in what 128 x 192 sums leave of a warp group's registers: else 8 to 256 bytes
    spill."""
    if problem.smoothing and problem.out_dtype:
        return False
    return not (problem.softcap and problem.bias_dtype and problem.out_dtype)


# The last wave ------------------------------------------------------------------------------------------------------

LEAST_STEPS = 4  # along k, of a piece
MOST_PIECES = 8  # a tile, in several rounds
MOST_ROUNDS = 4  # that there is scratch for: 69 MB on an H200
WORTH_ROUNDS = 32  # steps that more rounds must save


def steps_of_pieces(pieces, rest, k_tiles, clusters):
    """What `rest` tiles of a last wave take in so many pieces each, in steps along k of 0.7 us.

    Cutting costs 14, a round 3, a piece 1. (Of 10 tiles in 6 pieces, on an H200, 53 steps less should gain 35 us and
    gained 20.)
    """
    rounds = (rest * pieces + clusters - 1) // clusters
    return rounds * ((k_tiles + pieces - 1) // pieces + 3) + pieces + 14


@functools.lru_cache(maxsize=1024)
def last_wave_pieces(tiles: int, k_tiles: int, clusters: int) -> int:
    """How many pieces `cut_last` makes of the last wave of so many cluster tiles: what it needs scratch for.

    dX on an H200, of uncut: M 8192, H 4096, V 128256 in 5 x 50 pieces 0.981, M 16384 in 7 x 34 pieces 0.982; M 8192,
    H 2048, V 151936 in 9 x 58 pieces gained nothing.
    """
    rest, pieces, steps = tiles % clusters, 1, k_tiles
    if rest == 0:
        return 0
    n = clusters // rest
    if k_tiles >= LEAST_STEPS * n and (of_n := steps_of_pieces(n, rest, k_tiles, clusters)) < steps:
        pieces, steps = n, of_n
    for n in range(2, MOST_PIECES + 1):
        of_n = steps_of_pieces(n, rest, k_tiles, clusters)
        if n * rest <= MOST_ROUNDS * clusters and of_n + WORTH_ROUNDS <= steps:
            pieces, steps = n, of_n
    return rest * pieces


# Legality ------------------------------------------------------------------------------------------------------------

LEAST_REGISTERS = 40  # of a thread that multiplies, beside its sums: no kernel of fewer was tried
STAGED_BYTES = 64 * 128  # a piece of the output: 128 bytes of each of a warp group's rows


def gemm_smem_bytes(problem: GemmProblem, config: GemmConfig) -> int:
    """Shared memory of a CTA: stages of A and B, the output on its way, barriers and what aligning them takes."""
    stages = config.num_stages * (config.tile_m + config.tile_n) * TILE_K * 2
    output = STAGED_BYTES * config.num_buffers * config.num_wgs if problem.out_dtype is not None else 0
    return stages + output + 4 * config.num_wgs * problem.cut_last + 1024


def gemm_why_illegal(problem: GemmProblem, config: GemmConfig, gpu: Gpu) -> str | None:
    """Why `config` cannot multiply for `problem`: the field, what it is, what it may be. None where it can."""
    p, c = problem, config
    legal = {
        "tile_m": (64, 128, 192, 256),
        "tile_n": (128, 192, 256),
        "cluster_m": (1, 2, 4),
        "cluster_n": (1, 2),
        "group_along": ("m", "n"),
    }
    for field, values in legal.items():
        if getattr(c, field) not in values:
            return f"{field} is {getattr(c, field)!r}; expected one of {', '.join(map(repr, values))}"
    if c.pingpong and (p.cut_last or p.epilogue not in ("softmax", "dlogits", "store")):
        return "pingpong is True; expected False: tiles are taken by turns where all are whole, and none is scattered"
    for field, least in (("num_stages", 2), ("group", 1)):
        if getattr(c, field) < least:
            return f"{field} is {getattr(c, field)}; expected at least {least}"

    # what the kernels around it count on
    if p.epilogue == "softmax" and c.tile_n != SOFTMAX_TILE_N:
        return (
            f"tile_n is {c.tile_n}; expected {SOFTMAX_TILE_N}, as a partial sum of the softmax, which other kernels "
            "add up, is over so many classes"
        )
    if p.epilogue in ("softmax", "dlogits") and c.tile_m * c.cluster_m % ROW_TILE:
        return (
            f"tile_m is {c.tile_m} with cluster_m {c.cluster_m}, {c.tile_m * c.cluster_m} rows a cluster; expected a "
            f"multiple of {ROW_TILE}, as rows are flagged and cleared by so many"
        )

    # registers
    sums = c.row_blocks * c.tile_n // 2
    if sums + LEAST_REGISTERS > c.consumer_registers:
        return (
            f"tile_n is {c.tile_n} with tile_m {c.tile_m}, {sums} sums per thread; expected at most "
            f"{c.consumer_registers - LEAST_REGISTERS}, as a thread has {c.consumer_registers} registers"
        )

    needed = gemm_smem_bytes(p, c)
    if needed > gpu.smem_bytes:
        return (
            f"num_stages is {c.num_stages} with tiles of {c.tile_m} x {c.tile_n} x {TILE_K}, {needed} bytes of "
            f"shared memory; expected at most {gpu.smem_bytes} on {gpu.name}"
        )
    return None
