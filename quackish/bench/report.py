"""Reports of a results file: a Markdown page, figures, and verdicts on targets."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from quackish.bench import plots
from quackish.bench.cells import Cell, is_ours
from quackish.bench.results import Results, Row, cell_of, read_rows, scale_of
from quackish.bench.table import ERRORS
from quackish.cli.console import NO_GPU
from quackish.text import fill, significant

Verdict = tuple[str, str]  # (PASS or FAIL, the numbers)


class Page(NamedTuple):
    """The parts of a report besides the tables."""

    preface: str  # how the numbers were measured
    figures: Callable[[Results, Path], list[Path]]
    verdicts: Callable[[Results], list[Verdict]] = lambda results: []
    about: Mapping[str, str] = {}  # descriptions of providers


BENCH = Page(
    preface="Times are medians; the L2 is cleared before each sample, and all providers of a cell take turns. Shares "
    "are of the roof in the same turns. Memory is the peak above inputs, including what the library keeps between "
    "calls. Errors are against fp64.",
    figures=plots.for_bench,
)


def report(path: Path, page: Page) -> None:
    """Writes the page and the figures next to the CSV `path`, and prints the verdicts."""
    if not (rows := read_rows(path)):
        print(f"{path}: no rows")
        return
    results, page_path = Results(rows), path.with_suffix(".md")
    page_path.write_text(markdown(results, page), encoding="utf-8")
    figures = page.figures(results, path)
    for word, text in page.verdicts(results):
        print(fill(text, f"{word}  "))
    print(fill(results.noise(), indent="  "))
    print(fill(f"wrote {path}, {', '.join(file.name for file in (page_path, *figures))}", indent="  "), flush=True)


# The page -------------------------------------------------------------------------------------------------------------


def markdown(results: Results, page: Page) -> str:
    """The page as text."""
    tried = {name for case in results.cells.values() for name in case}
    parts = [
        f"# {results.op.title} on {results.rows[-1]['gpu']}\n",
        *[f"**{NO_GPU}**\n"] * any(row["gpu"] == "cpu" for row in results.rows),
        *(f"{source}.\n" for source in dict.fromkeys(map(_source_of, results.rows))),
        f"{page.preface}\n",
        *(f"- {word}: {text}" for word, text in page.verdicts(results)),
        f"- {results.noise()}\n",
        *(_by_cell(results) if results.bench.section_per_cell else _by_shape(results)),
    ]
    if failures := results.failures():
        failed = [f"- {name}: {reason} ({_some(cells)})" for (name, reason), cells in failures.items()]
        parts += ["## Failures and notes\n", *failed, ""]
    if page.about:
        parts += ["## Peers\n", *(f"- {name}: {about}" for name, about in page.about.items() if name in tried)]
    return "\n".join(parts) + "\n"


def _source_of(row: Row) -> str:
    """The environment of a row in one line."""
    code = f"commit {row['commit']}" if row["commit"] else f"quackish {row['quackish']}"
    return (
        f"{row['date']}, {code}, driver {row['driver'] or '-'}, CUDA {row['cuda'] or '-'}, "
        f"torch {row['torch']}, CuTe DSL {row['dsl'] or '-'}, {row['peers'] or 'no peers'}"
    )


def _some(cells: Sequence[Cell]) -> str:
    """The first eight cells, and how many more there are."""
    shown = ", ".join(map(str, cells[:8]))
    return shown if len(cells) <= 8 else f"{shown} and {len(cells) - 8} more"


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines) + "\n"


def _by_shape(results: Results) -> list[str]:
    """For each direction and dtype, a table of shapes by providers and one with all columns."""
    parts = []
    for (direction, dtype), cells in results.groups().items():
        parts += [f"## {direction.capitalize()}, {dtype}\n", _summary(results, cells)]
        if results.providers(cells):
            everything = _details(results, cells)
            parts += ["<details><summary>Everything measured</summary>\n", everything, "</details>\n"]
    return parts


def _by_cell(results: Results) -> list[str]:
    """For each cell the roof, a line per provider, and the peers that quackish does not dominate."""
    parts = []
    steady_cells = {results.steady(cell) for cell in results.cells}  # shown as columns of another cell
    for cell in (cell for cells in results.groups().values() for cell in cells):
        if cell in steady_cells or not results.providers([cell]):
            continue
        sizes = ", ".join(f"{dim} {size}" for dim, size in zip(results.op.dims, cell.shape, strict=True))
        roofs = [
            f"{text} {significant(ms)} ms"
            for name, text in results.bench.baselines.items()
            if (ms := results.ms(cell, name))
        ]
        models = f" ({names})" if (names := results.models(cell)) else ""
        parts += [f"## {cell.direction.capitalize()}, {cell.dtype}: {sizes}{cell.kind}{models}\n"]
        parts += [f"{', '.join(roofs)}\n"] if roofs else []
        parts.append(_details(results, [cell]))
        if cell.direction == "forward+backward" and 0 < len(results.peers(cell)) < len(results.points(cell)):
            better = ", ".join(results.not_dominated(cell))
            none = "Every peer's point is dominated by one of quackish.\n"
            parts.append(f"Not dominated by a point of quackish: {better}.\n" if better else none)
    return parts


def _summary(results: Results, cells: Sequence[Cell]) -> str:
    """Cells by providers: times and shares of the roof. The fastest provider with correct results is bold."""
    names, roof, scale = results.providers(cells), results.roof(cells[0]), scale_of(cells[0])[0]

    def time_and_share(cell: Cell, name: str) -> str:
        if not (ms := results.ms(cell, name)):
            return "-"
        correct = [results.ms(cell, n) for n in results.providers([cell]) if not results.is_wrong(cell, n)]
        text, percent = significant(scale * ms, 6), results.value(cell, name, "pct_of_roof")
        text = f"**{text}**" if name != roof and ms == min(correct, default=0) else text
        share = "wrong" if results.is_wrong(cell, name) else f"{percent:.0f} %" if percent and name != roof else ""
        return f"{text} ({share})" if share else text

    table = {" x ".join(results.op.dims): [" x ".join(map(str, cell.shape)) + cell.kind for cell in cells]}
    for name in (*[roof] * bool(roof), *names):
        table[f"**{name}**" if is_ours(name) else name] = [time_and_share(cell, name) for cell in cells]
    if any(models := [results.models(cell) for cell in cells]):
        table["models"] = models
    return markdown_table(list(table), zip(*table.values(), strict=True))


_SYMBOLS = {"dx": "dX", "dweight": "dW", "dw2": "dW2"}  # symbols of gradients
_DETAILS: dict[str, tuple[str, str | int]] = {  # columns of a results file
    "% of roof": ("pct_of_roof", 4),
    "peak MB": ("peak_mb", 5),
    "standing MB": ("standing_mb", ".2f"),
    "launches": ("launches", ".0f"),
    **{f"err {_SYMBOLS.get(of, of)}": (f"err_{of}", ".2g") for of in (name.removeprefix("err_") for name in ERRORS)},
    "note": ("note", ""),
}


def _details(results: Results, cells: Sequence[Cell]) -> str:
    """One line per provider and cell, the fastest first, without empty columns."""
    scale, unit = scale_of(cells[0])
    rows = [
        row
        for cell in cells
        for row in sorted(map(results.cells[cell].get, results.providers([cell])), key=lambda r: float(r["median_ms"]))
    ]
    table = {"shape": [f"{row['shape']}{cell_of(row).kind}" for row in rows]} if len(cells) > 1 else {}
    table["provider"] = [f"**{row['provider']}**" if is_ours(row["provider"]) else row["provider"] for row in rows]
    median, p20, p80 = ([_number(row, f"{name}_ms", 4, scale) for row in rows] for name in ("median", "p20", "p80"))
    table |= {unit: median, "p20-p80": list(map("-".join, zip(p20, p80, strict=True)))}
    if steady := results.steady(cells[0]):
        bursts = [results.cells[steady].get(row["provider"], {}) for row in rows]
        table["steady ms"] = [_number(row, "median_ms", 4) for row in bursts]
        ratios = [100 / float(row["pct_of_roof"]) if row.get("pct_of_roof") else None for row in bursts]
        table["steady / 3 GEMMs"] = [f"{ratio:.3f}" if ratio else "" for ratio in ratios]
    for title, (column, form) in _DETAILS.items():
        lines = [_number(row, column, form) for row in rows]
        table |= {title: lines} if any(lines) else {}
    return markdown_table(list(table), zip(*table.values(), strict=True))


def _number(row: Row, column: str, form: str | int, factor: float = 1.0) -> str:
    """A column's value, formatted by `form`, which may be a number of digits; unchanged without one."""
    value = row.get(column, "")
    if not value or not form:
        return value
    number = factor * float(value)
    return significant(number, form) if isinstance(form, int) else f"{number:{form}}"
