"""Threads whose first calls race share one Device, its steps and plans, and compute what one thread does."""

import subprocess
import sys
import threading
import time

import pytest
import torch

import quackish
from quackish import errors
from quackish.device import kernel_device as device
from quackish.device import spec
from quackish.ops.attention import kernel_steps as attention_steps
from quackish.ops.linear_cross_entropy import operators as lce
from quackish.ops.mlp import kernel_steps as grouped_mlp_steps
from quackish.ops.rms_norm import plans as rms_norm_plans
from quackish.ops.rms_norm.problems import FORWARD_SPEC
from tests import emulated_kernels, idle_kernels
from tests.rms_norm.emulated import Emulated

THREADS = 4


def race(call):
    """The results of `call` on threads that start at the same time."""
    barrier, results = threading.Barrier(THREADS), [None] * THREADS

    def run(i):
        barrier.wait()
        try:
            results[i] = call()
        except Exception as error:
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def made_once(monkeypatch, owner, name, call):
    """True if racing calls make one object, although making it takes a while."""
    make, made = getattr(owner, name), []

    def slow(*args, **kwargs):
        time.sleep(0.02)
        made.append(make(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(owner, name, slow)
    results = race(call)
    return len(made) == 1 and all(result is results[0] for result in results)


def test_what_threads_share_is_made_once(monkeypatch):
    monkeypatch.setattr(device, "_devices", {})
    monkeypatch.setattr(spec, "_classes", {})
    on, _ = idle_kernels.device()
    assert made_once(monkeypatch, device, "_create", lambda: device.device_of(torch.device("cpu")))
    assert made_once(monkeypatch, spec, "KernelClass", lambda: FORWARD_SPEC.kernel_class(on.gpu))
    assert made_once(monkeypatch, lce, "LceKernels", lambda: lce.kernels_of(on))
    assert made_once(monkeypatch, attention_steps, "AttentionSteps", lambda: attention_steps.steps_of(on))
    assert made_once(monkeypatch, grouped_mlp_steps, "KernelSteps", lambda: grouped_mlp_steps.steps_of(on))


class SlowSet(set):
    def __contains__(self, item):
        found = super().__contains__(item)
        time.sleep(0.02)
        return found


def test_a_reason_is_given_once(monkeypatch):
    given = []
    monkeypatch.setattr(errors, "_warned", SlowSet())
    monkeypatch.setattr(errors.warnings, "warn", lambda reason, *args, **options: given.append(reason))
    race(lambda: errors.warn_once("threads that race have the same reason"))
    assert len(given) == 1


def step(where="cpu"):
    """Loss and gradients of a norm and a head."""
    make = torch.Generator().manual_seed(0)
    x, norm, head = (
        torch.randn(*shape, generator=make).to(where, torch.bfloat16).requires_grad_()
        for shape in ((24, 64), (64,), (96, 64))
    )
    target = torch.randint(96, (24,), generator=make).to(where)
    loss = quackish.linear_cross_entropy(quackish.rms_norm(x, norm), head, target)
    return torch.stack([loss.float(), *(g.float().norm() for g in torch.autograd.grad(loss, (x, norm, head)))])


def test_first_steps_of_threads(monkeypatch):
    """With substituted kernels, which have no state: each thread's results are those of one thread."""
    norms = Emulated()
    monkeypatch.setattr(rms_norm_plans, "_plans", {})

    def kernel_for(problem, gpu):
        of = norms if problem.spec.operation == "rms_norm" else emulated_kernels
        return of.kernel_for(problem, gpu)

    on = device.KernelDevice(norms.device.gpu, kernel_for, stream=norms.device.stream, workspace=norms.take)
    with device.substitute("cpu", on):
        results = race(step)
        expected = step()
    assert all(torch.equal(result, expected) for result in results), results


FIRST_STEPS = """
import os
import torch
from tests.device.test_threads import race, step
torch.cuda.init()
results = race(lambda: step("cuda"))
assert all(torch.equal(result, step("cuda")) for result in results), results
os._exit(0)  # PyTorch's threads may still drop objects of Python's, which aborts a normal end
"""


@pytest.mark.gpu
@pytest.mark.parametrize("attempt", range(3))
def test_first_steps_of_threads_on_a_gpu(attempt):
    subprocess.run([sys.executable, "-c", FIRST_STEPS], check=True, timeout=300)
