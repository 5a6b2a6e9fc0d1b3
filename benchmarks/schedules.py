"""Time and memory of linear cross entropy's schedules: rows per chunk, memory limits, and a loss per token.

    python -m benchmarks.schedules                     writes results/<GPU>/schedules.md

Forward and backward in bf16. The calls of a table take turns in bursts, as a training loop runs them.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from benchmarks import harness
from quackish import linear_cross_entropy
from quackish.bench.environment import environment
from quackish.bench.report import markdown_table
from quackish.testing.timing import bursts

CHUNKED, LIMITED, TOKENS, TINY = (16384, 2048, 128256), (8192, 4096, 128256), (16384, 4096, 128256), (48, 64, 300)
LIMITS = (1 / 16, 1 / 4, 1 / 2, 1, 2, 4)  # in gradients' bytes


class Step:
    """Loss and gradients of x and w. With `per_token` the loss of each token, whose gradients are random.

    peak: bytes above the inputs, with the gradients
    """

    def __init__(self, x: Tensor, w: Tensor, target: Tensor, per_token: bool = False, entropy: bool = False, **options):
        self.x, self.w, self.target, self.options, self.entropy = x, w, target, options, entropy
        self.weights = torch.randn(len(x), device=x.device) if per_token else None
        self.peak = 0

    def __call__(self) -> tuple[Tensor, ...]:
        inputs = self.x, self.w, self.target
        if self.weights is None:
            loss = linear_cross_entropy(*inputs, **self.options)
        else:
            _, stats = linear_cross_entropy(*inputs, reduction="none", return_stats=True, **self.options)
            values = stats.log_prob + stats.entropy if self.entropy else stats.log_prob
            loss = (values * self.weights).sum()
        return torch.autograd.grad(loss, (self.x, self.w))

    def measure_peak(self) -> None:
        self()  # compiles, and allocates what is kept between calls
        if self.x.is_cuda:
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            self()
            self.peak = torch.cuda.max_memory_allocated() - before


def chunk_steps(*inputs: Tensor) -> dict[str, Step]:
    rows = [len(inputs[0]) // n for n in (1, 2, 4, 8)]
    return {f'`"chunked"`, {n} rows': Step(*inputs, schedule="chunked", chunk_size=n) for n in rows}


def limit_steps(*inputs: Tensor) -> dict[str, Step]:
    gradients = sum(t.nbytes for t in inputs[:2])
    factors = LIMITS if inputs[0].is_cuda else LIMITS[-1:]  # the portable path needs more
    limits = [int(gradients * factor) for factor in factors]
    return {f"`memory_limit={limit:_}`": Step(*inputs, memory_limit=limit) for limit in limits}


def token_steps(*inputs: Tensor) -> dict[str, Step]:
    return {
        "`auto`": Step(*inputs, per_token=True),
        "`recompute`": Step(*inputs, per_token=True, schedule="recompute"),
        "`stored`": Step(*inputs, per_token=True, schedule="stored"),
        "`auto`, gradient of the entropy too": Step(*inputs, per_token=True, entropy=True),
        "`recompute`, gradient of the entropy too": Step(*inputs, per_token=True, entropy=True, schedule="recompute"),
        'reduction `"mean"`': Step(*inputs),
    }


TABLES: dict[str, tuple[tuple[int, int, int], Callable[..., Mapping[str, Step]]]] = {
    "Rows per chunk": (CHUNKED, chunk_steps),
    "Memory limits": (LIMITED, limit_steps),
    "A loss per token": (TOKENS, token_steps),
}


def make(device: torch.device, m: int, h: int, v: int) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator(device).manual_seed(0)
    x, w = (torch.randn(n, h, generator=g, device=device) for n in (m, v))
    x, w = x.bfloat16().requires_grad_(), (w * 1.5 * h**-0.5).bfloat16().requires_grad_()
    return x, w, torch.randint(v, (m,), generator=g, device=device)


def table(device: torch.device, shape: tuple[int, int, int], make_steps: Callable[..., Mapping[str, Step]]) -> str:
    steps = make_steps(*make(device, *shape))
    for step in steps.values():
        step.measure_peak()
    times = bursts(steps, device, *((5, 0.4) if device.type == "cuda" else (1, 0.01)))
    rows = [
        (name, f"{t.median / 1e3:.4g}", f"{t.p20 / 1e3:.4g}-{t.p80 / 1e3:.4g}", f"{steps[name].peak / 1e9:.3f}")
        for name, t in times.items()
    ]
    return markdown_table(("call", "ms", "p20-p80", "peak GB"), rows)


def main(argv: Sequence[str] | None = None) -> Path:
    """Returns the page."""
    args = harness.arguments("schedules", __doc__, csv=False).parse_args(argv)
    device = harness.device_to_measure()
    on_gpu = device.type == "cuda"
    about = environment(device, args.commit)
    page = f"# Schedules of linear cross entropy, on {about['gpu']}\n\n"
    page += (
        f"Commit `{about['commit']}`, driver {about['driver']}, torch {about['torch']}. Peaks are above the inputs, "
    )
    page += "with the gradients, which `memory_limit` does not count.\n"
    for title, (shape, make_steps) in TABLES.items():
        m, h, v = shape if on_gpu else TINY
        gradients = 2 * (m + v) * h / 1e9
        page += f"\n## {title}\n\nM {m}, H {h}, V {v}. The gradients take {gradients:.3f} GB.\n\n"
        page += table(device, (m, h, v), make_steps)
    path = args.out / "schedules.md"
    harness.write_page(page, path)
    return path


if __name__ == "__main__":
    harness.main(main)
