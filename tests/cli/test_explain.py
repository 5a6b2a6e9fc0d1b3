"""`quackish explain`: its output compared with ops, launches and memory on a GPU; invalid arguments."""

import dataclasses
import itertools
from collections import Counter
from pathlib import Path

import pytest
import torch

import quackish
from quackish.__main__ import main
from quackish.bench.cells import OURS, options_of
from quackish.bench.results import read_rows
from quackish.cli import call_arguments
from quackish.cli import explain as command
from quackish.cli.parser import Parser
from quackish.device.choose import choose
from quackish.device.kernel_device import KernelDevice, substitute
from quackish.device.kernel_for import CompiledKernel
from quackish.device.launch import Resources
from quackish.device.work import describe, estimate
from quackish.gpu import B200, GH200, H100, H100_NVL, H100_PCIE, H200, roofs_of
from quackish.ops.linear_cross_entropy import dry_run as lce_dry_run
from quackish.ops.linear_cross_entropy import layout as lce_config
from quackish.ops.linear_cross_entropy.dry_run import representatives
from quackish.ops.linear_cross_entropy.explain import frontier
from quackish.ops.linear_cross_entropy.gemm_problems import RowsOut, Softmax, StoreWithResidual
from quackish.ops.rms_norm.problems import RmsNormBwdProblem
from quackish.ops.rms_norm.tools import RMS_NORM
from quackish.ops.shared import dry_run
from quackish.ops.shared.argument_types import size
from tests.linear_cross_entropy.cases import OPTIONS, REDUCTIONS, SCHEDULES, make
from tests.mlp.cases import make as make_mlp
from tests.variants import one_per

pytestmark = pytest.mark.usefixtures("wide")
BF16, CPU = "bfloat16", torch.device("cpu")
HEADLINE = "linear_cross_entropy 8192x4096x128256"
NO_KERNEL = "attn_bias=none"  # runs PyTorch's own attention


def parse(words):
    parser = Parser()
    command.add_arguments(parser)
    return parser.parse_args(words.split())


def dry(words, gpu=H200):
    return call_arguments.dry_run_call(parse(words), gpu)


def output(words, compiled=None):
    """The printed text. With `compiled`, fake resources are shown, and the kernels to compile are added to the list."""

    def resources(kernel_class, problem, config, target):
        compiled.append((kernel_class.__name__, problem, config, target))
        return Resources(40, 8, 3, 2, 58_000, config.threads)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command.launch, "resources", resources)
        return command.text(parse(words + " --no-compile" * (compiled is None)))


def test_a_dry_run_without_launches_says_why():
    """PyTorch runs custom operators on meta tensors by their fake implementation alone."""
    norm = lambda x, weight, eps, backend: torch.nn.functional.rms_norm(x, weight.shape, weight, eps)  # noqa: E731
    op = dataclasses.replace(RMS_NORM, function=norm)
    args = op.arguments((4, 8), torch.bfloat16, dry_run.META)
    with pytest.raises(AssertionError, match="rms_norm: the dry run saw no launch"):
        dry_run.dry_run(op, args, H200, ("forward", "backward"), "rms_norm")


# RMSNorm -------------------------------------------------------------------------------------------------------------


def test_rms_norm_backward_on_b200():
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
    compiled = []
    printed = output("rms_norm_backward 16384x4096 --dtype bf16 --gpu b200", compiled)
    problem = RmsNormBwdProblem(4096, BF16, BF16, BF16, dx_dtype=BF16, dweight_dtype=BF16)
    choice = choose(problem, B200)
    assert compiled == [("RmsNormBwd", problem, choice.config, "sm_100a")]
    assert printed.startswith(
        "rms_norm_backward 16384x4096 bfloat16 on B200 (sm_100a, 148 SMs)\nPath: quackish's kernels\n"
        "Nothing was measured on a B200: expected times are intervals, from the fastest to the slowest.\n\nlaunch"
    )
    fast, slow = (1e6 * problem.spec.work(problem, {"m": 16_384}).bytes / speed for speed in (6.86e12, 6.55e12))
    phase, row, sizes = printed.split("\n\n")[1].splitlines()[2:]
    assert (phase, sizes) == ("backward", "    m=16384")
    numbers = ["268.5", "MB", "134.2", "MB", "671.1", "M", f"{fast:.1f}", f"{slow:.1f}", "memory"]
    assert row.split() == ["[1]", "rms_norm_bwd", *numbers]
    assert "[1] rms_norm_bwd, class RmsNormBwd: n=4096 x=bf16 dy=bf16 weight=bf16 dx=bf16 dweight=bf16\n    " in printed
    assert " ".join(f"{name}={value}" for name, value in vars(choice.config).items()) in printed
    assert f"[1] {choice.source}: {choice.reason}\n" in printed
    (taken,) = [line.split()[2:] for line in printed.splitlines() if line.endswith("shared memory")]
    threads = str(choice.config.threads)
    assert taken == ["40", "58000", threads, "3", "shared", "memory"]  # 58,000 + 1024 of 233,472
    assert "\n[1] rms_norm_bwd spills registers: 8 bytes of stack, 3 local loads, 2 local stores.\n" in printed
    ends = "copy 6.55 TB/s, add 6.55 TB/s, GEMM 1496 TFLOP/s, and at copy 6.86 TB/s, add 6.86 TB/s, GEMM 1611 TFLOP/s"
    assert f"Expected times are between those at {ends} (published)." in printed


@pytest.mark.parametrize(
    "options, forward, backward",
    [
        ("--residual --residual-dtype fp16", "weight=bf16 residual=bf16 res=fp16", "weight=bf16 dres=fp16 dx=bf16"),
        ("--residual fp32 --bias", "bias=bf16 residual=fp32", "dx=bf16 dresidual=fp32 dweight=bf16 dbias=bf16"),
        ("--weight-dtype none --heads 3", "x=bf16 y=bf16", "dy=bf16 dx=bf16"),
        ("--out-dtype fp32", "y=fp32", "dy=fp32"),
        ("--weight-dtype fp32 --heads 4", "weight=fp32 heads=4", "dweight=fp32 heads=4"),
        ("--dweight-out", "weight=bf16", "dweight=fp32 add_dweight"),
    ],
)
def test_options_of_rms_norm(options, forward, backward):
    steps = dry(f"rms_norm 16x4096 {options}").steps
    for step, words in zip(steps, (forward, backward), strict=True):
        assert words in describe(step.problem, {}), step.phase


# Attention -----------------------------------------------------------------------------------------------------------


def measured_attention():
    """(words of a call, us, GPU): those of benchmarks/results/H100 that skip no tiles, then triangles on an H200."""
    path = Path(__file__).parents[2] / "benchmarks/results/H100/scaled_dot_product_attention.csv"
    for row in read_rows(path):
        options = options_of(row["data"])
        if row["provider"] != OURS or "causal" in options or "blocks" in options.values() or row["data"] == NO_KERNEL:
            continue
        words = [f"--{key.replace('_', '-')} {value}" for key, value in options.items()]
        words += ["--no-grad"] * (row["direction"] == "forward")
        yield " ".join([row["shape"], *words]), 1e3 * float(row["median_ms"]), H100
    for shape, us in (("256x4x256x32", 231), ("384x4x384x32", 625), ("768x4x768x32", 4360)):
        yield f"{shape} --attn-bias 1,H --key-mask", us, H200


def test_measured_times_of_attention_are_in_the_interval():
    shares = []
    for words, us, gpu in measured_attention():
        words = f"scaled_dot_product_attention {words.replace('float32', 'fp32')}"
        estimates = [estimate(step.work, roofs_of(gpu)) for step in dry(words, gpu).steps]
        least, most = sum(one.us for one in estimates), sum(one.most_us for one in estimates)
        assert least <= us <= most, (words, least, most, us)
        shares.append(us / most)
    assert len(shares) > 40
    assert max(shares) > 0.85  # the end of the interval is near


# Blackwell's own GEMMs ------------------------------------------------------------------------------------------------


def test_gemms_of_blackwell():
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
    compiled = []
    shown = output(HEADLINE + " --gpu b200", compiled)
    assert "No Blackwell GPU has run these kernels" in shown
    gemms = [(problem, config) for name, problem, config, target in compiled if name == "LceGemmSm100"]
    assert {type(problem.epilogue) for problem, _ in gemms} == {Softmax, RowsOut, StoreWithResidual}
    assert all(config == choose(problem, B200).config for problem, config in gemms)
    lines = shown.split("\n\n")[1].splitlines()
    rows = {sizes: line.split() for line, sizes in itertools.pairwise(lines) if "lce_gemm" in line}
    us = {sizes.split()[0]: row[-3] for sizes, row in rows.items() if row[-2:] == ["tensor", "cores"]}
    assert us["m=8192"] == f"{2 * 8192 * 4096 * 128_256 / 1496e12 * 1e6:.1f}"
    assert "tile_n=256 ctas=2" in shown


# The portable path ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words, reason",
    [
        ("rms_norm 64x64 --gpu a100", "rms_norm: no kernel for sm_80 (A100)"),
        ("rms_norm_forward 64x64 --gpu cpu", "rms_norm_forward: no kernel for cpu tensors. "),
        ("rms_norm 4x12 --dtype fp64 --gpu h200", "rms_norm: no kernel for x in float64; supported: bfloat16, float16"),
        ("linear_cross_entropy 8x64x9 --dtype fp32 --gpu h200", "no kernel for torch.float32; supported: torch.b"),
        ("grouped_mlp 8x64x32x4 --dtype fp32 --gpu h200", "grouped_mlp: no kernel for torch.float32; supported: "),
        ("grouped_mlp 8x64x12x4 --gpu h200", "grouped_mlp: no kernel for matrices with 64 and 12 columns; expected "),
        ("linear_cross_entropy 8x12x9 --gpu h200", "linear_weight with 12 columns; supported: multiples of 8. "),
    ],
)
def test_reasons_for_the_portable_path(words, reason):
    path, why = output(words, []).splitlines()[-2:]
    assert path == "Path: the portable path, in plain PyTorch"
    assert why.startswith("Why: ")
    assert reason in why
    assert why.endswith('backend="auto" runs the portable path.')


@pytest.mark.parametrize("gpu", ["h200", "cpu"])
def test_an_operation_without_kernels(gpu, monkeypatch):
    from quackish.cli import precompile

    op = dataclasses.replace(RMS_NORM, name="no_kernels", spec=None)
    monkeypatch.setitem(call_arguments.CALLS, op.name, (op, ("forward", "backward")))
    assert output(f"no_kernels 4x8 --gpu {gpu}").endswith(
        '\nWhy: no_kernels: no kernel for any GPU. backend="auto" runs the portable path.'
    )
    if gpu != "cpu":
        assert precompile.requests_of(op.name, "4x8", gpu) == []


def test_one_direction_may_take_the_portable_path():
    result = dry("rms_norm 1x262144 --bias")
    assert [step.phase for step in result.steps] == ["forward"]
    assert "the portable path, in plain PyTorch: rms_norm: no kernel for rows" in result.plan["Path of backward"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_the_default_gpu_is_named():
    first, second, *_ = output("rms_norm 64x64").splitlines()
    assert " on H200 (" in first
    assert second == "GPU: there is none here, so an H200 is assumed; --gpu names another"


@pytest.mark.parametrize(
    "error, note",
    [
        (FileNotFoundError("no cuobjdump"), "Registers and shared memory are not shown: no cuobjdump"),
        (ModuleNotFoundError("No module"), "not shown: nvidia-cutlass-dsl, the compiler, is not installed."),
    ],
)
def test_missing_tools_omit_only_resources(error, note, monkeypatch):
    def resources(*args):
        raise error

    monkeypatch.setattr(command.launch, "resources", resources)
    words = "linear_cross_entropy 64x64x100 --gpu h200"
    lines = command.text(parse(words)).splitlines()
    (omitted,) = [line for line in lines if "are not shown: " in line]
    assert omitted.endswith(note)
    lines.remove(omitted)
    assert lines == output(words).splitlines()


# Invalid arguments ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words, expected",
    [
        ("rms_norm 4x4x4", "SHAPE is '4x4x4'; expected MxN"),
        ("rms_norm 4x4 --weight-dtype x", "--weight-dtype: 'x' is unknown; expected one of bf16, fp16, fp32"),
        ("rms_norm 4x4 --residual-dtype fp32", "--residual-dtype is given without --residual"),
        ("rms_norm 4x4 --dweight-out --weight-dtype none", "--dweight-out is given, but --weight-dtype is none"),
        ("rms_norm 4x4 --heads 3", "--heads is 3, expected a divisor of 4 rows"),
        ("rms_norm 4x4 --schedule stored", "--schedule is an option of linear_cross_entropy, not of rms_norm"),
        ("linear_cross_entropy 4x8x9 --schedule x", "schedule is 'x', expected one of auto"),
        ("linear_cross_entropy 4x8x9 --chunk-size 0", "chunk_size is 0, expected"),
        ("linear_cross_entropy 512x64x900 --memory-limit 1kB", "memory_limit is 1000 bytes, expected at least "),
        ("linear_cross_entropy 4x8x9 --memory-limit x", "--memory-limit: 'x'; expected a number of bytes, such as"),
        ("grouped_mlp 4x8x8x2 --activation relu", "explain: activation is 'relu'; expected one of 'swiglu', "),
        ("grouped_mlp 4x8x8x2 --activation silu --w3", 'w3 is given but activation is "silu", which has no gate'),
    ],
)
def test_invalid_arguments(words, expected, capsys):
    assert main(["explain", *words.split()]) == 2
    *_, error = capsys.readouterr().err.splitlines()
    assert error.startswith("explain: ")
    assert expected in error


def test_a_line_says_at_once_what_takes_seconds(capsys):
    args = parse("rms_norm 4x8 --gpu h200")
    command.begin(args)
    assert "--no-compile skips this" in capsys.readouterr().err
    command.begin(parse("rms_norm 4x8 --gpu h200 --no-compile"))
    assert capsys.readouterr().err == ""


# Linear cross entropy ------------------------------------------------------------------------------------------------


def recording(launches):
    """Kernels that only add their launches to `launches`."""

    def kernel_for(problem, gpu):
        config = choose(problem, gpu).config
        return CompiledKernel(
            lambda *args: launches.append((problem.spec.name, problem, config, problem.spec.sizes_of(args[0]))), config
        )

    return kernel_for


@pytest.fixture(params=[H200, B200], ids=lambda gpu: gpu.name)
def launched(request):
    """(GPU, list of launches: kernel, problem, config, sizes). Nothing is computed."""
    gpu, launches = request.param, []
    with substitute("cpu", KernelDevice(gpu, recording(launches))):
        yield gpu, launches


def every_option():
    """(name, reduction), the first of each name with another reduction."""
    for i, name in enumerate(OPTIONS):
        yield from ((name, REDUCTIONS[(i + j) % len(REDUCTIONS)]) for j in range(len(REDUCTIONS)))


@pytest.mark.parametrize("name, reduction", one_per(lambda name, reduction: name, every_option()))
def test_a_dry_run_launches_what_the_operation_does(name, reduction, launched):
    gpu, launches = launched
    options, dtype = OPTIONS[name], torch.bfloat16
    printed = [f"--{key} {value}".replace("_", "-").replace(" True", "") for key, value in options.items()]
    hows = ("", "--return-lse", "--return-stats", "--grad-weight-out", "--no-grad")
    shapes = itertools.cycle([(300, 8, 700, "--chunk-size 128"), (40, 64, 1000, "")])  # in turn
    for (how, schedule), (m, h, v, chunks) in zip(itertools.product(hows, SCHEDULES), shapes, strict=False):
        x, w, target, kw = make(m, h, v, dtype, **options, reduction=reduction)
        launches.clear()
        out = torch.zeros(w.shape) if "out" in how else None
        with torch.set_grad_enabled(how != "--no-grad"):
            results = quackish.linear_cross_entropy(
                x, w, target, schedule=schedule, chunk_size=128 if chunks else None, backend="cute",
                return_lse="lse" in how, return_stats="stats" in how, grad_weight_out=out, **kw,
            )  # fmt: skip
        if how != "--no-grad":
            if "stats" in how:
                results = (results[0], *results[1][:3])
            results = results if isinstance(results, tuple) else (results,)
            torch.autograd.backward(results, [torch.ones(t.shape) for t in results])
        words = f"{m}x{h}x{v} --reduction {reduction} --schedule {schedule} {chunks} {how} {' '.join(printed)}"
        steps = dry(f"linear_cross_entropy {words}", gpu).steps
        mine = [(s.kernel, s.problem, s.choice.config, s.sizes) for s in steps if s.choice is not None]
        assert mine == launches, words


@pytest.mark.parametrize("call", ["rms_norm 16384x4096", *(f"{HEADLINE} --schedule {s}" for s in SCHEDULES)])
def test_hopper_cards_run_the_same_kernels_by_the_same_configs(call):
    """Only the number of CTAs differs, as the docs promise for output bits."""
    h200, *others = (
        [(s.kernel, s.problem, s.choice and s.choice.config, s.sizes) for s in dry(call, gpu).steps]
        for gpu in (H200, H100, H100_NVL, GH200, H100_PCIE)
    )
    assert all(steps == h200 for steps in others)


@pytest.mark.parametrize("gpu", [H200, B200], ids=lambda gpu: gpu.name)
@pytest.mark.parametrize("schedule, products", [("chunked", 3), ("stored", 3), ("recompute", 4)])
def test_launches_of_pytorch_and_flops(schedule, products, gpu):
    m, h, v = 8192, 4096, 128_256
    steps = dry(f"linear_cross_entropy {m}x{h}x{v} --bias --schedule {schedule}", gpu).steps
    gemms = [step for step in steps if step.kernel in ("lce_gemm", "torch.mm", "torch.addmm")]
    flops = sum(step.calls * step.work.flops for step in gemms)
    assert flops == 2 * m * h * products * v
    launching = {f"torch.{name}" for name in "mm addmm sum new_full new_zeros zero_ clone add_ _to_copy copy_".split()}
    assert {step.kernel for step in steps if step.choice is None} <= launching
    (loss,) = [step for step in steps if step.kernel == "torch.sum"]
    assert (loss.phase, loss.work.bytes_read, loss.work.bytes_written) == ("forward", m * 4, 4)


# Peak GB on an H200, with gradients: benchmarks/results/H200; the last two were measured separately.
@pytest.mark.parametrize(
    "shape, schedule, gb",
    [
        ("8192x4096x128256", "chunked", 2.654),
        ("8192x4096x128256", "stored", 3.421),
        ("8192x4096x128256", "recompute", 1.286),
        ("8192x2048x151936", "chunked", 2.718),
        ("65536x4096x128256", "chunked --chunk-size 16384", 7.040),
    ],
)
def test_memory_is_as_measured_on_a_gpu(shape, schedule, gb):
    result = dry(f"linear_cross_entropy {shape} --schedule {schedule}")
    assert result.peak_bytes / 1e9 == pytest.approx(gb, rel=2e-3)
    assert sum(buffer.bytes for buffer in result.buffers) == result.peak_bytes


def test_linear_cross_entropy_text():
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
    compiled = []
    printed = output("linear_cross_entropy 8192x4096x128256 --gpu h200", compiled)
    assert "Schedule: chunked, by the rule in kernel_config, quackish/ops/linear_cross_entropy/layout.py\n" in printed
    assert "Chunks: 1 in forward, of 8192 rows; at most 14336\n" in printed
    assert "1.40 GB  8192x85504 bf16\n 1.05 GB  128256x4096 bf16\n" in printed
    assert "lce_gemm: returns at once if no row was flagged." in printed
    assert len(set(map(str, compiled))) == len(compiled) == printed.count(", class ")
    total = float(printed.partition("\n12 launches ")[2].splitlines()[0].split()[-1])
    assert total > 1e6 * 3 * 2 * 8192 * 4096 * 128_256 / 700e12


def test_memory_limits():
    """Each row's limit selects that row, and its schedule and chunk rows need that memory."""
    words = "linear_cross_entropy 2048x512x32000 --gpu h200"
    printed = output(words)
    _, _, *rows = printed[printed.index("memory_limit from MB") :].split("\n\n")[0].splitlines()
    rows = [row.replace(",", "").split() for row in rows]
    limits, times = ([float(row[i]) for row in rows] for i in (0, -1))
    assert limits == sorted(limits, reverse=True)
    assert times == sorted(times)
    assert len(rows) > 5
    gradients = 2 * 512 * (2048 + 32_000)
    for limit, schedule, *chunk, _ in rows:
        result = dry(f"{words} --memory-limit {limit}MB")
        assert result.plan["Schedule"].startswith(f"{schedule}, the fastest within the memory limit")
        asked = f" --chunk-size {chunk[0]}" if chunk else ""
        assert result.peak_bytes == dry(f"{words} --schedule {schedule}{asked}").peak_bytes
        assert float(limit) * 1e6 - 10 * (1 << 20) <= result.peak_bytes - gradients <= float(limit) * 1e6
        assert float(limit) * 1e6 - 1e5 < result.limited_bytes <= float(limit) * 1e6
    assert f"\nmemory_limit counts {limits[0]:,.1f} MB: memory besides inputs and gradients.\n" in printed
    assert "expected time" not in output(f"{words} --no-grad").lower()
    assert size("8.2MB") == 8_200_000  # 8.2 * 1e6 is less


@pytest.mark.parametrize("items", [range(0), range(0, 5, 5), range(0, 9, 5), range(0, 10, 5), range(0, 101, 5)])
def test_representatives_stand_for_all_items(items):
    found = list(representatives(items))
    assert sum(count for _, count in found) == len(items)
    assert [item for item, _ in found] == sorted({*items[:2], *items[-1:]})


@pytest.mark.parametrize("gpu", [H200, B200], ids=lambda gpu: gpu.name)
@pytest.mark.parametrize("words", ["1000x64x5000 --chunk-size 128", "3000x64x20001 --grad-weight-out --dtype fp16"])
def test_a_dry_run_skips_equal_iterations(words, gpu, monkeypatch):
    """Launches, memory and what limits select are as if every iteration of every loop had run."""
    monkeypatch.setattr(lce_config, "MIN_BLOCK", 256)
    monkeypatch.setattr(lce_config, "SCRATCH_BYTES_NO_DW", 1 << 22)
    words = f"linear_cross_entropy {words} --schedule recompute"

    def found():
        result, counts = dry(words, gpu), Counter()
        for step in result.steps:
            sizes = {name: n for name, n in step.sizes.items() if name not in ("v0", "v1")}
            counts[step.phase, step.kernel, str(step.problem), str(sizes), step.work] += step.calls
        points = frontier(call_arguments.meta_arguments(parse(words)), gpu)
        return len(result.steps), (counts, result.peak_bytes, result.buffers, result.plan, points)

    count, run = found()
    monkeypatch.setattr(lce_dry_run, "representatives", lambda items: ((item, 1) for item in items))
    count_of_all, run_all = found()
    assert run == run_all
    assert count < count_of_all


@pytest.mark.parametrize(
    "words",
    ["536870912x64x256 --schedule recompute", "8192x64x536870912 --schedule recompute --chunk-size 128",
     "8192x64x536870912 --grad-weight-out", "536870912x8x8 --schedule stored --gpu b200"],
)  # fmt: skip
def test_huge_sizes_take_few_steps(words):
    assert len(dry(f"linear_cross_entropy {words}", B200 if "b200" in words else H200).steps) < 100


def test_equal_launches_are_counted():
    printed = output("linear_cross_entropy 1024x64x1000 --gpu h200 --chunk-size 256")
    assert printed.partition("\n[2] lce_gather ")[2].splitlines()[1] == "    4 calls, each rows=256 v=1000"
    assert "Chunks: 4 in forward, of 256 rows; at most 256\n" in printed


@pytest.mark.parametrize(
    "options, reason",
    [
        ("--schedule stored", "stored, as given"),
        ("--reduction none", 'gradients are computed in backward because of reduction "none"'),
        ("--return-lse --grad-weight-out", "because of a returned lse and grad_weight_out"),
        ("--return-stats", "because of returned statistics"),
        ("--reduction none --schedule chunked", "recompute in place of chunked; gradients are computed in"),
        ("--dtype fp16", "because of fp16"),
        ("--label-smoothing 0.1 --schedule stored", "because of label smoothing"),
        ("--schedule recompute", "recompute, as given; the input's gradient is computed in forward"),
        ("--no-grad", "none, as nothing needs a gradient"),
    ],
)
def test_reasons_for_schedules(options, reason):
    assert reason in dry(f"linear_cross_entropy 512x64x1000 {options}").plan["Schedule"]


# grouped_mlp ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["", "--recompute", "--grad-weight-out", "--no-grad"])
@pytest.mark.parametrize("words", ["--scales", "--bias --w3 --scales", "--activation silu --bias", "--dtype fp16"])
def test_a_dry_run_launches_what_grouped_mlp_does(words, how, monkeypatch):
    h, i, launches = 64, 40, []
    activation = "silu" if "silu" in words else "swiglu"
    dtype = torch.float16 if "fp16" in words else torch.bfloat16
    given = dict(split="w3" in words, biases="bias" in words, scales="scales" in words)
    case, dy = make_mlp(h=h, i=i, dtype=dtype, activation=activation, **given)
    outs = {}
    if "out" in how:
        outs = {f"grad_{name}_out": torch.zeros(case[name].shape) for name in ("w1", "w2", "w3") if name in case}
    with substitute("cpu", KernelDevice(H200, recording(launches))), torch.set_grad_enabled(how != "--no-grad"):
        y = quackish.grouped_mlp(**case, **outs, recompute=how == "--recompute")
        if y.requires_grad:
            y.backward(dy)
    shape = "x".join(map(str, (dy.shape[0], h, i, case["offs"].shape[0])))
    steps = dry(f"grouped_mlp {shape} {words} {how}").steps
    assert [(s.kernel, s.problem, s.choice.config, s.sizes) for s in steps if s.choice is not None] == launches
    backward = (how != "--no-grad") * (4 + ("w3" in words) + 2 * ("bias" in words))
    assert len(launches) == 2 + (how == "--recompute") + backward


def test_launches_and_memory_of_grouped_mlp():
    r, h, i, experts = 65_536, 2048, 768, 64
    result = dry(f"grouped_mlp {r}x{h}x{i}x{experts} --scales")
    assert [s.kernel for s in result.steps].count("grouped_gemm") == 6
    assert len(result.steps) == 7 <= 8  # PyTorch sums the partial gradients of the scales
    assert sum(s.work.flops for s in result.steps if s.kernel == "grouped_gemm") == 3 * 2 * r * h * 3 * i
    saved, gradients, y = 4 * r * i, 2 * (r * h + experts * 3 * h * i), 2 * r * h
    assert result.peak_bytes == pytest.approx(y + gradients + saved, rel=0.01)  # the preactivation's or its gradient
    assert sum(buffer.bytes for buffer in result.buffers) == result.peak_bytes
    without_grad = dry(f"grouped_mlp {r}x{h}x{i}x{experts} --no-grad")
    assert without_grad.peak_bytes == pytest.approx(y + 2 * r * i, rel=0.01)
    assert "by the rule in quackish/ops/mlp/gemm_problems.py" in output(f"grouped_mlp {r}x{h}x{i}x{experts}")


# Attention -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words, names",
    [
        ("", ("attention_bwd_product",)),
        ("--attn-bias 1,h --attn-mask half", ("attention_bwd_queries", "attention_bwd_bias")),
        ("--no-grad", None),
    ],
)
def test_launches_of_attention(words, names):
    """Sizes are the call's, although each tensor's strides have names such as batch too."""
    steps = dry(f"scaled_dot_product_attention 3x4x200x40 {words}").steps
    backward = () if names is None else ("attention_bwd_rows", "attention_bwd_keys", *names)
    if "--attn-mask" in words:
        assert steps.pop(0).sizes == dict(batches=3, heads=1, rows=200, columns=200)
        assert steps.pop(0).sizes == dict(batches=3, heads=1, num_q=200, num_k=200)
    assert [step.kernel for step in steps] == ["attention_fwd", *backward]
    sizes = dict(batch=3, heads=4, group=1, num_q=200, num_k=200, d=40)
    assert all(sizes[name] == step.sizes[name] for step in steps for name in step.sizes if name in sizes)
    assert [step.problem.dbias for step in steps[2:3]] == ["--attn-bias" not in words] * len(steps[2:3])
