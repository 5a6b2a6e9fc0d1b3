"""`python -m quackish explain`: what it says, against ops, launches and a GPU's memory; and how it refuses."""

import argparse
import gc
import json

import pytest
import torch
from lce_cases import OPTIONS, REDUCTIONS, SCHEDULES, make

import quackish
from quackish.__main__ import main
from quackish.cli import dry_run, explain_linear_cross_entropy
from quackish.cli import explain as command
from quackish.cli.explained import report, text
from quackish.configs.choose import choose
from quackish.configs.linear_cross_entropy import KernelProblem, kernel_config
from quackish.configs.rms_norm import RmsNormBwdProblem
from quackish.gpu import B200, H200, gpu_of
from quackish.launch import Resources
from quackish.ops import rms_norm_plans
from quackish.ops.kernel_for import Kernel
from quackish.ops.linear_cross_entropy import api as public
from quackish.ops.linear_cross_entropy import autograd as on_kernels
from quackish.ops.linear_cross_entropy import cublas
from quackish.work import sizes_of, work

BF16, CPU = "bfloat16", torch.device("cpu")


def explain(words):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.explain(parser.parse_args(words.split()))


def told(words, compiled=None):
    """The report. Compilation takes seconds: a stand-in's numbers, if asked for; `compiled` gets what it was given."""

    def resources(kernel_class, problem, config, target):
        compiled.append((kernel_class.__name__, problem, config, target))
        return Resources(40, 8, 3, 2, 58_000, config.threads)

    return report(explain(words), compiling=compiled is not None, resources=resources)


# RMSNorm -------------------------------------------------------------------------------------------------------------


def test_rms_norm_backward_on_b200():
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
    compiled = []
    said = told("rms_norm_backward 16384x4096 --dtype bf16 --gpu b200", compiled)
    problem = RmsNormBwdProblem(4096, BF16, BF16, BF16, dx_dtype=BF16, dweight_dtype=BF16)
    choice = choose("rms_norm_bwd", problem, B200)
    assert compiled == [("RmsNormBwd", problem, choice.config, "sm_100a")]
    (kernel,) = said["kernels"]
    assert kernel["config"] == vars(choice.config)
    assert (kernel["class"], kernel["source"], kernel["reason"]) == ("RmsNormBwd", choice.source, choice.reason)
    assert (kernel["registers"], kernel["stack_bytes"], kernel["local_loads"], kernel["local_stores"]) == (40, 8, 3, 2)
    assert (kernel["ctas_per_sm"], kernel["limited_by"]) == (3, "shared memory")  # 58,000 + 1024 of 233,472
    (row,) = said["launches"]
    done = work("rms_norm_bwd", problem, {"m": 16_384})
    assert (row["bytes_read"], row["bytes_written"], row["flops"]) == (done.bytes_read, done.bytes_written, done.flops)
    assert row["floor_us"] == pytest.approx(done.bytes / 8e12 * 1e6)
    assert said["roofs"]["source"] == "data sheet"
    assert said["path"] == "kernels"


def test_text_has_what_json_has(capsys):
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
    words = "rms_norm 4096x8192 --residual fp32 --weight-dtype fp32 --bias --gpu h200"
    said = told(words, [])
    shown = text(said)
    assert shown.startswith("rms_norm 4096x8192 bfloat16 on H200 (sm_90a, 132 SMs)\nPath: quackish's kernels\n")
    for row in said["launches"]:
        assert f"{row['floor_us']:.1f}" in shown
    for kernel in said["kernels"]:
        assert f"{kernel['kernel']}, class {kernel['class']}: {kernel['problem']}" in shown
        assert " ".join(f"{name}={value}" for name, value in kernel["config"].items()) in shown
        assert f"{kernel['source']}: {kernel['reason']}" in shown
    for part in ("registers  stack B", "limited by", "Floors are for copy 4.25 TB/s, add 4.39 TB/s, GEMM 700 TFLOP/s"):
        assert part in shown
    assert max(map(len, shown.splitlines())) < 170
    assert main(["explain", *words.split(), "--no-compile", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(told(words)))


@pytest.mark.parametrize("dtype, n", [("bf16", 4096), ("fp16", 100), ("fp32", 8200)])
@pytest.mark.parametrize(
    "words", ["", "--residual", "--residual fp32 --bias", "--weight-dtype none", "--out-dtype fp32"]
)
def test_rms_norm_problems_are_those_that_ops_ask_for(words, dtype, n, monkeypatch):
    asked = []

    def find_kernel(name, problem, *args):
        asked.append((name, problem))  # and the portable path runs

    monkeypatch.setattr(rms_norm_plans, "find_kernel", find_kernel)
    torch_dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]

    def tensor(*shape, dtype=torch_dtype):
        return torch.randn(shape).to(dtype).requires_grad_()

    x, weight = tensor(16, n), None if "none" in words else tensor(n)
    bias = tensor(n) if "--bias" in words else None
    residual = (
        tensor(16, n, dtype=torch.float32 if "fp32 --bias" in words else torch_dtype) if "--res" in words else None
    )
    out_dtype = torch.float32 if "--out-dtype" in words else None
    with quackish.config():  # in which no plan made before it is used
        outputs = quackish.rms_norm(x, weight, bias, residual=residual, out_dtype=out_dtype)
        outputs = outputs if residual is not None else (outputs,)
        torch.autograd.backward(outputs, [torch.ones_like(t) for t in outputs])
    expected = asked[:]
    steps = explain(f"rms_norm 16x{n} --dtype {dtype} --gpu h200 {words}").trace.steps
    assert [(step.kernel, step.problem) for step in steps] == expected


# The portable path ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words, reason",
    [
        ("rms_norm 64x64 --gpu a100", "rms_norm: no kernel for sm_80 (A100)"),
        ("rms_norm_forward 64x64 --gpu cpu", "rms_norm: no kernel for cpu tensors. "),
        ("rms_norm 4x12 --dtype fp64 --gpu h200", "rms_norm: no kernel for x in float64; supported: bfloat16, float16"),
        ("rms_norm_forward 1x262152 --gpu h200", "rms_norm: no kernel for "),
        ("linear_cross_entropy 64x64x100 --gpu a100", "linear_cross_entropy: no kernel for sm_80 (A100)"),
        ("linear_cross_entropy 64x64x100 --gpu cpu", "linear_cross_entropy: no kernel for cpu. "),
        ("linear_cross_entropy 8x64x9 --dtype fp32 --gpu h200", "no kernel for torch.float32; supported: torch.b"),
        ("linear_cross_entropy 8x12x9 --gpu h200", "linear_weight with 12 columns; supported: multiples of 8. "),
    ],
)
def test_the_portable_path_has_reasons(words, reason):
    said = told(words)
    assert (said["path"], "launches" in said) == ("portable", False)
    assert reason in said["why"]
    assert 'backend="auto" runs the portable path.' in said["why"]
    assert "Path: the portable path, in plain PyTorch\nWhy: " in text(said)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_as_on_which():
    said = told("rms_norm 64x64")
    assert said["gpu"]["name"] == "H200"
    assert "there is none here" in said["plan"]["GPU"]


# Without tools -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", ["rms_norm 64x64 --gpu h200", "linear_cross_entropy 64x64x100 --gpu h200"])
@pytest.mark.parametrize(
    "error, note",
    [
        (
            FileNotFoundError("cuobjdump is not there"),
            "Registers and shared memory are left out: cuobjdump is not there",
        ),
        (ModuleNotFoundError("No module"), "left out: nvidia-cutlass-dsl, the compiler, is not installed."),
    ],
)
def test_without_tools_the_rest_is_said(words, error, note):
    def resources(*args):
        raise error

    said = report(explain(words), compiling=True, resources=resources)
    (left_out,) = [n for n in said["notes"] if "left out" in n and "ignored" not in n]
    assert left_out.endswith(note)
    said["notes"].remove(left_out)
    assert said == told(words)


# What is refused -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words, expected",
    [
        ("rmsnorm 4x4", "OP: 'rmsnorm' is unknown; expected one of rms_norm, "),
        ("rms_norm 4x4x4", "SHAPE is '4x4x4'; expected MxN"),
        ("rms_norm 4xb", "SHAPE is '4xb'"),
        ("rms_norm 99999999999999999999x8", "SHAPE is '99999999999999999999x8'; expected sizes below 2**31 and"),
        (f"rms_norm {'9' * 5000}x8", "expected MxN"),
        ("rms_norm 4x4 --dtype int8", "--dtype: 'int8' is unknown; expected one of bf16, fp16, fp32, fp64"),
        (
            "rms_norm 4x4 --weight-dtype x",
            "--weight-dtype: 'x' is unknown; expected one of bf16, fp16, fp32, fp64, none",
        ),
        ("rms_norm 4x4 --gpu v100", "--gpu: 'v100' is unknown; expected one of h100"),
        ("rms_norm 4x4 --schedule stored", "--schedule is an option of linear_cross_entropy, not of rms_norm"),
        ("linear_cross_entropy 4x8x9 --residual", "--residual is an option of rms_norm, not of linear_cross_entropy"),
        ("linear_cross_entropy 4x8x9 --schedule x", "schedule is 'x', expected one of auto"),
        ("linear_cross_entropy 4x8x9 --chunk-size 0", "chunk_size is 0, expected"),
    ],
)
def test_refusals_say_what_was_expected(words, expected, capsys):
    try:
        status = main(["explain", *words.split()])
    except SystemExit as ended:
        status = ended.code
    assert status == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith("explain: ")
    assert expected in error


# Linear cross entropy ------------------------------------------------------------------------------------------------


@pytest.fixture(params=[H200, B200], ids=lambda gpu: gpu.name)
def launched(request, monkeypatch, run_on):
    """(the GPU, what the operation launches on it: kernel, problem, config, sizes). Nothing is computed."""
    gpu, seen = request.param, []

    def kernel_for(name, problem, gpu):
        config = choose(name, problem, gpu).config
        return Kernel(lambda *args: seen.append((name, problem, config, sizes_of(name, args))), config)

    for name in ("mm", "addmm"):
        monkeypatch.setattr(cublas, name, lambda a, b, out: None)
    k = on_kernels.kernels_on(CPU, gpu, kernel_for)
    run_on(lambda device: k)
    return gpu, seen


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", OPTIONS)
def test_a_dry_run_launches_what_the_operation_does(name, reduction, launched, monkeypatch):
    gpu, seen = launched
    options, dtype = OPTIONS[name], torch.bfloat16
    given = {key: value for key, value in options.items() if key not in ("bias", "class_weight")}
    for how in (dict(), dict(return_lse=True), dict(grad_weight_out=True), dict(grad=False), dict(compiled=True)):
        if "compiled" in how:
            monkeypatch.setattr(public, "is_plain", lambda: False)  # as while it is traced: operators run
        for schedule in SCHEDULES:
            for m, h, v, chunk_size in ((300, 8, 700, 128), (40, 64, 1000, None)):
                x, w, target, kw = make(m, h, v, dtype, **options, reduction=reduction)
                seen.clear()
                lse = how.get("return_lse", False)
                buffer = torch.zeros(w.shape) if "grad_weight_out" in how else None
                with torch.set_grad_enabled(how.get("grad", True)):
                    out = quackish.linear_cross_entropy(
                        x, w, target, schedule=schedule, chunk_size=chunk_size, backend="cute", return_lse=lse,
                        grad_weight_out=buffer, **kw,
                    )  # fmt: skip
                if how.get("grad", True):
                    outputs = out if lse else (out,)
                    torch.autograd.backward(outputs, [torch.ones(t.shape) for t in outputs])
                problem = KernelProblem(
                    v=v, h=h, dtype=BF16, reduction=reduction, return_lse=lse, grad_weight_out=buffer is not None,
                    label_smoothing="label_smoothing" in options,
                )  # fmt: skip
                call = dry_run.LceCall(
                    m, h, v, dtype, reduction, "bias" in options, "class_weight" in options, **given, **how
                )
                trace = dry_run.linear_cross_entropy(call, kernel_config(problem, m, schedule, chunk_size), gpu)
                mine = [s for s in trace.steps if s.choice is not None]
                assert [(s.kernel, s.problem, s.choice.config, s.sizes) for s in mine] == seen, (schedule, m, how)


def test_a_dry_run_leaves_the_operation_as_it_was():
    before = vars(on_kernels).copy()
    trace_of(4, 8, 100)
    assert vars(on_kernels) == before


def trace_of(m, h, v, gpu=H200, schedule="auto", **call):
    how = kernel_config(KernelProblem(v=v, h=h, dtype=BF16, reduction="mean"), m, schedule)
    return dry_run.linear_cross_entropy(dry_run.LceCall(m, h, v, torch.bfloat16, **call), how, gpu)


@pytest.mark.parametrize("gpu", [H200, B200], ids=lambda gpu: gpu.name)
@pytest.mark.parametrize("schedule, products", [("chunked", 3), ("stored", 3), ("recompute", 4)])
def test_what_pytorch_launches_and_how_many_products_there_are(schedule, products, gpu):
    m, h, v = 8192, 4096, 128_256
    steps = trace_of(m, h, v, gpu, schedule, bias=True).steps
    flops = sum(step.work.flops for step in steps if step.kernel in ("lce_gemm", "torch.mm", "torch.addmm"))
    assert flops == 2 * m * h * products * v
    launching = {f"torch.{name}" for name in "mm addmm sum new_full new_zeros zero_ clone add_ _to_copy copy_".split()}
    assert {step.kernel for step in steps if step.choice is None} <= launching
    (loss,) = [step for step in steps if step.kernel == "torch.sum"]
    assert (loss.phase, loss.work.bytes_read, loss.work.bytes_written) == ("forward", m * 4, 4)


# GB at the peak that an H200 showed, gradients included: benchmarks/results/H200, and the two later ones beside it.
@pytest.mark.parametrize(
    "m, h, v, schedule, gb",
    [
        (8192, 4096, 128_256, "chunked", 2.676),
        (8192, 4096, 128_256, "stored", 3.421),
        (8192, 4096, 128_256, "recompute", 1.286),
        (8192, 2048, 151_936, "chunked", 2.744),
        (65_536, 4096, 128_256, "chunked", 7.072),
    ],
)
def test_memory_is_what_a_gpu_showed(m, h, v, schedule, gb):
    trace = trace_of(m, h, v, schedule=schedule)
    assert trace.peak_bytes / 1e9 == pytest.approx(gb, rel=2e-3)
    assert sum(buffer.bytes for buffer in trace.buffers) == trace.peak_bytes


def test_linear_cross_entropy_text():
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
    compiled = []
    said = told("linear_cross_entropy 8192x4096x128256 --gpu h200", compiled)
    shown = text(said)
    assert "Schedule: chunked: auto; forward can make the gradients" in shown
    assert "Chunks: 1 in forward, of 8192 rows; at most 16640, which keeps their exponentials within 4.29 GB" in shown
    assert "\n1.40 GB  8192x85504 bf16\n1.05 GB  128256x4096 bf16\n" in shown
    assert "lce_gemm: returns at once if no row was flagged." in shown
    assert len(set(map(str, compiled))) == len(said["kernels"])
    total = sum(row["calls"] * row["floor_us"] for row in said["launches"])
    assert total > 1e6 * 3 * 2 * 8192 * 4096 * 128_256 / 700e12
    assert f"{total:.1f}" in shown


def test_equal_launches_are_counted():
    said = told("linear_cross_entropy 1024x64x1000 --gpu h200 --chunk-size 256")
    assert [row["calls"] for row in said["launches"] if row["kernel"] == "lce_gather"] == [4]
    assert said["plan"]["Chunks"] == "4 in forward, of 256 rows; at most 256, which was asked for, in whole tiles"


@pytest.mark.parametrize(
    "options, schedule, words",
    [
        (dict(), "auto", "forward can make the gradients"),
        (dict(), "stored", "asked for"),
        (dict(reduction="none"), "auto", 'reduction is "none", so it is left to backward'),
        (dict(reduction="none", v=10**7), "auto", "more than 2.15"),
        (dict(return_lse=True), "auto", "lse is returned, so it is left to backward"),
        (dict(grad_weight_out=True), "auto", "the weight's gradient is added to a buffer"),
        (dict(reduction="none"), "chunked", "chunked was asked for, but with reduction"),
        (dict(dtype="float16"), "auto", "fp16 has not the range"),
        (dict(label_smoothing=True), "stored", "stored was asked for, and gradients cannot start"),
    ],
)
def test_schedules_have_reasons(options, schedule, words):
    problem = KernelProblem(**{**dict(v=1000, h=64, dtype=BF16, reduction="mean"), **options})
    how = kernel_config(problem, 512, schedule)
    assert words in explain_linear_cross_entropy.schedule_reason(problem, 512, schedule, how)


# On a GPU ------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_memory_is_what_this_gpu_shows(schedule):
    m, h, v = 4096, 2048, 32_000
    x, w = (torch.randn(rows, h, device="cuda").bfloat16().requires_grad_() for rows in (m, v))
    target = torch.randint(v, (m,), device="cuda")

    def step():
        loss = quackish.linear_cross_entropy(x, w, target, schedule=schedule)
        return loss, *torch.autograd.grad(loss, [x, w])

    step()
    torch.cuda.synchronize()
    gc.collect()  # what other tests left and is collected during the step would count as its own
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    shown = torch.cuda.max_memory_allocated() - before
    assert trace_of(m, h, v, gpu_of(0), schedule).peak_bytes == pytest.approx(shown, rel=0.01, abs=1 << 20)


@pytest.mark.gpu
def test_the_current_gpu_is_the_default():
    assert told("rms_norm 64x64")["gpu"]["name"] == gpu_of(torch.cuda.current_device()).name
