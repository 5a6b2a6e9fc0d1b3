"""What `explain` says: an operation's launches, their kernels, and what these take of an SM; as JSON and as text."""

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

from quackish import kernels, launch
from quackish.cli.dry_run import Step, Trace
from quackish.gpu import Gpu, Roofs, roofs_of
from quackish.launch import Resources
from quackish.profiling import speeds, table_of, text_table
from quackish.work import describe, floor

# Of an SM, as the CUDA C++ Programming Guide gives them for compute capabilities 9.0 and 10.0.
_REGISTERS, _THREADS, _CTAS = 65_536, 2048, 32
_SYSTEM_SMEM_BYTES = 1024  # of each CTA


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


def report(e: Explained, compiling: bool, resources: Callable[..., Resources] = launch.resources) -> dict[str, Any]:
    """Everything, as JSON has it."""
    gpu = e.gpu and {"name": e.gpu.name, "target": e.gpu.target, "sm_count": e.gpu.sm_count}
    content = {"op": e.op, "shape": e.shape, "dtype": e.dtype, "gpu": gpu, "plan": e.plan, "notes": list(e.notes)}
    content["path"] = "kernels" if e.portable is None else "portable"
    content["why"] = e.portable or "the table of kernels has them for this GPU, dtype and shape"
    if e.trace is None:
        return content
    if e.gpu.family == "sm_100":
        content["notes"].append("These kernels are compiled for Blackwell; none of them has been run there.")
    roofs = roofs_of(e.gpu)
    own = list(dict.fromkeys((s.kernel, s.problem, s.choice) for s in e.trace.steps if s.choice is not None))
    used = _resources(own, e.gpu, content["notes"], resources) if compiling else {}
    content["roofs"] = roofs and dataclasses.asdict(roofs)
    content["launches"] = _launches(e.trace.steps, own, roofs)
    content["kernels"] = [_kernel(*key, used.get(key), e.gpu) for key in own]
    buffers = [buffer._asdict() for buffer in e.trace.buffers]
    content["memory"] = {"peak_bytes": e.trace.peak_bytes, "buffers": buffers}
    content["notes"] += dict.fromkeys(f"{s.kernel}: {s.work.note}." for s in e.trace.steps if s.work.note)
    return content


def _launches(steps: list[Step], own: list, roofs: Roofs | None) -> list[dict]:
    """Equal ones are one, with a count, where the first was."""
    rows: dict[tuple, dict] = {}
    for step in steps:
        key = step.phase, step.kernel, step.problem, step.choice, tuple(step.sizes.items())
        if key in rows:
            rows[key]["calls"] += 1
            continue
        row = rows[key] = {"phase": step.phase, "kernel": step.kernel, "kernel_index": None, "calls": 1}
        row["sizes"] = step.problem if step.choice is None else describe(None, step.sizes)
        if step.choice is not None:
            row["kernel_index"] = own.index(key[1:4]) + 1
        row |= {"bytes_read": step.work.bytes_read, "bytes_written": step.work.bytes_written, "flops": step.work.flops}
        if roofs is not None:
            least = floor(step.work, roofs)
            row |= {"floor_us": least.us, "bound": least.bound}
    return list(rows.values())


def _kernel(name: str, problem: Any, choice: Any, used: Resources | None, gpu: Gpu) -> dict[str, Any]:
    row = {
        "kernel": name,
        "class": kernels.find(name, gpu).__name__,
        "problem": describe(problem, {}),
        "config": vars(choice.config),
    }
    row |= {"source": choice.source, "reason": choice.reason}
    if used is not None:
        count, limit = _ctas_per_sm(used, choice.config, gpu)
        row |= dataclasses.asdict(used) | {"ctas_per_sm": count, "limited_by": limit}
        row["threads"] = row["threads"] or choice.config.threads
    return row


def _resources(own: list[tuple], gpu: Gpu, notes: list[str], resources: Callable[..., Resources]) -> dict:
    """Of each kernel; none, and a note, where they cannot be had."""
    found = {}
    for i, key in enumerate(own, 1):
        name, problem, choice = key
        if sys.stderr.isatty():
            print(f"\r\033[Kcompiling {name}, {i} of {len(own)} ... ", end="", file=sys.stderr)
        try:
            found[key] = resources(kernels.find(name, gpu), problem, choice.config, gpu.target)
        except (FileNotFoundError, ModuleNotFoundError) as error:
            why = "nvidia-cutlass-dsl, the compiler, is not installed." if isinstance(error, ImportError) else error
            notes.append(f"Registers and shared memory are left out: {why}")
            found = {}
            break
    print("\r\033[K" * sys.stderr.isatty(), end="", file=sys.stderr)
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
    path = "quackish's kernels" if c["path"] == "kernels" else "the portable path, in plain PyTorch"
    head = [f"{c['op']} {c['shape']} {c['dtype']} on {where}", f"Path: {path}", f"Why: {c['why']}"]
    parts, notes = ["\n".join(head + [f"{name}: {words}" for name, words in c["plan"].items()])], c["notes"]
    if "launches" in c:
        parts += [_launches_text(c["launches"]), _kernels_text(c["kernels"]), _resources_text(c["kernels"])]
        parts.append(_memory_text(**c["memory"]))
        notes = [_roofs_text(c["roofs"], gpu["name"]), *notes]
    return "\n\n".join(part for part in (*parts, "\n".join(notes)) if part)


def _launches_text(launches: list[dict]) -> str:
    columns = [
        *(("phase", "phase", ""), ("kernel", "kernel", ""), ("sizes", "sizes", ""), ("calls", "calls", "d")),
        *(("read", "bytes_read", _bytes), ("written", "bytes_written", _bytes), ("FLOPs", "flops", _unit)),
        *(("floor us", "floor_us", ".1f"), ("bound", "bound", "")),
    ]
    summed = [key for key in ("bytes_read", "bytes_written", "flops", "floor_us") if key in launches[0]]
    total: dict[str, Any] = {key: sum(row["calls"] * row[key] for row in launches) for key in summed}
    total |= {"phase": "", "kernel": "all", "calls": sum(row["calls"] for row in launches)}
    rows = [
        row | {"kernel": f"[{row['kernel_index']}] " * bool(row["kernel_index"]) + row["kernel"]} for row in launches
    ]
    rows += [total] * (total["calls"] > 1)
    return table_of(rows, columns if "floor_us" in total else columns[:-2])


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
    columns = [
        *(("kernel", "kernel", ""), ("registers", "registers", "d"), ("stack B", "stack_bytes", "d")),
        *(("local loads", "local_loads", "d"), ("stores", "local_stores", "d"), ("shared B", "smem_bytes", "d")),
        *(("threads", "threads", "d"), ("CTAs/SM", "ctas_per_sm", "d"), ("limited by", "limited_by", "")),
    ]
    return table_of([row | {"kernel": f"[{i}] {row['kernel']}"} for i, row in enumerate(found, 1)], columns)


def _memory_text(peak_bytes: int, buffers: list[dict]) -> str:
    large = [buffer for buffer in buffers if buffer["bytes"] * 100 >= peak_bytes]
    rest = peak_bytes - sum(buffer["bytes"] for buffer in large)
    rows = [[_bytes(buffer["bytes"]), buffer["text"]] for buffer in large] + [[_bytes(rest), "smaller ones"]] * (
        rest > 0
    )
    return text_table([_bytes(peak_bytes), "memory beside the inputs, at its peak"], rows, "rl")


def _roofs_text(roofs: dict | None, gpu: str) -> str:
    if roofs is None:
        return f"No roofs are known for {gpu}, so there are no floors."
    return f"Floors are for {speeds(Roofs(**roofs))} ({roofs['source']}). {roofs['note']}".rstrip()


def _bytes(value: float) -> str:
    return _unit(value, "B")


def _unit(value: float, unit: str = "") -> str:
    for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.{2 if value < 10 * size else 1}f} {prefix}{unit}"
    return f"{value:.0f} {unit}".rstrip()
