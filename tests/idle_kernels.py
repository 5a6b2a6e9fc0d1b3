"""Kernels that do nothing: which ones are launched, for what and how, on any host."""

from typing import Any, NamedTuple

import torch

from quackish import kernels, launch
from quackish.gpu import H200
from quackish.ops import rms_norm_plans as plans
from quackish.ops.linear_cross_entropy import launches as gemms


class Launch(NamedTuple):
    kernel: str
    problem: Any
    config: Any


def install(monkeypatch) -> list[Launch]:
    """CPU tensors go to them, as on an H200; returns the launches, in order."""
    launches, no_kernel = [], plans.gpu_for

    def get(kernel, problem, config, target):
        return lambda *args: launches.append(Launch(kernel, problem, config))

    monkeypatch.setattr(plans, "gpu_for", lambda device: H200 if device.type == "cpu" else no_kernel(device))
    monkeypatch.setattr(gemms, "gpu_of", lambda index: H200)
    monkeypatch.setattr(kernels, "find", lambda name, gpu: name)
    monkeypatch.setattr(launch, "get", get)
    monkeypatch.setattr(plans.workspace, "take", lambda *args: (0, 0, None))
    monkeypatch.setattr(plans.cuda, "current_device", lambda: None)
    monkeypatch.setattr(plans.cuda, "stream_of", lambda index: 0)
    monkeypatch.setattr(plans.cuda, "empty", torch._C._dynamo.guards._empty_strided_cpu)
    monkeypatch.setattr(plans, "_forward_plans", {})
    monkeypatch.setattr(plans, "_backward_plans", {})
    return launches
