"""From rms_norm.csv to what people read: verdicts on the bars, a Markdown page, a figure.

It is run by itself after a run that was cut short:

    python -m benchmarks.report_rms_norm benchmarks/results/H200/rms_norm.csv
"""

import math
import sys
from collections import defaultdict
from pathlib import Path

from rich.table import Table

from benchmarks.harness import console
from quackish.bench import plots
from quackish.bench.files import markdown_table, read_csv
from quackish.bench.measured import AGAIN, OURS

RIVAL = "quack"
ROOFS = {"fwd": "mul", "bwd": "add"}
TITLES = {"bwd": "Backward: dx and dweight, whole", "fwd": "Forward: y and rstd"}
SETS = {
    "grid": "bf16 grid",
    "dtypes": "fp16 and fp32 at N 4096",
    "large_n": "large N",
    "quick": "quick",
    "own": "own cells",
}

Row = dict[str, str]
Key = tuple[str, str, str, int, int]  # cells, op, dtype, n, m


class Results:
    """The rows of a CSV by cell and provider; times in microseconds, None where there is none."""

    def __init__(self, rows: list[Row]):
        self.rows = rows
        self.cells: dict[Key, dict[str, Row]] = defaultdict(dict)
        for row in rows:
            self.cells[row["cells"], row["op"], row["dtype"], int(row["n"]), int(row["m"])][row["provider"]] = row

    def us(self, key: Key, provider: str) -> float | None:
        value = self.cells[key].get(provider, {}).get("median_us")
        return float(value) if value else None

    def ratio(self, key: Key, over: str, under: str) -> float | None:
        """How many times `over` takes what `under` takes; either may be "bar"."""

        if self.us(key, OURS) is None or not (a := self.time(key, over)) or not (b := self.time(key, under)):
            return None
        return a / b

    def time(self, key: Key, name: str) -> float | None:
        """Of a provider, or "bar"."""
        if name != "bar":
            return self.us(key, name)
        bar = self.cells[key].get(OURS, {}).get("bar_us")
        return float(bar) if bar else None

    def keys(self, cells: str, op: str) -> list[Key]:
        return sorted(key for key in self.cells if key[:2] == (cells, op))

    def providers(self, op: str) -> list[str]:
        """In the order of the file, our own variants included, without roofs and the second measurement."""
        names = dict.fromkeys(row["provider"] for row in self.rows if row["op"] == op)
        return [name for name in names if name not in (ROOFS[op], AGAIN)]


def verdicts(results: Results) -> list[tuple[str, str]]:
    """(PASS or FAIL; the bar, how many cells keep it, the worst cell) for every bar that something was measured for."""
    if not any(row["provider"] == OURS for row in results.rows):
        return []
    lines = []
    for cells in ("grid", "dtypes", "quick", "own"):
        for op, text in (("bwd", "backward <= 1.05 t_add + 4 us"), ("fwd", "forward <= 1.05 t_mul + 1 us")):
            lines += _every(results, cells, op, "bar", 1.0, f"{text}; time / bar")
        lines += _every(results, cells, "bwd", RIVAL, 1.0, "backward no slower than QuACK; time / QuACK's")
        lines += _every(results, cells, "fwd", RIVAL, 1.02, "forward at most 2 % over QuACK; time / QuACK's")
        speedups = [r for key in results.keys(cells, "bwd") if (r := results.ratio(key, RIVAL, OURS))]
        if speedups and cells != "dtypes":  # that bar is the grid's
            mean = math.exp(sum(map(math.log, speedups)) / len(speedups))
            text = f"{SETS[cells]}: backward over QuACK's in the geometric mean: {mean:.3f}x, bar 1.25x"
            lines.append(("PASS" if mean >= 1.25 else "FAIL", text))
    return lines


def _every(results: Results, cells: str, op: str, under: str, limit: float, text: str) -> list[tuple[str, str]]:
    """The verdict on our time being at most `limit` times that of `under` in every cell where `under` was measured."""
    keys = [key for key in results.keys(cells, op) if under == "bar" or results.us(key, under)]
    # A cell that we failed to run is lost, not left out.
    ratios = {key: results.ratio(key, OURS, under) or math.inf for key in keys}
    if not ratios:
        return []
    missed = sorted((key for key in keys if ratios[key] > limit), key=ratios.__getitem__, reverse=True)
    worst = max(ratios, key=ratios.__getitem__)
    found = f"{len(keys) - len(missed)} of {len(keys)} cells, worst {_both(results, worst, under)}"
    if missed[1:]:
        found += f"; missed also in {'; '.join(_both(results, key, under) for key in missed[1:])}"
    return [("FAIL" if missed else "PASS", f"{SETS[cells]}: {text}: {found}")]


def _both(results: Results, key: Key, under: str) -> str:
    """Both times of a cell with all six digits of the file, as the last one may decide, and their ratio."""
    ours, other = results.us(key, OURS), results.time(key, under)
    ratio = results.ratio(key, OURS, under) or math.inf
    times = f"{ours:.6g} us for {other:.6g} us" if ours and other else "failed"
    return f"{ratio:.4f} ({times}) at {key[4]} x {key[3]} {key[2]}"


def noise(results: Results) -> str:
    """How far apart two measurements of the same graph in the same rounds were."""
    apart = sorted(abs(r - 1) for key in results.cells if (r := results.ratio(key, AGAIN, OURS)))
    if not apart:
        return "noise: not measured"
    return f"noise: quackish twice in one cell differs by {apart[len(apart) // 2]:.1%} (median), {apart[-1]:.1%} (most)"


def matrices(results: Results, cells: str) -> list[tuple[str, Table]]:
    """Small tables of N by M with their titles: our time over the bar, QuACK's and our other configs' over ours."""
    tables = []
    for op in ("bwd", "fwd"):
        keys = results.keys(cells, op)
        pairs = [(OURS, "bar", "our time / bar")]
        pairs += [
            (name, OURS, f"{name} / ours")
            for name in results.providers(op)
            if name == RIVAL or name.startswith(OURS + "[")
        ]
        for over, under, title in pairs:
            if not any(results.ratio(key, over, under) for key in keys):
                continue
            ms = sorted({key[4] for key in keys})
            table = Table("N", *map(str, ms), box=None, pad_edge=False)
            for dtype, n in sorted({key[2:4] for key in keys}):
                ratios = [results.ratio((cells, op, dtype, n, m), over, under) for m in ms]
                lost = (lambda r: r > 1) if under == "bar" else (lambda r: r < 1)
                name = {"bfloat16": "", "float16": " fp16", "float32": " fp32"}[dtype]
                table.add_row(f"{n}{name}", *("" if r is None else f"{r:.3f}{'!' if lost(r) else ''}" for r in ratios))
            tables.append((f"{op}, {SETS[cells]}: {title}, by M", table))
    return tables


def markdown(results: Results) -> str:
    first = results.rows[0]
    parts = [
        f"# RMSNorm on {first['gpu']}\n",
        f"{first['date']}, commit {first['commit']}{' and local changes' if first['dirty'] == 'True' else ''}, driver "
        f"{first['driver'] or '-'}, CUDA {first['cuda'] or '-'}, torch {first['torch']}, "
        f"CuTe DSL {first['dsl'] or '-'}, {first['peers'] or 'no peers'}.\n",
        "Medians in us (p20-p80 for quackish) of CUDA graph replays, the L2 cleared before each, all providers taking "
        "turns. `err` is the norm-wise error of the worst output against fp64, for quackish and the best peer; `same` "
        "says whether the bytes repeated.\n",
        *(f"- {word}: {text}" for word, text in verdicts(results)),
        f"- {noise(results)}\n",
    ]
    for cells, title in SETS.items():
        for op in ("bwd", "fwd"):
            if keys := results.keys(cells, op):
                parts += [f"## {TITLES[op]}, {title}\n", _cells_table(results, op, keys)]
    failed = dict.fromkeys(
        f"{row['provider']}, {row['op']}, N {row['n']}, {row['dtype']}: {row['status']}"
        for row in results.rows
        if row["status"] != "ok"
    )
    if failed:
        parts += ["## Not measured, or not as a graph\n", *(f"- {line}" for line in failed)]
    return "\n".join(parts) + "\n"


def _cells_table(results: Results, op: str, keys: list[Key]) -> str:
    others = [name for name in results.providers(op) if name != OURS and any(results.us(key, name) for key in keys)]
    header = ["dtype", "M", "N", ROOFS[op], OURS, "GB/s", "% of roof", "bar", "kept", *others, "QuACK / ours"]
    lines = []
    for key in keys:
        ours, cell = results.cells[key].get(OURS, {}), results.cells[key]
        kept = {"True": "yes", "False": "**no**"}.get(ours.get("within_bar", ""), "")
        median = _us(ours, shape=".6g")  # beside the bar, which may be missed by the last digit
        spread = f"{median} ({_us(ours, 'p20_us')}-{_us(ours, 'p80_us')})" if results.us(key, OURS) else "failed"
        lines.append(
            [
                *(key[2], key[4], key[3], _us(cell[ROOFS[op]]), spread),
                *(_us(ours, "gb_per_s"), _us(ours, "pct_of_roof"), _us(ours, "bar_us", ".6g"), kept),
                *(_us(cell.get(name, {})) for name in others),
                f"{r:.2f}" if (r := results.ratio(key, RIVAL, OURS)) else "",
                *_quality(results, key),
            ]
        )
    return markdown_table([*header, "err", "err, best peer", "same", "peak MB"], lines)


def _quality(results: Results, key: Key) -> list[str]:
    """Our error, the best peer's, whether our bytes repeated, our peak memory."""

    def errors(row: Row) -> list[float]:
        return [float(row[name]) for name in ("err_y", "err_dx", "err_dweight") if row.get(name)]

    ours = results.cells[key].get(OURS, {})
    peers = [max(e) for name, row in results.cells[key].items() if not name.startswith(OURS) and (e := errors(row))]
    same = {"True": "yes", "False": "**no**"}.get(ours.get("deterministic", ""), "")
    worst = [f"{pick(e):.2g}" if e else "" for pick, e in ((max, errors(ours)), (min, peers))]
    return [*worst, same, _us(ours, "peak_mb")]


def _us(row: Row, name: str = "median_us", shape: str = ".4g") -> str:
    return f"{float(row[name]):{shape}}" if row.get(name) else ""


def figure(results: Results, stem: Path) -> None:
    """% of the roof over M, one panel for each N of the bf16 cells: `stem`.svg and .png."""
    plt = plots.pyplot()
    keys = [key for key in results.cells if key[2] == "bfloat16" and key[0] != "large_n"]
    ns = sorted({key[3] for key in keys})
    ops = [op for op in ("bwd", "fwd") if any(key[1] == op for key in keys)]
    if not keys:
        return
    names = list(dict.fromkeys(name for op in ops for name in results.providers(op)))
    marks = dict(marker="o", markersize=3)
    styles = {n: dict(marks, color=f"C{i}", linewidth=2.2 if n == OURS else 1.1) for i, n in enumerate(names)}
    size = (2 + 1.9 * len(ns), 1 + 2.4 * len(ops))
    fig, axes = plt.subplots(len(ops), len(ns), figsize=size, squeeze=False, sharey=True)
    for row, op in zip(axes, ops, strict=True):
        row[0].set_ylabel(f"{TITLES[op].split(':')[0]}, % of torch.{ROOFS[op]}")
        for ax, n in zip(row, ns, strict=True):
            for name in names:
                measured = [key for key in keys if key[1] == op and key[3] == n and results.us(key, name)]
                points = [(key[4], float(results.cells[key][name]["pct_of_roof"])) for key in measured]
                plots.line(ax, name, points, styles[name])
            ax.set_xscale("log", base=2)
            ax.set_title(f"N {n}", fontsize=9)
            ax.axhline(100, color="0.6", linewidth=0.8)
            ax.grid(alpha=0.25)
            ax.tick_params(labelsize=7)
    axes[0, 0].set_ylim(0, max(110, *(max(line.get_ydata()) for ax in axes.flat for line in ax.lines)))
    for ax in axes[-1]:
        ax.set_xlabel("M", fontsize=8)
    plots.shared_legend(fig, axes.flat, ncols=len(names), fontsize=8)
    fig.suptitle(f"RMSNorm, bf16, {results.rows[0]['gpu']}: speed as a share of the roof in the same run", fontsize=10)
    fig.set_layout_engine("constrained")
    plots.save(fig, stem)
    plt.close(fig)


def report(csv: Path) -> None:
    """Writes the page and the figure beside `csv`, and prints the small tables and the verdicts."""
    results = Results(read_csv(csv))
    if not results.rows:
        console.print(f"{csv}: no rows")
        return
    csv.with_suffix(".md").write_text(markdown(results))
    try:
        figure(results, csv)
    except ImportError as error:
        console.print(f"no figure: {error}")
    for cells in SETS:
        for title, table in matrices(results, cells):
            console.print(title, markup=False, soft_wrap=True)
            console.print(table)
    for word, text in verdicts(results):
        style = {"PASS": "green", "FAIL": "red"}[word]
        console.print(f"{word}  {text}", style=style, markup=False, soft_wrap=True)
    console.print(noise(results), markup=False)


if __name__ == "__main__":
    report(Path(sys.argv[1]))
