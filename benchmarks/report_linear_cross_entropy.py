"""From linear_cross_entropy.csv to what people read: verdicts on the bars, a Markdown page, figures.

It is run by itself after a run that was cut short:

    python -m benchmarks.report_linear_cross_entropy benchmarks/results/H200/linear_cross_entropy.csv
"""

import sys
from collections import defaultdict
from pathlib import Path

from benchmarks.bars_linear_cross_entropy import AGAINST_MEMORY, HEADLINE, verdicts
from benchmarks.harness import console
from benchmarks.results_linear_cross_entropy import Key, Results, Row, noise
from quackish.bench import plots
from quackish.bench.files import markdown_table, read_csv
from quackish.bench.measure_linear_cross_entropy import GEMMS, NONE_IGNORED, THREE_GEMMS
from quackish.bench.measured import is_ours
from quackish.bench.providers_linear_cross_entropy import ABOUT
from quackish.testing.timing import LOAD_MS

TITLES = {"train": "Forward + backward", "loss": "Loss only, no grad", "host": "Host time, forward + backward"}


def markdown(results: Results) -> str:
    sources = dict.fromkeys(map(_source, results.rows))
    parts = [
        f"# Linear cross entropy on {results.rows[0]['gpu']}\n",
        *(f"{source}.\n" for source in sources),
        "bf16; medians of plain calls, all providers taking turns in random order, each call after "
        f"{LOAD_MS:.0f} ms of GEMMs on random data, as in a training step. `3 GEMMs` is three torch.mm on the same "
        "data in the same turns. Memory is the peak of a warm call above before the library was first called, "
        "gradients and what the library keeps between calls (standing) included. Errors are norm-wise against fp64. A "
        "peer's point is dominated where one of quackish's is no slower and no larger; those that are not are listed "
        "under each table.\n",
        *(f"- {word}: {text}" for word, text in verdicts(results)),
        f"- {noise(results)}\n",
    ]
    for mode, title in TITLES.items():
        for key in sorted(key for key in results.cases if key.mode == mode):
            if results.providers([key]):
                parts += [f"## {title}: {_title(key)}\n", *_roof_line(results, key), _case_table(results, key)]
                parts += _not_dominated_line(results, key) if mode == "train" else []
    failed = [
        f"- {name}{about and f' ({about})'}, {TITLES[key.mode].lower()}, {_title(key)}: {row['status']}"
        for key, case in results.cases.items()
        for name, row in case.items()
        if row["status"] != "ok"
        for about in [ABOUT.get(name, "")]
    ]
    if failed:
        parts += ["## Failed\n", *failed, ""]
    tried = {name for case in results.cases.values() for name in case}
    parts += ["## Peers\n", *(f"- {name}: {about}" for name, about in ABOUT.items() if name in tried)]
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


def _not_dominated_line(results: Results, key: Key) -> list[str]:
    if not (peers := results.peers(key)) or len(peers) == len(results.points(key)):
        return []
    if free := results.not_dominated(key):
        return [f"Not dominated by a point of quackish: {', '.join(free)}.\n"]
    return ["Every peer's point is dominated by one of quackish.\n"]


def _case_table(results: Results, key: Key) -> str:
    unit, scale = ("us", 1e3) if key.mode == "host" else ("ms", 1.0)
    header = [
        "provider",
        unit,
        "p20-p80",
        "of roof",
        "peak GB",
        "standing MB",
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
        peak = f"{float(row['peak_gb']):.4f}" if row["peak_gb"] else ""
        standing = f"{float(row['standing_mb']):.2f}" if row.get("standing_mb") else ""
        errors = (f"{float(row[c]):.2g}" if row[c] else "" for c in ("err_loss", "err_dx", "err_dw"))
        shown = f"**{name}**" if is_ours(name) else name
        spread = f"{times[1]:.4g}-{times[2]:.4g}"
        first = f"{float(row['first_s']):.2g}" if row["first_s"] else ""
        lines.append([shown, f"{times[0]:.4g}", spread, ratio, peak, standing, first, row["launches"], *errors])
    return markdown_table(header, lines)


# Figures -------------------------------------------------------------------------------------------------------------


def figures(results: Results, stem: Path) -> None:
    """Time against memory: `stem` at the headline shape, `stem`_m65536 and `stem`_confident where these were measured;
    `stem`_sweep: both over M and over V. As .svg and .png."""
    plt = plots.pyplot()
    gpu = results.rows[0]["gpu"]
    for key, path in _with_memory(results, stem):
        fig = plt.figure(figsize=(9, 6), layout="constrained")
        _time_against_memory(results, key, fig.subplots())
        fig.suptitle(f"Linear cross entropy, forward + backward, {_title(key)}, bf16, {gpu}", fontsize=10)
        plots.save(fig, path)
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
        plots.shared_legend(fig, axes.flat, ncols=6, fontsize=8)
        fig.suptitle(f"Linear cross entropy, forward + backward, bf16, {gpu}", fontsize=10)
        plots.save(fig, stem.with_name(f"{stem.stem}_sweep"))
    plt.close("all")


def _with_memory(results: Results, stem: Path) -> list[tuple[Key, Path]]:
    """The headline shape, or where it is not measured the largest; then others where all settings are measured."""
    keys = [k for k in results.cases if k.mode == "train" and not k.ignored and len(results.points(k)) > 1]
    first = max(keys, key=lambda k: (k.shape == HEADLINE, k.data == "normal", k.m * k.h * k.v), default=None)
    figures = [(first, stem)] if first else []
    for shape, data in AGAINST_MEMORY:
        name = f"m{shape[0]}" if data == "normal" else data
        if (key := results.train(shape, data)) in keys and key != first:
            figures.append((key, stem.with_name(f"{stem.stem}_{name}")))
    return figures


def _time_against_memory(results: Results, key: Key, ax) -> None:
    wrong = {name for name in results.points(key) if results.is_wrong(key, name)}
    points = {name + (name in wrong) * ", wrong results": (gb, ms) for name, (ms, gb) in results.points(key).items()}
    plots.time_against_memory(ax, points, is_ours, "ms")
    ours = sorted(point for name, point in points.items() if is_ours(name))
    if ours:  # what is above and to the right is dominated
        front = [(gb, min(ms for _, ms in ours[: i + 1])) for i, (gb, _) in enumerate(ours)]
        front = [(front[0][0], ax.get_ylim()[1]), *front, (ax.get_xlim()[1], front[-1][1])]
        ax.step(*zip(*front, strict=True), where="post", color="C3", linewidth=1, alpha=0.4, scalex=False, scaley=False)
    gradients = 2 * (key.v + key.m) * key.h / 1e9
    ax.axvline(gradients, color="0.6", linestyle=":", linewidth=1, label="the gradients alone")
    if roof := results.ms(key, THREE_GEMMS):
        ax.axhline(roof, color="0.6", linestyle="--", linewidth=1, label="three bare GEMMs")
    ax.set_xlabel("peak memory above inputs, GB")
    ax.legend(fontsize=8)
    plots.label(ax, points, is_ours)


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
            plots.line(ax, name, points, style | dict(markersize=3.5))
    if column == "of_roof":
        ax.axhline(1, color="0.6", linewidth=0.8)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    plots.log_axis(ax.yaxis)
    plots.size_ticks(ax, [getattr(key, axis) for key in line], k=1024 if axis == "m" else 1000)
    ax.set_ylabel(label, fontsize=8)
    ax.grid(alpha=0.25)


def report(csv: Path) -> None:
    """Writes the page and the figures beside `csv`, and prints the verdicts."""
    results = Results(read_csv(csv))
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
