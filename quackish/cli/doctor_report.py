"""The report of `doctor`: its sections, what each finds wrong, and what to do."""

import itertools
import os
import platform
import re
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quackish._version import __version__
from quackish.bench import torch_kernel
from quackish.bench.environment import PEERS, device_to_measure, driver_version, version
from quackish.bench.environment import environment as measured_on
from quackish.cli import check
from quackish.cli.check import Case
from quackish.cli.check_call import Check
from quackish.cli.check_processes import checks, per_kernel, run_all, summary
from quackish.cli.console import progress
from quackish.cli.parser import program_name
from quackish.device import cache, objects, toolchain, tuned, upkeep, variables
from quackish.device.files import why_no_output
from quackish.device.spec import KernelSpec
from quackish.errors import UnsupportedError
from quackish.gpu import FAMILIES, Gpu, gpu_of
from quackish.ops.shared.for_tools import Args, in_fp64
from quackish.testing.errors import error, same_bits
from quackish.text import fill, width

Tensors = dict[str, Tensor]

DSL = "nvidia-cutlass-dsl"
DSL_PARTS = tuple(f"{DSL}-libs-{part}" for part in ("base", "core", "cu12", "cu13"))
_RELEVANT_VARIABLES = re.compile(
    "QUACKISH_|CUTE_DSL_|CUDA_|NVIDIA_VISIBLE_DEVICES$|TORCH_|PYTORCH_|TRITON_|LOCAL_WORLD_SIZE$|LD_LIBRARY_PATH$"
    "|LD_PRELOAD$|XDG_(CACHE|CONFIG)_HOME$|TMPDIR$"
)


# PyTorch 2.14 is the last with wheels for CUDA 12. pip would keep another build of the same version without --force.
CUDA_12_TORCH = "`pip install --force-reinstall 'torch<2.15' --index-url https://download.pytorch.org/whl/cu126`"


class Report(dict):
    """The results of each section by title, `notes`, and `problems` with suggestions."""

    def __init__(self) -> None:
        super().__init__(notes=[], problems=[])
        self.note = self["notes"].append

    def problem(self, what: str, to_do: str) -> None:
        """`to_do` is a full sentence."""
        self["problems"].append({"what": what, "to_do": to_do})


def examine(sections: Mapping[str, Callable[[Report], Any]]) -> Report:
    """Runs all sections. A section that raises is reported as a problem, and the next ones still run."""
    report = Report()
    for name, section in sections.items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the report covers them
                report[name] = section(report)
        except Exception as error:  # this command must work on broken installations
            report.problem(f"{name}: {type(error).__name__}: {error}", "See the error message.")
            report[name] = None
    return report


def text(report: Report) -> str:
    lines = []
    for title, section in report.items():
        if section and title not in ("notes", "problems", "check"):
            lines += [title.capitalize(), *_rows(section), ""]
    lines += [fill(f"Note: {note}", indent="  ") for note in report["notes"]] + [""] * bool(report["notes"])
    problems = report["problems"]
    lines += [f"{len(problems)} problem{'s' if len(problems) > 1 else ''}:"] if problems else ["No problem found."]
    for i, problem in enumerate(problems, 1):
        lines += [fill(problem["what"], f"  {i}. "), fill(problem["to_do"], "     ")]
    return "\n".join(lines)


def _rows(section: Mapping[str, str]) -> list[str]:
    """Values beside names; below them if the section has a long name, or the value is too long for one line."""
    given = {name: value for name, value in section.items() if value not in (None, "")}
    column = max(map(len, given), default=0)
    rows = []
    for name, value in given.items():
        row = f"  {name:{column}}  {value}"
        rows.append(row if len(row) <= width() else f"  {name}\n{fill(value, '    ')}")
    return rows


# Versions and GPUs ---------------------------------------------------------------------------------------------------


def devices() -> list[torch.device]:
    """All GPUs, or the CPU."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [torch.device("cuda", i) for i in range(count)] or [torch.device("cpu")]


def has_kernels(device: torch.device, spec: KernelSpec | None = None) -> bool:
    """True if a kernel of `spec`, or any, should run on `device`."""
    if device.type != "cuda" or torch.version.hip:
        return False
    return gpu_of(device.index).family in (FAMILIES if spec is None else spec.on)


def versions(report: Report) -> dict[str, str]:
    built_for = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
    cuda = toolchain.driver_cuda()
    installed = {
        "quackish": f"{__version__}, {Path(__file__).parents[1]}",
        "Python": f"{platform.python_version()}, {sys.executable}",
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "torch": f"{torch.__version__}, {built_for}",
        "driver": f"{driver_version() or 'unknown version'}, CUDA {cuda[0]}.{cuda[1]}" if cuda else "",
        **{name: version(name) for name in (DSL, "apache-tvm-ffi", *PEERS)},
    }
    check_versions(report, {**installed, "torch": torch.__version__}, any(map(has_kernels, devices())))
    check_parts(report, {name: version(name) for name in (DSL, *DSL_PARTS)})
    return {**installed, "CuTe kernels of PyTorch": cute_kernels_of_torch(report, torch_kernel.status())}


def check_versions(report: Report, installed: Mapping[str, str], with_kernels: bool) -> None:
    """Reports versions that are not supported. with_kernels: a GPU here could run kernels."""
    for name in toolchain.SUPPORTED:
        if installed[name] and (name == "torch" or with_kernels) and not _is_supported(name, installed[name]):
            report.problem(f"{name} {installed[name]} is not supported", f"{toolchain.install(name)}.")


def check_parts(report: Report, installed: Mapping[str, str]) -> None:
    """Reports parts of the compiler that are installed in another version than the compiler.

    pip leaves a part as it is if the compiler is installed in another version without naming the extra.
    """
    for name in DSL_PARTS:
        if installed[name] and installed[name] != installed[DSL]:
            what = f"{name} {installed[name]} does not belong to {DSL} {installed[DSL] or '(not installed)'}"
            report.problem(what, f"{_install_dsl(installed[DSL] or installed[name])}.")


def cute_kernels_of_torch(report: Report, status: torch_kernel.Status) -> str:
    """Says if F.linear_cross_entropy and F.rms_norm run PyTorch's own kernels. A note says how to turn them on."""
    if not status.exists:
        return ""
    usable = [number for number in status.versions if _is_supported(DSL, number)]
    if usable:
        report.note(
            "PyTorch's own CuTe kernels (F.linear_cross_entropy, F.rms_norm, topk, scatter_add) are off with this "
            f"version of the compiler: {_install_dsl(usable[-1])} turns them on, and quackish runs with it too."
        )
    return "on" if status.is_on else f"off: {status.why}"


def _install_dsl(number: str) -> str:
    """The command that installs this version of the compiler, and of its build for CUDA 13 if there is one here."""
    extra = "[cu13]" if version(DSL_PARTS[-1]) else ""
    return f"`pip install '{DSL}{extra}=={number}'`"


def _is_supported(name: str, number: str) -> bool:
    minimum, below = toolchain.SUPPORTED[name]
    return _numbers(number) >= _numbers(minimum) and not (below and _numbers(number) >= _numbers(below))


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
    """Reports why torch has no GPU.

    A driver that torch cannot use is a problem. No driver, or one without a GPU as on a login node, is a note.
    """
    portable = "the portable path runs on the CPU."
    if torch.version.hip or driver is None:
        report.note(f"there is no NVIDIA driver (containers need `docker run --gpus all`): {portable}")
        return
    try:
        init()
    except (RuntimeError, AssertionError) as error:
        message, visible = _first_line(error), os.environ.get("CUDA_VISIBLE_DEVICES")
        if "No CUDA GPUs are available" in message:
            among = "" if visible is None else f" among CUDA_VISIBLE_DEVICES={visible!r}"
            report.note(f"there is an NVIDIA driver but no GPU{among}: {portable}")
            return
        to_do = "Check that `nvidia-smi` lists a GPU, and that torch is built for a CUDA version the driver supports: "
        to_do += "https://pytorch.org/get-started/locally."
        if driver[0] == 12 and not (torch.version.cuda or "").startswith("12."):
            to_do = (
                f"The driver supports CUDA 12, torch is built for {torch.version.cuda}. Update the driver to CUDA 13, "
            )
            to_do += f"or install the last PyTorch for CUDA 12: {CUDA_12_TORCH}."
        report.problem(f"there is an NVIDIA driver, but torch cannot use it: {message}", to_do)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _numbers(version: str) -> tuple[int, ...]:
    """The numbers of a version: (2, 11, 0) from "2.11.0a0+git"."""
    return tuple(map(int, re.match(r"\d+(\.\d+)*", version)[0].split(".")))


# The compiler, the cache and the environment -------------------------------------------------------------------------


def compiler(
    report: Report, find: Callable[[], toolchain.Toolchain] = toolchain.find, expected: bool | None = None
) -> dict[str, str]:
    """A missing compiler is a problem only if a GPU here could run kernels (`expected`)."""
    if expected is None:
        expected = any(map(has_kernels, devices()))
    try:
        tools = find()
    except UnsupportedError as error:
        what, _, to_do = str(error).partition(". ")
        if expected:
            report.problem(what, to_do)
        else:
            report.note(f"{what}. No GPU here runs kernels; only `precompile` needs the compiler: {to_do}")
        return {}
    linker = objects.linker()
    if linker is None:
        report.note(
            "no linker (ld, ld.lld or mold) is on PATH: kernels that are compiled here load through the compiler, "
            "which adds 0.5 s to the first call of each process. `apt-get install binutils` installs one."
        )
    built_for = f"CUDA {tools.flavour.removeprefix('cu')}"
    return {"built for": built_for, "runtime": str(tools.runtime), "linker": linker or "none"}


def cache_health(report: Report) -> dict[str, str]:
    folder, fault, entries = cache.location(), upkeep.folder_fault(), upkeep.entries()
    bad = [entry for entry in entries if entry.fault]
    stale = [entry for entry in entries if not entry.fault and upkeep.why_unusable(entry.identity)]
    if cache.is_off():
        report.note("QUACKISH_CACHE=0 turns the cache off: each process compiles its own kernels.")
    if fault:
        to_do = "Use a folder that belongs to you and is writable only by you; QUACKISH_CACHE_DIR names another."
        report.problem(f"the cache folder {folder} cannot be used: {fault}", to_do)
    if bad:
        what = f"{len(bad)} of {len(entries)} files in {folder} cannot be used, the first because: {bad[0].fault}"
        report.problem(what, f"`{program_name()} cache verify --delete` deletes them; they are compiled again.")
    if stale:
        what = f"{len(stale)} of {len(entries)} kernels on disk are for other versions, sources or CPUs; "
        report.note(f"{what}`{program_name()} cache clear --stale` deletes them.")
    location = f"{folder}" if folder.is_dir() else f"{folder} (does not exist yet)"
    return {"folder": location, "kernels": f"{len(entries)}, {sum(entry.bytes for entry in entries) / 1e6:.2f} MB"}


def environment(report: Report) -> dict[str, str]:
    """The environment variables that matter, and the table. Reports those that have no effect."""
    for what, to_do in variables.faults():
        report.problem(what, to_do)
    if why := why_no_output(tuned.path().parent):
        what, to_do = f"`tune` cannot store configs: {why}", "QUACKISH_CONFIG_DIR names another folder."
        if variables.get(variables.CONFIG_DIR) and not tuned.path().exists():  # so the variable has no effect
            report.problem(what, to_do)
        else:
            report.note(f"{what}; {to_do}")
    configs = {"table of tuned configs": str(tuned.path())} if tuned.path().exists() else {}
    return configs | {name: value for name, value in sorted(os.environ.items()) if _RELEVANT_VARIABLES.match(name)}


KERNELS, PORTABLE = "kernels", "portable path"
OPERATIONS = {name: case for name, case in check.SELF_TESTS.items() if "," not in name}


def operations(
    report: Report,
    cases: Mapping[str, Case] = OPERATIONS,
    on: Sequence[torch.device] | None = None,
    expects: Callable = has_kernels,
) -> dict[str, str]:
    """Path and results of each case on each device (default: all), and why the portable path runs if it does."""
    rows, todo = {}, list(itertools.product(on or devices(), cases.items()))
    show = progress(len(todo), "operations")
    for i, (device, (name, case)) in enumerate(todo):
        show(i, f"{name} on {device}")
        args, path, why_portable = case.make(device), KERNELS, ""
        try:
            try:
                runs = case.call(args, "cute"), case.call(args, "cute")
            except UnsupportedError as unsupported:
                path, why_portable = PORTABLE, str(unsupported)
                runs = case.call(args, "auto"), case.call(args, "auto")
            summary, fault = _check_results(case, args, *runs, path)
        except Exception as failure:
            summary, fault = "", f"does not run: {type(failure).__name__}: {_first_line(failure)}"
        verdict = f"{path}: {'WRONG' if fault else 'ok'}"
        rows[f"{name} on {device}"] = "; ".join(filter(None, (verdict, summary, why_portable)))
        if fault:
            report.problem(f"{name} on {device} ({path}) {fault}", _please_report("--json"))
        # A missing compiler is reported by `compiler`.
        if why_portable and case.spec is not None and expects(device, case.spec) and toolchain.versions() is not None:
            report.problem(f"{name} runs the portable path on {device}, expected kernels", why_portable)
    return rows


def _check_results(case: Case, args: Args, first: Tensors, second: Tensors, path: str) -> tuple[str, str]:
    """Returns (a summary of the results of two runs, what is wrong). "" means nothing is wrong."""
    truth = case.call(in_fp64(args), "reference")
    errors = {name: error(first[name].cpu().double(), truth[name]).norm for name in first}
    wrong = []
    for name, off in errors.items():
        bound = case.bound_of(name)
        if not off <= bound:
            wrong.append(f"{name} has error {off:.1e}, expected at most {bound:.0e}")
    same = all(same_bits(first[name], second[name]) for name in first)
    bits = "same bits in two runs" if same else "different bits in two runs"
    fault = f"gives wrong results: {', '.join(wrong)}" if wrong else ""
    if not wrong and not same and path == KERNELS:  # the portable path depends on PyTorch's GEMMs
        fault = f"gives {bits}"
    return f"errors {', '.join(f'{name} {off:.1e}' for name, off in errors.items())}; {bits}", fault


def _please_report(option: str) -> str:
    return f"Please report it, with the output of `{program_name()} doctor {option}`."


# {title: function that returns the rows of a section, and adds notes and problems to the report}
SECTIONS: dict[str, Callable[[Report], Any]] = {
    "versions": versions,
    "gpus": gpus,
    "compiler": compiler,
    "operations": operations,
    "cache": cache_health,
    "environment": environment,
}


def check_kernels(
    report: Report, todo: Sequence[Check] | None = None, device: torch.device | None = None, gpu: Gpu | None = None,
    **options: Any,
) -> dict[str, str]:  # fmt: skip
    """Runs checks (default: all of the current GPU). The file gets their records, the report a line per kernel."""
    device = device or device_to_measure()
    gpu = gpu or gpu_of(device.index)
    records = run_all(checks(gpu) if todo is None else todo, str(device), **options)
    rows = per_kernel(records, gpu)
    report["check"] = {"environment": measured_on(device), "kernels": rows, "calls": records}
    for record in records:
        if record["result"] != "ok":
            what = f"{record['call']}: {record['result']}"
            report.problem(f"{what}: {record['message']}", _please_report("--check"))
    return {row["kernel"]: summary(row) for row in rows}


# With --check.
CHECKS: dict[str, Callable[[Report], Any]] = {"kernels": check_kernels}
