"""The kernel of grouped_mlp: its configs, and compiled without spilled registers."""

import itertools

import pytest

from quackish.gpu import H100, H100_NVL, H200
from quackish.kernels.gemm.grouped_problem import (
    grouped_gemm_buffers,
    grouped_gemm_smem_bytes,
    grouped_gemm_why_illegal,
    max_groups_for,
)
from quackish.kernels.gemm.sm90_config import GemmConfig
from quackish.ops.mlp import gemm_problems
from quackish.ops.mlp.gemm_problems import (
    Down,
    DownBackward,
    MlpGemmProblem,
    Store,
    Up,
    cluster_tile_for,
    grouped_gemm_config,
)
from quackish.ops.mlp.reference import ACTIVATIONS, GATED
from tests.variants import check_compiles, one_per_epilogue


def problem(epilogue, dtype="bfloat16", **fields):
    return MlpGemmProblem(epilogue, dtype, **{"max_groups": 64, "out_dtype": dtype, **fields})


ALL = dict(biased=True, scaled=True, keeps=True)
UP = [
    *(problem(Up(f, **ALL), b_in_two=f in GATED, cluster_tile="256x192") for f in ACTIVATIONS),
    *(
        problem(Up("swiglu", biased=biased, scaled=biased, keeps=keeps), cluster_tile=tile)
        for biased, keeps, tile in itertools.product((True, False), (True, False), ("256x192", "128x256"))
    ),
    problem(Up("clamped_swiglu", biased=True, scaled=True), cluster_tile="256x192"),
    problem(Up("geglu", **ALL), "float16", cluster_tile="256x192"),
    problem(Up("swiglu", scaled=True, keeps=True), "float16"),
    problem(Up("clamped_swiglu", biased=True, scaled=True), "float16", cluster_tile="256x192"),
]
DOWN_BACKWARD = [
    *(problem(DownBackward(f, scaled=True), b_major="n", cluster_tile="256x192") for f in ACTIVATIONS),
    *(problem(DownBackward(f), b_major="n", cluster_tile="256x192") for f in ACTIVATIONS if f != "clamped_swiglu"),
    problem(DownBackward("swiglu"), b_major="n"),
    problem(DownBackward("swiglu", scaled=True), b_major="n"),
    problem(DownBackward("geglu", scaled=True), b_major="n", cluster_tile="256x128"),
    problem(DownBackward("clamped_swiglu"), b_major="n", cluster_tile="256x128"),
]
OTHERS = [
    *(problem(Down(biased=True, residual=True), cluster_tile=t) for t in ("128x256", "256x192", "128x512")),
    problem(Down(biased=True)),
    problem(Down(), "float16", cluster_tile="128x512"),
    problem(Down(), b_major="n", b_in_two=True),
    problem(Down(), b_major="n", b_in_two=True, cluster_tile="128x512"),
    problem(Down(biased=True), cluster_tile="256x192"),
    problem(Down(), b_major="n", b_in_two=True, cluster_tile="256x192"),
    *(
        problem(Down(biased=True, residual=True), dtype, cluster_tile=tile)
        for dtype, tile in (("bfloat16", "256x192"), ("float16", "256x192"), ("bfloat16", "128x512"))
    ),
    problem(Down(residual=True), b_major="n", cluster_tile="128x256"),
    problem(Store()),
    problem(Store(accumulate=True), out_dtype="float32", cluster_tile="256x192"),
    problem(Store(accumulate=True), out_dtype="float32", cluster_tile="192x256"),
    problem(Store(accumulate=True), out_dtype="float32"),
    problem(Store(), "float16", cluster_tile="192x256"),
    problem(Up("swiglu", scaled=True, keeps=True), max_groups=1024, b_in_two=True),
    problem(Store(), max_groups=1024, cluster_tile="256x192"),
    problem(Up("swiglu", keeps=True), max_groups=1),
    problem(Store(), max_groups=1),
]
PROBLEMS = [*UP, *DOWN_BACKWARD, *OTHERS]


@pytest.mark.exhaustive
@pytest.mark.parametrize("problem", one_per_epilogue(PROBLEMS), ids=str)
def test_compiles(problem):
    config = grouped_gemm_config(problem, H200)
    used = check_compiles("grouped_gemm", problem, config, H200)
    assert used.smem_bytes <= grouped_gemm_smem_bytes(problem, config)


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_the_rules_config_is_legal(problem):
    config = grouped_gemm_config(problem, H200)
    assert grouped_gemm_why_illegal(problem, config, H200) is None
    if isinstance(problem.epilogue, DownBackward):  # the activation, and two sets of the preactivation's parts
        assert grouped_gemm_buffers(problem, config) == 1 + 2 * (1 + problem.epilogue.gated)


def test_illegal_configs_are_refused():
    up = problem(Up("swiglu"))
    assert "accumulator registers" in grouped_gemm_why_illegal(up, GemmConfig(tile_m=256, pingpong=True), H200)
    assert "num_stages is 6" in grouped_gemm_why_illegal(up, GemmConfig(num_stages=6), H200)


def test_kernels_and_reference_have_the_same_gated_activations():
    assert gemm_problems.GATED == GATED


def test_problems_are_few():
    assert [max_groups_for(n) for n in (None, 1, 64, 65, 128, 1024)] == [1, 64, 64, 128, 128, 1024]


TILES = [  # epilogue, (m, n, k), the tile on an H100
    (Store(), (1536, 2048, None), "192x256"),
    (Store(), (28_672, 4096, None), "192x256"),
    (Store(), (2048, 2048, None), "128x256"),
    (Store(), (5760, 2880, None), "256x192"),
    (Down(), (None, 2048, 768), "256x192"),
    (Down(), (None, 1024, 768), "128x256"),
    (Down(), (None, 2880, 5760), "256x192"),
    (Down(), (None, 4096, 4096), "128x512"),
    (Up("swiglu"), (None, 2 * 14_336, 4096), "256x192"),
    (Up("swiglu"), (None, 2 * 128, 64), "128x256"),
    (DownBackward("swiglu"), (None, 768, 2048), "128x256"),
    (DownBackward("swiglu"), (None, 768, 4096), "256x192"),
    (DownBackward("swiglu"), (None, 256, 2048), "128x256"),
    (DownBackward("swiglu"), (None, 640, 2048), "256x128"),
    (DownBackward("clamped_swiglu"), (None, 2880, 2880), "256x128"),
]


@pytest.mark.parametrize("epilogue, sizes, tile", TILES)
def test_tiles_pad_little(epilogue, sizes, tile):
    chosen = problem(epilogue, cluster_tile=cluster_tile_for(problem(epilogue), H100, *sizes))
    assert chosen.cluster_tile == tile
    assert grouped_gemm_why_illegal(chosen, grouped_gemm_config(chosen, H100), H100) is None


def test_fast_memory_prefers_small_tiles():
    tiles = {gpu.name: cluster_tile_for(problem(Down()), gpu, None, 2048, 768) for gpu in (H100, H200, H100_NVL)}
    assert tiles == {"H100": "256x192", "H200": "128x256", "H100 NVL": "256x192"}
