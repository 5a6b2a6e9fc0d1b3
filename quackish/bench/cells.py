"""What is measured: a cell of a table, and its providers."""

import dataclasses
from collections.abc import Sequence

OURS = "quackish"
MOST = 1 << 29  # of a size: PyTorch fails with an internal error if a tensor's bytes overflow 64 bits
A_LAUNCH = f"{OURS} (a launch)"  # host time of the slowest launch in a call
AGAIN = f"{OURS} (again)"  # ours a second time, in the same turns: the noise
NONE_IGNORED = f"{OURS} (none ignored)"  # the roof of a cell with ignored rows
GEMMS, THREE_GEMMS = ("gemm-logits", "gemm-dx", "gemm-dw"), "three-gemms"
MLP_GEMMS = {"forward": "two-gemms", "forward+backward": "six-gemms"}
# Rows of a results file that are no provider's.
NOT_PROVIDERS = (A_LAUNCH, AGAIN, NONE_IGNORED, "mul", "add", THREE_GEMMS, *GEMMS, *MLP_GEMMS.values(), "truth")


def is_ours(name: str) -> bool:
    """Also true for "quackish-chunked" and "quackish (again)"."""
    return name == OURS or name.startswith((f"{OURS}-", f"{OURS} "))


def library(name: str) -> str:
    """The library that a provider belongs to: "liger" for "liger-cute"."""
    return OURS if is_ours(name) else name.partition("-")[0]


@dataclasses.dataclass(frozen=True)
class Cell:
    """One operation at one shape, in one direction, on one kind of data; all its providers take turns."""

    op: str
    shape: tuple[int, ...]  # of the operation's dimensions, the rows (tokens) first
    dtype: str  # "bfloat16"; "tf32" is float32 with matmuls in TF32, for linear_cross_entropy
    direction: str
    data: str = "normal"
    ignored: float = 0.0  # share of the rows

    @property
    def kind(self) -> str:
        """Of special data " confident" or " 80% ignored"; otherwise empty."""
        ignored = f"{self.ignored:.0%} ignored" if self.ignored else ""
        return "".join(f" {word}" for word in (self.data if self.data != "normal" else "", ignored) if word)

    def __str__(self) -> str:
        return f"{self.direction} {shape_name(self.shape)} {self.dtype}{self.kind}"


@dataclasses.dataclass(frozen=True)
class Job:
    """A cell to measure."""

    cell: Cell
    providers: tuple[str, ...]
    models: str = ""  # names of the models that have this shape


def shape_name(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


def parse_shape(text: str, form: str = "") -> tuple[int, ...]:
    """(8192, 4096) from "8192x4096"; ValueError unless it is as `form`, "MxN", and no size is above MOST."""
    sizes = text.strip().lower().replace("×", "x").split("x")
    known = all(size.isdecimal() and len(size) < 10 and 1 <= int(size) <= MOST for size in sizes)
    if not known or (form and len(sizes) != len(form.split("x"))):
        raise ValueError(f"{text!r}; expected {form or 'sizes such as 8x16'}, numbers from 1 to {MOST}")
    return tuple(map(int, sizes))
