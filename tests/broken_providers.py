"""Providers that fail in every way there is, for `bench --also`: each as rms_norm's (forward, backward)."""

import os
import sys
import time

import torch

CALLS = {"late": 0}


def forward(x, weight):
    return torch.nn.functional.rms_norm(x, weight.shape, weight, 1e-6), x.new_ones(len(x))


def good(dy, x, weight, rstd):
    leaves = [t.detach().requires_grad_() for t in (x, weight)]
    return torch.autograd.grad(torch.nn.functional.rms_norm(leaves[0], weight.shape, leaves[1], 1e-6), leaves, dy)


def raises(*tensors):
    raise RuntimeError("it broke\nat length")


def memory(*tensors):
    raise torch.cuda.OutOfMemoryError("no memory")


def aborts(*tensors):
    os.abort()


def exits(*tensors):
    print("goodbye")  # on stdout, which is not the worker's to talk on
    sys.exit(3)


def hangs(*tensors):
    time.sleep(3600)


def late(*tensors):
    """Dies after it was tried out, when all take turns: whose fault that is shows only when each is alone."""
    CALLS["late"] += 1
    if CALLS["late"] > 30:
        os.abort()
    return good(*tensors)


def wrong_shape(dy, x, weight, rstd):
    return x[:, :1], weight


def illegal(dy, x, weight, rstd):
    """An index out of bounds, on the device: the CUDA context is lost for good."""
    return x[torch.full((4,), 1 << 40, device=x.device)], weight


BACKWARD = (good, raises, memory, aborts, exits, hangs, late, wrong_shape, illegal)
PROVIDERS = {backward.__name__: (forward, backward) for backward in BACKWARD}
