"""Linear cross entropy of many rows with few classes, beside PyTorch: the cost must grow linearly with the rows.

    python -m benchmarks.many_rows        writes results/<GPU>/many_rows.md

Forward and backward, bf16, reduction "none". The bars are ratios to PyTorch eager, F.cross_entropy(F.linear(x, w)), in
the same run, with bf16 logits and with fp32 logits.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import quackish
from benchmarks.harness import arguments, device_to_measure, results_dir
from quackish.bench.console import console
from quackish.bench.environment import environment
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
    args = arguments("many_rows", __doc__).parse_args()
    device = device_to_measure()
    rows = ROWS if device.type == "cuda" else (256, 1024)
    about = environment(device, args.commit)
    lines = [f"# Many rows, {V} classes, H {H}: ms of a forward and backward", ""]
    lines += [f"{about['gpu']}, commit `{about['commit']}`, driver {about['driver']}, torch {about['torch']}.", ""]
    lines += ["| rows | step | ms | x bf16 logits | x fp32 logits | bar |", "|---|---|---|---|---|---|"]
    for m in rows:
        runs = steps(m, device)
        for run in list(runs.values()) * 2:
            run()
        ms = {name: times.median / 1e3 for name, times in take_turns(runs, device).items()}
        for name, time in ms.items():
            ratios = " | ".join(f"{time / ms[eager]:.2f}" for eager in EAGER)
            lines.append(f"| {m} | {name} | {time:.3f} | {ratios} | {BARS.get(name, '')} |")
    text = "\n".join(lines) + "\n"
    console().print(text)
    out = args.out or results_dir(device)
    out.mkdir(parents=True, exist_ok=True)
    (out / "many_rows.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
