"""argparse for the commands: one-line errors, suggestions for mistyped names, help of 80 columns or the terminal's."""

import argparse
import importlib.util
import re
import sys
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import Any, NoReturn

from quackish.device.files import why_no_output
from quackish.ops.shared.argument_types import unknown
from quackish.text import fill_page


class CommandError(Exception):
    """The command cannot run. The message is printed, and the exit status is 2."""


def program_name() -> str:
    """What the user types, for messages: "quackish", or "python -m quackish" if this process was started by that."""
    started_by_m = PurePath(sys.argv[0]).parts[-2:] == ("quackish", "__main__.py")
    return "python -m quackish" if started_by_m else "quackish"


class _Formatter(argparse.HelpFormatter):
    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=20)
        self._action_max_length = 14  # argparse counts names of commands without their indent

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        """Overrides argparse's, which joins paragraphs and examples. Examples start as this process was started."""
        return fill_page(re.sub(r"(?m)^    quackish ", f"    {program_name()} ", text), width)


class Parser(argparse.ArgumentParser):
    """Prints its help if it gets no arguments but needs some. A result has the chosen command's parser in `parser`."""

    def __init__(self, **options: Any):
        super().__init__(**options, formatter_class=_Formatter, allow_abbrev=False)
        self.set_defaults(parser=self)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if args is not None and not args and self._get_positional_actions():
            self.print_help()
            self.exit(2)
        return super().parse_known_args(args, namespace)

    def options(self) -> Sequence[str]:
        return [name for action in self._actions for name in action.option_strings]

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Overrides argparse's check of `choices`, to suggest the closest names."""
        if action.choices is not None and value not in action.choices:
            raise argparse.ArgumentError(action, unknown(str(value), map(str, action.choices)))

    def error(self, message: str) -> NoReturn:
        """Raises instead of printing the usage, which would bury the message."""
        if "arguments are required" in message:
            message += f"; `{self.prog} --help` describes them"
        raise CommandError(message)


def check_bench_extra() -> None:
    """Raises CommandError without matplotlib, which draws the figures."""
    if importlib.util.find_spec("matplotlib") is None:
        raise CommandError("figures need matplotlib; `pip install matplotlib` installs it")


def positive(text: str) -> int:
    """An argparse type: a positive int."""
    if not text.isdecimal() or len(text) > 9 or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}; expected a positive number of at most nine digits")
    return int(text)


def output_folder(text: str) -> Path:
    """An argparse type: a folder to write to, which need not exist."""
    folder = Path(text)
    if why := why_no_output(folder):
        raise argparse.ArgumentTypeError(f"{text}: {why}; name a folder that you can write to")
    return folder
