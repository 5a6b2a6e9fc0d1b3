"""Converts compiled kernels to bytes, and bytes to functions called with torch tensors.

The bytes are a shared library with the cubin and the host code that checks arguments and launches, for any CPU of this
architecture. Loading takes 0.3 ms, plus 6 ms once per process for the compiler's runtime library; it does not import
the compiler, which takes 0.3 s. Without a linker the bytes are the compiler's object file, and loading them imports the
compiler for its linker.
"""

import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quackish.device import toolchain

_SYMBOL = "kernel"
_SHARED = 3  # ELF's e_type of a shared library
_LINKERS = ("ld", "ld.lld", "mold")

# LLVM's target for host code. Its default is this machine's CPU, with AVX-512: SIGILL on older CPUs.
_BASELINE = {"x86_64": ("x86-64", "+sse2"), "aarch64": ("generic", "+neon")}


def export(compiled: Any) -> bytes:
    """Converts the result of `cute.compile` to bytes."""
    for_any_cpu(compiled.ir_module)
    with tempfile.TemporaryDirectory(prefix="quackish-") as folder:
        path = Path(folder, "kernel.o")
        compiled.export_to_c(str(path), function_name=_SYMBOL, export_only_tvm_ffi_symbols=True)
        return _linked(path).read_bytes()


def load(data: bytes, name: str) -> Callable[..., None]:
    """The function in `data`; `name` is for debuggers and /proc/self/maps.

    Freshly compiled kernels are loaded from bytes too, so that there is one calling convention: the compiler's own
    functions also take keywords and defaults.
    """
    if int.from_bytes(data[16:18], "little") == _SHARED:
        return _load_shared(data, name)
    import cutlass.cute as cute

    # Only this user can enter the folder, so nobody can swap the verified bytes.
    with tempfile.TemporaryDirectory(prefix="quackish-") as folder:
        path = Path(folder, "kernel.o")
        path.write_bytes(data)
        return getattr(cute.runtime.load_module(str(path), enable_tvm_ffi=True), _SYMBOL)


def linker() -> str | None:
    """The path of a linker; None if PATH has none."""
    return next(filter(None, map(shutil.which, _LINKERS)), None)


def for_any_cpu(module: Any) -> None:
    """Sets the target of all host functions to this architecture's baseline. The cubin is unaffected."""
    from cutlass._mlir import ir

    cpu, features = _BASELINE[toolchain.find().cpu]

    def visit(op):
        if op.name == "llvm.func":
            op.attributes["target_cpu"] = ir.StringAttr.get(cpu)
            # An empty list would mean the features of this machine's CPU.
            op.attributes["target_features"] = ir.Attribute.parse(f'#llvm.target_features<["{features}"]>')
        return ir.WalkResult.ADVANCE

    with module.context:
        module.operation.walk(visit)


def _linked(path: Path) -> Path:
    """Links the object at `path` into a shared library next to it. Returns `path` itself if that fails."""
    program, out = linker(), path.with_suffix(".so")
    if program is None:
        return path
    import tvm_ffi

    # found by name at load time: see _load_shared
    needed = [toolchain.find().runtime, tvm_ffi.libinfo.find_libtvm_ffi()]
    done = subprocess.run([program, "-shared", "-o", str(out), str(path), *map(str, needed)], capture_output=True)
    return out if done.returncode == 0 else path


def _load_shared(data: bytes, name: str) -> Callable[..., None]:
    """Loads a shared library from memory."""
    import tvm_ffi  # which loads its own library

    _load_runtime()
    # In memory, because /tmp may be mounted noexec. The symlink gives it a name that ends in .so, and a new path:
    # dlopen would take a known path for the same library.
    with tempfile.TemporaryDirectory(prefix="quackish-") as folder:
        descriptor = os.memfd_create(name)
        try:
            with open(descriptor, "wb", closefd=False) as file:
                file.write(data)
            path = Path(folder, "kernel.so")
            path.symlink_to(f"/proc/self/fd/{descriptor}")
            return getattr(tvm_ffi.load_module(path), _SYMBOL)
        finally:
            os.close(descriptor)


@functools.cache
def _load_runtime() -> ctypes.CDLL:
    """Loads the compiler's runtime library; kernels' libraries then find it by name."""
    return ctypes.CDLL(str(toolchain.find().runtime))
