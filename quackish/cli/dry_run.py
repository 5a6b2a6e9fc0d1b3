"""What linear cross entropy launches and allocates, without a GPU: its own code, run on tensors that have no memory.

Kernels are stand-ins that take note of their calls; what PyTorch runs itself, cuBLAS's GEMMs among it, is noted by a
dispatch mode, which also keeps count of the memory that is held.
"""

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

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
from quackish.ops.linear_cross_entropy import schedules
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
    peak_after: int  # how many steps came before
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

    As plain eager does it, or compiled code, once, every gradient being asked for. Not for several threads.
    """
    note = _Notes(gpu)
    k = kernels_on(_META, gpu, note.kernel_for)
    options = dict(ignore_index=-100, label_smoothing=call.label_smoothing, softcap=call.softcap, z_loss=call.z_loss)
    plan = KernelPlan(**options, reduction=call.reduction, compute_dtype=call.dtype, **dataclasses.asdict(how))
    with torch.device(_META):
        inputs, dw_out, arriving = _tensors(call)
    with _kernels(k), _Watch(note, [*inputs, dw_out, *arriving]) as watch:
        _run(plan, inputs, dw_out, arriving, call, note)
    return Trace(note.steps, watch.peak, watch.peak_after, watch.at_peak)


@contextlib.contextmanager
def _kernels(k) -> Iterator[None]:
    """The operation finds `k`, whatever the device, and its operators run what they do on one with kernels."""
    stand_ins = dict(
        kernels_of=lambda device: k, _fwd_op=on_kernels._fwd_impl, _bwd_op=on_kernels._bwd_impl,
        _scaled_op=on_kernels._scaled_impl,
    )  # fmt: skip
    with contextlib.ExitStack() as stack:
        for name, stand_in in stand_ins.items():
            stack.callback(setattr, on_kernels, name, getattr(on_kernels, name))
            setattr(on_kernels, name, stand_in)
        yield


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


def _run(plan: KernelPlan, inputs: Inputs, dw_out, arriving: list[Tensor], c: LceCall, note: "_Notes") -> None:
    """As `on_kernels.run` in plain eager, which a dispatch mode is not, or compiled, and autograd."""
    if not c.grad:
        with torch.no_grad():
            k, call = on_kernels.kernels_of(_META), on_kernels.operands(inputs, plan)
            on_kernels.loss_of(schedules.forward(k, call, plan, on_kernels._NONE, False), plan, inputs.target)
        return
    if c.compiled:
        context, args = _Context(), (*inputs, dw_out, *plan, [t is not None for t in inputs[:3]])
        with torch.no_grad():
            on_kernels._setup_context(context, args, on_kernels._fwd_op(*args))
            note.phase = "backward"
            on_kernels._op_backward(context, *(arriving if c.return_lse else (arriving[0], None)))
        return
    outputs = on_kernels._apply(*inputs[:3], inputs, dw_out, plan, c.return_lse)
    note.phase = "backward"
    wanted = [t for t in inputs[:3] if t is not None]
    torch.autograd.grad(outputs, wanted, arriving if c.return_lse else arriving[0], allow_unused=dw_out is not None)


class _Context:
    """What autograd hands an operator, as far as ours use it."""

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.saved_tensors = tensors

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        pass

    def set_materialize_grads(self, value: bool) -> None:
        pass


# Kernels -------------------------------------------------------------------------------------------------------------


class _Notes:
    """The steps so far; what it finds in place of kernels adds to them."""

    def __init__(self, gpu: Gpu):
        self.gpu, self.phase, self.steps = gpu, "forward", []

    def kernel_for(self, name: str, problem: Any, gpu: Gpu) -> Kernel:
        choice = choose(name, problem, gpu)

        def note(*args) -> None:
            sizes = sizes_of(name, args)
            self.steps.append(Step(self.phase, name, problem, choice, sizes, work(name, problem, sizes)))

        return Kernel(note, choice.config)


# PyTorch -------------------------------------------------------------------------------------------------------------

_OVERWRITES = ("zero_", "fill_", "copy_")  # they do not read the tensor that they are methods of


class _Watch(TorchDispatchMode):
    """Notes PyTorch's own launches, and the largest sum of bytes that tensors hold at a time, `given` ones apart."""

    def __init__(self, note: _Notes, given: Iterable[Any]):
        super().__init__()
        self.note = note
        self.given = {t.untyped_storage()._cdata for t in given if isinstance(t, Tensor)}
        self.held: dict[int, tuple[StorageWeakRef, Buffer]] = {}
        self.peak, self.peak_after, self.at_peak = 0, 0, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.aten.empty_strided.default:
            kwargs = {**kwargs, "device": _META}
        # a GEMM's result has its place already, and no value is asked for
        result = kwargs["out"] if "out" in kwargs else func(*args, **kwargs)
        name = func.overloadpacket.__name__
        returns = [returned.alias_info for returned in func._schema.returns]
        is_view = any(alias is not None and not alias.is_write for alias in returns)
        if not is_view and "empty" not in name:
            self.launch(name, args, kwargs, result)
        self.hold(result)
        return result

    def launch(self, name: str, args: tuple, kwargs: dict, result: Any) -> None:
        read = [t for t in tree_leaves(args) if isinstance(t, Tensor)]
        if name in _OVERWRITES or name.startswith("new_"):
            read = read[1:]
        written = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        if name in ("mm", "addmm"):
            (m, k), n = read[-2].shape, read[-1].shape[1]
            flops, text = 2 * m * n * k, f"m={m} n={n} k={k} {_dtype(read[-1])} out={_dtype(result)}"
        else:
            flops = sum(t.numel() for t in written) if name in ("add_", "sum") else 0
            text = " ".join(map(_shape, written[:1] or read[:1]))
        done = Work(sum(map(_nbytes, read)), sum(map(_nbytes, written)), flops)
        label = "cuBLAS" if name in ("mm", "addmm") else "PyTorch"
        self.note.steps.append(Step(self.note.phase, f"torch.{name}", f"{text} ({label})", None, {}, done))

    def hold(self, result: Any) -> None:
        for t in tree_leaves(result):
            if isinstance(t, Tensor):
                storage = t.untyped_storage()
                if storage._cdata not in self.given and storage._cdata not in self.held:
                    self.held[storage._cdata] = StorageWeakRef(storage), Buffer(_shape(t), storage.nbytes())
        self.held = {at: pair for at, pair in self.held.items() if not pair[0].expired()}
        total = sum(buffer.bytes for _, buffer in self.held.values())
        if total > self.peak:
            self.peak, self.peak_after = total, len(self.note.steps)
            self.at_peak = sorted((buffer for _, buffer in self.held.values()), key=lambda buffer: -buffer.bytes)


def _nbytes(t: Tensor) -> int:
    return t.numel() * t.itemsize


def _dtype(t: Tensor) -> str:
    name = str(t.dtype).removeprefix("torch.")
    return SHORT.get(name, name)


def _shape(t: Tensor) -> str:
    return f"{'x'.join(map(str, t.shape)) or 'scalar'} {_dtype(t)}"
