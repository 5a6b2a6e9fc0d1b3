"""argparse types of options."""

import argparse
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from quackish.errors import did_you_mean

T = TypeVar("T")


def unknown(given: str, known: Iterable[str]) -> str:
    known = list(known)
    return f"{given!r} is unknown; expected one of {', '.join(known)}{did_you_mean(given, known)}"


def one_of(known: Mapping[str, T]) -> Callable[[str], T]:
    """Maps a name in `known` (case-insensitive) to its value. Values are accepted as they are."""

    def parse(text: Any) -> T:
        if text in known.values():
            return text
        if text.lower() not in known:
            raise argparse.ArgumentTypeError(unknown(text, known))
        return known[text.lower()]

    return parse


def size(text: str) -> int:
    """A number of bytes, such as "1.5GB"."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) *([kMGT]?)B?", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r}; expected a number of bytes, such as 500MB or 1.5GB")
    return round(float(match[1]) * 1000 ** " kMGT".index(match[2] or " "))
