"""What `explain` says: an operation's launches, their kernels, and what these take of an SM; as JSON and as text."""

import dataclasses
import importlib.util
import sys
from collections.abc import Iterable
from typing import Any

from quackish import kernels, launch
from quackish.cli.dry_run import Step, Trace
from quackish.gpu import Gpu, Roofs, roofs_of
from quackish.launch import Resources
from quackish.profiling import text_table
from quackish.work import KERNELS, describe, floor

# Of an SM, as the CUDA C++ Programming Guide gives them for compute capabilities 9.0 and 10.0.
_REGISTERS, _THREADS, _CTAS = 65_536, 2048, 32
_SYSTEM_SMEM_BYTES = 1024  # of each CTA


class Refused(Exception):
    """An argument is not what was expected; the sentence says which, what it was and what was expected."""


@dataclasses.dataclass(frozen=True)
class Explained:
    op: str
    shape: str
    dtype: str
    gpu: Gpu | None
    portable: str | None  # why the portable path runs; None where kernels do
    plan: dict[str, str] = dataclasses.field(default_factory=dict)  # what was decided, and why
    trace: Trace | None = None
    notes: list[str] = dataclasses.field(default_factory=list)


# What there is to say ------------------------------------------------------------------------------------------------


def report(e: Explained, compiling: bool) -> dict[str, Any]:
    """Everything, as JSON has it."""
    gpu = None if e.gpu is None else {"name": e.gpu.name, "target": e.gpu.target, "sm_count": e.gpu.sm_count}
    content = {"op": e.op, "shape": e.shape, "dtype": e.dtype, "gpu": gpu}
    content["path"] = "kernels" if e.portable is None else "portable"
    content["why"] = e.portable or "the table of kernels has them for this GPU, dtype and shape"
    content |= {"plan": e.plan, "notes": list(e.notes)}
    if e.trace is None:
        return content
    if e.gpu.family == "sm_100":
        content["notes"].append("These kernels are compiled for Blackwell; none of them has been run there.")
    roofs = roofs_of(e.gpu)
    own = list(dict.fromkeys((s.kernel, s.problem, s.choice) for s in e.trace.steps if s.choice is not None))
    used = dict(zip(own, _resources(own, e.gpu, content["notes"]) if compiling else [], strict=False))
    content["roofs"] = roofs and dataclasses.asdict(roofs)
    content["launches"] = _launches(e.trace.steps, own, used, e.gpu, roofs)
    content["kernels"] = [_kernel(key, used.get(key), e.gpu) for key in own]
    content["memory"] = {
        "peak_bytes": e.trace.peak_bytes,
        "buffers": [buffer._asdict() for buffer in e.trace.buffers],
    }
    for note in dict.fromkeys(f"{s.kernel}: {s.work.note}." for s in e.trace.steps if s.work.note):
        content["notes"].append(note)
    return content


def _launches(steps: Iterable[Step], own: list, used: dict, gpu: Gpu | None, roofs: Roofs | None) -> list[dict]:
    """Equal ones are one, with a count, where the first was."""
    rows: dict[tuple, dict] = {}
    for step in steps:
        key = step.phase, step.kernel, step.problem, step.choice, tuple(step.sizes.items())
        if key in rows:
            rows[key]["calls"] += 1
            continue
        row = {"phase": step.phase, "kernel": step.kernel, "kernel_index": None, "calls": 1}
        row["sizes"] = step.problem if step.choice is None else describe(None, step.sizes)
        if step.choice is not None:
            mine = step.kernel, step.problem, step.choice
            row["kernel_index"] = own.index(mine) + 1
            ctas, tiles = KERNELS[step.kernel].ctas, KERNELS[step.kernel].tiles
            given = step.problem, step.choice.config, step.sizes
            row["ctas"] = ctas(*given)
            row["tiles_per_cta"] = tiles(*given) / row["ctas"] if tiles else None
            if mine in used:
                row["waves"] = row["ctas"] / (gpu.sm_count * _ctas_per_sm(used[mine], step.choice.config, gpu)[0])
        row |= {"bytes_read": step.work.bytes_read, "bytes_written": step.work.bytes_written, "flops": step.work.flops}
        if roofs is not None:
            least = floor(step.work, roofs)
            row |= {"floor_us": least.us, "bound": least.bound}
        rows[key] = row
    return list(rows.values())


def _kernel(key: tuple, used: Resources | None, gpu: Gpu) -> dict[str, Any]:
    name, problem, choice = key
    fields = {field.name: getattr(choice.config, field.name) for field in dataclasses.fields(choice.config)}
    row = {
        "kernel": name,
        "class": _class_name(name, gpu),
        "problem": describe(problem, {}),
        "config": fields,
        "source": choice.source,
        "reason": choice.reason,
    }
    if used is not None:
        count, limit = _ctas_per_sm(used, choice.config, gpu)
        row |= dataclasses.asdict(used) | {"ctas_per_sm": count, "limited_by": limit}
        row["threads"] = row["threads"] or choice.config.threads
    return row


def _class_name(name: str, gpu: Gpu) -> str:
    return kernels.find(name, gpu).__name__ if _compiler_is_there() else KERNELS[name].class_names[0]


def _compiler_is_there() -> bool:
    return importlib.util.find_spec("cutlass") is not None


def _resources(own: list, gpu: Gpu, notes: list[str]) -> list[Resources]:
    """Of each kernel; none, and a note, where they cannot be had."""
    if not _compiler_is_there():
        notes.append("Registers and shared memory are left out: nvidia-cutlass-dsl, the compiler, is not installed.")
        return []
    found = []
    for i, (name, problem, choice) in enumerate(own, 1):
        if sys.stderr.isatty():
            print(f"\rcompiling {name}, {i} of {len(own)} ... ", end="\r", file=sys.stderr)
        try:
            found.append(launch.resources(kernels.find(name, gpu), problem, choice.config, gpu.target))
        except FileNotFoundError as error:
            notes.append(f"Registers and shared memory are left out: {error}")
            return []
        finally:
            if sys.stderr.isatty():
                print("\033[K", end="\r", file=sys.stderr)
    return found


def _ctas_per_sm(used: Resources, config: Any, gpu: Gpu) -> tuple[int, str]:
    """How many CTAs of a kernel an SM holds at a time, and what it runs out of first."""
    threads = used.threads or config.threads
    warp_registers = -(-used.registers * 32 // 256) * 256  # they are handed out 256 a warp
    fit = {
        "registers": _REGISTERS // (warp_registers * -(-threads // 32)),
        "shared memory": gpu.smem_bytes_per_sm // (used.smem_bytes + _SYSTEM_SMEM_BYTES),
        "threads": _THREADS // threads,
        "CTAs": _CTAS,
    }
    limit = min(fit, key=fit.__getitem__)
    return fit[limit], limit


# ... as text ---------------------------------------------------------------------------------------------------------


def text(c: dict[str, Any]) -> str:
    gpu = c["gpu"]
    where = f"{gpu['name']} ({gpu['target']}, {gpu['sm_count']} SMs)" if gpu else "a CPU"
    paths = {"kernels": "quackish's kernels", "portable": "the portable path, in plain PyTorch"}
    head = [f"{c['op']} {c['shape']} {c['dtype']} on {where}", f"Path: {paths[c['path']]}", f"Why: {c['why']}"]
    parts = ["\n".join(head + [f"{name}: {words}" for name, words in c["plan"].items()])]
    if "launches" in c:
        parts += [_launches_text(c["launches"], c["roofs"]), _kernels_text(c["kernels"]), _resources_text(c["kernels"])]
        c["notes"].insert(0, _roofs_text(c["roofs"], gpu["name"]))
        parts.append(_memory_text(c["memory"]))
    parts.append("\n".join(c["notes"]))
    return "\n\n".join(part for part in parts if part)


def _launches_text(launches: list[dict], roofs: dict | None) -> str:
    header = ["phase", "kernel", "sizes", "calls", "CTAs", "tiles/CTA", "waves", "read", "written", "FLOPs"]
    rows = [
        [
            row["phase"],
            (f"[{row['kernel_index']}] " if row["kernel_index"] else "") + row["kernel"],
            row["sizes"],
            str(row["calls"]),
            _form(row.get("ctas"), "d"),
            _form(row.get("tiles_per_cta"), ".1f"),
            _form(row.get("waves"), ".2f"),
            _unit(row["bytes_read"], "B"),
            _unit(row["bytes_written"], "B"),
            _unit(row["flops"], ""),
        ]
        for row in launches
    ]
    total = ["", "all", "", str(sum(row["calls"] for row in launches)), "", "", ""]
    for key, unit in (("bytes_read", "B"), ("bytes_written", "B"), ("flops", "")):
        total.append(_unit(sum(row["calls"] * row[key] for row in launches), unit))
    if roofs is not None:
        header += ["floor us", "bound"]
        rows = [[*cells, f"{row['floor_us']:.1f}", row["bound"]] for cells, row in zip(rows, launches, strict=True)]
        total += [f"{sum(row['calls'] * row['floor_us'] for row in launches):.1f}", ""]
    if len(rows) > 1 or launches[0]["calls"] > 1:
        rows.append(total)
    return text_table(header, rows, "lllrrrrrrrrl"[: len(header)])


def _kernels_text(found: list[dict]) -> str:
    lines, why = [], {}
    for i, row in enumerate(found, 1):
        config = " ".join(f"{name}={value}" for name, value in row["config"].items())
        lines += [f"[{i}] {row['kernel']}, class {row['class']}: {row['problem']}", f"    {config}"]
        why.setdefault((row["source"], row["reason"]), []).append(f"[{i}]")
    lines += [f"{' '.join(which)} {source}: {reason}" for (source, reason), which in why.items()]
    return "\n".join(lines)


def _resources_text(found: list[dict]) -> str:
    if not found or "registers" not in found[0]:
        return ""
    header = ["kernel", "registers", "stack B", "local loads", "stores", "shared B", "threads", "CTAs/SM", "limited by"]
    rows = [
        [
            f"[{i}] {row['kernel']}",
            *(str(row[name]) for name in ("registers", "stack_bytes", "local_loads", "local_stores", "smem_bytes")),
            str(row["threads"]),
            str(row["ctas_per_sm"]),
            row["limited_by"],
        ]
        for i, row in enumerate(found, 1)
    ]
    return text_table(header, rows, "lrrrrrrrl")


def _memory_text(memory: dict) -> str:
    large = [buffer for buffer in memory["buffers"] if buffer["bytes"] * 100 >= memory["peak_bytes"]]
    rest = memory["peak_bytes"] - sum(buffer["bytes"] for buffer in large)
    rows = [[_unit(buffer["bytes"], "B"), buffer["text"]] for buffer in large]
    rows += [[_unit(rest, "B"), "smaller ones"]] * (rest > 0)
    return text_table([_unit(memory["peak_bytes"], "B"), "memory beside the inputs, at its peak"], rows, "rl")


def _roofs_text(roofs: dict | None, gpu: str) -> str:
    if roofs is None:
        return f"No roofs are known for {gpu}, so there are no floors."
    speeds = f"copy {roofs['copy'] / 1e12:.2f} TB/s, add {roofs['add'] / 1e12:.2f} TB/s, "
    speeds += f"GEMM {roofs['gemm'] / 1e12:.0f} TFLOP/s"
    return " ".join(filter(None, (f"Floors are for {speeds} ({roofs['source']}).", roofs["note"])))


def _form(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _unit(value: float, unit: str) -> str:
    for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.{2 if value < 10 * size else 1}f} {prefix}{unit}"
    return f"{value:.0f} {unit}".rstrip()
