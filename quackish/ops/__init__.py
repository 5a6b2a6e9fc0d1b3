"""The operations, one folder each. Importing this module imports neither torch nor an operation."""

import importlib.util
from collections.abc import Iterator
from typing import Any

from quackish.device.spec import KernelSpec

# adding an operation is its folder and its name here
OPERATIONS = ("rms_norm", "linear_cross_entropy", "mlp", "attention", "rotary", "linear_divergence")


def parts(name: str) -> Iterator[Any]:
    """The modules `quackish.ops.OPERATION.name`, in the order of OPERATIONS. An operation may lack some."""
    for operation in OPERATIONS:
        module = f"quackish.ops.{operation}.{name}"
        if importlib.util.find_spec(module):
            yield importlib.import_module(module)


def specs() -> dict[str, KernelSpec]:
    """The descriptions of all kernels, by name."""
    from quackish.ops.shared import problems as shared

    return {spec.name: spec for problems in (*parts("problems"), shared) for spec in problems.SPECS}
