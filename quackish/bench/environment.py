"""What something was measured on: the GPU, the code and the versions."""

import datetime
import functools
import hashlib
import importlib.metadata
import platform
import subprocess
from pathlib import Path

import torch

from quackish import __version__

SCHEMA = 2  # raise it when a column of a results file gets another meaning
# Columns that say where a row comes from; every results file has them.
ENVIRONMENT = ("date", "commit", "dirty", "gpu", "driver", "python", "torch", "cuda", "dsl", "tvm_ffi", "peers")
PEERS = ("quack-kernels", "liger-kernel", "cut-cross-entropy", "triton")

_PACKAGE = Path(__file__).parents[1]


def device_to_measure() -> torch.device:
    """The current GPU, or the CPU if there is none."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def device_name(device: torch.device) -> str:
    if device.type != "cuda":
        return device.type
    return torch.cuda.get_device_name(device).removeprefix("NVIDIA ")


def environment(device: torch.device, commit: str | None = None) -> dict[str, str]:
    """The values of ENVIRONMENT. `commit`, as `git describe` writes it, is used if there is no git to ask."""
    commit = commit or _commit()
    return dict(
        date=datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        commit=commit.removesuffix("-dirty"),
        dirty=str(commit.endswith("-dirty")),
        gpu=device_name(device),
        driver=_output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split("\n")[0],
        python=platform.python_version(),
        torch=torch.__version__,
        cuda=torch.version.cuda or "",
        dsl=version("nvidia-cutlass-dsl"),
        tvm_ffi=version("apache-tvm-ffi"),
        peers=" ".join(f"{name}={version(name)}" for name in PEERS if version(name)),
    )


def origin(device: torch.device, commit: str | None = None) -> dict[str, str]:
    """The columns that all rows of a run share."""
    return {"schema": str(SCHEMA), **environment(device, commit), "quackish": __version__, "source": source()}


def version(distribution: str) -> str:
    """The installed version of a distribution, "" if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


@functools.cache
def source() -> str:
    """Twelve digits of a hash of the package's files: distinguishes local changes to one commit."""
    files = ((path.relative_to(_PACKAGE).as_posix(), path.read_text("utf-8")) for path in _PACKAGE.rglob("*.py"))
    return hashlib.sha256(repr(sorted(files)).encode()).hexdigest()[:12]


def _commit() -> str:
    """ "" if the package is not in its own git checkout: site-packages may lie in another one."""
    if not _output("git", "-C", str(_PACKAGE), "ls-files", "__init__.py"):
        return ""
    return _output("git", "-C", str(_PACKAGE), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
