"""The programs of benchmarks/ on tiny shapes and made-up results: files, verdicts, figures."""

import importlib.util
import math
import re
import sys
import types
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import quackish
from benchmarks import (
    attention,
    decoder,
    grouped_mlp,
    harness,
    host_overhead,
    linear_cross_entropy,
    parallel,
    portable,
    rms_norm,
    traces,
)
from benchmarks import linear_divergence as distillation
from benchmarks import targets_linear_cross_entropy as targets
from quackish.bench import processes, report, runner
from quackish.bench.cells import A_LAUNCH, AGAIN, Cell, Job, options_of
from quackish.bench.environment import environment
from quackish.bench.measure import Record, Run, time_columns
from quackish.bench.results import COLUMNS, Results, read_rows, row_of
from quackish.bench.table import BENCHES
from quackish.device import kernel_device
from quackish.ops.linear_cross_entropy import providers as providers_linear_cross_entropy
from quackish.ops.linear_cross_entropy.measure import NONE_IGNORED
from quackish.ops.mlp.measure import group_sizes
from quackish.ops.rms_norm.measure import ROOFS
from quackish.testing.timing import Times

pytest.importorskip("matplotlib")
ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
SHAPE, TRAIN = "8192 x 4096 x 128256", "forward+backward"


@pytest.fixture
def in_this_process(monkeypatch):
    monkeypatch.setattr(runner, "Supervisor", Here)


class Here:
    """A Supervisor that measures in this process on the CPU."""

    def __init__(self, log, commit, timeout, options):
        self.options = options | {"rounds": 2}

    def start(self):
        return environment(CPU, "abc-dirty")

    def measure(self, job, begin):
        events = []
        names = [name for name in job.providers if name in ("quackish", "torch")]
        processes.measure(job.cell, names, events.append, device=CPU, **self.options)
        yield from (record for kind, *record in events if kind == "result")

    def close(self) -> None:
        pass


# A run ---------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU all cells are measured")
def test_norms_write_rows_page_and_figure(tmp_path, in_this_process):
    path = rms_norm.main(["--out", str(tmp_path)])
    assert {p.name for p in tmp_path.iterdir()} == {f"rms_norm.{kind}" for kind in ("csv", "md", "png", "svg")}
    path.with_suffix(".md").unlink()
    assert rms_norm.main(["--out", str(tmp_path), "--report"]) == path
    page = path.with_suffix(".md").read_text()
    for text in ("| 64 x 256 |", "| 64 x 1000 |", "commit abc-dirty", "forward <= 1.05 t_mul", "backward <= 1.05"):
        assert text in page


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU all cells are measured")
def test_losses_write_rows_and_append_steady_ones(tmp_path, in_this_process):
    path = tmp_path / "linear_cross_entropy.csv"
    words = ["--only", "48x64x300", "--out", str(tmp_path)]
    assert linear_cross_entropy.main(words) == path
    names = {"quackish", "torch", AGAIN, "three-gemms", "gemm-logits", "gemm-dx", "gemm-dw"}
    assert {row["provider"] for row in read_rows(path)} == names
    assert "steady" not in path.with_suffix(".md").read_text().partition("## Forward+backward")[2]
    linear_cross_entropy.main([*words, "--steady", "--append"])
    rows = read_rows(path)
    steady = {row["provider"]: row for row in rows if row["direction"] == "steady"}
    assert len(rows) == len(names) + len(steady)
    assert steady.keys() == {"quackish", "torch", AGAIN, "three-gemms"}
    ratio = float(steady["torch"]["median_ms"]) / float(steady["three-gemms"]["median_ms"])
    page = path.with_suffix(".md").read_text()
    assert page.count("\n## ") == 2  # one table, and the peers
    (header,) = (line for line in page.splitlines() if line.startswith("| provider |"))
    (line,) = (line for line in page.splitlines() if line.startswith("| torch |"))
    shown = dict(zip(header.split(" | "), line.split(" | "), strict=True))
    assert float(shown["steady ms"]) == pytest.approx(float(steady["torch"]["median_ms"]), rel=1e-3)
    assert float(shown["steady / 3 GEMMs"]) == pytest.approx(ratio, abs=2e-3)


def test_appending_to_another_file(tmp_path, in_this_process):
    path = tmp_path / "linear_cross_entropy.csv"
    path.write_text("m,n\n1,2\n")
    with pytest.raises(ValueError, match="not a results file of quackish: it has no column date"):
        linear_cross_entropy.main(["--out", str(tmp_path), "--append"])
    assert path.read_text() == "m,n\n1,2\n"


def test_peers_of_cases_are_known_and_described():
    for job in (*linear_cross_entropy.JOBS, *linear_cross_entropy.HOST):
        assert len(set(job.providers)) == len(job.providers)
        assert set(job.providers) <= set(providers_linear_cross_entropy.PROVIDERS), str(job.cell)
    described = providers_linear_cross_entropy.ABOUT
    for name in providers_linear_cross_entropy.PEERS:
        assert name in described or name.rpartition("-")[0] in described


def test_per_token_losses_of_providers(monkeypatch):
    """Liger's Hopper function, a stand-in here, is called as it is declared; providers return the mean of live rows."""

    def apply(
        _input, weight, target, temperature=1.0, ignore_index=-100, m_tiles_per_cluster=1, return_entropy=False,
        selected_token_ids=None,
    ):  # fmt: skip
        assert (temperature, m_tiles_per_cluster, selected_token_ids) == (1.0, 1, None)
        log_p = F.linear(_input, weight).log_softmax(1)
        losses = F.nll_loss(log_p, target, ignore_index=ignore_index, reduction="none")
        return (losses, -(log_p.exp() * log_p).sum(1)) if return_entropy is True else losses

    name = "liger_kernel.ops.cutedsl.ops.fused_scaled_cross_entropy_sm90"
    fake = types.ModuleType(name)
    fake.LigerFusedScaledCrossEntropySM90Function = types.SimpleNamespace(apply=apply)
    for end in [i for i, letter in enumerate(name) if letter == "."]:
        monkeypatch.setitem(sys.modules, name[:end], types.ModuleType(name[:end]))
    monkeypatch.setitem(sys.modules, name, fake)
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(rows, 8, generator=generator, dtype=torch.float64).requires_grad_() for rows in (12, 20))
    target = torch.randint(20, (12,), generator=generator)
    target[3] = -100
    truth = F.cross_entropy(F.linear(x, w), target)
    lce = providers_linear_cross_entropy
    for provider in (lce.TOKENS, lce.TOKENS_ENTROPY, "liger-scaled", "liger-scaled-loss"):
        loss = lce.load.__wrapped__(provider)(x, w, target)
        for got, want in zip(
            (loss, *torch.autograd.grad(loss, (x, w))),
            (truth, *torch.autograd.grad(truth, (x, w), retain_graph=True)),
            strict=True,
        ):
            torch.testing.assert_close(got, want)


def test_host_overhead_runs(tmp_path):
    page = host_overhead.main(["--out", str(tmp_path), "--commit", "abc"], repeats=2, norms=2).read_text()
    assert "| quackish |" in page
    assert "forward + backward / torch's" in page
    assert "\nCommit `abc`, driver " in page
    assert f", torch {torch.__version__}, " in page


def test_operations_without_kernels(tmp_path, monkeypatch):
    """The program's table, of one call with a peer that is installed and of attention."""
    calls = [call for call in portable.CALLS if call[0] in ("rms_norm", portable.ATTENTION)][:2]
    monkeypatch.setattr(portable, "CALLS", calls)
    path = portable.main(["--tiny", "--out", str(tmp_path)])
    rows = read_rows(path)
    assert [row["provider"] for row in rows] == [
        "quackish",
        "torch",
        "quackish",
        portable.EAGER[portable.ATTENTION] if torch.cuda.is_available() else "torch-math",
    ]
    assert all(row["status"] == "ok" and float(row["median_ms"]) > 0 for row in rows)
    page = path.with_suffix(".md").read_text()
    assert f"\n| {calls[1][0]} {rows[2]['shape']} attn_bias=1,H | " in page
    assert kernel_device._uses_kernels


RECORDED = sorted((ROOT / "benchmarks" / "results").rglob("*_*.csv"))


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: str(path.relative_to(ROOT / "benchmarks" / "results")))
def test_recorded_results_can_be_reported(path):
    programs = {"rms_norm": rms_norm, "linear_cross_entropy": targets}
    programs |= dict.fromkeys(("grouped_mlp", "moe_mlp"), grouped_mlp) | {"scaled_dot_product_attention": attention}
    programs |= dict.fromkeys(("mlp", "rotary"), decoder) | {"linear_divergence": distillation}
    if path.stem in programs:  # a training step has other columns
        page = report.markdown(Results(read_rows(path)), programs[path.stem].PAGE)
        assert "quackish" in page.partition("\n## ")[2]


# Verdicts ------------------------------------------------------------------------------------------------------------


def results_of(cells: dict[Cell, dict[str, Record]]) -> Results:
    rows = (row_of(Job(cell, ()), name, record) for cell, of in cells.items() for name, record in of.items())
    empty = dict.fromkeys(COLUMNS, "") | {"gpu": "H200"}
    return Results([empty | {key: str(value) for key, value in row.items() if value is not None} for row in rows])


def norms(times: dict[int, dict[str, float | None]], direction: str = "backward") -> Results:
    """The grid at N 256 from {m: {provider: us}}; the roof takes 100 us, so the target is 109 (forward 106)."""
    cells, roof = {}, Times(100.0, 100.0, 100.0)
    for m, providers in times.items():
        providers = {**providers, ROOFS[direction]: 100.0}.items()
        cells[Cell("rms_norm", (m, 256), "bfloat16", direction)] = {
            name: {"status": "ok"} | time_columns(Times(us, us, us), roof) if us else {"status": "no"}
            for name, us in providers
        }
    return results_of(cells)


def of_norms(results: Results) -> dict[str, str]:
    return {text.split(": ")[1].split(";")[0]: f"{word} {text}" for word, text in rms_norm.verdicts(results)}


def test_targets_of_norms():
    verdicts = of_norms(norms({4096: {"quackish": 109.0, "quack": 150.0}}))
    assert [text[:4] for text in verdicts.values()] == ["PASS"] * 3
    # ratios that are equal in four digits
    times = {4096: {"quackish": 109.0, "quack": 150.0}, 8192: {"quackish": 109.004, "quack": 109.0}}
    result = norms(times | {16384: {"quackish": 109.002}})
    target, rival, mean = of_norms(result).values()
    assert target.startswith("FAIL")
    assert "1 of 3 cells, worst 1.0000 (109.004 us for 109 us) at 8192 x 256 bfloat16" in target
    assert target.endswith("missed also in 1.0000 (109.002 us for 109 us) at 16384 x 256 bfloat16")
    assert rival.startswith("FAIL")
    assert f"{math.sqrt(150 / 109 * 109 / 109.004):.3f}x" in mean
    assert "| 16384 x 256 | 100 | **109.002** (92 %) |" in report.markdown(result, rms_norm.PAGE)
    # a failed cell is FAIL; failed peers are ignored
    target, rival, _ = of_norms(
        norms({4: {"quackish": 50.0, "quack": 90.0}, 8: {"quackish": None, "quack": 90.0}})
    ).values()
    assert "1 of 2 cells, worst inf (failed) at 8" in target
    assert "1 of 2 cells, worst inf (failed) at 8" in rival
    _, rival, _ = of_norms(norms({4: {"quackish": 50.0, "quack": 90.0}, 8: {"quackish": 50.0, "quack": None}})).values()
    assert "1 of 1 cells" in rival
    for us, word in ((102.0, "PASS"), (102.1, "FAIL")):
        verdicts = of_norms(norms({4096: {"quackish": us, "quack": 100.0}}, "forward"))
        assert verdicts["forward at most 2 % over QuACK"].startswith(word)
    # larger N count apart
    large = Cell("rms_norm", (4096, 16_384), "bfloat16", "backward")
    slow = {"status": "ok"} | time_columns(Times(120.0, 120.0, 120.0), Times(100.0, 100.0, 100.0))
    verdicts = rms_norm.verdicts(results_of({large: {"quackish": slow, ROOFS["backward"]: slow | {"median_ms": 0.1}}}))
    assert [(word, text[:27]) for word, text in verdicts] == [("FAIL", "bfloat16, N over 8192: back")]
    text = norms({4096: {"quackish": 100.0, "quackish (again)": 103.0}}).noise()
    assert "3.0% (median), 3.0% (maximum)" in text


def made_up(cases: dict[tuple, dict[str, tuple]]) -> Results:
    """Results from {(direction, m, h, v, data, ignored): {provider: (ms, GB, errors of dX and dW)}}; None failed."""

    def measured(ms: float | None, gb: float | None, error: float | None) -> Record:
        times = Times(*[1e3 * ms] * 3) if ms else None
        record = {"status": "ok" if ms else "RuntimeError: no", "peak_mb": gb and 1e3 * gb}
        return record | {"err_dx": error, "err_dweight": error} | time_columns(times, times)

    cells = {}
    for (direction, m, h, v, *kind), providers in cases.items():
        cell = Cell("linear_cross_entropy", (m, h, v), "bfloat16", direction, *kind)
        cells[cell] = {name: measured(*point) for name, point in providers.items()}
    return results_of(cells)


def headline(**times) -> dict[tuple, dict[str, tuple]]:
    """The headline shape; three GEMMs take 40 ms."""
    providers = {name.replace("_", "-"): (*point, 0.01)[:3] for name, point in times.items()}
    return {(TRAIN, *targets.HEADLINE.shape, "normal", 0.0): {"three-gemms": (40.0, None, None), **providers}}


def verdicts_of(results: Results) -> dict[str, str]:
    """{subject of a verdict: PASS or FAIL, and the text}"""
    lines = targets.verdicts(results)
    return {": ".join(text.split(": ")[:2]): f"{word} {text}" for word, text in lines}


def test_targets_of_the_headline_shape():
    good = {f"quackish_{s}": (40 * of_gemms, gb or 3.2) for s, (of_gemms, gb) in targets.HEADLINE_TARGETS.items()}
    verdicts = verdicts_of(made_up(headline(**good, quack=(41.0, 4.3), cce=(95.0, 1.12), torch=(43.0, 6.3))))
    # cce needs less memory than quackish, but is slower
    text = verdicts.pop(f"{SHAPE}: time against memory")
    assert text.startswith("FAIL")
    assert text.endswith("2 of 3 peers' points dominated by one of ours; not cce (95 ms, 1.1200 GB)")
    for schedule in targets.HEADLINE_TARGETS:
        text = verdicts[f"{SHAPE} {schedule}: faster than every peer that uses no more memory"]
        assert "cce 95.000 ms" in text
        assert text.endswith("of 1")
    kept = {about for about, text in verdicts.items() if text.startswith("PASS") and about.startswith(SHAPE)}
    assert len(kept) == 8

    bad = {name: (1.001 * ms, 1.001 * gb) for name, (ms, gb) in good.items()}
    verdicts = verdicts_of(made_up(headline(**bad, quack=(1.001 * 40, 1.0))))  # as fast as two of ours
    assert kept == {about for about, text in verdicts.items() if text.startswith("FAIL") and about in kept}
    # a failed schedule is FAIL; failed peers are ignored
    verdicts = verdicts_of(made_up(headline(quackish_stored=(None, None), quack=(None, None))))
    assert [text[:4] for text in verdicts.values()] == ["FAIL"]


def test_peers_that_are_not_dominated_are_listed():
    """Neither in the verdict nor below the table."""
    ours = {"quackish": (300.0, 7.08, 0.01), "quackish-recompute": (400.0, 2.5, 0.01)}
    peers = {"quack-base": (319.4, 4.74, 0.01), "liger": (310.0, 2.11, math.nan), "torch": (339.0, 50.4, 0.01)}
    listed = "quack-base (319.4 ms, 4.7400 GB), liger (310 ms, 2.1100 GB, wrong results)"
    for cell in targets.AGAINST_MEMORY:
        case = (TRAIN, *cell.shape, cell.data, 0.0)
        page = report.markdown(made_up({case: {**ours, **peers}}), targets.PAGE)
        assert f": 1 of 3 peers' points dominated by one of ours; not {listed}\n" in page
        assert f"Not dominated by a point of quackish: {listed}." in page
    fast = made_up({case: {**peers, "quackish": (300.0, 2.11, 0.01)}})
    assert "Every peer's point is dominated by one of quackish." in report.markdown(fast, targets.PAGE)


def test_targets_of_forward_ignored_rows_errors_and_host_time():
    def judge(loss, ignored, error, confident, host, quack, launch):
        shape = targets.HEADLINE.shape
        step = {"quackish": (host, 0, None), A_LAUNCH: (launch, 0, None), "torch": (0.2, 0, None)}
        cases = {
            ("forward", *shape, "normal", 0.0): {"gemm-logits": (10.0, 0, None), "quackish": (loss, 0, None)},
            (TRAIN, *shape, "normal", 0.8): {"quackish": (ignored, 1, None), NONE_IGNORED: (1, 1, 0)},
            (TRAIN, *shape, "normal", 0.0): {"quackish": (1.0, 1, error), "torch": (1.0, 1, 0.01)},
            (TRAIN, *shape, "confident", 0.0): {"quackish": (1.0, 1, confident), "torch": (1.0, 1, 0.01)},
            ("host", 128, 512, 1024, "normal", 0.0): {**step, "quack": (quack, 0, None)},
        }
        return [word for word, text in targets.verdicts(made_up(cases)) if "dominated" not in text]

    assert judge(10.3, 0.35, 0.01, 0.005, 0.28, 0.56, 0.015) == ["PASS"] * 9
    assert judge(10.4, 0.36, 0.011, 0.0051, 0.281, 0.56, 0.0151) == ["FAIL"] * 9
    assert "FAIL" in judge(10, 0.3, math.nan, 0.001, 0.1, 1, 0.01)


# Figures -------------------------------------------------------------------------------------------------------------


def test_figures_are_drawn(tmp_path):
    cases = headline(quackish_chunked=(40.8, 3.0), quack=(41.0, 4.3), cce=(95.0, 1.12))
    cases |= {(*case[:4], "confident", 0.0): providers for case, providers in cases.items()}
    cases[(TRAIN, 65536, 4096, 128256, "normal", 0.0)] = {"quackish": (300.0, 2.0, None), "cce": (800.0, 1.2, None)}
    drawn = targets.PAGE.figures(made_up(cases), tmp_path / "lce.csv")
    expected = {f"lce{kind}.{s}" for kind in ("", "_m65536", "_confident") for s in ("svg", "png")}
    assert {p.name for p in drawn} == {p.name for p in tmp_path.iterdir()} == expected


def parallel_cell(ms, **record):
    """Four GPUs, one of them slower."""
    alone = [[36.0], [36.0], [36.0], [37.0]]
    steps = {parallel.OURS: {"loss": 1.0, "mb": 900.0, "why": ""}, "peer": {"why": "RuntimeError: no"}}
    times = {parallel.OURS: [[ms], [ms - 1], [ms], [ms]], parallel.ALONE: alone, parallel.ONE_GPU: alone}
    shares = (0.07, 0.02, 0.05, 0.04)  # GPUs that finish early wait in the collectives
    tables = {parallel.OURS: [{"GemmSm90 1": 8.0, "exposed": share * ms, "step": ms} for share in shares]}
    shape = [8192, 4096, 128256]
    return {"shape": shape, "ranks": 4, "most_mb": 900.0, "steps": steps, "ms": times, "kernels": tables} | record


def test_targets_of_the_parallel_head():
    ours, peer = parallel.lines_of(parallel_cell(9.4))
    assert ours[4:6] == ("0.957", "0.984")
    assert peer[3] == "RuntimeError: no"
    assert [passed for passed, _ in parallel.verdicts(parallel_cell(9.4))] == ["PASS"] * 3
    missed = parallel.verdicts(parallel_cell(9.8, most_mb=899.0))
    assert [passed for passed, _ in missed] == ["FAIL", "PASS", "FAIL"]
    text = parallel.page([parallel_cell(9.8)], environment(CPU, "abc-dirty"))
    assert "- FAIL: 8192x4096x128256, 4 GPUs: efficiency of GPU 0: 0.9184, target 0.94\n" in text
    assert "| quackish: GemmSm90 1 | 8.000 | 8.000 | 8.000 | 8.000 |" in text
    assert "| quackish, one GPU alone | 36.000 | 36.000 | 36.000 | 37.000 |" in text


def test_the_kernels_of_a_traced_step():
    assert traces.covered([(0, 2), (5, 6), (1, 3), (2, 2.5)]) == 4
    step = [("Gemm", 0, 4), ("ncclSum", 3, 6), ("Gemm", 6, 9), ("small", 0, 0.01)]
    events = [(name, 10 * i + start, 10 * i + end) for i in range(1 + traces.STEPS) for name, start, end in step]
    events[1] = ("ncclSum", -100, 6)  # waited for the other ranks
    expected = {"Gemm 1": 4, "ncclSum": 3, "Gemm 2": 3, "others": 0.01, "idle": 1, "exposed": 2, "step": 10}
    assert traces.kernels_of(events) == pytest.approx(expected)
    for place in ("kernels", "opslinear_cross_entropykernels"):
        name = f"kernel_cutlass_kernel_quackish{place}gemm_sm90LceGemmSm90_object_at__cutlasscuteatomCopyAtom_0"
        assert traces.short_name(name) == "LceGemmSm90"
    assert traces.short_name("void at::native::fill<float>(int)") == "at::native::fill"
    nccl = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
    assert traces.short_name(nccl) == "ncclDevKernel_AllGather_RING_LL"


def test_a_peer_that_raises_is_dropped_on_all_ranks():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        steps = {"peer": lambda: 1 / 0, parallel.OURS: lambda: torch.tensor(2.0)}
        record = parallel.first_steps(steps, CPU)
    finally:
        torch.distributed.destroy_process_group()
    assert list(steps) == [parallel.OURS]
    assert record["peer"]["why"] == "ZeroDivisionError: division by zero"
    assert record[parallel.OURS] == {"loss": 2.0, "mb": 0.0, "why": ""}


def test_targets_of_grouped_mlp():
    def judge(ours, error, launches, host, op="grouped_mlp"):
        errors = dict.fromkeys(grouped_mlp.ERRORS, 1e-3)
        mine = {"median_ms": ours, "launches": launches, **errors, "err_dx": error}
        times = {"quackish": mine, "torch-compile": {"median_ms": 6.0}, "torch": {"median_ms": 8.0, **errors}}
        times["six-gemms"] = {"median_ms": 5.0}
        cell = Cell(op, (1024, 64, 32, 4), "bfloat16", TRAIN, "zipf")
        cells = {cell: times, Cell(*cell_of_host): {"quackish": {"median_ms": host}, "torch": {"median_ms": 0.2}}}
        found = {cell: {name: {"status": "ok"} | record for name, record in of.items()} for cell, of in cells.items()}
        return grouped_mlp.verdicts(results_of(found))

    cell_of_host = "grouped_mlp", grouped_mlp.HOST, "bfloat16", "host"
    assert [word for word, _ in judge(4.9, 1e-3, 8, 0.2)] == ["PASS"] * 6
    record = judge(6.1, 2e-3, 9, 0.3)
    assert [word for word, _ in record] == ["FAIL"] * 6
    assert record[3][1].endswith("zipf: errors at most PyTorch eager's; err_dx 2.00e-03 > 1.00e-03")
    assert [word for word, _ in judge(4.9, math.nan, 8, 0.2)].count("FAIL") == 1
    assert all(word == "PASS" for word, _ in judge(4.9, 1e-3, 10, 0.2, "moe_mlp"))
    assert group_sizes("half-empty", 10, 4) == [0, 5, 0, 5]
    assert sum(group_sizes("zipf", 1000, 7)) == 1000


def test_targets_of_a_decoder_layer():
    def judge(op, shape, ours, **more):
        errors = dict.fromkeys(("err_y", "err_dweight"), 1e-3)
        found = {
            "quackish": {"median_ms": ours, "peak_mb": 900.0, **errors, **more},
            "torch": {"median_ms": 2.0, **errors},
            "torch-compile": {"median_ms": 1.2},
            "liger": {"median_ms": 1.05, "peak_mb": 1000.0},
            "six-gemms" if op == "mlp" else "mul": {"median_ms": 1.0},
        }
        cells = {
            Cell(op, shape, "bfloat16", TRAIN if op == "mlp" else "forward"): found,
            Cell(op, decoder.HOST[op], "bfloat16", "host"): {n: found[n] for n in ("quackish", "torch")},
        }
        ok = {cell: {name: {"status": "ok"} | record for name, record in of.items()} for cell, of in cells.items()}
        return [word for word, _ in decoder.verdicts(results_of(ok))]

    for op, shape in (("mlp", (16_384, 8, 8)), ("mlp", (1024, 8, 8)), ("rotary", (8, 4, 4, 8, 8))):
        assert set(judge(op, shape, 1.0)) == {"PASS"}
        assert "FAIL" in judge(op, shape, 1.3)
        assert judge(op, shape, 1.0, err_y=2e-3).count("FAIL") == 1
    assert judge("mlp", (16_384, 8, 8), 1.0, peak_mb=1100.0).count("FAIL") == 1


def test_targets_of_the_distillation_head():
    def judge(ours, memory=900.0, **more):
        errors = dict.fromkeys(distillation.BENCHES["linear_divergence"].errors, 1e-3)
        found = {
            "quackish": {"median_ms": ours, "peak_mb": memory, **errors, **more},
            "trl": {"median_ms": 2.0, "peak_mb": 1000.0, **errors},
            "torch-compile": {"median_ms": 1.2},
            "four-gemms": {"median_ms": 1.0},
        }
        cell = Cell("linear_divergence", (8, 8, 8, 8), "bfloat16", TRAIN, "beta=0.5")
        found = {name: {"status": "ok"} | record for name, record in found.items()}
        return [word for word, _ in distillation.verdicts(results_of({cell: found}))]

    assert set(judge(1.1)) == {"PASS"}
    assert judge(1.18).count("FAIL") == 1
    assert judge(1.25).count("FAIL") == 2
    assert judge(1.1, 1100.0).count("FAIL") == judge(1.1, err_dx=2e-3).count("FAIL") == 1


@pytest.mark.exhaustive
@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU all cells are measured")
def test_the_distillation_head_writes_a_file(tmp_path, in_this_process):
    (path,) = distillation.main(["--out", str(tmp_path)])
    assert {row["data"] for row in read_rows(path)} == {"beta=0.0", "beta=0.5", "beta=1.0"}


@pytest.mark.exhaustive
@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU all cells are measured")
def test_a_decoder_layer_writes_two_files(tmp_path, in_this_process):
    for path in decoder.main(["--out", str(tmp_path)]):
        rows = read_rows(path)
        assert {"quackish", "torch"} <= {row["provider"] for row in rows if row["status"] == "ok"}
        assert {row["direction"] for row in rows} == {*decoder.DIRECTIONS[path.stem], "host"}
        assert "/ " in path.with_suffix(".md").read_text()


@pytest.mark.exhaustive
@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU all cells are measured")
def test_grouped_mlp_writes_rows_of_every_split_and_of_the_router(tmp_path, in_this_process):
    path, moe_path = grouped_mlp.main(["--out", str(tmp_path)])
    page, rows = path.with_suffix(".md").read_text(), read_rows(path)
    assert {row["data"] for row in rows} == {"normal", "zipf", "half-empty"}
    assert "zipf: errors at most PyTorch eager's" in page
    assert "| 64x64x32x4 zipf | torch |" in page
    (ours, *_) = read_rows(moe_path)
    assert ours["provider"] == "quackish"
    assert max(float(ours[name]) for name in grouped_mlp.ERRORS) < 0.01


def test_the_figure_of_experts_names_the_split_and_has_only_panels_with_a_roof(tmp_path):
    ours = {"status": "ok", "median_ms": 2.0, "pct_of_roof": 50.0}
    cells = [Cell("grouped_mlp", (1024, 64, 32, 4), "bfloat16", TRAIN, data) for data in ("normal", "zipf")]
    host = Cell("grouped_mlp", grouped_mlp.HOST, "bfloat16", "host")
    found = results_of({cell: {"quackish": ours} for cell in [*cells, host]})
    svg, _ = grouped_mlp.PAGE.figures(found, tmp_path / "grouped_mlp.csv")
    drawn = set(re.findall("<!-- (.*) -->", svg.read_text()))  # texts are paths, with the text in a comment
    assert {f"{TRAIN}, bfloat16", "E 4", "zipf"} <= drawn
    assert "host, bfloat16" not in drawn


def test_experts_after_a_router_are_compared_with_fp64(monkeypatch):
    """Liger's function is called as its docstring says. Here a stand-in multiplies by 1.5 times w2."""

    def apply(x, gate_up_proj, down_proj, top_k_index, top_k_weights):
        assert top_k_index.dtype == torch.int32
        return quackish.moe_mlp(x, top_k_index, top_k_weights, gate_up_proj, 1.5 * down_proj)

    fake = types.ModuleType("liger_kernel.ops.fused_moe")
    fake.LigerFusedMoEFunction = types.SimpleNamespace(apply=apply)
    for name in ("liger_kernel", "liger_kernel.ops"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, fake.__name__, fake)
    moe, found = BENCHES["moe_mlp"], {}
    names = ["quackish", "liger", *["transformers"] * bool(importlib.util.find_spec("transformers"))]
    cell = Cell("moe_mlp", (64, 64, 32, 4, 2), "bfloat16", TRAIN)
    moe.measure(cell, names, Run(CPU, moe.load, found.__setitem__, rounds=2))
    errors = {name: [found[name][column] for column in grouped_mlp.ERRORS] for name in names}
    assert min(errors["liger"]) == pytest.approx(0.5, abs=0.01)
    assert "wrong: err_y 0.5" in found["liger"]["note"]
    assert all(max(of) < 0.01 for name, of in errors.items() if name != "liger")


# Attention -----------------------------------------------------------------------------------------------------------


def test_targets_of_attention():
    def judge(job, ours, peers, mb=1.0, error=1e-3):
        mine = {"median_ms": ours, "peak_mb": mb, "err_y": error, "roof_ms": 1.0}
        times = {name: {"median_ms": ms, "err_y": 1e-3} for name, ms in peers.items()}
        found = {name: {"status": "ok"} | record for name, record in {**times, "quackish": mine}.items()}
        return attention.verdicts(results_of({job.cell: found}))

    long, short = attention.case(2048, 64), attention.case(512, 64)
    mask = attention.case(4096, 64, attn_bias="none", attn_mask="top")
    words = lambda *of, **how: [word for word, _ in judge(*of, **how)]  # noqa: E731
    assert words(long, 1.0, {"flex": 2.5, "torch-efficient": 9.0}) == ["PASS"] * 3
    assert words(long, 1.0, {"flex": 2.49}, error=0.003) == ["FAIL", "PASS", "FAIL"]
    assert words(short, 1.0, {"flex": 1.01}) == ["PASS"] * 3
    assert words(short, 1.0, {"flex": 1.0})[0] == "FAIL"
    assert words(attention.case(2048, 64, attn_bias="1,H"), 1.0, {"flex": 1.01})[0] == "PASS"
    assert words(attention.case(2048, 64, attention.FORWARD), 1.0, {"flex": 1.01})[0] == "PASS"
    # a mask alone is compared with FlexAttention
    assert words(mask, 1.0, {"flex": 1.6, "flex-block-mask": 1.5, "torch-cudnn": 0.5})[0] == "PASS"
    assert words(mask, 1.0, {"flex": 1.6, "flex-block-mask": 1.4})[0] == "FAIL"
    # plain calls are PyTorch's, and peers with wrong results do not count
    assert words(attention.case(2048, 64, attn_bias="none"), 1.0, {"fa4": 0.5}) == ["PASS"]
    wrong = results_of({long.cell: {"quackish": {"status": "ok", "median_ms": 1.0}, "flex": {"err_y": 0.5}}})
    assert attention.verdicts(wrong) == []
    (host,) = [job for job in attention.JOBS if job.cell.direction == attention.HOST]
    assert words(host, 1.1, {"torch-efficient": 1.0}) == ["PASS", "PASS"]
    assert words(host, 1.2, {"torch-efficient": 1.0}) == ["FAIL", "PASS"]
    # o, dq, dk and dv of 64 columns, a bias (4, 16, 2048, 2048), and 64 bytes per row
    rows = 4 * 16 * 2048
    most = 1e-6 * (rows * (4 * 128 + 64) + rows * 2048 * 2)
    for factor, word in ((0.999, "PASS"), (1.001, "FAIL")):
        assert words(long, 1.0, {"flex": 2.5}, mb=factor * most) == ["PASS", word, "PASS"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU all cells are measured")
def test_attention_writes_rows_of_every_kind_of_cell(tmp_path, in_this_process):
    path = attention.main(["--out", str(tmp_path), "--only", "2x2x130x64"])
    rows = read_rows(path)
    assert {row["data"] for row in rows} == {job.cell.data for job in attention.TINY}
    assert all(row["median_ms"] for row in rows)
    assert "what rounding to bf16 explains: at most 0." in path.with_suffix(".md").read_text()
    with pytest.raises(ValueError, match="--only is 'zipf'; expected words such as 4x16x2048x64"):
        attention.main(["--out", str(tmp_path), "--only", "zipf"])


def test_cells_of_attention_are_distinct_and_legal():
    cells = [job.cell for job in attention.JOBS]
    assert len(set(cells)) == len(cells)
    for cell in cells:
        BENCHES[cell.op].op.arguments(cell.shape, torch.bfloat16, torch.device("meta"), options_of(cell.data))
        is_small = cell.shape in [shape for shape, _ in attention.SMALL.values()]
        assert is_small or cell.direction == attention.HOST or cell.shape[0] * cell.shape[2] == attention.TOKENS
    assert attention.SMALL_TARGETS.keys() <= {shape for shape, _ in attention.SMALL.values()}


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_attention_is_compiled_before_the_run():
    cell = attention.TINY[1].cell
    for name in ("quackish", "flex"):
        attention.first_step(cell, name)
    with pytest.raises(ValueError, match="there is no mask"):
        attention.first_step(cell, "flex-block-mask")


def test_experts_are_compiled_before_the_run():
    (job,) = grouped_mlp.tiny("moe_mlp")
    grouped_mlp.first_step(job.cell, "transformers")
    with pytest.raises(KeyError):
        grouped_mlp.first_step(job.cell, "no such library")


def leave_a_file(cell, name):  # a first step
    if name == "broken":
        raise RuntimeError
    Path(cell.data, name).touch()


@pytest.mark.exhaustive  # three processes import PyTorch
def test_first_steps_run_in_processes(tmp_path):
    """One that fails does not stop the others."""
    cell = Cell("rms_norm", (1, 1), "bfloat16", "forward", str(tmp_path))
    harness.warm_up([Job(cell, ("broken", "a", "b", "other"))], ("broken", "a", "b"), leave_a_file)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]
