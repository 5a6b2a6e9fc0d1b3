"""Figures, 8 inches wide (800 pixels on screen): share of the measured peak over cells, and time against memory."""

import contextlib
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from quackish.bench.cells import OURS, Cell, is_ours, library
from quackish.bench.looks import LOOKS, color_of, colors_of, title_of
from quackish.bench.results import Point, Results

WIDTH = 8.0  # inches
PEAK = dict(color="0.5", linestyle="--", linewidth=1)
NOTE = dict(color="0.35", fontsize=7.5)
STYLE: dict[str, Any] = {"font.size": 8, "axes.titlesize": 8, "figure.titlesize": 10, "legend.fontsize": 8}
STYLE |= {"legend.frameon": False, "axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "quackish"}


# Which figures a page has ---------------------------------------------------------------------------------------------


def for_bench(results: Results, path: Path) -> list[Path]:
    """Share of the measured peak, and time against memory of the largest cell: *_roof and *_memory, .svg and .png."""
    groups = results.groups()
    panels = {f"{direction}, {dtype}": of for (direction, dtype), of in groups.items() if results.roof(of[0])}
    made = over_cells(results, panels, path.with_name(f"{path.stem}_roof"), results.op.title)
    cells = [cell for cell in results.cells if results.bench.section_per_cell and len(results.points(cell)) > 1]
    largest = max(cells, key=lambda cell: (cell.direction == "forward+backward", math.prod(cell.shape)), default=None)
    return made + (against_memory(results, largest, path.with_name(f"{path.stem}_memory")) if largest else [])


# Share of the measured peak over cells --------------------------------------------------------------------------------


def over_cells(results: Results, panels: Mapping[str, Sequence[Cell]], path: Path, title: str) -> list[Path]:
    """One panel per title, stacked, with a line per provider."""
    names = results.providers(cell for cells in panels.values() for cell in cells)
    if not names:
        return []
    with _figure(0.9 + 2.7 * len(panels), title, results.rows[-1]["gpu"]) as fig:
        for ax, (panel, cells) in zip(fig.subplots(len(panels), squeeze=False).flat, panels.items(), strict=True):
            _panel(ax, results, panel, cells, colors_of(names))
        return _save(fig, path)


def _panel(ax: Any, results: Results, title: str, cells: Sequence[Cell], colors: Mapping[str, str]) -> None:
    """Cells that differ only in the number of rows are joined by a line."""
    segments = [list(group) for _, group in itertools.groupby(cells, lambda cell: (cell.shape[1:], cell.kind))]
    numbered = [(gap, cell) for gap, segment in enumerate(segments) for cell in segment]
    at = {cell: i + gap for i, (gap, cell) in enumerate(numbered)}  # x coordinates, with a gap between segments
    for segment, (name, color) in itertools.product(segments, colors.items()):
        values = [(at[c], results.value(c, name, "pct_of_roof")) for c in segment if not results.is_wrong(c, name)]
        points = [(x, value) for x, value in values if value]
        look: dict[str, Any] = dict(linewidth=1.2, marker="o")
        look = dict(linewidth=2.0, marker="D", zorder=3) if is_ours(name) else look
        xs, ys = [x for x, _ in points], [y for _, y in points]
        ax.plot(xs, ys, label=title_of(name), color=color, markersize=4, **look)
    ax.set_ylim(0, max(105, ax.get_ylim()[1]))
    ax.axhline(100, **PEAK)
    ticks = {at[cell]: f"{m / 1024:.3g}k" if (m := cell.shape[0]) >= 1024 else str(m) for cell in cells}
    for segment in segments if len(segments) > 1 else ():  # the common sizes and data, below the first cell of a line
        common = [f"{dim} {n}" for dim, n in zip(results.op.dims, segment[0].shape, strict=True)]
        ticks[at[segment[0]]] += "\n".join(["\n", *common[1:], *segment[0].kind.split()])
    ax.set_xticks(list(ticks), list(ticks.values()), fontsize=5.5 if len(ticks) > 20 else 7)
    ax.set_xlabel(results.op.dims[0])
    ax.set_ylabel("speed, % of the measured peak")
    ax.set_title(title, loc="left")
    ax.grid(alpha=0.25, linewidth=0.5)


# Time against memory --------------------------------------------------------------------------------------------------


def against_memory(results: Results, cell: Cell, path: Path) -> list[Path]:
    """The best points of every library, with names and numbers in the legend. Lower left is better."""
    with _figure(5.2, f"{results.op.title}: time and memory", results.rows[-1]["gpu"]) as fig:
        _draw_points(fig.subplots(), results, cell, results.best_points(cell))
        return _save(fig, path)


def _draw_points(ax: Any, results: Results, cell: Cell, points: Mapping[str, Point]) -> None:
    """The points, and the limits to compare them with."""
    (m, *hidden, v), labels, colors = cell.shape, labels_of(points), colors_of(points)
    is_step = cell.direction == "forward+backward"
    for name, (ms, gb) in sorted(points.items(), key=lambda point: point[1]):
        look: dict[str, Any] = dict(marker="D", s=48) if is_ours(name) else dict(s=36)
        ax.scatter(gb, ms, color=colors[name], zorder=3, label=labels[name], **look)
    offset: dict[str, Any] = dict(textcoords="offset points", **NOTE)
    if peak := results.ms(cell, results.roof(cell)):
        ax.axhline(peak, **PEAK)
        text = f"cuBLAS, {results.bench.baselines.get(results.roof(cell), 'the matmul')} alone: {_short(peak)} ms"
        ax.annotate(text, (1, peak), (-4, -3), xycoords=("axes fraction", "data"), ha="right", va="top", **offset)
    if is_step:
        least = 2e-9 * (v + m) * hidden[0]
        ax.axvline(least, **PEAK)
        text = f"the gradients alone: {_short(least)} GB"
        ax.annotate(text, (least, 0), (4, 4), xycoords=("data", "axes fraction"), va="bottom", **offset)
    ax.margins(0.17)
    _log_axis(ax, "x")
    _log_axis(ax, "y")
    right, top = ax.get_xlim()[1], ax.get_ylim()[1]
    ax.autoscale(False)
    if ours := sorted((gb, ms) for name, (ms, gb) in points.items() if is_ours(name)):
        best = list(itertools.accumulate((ms for _, ms in ours), min))  # no slower with more memory
        beaten: dict[str, Any] = dict(step="post", color=color_of(OURS), alpha=0.07, linewidth=0)
        ax.fill_between([*(gb for gb, _ in ours), right], [*best, best[-1]], top, **beaten)
        text = "lower left is better; shaded: ours is faster and needs less memory"
        ax.annotate(text, (1, 1), (-4, -4), xycoords="axes fraction", ha="right", va="top", **offset)
    ax.set_xlabel(f"peak memory above the inputs, GB{', gradients included' * is_step} (log scale)")
    ax.set_ylabel(f"milliseconds{', forward and backward' * is_step} (log scale)")
    ax.set_title(
        f"{m:,} tokens, hidden size {' and '.join(f'{h:,}' for h in hidden)}, vocabulary {v:,}, "
        f"{cell.dtype}{',' * bool(cell.kind)}{cell.kind}",
        loc="left",
    )
    ax.grid(alpha=0.25, linewidth=0.5)


def _short(value: float) -> str:
    """Three digits: 36.0, 166, 1,250."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:#.3g}".rstrip(".")


def labels_of(points: Mapping[str, Point]) -> dict[str, str]:
    """Names and numbers. If one setting of a library is shown, its name is the library's, but for PyTorch."""
    shown = Counter(map(library, points))
    alone = [
        name for name in points if shown[library(name)] == 1 and library(name) in LOOKS and library(name) != "torch"
    ]
    titles = {name: title_of(library(name) if name in alone else name) for name in points}
    return {name: f"{titles[name]}: {_short(ms)} ms, {_short(gb)} GB" for name, (ms, gb) in points.items()}


# Shared ---------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _figure(height: float, title: str, gpu: str) -> Iterator[Any]:
    """A figure in STYLE with a title and the GPU's name."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        fig = Figure(figsize=(WIDTH, height), layout="constrained")
        fig.suptitle(f"{title}, {gpu}")
        yield fig


def _save(fig: Any, stem: Path) -> list[Path]:
    """Writes `stem`.svg and .png, with one legend below all axes, if anything has a label."""
    handles = {text: h for ax in fig.axes for h, text in zip(*ax.get_legend_handles_labels(), strict=True)}
    if handles:
        columns = min(5, int(72 * WIDTH / (30 + 4.6 * max(map(len, handles)))))  # 72 points an inch
        fig.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=columns)
    paths = [stem.with_name(f"{stem.name}{suffix}") for suffix in (".svg", ".png")]
    for path in paths:
        fig.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
    return paths


def _log_axis(ax: Any, which: str) -> None:
    """Makes an axis logarithmic, with plain numbers, and with ticks between powers of ten if it spans few of them."""
    from matplotlib.ticker import LogLocator, NullLocator

    getattr(ax, f"set_{which}scale")("log")
    axis = getattr(ax, f"{which}axis")
    low, high = axis.get_data_interval()
    decades = math.log10(high / low) if 0 < low < high else 0.0  # infinite if nothing is drawn
    fine = (1.0, 1.2, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0)
    axis.set_major_locator(LogLocator(subs=fine if decades < 1.2 else (1.0, 2.0, 5.0) if decades < 2.5 else (1.0,)))
    axis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_minor_locator(NullLocator())
