"""What linear cross entropy hands to its compiled kernels: as many arguments as they take, and None for the same ones.

The schedules, LceKernels and the kernels' own lists of arguments run; nothing is compiled and nothing computed.
"""

import collections

import pytest
import torch
from lce_cases import OPTIONS, REDUCTIONS, SCHEDULES, make

from quackish import launch
from quackish.gpu import B200, H200
from quackish.ops import cuda
from quackish.ops.linear_cross_entropy import api as public
from quackish.ops.linear_cross_entropy import autograd as on_kernels
from quackish.ops.linear_cross_entropy import cublas, launches, linear_cross_entropy
from quackish.ops.linear_cross_entropy import exp_logits as of_e
from quackish.ops.linear_cross_entropy import launches as gemms
from quackish.ops.linear_cross_entropy.cublas import CublasGemms
from quackish.ops.linear_cross_entropy.launches import GemmLaunches, LceKernels


def check(given, taken, where):
    """`taken` is from fake_args(): pointers and numbers are given as numbers, tensors as tensors."""
    if isinstance(taken, (tuple, list)):
        if hasattr(taken, "_fields"):
            assert type(given) is type(taken), where
        assert len(given) == len(taken), where
        for i, (one, other) in enumerate(zip(given, taken, strict=True)):
            check(one, other, f"{where}, argument {i}")
    elif taken is None or given is None:
        assert given is None, f"{where}: {given}"
        assert taken is None, f"{where}: None"
    elif isinstance(given, torch.Tensor):
        assert "ensor" in type(taken).__name__, where
    else:
        assert isinstance(given, (int, float)), f"{where}: {given}"
        assert "ensor" not in type(taken).__name__, where


@pytest.fixture(params=[H200, B200], ids=lambda gpu: gpu.name)
def launched(request, monkeypatch):
    """Launches by kernel; LceKernels is that of this GPU, and takes CPU tensors."""
    count = collections.Counter()

    def get(kernel_class, problem, config, target):
        taken = kernel_class(problem, config).fake_args()[:-1]  # without the stream, which is none here

        def kernel(*given):
            check(given[:-1], taken, problem)
            count[kernel_class.__name__] += 1

        return kernel

    monkeypatch.setattr(launch, "get", get)
    for module in (gemms, cublas, launches):
        monkeypatch.setattr(module, "gpu_of", lambda index: request.param)
    for name in ("mm", "addmm"):
        monkeypatch.setattr(cublas, name, lambda a, b, out: None)
    monkeypatch.setattr(public, "no_kernel_on", lambda device: "")
    monkeypatch.setattr(public, "_plans", {})
    monkeypatch.setattr(of_e, "SHARED_FROM", 0)  # E in two blocks
    k = LceKernels(torch.device("cpu"))
    monkeypatch.setattr(on_kernels, "kernels_of", lambda device: k)
    return count


@pytest.mark.parametrize("make_gemms", [GemmLaunches, CublasGemms])
def test_launches_are_on_the_current_stream_of_their_device(make_gemms, monkeypatch):
    device = torch.device("cuda", 3)
    k = LceKernels(device, make_gemms(device, H200))
    for current in (7, 8):
        monkeypatch.setattr(cuda, "stream_of", lambda index, current=current: 1000 * index + current)
        assert k.stream() == 3000 + current


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_arguments(dtype, name, reduction, launched):
    for schedule in SCHEDULES:
        for m, h, v, chunk_size in ((300, 8, 700, 128), (40, 64, 1000, None)):
            x, w, target, kw = make(m, h, v, dtype, **OPTIONS[name], reduction=reduction)
            how = dict(schedule=schedule, chunk_size=chunk_size, backend="cute", return_lse=True)
            for lse_too in (False, True):
                loss, lse = linear_cross_entropy(x, w, target, **kw, **how)
                outputs = [loss, lse] if lse_too else [loss]
                torch.autograd.grad(outputs, [x, w], [torch.ones_like(t) for t in outputs])
            buffer = torch.zeros(w.shape)
            linear_cross_entropy(x, w, target, grad_weight_out=buffer, **kw, **how)[0].sum().backward()
            with torch.autocast("cpu", dtype=dtype):
                loss, _ = linear_cross_entropy(x.float(), w.float(), target.int(), **kw, **how)
            loss.sum().backward()
            with torch.no_grad():
                linear_cross_entropy(x, w, target, **kw, **how)
            linear_cross_entropy(x, w.detach(), target, **kw, **how)[0].sum().backward()
    if reduction == "mean":
        for num_items in (3, torch.tensor(3)):
            linear_cross_entropy(x, w, target, num_items=num_items, **kw, **how)
    assert set(launched) >= {"LceCompact", "LceGather", "LceRows"}
    assert ("GemmSm90" in launched) != ("LceExp" in launched)
