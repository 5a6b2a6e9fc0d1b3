"""What the programs here share: where results go, and what they say on a machine without a GPU."""

import re
from pathlib import Path

import torch

from quackish.bench import environment
from quackish.bench.console import NO_GPU
from quackish.bench.console import console as _console

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
# On a GPU a shape that no kernel covers shall fail and be named, not run the portable path.
BACKEND = "cute" if torch.cuda.is_available() else "auto"

console = _console()


def device_to_measure() -> torch.device:
    """The GPU; where there is none the CPU, and a line that says so."""
    device = environment.device_to_measure()
    if device.type == "cpu":
        console.print(NO_GPU)
    return device


def results_dir(device: torch.device) -> Path:
    """Results are kept per GPU model."""
    return RESULTS / re.sub(r"[^\w.-]+", "-", environment.device_name(device))
