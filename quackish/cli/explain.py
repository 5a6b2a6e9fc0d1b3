"""Which kernels and configs a shape gets and why, their bytes and FLOPs, and the least time these take.

    python -m quackish explain rms_norm_backward 16384x4096 --gpu b200
    python -m quackish explain linear_cross_entropy 8192x4096x128256 --schedule recompute
    python -m quackish explain grouped_mlp 131072x2048x768x128 --scales

Needs no GPU. Registers and shared memory are read from kernels that are compiled for the GPU in question (a second
each, --no-compile goes without); that takes cuobjdump, of Triton's wheel or the CUDA toolkit.

Of linear cross entropy it shows what each memory_limit would choose, as a table, and with --figure as a figure.
"""

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quackish import kernels, launch
from quackish.bench.console import check_extra, progress
from quackish.cli.dry_run import DryRun, Point, Step
from quackish.cli.operations import add_arguments as add_call
from quackish.cli.operations import frontier, run_dry, which_gpu
from quackish.cli.parser import Refused, one_of
from quackish.configs.choose import Choice
from quackish.gpu import NAMED, Gpu, Roofs, roofs_of
from quackish.launch import Resources
from quackish.profiling import speeds, table_of, text_table
from quackish.work import describe, floor

# Of an SM, as the CUDA C++ Programming Guide gives them for compute capabilities 9.0 and 10.0.
_REGISTERS, _THREADS, _CTAS = 65_536, 2048, 32
_SYSTEM_SMEM_BYTES = 1024  # of each CTA

_Own = list[tuple[str, Any, Choice]]  # kernels of ours, with problem and choice
_Used = dict[tuple[str, Any, Choice], Resources]  # of all of them, or empty


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_call(parser)
    names = {name: name for name in (*NAMED, "cpu", "this")}
    of = f"{', '.join(NAMED)}, cpu, or this, the default where there is one; else h200"
    parser.add_argument("--gpu", type=one_of(names), help=of)
    parser.add_argument("--no-compile", action="store_true", help="leave out what takes compiling: registers and so on")
    figure = "draw what memory limits choose (linear_cross_entropy): writes FILE.svg and FILE.png; extra bench"
    parser.add_argument("--figure", type=Path, metavar="FILE", help=figure)


def run(args: argparse.Namespace) -> int:
    print(text(args, None if args.no_compile else launch.resources))
    return 0


def text(args: argparse.Namespace, resources: Callable[..., Resources] | None) -> str:
    """`resources` compiles a kernel; None leaves out what that takes."""
    if args.figure is not None and args.op != "linear_cross_entropy":
        raise Refused(f"--figure is an option of linear_cross_entropy, not of {args.op}")
    gpu, why = which_gpu(args.gpu)
    found = run_dry(args, gpu)
    where = f"{gpu.name} ({gpu.target}, {gpu.sm_count} SMs)" if gpu else "a CPU"
    head = [f"{args.op} {args.shape} {args.dtype} on {where}", *[f"GPU: {why}"] * bool(why)]
    if found.portable is not None:
        return "\n".join([*head, "Path: the portable path, in plain PyTorch", f"Why: {found.portable}"])
    head += ["Path: quackish's kernels", *(f"{name}: {words}" for name, words in found.plan.items())]
    roofs, notes = roofs_of(gpu), list(found.notes)
    if gpu.family != "sm_90":
        notes.append("These kernels are compiled for Blackwell; none of them has been run there.")
    own = list(dict.fromkeys((s.kernel, s.problem, s.choice) for s in found.steps if s.choice is not None))
    used = _resources(own, gpu, notes, resources) if resources else {}
    notes += dict.fromkeys(f"{s.kernel}: {s.work.note}." for s in found.steps if s.work.note)
    parts = [_launches(found.steps, own, roofs), _kernels(own, gpu)]
    if used:
        parts.append(_taken(used, gpu))
    parts.append(_memory(found))
    if args.op == "linear_cross_entropy":
        points = frontier(args, gpu)
        parts.append(_limits(points, not args.no_grad))
        if not args.no_grad:
            notes.append("Expected times are those of all gradients in bf16: expected_time, beside kernel_config.")
        if args.figure is not None:
            notes.append(f"Wrote {' and '.join(map(str, _draw(args, points, gpu)))}.")
    return "\n\n".join(["\n".join(head), *parts, "\n".join([_roofs(roofs, gpu), *notes])])


def _resources(own: _Own, gpu: Gpu, notes: list[str], resources: Callable[..., Resources]) -> _Used:
    """Empty, with a note, if they cannot be read."""
    used: _Used = {}
    try:
        with progress(len(own), sys.stderr) as show:
            for key in own:
                show(len(used), "compiling kernels")
                name, problem, choice = key
                used[key] = resources(kernels.find(name, gpu), problem, choice.config, gpu.target)
    except (FileNotFoundError, ModuleNotFoundError) as error:
        why = "nvidia-cutlass-dsl, the compiler, is not installed." if isinstance(error, ImportError) else error
        notes.append(f"Registers and shared memory are left out: {why}")
        return {}
    return used


# Sections ------------------------------------------------------------------------------------------------------------


def _launches(steps: list[Step], own: _Own, roofs: Roofs | None) -> str:
    """A table; equal launches are one row, where the first was."""
    equal: dict[tuple, list[Step]] = {}
    for step in steps:
        equal.setdefault((step.phase, step.kernel, step.problem, step.choice, *step.sizes.items()), []).append(step)
    rows, total = [], {"kernel": "all", "calls": len(steps)}
    for step, *others in equal.values():
        amounts = {"read": step.work.bytes_read, "written": step.work.bytes_written, "flops": step.work.flops}
        least = {} if roofs is None else vars(floor(step.work, roofs))
        number = "" if step.choice is None else f"[{own.index((step.kernel, step.problem, step.choice)) + 1}] "
        sizes = step.problem if step.choice is None else describe(None, step.sizes)
        row = {"phase": step.phase, "kernel": number + step.kernel, "sizes": sizes, "calls": 1 + len(others)}
        rows.append(row | amounts | least)
        for key in {"read", "written", "flops", "us"} & rows[-1].keys():
            total[key] = total.get(key, 0) + row["calls"] * rows[-1][key]
    columns = [
        *(("phase", "phase", ""), ("kernel", "kernel", ""), ("sizes", "sizes", ""), ("calls", "calls", "d")),
        *(("read", "read", _bytes), ("written", "written", _bytes), ("FLOPs", "flops", _unit)),
    ]
    if roofs is not None:
        columns += [("floor us", "us", ".1f"), ("bound", "bound", "")]
    return table_of(rows + [total] * (len(steps) > 1), columns)


def _kernels(own: _Own, gpu: Gpu) -> str:
    lines, why = [], {}
    for i, (name, problem, choice) in enumerate(own, 1):
        config = " ".join(f"{name}={value}" for name, value in vars(choice.config).items())
        lines += [f"[{i}] {name}, class {kernels.find(name, gpu).__name__}: {describe(problem, {})}", f"    {config}"]
        why.setdefault(f"{choice.source}: {choice.reason}", []).append(f"[{i}]")
    return "\n".join(lines + [f"{' '.join(which)} {reason}" for reason, which in why.items()])


def _taken(used: _Used, gpu: Gpu) -> str:
    rows = []
    for i, ((name, _, choice), taken) in enumerate(used.items(), 1):
        count, limit = _ctas_per_sm(taken, choice.config, gpu)
        row = {"kernel": f"[{i}] {name}", "ctas_per_sm": count, "limit": limit}
        rows.append(vars(taken) | row | {"threads": taken.threads or choice.config.threads})
    columns = [
        *(("kernel", "kernel", ""), ("registers", "registers", "d"), ("stack B", "stack_bytes", "d")),
        *(("local loads", "local_loads", "d"), ("stores", "local_stores", "d"), ("shared B", "smem_bytes", "d")),
        *(("threads", "threads", "d"), ("CTAs/SM", "ctas_per_sm", "d"), ("limited by", "limit", "")),
    ]
    return table_of(rows, columns)


def _ctas_per_sm(used: Resources, config: Any, gpu: Gpu) -> tuple[int, str]:
    """How many CTAs of a kernel an SM holds at a time, and what it runs out of first."""
    threads = used.threads or config.threads
    warp_registers = -(-used.registers * 32 // 256) * 256  # allocated in units of 256 per warp
    fit = {
        "registers": _REGISTERS // (warp_registers * -(-threads // 32)),
        "shared memory": gpu.smem_bytes_per_sm // (used.smem_bytes + _SYSTEM_SMEM_BYTES),
        "threads": _THREADS // threads,
        "CTAs": _CTAS,
    }
    limit = min(fit, key=fit.__getitem__)
    return fit[limit], limit


def _memory(found: DryRun) -> str:
    large = [buffer for buffer in found.buffers if buffer.bytes * 100 >= found.peak_bytes]
    rows = [[_bytes(buffer.bytes), buffer.text] for buffer in large]
    if small := found.peak_bytes - sum(buffer.bytes for buffer in large):
        rows.append([_bytes(small), "smaller ones"])
    return text_table([_bytes(found.peak_bytes), "memory beside the inputs, at its peak"], rows, "rl")


def _limits(points: list[Point], grad: bool) -> str:
    """What each memory limit chooses."""
    rows = [
        {
            "mb": math.ceil(point.bytes / 1e5) / 10,  # a limit of so much is enough
            "schedule": point.how.schedule,
            "rows": point.rows,
            "time": point.time if grad else None,
        }
        for point in points
    ]
    columns = [("memory_limit from MB", "mb", ",.1f"), ("schedule", "schedule", ""), ("chunk rows", "rows", "d")]
    return table_of(rows, [*columns, ("expected time / 3 GEMMs", "time", ".2f")][: 3 + grad])


def _draw(args: argparse.Namespace, points: list[Point], gpu: Gpu) -> list[Path]:
    from quackish.bench import plots

    try:
        check_extra()
    except ImportError as error:
        raise Refused(str(error)) from None
    title = f"linear_cross_entropy {args.shape} {args.dtype}"
    drawn = [(point.how.schedule, point.bytes / 1e9, point.time) for point in points]
    return plots.of_limits(drawn, title, gpu.name, args.figure.with_suffix(""))


def _roofs(roofs: Roofs | None, gpu: Gpu) -> str:
    if roofs is None:
        return f"No roofs are known for {gpu.name}, so there are no floors."
    return f"Floors are for {speeds(roofs)} ({roofs.source}). {roofs.note}".rstrip()


def _bytes(value: float) -> str:
    return _unit(value, "B")


def _unit(value: float, unit: str = "") -> str:
    for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.{2 if value < 10 * size else 1}f} {prefix}{unit}"
    return f"{value:.0f} {unit}".rstrip()
