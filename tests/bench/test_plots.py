"""Figures of time against memory: which points are drawn, their titles and colors."""

import re
from pathlib import Path

import pytest

from benchmarks import targets_linear_cross_entropy as targets
from quackish.bench.cells import Cell
from quackish.bench.looks import LOOKS, color_of, colors_of, title_of
from quackish.bench.plots import labels_of
from quackish.bench.results import COLUMNS, Results, read_rows

RECORDED = Path(__file__).parents[2] / "benchmarks/results"
CELL = targets.HEADLINE


def results(**points: tuple) -> Results:
    """{provider: (ms, GB, error)}"""
    rows = []
    for name, (ms, gb, *error) in points.items():
        row = dict.fromkeys(COLUMNS, "") | vars(CELL) | {"shape": "8192x4096x128256", "ignored": "0.0", "status": "ok"}
        row |= {"provider": name.replace("_", "-"), "median_ms": str(ms), "peak_mb": str(1e3 * gb)}
        rows.append(row | {"err_dx": str(error[0]) if error else "0.001"})
    return Results(rows)


def test_a_figure_has_the_default_and_the_settings_worth_their_memory():
    found = results(
        quackish=(36.0, 2.7), quackish_stored=(35.0, 3.4), quackish_recompute=(45.0, 1.3), quackish_chunked=(34.0, 2.7),
        quackish_chunked_4096=(35.9, 2.8), quackish_stats=(30.0, 1.0), quack_8192=(39.0, 4.4), quack_logits=(38.0, 3.2),
        liger=(56.0, 1.2), liger_cute=(55.0, 1.2), liger_fp32=(20.0, 3.2, 0.5), torch=(41.0, 6.3),
        torch_compile=(39.9, 3.2),
    )  # fmt: skip
    best = found.best_points(CELL)
    assert set(best) == {
        "quackish", "quackish-stored", "quackish-recompute", "quack-logits", "liger", "torch", "torch-compile",
    }  # fmt: skip
    assert best["quackish"] == (36.0, 2.7)
    assert labels_of(best)["quack-logits"] == "QuACK: 38.0 ms, 3.20 GB"  # its only setting
    assert labels_of(best)["torch-compile"] == "PyTorch, compiled: 39.9 ms, 3.20 GB"


def test_titles_and_colors():
    assert title_of("quack-8192") == "QuACK, chunks of 8192 rows"
    assert title_of("quackish-chunked-1024") == "ours, chunks of 1024 rows"
    assert title_of("quackish-recompute-1024") == "ours, recompute, chunks of 1024 rows"
    assert title_of("my.module:loss-2") == "my.module:loss-2"
    assert color_of("quack-8192") == color_of("quack") == LOOKS["quack"][1]
    names = ["quackish-recompute", *(f"quackish-recompute-{rows}" for rows in (512, 1024)), "quack", "quack-8192"]
    assert len(set(colors_of(names).values())) == len(names)


FIGURES = [
    (card, suffix, cell)
    for card in ("H100", "H200")
    for suffix, cell in zip(("", "_confident", "_m65536"), targets.AGAINST_MEMORY, strict=True)
]


@pytest.mark.parametrize("card, suffix, cell", FIGURES, ids=lambda value: value if isinstance(value, str) else "")
def test_recorded_figures_name_every_point(card: str, suffix: str, cell: Cell):
    found = Results(read_rows(RECORDED / f"{card}/linear_cross_entropy.csv"))
    svg = (RECORDED / f"{card}/linear_cross_entropy{suffix}.svg").read_text(encoding="utf-8")
    drawn = re.findall("<!-- (.*?) -->", svg)  # texts are paths, with each line in a comment
    missing = [label for label in labels_of(found.best_points(cell)).values() if label not in drawn]
    assert missing == []
