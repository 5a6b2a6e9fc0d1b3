"""Runs the operations' kernels on CPU tensors, by executing their PTX in `quackish.emulator`."""

import contextlib
import contextvars
import ctypes
import functools
import tempfile
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch

from quackish.device import cache, notice, objects
from quackish.device.compile import Request, compile_kernel, lock
from quackish.device.kernel_device import KernelDevice, empty_on, substitute
from quackish.device.kernel_for import CompiledKernel, request_for
from quackish.device.workspace import MAX_TICKETS
from quackish.errors import UnsupportedError, describe, did_you_mean
from quackish.gpu import NAMED, Gpu
from quackish.once import once

if TYPE_CHECKING:
    from quackish import emulator

_OPTIONS = "--keep-ptx --generate-line-info"
_Completion = Literal["at_once", "late"]
_POISON = 0xFF  # in all bytes of new memory: NaN as a floating-point number


@contextlib.contextmanager
def emulate(gpu: str | Gpu = "h200", completion: _Completion = "late", seed: int = 0) -> Iterator["emulator.Report"]:
    """Inside the block, calls on CPU tensors run the kernels of `gpu` in an emulator of its instructions.

        with quackish.emulate(gpu="b200") as report:
            y = quackish.rms_norm(x, weight)
            y.sum().backward()
        print(report.launches)

    gpu: a name such as "h100", "h200", "b200" or "b300", or any `quackish.gpu.Gpu`, perhaps with another `sm_count`
    completion: asynchronous copies and matrix instructions complete "late", when a wait needs them, or "at_once"
    seed: chooses the order in which warps and CTAs take turns. The same arguments repeat a run exactly.

    The report lists the launches with their counts: matrix instructions, bytes requested from and of global memory,
    barrier phases, shared and tensor memory, instructions.

    With backend="auto", a call that no kernel covers raises UnsupportedError, so whatever succeeds has run kernels.
    torch.compile, CUDA graphs and CUDA streams raise UnsupportedError too. Backward must run inside the block of its
    forward; otherwise it raises RuntimeError. A kernel that accesses memory outside of tensors, deadlocks, or breaks a
    rule of the hardware raises `quackish.emulator.Fault`. Launches run one after another. New memory is full of NaN.

    The block applies to the CPU tensors of the whole process. The emulator is slow: use shapes of some hundred rows and
    columns. It needs numpy (`pip install 'quackish[emulator]'`), a C compiler and a linker.
    Raises ValueError for an unknown GPU or completion.
    """
    emulator = _import_emulator()
    how = f"with quackish.emulate(gpu={gpu!r}, completion={completion!r}, seed={seed!r})"
    if isinstance(gpu, str):
        if gpu.lower() not in NAMED:
            raise ValueError(
                f"quackish.emulate: gpu is {gpu!r}; expected a Gpu or one of {', '.join(NAMED)}"
                f"{did_you_mean(gpu, NAMED)}"
            )
        gpu = NAMED[gpu.lower()]
    if not isinstance(gpu, Gpu):
        raise TypeError(
            f"quackish.emulate: gpu is {describe(gpu)}; expected a quackish.gpu.Gpu or one of {', '.join(NAMED)}"
        )
    if completion not in get_args(_Completion):
        known = " or ".join(map(repr, get_args(_Completion)))
        raise ValueError(f"quackish.emulate: completion is {completion!r}; expected {known}")
    with emulator.record(completion, seed, how) as report:
        workspace = Workspace()
        kernel_for = functools.partial(_kernel_for, contextvars.copy_context(), workspace)
        device = KernelDevice(gpu, kernel_for, _empty, _stream, workspace.take, must_cover=True)
        with substitute("cpu", device):
            yield report


def _import_emulator() -> Any:
    try:
        from quackish import emulator
    except ImportError as error:
        raise ImportError(
            f"quackish.emulate needs numpy: {error}. `pip install 'quackish[emulator]'` installs it."
        ) from error
    return emulator


# The KernelDevice ----------------------------------------------------------------------------------------------------


def _kernel_for(context: contextvars.Context, workspace: "Workspace", problem: Any, gpu: Gpu) -> CompiledKernel:
    """context: has the settings of `emulator.record`, which apply to launches of every thread"""
    request = request_for(problem, gpu)
    launch = workspace.checked(load(request, gpu, problem.spec.name), problem.spec.name)
    return CompiledKernel(lambda *args: context.copy().run(launch, *args), request.config)


def _empty(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return _poison(_uninitialized(shape, strides, dtype))


def _poison(memory: torch.Tensor) -> torch.Tensor:
    """Fills a tensor's memory with `_POISON`. Returns the tensor."""
    ctypes.memset(memory.data_ptr(), _POISON, memory.untyped_storage().nbytes())
    return memory


_uninitialized = empty_on("cpu")


class Workspace:
    """The workspace of the only stream: its launches share tickets and scratch, which is full of NaN for each of them.

    Scratch of another size is other memory, so that an access beyond its end is a fault.
    """

    def __init__(self):
        self._tickets = torch.zeros(MAX_TICKETS, dtype=torch.int32, device="cpu")
        self._scratch: dict[int, torch.Tensor] = {}  # by size
        self._lock = threading.RLock()  # launches on one stream run in order

    def take(self, stream: int, floats: int, num_tickets: int = 0) -> tuple[int, int, torch.Tensor]:
        if floats not in self._scratch:
            self._scratch[floats] = _uninitialized((floats,), (1,), torch.float32)
        scratch = _poison(self._scratch[floats])
        return self._tickets.data_ptr(), scratch.data_ptr(), scratch

    def checked(self, launch: Callable[..., None], name: str) -> Callable[..., None]:
        """The launch of a kernel, behind which tickets must be zero, as the next launch expects them."""

        def run(*args: Any) -> None:
            with self._lock:
                launch(*args)
                if self._tickets.any():
                    where = int(self._tickets.nonzero()[0])
                    raise _import_emulator().Fault(
                        "launch-state",
                        f"{name} leaves {int(self._tickets[where])} in ticket {where} of the workspace; expected 0, as "
                        "it was before the launch",
                        advice="the last CTA to use a ticket must reset it",
                    )

        return run


def _stream() -> int:
    """The only stream. A launch would be missing from a CUDA graph, and would not wait for another stream."""
    if torch.cuda.is_initialized():
        if torch.cuda.is_current_stream_capturing():
            raise UnsupportedError(
                "quackish.emulate: CUDA graphs are not supported; expected a call outside of capture"
            )
        if torch.cuda.current_stream() != torch.cuda.default_stream():
            raise UnsupportedError("quackish.emulate: CUDA streams are not supported; expected the default stream")
    return 0


# Compiled kernels ----------------------------------------------------------------------------------------------------

_loaded: dict[tuple[Request, Gpu, str], Callable[..., None]] = {}


def load(request: Request, gpu: Gpu, name: str) -> Callable[..., None]:
    """The kernel as a function that runs on the CPU; from memory, from the cache of kernels, or compiled.

    name: of the kernel, in reports
    """
    return once(_loaded, (request, gpu, name), _load, request, gpu, name)


def _load(request: Request, gpu: Gpu, name: str) -> Callable[..., None]:
    emulator = _import_emulator()
    with lock:
        return emulator.Kernel(_obtain(request), gpu, name)


def _obtain(request: Request) -> "emulator.Exported":
    """PTX and host code. They are in the folder of compiled kernels, under an identity with one more field."""
    emulator = _import_emulator()
    identity = {**cache.identity(*request), "emulator": _OPTIONS}
    data = cache.load(request.kernel_class, identity)
    if data is None:
        announced = notice.if_slow([request.kernel_class], request.target)
        with announced, tempfile.TemporaryDirectory(prefix="quackish-") as folder:
            compiled = compile_kernel(*request, more_options=f"{_OPTIONS} --dump-dir {folder}")
        objects.for_any_cpu(compiled.ir_module)
        exported = emulator.export(compiled)
        data = exported.ptx.encode() + b"\0" + exported.object
        cache.store(request.kernel_class, identity, data)
    ptx, _, host_code = data.partition(b"\0")
    return emulator.Exported(host_code, ptx.decode())
