"""What launches did, in numbers, and what was found."""

import dataclasses
import json
from typing import Any

from quackish.emulator.dependent_launches import Ended
from quackish.emulator.errors import Fault, Place
from quackish.emulator.findings import Findings
from quackish.emulator.profile import LineCounts, Trace


@dataclasses.dataclass(frozen=True)
class LaunchReport:
    """Counts of one launch. All but `instructions` are the same for every seed and completion."""

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    mmas: int  # matrix instructions
    flops: int  # those of matrix instructions
    # Requested from global memory, without loads that poll (acquire, relaxed, volatile) and atom.cas. A multicast copy
    # counts once.
    bytes_read: int
    bytes_written: int  # requested of global memory; an atomic operation reads and writes
    barrier_phases: int  # completed ones: of mbarriers, barriers of CTAs and of clusters
    shared_bytes: int  # per CTA
    tensor_memory_columns: int  # the most that a CTA had allocated at once
    instructions: int  # counted once per warp. Where threads poll, the number depends on the seed.
    seconds: float
    profile: list[LineCounts] | None = None  # with emulator.record(profile=True)


@dataclasses.dataclass
class Report:
    """What `emulator.record` yields: its settings, its launches so far, oldest first, and what was found in them."""

    completion: str
    seed: Any
    how_to_repeat: str = ""
    launches: list[LaunchReport] = dataclasses.field(default_factory=list)
    before: Ended | None = None  # the latest launch
    # What `emulator.record` was asked for
    checks: Findings = dataclasses.field(default_factory=Findings, repr=False)
    profile: bool = False
    tracer: Trace | None = dataclasses.field(default=None, repr=False)

    @property
    def trace(self) -> list[Place]:
        """The instructions of the warp that emulator.record(trace=(cta, warp)) names, in all launches."""
        return self.tracer.places if self.tracer else []

    def as_dict(self) -> dict[str, Any]:
        """The report in lists and dictionaries, for JSON."""
        return {
            "completion": self.completion,
            "seed": self.seed,
            "launches": [dataclasses.asdict(launch) for launch in self.launches],
            "findings": [dataclasses.asdict(finding) for finding in self.findings],
            "trace": [dataclasses.asdict(place) for place in self.trace],
        }

    def to_json(self) -> str:
        return json.dumps(self.as_dict(), indent=1, default=str)

    @property
    def findings(self) -> list[Fault]:
        """Findings that did not end the run, oldest first: each pair of instructions once."""
        return self.checks.found
