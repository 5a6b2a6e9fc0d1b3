"""What a call holds at its peak, and what to run within a memory limit. Nothing is allocated, and no GPU is needed.

A rehearsal runs the operation's own code on meta tensors. Its kernels are stand-ins, and a dispatch mode counts the
memory that is asked for.
"""

import math
import operator
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
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
from quackish.ops.linear_cross_entropy.calls import Plan
from quackish.ops.linear_cross_entropy.checks import Inputs
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
    """The fastest config that takes at most `memory_limit` bytes, as a tuple; ValueError if none does.

    In a thread of its own: there, no mode, hook of saved tensors, autocast or no_grad of the caller's is on.
    """
    with ThreadPoolExecutor(1) as apart:
        return apart.submit(_within, memory_limit, Request(*request), schedule, chunk_size, gpu).result()


# What torch.compiler.assume_constant_result does, which would import the compiler first, Triton included.
within._dynamo_marked_constant = True


def _within(memory_limit: int, request: Request, schedule: str, chunk_size: int | None, gpu: Gpu | None) -> tuple:
    for how in candidates(request, schedule, chunk_size):
        try:
            Rehearsal(request, how, gpu, memory_limit).run()
        except _TooMuch:
            continue
        return how.schedule, how.chunk_rows, how.dx_in_forward, how.dw_in_chunks
    *_, (how, needs) = frontier(request, schedule, chunk_size, gpu)
    raise ValueError(
        f"linear_cross_entropy: memory_limit is {memory_limit} bytes, expected at least {needs}: what "
        f'schedule="{how.schedule}", chunk_size={how.chunk_rows} takes beside inputs and gradients'
    )


def frontier(
    request: Request, schedule: str, chunk_size: int | None, gpu: Gpu | None = None
) -> Iterator[tuple[LinearCrossEntropyConfig, int]]:
    """(config, the bytes that it takes), the fastest first, each with less memory than all before it.

    gpu: in place of the device's.
    """
    least = math.inf
    for how in candidates(request, schedule, chunk_size):
        needs = Rehearsal(request, how, gpu).run().above_gradients
        if needs < least:
            least = needs
            yield how, needs


def candidates(request: Request, schedule: str, chunk_size: int | None) -> list[LinearCrossEntropyConfig]:
    """What a call may run within a limit, the fastest first."""
    (m, h, v), has_out, on_kernels = request.sizes, request.tensors[5] is not None, request.why_portable is None
    problem = problem_of(request.options, v, h, request.return_lse, has_out, on_kernels)
    return by_speed(problem, m, h, schedule, chunk_size)


# Rehearsals ----------------------------------------------------------------------------------------------------------


class Held(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype
    bytes: int


class _TooMuch(Exception):
    pass


class Tally(TorchDispatchMode):
    """Counts the memory that code asks for on meta tensors."""

    def __init__(self):
        super().__init__()
        self.given: set[int] = set()  # storages that are not counted
        self.held: dict[int, tuple[StorageWeakRef, Held]] = {}
        self.peak, self.at_peak = 0, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        # a GEMM's result exists already, and nothing reads its values
        result = kwargs["out"] if "out" in kwargs else func(*args, **kwargs)
        self.called(func, args, result)
        self.hold(tensors_in(result), SORT_BYTES * args[0].numel() if func.overloadpacket.__name__ == "sort" else 0)
        return result

    def give(self, *tensors: Tensor | None) -> None:
        self.given |= {t.untyped_storage()._cdata for t in tensors if t is not None}

    def called(self, func, args, result) -> None:
        """For what else is to be recorded."""

    def hold(self, results: list[Tensor], scratch: int) -> None:
        stored = {t.untyped_storage()._cdata: t for t in results}
        new = [at for at in stored if at not in self.given and at not in self.held]
        if not new and not scratch:
            return
        self.held = {at: pair for at, pair in self.held.items() if not pair[0].expired()}
        for at in new:
            storage, t = stored[at].untyped_storage(), stored[at]
            self.held[at] = StorageWeakRef(storage), Held(tuple(t.shape), t.dtype, self.allocated(storage.nbytes()))
        total = sum(held.bytes for _, held in self.held.values()) + scratch
        self.check(total)
        if total > self.peak:
            self.peak, self.at_peak = total, [held for _, held in self.held.values()]

    def check(self, total: int) -> None:
        """For limits on what is held."""

    def allocated(self, size: int) -> int:
        return -(-size // BLOCK) * BLOCK + (LARGE if size > LARGE else 0)


class Rehearsal(Tally):
    """Runs forward and backward, with all gradients that are required, and a gradient that arrives at each result."""

    def __init__(self, request: Request, how: LinearCrossEntropyConfig, gpu: Gpu | None = None, most: float = math.inf):
        """most: bytes beside inputs and gradients; `run` raises _TooMuch as soon as it needs more."""
        super().__init__()
        self.request, self.phase, self.most = request, "forward", most
        self.plan = Plan(*request.options, *vars(how).values(), request.why_portable)
        self.k = None
        if request.why_portable is None:
            gpu = gpu or autograd.kernels_of(request.device).gpu
            self.k = autograd.kernels_on(META, gpu, self.kernel_for)
        self.gradients = 0
        self.made = 0  # bytes of gradients, by the forward operator

    @property
    def above_gradients(self) -> int:
        return self.peak - self.gradients

    def run(self) -> "Rehearsal":
        # The first operation would import it, and references from there would keep tensors until they are collected.
        import torch._dynamo

        *tensors, dw_out = (None if t is None else _blank(*t) for t in self.request.tensors)
        plan, return_lse = self.plan, self.request.return_lse
        inputs = Inputs(*tensors, 1.0 if self.request.has_scale else None, None, dw_out)
        shape = inputs.target.shape
        dtype = autograd.accumulate_dtype(plan.compute_dtype)
        arriving = [torch.empty(shape if plan.reduction == "none" else (), dtype=dtype, device=META)]
        arriving += [torch.empty(shape, dtype=dtype, device=META)] * (3 if plan.return_stats else return_lse)
        self.give(*tensors, dw_out, *arriving)
        wanted = [t for t in inputs[:3] if t is not None and t.requires_grad]
        self.gradients = sum(t.nbytes for t in wanted if dw_out is None or t is not inputs.linear_weight)
        with self:
            results = autograd.run(inputs, plan, return_lse, self.request.eager, self.k)[: len(arriving)]
            self.phase = "backward"
            # compiled code does not scale in place the gradients that forward made
            copies = torch.empty(self.made, dtype=torch.uint8, device=META) if self.made else None
            if wanted:
                torch.autograd.grad(results, wanted, arriving, allow_unused=dw_out is not None)
            del copies
        return self

    def kernel_for(self, name: str, problem: Any, gpu: Gpu) -> Kernel:
        return Kernel(lambda *args: None, choose(name, problem, gpu).config)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in autograd.IMPLEMENTATIONS:  # of the operators: in place of what they do with meta tensors
            with self:
                result = autograd.IMPLEMENTATIONS[func](*args, k=self.k, device=self.request.device)
            if self.phase == "forward" and not self.request.eager:
                self.made = sum(grad.nbytes for grad in result[-3:] if grad is not None)
            return result
        if func is torch.ops.aten.empty_strided.default:
            kwargs = {**(kwargs or {}), "device": META}
        return super().__torch_dispatch__(func, types, args, kwargs)

    def check(self, total: int) -> None:
        if total - self.gradients > self.most:
            raise _TooMuch

    def allocated(self, size: int) -> int:
        return super().allocated(size) if self.request.device.type == "cuda" else size


def _blank(shape: tuple, strides: tuple, offset: int, dtype: torch.dtype, requires_grad: bool) -> Tensor:
    t = torch.empty_strided(shape, strides, dtype=dtype, device=META)
    return t.as_strided(shape, strides, offset).requires_grad_(requires_grad)


def tensors_in(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
