"""Host time of an RMSNorm: a chain of 64 norms, forward and backward, timed until all is enqueued.

    python -m benchmarks.host_overhead

Shapes are small (M 128, N 1024, bf16), so that the GPU keeps up and the host is what is measured.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

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
PARTS = ("forward", "backward", "both")
FIELDS = (*ENVIRONMENT, "what", "provider", "status", "median_us", "p20_us", "p80_us")
BAR, LAUNCH_BAR_US = 1.15, 6.0  # forward + backward, times torch's own; the slowest launch

Norm = Callable[[Tensor, Tensor], Tensor]


def _quackish() -> Norm:
    from quackish.ops.rms_norm import rms_norm

    return lambda x, weight: rms_norm(x, weight, eps=EPS, backend=harness.BACKEND)


def _quack() -> Norm:
    from quack.rmsnorm import rmsnorm

    return lambda x, weight: rmsnorm(x, weight, eps=EPS)


def _liger_cute() -> Norm:
    from liger_kernel.functional import rms_norm

    return lambda x, weight: rms_norm(x, weight, EPS, impl="nvidia-cutedsl")


def _liger_triton() -> Norm:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    return lambda x, weight: LigerRMSNormFunction.apply(x, weight, EPS, 0.0, "llama", False)


def _torch() -> Norm:
    return lambda x, weight: torch.nn.functional.rms_norm(x, weight.shape, weight, EPS)


NORMS: dict[str, Callable[[], Norm]] = {"torch": _torch, "quackish": _quackish, "quack": _quack}
NORMS |= {"liger-cute": _liger_cute, "liger-triton": _liger_triton}


def chain(norm: Norm, device: torch.device, count: int) -> Callable[[], tuple[float, float, float]]:
    """A function that returns microseconds per norm of PARTS, until all is enqueued."""
    x, dy, weight = (inputs.rows(shape, torch.bfloat16, device=device) for shape in ((M, N), (M, N), (N,)))
    leaves = [t.clone().requires_grad_() for t in (x, *[weight] * count)]

    def timed(work: Callable[[], object]) -> tuple[float, object]:
        start = time.perf_counter()
        result = work()
        us = 1e6 * (time.perf_counter() - start) / count
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return us, result

    def forward() -> Tensor:
        y = leaves[0]
        for weight in leaves[1:]:
            y = norm(y, weight)
        return y

    def run() -> tuple[float, float, float]:
        for t in leaves:
            t.grad = None
        forward_us, y = timed(forward)
        backward_us, _ = timed(lambda: y.backward(dy))
        return forward_us, backward_us, forward_us + backward_us

    return run


def main(argv: Sequence[str] | None = None) -> Path:
    """Returns the CSV file."""
    parser = harness.arguments("host_overhead", __doc__)
    parser.add_argument("--repeats", type=int, default=50, help="chains timed for each; default %(default)s")
    parser.add_argument("--norms", type=int, default=64, help="norms in a chain; default %(default)s")
    args = parser.parse_args(argv)
    device, chains, rows = harness.device_to_measure(), {}, []
    for name, make in NORMS.items():
        try:
            chains[name] = chain(make(), device, args.norms)
            chains[name]()  # compiles
        except Exception as error:
            chains.pop(name, None)
            rows.append({"what": "both", "provider": name, "status": reason(error)})
            console().print(f"without {name}: {reason(error)}", markup=False)
    times = {n: dict(zip(PARTS, t, strict=True)) for n, t in in_turns(chains, args.repeats, 3).items()}
    if "quackish" in chains and (launch := launch_times(chain(_quackish(), device, 1), device)):
        times["quackish"]["launch"] = launch
    for name, parts in times.items():
        found = {what: dict(median_us=t.median, p20_us=t.p20, p80_us=t.p80) for what, t in parts.items()}
        rows += [{"what": what, "provider": name, "status": "ok", **us} for what, us in found.items()]
    path = (args.out or harness.results_dir(device)) / "host_overhead.csv"
    CsvLog(path, FIELDS, environment(device, args.commit)).write(rows)
    page = report({name: {what: t.median for what, t in parts.items()} for name, parts in times.items()}, args.norms)
    path.with_suffix(".md").write_text(f"# Host time on {device_name(device)}\n\n{page}")
    console().print(page, markup=False)
    return path


def report(us: Mapping[str, Mapping[str, float]], norms: int) -> str:
    """A table and the verdicts, in Markdown."""
    of_torch = {name: of["both"] / us["torch"]["both"] for name, of in us.items()}
    lines = [(name, *(f"{of[what]:.1f}" for what in PARTS), f"{of_torch[name]:.2f}") for name, of in us.items()]
    said = at_most(of_torch.get("quackish"), BAR, "forward + backward / torch's")
    said += at_most(
        us.get("quackish", {}).get("launch"), LAUNCH_BAR_US, "the slowest launch, its arguments at hand", " us"
    )
    table = markdown_table(("provider", *PARTS, "of torch"), lines)
    verdicts = "".join(f"- {word}  {text}\n" for word, text in said)
    return f"Host microseconds a norm, in a chain of {norms}, M {M}, N {N}\n\n{table}\n{verdicts}"


if __name__ == "__main__":
    main()
