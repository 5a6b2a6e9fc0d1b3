"""Compiled host code on a CPU: launches, their parameters, errors and threads."""

import ctypes
import dataclasses
import struct
import subprocess
import threading
from pathlib import Path

import pytest
import torch

from quackish.device.choose import analytical
from quackish.device.compile import compile_kernel, lock
from quackish.emulator import host, tensor_map
from quackish.emulator.errors import Fault, ToolMissing
from quackish.emulator.swizzle import Swizzle
from quackish.gpu import B200, H200
from quackish.ops.rms_norm.problems import RmsNormFwdProblem

LAYOUT = [(0, 8), (8, 8), (16, 8), (24, 16), (40, 4), (44, 4)]  # x, weight, y, (rstd, m), eps, weight_offset


def export(n: int, folder: Path) -> host.Exported:
    problem = RmsNormFwdProblem(n, "bfloat16", "bfloat16", "bfloat16")
    config = analytical(problem, H200).config
    with lock:
        compiled = compile_kernel(
            problem.spec.kernel_class(H200), problem, config, "sm_90a", f"--keep-ptx --dump-dir {folder}"
        )
        return host.export(compiled)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    return export(256, tmp_path_factory.mktemp("ptx"))


def arguments(rows: int = 20, ctas: int = 3) -> tuple:
    x, weight, y, rstd = (4096 * i for i in (1, 2, 3, 4))  # addresses that nothing reads
    return (x, weight, None, None, y, None, rstd, None, None, 1e-6, 0.5, rows, ctas), 0


def test_a_launch_and_its_parameters(exported):
    launches, spaces = [], []

    def handle(launch):
        launches.append(launch)
        spaces.append(launch.parameters(LAYOUT))

    host.load(exported, H200).call(handle, *arguments(rows=20, ctas=3))
    (launch,) = launches
    assert f".entry {launch.kernel}(" in exported.ptx
    assert launch.grid == (3, 1, 1)
    assert launch.block == (128, 1, 1)
    assert launch.cluster == (1, 1, 1)
    assert (launch.cooperative, launch.programmatic) == (False, False)
    eps, offset = (struct.unpack("f", struct.pack("f", value))[0] for value in (1e-6, 0.5))
    assert struct.unpack("<QQQQIxxxxff", spaces[0]) == (4096, 8192, 12288, 16384, 20, eps, offset)


def test_a_cluster_reaches_the_launch(tmp_path):
    launches = []
    host.load(export(131072, tmp_path), H200).call(launches.append, *arguments(rows=2, ctas=2 * 16))
    (launch,) = launches
    assert launch.cluster[0] > 1
    assert launch.grid[0] % launch.cluster[0] == 0


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_what_the_handler_raises_reaches_the_caller_as_it_is(exported, kind):
    code, error = host.load(exported, H200), kind("mine")

    def handle(launch):
        raise error

    with pytest.raises(kind) as caught:
        code.call(handle, *arguments())
    assert caught.value is error
    launches = []
    code.call(launches.append, *arguments())
    assert len(launches) == 1


def test_host_code_checks_its_arguments(exported):
    with pytest.raises(TypeError, match="Expects 2 parameters"):
        host.load(exported, H200).call(lambda launch: None, 1)


def test_threads_and_nested_calls_keep_their_own_handlers(exported):
    code, both_inside, seen = host.load(exported, H200), threading.Barrier(2), {}

    def run(ctas):
        def inner(launch):
            seen[ctas, "inner"] = launch.grid[0]

        def outer(launch):
            both_inside.wait(timeout=60)
            code.call(inner, *arguments(ctas=10 * ctas))
            both_inside.wait(timeout=60)
            seen[ctas, "outer"] = launch.grid[0]

        code.call(outer, *arguments(ctas=ctas))

    threads = [threading.Thread(target=run, args=(ctas,)) for ctas in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == {(1, "inner"): 10, (1, "outer"): 1, (2, "inner"): 20, (2, "outer"): 2}


def test_each_loaded_kernel_has_its_own_gpu(exported):
    gpus = [H200, B200, dataclasses.replace(H200, sm_count=4)]
    found = [host.device_attributes(gpu) for gpu in gpus]
    assert [(a[16], a[75], a[76]) for a in found] == [(132, 9, 0), (148, 10, 0), (4, 9, 0)]
    assert host.device_attributes(dataclasses.replace(B200, target="sm_103a"))[76] == 3
    codes = [host.load(exported, gpu) for gpu in gpus]
    answers = []
    for code in codes:
        value, (library, _) = host.ctypes.c_int(), code._keep_alive
        assert library._cudaDeviceGetAttribute(host.ctypes.byref(value), 16, 0) == 0
        answers.append(value.value)
        assert library._cudaDeviceGetAttribute(host.ctypes.byref(value), 999, 0) == 801
    assert answers == [132, 148, 4]


def test_a_missing_compiler_is_named_with_its_cure(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ToolMissing, match=r"finds no 'cc' in PATH.*apt-get install"):
        host._shim.__wrapped__()


def test_host_code_that_calls_something_unknown_does_not_load(exported, monkeypatch, tmp_path):
    # a name that nothing in the process has: it may have loaded CUDA's real functions
    source = host._SHIM.read_text() + "\nint _cudaUnknown(void);\nint caller(void) { return _cudaUnknown(); }\n"
    (tmp_path / "shim.c").write_text(source)
    subprocess.run(["cc", "-c", "-fPIC", "-o", tmp_path / "shim.o", tmp_path / "shim.c"], check=True)
    monkeypatch.setattr(host, "_shim", (tmp_path / "shim.o").read_bytes)
    with pytest.raises(NotImplementedError, match="undefined symbol: _cudaUnknown"):
        host.load(exported, H200)


def test_a_function_without_ptx_is_refused():
    with pytest.raises(ValueError, match="--keep-ptx"):
        host.export(torch.nn.Identity())


# Tensor maps that host code encodes with cuTensorMapEncodeTiled


@pytest.fixture(scope="module")
def encode(tmp_path_factory):
    """_cuTensorMapEncodeTiled of the shim as a function that returns (error, the 128 bytes)."""
    folder = tmp_path_factory.mktemp("shim")
    (folder / "shim.o").write_bytes(host._shim())
    subprocess.run(["ld", "-shared", "-o", "shim.so", "shim.o"], cwd=folder, check=True)
    library = ctypes.CDLL(str(folder / "shim.so"))

    def call(type_, address, sizes, strides, box, swizzle=0, interleave=0):
        data = (ctypes.c_uint64 * 16)()
        wide = ((ctypes.c_uint64 * 5)(*values) for values in (sizes, strides))
        narrow = ((ctypes.c_uint * 5)(*values) for values in (box, [1] * 5))
        where = ctypes.c_void_p(address)
        error = library._cuTensorMapEncodeTiled(
            data, type_, len(sizes), where, *wide, *narrow, interleave, swizzle, 2, 0
        )
        return error, bytes(data)

    return call


def test_encoded_tensor_maps(encode):
    far = 16 * (1 << 33) + 32  # a stride of more than 32 bits
    sizes, strides, box = (64, 3, 4, 5, 1 << 32), (128, 256, 512, far), (64, 2, 3, 1, 256)
    error, data = encode(9, 0x7F00_0000_1230, sizes, strides, box, swizzle=3)
    assert error == 0
    assert tensor_map.decode(data) == tensor_map.TensorMap(0x7F00_0000_1230, "bf16", sizes, strides, box, Swizzle.B128)
    for type_, element in {
        0: "u8",
        1: "u16",
        2: "u32",
        3: "s32",
        4: "u64",
        5: "s64",
        6: "f16",
        7: "f32",
        11: "f32",
    }.items():
        error, data = encode(type_, 64, (256, 8), (2048,), (16, 8))
        assert (error, tensor_map.decode(data).element) == (0, element)
    error, data = encode(7, 64, (256, 8), (2048,), (32, 8), swizzle=4)
    assert tensor_map.decode(data).swizzle is Swizzle.B128_ATOM_32B


def test_tensor_maps_that_the_driver_refuses(encode):
    invalid, unsupported = 1, 801
    assert encode(7, 8, (256, 8), (1024,), (16, 8))[0] == invalid  # an address that is no multiple of 16
    assert encode(7, 64, (256, 8), (1016,), (16, 8))[0] == invalid
    assert encode(7, 64, (256, 8), (1024,), (16, 257))[0] == invalid
    assert encode(7, 64, (256, 0), (1024,), (16, 8))[0] == invalid
    assert encode(8, 64, (256, 8), (2048,), (16, 8))[0] == unsupported  # fp64
    assert encode(7, 64, (256, 8), (1024,), (16, 8), interleave=1)[0] == unsupported


def test_host_code_that_asserts_success():
    """The caller gets an error, and a handler's error comes first."""
    code = host.HostCode(lambda error: host._fail(error), None, None)
    with pytest.raises(Fault, match="with an invalid argument: error 1"):
        code.call(None, 1)
    with pytest.raises(Fault, match="that the emulator lacks: error 801"):
        code.call(None, 801)
