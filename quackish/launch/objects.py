"""A compiled kernel as bytes, and bytes as a function that is called with torch tensors.

The bytes are a shared library: host code that checks the arguments and launches, for any CPU of this kind, and the
cubin inside. The system loads it in 0.3 ms, with the compiler's runtime library beside it (6 ms, once a process); the
compiler itself, 0.3 s to import, is not needed. Where there is no linker the bytes are the object file that the
compiler wrote, and its own linker is imported to load them.
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

from quackish import toolchain

_SYMBOL = "kernel"
_SHARED = 3  # ELF's e_type of a shared library
_LINKERS = ("ld", "ld.lld", "mold")

# What LLVM makes host code for. It would take the CPU at hand, AVX-512 and all, and an older one would die of SIGILL.
_BASELINE = {"x86_64": ("x86-64", "+sse2"), "aarch64": ("generic", "+neon")}


def export(compiled: Any) -> bytes:
    """Of what `cute.compile` returned."""
    _for_any_cpu(compiled.ir_module)
    with tempfile.TemporaryDirectory(prefix="quackish-") as folder:
        path = Path(folder, "kernel.o")
        compiled.export_to_c(str(path), function_name=_SYMBOL, export_only_tvm_ffi_symbols=True)
        return _linked(path).read_bytes()


def load(data: bytes, name: str) -> Callable[..., None]:
    """The function in `data`; debuggers and /proc/self/maps call its code `name`.

    What was just compiled comes this way too: what the compiler returns may take keywords and defaults, what is loaded
    never does, and there should be one calling convention to test.
    """
    if int.from_bytes(data[16:18], "little") == _SHARED:
        return _load_shared(data, name)
    import cutlass.cute as cute

    # Verified bytes go through a folder that only this process's user can enter: nobody can swap them in between.
    with tempfile.TemporaryDirectory(prefix="quackish-") as folder:
        path = Path(folder, "kernel.o")
        path.write_bytes(data)
        return getattr(cute.runtime.load_module(str(path), enable_tvm_ffi=True), _SYMBOL)


def linker() -> str | None:
    return next(filter(None, map(shutil.which, _LINKERS)), None)


def _for_any_cpu(module: Any) -> None:
    """Makes every function of host code one for the baseline of this machine's kind. The cubin stays what it is."""
    from cutlass._mlir import ir

    cpu, features = _BASELINE[toolchain.find().cpu]

    def visit(op):
        if op.name == "llvm.func":
            op.attributes["target_cpu"] = ir.StringAttr.get(cpu)
            # Not empty: that would be those of the CPU at hand.
            op.attributes["target_features"] = ir.Attribute.parse(f'#llvm.target_features<["{features}"]>')
        return ir.WalkResult.ADVANCE

    with module.context:
        module.operation.walk(visit)


def _linked(path: Path) -> Path:
    """A shared library of the object at `path`, beside it; `path` itself where it cannot be linked."""
    program, out = linker(), path.with_suffix(".so")
    if program is None:
        return path
    import tvm_ffi

    needed = [toolchain.find().runtime, tvm_ffi.libinfo.find_libtvm_ffi()]  # by their names alone: see _load_shared
    done = subprocess.run([program, "-shared", "-o", out, path, *needed], capture_output=True)
    return out if done.returncode == 0 else path


def _load_shared(data: bytes, name: str) -> Callable[..., None]:
    import tvm_ffi  # which loads its own library

    _load_runtime()
    # In memory, because /tmp may be mounted noexec. The link is for its name: it has to end in .so, and the system
    # takes a path that it has loaded before for the same library.
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
    """Before the libraries that need it, which look for its name among those that are loaded."""
    return ctypes.CDLL(str(toolchain.find().runtime))
