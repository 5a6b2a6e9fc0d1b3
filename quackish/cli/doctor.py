"""What runs here and why, and whether it works: versions, GPUs, the path of each operation, the cache, a self-test.

    python -m quackish doctor
    python -m quackish doctor --json

Ends with 1 where something is wrong, and says what to do about it. The self-test compares each operation, forward and
backward, with the formula in fp64, and its bits with those of a second run; it takes a second, and some more where
kernels are compiled for the first time.
"""

import argparse
import json
import warnings
from typing import Any

from quackish.cli import examine, self_test
from quackish.cli.examine import Problem


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="the same as JSON, to put into a bug report")
    parser.add_argument("--no-self-test", action="store_true", help="leave out the self-test, and the compiler's")


def run(args: argparse.Namespace) -> int:
    report = examine_all(self_testing=not args.no_self_test)
    print(json.dumps(report, indent=1) if args.json else text(report))
    return 1 if report["problems"] else 0


def examine_all(self_testing: bool = True) -> dict[str, Any]:
    """Every part by name, as JSON has it. A part that raises is a problem, and the others are there."""
    problems: list[Problem] = []
    notes: list[str] = []
    parts = {
        "versions": lambda: examine.versions(problems),
        "gpus": lambda: examine.gpus(problems, notes),
        "toolchain": lambda: examine.compiler(problems, notes),
        "paths": lambda: examine.paths(problems),
        "cache": lambda: examine.cache_health(problems, notes),
        "tuned": lambda: examine.tuned(problems),
        "environment": examine.environment,
    }
    if self_testing:
        parts["compiles"] = lambda: self_test.compiler(problems)
        parts["self_test"] = lambda: self_test.operations(problems)
    report: dict[str, Any] = {}
    for name, part in parts.items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # what they say is in the report
                report[name] = part()
        except Exception as error:  # whatever is broken here is what this command is for
            problems.append(Problem(f"{name}: {type(error).__name__}: {error}", "The message says what to look at."))
            report[name] = None
    report["notes"] = notes
    report["problems"] = [problem._asdict() for problem in problems]
    return report


def text(report: dict[str, Any]) -> str:
    lines = []
    for title, part, show in (
        ("Versions", report["versions"], _pairs),
        ("GPUs", report["gpus"], _gpus),
        ("Compiler", report["toolchain"], _pairs),
        ("Which path runs", report["paths"], _paths),
        ("Cache", report["cache"], _pairs),
        ("Tuned configs", report["tuned"], _pairs),
        ("Environment", report["environment"], _pairs),
        ("Compiling", report.get("compiles"), _pairs),
        ("Self-test", report.get("self_test"), _tests),
    ):
        if part:
            lines += [title, *(f"  {line}" for line in show(part)), ""]
    for note in report["notes"]:
        lines += [f"Note: {note}"]
    lines += [""] if report["notes"] else []
    problems = report["problems"]
    lines += [f"{len(problems)} problem{'s' if len(problems) > 1 else ''}:"] if problems else ["No problem found."]
    for i, problem in enumerate(problems, 1):
        lines += [f"  {i}. {problem['what']}", f"     {problem['to_do']}"]
    return "\n".join(lines)


def _pairs(part: dict[str, Any]) -> list[str]:
    width = max(map(len, part))
    return [f"{name:{width}}  {value}" for name, value in part.items() if value not in (None, "")]


def _gpus(part: list[dict[str, Any]]) -> list[str]:
    return [
        f"{gpu['device']}: {gpu['name']}, compute capability {gpu['capability']} ({gpu['target']}), {gpu['sms']} SMs, "
        f"{gpu['memory_bytes'] / 1e9:.1f} GB"
        for gpu in part
    ]


def _paths(part: list[dict[str, str]]) -> list[str]:
    return [f"{row['op']} on {row['device']}: {row['path']}" + f" ({row['why']})" * bool(row["why"]) for row in part]


def _tests(part: list[dict[str, Any]]) -> list[str]:
    lines = []
    for row in part:
        errors = ", ".join(f"{name} {error:.1e}" for name, error in row["errors"].items())
        bits = {True: "the same bits twice", False: "other bits in a second run", None: ""}[row["same_bits"]]
        times = f"{row['first_ms']:.0f} ms, then {row['again_ms']:.1f}" if row["again_ms"] else ""
        said = "; ".join(filter(None, (errors and f"errors {errors}", bits, times, row["failure"])))
        lines.append(f"{row['op']} on {row['device']}, {row['path']}: {'ok' if row['ok'] else 'WRONG'}; {said}")
    return lines
