"""quackish.profile(): which launches it records, their times and speeds; on a GPU, compared with a dry run."""

import functools
import gc
import threading
import types

import pytest
import torch

import quackish
from quackish import profiling
from quackish.cli import call_arguments
from quackish.cli.parser import Parser
from quackish.device import compile as compiling
from quackish.device import launch
from quackish.gpu import B200, H200, Roofs, gpu_of
from quackish.kernels.gemm.problem import GemmArgs
from quackish.kernels.gemm.sm90_config import GemmConfig
from quackish.ops.linear_cross_entropy.gemm_problems import LceGemmProblem, Softmax
from quackish.ops.rms_norm.problems import ForwardArgs, RmsNormFwdConfig, RmsNormFwdProblem
from quackish.ops.shared.problems import ScaleArgs, ScaleProblem
from quackish.testing.errors import same_bits

ROOFS = Roofs(copy=4e12, add=4e12, gemm=8e14, source="data sheet")
NORM = RmsNormFwdProblem(4096, "bfloat16", "bfloat16", "bfloat16")
NORM_CONFIG = RmsNormFwdConfig(128, 128)
GEMM = LceGemmProblem(Softmax(), "bfloat16", "bfloat16")


def stand_in(class_name, problem, config, function=lambda *args: None):
    """A result of launch.get that wraps `function` instead of a kernel."""
    return compiling._counted(function, type(class_name, (), {}), problem, config)


def norm(m=16_384, stream=0, function=lambda *args: None):
    kernel = stand_in("RmsNormFwd", NORM, NORM_CONFIG, function)
    args = ForwardArgs(**dict.fromkeys(ForwardArgs._fields) | dict(m=m, num_ctas=128))
    kernel(args, stream)


def gemm(m=8192, n=128_256, k=4096, stream=0, function=lambda *args: None):
    kernel = stand_in("LceGemmSm90", GEMM, GemmConfig(), function)
    args = GemmArgs(**dict.fromkeys(GemmArgs._fields) | dict(m=m, n=n, k=k, max_clusters=66))
    kernel(args, stream)


def recorded(p):
    return [(each.kernel, each.sizes.get("m")) for each in p.launches]


# Recording -----------------------------------------------------------------------------------------------------------


def test_only_launches_inside_are_recorded():
    with quackish.profile() as p:
        norm(2)
        gemm(3)
    norm(4)
    assert recorded(p) == [("rms_norm_fwd", 2), ("lce_gemm", 3)]
    first = p.launches[0]
    assert (first.problem, first.config, first.sizes) == (NORM, NORM_CONFIG, {"m": 2})
    assert first.work == NORM.spec.work(NORM, first.sizes)
    assert p.launches[1].sizes == {"m": 3, "n": 128_256, "k": 4096}
    with p:  # entering again continues it
        norm(5)
    assert recorded(p)[2:] == [("rms_norm_fwd", 5)]


def test_profiles_nest_and_record_all_threads():
    with quackish.profile() as outer:
        norm(1)
        with quackish.profile() as inner:
            threads = [threading.Thread(target=norm, args=(m,)) for m in range(2, 9)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        norm(9)
    assert sorted(recorded(outer)) == [("rms_norm_fwd", m) for m in range(1, 10)]
    assert sorted(recorded(inner)) == [("rms_norm_fwd", m) for m in range(2, 9)]


def test_arguments_and_errors_are_passed_through():
    given = []
    counted = launch.counters.launches
    with quackish.profile() as p:
        norm(7, stream=9, function=lambda *args: given.append(args))
        with pytest.raises(ZeroDivisionError):
            norm(8, function=lambda *args: 1 / 0)
    with pytest.raises(KeyError), quackish.profile():
        raise KeyError
    assert compiling._observer is None
    ((args, stream),) = given
    assert (args.m, args.num_ctas, stream) == (7, 128, 9)
    assert recorded(p) == [("rms_norm_fwd", 7)]
    assert launch.counters.launches == counted + 1


class Cuda:
    """A fake torch.cuda. Each launch advances its clock by 2 ms."""

    def __init__(self):
        self.capturing, self.clock, self.log, self.gpu = False, 0.0, [], H200
        self.is_initialized = lambda: True
        self.current_device = lambda: 3
        self.ExternalStream = lambda handle: types.SimpleNamespace(cuda_stream=handle)
        self.current_stream = lambda: self.ExternalStream(5)
        self.default_stream = lambda: self.ExternalStream(0)
        self.is_current_stream_capturing = lambda: self.capturing

    def Event(self, enable_timing):
        event = types.SimpleNamespace(synchronize=lambda: self.log.append("synchronize"))

        def record(stream):
            event.time = self.clock
            self.log.append(("record", stream.cuda_stream))

        event.record, event.elapsed_time = record, lambda end: end.time - event.time
        return event

    def launch(self, *args):
        self.clock += 2.0
        self.log.append("launch")


@pytest.fixture
def cuda(monkeypatch):
    cuda = Cuda()
    monkeypatch.setattr(profiling, "cuda", cuda)
    monkeypatch.setattr(profiling, "gpu_of", lambda device: cuda.gpu)
    return cuda


@pytest.mark.parametrize("stream", [5, 0, 11])
def test_a_launch_is_timed_on_its_own_stream(stream, cuda):
    with quackish.profile() as p:
        norm(stream=stream, function=cuda.launch)
    assert cuda.log == [("record", stream), "launch", ("record", stream)]  # and nothing synchronizes
    (only,) = p.launches
    assert (only.ms, only.device, only.stream) == (2.0, 3, stream)
    assert p.launches[0].ms == 2.0  # read again
    assert cuda.log.count("synchronize") == 1


def test_a_captured_launch_has_no_time(cuda):
    with quackish.profile() as p:
        norm(function=cuda.launch)
        cuda.capturing = True
        norm(function=cuda.launch)
    p.roofs = ROOFS
    assert [each.ms for each in p.launches] == [2.0, None]
    (both,) = p.rows()
    assert (both["calls"], both["untimed"], both["total_ms"], both["mean_us"]) == (2, 1, 2.0, 2000)


# Results -------------------------------------------------------------------------------------------------------------


def test_speeds_and_bounds(cuda):
    with quackish.profile() as p:
        for _ in range(3):
            norm(function=cuda.launch)
        gemm(8192, 8192, 8192, function=cuda.launch)
        norm(1, function=cuda.launch)
    p.roofs = ROOFS
    row, of_gemm, short = p.rows()
    done = NORM.spec.work(NORM, {"m": 16_384})
    assert tuple(row) == profiling.COLUMNS
    assert (row["kernel"], row["calls"], row["total_ms"], row["mean_us"]) == ("rms_norm_fwd", 3, 6.0, 2000)
    assert row["gb_per_s"] == pytest.approx(done.bytes / 2e-3 / 1e9)
    assert row["estimated_us"] == pytest.approx(done.bytes / 4e12 * 1e6)
    assert row["pct_of_roof"] == pytest.approx(100 * done.bytes / 4e12 / 2e-3)
    assert of_gemm["tflop_per_s"] == pytest.approx(2 * 8192**3 / 2e-3 / 1e12)
    assert of_gemm["pct_of_roof"] == pytest.approx(100 * 2 * 8192**3 / 8e14 / 2e-3)
    assert [each["bound"] for each in (row, of_gemm, short)] == ["memory", "tensor cores", "launch"]
    assert short["pct_of_roof"] is None


def test_data_dependent_work_has_no_speed(cuda):
    kernel = stand_in("Scale", ScaleProblem("bfloat16"), None, cuda.launch)
    with quackish.profile() as p:
        kernel(ScaleArgs(n=8_388_608, n2=65_536_000), 0)
    p.roofs = ROOFS
    (row,) = p.rows()
    speeds = "bytes", "flops", "gb_per_s", "tflop_per_s", "estimated_us", "pct_of_roof", "bound"
    assert (row["mean_us"], *(row[name] for name in speeds)) == (2000.0, *[None] * 7)


def test_print_shows_one_row_per_kernel_and_problem(cuda):
    with quackish.profile() as p:
        norm(function=cuda.launch)
        norm(1, function=cuda.launch)
    p.roofs = ROOFS
    text = str(p)
    assert "2 launches of quackish's kernels, 4.000 ms" in text
    assert sum(line.startswith("rms_norm_fwd") for line in text.splitlines()) == 2
    assert "m=16384 n=4096 x=bf16 y=bf16 weight=bf16" in text
    assert "Roofs of H200, data sheet: copy 4.00 TB/s, add 4.00 TB/s, GEMM 800 TFLOP/s." in text
    assert "Not recorded: graph replays" in text


def test_without_measured_roofs_there_is_no_percentage(cuda):
    cuda.gpu = B200
    with quackish.profile() as p:
        norm(function=cuda.launch)
    (row,) = p.rows()
    assert row["gb_per_s"] > 0
    assert row["pct_of_roof"] is None
    assert "Roofs of B200: not known." in str(p)


def test_print_without_launches():
    with quackish.profile() as p:
        quackish.rms_norm(torch.randn(4, 8), None)  # the portable path
    assert p.launches == []
    assert "no launch of a quackish kernel was recorded" in str(p)


# On a GPU ------------------------------------------------------------------------------------------------------------


def norm_step(m=16_384, n=4096):
    """Forward and backward: (y, dx, dweight)."""
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(m, n, generator=generator, device="cuda").bfloat16().requires_grad_()
    weight = torch.randn(n, generator=generator, device="cuda").bfloat16().requires_grad_()
    y = quackish.rms_norm(x, weight)
    return y.detach(), *torch.autograd.grad(y, [x, weight], y.detach())


def loss_step(schedule, m=2048, h=1024, v=32_000):
    """Forward and backward: (loss, dinput, dlinear_weight)."""
    generator = torch.Generator("cuda").manual_seed(0)
    x, w = (torch.randn(rows, h, generator=generator, device="cuda").bfloat16().requires_grad_() for rows in (m, v))
    target = torch.randint(v, (m,), generator=generator, device="cuda")
    loss = quackish.linear_cross_entropy(x, w, target, schedule=schedule)
    return loss.detach(), *torch.autograd.grad(loss, [x, w])


@pytest.mark.gpu
@pytest.mark.parametrize(
    "call, step",
    [
        ("rms_norm 16384x4096", norm_step),
        *(
            (f"linear_cross_entropy 2048x1024x32000 --schedule {schedule}", functools.partial(loss_step, schedule))
            for schedule in ("chunked", "stored", "recompute")
        ),
    ],
)
def test_launches_match_a_dry_run(call, step):
    """And results are unchanged."""
    plain = step()
    with quackish.profile() as p:
        profiled = step()
    step()
    assert all(map(same_bits, plain, profiled))
    shares = [row["pct_of_roof"] for row in p.rows() if row["pct_of_roof"] is not None]
    assert 0 < max(shares) <= 130, str(p)
    assert "% roof" in str(p)
    parser = Parser()
    call_arguments.add_arguments(parser)
    expected = call_arguments.dry_run_call(parser.parse_args(call.split()), gpu_of(torch.cuda.current_device())).steps
    assert [(each.kernel, each.problem, each.config, each.sizes) for each in p.launches] == [
        (step.kernel, step.problem, step.choice.config, step.sizes) for step in expected if step.choice is not None
    ]
    assert all(each.ms > 0 and each.device == torch.cuda.current_device() for each in p.launches)


@pytest.mark.gpu
def test_side_streams_and_other_devices():
    norm_step()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with quackish.profile() as p:
        norm_step(1024)
        with torch.cuda.stream(side):
            norm_step(2048)
        if torch.cuda.device_count() > 1:
            x = torch.randn(4096, 1024, device="cuda:1", dtype=torch.bfloat16)  # not the current device
            quackish.rms_norm(x, None)
    torch.cuda.current_stream().wait_stream(side)
    streams = {each.sizes["m"]: each.stream for each in p.launches if each.device == torch.cuda.current_device()}
    assert streams == {1024: torch.cuda.current_stream().cuda_stream, 2048: side.cuda_stream}
    assert all(each.ms > 0 for each in p.launches)
    assert [each.device for each in p.launches if each.sizes["m"] == 4096] == [1] * (torch.cuda.device_count() > 1)


@pytest.mark.gpu
def test_capture_works_and_replays_are_not_recorded():
    x = torch.randn(1024, 4096, device="cuda", dtype=torch.bfloat16)
    expected = quackish.rms_norm(x, None)
    graph = torch.cuda.CUDAGraph()
    with quackish.profile() as p:
        with torch.cuda.graph(graph):
            y = quackish.rms_norm(x, None)
        graph.replay()
        quackish.rms_norm(x, None)
    torch.cuda.synchronize()
    assert same_bits(y, expected)
    captured, plain = p.launches
    assert captured.ms is None
    assert plain.ms > 0
    assert "1 were captured into CUDA graphs" in str(p)


@pytest.mark.gpu
def test_recording_keeps_no_memory():
    norm_step()
    with quackish.profile() as p:
        results = norm_step()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        size = sum(t.nbytes for t in results)
        del results
        gc.collect()  # garbage of earlier tests
        assert torch.cuda.memory_allocated() <= before - size
    assert len(p.launches) == 2
