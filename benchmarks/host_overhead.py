"""Host time of RMSNorm: a chain of 64 norms, forward and backward, timed until all work is enqueued.

    python -m benchmarks.host_overhead        writes results/<GPU>/host_overhead.md

The shape is small so that the GPU never limits the host.
"""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

import quackish
from benchmarks import harness
from benchmarks.verdicts import at_most
from quackish.bench.environment import environment
from quackish.bench.host import host_times, launch_times
from quackish.bench.measure import reason
from quackish.bench.report import markdown_table
from quackish.ops.rms_norm.tools import EPS
from quackish.testing import inputs

M, N = 128, 1024
NORMS = ("torch", "quackish", "quack", "liger-cute", "liger-triton")
TARGET, LAUNCH_TARGET_US = 1.15, 6.0  # time / torch's time; the slowest launch


def norm_of(name: str) -> Callable[[Tensor, Tensor], Tensor]:
    if name == "quack":
        from quack.rmsnorm import rmsnorm
    elif name == "liger-cute":
        from liger_kernel.functional import rms_norm
    elif name == "liger-triton":
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction
    return {
        "torch": lambda x, weight: torch.nn.functional.rms_norm(x, weight.shape, weight, EPS),
        "quackish": lambda x, weight: quackish.rms_norm(x, weight, eps=EPS),
        "quack": lambda x, weight: rmsnorm(x, weight, eps=EPS),
        "liger-cute": lambda x, weight: rms_norm(x, weight, EPS, impl="nvidia-cutedsl"),
        "liger-triton": lambda x, weight: LigerRMSNormFunction.apply(x, weight, EPS, 0.0, "llama", False),
    }[name]


def chain(name: str, device: torch.device, count: int) -> Callable[[], None]:
    """Forward and backward of `count` norms."""
    x, dy, weight = (inputs.rows(shape, torch.bfloat16, device=device) for shape in ((M, N), (M, N), (N,)))
    norm, leaves = norm_of(name), [t.clone().requires_grad_() for t in (x, *[weight] * count)]

    def run() -> None:
        for t in leaves:
            t.grad = None
        functools.reduce(norm, leaves).backward(dy)

    run()  # compiles
    return run


def main(argv: Sequence[str] | None = None, repeats: int = 50, norms: int = 64) -> Path:
    """Returns the page."""
    args = harness.arguments("host_overhead", __doc__, csv=False).parse_args(argv)
    device, chains = harness.device_to_measure(), {}
    for name in NORMS:
        try:
            chains[name] = chain(name, device, norms)
        except Exception as error:
            print(f"without {name}: {reason(error)}")
    times = host_times(chains, device, repeats, calls=1)
    us = {name: chain_times.median / norms for name, chain_times in times.items()}
    launch = launch_times(chain("quackish", device, 1), device)
    verdicts = at_most(us["quackish"] / us["torch"], TARGET, "forward + backward / torch's")
    verdicts += at_most(launch and launch.median, LAUNCH_TARGET_US, "the slowest launch", " us")
    lines = [(name, f"{t:.1f}", f"{t / us['torch']:.2f}") for name, t in us.items()]
    about = environment(device, args.commit)
    page = f"# Host time on {about['gpu']}\n\nCommit `{about['commit']}`, driver {about['driver'] or '-'}, torch "
    page += f"{about['torch']}, {about['peers'] or 'no peers'}. Host microseconds per norm, forward and backward, in a "
    page += f"chain of {norms}, M {M}, N {N}.\n\n" + markdown_table(("provider", "us", "of torch"), lines)
    page += "".join(f"\n- {word}: {text}" for word, text in verdicts) + "\n"
    path = args.out / "host_overhead.md"
    harness.write_page(page, path)
    return path


if __name__ == "__main__":
    main()
