"""quackish emulate --gpu GPU script.py: programs that are written for a GPU."""

import subprocess
import sys

import pytest
import torch

if sys.platform != "linux":
    pytest.skip("the compiler is for Linux", allow_module_level=True)

SCRIPT = """
import sys

import cutlass
import cutlass.cute as cute
import torch
from cutlass.cute.runtime import from_dlpack


@cute.kernel
def kernel(x: cute.Tensor, y: cute.Tensor, factor: cutlass.Float32, addend: cutlass.Constexpr):
    thread, _, _ = cute.arch.thread_idx()
    y[thread] = x[thread] * factor + addend


@cute.jit
def affine(x: cute.Tensor, y: cute.Tensor, factor: cutlass.Float32, addend: cutlass.Constexpr = 1):
    kernel(x, y, factor, addend).launch(grid=[1, 1, 1], block=[SIZE, 1, 1])


SIZE = 64
cutlass.cuda.initialize_cuda_context()
assert torch.cuda.get_device_capability() == (10, 0)
x = torch.randn(SIZE, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
y = torch.empty_like(x)
assert x.is_cuda and x.device.type == "cuda"
before = y.cpu()
begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
with torch.cuda.stream(torch.cuda.Stream()):
    begin.record()
    described = (from_dlpack(tensor, assumed_align=128) for tensor in (x, y))
    affine(*described, float(sys.argv[1]), addend=int(sys.argv[2]))
    end.record()
torch.cuda.synchronize()
assert begin.elapsed_time(end) > 0
assert not torch.equal(before, y.cpu())
torch.testing.assert_close(y.cpu(), x.cpu() * 3 + 5)
addresses = [torch.zeros(size, device="cuda").data_ptr() for size in range(1, 2000, 7)]
assert not any(address % 256 for address in addresses)
print("right", __name__)
"""


def emulate(tmp_path, script, *arguments):
    path = tmp_path / "script.py"
    path.write_text(script)
    command = [sys.executable, "-m", "quackish", "emulate", "--gpu", "b200", str(path), *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def test_a_program_written_for_a_gpu(tmp_path):
    done = emulate(tmp_path, SCRIPT, "3", "5")
    assert done.stdout.splitlines()[-2:] == ["right __main__", "1 launches on an emulated b200"], done.stderr
    assert done.returncode == 0


@pytest.mark.exhaustive
def test_a_fault_of_a_program(tmp_path):
    done = emulate(tmp_path, SCRIPT.replace("block=[SIZE", "block=[1024"), "3", "5")
    assert done.returncode == 1
    assert "outside every tensor" in done.stdout


@pytest.mark.exhaustive
def test_what_is_not_supported_is_named(tmp_path):
    done = emulate(tmp_path, "import torch; torch.cuda.CUDAGraph()")
    assert done.returncode == 1
    assert "the emulator has no CUDA graphs" in done.stderr


@pytest.mark.exhaustive
def test_kernels_of_triton_are_refused(tmp_path):
    pytest.importorskip("triton")
    script = """
import torch, triton, triton.language as tl

@triton.jit
def copy(x, y, n: tl.constexpr):
    i = tl.arange(0, n)
    tl.store(y + i, tl.load(x + i))

x = torch.randn(64, device="cuda")
copy[(1,)](x, torch.empty_like(x), 64)
"""
    done = emulate(tmp_path, script)
    assert done.returncode == 1
    assert "NotImplementedError: the emulator runs kernels of CuTe DSL, and copy is one of Triton" in done.stderr


def test_devices():
    from quackish.emulator import torch_cuda

    with torch_cuda.cpu_as_cuda():
        x = torch.zeros(3, device="cuda:0")
        assert x.device == torch.device("cuda", 0)
        for copy in (x.cuda(), x.cpu(), x.to("cuda"), x.to(device=torch.device("cuda"))):
            copy.fill_(1)
            assert not x.any()
        assert x.to(torch.float64).dtype is torch.float64
    assert x.device == torch.device("cpu")
