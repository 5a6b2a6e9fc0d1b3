"""The arguments of kernels: one NamedTuple per kernel, for host and device code, next to the kernel's problem.

`problem.args` is the NamedTuple of specs: each argument is a `Ptr`, the type of a number, or None if absent. A field's
default is its spec if that is the same for all problems, and None if some problems have no such argument. A launch
fills the NamedTuple with addresses and numbers, by name; absent arguments are left out.
"""

import dataclasses
import functools
import types
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True)
class Ptr:
    """A device address, aligned to 16 bytes or to one element."""

    dtype: str
    aligned: bool = False


I32, I64, F32, BF16 = Ptr("int32"), Ptr("int64"), Ptr("float32"), Ptr("bfloat16")
ALIGNED_F32, ALIGNED_I16 = Ptr("float32", aligned=True), Ptr("int16", aligned=True)


@functools.cache
def by_name(kind: type) -> Callable[..., Any]:
    """A function that makes a NamedTuple from keywords, up to 15 in a third of the time that calling it takes."""
    return types.MethodType(kind.__new__, kind)


def optional(dtype: str | None, aligned: bool = False) -> Ptr | None:
    """A Ptr to elements of `dtype`; None without one, for an argument that the problem lacks."""
    return None if dtype is None else Ptr(dtype, aligned)
