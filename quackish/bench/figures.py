"""The figures of a results file: time over shape, share of the roof over shape, and time against memory."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quackish.bench import plots
from quackish.bench.cells import shape_name
from quackish.bench.measured import is_ours
from quackish.bench.panels import Panel, panels
from quackish.bench.results import Results

UNITS = {"us": "microseconds", "ms": "milliseconds"}
# Okabe and Ito's colours, which most colour-blind people tell apart; red-orange is ours.
OURS_COLOR, COLORS = "#d55e00", ("#0072b2", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000", "#7f7f7f")
DASHES, MARKERS = ("-", "--", ":", "-."), "osv^Dp"
ROOF = dict(color="0.5", linestyle="--", linewidth=1)
STYLE = {
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "svg.hashsalt": "quackish",
}


def draw(results: Results, path: Path) -> list[Path]:
    """Draws to `path`'s name with _time, _roof and _memory, each as .svg and .png, and returns the files."""
    if not results.providers(results.cells):
        return []
    plt = plots.pyplot()
    made = []
    with plt.rc_context(STYLE):
        for what in ("time", "roof"):
            made += plots.save(_over_shapes(plt, results, what), path.with_name(f"{path.stem}_{what}"))
        if fig := _memory(plt, results):
            made += plots.save(fig, path.with_name(f"{path.stem}_memory"))
    plt.close("all")
    return made


def _over_shapes(plt: Any, results: Results, what: str) -> Any:
    """A figure of small panels: "time", with the roof and the spread, or "roof", the share of it."""
    names, shown = results.providers(results.cells), panels(results)
    styles = _styles(names)
    rows, columns = 1 + max(panel.row for panel in shown), 1 + max(panel.column for panel in shown)
    fig = plt.figure(figsize=(0.6 + 2.5 * max(columns, 2), 1.0 + 2.1 * rows), layout="constrained")
    axes = fig.subplots(rows, columns, squeeze=False)
    for ax in axes.flat:
        ax.set_visible(False)
    for panel in shown:
        ax = axes[panel.row, panel.column]
        ax.set_visible(True)
        for name in names:
            _line(ax, results, panel, name, what, styles[name])
        if what == "time":
            _line(ax, results, panel, results.roof(panel.cells[0]), what, ROOF)
            ax.set_yscale("log")
            plots.log_axis(ax.yaxis)
        else:
            ax.axhline(100, **ROOF)
            ax.set_ylim(0, max(105, ax.get_ylim()[1]))
        _x_axis(ax, results, panel)
        ax.set_title(panel.title(results.op.dims), loc="left")
        ax.grid(alpha=0.25, linewidth=0.5)
        if panel.column == 0:
            ax.set_ylabel(UNITS[results.op.unit] if what == "time" else "% of the roof")
    styles |= {"roof": ROOF} if what == "time" else {}
    handles = [plt.Line2D([], [], label=name, **style) for name, style in styles.items()]
    fig.legend(handles=handles, loc="outside lower center", ncols=min(6, len(handles)))
    fig.suptitle(f"{results.op.title} on {results.rows[-1]['gpu']}")
    return fig


def _line(ax: Any, results: Results, panel: Panel, name: str, what: str, style: dict) -> None:
    column, scale = ("median_ms", results.scale) if what == "time" else ("pct_of_roof", 1.0)
    points = [
        (x, cell)
        for x, cell in zip(panel.xs, panel.cells, strict=True)
        if results.value(cell, name, column) and not results.is_wrong(cell, name)
    ]
    if not points:
        return
    xs = [x for x, _ in points]
    if panel.axis is None:  # nothing between the points
        style = style | dict(linestyle="none", marker=style.get("marker", "_"))
    ax.plot(xs, [scale * results.value(cell, name, column) for _, cell in points], **style)
    if what == "time" and panel.axis is not None:
        low, high = ([scale * results.value(cell, name, p) for _, cell in points] for p in ("p20_ms", "p80_ms"))
        ax.fill_between(xs, low, high, color=style["color"], alpha=0.2, linewidth=0)


def _x_axis(ax: Any, results: Results, panel: Panel) -> None:
    if panel.axis is None:
        ax.set_xticks(panel.xs, panel.ticks, rotation=30, ha="right", fontsize=6)
        ax.margins(x=0.15)
        return
    ax.set_xscale("log", base=2)
    ax.set_xticks(panel.xs, panel.ticks, fontsize=7, rotation=30 if panel.axis == 2 else 0)
    ax.xaxis.minorticks_off()
    dim = results.op.dims[panel.axis].upper()
    ax.set_xlabel("rows (M)" if dim == "M" else dim)


def _styles(names: Sequence[str]) -> dict[str, dict]:
    ours = [name for name in names if is_ours(name)]
    others = [name for name in names if not is_ours(name)]
    bold = dict(color=OURS_COLOR, linewidth=2, marker="D", markersize=4, zorder=3)
    styles = {name: {**bold, "linestyle": DASHES[i % 4]} for i, name in enumerate(ours)}
    for i, name in enumerate(others):
        line = dict(color=COLORS[i % len(COLORS)], linestyle=DASHES[i // len(COLORS) % 4], marker=MARKERS[i % 6])
        styles[name] = dict(linewidth=1.2, markersize=3, **line)
    return styles


def _memory(plt: Any, results: Results) -> Any:
    """Time against memory at the largest shape of each direction; None where no memory was measured."""
    shown = []
    for (direction, dtype), cells in results.groups().items():
        for cell in sorted(cells, key=lambda cell: -math.prod(cell.shape)):
            names = [name for name in results.providers([cell]) if not results.is_wrong(cell, name)]
            both = {name: (results.value(cell, name, "peak_mb"), results.ms(cell, name)) for name in names}
            both = {name: point for name, point in both.items() if point[0]}
            if len(both) > 1:
                shown.append((f"{direction}, {shape_name(cell.shape)}, {dtype}", cell, both))
                break
    if not shown:
        return None
    fig = plt.figure(figsize=(1 + 4 * len(shown), 4.2), layout="constrained")
    axes = fig.subplots(1, len(shown), squeeze=False)[0]
    scaled = []
    for ax, (title, cell, both) in zip(axes, shown, strict=True):
        unit, mb = ("GB", 1e-3) if max(point[0] for point in both.values()) >= 1000 else ("MB", 1.0)
        points = {name: (mb * memory, results.scale * ms) for name, (memory, ms) in both.items()}
        plots.time_against_memory(ax, points, is_ours, UNITS[results.op.unit])
        if roof := results.ms(cell, results.roof(cell)):
            ax.axhline(results.scale * roof, **ROOF, label="roof")
        ax.set_xlabel(f"peak memory above inputs, {unit}")
        ax.set_title(title, loc="left")
        scaled.append(points)
    plots.shared_legend(fig, axes, ncols=4)
    fig.suptitle(f"{results.op.title} on {results.rows[-1]['gpu']}")
    for ax, points in zip(axes, scaled, strict=True):
        plots.label(ax, points, is_ours)
    return fig
