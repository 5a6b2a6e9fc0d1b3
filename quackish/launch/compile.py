"""Compiled kernels of this process: from memory, then disk, then the compiler."""

import contextlib
import contextvars
import dataclasses
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from quackish.launch import cache, objects

OPTIONS = "--enable-tvm-ffi --opt-level 3"


class Request(NamedTuple):
    """The arguments of `get`."""

    kernel_class: type
    problem: Any
    config: Any
    target: str


@dataclasses.dataclass
class Counters:
    """What this process, and those that compile for it, did so far. Of launches by two threads at the same instant, one
    may go uncounted."""

    compiles: int = 0
    disk_loads: int = 0
    launches: int = 0


counters = Counters()
_ready: dict[Request, Callable[..., None]] = {}
_observer: Callable[[Callable[..., None], tuple, type, Any, Any], None] | None = None
lock = threading.Lock()  # to be held while compiling: the compiler is not thread-safe, and autograd has its own threads


def get(kernel_class: type, problem: Any, config: Any, target: str) -> Callable[..., None]:
    """The kernel for `problem` as `config` says, for GPU architecture `target` ("sm_90a"), ready to be called.

    It is called with torch tensors, ints (for pointers and streams too), floats and None, by position, for all that
    `fake_args()` lists but an environment stream, and checks them itself: ValueError or TypeError naming the argument.
    Its first call loads the cubin into the CUDA context, so it should not be the one that a CUDA graph captures.
    Raises RuntimeError with problem and config in it where compilation fails.
    """
    request = Request(kernel_class, problem, config, target)
    recording = _recording.get()
    if recording is not None:
        return recording.kernel(request)
    kernel = _ready.get(request)
    if kernel is None:
        with lock:
            kernel = _ready.get(request)  # another thread may have been faster
            if kernel is None:
                kernel = _ready[request] = _counted(_load(request), *request[:3])
    return kernel


def _load(request: Request) -> Callable[..., None]:
    return objects.load(object_of(request), f"{request.kernel_class.__name__}-{request.target}")


class Obtained(NamedTuple):
    data: bytes
    status: str  # "loaded" (it was on disk), "compiled" (and stored) or "not stored" (compiled, but not stored)
    message: str = ""  # why it was not stored


def object_of(request: Request) -> bytes:
    """From disk, or else compiled; with `lock` held."""
    return obtain(request).data


def obtain(request: Request) -> Obtained:
    """`object_of`, and where it came from."""
    identity = identity_of(request)
    data = cache.load(request.kernel_class, identity)
    if data is not None:
        counters.disk_loads += 1
        return Obtained(data, "loaded")
    data = objects.export(compile_kernel(*request))
    counters.compiles += 1
    why = cache.store(request.kernel_class, identity, data)
    return Obtained(data, "not stored" if why else "compiled", why)


def identity_of(request: Request) -> dict[str, str]:
    return cache.identity(*request, OPTIONS)


def is_at_hand(request: Request) -> bool:
    """Whether it is in memory or on disk."""
    return request in _ready or cache.holds(request.kernel_class, identity_of(request))


def compile_kernel(kernel_class: type, problem: Any, config: Any, target: str, more_options: str = "") -> Any:
    """What `cute.compile` returns; needs no GPU, and `lock` held. Not callable: see `objects`."""
    import cutlass.cute as cute

    # The target is always given: without it the compiler asks CUTE_DSL_ARCH, then the first GPU, then takes sm_100a.
    options = f"{OPTIONS} --gpu-arch {target} {more_options}"
    try:
        kernel = kernel_class(problem, config)
        # The compiler would link the code into this process too where the GPU is a `target`, which takes longer than
        # all else it does for a small kernel (126 ms with, 50 without), and it is linked in `objects` anyway.
        return cute.compile(kernel, *kernel.fake_args(), options=options, no_jit_engine=True)
    except Exception as error:
        raise RuntimeError(
            f"{kernel_class.__qualname__} does not compile for {target}: {type(error).__name__}: {error}\n"
            f"  problem: {problem}\n  config: {config}"
        ) from error


def _counted(function: Callable[..., None], kernel_class: type, problem: Any, config: Any) -> Callable[..., None]:
    def call(*args):  # 0.05 us more than `function` itself
        observer = _observer
        if observer is None:
            function(*args)
        else:
            observer(function, args, kernel_class, problem, config)
        counters.launches += 1

    return call


def observe(observer: Callable[[Callable[..., None], tuple, type, Any, Any], None] | None) -> None:
    """From now on `observer(function, args, kernel_class, problem, config)` is called for each launch, on the launch's
    own thread, and has to call `function(*args)`, which launches; None ends that. There is one: the last one given."""
    global _observer
    _observer = observer


# Planning ------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Recording:
    """What code asked the launcher for, in order, while nothing was compiled, loaded or launched."""

    requests: dict[Request, None] = dataclasses.field(default_factory=dict)  # a set that keeps its order
    launches: list[tuple[Request, tuple]] = dataclasses.field(default_factory=list)  # with their arguments

    def kernel(self, request: Request) -> Callable[..., None]:
        self.requests[request] = None
        return lambda *args: self.launches.append((request, args))


_recording: contextvars.ContextVar[Recording | None] = contextvars.ContextVar("recording", default=None)


@contextlib.contextmanager
def record() -> Iterator[Recording]:
    """On this thread `get` returns functions that note their calls, and does nothing else.

    Whoever keeps what `get` returned must forget it at the end.
    """
    recording = Recording()
    token = _recording.set(recording)
    try:
        yield recording
    finally:
        _recording.reset(token)
