"""What a new process waits for: the import, and each operation's first call, on an empty cache and on a filled one.

    python -m benchmarks.first_use

Each number is from a process of its own. On a GPU a first call is forward and backward, from inputs on the GPU to the
end of its work. Without one it is what the launcher does for the call's kernels, compiled for an H200: their look-up,
their compilation (cold) or loading (warm), all but their launch. Ends with 1 where a bar is missed.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RMS_NORM, LINEAR_CROSS_ENTROPY = "4096x4096", "1024x2048x32000"
BARS = {"import quackish": 1.0, "cold": 5.0, "warm": 0.1}  # seconds


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.first_use", description=__doc__)
    parser.add_argument("--repeats", type=int, default=5, help="processes a row (5); cold ones at most 3")
    parser.add_argument("--measure", choices=MEASURES, help=argparse.SUPPRESS)  # in a process of its own
    args = parser.parse_args(argv)
    if args.measure:
        print(json.dumps(MEASURES[args.measure]()))
        return 0
    rows = [
        _row("import quackish", "", [_in_a_process("import") for _ in range(args.repeats)], BARS["import quackish"])
    ]
    for op in ("rms_norm", "linear_cross_entropy"):
        cold = []
        for _ in range(min(args.repeats, 3)):
            folder = tempfile.TemporaryDirectory(prefix="quackish-")
            cold.append(_in_a_process(op, folder.name))
        warm = [_in_a_process(op, folder.name) for _ in range(args.repeats)]
        rows += [_row(op, "cold", cold, BARS["cold"]), _row(op, "warm", warm, BARS["warm"])]
    print(_table(rows))
    return 0 if all(row["pass"] for row in rows) else 1


def _in_a_process(measure: str, cache: str | None = None) -> dict[str, Any]:
    env = dict(os.environ) | ({"QUACKISH_CACHE_DIR": cache} if cache else {})
    command = [sys.executable, "-m", "benchmarks.first_use", "--measure", measure]
    done = subprocess.run(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def _row(what: str, cache: str, measured: list[dict[str, Any]], bar: float) -> dict[str, Any]:
    seconds = [one.pop("seconds") for one in measured]
    median = statistics.median(seconds)
    row = dict(what=what, cache=cache, bar=bar, median=median, least=min(seconds), most=max(seconds), **measured[-1])
    return row | {"pass": median < bar and not row.get("cuda_initialized")}


def _table(rows: list[dict[str, Any]]) -> str:
    from quackish.profiling import text_table

    cells = [
        [
            row["what"],
            row["cache"],
            f"{row['median']:.3f}",
            f"{row['least']:.3f} to {row['most']:.3f}",
            f"{row['bar']:.1f}",
            "PASS" if row["pass"] else "FAIL",
            row["said"],
        ]
        for row in rows
    ]
    return text_table(["first", "cache", "seconds", "range", "bar", "", ""], cells, "llrlrll")


# Measures, each the first thing that its process does ----------------------------------------------------------------


def _import() -> dict[str, Any]:
    import torch

    before, started = len(sys.modules), time.perf_counter()
    import quackish  # noqa: F401

    seconds = time.perf_counter() - started
    initialized = torch.cuda.is_initialized()
    said = f"beyond torch; {len(sys.modules) - before} modules; CUDA is {'' if initialized else 'not '}initialised"
    return dict(seconds=seconds, cuda_initialized=initialized, said=said)


def _rms_norm() -> dict[str, Any]:
    import torch

    import quackish

    if not torch.cuda.is_available():
        return _launcher("rms_norm", RMS_NORM)
    m, n = map(int, RMS_NORM.split("x"))
    bf16 = dict(dtype=torch.bfloat16, device="cuda")
    x, weight = torch.randn(m, n, **bf16, requires_grad=True), torch.ones(n, **bf16, requires_grad=True)
    dy = torch.randn(m, n, **bf16)
    # not y.backward(dy), for which PyTorch imports sympy: 1.9 s
    return _timed(lambda: (quackish.rms_norm(x, weight) * dy).sum().backward())


def _linear_cross_entropy() -> dict[str, Any]:
    import torch

    import quackish

    if not torch.cuda.is_available():
        return _launcher("linear_cross_entropy", LINEAR_CROSS_ENTROPY)
    m, h, v = map(int, LINEAR_CROSS_ENTROPY.split("x"))
    bf16 = dict(dtype=torch.bfloat16, device="cuda", requires_grad=True)
    x, weight = torch.randn(m, h, **bf16), torch.randn(v, h, **bf16)
    target = torch.randint(0, v, (m,), device="cuda")
    return _timed(lambda: quackish.linear_cross_entropy(x, weight, target).backward())


def _timed(call: Callable[[], None]) -> dict[str, Any]:
    import torch

    torch.cuda.synchronize()
    started = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return _counted(time.perf_counter() - started)


def _launcher(op: str, shape: str) -> dict[str, Any]:
    """What the call's kernels take until they could be launched."""
    from quackish import launch
    from quackish.cli.precompile import requests_of

    requests = requests_of(op, shape, "h200")
    started = time.perf_counter()
    if op == "linear_cross_entropy":  # as it does
        launch.prepare(requests)
    for request in requests:
        launch.get(*request)
    return _counted(time.perf_counter() - started)


def _counted(seconds: float) -> dict[str, Any]:
    from quackish import launch

    c, compiler = launch.counters, "" if "cutlass" in sys.modules else "not "
    said = f"{c.compiles} compiled, {c.disk_loads} loaded, {c.launches} launched; the compiler is {compiler}imported"
    return dict(seconds=seconds, said=said)


MEASURES = {"import": _import, "rms_norm": _rms_norm, "linear_cross_entropy": _linear_cross_entropy}

if __name__ == "__main__":
    sys.exit(main())
