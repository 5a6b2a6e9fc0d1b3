"""What is measured: a cell of a table."""

import dataclasses


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
