"""The environment of a measurement: GPU, commit and versions."""

import datetime
import importlib.metadata
import platform
import subprocess
from pathlib import Path

import torch

from quackish._version import __version__

# Columns of a results file.
ENVIRONMENT = ("date", "commit", "gpu", "driver", "python", "torch", "cuda", "dsl", "tvm_ffi", "peers", "quackish")
PEERS = (
    "quack-kernels", "liger-kernel", "cut-cross-entropy", "flash-attn-4", "cuequivariance-ops-torch-cu13", "sonic-moe",
    "triton",
)  # fmt: skip

_PACKAGE = Path(__file__).parents[1]


def device_to_measure() -> torch.device:
    """The current GPU, or the CPU if there is none."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def device_name(device: torch.device) -> str:
    if device.type != "cuda":
        return device.type
    return torch.cuda.get_device_name(device).removeprefix("NVIDIA ")


def environment(device: torch.device, commit: str | None = None) -> dict[str, str]:
    """The values of ENVIRONMENT. `commit` (as `git describe --dirty` prints it) is needed only without git."""
    return dict(
        date=datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        commit=commit or _commit(),
        gpu=device_name(device),
        driver=driver_version(),
        python=platform.python_version(),
        torch=torch.__version__,
        cuda=torch.version.cuda or "",
        dsl=version("nvidia-cutlass-dsl"),
        tvm_ffi=version("apache-tvm-ffi"),
        peers=" ".join(f"{name}={version(name)}" for name in PEERS if version(name)),
        quackish=__version__,
    )


def driver_version() -> str:
    """The driver's version; "" without nvidia-smi."""
    return _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split("\n")[0]


def version(distribution: str) -> str:
    """The installed version of a distribution, "" if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _commit() -> str:
    """The commit of this package; "" unless git tracks it: site-packages may lie inside another checkout."""
    if not _output("git", "-C", str(_PACKAGE), "ls-files", "__init__.py"):
        return ""
    return _output("git", "-C", str(_PACKAGE), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")


def _output(*command: str) -> str:
    """What a command prints; "" if it fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
