"""benchmarks/schedules.py on tiny inputs: which calls are measured, their gradients, and the page."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("matplotlib")

from benchmarks import schedules
from quackish.testing.timing import Times

CPU = torch.device("cpu")
M, H, V = schedules.TINY
STEPS = {
    "Rows per chunk": [dict(schedule="chunked", chunk_size=rows) for rows in (48, 24, 12, 6)],
    "Memory limits": [dict(memory_limit=4 * 2 * (M + V) * H)],
    "Losses per token": [{}, dict(schedule="recompute"), dict(schedule="stored"), {}, dict(schedule="recompute"), {}],
}
WITH_ENTROPY = ('`"auto"`, the entropies too', '`"recompute"`, the entropies too')


@pytest.fixture
def calls(monkeypatch):
    """The options of each call, as they are made."""
    made, function = [], schedules.linear_cross_entropy

    def call(*args, **options):
        made.append(options)
        return function(*args, **options)

    monkeypatch.setattr(schedules, "linear_cross_entropy", call)
    monkeypatch.setattr(schedules.harness, "device_to_measure", lambda: CPU)
    return made


@pytest.mark.parametrize("table", schedules.TABLES, ids=lambda table: table.title)
def test_gradients_of_each_call(calls, table):
    """Beside fp64, with the options that the row names."""
    data = schedules.make(CPU, M, H, V)
    steps = table.steps(data)
    assert len(steps) == len(STEPS[table.title])
    for (name, step), options in zip(steps.items(), STEPS[table.title], strict=True):
        per_token = table.title == "Losses per token" and name != "the mean loss"
        got = step()
        assert calls[-1] == options | (dict(reduction="none", return_stats=True) if per_token else {}), name
        x, w = (t.detach().double().requires_grad_() for t in (data.x, data.w))
        log_p = (x @ w.t()).log_softmax(-1)
        values = log_p.gather(1, data.target[:, None])[:, 0]
        if name in WITH_ENTROPY:
            values = values - (log_p.exp() * log_p).sum(-1)
        loss = (values * step.token_weights).sum() if per_token else -values.mean()
        for grad, truth in zip(got, torch.autograd.grad(loss, (x, w)), strict=True):
            assert (grad - truth).norm() <= 2**-7 * truth.norm(), name


def test_page(calls, tmp_path, monkeypatch):
    """Milliseconds, percentiles and peaks are in their columns."""
    times = schedules.bursts

    def bursts(steps, *args):
        assert times(steps, *args).keys() == steps.keys()
        return dict.fromkeys(steps, Times(2000.0, 1000.0, 3000.0))

    monkeypatch.setattr(schedules, "bursts", bursts)
    monkeypatch.setattr(schedules, "peak_gb", lambda step: step() and "0.5")
    page = schedules.main(["--commit", "abc", "--out", str(tmp_path)]).read_text()
    for table in schedules.TABLES:
        rows = page.split(f"## {table.title}\n")[1].split("\n## ")[0]
        for name in table.steps(schedules.make(CPU, M, H, V)):
            assert f"| {name} | 2 | 1 | 3 | 0.5 |\n" in rows


def test_peak_is_that_of_the_second_step(monkeypatch):
    step = schedules.chunk_steps(schedules.make(CPU, M, H, V)).popitem()[1]
    assert schedules.peak_gb(step) == ""
    log = []

    class OnGpu:
        data = SimpleNamespace(x=SimpleNamespace(is_cuda=True))

        def __call__(self):
            log.append("step")

    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: log.append("before") or 3_000_000_000)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: log.append("reset"))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: log.append("peak") or 4_500_000_000)
    assert schedules.peak_gb(OnGpu()) == "1.500"
    assert log == ["step", "before", "reset", "step", "peak"]
