"""The memory of a call, counted on meta tensors, and the largest blocks of rows within a limit."""

import functools
import importlib
import operator
from typing import NamedTuple

import torch
from torch import Tensor

from quackish.device.kernel_device import require_device, why_unsupported
from quackish.device.modes import is_compiling, traced_as_constant
from quackish.gpu import Gpu
from quackish.ops.linear_divergence import kernel_steps, operators, reference
from quackish.ops.linear_divergence.checks import WHO
from quackish.ops.linear_divergence.operators import Plan, Tensors
from quackish.ops.linear_divergence.schedule import BLOCKS, CHUNKS, Layout, default_layout
from quackish.ops.shared.dry_run import Recorder
from quackish.ops.shared.memory_counter import META, LimitExceeded, isolated
from quackish.ops.shared.problems import GEMM_SPEC


class Request(NamedTuple):
    """Everything that memory depends on, except the layout. torch.compile treats it as constants."""

    tensors: tuple  # (shape, strides, dtype) of each of Tensors; None if it is absent
    plan: tuple  # of Plan, with a tuple as `needs`
    device: torch.device
    eager: bool

    def shape(self, name: str) -> tuple[int, ...]:
        return self.tensors[Tensors._fields.index(name)][0]


def request_for(t: Tensors, plan: Plan) -> tuple:
    """The fields of a Request. Numbers that memory does not depend on, which may be symbolic, are left out."""
    ints = lambda sizes: tuple(operator.index(n) for n in sizes)  # noqa: E731
    tensors = tuple(None if one is None else (ints(one.shape), ints(one.stride()), one.dtype) for one in t)
    caps = [None if cap is None else 1.0 for cap in (plan.softcap, plan.teacher_softcap)]
    beta = 0.0 if plan.beta == 0 else 1.0 if plan.beta == 1 else 0.5
    plan = plan._replace(
        beta=beta, temperature=1.0, softcap=caps[0], teacher_softcap=caps[1], scale=1.0, teacher_scale=1.0
    )
    fields = tuple(tuple(field) if isinstance(field, list) else field for field in plan)
    return tensors, fields, t.x.device, not is_compiling()


@traced_as_constant
def layout_within(limit: int, request: tuple) -> tuple[int, int]:
    """The fields of the layout with the largest blocks, then the largest chunks, within `limit` bytes.

    ValueError if there is none.
    """
    request = Request(*request)
    return _layout_within(limit, request, gpu_of(request))


def gpu_of(request: Request) -> Gpu | None:
    """Of the kernels that run; None on the portable path."""
    plan = Plan(*request.plan)
    (v, h), (_, teacher_h) = request.shape("w"), request.shape("teacher_w")
    why = why_unsupported(WHO, GEMM_SPEC, request.device)
    if plan.backend == "reference" or why or kernel_steps.why_unsupported(plan.dtype, v, (h, teacher_h)):
        return None
    return require_device(WHO, request.device).gpu


@functools.lru_cache(maxsize=256)
def _layout_within(limit: int, request: Request, gpu: Gpu | None) -> Layout:
    return isolated(_choose, limit, request, gpu)


def _choose(limit: int, request: Request, gpu: Gpu | None) -> Layout:
    m, h = request.shape("x")
    chunks = [rows for rows in CHUNKS if rows <= default_layout(h).chunk]
    blocks = [rows for rows in BLOCKS if rows < m or rows == BLOCKS[0]]
    layouts = [Layout(chunk, block) for block in blocks for chunk in chunks if chunk <= block]
    for layout in layouts:
        try:
            count(request, gpu, layout, limit)
        except LimitExceeded:
            continue
        return layout
    least = min(count(request, gpu, layout) for layout in layouts)  # several blocks sum dw in fp32
    raise ValueError(
        f"{WHO}: memory_limit is {limit} bytes, expected at least {least}, the least peak of all blocks of rows, in "
        "addition to inputs and gradients"
    )


def count(request: Request, gpu: Gpu | None, layout: Layout, limit: int | None = None) -> int:
    """Bytes at the peak of forward and backward in addition to inputs and gradients. LimitExceeded above `limit`.

    The portable path is counted as on a CPU, which copies 16-bit operands of matrix products to fp32.
    """
    # Done by the first operation, the import would keep tensors alive until garbage collection.
    importlib.import_module("torch._dynamo")
    t = Tensors(*(None if m is None else torch.empty_strided(*m[:2], dtype=m[2], device=META) for m in request.tensors))
    plan = Plan(*request.plan)._replace(chunk=layout.chunk, block=layout.block)
    recorder, gradients = _Recorder(request.device), gradient_bytes(t, plan)
    if limit is not None:
        recorder.limit = limit + gradients
    steps = reference if gpu is None else kernel_steps.KernelSteps(recorder.device(gpu))
    run(recorder, t, plan, steps, scales_in_place=request.eager and gpu is not None)
    return recorder.peak - gradients


class _Recorder(Recorder):
    """Of calls on a device."""

    def __init__(self, device: torch.device):
        super().__init__()
        self.of = device

    def allocation_size(self, size: int) -> int:
        return super().allocation_size(size) if self.of.type == "cuda" else size


def gradient_bytes(t: Tensors, plan: Plan) -> int:
    """Of the gradients that autograd gets."""
    pairs = zip((t.x, None if t.grad_w_out is not None else t.w, t.bias), plan.needs, strict=True)
    return sum(like.nbytes for like, needed in pairs if needed and like is not None)


def run(recorder: Recorder, t: Tensors, plan: Plan, steps: operators.Steps, scales_in_place: bool = True) -> None:
    """Records a call on meta tensors."""
    is_none, wide = plan.reduction == "none", torch.float64 if plan.dtype == torch.float64 else torch.float32
    dloss: Tensor = torch.empty(len(t.x) if is_none else (), dtype=wide, device=META)
    recorder.ignore(*t, dloss)
    with recorder:
        results = operators.forward(t, plan, steps)
        recorder.phase = "backward"
        grads = None
        if any(plan.needs) and is_none:
            grads = operators.backward(dloss, results[-1], t, plan, steps)
        elif not scales_in_place:
            grads = tuple(None if grad is None else torch.empty_like(grad) for grad in results[2:5])
        del grads, results  # held until here
