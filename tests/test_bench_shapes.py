"""What can be asked of `python -m quackish bench`: models, shapes, files, and the columns of its CSV."""

import math
import re
from pathlib import Path

import pytest

from quackish.bench import shapes
from quackish.bench.cells import A_LAUNCH, AGAIN, Cell, Job
from quackish.bench.measured import Measured
from quackish.bench.models import find
from quackish.bench.operations import LINEAR_CROSS_ENTROPY, RMS_NORM
from quackish.bench.results import COLUMNS, cell_of, role_of, row_of
from quackish.testing.timing import Times

LCE_CELL = Cell("linear_cross_entropy", (8, 32, 90), "bfloat16", "forward+backward")


def test_models_have_norms_and_heads_and_a_shape_of_several_is_measured_once():
    found = shapes.wanted(RMS_NORM, ["llama3-8b", "qwen3-8b"], [100], ["100x128", "100x4096"])
    assert found == {
        (100, 4096): "llama3-8b, qwen3-8b",
        (3200, 128): "qwen3-8b q_norm",
        (800, 128): "qwen3-8b k_norm",
        (100, 128): "",
    }
    heads = shapes.wanted(LINEAR_CROSS_ENTROPY, ["llama3-70b"], [1, 2], [])
    assert list(heads) == [(1, 8192, 128256), (2, 8192, 128256)]


def test_patterns_name_models():
    assert [model.name for model in find(["gemma3-1*", "llama3-8b"])] == ["llama3-8b", "gemma3-1b", "gemma3-12b"]
    with pytest.raises(ValueError, match="--model gpt5: no such model; there are llama3-8b"):
        find(["llama3-8b", "gpt5"])
    with pytest.raises(ValueError, match=r"--tokens 9999999999: llama3-8b is 9999999999x4096; expected sizes below"):
        shapes.wanted(RMS_NORM, ["llama3-8b"], [9999999999], [])


def test_shapes_are_read_from_files(tmp_path):
    pytest.importorskip("yaml")
    (tmp_path / "shapes.yaml").write_text(
        "rms_norm: [8x32, {m: 9, n: 33}]\nlinear_cross_entropy: [{m: 1, h: 2, v: 3}]\n"
    )
    assert list(shapes.wanted(LINEAR_CROSS_ENTROPY, [], [], [f"{tmp_path}/shapes.yaml"])) == [(1, 2, 3)]
    (tmp_path / "plain.yml").write_text("- 8x32\n- 9x32\n")
    (tmp_path / "shapes.csv").write_text("name, n, m\nfirst, 32, 10\nsecond, 33, 11\n")
    files = [f"{tmp_path}/{name}" for name in ("shapes.yaml", "plain.yml", "shapes.csv")]
    found = shapes.wanted(RMS_NORM, [], [], [*files, "8x32,12x32"])
    assert list(found) == [(8, 32), (9, 33), (9, 32), (10, 32), (11, 33), (12, 32)]


@pytest.mark.parametrize(
    "name, text, says",
    [
        ("a.yaml", "other: [8x32]", "expected a list of shapes of rms_norm, MxN such as 8192x4096; got 'other"),
        ("a.yaml", "[8x32, 8x]", "entry 2: '8x' is no shape of rms_norm; expected MxN such as 8192x4096"),
        ("a.yaml", "[{m: 8, k: 32}]", "entry 1: "),
        ("a.yaml", "{[", "a.yaml: while parsing"),
        ("a.csv", "m,h\n1,2\n", "entry 1: {'m': '1', 'h': '2'} is no shape"),
        ("a.csv", "m,n\n1,2\n3,x\n", "entry 2: "),
        ("a.csv", "", "expected a list of shapes"),
        ("8x32x64", "", "'8x32x64' is no shape of rms_norm; expected MxN such as"),
        ("8x0", "", "'8x0' is no shape of rms_norm"),
        ("no.yaml", None, "no.yaml: .*No such file"),
        ("99999999999999999999x8", "", r"expected sizes below 2\*\*31"),
    ],
)
def test_shapes_that_make_no_sense_are_told(tmp_path, name, text, says):
    pytest.importorskip("yaml")
    if text is not None and name.startswith("a."):
        (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=says):
        shapes.wanted(RMS_NORM, [], [], [f"{tmp_path}/{name}" if "." in name else name])


def test_a_row_has_the_columns_that_the_readme_explains():
    found = Measured(
        times=Times(2000.0, 1900.0, 2100.0),
        roof=Times(1000.0, 990.0, 1010.0),
        peak_bytes=3_000_000,
        standing_bytes=40_000,
        errors={"err_loss": 1e-6, "err_dx": 2e-3, "err_dweight": 3e-3},
    )
    row = row_of(Job(LCE_CELL, ("quackish",), {"models": "llama3-8b"}), "quackish", found, 10)
    assert {*COLUMNS, "data", "ignored"} > row.keys()
    assert (row["shape"], row["role"], row["status"], row["note"]) == ("8x32x90", "ours", "ok", "")
    assert (row["median_ms"], row["p20_ms"], row["p80_ms"], row["roof_ms"]) == (2.0, 1.9, 2.1, 1.0)
    assert (row["pct_of_roof"], row["peak_mb"], row["standing_mb"], row["err_dweight"]) == (50.0, 3.0, 0.04, 3e-3)
    assert cell_of({key: str(value) for key, value in row.items()}) == LCE_CELL
    text = (Path(__file__).parents[1] / "benchmarks" / "README.md").read_text()
    assert tuple(re.findall(r"^\| `(\w+)` \|", text, re.M)) == COLUMNS


@pytest.mark.parametrize("error, note", [(0.09, ""), (0.11, "wrong: err_y 0.11"), (math.nan, "wrong: err_y nan")])
def test_what_is_wrong_is_said_to_be(error, note):
    job = Job(Cell("rms_norm", (8, 32), "bfloat16", "forward"), ())
    assert row_of(job, "torch", Measured(errors={"err_y": error}))["note"] == note


def test_every_row_has_a_role():
    names = ("quackish", "quackish-stored", AGAIN, "quack", "mine", "three-gemms", "gemm-dx", A_LAUNCH)
    roles = [role_of(LCE_CELL, name) for name in names]
    assert roles == ["ours", "ours", "again", "peer", "own", "roof", "part", "part"]
