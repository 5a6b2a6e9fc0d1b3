"""Runs the kernels of a call on the CPU, in an emulator of the GPU's instructions. Needs no GPU.

    quackish emulate rms_norm 64x256 --gpu b200
    quackish emulate linear_cross_entropy 70x64x300 --schedule recompute --seed 3
    quackish emulate linear_cross_entropy 70x64x300 --gpu b200
    quackish emulate rms_norm 64x256 --json
    quackish emulate --gpu b200 script.py --its-own-options

The last form runs a program that is written for a GPU, unchanged; `quackish emulate --help script.py` describes it. The
other ones run forward and backward, compare the results with the reference in fp64, and count for each launch: matrix
instructions (MMAs), bytes read from and written to global memory, phases of barriers, bytes of shared memory and
columns of tensor memory of a CTA, and instructions of warps. Exits with status 1 if a result is wrong, or if a kernel
breaks a rule of the hardware.

The emulator is slow: choose shapes of some hundred rows and columns. It needs numpy (`pip install
'quackish[emulator]'`), a C compiler and a linker.
"""

import argparse
import dataclasses
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import quackish
from quackish.cli import call_arguments
from quackish.cli.parser import CommandError
from quackish.errors import UnsupportedError
from quackish.gpu import NAMED
from quackish.ops.shared.argument_types import one_of
from quackish.ops.shared.for_tools import Operation, in_fp64, operations
from quackish.text import fill, table_of

if TYPE_CHECKING:
    from torch import Tensor

OPERATIONS = operations()
_ENTRIES = tuple(OPERATIONS.values())
_COMPLETIONS = "late", "at_once"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("op", metavar="OP", choices=OPERATIONS, help=", ".join(OPERATIONS))
    call_arguments.add_shape_and_options(parser, _ENTRIES)
    gpus = {name: name for name in NAMED}
    parser.add_argument("--gpu", type=one_of(gpus), default="h200", help=f"{', '.join(NAMED)} (h200)")
    completion_help = "when asynchronous copies and matrix instructions complete: late (the default) or at_once"
    parser.add_argument("--completion", choices=_COMPLETIONS, default="late", help=completion_help)
    seed_help = "of the order in which warps and CTAs take turns (0)"
    parser.add_argument("--seed", type=int, default=0, metavar="N", help=seed_help)
    parser.add_argument("--json", action="store_true", help="print JSON: results and launches, or the fault")


def begin(args: argparse.Namespace) -> None:
    call_arguments.shape_of(args, OPERATIONS[args.op], _ENTRIES)


def run(args: argparse.Namespace) -> int:
    import torch

    op = OPERATIONS[args.op]
    call_args = call_arguments.arguments_of(args, op, _ENTRIES, torch.device("cpu"))
    try:
        from quackish.emulator import Fault, ToolMissing
    except ImportError as why:
        raise CommandError(str(why)) from None
    try:
        with quackish.emulate(args.gpu, args.completion, args.seed) as report:
            results = op.call(call_args, "auto")
    except (UnsupportedError, ToolMissing) as why:
        raise CommandError(str(why)) from None
    except Fault as fault:
        print(json.dumps({"fault": dataclasses.asdict(fault)}, indent=1) if args.json else fault)
        return 1
    rows = _compared(op, results, op.call(in_fp64(call_args), "reference"))
    if args.json:
        print(json.dumps({"results": rows, **report.as_dict()}, indent=1))
    else:
        _print(args, rows, report)
    return int(not all(row["ok"] for row in rows))


def _print(args: argparse.Namespace, rows: list[dict[str, Any]], report: Any) -> None:
    """Prints a table of the results and one of the launches."""
    how = f"completion {args.completion}, seed {args.seed}"
    print(fill(f"{args.op} {args.shape} on an emulated {args.gpu}, {how}", indent="  ") + "\n")
    print(table_of(rows, {"result": "", "dtype": "", "error": ".1e", "bound": ".0e", "ok": _verdict}))
    print()
    launches: list[str | dict[str, int]] = []
    for launch in report.launches:
        launches += [fill(f"{launch.kernel}, grid {_triple(launch.grid)}, cluster {_triple(launch.cluster)}")]
        launches += [{title: getattr(launch, field) for title, field in _COLUMNS.items()}]
    print(table_of(launches, dict.fromkeys(_COLUMNS, "d")))
    for finding in report.findings:
        print(f"\n{finding}")


def _compared(op: Operation, results: Mapping[str, "Tensor"], truth: Mapping[str, "Tensor"]) -> list[dict[str, Any]]:
    """For each result its norm-wise error, its bound, and whether it is right."""
    from quackish.testing.errors import error

    rows: list[dict[str, Any]] = []
    for name, got in results.items():
        off, bound = error(got.double(), truth[name].double()).norm, op.bound_of(name)
        dtype = str(got.dtype).removeprefix("torch.")
        rows.append({"result": name, "dtype": dtype, "error": off, "bound": bound, "ok": off <= bound})
    return rows


def _verdict(ok: bool) -> str:
    return "ok" if ok else "WRONG"


def _triple(sizes: tuple[int, int, int]) -> str:
    """Sizes without those that are 1 at the end: 4x2 for (4, 2, 1)."""
    return "x".join(map(str, sizes)).removesuffix("x1").removesuffix("x1")


# Headings, and the fields of a LaunchReport below them.
_COLUMNS = {
    "MMAs": "mmas",
    "bytes read": "bytes_read",
    "bytes written": "bytes_written",
    "barrier phases": "barrier_phases",
    "shared bytes": "shared_bytes",
    "tensor columns": "tensor_memory_columns",
    "warp instructions": "instructions",
}
