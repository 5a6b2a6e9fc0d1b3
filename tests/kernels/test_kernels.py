"""Kernels compiled for Hopper and Blackwell on any host: no register spills, and the expected number of CTAs per SM."""

import pytest

from quackish.cli import call_arguments
from quackish.cli.parser import Parser
from quackish.device.choose import analytical
from quackish.errors import UnsupportedError
from quackish.gpu import B300, H200
from quackish.ops.rms_norm.problems import (
    MAX_N,
    MAX_N_TWO_SUMS,
    RmsNormBwdProblem,
    RmsNormFwdProblem,
    rms_norm_bwd_config,
    rms_norm_fwd_config,
)
from tests.variants import all_pairs, check_compiles, on_gpus, one_per_kernel

BF16, FP32 = "bfloat16", "float32"
# Both sides of the thresholds in quackish/ops/rms_norm/problems.py, and awkward sizes.
SIZES = (8, 136, 264, 640, 1000, 1032, 2560, 3080, 5120, 5128, 8192, 8200, 16_384, 16_392)
LARGE = (20_000, 65_536, 131_072, MAX_N)


def forward_problems():
    for n in SIZES + LARGE:
        yield RmsNormFwdProblem(n, BF16, BF16, FP32)
    for n in SIZES[1::2] + LARGE:
        yield RmsNormFwdProblem(n, BF16, BF16, FP32, FP32, FP32, packed=False)
    for n in (256, 4096, 8192, 32_768):
        yield RmsNormFwdProblem(n, BF16, BF16, BF16)
    for n in (1, 100, 4097, 40_001):
        yield RmsNormFwdProblem(n, BF16, BF16, BF16, aligned=False)
    for n in (160, 4096, 8200):
        yield RmsNormFwdProblem(n, FP32, FP32, FP32, FP32, FP32)
    yield RmsNormFwdProblem(4096, "float16", FP32)
    yield RmsNormFwdProblem(4096, BF16, BF16, BF16, None, BF16, res_dtype=FP32)
    for n, heads in ((128, 32), (16_384, 3)):
        yield RmsNormFwdProblem(n, BF16, BF16, FP32, FP32, heads=heads)


def backward_problems():
    plain = dict(weight_dtype=BF16, dx_dtype=BF16, dweight_dtype=BF16)
    everything = dict(weight_dtype=FP32, dres_dtype=FP32, dx_dtype=BF16, dresidual_dtype=FP32, dweight_dtype=FP32)
    for n in SIZES + LARGE:
        yield RmsNormBwdProblem(n, BF16, BF16, **plain)
    for n in SIZES[1::2] + LARGE:
        dbias = FP32 if n <= MAX_N_TWO_SUMS else None
        yield RmsNormBwdProblem(n, FP32, BF16, **everything, dbias_dtype=dbias, packed=False)
    for n in (176, 656, 3584):
        yield RmsNormBwdProblem(n, BF16, BF16, **plain, dres_dtype=BF16, dbias_dtype=BF16)
    for n in (1, 100, 4097, 40_001):
        yield RmsNormBwdProblem(n, BF16, BF16, **plain, aligned=False)
    yield RmsNormBwdProblem(4096, BF16, BF16, weight_dtype=BF16, dx_dtype=BF16)
    yield RmsNormBwdProblem(4096, BF16, BF16, weight_dtype=BF16, dweight_dtype=BF16)
    for n, heads in ((128, 32), (136, 33), (8192, 66), (16_392, 3)):
        yield RmsNormBwdProblem(n, BF16, BF16, **plain, heads=heads)
        yield RmsNormBwdProblem(n, FP32, BF16, **everything, dbias_dtype=FP32, packed=False, heads=heads)
    yield RmsNormBwdProblem(257, BF16, BF16, **plain, aligned=False, heads=7)
    accumulate = dict(dweight_dtype=FP32, add_dweight=True)
    yield RmsNormBwdProblem(4096, BF16, BF16, **plain | accumulate)
    yield RmsNormBwdProblem(128, BF16, BF16, **plain | accumulate, dbias_dtype=FP32, heads=32)
    for n in (512, 520, 4096):
        yield RmsNormBwdProblem(n, FP32, FP32, weight_dtype=FP32, dx_dtype=FP32, dweight_dtype=FP32)


def problems():
    yield from (("rms_norm_fwd", problem) for problem in forward_problems())
    yield from (("rms_norm_bwd", problem) for problem in backward_problems())


@pytest.mark.parametrize(
    "name, problem, gpu",
    one_per_kernel(on_gpus(all_pairs(problems()))),
    ids=lambda value: getattr(value, "target", str(value)),
)
def test_compiles(name, problem, gpu):
    config = analytical(problem, gpu).config
    check_compiles(name, problem, config, gpu, getattr(config, "ctas_per_sm", 1))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "call",
    [
        "rms_norm 8192x4096 --residual --bias",
        "linear_cross_entropy 4096x2048x32000 --bias",
        "linear_cross_entropy 4096x2048x32000 --dtype fp16 --reduction none --softcap 30",
    ],
)
def test_compiles_for_b300(call):
    """B300 uses the same sources and configs as B200, so a few problems are enough."""
    parser = Parser()
    call_arguments.add_arguments(parser)
    steps = call_arguments.dry_run_call(parser.parse_args(call.split()), B300).steps
    kernels = {(step.kernel, step.problem, step.choice.config) for step in steps if step.choice is not None}
    assert len(kernels) >= 2
    for name, problem, config in kernels:
        check_compiles(name, problem, config, B300)


def test_too_long_rows_are_refused():
    with pytest.raises(UnsupportedError, match="262152 elements; at most 262144"):
        rms_norm_fwd_config(RmsNormFwdProblem(MAX_N + 8, BF16, BF16), H200)
    with pytest.raises(UnsupportedError, match="at most 131072"):
        problem = RmsNormBwdProblem(MAX_N, BF16, BF16, BF16, dx_dtype=BF16, dweight_dtype=BF16, dbias_dtype=BF16)
        rms_norm_bwd_config(problem, H200)


def test_too_many_heads_are_refused():
    with pytest.raises(UnsupportedError, match=r"133 heads of 8192 columns, which take 133 resident .* at most 132 on"):
        rms_norm_bwd_config(RmsNormBwdProblem(8192, BF16, BF16, BF16, dx_dtype=BF16, heads=133), H200)
    rms_norm_bwd_config(RmsNormBwdProblem(8192, BF16, BF16, BF16, dx_dtype=BF16, heads=132), H200)


@pytest.mark.parametrize("heads", [1, 3, 7, 24, 32])
@pytest.mark.parametrize("n", [64, 128, 4096, 16_384])
@pytest.mark.parametrize("tokens", [1, 5, 4096])
def test_a_thread_has_rows_of_one_head(tokens, n, heads):
    problem = RmsNormBwdProblem(n, BF16, BF16, BF16, dx_dtype=BF16, dweight_dtype=BF16, heads=heads)
    config = rms_norm_bwd_config(problem, H200)
    num_ctas, tile_m = config.num_ctas(tokens * heads, H200.sm_count, heads), config.threads // config.threads_per_row
    assert num_ctas <= config.max_clusters(H200.sm_count) * config.split_n
    assert num_ctas // config.split_n * tile_m % heads == 0


@pytest.mark.parametrize("m", [1, 2, 131, 132, 133, 4096, 65_536])
@pytest.mark.parametrize("n", [256, 4096, 65_536, MAX_N])
@pytest.mark.parametrize("sm_count", [16, 132])  # a slice of a GPU, a whole one
def test_all_ctas_are_resident(n, m, sm_count):
    problem = RmsNormBwdProblem(n, BF16, BF16, BF16, dx_dtype=BF16, dweight_dtype=BF16)
    config = rms_norm_bwd_config(problem, H200)
    num_ctas = config.num_ctas(m, sm_count)
    assert num_ctas % config.split_n == 0
    assert 1 <= num_ctas <= sm_count * config.ctas_per_sm
