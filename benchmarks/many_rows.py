"""Linear cross entropy of many rows and few classes, and PyTorch: the time must be linear in the rows.

    python -m benchmarks.many_rows        writes results/<GPU>/many_rows.md

Forward and backward, bf16, reduction "none". The bars are ratios to PyTorch eager, F.cross_entropy(F.linear(x, w)), in
the same run, with bf16 logits and with fp32 logits.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import quackish
from benchmarks import harness
from quackish.bench.environment import environment
from quackish.bench.report import markdown_table
from quackish.testing.timing import take_turns

V, H = 256, 512
ROWS = (65_536, 262_144, 1_048_576)
BARS = {"quackish": 1.5, "quackish, grad_weight_out": 1.5, "quackish, recompute": 3.0}
EAGER = ("PyTorch, bf16 logits", "PyTorch, fp32 logits")


def steps(m: int, device: torch.device) -> dict[str, Callable[[], None]]:
    g = torch.Generator(device).manual_seed(0)
    x = torch.randn(m, H, generator=g, device=device, dtype=torch.bfloat16).requires_grad_()
    w = (torch.randn(V, H, generator=g, device=device) * H**-0.5).bfloat16().requires_grad_()
    target = torch.randint(V, (m,), generator=g, device=device)
    buffer = torch.zeros(V, H, device=device)

    def step(loss_of: Callable[[], Tensor]) -> Callable[[], None]:
        def run() -> None:
            x.grad = w.grad = None
            loss_of().sum().backward()

        return run

    def ours(**options) -> Callable[[], None]:
        return step(lambda: quackish.linear_cross_entropy(x, w, target, reduction="none", **options))

    return {
        "quackish": ours(),
        "quackish, grad_weight_out": ours(grad_weight_out=buffer),
        "quackish, recompute": ours(schedule="recompute"),
        EAGER[0]: step(lambda: F.cross_entropy(F.linear(x, w), target, reduction="none")),
        EAGER[1]: step(lambda: F.cross_entropy(F.linear(x, w).float(), target, reduction="none")),
    }


def main() -> None:
    args = harness.arguments("many_rows", __doc__, csv=False).parse_args()
    device = harness.device_to_measure()
    about, lines = environment(device, args.commit), []
    for m in ROWS if device.type == "cuda" else (256, 1024):
        runs = steps(m, device)
        for run in list(runs.values()) * 2:
            run()
        ms = {name: times.median / 1e3 for name, times in take_turns(runs, device).items()}
        for name, time in ms.items():
            lines.append((m, name, f"{time:.3f}", *(f"{time / ms[eager]:.2f}" for eager in EAGER), BARS.get(name, "")))
    page = f"# Many rows, {V} classes, H {H}: ms of a forward and backward\n\n"
    page += f"{about['gpu']}, commit `{about['commit']}`, driver {about['driver']}, torch {about['torch']}.\n\n"
    page += markdown_table(("rows", "step", "ms", "x bf16 logits", "x fp32 logits", "bar"), lines)
    harness.write_page(page, args.out / "many_rows.md")


if __name__ == "__main__":
    main()
