"""Dry runs: the launches and the memory of a call, found by running the operation on meta tensors. Needs no GPU.

The operation's own code runs on a KernelDevice whose kernels do nothing but record their launch. `Recorder` also
records PyTorch's own launches, such as cuBLAS GEMMs, and counts allocated memory.
"""

import dataclasses
from typing import Any, NamedTuple

from torch import Tensor

from quackish.device.choose import Choice, choose
from quackish.device.kernel_device import KernelDevice, empty_on, substitute, why_unsupported
from quackish.device.kernel_for import CompiledKernel, kernel_for
from quackish.device.work import SHORT, Work
from quackish.errors import UnsupportedError
from quackish.gpu import Gpu
from quackish.ops.shared.for_tools import Args, Operation
from quackish.ops.shared.memory_counter import META, Allocation, MemoryCounter, tensors_of


class Step(NamedTuple):
    """A launch, of a quackish kernel or by PyTorch, and how often it is repeated."""

    phase: str  # "forward" or "backward"
    kernel: str  # KernelSpec.name, or such as "torch.mm"
    problem: Any  # a string with the shapes for PyTorch's launches
    choice: Choice | None  # None for PyTorch's launches
    sizes: dict[str, int]
    work: Work  # bytes and FLOPs of one call
    calls: int = 1


class Buffer(NamedTuple):
    text: str
    bytes: int


@dataclasses.dataclass
class DryRun:
    """Launches and memory of a call's forward and backward, with all gradients."""

    portable: str | None = None  # why the portable path runs; None if kernels run
    plan: dict[str, str] = dataclasses.field(default_factory=dict)  # decisions and their reasons, by title
    steps: list[Step] = dataclasses.field(default_factory=list)
    peak_bytes: int = 0  # peak memory, with results and gradients but without inputs
    buffers: list[Buffer] = dataclasses.field(default_factory=list)  # allocated at the peak, the largest first
    notes: list[str] = dataclasses.field(default_factory=list)
    limited_bytes: int | None = None  # what `memory_limit` bounds: the peak without results and gradients


def dry_run(op: Operation, args: Args, gpu: Gpu, passes: tuple[str, ...], name: str) -> DryRun:
    """Runs a call on meta tensors. `name` is the operation's in messages. ValueError for invalid arguments."""
    with substitute(META, KernelDevice(gpu, kernel_for)):
        if why := why_unsupported(name, op.spec, META):
            return DryRun(portable=why)
    try:
        return (op.dry_run or launches)(op, args, gpu, passes)
    except UnsupportedError as error:
        return DryRun(portable=str(error))


def launches(op: Operation, args: Args, gpu: Gpu, passes: tuple[str, ...]) -> DryRun:
    """Runs an operation that allocates by its KernelDevice alone. Launches of PyTorch are not recorded."""
    dry, scratch, phase = DryRun(), [], "forward"

    def record(problem: Any, gpu: Gpu) -> CompiledKernel:
        choice, spec = choose(problem, gpu), problem.spec

        def launch(args: Any, stream: int) -> None:
            sizes = spec.sizes_of(args)
            dry.steps.append(Step(phase, spec.name, problem, choice, sizes, spec.work(problem, sizes)))

        return CompiledKernel(launch, choice.config)

    def workspace(stream: int, floats: int, num_tickets: int = 0) -> tuple[int, int, None]:
        scratch.append(Buffer("scratch of the sums over CTAs, kept for the stream", 4 * floats))
        return 0, 0, None

    with substitute(META, KernelDevice(gpu, record, empty_on(META), workspace=workspace)):
        results = op.forward(args, "cute")
        try:
            phase = "backward"
            op.backward(args, results)
        except UnsupportedError as error:
            if passes == ("backward",):
                raise
            dry.plan["Path of backward"] = f"the portable path, in plain PyTorch: {error}"
    if not dry.steps:
        raise AssertionError(
            f"{op.name}: the dry run saw no launch. A plain eager call must run its kernels without a custom operator: "
            "on meta tensors PyTorch runs only an operator's fake implementation"
        )
    dry.steps = [step for step in dry.steps if step.phase in passes]
    dry.buffers = [Buffer(f"results of {step.phase}", step.work.bytes_written) for step in dry.steps]
    dry.buffers += scratch if "backward" in passes else []
    dry.peak_bytes = sum(buffer.bytes for buffer in dry.buffers)
    return dry


# Recording -----------------------------------------------------------------------------------------------------------

_OVERWRITES = ("zero_", "fill_", "copy_")  # methods that do not read their own tensor


class Recorder(MemoryCounter):
    """Records the launches of quackish's kernels and of PyTorch."""

    phase = "forward"

    def __init__(self, *args):
        self.steps: list[Step] = []
        super().__init__(*args)

    def kernel_for(self, problem: Any, gpu: Gpu) -> CompiledKernel:
        choice, spec = choose(problem, gpu), problem.spec

        def launch(args: Any, stream: int) -> None:
            sizes, phase = spec.sizes_of(args), self.phase
            self.steps.append(Step(phase, spec.name, problem, choice, sizes, spec.work(problem, sizes), self.calls))

        return CompiledKernel(launch, choice.config)

    def device(self, gpu: Gpu) -> KernelDevice:
        """A device on which nothing runs. Its tickets are those of a stream, which are kept."""
        return KernelDevice(
            gpu, self.kernel_for, empty_on(META), workspace=lambda stream, floats, tickets=0: (0, 0, None)
        )

    def buffers(self) -> list[Buffer]:
        """The tensors allocated at the peak, the largest first."""
        return sorted((Buffer(_shape(held), held.bytes) for held in self.at_peak), key=lambda buffer: -buffer.bytes)

    def record_call(self, func, args, result) -> None:
        name = func.overloadpacket.__name__
        returns = [returned.alias_info for returned in func._schema.returns]
        is_view = any(alias is not None and not alias.is_write for alias in returns)
        if is_view or "empty" in name:
            return
        read, written = tensors_of(args), tensors_of(result)
        if name in _OVERWRITES or name.startswith("new_"):
            read = read[1:]
        if name in ("mm", "addmm"):
            (m, k), n = read[-2].shape, read[-1].shape[1]
            flops = 2 * m * n * k
            text = f"m={m} n={n} k={k} {_dtype(read[-1])} out={_dtype(written[0])} (cuBLAS)"
        else:
            flops = sum(t.numel() for t in written) if name in ("add_", "sum") else 0
            text = " ".join([*map(_shape, written[:1] or read[:1]), "(PyTorch)"])
        launch_work = Work(sum(t.nbytes for t in read), sum(t.nbytes for t in written), flops)
        self.steps.append(Step(self.phase, f"torch.{name}", text, None, {}, launch_work, self.calls))


def _dtype(t: Tensor | Allocation) -> str:
    name = str(t.dtype).removeprefix("torch.")
    return SHORT.get(name, name)


def _shape(t: Tensor | Allocation) -> str:
    return f"{'x'.join(map(str, t.shape)) or 'scalar'} {_dtype(t)}"
