"""argparse for the commands of `python -m quackish`: one-line errors, and suggestions for mistyped names."""

import argparse
import importlib.util
import os
import tempfile
from pathlib import Path
from typing import Any, NoReturn

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


def why_no_output(folder: Path) -> str:
    """Why no file can be written to this folder, which need not exist; "" if one can."""
    return _why_not_writable(next(path for path in (folder, *folder.parents) if os.path.exists(path)))


def _why_not_writable(folder: Path) -> str:
    if not folder.is_dir():
        return f"{folder} is not a folder"
    try:
        with tempfile.TemporaryFile(dir=folder):  # os.access is true for root, even on /proc
            return ""
    except OSError as error:
        return f"{folder} cannot be written: {error.strerror}"
