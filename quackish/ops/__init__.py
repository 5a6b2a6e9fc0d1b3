"""The operations, one folder each. Importing this module imports neither torch nor an operation."""

import importlib
from collections.abc import Iterator
from typing import Any

from quackish.device.spec import KernelSpec

OPERATIONS = ("rms_norm", "linear_cross_entropy", "mlp", "attention")  # adding one is its folder and its name here


def parts(name: str) -> Iterator[Any]:
    """The modules `quackish.ops.OPERATION.name`, in the order of OPERATIONS."""
    for operation in OPERATIONS:
        yield importlib.import_module(f"quackish.ops.{operation}.{name}")


def specs() -> dict[str, KernelSpec]:
    """The descriptions of all kernels, by name."""
    return {spec.name: spec for problems in parts("problems") for spec in problems.SPECS}
