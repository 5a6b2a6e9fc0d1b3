"""argparse for the commands of `python -m quackish`: one-line errors, and suggestions for mistyped names."""

import argparse
import importlib.util
from pathlib import Path
from typing import Any, NoReturn

from quackish.files import why_no_output
from quackish.operations.argument_types import unknown


class CommandError(Exception):
    """The command cannot run. `python -m quackish` prints the message and exits with status 2."""


class Parser(argparse.ArgumentParser):
    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Overrides argparse's check of `choices`, to suggest the closest names."""
        if action.choices is not None and value not in action.choices:
            raise argparse.ArgumentError(action, unknown(str(value), map(str, action.choices)))

    def error(self, message: str) -> NoReturn:
        """Raises instead of printing the usage, which would bury the message."""
        raise CommandError(message)


def check_bench_extra() -> None:
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
