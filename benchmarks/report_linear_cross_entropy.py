"""From linear_cross_entropy.csv to what people read: verdicts on the bars, a Markdown page, figures.

It is run by itself after a run that was cut short:

    python -m benchmarks.report_linear_cross_entropy benchmarks/results/H200/linear_cross_entropy.csv
"""

import math
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from benchmarks import harness
from benchmarks.harness import console, markdown_table
from benchmarks.providers_linear_cross_entropy import OURS, PROVIDERS, is_ours

AGAIN, NONE_IGNORED = f"{OURS} (again)", f"{OURS} (none ignored)"
THREE_GEMMS, GEMMS = "three-gemms", ("gemm-logits", "gemm-dx", "gemm-dw")
NOT_COMPARED = (AGAIN, NONE_IGNORED, THREE_GEMMS, *GEMMS, "truth")

HEADLINE = (8192, 4096, 128256)
# of three bare GEMMs, and GB above inputs
HEADLINE_BARS = {"stored": (1.00, None), "chunked": (1.02, 3.0), "recompute": (1.36, 1.30)}
SHAPES = ((4096, 2048, 32000), (8192, 2048, 151936), (16384, 4096, 128256), (65536, 4096, 128256))
SHAPES_BAR = 1.02
SMALL = (1024, 4096, 128256)
LOSS_BAR = 1.03  # of one logits GEMM
IGNORED_BAR = 0.35  # of the time with no row ignored, at 80 % ignored
CONFIDENT_BAR = 0.5  # of torch's error
HOST_BAR_US, LAUNCH_BAR_US = 150, 15

Row = dict[str, str]
Verdict = tuple[str, str]  # PASS or FAIL, and what was found


class Key(NamedTuple):
    mode: str
    h: int
    v: int
    m: int
    data: str
    ignored: float

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.m, self.h, self.v

    def __str__(self) -> str:
        return f"{self.m} x {self.h} x {self.v}"


class Results:
    """The rows of a CSV by case and provider; of rows for the same, the last."""

    def __init__(self, rows: list[Row]):
        self.rows = rows
        self.cases: dict[Key, dict[str, Row]] = defaultdict(dict)
        for row in rows:
            m, h, v = (int(row[name]) for name in "mhv")
            key = Key(row["mode"], h, v, m, row["data"], float(row["ignored"]))
            self.cases[key][row["provider"]] = row

    def value(self, key: Key, provider: str, column: str) -> float | None:
        value = self.cases.get(key, {}).get(provider, {}).get(column)
        return float(value) if value else None

    def ms(self, key: Key, provider: str) -> float | None:
        return self.value(key, provider, "median_ms")

    def ratio(self, key: Key, over: str, under: str) -> float | None:
        """How many times `over` takes what `under` takes; inf where `over` was tried and has no time."""
        if over not in self.cases.get(key, {}) or not (b := self.ms(key, under)):
            return None
        return (self.ms(key, over) or math.inf) / b

    def train(self, shape: tuple[int, int, int], data: str = "normal") -> Key:
        m, h, v = shape
        return Key("train", h, v, m, data, 0.0)

    def providers(self, keys: Iterable[Key]) -> list[str]:
        """Those with a time in any of the cases; the known ones in their own order, our variants before peers."""
        names = {name for key in keys for name in self.cases[key] if self.ms(key, name) and name not in NOT_COMPARED}
        order = {name: i for i, name in enumerate(PROVIDERS)}
        return sorted(names, key=lambda name: (not is_ours(name), order.get(name, len(order)), name))

    def points(self, key: Key) -> dict[str, tuple[float, float]]:
        """(ms, GB) of each provider that has both."""
        both = {n: (self.ms(key, n), self.value(key, n, "peak_gb")) for n in self.providers([key])}
        return {name: point for name, point in both.items() if None not in point}


# Verdicts ------------------------------------------------------------------------------------------------------------


def verdicts(results: Results) -> list[Verdict]:
    """One for every bar that something was measured for."""
    lines = [*_headline(results), *_shapes(results), *_small(results), *_dominated(results)]
    return [*lines, *_loss_only(results), *_ignored(results), *_errors(results), *_host(results)]


def _verdict(kept: bool, text: str) -> Verdict:
    return "PASS" if kept else "FAIL", text


def _at_most(value: float | None, bar: float, text: str, unit: str = "") -> list[Verdict]:
    return [] if value is None else [_verdict(value <= bar, f"{text}: {value:.3f}{unit}, bar {bar:g}{unit}")]


def _headline(results: Results) -> list[Verdict]:
    key, lines = results.train(HEADLINE), []
    for schedule, (of_gemms, gb) in HEADLINE_BARS.items():
        name = f"{OURS}-{schedule}"
        lines += _at_most(results.ratio(key, name, THREE_GEMMS), of_gemms, f"{key} {schedule}: time / 3 GEMMs")
        if gb:
            lines += _at_most(results.value(key, name, "peak_gb"), gb, f"{key} {schedule}: peak above inputs", " GB")
        points = results.points(key)
        if mine := points.get(name):
            rivals = {n: p for n, p in points.items() if not is_ours(n) and p[1] <= mine[1]}
            text = f"{key} {schedule}: faster than every peer that uses no more memory"
            lines += _faster(mine[0], {n: ms for n, (ms, _) in rivals.items()}, text)
    return lines


def _faster(ours: float, peers: dict[str, float], text: str) -> list[Verdict]:
    if not peers:
        return []
    best = min(peers, key=peers.__getitem__)
    found = f"{ours:.3f} ms, {best} {peers[best]:.3f} ms"
    return [_verdict(ours < peers[best], f"{text}: {found} ({ours / peers[best]:.3f}), of {len(peers)}")]


def _faster_than_every_peer(results: Results, key: Key) -> list[Verdict]:
    peers = {n: results.ms(key, n) for n in results.providers([key]) if not is_ours(n)} if key in results.cases else {}
    if OURS not in results.cases.get(key, {}):
        return []
    return _faster(results.ms(key, OURS) or math.inf, peers, f"{key}: faster than every peer")


def _shapes(results: Results) -> list[Verdict]:
    lines = []
    for key in map(results.train, SHAPES):
        lines += _at_most(results.ratio(key, OURS, THREE_GEMMS), SHAPES_BAR, f"{key}: time / 3 GEMMs")
        lines += _faster_than_every_peer(results, key)
    return lines


def _small(results: Results) -> list[Verdict]:
    return _faster_than_every_peer(results, results.train(SMALL))


def _dominated(results: Results) -> list[Verdict]:
    """Whether for every peer's point at the headline shape one of ours is no slower and no larger."""
    points = results.points(results.train(HEADLINE))
    ours = [p for name, p in points.items() if is_ours(name)]
    peers = {name: p for name, p in points.items() if not is_ours(name)}
    if not ours or not peers:
        return []
    free = [name for name, (ms, gb) in peers.items() if not any(a <= ms and b <= gb for a, b in ours)]
    text = f"time against memory: {len(peers) - len(free)} of {len(peers)} peers' points dominated by one of ours"
    return [_verdict(not free, text + (f"; not {', '.join(free)}" if free else ""))]


def _loss_only(results: Results) -> list[Verdict]:
    lines = []
    for key in sorted(key for key in results.cases if key.mode == "loss"):
        lines += _at_most(results.ratio(key, OURS, GEMMS[0]), LOSS_BAR, f"{key} loss only: time / logits GEMM")
    return lines


def _ignored(results: Results) -> list[Verdict]:
    lines = []
    for key in sorted(key for key in results.cases if key.mode == "train" and key.ignored >= 0.8):
        text = f"{key}, {key.ignored:.0%} ignored: time / none ignored"
        lines += _at_most(results.ratio(key, OURS, NONE_IGNORED), IGNORED_BAR, text)
    return lines


def _errors(results: Results) -> list[Verdict]:
    """Of each of our variants against torch's eager bf16, on each kind of data: the worst ratio of all shapes."""
    lines = []
    for data, bar in (("normal", 1.0), ("confident", CONFIDENT_BAR)):
        keys = [key for key in results.cases if key.mode == "train" and key.data == data]
        for column, what in (("err_dx", "dX"), ("err_dw", "dW")):
            ratios = {}
            for key in keys:
                for name in results.providers([key]):
                    mine, theirs = results.value(key, name, column), results.value(key, "torch", column)
                    if is_ours(name) and mine is not None and theirs:
                        ratios[f"{name} at {key}"] = math.inf if math.isnan(mine) else mine / theirs
            if ratios:
                worst = max(ratios, key=ratios.__getitem__)
                text = f"{data} data, error of {what} / torch eager's: worst {ratios[worst]:.3f}, {worst}, bar {bar:g}"
                lines.append(_verdict(ratios[worst] <= bar, text))
    return lines


def _host(results: Results) -> list[Verdict]:
    lines = []
    for key in sorted(key for key in results.cases if key.mode == "host"):
        if (ms := results.ms(key, OURS)) is None:
            continue
        lines += _at_most(1e3 * ms, HOST_BAR_US, f"{key}: host, forward + backward", " us")
        if launches := results.value(key, OURS, "launches"):
            text = f"{key}: host, each of {launches:.0f} launches"
            lines += _at_most(1e3 * ms / launches, LAUNCH_BAR_US, text, " us")
    return lines


def noise(results: Results) -> str:
    """How far apart two measurements of the same in the same turns were."""
    ratios = (results.ratio(key, AGAIN, OURS) for key in results.cases)
    apart = sorted(abs(r - 1) for r in ratios if r is not None)
    if not apart:
        return "noise: not measured"
    return f"noise: quackish twice in one case differs by {apart[len(apart) // 2]:.1%} (median), {apart[-1]:.1%} (most)"


# The page ------------------------------------------------------------------------------------------------------------

TITLES = {"train": "Forward + backward", "loss": "Loss only, no grad", "host": "Host time, forward + backward"}


def markdown(results: Results) -> str:
    sources = dict.fromkeys(map(_source, results.rows))
    parts = [
        f"# Linear cross entropy on {results.rows[0]['gpu']}\n",
        *(f"{source}.\n" for source in sources),
        "bf16; medians of plain calls, all providers taking turns. `3 GEMMs` is three torch.mm on the same data in the "
        "same turns. Memory is the peak above inputs, gradients included. Errors are norm-wise against fp64.\n",
        *(f"- {word}: {text}" for word, text in verdicts(results)),
        f"- {noise(results)}\n",
    ]
    for mode, title in TITLES.items():
        for key in sorted(key for key in results.cases if key.mode == mode):
            if results.providers([key]):
                parts += [f"## {title}: {_title(key)}\n", *_roof_line(results, key), _case_table(results, key)]
    failed = dict.fromkeys(
        f"{row['provider']}, {row['mode']}, {row['m']} x {row['h']} x {row['v']}: {row['status']}"
        for case in results.cases.values()
        for row in case.values()
        if row["status"] != "ok"
    )
    if failed:
        parts += ["## Not measured\n", *(f"- {line}" for line in failed)]
    return "\n".join(parts) + "\n"


def _source(row: Row) -> str:
    changes = " and local changes" if row["dirty"] == "True" else ""
    return (
        f"{row['date']}, commit {row['commit']}{changes}, driver {row['driver'] or '-'}, CUDA {row['cuda'] or '-'}, "
        f"torch {row['torch']}, CuTe DSL {row['dsl'] or '-'}, {row['peers'] or 'no peers'}"
    )


def _title(key: Key) -> str:
    kind = "" if key.data == "normal" else f", {key.data} rows"
    return f"M {key.m}, H {key.h}, V {key.v}{kind}" + (f", {key.ignored:.0%} ignored" if key.ignored else "")


def _roof_line(results: Results, key: Key) -> list[str]:
    names = {THREE_GEMMS: "3 GEMMs", GEMMS[0]: "logits", GEMMS[1]: "dX", GEMMS[2]: "dW", NONE_IGNORED: "none ignored"}
    times = [f"{text} {ms:.4g} ms" for name, text in names.items() if (ms := results.ms(key, name))]
    return [f"{', '.join(times)}\n"] if times else []


def _case_table(results: Results, key: Key) -> str:
    unit, scale = ("us", 1e3) if key.mode == "host" else ("ms", 1.0)
    header = [
        "provider",
        unit,
        "p20-p80",
        "of roof",
        "peak GB",
        "first call s",
        "launches",
        "err loss",
        "err dX",
        "err dW",
    ]
    lines = []
    for name in sorted(results.providers([key]), key=lambda name: results.ms(key, name)):
        row = results.cases[key][name]
        times = [scale * float(row[column]) for column in ("median_ms", "p20_ms", "p80_ms")]
        ratio = f"{float(row['of_roof']):.3f}" if row["of_roof"] else ""
        peak = f"{float(row['peak_gb']):.2f}" if row["peak_gb"] else ""
        errors = (f"{float(row[c]):.2g}" if row[c] else "" for c in ("err_loss", "err_dx", "err_dw"))
        shown = f"**{name}**" if is_ours(name) else name
        spread = f"{times[1]:.4g}-{times[2]:.4g}"
        first = f"{float(row['first_s']):.2g}" if row["first_s"] else ""
        lines.append([shown, f"{times[0]:.4g}", spread, ratio, peak, first, row["launches"], *errors])
    return markdown_table(header, lines)


# Figures -------------------------------------------------------------------------------------------------------------


def figures(results: Results, stem: Path) -> None:
    """`stem`: time against memory at the headline shape; `stem`_sweep: both over M and over V. As .svg and .png."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    gpu = results.rows[0]["gpu"]
    key = _largest_with_memory(results)
    if key:
        fig = plt.figure(figsize=(9, 6), layout="constrained")
        _time_against_memory(results, key, fig.subplots())
        fig.suptitle(f"Linear cross entropy, forward + backward, {_title(key)}, bf16, {gpu}", fontsize=10)
        _save(fig, stem)
    panels = [(axis, line) for axis in ("m", "v") if len(line := _sweep(results, axis)) > 1]
    if panels:
        fig = plt.figure(figsize=(1 + 5.5 * len(panels), 8), layout="constrained")
        axes = fig.subplots(2, len(panels), squeeze=False)
        names = results.providers(key for _, line in panels for key in line)
        names = [n for n in names if any(sum(results.ms(key, n) is not None for key in line) > 1 for _, line in panels)]
        styles = {name: dict(color=f"C{i % 10}", linestyle=("-", "--")[i // 10]) for i, name in enumerate(names)}
        for (above, below), (axis, line) in zip(axes.T, panels, strict=True):
            _over(results, line, axis, above, "of_roof", "time / three bare GEMMs", styles)
            _over(results, line, axis, below, "peak_gb", "peak memory above inputs, GB", styles)
            fixed = f"V {line[0].v}" if axis == "m" else f"M {line[0].m}"
            above.set_title(f"over {axis.upper()}, H {line[0].h}, {fixed}", fontsize=9)
        handles = {text: h for ax in axes.flat for h, text in zip(*ax.get_legend_handles_labels(), strict=True)}
        fig.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=6, fontsize=8)
        fig.suptitle(f"Linear cross entropy, forward + backward, bf16, {gpu}", fontsize=10)
        _save(fig, stem.with_name(f"{stem.stem}_sweep"))
    plt.close("all")


def _save(fig, stem: Path) -> None:
    for suffix in (".svg", ".png"):
        fig.savefig(stem.with_suffix(suffix), dpi=150)


def _largest_with_memory(results: Results) -> Key | None:
    """The headline shape, or where it is not measured the largest."""
    keys = [k for k in results.cases if k.mode == "train" and not k.ignored and len(results.points(k)) > 1]
    return max(keys, key=lambda k: (k.shape == HEADLINE, k.data == "normal", k.m * k.h * k.v), default=None)


def _time_against_memory(results: Results, key: Key, ax) -> None:
    points = results.points(key)
    for ours in (True, False):
        some = {name: p for name, p in points.items() if is_ours(name) == ours}
        if some:
            ms, gb = zip(*some.values(), strict=True)
            style = dict(color="C3", marker="D", s=46) if ours else dict(color="C0", marker="o", s=30)
            ax.scatter(gb, ms, label="quackish" if ours else "peers", zorder=3, **style)
    gradients = 2 * (key.v + key.m) * key.h / 1e9
    ax.axvline(gradients, color="0.6", linestyle=":", linewidth=1, label="the gradients alone")
    if roof := results.ms(key, THREE_GEMMS):
        ax.axhline(roof, color="0.6", linestyle="--", linewidth=1, label="three bare GEMMs")
    ax.set_xscale("log")
    ax.set_yscale("log")
    _log_axis(ax.xaxis)
    _log_axis(ax.yaxis)
    ax.set_xlabel("peak memory above inputs, GB")
    ax.set_ylabel("ms")
    ax.grid(alpha=0.25, which="both")
    ax.legend(fontsize=8)
    ax.margins(0.12)
    _label(ax, {name: (gb, ms) for name, (ms, gb) in points.items()})


def _label(ax, points: dict[str, tuple[float, float]]) -> None:
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


def _log_axis(axis) -> None:
    """Logarithmic, with plain numbers at more than the powers of ten."""
    from matplotlib.ticker import LogLocator, NullLocator

    axis.set_major_locator(LogLocator(subs=(1.0, 1.2, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0)))
    axis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_minor_locator(NullLocator())


def _sweep(results: Results, axis: str) -> list[Key]:
    """The cases at HEADLINE's other two sizes, along `axis`; where there are none, the longest such line."""
    lines: dict[tuple, list[Key]] = defaultdict(list)
    for key in results.cases:
        if key.mode == "train" and key.data == "normal" and not key.ignored and results.providers([key]):
            lines[(key.h, key.v if axis == "m" else key.m)].append(key)
    wanted = HEADLINE[1], HEADLINE[2] if axis == "m" else HEADLINE[0]
    best = max(lines, key=lambda where: (where == wanted, len(lines[where])), default=None)
    return sorted(lines[best], key=lambda key: getattr(key, axis)) if best else []


def _over(results: Results, line: list[Key], axis: str, ax, column: str, label: str, styles: dict[str, dict]) -> None:
    for name, style in styles.items():
        points = [(getattr(key, axis), value) for key in line if (value := results.value(key, name, column))]
        if len(points) > 1:
            style = style | (dict(linewidth=2.2, marker="D") if is_ours(name) else dict(linewidth=1.1, marker="o"))
            ax.plot(*zip(*points, strict=True), label=name, markersize=3.5, **style)
    if column == "of_roof":
        ax.axhline(1, color="0.6", linewidth=0.8)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    _log_axis(ax.yaxis)
    ticks = [getattr(key, axis) for key in line]
    k = 1024 if axis == "m" else 1000
    ax.set_xticks(ticks, [f"{tick // k}k" if tick >= k else str(tick) for tick in ticks], fontsize=7)
    ax.xaxis.minorticks_off()
    ax.set_ylabel(label, fontsize=8)
    ax.grid(alpha=0.25)


def report(csv: Path) -> None:
    """Writes the page and the figures beside `csv`, and prints the verdicts."""
    results = Results(harness.read_csv(csv))
    if not results.rows:
        console.print(f"{csv}: no rows")
        return
    csv.with_suffix(".md").write_text(markdown(results))
    try:
        figures(results, csv)
    except ImportError as error:
        console.print(f"no figures: {error}")
    for word, text in verdicts(results):
        style = {"PASS": "green", "FAIL": "red"}[word]
        console.print(f"{word}  {text}", style=style, markup=False, soft_wrap=True)
    console.print(noise(results), markup=False)


if __name__ == "__main__":
    report(Path(sys.argv[1]))
