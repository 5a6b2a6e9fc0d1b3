"""Compares two CSVs of `bench`, row by row: a table of ratios, and what became slower.

A regression is slower by more than --fail and by more than the noise: its p20 is above the former p80. A row that had a
time and now fails is one too. Exit status 1 if there is any.
"""

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("before", type=Path, help="the CSV to compare with")
    parser.add_argument("after", type=Path, help="the CSV that is judged")
    fail = "how much slower is a regression; default %(default)s"
    parser.add_argument("--fail", type=_share, default="3%", metavar="PERCENT", help=fail)
    only = 'compare these only, names or patterns ("quackish*")'
    parser.add_argument("--providers", nargs="+", default=["*"], metavar="NAME", help=only)


def run(args: argparse.Namespace) -> int:
    from quackish.bench import compare
    from quackish.bench.console import console

    found = compare.compare(args.before, args.after, args.fail, args.providers)
    compare.show(found, console())
    return 1 if found.regressions else 0


def _share(text: str) -> float:
    """0.03 of "3%" or "3"."""
    try:
        share = float(text.rstrip("% ")) / 100
    except ValueError:
        share = -1.0
    if not share >= 0:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a percentage such as 3%")
    return share
