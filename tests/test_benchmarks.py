"""The benchmarks on tiny shapes: what they write, how they judge, and that nothing they meet ends a run early."""

import math
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

pytest.importorskip("rich")
ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # benchmarks/ is no part of the package

from benchmarks import host_overhead, report_rms_norm, rms_norm  # noqa: E402
from quackish.bench import measure_rms_norm, memory, providers_rms_norm  # noqa: E402
from quackish.bench.files import read_csv  # noqa: E402
from quackish.bench.providers_rms_norm import Provider  # noqa: E402
from quackish.bench.truth_rms_norm import backward_errors, forward_errors, is_deterministic  # noqa: E402
from quackish.testing.timing import Times, Work, interleave, prepare  # noqa: E402

CPU = torch.device("cpu")
TINY = ["--m", "4", "9", "--n", "32", "--rounds", "1", "--providers", "quackish"]


@pytest.fixture(autouse=True)
def one_thread():
    """Many threads on a busy machine make small work slow, by far."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def provide(monkeypatch):
    """Puts one more provider beside the others."""

    def put(provider: Provider) -> None:
        monkeypatch.setitem(providers_rms_norm.PROVIDERS, provider.name, lambda: provider)

    return put


def quackish() -> Provider:
    return providers_rms_norm.PROVIDERS["quackish"]()


# Timing --------------------------------------------------------------------------------------------------------------


def test_times_are_median_and_percentiles():
    assert Times.of(list(map(float, range(11)))) == Times(median=5.0, p20=2.0, p80=8.0)
    assert Times.of([7.0]) == Times(7.0, 7.0, 7.0)


def test_competitors_take_turns():
    order = []
    times = interleave({name: lambda name=name: order.append(name) for name in "ABC"}, CPU, rounds=2, block=2)
    assert "".join(order) == 3 * "AABBCC"  # the first round is thrown away
    assert times.keys() == set("ABC")


@pytest.mark.gpu
def test_a_graph_is_captured_and_repeats_into_its_outputs():
    device = torch.device("cuda", 0)
    x = torch.ones(1000, device=device)
    work = prepare(lambda: (x + 1,), device)
    assert work.is_graph
    x += 1
    work.run()
    assert work.outputs[0].eq(3).all()


@pytest.mark.gpu
def test_what_cannot_be_captured_is_launched_plainly():
    def fn():
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("not while capturing")
        return (torch.ones(3, device="cuda"),)

    work = prepare(fn, torch.device("cuda", 0))
    assert not work.is_graph
    assert work.run()[0].eq(1).all()


# Truth ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 7, 1 << 20], ids=["row by row", "with a rest", "at once"])
def test_errors_are_relative_to_fp64(monkeypatch, rows):
    monkeypatch.setattr("quackish.bench.truth_rms_norm.CHUNK_ELEMENTS", 48 * rows)
    x, dy, weight = torch.randn(23, 48), torch.randn(23, 48), torch.randn(48)
    provider = quackish()
    y, rstd = provider.forward(x, weight)
    dx, dweight = provider.backward(dy, x, weight, rstd)
    good, bad = (dx, dweight), (dx * 1.5, dweight * 0.5)
    assert forward_errors(x, weight, 1e-6, {"good": (y, rstd)})["good"]["err_y"] < 1e-6
    errors = backward_errors(dy, x, weight, 1e-6, {"good": good, "bad": bad})
    assert max(errors["good"].values()) < 1e-6
    assert errors["bad"] == pytest.approx({"err_dx": 0.5, "err_dweight": 0.5})
    nan = torch.full_like(dx, math.nan)
    assert math.isnan(backward_errors(dy, x, weight, 1e-6, {"nan": (nan, dweight)})["nan"]["err_dx"])


def test_bytes_that_differ_are_noticed():
    zeros = iter([0.0, 0.0, -0.0])  # equal as numbers

    def work(values):
        return Work(lambda: (torch.tensor([1.0, next(values)]),), None, is_graph=False)

    assert not is_deterministic(work(zeros))
    assert is_deterministic(work(iter([0.0] * 3)))


# A run ---------------------------------------------------------------------------------------------------------------


def test_a_run_writes_rows_page_and_figure(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path = rms_norm.main([*TINY, "--out", str(tmp_path), "--commit", "abc-dirty"])
    rows = read_csv(path)
    assert tuple(rows[0]) == rms_norm.FIELDS
    assert [(r["op"], r["m"], r["provider"]) for r in rows] == [
        (op, m, name)
        for m in ("4", "9")
        for op, roof in (("fwd", "mul"), ("bwd", "add"))
        for name in ("quackish", "quackish (again)", roof)
    ]
    for row in rows:
        assert (row["commit"], row["dirty"], row["status"]) == ("abc", "True", "ok")
        assert float(row["p20_us"]) <= float(row["median_us"]) <= float(row["p80_us"])
        assert float(row["pct_of_roof"]) == pytest.approx(100 * float(row["roof_us"]) / float(row["median_us"]), 1e-4)
    assert all(
        float(r["err_dx"]) < 0.01 and r["deterministic"] == "True" for r in rows if r["op"] == "bwd" and r["err_dx"]
    )
    assert {p.suffix for p in tmp_path.iterdir()} == {".csv", ".md", ".png", ".svg"}
    assert "| bfloat16 | 9 | 32 |" in path.with_suffix(".md").read_text()
    if not torch.cuda.is_available():
        assert "No GPU" in capsys.readouterr().out


def test_providers_that_are_missing_or_crash_are_named_and_left_out(tmp_path, provide, monkeypatch, capsys):
    def missing():
        raise ImportError("no module of that name")

    def crash(*tensors):
        raise RuntimeError("it broke\nat length")

    monkeypatch.setitem(providers_rms_norm.PROVIDERS, "missing", missing)
    provide(Provider("half", quackish().forward, crash))
    path = rms_norm.main([*TINY, "missing", "half", "--out", str(tmp_path)])
    status = {(r["provider"], r["op"]): r["status"] for r in read_csv(path)}
    assert status["half", "fwd"] == "ok"
    assert status["half", "bwd"] == "RuntimeError: it broke"
    assert status["quackish", "bwd"] == "ok"
    assert "missing" not in {name for name, _ in status}
    assert "without missing: ImportError: no module of that name" in capsys.readouterr().out
    assert "half, bwd, N 32, bfloat16: RuntimeError: it broke" in path.with_suffix(".md").read_text()


def test_a_run_that_is_cut_short_keeps_its_cells(tmp_path, provide):
    def backward(dy, x, weight, rstd):
        if x.shape[0] == 9:
            raise KeyboardInterrupt
        return quackish().backward(dy, x, weight, rstd)

    provide(Provider("slow", None, backward))
    with pytest.raises(KeyboardInterrupt):
        rms_norm.main([*TINY, "slow", "--out", str(tmp_path)])
    assert {row["m"] for row in read_csv(tmp_path / "rms_norm.csv")} == {"4"}
    assert (tmp_path / "rms_norm.md").exists()


def test_standing_memory_is_charged_to_the_library_that_holds_it(tmp_path, provide, monkeypatch):
    """Also where the first call was made for another cell, and although graphs keep their outputs."""
    at, kept = {"now": 0, "peak": 0}, []

    def allocate(size):
        at["now"] += size
        at["peak"] = max(at["peak"], at["now"])

    def backward(dy, x, weight, rstd):
        if not kept:
            kept.append(allocate(4000))
        allocate(500)
        allocate(-500)
        return quackish().backward(dy, x, weight, rstd)

    monkeypatch.setattr(memory, "_standing", Counter())
    monkeypatch.setattr(memory, "_counts", lambda device: True)
    monkeypatch.setattr(memory, "_allocated", lambda device: at["now"])
    monkeypatch.setattr(memory, "_reset_peak", lambda device: at.update(peak=at["now"]))
    monkeypatch.setattr(memory, "_peak", lambda device: at["peak"])
    monkeypatch.setattr(measure_rms_norm, "prepare", lambda call, device: (allocate(70), prepare(call, device))[1])
    provide(Provider("holds", None, backward))
    rows = read_csv(rms_norm.main([*TINY, "holds", "--ops", "bwd", "--out", str(tmp_path)]))
    found = [
        (r["provider"], r["peak_mb"], r["standing_mb"]) for r in rows if r["peak_mb"] and "again" not in r["provider"]
    ]
    assert found == [("quackish", "0.0", "0.0"), ("holds", "0.0045", "0.004")] * 2


def test_a_config_is_forced_by_field():
    assert providers_rms_norm.with_config("num_stages=4").name == "quackish[num_stages=4]"
    with pytest.raises(ValueError, match="no field 'stages'"):
        providers_rms_norm.with_config("stages=4")
    x, weight = torch.randn(4, 32), torch.randn(32)
    dx, dweight = providers_rms_norm.with_config("num_stages=4").backward(x, x, weight, torch.ones(4))
    assert (dx.shape, dweight.shape) == (x.shape, weight.shape)


def test_host_overhead_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(host_overhead, "NORMS", 2)
    monkeypatch.setattr(host_overhead, "M", 4)
    path = host_overhead.main(["--repeats", "2", "--out", str(tmp_path)])
    rows = read_csv(path)
    assert tuple(rows[0]) == host_overhead.FIELDS
    measured = [(r["provider"], r["what"]) for r in rows if r["status"] == "ok"]
    assert measured[:6] == [(name, what) for name in ("torch", "quackish") for what in ("forward", "backward", "both")]
    assert "| quackish |" in path.with_suffix(".md").read_text()


@pytest.mark.gpu
def test_a_cell_on_the_gpu_is_timed_as_graphs(tmp_path):
    path = rms_norm.main([*TINY, "torch", "--out", str(tmp_path)])
    for row in read_csv(path):
        assert row["status"] == "ok"
        if "again" not in row["provider"] and row["provider"] not in ("mul", "add"):
            assert row["deterministic"] == "True"
            assert float(row["peak_mb"]) > 0
            assert max(float(row[name] or 0) for name in ("err_y", "err_dx", "err_dweight")) < 0.01


# Verdicts ------------------------------------------------------------------------------------------------------------


def results(times: dict[int, dict[str, float | None]], op: str = "bwd") -> report_rms_norm.Results:
    """Results of the grid at N 256 from {m: {provider: us}}; the roof takes 100 us, so the bwd bar is 109, fwd 106."""
    rows = []
    for m, cell in times.items():
        for name, us in {**cell, report_rms_norm.ROOFS[op]: 100.0}.items():
            row = {"cells": "grid", "op": op, "dtype": "bfloat16", "m": m, "n": 256, "provider": name, "status": "ok"}
            if us is not None:
                row |= rms_norm._speed(op, rms_norm.Cell("grid", m, 256), Times(us, us, us), 100.0)
            rows.append({key: str(value) for key, value in row.items()})
    return report_rms_norm.Results(rows)


def words(result: report_rms_norm.Results) -> dict[str, str]:
    return {text.split(": ")[1].split(";")[0]: f"{word} {text}" for word, text in report_rms_norm.verdicts(result)}


def test_bars_are_judged_in_every_cell():
    said = words(results({4096: {"quackish": 109.0, "quack": 150.0}, 8192: {"quackish": 109.1, "quack": 109.0}}))
    bar = said["backward <= 1.05 t_add + 4 us"]
    assert bar.startswith("FAIL")
    assert "1 of 2 cells, worst 1.0009 (109.1 us for 109 us) at 8192 x 256" in bar
    assert said["backward no slower than QuACK"].startswith("FAIL")
    mean = math.sqrt(150 / 109 * 109 / 109.1)
    assert f"{mean:.3f}x" in said["backward over QuACK's in the geometric mean"]

    said = words(results({4096: {"quackish": 109.0, "quack": 150.0}}))
    assert all(text.startswith("PASS") for text in said.values())
    assert len(said) == 3


def test_a_bar_missed_by_a_hair_fails_and_both_numbers_are_said():
    """In the verdict and in the table, whose four digits would be the same."""
    result = results({4096: {"quackish": 109.004}, 8192: {"quackish": 109.0}, 16384: {"quackish": 109.002}})
    bar = words(result)["backward <= 1.05 t_add + 4 us"]
    assert bar.startswith("FAIL")
    assert "1 of 3 cells, worst 1.0000 (109.004 us for 109 us) at 4096 x 256 bfloat16" in bar
    assert bar.endswith("missed also in 1.0000 (109.002 us for 109 us) at 16384 x 256 bfloat16")
    table = report_rms_norm._cells_table(result, "bwd", result.keys("grid", "bwd"))
    kept = {line.split(" | ")[1]: line.split(" | ")[4:9] for line in table.splitlines()[2:]}
    assert (kept["4096"][0].split()[0], *kept["4096"][3:]) == ("109.004", "109", "**no**")
    assert kept["8192"][4] == "yes"


def test_the_roofs_are_elementwise_kernels_for_the_same_traffic():
    """Not copy_, which for large tensors is a copy engine's and slower than any kernel."""
    data = measure_rms_norm.Data.make(8, 32, torch.bfloat16, CPU)
    for direction, op, expected in (("forward", "mul", data.x), ("backward", "add", data.x + data.dy)):
        data.out.fill_(0)
        ran = []

        class Watch(torch.utils._python_dispatch.TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None, ran=ran):
                ran.append(str(func))
                return func(*args, **(kwargs or {}))

        with Watch():
            measure_rms_norm._roof(direction, data)()
        assert [name.split(".")[1] for name in ran] == [op]
        assert torch.equal(data.out, expected)


def test_forward_may_be_two_percent_slower_than_quack():
    def verdict(us):
        return words(results({4096: {"quackish": us, "quack": 100.0}}, "fwd"))["forward at most 2 % over QuACK"][:4]

    assert (verdict(102.0), verdict(102.1)) == ("PASS", "FAIL")


def test_a_cell_that_failed_is_lost_and_a_peer_that_failed_is_left_out():
    said = words(results({4096: {"quackish": 50.0, "quack": 100.0}, 8192: {"quackish": None, "quack": 100.0}}))
    assert "1 of 2 cells, worst inf (failed) at 8192" in said["backward <= 1.05 t_add + 4 us"]
    said = words(results({4096: {"quackish": 50.0, "quack": 100.0}, 8192: {"quackish": 50.0, "quack": None}}))
    assert "1 of 1 cells" in said["backward no slower than QuACK"]


def test_noise_is_what_two_measurements_differ_by():
    text = report_rms_norm.noise(results({4096: {"quackish": 100.0, "quackish (again)": 103.0}}))
    assert "3.0% (median), 3.0% (most)" in text
