"""Says if PyTorch (2.15 and newer) runs its own CuTe kernels.

It runs them only with some versions of nvidia-cutlass-dsl, and otherwise plain code without a message.
"""

import functools
import importlib
import os
from typing import Any, NamedTuple

import torch

from quackish.bench.environment import version

_OPERATOR = "_linear_cross_entropy_batch_chunked"


class Status(NamedTuple):
    exists: bool  # this version of PyTorch has such kernels
    is_on: bool = False
    why: str = ""  # why it is off
    versions: tuple[str, ...] = ()  # versions of nvidia-cutlass-dsl that would turn it on


@functools.cache
def status() -> Status:
    """Says if PyTorch runs its own CuTe kernels in F.linear_cross_entropy and F.rms_norm."""
    try:
        importlib.import_module("torch._native.ops.linear_cross_entropy")
        native = importlib.import_module("torch._native.cutedsl_utils")
    except ImportError:
        return Status(False, False, f"PyTorch {torch.__version__} has none; 2.15 does")
    registry: Any = torch.backends.python_native
    if _OPERATOR in registry.get_dsl_operations("cutedsl", "torch_nn"):
        return Status(True, True)
    if os.environ.get("TORCH_DISABLE_NATIVE_JIT") == "1":
        return Status(True, False, "TORCH_DISABLE_NATIVE_JIT=1 turns them off")
    if torch.version.cuda is None:
        return Status(True, False, f"PyTorch {torch.__version__} is built without CUDA")
    accepted = tuple(map(str, sorted(getattr(native, "_CUTEDSL_REQUIRED_VERSIONS", ()))))
    installed = version("nvidia-cutlass-dsl") or "none"
    return Status(
        True, False, f"they need nvidia-cutlass-dsl {' or '.join(accepted)}; installed: {installed}", accepted
    )


def note() -> str:
    """Says if PyTorch runs its CuTe kernels, in the column "note" of results."""
    if not status().exists:
        return ""
    name = "PyTorch " + ".".join(torch.__version__.split(".")[:2])
    return f"{name} CuTe" if status().is_on else f"{name}, CuTe kernels off: {status().why}"
