"""What the commands of `python -m quackish` share: argparse with suggestions for mistyped names."""

import argparse
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn, TypeVar

from quackish.errors import did_you_mean

T = TypeVar("T")


class Refused(Exception):
    """An invalid request: `python -m quackish` prints the sentence, which says what was expected, and exits with 2."""


class Parser(argparse.ArgumentParser):
    """Subcommands get parsers of this class too."""

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """argparse calls this for every argument that has `choices`, as commands do."""
        if action.choices is not None and value not in action.choices:
            raise argparse.ArgumentError(action, unknown(str(value), map(str, action.choices)))

    def error(self, message: str) -> NoReturn:
        """Without the usage, which would hide the sentence; `--help` has it."""
        raise Refused(message)


def unknown(given: str, known: Iterable[str]) -> str:
    known = list(known)
    return f"{given!r} is unknown; expected one of {', '.join(known)}{did_you_mean(given, known)}"


def one_of(known: Mapping[str, T]) -> Callable[[str], T]:
    """An argument's `type`: a name in `known`, in any case, gives its value; a value of `known` gives itself."""

    def parse(text: str) -> T:
        if text in known.values():
            return text
        if text.lower() not in known:
            raise argparse.ArgumentTypeError(unknown(text, known))
        return known[text.lower()]

    return parse


def positive(text: str) -> int:
    """An argument's `type`."""
    if not text.isdecimal() or len(text) > 9 or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}; expected a positive number of at most nine digits")
    return int(text)


def size(text: str) -> int:
    """An argument's `type`: bytes."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) *([kMGT]?)B?", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r}; expected a number of bytes, such as 500MB or 1.5GB")
    return round(float(found[1]) * 1000 ** " kMGT".index(found[2] or " "))
