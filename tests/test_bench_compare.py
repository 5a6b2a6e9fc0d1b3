"""`quackish bench compare` on made-up results: joined rows, regressions, output."""

from pathlib import Path

import pytest

from quackish.__main__ import main
from quackish.bench.cells import shape_name
from quackish.bench.compare import compare, regressions
from quackish.bench.results import COLUMNS, CsvLog, read_rows

FAST = (1.0, 0.99, 1.01)


@pytest.fixture
def write(tmp_path):
    """Writes a CSV of rows ((shape, provider), (median, p20, p80) or a reason) and returns its path."""

    def put(name: str, rows: dict[tuple[str, str], tuple | str], **columns: str) -> Path:
        base = dict.fromkeys(COLUMNS, "") | {"op": "rms_norm", "dtype": "bfloat16", "direction": "forward"}
        log = CsvLog(tmp_path / name, base | {"data": "normal", "ignored": "0.0", "gpu": "H200"} | columns)
        for (shape, provider), times_or_reason in rows.items():
            times = (times_or_reason, "", "", "") if isinstance(times_or_reason, str) else ("ok", *times_or_reason)
            row = dict(zip(("status", "median_ms", "p20_ms", "p80_ms"), times, strict=True))
            log.write([row | {"shape": shape, "provider": provider}])
        return tmp_path / name

    return put


def verdicts(a: Path, b: Path, fail: float = 0.03) -> dict[tuple[str, str], str]:
    return {(shape_name(pair.cell.shape), pair.provider): pair.verdict for pair in compare(a, b, fail)[1]}


def test_slower_means_by_more_than_the_limit_and_the_noise(write):
    a = write("a.csv", {(f"{m}x4", "quackish"): FAST for m in (1, 2, 3, 4, 5, 10)})
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


def test_only_new_failures_are_regressions(write):
    a = write("a.csv", {("1x4", "quackish"): FAST, ("2x4", "quackish"): "no", ("3x4", "quackish"): "no"})
    b = write("b.csv", {("1x4", "quackish"): "it broke", ("2x4", "quackish"): FAST, ("3x4", "quackish"): "no"})
    assert list(verdicts(a, b).values()) == ["fails", "works", "failed before"]
    assert [pair.cell.shape for pair in regressions(compare(a, b, 0.03)[1])] == [(1, 4)]


def test_roofs_are_not_judged_and_the_last_row_counts(write):
    rows = {("1x4", name): FAST for name in ("quackish", "mul", "quackish (again)")}
    a, b = write("a.csv", rows), write("b.csv", dict.fromkeys(rows, (2.0, 2.0, 2.0)))
    assert list(verdicts(a, b).values()) == ["slower", "", ""]
    CsvLog(a, {}, [*read_rows(a), read_rows(b)[0]]).close()
    assert list(verdicts(a, b).values()) == ["", "", ""]


def test_output_and_exit_status(write, wide, capsys):
    a = write("a.csv", {("1x4", "quackish"): FAST, ("1x4", "mul"): FAST, ("2x4", "quack"): FAST})
    rows = {("1x4", "quackish"): (1.1, 1.1, 1.1), ("1x4", "mul"): FAST, ("3x4", "quack"): "no"}
    b = write("b.csv", rows, gpu="B200")
    assert main(["bench", "compare", str(a), str(b)]) == 1
    output = capsys.readouterr().out
    assert "gpu: H200 -> B200" in output
    assert output.partition("\nforward 1x4 bfloat16\n")[2].splitlines()[0].split() == [
        "quackish",
        "1",
        "1.1",
        "1.100",
        "-",
        "slower",
    ]
    assert "in one file only: forward 2x4 bfloat16 quack (before); forward 3x4 bfloat16 quack (after)\n" in output
    assert "1 of 2 rows are slower by more than 3 % and by more than the noise" in output
    assert main(["bench", "compare", str(a), str(b), "--fail", "10%"]) == 0
    assert main(["bench", "compare", str(a), str(b), "--fail", "11"]) == 0


def test_invalid_files(write, tmp_path, capsys):
    a = write("a.csv", {("1x4", "quackish"): FAST})
    (tmp_path / "other.csv").write_text("m,n\n1,2\n")
    (tmp_path / "empty.csv").write_text("")
    write("far.csv", {("1x4", "quackish"): FAST}, op="linear_cross_entropy", shape="1x4x9")
    for name, message in {
        "absent": "no such file",
        "other": "not a results file of quackish: it has no column date",
        "empty": "it has no column date",
        "far": "have no row in common",
    }.items():
        assert main(["bench", "compare", str(a), str(tmp_path / f"{name}.csv")]) == 2
        assert message in capsys.readouterr().err
