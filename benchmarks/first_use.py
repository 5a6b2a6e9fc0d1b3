"""Start-up time: the import, and each operation's first call, with an empty cache and with a filled one.

    python -m benchmarks.first_use

Each number is from a process of its own. On a GPU a first call is forward and backward, from inputs on the GPU to the
end of its work. Without one it is what the launcher does for the call's kernels, compiled for an H200: look-up, and
compilation (cold) or loading (warm), but no launch. Ends with 1 if a bar is missed.
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
SHAPES = {"rms_norm": "4096x4096", "linear_cross_entropy": "1024x2048x32000"}
BARS = {"import quackish": 1.0, "cold": 5.0, "warm": 0.1}  # seconds


def main(argv: list[str] | None = None, measured_by: Callable[..., dict[str, Any]] | None = None) -> int:
    """Exit status. `measured_by` stands in for processes of their own."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.first_use", description=__doc__)
    parser.add_argument("--repeats", type=int, default=5, help="processes a row (5); cold ones at most 3")
    parser.add_argument("--measure", choices=("import", *SHAPES), help=argparse.SUPPRESS)  # in a process of its own
    args = parser.parse_args(argv)
    if args.measure:
        print(json.dumps(_import() if args.measure == "import" else _first_call(args.measure)))
        return 0
    measure = measured_by or _in_a_process
    rows = [_row("import quackish", "", [measure("import") for _ in range(args.repeats)], BARS["import quackish"])]
    for op in SHAPES:
        cold = []
        for _ in range(min(args.repeats, 3)):
            folder = tempfile.TemporaryDirectory(prefix="quackish-")
            cold.append(measure(op, folder.name))
        warm = [measure(op, folder.name) for _ in range(args.repeats)]
        rows += [_row(op, "cold", cold, BARS["cold"]), _row(op, "warm", warm, BARS["warm"])]
    from quackish.profiling import text_table

    print(text_table(["first", "cache", "seconds", "range", "bar", "", ""], [line for _, line in rows], "llrlrll"))
    return 0 if all(kept for kept, _ in rows) else 1


def _in_a_process(measure: str, cache: str | None = None) -> dict[str, Any]:
    env = dict(os.environ) | ({"QUACKISH_CACHE_DIR": cache} if cache else {})
    command = [sys.executable, "-m", "benchmarks.first_use", "--measure", measure]
    done = subprocess.run(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def _row(what: str, cache: str, measured: list[dict[str, Any]], bar: float) -> tuple[bool, list[str]]:
    """Whether the bar is kept, and the line of the table."""
    seconds, last = [one["seconds"] for one in measured], measured[-1]
    median = statistics.median(seconds)
    kept = median < bar and not last.get("cuda_initialized")
    spread = f"{min(seconds):.3f} to {max(seconds):.3f}"
    return kept, [what, cache, f"{median:.3f}", spread, f"{bar:.1f}", "PASS" if kept else "FAIL", last["said"]]


# Measures, each the first thing that its process does ----------------------------------------------------------------


def _import() -> dict[str, Any]:
    import torch

    before, started = len(sys.modules), time.perf_counter()
    import quackish  # noqa: F401

    seconds = time.perf_counter() - started
    initialized = torch.cuda.is_initialized()
    said = f"beyond torch; {len(sys.modules) - before} modules; CUDA is {'' if initialized else 'not '}initialized"
    return dict(seconds=seconds, cuda_initialized=initialized, said=said)


def _first_call(op: str) -> dict[str, Any]:
    """Forward and backward on a GPU; without one, all that precedes the launches."""
    import torch

    import quackish
    from quackish import launch

    if torch.cuda.is_available():
        made = dict(dtype=torch.bfloat16, device="cuda")
        m, h, *v = map(int, SHAPES[op].split("x"))
        x, weight = torch.randn(m, h, **made), torch.randn(*v, h, **made)
        target, dy = torch.randint(0, v[0] if v else 1, (m,), device="cuda"), torch.randn(m, h, **made)
        for t in (x, weight):
            t.requires_grad_()

        def call() -> None:
            if op == "rms_norm":  # not y.backward(dy), for which PyTorch imports sympy: 1.9 s
                (quackish.rms_norm(x, weight) * dy).sum().backward()
            else:
                quackish.linear_cross_entropy(x, weight, target).backward()
            torch.cuda.synchronize()

        torch.cuda.synchronize()
    else:
        from quackish.cli.precompile import requests_of

        requests = requests_of(op, SHAPES[op], "h200")

        def call() -> None:
            if op == "linear_cross_entropy":  # as it does
                launch.prepare(requests)
            for request in requests:
                launch.get(*request)

    started = time.perf_counter()
    call()
    seconds, c = time.perf_counter() - started, launch.counters
    compiler = "" if "cutlass" in sys.modules else "not "
    said = f"{c.compiles} compiled, {c.disk_loads} loaded, {c.launches} launched; the compiler is {compiler}imported"
    return dict(seconds=seconds, said=said)


if __name__ == "__main__":
    sys.exit(main())
