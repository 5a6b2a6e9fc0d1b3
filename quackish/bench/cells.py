"""What is measured: a cell of a table."""

import dataclasses
import math
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Cell:
    """One operation at one shape, in one direction: all its providers take turns."""

    op: str
    shape: tuple[int, ...]  # of the operation's dimensions, the rows (tokens) first
    dtype: str  # "bfloat16"
    direction: str

    def __str__(self) -> str:
        return f"{self.direction} {shape_name(self.shape)} {self.dtype}"


def shape_name(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def parse_shape(text: str) -> tuple[int, ...]:
    """(8192, 4096) of "8192x4096"; ValueError where it is none."""
    shape = tuple(int(size) for size in text.strip().split("x"))
    if min(shape) < 1:
        raise ValueError(text)
    return shape


def too_large(shape: Sequence[int]) -> str:
    """What was expected of a shape whose tensors no GPU holds; "" where they may fit.

    Kernels count in 32 bits, and PyTorch fails with an internal error where a tensor's bytes overflow 64 bits.
    """
    if max(shape) < 2**31 and math.prod(sorted(shape)[-2:]) < 2**60:
        return ""
    return "sizes below 2**31 and tensors of less than 2**60 elements"
