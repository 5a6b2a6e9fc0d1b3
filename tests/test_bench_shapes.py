"""What can be asked of `python -m quackish bench`: models, shapes, files, and the columns of its CSV."""

import dataclasses
from pathlib import Path

import pytest

from quackish.bench import schema, shapes
from quackish.bench.cells import Cell, Job, parse_shape, shape_name
from quackish.bench.measured import AGAIN, Measured, is_ours
from quackish.bench.models import MODELS, find
from quackish.bench.operations import OPERATIONS
from quackish.testing.timing import Times

RMS, LCE = OPERATIONS["rms_norm"], OPERATIONS["linear_cross_entropy"]


# Shapes --------------------------------------------------------------------------------------------------------------


def test_a_model_has_its_norms_and_its_head():
    assert shapes.wanted(RMS, ["qwen3-8b"], [100], []) == {
        (100, 4096): "qwen3-8b",
        (3200, 128): "qwen3-8b q_norm",
        (800, 128): "qwen3-8b k_norm",
    }
    assert shapes.wanted(LCE, ["llama3-70b"], [1, 2], []) == {
        (1, 8192, 128256): "llama3-70b",
        (2, 8192, 128256): "llama3-70b",
    }
    assert (8, 512) in shapes.wanted(RMS, ["deepseek-v3"], [8], [])


def test_a_shape_of_several_models_is_measured_once():
    found = shapes.wanted(RMS, ["llama3-8b", "qwen3-8b", "qwen3-235b-a22b"], [7], ["7x4096"])
    assert found[7, 4096] == "llama3-8b, qwen3-8b, qwen3-235b-a22b"
    assert len(found) == 5  # 7 rows of 4096; of 128 the heads: 32 and 8, 64 and 4


def test_patterns_name_models():
    assert [model.name for model in find(["gemma3-1*", "llama3-8b"])] == ["llama3-8b", "gemma3-1b", "gemma3-12b"]
    assert len(find(["qwen3-*"])) == 8
    assert len(find(["*"])) == len(MODELS)
    with pytest.raises(ValueError, match="--model gpt5: no such model; there are llama3-8b"):
        find(["llama3-8b", "gpt5"])


def test_vocabularies_and_heads_are_whole():
    """LCE's kernels take H that is a multiple of 8; a slip of a finger would mostly not be one."""
    for model in MODELS.values():
        assert model.hidden % 128 == 0
        assert model.vocab % 64 == 0
        assert "/" in model.source
        assert all(n % 64 == 0 and rows >= 1 for n, rows in model.norms.values())


def test_shapes_are_read_from_files(tmp_path):
    yaml = tmp_path / "shapes.yaml"
    yaml.write_text("rms_norm: [8x32, {m: 9, n: 33}]\nlinear_cross_entropy:\n  - {m: 1, h: 2, v: 3}\n")
    assert list(shapes.wanted(RMS, [], [], [str(yaml)])) == [(8, 32), (9, 33)]
    assert list(shapes.wanted(LCE, [], [], [str(yaml)])) == [(1, 2, 3)]
    plain = tmp_path / "plain.yml"
    plain.write_text("- 8x32\n- 9x32\n")
    table = tmp_path / "shapes.csv"
    table.write_text("name, n, m\nfirst, 32, 10\nsecond, 33, 11\n")
    found = shapes.wanted(RMS, [], [], [str(plain), "8x32,12x32", str(table)])
    assert list(found) == [(8, 32), (9, 32), (12, 32), (10, 32), (11, 33)]
    assert set(found.values()) == {""}


@pytest.mark.parametrize(
    "name, text, says",
    [
        ("a.yaml", "other: [8x32]", "has no rms_norm; it has other"),
        ("a.yaml", "[8x32, 8x]", r"entry 2: '8x' is no shape of rms_norm; expected MxN such as 8192x4096"),
        ("a.yaml", "[{m: 8, k: 32}]", "entry 1: "),
        ("a.yaml", "[8x0]", "entry 1: '8x0' is no shape"),
        ("a.yaml", "", "expected a list of shapes"),
        ("a.yaml", "{[", "not YAML"),
        ("a.csv", "m,h\n1,2\n", "has no column n; it has m, h, expected m, n"),
        ("a.csv", "m,n\n1,2\n3,x\n", r"a.csv:3: "),
        ("a.csv", "", "has no column m, n; it has none"),
    ],
)
def test_files_that_make_no_sense_are_told(tmp_path, name, text, says):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ValueError, match=says):
        shapes.wanted(RMS, [], [], [str(path)])


def test_shapes_that_make_no_sense_are_told():
    with pytest.raises(ValueError, match="--shapes: '8x32x64' is no shape of rms_norm; expected MxN such as"):
        shapes.wanted(RMS, [], [], ["8x32x64"])
    with pytest.raises(ValueError, match=r"--shapes nothing\.yaml: No such file"):
        shapes.wanted(RMS, [], [], ["nothing.yaml"])
    with pytest.raises(
        ValueError, match=r"'99999999999999999999x8' is no shape of rms_norm; expected sizes below 2\*\*31"
    ):
        shapes.wanted(RMS, [], [], ["99999999999999999999x8"])
    with pytest.raises(ValueError, match=r"--tokens 9999999999: llama3-8b is 9999999999x4096; expected sizes below"):
        shapes.wanted(RMS, ["llama3-8b"], [9999999999], [])


def test_without_a_gpu_shapes_are_small():
    assert shapes.small(RMS, [(8192, 4096), (16384, 4096), (9, 32)]) == {(64, 1024): "", (9, 32): ""}
    assert list(shapes.small(LCE, [(8192, 4096, 128256)])) == [LCE.small]


# Rows ----------------------------------------------------------------------------------------------------------------


def test_a_row_has_the_columns_of_the_schema():
    cell = Cell("linear_cross_entropy", (8, 32, 90), "bfloat16", "forward+backward")
    found = Measured(
        times=Times(2000.0, 1900.0, 2100.0),
        roof=Times(1000.0, 990.0, 1010.0),
        peak_bytes=3_000_000,
        standing_bytes=40_000,
        first_s=1.5,
        compiles=2,
        launches=9,
        deterministic=True,
        errors={"err_loss": 1e-6, "err_dx": 2e-3, "err_dw": 3e-3},
    )
    assert Measured.from_dict(dataclasses.asdict(found)) == found
    job = Job(cell, ("quackish",), {"models": "llama3-8b"})
    row = schema.row_of(job, "quackish", found, tuple(schema.COLUMNS), 10)
    assert schema.COLUMNS.keys() >= row.keys()
    assert (row["shape"], row["role"], row["status"], row["note"]) == ("8x32x90", "ours", "ok", "")
    assert (row["median_ms"], row["p20_ms"], row["p80_ms"], row["roof_ms"]) == (2.0, 1.9, 2.1, 1.0)
    assert (row["pct_of_roof"], row["peak_mb"], row["standing_mb"]) == (50.0, 3.0, 0.04)
    assert (row["err_dweight"], row["launches"]) == (3e-3, 9)
    assert schema.cell_of({key: str(value) for key, value in row.items()}) == cell
    failed = schema.row_of(job, "quack", Measured(status="RuntimeError: no"), tuple(schema.COLUMNS))
    assert (failed["role"], failed["status"], failed.get("median_ms")) == ("peer", "RuntimeError: no", None)


@pytest.mark.parametrize("error, note", [(0.09, ""), (0.11, "wrong: err_y 0.11"), (float("nan"), "wrong: err_y nan")])
def test_what_is_wrong_is_said_to_be(error, note):
    cell = Cell("rms_norm", (8, 32), "bfloat16", "forward")
    row = schema.row_of(Job(cell, ()), "torch", Measured(errors={"err_y": error}), ("note",))
    assert row["note"] == note


def test_every_row_has_a_role():
    cell = Cell("linear_cross_entropy", (8, 32, 90), "bfloat16", "forward+backward")
    roles = {name: schema.role_of(cell, name) for name in ("quackish", "quackish-stored", AGAIN, "quack", "mine")}
    assert list(roles.values()) == ["ours", "ours", "again", "peer", "own"]
    assert (schema.role_of(cell, "three-gemms"), schema.role_of(cell, "gemm-dx")) == ("roof", "part")
    assert not is_ours("quack")


def test_the_schema_is_documented():
    """Each column, in its order, with what it means: others read these files."""
    text = (Path(__file__).parents[1] / "benchmarks" / "README.md").read_text()
    lines = [f"| `{name}` | {meaning} |" for name, meaning in schema.COLUMNS.items()]
    assert "\n".join(lines) in text
    assert f"schema {schema.SCHEMA}" in text


def test_shapes_have_names():
    assert parse_shape(shape_name((8, 32, 90))) == (8, 32, 90)
    for text in ("8x", "x", "8,9", "0x4", "-1x4"):
        with pytest.raises(ValueError):
            parse_shape(text)
