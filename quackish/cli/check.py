"""The calls of `doctor` and `doctor --check`: small ones that launch every kernel, and large ones to time.

`SelfTest`s of quackish/ops/*/tools.py describe them.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from quackish.device.spec import KernelSpec
from quackish.ops.shared.for_tools import Args, Operation, SelfTest, operations
from quackish.types import Backend


class Case(NamedTuple):
    """A call, forward and backward."""

    make: Callable[[torch.device], Args]  # the arguments
    call: Callable[[Args, Backend], dict[str, Tensor]]  # (arguments, backend) -> results and gradients
    spec: KernelSpec | None  # as in Operation
    bound_of: Callable[[str], float]  # the norm-wise error that a result or gradient may have
    timed: bool = False  # large: its GEMMs are timed beside cuBLAS's, and truth is computed on the GPU
    only_timed: bool = False  # too large for truth


def _case(op: Operation, test: SelfTest, timed: bool = False) -> Case:
    def make(device: torch.device) -> Args:
        return op.arguments(test.shape, getattr(torch, test.dtype), device, test.options)

    return Case(make, op.call, op.spec, op.bound_of, timed, test.only_timed)


def _small(op: Operation) -> dict[str, SelfTest]:
    """The small calls of an operation: one with default options, and its self-tests by name."""
    return {"": SelfTest(op.small), **op.self_tests}


def _name_of(op: Operation, test: SelfTest) -> str:
    options = [name if value is True else str(value) for name, value in test.options.items()]
    return ", ".join([f"{op.name} {'x'.join(map(str, test.shape))}", *options])


SELF_TESTS: dict[str, Case] = {
    ", ".join(filter(None, (op.name, what))): _case(op, test)
    for op in operations().values()
    for what, test in _small(op).items()
}
TIMED: dict[str, Case] = {
    _name_of(op, test): _case(op, test, timed=True) for op in operations().values() for test in op.large_tests
}


def load(name: str) -> Case:
    """The call with this name. It is a function of a module, because `Check` is sent to a process."""
    return (SELF_TESTS | TIMED)[name]
