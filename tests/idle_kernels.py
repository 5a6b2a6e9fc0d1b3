"""A fake H200 on any host, with kernels that do nothing: records the launches with their problems and configs."""

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
from quackish.ops.linear_cross_entropy import launches as lce_launches


class Launch(NamedTuple):
    kernel: str
    problem: Any
    config: Any


def on_h200(monkeypatch, kernel_for: KernelFor, take: Callable, stream: int = 0) -> SimpleNamespace:
    """Makes RMSNorm of CPU tensors use kernels of `kernel_for` as on an H200; returns the fake ops.cuda."""
    monkeypatch.setattr(workspace, "take", take)
    real_gpu_for = plans.gpu_for
    allocate = torch._C._dynamo.guards._empty_strided_cpu
    driver = dict(current_device=lambda: None, stream_of=lambda index: stream, empty=allocate)
    fake_cuda = SimpleNamespace(**{**vars(cuda), **driver})
    for name, value in dict(
        gpu_for=lambda device: H200 if device.type == "cpu" else real_gpu_for(device),
        kernel_for=kernel_for,
        cuda=fake_cuda,
        _plans={},
    ).items():
        monkeypatch.setattr(plans, name, value)
    return fake_cuda


def install(monkeypatch) -> list[Launch]:
    """Replaces the kernels of both operations; returns the list of launches, in order."""
    launches = []

    def get(kernel, problem, config, target):
        return lambda *args: launches.append(Launch(kernel, problem, config))

    def kernel_for(name, problem, gpu):
        config = choose.choose(name, problem, gpu).config
        return Kernel(get(name, problem, config, gpu.target), config)

    on_h200(monkeypatch, kernel_for, lambda *args: (0, 0, None))
    monkeypatch.setattr(lce_launches, "gpu_of", lambda index: H200)
    monkeypatch.setattr(kernels, "find", lambda name, gpu: name)
    monkeypatch.setattr(launch, "get", get)
    return launches
