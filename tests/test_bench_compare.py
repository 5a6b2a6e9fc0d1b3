"""`python -m quackish bench compare` on made-up results: what is joined, what is a regression, what is told."""

from pathlib import Path

import pytest

for package in ("rich", "matplotlib", "yaml"):
    pytest.importorskip(package)

from quackish.__main__ import main  # noqa: E402
from quackish.bench.cells import shape_name  # noqa: E402
from quackish.bench.compare import compare  # noqa: E402
from quackish.bench.results import COLUMNS, CsvLog, read_rows  # noqa: E402


@pytest.fixture
def write(tmp_path):
    """Writes a CSV of rows ((shape, provider), (median, p20, p80) or a reason) and returns its path."""

    def put(name: str, rows: dict[tuple[str, str], tuple | str], **columns: str) -> Path:
        path = tmp_path / name
        base = dict.fromkeys(COLUMNS, "") | {"schema": "2", "op": "rms_norm", "dtype": "bfloat16"}
        log = CsvLog(path, COLUMNS, base | {"direction": "forward", "gpu": "H200"} | columns)
        for (shape, provider), found in rows.items():
            role = {"quackish": "ours", "mul": "roof", "quackish (again)": "again"}.get(provider, "peer")
            row = {"shape": shape, "provider": provider, "role": role, "status": "ok"}
            if isinstance(found, str):
                log.write([row | {"status": found}])
            else:
                log.write([row | dict(zip(("median_ms", "p20_ms", "p80_ms"), found, strict=True))])
        return path

    return put


def verdicts(a: Path, b: Path, fail: float = 0.03) -> dict[tuple[str, str], str]:
    return {(shape_name(pair.cell.shape), pair.provider): pair.verdict for pair in compare(a, b, fail).both}


def test_slower_is_beyond_the_bar_and_beyond_the_noise(write):
    a = write("a.csv", {(f"{m}x4", "quackish"): (1.0, 0.99, 1.01) for m in (1, 2, 3, 4, 5, 10)})
    b = write(
        "b.csv",
        {
            ("1x4", "quackish"): (1.029, 1.028, 1.03),  # within 3 %
            ("2x4", "quackish"): (1.031, 1.02, 1.04),  # beyond, and p20 above the former p80
            ("3x4", "quackish"): (1.05, 1.005, 1.1),  # beyond, within the noise
            ("4x4", "quackish"): (0.96, 0.95, 0.97),
            ("5x4", "quackish"): (0.96, 0.95, 1.00),
            ("10x4", "quackish"): (1.0, 0.9, 1.1),
        },
    )
    assert list(verdicts(a, b).values()) == ["", "slower", "noise", "faster", "noise", ""]
    assert verdicts(a, b, fail=0.04)["2x4", "quackish"] == ""
    sentence = compare(a, b, 0.03).regressions[0]
    assert sentence.startswith("rms_norm forward 2x4 bfloat16 quackish: 1 -> 1.031 ms, 1.031 times")


def test_failing_now_is_a_regression_and_having_failed_is_none(write):
    a = write("a.csv", {("1x4", "quackish"): (1.0, 1.0, 1.0), ("2x4", "quackish"): "no", ("3x4", "quackish"): "no"})
    b = write("b.csv", {("1x4", "quackish"): "it broke", ("2x4", "quackish"): (1, 1, 1), ("3x4", "quackish"): "no"})
    assert list(verdicts(a, b).values()) == ["fails", "works", "failed before"]
    assert compare(a, b, 0.03).regressions == ["rms_norm forward 1x4 bfloat16 quackish: took 1 ms, now it broke"]


def test_neither_roof_nor_noise_is_judged_and_of_rows_for_the_same_the_last_counts(write):
    rows = {("1x4", name): (1.0, 1.0, 1.0) for name in ("quackish", "mul", "quackish (again)")}
    a, b = write("a.csv", rows), write("b.csv", dict.fromkeys(rows, (2.0, 2.0, 2.0)))
    assert list(verdicts(a, b).values()) == ["slower", "", ""]
    CsvLog(a, COLUMNS, {}, append=True).write([read_rows(b)[0]])
    assert list(verdicts(a, b).values()) == ["", "", ""]


def test_files_of_the_programs_are_compared_too():
    """Also those that were recorded with other columns."""
    path = Path(__file__).parents[1] / "benchmarks/results/H200/linear_cross_entropy.csv"
    both = compare(path, path, 0.03).both
    assert {"confident", "normal"} == {pair.cell.data for pair in both}
    assert len(both) > 80


def test_the_command_prints_and_ends_with_one(write, capsys):
    a = write("a.csv", {("1x4", "quackish"): (1, 1, 1), ("1x4", "mul"): (1, 1, 1), ("2x4", "quack"): (1, 1, 1)})
    b = write(
        "b.csv",
        {("1x4", "quackish"): (1.1, 1.1, 1.1), ("1x4", "mul"): (1.01, 1, 1), ("3x4", "quack"): "no"},
        gpu="B200",
    )
    assert main(["bench", "compare", str(a), str(b)]) == 1
    said = capsys.readouterr().out
    assert "gpu: H200 -> B200" in said
    assert "1.100" in said
    assert "only before: rms_norm forward 2x4 bfloat16 quack\n" in said
    assert "only after: rms_norm forward 3x4 bfloat16 quack\n" in said
    assert "the roofs themselves moved by +1.0 % to +1.0 %" in said
    assert "REGRESSION  rms_norm forward 1x4 bfloat16 quackish: 1 -> 1.1 ms" in said
    assert "1 of 2 rows slower by more than 3 % and beyond the noise" in said
    assert main(["bench", "compare", str(a), str(b), "--fail", "10%"]) == 0
    assert main(["bench", "compare", str(a), str(b), "--fail", "11"]) == 0
    assert main(["bench", "compare", str(a), str(b), "--providers", "q*k"]) == 0


def test_files_that_are_none_of_ours_are_told(write, tmp_path, capsys):
    a = write("a.csv", {("1x4", "quackish"): (1, 1, 1)})
    (tmp_path / "other.csv").write_text("m,n\n1,2\n")
    (tmp_path / "empty.csv").write_text("")
    write("newer.csv", {("1x4", "quackish"): (1, 1, 1)}, schema="3")
    write("far.csv", {("1x4", "quackish"): (1, 1, 1)}, op="linear_cross_entropy", shape="1x4x9")
    for name, says in {
        "absent": "no such file",
        "other": "not a results file of quackish: its columns are m, n",
        "empty": "its columns are none",
        "newer": "its schema is 3, this is 2",
        "far": "have no row in common",
    }.items():
        assert main(["bench", "compare", str(a), str(tmp_path / f"{name}.csv")]) == 2
        assert says in capsys.readouterr().err
