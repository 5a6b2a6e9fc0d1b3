"""Compiled kernels on disk: list, verify, clear, export, import.

    python -m quackish cache ls
    python -m quackish cache verify --delete
    python -m quackish cache clear --stale
    python -m quackish cache export kernels.tar
    python -m quackish cache import kernels.tar

The folder is the user's cache folder, or QUACKISH_CACHE_DIR. A file is of use to the versions, sources and kind of CPU
that it was made with; it is loaded on any CPU of that kind (x86_64: all of them, whatever they have of AVX).
"""

import argparse
import re
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from quackish.cli.parser import Refused
from quackish.launch import cache, upkeep
from quackish.launch.upkeep import Entry, printable
from quackish.profiling import text_table
from quackish.work import SHORT

_VERIFY = "`python -m quackish cache verify` says why"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="what", metavar="WHAT", required=True)

    def command(do, name: str, help: str, description: str | None = None) -> argparse.ArgumentParser:
        found = commands.add_parser(name, help=help, description=description)
        found.set_defaults(do=do)
        return found

    command(_ls, "ls", "a table of the kernels, and whether they are of use here")
    verify = command(_verify, "verify", "check each file: checksum, name, owner, mode; ends with 1 if one is bad")
    verify.add_argument("--delete", action="store_true", help="delete the bad ones")
    clear = command(_clear, "clear", "delete kernels; they are compiled again where they are needed")
    clear.add_argument("--stale", action="store_true", help="only those of no use here: other versions, another CPU")
    export = command(_export, "export", "write the kernels into a tar file, for another machine")
    export.add_argument("file", type=Path, metavar="FILE", help="kernels.tar; .tar.gz and .tar.xz are compressed")
    trust = "Adds the kernels of a tar file that `cache export` wrote; those that are here already stay. They are code "
    trust += "that will run: import only what somebody made whom you trust. Checksums show damage, not origin."
    what = "add the kernels of such a file: code that will run, so only from whom you trust"
    command(_import, "import", what, trust).add_argument("file", type=Path, metavar="FILE")


def run(args: argparse.Namespace) -> int:
    try:
        return args.do(args)
    except (OSError, ValueError) as error:
        raise Refused(f"{args.what}: {error}") from error


def _ls(args: argparse.Namespace) -> int:
    found, bad = _sound_and_bad()
    if found:
        header = ["kernel", "target", "made with", "size", "date", "of use here", "problem", "config"]
        print(text_table(header, [_row(entry) for entry in found], "lllrllll") + "\n")
    print(f"{_count(found)}, {_size(found)}, in {cache.location()}" + (" (QUACKISH_CACHE=0: off)" * cache.is_off()))
    if bad:
        print(f"{_count(bad)} not sound: {_VERIFY}")
    return 0


def _verify(args: argparse.Namespace) -> int:
    found, folder = upkeep.entries(), upkeep.folder_fault()
    bad = [entry for entry in found if entry.fault]
    for line in [f"{cache.location()}: {folder}"] * bool(folder) + [f"{entry.path}: {entry.fault}" for entry in bad]:
        print(printable(line))
    left = _delete([entry.path for entry in bad], "them") if args.delete else bool(bad)
    print(f"{_count(found)} in {cache.location()}: {len(found) - len(bad)} sound, {len(bad)} bad")
    return 1 if folder or left else 0


def _clear(args: argparse.Namespace) -> int:
    sound, bad = _sound_and_bad()
    if args.stale:
        chosen = [entry.path for entry in sound if upkeep.differs(entry.identity)]
    else:
        chosen = sorted(entry.path for entry in sound + bad) + upkeep.leftovers()
    if not chosen:
        print("nothing to delete")
        return 0
    return 1 if _delete(chosen, f"{_count(chosen)} in {cache.location()}") else 0


def _delete(chosen: Sequence[Path], what: str) -> bool:
    """Whether something could not be deleted."""
    count, left = upkeep.remove(chosen)
    for line in left:
        print(printable(line))
    print(f"deleted {count} of {what}")
    return bool(left)


def _export(args: argparse.Namespace) -> int:
    chosen, bad = _sound_and_bad()
    if bad:
        print(f"left out {_count(bad)}, not sound: {_VERIFY}", file=sys.stderr)
    if not chosen:
        raise ValueError(f"no kernel to export in {cache.location()}")
    upkeep.pack(chosen, args.file)
    print(f"wrote {_count(chosen)}, {_size(chosen)}, to {args.file}")
    for line in sorted({f"{_made_with(entry)} {entry.identity['target']}" for entry in chosen}):
        print(f"  made with and for: {printable(line)}")
    print("of use where versions, sources and kind of CPU are the same: `cache import` says which are")
    return 0


def _import(args: argparse.Namespace) -> int:
    if cache.is_off():
        raise ValueError("QUACKISH_CACHE=0 turns the cache off here")
    added, known = upkeep.unpack(args.file)
    print(f"added {_count(added)} from {args.file} to {cache.location()}; they are code that will run")
    if known:
        print(f"{_count(known)} were here already and stay")
    reasons = Counter(e.fault or upkeep.differs(e.identity) for e in [*added, *known])
    for reason, count in sorted(reasons.items()):
        print(f"  {count} of no use here: {reason}" if reason else f"  {count} of use here")
    return 0


# How kernels are shown -----------------------------------------------------------------------------------------------


def _sound_and_bad() -> tuple[list[Entry], list[Entry]]:
    found = upkeep.entries()
    return [entry for entry in found if not entry.fault], [entry for entry in found if entry.fault]


def _row(entry: Entry) -> list[str]:
    identity, reason = entry.identity, upkeep.differs(entry.identity)
    cells = [
        *(identity["kernel"].rpartition(".")[2], identity["target"], _made_with(entry), f"{entry.bytes / 1e3:.0f} kB"),
        *(time.strftime("%Y-%m-%d", time.localtime(entry.modified)), f"no: {reason}" if reason else "yes"),
        *(short(identity["problem"]), short(identity["config"])),
    ]
    return [printable(cell) for cell in cells]


def _made_with(entry: Entry) -> str:
    return " ".join(entry.identity.get(name, "?") for name in ("quackish", "nvidia-cutlass-dsl", "cuda", "cpu"))


def short(text: str) -> str:
    """A dataclass's repr in few words: "n=4096 x=bf16 packed"; what is None or False is left out."""
    words = []
    for name, string, other in re.findall(r"\b(\w+)=(?:'([^']*)'|([^,()]+))", text):
        if other not in ("None", "False"):
            value = string or other
            words.append(name if other == "True" else f"{name.removesuffix('_dtype')}={SHORT.get(value, value)}")
    return " ".join(words) or text


def _count(chosen: Sequence) -> str:
    return f"{len(chosen)} kernel{'s' if len(chosen) != 1 else ''}"


def _size(chosen: list[Entry]) -> str:
    return f"{sum(entry.bytes for entry in chosen) / 1e6:.2f} MB"
