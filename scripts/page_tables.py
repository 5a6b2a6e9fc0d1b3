"""Tables that a script writes into pages of docs/, each between two comments of its page.

python scripts/NAME.py            # writes the pages
python scripts/NAME.py --check    # exit status 1 if a table is out of date
"""

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

# By name: the rows of a table, the titles first
Tables = Mapping[str, Callable[[], Iterable[Sequence[str]]]]


def with_tables(page: str, tables: Tables, script: str) -> str:
    """The page with these tables made again."""
    for name, rows_of in tables.items():
        head, *rows = rows_of()
        lines = [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]
        begin, end = f"<!-- begin {name}: by scripts/{script} -->", f"<!-- end {name} -->"
        if page.count(begin) != 1 or page.count(end) != 1:
            raise ValueError(f"table {name}: expected {begin} and {end} once in the page")
        before, _, rest = page.partition(begin)
        _, _, after = rest.partition(end)
        page = f"{before}{begin}\n" + "\n".join(lines) + f"\n{end}{after}"
    return page


def main(description: str, pages: Mapping[Path, Tables], script: str) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--check", action="store_true", help="do not write; exit status 1 if a table is out of date")
    args = parser.parse_args()
    status = 0
    for path, tables in pages.items():
        page = path.read_text(encoding="utf-8")
        made = with_tables(page, tables, script)
        if not args.check:
            path.write_text(made, encoding="utf-8")
        elif made != page:
            print(f"{path}: tables are out of date; expected those that {script} writes", file=sys.stderr)
            status = 1
    return status
