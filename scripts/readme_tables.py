"""Writes the tables of README.md and of the site's first page from the CSV files in benchmarks/results.

python scripts/readme_tables.py            # writes README.md and docs/index.md
python scripts/readme_tables.py --check    # exit status 1 if a table is out of date
"""

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import page_tables
from measurement_tables import MOE, RESULTS, ROOT, Table, find, significant
from quackish.bench.cells import OURS, Cell, is_ours, library
from quackish.bench.looks import title_of
from quackish.bench.results import Results, read_rows

PAGE, FIRST_PAGE = ROOT / "README.md", ROOT / "docs/index.md"


class Time(NamedTuple):
    ms: float
    gb: float
    name: str = ""


Times = tuple[Time, Time, Time]  # ours, the fastest other library, PyTorch


@functools.cache
def results_of(card: str, op: str) -> Results:
    return Results(read_rows(RESULTS / f"{card}/{op}.csv"))


def operation(card: str, cell: Cell) -> Times:
    results = results_of(card, cell.op)
    points = {n: p for n, p in results.points(cell).items() if n not in results.bench.more_outputs}
    points = {n: p for n, p in points.items() if not results.is_wrong(cell, n)}
    mine = Time(*points[OURS])
    pytorch = [Time(*p) for n, p in points.items() if library(n) in ("torch", "transformers")]
    others = [n for n in points if not is_ours(n) and library(n) not in ("torch", "transformers")]
    # Liger's kernels for Hopper are not its default.
    others = [Time(*points[n], title_of(n if library(n) == "liger" else library(n))) for n in others]
    return mine, min(others), min(pytorch)


def step(card: str, model: str) -> Times:
    """An eager training step."""
    rows = (
        find(f"{card}/llama_step.csv", model=model, provider=name, compiled="no")
        for name in ("quackish", "liger", "plain")
    )
    ours, liger, plain = (Time(float(row["median_ms"]), float(row["peak_gb"])) for row in rows)
    return ours, liger._replace(name="Liger"), plain


def compiled_step() -> Times:
    """That of the 1B Llama with compiled layers on the H200. Unsloth, which compiles them too, is faster than Liger."""
    names = ("quackish, layers compiled", "unsloth", "plain, layers compiled")
    rows = (find("H200/unsloth_step.md", provider=name) for name in names)
    ours, unsloth, plain = (Time(float(row["ms"]), float(row["peak GB"])) for row in rows)
    return ours, unsloth._replace(name="Unsloth"), plain


def loss(*shape: int) -> Cell:
    return Cell("linear_cross_entropy", shape, "bfloat16", "forward+backward")


def norm(*shape: int) -> Cell:
    return Cell("rms_norm", shape, "bfloat16", "backward")


def distillation(*shape: int) -> Cell:
    return Cell("linear_divergence", shape, "bfloat16", "forward+backward", "beta=0.0")


def experts(model: str) -> Cell:
    return Cell("moe_mlp", tuple(map(int, MOE[model].split("x"))), "bfloat16", "forward+backward")


def rows_of(card: str) -> dict[str, Callable[[], Times]]:
    """By title of a row. The H100 has fewer."""
    of, of_step = (functools.partial(functools.partial, times, card) for times in (operation, step))
    large, rows = card == "H200", {}
    rows["1B Llama, an eager step"] = of_step("llama-1b")
    if large:
        rows["1B Llama, layers compiled"] = compiled_step
    rows["4 layers of an 8B Llama, an eager step"] = of_step("llama-8b")
    if large:
        rows["Qwen3 1.7B, an eager step"] = of_step("qwen3-1.7b")
    rows["cross entropy, 8192 x 4096 x 128,256"] = of(loss(8192, 4096, 128256))
    rows["distillation, 8192 x 2048 x 128,256"] = of(distillation(8192, 2048, 4096, 128256))
    if large:
        rows["RMSNorm, backward alone, 4096 x 4096"] = of(norm(4096, 4096))
        rows["experts of Qwen3-30B, 16,384 tokens"] = of(experts("Qwen3-30B"))
    return rows


def in_units(value: float, small: str, large: str) -> str:
    """`value` is in the large unit, a thousand times the small one."""
    return f"{significant(value)} {large}" if value >= 1 else f"{significant(1e3 * value)} {small}"


def table(card: str) -> Table:
    yield card, "ours", "best other library", "PyTorch", "memory: ours", "memory: other", "memory: PyTorch"
    for title, times_of in rows_of(card).items():
        times = times_of()
        cells, best = [], min(time.ms for time in times)
        for time in times:
            text = in_units(time.ms, "us", "ms")
            text = f"**{text}**" if time.ms == best else text
            cells.append(f"{text}, {time.name}" if time.name else text)
        yield title, *cells, *(in_units(time.gb, "MB", "GB") for time in times)


TABLES: page_tables.Tables = {card: functools.partial(table, card) for card in ("H100", "H200")}
PAGES = {PAGE: TABLES, FIRST_PAGE: {"H200": TABLES["H200"]}}

if __name__ == "__main__":
    sys.exit(page_tables.main(__doc__, PAGES, Path(__file__).name))
