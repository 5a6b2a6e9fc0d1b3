"""The benchmark of linear cross entropy on tiny shapes and on made-up results: what it writes and how it judges."""

import math
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

pytest.importorskip("rich")
ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # benchmarks/ is no part of the package

from benchmarks import bars_linear_cross_entropy as bars  # noqa: E402
from benchmarks import linear_cross_entropy  # noqa: E402
from benchmarks import report_linear_cross_entropy as report  # noqa: E402
from benchmarks.results_linear_cross_entropy import Results  # noqa: E402
from quackish.bench import host, memory, providers_linear_cross_entropy  # noqa: E402
from quackish.bench.files import read_csv  # noqa: E402
from quackish.bench.measure_linear_cross_entropy import NONE_IGNORED  # noqa: E402
from quackish.bench.measured import A_LAUNCH, AGAIN  # noqa: E402
from quackish.bench.providers_linear_cross_entropy import IGNORED, load  # noqa: E402
from quackish.bench.truth_linear_cross_entropy import (  # noqa: E402
    CONFIDENCE,
    Data,
    Truth,
    dlogits_of,
    is_deterministic,
)
from quackish.launch import compile as compiling  # noqa: E402
from quackish.testing.timing import take_turns  # noqa: E402

CPU = torch.device("cpu")
TINY = ["--shapes", "24x32x90", "--repeats", "2", "--backend", "auto"]


@pytest.fixture(autouse=True)
def one_thread():
    """Many threads on a busy machine make small work slow, by far."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def provide(monkeypatch):
    """Puts one more peer beside the others, last."""

    def put(name: str, make) -> None:
        monkeypatch.setitem(providers_linear_cross_entropy.PEERS, name, make)
        names = (*linear_cross_entropy.PROVIDERS, name)
        monkeypatch.setattr(linear_cross_entropy, "PROVIDERS", names)

    yield put
    load.cache_clear()


def run(tmp_path: Path, *more: str) -> list[dict[str, str]]:
    return read_csv(linear_cross_entropy.main([*TINY, "--out", str(tmp_path), *more]))


# Timing --------------------------------------------------------------------------------------------------------------


def test_every_work_has_its_turn_and_slow_ones_fewer(monkeypatch):
    clock = {"now": 0.0, "a": 0, "slow": 0}
    monkeypatch.setattr("time.perf_counter", lambda: clock["now"])

    def work(name, seconds):
        def call():
            clock["now"] += seconds
            clock[name] += 1

        return call

    times = take_turns({"a": work("a", 0.01), "slow": work("slow", 1.0)}, CPU, repeats=10, seconds=0.5, least=3)
    assert (clock["a"], clock["slow"]) == (10, 3)
    assert times["slow"].median == pytest.approx(1e6)


def test_a_work_that_fails_is_told_and_left_out():
    told = []

    def fail():
        raise RuntimeError("no")

    times = take_turns({"good": int, "bad": fail}, CPU, 3, on_error=lambda name, error: told.append((name, str(error))))
    assert (list(times), told) == (["good"], [("bad", "no")])
    with pytest.raises(RuntimeError, match="no"):
        take_turns({"bad": fail}, CPU)


# Data and truth ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("elements", [1, 500, 1 << 20], ids=["row by row", "with a rest", "at once"])
@pytest.mark.parametrize("ignored", [0.0, 0.5])
def test_errors_are_relative_to_fp64(monkeypatch, elements, ignored):
    monkeypatch.setattr("quackish.bench.truth_linear_cross_entropy.CHUNK_ELEMENTS", elements)
    monkeypatch.setattr("quackish.bench.truth_linear_cross_entropy.ROWS", 5)
    monkeypatch.setattr("quackish.bench.truth_linear_cross_entropy.CLASSES", 7)
    data = Data.make(23, 16, 50, "normal", ignored, CPU)
    truth = Truth(data)
    x, w = (t.detach().double().requires_grad_() for t in (data.x, data.w))
    loss = torch.nn.functional.cross_entropy(x @ w.T, data.target)
    loss.backward()
    assert max(truth.errors(loss, x.grad, w.grad).values()) < 1e-12
    wrong = truth.errors(loss * 2, x.grad * 1.5, w.grad * 0.5)
    assert wrong == pytest.approx({"err_loss": 1.0, "err_dx": 0.5, "err_dw": 0.5})
    assert math.isnan(truth.errors(loss, x.grad * math.nan, w.grad)["err_dx"])
    # the dlogits of the bare GEMMs are those of the same loss
    dlogits = dlogits_of(data)
    dw = dlogits.double().T @ data.x.detach().double()
    assert float((dw - w.grad).norm() / w.grad.norm()) < 0.02
    assert dlogits[data.target == IGNORED].abs().sum() == 0


def test_confident_rows_are_as_confident_as_they_say():
    data = Data.make(300, 512, 4000, "confident", 0.0, CPU)
    logits = data.x.detach().float() @ data.w.detach().float().T
    p = torch.softmax(logits, 1).gather(1, data.target[:, None]).squeeze(1)
    for i, wanted in enumerate(CONFIDENCE):
        assert float(1 - p[i::3].median()) == pytest.approx(1 - wanted, rel=0.5)


def test_ignored_rows_are_a_share_of_all():
    data = Data.make(50, 8, 20, "normal", 0.8, CPU)
    assert int((data.target == IGNORED).sum()) == 40
    assert int((data.all_targets == IGNORED).sum()) == 0


@pytest.mark.parametrize("what", ["loss", "x", "w"])
def test_bytes_that_differ_are_noticed(what):
    data = Data.make(4, 8, 20, "normal", 0.0, CPU)
    calls = []

    def work():
        calls.append(1)
        late = torch.tensor(-0.0 if len(calls) == 3 else 0.0)  # equal as numbers
        data.x.grad, data.w.grad = torch.zeros_like(data.x), torch.zeros_like(data.w)
        if what != "loss":
            getattr(data, what).grad[0, 0] = late
        return late if what == "loss" else torch.tensor(1.0)

    assert is_deterministic(work, data, 2)
    calls.clear()
    assert not is_deterministic(work, data, 3)


# A run ---------------------------------------------------------------------------------------------------------------


def test_a_run_writes_rows_and_page(tmp_path, capsys):
    rows = run(tmp_path, "--providers", "quackish*,torch", "--chunk-sizes", "8", "--commit", "abc-dirty")
    assert tuple(rows[0]) == linear_cross_entropy.FIELDS
    schedules = [f"quackish-{s}" for s in ("stored", "chunked", "recompute")]
    schedules += [f"quackish-chunked-{rows}" for rows in (1024, 2048, 4096, 8192)]
    schedules += [f"quackish-recompute-{rows}" for rows in (16384, 4096, 128)]
    gemms = ["three-gemms", "gemm-logits", "gemm-dx", "gemm-dw"]
    expected = ["quackish-chunked-8", "quackish", *schedules, "torch", AGAIN, *gemms]
    assert [row["provider"] for row in rows] == expected
    for row in rows:
        assert (row["commit"], row["dirty"], row["status"], row["mode"]) == ("abc", "True", "ok", "train")
        assert float(row["p20_ms"]) <= float(row["median_ms"]) <= float(row["p80_ms"])
        assert float(row["of_roof"]) == pytest.approx(float(row["median_ms"]) / float(row["roof_ms"]), 1e-4)
    assert all(float(row[error]) < 0.01 for row in rows[:6] for error in ("err_loss", "err_dx", "err_dw"))
    page = (tmp_path / "linear_cross_entropy.md").read_text()
    assert "| **quackish-chunked-8** |" in page
    assert "commit abc and local changes" in page
    if not torch.cuda.is_available():
        assert "No GPU" in capsys.readouterr().out


def test_rows_are_appended_and_the_newer_ones_count(tmp_path):
    first = run(tmp_path, "--providers", "torch", "--no-errors")
    assert not any(row["err_dx"] for row in first)
    both = run(tmp_path, "--providers", "torch", "--append", "--mode", "loss")
    assert both[: len(first)] == first
    assert {row["provider"] for row in both[len(first) :]} == {"torch", "gemm-logits"}
    again = run(tmp_path, "--providers", "torch", "--append")
    results = Results(again)
    assert len(results.cases) == 2
    assert results.value(results.train((24, 32, 90)), "torch", "err_dx") is not None
    (tmp_path / "linear_cross_entropy.csv").write_text("m,n\n1,2\n")
    with pytest.raises(ValueError, match="its columns are m, n; expected"):
        run(tmp_path, "--append")


def test_ignored_rows_are_timed_beside_none_ignored(tmp_path):
    rows = {row["provider"]: row for row in run(tmp_path, "--providers", "quackish,torch", "--ignored", "0.8")}
    assert rows.keys() == {"quackish", "torch", AGAIN, NONE_IGNORED}
    assert rows["quackish"]["roof_ms"] == rows[NONE_IGNORED]["median_ms"]


def test_a_launch_is_the_slowest_of_a_step(monkeypatch):
    """By its median over steps in a row, whichever of their launches it is."""
    now = [0.0]
    monkeypatch.setattr(host.time, "perf_counter", lambda: now[0])

    def launch_of(us):
        def function():
            now[0] += us / 1e6

        return compiling._counted(function, None, None, None)

    launches = [launch_of(us) for us in (3, 7, 5)]

    def step():
        now[0] += 1.0  # what is not a launch's
        for one in launches:
            one()

    times = host.launch_times(step, torch.device("cpu"), repeats=3, calls=4)
    assert times.median == pytest.approx(7)
    assert host.launch_times(lambda: None, torch.device("cpu"), repeats=3) is None


def test_host_time_runs(tmp_path):
    rows = run(tmp_path, "--providers", "quackish,torch,bare-function", "--mode", "host")
    assert [(row["provider"], row["mode"], row["status"]) for row in rows] == [
        ("quackish", "host", "ok"),
        ("torch", "host", "ok"),
        ("bare-function", "host", "ok"),
    ]
    assert "Host time" in (tmp_path / "linear_cross_entropy.md").read_text()


@pytest.fixture
def allocator(monkeypatch):
    """Counts what tests say is allocated, in place of CUDA's."""

    class Allocator:
        now = peak = 0

        def allocate(self, size: int) -> None:
            self.now += size
            self.peak = max(self.peak, self.now)

        def reset_peak(self) -> None:
            self.peak = self.now

    made = Allocator()
    monkeypatch.setattr(memory, "_standing", Counter())
    monkeypatch.setattr(memory, "_counts", lambda device: True)
    monkeypatch.setattr(memory, "_allocated", lambda device: made.now)
    monkeypatch.setattr(memory, "_reset_peak", lambda device: made.reset_peak())
    monkeypatch.setattr(memory, "_peak", lambda device: made.peak)
    return made


def test_standing_memory_is_charged_to_each_provider_of_the_library_that_holds_it(tmp_path, provide, allocator):
    mb, kept = 1_000_000, []

    def provider(library, tickets, needs, fails=False):
        def call(x, w, target):
            if library not in kept:
                kept.append(library)
                allocator.allocate(tickets * mb)
            allocator.allocate(needs * mb)
            allocator.allocate(-needs * mb)
            if fails:
                raise RuntimeError("no")
            return load("torch")(x, w, target)

        return lambda: call

    provide("one", provider("one", 40, 10))
    provide("one-more", provider("one", 40, 3))
    provide("two-broken", provider("two", 100, 1, fails=True))
    provide("two", provider("two", 100, 2))
    provide("three", provider("three", 0, 5))
    names = "one,one-more,two-broken,two,three"
    rows = run(tmp_path, "--shapes", "24x32x90,24x32x91", "--providers", names)
    found = [(r["provider"], r["peak_gb"], r["standing_mb"]) for r in rows if r["peak_gb"]]
    of_a_shape = [
        *(("one", "0.05", "40.0"), ("one-more", "0.043", "40.0")),
        *(("two", "0.102", "100.0"), ("three", "0.005", "0.0")),
    ]
    assert found == of_a_shape * 2


@pytest.mark.gpu
def test_the_peak_is_the_same_whoever_was_measured_before(tmp_path):
    args = ["--shapes", "512x512x4096", "--backend", "auto", "--repeats", "1", "--no-errors"]
    found = []
    for providers in ("quackish-chunked,torch", "quackish-chunked", "quackish-chunked,quackish-recompute"):
        path = linear_cross_entropy.main([*args, "--providers", providers, "--out", str(tmp_path)])
        found.append({row["provider"]: row["peak_gb"] for row in read_csv(path) if row["peak_gb"]})
    assert found[0]["quackish-chunked"] == found[1]["quackish-chunked"] == found[2]["quackish-chunked"]
    gradients = 2 * (512 + 4096) * 512 / 1e9
    assert float(found[0]["torch"]) - gradients < 0.02  # logits; a workspace of cuBLAS's would be 0.033 on top


def test_providers_that_are_missing_or_crash_are_named_and_the_run_goes_on(tmp_path, provide, capsys):
    def missing():
        raise ImportError("no module of that name")

    calls = []

    def late(x, w, target):
        calls.append(1)
        if len(calls) > 2:
            raise torch.cuda.OutOfMemoryError("no memory\nat length")
        return load("torch")(x, w, target)

    provide("missing", missing)
    provide("late", lambda: late)
    rows = run(tmp_path, "--providers", "missing,late,torch")
    status = {row["provider"]: row["status"] for row in rows}
    assert status.pop("missing") == "ImportError: no module of that name"
    assert status.pop("late") == "OutOfMemoryError: no memory"
    assert set(status.values()) == {"ok"}
    assert "torch" in status
    assert len(rows) == len(status) + 2
    assert "missing: ImportError: no module of that name" in capsys.readouterr().out
    assert (
        "- late, forward + backward, M 24, H 32, V 90: OutOfMemoryError: no memory"
        in (tmp_path / "linear_cross_entropy.md").read_text()
    )


def test_a_run_that_is_cut_short_keeps_its_cases(tmp_path, provide):
    def stop(x, w, target):
        if x.shape[0] == 9:
            raise KeyboardInterrupt
        return load("torch")(x, w, target)

    provide("stop", lambda: stop)
    args = ["--shapes", "8x32x90,9x32x90", "--providers", "stop", "--repeats", "1", "--out", str(tmp_path)]
    with pytest.raises(KeyboardInterrupt):
        linear_cross_entropy.main(args)
    assert {row["m"] for row in read_csv(tmp_path / "linear_cross_entropy.csv")} == {"8"}
    assert (tmp_path / "linear_cross_entropy.md").exists()


def test_a_provider_that_nobody_knows_is_refused(capsys):
    with pytest.raises(SystemExit):
        linear_cross_entropy.main(["--providers", "quakish"])
    assert "no provider is named quakish" in capsys.readouterr().err


@pytest.mark.gpu
def test_a_case_on_the_gpu_has_times_memory_and_errors(tmp_path):
    args = ["--shapes", "512x512x4096", "--providers", "quackish*,torch", "--backend", "auto", "--repeats", "3"]
    rows = read_csv(linear_cross_entropy.main([*args, "--out", str(tmp_path)]))
    gradients = 2 * (512 + 4096) * 512 / 1e9
    for row in rows:
        assert row["status"] == "ok"
        assert float(row["median_ms"]) > 0
        if row["peak_gb"]:
            assert float(row["peak_gb"]) >= gradients
            assert max(float(row[error]) for error in ("err_loss", "err_dx", "err_dw")) < 0.02


# Verdicts and figures ------------------------------------------------------------------------------------------------


def made_up(cases: dict[tuple, dict[str, tuple]]) -> Results:
    """Results from {(mode, m, h, v, data, ignored): {provider: (ms, GB, errors of dX and dW)}}; ms None has failed."""
    rows = []
    for (mode, m, h, v, data, ignored), providers in cases.items():
        for name, (ms, gb, error) in providers.items():
            row = dict.fromkeys(linear_cross_entropy.FIELDS, "")
            row |= dict(gpu="H200", mode=mode, m=m, h=h, v=v, data=data, ignored=ignored, provider=name)
            row |= dict(status="ok" if ms else "RuntimeError: no", median_ms=ms, p20_ms=ms, p80_ms=ms, peak_gb=gb)
            row |= dict(err_dx=error, err_dw=error)
            rows.append({key: "" if value is None else str(value) for key, value in row.items()})
    return Results(rows)


def headline(**times) -> dict[tuple, dict[str, tuple]]:
    """The headline shape; three GEMMs take 40 ms."""
    providers = {name.replace("_", "-"): (*point, 0.01)[:3] for name, point in times.items()}
    return {("train", *bars.HEADLINE, "normal", 0.0): {"three-gemms": (40.0, None, None), **providers}}


def words(results: Results) -> dict[str, str]:
    """{what a verdict is about: PASS or FAIL and the text}"""
    lines = bars.verdicts(results)
    return {text.split(": ")[0] + ": " + text.split(": ")[1]: f"{word} {text}" for word, text in lines}


SHAPE = "8192 x 4096 x 128256"


def test_bars_of_the_headline_shape():
    good = dict(quackish_stored=(40.0, 3.2), quackish_chunked=(40.8, 3.0), quackish_recompute=(54.4, 1.30))
    said = words(made_up(headline(**good, quack=(41.0, 4.3), cce=(95.0, 1.12), torch=(43.0, 6.3))))
    kept = {about for about, text in said.items() if text.startswith("PASS")}
    assert {f"{SHAPE} {schedule}: time / 3 GEMMs" for schedule in bars.HEADLINE_BARS} <= kept
    assert {f"{SHAPE} {schedule}: peak above inputs" for schedule in ("chunked", "recompute")} <= kept
    # nothing of ours is as small as cce, which is slower than all of it
    text = said[f"{SHAPE}: time against memory"]
    assert text.startswith("FAIL")
    assert text.endswith("2 of 3 peers' points dominated by one of ours; not cce (95 ms, 1.1200 GB)")
    for schedule in bars.HEADLINE_BARS:
        text = said[f"{SHAPE} {schedule}: faster than every peer that uses no more memory"]
        assert text.startswith("PASS")
        assert "cce 95.000 ms" in text
        assert text.endswith("of 1")

    bad = dict(quackish_stored=(40.1, 3.2), quackish_chunked=(40.9, 3.1), quackish_recompute=(54.5, 1.31))
    said = words(made_up(headline(**bad, quack=(40.8, 3.1))))
    for schedule in ("stored", "chunked", "recompute"):
        assert said[f"{SHAPE} {schedule}: time / 3 GEMMs"].startswith("FAIL")
    for schedule in ("chunked", "recompute"):
        assert said[f"{SHAPE} {schedule}: peak above inputs"].startswith("FAIL")
    assert said[f"{SHAPE} chunked: faster than every peer that uses no more memory"].startswith("FAIL")


def test_no_peer_that_is_not_dominated_is_hidden():
    """At the headline shape, on confident data and with 65536 rows: in the verdict and under the table."""
    shapes = [(*shape, data) for shape, data in bars.AGAINST_MEMORY]
    assert shapes == [
        (8192, 4096, 128256, "normal"),
        (8192, 4096, 128256, "confident"),
        (65536, 4096, 128256, "normal"),
    ]
    ours = {"quackish": (300.0, 7.08, 0.01), "quackish-recompute": (400.0, 2.5, 0.01)}
    peers = {"quack-base": (319.4, 4.74, 0.01), "liger": (310.0, 2.11, math.nan), "torch": (339.0, 50.4, 0.01)}
    for shape in shapes:
        result = made_up({("train", *shape, 0.0): {**ours, **peers}})
        listed = "quack-base (319.4 ms, 4.7400 GB), liger (310 ms, 2.1100 GB, wrong results)"
        (text,) = [f"{word} {text}" for word, text in bars.verdicts(result) if "time against memory" in text]
        assert text.startswith("FAIL")
        assert text.endswith(f"1 of 3 peers' points dominated by one of ours; not {listed}")
        assert f"Not dominated by a point of quackish: {listed}." in report.markdown(result)
        fast = made_up({("train", *shape, 0.0): {**peers, "quackish": (300.0, 2.11, 0.01)}})
        assert "Every peer's point is dominated by one of quackish." in report.markdown(fast)
    other = made_up({("train", 16384, 4096, 128256, "normal", 0.8): {**ours, **peers}})
    assert f"Not dominated by a point of quackish: {listed}." in report.markdown(other)


def test_a_peer_that_failed_is_said_to_be_with_its_setting():
    page = report.markdown(made_up({("train", *bars.HEADLINE, "normal", 0.0): {"quack": (None, None, None)}}))
    assert "- quack (QuACK's default: chunks of 4096 rows, with" in page
    assert "), forward + backward, M 8192, H 4096, V 128256: RuntimeError: no" in page


def test_every_peer_of_a_case_is_known_and_described():
    for case in (*linear_cross_entropy.BARS, *linear_cross_entropy.SWEEP, linear_cross_entropy.HOST_CASE):
        assert set(case.providers) <= set(linear_cross_entropy.PROVIDERS), str(case)
    described = providers_linear_cross_entropy.ABOUT
    for name in providers_linear_cross_entropy.PEERS:
        assert name in described or name.rpartition("-")[0] in described


def test_one_shape_of_the_bars_alone(monkeypatch, capsys):
    args = linear_cross_entropy.arguments().parse_args(["--only", "8192x4096x128256,65536x4096x128256"])
    cases = linear_cross_entropy.cases_of(args, torch.device("cuda"))
    assert [str(case) for case in cases] == [
        f"{SHAPE}{more}" for more in ("", " loss", " 80% ignored", " confident")
    ] + ["65536 x 4096 x 128256"]
    assert "quack-base-2048" in cases[-1].providers
    with pytest.raises(SystemExit):
        linear_cross_entropy.main(["--only", "7x8x9"])
    assert "--only 7x8x9: none of the shapes that are measured" in capsys.readouterr().err


def test_a_schedule_that_failed_has_failed_and_a_peer_that_failed_is_left_out():
    said = words(made_up(headline(quackish_stored=(None, None), quack=(None, None))))
    assert said[f"{SHAPE} stored: time / 3 GEMMs"].startswith("FAIL")
    assert len(said) == 1


@pytest.mark.parametrize("ms, quack, word", [(40.8, 41.0, "PASS"), (40.9, 41.0, "FAIL"), (40.8, 40.8, "FAIL")])
def test_other_shapes_are_judged_by_auto(ms, quack, word):
    shape = ("train", *bars.SHAPES[0], "normal", 0.0)
    providers = {"three-gemms": (40.0, 0, 0), "quackish": (ms, 1, 0.01), "quack": (quack, 1, 0.01)}
    found = {text.split(" ")[0] for text in words(made_up({shape: providers})).values()}
    assert (found == {"PASS"}) == (word == "PASS")


def test_loss_only_ignored_rows_errors_and_host():
    m, h, v = bars.HEADLINE

    def judge(loss, ignored, error, confident, host, launch):
        def pair(ours, torch):
            return {"quackish": (1.0, 1, ours), "torch": (1.0, 1, torch)}

        return words(
            made_up(
                {
                    ("loss", m, h, v, "normal", 0.0): {"gemm-logits": (10.0, 0, None), "quackish": (loss, 0, None)},
                    ("train", m, h, v, "normal", 0.8): {"quackish": (ignored, 1, None), NONE_IGNORED: (1, 1, 0)},
                    ("train", m, h, v, "normal", 0.0): pair(error, 0.01),
                    ("train", m, h, v, "confident", 0.0): pair(confident, 0.01),
                    ("host", 128, 512, 1024, "normal", 0.0): {
                        "quackish": (host, 0, None),
                        A_LAUNCH: (launch, 0, None),
                    },
                }
            )
        ).values()

    good = judge(10.3, 0.35, 0.01, 0.005, 0.150, 0.015)
    bad = judge(10.4, 0.36, 0.011, 0.0051, 0.151, 0.0151)
    assert (len(good), {text[:4] for text in good if "dominated" not in text}) == (len(bad), {"PASS"})
    assert {text[:4] for text in bad if "dominated" not in text} == {"FAIL"}
    assert len(good) == 10
    assert "FAIL" in " ".join(judge(10, 0.3, math.nan, 0.001, 0.1, 0.01))


def test_figures_are_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    cases = headline(quackish_chunked=(40.8, 3.0), quack=(41.0, 4.3), cce=(95.0, 1.12))
    cases[("train", *bars.HEADLINE, "confident", 0.0)] = cases[("train", *bars.HEADLINE, "normal", 0.0)]
    for m, v in ((1024, 128256), (65536, 128256), (8192, 32000)):
        cases[("train", m, 4096, v, "normal", 0.0)] = {"quackish": (m / 200, 2.0, None), "cce": (m / 80, 1.2, None)}
    results = made_up(cases)
    for case in results.cases.values():
        for row in case.values():
            row["of_roof"] = "1.1"
    report.figures(results, tmp_path / "lce.csv")
    kinds = ("", "_m65536", "_confident", "_sweep")
    assert {p.name for p in tmp_path.iterdir()} == {f"lce{kind}.{s}" for kind in kinds for s in ("svg", "png")}
