"""From a results file to what people read: a page in Markdown, tables and verdicts on the console, figures."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from quackish.bench import plots, schema
from quackish.bench.bars import Verdict
from quackish.bench.cells import Cell, shape_name
from quackish.bench.console import console
from quackish.bench.measured import NONE_IGNORED, OURS, is_ours
from quackish.bench.results import Results
from quackish.bench.schema import Row

ERROR_NAMES = {"err_y": "err y", "err_loss": "err loss", "err_dx": "err dX", "err_dweight": "err dW"}


class Page(NamedTuple):
    """How results are reported: how the numbers were taken, tables, figures, bars."""

    preface: str
    sections: Callable[[Results], list[str]]
    figures: Callable[[Results, Path], list[Path]]
    verdicts: Callable[[Results], list[Verdict]] = lambda results: []
    about: Mapping[str, str] = {}  # what providers are, by name


def report(path: Path, page: Page) -> None:
    """Writes the page and the figures beside the CSV `path`, and prints tables and verdicts."""
    if not (rows := schema.read_rows(path)):
        console().print(f"{path}: no rows", markup=False)
        return
    results, found = Results(rows), path.with_suffix(".md")
    found.write_text(markdown(results, page), encoding="utf-8")
    drawn = page.figures(results, path)
    for (direction, dtype), cells in results.groups().items():
        _print(f"{results.op.title}, {direction}, {dtype}, {results.scale(cells[0])[1]}", results, cells)
    for word, text in page.verdicts(results):
        style = {"PASS": "green", "FAIL": "red"}[word]
        console().print(f"{word}  {text}", style=style, markup=False, soft_wrap=True)
    console().print(results.noise(), markup=False)
    made = ", ".join(file.name for file in (found, *drawn))
    console().print(f"{path}, and beside it {made}", markup=False, soft_wrap=True)


def markdown(results: Results, page: Page) -> str:
    tried = {name for case in results.cells.values() for name in case}
    parts = [
        f"# {results.op.title} on {results.rows[-1]['gpu']}\n",
        *(f"{source}.\n" for source in dict.fromkeys(map(source_of, results.rows))),
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


def source_of(row: Row) -> str:
    """Where a row comes from, in one line."""
    changes = " and local changes" if row["dirty"] == "True" else ""
    code = f"commit {row['commit']}{changes}" if row["commit"] else f"quackish {row.get('quackish', '')}"
    return (
        f"{row['date']}, {code}, driver {row['driver'] or '-'}, CUDA {row['cuda'] or '-'}, "
        f"torch {row['torch']}, CuTe DSL {row['dsl'] or '-'}, {row['peers'] or 'no peers'}"
    )


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines) + "\n"


# Sections -------------------------------------------------------------------------------------------------------------


def of_bench(results: Results) -> list[str]:
    """For each direction and dtype a table of shapes by providers, and one of everything."""
    parts = []
    for (direction, dtype), cells in results.groups().items():
        title = f"{direction}, {dtype}"
        parts += [f"## {title[0].upper()}{title[1:]}\n", markdown_table(*summary(results, cells))]
        if results.providers(cells):
            details = _details(results, cells, {"shape": lambda row: row["shape"], **_DETAILS, **_MB})
            parts += ["<details><summary>Everything measured</summary>\n", details, "</details>\n"]
    return parts


def summary(results: Results, cells: Sequence[Cell]) -> tuple[list[str], list[list[str]]]:
    """Header and lines: a line for each cell, a column for each provider; the best of ours and others is bold."""
    names, roof = results.providers(cells), results.roof(cells[0])
    models = any(row.get("models") for cell in cells for row in results.cells[cell].values())
    shown = [f"**{name}**" if is_ours(name) else name for name in names]
    header = [" x ".join(dim.upper() for dim in results.op.dims), *(["models"] if models else []), roof, *shown]
    lines = []
    for cell in cells:
        best = min((results.ms(cell, name) for own in (True, False) if (name := results.best(cell, own))), default=0)
        row = next(iter(results.cells[cell].values()))
        line = [" x ".join(map(str, cell.shape)), *([row["models"]] if models else [])]
        for name in (roof, *names):
            ms, share = results.ms(cell, name), results.value(cell, name, "pct_of_roof")
            text = f"{results.scale(cell)[0] * ms:.4g}" if ms else "-"
            text = f"**{text}**" if ms and ms == best and name != roof else text
            share = "wrong" if results.is_wrong(cell, name) else share and f"{share:.0f} %"
            line.append(f"{text} ({share})" if ms and share and name != roof else text)
        lines.append(line)
    return header, lines


def _number(column: str, shape: str = ".4g", factor: float = 1.0) -> Callable[[Row], str]:
    return lambda row: f"{factor * float(row[column]):{shape}}" if row.get(column) else ""


def _same(row: Row) -> str:
    return {"True": "yes", "False": "**no**"}.get(row.get("deterministic", ""), "")


_DETAILS: dict[str, Callable[[Row], str]] = {
    "provider": lambda row: f"**{row['provider']}**" if row["role"] == "ours" else row["provider"],
    "time": None,
    "p20-p80": None,
}
_LAST = {
    "first call s": _number("first_s", ".2g"),
    "launches": lambda row: row["launches"],
    "same": _same,
    **{title: _number(column, ".2g") for column, title in ERROR_NAMES.items()},
    "note": lambda row: row.get("note", ""),
}
_MB = {"% of roof": _number("pct_of_roof"), "peak MB": _number("peak_mb"), **_LAST}
_GB = {
    "of roof": lambda row: f"{100 / float(row['pct_of_roof']):.3f}" if row["pct_of_roof"] else "",
    "peak GB": _number("peak_mb", ".4f", 1e-3),
    "standing MB": _number("standing_mb", ".2f"),
    **_LAST,
}


def _details(results: Results, cells: Sequence[Cell], columns: Mapping[str, Callable[[Row], str]]) -> str:
    """A line for each provider of each cell, the fastest first; columns that are empty are left out."""
    scale, unit = results.scale(cells[0])
    low, high = _number("p20_ms", factor=scale), _number("p80_ms", factor=scale)
    times = {"time": _number("median_ms", factor=scale), "p20-p80": lambda row: f"{low(row)}-{high(row)}"}
    rows = [
        row
        for cell in cells
        for row in sorted(map(results.cells[cell].get, results.providers([cell])), key=lambda r: float(r["median_ms"]))
    ]
    table = {
        unit if title == "time" else title: [(times.get(title) or text)(row) for row in rows]
        for title, text in columns.items()
    }
    table = {title: lines for title, lines in table.items() if title == "provider" or any(lines)}
    return markdown_table(list(table), zip(*table.values(), strict=True))


def of_norms(results: Results, sets: Mapping[str, str], titles: Mapping[str, str], rival: str) -> list[str]:
    """For each set of cells and direction a line per cell: ours, its bar, every peer."""
    parts = []
    for name, title in sets.items():
        for direction, what in titles.items():
            if cells := cells_of(results, name, direction):
                parts += [f"## {what}, {title}\n", _norm_table(results, cells, rival)]
    return parts


def cells_of(results: Results, name: str, direction: str) -> list[Cell]:
    """The cells of one set, by dtype, row length and rows."""
    found = [c for c, rows in results.cells.items() if c.direction == direction and _set_of(rows) == name]
    return sorted(found, key=lambda cell: (cell.dtype, cell.shape[1], cell.shape[0]))


def _set_of(rows: Mapping[str, Row]) -> str:
    return next(iter(rows.values()))["cells"]


def _norm_table(results: Results, cells: Sequence[Cell], rival: str) -> str:
    roof, names = results.roof(cells[0]), [name for name in results.providers(cells) if name != OURS]
    us = _number("median_us")
    header = ["dtype", "M", "N", roof, OURS, "GB/s", "% of roof", "bar", "kept", *names, f"{rival} / ours"]
    lines = []
    for cell in cells:
        rows, ours = results.cells[cell], results.cells[cell].get(OURS, {})
        peers = [max(errors) for name, row in rows.items() if not is_ours(name) and (errors := _errors(row))]
        spread = f"{us(ours)} ({_number('p20_us')(ours)}-{_number('p80_us')(ours)})"
        precise = _number("median_us", ".6g")(ours)  # beside the bar, which may be missed by the last digit
        kept = {"True": "yes", "False": "**no**"}.get(ours.get("within_bar", ""), "")
        ratio = results.ratio(cell, rival, OURS) if results.ms(cell, rival) else None
        lines.append(
            [
                *(cell.dtype, *cell.shape, us(rows.get(roof, {}))),
                spread.replace(us(ours), precise, 1) if precise else "failed",
                *(_number(column)(ours) for column in ("gb_per_s", "pct_of_roof")),
                *(_number("bar_us", ".6g")(ours), kept, *(us(rows.get(name, {})) for name in names)),
                *("" if ratio is None else f"{ratio:.2f}", f"{max(_errors(ours)):.2g}" if _errors(ours) else ""),
                *(f"{min(peers):.2g}" if peers else "", _same(ours), _number("peak_mb")(ours)),
            ]
        )
    return markdown_table([*header, "err", "err, best peer", "same", "peak MB"], lines)


def _errors(row: Row) -> list[float]:
    return [float(row[name]) for name in schema.ERRORS if row.get(name)]


def of_heads(results: Results, titles: Mapping[str, str]) -> list[str]:
    """For each cell its roof, a line per provider, and the peers' points that none of ours dominates."""
    parts, groups = [], results.groups()
    for direction, title in titles.items():
        for cell in (cell for (d, _), cells in groups.items() if d == direction for cell in cells):
            if not results.providers([cell]):
                continue
            names = {"three-gemms": "3 GEMMs", "gemm-logits": "logits", "gemm-dx": "dX", "gemm-dw": "dW"}
            names[NONE_IGNORED] = "none ignored"
            roofs = [f"{text} {ms:.4g} ms" for name, text in names.items() if (ms := results.ms(cell, name))]
            parts += [f"## {title}: {head_name(cell)}\n", *([f"{', '.join(roofs)}\n"] if roofs else [])]
            parts.append(_details(results, [cell], {**_DETAILS, **_GB}))
            if direction == "forward+backward" and 0 < len(results.peers(cell)) < len(results.points(cell)):
                free = ", ".join(results.not_dominated(cell))
                every = "Every peer's point is dominated by one of quackish.\n"
                parts.append(f"Not dominated by a point of quackish: {free}.\n" if free else every)
    return parts


def head_name(cell: Cell) -> str:
    m, h, v = cell.shape
    kind = "" if cell.data == "normal" else f", {cell.data} rows"
    return f"M {m}, H {h}, V {v}{kind}" + (f", {cell.ignored:.0%} ignored" if cell.ignored else "")


def _some(cells: Sequence[Cell]) -> str:
    shown = ", ".join(map(str, cells[:8]))
    return shown if len(cells) <= 8 else f"{shown} and {len(cells) - 8} more"


def _print(title: str, results: Results, cells: Sequence[Cell]) -> None:
    """The best of ours beside the best of the others: narrow enough for any terminal."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("shape", "roof", "ours", "time", "% of roof", "best other", "its time", "times ours"):
        table.add_column(name, justify="left" if name in ("shape", "ours", "best other") else "right")
    for cell in cells:
        roof, ours, other = results.op.roofs.get(cell.direction), results.best(cell, True), results.best(cell, False)
        times = [results.ms(cell, name) if name else None for name in (roof, ours, other)]
        shown = ["-" if ms is None else f"{results.scale(cell)[0] * ms:.4g}" for ms in times]
        share = f"{100 * times[0] / times[1]:.0f}" if None not in times[:2] else ""
        ratio = f"{times[2] / times[1]:.2f}" if None not in times[1:] else ""
        kind = str(cell).partition(cell.dtype)[2]  # data and ignored rows
        name = shape_name(cell.shape) + kind
        table.add_row(name, shown[0], ours or "-", shown[1], share, other or "-", shown[2], ratio)
    console().print(f"\n{title}", markup=False, soft_wrap=True)
    console().print(table)


BENCH = Page(
    preface="Times are medians, the L2 cleared before each sample, all providers of a cell taking turns; beside them "
    "is the share of the roof in the same turns. Memory is the peak above inputs, including what the library keeps "
    "between calls. Errors are against fp64. `same` says whether ten runs gave the same bytes. The first call compiles "
    "or loads from a cache.",
    sections=of_bench,
    figures=plots.for_bench,
)
