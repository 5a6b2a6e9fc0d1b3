"""benchmarks/first_use.py: its processes and verdicts. Nothing is timed here."""

import pytest

from benchmarks import first_use


def rows(capsys, seconds, **more):
    """Exit status and lines, where each process reports `seconds[measure, whether its cache was filled before]`."""
    asked = []

    def in_a_process(measure, cache=None):
        asked.append((measure, cache))
        filled = (measure, cache) in asked[:-1] and asked.count((measure, cache)) > 1
        return dict(seconds=seconds[measure, filled], note="something", **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(first_use, "_in_a_process", in_a_process)
        status = first_use.main(["--repeats", "3"])
    return status, capsys.readouterr().out.splitlines()[2:], asked


FAST = {("import", False): 0.1, ("import", True): 0.1}
FAST |= {(op, filled): 0.05 for op in ("rms_norm", "linear_cross_entropy") for filled in (False, True)}


def test_all_bars_met(capsys):
    status, lines, asked = rows(capsys, FAST)
    assert status == 0
    assert [line.split()[:2] for line in lines[1:]] == [
        [op, cache] for op in ("rms_norm", "linear_cross_entropy") for cache in ("cold", "warm")
    ]
    assert all("PASS" in line for line in lines)
    caches = [cache for measure, cache in asked if measure == "rms_norm"]
    assert len(caches) == 6  # three cold ones, each with an empty cache; three more with the last one's
    assert len(set(caches)) == 3
    assert set(caches[2:]) == {caches[2]}


@pytest.mark.parametrize("missed", [("import", True), ("rms_norm", True), ("linear_cross_entropy", False)])
def test_a_bar_missed(capsys, missed):
    slow = {measure: 9.0 for measure in FAST if measure[0] == missed[0]}
    status, lines, _ = rows(capsys, FAST | slow)
    assert status == 1
    for line in lines:
        assert ("FAIL" in line) == (missed[0] in line)


def test_an_import_that_initializes_cuda(capsys):
    status, lines, _ = rows(capsys, FAST, cuda_initialized=True)
    assert status == 1
    assert "FAIL" in lines[0]


@pytest.mark.exhaustive
def test_first_call_in_a_process(tmp_path):
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
    cold = first_use._in_a_process("rms_norm", str(tmp_path / "cache"))
    warm = first_use._in_a_process("rms_norm", str(tmp_path / "cache"))
    assert cold["note"].startswith("2 compiled, 0 loaded")
    assert warm["note"].startswith("0 compiled, 2 loaded")
