"""Runs host code compiled by CuTe DSL on a CPU: a kernel launch becomes a call of a Python function.

Host code checks arguments, encodes tensor maps and launches. It is ordinary machine code that calls about ten functions
of CUDA, and `shim.c` stands in for those.
"""

import ctypes
import functools
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from quackish.emulator.errors import Fault, ToolMissing
from quackish.emulator.gpu import capability

_SYMBOL = "kernel"
_SHIM = Path(__file__).with_name("shim.c")
_LAUNCH_FAILED = 719  # cudaErrorLaunchFailure: what host code sees if a handler raises

_NOT_SUPPORTED = 801  # cudaErrorNotSupported

# cudaLaunchAttributeID
_COOPERATIVE = 2
_CLUSTER_DIMENSION = 4
_PROGRAMMATIC_STREAM_SERIALIZATION = 6
_WITHOUT_EFFECT_HERE = {
    0,  # ignore
    5,  # cluster scheduling policy
    7,  # programmatic event: events are those of the host, behind the launch
    8,  # priority
    11,  # preferred cluster dimension: a GPU may use it, or the cluster dimension
    12,  # launch completion event
    14,  # preferred shared memory carveout
}


class Launch(NamedTuple):
    """What a kernel is launched with. Its parameters are in memory until the handler returns."""

    kernel: str  # the entry's name in the PTX
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    shared_bytes: int  # dynamic shared memory
    cooperative: bool  # all CTAs are resident together, or the launch fails
    programmatic: bool  # may start before the launch in front of it ends: programmatic dependent launch
    parameter_addresses: int  # the address of an array with the address of each parameter

    def parameters(self, layout: Iterable[tuple[int, int]]) -> bytes:
        """Copies the parameters into the bytes of the parameter space. layout: (offset, size) of each."""
        layout = list(layout)
        space = bytearray(max((offset + size for offset, size in layout), default=0))
        addresses = (ctypes.c_void_p * len(layout)).from_address(self.parameter_addresses) if layout else ()
        for (offset, size), address in zip(layout, addresses, strict=True):
            space[offset : offset + size] = ctypes.string_at(address, size)
        return bytes(space)


class Exported(NamedTuple):
    """A compiled function as data that can be stored."""

    object: bytes  # an object file with the host code
    ptx: str


class HostCode:
    """A compiled function that hands its launches to Python. Threads may call it at the same time."""

    def __init__(self, function: Callable[..., Any], library: ctypes.CDLL, callbacks: Any):
        self.entry = self.function = function  # `entry` may be another function, which calls `function`
        self._keep_alive = library, callbacks

    def call(self, handler: Callable[[Launch], None], *args: Any, **kwargs: Any) -> None:
        """Runs the host code with these arguments; each launch calls `handler` on this thread.

        What the handler raises ends the host code and reaches the caller.
        """
        call = _Call(handler)
        _running.calls.append(call)
        try:
            self.entry(*args, **kwargs)
        except Exception:
            if call.error is None:
                raise
        finally:
            _running.calls.pop()
        if call.error is not None:
            raise call.error


def export(compiled: Any) -> Exported:
    """Turns a result of `cute.compile` with --enable-tvm-ffi and --keep-ptx into data for `load`."""
    ptx = getattr(compiled, "__ptx__", None)
    if not ptx:
        raise ValueError(
            "the compiled function has no PTX; compile with the options '--keep-ptx --generate-line-info "
            "--dump-dir FOLDER', where FOLDER exists"
        )
    with tempfile.TemporaryDirectory(prefix="emulator-") as folder:
        path = Path(folder, "kernel.o")
        try:
            compiled.export_to_c(str(path), function_name=_SYMBOL, export_only_tvm_ffi_symbols=True)
        except TypeError as error:  # only functions for TVM-FFI have this parameter
            raise ValueError(
                "the compiled function is not callable by TVM-FFI; compile with --enable-tvm-ffi"
            ) from error
        return Exported(path.read_bytes(), ptx)


def load(exported: Exported, gpu: Any) -> HostCode:
    """Links host code with the shim and loads it. Raises ToolMissing without a compiler or linker."""
    import tvm_ffi  # which loads its own library

    with tempfile.TemporaryDirectory(prefix="emulator-") as folder:
        parts = {"kernel.o": exported.object, "shim.o": _shim()}
        for name, content in parts.items():
            Path(folder, name).write_bytes(content)
        # -Bsymbolic: the shim answers even where the process has loaded the real functions.
        _run("ld", "-shared", "-Bsymbolic", "-o", "kernel.so", *parts, tvm_ffi.libinfo.find_libtvm_ffi(), folder=folder)
        path = Path(folder, "kernel.so")
        try:
            library = ctypes.CDLL(str(path))
        except OSError as error:  # the message ends with "undefined symbol: NAME"
            raise NotImplementedError(f"the host code calls a function that the emulator lacks: {error}") from error
        function = getattr(tvm_ffi.load_module(str(path)), _SYMBOL)
    on_launch, on_error = _ON_LAUNCH(_handle), _ON_ERROR(_fail)
    attributes = device_attributes(gpu)
    table = (ctypes.c_int * (2 * len(attributes)))(*(number for pair in attributes.items() for number in pair))
    if library.emulator_connect(on_launch, on_error, table, len(attributes)) != 0:
        raise AssertionError(f"the shim has no room for {len(attributes)} device attributes")
    return HostCode(function, library, (on_launch, on_error))


class _Call:
    """A call of host code: who handles its launches, and what the handler raised."""

    def __init__(self, handler: Callable[[Launch], None]):
        self.handler = handler
        self.error: BaseException | None = None


class _Running(threading.local):
    """The calls of host code on each thread, innermost last."""

    def __init__(self):
        self.calls: list[_Call] = []


# A launch reaches Python on the thread of its call, and belongs to the innermost call on that thread.
_running = _Running()


class _Config(ctypes.Structure):  # cudaLaunchConfig_t
    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("dynamic_shared_bytes", ctypes.c_size_t),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("num_attributes", ctypes.c_uint),
    ]


class _Attribute(ctypes.Structure):  # cudaLaunchAttribute: its value is a union of 64 bytes
    _fields_ = [("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_uint * 16)]


_ON_ERROR = ctypes.CFUNCTYPE(None, ctypes.c_int)
_ON_LAUNCH = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(_Config), ctypes.c_char_p, ctypes.c_void_p)


def _handle(config: Any, kernel: bytes, parameter_addresses: int) -> int:
    """Called by the shim for each launch. It must not raise through C: the error is kept in the call."""
    call = _running.calls[-1]
    try:
        call.handler(_launch(config.contents, kernel, parameter_addresses))
    except BaseException as error:
        call.error = error
        return _LAUNCH_FAILED
    return 0


def _fail(error: int) -> None:
    """Called by the shim where host code asserts that a call of CUDA succeeds."""
    call = _running.calls[-1]
    if call.error is None:
        what = "that the emulator lacks" if error == _NOT_SUPPORTED else "with an invalid argument"
        call.error = Fault("host-call", f"the host code calls a function of CUDA {what}: error {error}")


def _launch(config: _Config, kernel: bytes, parameter_addresses: int) -> Launch:
    """Reads a cudaLaunchConfig_t. Raises NotImplementedError for a launch attribute that is unknown."""
    cluster, cooperative, programmatic = (1, 1, 1), False, False
    for i in range(config.num_attributes):
        attribute = _Attribute.from_address(config.attributes + i * ctypes.sizeof(_Attribute))
        if attribute.id == _CLUSTER_DIMENSION:
            cluster = tuple(attribute.value[:3])
        elif attribute.id == _COOPERATIVE:
            cooperative = bool(attribute.value[0])
        elif attribute.id == _PROGRAMMATIC_STREAM_SERIALIZATION:
            programmatic = bool(attribute.value[0])
        elif attribute.id not in _WITHOUT_EFFECT_HERE and any(attribute.value):
            raise NotImplementedError(f"the launch of {kernel.decode()} has attribute {attribute.id}, which is unknown")
    return Launch(
        kernel=kernel.decode(),
        grid=tuple(config.grid),
        block=tuple(config.block),
        cluster=cluster,
        shared_bytes=config.dynamic_shared_bytes,
        cooperative=cooperative,
        programmatic=programmatic,
        parameter_addresses=parameter_addresses,
    )


def device_attributes(gpu: Any) -> dict[int, int]:
    """What the shim answers to host code: {number of a cudaDeviceAttr: value}."""
    major, minor = capability(gpu)
    return {
        5: 2**31 - 1,  # cudaDevAttrMaxGridDimX
        10: 32,  # cudaDevAttrWarpSize
        16: gpu.sm_count,  # cudaDevAttrMultiProcessorCount
        39: gpu.threads_per_sm,  # cudaDevAttrMaxThreadsPerMultiProcessor
        75: major,  # cudaDevAttrComputeCapabilityMajor
        76: minor,  # cudaDevAttrComputeCapabilityMinor
        81: gpu.smem_bytes_per_sm,  # cudaDevAttrMaxSharedMemoryPerMultiprocessor
        82: gpu.registers_per_sm,  # cudaDevAttrMaxRegistersPerMultiprocessor
        95: 1,  # cudaDevAttrCooperativeLaunch
        97: gpu.smem_bytes,  # cudaDevAttrMaxSharedMemoryPerBlockOptin
    }


@functools.cache
def _shim() -> bytes:
    """The shim as an object file. Compiling it takes 50 ms, once per process."""
    with tempfile.TemporaryDirectory(prefix="emulator-") as folder:
        compile_c(str(_SHIM), f"{folder}/shim.o", "-c")
        return Path(folder, "shim.o").read_bytes()


def compile_c(source: str, to: str, *options: str) -> None:
    """Compiles a file of this folder. Raises ToolMissing without a compiler."""
    _run("cc", *options, "-O1", "-fPIC", "-o", to, source, folder=str(_SHIM.parent))


def _run(program: str, *args: Any, folder: str) -> None:
    """Runs a program in `folder`. Raises ToolMissing if it is not in PATH, RuntimeError if it fails."""
    path = shutil.which(program)
    if path is None:
        raise ToolMissing(
            f"The emulator needs a C compiler (cc) and a linker (ld), and finds no {program!r} in PATH. "
            "`apt-get install gcc binutils` or `dnf install gcc binutils` installs both."
        )
    done = subprocess.run([path, *map(str, args)], cwd=folder, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{program} failed with status {done.returncode}:\n{done.stderr.strip()}")
