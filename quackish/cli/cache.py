"""Compiled kernels on disk: list, verify, clear, export, import.

    python -m quackish cache ls
    python -m quackish cache verify --delete
    python -m quackish cache clear --stale --older-than 30d
    python -m quackish cache export kernels.tar --target sm_90a
    python -m quackish cache import kernels.tar

The folder is the user's cache folder, or QUACKISH_CACHE_DIR. A file is of use to the versions, sources and kind of CPU
that it was made with; it is loaded on any CPU of that kind (x86_64: all of them, whatever they have of AVX).
"""

import argparse
import ast
import sys
import time
from pathlib import Path

from quackish.launch import cache, upkeep
from quackish.launch.upkeep import Entry, printable
from quackish.profiling import text_table
from quackish.work import SHORT

_AGES = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    ls = commands.add_parser("ls", help="a table of the kernels, and whether they are of use here")
    ls.set_defaults(do=_ls)
    verify = commands.add_parser(
        "verify", help="check each file: checksum, name, owner, mode; ends with 1 if one is bad"
    )
    verify.add_argument("--delete", action="store_true", help="delete the bad ones")
    verify.set_defaults(do=_verify)
    clear = commands.add_parser("clear", help="delete kernels")
    clear.add_argument("--yes", "-y", action="store_true", help="do not ask")
    clear.set_defaults(do=_clear)
    export = commands.add_parser("export", help="write kernels into a tar file, for another machine")
    export.add_argument("file", type=Path, metavar="FILE", help="kernels.tar; .tar.gz and .tar.xz are compressed")
    export.set_defaults(do=_export)
    import_ = commands.add_parser(
        "import",
        help="add the kernels of such a file: code that will run, so only from whom you trust",
        description="Adds the kernels of a tar file that `cache export` wrote; those that are here already stay. They "
        "are code that will run: import only what somebody made whom you trust. Checksums show damage, not origin.",
    )
    import_.add_argument("file", type=Path, metavar="FILE")
    import_.set_defaults(do=_import)
    for filtered in (ls, clear, export):
        filtered.add_argument("--target", metavar="SM", help="only those for this architecture: sm_90a")
        filtered.add_argument(
            "--older-than", type=_seconds, metavar="AGE", help=f"only those written before: 30d; {', '.join(_AGES)}"
        )
    ls.add_argument("--stale", action="store_true", help="only those of no use here")
    clear.add_argument("--stale", action="store_true", help="only those of no use here: other versions, another CPU")
    export.set_defaults(stale=False)


def run(args: argparse.Namespace) -> int:
    try:
        return args.do(args)
    except (OSError, ValueError) as error:
        print(f"cache {args.what}: {error}", file=sys.stderr)
        return 2


def _ls(args: argparse.Namespace) -> int:
    found = [entry for entry in _chosen(args) if not entry.fault]
    bad = [entry for entry in upkeep.entries() if entry.fault]
    if found:
        header = ["kernel", "target", "made with", "size", "age", "of use here", "problem", "config"]
        print(text_table(header, [_row(entry) for entry in found], "lllrrlll") + "\n")
    print(f"{_count(found)}, {_size(found)}, in {cache.location()}" + (" (QUACKISH_CACHE=0: off)" * cache.is_off()))
    if bad:
        print(f"{_count(bad)} not sound: `python -m quackish cache verify` says why")
    return 0


def _verify(args: argparse.Namespace) -> int:
    found, folder = upkeep.entries(), upkeep.folder_fault()
    bad = [entry for entry in found if entry.fault]
    if folder:
        print(f"{cache.location()}: {folder}")
    for entry in bad:
        print(printable(f"{entry.path}: {entry.fault}"))
    left = bool(bad)
    if args.delete:
        left = _delete(bad, "them")
    print(f"{_count(found)} in {cache.location()}: {len(found) - len(bad)} sound, {len(bad)} bad")
    return 1 if folder or left else 0


def _clear(args: argparse.Namespace) -> int:
    chosen = _chosen(args)
    if args.target is None and args.older_than is None and not args.stale:
        chosen = [*chosen, *upkeep.leftovers()]
    if not chosen:
        print("nothing to delete")
        return 0
    what = f"{_count(chosen)} in {cache.location()}"
    if not args.yes:
        if not sys.stdin.isatty():
            raise ValueError(f"would delete {what}; say --yes, as nobody can be asked here")
        if input(f"Delete {what}? [y/N] ").strip().lower() not in ("y", "yes"):
            print("nothing was deleted")
            return 1
    return 1 if _delete(chosen, what) else 0


def _delete(chosen: list, what: str) -> bool:
    """Whether something could not be deleted."""
    count, left = upkeep.remove(chosen)
    for line in left:
        print(printable(line))
    print(f"deleted {count} of {what}")
    return bool(left)


def _export(args: argparse.Namespace) -> int:
    chosen = [entry for entry in _chosen(args) if not entry.fault]
    bad = [entry for entry in upkeep.entries() if entry.fault]
    if bad:
        print(f"left out {_count(bad)}, not sound: `python -m quackish cache verify` says why", file=sys.stderr)
    if not chosen:
        raise ValueError(f"no kernel to export in {cache.location()}")
    upkeep.pack(chosen, args.file)
    print(f"wrote {_count(chosen)}, {_size(chosen)}, to {args.file}")
    for line in sorted({_made_with(entry) + f" {entry.identity['target']}" for entry in chosen}):
        print(f"  made with and for: {printable(line)}")
    print("of use where versions, sources and kind of CPU are the same: `cache import` says which are")
    return 0


def _import(args: argparse.Namespace) -> int:
    if cache.is_off():
        raise ValueError("QUACKISH_CACHE=0 turns the cache off here")
    done = upkeep.unpack(args.file)
    print(f"added {_count(done.added)} from {args.file} to {cache.location()}; they are code that will run")
    if done.known:
        print(f"{_count(done.known)} were here already and stay")
    reasons: dict[str, int] = {}
    for entry in [*done.added, *done.known]:
        reason = entry.fault or str(upkeep.differs(entry.identity) or "")
        reasons[reason] = reasons.get(reason, 0) + 1
    for reason, count in sorted(reasons.items()):
        print(f"  {count} of use here" if not reason else f"  {count} of no use here: {reason}")
    return 0


# What is chosen, and how it is shown ---------------------------------------------------------------------------------


def _chosen(args: argparse.Namespace) -> list[Entry]:
    """Of damaged files only the age is known."""
    chosen, now = upkeep.entries(), time.time()
    if args.target is not None:
        chosen = [entry for entry in chosen if entry.identity.get("target") == args.target]
    if args.older_than is not None:
        chosen = [entry for entry in chosen if entry.modified < now - args.older_than]
    if args.stale:
        chosen = [entry for entry in chosen if not entry.fault and upkeep.differs(entry.identity)]
    return chosen


def _row(entry: Entry) -> list[str]:
    identity, reason = entry.identity, upkeep.differs(entry.identity)
    cells = [
        identity["kernel"].rpartition(".")[2],
        identity["target"],
        _made_with(entry),
        f"{entry.bytes / 1e3:.0f} kB",
        _age(time.time() - entry.modified),
        "yes" if reason is None else f"no: {reason}",
        short(identity["problem"]),
        short(identity["config"]),
    ]
    return [printable(cell) for cell in cells]


def _made_with(entry: Entry) -> str:
    names = ("quackish", "nvidia-cutlass-dsl", "cuda", "cpu")
    return " ".join(entry.identity.get(name, "?") for name in names)


def short(text: str) -> str:
    """A dataclass's repr in few words: "n=4096 x=bf16 packed"; what is None or False is left out."""
    words = []
    try:
        for field in ast.parse(text, mode="eval").body.keywords:
            name, value = field.arg.removesuffix("_dtype"), ast.literal_eval(field.value)
            if value is not None and value is not False:
                words.append(name if value is True else f"{name}={SHORT.get(value, value)}")
    except (SyntaxError, AttributeError, ValueError, TypeError, RecursionError, MemoryError):
        return text
    return " ".join(words)


def _count(chosen: list) -> str:
    return f"{len(chosen)} kernel{'s' if len(chosen) != 1 else ''}"


def _size(chosen: list[Entry]) -> str:
    return f"{sum(entry.bytes for entry in chosen) / 1e6:.2f} MB"


def _age(seconds: float) -> str:
    unit = max((unit for unit in _AGES if seconds >= 2 * _AGES[unit]), key=_AGES.__getitem__, default="s")
    return f"{seconds / _AGES[unit]:.0f} {unit}"


def _seconds(text: str) -> int:
    number, unit = text[:-1], text[-1:]
    if not number.isdecimal() or unit not in _AGES:
        raise argparse.ArgumentTypeError(f"{text!r}; expected a number and one of {', '.join(_AGES)}, as in 30d")
    return int(number) * _AGES[unit]
