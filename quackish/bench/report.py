"""From a results file to what people read: a page in Markdown, a table on the console, figures."""

from collections.abc import Sequence
from pathlib import Path

from quackish.bench import figures, schema
from quackish.bench.cells import Cell, shape_name
from quackish.bench.console import console
from quackish.bench.files import markdown_table, read_csv
from quackish.bench.measured import is_ours
from quackish.bench.operations import Operation
from quackish.bench.results import Results, Row

ERROR_NAMES = {"err_y": "err y", "err_loss": "err loss", "err_dx": "err dx", "err_dweight": "err dweight"}


def report(op: Operation, path: Path) -> None:
    """Writes the page and the figures beside the CSV `path`, and prints the tables."""
    results = Results(op, read_csv(path))
    if not results.rows:
        console().print(f"{path}: no rows", markup=False)
        return
    page = path.with_suffix(".md")
    page.write_text(markdown(results), encoding="utf-8")
    drawn = figures.draw(results, path)
    for (direction, dtype), cells in results.groups().items():
        _print(f"{op.title}, {direction}, {dtype}, {op.unit}", results, cells)
    console().print(results.noise(), markup=False)
    made = ", ".join(str(file.name) for file in (page, *drawn))
    console().print(f"{path}, and beside it {made}", markup=False, soft_wrap=True)


def markdown(results: Results) -> str:
    op = results.op
    parts = [
        f"# {op.title} on {results.rows[-1]['gpu']}\n",
        *(f"{source}.\n" for source in dict.fromkeys(map(source_of, results.rows))),
        f"Times are medians in {op.unit}, the L2 cleared before each sample, all providers of a cell taking turns; "
        "beside them the share of the roof in the same turns. Memory is the peak above inputs, with what the "
        "library keeps between calls. Errors are against fp64. `same` says whether ten runs gave the same bytes. The "
        "first call compiles, or loads from a cache.\n",
        f"- {results.noise()}\n",
    ]
    for (direction, dtype), cells in results.groups().items():
        title = f"{direction}, {dtype}"
        parts += [f"## {title[0].upper()}{title[1:]}\n", markdown_table(*summary(results, cells, bold="**"))]
        if results.providers(cells):
            parts += ["<details><summary>Everything measured</summary>\n", _details(results, cells), "</details>\n"]
    if failures := results.failures():
        parts.append("## Not measured\n")
        parts += [f"- {name}: {reason} ({_places(cells)})" for (name, reason), cells in failures.items()]
    return "\n".join(parts) + "\n"


def source_of(row: Row) -> str:
    """Where a row comes from, in a line."""
    changes = " and local changes" if row["dirty"] == "True" else ""
    code = f"commit {row['commit']}{changes}" if row["commit"] else f"quackish {row['quackish']}"
    return (
        f"{row['date']}, {code}, driver {row['driver'] or '-'}, CUDA {row['cuda'] or '-'}, "
        f"torch {row['torch']}, CuTe DSL {row['dsl'] or '-'}, {row['peers'] or 'no peers'}"
    )


def summary(results: Results, cells: Sequence[Cell], bold: str = "") -> tuple[list[str], list[list[str]]]:
    """Header and lines: a line for each cell, a column for each provider."""
    op, names = results.op, results.providers(cells)
    models = any(row["models"] for cell in cells for row in results.cells[cell].values())
    roof = results.roof(cells[0])
    shown = [f"{bold}{name}{bold}" if is_ours(name) else name for name in names]
    header = [" x ".join(dim.upper() for dim in op.dims), *(["models"] if models else []), roof, *shown]
    lines = []
    for cell in cells:
        bests = [results.ms(cell, name) for own in (True, False) if (name := results.best(cell, ours=own))]
        row = next(iter(results.cells[cell].values()))
        line = [" x ".join(map(str, cell.shape)), *([row["models"]] if models else [])]
        for name in (roof, *names):
            ms, share = results.ms(cell, name), results.value(cell, name, "pct_of_roof")
            text = f"{results.scale * ms:.4g}" if ms else "-"
            text = f"{bold}{text}{bold}" if ms and ms == min(bests, default=0) and name != roof else text
            share = "wrong" if results.is_wrong(cell, name) else share and f"{share:.0f} %"
            line.append(f"{text} ({share})" if ms and share and name != roof else text)
        lines.append(line)
    return header, lines


def _details(results: Results, cells: Sequence[Cell]) -> str:
    rows = {cell: [results.cells[cell][name] for name in results.providers([cell])] for cell in cells}
    errors = [name for name in schema.ERRORS if any(row[name] for group in rows.values() for row in group)]
    header = ["shape", "provider", results.op.unit, "p20-p80", "% of roof", "peak MB", "first call s", "launches"]
    header += ["same", *(ERROR_NAMES[name] for name in errors), "note"]
    lines = []
    for cell, group in rows.items():
        for row in sorted(group, key=lambda row: float(row["median_ms"])):
            times = [results.scale * float(row[name]) for name in ("median_ms", "p20_ms", "p80_ms")]
            name = f"**{row['provider']}**" if row["role"] == "ours" else row["provider"]
            same = {"True": "yes", "False": "**no**"}.get(row["deterministic"], "")
            lines.append(
                [
                    *(shape_name(cell.shape), name, f"{times[0]:.4g}", f"{times[1]:.4g}-{times[2]:.4g}"),
                    *(_number(row[column], "{:.4g}") for column in ("pct_of_roof", "peak_mb")),
                    *(_number(row["first_s"], "{:.2g}"), row["launches"], same),
                    *(_number(row[name], "{:.2g}") for name in errors),
                    row["note"],
                ]
            )
    columns = [i for i, name in enumerate(header) if name == "provider" or any(line[i] for line in lines)]
    return markdown_table([header[i] for i in columns], [[line[i] for i in columns] for line in lines])


def _number(text: str, shape: str) -> str:
    return shape.format(float(text)) if text else ""


def _places(cells: Sequence[Cell]) -> str:
    shown = ", ".join(map(str, cells[:3]))
    return shown if len(cells) <= 3 else f"{shown} and {len(cells) - 3} more"


def _print(title: str, results: Results, cells: Sequence[Cell]) -> None:
    """The best of ours beside the best of the others: narrow enough for any terminal."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("shape", "roof", "ours", "time", "% of roof", "best other", "its time", "times ours"):
        table.add_column(name, justify="left" if name in ("shape", "ours", "best other") else "right")
    for cell in cells:
        roof, ours, other = results.roof(cell), results.best(cell, ours=True), results.best(cell, ours=False)
        times = [results.ms(cell, name) if name else None for name in (roof, ours, other)]
        shown = ["-" if ms is None else f"{results.scale * ms:.4g}" for ms in times]
        share = f"{100 * times[0] / times[1]:.0f}" if None not in times[:2] else ""
        ratio = f"{times[2] / times[1]:.2f}" if None not in times[1:] else ""
        table.add_row(shape_name(cell.shape), shown[0], ours or "-", shown[1], share, other or "-", shown[2], ratio)
    console().print(f"\n{title}", markup=False, soft_wrap=True)
    console().print(table)
