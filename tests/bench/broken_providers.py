"""Failing providers for `--providers tests.bench.broken_providers:NAME`, most (forward, backward) of rms_norm."""

import multiprocessing
import os
import signal
import sys
import time

import torch

CALLS = {"late": 0}


def forward(x, weight):
    return torch.nn.functional.rms_norm(x, weight.shape, weight, 1e-6), x.new_ones(len(x))


def pair(backward):
    return forward, backward


@pair
def good(dy, x, weight, rstd):
    leaves = [t.detach().requires_grad_() for t in (x, weight)]
    return torch.autograd.grad(torch.nn.functional.rms_norm(leaves[0], weight.shape, leaves[1], 1e-6), leaves, dy)


@pair
def raises(*tensors):
    raise RuntimeError("it broke\nat length")


@pair
def aborts(*tensors):
    os.abort()


@pair
def exits(*tensors):
    print("goodbye")  # must go to the log
    sys.exit(3)


@pair
def hangs(*tensors):
    time.sleep(3600)


@pair
def interrupts(*tensors):
    """Ctrl-C, as the parent gets it."""
    os.kill(multiprocessing.parent_process().pid, signal.SIGINT)
    time.sleep(3600)


@pair
def late(*tensors):
    """Aborts while all providers take turns, so the culprit is found only by measuring each alone."""
    CALLS["late"] += 1
    if CALLS["late"] > 30:
        os.abort()
    return good[1](*tensors)


@pair
def wrong_shape(dy, x, weight, rstd):
    return x[:, :1], weight


@pair
def illegal(dy, x, weight, rstd):
    """An out-of-bounds index on the device, which destroys the CUDA context."""
    return x[torch.full((4,), 1 << 40, device=x.device)], weight


CALLS_OF_LOSS = []


def slow_loss(x, w, target):
    """A loss that hangs in its fourth call, after the first sample."""
    CALLS_OF_LOSS.append(1)
    if len(CALLS_OF_LOSS) > 3:
        time.sleep(1)  # until the main process has read the sample
        open(os.environ["QUACKISH_TEST_FLAG"], "w").close()
        time.sleep(600)
    return torch.nn.functional.cross_entropy(x @ w.T, target)
