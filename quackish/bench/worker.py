"""The process that measures: cells come in on stdin, events go out on stdout, one JSON object per line.

    python -m quackish.bench.worker rms_norm [--also FILE] [--commit C]

It announces each step, so that the supervisor knows what was in progress when it dies:

    {"ready": {columns of the environment}, "own": [names of providers in FILE]}
    {"at": "quack"}, {"provider": "quack", "measured": {...}}, ...      for each cell; "partial": so far
    {"done": true} or {"broken": "why"}                                 at the cell's end

After "broken" the process ends: the CUDA context may be lost. Whatever providers print goes to stderr.
"""

import argparse
import dataclasses
import faulthandler
import importlib.util
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from quackish.bench import schema
from quackish.bench.cells import Cell, Job
from quackish.bench.environment import device_to_measure
from quackish.bench.measured import Run, reason
from quackish.bench.operations import OPERATIONS
from quackish.bench.providers_rms_norm import Provider


def main() -> None:
    commands, events = _take_stdio()
    faulthandler.enable()

    def say(**event: object) -> None:
        events.write(json.dumps(event) + "\n")
        events.flush()

    try:
        parser = argparse.ArgumentParser()
        parser.add_argument("op", choices=OPERATIONS)
        parser.add_argument("--also", type=Path)
        parser.add_argument("--commit")
        args = parser.parse_args()
        op, device = OPERATIONS[args.op], device_to_measure()
        own = _from_file(args.also) if args.also else {}
        say(ready=schema.origin(device, args.commit), own=list(own))
        for line in commands:
            message = json.loads(line)
            options = dict(message["options"])
            backend = options.pop("backend", "auto")
            run = Run(
                device=device,
                load=lambda name: _own(op.name, name, own[name]) if name in own else op.load(name, backend),  # noqa: B023
                tell=lambda name, found: say(provider=name, measured=dataclasses.asdict(found)),
                partial=lambda name, found: say(provider=name, measured=dataclasses.asdict(found), partial=True),
                at=lambda step: say(at=step),
                **options,
            )
            op.measure(_job(message["job"]), run)
            say(done=True)
    except Exception as error:
        say(broken=reason(error))
        sys.excepthook(*sys.exc_info())  # to stderr, whole
        sys.stderr.flush()
        os._exit(1)  # an ordinary exit waits for a GPU that may never answer


def _job(message: dict) -> Job:
    cell = message["cell"]
    cell = Cell(**{**cell, "shape": tuple(cell["shape"])})
    return Job(**{**message, "cell": cell, "providers": tuple(message["providers"])})


def _take_stdio() -> tuple[TextIO, TextIO]:
    """stdin and stdout for the supervisor alone: others read nothing, and write to stderr."""
    commands, events = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.dup2(2, 1)
    return commands, events


def _from_file(path: Path) -> dict[str, Any]:
    """PROVIDERS of the user's Python file."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"--also {path}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    providers = getattr(module, "PROVIDERS", None)
    if not isinstance(providers, dict):
        raise ValueError(f"--also {path}: has no dict PROVIDERS of names and functions")
    return providers


def _own(op: str, name: str, functions: Any) -> Provider | Callable:
    """The user's entry: for rms_norm a pair (forward, backward), for linear_cross_entropy a function."""
    return Provider(name, *functions) if op == "rms_norm" else functions


if __name__ == "__main__":
    main()
