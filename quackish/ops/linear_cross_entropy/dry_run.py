"""Dry runs: the operation's own code on meta tensors, with kernels that do nothing. Needs no GPU.

warm_up.py finds a call's kernels with them, memory.py its peak memory, and the tools its launches.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from quackish.device.choose import choose
from quackish.device.kernel_device import KernelDevice, empty_on
from quackish.device.kernel_for import CompiledKernel
from quackish.gpu import Gpu
from quackish.ops.linear_cross_entropy import operators
from quackish.ops.linear_cross_entropy.calls import Call
from quackish.ops.linear_cross_entropy.launches import LceKernels
from quackish.ops.linear_cross_entropy.reference import accumulate_dtype

empty, engine = empty_on("meta"), torch.autograd.Variable._execution_engine
T = TypeVar("T")


class DryRun:
    """Forward and backward of a call, with the gradients of all inputs that require them."""

    def __init__(self, call: Call, gpu: Gpu, num_grads: int):
        """call: on meta tensors. gpu: of its kernels. num_grads: how many of the first outputs have a gradient."""
        self.phase = "forward"
        self.calls = 1  # how often the current launch is repeated
        if call.plan.why_portable is None:
            call = call._replace(kernels=LceKernels(KernelDevice(gpu, self.kernel_for, empty), self.loop))
        self.call, plan, shape = call, call.plan, call.inputs.target.shape
        shapes = [shape if plan.reduction == "none" else (), *[shape] * (num_grads - 1)]
        dtype = accumulate_dtype(plan.compute_dtype)
        self.grad_outputs = [torch.empty(shape, dtype=dtype, device="meta") for shape in shapes]
        self.leaves = [t for t in call.inputs.parameters() if t is not None and t.requires_grad]

    def run(self) -> Any:
        results = operators.run(self.call)[: len(self.grad_outputs)]
        self.phase = "backward"
        kept = self.between()
        if self.leaves:
            # not torch.autograd.grad, which imports 500 modules (300 ms) to check the gradients' shapes
            options = dict(allow_unreachable=True, accumulate_grad=False)
            engine.run_backward(results, tuple(self.grad_outputs), False, False, tuple(self.leaves), **options)
        del kept
        return self

    def between(self) -> Any:
        """Is called between forward and backward. What it returns is kept until backward ends."""

    def kernel_for(self, problem: Any, gpu: Gpu) -> CompiledKernel:
        return CompiledKernel(lambda *args: None, choose(problem, gpu).config)

    def loop(self, items: Sequence[Any]) -> Iterator[Any]:
        """Runs the iterations that stand for all others. `calls` is how many, nested loops included."""
        for item, count in representatives(items):
            self.calls *= count
            yield item
            self.calls //= count


def representatives(items: Sequence[Any]) -> Iterator[tuple[Any, int]]:
    """(item, the number of items that it stands for) of a schedule's loop, so that dry runs of long loops are short.

    items: the starts of equal ranges, of which the last may be shorter, or ClassBlocks. The first item stands for
    itself only, because an iteration may add to the results of earlier ones.
    """
    if isinstance(items, range):
        sizes = [len(items) - 1, 1] if items else []
    else:
        alike = itertools.groupby(items, lambda block: (block.v1 - block.v0, block.offset is None))
        sizes = [sum(1 for _ in group) for _, group in alike]
    start = 0
    for size in sizes:
        if size > 0:
            yield items[start], 1
        if size > 1:
            yield items[start + 1], size - 1
        start += size


def isolated(function: Callable[..., T], *args: Any) -> T:
    """function(*args) in a new thread, where none of the caller's modes, saved-tensor hooks, autocast or no_grad are
    active."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *args).result()
