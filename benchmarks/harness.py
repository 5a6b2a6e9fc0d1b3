"""What every benchmark here shares: what it ran on, the file it writes row by row, and how it prints."""

import csv
import datetime
import importlib.metadata
import platform
import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"

# Columns that say where a row comes from; every results file starts with them.
ENVIRONMENT = ("date", "commit", "dirty", "gpu", "driver", "python", "torch", "cuda", "dsl", "tvm_ffi", "peers")
PEERS = ("quack-kernels", "liger-kernel", "cut-cross-entropy", "triton")

console = Console(highlight=False)
if not console.is_terminal:
    console = Console(highlight=False, width=120)


def progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console)


def device_to_measure() -> torch.device:
    """The GPU; where there is none the CPU, and a line that says so."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    console.print("No GPU: the portable path runs on the CPU. This tries the benchmark itself; it measures nothing.")
    return torch.device("cpu")


def device_name(device: torch.device) -> str:
    if device.type != "cuda":
        return device.type
    return torch.cuda.get_device_name(device).removeprefix("NVIDIA ")


def results_dir(device: torch.device) -> Path:
    """Results are kept per GPU model."""
    return RESULTS / re.sub(r"[^\w.-]+", "-", device_name(device))


def environment(device: torch.device, commit: str | None = None) -> dict[str, str]:
    """The values of ENVIRONMENT. `commit`, as `git describe` writes it, stands in where there is no git to ask."""
    commit = commit or _output("git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")
    values = (
        datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        commit.removesuffix("-dirty"),
        str(commit.endswith("-dirty")),
        device_name(device),
        _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split("\n")[0],
        platform.python_version(),
        torch.__version__,
        torch.version.cuda or "",
        version("nvidia-cutlass-dsl"),
        version("apache-tvm-ffi"),
        " ".join(f"{name}={version(name)}" for name in PEERS if version(name)),
    )
    return dict(zip(ENVIRONMENT, values, strict=True))


def version(distribution: str) -> str:
    """The installed version of a distribution, "" where it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


class CsvLog:
    """A CSV file with a fixed header, flushed with every write: a run that is killed keeps what it measured.

    With `append` the rows that the file has are kept; where they have another header it is a ValueError.
    """

    def __init__(self, path: Path, fields: Sequence[str], constants: Mapping[str, str], append: bool = False):
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self._constants = path, constants
        append = append and path.exists()
        if append:
            with path.open(newline="") as file:
                header = next(csv.reader(file), [])
            if header != list(fields):
                raise ValueError(f"{path}: its columns are {', '.join(header)}; expected {', '.join(fields)}")
        self._file = path.open("a" if append else "w", newline="")
        self._writer = csv.DictWriter(self._file, fields)
        if not append:
            self._writer.writeheader()

    def write(self, rows: Iterable[Mapping[str, object]]) -> None:
        for row in rows:
            self._writer.writerow({key: _plain(value) for key, value in {**self._constants, **row}.items()})
        self._file.flush()


def _plain(value: object) -> object:
    return float(f"{value:.6g}") if isinstance(value, float) else value


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def failure(error: Exception) -> str:
    """An exception in a cell of a table."""
    return f"{type(error).__name__}: {error}".split("\n")[0][:200]


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines) + "\n"
