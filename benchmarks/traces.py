"""A trace of equal steps on a GPU, and how long a step's kernels take."""

import gzip
import json
import math
import re
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

STEPS = 5


def traced(step: Callable[[], object], device: torch.device, file: Path) -> dict[str, float]:
    """Writes a trace of 1 + STEPS steps to `file`, and returns `kernels_of` it."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(1 + STEPS):
            step()
        torch.cuda.synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        profile.export_chrome_trace(f"{folder}/trace.json")
        text = Path(folder, "trace.json").read_text()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(gzip.compress(text.encode(), 5))
    events = [e for e in json.loads(text)["traceEvents"] if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    return kernels_of([(short_name(e["name"]), e["ts"] / 1e3, (e["ts"] + e["dur"]) / 1e3) for e in events])


def short_name(name: str) -> str:
    ours = re.match(r"kernel_cutlass_kernel_quackish[a-z0-9_]*([A-Z]\w*?)_object_at", name)
    return ours[1] if ours else re.sub(r"[(<].*", "", name.removeprefix("void "))[:60]


def kernels_of(events: list[tuple[str, float, float]]) -> dict[str, float]:
    """ms per step of each kernel, "idle" without any, "exposed" with NCCL's alone, and of the whole "step".

    events: (name, start, end) of 1 + STEPS equal steps, in ms. Launches of one name in a step are numbered. The first
    step is left out: it also waits for ranks whose profiler starts later.
    """
    events = sorted(events, key=lambda event: event[1])
    of_step = {name: count // (1 + STEPS) for name, count in Counter(name for name, *_ in events).items()}
    seen, begin, times = Counter(), -math.inf, defaultdict(float)
    for name, start, end in events:
        i, n = seen[name], of_step[name]
        seen[name] += 1
        if i < n:
            begin = max(begin, end)
        else:
            times[f"{name} {i % n + 1}" if n > 1 else name] += (end - start) / STEPS
    spans = [(max(start, begin), end, "nccl" in name) for name, start, end in events if end > begin]
    busy, working = covered(span[:2] for span in spans), covered(span[:2] for span in spans if not span[2])
    step = max(end for _, end, _ in spans) - begin
    times["others"] = sum(times.pop(name) for name in [name for name, ms in times.items() if ms < 0.01 * step / STEPS])
    return {**times, "idle": (step - busy) / STEPS, "exposed": (busy - working) / STEPS, "step": step / STEPS}


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """The length of the union."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total
