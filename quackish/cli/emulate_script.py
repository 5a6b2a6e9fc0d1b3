"""Runs a program that is written for a GPU on the CPU, unchanged. Needs no GPU.

    quackish emulate --gpu b200 script.py --its-own-options

Kernels of CuTe DSL run in an emulator of the GPU's instructions, and operations of PyTorch on the CPU. Prints the
number of launches at the end. Exits with status 1 if a kernel breaks a rule of the hardware. CUDA graphs and Triton are
not supported.
"""

import argparse
from pathlib import Path

from quackish.cli.parser import CommandError
from quackish.gpu import NAMED
from quackish.ops.shared.argument_types import one_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    gpus = {name: name for name in NAMED}
    parser.add_argument("--gpu", type=one_of(gpus), default="h200", help=f"{', '.join(NAMED)} (h200)")
    completion_help = "when asynchronous work completes: late (the default) or at_once"
    parser.add_argument("--completion", choices=("late", "at_once"), default="late", help=completion_help)
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the order of warps and CTAs (0)")
    parser.add_argument("script", metavar="SCRIPT.py", help="the program")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="its arguments")


def begin(args: argparse.Namespace) -> None:
    if not Path(args.script).is_file():
        raise CommandError(f"{args.script} is not a file")


def run(args: argparse.Namespace) -> int:
    try:
        from quackish import emulator
        from quackish.emulator import scripts
    except ImportError as why:
        raise CommandError(str(why)) from None
    try:
        scripts.restart_with_aligned_memory()
    except emulator.ToolMissing as why:
        raise CommandError(str(why)) from None
    with emulator.unchanged(args.gpu), emulator.record(args.completion, args.seed) as report:
        try:
            scripts.run(args.script, args.args)
        except emulator.Fault as fault:
            print(fault)
            return 1
        finally:
            for finding in report.findings:
                print(finding)
            print(f"{len(report.launches)} launches on an emulated {args.gpu}")
    return 0
