"""Start-up time: the import, and the first call of each operation with an empty (cold) and a filled (warm) cache.

    python -m benchmarks.first_use

Each sample is a new process. A first call is forward and backward. Without a GPU it is only the work of the launcher,
for an H200: compiling (cold) or loading (warm) the kernels. The exit status is 1 if a target is missed.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SHAPES = {"rms_norm": "4096x4096", "linear_cross_entropy": "1024x2048x32000"}
TARGETS = {"import quackish": 1.0, "cold": 5.0, "warm": 0.1}  # seconds


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--repeats", type=int, default=5, help="processes per row (5); at most 3 for a cold cache")
    parser.add_argument("--measure", choices=("import", *SHAPES), help=argparse.SUPPRESS)  # for the child process
    args = parser.parse_args(argv)
    if args.measure:
        print(json.dumps(_import() if args.measure == "import" else _first_call(args.measure)))
        return 0
    measured = {("import quackish", ""): [_in_a_process("import") for _ in range(args.repeats)]}
    for op in SHAPES:
        folders = [tempfile.TemporaryDirectory(prefix="quackish-") for _ in range(min(args.repeats, 3))]
        measured[op, "cold"] = [_in_a_process(op, folder.name) for folder in folders]
        measured[op, "warm"] = [_in_a_process(op, folders[-1].name) for _ in range(args.repeats)]
    from quackish.text import text_table

    lines = [_line(what, cache, samples) for (what, cache), samples in measured.items()]
    print(text_table(["first", "cache", "seconds", "maximum", "target", "", ""], lines, "llrrrll"))
    return 1 if any("FAIL" in line for line in lines) else 0


def _in_a_process(measure: str, cache: str | None = None) -> dict[str, Any]:
    env = dict(os.environ) | ({"QUACKISH_CACHE_DIR": cache} if cache else {})
    command = [sys.executable, "-m", "benchmarks.first_use", "--measure", measure]
    done = subprocess.run(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def _line(what: str, cache: str, samples: list[dict[str, Any]]) -> list[str]:
    seconds, last, target = [sample["seconds"] for sample in samples], samples[-1], TARGETS[cache or what]
    word = "PASS" if statistics.median(seconds) < target and not last.get("cuda_initialized") else "FAIL"
    return [
        what,
        cache,
        f"{statistics.median(seconds):.3f}",
        f"{max(seconds):.3f}",
        f"{target:.1f}",
        word,
        last["note"],
    ]


def _import() -> dict[str, Any]:
    import torch

    started = time.perf_counter()
    import quackish  # noqa: F401

    seconds, cuda = time.perf_counter() - started, torch.cuda.is_initialized()
    note = f"without torch's import; CUDA is {'' if cuda else 'not '}initialized"
    return dict(seconds=seconds, cuda_initialized=cuda, note=note)


def _first_call(op: str) -> dict[str, Any]:
    """Forward and backward on a GPU; without one, compiling or loading their kernels."""
    import torch

    import quackish
    from quackish.device import launch

    if gpu := torch.cuda.is_available():
        m, h, *v = map(int, SHAPES[op].split("x"))
        x, weight = (torch.randn(*shape, device="cuda").bfloat16().requires_grad_() for shape in ((m, h), (*v, h)))
        target = torch.randint(0, 256, (m,), device="cuda")
        torch.cuda.synchronize()
    else:
        from quackish.cli.precompile import requests_of

        requests = requests_of(op, SHAPES[op], "h200")
    started = time.perf_counter()
    if gpu and op == "rms_norm":  # not y.backward(dy): PyTorch imports sympy for it, which takes 1.9 s
        quackish.rms_norm(x, weight).square().sum().backward()
    elif gpu:
        quackish.linear_cross_entropy(x, weight, target).backward()
    else:
        if op == "linear_cross_entropy":  # as the operation does
            launch.prepare(requests)
        for request in requests:
            launch.get(*request)
    if gpu:
        torch.cuda.synchronize()
    seconds, c = time.perf_counter() - started, launch.counters
    return dict(seconds=seconds, note=f"{c.compiles} compiled, {c.disk_loads} loaded, {c.launches} launched")


if __name__ == "__main__":
    sys.exit(main())
