"""The command `quackish`, also started as `python -m quackish`: see quackish/cli."""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from quackish.cli import interrupt
from quackish.cli.commands import COMMANDS, parser_of
from quackish.cli.parser import CommandError, program_name
from quackish.errors import did_you_mean
from quackish.text import fill

# These have nothing to clean up, so Ctrl-C ends them at once, as all commands in `begin`, where torch is imported: an
# exception may be lost in a destructor, and aborts the process in the imports of the compiler.
_END_AT_ONCE = ("doctor", "emulate", "explain")


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else list(argv)
    chosen = _chosen(argv)
    who = chosen or program_name()
    try:
        args = _parse(argv, chosen)
        args.begin(args)
        if signal.getsignal(signal.SIGINT) is interrupt.end and chosen not in _END_AT_ONCE:
            interrupt.set_handler(signal.default_int_handler)
        return args.run(args)
    except CommandError as error:
        message = f"{who}: {error}"
        print(fill(message) if sys.stderr.isatty() else message, file=sys.stderr)
        return 2
    except KeyboardInterrupt as error:  # Ctrl-C, or SIGTERM where a command turns it into this
        print(" by ".join([f"{who}: interrupted", *map(str, error.args)]), file=sys.stderr)
        return interrupt.STATUS


def _chosen(argv: Sequence[str]) -> str | None:
    return next((word for word in argv if word in COMMANDS), None)


def _parse(argv: Sequence[str], chosen: str | None) -> argparse.Namespace:
    script = chosen == "emulate" and any(word.endswith(".py") for word in argv)
    args, unrecognized = parser_of(chosen, script).parse_known_args(argv)
    if unrecognized:
        suggestion = did_you_mean(unrecognized[0].partition("=")[0], args.parser.options())
        args.parser.error(f"unrecognized arguments: {' '.join(unrecognized)}{suggestion}")
    if args.command is None:
        args.parser.error("the following arguments are required: COMMAND")
    return args


def console_script() -> NoReturn:
    """The entry point of `quackish`, which ends the process."""
    interrupt.set_handler(interrupt.end)  # until torch is imported
    try:
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


if __name__ == "__main__":
    console_script()
