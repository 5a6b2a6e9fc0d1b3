"""`python -m quackish explain`: what it says, against ops, launches and a GPU's memory; and how it refuses."""

import gc
import json

import pytest
import torch
from lce_cases import OPTIONS, REDUCTIONS, SCHEDULES, make

import quackish
from quackish import kernels, launch
from quackish.__main__ import main
from quackish.cli import dry_run, explain_linear_cross_entropy, explained
from quackish.configs.choose import choose
from quackish.configs.linear_cross_entropy import KernelProblem, kernel_config
from quackish.configs.rms_norm import RmsNormBwdProblem, RmsNormFwdProblem
from quackish.errors import UnsupportedError
from quackish.gpu import B200, H200, NAMED, gpu_of
from quackish.launch import Resources
from quackish.ops import rms_norm_plans
from quackish.ops.linear_cross_entropy import api as public
from quackish.ops.linear_cross_entropy import autograd as on_kernels
from quackish.ops.linear_cross_entropy import cublas
from quackish.work import kernel_of, sizes_of, work

BF16 = "bfloat16"


def explain(capsys, *words, status=0, **options):
    """What is printed; of --json, as objects."""
    assert main(["explain", *words]) == status
    out, err = capsys.readouterr()
    if status:
        return err
    return json.loads(out) if "--json" in words else out


@pytest.fixture
def resources(monkeypatch):
    """Compilation takes seconds: what it would say. Those that ask for it get what was compiled, in order."""
    compiled = []

    def stand_in(kernel_class, problem, config, target):
        compiled.append((kernel_class.__name__, problem, config, target))
        return Resources(40, 8, 3, 2, 58_000, config.threads)

    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
    monkeypatch.setattr(launch, "resources", stand_in)
    return compiled


# RMSNorm -------------------------------------------------------------------------------------------------------------


def test_rms_norm_backward_on_b200(capsys, resources):
    said = explain(capsys, *"rms_norm_backward 16384x4096 --dtype bf16 --gpu b200 --json".split())
    problem = RmsNormBwdProblem(4096, BF16, BF16, BF16, dx_dtype=BF16, dweight_dtype=BF16)
    choice = choose("rms_norm_bwd", problem, B200)
    assert resources == [("RmsNormBwd", problem, choice.config, "sm_100a")]
    (kernel,) = said["kernels"]
    assert kernel["config"] == vars(choice.config)
    assert (kernel["class"], kernel["source"], kernel["reason"]) == ("RmsNormBwd", choice.source, choice.reason)
    assert kernel["registers"] == 40
    assert (kernel["stack_bytes"], kernel["local_loads"], kernel["local_stores"]) == (8, 3, 2)
    assert (kernel["ctas_per_sm"], kernel["limited_by"]) == (3, "shared memory")  # 58,000 + 1024 of 233,472
    (row,) = said["launches"]
    done = work("rms_norm_bwd", problem, {"m": 16_384, "num_ctas": row["ctas"]})
    assert (row["bytes_read"], row["bytes_written"], row["flops"]) == (done.bytes_read, done.bytes_written, done.flops)
    assert row["floor_us"] == pytest.approx(done.bytes / 8e12 * 1e6)
    assert row["ctas"] == choice.config.num_ctas(16_384, 148)
    assert row["waves"] == pytest.approx(row["ctas"] / (3 * 148))
    assert said["roofs"]["source"] == "data sheet"
    assert said["path"] == "kernels"


def test_text_has_what_json_has(capsys, resources):
    words = "rms_norm 4096x8192 --residual fp32 --weight-dtype fp32 --bias --gpu h200".split()
    text, said = explain(capsys, *words), explain(capsys, *words, "--json")
    assert text.startswith("rms_norm 4096x8192 bfloat16 on H200 (sm_90a, 132 SMs)\nPath: quackish's kernels\n")
    for row in said["launches"]:
        assert f"{row['floor_us']:.1f}" in text
        assert str(row["ctas"]) in text
    for kernel in said["kernels"]:
        assert f"{kernel['kernel']}, class {kernel['class']}: {kernel['problem']}" in text
        assert " ".join(f"{name}={value}" for name, value in kernel["config"].items()) in text
        assert f"{kernel['source']}: {kernel['reason']}" in text
    assert "registers  stack B" in text
    assert "limited by" in text
    assert "Floors are for copy 4.25 TB/s, add 4.39 TB/s, GEMM 700 TFLOP/s (measured)." in text
    assert max(map(len, text.splitlines())) < 170


@pytest.mark.parametrize(
    "words", ["", "--residual", "--residual fp32 --bias", "--weight-dtype none", "--out-dtype fp32"]
)
@pytest.mark.parametrize("dtype, n", [("bf16", 4096), ("fp16", 100), ("fp32", 8200)])
def test_rms_norm_problems_are_those_that_ops_ask_for(words, dtype, n, capsys, monkeypatch):
    asked = []
    monkeypatch.setattr(rms_norm_plans, "gpu_for", lambda device: H200)
    monkeypatch.setattr(rms_norm_plans, "_forward_plans", {})
    monkeypatch.setattr(rms_norm_plans, "_backward_plans", {})
    monkeypatch.setattr(kernels, "find", lambda name, gpu: name)

    def get(name, problem, config, target):
        asked.append((name, problem, config, target))
        raise UnsupportedError("no GPU")

    monkeypatch.setattr(launch, "get", get)
    long = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    options = dict(zip(words.split()[::2], [*words.split()[1::2], None], strict=False))
    x = torch.randn(16, n).to(long[dtype]).requires_grad_()
    weight = None if "none" in words else torch.randn(n).to(long[dtype]).requires_grad_()
    bias = torch.randn(n).to(long[dtype]).requires_grad_() if "--bias" in words else None
    residual = None
    if "--residual" in words:
        residual = torch.randn(16, n).to(long[options["--residual"] or dtype]).requires_grad_()
    out_dtype = torch.float32 if "--out-dtype" in words else None
    outputs = quackish.rms_norm(x, weight, bias, residual=residual, out_dtype=out_dtype)
    outputs = outputs if residual is not None else (outputs,)
    torch.autograd.backward(outputs, [torch.ones_like(t) for t in outputs])

    seen, expected = [], list(asked)
    monkeypatch.setattr("quackish.cli.explain.report", lambda e, compiling: seen.extend(e.trace.steps))
    explain(capsys, "rms_norm", f"16x{n}", "--dtype", dtype, "--gpu", "h200", "--json", *words.split())
    assert [(step.kernel, step.problem, step.choice.config, "sm_90a") for step in seen] == expected


# The portable path ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gpu", ["a100", "a10", "l40s", "cpu"])
@pytest.mark.parametrize("words", ["rms_norm_forward 64x64", "rms_norm 64x64", "linear_cross_entropy 64x64x100"])
def test_portable_targets(gpu, words, capsys):
    said = explain(capsys, *words.split(), "--gpu", gpu, "--json")
    family = NAMED[gpu].family if gpu in NAMED else "cpu"
    assert said["path"] == "portable"
    assert family in said["why"]
    assert "launches" not in said
    text = explain(capsys, *words.split(), "--gpu", gpu)
    assert "Path: the portable path, in plain PyTorch" in text
    assert said["why"] in text


def refusal(call):
    with pytest.raises(UnsupportedError) as caught:
        call()
    return str(caught.value)


def test_reasons_are_the_operations_own(capsys, monkeypatch):
    x, w, target = torch.randn(4, 12).bfloat16(), torch.randn(9, 12).bfloat16(), torch.randint(9, (4,))

    def why(*words):
        return explain(capsys, *words, "--json")["why"]

    def norm(x):
        return refusal(lambda: quackish.rms_norm(x, None, backend="cute"))

    def loss(x, w):
        return refusal(lambda: quackish.linear_cross_entropy(x, w, target, backend="cute"))

    assert why("rms_norm", "4x12", "--gpu", "cpu") == norm(x)
    assert why("linear_cross_entropy", "4x12x9", "--gpu", "cpu") == loss(x, w)
    monkeypatch.setattr(public, "no_kernel_on", lambda device: "")
    monkeypatch.setattr(public, "_plans", {})
    assert why("linear_cross_entropy", "4x12x9", "--gpu", "h200") == loss(x, w)
    assert why(*"linear_cross_entropy 4x16x9 --gpu h200 --dtype fp32".split()) == loss(x.float(), w.float())
    monkeypatch.setattr(rms_norm_plans, "gpu_for", lambda device: H200)
    monkeypatch.setattr(rms_norm_plans, "_forward_plans", {})
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
    assert why(*"rms_norm 4x12 --gpu h200 --dtype fp64".split()) == norm(x.double())
    long = torch.randn(1, 262_152).bfloat16()
    assert why(*"rms_norm_forward 1x262152 --gpu h200".split()) == norm(long)


def test_without_a_gpu_it_says_as_on_which(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    said = explain(capsys, "rms_norm", "64x64", "--json", "--no-compile")
    assert said["gpu"]["name"] == "H200"
    assert "there is none here" in said["plan"]["GPU"]
    assert "there is no GPU here" in explain(capsys, "rms_norm", "64x64", "--gpu", "this", status=2)


# Without tools -------------------------------------------------------------------------------------------------------


def test_without_cuobjdump_registers_are_left_out(capsys, monkeypatch):
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
    monkeypatch.setattr("quackish.launch.cubin.shutil.which", lambda *args, **kwargs: None)
    said = explain(capsys, "rms_norm", "64x64", "--gpu", "h200", "--json")
    (note,) = [note for note in said["notes"] if "left out" in note]
    assert note.startswith("Registers and shared memory are left out: cuobjdump, which reads ")
    assert "launch." not in note  # a name of the code's
    assert all("registers" not in kernel for kernel in said["kernels"])
    assert all("waves" not in row for row in said["launches"])
    assert "stack B" not in explain(capsys, "rms_norm", "64x64", "--gpu", "h200")


@pytest.mark.parametrize("words", ["rms_norm 64x64 --gpu h200", "linear_cross_entropy 64x64x100 --gpu h200"])
def test_without_the_compiler_the_rest_is_said(words, capsys, monkeypatch):
    with_it = explain(capsys, *words.split(), "--json", "--no-compile")

    monkeypatch.setattr(explained, "_compiler_is_there", lambda: False)
    said = explain(capsys, *words.split(), "--json")
    assert any("nvidia-cutlass-dsl, the compiler, is not installed" in note for note in said["notes"])
    assert said["launches"] == with_it["launches"]
    assert said["kernels"] == with_it["kernels"]


# What is refused -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words, expected",
    [
        ("rmsnorm 4x4", "OP is 'rmsnorm'; expected one of rms_norm, "),
        ("rms_norm 4x4x4", "SHAPE is '4x4x4'; expected MxN"),
        ("linear_cross_entropy 4x4", "SHAPE is '4x4'; expected MxHxV"),
        ("rms_norm 4x0", "positive numbers"),
        ("rms_norm 4x-4", "SHAPE is '4x-4'"),
        ("rms_norm 4xb", "SHAPE is '4xb'"),
        ("rms_norm 99999999999999999999x8", "SHAPE is '99999999999999999999x8'; expected sizes below 2**31 and"),
        ("linear_cross_entropy 8x8x99999999999999999999", "expected sizes below 2**31"),
        ("rms_norm 2147483647x2147483647", "tensors of less than 2**60 elements"),
        (f"rms_norm {'9' * 5000}x8", "expected MxN"),
        ("rms_norm 4x4 --dtype int8", "--dtype is 'int8'; expected one of bf16, fp16, fp32, fp64"),
        ("rms_norm 4x4 --weight-dtype x", "--weight-dtype is 'x'; expected one of bf16, fp16, fp32, fp64, none"),
        ("rms_norm 4x4 --gpu v100", "--gpu is 'v100'; expected one of h100"),
        ("rms_norm 4x4 --schedule stored", "--schedule is an option of linear_cross_entropy, not of rms_norm"),
        ("linear_cross_entropy 4x8x9 --residual", "--residual is an option of rms_norm, not of linear_cross_entropy"),
        ("linear_cross_entropy 4x8x9 --schedule x", "schedule is 'x', expected one of auto"),
        ("linear_cross_entropy 4x8x9 --reduction x", "reduction is 'x', expected one of none, mean, sum"),
        ("linear_cross_entropy 4x8x9 --chunk-size 0", "chunk_size is 0, expected"),
        ("linear_cross_entropy 4x8x9 --label-smoothing 2", "label_smoothing is 2.0, expected"),
    ],
)
def test_refusals_say_what_was_expected(words, expected, capsys):
    error = explain(capsys, *words.split(), status=2)
    assert error.startswith("explain: ")
    assert expected in error
    assert len(error.splitlines()) == 1


# Linear cross entropy ------------------------------------------------------------------------------------------------


@pytest.fixture(params=[H200, B200], ids=lambda gpu: gpu.name)
def launched(request, monkeypatch):
    """(the GPU, what the operation launches on it: kernel, problem, config, sizes). Nothing is computed."""
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
    seen = []

    def get(kernel_class, problem, config, target):
        name = kernel_of(kernel_class.__name__)
        return lambda *args: seen.append((name, problem, config, sizes_of(name, args)))

    monkeypatch.setattr(launch, "get", get)
    for name in ("mm", "addmm"):
        monkeypatch.setattr(cublas, name, lambda a, b, out: None)
    monkeypatch.setattr(public, "no_kernel_on", lambda device: "")
    monkeypatch.setattr(public, "_plans", {})
    k = on_kernels.kernels_on(torch.device("cpu"), request.param)
    monkeypatch.setattr(on_kernels, "kernels_of", lambda device: k)
    return request.param, seen


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", OPTIONS)
def test_a_dry_run_launches_what_the_operation_does(name, reduction, launched):
    gpu, seen = launched
    options, dtype = OPTIONS[name], torch.bfloat16
    given = {key: value for key, value in options.items() if key not in ("bias", "class_weight")}
    for schedule in SCHEDULES:
        for m, h, v, chunk_size in ((300, 8, 700, 128), (40, 64, 1000, None)):
            for how in (dict(), dict(return_lse=True), dict(grad_weight_out=True), dict(grad=False)):
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
    before = on_kernels.kernels_of
    how = kernel_config(KernelProblem(v=100, h=8, dtype=BF16, reduction="mean"), 4)
    dry_run.linear_cross_entropy(dry_run.LceCall(4, 8, 100, torch.bfloat16), how, H200)
    assert on_kernels.kernels_of is before


def trace_of(m, h, v, gpu=H200, schedule="auto", chunk_size=None, **call):
    how = kernel_config(KernelProblem(v=v, h=h, dtype=BF16, reduction="mean"), m, schedule, chunk_size)
    return dry_run.linear_cross_entropy(dry_run.LceCall(m, h, v, torch.bfloat16, **call), how, gpu)


@pytest.mark.parametrize("gpu", [H200, B200], ids=lambda gpu: gpu.name)
@pytest.mark.parametrize("schedule, products", [("chunked", 3), ("stored", 3), ("recompute", 4)])
def test_products_are_three_or_four(schedule, products, gpu):
    m, h, v = 8192, 4096, 128_256
    trace = trace_of(m, h, v, gpu, schedule)
    flops = sum(step.work.flops for step in trace.steps if step.kernel in ("lce_gemm", "torch.mm", "torch.addmm"))
    begun = 42_240 if (schedule, gpu) == ("recompute", H200) else 0  # classes whose logits backward does not need
    assert flops == 2 * m * h * (products * v - begun)


@pytest.mark.parametrize("gpu", [H200, B200], ids=lambda gpu: gpu.name)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_of_pytorch_only_launches_are_listed(schedule, gpu):
    launching = {f"torch.{name}" for name in "mm addmm sum new_full new_zeros zero_ clone add_ _to_copy copy_".split()}
    steps = [step for step in trace_of(512, 64, 1000, gpu, schedule, bias=True).steps if step.choice is None]
    assert {step.kernel for step in steps} <= launching
    (loss,) = [step for step in steps if step.kernel == "torch.sum"]
    assert (loss.phase, loss.work.bytes_read, loss.work.bytes_written) == ("forward", 512 * 4, 4)


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
    schedule, _, chunk_size = schedule.partition("-")
    trace = trace_of(m, h, v, schedule=schedule, chunk_size=int(chunk_size) if chunk_size else None)
    assert trace.peak_bytes / 1e9 == pytest.approx(gb, rel=1e-3 if chunk_size else 2e-3)
    assert sum(buffer.bytes for buffer in trace.buffers) == trace.peak_bytes


def test_linear_cross_entropy_text(capsys, resources):
    text = explain(capsys, *"linear_cross_entropy 8192x4096x128256 --gpu h200".split())
    said = explain(capsys, *"linear_cross_entropy 8192x4096x128256 --gpu h200 --json".split())
    assert "Schedule: chunked: auto; forward can make the gradients" in text
    assert "Chunks: 1 in forward, of 8192 rows; at most 16640, which keeps their exponentials within 4.29 GB" in text
    assert "\n2.68 GB  memory beside the inputs, at its peak\n" in text
    assert "\n1.40 GB  8192x85504 bf16\n1.05 GB  128256x4096 bf16\n" in text
    assert "lce_gemm: leaves at once where no row was flagged." in text
    assert [row["phase"] for row in said["launches"]] == sorted(
        (row["phase"] for row in said["launches"]), reverse=True
    )
    assert len(set(map(str, resources))) == len(said["kernels"])
    total = sum(row["calls"] * row["floor_us"] for row in said["launches"])
    assert total > 1e6 * 3 * 2 * 8192 * 4096 * 128_256 / 700e12
    assert f"{total:.1f}" in text


@pytest.mark.parametrize(
    "shape, chunks",
    [
        ("8192x4096x128256", "8 in forward, of 1024 rows; at most 1024, which was asked for"),
        ("8192x256x128256", "8 in forward, of 1024 rows; at most 1024, which was asked for"),
    ],
)
def test_chunks_where_a_size_is_given(capsys, shape, chunks):
    words = f"linear_cross_entropy {shape} --gpu h200 --schedule recompute --chunk-size 1024 --no-compile"
    assert f"Chunks: {chunks}" in explain(capsys, *words.split())


def test_equal_launches_are_counted(capsys):
    words = "linear_cross_entropy 1024x64x1000 --gpu h200 --chunk-size 256 --no-compile --json"
    said = explain(capsys, *words.split())
    gather = [row for row in said["launches"] if row["kernel"] == "lce_gather"]
    assert [row["calls"] for row in gather] == [4]


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


# With the compiler, and on a GPU -------------------------------------------------------------------------------------


def test_registers_are_those_of_the_kernel(capsys):
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
    problem = RmsNormFwdProblem(4096, BF16, BF16, BF16)
    config = choose("rms_norm_fwd", problem, H200).config
    try:
        used = launch.resources(kernels.find("rms_norm_fwd", H200), problem, config, "sm_90a")
    except FileNotFoundError as error:
        pytest.skip(str(error))
    said = explain(capsys, *"rms_norm_forward 512x4096 --gpu h200 --json".split())
    (kernel,) = said["kernels"]
    assert {name: kernel[name] for name in vars(used)} == vars(used)


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
def test_the_current_gpu_is_the_default(capsys):
    said = explain(capsys, *"rms_norm 64x64 --json --no-compile".split())
    assert said["gpu"]["name"] == gpu_of(torch.cuda.current_device()).name
