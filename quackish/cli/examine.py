"""What `doctor` finds out about this machine, a function a section. None of them compiles or launches anything but
`paths`, which asks the operations themselves."""

import glob
import os
import platform
import re
import stat
import sys
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch

from quackish import __version__, kernels, toolchain
from quackish.bench.environment import PEERS, version
from quackish.configs import table
from quackish.configs.rms_norm import RmsNormBwdProblem, RmsNormFwdProblem
from quackish.errors import UnsupportedError
from quackish.gpu import gpu_of
from quackish.launch import cache, objects, upkeep
from quackish.ops.linear_cross_entropy import api as linear_cross_entropy
from quackish.ops.rms_norm_plans import find_kernel

# At least, and less than: as in pyproject.toml.
SUPPORTED = {
    "torch": ("2.8", None),
    "nvidia-cutlass-dsl": ("4.8.1", "4.9"),
    "apache-tvm-ffi": ("0.1.15", "0.2"),
}
_MATTERS = re.compile(
    "QUACKISH_|CUTE_DSL_|CUDA_|NVIDIA_VISIBLE_DEVICES$|TORCH_|PYTORCH_|TRITON_|LOCAL_WORLD_SIZE$|LD_LIBRARY_PATH$"
    "|LD_PRELOAD$|XDG_(CACHE|CONFIG)_HOME$|TMPDIR$"
)
_DRIVER = Path("/proc/driver/nvidia")
KERNELS, CUBLAS, PORTABLE = "CuTe DSL kernels", "cuBLAS's GEMMs between CuTe DSL kernels", "portable path"


class Problem(NamedTuple):
    what: str
    to_do: str  # a sentence


def devices() -> list[torch.device]:
    """The GPUs, and the CPU."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [*(torch.device("cuda", i) for i in range(count)), torch.device("cpu")]


def has_kernels(device: torch.device) -> bool:
    """Whether kernels should run there, if all is well."""
    if device.type != "cuda" or torch.version.hip:
        return False
    try:
        kernels.find("rms_norm_fwd", gpu_of(device.index))
    except UnsupportedError:
        return False
    return True


def expects_kernels() -> bool:
    return any(map(has_kernels, devices()))


# Sections ------------------------------------------------------------------------------------------------------------


def versions(problems: list[Problem]) -> dict[str, str]:
    found = {
        "quackish": f"{__version__}, {Path(__file__).parents[1]}",
        "Python": f"{platform.python_version()}, {sys.executable}",
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda}",
        "driver": _driver(),
        **{name: version(name) for name in ("nvidia-cutlass-dsl", "apache-tvm-ffi", *PEERS)},
    }
    if torch.version.hip:
        found["torch"] = f"{torch.__version__}, ROCm {torch.version.hip}"
    installed = {**found, "torch": torch.__version__}
    for name, (least, below) in SUPPORTED.items():
        if not installed[name] or (name != "torch" and not expects_kernels()):
            continue
        if _number(installed[name]) < _number(least) or (below and _number(installed[name]) >= _number(below)):
            wanted = f"{name}>={least}" + f",<{below}" * bool(below)
            problems.append(
                Problem(f"{name} {installed[name]} is not one that quackish works with", f"`pip install '{wanted}'`.")
            )
    return {name: text for name, text in found.items() if text}


def gpus(problems: list[Problem], notes: list[str]) -> list[dict[str, Any]]:
    if not torch.cuda.is_available():
        _why_no_gpu(problems, notes)
        return []
    rows = []
    for device in devices()[:-1]:
        p, gpu = torch.cuda.get_device_properties(device), gpu_of(device.index)
        rows.append(
            dict(
                device=str(device), name=p.name, capability=f"{p.major}.{p.minor}", target=gpu.target,
                sms=p.multi_processor_count, memory_bytes=p.total_memory,
            )
        )  # fmt: skip
    return rows


def _why_no_gpu(problems: list[Problem], notes: list[str]) -> None:
    """Why torch sees none: a problem where there should be one, else a note."""
    driver, hidden = toolchain.driver_cuda(), os.environ.get("CUDA_VISIBLE_DEVICES")
    loaded, present = (_DRIVER / "version").exists(), bool(glob.glob(str(_DRIVER / "gpus" / "*")))
    portable = "the portable path runs on the CPU."
    if torch.version.hip or (driver is None and not loaded):
        notes.append(f"no NVIDIA driver is here: {portable}")
    elif hidden is not None and not hidden.replace("-1", "").strip(" ,"):
        notes.append(f"CUDA_VISIBLE_DEVICES={hidden!r} hides the GPUs: {portable}")
    elif torch.version.cuda is None:
        what = f"torch {torch.__version__} is built without CUDA, but there is an NVIDIA driver"
        problems.append(Problem(what, "Install a build with CUDA: https://pytorch.org/get-started/locally says how."))
    elif driver is None:
        what = "the NVIDIA driver is loaded, but its library libcuda.so.1 is not found"
        to_do = "In a container: start it with its GPUs (docker run --gpus all). Else install the driver again."
        problems.append(Problem(what, to_do))
    elif driver[0] < _number(torch.version.cuda)[0]:
        what = f"the driver has CUDA {driver[0]}.{driver[1]}, too old for torch, built for {torch.version.cuda}"
        problems.append(Problem(what, f"Install a newer driver, or a build of torch for CUDA {driver[0]}."))
    elif present or not loaded:
        what = f"there is an NVIDIA driver, but torch cannot use it: {_cuda_error()}"
        to_do = "See whether `nvidia-smi` works; after an update of the driver a restart may be due."
        problems.append(Problem(what, to_do))
    else:
        notes.append(f"there is an NVIDIA driver, but no GPU: {portable}")


def _cuda_error() -> str:
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return str(error).split("\n")[0]
    return "no device"


def compiler(problems: list[Problem], notes: list[str]) -> dict[str, str]:
    """The compiler and the runtime library. What is missing is a problem only where a GPU could run kernels."""
    wanted = "`pip install '" + "' '".join(f"{n}>={a},<{b}" for n, (a, b) in SUPPORTED.items() if b) + "'`."
    try:
        tools = toolchain.find()
    except ModuleNotFoundError as error:
        _missing(problems, notes, f"the compiler is not installed ({error})", wanted)
        return {}
    except UnsupportedError as error:
        _missing(problems, notes, *str(error).split(". ", 1))
        return {}
    if not tools.runtime.is_file():
        what = f"the compiler's runtime library is not where it should be, {tools.runtime}"
        again = f"`pip install --force-reinstall nvidia-cutlass-dsl-libs-{tools.flavour}=={tools.dsl}`."
        _missing(problems, notes, what, again)
    if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__") and not version("torch-c-dlpack-ext"):
        notes.append(
            "tvm_ffi builds an extension for this torch when it is first imported, which takes up to a minute. "
            "`pip install torch-c-dlpack-ext` brings it built."
        )
    linker = objects.linker()
    if linker is None:
        notes.append(
            "no linker (ld, ld.lld or mold) is on PATH: kernels that are compiled here load through the compiler, "
            "which takes each process 0.5 s at its first call. `apt-get install binutils` brings one."
        )
    return {
        "nvidia-cutlass-dsl": tools.dsl,
        "built for": f"CUDA {tools.flavour.removeprefix('cu')}",
        "apache-tvm-ffi": tools.ffi,
        "runtime": str(tools.runtime),
        "linker": linker or "none",
    }


def _missing(problems: list[Problem], notes: list[str], what: str, to_do: str) -> None:
    if expects_kernels():
        problems.append(Problem(what, to_do))
    else:
        notes.append(f"{what}. No GPU here would run kernels; `precompile` would need it: {to_do}")


def paths(problems: list[Problem]) -> list[dict[str, str]]:
    """Which path bf16 calls take on each device; why, in the operations' own words, where it is the portable one."""
    rows = []
    for device in devices():
        for op, find in (("rms_norm", rms_norm_path), ("linear_cross_entropy", linear_cross_entropy_path)):
            path, why = find(device)
            rows.append(dict(op=op, device=str(device), path=path, why=why))
            if path == PORTABLE and has_kernels(device) and _tools_are_there():  # else `compiler` tells
                problems.append(Problem(f"{op} takes the portable path on {device}, where kernels should run", why))
    return rows


def _tools_are_there() -> bool:
    try:
        toolchain.find()
    except (ModuleNotFoundError, UnsupportedError):
        return False
    return True


def rms_norm_path(device: torch.device) -> tuple[str, str]:
    """Asks for kernels, which loads or compiles them."""
    b = "bfloat16"
    forward = RmsNormFwdProblem(1024, b, b, b, None, None)
    backward = RmsNormBwdProblem(1024, b, b, b, None, b, None, b, None)
    try:
        for name, problem in (("rms_norm_fwd", forward), ("rms_norm_bwd", backward)):
            find_kernel(name, problem, 1, device, "cute")
    except UnsupportedError as error:
        return PORTABLE, str(error)
    return KERNELS, ""


def linear_cross_entropy_path(device: torch.device) -> tuple[str, str]:
    why = linear_cross_entropy.no_kernel_on(device)
    if why:
        return PORTABLE, why
    try:
        kernels.find("lce_gemm", gpu_of(device.index))
    except UnsupportedError as error:
        return CUBLAS, str(error).split(". ")[0]
    return KERNELS, ""


def cache_health(problems: list[Problem], notes: list[str]) -> dict[str, Any]:
    folder, fault = cache.location(), upkeep.folder_fault()
    if cache.is_off():
        notes.append("QUACKISH_CACHE=0 turns the cache off: each process compiles its own kernels.")
    if fault:
        to_do = (
            "Make it a folder that belongs to you and that only you may write to, or name another: QUACKISH_CACHE_DIR."
        )
        problems.append(Problem(f"the cache folder {folder} cannot be used: {fault}", to_do))
    if not folder.is_dir():
        return {"folder": f"{folder} (not there yet)", "writable": "no" if fault else "yes"}
    found = upkeep.entries()
    bad = [entry for entry in found if entry.fault]
    stale = [entry for entry in found if not entry.fault and upkeep.differs(entry.identity)]
    if bad:
        what = f"{len(bad)} of {len(found)} files in {folder} cannot be used, the first because: {bad[0].fault}"
        problems.append(
            Problem(what, "`python -m quackish cache verify --delete` deletes them; they are compiled again.")
        )
    if stale:
        notes.append(
            f"{len(stale)} of {len(found)} kernels on disk are for other versions, sources or CPUs; "
            "`python -m quackish cache clear --stale` deletes them."
        )
    status = os.stat(folder)
    return {
        "folder": str(folder),
        "mode": f"{stat.S_IMODE(status.st_mode):o}, owner {status.st_uid}" + " (you)" * (status.st_uid == os.geteuid()),
        "writable": "no" if fault else "yes",
        "kernels": len(found),
        "bytes": sum(entry.bytes for entry in found),
        "damaged": len(bad),
        "of no use here": len(stale),
    }


def tuned(problems: list[Problem]) -> dict[str, Any]:
    """The user's table of configs."""
    path = table.user_path()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        rows = table.read(path)
    for warning in said:
        problems.append(Problem(str(warning.message).split(". `")[0], "`python -m quackish tune --clear` removes it."))
    if not rows.rows:
        return {}
    return {"table": str(path), "rows": len(rows.rows), "in use": sum(map(rows.counts, rows.rows))}


def environment() -> dict[str, str]:
    return {name: value for name, value in sorted(os.environ.items()) if _MATTERS.match(name)}


def _driver() -> str:
    """The driver's version and the CUDA that it supports."""
    cuda = toolchain.driver_cuda()
    try:
        line = (_DRIVER / "version").read_text().split("\n")[0]
    except OSError:
        line = ""
    number = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", line)
    words = [number[0] if number else "", f"CUDA {cuda[0]}.{cuda[1]}" if cuda else ""]
    return ", ".join(filter(None, words))


def _number(version: str) -> tuple[int, ...]:
    """(2, 11) of "2.11.0a0+git": what comes before anything but numbers."""
    return tuple(map(int, re.match(r"\d+(\.\d+)*", version)[0].split(".")))
