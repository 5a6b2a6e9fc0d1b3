"""quackish.emulate and `quackish emulate`: what they promise, refuse, count and print.

Tests of numbers run in the emulator too, next to the paths of the other kernels: see tests/emulator_cases.py.
"""

import builtins
import dataclasses
import json
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import quackish
from quackish import emulation
from quackish.__main__ import main
from quackish.device.choose import analytical
from quackish.device.kernel_device import device_of
from quackish.emulator import Fault, host
from quackish.emulator.errors import ToolMissing
from quackish.errors import UnsupportedError
from quackish.gpu import B200, H200
from quackish.ops.linear_cross_entropy.gemm_problems import LceGemmProblem, Softmax, gemm_config
from quackish.ops.rms_norm.problems import RmsNormBwdProblem, RmsNormFwdProblem
from quackish.ops.shared.for_tools import Operation
from quackish.testing.errors import same_bits
from tests.emulator_cases import small

BF16, FP32 = torch.bfloat16, torch.float32
SMALL = small(H200)


def normal(*shape, seed=0, scale=1.0, dtype=BF16):
    t = scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return t.to(dtype).requires_grad_()


def rms_norm(m=20, n=256):
    x, w = normal(m, n), normal(n, seed=1)
    y = quackish.rms_norm(x, w, eps=1e-6)
    return y.detach(), *torch.autograd.grad(y, (x, w), normal(m, n, seed=2).detach())


def linear_cross_entropy(schedule):
    x, w, target = normal(200, 64), normal(300, 64, seed=1, scale=0.2), torch.arange(200)
    target[::5] = -100
    loss = quackish.linear_cross_entropy(x, w, target, schedule=schedule, chunk_size=128)
    return loss.detach(), *torch.autograd.grad(loss, (x, w))


def stored():
    return linear_cross_entropy("stored")


def recompute():
    return linear_cross_entropy("recompute")


def grouped_mlp():
    x, w1, w2 = normal(150, 64), normal(3, 128, 64, seed=1, scale=0.2), normal(3, 64, 64, seed=2, scale=0.2)
    scales, offs = normal(150, seed=3), torch.tensor([70, 70, 140], dtype=torch.int32)
    y = quackish.grouped_mlp(x, w1, w2, offs, scales=scales)
    return y.detach(), *torch.autograd.grad(y, (x, w1, w2, scales), normal(150, 64, seed=4).detach())


# Results --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call, gpu",
    [
        (rms_norm, SMALL),
        *(pytest.param(call, SMALL, marks=pytest.mark.exhaustive) for call in (stored, grouped_mlp)),
        pytest.param(recompute, small(B200), marks=pytest.mark.exhaustive),
    ],
    ids=lambda value: getattr(value, "__name__", None) or value.name,
)
def test_bits_are_those_of_every_completion_and_seed(call, gpu):
    runs = []
    for completion, seed in (("late", 0), ("at_once", 1)):
        with quackish.emulate(gpu, completion, seed) as report:
            runs.append(call())
        counts = [
            dataclasses.replace(launch, instructions=0, seconds=0.0) for launch in report.launches
        ]  # a kernel that polls executes more or fewer instructions
        runs[-1] = [*runs[-1]], counts
    (results, counts), (others, other_counts) = runs
    assert counts == other_counts
    assert all(map(same_bits, others, results))


def test_a_seed_repeats_a_run():
    reports = []
    for _ in range(2):
        with quackish.emulate(SMALL, seed=3) as report:
            rms_norm(300)
        assert (report.completion, report.seed) == ("late", 3)
        reports.append([dataclasses.replace(launch, seconds=0.0) for launch in report.launches])
    assert reports[0] == reports[1]
    assert [launch.kernel for launch in reports[0]] == ["rms_norm_fwd", "rms_norm_bwd"]


# Counts ---------------------------------------------------------------------------------------------------------------


def norm_traffic(m, n, gpu):
    """(bytes read, bytes written) by forward and by backward in bf16, for n in multiples of 8.

    A kernel reads the weight for each row of a tile. Forward's last tile reads the last row again for rows past the
    end. Backward reads rstd for each thread.
    """
    weight, tensor = 2 * n, 2 * m * n
    problem = RmsNormFwdProblem(n, *["bfloat16"] * 3)
    config = analytical(problem, gpu).config
    rows = config.num_ctas(m, gpu.sm_count) // config.split_n * config.threads // config.threads_per_row
    forward = rows * (2 * n + weight), tensor + 4 * m

    problem = RmsNormBwdProblem(n, *["bfloat16"] * 3, dx_dtype="bfloat16", dweight_dtype="bfloat16")
    config = analytical(problem, gpu).config
    ctas = config.num_ctas(m, gpu.sm_count)
    clusters = ctas // config.split_n
    rows = clusters * config.threads // config.threads_per_row  # at once
    rstd = -(-m // rows) * ctas * config.threads * 4
    partial_sums, arrivals = 4 * clusters * n, 2 * 4 * ctas  # at two counters, of which one is reset
    read = 2 * tensor + rows * weight + rstd + partial_sums + arrivals
    written = tensor + partial_sums + weight + arrivals + 4 * config.split_n
    return [forward, (read, written)]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "m, n, gpu",
    [
        *((m, n, SMALL) for m, n in ((64, 256), (20, 256), (5, 4096))),
        *(pytest.param(3, 20_000, gpu, marks=pytest.mark.exhaustive) for gpu in (SMALL, small(B200))),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_the_norms_read_and_write_each_element_once(m, n, gpu):
    """And the weight and rstd as often as the formula says; partial sums are written once and read once."""
    for completion, seed in (("late", 0), ("at_once", 1)):
        with quackish.emulate(gpu, completion, seed) as report:
            rms_norm(m, n)
        traffic = [(launch.bytes_read, launch.bytes_written) for launch in report.launches]
        assert traffic == norm_traffic(m, n, gpu)


@pytest.mark.exhaustive
def test_gemms_execute_no_matrix_instruction_too_many():
    m, h, v = 256, 128, 384
    x, w = normal(m, h).detach(), normal(v, h).detach()
    config = gemm_config(LceGemmProblem(Softmax(), "bfloat16", None), H200)
    with quackish.emulate(SMALL) as report:
        quackish.linear_cross_entropy(x, w, torch.arange(m))
    logits, recomputed = (launch for launch in report.launches if launch.kernel == "lce_gemm")
    assert logits.mmas == (m // 64) * (v // config.tile_n) * (h // 16)
    assert logits.flops == 2 * m * v * h
    assert recomputed.mmas == 0  # no row was flagged
    assert all(launch.mmas == 0 for launch in report.launches if launch.kernel != "lce_gemm")


# Blocks ---------------------------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
def test_gpus_by_name_and_with_fewer_sms():
    grids = {}
    for gpu in ("H200", H200, SMALL):
        with quackish.emulate(gpu) as report:
            rms_norm(300)
        grids[gpu] = report.launches[1].grid
    assert grids["H200"] == grids[H200] > grids[SMALL]
    with quackish.emulate("a100"), pytest.raises(UnsupportedError, match=r"rms_norm: no kernel for sm_80 \(A100\)"):
        rms_norm()


def test_wrong_arguments():
    with pytest.raises(ValueError, match=r"quackish.emulate: gpu is 'h20'; .* did you mean"), quackish.emulate("h20"):
        pass
    with pytest.raises(ValueError, match=r"quackish.emulate: completion is 'never'; expected 'at_once' or 'late'"):
        with quackish.emulate(completion="never"):
            pass


def test_calls_without_a_kernel_raise():
    x = torch.ones(4, 16, dtype=torch.float64)
    with quackish.emulate(SMALL) as report:
        with pytest.raises(UnsupportedError, match=r"no kernel .*; here every call must run kernels"):
            quackish.rms_norm(x, None)
        assert quackish.rms_norm(x, None, backend="reference").dtype == torch.float64
    assert report.launches == []


def test_no_plan_leaves_or_enters_a_block():
    before = rms_norm()
    with quackish.emulate(SMALL) as report:
        rms_norm()
        with quackish.emulate(small(B200)) as inner:
            rms_norm()
        rms_norm()
    assert (len(report.launches), len(inner.launches)) == (4, 2)
    assert all(map(same_bits, rms_norm(), before))
    assert len(report.launches) == 4
    assert isinstance(device_of(torch.device("cpu")), str)


def test_a_block_applies_to_all_threads():
    with quackish.emulate(SMALL, seed=1) as report:
        rms_norm()
        with ThreadPoolExecutor(1) as pool:
            pool.submit(rms_norm).result()
    launches = [dataclasses.replace(launch, seconds=0.0) for launch in report.launches]
    assert len(launches) == 4
    assert launches[:2] == launches[2:]  # the same completion and seed


def test_backward_outside_the_block_raises():
    x = normal(4, 256)
    with quackish.emulate(SMALL):
        loss = quackish.rms_norm(x, None).sum()
    with pytest.raises(RuntimeError, match="expected backward inside the same"):
        loss.backward()


def test_torch_compile_is_refused():
    torch._dynamo.reset()
    compiled = torch.compile(lambda: quackish.rms_norm(normal(4, 256), None), backend="eager")
    with quackish.emulate(SMALL) as report:
        with pytest.raises(RuntimeError, match=r"torch\.compile is not supported"):
            compiled()
        assert report.launches == []
        rms_norm()  # fake tensors of the compiler have no memory
    assert len(report.launches) == 2
    torch._dynamo.reset()


def test_unwritten_memory_is_nan():
    with quackish.emulate(SMALL):
        device = device_of(torch.device("cpu"))
        assert device.vector(100, BF16).isnan().all()
        _, scratch, memory = device.workspace(0, 100)
    assert not memory.view(FP32)[-100:].isfinite().any()
    assert scratch == memory[-100:].data_ptr()


def test_an_access_outside_of_tensors_is_a_fault(source_lines):
    x, y, rstd = torch.ones(4, 256, dtype=BF16), torch.empty(4, 256, dtype=BF16), torch.empty(4)
    problem = RmsNormFwdProblem(256, "bfloat16", "bfloat16")
    with quackish.emulate(SMALL, seed=7):
        launch = device_of(torch.device("cpu")).kernel_for(problem, SMALL).launch
        args = x.data_ptr(), None, None, None, y.data_ptr(), None, rstd.data_ptr(), None, None, 1e-6, 0.0
        launch((*args, 4, 1), 0)
        with pytest.raises(Fault) as fault:
            launch((*args, 5, 1), 0)
    lines = r"(?s)outside every tensor.*rows\.py:\d+.*RmsNormFwd \([^ ]*forward\.py:\d+\).*'late', seed=7"
    fault.match(lines)
    assert "kernel_cutlass" not in str(fault.value)
    assert y.isfinite().all()


# What it needs --------------------------------------------------------------------------------------------------------


def test_numpy_is_named_if_it_is_missing(monkeypatch, capsys):
    real = builtins.__import__

    def without_numpy(name, *args, **kwargs):
        if name == "numpy":
            raise ModuleNotFoundError("No module named 'numpy'")
        return real(name, *args, **kwargs)

    for name in [name for name in sys.modules if name.startswith("quackish.emulator")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(quackish, "emulator", raising=False)
    monkeypatch.setattr(builtins, "__import__", without_numpy)
    with pytest.raises(ImportError, match=r"emulate needs numpy: .* `pip install 'quackish\[emulator\]'`"):
        with quackish.emulate():
            pass
    assert main("emulate rms_norm 4x256".split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "numpy" in line


def test_a_missing_compiler_is_one_line(monkeypatch, capsys):
    emulation._loaded.clear()
    host._shim.cache_clear()
    monkeypatch.setenv("PATH", "/nowhere")
    with (
        quackish.emulate(SMALL),
        pytest.raises(ToolMissing, match=r"a C compiler \(cc\) and a linker \(ld\), and finds"),
    ):
        rms_norm()
    assert main("emulate rms_norm 4x256".split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "apt-get install gcc binutils" in line


# The command ----------------------------------------------------------------------------------------------------------


def test_the_command(capsys):
    assert main("emulate rms_norm 20x256 --seed 5 --completion at_once".split()) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "rms_norm 20x256 on an emulated h200, completion at_once, seed 5"
    first_words = [line.split()[0] for line in lines if line and not line.startswith("-")]
    assert first_words[1:6] == ["result", "y", "dx", "dweight", "MMAs"]
    assert first_words[6::2] == ["rms_norm_fwd,", "rms_norm_bwd,"]
    assert {line.split()[-1] for line in lines[4:7]} == {"ok"}
    forward = lines.index("rms_norm_fwd, grid 3, cluster 1")
    assert lines[forward + 1].split()[:2] == ["0", str(24 * 256 * 2 * 2)]  # MMAs, bytes read


def test_the_command_reports_wrong_results_and_faults(monkeypatch, capsys):
    monkeypatch.setattr(Operation, "bound_of", lambda op, name: 0.0)
    assert main("emulate rms_norm 4x256".split()) == 1
    assert "WRONG" in capsys.readouterr().out

    def fail(*args):
        raise Fault("deadlock", "a mistake")

    monkeypatch.setattr("quackish.emulator.grid.Grid.run", fail)
    assert main("emulate rms_norm 4x256".split()) == 1
    assert "a mistake" in capsys.readouterr().out
    assert main("emulate rms_norm 4x256 --json".split()) == 1
    fault = json.loads(capsys.readouterr().out)["fault"]
    assert (fault["rule"], fault["message"]) == ("deadlock", "a mistake")
    assert fault["launch"]["kernel"].startswith("rms_norm_fwd, RmsNormFwd")


def test_the_command_prints_findings(monkeypatch, capsys):
    monkeypatch.setattr(
        "quackish.emulator.grid.Grid.run", lambda grid: grid.findings.add(Fault("cta-pair-start", "something"))
    )
    main("emulate rms_norm 4x256".split())
    assert "\nformal: cta-pair-start: something\n" in capsys.readouterr().out


def test_the_command_prints_json(capsys):
    assert main("emulate rms_norm 4x256 --json".split()) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [(row["result"], row["ok"]) for row in printed["results"]] == [("y", True), ("dx", True), ("dweight", True)]
    assert [launch["kernel"] for launch in printed["launches"]] == ["rms_norm_fwd", "rms_norm_bwd"]
    assert printed["findings"] == []


@pytest.mark.parametrize(
    "words, text",
    [
        ("rms_norm 4x256 --gpu a100", "rms_norm: no kernel for sm_80"),
        ("rms_norm 4x256 --gpu h2000", "expected one of"),
        ("rms_norm 4x256 --completion soon", "'soon' is unknown; expected one of late, at_once"),
    ],
)
def test_the_command_refuses(words, text, capsys):
    assert main(["emulate", *words.split()]) == 2
    assert text in capsys.readouterr().err.splitlines()[-1]
