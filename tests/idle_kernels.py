"""Stand-ins for an H200 and its kernels, on any host: which kernels are launched, for what and how."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from quackish import kernels, launch
from quackish.configs import choose
from quackish.gpu import H200
from quackish.ops import cuda, workspace
from quackish.ops import rms_norm_plans as plans
from quackish.ops.kernel_for import Kernel, KernelFor
from quackish.ops.linear_cross_entropy import launches as gemms


class Launch(NamedTuple):
    kernel: str
    problem: Any
    config: Any


def on_h200(monkeypatch, kernel_for: KernelFor, take: Callable, stream: int = 0) -> SimpleNamespace:
    """RMSNorm of CPU tensors runs kernels of `kernel_for`, as an H200's would; returns what stands in for ops.cuda."""
    monkeypatch.setattr(workspace, "take", take)
    no_kernel = plans.gpu_for
    allocate = torch._C._dynamo.guards._empty_strided_cpu
    driver = dict(current_device=lambda: None, stream_of=lambda index: stream, empty=allocate)
    stands_in = SimpleNamespace(**{**vars(cuda), **driver})
    for name, value in dict(
        gpu_for=lambda device: H200 if device.type == "cpu" else no_kernel(device),
        kernel_for=kernel_for,
        cuda=stands_in,
        _plans={},
    ).items():
        monkeypatch.setattr(plans, name, value)
    return stands_in


def install(monkeypatch) -> list[Launch]:
    """Kernels that do nothing, for both operations; returns the launches, in order."""
    launches = []

    def get(kernel, problem, config, target):
        return lambda *args: launches.append(Launch(kernel, problem, config))

    def kernel_for(name, problem, gpu):
        config = choose.choose(name, problem, gpu).config
        return Kernel(get(name, problem, config, gpu.target), config)

    on_h200(monkeypatch, kernel_for, lambda *args: (0, 0, None))
    monkeypatch.setattr(gemms, "gpu_of", lambda index: H200)
    monkeypatch.setattr(kernels, "find", lambda name, gpu: name)
    monkeypatch.setattr(launch, "get", get)
    return launches
