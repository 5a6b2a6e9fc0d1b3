"""What linear cross entropy launches and allocates: its own code, run on tensors without memory. Needs no GPU.

Kernels are stand-ins that record their calls. A dispatch mode records what PyTorch itself launches, such as cuBLAS's
GEMMs, and counts the memory that is held.
"""

import dataclasses
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from quackish.configs.choose import Choice, choose
from quackish.configs.linear_cross_entropy import LinearCrossEntropyConfig
from quackish.gpu import Gpu
from quackish.ops.kernel_for import Kernel
from quackish.ops.linear_cross_entropy import autograd as on_kernels
from quackish.ops.linear_cross_entropy.autograd import Inputs, kernels_on
from quackish.ops.linear_cross_entropy.schedules import KernelPlan
from quackish.work import SHORT, Work, sizes_of, work

_META = torch.device("meta")


class Step(NamedTuple):
    """A launch."""

    phase: str  # "forward" or "backward"
    kernel: str  # as in the table of kernels, or "torch.mm" and the like
    problem: Any  # of torch's: the shapes, as a string
    choice: Choice | None  # None for torch's
    sizes: dict[str, int]
    work: Work


class Buffer(NamedTuple):
    text: str
    bytes: int


@dataclasses.dataclass
class Trace:
    steps: list[Step]
    peak_bytes: int  # at most held at a time, beside the inputs; results included
    buffers: list[Buffer]  # what was held then, the largest first


@dataclasses.dataclass(frozen=True)
class LceCall:
    """A call of linear_cross_entropy, as far as launches and memory depend on it."""

    m: int
    h: int
    v: int
    dtype: torch.dtype
    reduction: str = "mean"
    bias: bool = False
    class_weight: bool = False
    label_smoothing: float = 0.0
    softcap: float | None = None
    z_loss: float = 0.0
    return_lse: bool = False  # and a gradient arrives at it
    grad_weight_out: bool = False  # a buffer in fp32
    grad: bool = True
    compiled: bool = False  # by operators, as code that torch.compile made


def linear_cross_entropy(call: LceCall, how: LinearCrossEntropyConfig, gpu: Gpu) -> Trace:
    """Forward, and with `grad` backward, of `call` by the schedule `how` on `gpu`, which has kernels for it.

    As plain eager runs it once, or compiled code, with every gradient asked for. Not thread-safe.
    """
    recorder = _Recorder(gpu)
    k = kernels_on(_META, gpu, recorder.kernel_for)
    options = dict(ignore_index=-100, label_smoothing=call.label_smoothing, softcap=call.softcap, z_loss=call.z_loss)
    plan = KernelPlan(**options, reduction=call.reduction, compute_dtype=call.dtype, **dataclasses.asdict(how))
    with torch.device(_META):
        inputs, dw_out, arriving = _tensors(call)
    given = [t for t in (*inputs, dw_out, *arriving) if t is not None]
    recorder.given = {t.untyped_storage()._cdata for t in given}
    stand_ins = dict(  # the operation finds `k`, and its operators run what they run where there are kernels
        kernels_of=lambda device: k, _fwd_op=on_kernels._fwd_impl, _bwd_op=on_kernels._bwd_impl,
        _scaled_op=on_kernels._scaled_impl,
    )  # fmt: skip
    with mock.patch.multiple(on_kernels, **stand_ins), recorder:
        _run(plan, inputs, dw_out, arriving, call, recorder)
    return Trace(recorder.steps, recorder.peak, recorder.at_peak)


def _tensors(c: LceCall) -> tuple[Inputs, Tensor | None, list[Tensor]]:
    """The inputs, the buffer for the weight's gradient, and the gradients that arrive."""
    fp32 = torch.float32
    inputs = Inputs(
        torch.empty(c.m, c.h, dtype=c.dtype, requires_grad=c.grad),
        torch.empty(c.v, c.h, dtype=c.dtype, requires_grad=c.grad),
        torch.empty(c.v, dtype=c.dtype, requires_grad=c.grad) if c.bias else None,
        torch.empty(c.m, dtype=torch.int64),
        torch.empty(c.v, dtype=fp32) if c.class_weight else None,
        None,
    )
    dw_out = torch.empty(c.v, c.h, dtype=fp32) if c.grad_weight_out else None
    arriving = [torch.empty(c.m if c.reduction == "none" else (), dtype=fp32)]
    return inputs, dw_out, arriving + [torch.empty(c.m, dtype=fp32)] * c.return_lse


def _run(plan: KernelPlan, inputs: Inputs, dw_out, arriving: list[Tensor], c: LceCall, recorder: "_Recorder") -> None:
    """Plain eager, or compiled code, and autograd."""
    if not (c.grad and c.compiled):
        loss, lse = on_kernels.run(inputs, plan, dw_out, c.return_lse, eager=True)
        recorder.phase = "backward"
        if c.grad:
            outputs, wanted = (loss, lse) if c.return_lse else (loss,), [t for t in inputs[:3] if t is not None]
            torch.autograd.grad(outputs, wanted, arriving, allow_unused=dw_out is not None)
        return
    context = SimpleNamespace(mark_non_differentiable=lambda *tensors: None, set_materialize_grads=lambda value: None)
    context.save_for_backward = lambda *tensors: setattr(context, "saved_tensors", tensors)
    args = (*inputs, dw_out, *plan, [t is not None for t in inputs[:3]])
    with torch.no_grad():
        on_kernels._setup_context(context, args, on_kernels._fwd_op(*args))
        recorder.phase = "backward"
        on_kernels._op_backward(context, *(arriving if c.return_lse else (arriving[0], None)))


# What is launched and held -------------------------------------------------------------------------------------------

_OVERWRITES = ("zero_", "fill_", "copy_")  # they do not read the tensor that they are methods of


class _Recorder(TorchDispatchMode):
    """The launches of kernels and of PyTorch, and the largest sum of bytes held at a time, beside what is `given`."""

    def __init__(self, gpu: Gpu):
        super().__init__()
        self.gpu, self.phase, self.steps = gpu, "forward", []
        self.given: set[int] = set()
        self.held: dict[int, tuple[StorageWeakRef, Buffer]] = {}
        self.peak, self.at_peak = 0, []

    def kernel_for(self, name: str, problem: Any, gpu: Gpu) -> Kernel:
        choice = choose(name, problem, gpu)

        def launch(*args) -> None:
            sizes = sizes_of(name, args)
            self.steps.append(Step(self.phase, name, problem, choice, sizes, work(name, problem, sizes)))

        return Kernel(launch, choice.config)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.aten.empty_strided.default:
            kwargs = {**kwargs, "device": _META}
        # a GEMM's result has its place already, and no value is asked for
        result = kwargs["out"] if "out" in kwargs else func(*args, **kwargs)
        name = func.overloadpacket.__name__
        returns = [returned.alias_info for returned in func._schema.returns]
        is_view = any(alias is not None and not alias.is_write for alias in returns)
        written = _tensors_in(result)
        if not is_view and "empty" not in name:
            self.launched(name, _tensors_in(args), written)
        self.hold(written)
        return result

    def launched(self, name: str, read: list[Tensor], written: list[Tensor]) -> None:
        if name in _OVERWRITES or name.startswith("new_"):
            read = read[1:]
        if name in ("mm", "addmm"):
            (m, k), n = read[-2].shape, read[-1].shape[1]
            flops = 2 * m * n * k
            text = f"m={m} n={n} k={k} {_dtype(read[-1])} out={_dtype(written[0])} (cuBLAS)"
        else:
            flops = sum(t.numel() for t in written) if name in ("add_", "sum") else 0
            text = " ".join([*map(_shape, written[:1] or read[:1]), "(PyTorch)"])
        done = Work(sum(t.nbytes for t in read), sum(t.nbytes for t in written), flops)
        self.steps.append(Step(self.phase, f"torch.{name}", text, None, {}, done))

    def hold(self, results: list[Tensor]) -> None:
        for t in results:
            storage = t.untyped_storage()
            if storage._cdata not in self.given and storage._cdata not in self.held:
                self.held[storage._cdata] = StorageWeakRef(storage), Buffer(_shape(t), storage.nbytes())
        self.held = {at: pair for at, pair in self.held.items() if not pair[0].expired()}
        total = sum(buffer.bytes for _, buffer in self.held.values())
        if total > self.peak:
            self.peak = total
            self.at_peak = sorted((buffer for _, buffer in self.held.values()), key=lambda buffer: -buffer.bytes)


def _tensors_in(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _dtype(t: Tensor) -> str:
    name = str(t.dtype).removeprefix("torch.")
    return SHORT.get(name, name)


def _shape(t: Tensor) -> str:
    return f"{'x'.join(map(str, t.shape)) or 'scalar'} {_dtype(t)}"
