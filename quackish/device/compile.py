"""Finds compiled kernels: in memory, on disk, or by compiling."""

import contextlib
import dataclasses
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from quackish.device import cache, notice, objects


class Request(NamedTuple):
    """The arguments of `get`."""

    kernel_class: Any  # the kernel's class, or its KernelClass
    problem: Any
    config: Any
    target: str


@dataclasses.dataclass
class Counters:
    """Counts of this process and its compiling processes. Concurrent launches by two threads may count as one."""

    compiles: int = 0
    disk_loads: int = 0
    launches: int = 0


counters = Counters()
_ready: dict[Request, Callable[..., None]] = {}
Observer = Callable[[Callable[..., None], tuple, type, Any, Any], None]
_observer: Observer | None = None
lock = threading.Lock()  # held while compiling: the compiler is not thread-safe, and autograd has its own threads


def get(kernel_class: type, problem: Any, config: Any, target: str) -> Callable[..., None]:
    """The callable kernel for (problem, config) on GPU architecture `target` ("sm_90a").

    Its arguments are those of `fake_args()` except an environment stream, by position: torch tensors, ints (also for
    pointers and streams), floats and None. It checks them, and raises ValueError or TypeError naming the argument. The
    first call loads the cubin into the CUDA context, so a CUDA graph should not capture it.
    Raises RuntimeError with problem and config in the message if compilation fails.
    """
    request = Request(kernel_class, problem, config, target)
    kernel = _ready.get(request)
    if kernel is None:
        with lock:
            kernel = _ready.get(request)  # another thread may have compiled it meanwhile
            if kernel is None:
                function = objects.load(obtain(request, announce=True).data, f"{kernel_class.__name__}-{target}")
                kernel = _ready[request] = _counted(function, *request[:3])
    return kernel


class Obtained(NamedTuple):
    """The object of a kernel, and how it was obtained."""

    data: bytes
    status: str  # "loaded" (from disk), "compiled" (and stored) or "not stored" (compiled only)
    message: str = ""  # why it was not stored


def obtain(request: Request, announce: bool = False) -> Obtained:
    """Loads the object from disk, or compiles it. Call with `lock` held.

    announce: print a line to the user if compiling is slow.
    """
    identity = cache.identity(*request)
    if (data := cache.load(request.kernel_class, identity)) is not None:
        counters.disk_loads += 1
        return Obtained(data, "loaded")
    with notice.if_slow([request.kernel_class], request.target) if announce else contextlib.nullcontext():
        data = objects.export(compile_kernel(*request))
    counters.compiles += 1
    why = cache.store(request.kernel_class, identity, data)
    return Obtained(data, "not stored" if why else "compiled", why)


def is_available(request: Request) -> bool:
    """True if the kernel is in memory or on disk."""
    return request in _ready or cache.holds(request.kernel_class, cache.identity(*request))


def compile_kernel(kernel_class: type, problem: Any, config: Any, target: str, more_options: str = "") -> Any:
    """The result of `cute.compile`, which is not callable: see `objects`. Needs no GPU. Call with `lock` held."""
    import cutlass.cute as cute

    # Without an explicit target the compiler uses CUTE_DSL_ARCH, the first GPU, or sm_100a.
    options = f"{cache.OPTIONS} --gpu-arch {target} {more_options}"
    try:
        kernel = kernel_class(problem, config)
        # no_jit_engine: `objects` links the code anyway; linking it here too takes a small kernel from 50 to 126 ms.
        return cute.compile(kernel, *kernel.fake_args(), options=options, no_jit_engine=True)
    except Exception as error:
        raise RuntimeError(
            f"{kernel_class.__qualname__} does not compile for {target}: {type(error).__name__}: {error}\n"
            f"  problem: {problem}\n  config: {config}"
        ) from error


def _counted(function: Callable[..., None], kernel_class: type, problem: Any, config: Any) -> Callable[..., None]:
    """Wraps a kernel: counts its launches, and hands them to the observer if there is one."""

    def call(*args):  # adds 0.05 us
        observer = _observer
        if observer is None:
            function(*args)
        else:
            observer(function, args, kernel_class, problem, config)
        counters.launches += 1

    return call


def observe(observer: Observer | None) -> None:
    """Sets the observer of launches, replacing any other; None removes it.

    Each launch calls `observer(function, args, kernel_class, problem, config)` on its own thread. The observer must
    call `function(*args)`, which launches.
    """
    global _observer
    _observer = observer
