"""The kernel of grouped_mlp: its configs, and compiled without spilled registers."""

import itertools

import pytest
from variants import check_compiles, some

from quackish.configs.gemm import GemmConfig
from quackish.configs.grouped_gemm import (
    GroupedGemmProblem,
    cluster_n_for,
    grouped_gemm_buffers,
    grouped_gemm_config,
    grouped_gemm_why_illegal,
    max_groups_for,
)
from quackish.gpu import H200


def problem(epilogue, dtype="bfloat16", **fields):
    return GroupedGemmProblem(epilogue, dtype, **{"max_groups": 64, "out_dtype": dtype, **fields})


ACTIVATIONS = {"swiglu": True, "clamped_swiglu": True, "geglu": True, "relu2": False}  # gated or not
UP = [
    *(
        problem("up", activation=name, biased=True, scaled=True, keeps=True, b_in_two=gated)
        for name, gated in ACTIVATIONS.items()
    ),
    *(
        problem("up", activation="swiglu", biased=biased, scaled=biased, keeps=keeps)
        for biased, keeps in itertools.product((True, False), (True, False))
    ),
]
DOWN_BACKWARD = [
    *(problem("down_backward", activation=name, scaled=True, b_major="n") for name in ACTIVATIONS),
    problem("down_backward", activation="swiglu", b_major="n"),
]
OTHERS = [
    problem("down", biased=True),
    problem("down", "float16", deep=True),
    problem("down", b_major="n", b_in_two=True),
    problem("down", b_major="n", b_in_two=True, deep=True),
    problem("store"),
    problem("store", out_dtype="float32", accumulate=True),
    problem("store", "float16", cluster_n=2),
    problem("up", max_groups=1024, activation="swiglu", scaled=True, keeps=True),
    problem("store", max_groups=1024),
]
PROBLEMS = [*UP, *DOWN_BACKWARD, *OTHERS]


@pytest.mark.parametrize("problem", some(PROBLEMS, 4), ids=str)
def test_compiles(problem):
    check_compiles("grouped_gemm", problem, grouped_gemm_config(problem, H200), H200)


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_the_rules_config_is_legal(problem):
    config = grouped_gemm_config(problem, H200)
    assert grouped_gemm_why_illegal(problem, config, H200) is None
    if problem.epilogue == "down_backward":  # the activation and two gradients: no store waits for the one before
        assert grouped_gemm_buffers(problem, config) == 2 + problem.gated


def test_illegal_configs_are_refused():
    up = problem("up", activation="swiglu")
    assert "accumulator registers" in grouped_gemm_why_illegal(up, GemmConfig(tile_m=256, pingpong=True), H200)
    assert "num_stages is 6" in grouped_gemm_why_illegal(up, GemmConfig(num_stages=6), H200)


def test_problems_are_few():
    assert [max_groups_for(n) for n in (1, 64, 65, 128, 1024)] == [64, 64, 128, 128, 1024]
    assert cluster_n_for(1536, 2048) == 1  # covered exactly either way
    assert cluster_n_for(2048, 768) == 2  # 2048 in tiles of 384 rows leaves 256 over
    assert cluster_n_for(5760, 2880) == 1
