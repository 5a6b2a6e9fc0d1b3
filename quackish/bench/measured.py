"""What is known about one provider in one cell, and how a cell is measured."""

import dataclasses
from collections.abc import Callable, Mapping

import torch

from quackish.bench.memory import MEMORY, Memory
from quackish.testing.timing import Times

OURS = "quackish"
A_LAUNCH = f"{OURS} (a launch)"  # host time of the slowest launch in a call
AGAIN = f"{OURS} (again)"  # ours a second time, in the same turns: the noise
NONE_IGNORED = f"{OURS} (none ignored)"  # the roof of a cell with ignored rows


def is_ours(name: str) -> bool:
    """Also true for "quackish-chunked", "quackish[num_stages=4]" and "quackish (again)"."""
    return name == OURS or name.startswith((f"{OURS}-", f"{OURS}[", f"{OURS} "))


def library(name: str) -> str:
    """The library that a provider belongs to: "liger" for "liger-cute"."""
    return OURS if is_ours(name) else name.partition("-")[0]


@dataclasses.dataclass(frozen=True)
class Measured:
    """What was found out about one provider in one cell; None means unknown."""

    status: str = "ok"  # or why there is no time
    note: str = ""  # "plain launches": it could not be captured as a CUDA graph; "portable path"
    times: Times | None = None
    roof: Times | None = None  # in the same turns
    peak_bytes: int | None = None  # in a warm call, above what was allocated before the library's first call
    standing_bytes: int | None = None  # the part of it that the library keeps between calls
    first_s: float | None = None  # seconds of the first call, which compiles or loads from a cache
    compiles: int = 0  # by quackish, in that call
    launches: int = 0  # by quackish's launcher, in one call
    deterministic: bool | None = None
    errors: Mapping[str, float] = dataclasses.field(default_factory=dict)  # "err_dx": relative to fp64

    @classmethod
    def from_dict(cls, values: Mapping) -> "Measured":
        """The inverse of `dataclasses.asdict`, also through JSON."""
        times = {name: Times(**values[name]) for name in ("times", "roof") if values[name] is not None}
        return cls(**{**values, **times})


def _ignore(*what: object) -> None:
    pass


@dataclasses.dataclass(frozen=True)
class Run:
    """How cells are measured, and what to call with the results."""

    device: torch.device
    load: Callable[[str], object]  # a provider by its name; an exception is that provider's failure
    tell: Callable[[str, Measured], None]  # each provider's result, as soon as it is known
    partial: Callable[[str, Measured], None] = _ignore  # what is known so far, in case the run is interrupted
    at: Callable[[str], None] = _ignore  # what comes next, before it starts: a provider's name or a step
    rounds: int = 10
    repeats: int = 0  # runs whose bytes are compared; with 0 none are
    seconds: float = 0.4  # of samples for one provider of linear_cross_entropy that already has five
    errors: bool = True  # compare with fp64
    memory: Memory = MEMORY

    def fail(self, name: str, error: Exception) -> None:
        """Tells that a provider failed. Raises if the CUDA context is lost: nothing can be measured then."""
        self.tell(name, Measured(status=reason(error)))
        self.synchronize()

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def reason(error: BaseException) -> str:
    """An exception as the cell of a table."""
    return f"{type(error).__name__}: {error}".split("\n")[0][:200].strip()
