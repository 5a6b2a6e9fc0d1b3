"""Other people's functions in the emulator: compile, load, replace_cuda, and the pytest fixture."""

import dataclasses
import sys

import pytest
import torch

import quackish.gpu
from quackish import emulator
from quackish.emulator import gpu as gpus

if sys.platform != "linux":
    pytest.skip("the compiler is for Linux", allow_module_level=True)

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass.cute.runtime import from_dlpack, make_fake_compact_tensor, make_fake_stream

from tests.device import jit_functions
from tests.device.jit_functions import Options, ScaleBySettings, Tensors, ask_hardware

ENV_STREAM = make_fake_stream(use_tvm_ffi_env_stream=True)
ONE = cutlass.Float32(1)


def fake() -> tuple:
    n = cute.sym_int()
    return tuple(make_fake_compact_tensor(cutlass.BFloat16, (n,), assumed_align=2) for _ in range(2))


def tensors() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(300).bfloat16(), torch.full((300,), float("nan")).bfloat16()


def is_scaled(x: torch.Tensor, y: torch.Tensor, factor: float) -> bool:
    result = torch.equal(y, (x.float() * factor).bfloat16())
    y.fill_(float("nan"))
    return result


# compile


@pytest.mark.parametrize("gpu", ["h100", "B200"])
def test_fake_arguments(gpu):
    scale = emulator.compile(jit_functions.scale, *fake(), ONE, ENV_STREAM, gpu=gpu, name="scale")
    x, y = tensors()
    with emulator.record("late", seed=3) as report:
        scale(x, y, 3.0)
        assert is_scaled(x, y, 3)
        scale(factor=0.5, y=y, x=x)
        assert is_scaled(x, y, 0.5)
    assert [(launch.kernel, launch.grid) for launch in report.launches] == 2 * [("scale", (3, 1, 1))]


KINDS = {
    "static": from_dlpack,
    "dynamic": lambda t: from_dlpack(t).mark_layout_dynamic(),
    "of TVM-FFI": lambda t: from_dlpack(t, enable_tvm_ffi=True),
    "torch": lambda t: t,
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_real_arguments(kind):
    """Both for compiling and for a call; a tensor may serve several times."""
    x, y = tensors()
    compiled_with = kind(x), kind(y)
    scale = emulator.compile(jit_functions.scale, *compiled_with, ONE, CUstream(0), gpu="b200", options="--opt-level 2")
    for arguments in (compiled_with, compiled_with, (kind(x), kind(y)), (x, y)):
        scale(*arguments, 2.0, CUstream(0))
        assert is_scaled(x, y, 2)
    scale(x.requires_grad_(), y, 2.0, 0)
    assert is_scaled(x, y, 2)


def test_an_object_with_tuples_dataclasses_and_defaults():
    scale = emulator.compile(ScaleBySettings(2), Tensors(*fake()), Options(ONE), gpu="h200")
    x, y = tensors()
    scale(Tensors(x, y), Options(3.0))
    assert is_scaled(x, y, 12)
    scale(Tensors(x, y), Options(3.0), more=0.5)
    assert is_scaled(x, y, 6)


def test_a_fault_names_the_tensor():
    x, y = tensors()
    short, stream = y[:280].clone(), CUstream(0)
    calls = {
        "y": (jit_functions.scale, (x, y, ONE, stream), (x, short, 2.0, stream)),
        "tensors.y": (ScaleBySettings(0), (Tensors(x, y), Options(ONE)), (Tensors(x, short), Options(2.0))),
    }
    for name, (function, compiled_with, arguments) in calls.items():
        with pytest.raises(emulator.Fault, match="of the nearest one, which has 560 bytes") as fault:
            emulator.compile(function, *compiled_with, gpu="b200")(*arguments)
        assert fault.value.tensor == name


def test_host_code_still_checks_arguments():
    scale = emulator.compile(jit_functions.scale, *fake(), ONE, ENV_STREAM, gpu="h100")
    x, y = tensors()
    with pytest.raises(ValueError, match=r"y.*shape"):
        scale(x, y[:100], 1.0)
    with pytest.raises(ValueError, match=r"#0 .*dtype=bfloat16"):
        scale(x.float(), y, 1.0)


def test_questions_about_the_hardware_need_no_driver():
    small = emulator.Gpu("small", "sm_100a", sm_count=6)
    out = torch.zeros(2, dtype=torch.int32)
    emulator.compile(ask_hardware, out, gpu=small)(out)
    assert out.tolist() == [3, 6]


def test_gpus():
    assert len(gpus.NAMED) == 4
    for name, gpu in gpus.NAMED.items():
        known = quackish.gpu.NAMED[name]
        assert {field: getattr(known, field) for field in vars(gpu)} == vars(gpu)
        assert gpus.find(known) is known
    with pytest.raises(ValueError, match="gpu is 'h900'; expected one of h100, h200, b200, b300"):
        gpus.find("h900")
    with pytest.raises(TypeError, match="lacks smem_bytes, "):
        gpus.find(type("Mine", (), dict(name="mine", target="sm_90a", sm_count=1))())


@pytest.mark.parametrize(
    "target, runs_on",
    [("sm_90a", "h100"), ("sm_90", "h100 b200 b300"), ("sm_100a", "b200"), ("sm_100f", "b200 b300")],
)
def test_which_gpus_run_a_target(target, runs_on):
    assert [name for name in ("h100", "b200", "b300") if gpus.can_run(gpus.NAMED[name], target)] == runs_on.split()


@cute.experimental.kernel
def copy_kernel(x: cute.Tensor, y: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    y[thread] = x[thread]


@cute.experimental.jit
def copy(x: cute.Tensor, y: cute.Tensor):
    copy_kernel(x, y).launch(grid=[1, 1, 1], block=[300, 1, 1])


def test_experimental_functions():
    x, y = tensors()
    emulator.compile(copy, x, y, gpu="b200")(x, y)
    assert torch.equal(x, y)


# load


def test_load(tmp_path):
    options = f"--enable-tvm-ffi --keep-ptx --dump-dir {tmp_path} --gpu-arch sm_90a"
    compiled = cute.compile(jit_functions.scale, *fake(), ONE, ENV_STREAM, options=options, no_jit_engine=True)
    x, y = tensors()
    emulator.load(compiled, "h100")(x, y, 4.0)
    assert is_scaled(x, y, 4)
    with pytest.raises(ValueError, match="compiled for sm_90a; gpu is B200: sm_100a"):
        emulator.load(compiled, "b200")(x, y, 4.0)


def test_load_of_a_function_compiled_with_cpu_tensors(tmp_path):
    x, y = tensors()
    options = f"--enable-tvm-ffi --keep-ptx --dump-dir {tmp_path} --gpu-arch sm_90a"
    described = map(from_dlpack, (x, y))
    compiled = cute.compile(
        jit_functions.scale, *described, ONE, make_fake_stream(), options=options, no_jit_engine=True
    )
    emulator.load(compiled, "h100")(x, y, 4.0, 0)
    assert is_scaled(x, y, 4)


# replace_cuda


def test_a_library_in_the_block():
    before = torch.cuda.is_available(), torch.cuda.get_device_properties, torch.Tensor.is_cuda, cute.compile
    gpu = dataclasses.replace(gpus.NAMED["b300"], sm_count=6)
    x, y = tensors()
    with emulator.replace_cuda(gpu), emulator.record() as report:
        assert torch.cuda.is_available()
        assert torch.cuda.get_device_capability(x.device) == (10, 3)
        assert torch.cuda.get_device_properties(0).multi_processor_count == 6
        assert x.is_cuda

        @torch.library.custom_op("quackish_tests::scale", mutates_args=("y",), device_types="cuda")
        def operator(x: torch.Tensor, y: torch.Tensor, factor: float) -> None:
            function = cute.compile[cute.OptLevel(2)](jit_functions.scale, *fake(), ONE, make_fake_stream())
            function(x, y, factor, torch.cuda.current_stream())

        operator(x, y, 2.0)
        assert is_scaled(x, y, 2)
        function = cute.compile(ScaleBySettings(0), Tensors(*fake()), Options(ONE), options="--enable-tvm-ffi")
        function(Tensors(x, y), Options(5.0))
        assert is_scaled(x, y, 5)
    assert len(report.launches) == 2
    assert not x.is_cuda
    assert before == (torch.cuda.is_available(), torch.cuda.get_device_properties, torch.Tensor.is_cuda, cute.compile)


def test_compile_in_the_block():
    x, y = tensors()
    with emulator.replace_cuda("b200"), emulator.record() as report:
        emulator.compile(jit_functions.scale, *fake(), ONE, ENV_STREAM, gpu="h100")(x, y, 2.0)
        assert is_scaled(x, y, 2)
    assert len(report.launches) == 1


# The pytest plugin


class Outcomes:
    def __init__(self):
        self.passed: list[str] = []

    def pytest_runtest_logreport(self, report):
        if report.when == "call" and report.passed:
            self.passed.append(report.nodeid.split("::")[1])


def test_the_fixture_runs_a_test_in_all_settings(tmp_path):
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["quackish.emulator.pytest_plugin"]\n')
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_it.py").write_text(
        "import pytest\n"
        "def test_all(emulated):\n"
        "    assert not emulated.launches\n"
        "@pytest.mark.parametrize('emulated', [('late', 7)], indirect=True)\n"
        "def test_one(emulated):\n"
        "    assert (emulated.completion, emulated.seed) == ('late', 7)\n"
    )
    outcomes = Outcomes()
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--rootdir", str(tmp_path), str(tmp_path)]
    assert pytest.main(options, plugins=[outcomes]) == 0
    assert outcomes.passed == [
        *(f"test_all[{completion}-{seed}]" for completion in ("at_once", "late") for seed in range(3)),
        "test_one[emulated0]",
    ]
