"""How operations reach a device that runs kernels: its properties, memory, current stream, workspace and kernels.

`device_of` maps a tensor's device to its KernelDevice, or to the reason why it has none. A KernelSpec says which GPU
families its kernel supports. Inside `substitute`, tensors use the given KernelDevice instead: so dry runs and tests run
the operations' own code on tensors of a CPU, or of no device at all.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from quackish.device import choose, cuda, launch, toolchain, workspace
from quackish.device.kernel_for import CompiledKernel, KernelFor, kernel_for
from quackish.device.modes import is_compiling, traced_as_constant
from quackish.device.spec import EMULATED_ONLY, KernelSpec
from quackish.errors import UnsupportedError, check_bool, warn_once
from quackish.gpu import FAMILIES, Gpu, gpu_of
from quackish.once import once

# (shape, strides, dtype) -> uninitialized memory; shape and strides are tuples, not torch.Size
Empty = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]


def empty_on(device: torch.device | str) -> Empty:
    """`KernelDevice.empty` of a substitute whose memory is on `device`, such as "meta" for a dry run."""

    def empty(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty_strided(shape, strides, dtype=dtype, device=device)

    return empty


_cpu_memory = empty_on("cpu")


def _new_workspace(stream: int, floats: int, num_tickets: int = workspace.NUM_TICKETS) -> tuple[int, int, Tensor]:
    """`KernelDevice.workspace` of substitutes: each call gets memory of its own."""
    memory = torch.zeros(workspace.MAX_TICKETS + floats, dtype=torch.int32, device="cpu")
    return memory.data_ptr(), memory.data_ptr() + 4 * workspace.MAX_TICKETS, memory


@dataclasses.dataclass(frozen=True, eq=False)
class KernelDevice:
    """Functions that operations copy into their plans, which saves looking them up in each call.

    The defaults are for substitutes: tensors and workspace are in the CPU's memory, and stream 0 is the current one.
    """

    gpu: Gpu
    kernel_for: KernelFor  # (problem, gpu) -> its config and launch; UnsupportedError if there is none
    empty: Empty = _cpu_memory
    stream: Callable[[], int] = int  # the handle of its current stream
    # (stream, number of fp32, number of tickets) -> addresses of tickets and of scratch, an object to keep until the
    # launch; see workspace.take
    workspace: Callable[..., tuple[int, int, object]] = _new_workspace
    # Memory comes from the current device, and launches go there: if current() is not `index`, enter make_current().
    index: int | None = None
    current: Callable[[], int | None] = lambda: None
    make_current: Callable[[], AbstractContextManager] = contextlib.nullcontext
    # Compiles kernels in parallel before they are needed; without it, they are compiled one by one when needed.
    prepare: Callable[[list[launch.Request]], None] | None = None
    cache: dict[Any, Any] = dataclasses.field(default_factory=dict, repr=False)  # what operations keep per KernelDevice
    # With backend="auto", a call that no kernel covers raises instead of running the portable path, and torch.compile
    # is refused: whatever succeeds has run kernels.
    must_cover: bool = False

    def vector(self, n: int, dtype: torch.dtype) -> Tensor:
        """Uninitialized memory."""
        return self.empty((n,), (1,), dtype)

    def matrix(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """Uninitialized and contiguous memory."""
        return self.empty((rows, columns), (columns, 1), dtype)


_devices: dict[torch.device, KernelDevice | str] = {}


def _create(device: torch.device) -> KernelDevice | str:
    """The KernelDevice of a device, or a sentence on why it has none."""
    if device.type != "cuda" or torch.version.hip:  # ROCm's devices are "cuda" too
        return f"no kernel for {'AMD GPUs' if device.type == 'cuda' else f'{device.type} tensors'}."
    gpu = gpu_of(device.index)
    if gpu.family in FAMILIES:  # otherwise a compiler would not help
        try:
            toolchain.find()
        except UnsupportedError as error:
            return str(error)
    return KernelDevice(
        gpu,
        _emulated_only_kernel_for if gpu.family in EMULATED_ONLY else kernel_for,
        cuda.empty,
        functools.partial(cuda.stream_of, device.index),
        functools.partial(workspace.take, device.index),
        device.index,
        cuda.current_device,
        functools.partial(torch.cuda.device, device.index),
        launch.prepare,
    )


def _emulated_only_kernel_for(problem: Any, gpu: Gpu) -> CompiledKernel:
    """`kernel_for`, with one warning per process."""
    kernel = kernel_for(problem, gpu)
    warn_once(
        f"quackish's kernels for {gpu.family} ({gpu.name}) have run in an emulator but on no such GPU: they might hang "
        "or give wrong results. `quackish doctor --check` tests them on this GPU; quackish.use_kernels(False) turns "
        "them off.",
        RuntimeWarning,
    )
    return kernel


def device_of(device: torch.device) -> KernelDevice | str:
    """The KernelDevice of tensors on `device`; a sentence if no kernel runs there. The same object until it changes."""
    found = _find(device)
    return found if _uses_kernels or _is_substitute(found) or isinstance(found, str) else _TURNED_OFF


def _find(device: torch.device) -> KernelDevice | str:
    """`device_of` without the switch."""
    for where, substitute in _substitutes:
        if where == device or (where.index is None and where.type == device.type):
            return substitute
    return _devices.get(device) or once(_devices, device, _create, device)


def _is_substitute(found: KernelDevice | str | None) -> bool:
    return isinstance(found, KernelDevice) and found.index is None


def why_unsupported(op: str, spec: KernelSpec | None, device: torch.device) -> str:
    """Why tensors on `device` have no kernel of `spec`, for users of operation `op`; "" if they have it."""
    if spec is None:
        return f'{op}: no kernel for any GPU. backend="auto" runs the portable path.'
    found = device_of(device)
    if isinstance(found, str):
        return f'{op}: {found} backend="auto" runs the portable path.'
    why = found.cache.get((op, spec))
    if why is None:
        try:
            spec.variant(found.gpu)
            why = ""
        except UnsupportedError as error:
            why = str(error).replace(spec.operation, op, 1)
        found.cache[op, spec] = why
    return why


def require_device(op: str, device: torch.device) -> KernelDevice:
    """The KernelDevice of tensors for which kernels were chosen, even if they were turned off since then.

    Raises RuntimeError if they have none any more.
    """
    found = _find(device)
    if isinstance(found, str):
        raise RuntimeError(
            f"{op}: {found} Its kernels were chosen inside a `with quackish.emulate(...)` block; expected to run "
            "inside it too"
        )
    return found


@traced_as_constant
def expects_kernels(device: torch.device) -> bool:
    """True on GPUs and substitutes, where the portable path gives a warning.

    Other devices never have a kernel, and `use_kernels(False)` asked for the portable path.
    """
    return (device.type == "cuda" and _uses_kernels) or isinstance(device_of(device), KernelDevice)


def is_gpu_without_kernels(device: torch.device) -> bool:
    """True for a GPU that no kernel runs on, whatever `use_kernels` says."""
    found = _find(device)
    return device.type == "cuda" and (isinstance(found, str) or found.gpu.family not in FAMILIES)


@traced_as_constant
def requires_kernels(device: torch.device, backend: str) -> bool:
    """True if a call that no kernel covers raises instead of running the portable path."""
    found = device_of(device)
    return backend == "cute" or (backend == "auto" and isinstance(found, KernelDevice) and found.must_cover)


@traced_as_constant
def _refuse_compile(op: str, device: torch.device) -> None:
    """Raises UnsupportedError on a device that `must_cover`."""
    found = device_of(device)
    if isinstance(found, KernelDevice) and found.must_cover:
        raise UnsupportedError(
            f"{op}: torch.compile is not supported where every call must run kernels, because compiled code may "
            'outlive the block; expected an eager call, as with torch.compiler.set_stance("force_eager")'
        )


def refuse_compile_in_substitutes(op: str, device: torch.device) -> None:
    """Raises UnsupportedError while torch.compile traces a call on a device that `must_cover`.

    `_substitutes` is also a guard of the compiled code: another block of `substitute` traces it again.
    """
    if _substitutes:
        _refuse_compile(op, device)


def refuse_portable(why: str, device: torch.device, backend: str) -> None:
    """Raises UnsupportedError if this call must run kernels. why: a sentence on why none covers it."""
    if not requires_kernels(device, backend):
        return
    if backend != "cute":
        why = why.removesuffix(' backend="auto" runs the portable path.').removesuffix(".")
        why += '; here every call must run kernels, unless it has backend="reference"'
    raise UnsupportedError(why)


def report_portable(why: str, device: torch.device, backend: str) -> None:
    """`refuse_portable`, then one warning per reason on GPUs and substitutes. torch.compile cannot trace it."""
    refuse_portable(why, device, backend)
    if expects_kernels(device):
        warn_once(why)


def is_current(device: torch.device) -> bool:
    """True if memory comes from `device` and launches go there, or if it has no kernels."""
    found = device_of(device)
    return isinstance(found, str) or found.current() == found.index


def as_current(device: torch.device) -> AbstractContextManager:
    """Makes `device` the current one, unless it is or has no kernels."""
    found = device_of(device)
    if isinstance(found, str) or found.current() == found.index:
        return contextlib.nullcontext()
    return found.make_current()


def forward_device(device: torch.device) -> KernelDevice | str | None:
    """What `check_same_device` takes in backward: `device_of`, which torch.compile cannot trace."""
    return None if is_compiling() else device_of(device)


def check_same_device(op: str, forward: KernelDevice | str | None, device: torch.device) -> None:
    """Raises RuntimeError unless forward and backward run in the same block of `substitute`, or in none.

    Compiled code has no such check: torch.compile is refused in such blocks (`refuse_compile_in_substitutes`).
    """
    if is_compiling():
        return
    found = _find(device)
    if found is not forward and (_is_substitute(found) or _is_substitute(forward)):
        raise RuntimeError(
            f"{op}: {device} tensors had another device of kernels in forward; expected backward inside the same "
            "`with quackish.emulate(...)` block as its forward"
        )


# Substitutes ----------------------------------------------------------------------------------------------------------

_substitutes: tuple[tuple[torch.device, KernelDevice], ...] = ()  # one per block, innermost first


@contextlib.contextmanager
def substitute(where: torch.device | str, device: KernelDevice) -> Iterator[None]:
    """Inside the block, calls on tensors of device `where`, such as "cpu" or "meta", use `device`.

    A type without an index stands for all its devices. Applies to the whole process, as `quackish.config`, and changes
    the same epoch: no plan or kernel leaks into the block or out of it. Backward must run inside the same block. It
    raises outside, except in a checkpoint with use_reentrant=True, which runs its forward again where backward runs.
    """
    global _substitutes
    entry = torch.device(where), device
    with choose.changing():
        _substitutes = entry, *_substitutes
    try:
        yield
    finally:
        with choose.changing():
            _substitutes = tuple(other for other in _substitutes if other is not entry)


# The switch -----------------------------------------------------------------------------------------------------------

_uses_kernels = True
_TURNED_OFF = "quackish.use_kernels(False) turned kernels off."


def use_kernels(enabled: bool) -> None:
    """Turns kernels off or on for the whole process, to find out whether a kernel is to blame for something.

    With False, `backend="auto"` is the portable path on every GPU, without a warning, also in patched models and
    trainers; `backend="cute"` raises UnsupportedError. Other bits result, so call it on every rank, before the first
    forward pass. A backward pass whose forward ran kernels may still run them. Code that torch.compile has traced keeps
    what it was traced with, and a `with quackish.emulate(...)` block works as before. It costs nothing per call.
    """
    global _uses_kernels
    check_bool("use_kernels", enabled=enabled)
    with choose.changing():
        _uses_kernels = enabled
