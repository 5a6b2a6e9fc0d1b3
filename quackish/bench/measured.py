"""What is known of one provider in one cell, and how cells are measured."""

import dataclasses
from collections.abc import Callable, Mapping

import torch

from quackish.testing.timing import Times

OURS = "quackish"
A_LAUNCH = f"{OURS} (a launch)"  # of the host's time: what the slowest launch of a call takes of it
AGAIN = f"{OURS} (again)"  # ours a second time, in the same turns: the noise


def is_ours(name: str) -> bool:
    """Also for "quackish-chunked", "quackish[num_stages=4]" and "quackish (again)"."""
    return name == OURS or name.startswith((f"{OURS}-", f"{OURS}[", f"{OURS} "))


@dataclasses.dataclass(frozen=True)
class Measured:
    """What was found out of one provider in one cell; None is not known."""

    status: str = "ok"  # or why there is no time
    note: str = ""  # "plain launches": it could not be captured as a CUDA graph; "portable path"
    times: Times | None = None
    roof: Times | None = None  # in the same turns
    peak_bytes: int | None = None  # in a warm call, above before the library's first call in the process
    standing_bytes: int | None = None  # of these, what the library keeps between calls
    first_s: float | None = None  # seconds of the first call, which compiles, or loads from a cache
    compiles: int = 0  # by quackish, in that call
    launches: int = 0  # by quackish's launcher, in one call
    deterministic: bool | None = None
    errors: Mapping[str, float] = dataclasses.field(default_factory=dict)  # "err_dx": relative to fp64

    def as_dict(self) -> dict:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping) -> "Measured":
        """Of what `as_dict` made, JSON on the way included."""
        times = {name: Times(**values[name]) for name in ("times", "roof") if values[name] is not None}
        return cls(**{**values, **times})


@dataclasses.dataclass(frozen=True)
class Run:
    """How cells are measured, and who hears of it."""

    device: torch.device
    load: Callable[[str], object]  # a provider by its name; whatever it raises is that provider's failure
    tell: Callable[[str, Measured], None]  # each provider's result, as soon as it is known
    at: Callable[[str], None] = lambda step: None  # what comes next, before it starts: a provider's name or a step
    rounds: int = 10
    repeats: int = 0  # runs whose bytes are compared; with 0 none are

    def fail(self, name: str, error: Exception) -> None:
        """Tells that a provider failed. Raises where it took the CUDA context along: nothing can be measured then."""
        self.tell(name, Measured(status=reason(error)))
        self.synchronize()

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def reason(error: BaseException) -> str:
    """An exception in a cell of a table."""
    return f"{type(error).__name__}: {error}".split("\n")[0][:200].strip()
