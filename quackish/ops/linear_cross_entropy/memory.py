"""The peak memory of a call, and the fastest config within a memory limit. Allocates nothing and needs no GPU.

A dispatch mode counts the memory that a dry run would allocate.
"""

import importlib
import math
import operator
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quackish.device import cuda
from quackish.device.modes import is_compiling, traced_as_constant
from quackish.gpu import Gpu
from quackish.ops.linear_cross_entropy.calls import Call, GradOutputs, Grads, LossPlan, grads_needed, requires_grad
from quackish.ops.linear_cross_entropy.checks import Inputs
from quackish.ops.linear_cross_entropy.dry_run import DryRun, empty, isolated
from quackish.ops.linear_cross_entropy.layout import LinearCrossEntropyConfig, LinearCrossEntropyProblem, by_speed
from quackish.ops.linear_cross_entropy.operators import OPERATORS, kernels_on
from quackish.ops.shared.memory_counter import META, LimitExceeded, MemoryCounter


class Metadata(NamedTuple):
    """Everything about a tensor that memory depends on."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    requires_grad: bool


class Request(NamedTuple):
    """Everything that memory depends on, except the config. torch.compile treats it as constants."""

    tensors: tuple  # of `tensor_metadata`
    options: tuple  # LossPlan.options
    return_lse: bool
    has_scale: bool  # logit_scale is given
    device: torch.device
    eager: bool  # see Call

    def inputs(self) -> Inputs:
        """The Metadata of each input; None for absent ones and numbers."""
        return Inputs(*(None if t is None else Metadata(*t) for t in self.tensors))


def request_for(inputs: Inputs, plan: LossPlan, return_lse: bool, eager: bool) -> tuple:
    """The fields of the Request of a plan without config.

    Leaves out values that memory does not depend on: torch.compile may have made them symbolic.
    """
    plan = plan._replace(
        ignore_index=0, softcap=None if plan.softcap is None else 1.0,
        label_smoothing=1.0 if plan.label_smoothing > 0 else 0.0, z_loss=1.0 if plan.z_loss > 0 else 0.0,
    )  # fmt: skip
    device, has_scale = inputs.input.device, inputs.logit_scale is not None
    return tensor_metadata(inputs), plan.options, return_lse, has_scale, device, eager


def tensor_metadata(inputs: Inputs) -> tuple:
    """The Metadata of each input as a tuple; None if it is absent, and for logit_scale and num_items."""
    grad = torch.is_grad_enabled()
    return tuple(
        None if t is None else (_ints(t.shape), _ints(t.stride()), _offset(t), t.dtype, grad and t.requires_grad)
        for t in inputs._replace(logit_scale=None, num_items=None)
    )


def _ints(sizes: Iterable[Any]) -> tuple[int, ...]:
    return tuple(operator.index(n) for n in sizes)  # torch.compile specializes on each


def _offset(t: Tensor) -> int | torch.SymInt:
    """Storage offset in elements, modulo 8: weights not aligned to 16 bytes are copied. Dynamo cannot trace offsets."""
    return 0 if is_compiling() else t.storage_offset() % 8


def problem_for(plan: LossPlan, v: int, h: int, return_lse: bool, has_out: bool) -> LinearCrossEntropyProblem:
    """The problem that the config rules take."""
    return LinearCrossEntropyProblem(
        v=v, h=h, dtype=cuda.name_of(plan.compute_dtype), reduction=plan.reduction, softcap=plan.softcap is not None,
        return_lse=return_lse or plan.return_stats, grad_weight_out=has_out,
        label_smoothing=plan.label_smoothing > 0, on_kernels=plan.why_portable is None,
    )  # fmt: skip


# Memory limit ---------------------------------------------------------------------------------------------------------


@traced_as_constant
def choose_within_limit(
    memory_limit: int, request: tuple, schedule: str, chunk_size: int | None, gpu: Gpu | None = None
) -> tuple[str, int, bool, bool, bool]:
    """The fields of the fastest config within `memory_limit` bytes; ValueError if there is none."""
    return isolated(_choose, memory_limit, Request(*request), schedule, chunk_size, gpu)


def _choose(memory_limit: int, request: Request, schedule: str, chunk_size: int | None, gpu: Gpu | None) -> tuple:
    for config in candidates(request, schedule, chunk_size):
        try:
            MemoryDryRun(request, config, gpu, memory_limit).run()
        except LimitExceeded:
            continue
        return tuple(config)
    *_, (config, bytes_needed) = frontier(request, schedule, chunk_size, gpu)
    raise ValueError(
        f"linear_cross_entropy: memory_limit is {memory_limit} bytes, expected at least {bytes_needed}, the peak of "
        f'schedule="{config.schedule}", chunk_size={config.chunk_rows} in addition to inputs and gradients'
    )


def frontier(
    request: Request, schedule: str, chunk_size: int | None, gpu: Gpu | None = None
) -> Iterator[tuple[LinearCrossEntropyConfig, int]]:
    """(config, bytes needed), the fastest first, each with less memory than all before it.

    gpu: overrides the device's.
    """
    least = math.inf
    for config in candidates(request, schedule, chunk_size):
        bytes_needed = MemoryDryRun(request, config, gpu).run().peak_without_grads
        if bytes_needed < least:
            least = bytes_needed
            yield config, bytes_needed


def candidates(request: Request, schedule: str, chunk_size: int | None) -> list[LinearCrossEntropyConfig]:
    """The configs to try for a memory limit, the fastest first."""
    inputs, plan = request.inputs(), LossPlan(*request.options)
    (v, h), m = inputs.linear_weight.shape, math.prod(inputs.target.shape)
    problem = problem_for(plan, v, h, request.return_lse, inputs.grad_weight_out is not None)
    return by_speed(problem, m, h, schedule, chunk_size)


# Dry runs -------------------------------------------------------------------------------------------------------------


class MemoryDryRun(MemoryCounter, DryRun):
    """A dry run that counts memory, with gradients of all outputs."""

    def __init__(
        self, request: Request, config: LinearCrossEntropyConfig, gpu: Gpu | None = None, limit: float = math.inf
    ):
        """limit: bytes in addition to inputs and gradients. `run` raises LimitExceeded above it."""
        MemoryCounter.__init__(self)
        self.request, self.forward_grad_bytes = request, 0  # of the gradients that the forward operator returns
        self.plan = plan = LossPlan(*request.options).with_config(config)
        inputs = Inputs(*(None if t is None else _meta_tensor(t) for t in request.inputs()))
        if request.has_scale:
            inputs = inputs._replace(logit_scale=1.0)
        if plan.why_portable is None:
            gpu = gpu or kernels_on(request.device).gpu
        needed = grads_needed(inputs, plan, requires_grad(inputs))
        call = Call(inputs, plan, needed, None, request.device, request.return_lse, request.eager)
        num_row_grads = len(GradOutputs._fields) - 1 if plan.return_stats else int(request.return_lse)
        DryRun.__init__(self, call, gpu, 1 + num_row_grads)
        self.ignore(*(t for t in inputs if isinstance(t, Tensor)), *self.grad_outputs)
        dw_out = inputs.grad_weight_out
        self.grad_bytes = sum(t.nbytes for t in self.leaves if dw_out is None or t is not inputs.linear_weight)
        self.limit = limit + self.grad_bytes

    @property
    def peak_without_grads(self) -> int:
        return self.peak - self.grad_bytes

    def run(self) -> "MemoryDryRun":
        # Import it now: done by the first operation, the import would keep tensors alive until garbage collection.
        importlib.import_module("torch._dynamo")
        with self:
            return super().run()

    def between(self) -> Tensor | None:
        """Compiled code scales forward's gradients out of place."""
        num_bytes = self.forward_grad_bytes
        return torch.empty(num_bytes, dtype=torch.uint8, device=META) if num_bytes else None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        operator = next((op for op in OPERATORS if op.overload is func), None)
        if operator is not None:  # run it instead of its fake implementation
            with self:
                result = operator.run(*args, kernels=self.call.kernels, device=self.request.device)
            if self.phase == "forward" and not self.request.eager:
                self.forward_grad_bytes = sum(grad.nbytes for grad in result[-len(Grads._fields) :] if grad is not None)
            return result
        if func is torch.ops.aten.empty_strided.default:
            kwargs = {**(kwargs or {}), "device": META}
        return super().__torch_dispatch__(func, types, args, kwargs)

    def allocation_size(self, size: int) -> int:
        return super().allocation_size(size) if self.request.device.type == "cuda" else size


def _meta_tensor(like: Metadata) -> Tensor:
    t = empty(like.shape, like.strides, like.dtype)
    return t.as_strided(like.shape, like.strides, like.offset).requires_grad_(like.requires_grad)
