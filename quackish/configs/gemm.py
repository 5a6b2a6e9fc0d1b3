"""The GEMMs of linear cross entropy: what is asked (Problem) and how it is done (Config)."""

import dataclasses

from quackish.gpu import Gpu


@dataclasses.dataclass(frozen=True)
class GemmProblem:
    """D[m, n] = sum over k of A[m, k] * B[n, k], in fp32, and what becomes of it.

    `epilogue`:
    - "softmax": A rows, B classes. E = exp(a - ref) * d for the logits a, its row sums a tile, the target's logit.
    - "dlogits": A rows, B classes. The gradient of the logits, their statistics being known.
    - "rows": row i of D, scaled, to row order[i] of the output.
    - "store": D as it is; or added to an fp32 output.
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
    redo: bool = False  # softmax: only the tiles that a first launch flagged, with their rows' maxima for ref
    accumulate: bool = False  # store: D is added to the output
    split_k: bool = False  # A lies in two buffers: its first columns, and the others


@dataclasses.dataclass(frozen=True)
class GemmConfig:
    """Tiles of tile_m x tile_n, tile_k deep; a warp group of four warps has 64 rows of a tile, another one loads.

    Clusters of cluster_m x cluster_n CTAs share what they load. Tiles are walked in groups of `group` clusters along
    `group_along` ("m" or "n"), all of the other dimension for each, so that what a group reads again is in the L2.
    """

    tile_m: int = 128
    tile_n: int = 256
    tile_k: int = 64
    cluster_m: int = 2
    cluster_n: int = 1
    num_stages: int = 4
    group: int = 8
    group_along: str = "m"
    producer_registers: int = 24
    consumer_registers: int = 240

    @property
    def num_wgs(self) -> int:
        return self.tile_m // 64

    @property
    def threads(self) -> int:
        return 128 * (1 + self.num_wgs)

    def max_clusters(self, sm_count: int) -> int:
        """Clusters that run at a time: one CTA fits an SM."""
        return sm_count // (self.cluster_m * self.cluster_n)


def gemm_config(problem: GemmProblem, gpu: Gpu) -> GemmConfig:
    """The same for every shape: a row's partial sums, and so its loss, must not depend on M.

    An H200, bf16, ms with cuBLAS's plain GEMM in brackets, in random order in one run that keeps the card at its power
    limit; dw adding to fp32 sums last. (The code that ran also kept 16-bit tiles back to store them under the next
    tile's products; store took the same time with and without, so it is gone.)
        M, H, V              softmax        rows (dx)      store (dw)
        4096, 2048, 32000    0.840 (0.810)  0.750 (0.749)  0.790 (0.792), 0.837
        8192, 2048, 151936   7.96 (7.67)    7.19 (7.25)    7.16 (7.20), 7.25
        8192, 4096, 128256   13.11 (12.83)  12.62 (12.61)  12.52 (12.83), 12.82
    `group` 2 to 32, along m or n, clusters of 1 x 2 and a warp group that lags behind the other are within 1 % of this
    or slower; tile_n 192 costs 1 to 14 %, two stages of tile_k 128 50 %. The exponentials are what softmax costs over
    a plain GEMM, 2 to 5 %: 2048 cycles a tile at MUFU's rate of 16 a cycle. Working out a quarter of them by polynomial
    gains nothing.
    """
    if problem.epilogue == "dlogits" and problem.smoothing:
        return GemmConfig(tile_n=128)  # 8 to 64 bytes of registers spill with 256 columns, class weights and softcap
    return GemmConfig()


def softmax_tile_n() -> int:
    """How many classes a partial sum of the softmax runs over."""
    return GemmConfig.tile_n
