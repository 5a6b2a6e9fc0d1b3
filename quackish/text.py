"""Wrapped text and tables, as commands, reports and scripts print them."""

import math
import re
import shutil
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_AT_SPACES: dict[str, Any] = dict(break_long_words=False, break_on_hyphens=False)


def width() -> int:
    """The terminal's columns; 80 if stdout is not a terminal. The environment variable COLUMNS overrides both."""
    return shutil.get_terminal_size().columns


def fill(text: str, first: str = "", indent: str | None = None) -> str:
    """Wraps a line at spaces to the width of the terminal. A longer word, such as a path, stays whole.

    `first` precedes the first line and `indent` the next ones; by default these are `first` in spaces.
    """
    indent = " " * len(first) if indent is None else indent
    return textwrap.fill(text, width(), initial_indent=first, subsequent_indent=indent, **_AT_SPACES)


def fill_page(page: str, columns: int) -> str:
    """Wraps each paragraph. Indented lines are commands to copy, which go on after a backslash."""
    paragraphs = []
    for paragraph in re.split(r"\n\s*\n", page.strip()):
        if not paragraph.startswith(" "):
            paragraphs.append(textwrap.fill(" ".join(paragraph.split()), columns, **_AT_SPACES))
            continue
        how = dict(initial_indent="    ", subsequent_indent=" " * 8) | _AT_SPACES
        lines = [textwrap.wrap(line.strip(), columns - 2, **how) for line in paragraph.splitlines()]
        paragraphs.append("\n".join(" \\\n".join(parts) for parts in lines))
    return "\n\n".join(paragraphs)


def significant(value: float, digits: int = 4) -> str:
    """The number rounded to significant digits, without an exponent if it is large: 15960 instead of 1.596e+04."""
    return f"{float(f'{value:.{digits}g}'):.12g}"


def megabytes(num_bytes: int) -> float:
    """In MB with one decimal, rounded up: as a `memory_limit` it is enough."""
    return math.ceil(num_bytes / 1e5) / 10


# Tables --------------------------------------------------------------------------------------------------------------


def text_table(header: Sequence[str], rows: Sequence[str | Sequence[str]], align: str) -> str:
    """A table with columns two spaces apart. `align` has "l" or "r" per column; a string is a row without columns."""
    cells = [row for row in rows if not isinstance(row, str)]
    widths = [max(map(len, column)) for column in zip(header, *cells, strict=True)]
    lines = [header, ["-" * width for width in widths], *rows]
    return "\n".join(
        line
        if isinstance(line, str)
        else "  ".join(
            cell.ljust(width) if side == "l" else cell.rjust(width)
            for cell, width, side in zip(line, widths, align, strict=True)
        ).rstrip()
        for line in lines
    )


def table_of(rows: Sequence[str | Mapping[str, Any]], formats: Mapping[str, str | Callable]) -> str:
    """A table of dicts, and of strings as in `text_table`.

    `formats`: {column: format spec or function}, with "" for text. None is left blank.
    """

    def cell(value: Any, form: str | Callable) -> str:
        if value is None:
            return ""
        return form(value) if callable(form) else format(value, form)

    cells = [
        row if isinstance(row, str) else [cell(row.get(column), form) for column, form in formats.items()]
        for row in rows
    ]
    return text_table(list(formats), cells, "".join("r" if form else "l" for form in formats.values()))
