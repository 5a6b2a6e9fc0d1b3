"""From a results file to what people read: a page in Markdown, tables and verdicts on the console, figures."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from quackish.bench import plots
from quackish.bench.bars import Verdict
from quackish.bench.cells import NONE_IGNORED, Cell, is_ours, shape_name
from quackish.bench.console import console
from quackish.bench.results import Results, Row, read_rows

Extras = Mapping[str, Callable[[Cell], str]]  # further columns of a summary


class Page(NamedTuple):
    """How results are reported: how the numbers were taken, tables, figures, bars."""

    preface: str
    sections: Callable[[Results], list[str]]
    figures: Callable[[Results, Path], list[Path]]
    verdicts: Callable[[Results], list[Verdict]] = lambda results: []
    about: Mapping[str, str] = {}  # what providers are, by name


def report(path: Path, page: Page) -> None:
    """Writes the page and the figures beside the CSV `path`, and prints tables and verdicts."""
    if not (rows := read_rows(path)):
        console().print(f"{path}: no rows", markup=False)
        return
    results, found = Results(rows), path.with_suffix(".md")
    found.write_text(markdown(results, page), encoding="utf-8")
    drawn = page.figures(results, path)
    for (direction, dtype), cells in results.groups().items():
        header = ("shape", ">roof", "ours", ">time", ">% of roof", "best other", ">its time", ">times ours")
        title = f"{results.op.title}, {direction}, {dtype}, {results.scale(cells[0])[1]}"
        console_table(title, header, [_best(results, cell) for cell in cells])
    for word, text in page.verdicts(results):
        style = {"PASS": "green", "FAIL": "red"}[word]
        console().print(f"{word}  {text}", style=style, markup=False, soft_wrap=True)
    console().print(results.noise(), markup=False)
    made = ", ".join(file.name for file in (found, *drawn))
    console().print(f"{path}, and beside it {made}", markup=False, soft_wrap=True)


def console_table(
    title: str, header: Sequence[str], lines: Iterable[Sequence[str]], styles: Sequence[str] | None = None
) -> None:
    """Prints a table; columns whose title begins with > are aligned to the right."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in header:
        table.add_column(name.removeprefix(">"), justify="right" if name.startswith(">") else "left")
    for i, line in enumerate(lines):
        table.add_row(*line, style=styles[i] if styles else None)
    console().print(f"\n{title}", markup=False, soft_wrap=True)
    console().print(table)


def _best(results: Results, cell: Cell) -> list[str]:
    """The best of ours beside the best of the others: narrow enough for any terminal."""
    ours, other = results.best(cell, True), results.best(cell, False)
    times = [results.ms(cell, name) if name else None for name in (results.roof(cell), ours, other)]
    roof, mine, its = ("-" if ms is None else f"{results.scale(cell)[0] * ms:.4g}" for ms in times)
    share = f"{100 * times[0] / times[1]:.0f}" if None not in times[:2] else ""
    ratio = f"{times[2] / times[1]:.2f}" if None not in times[1:] else ""
    return [shape_name(cell.shape) + cell.kind, roof, ours or "-", mine, share, other or "-", its, ratio]


# The page -------------------------------------------------------------------------------------------------------------


def markdown(results: Results, page: Page) -> str:
    tried = {name for case in results.cells.values() for name in case}
    parts = [
        f"# {results.op.title} on {results.rows[-1]['gpu']}\n",
        *(f"{source}.\n" for source in dict.fromkeys(map(_source_of, results.rows))),
        f"{page.preface}\n",
        *(f"- {word}: {text}" for word, text in page.verdicts(results)),
        f"- {results.noise()}\n",
        *page.sections(results),
    ]
    if failures := results.failures():
        failed = [f"- {name}: {reason} ({_some(cells)})" for (name, reason), cells in failures.items()]
        parts += ["## Not measured, or not as usual\n", *failed, ""]
    if page.about:
        parts += ["## Peers\n", *(f"- {name}: {about}" for name, about in page.about.items() if name in tried)]
    return "\n".join(parts) + "\n"


def _source_of(row: Row) -> str:
    """Where a row comes from, in one line."""
    changes = " and local changes" if row["dirty"] == "True" else ""
    code = f"commit {row['commit']}{changes}" if row["commit"] else f"quackish {row['quackish']}"
    return (
        f"{row['date']}, {code}, driver {row['driver'] or '-'}, CUDA {row['cuda'] or '-'}, "
        f"torch {row['torch']}, CuTe DSL {row['dsl'] or '-'}, {row['peers'] or 'no peers'}"
    )


def _some(cells: Sequence[Cell]) -> str:
    shown = ", ".join(map(str, cells[:8]))
    return shown if len(cells) <= 8 else f"{shown} and {len(cells) - 8} more"


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines) + "\n"


def of_bench(results: Results) -> list[str]:
    return of_cells(results, {f"{d.capitalize()}, {dtype}": cells for (d, dtype), cells in results.groups().items()})


def of_cells(
    results: Results, groups: Mapping[str, Sequence[Cell]], digits: int = 4, extras: Extras | None = None
) -> list[str]:
    """For each group of cells a table of shapes by providers, with further columns, and one of everything."""
    parts = []
    for title, cells in groups.items():
        parts += [f"## {title}\n", summary(results, cells, digits, extras)]
        if results.providers(cells):
            everything = details(results, cells)
            parts += ["<details><summary>Everything measured</summary>\n", everything, "</details>\n"]
    return parts


def of_heads(results: Results, titles: Mapping[str, str]) -> list[str]:
    """For each cell its roof, a line per provider, and the peers' points that none of ours dominates."""
    names = {"three-gemms": "3 GEMMs", "gemm-logits": "logits", "gemm-dx": "dX", "gemm-dw": "dW"}
    names[NONE_IGNORED] = "none ignored"
    parts = []
    for cell in (cell for cells in results.groups().values() for cell in cells if results.providers([cell])):
        m, h, v = cell.shape
        roofs = [f"{text} {ms:.4g} ms" for name, text in names.items() if (ms := results.ms(cell, name))]
        parts += [f"## {titles[cell.direction]}: M {m}, H {h}, V {v}{cell.kind}\n"]
        parts += [f"{', '.join(roofs)}\n"] if roofs else []
        parts.append(details(results, [cell]))
        if cell.direction == "forward+backward" and 0 < len(results.peers(cell)) < len(results.points(cell)):
            free = ", ".join(results.not_dominated(cell))
            every = "Every peer's point is dominated by one of quackish.\n"
            parts.append(f"Not dominated by a point of quackish: {free}.\n" if free else every)
    return parts


def summary(results: Results, cells: Sequence[Cell], digits: int = 4, extras: Extras | None = None) -> str:
    """A line for each cell, a column for each provider; the best of all is bold. Times, and shares of the roof."""
    names, roof, scale = results.providers(cells), results.roof(cells[0]), results.scale(cells[0])[0]
    models = {cell: results.first(cell)["models"] for cell in cells}
    if any(models.values()):
        extras = {"models": models.__getitem__, **(extras or {})}
    shown = [f"**{name}**" if is_ours(name) else name for name in names]

    def time_of(cell: Cell, name: str) -> str:
        if not (ms := results.ms(cell, name)):
            return "-"
        bests = (results.best(cell, ours) for ours in (True, False))
        is_best = ms == min((results.ms(cell, best) for best in bests if best), default=0) and name != roof
        text, percent = f"{scale * ms:.{digits}g}", results.value(cell, name, "pct_of_roof")
        share = "wrong" if results.is_wrong(cell, name) else f"{percent:.0f} %" if percent and name != roof else ""
        return (f"**{text}**" if is_best else text) + (f" ({share})" if share else "")

    columns: dict[str, Callable[[Cell], str]] = {
        " x ".join(map(str.upper, results.op.dims)): lambda cell: " x ".join(map(str, cell.shape)) + cell.kind,
        **{title: lambda cell, n=n: time_of(cell, n) for title, n in zip((roof, *shown), (roof, *names), strict=True)},
        **(extras or {}),
    }
    return markdown_table(list(columns), [[text(cell) for text in columns.values()] for cell in cells])


_DETAILS = {  # columns of a results file
    "% of roof": ("pct_of_roof", ".4g"),
    "peak MB": ("peak_mb", ".5g"),
    "standing MB": ("standing_mb", ".2f"),
    "first call s": ("first_s", ".2g"),
    "launches": ("launches", ".0f"),
    "same": ("deterministic", ""),
    "err y": ("err_y", ".2g"),
    "err loss": ("err_loss", ".2g"),
    "err dX": ("err_dx", ".2g"),
    "err dW": ("err_dweight", ".2g"),
    "note": ("note", ""),
}


def details(results: Results, cells: Sequence[Cell]) -> str:
    """A line for each provider of each cell, the fastest first; columns that are empty are left out."""
    scale, unit = results.scale(cells[0])
    rows = [
        row
        for cell in cells
        for row in sorted(map(results.cells[cell].get, results.providers([cell])), key=lambda r: float(r["median_ms"]))
    ]
    table = {"shape": [row["shape"] for row in rows]} if len(cells) > 1 else {}
    table["provider"] = [f"**{row['provider']}**" if row["role"] == "ours" else row["provider"] for row in rows]
    table[unit] = [number(row, "median_ms", ".4g", scale) for row in rows]
    table["p20-p80"] = [f"{number(row, 'p20_ms', '.4g', scale)}-{number(row, 'p80_ms', '.4g', scale)}" for row in rows]
    for title, (column, form) in _DETAILS.items():
        lines = [number(row, column, form) for row in rows]
        table |= {title: lines} if any(lines) else {}
    return markdown_table(list(table), zip(*table.values(), strict=True))


def number(row: Row, column: str, form: str, factor: float = 1.0) -> str:
    """A column's value as a table shows it: "" for none, truth as yes and no."""
    value = row.get(column, "")
    if not value or not form:
        return {"True": "yes", "False": "**no**"}.get(value, value)
    return f"{factor * float(value):{form}}"


BENCH = Page(
    preface="Times are medians, the L2 cleared before each sample, all providers of a cell taking turns; beside them "
    "is the share of the roof in the same turns. Memory is the peak above inputs, including what the library keeps "
    "between calls. Errors are against fp64. `same` says whether ten runs gave the same bytes. The first call compiles "
    "or loads from a cache.",
    sections=of_bench,
    figures=plots.for_bench,
)
