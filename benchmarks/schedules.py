"""Time and memory of linear cross entropy: rows per chunk, memory limits and losses per token.

    python -m benchmarks.schedules                     writes results/<GPU>/schedules.md

Forward and backward in bf16. The calls of a table take turns in bursts, as a training loop runs them.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks import harness
from quackish import linear_cross_entropy
from quackish.bench.environment import environment
from quackish.bench.report import markdown_table
from quackish.ops.linear_cross_entropy.measure import Data
from quackish.testing.timing import bursts

TINY = (48, 64, 300)  # without a GPU
BURSTS = (5, 0.4)  # their number, and seconds of each
LIMITS = (1 / 16, 1 / 4, 1 / 2, 1, 2, 4)  # relative to the gradients' bytes


class Step:
    """A call and its gradients of x and w: of the mean loss, or of a weighted sum over tokens' log-probabilities.

    entropy: the sum over tokens also has their entropies
    options: arguments of linear_cross_entropy
    """

    def __init__(self, data: Data, per_token: bool = False, entropy: bool = False, **options):
        self.data, self.per_token, self.entropy, self.options = data, per_token, entropy, options
        self.token_weights = torch.linspace(-1, 1, len(data.x), device=data.x.device)

    def __call__(self) -> tuple[Tensor, ...]:
        x, w, target = self.data.x, self.data.w, self.data.target
        if self.per_token:
            _, stats = linear_cross_entropy(x, w, target, reduction="none", return_stats=True, **self.options)
            values = stats.log_prob + stats.entropy if self.entropy else stats.log_prob
            loss = (values * self.token_weights).sum()
        else:
            loss = linear_cross_entropy(x, w, target, **self.options)
        return torch.autograd.grad(loss, (x, w))


Steps = dict[str, Step]


def chunk_steps(data: Data) -> Steps:
    rows = [len(data.x) // n for n in (1, 2, 4, 8)]
    return {f'`"chunked"`, {n} rows': Step(data, schedule="chunked", chunk_size=n) for n in rows}


def limit_steps(data: Data) -> Steps:
    factors = LIMITS if data.x.is_cuda else LIMITS[-1:]  # the portable path needs more
    limits = [int((data.x.nbytes + data.w.nbytes) * factor) for factor in factors]
    return {f"`memory_limit={limit}`": Step(data, memory_limit=limit) for limit in limits}


def token_steps(data: Data) -> Steps:
    return {
        '`"auto"`': Step(data, per_token=True),
        '`"recompute"`': Step(data, per_token=True, schedule="recompute"),
        '`"stored"`': Step(data, per_token=True, schedule="stored"),
        '`"auto"`, the entropies too': Step(data, per_token=True, entropy=True),
        '`"recompute"`, the entropies too': Step(data, per_token=True, entropy=True, schedule="recompute"),
        "the mean loss": Step(data),
    }


class Table(NamedTuple):
    title: str
    shape: tuple[int, int, int]  # M, H, V
    steps: Callable[[Data], Steps]
    about: str = ""


TABLES = (
    Table("Rows per chunk", (16384, 2048, 128256), chunk_steps),
    Table("Memory limits", (8192, 4096, 128256), limit_steps, " `memory_limit` does not count them."),
    Table("Losses per token", (16384, 4096, 128256), token_steps, " Each token's log-probability gets a gradient."),
)


def make(device: torch.device, m: int, h: int, v: int) -> Data:
    return Data.make(m, h, v, "normal", 0.0, device, torch.bfloat16)


def peak_gb(step: Step) -> str:
    """Above what is allocated before the step, after a first one that allocates what is kept. Empty without a GPU."""
    step()
    if not step.data.x.is_cuda:
        return ""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    return f"{(torch.cuda.max_memory_allocated() - before) / 1e9:.3f}"


def section(table: Table, device: torch.device) -> str:
    on_gpu = device.type == "cuda"
    m, h, v = table.shape if on_gpu else TINY
    steps = table.steps(make(device, m, h, v))
    peaks = {name: peak_gb(step) for name, step in steps.items()}
    times = bursts(steps, device, *(BURSTS if on_gpu else (1, 0.01)))
    rows = [
        (name, *(f"{us / 1e3:.4g}" for us in (times[name].median, times[name].p20, times[name].p80)), peaks[name])
        for name in steps
    ]
    lines = (
        f"\n## {table.title}\n\nM {m}, H {h}, V {v}. The gradients take {2 * (m + v) * h / 1e9:.3g} GB.{table.about}"
    )
    return lines + "\n\n" + markdown_table(("call", "ms", "p20", "p80", "peak GB"), rows)


def main(argv: Sequence[str] | None = None) -> Path:
    """Returns the page."""
    args = harness.arguments("schedules", __doc__, csv=False).parse_args(argv)
    device = harness.device_to_measure()
    about = environment(device, args.commit)
    page = f"# Schedules of linear cross entropy, on {about['gpu']}\n\n"
    page += f"Commit `{about['commit']}`, driver {about['driver']}, torch {about['torch']}. Times are medians of "
    page += (
        f"{BURSTS[0]} bursts of {BURSTS[1]} s. Peaks are above what is allocated before a call, with the gradients.\n"
    )
    page += "".join(section(table, device) for table in TABLES)
    path = args.out / "schedules.md"
    harness.write_page(page, path)
    return path


if __name__ == "__main__":
    harness.main(main)
