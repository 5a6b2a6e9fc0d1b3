"""Runs programs that are written for a GPU, unchanged."""

import contextlib
import os
import runpy
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from quackish.emulator import cuda_bindings, dsl, host, torch_cuda

_PRELOADED = "QUACKISH_EMULATOR_PRELOADED"


def restart_with_aligned_memory() -> None:
    """Starts the process again, so that its memory is aligned to 256 bytes as a GPU's is. Returns in the new one."""
    if preloaded := os.environ.pop(_PRELOADED, None):
        os.environ.pop("LD_PRELOAD")  # not for the script's own processes
        Path(preloaded).unlink()
        return
    descriptor, path = tempfile.mkstemp(prefix="emulator-", suffix=".so")
    os.close(descriptor)
    host.compile_c("aligned.c", path, "-shared")
    environment = {**os.environ, "LD_PRELOAD": path, _PRELOADED: path}
    os.execve(sys.executable, [sys.executable, "-m", "quackish", *sys.argv[1:]], environment)


@contextlib.contextmanager
def unchanged(compile: Any) -> Iterator[None]:
    """Inside the block, "cuda" means the CPU, and functions with @cute.jit can be called.

    compile: makes a Kernel of (function, args, kwargs)
    """

    def call(function: Any, args: tuple, kwargs: dict) -> None:
        kernel = compile(function, args, kwargs)
        kernel(*dsl.runtime_arguments(kernel.entry, args, dsl.without_options(kwargs)))

    with dsl.replace_calls(call), cuda_bindings.stand_ins(), torch_cuda.cpu_as_cuda(), _without_triton():
        yield


@contextlib.contextmanager
def _without_triton() -> Iterator[None]:
    """Inside the block, a launch of a kernel of Triton raises NotImplementedError."""
    try:
        from triton.runtime.jit import JITFunction
    except ImportError:
        yield
        return

    def refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            f"the emulator runs kernels of CuTe DSL, and {self.fn.__name__} is one of Triton; call PyTorch instead, or "
            "run the program without it"
        )

    with mock.patch.object(JITFunction, "run", refuse):
        yield


def run(path: str, args: list[str]) -> None:
    """Runs a script as `python path args` does."""
    with (
        mock.patch.object(sys, "argv", [path, *args]),
        mock.patch.object(sys, "path", [str(Path(path).parent), *sys.path]),
    ):
        runpy.run_path(path, run_name="__main__")
