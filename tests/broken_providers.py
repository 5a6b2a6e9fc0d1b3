"""Providers that fail in every way there is, as `broken_providers:NAME`: rms_norm's (forward, backward)."""

import os
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
    print("goodbye")  # on stdout, which is not the worker's to talk on
    sys.exit(3)


@pair
def hangs(*tensors):
    time.sleep(3600)


@pair
def late(*tensors):
    """Dies after it was tried out, when all take turns: whose fault that is shows only when each is alone."""
    CALLS["late"] += 1
    if CALLS["late"] > 30:
        os.abort()
    return good[1](*tensors)


@pair
def wrong_shape(dy, x, weight, rstd):
    return x[:, :1], weight


@pair
def illegal(dy, x, weight, rstd):
    """An index out of bounds, on the device: the CUDA context is lost for good."""
    return x[torch.full((4,), 1 << 40, device=x.device)], weight


CALLS_OF_LOSS = []


def slow_loss(x, w, target):
    """A loss that stops answering once it is timed: three calls come before the second sample."""
    CALLS_OF_LOSS.append(1)
    if len(CALLS_OF_LOSS) > 3:
        open(os.environ["QUACKISH_TEST_TOLD"], "w").close()
        time.sleep(600)
    return torch.nn.functional.cross_entropy(x @ w.T, target)
