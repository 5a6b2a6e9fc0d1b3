"""`python -m quackish`: inspect, measure and tune the kernels, and manage their cache."""

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Sequence

from quackish import interrupt
from quackish._version import __version__
from quackish.cli.parser import CommandError, Parser

_PROG = "python -m quackish"
# Kept here so that `--help` imports no command.
COMMANDS = {
    "bench": "time operations and other libraries over shapes; compare two results",
    "cache": "list, verify, clear, export or import compiled kernels",
    "doctor": "check the installation: versions, GPUs, the path and the results of each operation",
    "emulate": "run the kernels of a call on the CPU, and compare with fp64; needs no GPU",
    "explain": "show the kernels, configs, estimated time and memory of a call; needs no GPU",
    "precompile": "compile kernels for shapes and GPUs into the cache; needs no GPU",
    "tune": "search for faster configs on this GPU and store them in your table",
}


# These have nothing to clean up, so Ctrl-C ends them at once: an exception may be lost in a destructor, and aborts the
# process in the imports of the compiler.
_END_AT_ONCE = ("doctor", "emulate", "explain")


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else list(argv)
    chosen = _chosen(argv)
    who = chosen or _PROG
    try:
        args = _parse(argv, chosen)
        return args.run(args)
    except CommandError as error:
        print(f"{who}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as error:  # Ctrl-C, or SIGTERM where a command turns it into this
        print(" by ".join([f"{who}: interrupted", *map(str, error.args)]), file=sys.stderr)
        return interrupt.STATUS


def _chosen(argv: Sequence[str]) -> str | None:
    return next((word for word in argv if word in COMMANDS), None)


def _parse(argv: Sequence[str], chosen: str | None) -> argparse.Namespace:
    parser = Parser(prog=_PROG, description=__doc__)
    parser.add_argument("--version", action="version", version=f"quackish {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, summary in COMMANDS.items():
        module = importlib.import_module(f"quackish.cli.{name}") if name == chosen else None
        command = commands.add_parser(
            name,
            help=summary,
            description=None if module is None else module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if module is not None:
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    return parser.parse_args(argv)


if __name__ == "__main__":
    try:
        if _chosen(sys.argv[1:]) not in _END_AT_ONCE:
            interrupt.set_handler(signal.default_int_handler)
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `head`, closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 141  # 128 + SIGPIPE
    except KeyboardInterrupt:
        interrupt.end()
    if status == interrupt.STATUS:
        os._exit(status)  # sys.exit may wait for threads, and Python may end with another status
    sys.exit(status)
