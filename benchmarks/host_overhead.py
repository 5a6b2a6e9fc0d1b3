"""Host time of an RMSNorm: a chain of 64 norms, forward and backward, timed until all is enqueued.

    python -m benchmarks.host_overhead

The shape is small, so that the GPU keeps up and the host is what is measured.
"""

import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

import quackish
from benchmarks import harness
from quackish.bench.bars import at_most
from quackish.bench.console import console
from quackish.bench.environment import ENVIRONMENT, device_name, environment
from quackish.bench.host import in_turns, launch_times
from quackish.bench.measured import reason
from quackish.bench.providers_rms_norm import EPS
from quackish.bench.report import markdown_table
from quackish.bench.results import CsvLog
from quackish.testing import inputs

M, N = 128, 1024
NORMS = ("torch", "quackish", "quack", "liger-cute", "liger-triton")
PARTS = ("forward", "backward", "both")
FIELDS = (*ENVIRONMENT, "what", "provider", "status", "median_us", "p20_us", "p80_us")
BAR, LAUNCH_BAR_US = 1.15, 6.0  # forward + backward, times torch's own; the slowest launch


def norm_of(name: str) -> Callable[[Tensor, Tensor], Tensor]:
    if name == "quack":
        from quack.rmsnorm import rmsnorm
    elif name == "liger-cute":
        from liger_kernel.functional import rms_norm
    elif name == "liger-triton":
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction
    return {
        "torch": lambda x, weight: torch.nn.functional.rms_norm(x, weight.shape, weight, EPS),
        "quackish": lambda x, weight: quackish.rms_norm(x, weight, eps=EPS, backend=harness.BACKEND),
        "quack": lambda x, weight: rmsnorm(x, weight, eps=EPS),
        "liger-cute": lambda x, weight: rms_norm(x, weight, EPS, impl="nvidia-cutedsl"),
        "liger-triton": lambda x, weight: LigerRMSNormFunction.apply(x, weight, EPS, 0.0, "llama", False),
    }[name]


def chain(name: str, device: torch.device, count: int) -> Callable[[], tuple[float, float, float]]:
    """A function that returns microseconds per norm of PARTS, until all is enqueued."""
    x, dy, weight = (inputs.rows(shape, torch.bfloat16, device=device) for shape in ((M, N), (M, N), (N,)))
    norm, leaves = norm_of(name), [t.clone().requires_grad_() for t in (x, *[weight] * count)]
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None

    def run() -> tuple[float, float, float]:
        for t in leaves:
            t.grad = None
        start = time.perf_counter()
        y = functools.reduce(norm, leaves)
        forward = time.perf_counter() - start
        synchronize()
        start = time.perf_counter()
        y.backward(dy)
        backward = time.perf_counter() - start
        synchronize()
        return tuple(1e6 / count * seconds for seconds in (forward, backward, forward + backward))

    run()  # compiles
    return run


def main(argv: Sequence[str] | None = None, repeats: int = 50, norms: int = 64) -> Path:
    args = harness.arguments("host_overhead", __doc__).parse_args(argv)
    device, chains = harness.device_to_measure(), {}
    for name in NORMS:
        try:
            chains[name] = chain(name, device, norms)
        except Exception as error:
            console().print(f"without {name}: {reason(error)}", markup=False)
    times = {n: dict(zip(PARTS, t, strict=True)) for n, t in in_turns(chains, repeats, 3).items()}
    if launch := launch_times(chain("quackish", device, 1), device):
        times["quackish"]["launch"] = launch
    rows = (
        dict(what=what, provider=name, status="ok", median_us=t.median, p20_us=t.p20, p80_us=t.p80)
        for name, parts in times.items()
        for what, t in parts.items()
    )
    path = (args.out or harness.results_dir(device)) / "host_overhead.csv"
    CsvLog(path, FIELDS, environment(device, args.commit)).write(rows)
    us = {name: [parts[what].median for what in PARTS] for name, parts in times.items()}
    lines = [(name, *(f"{t:.1f}" for t in of), f"{of[2] / us['torch'][2]:.2f}") for name, of in us.items()]
    verdicts = at_most(us["quackish"][2] / us["torch"][2], BAR, "forward + backward / torch's")
    verdicts += at_most(launch and launch.median, LAUNCH_BAR_US, "the slowest launch", " us")
    page = f"# Host time on {device_name(device)}\n\nMicroseconds per norm, in a chain of {norms}, M {M}, N {N}\n\n"
    table = markdown_table(("provider", *PARTS, "of torch"), lines)
    page += "\n".join([table, *(f"- {word}: {text}" for word, text in verdicts), ""])
    path.with_suffix(".md").write_text(page)
    console().print(page, markup=False)
    return path


if __name__ == "__main__":
    main()
