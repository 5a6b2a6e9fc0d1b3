"""Finds the installed compiler and its runtime library.

It only looks at files: importing the compiler takes 0.3 s, and kernels on disk do not need it.
"""

import ctypes
import functools
import importlib
import importlib.metadata
import importlib.util
import os
import platform
from pathlib import Path
from typing import NamedTuple

from quackish._version import __version__
from quackish.errors import UnsupportedError

# Versions that quackish runs with: at least, and less than.
SUPPORTED = {
    "torch": ("2.9", None),
    "nvidia-cutlass-dsl": ("4.8.0", "4.9"),
    "apache-tvm-ffi": ("0.1.15", "0.2"),
}
# Versions that pyproject.toml asks for. PyTorch 2.15 turns its own CuTe kernels off with newer compilers than 4.8.0.
REQUIRED = SUPPORTED | {"nvidia-cutlass-dsl": ("4.8.0", "4.8.1")}
_RUNTIME = "libcute_dsl_runtime.so"


class Toolchain(NamedTuple):
    """The installed compiler, as kernels depend on it."""

    dsl: str  # version of nvidia-cutlass-dsl
    ffi: str  # version of apache-tvm-ffi
    flavour: str  # such as "cu13": the CUDA major version that the compiler is built for
    cpu: str  # such as "x86_64": host code runs on every CPU of this architecture
    runtime: Path  # the library that compiled host code calls


@functools.cache
def find() -> Toolchain:
    """Finds the toolchain. Raises UnsupportedError if a part is missing or the driver is too old."""
    compiler, ffi = _folder("nvidia-cutlass-dsl", "cutlass"), _folder("apache-tvm-ffi", "tvm_ffi")
    root = next((parent for parent in compiler.parents if parent.name == "nvidia_cutlass_dsl"), compiler)
    libraries = compiler.glob("_mlir/_mlir_libs/_cutlass_ir.cu*.so")  # one per CUDA major version
    installed = sorted(int(path.name.split(".")[1].removeprefix("cu")) for path in libraries)
    flavour = choose_flavour(installed, driver_cuda())
    runtimes = os.environ.get("CUTE_DSL_LIBS", "").split(os.pathsep)  # the compiler's own variable
    return Toolchain(
        dsl=_version("nvidia-cutlass-dsl", root.parent, "cutlass"),
        ffi=_version("apache-tvm-ffi", ffi.parent, "tvm_ffi"),
        flavour=f"cu{flavour}",
        cpu=platform.machine(),
        runtime=Path(next((p for p in runtimes if p.endswith(_RUNTIME)), root / f"cu{flavour}" / "lib" / _RUNTIME)),
    )


def versions() -> dict[str, str] | None:
    """Versions of quackish, the DSL and the CUDA it compiles for; None without a working compiler."""
    try:
        tools = find()
    except UnsupportedError:
        return None
    return {"quackish": __version__, "nvidia-cutlass-dsl": tools.dsl, "cuda": tools.flavour}


def choose_flavour(installed: list[int], driver: tuple[int, int] | None) -> int:
    """The newest CUDA that the driver supports; without a driver, the newest that is installed.

    The compiler's import chooses the same.
    """
    supported = [major for major in installed if driver is None or major <= driver[0]]
    if not supported:
        names = ", ".join(f"cu{major}" for major in installed) or "none"
        cuda = (
            "" if driver is None else f" This driver has CUDA {driver[0]}.{driver[1]}; the oldest supported is CUDA 12."
        )
        raise UnsupportedError(
            f"nvidia-cutlass-dsl: no compiler for this driver (installed: {names}).{cuda} "
            f"{install('nvidia-cutlass-dsl')} installs the one for CUDA 12 drivers and newer."
        )
    return max(supported)


@functools.cache
def driver_cuda() -> tuple[int, int] | None:
    """The CUDA version that the driver supports, such as (13, 0); None without a driver. Does not initialize CUDA."""
    version = ctypes.c_int(0)
    try:
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)) != 0:
            return None
    except (OSError, AttributeError):
        return None
    return version.value // 1000, version.value % 1000 // 10


def install(distribution: str) -> str:
    """The command that installs the version of pyproject.toml."""
    minimum, below = REQUIRED[distribution]
    return f"`pip install '{distribution}>={minimum}" + f",<{below}" * bool(below) + "'`"


def _folder(distribution: str, module: str) -> Path:
    """The folder of a module, which is not imported. Raises UnsupportedError if it is not installed."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise UnsupportedError(
            f"{distribution}, which the kernels need, is not installed (no module named {module!r}). "
            f"{install(distribution)} installs it."
        )
    return Path(spec.origin).parent


def _version(distribution: str, site: Path, module: str) -> str:
    """The version installed in the folder `site`, ignoring other folders of sys.path. Works without metadata too."""
    metadata = next(iter(importlib.metadata.distributions(name=distribution, path=[str(site)])), None)
    return importlib.import_module(module).__version__ if metadata is None else metadata.version
