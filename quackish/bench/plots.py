"""The figures: values over sizes in small panels, and time against memory. All are 8 inches wide, 800 pixels on screen.

Every provider has one color in all figures: COLORS.
"""

import contextlib
import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from quackish.bench.cells import Cell, shape_name
from quackish.bench.measured import is_ours
from quackish.bench.results import Results

# Warm colors are ours; each library has one hue.
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
OTHERS = ("#8c564b", "#e377c2", "#17becf", "#5c4bb5")  # the user's own
DASHES, MARKERS = ("-", "--", ":", "-."), "osv^<>p*"
ROOF = dict(color="0.5", linestyle="--", linewidth=1)
WIDTH, COLUMNS = 8.0, 4  # inches; panels side by side, at most
UNITS = {"us": "microseconds", "ms": "milliseconds"}
STYLE = {
    "font.size": 8,
    "axes.titlesize": 8,
    "figure.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "svg.hashsalt": "quackish",
}
Point = tuple[float, float]


class Panel(NamedTuple):
    cells: list[Cell]
    axis: int | None  # the dimension in which they differ; None for more than one
    what: str  # "time", "roof" (share of it), "ratio" (time over it) or "memory"
    row: int
    column: int

    @property
    def xs(self) -> list[int]:
        return [i if self.axis is None else cell.shape[self.axis] for i, cell in enumerate(self.cells)]

    @property
    def ticks(self) -> list[str]:
        """Sizes as "8k"; k is 1000 for vocabularies, which are no powers of two."""
        if self.axis is None:
            return [shape_name(cell.shape) for cell in self.cells]
        k = 1000 if self.axis == 2 else 1024
        return [f"{x / k:.3g}k" if x >= k else str(x) for x in self.xs]

    def title(self, dims: Sequence[str]) -> str:
        """The direction, and what all cells have in common: "backward, N 4096"."""
        cell, sizes = self.cells[0], []
        if self.axis is not None:
            sizes = [
                f"{d.upper()} {n}" for i, (d, n) in enumerate(zip(dims, cell.shape, strict=True)) if i != self.axis
            ]
        return ", ".join([cell.direction, *sizes, *([] if cell.dtype == "bfloat16" else [cell.dtype])])


def color_of(name: str) -> str:
    """The color of a provider; variants (other sizes of chunks, other configs) have that of what they vary."""
    base = name.partition("[")[0].partition(" ")[0]
    while base not in COLORS and "-" in base:
        base = base.rpartition("-")[0]
    return COLORS.get(base) or OTHERS[sum(map(ord, name)) % len(OTHERS)]


def styles(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Lines: variants of one color differ in dashes and markers; ours are thicker."""
    seen: dict[str, itertools.count] = defaultdict(itertools.count)
    made = {}
    for name in names:
        i = next(seen[color_of(name)])
        ours = dict(linewidth=2.0, marker="D", markersize=4, zorder=3)
        peer = dict(linewidth=1.2, marker=MARKERS[i % len(MARKERS)], markersize=3.5)
        made[name] = dict(color=color_of(name), linestyle=DASHES[i % len(DASHES)], **(ours if is_ours(name) else peer))
    return made


# Which figures a page has ---------------------------------------------------------------------------------------------


def for_bench(results: Results, path: Path) -> list[Path]:
    """`path`'s name with _time, _roof and _memory: each as .svg and .png."""
    made = []
    for what in ("time", "roof"):
        shown = panels(results, results.groups().values(), what)
        made += over_sizes(results, shown, path.with_name(f"{path.stem}_{what}"), results.op.title)
    largest = []  # of each direction
    for cells in results.groups().values():
        measured = [cell for cell in cells if len(_right(results, cell)) > 1]
        largest += sorted(measured, key=lambda cell: -math.prod(cell.shape))[:1]
    return made + against_memory(results, largest, path.with_name(f"{path.stem}_memory"))


def for_norms(results: Results, path: Path) -> list[Path]:
    """The share of the roof, for bf16 cells."""
    groups = [
        [cell for cell in cells if {row["cells"] for row in results.cells[cell].values()} != {"large_n"}]
        for (_, dtype), cells in results.groups().items()
        if dtype == "bfloat16"
    ]
    return over_sizes(results, panels(results, groups, "roof"), path.with_suffix(""), "RMSNorm, bf16")


def for_heads(results: Results, path: Path, headline: tuple[int, ...], others: Mapping[str, Cell]) -> list[Path]:
    """Time against memory at the headline shape, else at the largest one, and at `others`; both over M and over V."""
    cells = [
        c for c in results.cells if c.direction == "forward+backward" and not c.ignored and len(results.points(c)) > 1
    ]
    first = max(cells, key=lambda c: (c.shape == headline, c.data == "normal", math.prod(c.shape)), default=None)
    made = against_memory(results, [first] if first else [], path.with_suffix(""))
    for name, cell in others.items():
        if cell in cells and cell != first:
            made += against_memory(results, [cell], path.with_name(f"{path.stem}_{name}"))
    plain = [cell for cell in results.cells if cell.direction == "forward+backward" and _is_plain(cell)]
    families = []
    for axis in (0, 2):
        lines: dict[tuple[int, ...], list[Cell]] = defaultdict(list)
        for cell in plain:
            if results.providers([cell]):
                lines[_without(cell.shape, axis)].append(cell)
        at = _without(headline, axis)
        best = max(lines.values(), key=lambda line: (_without(line[0].shape, axis) == at, len(line)), default=[])
        if len(best) > 1:
            families.append((axis, sorted(best, key=lambda cell: cell.shape[axis])))
    shown = [
        Panel(line, axis, what, row, column)
        for column, (axis, line) in enumerate(families)
        for row, what in enumerate(("ratio", "memory"))
    ]
    return made + over_sizes(results, shown, path.with_name(f"{path.stem}_sweep"), "Linear cross entropy, bf16")


def _is_plain(cell: Cell) -> bool:
    return cell.data == "normal" and not cell.ignored


def _without(shape: Sequence[int], axis: int) -> tuple[int, ...]:
    return (*shape[:axis], *shape[axis + 1 :])


def panels(results: Results, groups: Iterable[Sequence[Cell]], what: str) -> list[Panel]:
    """Every cell in at least one panel of cells that differ in one dimension; each group begins a new row."""
    found: list[Panel] = []
    for cells in groups:
        row = found[-1].row + 1 if found else 0
        for i, (axis, family) in enumerate(_families(cells, len(results.op.dims))):
            found.append(Panel(family, axis, what, row + i // COLUMNS, i % COLUMNS))
    return found


def _families(cells: Sequence[Cell], dims: int) -> list[tuple[int | None, list[Cell]]]:
    """Lines along the rows first, then along the other dimensions; cells on no line stay together."""
    families: list[tuple[int | None, list[Cell]]] = []
    covered: set[Cell] = set()
    for axis in range(dims):
        lines: dict[tuple[int, ...], list[Cell]] = defaultdict(list)
        for cell in cells:
            lines[_without(cell.shape, axis)].append(cell)
        new = [line for line in lines.values() if len(line) > 1 and not covered.issuperset(line)]
        families += [(axis, sorted(line, key=lambda cell: cell.shape[axis])) for line in new]
        covered.update(cell for line in new for cell in line)
    rest = [cell for cell in cells if cell not in covered]
    return families + ([(None, rest)] if rest else [])


# Values over sizes ----------------------------------------------------------------------------------------------------


def over_sizes(results: Results, shown: Sequence[Panel], path: Path, title: str) -> list[Path]:
    """Small panels, a line per provider."""
    names = results.providers(cell for panel in shown for cell in panel.cells)
    if not names:
        return []
    rows, columns = (1 + max(getattr(panel, at) for panel in shown) for at in ("row", "column"))
    with _figure(1.1 + rows * (2.0 if columns > 2 else 2.6), results, title) as fig:
        axes = fig.subplots(rows, columns, squeeze=False)
        for ax in axes.flat:
            ax.set_visible(False)
        looks = styles(names)
        for panel in shown:
            _panel(axes[panel.row, panel.column], results, panel, looks)
        _legend(fig, axes.flat, ncols=5)
        return _save(fig, path)


def _panel(ax: Any, results: Results, panel: Panel, looks: Mapping[str, dict]) -> None:
    ax.set_visible(True)
    unit, what = results.op.unit, panel.what
    column, scale, label = {
        "time": ("median_ms", results.scale(panel.cells[0])[0], f"{UNITS[unit]} (log)"),
        "roof": ("pct_of_roof", 1.0, "% of the roof"),
        "ratio": ("pct_of_roof", 1.0, "time / three bare GEMMs (log)"),
        "memory": ("peak_mb", 1e-3, "peak memory above inputs, GB (log)"),
    }[what]
    looks = {**looks, "roof": ROOF} if what == "time" else looks
    for name, look in looks.items():
        provider = results.roof(panel.cells[0]) if name == "roof" else name
        points = [
            (x, 100 / value if what == "ratio" else scale * value, cell)
            for x, cell in zip(panel.xs, panel.cells, strict=True)
            if (value := results.value(cell, provider, column)) and not results.is_wrong(cell, provider)
        ]
        if panel.axis is None:  # nothing between the points
            look = look | dict(linestyle="none", marker=look.get("marker", "_"))
        xs = [x for x, _, _ in points]
        ax.plot(xs, [y for _, y, _ in points], label=name, **look)
        if what == "time" and name != "roof" and panel.axis is not None:
            low, high = ([scale * results.value(cell, name, p) for *_, cell in points] for p in ("p20_ms", "p80_ms"))
            ax.fill_between(xs, low, high, color=look["color"], alpha=0.2, linewidth=0)
    if what == "roof":
        ax.axhline(100, **ROOF)
        ax.set_ylim(0, max(105, ax.get_ylim()[1]))
    else:
        _log_axis(ax, "y")
    if what == "ratio":
        ax.axhline(1, **ROOF)
    if panel.column == 0:
        ax.set_ylabel(label)
    if panel.axis is None:
        ax.set_xticks(panel.xs, panel.ticks, rotation=30, ha="right", fontsize=7)
        ax.margins(x=0.15)
    else:
        ax.set_xscale("log", base=2)
        crowded = [x for x, after in itertools.pairwise(panel.xs) if after / x < 1.15]  # their ticks would overlap
        ticks = [(x, "" if x in crowded else tick) for x, tick in zip(panel.xs, panel.ticks, strict=True)]
        ax.set_xticks(*zip(*ticks, strict=True), fontsize=7)
        ax.xaxis.minorticks_off()
        ax.set_xlabel(f"{results.op.dims[panel.axis].upper()} (log)")
    ax.set_title(panel.title(results.op.dims), loc="left")
    ax.grid(alpha=0.25, linewidth=0.5)


# Time against memory --------------------------------------------------------------------------------------------------


def against_memory(results: Results, cells: Sequence[Cell], path: Path) -> list[Path]:
    """A panel for each cell with a point per provider; below and left is better, above our line is dominated."""
    if not cells:
        return []
    cell = cells[0]
    title = results.op.title if len(cells) > 1 else f"{results.op.title}, {_words(results, cell)}"
    with _figure(5.6 if len(cells) == 1 else 4.6, results, title) as fig:
        axes = fig.subplots(1, len(cells), squeeze=False)[0]
        drawn = [_cloud(ax, results, cell) for ax, cell in zip(axes, cells, strict=True)]
        if len(cells) > 1:
            for ax, cell in zip(axes, cells, strict=True):
                ax.set_title(_words(results, cell), loc="left")
        _legend(fig, axes, ncols=5)
        fig.canvas.draw()  # the layout decides where points are
        for ax, (points, lines) in zip(axes, drawn, strict=True):
            _label(ax, points, lines)
        return _save(fig, path)


def _words(results: Results, cell: Cell) -> str:
    sizes = (f"{dim.upper()} {n}" for dim, n in zip(results.op.dims, cell.shape, strict=True))
    return ", ".join([cell.direction, *sizes, cell.dtype, *([cell.data] if cell.data != "normal" else [])])


def _right(results: Results, cell: Cell) -> dict[str, Point]:
    return {name: point for name, point in results.points(cell).items() if not results.is_wrong(cell, name)}


def _cloud(ax: Any, results: Results, cell: Cell) -> tuple[dict[str, Point], list[Point]]:
    """The points that were drawn, by name, and the corners of our line."""
    scale, unit = results.scale(cell)
    found = results.points(cell)
    memory, gb = ("GB", 1.0) if max(gb for _, gb in found.values()) >= 1 else ("MB", 1e3)
    points = {name: (gb * size, scale * ms) for name, (ms, size) in found.items()}
    for name, (x, y) in points.items():
        shape = dict(marker="D", s=40) if is_ours(name) else dict(marker="o", s=28)
        wrong = dict(facecolors="none", edgecolors=color_of(name)) if results.is_wrong(cell, name) else {}
        base = re.sub(r"-\d+$", "", name)
        ax.scatter([x], [y], label=base, zorder=3, **shape, **(wrong or dict(color=color_of(name))))
    ax.margins(0.14)
    _log_axis(ax, "x")
    _log_axis(ax, "y")
    if roof := results.ms(cell, results.roof(cell)):
        ax.axhline(scale * roof, **ROOF, label="three bare GEMMs" if len(cell.shape) == 3 else "roof")
    if cell.direction == "forward+backward":
        m, h, v = cell.shape
        ax.axvline(gb * 2e-9 * (v + m) * h, color="0.6", linestyle=":", linewidth=1, label="the gradients alone")
    line: list[Point] = []
    for x, y in sorted(point for name, point in points.items() if is_ours(name)):
        line += (
            [(x, line[-1][1]), (x, y)] if line and y < line[-1][1] else [] if line else [(x, ax.get_ylim()[1]), (x, y)]
        )
    if line:
        line.append((ax.get_xlim()[1], line[-1][1]))
        kept = dict(linewidth=1, alpha=0.4, scalex=False, scaley=False)
        ax.plot(*zip(*line, strict=True), color=COLORS["quackish"], **kept)
    ax.set_xlabel(f"peak memory above inputs, {memory} (log)")
    ax.set_ylabel(f"{UNITS[unit]} (log)")
    ax.grid(alpha=0.25, which="both", linewidth=0.5)
    names = {name: name + ", wrong results" * results.is_wrong(cell, name) for name in points}
    return {names[name]: point for name, point in points.items()}, line


def _label(ax: Any, points: Mapping[str, Point], line: Sequence[Point]) -> None:
    """Names beside their points, where no other point, name or line is near; points without a free spot get none.

    Points that lie on each other share a label. Positions are in typographic points.
    """
    per_pt = ax.figure.dpi / 72
    place = {name: tuple(ax.transData.transform(point) / per_pt) for name, point in points.items()}
    groups: list[list[str]] = []
    for name in sorted(points, key=place.__getitem__):
        near = (group for group in groups if math.dist(place[group[0]], place[name]) < 5)
        if group := next(near, None):
            group.append(name)
        else:
            groups.append([name])
    corners = [tuple(ax.transData.transform(point) / per_pt) for point in line]
    strokes = [p for a, b in itertools.pairwise(corners) for p in _between(a, b)]
    taken = [(x - 4, y - 4, x + 4, y + 4) for x, y in place.values()]
    frame = [value / per_pt for value in ax.bbox.extents]
    for group in groups:
        (x, y), text = place[group[0]], ", ".join(group)
        width, height = 4.7 * len(text), 9
        others = [box for name, box in zip(place, taken, strict=False) if name not in group] + taken[len(place) :]
        spot = None
        for distance in (7, 14, 22, 30, 40):
            for angle in (0, 1, -1, 2, -2, 3, -3, 4, -4, 5, -5, 6, -6, 7, -7, 8):
                dx, dy = distance * math.cos(angle * math.pi / 8), distance * math.sin(angle * math.pi / 8)
                left = x + dx - (width if abs(angle) > 4 else width / 2 if abs(angle) == 4 else 0)
                box = (left, y + dy - height / 2, left + width, y + dy + height / 2)
                leader = _between((x, y), (x + dx, y + dy))
                if (
                    _inside(box, frame)
                    and not any(_overlap(box, other) for other in others)
                    and not any(_overlap(box, (*p, *p)) for p in strokes)
                    and not any(_overlap((*p, *p), other) for p in leader for other in others)
                ):
                    spot = spot or (box, dx, dy)
            if spot:
                break
        if spot is None:
            continue
        box, dx, dy = spot
        taken.append(box)
        style = dict(fontsize=7.5, color=color_of(group[0]), va="center", ha="left", textcoords="offset points")
        ax.annotate(text, points[group[0]], xytext=(box[0] - x, dy), **style)
        if distance > 7:
            end = ax.transData.inverted().transform(((x + dx) * per_pt, (y + dy) * per_pt))
            start = points[group[0]]
            ax.plot([start[0], end[0]], [start[1], end[1]], color="0.6", linewidth=0.6, scalex=False, scaley=False)


def _between(a: Point, b: Point, step: float = 3.0) -> list[Point]:
    count = max(1, math.ceil(math.dist(a, b) / step))
    return [(a[0] + (b[0] - a[0]) * i / count, a[1] + (b[1] - a[1]) * i / count) for i in range(count + 1)]


def _inside(box: Sequence[float], frame: Sequence[float]) -> bool:
    return frame[0] <= box[0] and frame[1] <= box[1] and box[2] <= frame[2] and box[3] <= frame[3]


def _overlap(a: Sequence[float], b: Sequence[float]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


# Shared ---------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _figure(height: float, results: Results, title: str) -> Iterator[Any]:
    """A figure in STYLE with a title and the GPU's name."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with pyplot.rc_context(STYLE):
        fig = pyplot.figure(figsize=(WIDTH, height), layout="constrained")
        fig.suptitle(f"{title}, {results.rows[-1]['gpu']}")
        try:
            yield fig
        finally:
            pyplot.close(fig)


def _save(fig: Any, stem: Path) -> list[Path]:
    """`stem`.svg and .png."""
    paths = [stem.with_name(f"{stem.name}{suffix}") for suffix in (".svg", ".png")]
    for path in paths:
        fig.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
    return paths


def _log_axis(ax: Any, which: str) -> None:
    """Logarithmic with plain numbers; an axis of few powers of ten has ticks between them."""
    from matplotlib.ticker import LogLocator, NullLocator

    getattr(ax, f"set_{which}scale")("log")
    axis = getattr(ax, f"{which}axis")
    low, high = axis.get_data_interval()
    decades = math.log10(high / low) if 0 < low < high else 0.0  # infinite if nothing is drawn
    fine = (1.0, 1.2, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0)
    axis.set_major_locator(LogLocator(subs=fine if decades < 1.2 else (1.0, 2.0, 5.0) if decades < 2.5 else (1.0,)))
    axis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_minor_locator(NullLocator())


def _legend(fig: Any, axes: Iterable[Any], **options: Any) -> None:
    """One legend below all axes, each label once."""
    handles = {text: h for ax in axes for h, text in zip(*ax.get_legend_handles_labels(), strict=True)}
    fig.legend(handles.values(), handles.keys(), loc="outside lower center", **options)
