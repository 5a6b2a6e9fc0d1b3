"""`quackish tune`: candidates, the search with fake times, and the command's output and table."""

import dataclasses
import functools
import json
import re
import subprocess
import sys

import pytest
import torch

from quackish import config
from quackish.cli import tune as command
from quackish.cli.parser import CommandError, Parser
from quackish.device import choose, tuned
from quackish.device.kernel_device import KernelDevice, substitute
from quackish.device.launch import Resources
from quackish.gpu import A100, B200, H200, gpu_of
from quackish.kernels.gemm.problem import Store
from quackish.kernels.gemm.sm90_config import GemmConfig
from quackish.ops.attention.score_problems import (
    AttentionBiasProblem,
    AttentionForwardProblem,
    AttentionKeysProblem,
    AttentionQueriesBiasProblem,
    AttentionQueriesProblem,
)
from quackish.ops.attention.small_problems import AttentionSmallBackwardProblem, AttentionSmallForwardProblem
from quackish.ops.linear_cross_entropy.gemm_problems import Dlogits, LceGemmProblem, Logits, RowsOut, Softmax
from quackish.ops.mlp import gemm_problems as mlp
from quackish.ops.rms_norm.problems import RmsNormBwdConfig, RmsNormBwdProblem, RmsNormFwdConfig, RmsNormFwdProblem
from quackish.testing.timing import Times
from quackish.tune import cases, search
from quackish.tune.candidates import candidates
from tests import emulated_kernels, idle_kernels
from tests.emulator_cases import QUICK, emulated

BF16 = "bfloat16"
CPU = torch.device("cpu")
FORWARD = RmsNormFwdProblem(4096, BF16, BF16, BF16)
BACKWARD = RmsNormBwdProblem(4096, BF16, BF16, BF16, dx_dtype=BF16, dweight_dtype=BF16)
DX = LceGemmProblem(RowsOut(), BF16, BF16, b_major="n")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch, wide):
    """The folder of the user's table, empty."""
    monkeypatch.setenv("QUACKISH_CONFIG_DIR", str(tmp_path))
    choose.reload()
    yield tmp_path
    monkeypatch.undo()
    choose.reload()


# Candidates ----------------------------------------------------------------------------------------------------------


def problems():
    for n in (1, 100, 256, 4096, 16_384, 262_144):
        aligned = n % 8 == 0
        yield RmsNormFwdProblem(n, BF16, BF16, BF16, aligned=aligned)
        yield RmsNormBwdProblem(n, BF16, BF16, BF16, dx_dtype=BF16, dweight_dtype=BF16, aligned=aligned)
    for epilogue in (Softmax(), Dlogits()):
        yield LceGemmProblem(epilogue, BF16, BF16)
    for epilogue in (mlp.Up("swiglu", keeps=True), mlp.Down(), mlp.DownBackward("swiglu")):
        yield mlp.MlpGemmProblem(epilogue, BF16, 64, BF16)
    yield mlp.MlpGemmProblem(mlp.Store(accumulate=True), BF16, 64, "float32")
    yield DX
    for of in (AttentionForwardProblem, AttentionQueriesProblem, AttentionKeysProblem, AttentionBiasProblem):
        yield of(BF16, 64, BF16)
    for of in (AttentionQueriesBiasProblem, AttentionSmallForwardProblem, AttentionSmallBackwardProblem):
        yield of(BF16, 32, BF16)
    yield LceGemmProblem(Store(accumulate=True), BF16, "float32", a_major="m", b_major="n", live="k")


@pytest.mark.parametrize("on", [H200, B200], ids=lambda on: on.name)
def test_candidates_are_legal_and_start_with_the_analytical_choice(on):
    for problem in problems():
        if on.family not in problem.spec.on:
            continue
        found = candidates(problem, on, max_others=40)
        assert found[0] == choose.analytical(problem, on).config
        assert 1 < len(found) <= 41 or getattr(problem, "n", 999) < 64, problem
        assert len(set(found)) == len(found)
        assert found[:11] == candidates(problem, on, max_others=10)
        for one in found:
            assert problem.spec.variant(on).why_illegal(problem, one, on) is None, (problem, one)


def test_candidates_vary_every_useful_field():
    def varied(problem):
        found = candidates(problem, H200, max_others=1000)
        return found, {name: {getattr(one, name) for one in found} for name in vars(found[0])}

    found, values = varied(BACKWARD)
    assert all(len(values[name]) >= 3 for name in ("threads", "threads_per_row", "num_stages", "ctas_per_sm"))
    assert found[0] == RmsNormBwdConfig(256, 128, 3, 1)
    assert RmsNormBwdConfig(128, 128, 2, 1) not in found  # a quarter of the bytes in flight
    assert RmsNormBwdConfig(128, 128, 2, 2) in found
    found, values = varied(dataclasses.replace(BACKWARD, n=4097, aligned=False))
    assert values["num_stages"] == {0}  # unaligned rows have no stages
    assert len(found) > 5
    assert varied(dataclasses.replace(FORWARD, n=65_536))[1]["split_n"] >= {8, 16}

    found, values = varied(mlp.MlpGemmProblem(mlp.Down(), BF16, 64, BF16))
    assert all(len(values[name]) >= 2 for name in set(values) - {"group_along"})

    found, values = varied(DX)
    assert all(len(values[name]) >= 2 for name in set(values) - {"pingpong"})
    assert values["pingpong"] == {False}
    assert varied(LceGemmProblem(Softmax(), BF16, BF16))[1]["pingpong"] == {False, True}
    # 64 x 128 tiles have half the multiplications per load
    assert not [one for one in found if (one.tile_m, one.tile_n, one.cluster_m) == (64, 128, 1)]


# Spills --------------------------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
def test_configs_that_spill_do_not_fit(monkeypatch, tmp_path):
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
    monkeypatch.setenv("QUACKISH_CACHE_DIR", str(tmp_path / "cache"))
    problem, unspilled = dataclasses.replace(BACKWARD, n=256), RmsNormBwdConfig(64, 16, 2, 2)
    assert list(search.examine(problem, [unspilled], H200)) == [True]  # in another process
    assert len(list((tmp_path / "cache").glob("RmsNormBwd-sm_90a-*.kernel"))) == 1  # this process finds it
    assert search.fits(DX, GemmConfig(tile_m=192, num_stages=2), H200) is False  # too many accumulators
    spills = Resources(255, 16, 1, 1, 4096, 256)
    monkeypatch.setattr(search.launch, "resources", lambda *args: spills)
    assert search.fits(problem, unspilled, H200) is False


# The search, by fake times -------------------------------------------------------------------------------------------


class Bench:
    """Fake shapes and timer. `us(config, shape)` is the time of a config; configs in `wrong` give wrong results."""

    def __init__(self, us, shapes=1, wrong=(), refusing=()):
        self.us, self.wrong, self.refusing, self.timed = us, wrong, refusing, []
        self.shapes = [functools.partial(functools.partial, self.build, i) for i in range(shapes)]

    def build(self, shape, chosen):
        if chosen in self.refusing:
            raise RuntimeError("too many resources requested for launch")
        result = torch.empty(4, 8)

        def run():
            return result.fill_(2.0 if chosen in self.wrong else 1.0), None

        run.us, run.chosen = self.us(chosen, shape), chosen
        return run

    def timer(self, runs, device, rounds, block):
        assert device is CPU
        self.timed.append([run.chosen for run in runs.values()])
        return {name: Times(run.us, run.us, run.us) for name, run in runs.items()}

    def search(self, configs):
        steps = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(search, "interleave", self.timer)
            outcome = search.search(configs, self.shapes, CPU, lambda done, phase: steps.append(done))
        return outcome, len(steps)


def test_the_fastest_is_found_over_all_shapes():
    configs = list(range(30))
    bench = Bench(lambda chosen, shape: (100, 200)[shape] * (0.9 if chosen == 17 else 1 + chosen / 100), shapes=2)
    outcome, steps = bench.search(configs)
    assert (outcome.config, outcome.why, outcome.dropped) == (17, "", ())
    assert outcome.gain == pytest.approx(1 / 0.9)
    assert outcome.noise == pytest.approx(0)
    assert outcome.us == pytest.approx([90, 180])
    assert outcome.analytical_us == pytest.approx([100, 200])
    assert steps == search.num_steps(2)
    # the field shrinks; the analytical choice is always timed, twice in the last rounds
    assert [len(timed) for timed in bench.timed] == [30, 30, 17, 17, *[5] * 2 * search.ROUNDS]
    assert all(0 in timed for timed in bench.timed)
    assert bench.timed[-1].count(0) == 2


@pytest.mark.parametrize(
    "again, us, why",
    [
        (100.0, 120.0, "no candidate is faster"),
        (100.0, 99.5, "the best candidate is 0.5 % faster, too little to store"),
        (105.0, 96.0, "the best candidate is 4.2 % faster, within the noise of 5.0 %"),
    ],
)
def test_uncertain_gains_are_not_stored(again, us, why):
    outcome = search.verdict([0, 0, 1], [[[100.0]], [[again]], [[us]]])
    assert (outcome.config, outcome.us, outcome.why) == (0, [100.0], why)


def test_stored_gains_exceed_the_noise_at_every_shape():
    twice = [[100.0] * 5], [[100.0, 101.0, 102.0, 103.0, 104.0]]  # the noise is 4 %
    assert search.verdict([0, 0, 1], [*twice, [[97.0, 80.0, 80.0, 80.0, 80.0]]]).why == ""
    assert "within the noise of 4.0 %" in search.verdict([0, 0, 1], [*twice, [[97.0, 97.0, 80.0, 80.0, 80.0]]]).why
    us = [[100.0], [100.0]], [[100.0], [100.0]], [[50.0], [103.0]], [[90.0], [90.0]]  # at two shapes
    assert search.verdict([0, 0, 1], us[:3]).why.endswith("faster, but 3.0 % slower at one of the shapes")
    assert search.verdict([0, 0, 1, 2], us).config == 2


def test_wrong_results_and_failing_launches_are_dropped():
    bench = Bench(lambda chosen, shape: 100 - 10 * chosen, wrong=[3], refusing=[2], shapes=2)
    outcome, steps = bench.search([0, 1, 2, 3])
    assert outcome.config == 1
    assert [chosen for chosen, _ in outcome.dropped] == [2, 3]
    assert outcome.dropped[0][1] == "does not run: too many resources requested for launch"
    assert outcome.dropped[1][1].startswith("result 0 is wrong: Error(norm=1.0")
    assert steps == search.num_steps(2)


def test_search_without_rivals():
    assert Bench(lambda chosen, shape: 100).search([0])[0].why == "no candidate is faster"
    assert Bench(lambda chosen, shape: 100, refusing=[1]).search([0, 1])[0].config == 0
    with pytest.raises(RuntimeError, match="too many resources"):
        Bench(lambda chosen, shape: 100, refusing=[0]).search([0, 1])


def test_only_rounding_may_differ():
    x = torch.randn(64, 512, generator=torch.Generator().manual_seed(0))
    half = x.bfloat16()
    assert search.differs([half, None], [half.clone(), None]) is None
    assert search.differs([(half.float() * (1 + 2**-9)).bfloat16()], [half]) is None
    assert search.differs([x * (1 + 1e-6)], [x]) is None
    empty = torch.where(torch.arange(x.numel()).view(x.shape) == 1, -torch.inf, x)  # lse of a row without keys
    assert search.differs([empty * (1 + 1e-6)], [empty]) is None
    assert "result 0" in search.differs([x], [empty])
    assert "result 1" in search.differs([half, x * (1 + 1e-4)], [half, x])
    for wrong in (half[3, 5] + 1, torch.nan):
        one = half.clone()
        one[3, 5] = wrong
        assert "result 0" in search.differs([one], [half])


# Launches ------------------------------------------------------------------------------------------------------------


def plan(words, gpu=H200):
    parser = Parser()
    command.add_arguments(parser)
    return command.plan(parser.parse_args(words.split()), gpu)


LCE = "linear_cross_entropy 300x64x1000 --schedule "
CASES = [
    "rms_norm_forward 30x512 --residual --residual-dtype fp32 --bias",
    "rms_norm_backward 30x512 --residual fp32 --bias",
    "rms_norm_backward 30x511 --weight-dtype fp32 --heads 3 --dweight-out",
    LCE + "chunked",
    LCE + "stored --bias --softcap 30",
    LCE + "recompute --label-smoothing 0.1 --class-weight --dtype fp16",
    LCE + "recompute --logit-scale 0.5 --return-stats",
    "linear_cross_entropy 2000x4096x30000",  # exp_logits in two buffers
    "grouped_mlp 3000x256x128x8 --scales",
    "grouped_mlp 3000x128x200x8 --w3 --bias --scales --activation geglu --grad-weight-out",
    "grouped_mlp 700x64x4096x4 --activation silu --dtype fp16",
    "scaled_dot_product_attention 2x3x200x64",
    "scaled_dot_product_attention 2x3x130x40 --attn-bias 1,h --bias-dtype fp32 --attn-mask half --return-lse",
    "scaled_dot_product_attention 4x4x64x32",
    "scaled_dot_product_attention 5x3x100x32 --attn-bias 1,h --key-mask --return-lse",
    "scaled_dot_product_attention 9x2x250x32 --attn-bias 1,h --key-mask",
    "scaled_dot_product_attention 2x3x200x128 --attn-bias none --attn-mask top --causal --softcap 20",
]


@pytest.mark.parametrize("words", CASES)
def test_a_case_launches_its_problem_by_the_given_config(words):
    with idle_kernels.on_cpu() as launches:
        for problem, sizes in plan(words):
            small = {name: min(size, 700) for name, size in sizes[0].items()}
            build = cases.prepare(problem, H200, small, CPU)
            launches.clear()  # attention's other kernels
            tried = candidates(problem, H200, max_others=2)
            runs = [build(one) for one in tried]
            assert [one.config for one in launches] == tried  # one launch each, before timing
            launches.clear()
            with config(**{problem.spec.name_of(problem): tried[0]}):  # a later choice has no effect
                results = [run() for run in reversed(runs)]
            assert launches == [(problem.spec.name, problem, one) for one in reversed(tried)]
            launches.clear()
            for one, other in zip(results[0], results[1], strict=True):
                assert (one is None) == (other is None)
                assert one is None or one.shape == other.shape


@pytest.mark.parametrize("epilogue", emulated_kernels.EPILOGUES)
def test_an_epilogue_of_linear_cross_entropy_with_all_options_has_its_arguments(epilogue):
    """The emulated kernels check that each argument of the problem is given."""
    options = {field.name: True if field.type in (bool, "bool") else BF16 for field in dataclasses.fields(epilogue)}
    problem = LceGemmProblem(epilogue(**options), BF16, "float32" if epilogue is Store else BF16)
    with substitute("cpu", KernelDevice(H200, emulated_kernels.kernel_for)):
        build = cases.prepare(problem, H200, dict(m=70, n=400, k=64), CPU)
        search.results_of(build(choose.analytical(problem, H200).config))


@pytest.mark.parametrize("words", [words for words in CASES if "grouped" in words])
def test_cases_of_grouped_mlp_have_the_operands_of_their_problem(words):
    for problem, sizes in plan(words):
        with substitute("cpu", KernelDevice(H200, emulated_kernels.kernel_for)):
            build = cases.prepare(problem, H200, {**sizes[0], "rows": 60}, CPU)
            results = search.results_of(build(choose.analytical(problem, H200).config))
        for t in results:
            assert t is None or 0.1 < t.double().square().mean().sqrt() < 40, problem


@pytest.mark.exhaustive
def test_cases_of_attention_have_the_arguments_of_a_call():
    """For a bias whose rows do not start on 16 bytes: results are those of the analytical choice.

    Another candidate runs of forward and of the kernel for dk and dv, each of which has several results.
    """
    words = "scaled_dot_product_attention 2x1x70x64 --attn-bias 1,h --attn-mask half --return-lse"
    for problem, sizes in plan(words):
        problem = dataclasses.replace(problem, bias_aligned=False, mask_aligned=False)
        with emulated(QUICK):
            build = cases.prepare(problem, H200, sizes[0], CPU)
            has_two = len(problem.spec.results) > 1
            first, *others = candidates(problem, H200, max_others=int(has_two))
            expected = [t.clone() for t in search.results_of(build(first)) if t is not None]
            assert len(expected) == 1 + has_two
            for t in expected:
                assert 0.01 < t.double().square().mean().sqrt() < 40, problem
            for one in others:
                assert search.differs([t for t in search.results_of(build(one)) if t is not None], expected) is None


@pytest.mark.parametrize("words", [LCE + "chunked", "grouped_mlp 700x64x192x5 --scales"])
def test_gemms_of_blackwell(words):
    with substitute("cpu", KernelDevice(B200, idle_kernels.device()[0].kernel_for)):
        for problem, sizes in plan(words, B200):
            tried = candidates(problem, B200, max_others=100)
            assert {one.ctas for one in tried} == {1, 2}
            is_wide = isinstance(problem.epilogue, (Logits, mlp.Up, mlp.Down, mlp.DownBackward))
            assert {one.tile_n for one in tried} == ({256} if is_wide else {128, 256})
            assert all(problem.spec.variant(B200).why_illegal(problem, one, B200) is None for one in tried)
            cases.prepare(problem, B200, {name: min(size, 700) for name, size in sizes[0].items()}, CPU)(tried[-1])


def test_a_problem_is_tuned_once_over_its_shapes():
    found = plan("rms_norm_backward 4096x1024,128x1024 4096x1024 512x2048", B200)
    assert [(problem.n, sizes) for problem, sizes in found] == [
        (1024, [dict(m=128), dict(m=4096)]),
        (2048, [dict(m=512)]),
    ]
    found = plan(LCE + "chunked")
    assert [problem.spec.name_of(problem) for problem, _ in found] == ["lce_logits", "lce_dx", "lce_dw"]
    assert not any(problem.epilogue.selects_tiles for problem, _ in found)


# The command ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words, gpu, text",
    [
        ("rms_norm_forward", H200, "the following arguments are required: SHAPE"),
        ("rms_norm_forward 8x8", A100, "there is nothing to tune: rms_norm_forward: no kernel for sm_80"),
        ("rms_norm_forward 8x999999", H200, "there is nothing to tune: rms_norm: no kernel"),
    ],
)
def test_invalid_arguments(words, gpu, text):
    with pytest.raises(CommandError, match=re.escape(text)):
        plan(words, gpu)


def fake_examine(problem, configs, gpu):
    return iter([False, False] + [True] * (len(configs) - 2))


def better(configs):
    return search.Outcome(configs[-1], [9.0], [10.0], gain=1.111, noise=0.01)


def tune(outcome=better, shapes="4096x4096", examine=fake_examine):
    """(exit status, searched configs) on a fake H200; `outcome(configs)` is the result of the search."""
    searched = []

    def search_for(configs, shapes, device, show):
        searched.append(configs)
        return outcome(configs)

    return command.tune(plan(f"rms_norm_forward {shapes}"), H200, 4, CPU, examine, search_for), searched


def test_a_faster_config_is_stored_and_used(folder, capsys):
    status, (configs,) = tune()
    assert status == 0
    everything = candidates(FORWARD, H200, 4)
    assert configs == [everything[0], *everything[3:]]  # without configs that spill or do not compile
    out = capsys.readouterr().out
    assert "11.1 % faster than the analytical choice, noise 1.0 %." in out
    assert f"Written to {folder / 'tuned.json'}." in out
    assert "  m=4096\n           10.0      9.0  1.111\n" in out
    found = choose.choose(FORWARD, H200)
    assert (found.config, found.source) == (configs[-1], "user table")
    assert "11.1 % faster than the analytical choice at m=4096 (20" in found.reason
    (row,) = json.loads((folder / "tuned.json").read_text())["rows"]
    assert row["gpu"] == "H200"
    assert set(row["toolchain"]) == {"quackish", "nvidia-cutlass-dsl", "cuda"}

    # a config in the table is a candidate too, however far from the analytical choice
    tuned.put(tuned.make_row(FORWARD, H200, RmsNormFwdConfig(1024, 512), "x"))
    choose.reload()
    assert tune()[1][0][-1] == RmsNormFwdConfig(1024, 512)


def test_without_a_gain_the_row_is_removed(capsys):
    def analytical(configs):
        return search.Outcome(configs[0], [10.0], [10.0], why="no other is faster", dropped=((configs[1], "wrong"),))

    tune()
    assert tune(analytical)[0] == 0
    out = capsys.readouterr().out
    assert "The analytical choice stays: no other is faster. Its row is removed." in out
    assert "dropped: RmsNormFwdConfig(" in out
    assert "): wrong\n" in out
    assert choose.choose(FORWARD, H200).source == "analytical"
    assert tune(analytical)[0] == 0
    assert "stays: no other is faster.\n" in capsys.readouterr().out


def test_a_failing_problem_does_not_stop_others(capsys):
    errors = [torch.OutOfMemoryError("CUDA out of memory")]

    def outcome(configs):
        if errors:
            raise errors.pop()
        return better(configs)

    assert tune(outcome, "4096x4096,4096x2048")[0] == 1
    out, err = capsys.readouterr()
    assert "failed: OutOfMemoryError: CUDA out of memory" in err
    assert "Written to" in out
    assert [row.problem["n"] for row in tuned.rows()] == [2048]


def test_a_table_that_cannot_be_written(folder, monkeypatch):
    (folder / "file").write_text("")
    monkeypatch.setenv("QUACKISH_CONFIG_DIR", str(folder / "file"))

    def examine(*args):
        raise AssertionError("the table is not checked first")

    message = r"tuned\.json cannot be written: .*file is not a folder; QUACKISH_CONFIG_DIR names another"
    with pytest.warns(RuntimeWarning, match="Not a directory"), pytest.raises(CommandError, match=message):
        tune(examine=examine)


def test_without_cuobjdump():
    def examine(*args):
        raise FileNotFoundError("cuobjdump is not there")
        yield

    with pytest.raises(CommandError, match="cuobjdump is not there"):
        tune(examine=examine)


# On a GPU ------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("words", CASES)
def test_candidates_give_the_same_results(words):
    if torch.cuda.get_device_capability()[0] != 9 and "norm" not in words:
        pytest.skip("needs a quackish GEMM, which run on Hopper")
    device = torch.device("cuda", torch.cuda.current_device())
    gpu = gpu_of(device.index)
    for problem, sizes in plan(words, gpu):
        build = cases.prepare(problem, gpu, sizes[0], device)
        first, *others = candidates(problem, gpu, max_others=2)
        expected = [None if t is None else t.clone() for t in search.results_of(build(first))]
        assert not any(t is not None and t.isnan().any() for t in expected)
        for one in others:
            assert search.differs(search.results_of(build(one)), expected) is None, one


@pytest.mark.gpu
def test_the_command():
    tuned = [sys.executable, "-m", "quackish", "tune", "rms_norm_forward", "512x1024,8192x1024", "--candidates", "6"]
    done = subprocess.run(tuned, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "candidates" in done.stdout
    assert "Written to" in done.stdout or "The analytical choice stays" in done.stdout
