"""What a call holds at its peak, and what to run within a memory limit. Nothing is allocated, and no GPU is needed.

A rehearsal runs the operation's own code on meta tensors. Its kernels are stand-ins, and a dispatch mode counts the
memory that is asked for.
"""

import math
import operator
import threading
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from quackish.configs.choose import choose
from quackish.configs.linear_cross_entropy import (
    KernelProblem,
    LinearCrossEntropyConfig,
    LinearCrossEntropyProblem,
    by_speed,
)
from quackish.gpu import Gpu
from quackish.ops.kernel_for import Kernel
from quackish.ops.linear_cross_entropy import autograd
from quackish.ops.linear_cross_entropy.checks import Inputs
from quackish.ops.linear_cross_entropy.schedules import Plan
from quackish.ops.modes import is_compiling

META = torch.device("meta")
# PyTorch's caching allocator hands out multiples of 512 bytes, and above 1 MiB blocks up to 1 MiB larger than asked.
BLOCK, LARGE = 512, 1 << 20
SORT_BYTES = 24  # per element, beside the results: indices and CUB's scratch


class Request(NamedTuple):
    """All that memory depends on, but the config; constants to torch.compile."""

    tensors: tuple  # of `described`
    options: tuple  # the fields of Plan before schedule
    why_portable: str | None
    return_lse: bool
    has_scale: bool  # logit_scale is given
    device: torch.device
    eager: bool  # see autograd.run

    @property
    def sizes(self) -> tuple[int, int, int]:
        """m, h, v"""
        (v, h), target = self.tensors[1][0], self.tensors[3][0]
        return math.prod(target), h, v


def described(inputs: Inputs) -> tuple:
    """The arguments of `_blank` for all but logit_scale and num_items; None where absent."""
    grad, tensors = torch.is_grad_enabled(), (*inputs[:5], inputs.grad_weight_out)
    return tuple(
        None if t is None else (_ints(t.shape), _ints(t.stride()), _offset(t), t.dtype, grad and t.requires_grad)
        for t in tensors
    )


def _ints(sizes: Iterable[int]) -> tuple[int, ...]:
    return tuple(operator.index(n) for n in sizes)  # torch.compile specializes on each


def _offset(t: Tensor) -> int:
    """In elements modulo 8: weights that do not start on 16 bytes are copied. The compiler cannot trace offsets."""
    return 0 if is_compiling() else t.storage_offset() % 8


def problem_of(
    options: tuple, v: int, h: int, return_lse: bool, has_out: bool, on_kernels: bool
) -> KernelProblem | LinearCrossEntropyProblem:
    """What the rules depend on; `options` has the fields of Plan before schedule."""
    _, smoothing, softcap, _, reduction, return_stats, compute_dtype = options
    return_lse = return_lse or return_stats
    dtype = str(compute_dtype).removeprefix("torch.")
    if on_kernels:
        return KernelProblem(v, h, dtype, reduction, return_lse, has_out, smoothing > 0)
    return LinearCrossEntropyProblem(v, dtype, reduction, softcap is not None, return_lse)


# Within a limit ------------------------------------------------------------------------------------------------------


def within(
    memory_limit: int, request: tuple, schedule: str, chunk_size: int | None, gpu: Gpu | None = None
) -> tuple[str, int, bool, bool]:
    """The first config of `frontier` that takes at most `memory_limit` bytes, as a tuple; ValueError if none does."""
    for how, needs in frontier(Request(*request), schedule, chunk_size, gpu):
        if needs <= memory_limit:
            return how.schedule, how.chunk_rows, how.dx_in_forward, how.dw_in_chunks
    raise ValueError(
        f"linear_cross_entropy: memory_limit is {memory_limit} bytes, expected at least {needs}: what "
        f'schedule="{how.schedule}", chunk_size={how.chunk_rows} takes beside inputs and gradients'
    )


# What torch.compiler.assume_constant_result does, which would import the compiler first, Triton included.
within._dynamo_marked_constant = True


def frontier(
    request: Request, schedule: str, chunk_size: int | None, gpu: Gpu | None = None
) -> Iterator[tuple[LinearCrossEntropyConfig, int]]:
    """(config, the bytes that it takes), the fastest first, each with less memory than all before it.

    gpu: in place of the device's.
    """
    (m, h, v), least = request.sizes, math.inf
    has_out, on_kernels = request.tensors[5] is not None, request.why_portable is None
    problem = problem_of(request.options, v, h, request.return_lse, has_out, on_kernels)
    for how in by_speed(problem, m, h, schedule, chunk_size):
        needs = Rehearsal(request, how, gpu).run().above_gradients
        if needs < least:
            least = needs
            yield how, needs


# Rehearsals ----------------------------------------------------------------------------------------------------------


class Held(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype
    bytes: int


class Rehearsal(TorchDispatchMode):
    """Runs forward and backward, with all gradients that are required, and a gradient that arrives at each result."""

    def __init__(self, request: Request, how: LinearCrossEntropyConfig, gpu: Gpu | None = None):
        super().__init__()
        self.request, self.phase = request, "forward"
        self.plan = Plan(*request.options, *vars(how).values(), request.why_portable)
        self.k = None
        if request.why_portable is None:
            gpu = gpu or autograd.kernels_of(request.device).gpu
            self.k = autograd.kernels_on(META, gpu, self.kernel_for)
        self.given: set[int] = set()
        self.held: dict[int, tuple[StorageWeakRef, Held]] = {}
        self.peak, self.at_peak, self.gradients = 0, [], 0
        self.copied = 0  # bytes of gradients made in forward, which compiled code does not scale in place

    @property
    def above_gradients(self) -> int:
        return self.peak - self.gradients

    def run(self) -> "Rehearsal":
        """In a thread of its own: there, no mode, hook of saved tensors, autocast or no_grad of the caller's is on."""
        errors = []

        def run() -> None:
            try:
                self._run()
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        if errors:
            raise errors[0]
        return self

    def _run(self) -> None:
        *tensors, dw_out = (None if t is None else _blank(*t) for t in self.request.tensors)
        plan, return_lse = self.plan, self.request.return_lse
        inputs = Inputs(*tensors, 1.0 if self.request.has_scale else None, None, dw_out)
        shape = inputs.target.shape
        dtype = autograd.accumulate_dtype(plan.compute_dtype)
        arriving = [torch.empty(shape if plan.reduction == "none" else (), dtype=dtype, device=META)]
        arriving += [torch.empty(shape, dtype=dtype, device=META)] * (3 if plan.return_stats else return_lse)
        self.given = {t.untyped_storage()._cdata for t in (*tensors, dw_out, *arriving) if t is not None}
        with self:
            results = autograd.run(inputs, plan, return_lse, self.request.eager, self.k)[: len(arriving)]
            self.phase = "backward"
            wanted = [t for t in inputs[:3] if t is not None and t.requires_grad]
            if wanted:
                grads = torch.autograd.grad(results, wanted, arriving, allow_unused=dw_out is not None)
                self.gradients = sum(grad.nbytes for grad in grads if grad is not None)

    def kernel_for(self, name: str, problem: Any, gpu: Gpu) -> Kernel:
        return Kernel(lambda *args: None, choose(name, problem, gpu).config)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in autograd.IMPLEMENTATIONS:  # of the operators: in place of what they do with meta tensors
            with self:
                result = autograd.IMPLEMENTATIONS[func](*args, k=self.k, device=self.request.device)
            if self.phase == "forward" and not self.request.eager:
                self.copied = sum(grad.nbytes for grad in result[-3:] if grad is not None)
            return result
        if func is torch.ops.aten.empty_strided.default:
            kwargs = {**kwargs, "device": META}
        # a GEMM's result exists already, and nothing reads its values
        result = kwargs["out"] if "out" in kwargs else func(*args, **kwargs)
        self.called(func, args, result)
        self.hold(tensors_in(result), SORT_BYTES * args[0].numel() if func.overloadpacket.__name__ == "sort" else 0)
        return result

    def called(self, func, args, result) -> None:
        """For what else is to be recorded."""

    def hold(self, results: list[Tensor], scratch: int) -> None:
        for t in results:
            storage = t.untyped_storage()
            if storage._cdata not in self.given and storage._cdata not in self.held:
                held = Held(tuple(t.shape), t.dtype, self.allocated(storage.nbytes()))
                self.held[storage._cdata] = StorageWeakRef(storage), held
        self.held = {at: pair for at, pair in self.held.items() if not pair[0].expired()}
        total = sum(held.bytes for _, held in self.held.values()) + scratch
        if self.phase == "backward":
            total += self.copied
        if total > self.peak:
            self.peak, self.at_peak = total, [held for _, held in self.held.values()]

    def allocated(self, size: int) -> int:
        if self.request.device.type != "cuda":
            return size
        return -(-size // BLOCK) * BLOCK + (LARGE if size > LARGE else 0)


def _blank(shape: tuple, strides: tuple, offset: int, dtype: torch.dtype, requires_grad: bool) -> Tensor:
    t = torch.empty_strided(shape, strides, dtype=dtype, device=META)
    return t.as_strided(shape, strides, offset).requires_grad_(requires_grad)


def tensors_in(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
