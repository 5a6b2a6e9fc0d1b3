"""Manages the compiled kernels on disk: list, verify, clear.

    quackish cache ls
    quackish cache verify --delete
    quackish cache clear --stale

The folder is the user's cache folder, or QUACKISH_CACHE_DIR. A kernel is usable only with the versions, sources and CPU
architecture it was compiled with; on x86_64 it runs on every CPU, with or without AVX.
"""

import argparse
import re
import time
from collections.abc import Sequence
from pathlib import Path

from quackish.cli.parser import CommandError, program_name
from quackish.device import cache, upkeep
from quackish.device.upkeep import Entry, printable
from quackish.device.work import SHORT
from quackish.text import fill


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="what", metavar="WHAT", required=True)

    def command(function, name: str, help: str) -> argparse.ArgumentParser:
        subparser = commands.add_parser(name, help=help)
        subparser.set_defaults(function=function)
        return subparser

    command(_ls, "ls", "list the kernels, and whether they are usable here")
    verify = command(_verify, "verify", "check each file: checksum, name, owner, mode; exit status 1 if one is bad")
    verify.add_argument("--delete", action="store_true", help="delete bad files")
    clear = command(_clear, "clear", "delete kernels; they are compiled again when needed")
    clear.add_argument("--stale", action="store_true", help="only kernels not usable here: other versions, another CPU")


def run(args: argparse.Namespace) -> int:
    try:
        return args.function(args)
    except (OSError, ValueError) as error:
        why = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else error
        raise CommandError(f"{args.what}: {why}") from error


def _ls(args: argparse.Namespace) -> int:
    good, bad = _good_and_bad()
    groups: dict[str, list[Entry]] = {}
    for entry in good:
        reason = upkeep.why_unusable(entry.identity)
        usable = f"not usable here: {reason}" if reason else "usable here"
        groups.setdefault(printable(f"{_compiled_with(entry)}, {usable}"), []).append(entry)
    for title, entries in groups.items():
        print(fill(f"Compiled with {title}", indent="    "))
        print("\n".join(map(_listed, entries)) + "\n")
    off = " (QUACKISH_CACHE=0: off)" * cache.is_off()
    print(fill(f"{_count(good)}, {_size(good)}, in {cache.location()}{off}", indent="  "))
    if bad:
        print(fill(f"{_count(bad)} bad: `{program_name()} cache verify` shows why"))
    return 0


def _verify(args: argparse.Namespace) -> int:
    good, bad = _good_and_bad()
    if folder_fault := upkeep.folder_fault():
        print(fill(f"{cache.location()}: {folder_fault}", indent="  "))
    for entry in bad:
        print(fill(printable(f"{entry.path}: {entry.fault}"), indent="  "))
    failed = _delete([entry.path for entry in bad]) if args.delete else bool(bad)
    print(fill(f"{_count(good + bad)} in {cache.location()}: {len(good)} good, {len(bad)} bad", indent="  "))
    return 1 if folder_fault or failed else 0


def _clear(args: argparse.Namespace) -> int:
    good, bad = _good_and_bad()
    if args.stale:
        paths = [entry.path for entry in good if upkeep.why_unusable(entry.identity)]
    else:
        paths = sorted(entry.path for entry in good + bad) + upkeep.leftovers()
    if not paths:
        print("nothing to delete")
        return 0
    return 1 if _delete(paths) else 0


def _delete(paths: Sequence[Path]) -> bool:
    """Returns True if a file could not be deleted."""
    count, failures = upkeep.remove(paths)
    for line in failures:
        print(fill(printable(line), indent="  "))
    print(fill(f"deleted {count} of {len(paths)} files in {cache.location()}", indent="  "))
    return bool(failures)


def _good_and_bad() -> tuple[list[Entry], list[Entry]]:
    """All kernels in the cache folder, as (good, bad)."""
    entries = upkeep.entries()
    return [entry for entry in entries if not entry.fault], [entry for entry in entries if entry.fault]


def _listed(entry: Entry) -> str:
    """The lines of a kernel: its name and target, its problem, its config."""
    identity, date = entry.identity, time.strftime("%Y-%m-%d", time.localtime(entry.modified))
    kernel = f"{identity['kernel'].rpartition('.')[2]} {identity['target']}, {entry.bytes / 1e3:.0f} kB, {date}"
    below = [fill(printable(short(identity[part])), "    ") for part in ("problem", "config")]
    return "\n".join([fill(printable(kernel), "  "), *below])


def _compiled_with(entry: Entry) -> str:
    return " ".join(entry.identity.get(name, "?") for name in ("quackish", "nvidia-cutlass-dsl", "cuda", "cpu"))


def short(text: str) -> str:
    """A dataclass's repr, shortened: "n=4096 x=bf16 packed". Fields that are None or False are omitted."""
    words = []
    for name, string, other in re.findall(r"\b(\w+)=(?:'([^']*)'|([^,()]+))", text):
        if other not in ("None", "False"):
            value = string or other
            words.append(name if other == "True" else f"{name.removesuffix('_dtype')}={SHORT.get(value, value)}")
    return " ".join(words) or text


def _count(entries: list[Entry]) -> str:
    return f"{len(entries)} kernel{'s' if len(entries) != 1 else ''}"


def _size(entries: list[Entry]) -> str:
    return f"{sum(entry.bytes for entry in entries) / 1e6:.2f} MB"
