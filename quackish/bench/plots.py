"""Figures: share of the roof over cells, and time against memory. All are 8 inches wide (800 pixels on screen)."""

import contextlib
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from quackish.bench.cells import Cell, is_ours
from quackish.bench.results import Results

# One color per provider in all figures: warm colors for quackish, one hue per library.
COLORS = {
    "quackish": "#d1350f",
    "quackish-stored": "#7f1d0a",
    "quackish-chunked": "#f08a3c",
    "quackish-recompute": "#c99a06",
    "quack": "#0b5fa5",
    "quack-base": "#4aa3df",
    "quack-logits": "#1b2a6b",
    "liger": "#1a7f37",
    "liger-triton": "#1a7f37",  # what "liger" is
    "liger-cute": "#6cc24a",
    "liger-cute-sm90": "#00a58e",
    "liger-fp32": "#9aa800",
    "cce": "#a03cb4",
    "torch": "#333333",
    "torch-compile": "#7a7a7a",
    "torch-chunked": "#b0b0b0",
}
OTHERS = ("#8c564b", "#e377c2", "#17becf", "#5c4bb5")  # colors of the user's own providers
WIDTH = 8.0  # inches
ROOF = dict(color="0.5", linestyle="--", linewidth=1)
STYLE: dict[str, Any] = {"font.size": 8, "axes.titlesize": 8, "figure.titlesize": 9, "legend.fontsize": 8}
STYLE |= {"legend.frameon": False, "axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "quackish"}


def color_of(name: str) -> str:
    """The color of a provider. Variants (other chunk sizes) have the color of their base."""
    base = name.partition(" ")[0]
    while base not in COLORS and "-" in base:
        base = base.rpartition("-")[0]
    return COLORS.get(base) or OTHERS[sum(map(ord, name)) % len(OTHERS)]


def styles(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Line styles: providers of one color differ in dashes and markers; quackish has thicker lines."""
    made: dict[str, dict[str, Any]] = {}
    for name in names:
        i = sum(look["color"] == color_of(name) for look in made.values())
        ours = dict(linewidth=2.0, marker="D", markersize=4, zorder=3)
        look = ours if is_ours(name) else dict(linewidth=1.2, marker="osv^<>p*"[i % 8], markersize=3.5)
        made[name] = dict(color=color_of(name), linestyle=("-", "--", ":", "-.")[i % 4], **look)
    return made


# Which figures a page has ---------------------------------------------------------------------------------------------


def for_bench(results: Results, path: Path) -> list[Path]:
    """The share of the roof, and time against memory of the largest cell: files *_roof and *_memory, .svg and .png."""
    groups = results.groups()
    panels = {f"{direction}, {dtype}": of for (direction, dtype), of in groups.items() if results.roof(of[0])}
    made = over_cells(results, panels, path.with_name(f"{path.stem}_roof"), results.op.title)
    cells = [cell for cell in results.cells if results.bench.section_per_cell and len(results.points(cell)) > 1]
    largest = max(cells, key=lambda cell: (cell.direction == "forward+backward", math.prod(cell.shape)), default=None)
    return made + (against_memory(results, largest, path.with_name(f"{path.stem}_memory")) if largest else [])


# Share of the roof over cells -----------------------------------------------------------------------------------------


def over_cells(results: Results, panels: Mapping[str, Sequence[Cell]], path: Path, title: str) -> list[Path]:
    """One panel per title, stacked, with a line per provider."""
    names = results.providers(cell for cells in panels.values() for cell in cells)
    if not names:
        return []
    with _figure(0.9 + 2.7 * len(panels), title, results.rows[-1]["gpu"]) as fig:
        for ax, (panel, cells) in zip(fig.subplots(len(panels), squeeze=False).flat, panels.items(), strict=True):
            _panel(ax, results, panel, cells, styles(names))
        return _save(fig, path)


def _panel(ax: Any, results: Results, title: str, cells: Sequence[Cell], looks: dict[str, dict]) -> None:
    """Cells that differ only in the number of rows are joined by a line."""
    segments = [list(group) for _, group in itertools.groupby(cells, lambda cell: (cell.shape[1:], cell.kind))]
    numbered = [(gap, cell) for gap, segment in enumerate(segments) for cell in segment]
    at = {cell: i + gap for i, (gap, cell) in enumerate(numbered)}  # x coordinates, with a gap between segments
    for segment, (name, look) in itertools.product(segments, looks.items()):
        values = [(at[c], results.value(c, name, "pct_of_roof")) for c in segment if not results.is_wrong(c, name)]
        points = [(x, value) for x, value in values if value]
        ax.plot([x for x, _ in points], [y for _, y in points], label=name, **look)
    ax.set_ylim(0, max(105, ax.get_ylim()[1]))
    ax.axhline(100, **ROOF)
    ticks = {at[cell]: f"{m / 1024:.3g}k" if (m := cell.shape[0]) >= 1024 else str(m) for cell in cells}
    for segment in segments if len(segments) > 1 else ():  # the common sizes and data, below the first cell of a line
        common = [f"{dim} {n}" for dim, n in zip(results.op.dims, segment[0].shape, strict=True)]
        ticks[at[segment[0]]] += "\n".join(["\n", *common[1:], *segment[0].kind.split()])
    ax.set_xticks(list(ticks), list(ticks.values()), fontsize=5.5 if len(ticks) > 20 else 7)
    ax.set_xlabel(results.op.dims[0])
    ax.set_ylabel("% of the roof")
    ax.set_title(title, loc="left")
    ax.grid(alpha=0.25, linewidth=0.5)


# Time against memory --------------------------------------------------------------------------------------------------


def against_memory(results: Results, cell: Cell, path: Path) -> list[Path]:
    """One point per provider. Lower left is better; points above quackish's line are dominated."""
    with _figure(5.6, results.op.title, results.rows[-1]["gpu"]) as fig:
        ax = fig.subplots()
        points = _draw_points(ax, results, cell)
        _save(fig, path)  # the layout fixes the positions of the points
        _label(ax, points)
        return _save(fig, path)


def _draw_points(ax: Any, results: Results, cell: Cell) -> dict[str, tuple[float, float]]:
    """Returns the drawn points by name."""
    points = {name: (gb, ms) for name, (ms, gb) in results.points(cell).items()}
    for name, point in points.items():
        shape = dict(marker="D", s=40) if is_ours(name) else dict(marker="o", s=28)
        wrong = results.is_wrong(cell, name)
        label = re.sub(r"-\d+$", "", name) + (", wrong results" if wrong else "")
        colors = dict(edgecolors=color_of(name), facecolors="none" if wrong else color_of(name))
        ax.scatter(*point, label=label, zorder=3, **shape, **colors)
    ax.margins(0.14)
    _log_axis(ax, "x")
    _log_axis(ax, "y")
    kept = dict(scalex=False, scaley=False)
    if ours := sorted(point for name, point in points.items() if is_ours(name)):  # no slower with more memory
        best = list(itertools.accumulate((y for _, y in ours), min))
        xs, ys = [ours[0][0], *(x for x, _ in ours), ax.get_xlim()[1]], [ax.get_ylim()[1], *best, best[-1]]
        ax.step(xs, ys, where="post", color=COLORS["quackish"], linewidth=1, alpha=0.4, **kept)
    if roof := results.ms(cell, results.roof(cell)):
        ax.axhline(roof, **ROOF, label="three bare GEMMs" if cell.direction == "forward+backward" else "roof")
    if cell.direction == "forward+backward":
        m, h, v = cell.shape
        ax.axvline(2e-9 * (v + m) * h, color="0.6", linestyle=":", linewidth=1, label="the gradients alone")
    ax.set_xlabel("peak memory above inputs, GB (log)")
    ax.set_ylabel("milliseconds (log)")
    sizes = (f"{dim} {n}" for dim, n in zip(results.op.dims, cell.shape, strict=True))
    ax.set_title(", ".join([cell.direction, *sizes, cell.dtype]) + cell.kind, loc="left")
    ax.grid(alpha=0.25, linewidth=0.5)
    return points


def _label(ax: Any, points: Mapping[str, tuple[float, float]]) -> None:
    """Writes names next to their points where nothing overlaps. The legend covers the others."""
    from matplotlib.patheffects import withStroke
    from matplotlib.transforms import Bbox

    def box(x: float, y: float) -> Bbox:
        return Bbox.from_bounds(x - 6, y - 6, 12, 12)

    taken = [box(*ax.transData.transform(point)) for point in points.values()]
    spots = [(8, 0, "left", "center"), (-8, 0, "right", "center"), (0, 8, "center", "bottom"), (0, -8, "center", "top")]
    spots += [(7, 6, "left", "bottom"), (7, -6, "left", "top"), (-7, 6, "right", "bottom"), (-7, -6, "right", "top")]
    for (name, point), (x, y, ha, va) in itertools.product(points.items(), spots):
        if any(text.get_text() == name for text in ax.texts):
            continue
        style = dict(fontsize=7.5, color=color_of(name), path_effects=[withStroke(linewidth=3, foreground="white")])
        text = ax.annotate(name, point, (x, y), textcoords="offset points", ha=ha, va=va, **style)
        area = text.get_window_extent()
        inside = ax.bbox.x0 <= area.x0 and area.x1 <= ax.bbox.x1 and ax.bbox.y0 <= area.y0 and area.y1 <= ax.bbox.y1
        if inside and not area.count_overlaps(taken):
            taken.append(area)
        else:
            text.remove()


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
    """Writes `stem`.svg and .png."""
    paths = [stem.with_name(f"{stem.name}{suffix}") for suffix in (".svg", ".png")]
    _write(fig, paths)
    return paths


def _write(fig: Any, paths: Sequence[Path]) -> None:
    """Writes the figure with one legend below all axes."""
    if not fig.legends:
        handles = {text: h for ax in fig.axes for h, text in zip(*ax.get_legend_handles_labels(), strict=True)}
        columns = min(5, int(72 * WIDTH / (30 + 4.6 * max(map(len, handles)))))  # 72 points an inch
        fig.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=columns)
    for path in paths:
        fig.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)


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
