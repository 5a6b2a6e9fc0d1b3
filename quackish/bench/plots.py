"""What figures share: files, colours, logarithmic axes, lines over sizes, and points with their names beside them."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

Point = tuple[float, float]


def pyplot() -> Any:
    """matplotlib.pyplot, drawing to files."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def save(fig: Any, stem: Path) -> list[Path]:
    """`stem`.svg and `stem`.png"""
    paths = [stem.with_suffix(suffix) for suffix in (".svg", ".png")]
    for path in paths:
        fig.savefig(path, dpi=150)
    return paths


def log_axis(axis: Any) -> None:
    """Logarithmic, with plain numbers; where few powers of ten are seen, at more than these."""
    from matplotlib.ticker import LogLocator, NullLocator

    low, high = axis.get_data_interval()
    decades = math.log10(high / low) if 0 < low < high else 0.0  # infinite where nothing is drawn
    fine = (1.0, 1.2, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0)
    axis.set_major_locator(LogLocator(subs=fine if decades < 1.2 else (1.0, 2.0, 5.0) if decades < 2.5 else (1.0,)))
    axis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_minor_locator(NullLocator())


def size_ticks(ax: Any, sizes: Sequence[int], k: int = 1024) -> None:
    """A tick at each size, "8k" for 8 * k."""
    ax.set_xticks(sizes, [f"{size // k}k" if size >= k else str(size) for size in sizes], fontsize=7)
    ax.xaxis.minorticks_off()


def line(ax: Any, name: str, points: Sequence[Point], style: Mapping[str, Any]) -> None:
    """Through the points from left to right; nothing where there are none."""
    if points:
        ax.plot(*zip(*sorted(points), strict=True), label=name, **style)


def shared_legend(fig: Any, axes: Sequence[Any], **options: Any) -> None:
    """One legend under all of `axes`, each label once."""
    handles = {text: h for ax in axes for h, text in zip(*ax.get_legend_handles_labels(), strict=True)}
    fig.legend(handles.values(), handles.keys(), loc="outside lower center", **options)


def time_against_memory(ax: Any, points: Mapping[str, Point], is_ours: Callable[[str], bool], unit: str) -> None:
    """A point at (memory, time) for each name. What is lower and further left is better; to be labelled by `label`."""
    for ours in (True, False):
        some = [point for name, point in points.items() if is_ours(name) == ours]
        if some:
            style = dict(color="C3", marker="D", s=46) if ours else dict(color="C0", marker="o", s=30)
            ax.scatter(*zip(*some, strict=True), label="quackish" if ours else "peers", zorder=3, **style)
    ax.set_xscale("log")
    ax.set_yscale("log")
    log_axis(ax.xaxis)
    log_axis(ax.yaxis)
    ax.set_ylabel(unit)
    ax.grid(alpha=0.25, which="both")
    ax.margins(0.12)


def label(ax: Any, points: Mapping[str, Point], is_ours: Callable[[str], bool]) -> None:
    """Names beside their points, where neither a point nor another name is; a line leads to those further away."""
    ax.figure.canvas.draw()  # the layout decides where points are
    per_pt = ax.figure.dpi / 72
    at = {name: tuple(ax.transData.transform(p) / per_pt) for name, p in points.items()}
    taken = [(x - 4, y - 4, x + 4, y + 4) for x, y in at.values()]
    for name, (x, y) in sorted(at.items(), key=lambda item: item[1]):
        width, height = 4.6 * len(name), 10
        around = [(math.sin(i * math.pi / 8), math.cos(i * math.pi / 8)) for i in (4, 3, 5, 2, 6, 1, 7, 0, 8)]
        for distance in range(8, 200, 6):
            spots = [(distance * a, distance * b - height / 2) for a, b in around]
            spots += [(-dx - width, dy) for dx, dy in spots]
            boxes = [(x + dx, y + dy, x + dx + width, y + dy + height) for dx, dy in spots]
            free = [i for i, box in enumerate(boxes) if not any(_overlap(box, other) for other in taken)]
            if free:
                break
        box, offset = boxes[(free or [0])[0]], spots[(free or [0])[0]]
        taken.append(box)
        style = dict(fontsize=8, color="C3" if is_ours(name) else "0.25", va="bottom")
        if distance > 8:
            style["arrowprops"] = dict(arrowstyle="-", color="0.6", linewidth=0.6, relpos=(float(offset[0] < 0), 0.5))
        ax.annotate(name, points[name], xytext=offset, textcoords="offset points", **style)


def _overlap(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
