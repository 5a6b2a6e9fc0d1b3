"""The parser of `python -m quackish` and of its commands: argparse's, with a suggestion for a mistyped name."""

import argparse
from typing import Any

from quackish.errors import did_you_mean


class Parser(argparse.ArgumentParser):
    """Subcommands get parsers of this class too."""

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """argparse calls this for every argument that has `choices`, as commands do."""
        if action.choices is not None and value not in action.choices:
            known = [str(choice) for choice in action.choices]
            expected = f"{value!r} is unknown; expected one of {', '.join(known)}"
            raise argparse.ArgumentError(action, expected + did_you_mean(str(value), known))
