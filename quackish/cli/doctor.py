"""What runs here and why, and whether it works: versions, GPUs, each operation's path and results, the cache.

    python -m quackish doctor
    python -m quackish doctor --json
    python -m quackish doctor --check     # on a GPU that quackish has not seen: tests and times every kernel

Ends with 1 where something is wrong, and says what to do about it. Each operation is compared, forward and backward,
with its formula in fp64, and its bits with those of a second run. This takes a second, and longer where kernels are
compiled for the first time.
"""

import argparse
import functools
import itertools
import json
import os
import platform
import re
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from quackish import __version__, kernels, toolchain
from quackish.bench.environment import PEERS, driver_version, version
from quackish.cli import check
from quackish.cli.check import Case, Tensors
from quackish.cli.parser import Refused
from quackish.configs import table
from quackish.errors import UnsupportedError
from quackish.gpu import gpu_of
from quackish.launch import cache, objects, upkeep
from quackish.testing.errors import error, same_bits

# At least, and less than: as in pyproject.toml.
SUPPORTED = {
    "torch": ("2.9", None),
    "nvidia-cutlass-dsl": ("4.8.1", "4.9"),
    "apache-tvm-ffi": ("0.1.15", "0.2"),
}
_MATTERS = re.compile(
    "QUACKISH_|CUTE_DSL_|CUDA_|NVIDIA_VISIBLE_DEVICES$|TORCH_|PYTORCH_|TRITON_|LOCAL_WORLD_SIZE$|LD_LIBRARY_PATH$"
    "|LD_PRELOAD$|XDG_(CACHE|CONFIG)_HOME$|TMPDIR$"
)


class Report(dict):
    """What each section found, by name; `notes`, and `problems`, each with what to do about it."""

    def __init__(self) -> None:
        super().__init__(notes=[], problems=[])
        self.note = self["notes"].append

    def problem(self, what: str, to_do: str) -> None:
        """`to_do` is a sentence."""
        self["problems"].append({"what": what, "to_do": to_do})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="the same as JSON, to put into a bug report")
    check_help = "also test every kernel and time the large ones; writes it all to FILE, to attach to an issue; "
    default = Path("quackish-check.json")
    parser.add_argument(
        "--check", nargs="?", type=Path, const=default, metavar="FILE", help=f"{check_help}default {default}"
    )


def run(args: argparse.Namespace) -> int:
    report = examine(SECTIONS | CHECKS if args.check else SECTIONS)
    print(json.dumps(report, indent=1) if args.json else text(report))
    if args.check:
        try:
            args.check.write_text(json.dumps(report, indent=1) + "\n")
        except OSError as error:
            raise Refused(f"the report above cannot be written: {error}") from None
        print(f"written to {args.check}", file=sys.stderr)
    return 1 if report["problems"] else 0


def examine(sections: Mapping[str, Callable[[Report], Any]]) -> Report:
    """Runs all sections. One that raises is a problem and hides no other."""
    report = Report()
    for name, section in sections.items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # what they say is in the report
                report[name] = section(report)
        except Exception as error:  # to find what is broken is what this command is for
            report.problem(f"{name}: {type(error).__name__}: {error}", "The message says what to look at.")
            report[name] = None
    return report


def text(report: Report) -> str:
    lines = []
    for title, section in report.items():
        if section and title not in ("notes", "problems"):
            width = max(map(len, section))
            found = [f"  {name:{width}}  {value}" for name, value in section.items() if value not in (None, "")]
            lines += [title.capitalize(), *found, ""]
    lines += [f"Note: {note}" for note in report["notes"]] + [""] * bool(report["notes"])
    problems = report["problems"]
    lines += [f"{len(problems)} problem{'s' if len(problems) > 1 else ''}:"] if problems else ["No problem found."]
    for i, problem in enumerate(problems, 1):
        lines += [f"  {i}. {problem['what']}", f"     {problem['to_do']}"]
    return "\n".join(lines)


# Versions and GPUs ---------------------------------------------------------------------------------------------------


def devices() -> list[torch.device]:
    """The GPUs; the CPU if there is none."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [torch.device("cuda", i) for i in range(count)] or [torch.device("cpu")]


def has_kernels(device: torch.device, kernel: str = "rms_norm_fwd") -> bool:
    """Whether this kernel should run there, if all is well."""
    return device.type == "cuda" and not torch.version.hip and gpu_of(device.index).family in kernels.TABLE[kernel][1]


def versions(report: Report) -> dict[str, str]:
    built_for = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
    cuda = toolchain.driver_cuda()
    found = {
        "quackish": f"{__version__}, {Path(__file__).parents[1]}",
        "Python": f"{platform.python_version()}, {sys.executable}",
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "torch": f"{torch.__version__}, {built_for}",
        "driver": f"{driver_version() or 'version not known'}, CUDA {cuda[0]}.{cuda[1]}" if cuda else "",
        **{name: version(name) for name in ("nvidia-cutlass-dsl", "apache-tvm-ffi", *PEERS)},
    }
    check_versions(report, {**found, "torch": torch.__version__}, any(map(has_kernels, devices())))
    return found


def check_versions(report: Report, installed: Mapping[str, str], with_kernels: bool) -> None:
    for name, (least, below) in SUPPORTED.items():
        if not installed[name] or not (name == "torch" or with_kernels):
            continue
        found = _numbers(installed[name])
        if found < _numbers(least) or (below and found >= _numbers(below)):
            wanted = f"{name}>={least}" + f",<{below}" * bool(below)
            report.problem(
                f"{name} {installed[name]} is not one that quackish works with", f"`pip install '{wanted}'`."
            )


def gpus(report: Report) -> dict[str, str]:
    if not torch.cuda.is_available():
        why_no_gpu(report, toolchain.driver_cuda())
        return {}
    rows = {}
    for device in devices():
        p, target = torch.cuda.get_device_properties(device), gpu_of(device.index).target
        size = f"{p.multi_processor_count} SMs, {p.total_memory / 1e9:.1f} GB"
        rows[str(device)] = f"{p.name}, compute capability {p.major}.{p.minor} ({target}), {size}"
    return rows


def why_no_gpu(report: Report, driver: tuple[int, int] | None, init: Callable[[], None] = torch.cuda.init) -> None:
    """A driver that torch cannot use is a problem; no driver, or one without a GPU, as on a login node, is none."""
    portable = "the portable path runs on the CPU."
    if torch.version.hip or driver is None:
        report.note(f"no NVIDIA driver is here (a container gets it by `docker run --gpus all`): {portable}")
        return
    try:
        init()
    except (RuntimeError, AssertionError) as error:
        said, hidden = _first_line(error), os.environ.get("CUDA_VISIBLE_DEVICES")
        if "No CUDA GPUs are available" in said:
            among = "" if hidden is None else f" among CUDA_VISIBLE_DEVICES={hidden!r}"
            report.note(f"there is an NVIDIA driver but no GPU{among}: {portable}")
            return
        to_do = "See whether `nvidia-smi` lists a GPU, and whether torch is built for a CUDA that the driver supports: "
        to_do += "https://pytorch.org/get-started/locally."
        report.problem(f"there is an NVIDIA driver, but torch cannot use it: {said}", to_do)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _numbers(version: str) -> tuple[int, ...]:
    """(2, 11) of "2.11.0a0+git": what comes before anything but numbers."""
    return tuple(map(int, re.match(r"\d+(\.\d+)*", version)[0].split(".")))


# The compiler, the cache and the environment -------------------------------------------------------------------------


def compiler(
    report: Report, find: Callable[[], toolchain.Toolchain] = toolchain.find, expected: bool | None = None
) -> dict[str, str]:
    """What is missing is a problem only where a GPU could run kernels: `expected`."""
    try:
        tools = find()
    except UnsupportedError as error:
        what, _, to_do = str(error).partition(". ")
        if any(map(has_kernels, devices())) if expected is None else expected:
            report.problem(what, to_do)
        else:
            report.note(f"{what}. No GPU here would run kernels; `precompile` would need it: {to_do}")
        return {}
    linker = objects.linker()
    if linker is None:
        report.note(
            "no linker (ld, ld.lld or mold) is on PATH: kernels that are compiled here load through the compiler, "
            "which takes each process 0.5 s at its first call. `apt-get install binutils` brings one."
        )
    built_for = f"CUDA {tools.flavour.removeprefix('cu')}"
    return {"built for": built_for, "runtime": str(tools.runtime), "linker": linker or "none"}


def cache_health(report: Report) -> dict[str, str]:
    folder, fault, found = cache.location(), upkeep.folder_fault(), upkeep.entries()
    bad = [entry for entry in found if entry.fault]
    stale = [entry for entry in found if not entry.fault and upkeep.differs(entry.identity)]
    if cache.is_off():
        report.note("QUACKISH_CACHE=0 turns the cache off: each process compiles its own kernels.")
    if fault:
        to_do = "Make it a folder that belongs to you and that only you may write to, or name another: "
        report.problem(f"the cache folder {folder} cannot be used: {fault}", f"{to_do}QUACKISH_CACHE_DIR.")
    if bad:
        what = f"{len(bad)} of {len(found)} files in {folder} cannot be used, the first because: {bad[0].fault}"
        report.problem(what, "`python -m quackish cache verify --delete` deletes them; they are compiled again.")
    if stale:
        what = f"{len(stale)} of {len(found)} kernels on disk are for other versions, sources or CPUs; "
        report.note(f"{what}`python -m quackish cache clear --stale` deletes them.")
    there = f"{folder}" if folder.is_dir() else f"{folder} (not there yet)"
    return {"folder": there, "kernels": f"{len(found)}, {sum(entry.bytes for entry in found) / 1e6:.2f} MB"}


def environment(report: Report) -> dict[str, str]:
    tuned = {"table of tuned configs": str(table.path())} if table.path().exists() else {}
    return tuned | {name: value for name, value in sorted(os.environ.items()) if _MATTERS.match(name)}


# The operations ------------------------------------------------------------------------------------------------------

KERNELS, PORTABLE = "kernels", "portable path"
# Norm-wise, of bf16 results: 1 to 4 times its unit roundoff. The loss is fp32.
_BOUNDS = {"y": 0.004, "loss": 1e-4, "lse": 1e-4}
_GRAD_BOUND = 0.008
_REPORT = "Please report it, with the output of `python -m quackish doctor --json`."
OPERATIONS = {name: case for name, case in check.SELF_TESTS.items() if "," not in name}


def operations(
    report: Report, cases: Mapping[str, Case] = OPERATIONS, expects: Callable = has_kernels
) -> dict[str, str]:
    """Each case on each device: its path, why where it is the portable one, and whether its results are right."""
    rows = {}
    for device, (name, case) in itertools.product(devices(), cases.items()):
        given, path, why = case.make(device), KERNELS, ""
        try:
            try:
                runs = [case.call(given, "cute") for _ in range(2)]
            except UnsupportedError as unsupported:
                path, why = PORTABLE, str(unsupported)
                runs = [case.call(given, "auto") for _ in range(2)]
            found, fault = _judge(case, given, *runs, path)
        except Exception as failure:
            found, fault = "", f"does not run: {type(failure).__name__}: {_first_line(failure)}"
        verdict = f"{path}: {'WRONG' if fault else 'ok'}"
        rows[f"{name} on {device}"] = "; ".join(filter(None, (verdict, found, why)))
        if fault:
            report.problem(f"{name} on {device} ({path}) {fault}", _REPORT)
        if why and expects(device, case.kernel) and toolchain.versions() is not None:  # else `compiler` tells
            report.problem(f"{name} takes the portable path on {device}, where kernels should run", why)
    return rows


def _judge(case: Case, given: Tensors, first: Tensors, again: Tensors, path: str) -> tuple[str, str]:
    """What was found; what is wrong, or ""."""
    on_cpu = {name: t.cpu() for name, t in given.items()}
    truth = case.call({name: t.double() if t.is_floating_point() else t for name, t in on_cpu.items()}, "reference")
    errors = {name: error(first[name].cpu().double(), truth[name]).norm for name in first}
    same = all(same_bits(first[name], again[name]) for name in first)
    bounds = {name: _BOUNDS.get(name, _GRAD_BOUND) for name in errors}
    wrong = [
        f"{name} is off by {off:.1e}, at most {bounds[name]:.0e} expected"
        for name, off in errors.items()
        if not off <= bounds[name]
    ]
    fault = f"gives wrong results: {', '.join(wrong)}" if wrong else ""
    if not wrong and not same and path == KERNELS:  # the portable path is as reproducible as the library's GEMMs are
        fault = "gives other bits in a second run"
    bits = "the same bits twice" if same else "other bits in a second run"
    return f"errors {', '.join(f'{name} {off:.1e}' for name, off in errors.items())}; {bits}", fault


# Titles of the sections, and what finds out what they hold.
SECTIONS = {
    "versions": versions,
    "gpus": gpus,
    "compiler": compiler,
    "operations": operations,
    "cache": cache_health,
    "environment": environment,
}
# In their place with --check, and beside them.
CHECKS = {
    "operations": functools.partial(operations, cases=check.SELF_TESTS),
    "speed": lambda report: check.speeds(list(filter(has_kernels, devices()))),
}
