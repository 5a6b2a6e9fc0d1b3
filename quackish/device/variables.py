"""The environment variables of quackish. This module reads them; `quackish doctor` checks them."""

import os
from collections.abc import Callable, Mapping
from typing import NamedTuple

from quackish.errors import did_you_mean


class Variable(NamedTuple):
    expected: str  # the legal values, for a message
    is_legal: Callable[[str], bool] = bool


CACHE = "QUACKISH_CACHE"
CACHE_DIR = "QUACKISH_CACHE_DIR"
COMPILE_JOBS = "QUACKISH_COMPILE_JOBS"
CONFIG_DIR = "QUACKISH_CONFIG_DIR"
# docs/tools.md says what each does.
VARIABLES = {
    CACHE: Variable("0 or 1", ("0", "1").__contains__),
    CACHE_DIR: Variable("a folder"),
    COMPILE_JOBS: Variable("a number of processes", str.isdecimal),
    CONFIG_DIR: Variable("a folder"),
}


def get(name: str) -> str:
    """The value of a variable; "" if it is not set, or not legal."""
    value = os.environ.get(name, "")
    return value if value and VARIABLES[name].is_legal(value) else ""


def faults(environ: Mapping[str, str] | None = None) -> list[tuple[str, str]]:
    """Returns (what is wrong, what to do) for each variable of quackish that has no effect."""
    found = []
    for name, value in sorted((os.environ if environ is None else environ).items()):
        if name not in VARIABLES and name.upper().startswith("QUACKISH"):
            known = f"expected one of {', '.join(VARIABLES)}{did_you_mean(name, VARIABLES)}"
            found.append((f"the environment variable {name} is unknown and ignored; {known}", f"`unset {name}`."))
        elif name in VARIABLES and value and not VARIABLES[name].is_legal(value):
            found.append(
                (f"{name}={value!r} is ignored; expected {VARIABLES[name].expected}", f"Correct or `unset {name}`.")
            )
    return found
