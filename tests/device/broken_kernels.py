"""Calls for `doctor --check` whose kernels are stand-ins: right, wrong, hanging and faulting. `load` is the table's."""

import functools
import itertools
import os
import signal
import sys
import time

import torch

import quackish
from quackish.cli.check import Case
from quackish.device import compile as compiling
from quackish.errors import UnsupportedError
from quackish.ops.mlp.problems import TokenRowsArgs, TokenRowsProblem
from quackish.ops.rms_norm.problems import FORWARD_SPEC, ForwardArgs, RmsNormFwdProblem
from quackish.ops.rms_norm.tools import RMS_NORM

KINDS = {
    "norm": ("RmsNormFwd", RmsNormFwdProblem(1, "float32", "float32"), ForwardArgs(m=8)),
    "other": ("TokenRows", TokenRowsProblem("copy", 8, "bfloat16"), TokenRowsArgs(tokens=8, k=1)),
}
drift = itertools.count()


def make(device):
    return {"x": torch.arange(8.0, device=device)}


def launch(function, kind="norm"):
    """Launches a stand-in for a kernel, as `launch.get` returns them."""
    name, problem, args = KINDS[kind]
    compiling._counted(lambda *args: function(), type(name, (), {}), problem, None)(args, 0)


def call_of(kernel):
    """A call of two kernels, of which the second is `kernel`: it returns what to add to the right result."""

    def call(args, backend):
        x = args["x"]
        if backend == "reference":
            return {"y": 2 * x}
        results = []
        launch(lambda: results.append(2 * x))
        launch(lambda: results.append(kernel()), "other")
        if kernel is fails_later:
            raise ValueError("not the kernel's fault")
        return {"y": results[0] + results[1]}

    return call


def right():
    return 0.0


def wrong():
    return 0.1


def drifts():
    return 1e-6 * next(drift)


def raises():
    raise RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with TORCH_USE_CUDA_DSA")


def fails_later():
    return 0.0


def faults():
    print("about to fault", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGSEGV)


def exits():
    os._exit(3)


def hangs():
    time.sleep(3600)


def unsupported():
    raise UnsupportedError("no kernel for this.")


KERNELS = {one.__name__: one for one in (right, wrong, drifts, raises, fails_later, faults, exits, hangs, unsupported)}


def emulated(args, backend):
    """Forward and backward of a norm, in the emulator: the compiled kernels."""
    if backend == "reference":
        return run_norm(args)
    with quackish.emulate("b200"):
        return run_norm(args)


def run_norm(args):
    y = quackish.rms_norm(args["x"], None, eps=1e-6)
    (dx,) = torch.autograd.grad(y, args["x"], torch.ones_like(y))
    return {"y": y.detach(), "dx": dx}


def load(name):
    if name == "emulated":
        make_small = functools.partial(RMS_NORM.arguments, (5, 64), torch.bfloat16)
        return Case(make_small, emulated, FORWARD_SPEC, RMS_NORM.bound_of)
    return Case(make, call_of(KERNELS[name]), FORWARD_SPEC, RMS_NORM.bound_of)
