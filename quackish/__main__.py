"""`python -m quackish`: see into the kernels, measure them, and look after their cache."""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from quackish import __version__
from quackish.cli.parser import Parser, Refused

# A line each, here rather than in the commands' files: `--help` imports none of them.
COMMANDS = {
    "bench": "time operations, and other libraries beside them, over shapes; compare two results",
    "cache": "list, verify, clear, export or import compiled kernels",
    "doctor": "what runs here and why, and whether it works",
    "explain": "which kernel and config a shape gets, and what it costs at least; needs no GPU",
    "precompile": "fill the cache for shapes and GPUs; needs no GPU",
    "tune": "search for faster configs on this GPU and keep them in a table of yours",
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m quackish", description=__doc__)
    parser.add_argument("--version", action="version", version=f"quackish {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    argv = sys.argv[1:] if argv is None else list(argv)
    chosen = next((word for word in argv if word in COMMANDS), None)
    for name, summary in COMMANDS.items():
        module = importlib.import_module(f"quackish.cli.{name}") if name == chosen else None
        command = commands.add_parser(
            name,
            help=summary,
            description=module and module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if module is not None:
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    try:
        args = parser.parse_args(argv)
        return args.run(args)
    except Refused as refused:
        print(f"{chosen or parser.prog}: {refused}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, `head` say, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 141  # as of a program that the signal ended
    sys.exit(status)
