"""Cells, which are what is measured: an operation, shape, dtype and direction. Names of providers.

The roof of a cell is the time of PyTorch's kernels for the same memory traffic or matmuls, measured in the same turns.
"""

import dataclasses
import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from quackish.errors import did_you_mean

OURS = "quackish"
A_LAUNCH = f"{OURS} (a launch)"  # host time of the slowest launch in a call
AGAIN = f"{OURS} (again)"  # quackish measured a second time in the same turns, to show the noise
TRUTH = "truth"  # the step that computes results in fp64


def is_ours(name: str) -> bool:
    """True for "quackish", "quackish-chunked" and "quackish (again)"."""
    return name == OURS or name.startswith((f"{OURS}-", f"{OURS} "))


def library(name: str) -> str:
    """The library that a provider belongs to: "liger" for "liger-cute"."""
    return OURS if is_ours(name) else name.partition("-")[0]


@dataclasses.dataclass(frozen=True)
class Cell:
    """One operation at one shape, in one direction, on one kind of data. All its providers are timed in turns."""

    op: str
    shape: tuple[int, ...]  # the number of rows (tokens) comes first
    dtype: str  # "bfloat16", say; linear_cross_entropy also has "tf32", float32 with TF32 matmuls
    direction: str
    data: str = "normal"  # a kind of data, or options of the call: see `data_of`
    ignored: float = 0.0  # share of ignored rows

    @property
    def kind(self) -> str:
        """A suffix for unusual data, such as " confident" or " 80% ignored"."""
        data = f" {self.data}" if self.data != "normal" else ""
        return data + (f" {self.ignored:.0%} ignored" if self.ignored else "")

    def __str__(self) -> str:
        return f"{self.direction} {shape_name(self.shape)} {self.dtype}{self.kind}"


@dataclasses.dataclass(frozen=True)
class Job:
    """A cell to measure."""

    cell: Cell
    providers: tuple[str, ...]
    models: str = ""  # names of the models that have this shape


def data_of(options: Mapping[str, Any]) -> str:
    """Options of a call as `Cell.data`, such as "attn_bias=1,H causal"; "normal" without any."""
    return " ".join(name if value is True else f"{name}={value}" for name, value in options.items()) or "normal"


def options_of(data: str) -> dict[str, Any]:
    """The options of `data_of`, with values as strings."""
    words = () if data == "normal" else data.split()
    return {name: value or True for name, _, value in (word.partition("=") for word in words)}


def match(option: str, patterns: Iterable[str], known: Iterable[str]) -> list[str]:
    """The names in `known` that match any pattern. ValueError if a pattern matches none."""
    for pattern in patterns:
        if not fnmatch.filter(known, pattern):
            names = f"{', '.join(known)}{did_you_mean(pattern, known)}"
            raise ValueError(f"{option} {pattern} is unknown; expected one of {names}")
    return [name for name in known if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]


def shape_name(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))
