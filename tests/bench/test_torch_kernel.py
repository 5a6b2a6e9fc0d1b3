"""PyTorch's own CuTe kernel of linear cross entropy, as a peer in `bench`: its file, the loop around it, the labels."""

import functools
import subprocess
import sys
import types

import pytest
import torch
import torch.nn.functional as F

from benchmarks import torch_kernel as file_of_torch
from quackish.bench import torch_kernel
from quackish.bench.measure import Run, first_calls
from quackish.bench.torch_kernel import Status
from quackish.errors import UnsupportedError
from quackish.ops.linear_cross_entropy import providers
from quackish.testing.errors import error

OFF = Status(True, False, "they need nvidia-cutlass-dsl 4.8.0; installed: 4.8.1", ("4.8.0",))


@pytest.fixture
def state(monkeypatch):
    def set_state(status):
        monkeypatch.setattr(torch_kernel, "status", lambda: status)

    return set_state


def kernel(dlogits, losses, logits, scale, target):
    """What PyTorch's kernel computes. dlogits and logits share memory."""
    rows = range(len(logits))
    log_p = logits.log_softmax(-1)
    losses.copy_(-scale * log_p[rows, target])
    results = scale[:, None] * log_p.exp()
    results[rows, target] -= scale
    dlogits.copy_(results)


@pytest.mark.parametrize("rows", [16, 100, 128])
def test_loop(monkeypatch, rows):
    mm = torch.mm

    def mm_of_cuda(a, b, out_dtype=None, out=None):  # a CPU has no out_dtype
        return mm(a.to(out_dtype or a.dtype), b.to(out_dtype or b.dtype), out=out)

    monkeypatch.setattr(torch, "mm", mm_of_cuda)
    torch.manual_seed(0)
    x, w = (torch.randn(n, 32).bfloat16().requires_grad_() for n in (100, 300))
    target = torch.randint(300, (100,)).index_fill_(0, torch.arange(0, 100, 3), -100)
    loss = file_of_torch.Loop.apply(rows, kernel, x, w, target)
    got = (loss, *torch.autograd.grad(2 * loss, (x, w)))
    truth = F.cross_entropy(F.linear(x.double(), w.double()), target)
    expected = (truth, *torch.autograd.grad(2 * truth, (x, w)))
    for ours, theirs, bound in zip(got, expected, (1e-5, 0.008, 0.016), strict=True):  # dW is rounded in each chunk
        assert error(ours.detach().double(), theirs.detach().double()).norm <= bound


def test_file_of_pytorch(monkeypatch, state, tmp_path):
    name, path = "benchmarks.torch_kernel:rows_256", tmp_path / "fused_grad_logits_kernel.py"
    path.write_text(
        "from torch._native.instrumentation import instrumented_cutedsl_cache\n"
        "from torch._vendor.quack.reduce import block_reduce\n"
        "@instrumented_cutedsl_cache('name', key_fn=None)\n"
        "def compiled():\n    return block_reduce\n"
        "def fused_grad_logits_into():\n    return compiled()\n"
    )
    state(OFF)
    monkeypatch.setitem(sys.modules, "quack", types.ModuleType("quack"))
    monkeypatch.setitem(sys.modules, "quack.reduce", types.SimpleNamespace(block_reduce="QuACK's"))
    before = set(sys.modules)
    with pytest.raises(UnsupportedError, match=r"they need nvidia-cutlass-dsl 4\.8\.0"):
        providers.load("torch-cute-256")
    with pytest.raises(UnsupportedError, match=r"fused_grad_logits_kernel.py is not in this folder"):
        providers.load(name)(None, None, None)
    monkeypatch.chdir(tmp_path)
    file_of_torch.load.cache_clear()
    assert file_of_torch.load()() == "QuACK's"
    with torch.no_grad(), pytest.raises(UnsupportedError, match="does not run it without grad"):
        providers.load(name)(None, None, None)
    assert set(sys.modules) == before
    file_of_torch.load.cache_clear()


@pytest.mark.parametrize(
    "status, note",
    [
        (Status(False, False, "none"), ""),
        (OFF, f"PyTorch 2.15, CuTe kernels off: {OFF.why}"),
        (Status(True, True), "PyTorch 2.15 CuTe"),
    ],
)
def test_rows_say_which_code_ran(monkeypatch, state, status, note):
    state(status)
    monkeypatch.setattr(torch, "__version__", "2.15.0+cu132")
    provider = functools.partial(lambda: 0.0)
    provider.note = torch_kernel.note()
    assert provider.note == note
    records = {}
    run = Run(torch.device("cpu"), lambda name: provider, records.__setitem__)
    first_calls(["torch-chunked"], run, lambda given: given, lambda result: {})
    assert records["torch-chunked"]["note"] == note


def test_status_is_the_one_of_this_pytorch():
    status = torch_kernel.status()
    assert status.exists == (tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 15))
    assert status.is_on or status.why


COMPILE = """
import hashlib, sys
if sys.argv[1]:
    import torch._vendor.quack.dsl
    import torch._vendor.quack.rmsnorm
from quackish.device.choose import analytical
from quackish.ops.rms_norm.problems import RmsNormBwdProblem
from quackish import gpu
from quackish.device import compile, objects
problem = RmsNormBwdProblem(4096, "bfloat16", "bfloat16", "bfloat16", "bfloat16", dweight_dtype="bfloat16")
config = analytical(problem, gpu.H200).config
compiled = compile.compile_kernel(problem.spec.kernel_class(gpu.H200), problem, config, "sm_90a")
print(hashlib.sha256(objects.export(compiled)).hexdigest())
"""


@pytest.mark.exhaustive
@pytest.mark.skipif(not torch_kernel.status().exists, reason="this PyTorch has no CuTe kernels")
def test_kernels_are_the_same_after_pytorch_patched_the_compiler():
    """PyTorch's kernels import a copy of QuACK, which patches the DSL."""
    commands = ([sys.executable, "-c", COMPILE, patched] for patched in ("", "patched"))
    runs = [subprocess.run(command, capture_output=True, text=True) for command in commands]
    assert [run.returncode for run in runs] == [0, 0], runs[1].stderr
    assert runs[0].stdout == runs[1].stdout != ""


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [256, 1024])
def test_kernel_on_a_gpu(rows):
    """Needs PyTorch 2.15 with its kernels on, or the file of its kernel and QuACK."""
    if not torch_kernel.status().is_on and not file_of_torch.FILE.exists():
        pytest.skip(torch_kernel.status().why)
    is_on = torch_kernel.status().is_on
    loss_of = providers.load(f"torch-cute-{rows}" if is_on else f"benchmarks.torch_kernel:rows_{rows}")
    torch.manual_seed(0)
    x, w = (torch.randn(n, 128, device="cuda").div(4).bfloat16().requires_grad_() for n in (700, 3000))
    target = torch.randint(3000, (700,), device="cuda").index_fill_(0, torch.arange(0, 700, 7, device="cuda"), -100)
    loss = loss_of(x, w, target)
    truth = F.cross_entropy(F.linear(x.double(), w.double()), target)
    got, expected = (torch.autograd.grad(value, (x, w)) for value in (loss, truth))
    assert abs(loss.item() - truth.item()) <= 0.01 * truth.item()  # PyTorch returns the loss in bf16
    for ours, theirs in zip(got, expected, strict=True):
        assert error(ours.double(), theirs.double()).norm <= 0.02
