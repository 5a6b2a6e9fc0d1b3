"""Shapes, models and providers of `quackish bench`, and the columns of its CSV."""

import re
from pathlib import Path

import pytest

from quackish.bench.cells import Cell, Job, data_of, options_of
from quackish.bench.measure import time_columns
from quackish.bench.results import COLUMNS, cell_of, row_of
from quackish.bench.table import BENCHES
from quackish.testing.timing import Times

RMS_NORM, LINEAR_CROSS_ENTROPY, GROUPED_MLP = map(BENCHES.get, ("rms_norm", "linear_cross_entropy", "grouped_mlp"))
LCE_CELL = Cell("linear_cross_entropy", (8, 32, 90), "bfloat16", "forward+backward", ignored=0.8)


def test_shapes_of_models():
    norms = RMS_NORM.shapes(["llama3-8b", "qwen3-8b"], [100], ["100x128", "100x4096"])
    assert norms == {
        (100, 4096): "llama3-8b, qwen3-8b",
        (3200, 128): "qwen3-8b q_norm",
        (800, 128): "qwen3-8b k_norm",
        (100, 128): "",
    }
    heads = LINEAR_CROSS_ENTROPY.shapes(["llama3-70b"], [1, 2], [])
    assert list(heads) == [(1, 8192, 128256), (2, 8192, 128256)]
    experts = GROUPED_MLP.shapes(["llama3-8b", "qwen3-30b-a3b", "gpt*"], [10], [])
    assert experts == {(80, 2048, 768, 128): "qwen3-30b-a3b", (40, 2880, 2880, 32): "gpt-oss-20b"}
    with pytest.raises(ValueError, match="--model llama3-8b: no shape of grouped_mlp; expected one of qwen3-30b"):
        GROUPED_MLP.shapes(["llama3-8b"], [10], [])


def test_patterns_of_models():
    heads = LINEAR_CROSS_ENTROPY.shapes(["gemma3-1*", "llama3-8b"], [1], [])
    assert list(heads.values()) == ["llama3-8b", "gemma3-1b", "gemma3-12b"]
    with pytest.raises(ValueError, match="--model gpt5 is unknown; expected one of llama3-8b"):
        RMS_NORM.shapes(["llama3-8b", "gpt5"], [1], [])


@pytest.mark.parametrize("shape", ["8x32x64", "8x0", "8x", "shapes.yaml", "99999999999999999999x8"])
def test_invalid_shapes(shape):
    with pytest.raises(ValueError, match=f"--shapes is '{shape}'; expected MxN, numbers from 1 to"):
        RMS_NORM.shapes([], [], [shape])


def test_patterns_of_providers():
    names = LINEAR_CROSS_ENTROPY.matching(["mine:loss", "torch*", "quackish", "quackish-chunked-777"])
    assert names == (
        "quackish-chunked-777",
        "quackish",
        "torch",
        "torch-compile",
        "torch-fp32",
        "torch-chunked-stats",
        "torch-chunked",
        "torch-cute-256",
        "torch-cute-1024",
        "torch-cute-4096",
        "mine:loss",
    )


def test_options_of_a_call_are_data_of_a_cell():
    for options, data in (({}, "normal"), ({"attn_bias": "1,H", "causal": True}, "attn_bias=1,H causal")):
        assert data_of(options) == data
        assert options_of(data) == options


def test_columns_of_rows_and_the_readme():
    times = time_columns(Times(2000.0, 1900.0, 2100.0), Times(1000.0, 990.0, 1010.0))
    record = times | {"status": "ok", "peak_mb": 3.0}
    row = row_of(Job(LCE_CELL, ("quackish",), "llama3-8b"), "quackish", record)
    assert set(COLUMNS) > row.keys()
    assert (row["shape"], row["models"], row["status"]) == ("8x32x90", "llama3-8b", "ok")
    assert (row["median_ms"], row["p20_ms"], row["p80_ms"], row["roof_ms"]) == (2.0, 1.9, 2.1, 1.0)
    assert (row["pct_of_roof"], row["peak_mb"]) == (50.0, 3.0)
    assert cell_of({key: str(value) for key, value in row.items()}) == LCE_CELL
    text = (Path(__file__).parents[2] / "benchmarks" / "README.md").read_text()
    assert tuple(re.findall(r"^\| `(\w+)` \|", text, re.M)) == COLUMNS
