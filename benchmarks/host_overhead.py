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
from benchmarks.harness import BACKEND, console
from quackish.bench.bars import verdict
from quackish.bench.environment import ENVIRONMENT, device_name, environment
from quackish.bench.host import host_us, in_turns
from quackish.bench.measured import reason
from quackish.bench.providers_rms_norm import EPS
from quackish.bench.report import markdown_table
from quackish.bench.schema import CsvLog
from quackish.testing import inputs
from quackish.testing.timing import Times

NORMS, M, N = 64, 128, 1024
PARTS = ("forward", "backward", "both")
FIELDS = (*ENVIRONMENT, "what", "provider", "status", "median_us", "p20_us", "p80_us")
BAR = 1.15  # forward + backward, times torch's own
LAUNCH_BAR_US = 6.0

Norm = Callable[[Tensor, Tensor], Tensor]


def _quackish() -> Norm:
    from quackish.ops.rms_norm import rms_norm

    return lambda x, weight: rms_norm(x, weight, eps=EPS, backend=BACKEND)


def _bare() -> Norm:
    """A torch.autograd.Function around prepared launches: no checks and no look-ups."""
    forward_launch, backward_launch, backward_args = _launches()

    class Bare(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            y = torch.empty_like(x)
            rstd = torch.empty(M, dtype=torch.float32, device=x.device)
            forward_launch(x, weight, y, rstd)
            ctx.save_for_backward(x, weight, rstd)
            return y

        @staticmethod
        def backward(ctx, dy):
            x, weight, rstd = ctx.saved_tensors
            dx, dweight = torch.empty_like(x), torch.empty_like(weight)
            backward_launch(*backward_args(dy, x, weight, rstd, dx, dweight))
            return dx, dweight

    return Bare.apply


def _launches() -> tuple[Callable[..., None], Callable[..., None], Callable[..., tuple]]:
    """The chain's kernels: a forward that takes tensors, a backward, and a function from tensors to its arguments."""
    from quackish.ops.rms_norm_plans import BackwardPlan, ForwardPlan

    x, weight = _inputs()[:2]
    rstd, stream = torch.ones(M, device=x.device), torch.cuda.current_stream().cuda_stream
    forward = ForwardPlan(x, weight, None, None, EPS, 0.0, None, "cute").kernel
    backward = BackwardPlan(x, x, weight, rstd, None, 0.0, x.dtype, None, x.dtype, None, "cute").kernel
    scratch = torch.empty(backward.scratch_floats, device=x.device)
    tickets = torch.zeros(backward.num_tickets, dtype=torch.int32, device=x.device)

    def run_forward(x, weight, y, rstd):
        pointers = (x.data_ptr(), weight.data_ptr(), None, None, y.data_ptr(), None)
        forward.launch(*pointers, rstd.data_ptr(), None, None, EPS, 0.0, M, forward.num_ctas, stream)

    def backward_args(dy, x, weight, rstd, dx, dweight):
        inputs = (x.data_ptr(), weight.data_ptr(), dy.data_ptr(), None)
        outputs = (dx.data_ptr(), None, dweight.data_ptr(), None, scratch.data_ptr(), tickets.data_ptr())
        return *inputs, rstd.data_ptr(), *outputs, None, None, None, 0.0, M, backward.num_ctas, stream

    return run_forward, backward.launch, backward_args


def _quack() -> Norm:
    from quack.rmsnorm import rmsnorm

    return lambda x, weight: rmsnorm(x, weight, eps=EPS)


def _liger_cute() -> Norm:
    from liger_kernel.functional import rms_norm

    return lambda x, weight: rms_norm(x, weight, EPS, impl="nvidia-cutedsl")


def _liger_triton() -> Norm:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    return lambda x, weight: LigerRMSNormFunction.apply(x, weight, EPS, 0.0, "llama", False)


NORMS_OF: dict[str, Callable[[], Norm]] = {
    "torch": lambda: lambda x, weight: torch.nn.functional.rms_norm(x, weight.shape, weight, EPS),
    "quackish": _quackish,
    "bare Function": _bare,
    "quack": _quack,
    "liger-cute": _liger_cute,
    "liger-triton": _liger_triton,
}


def _inputs() -> tuple[Tensor, Tensor, Tensor]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shapes = ((M, N), (N,), (M, N))
    return tuple(inputs.rows(s, torch.bfloat16, seed=i, device=device) for i, s in enumerate(shapes))


def chain(norm: Norm, x: Tensor, weights: Sequence[Tensor], dy: Tensor) -> tuple[float, float, float]:
    """Microseconds per norm of forward, backward and both through the chain, until all is enqueued."""
    for t in (x, *weights):
        t.grad = None
    _synchronize()
    start = time.perf_counter()
    y = x
    for weight in weights:
        y = norm(y, weight)
    forward = 1e6 * (time.perf_counter() - start) / len(weights)
    _synchronize()
    start = time.perf_counter()
    y.backward(dy)
    backward = 1e6 * (time.perf_counter() - start) / len(weights)
    _synchronize()
    return forward, backward, forward + backward


def chains(norms: Mapping[str, Norm], repeats: int, count: int) -> dict[str, dict[str, Times]]:
    """For each norm the times of PARTS; the norms take turns."""
    x, weight, dy = _inputs()
    x.requires_grad_()
    weights = [weight.clone().requires_grad_() for _ in range(count)]
    works = {name: lambda norm=norm: chain(norm, x, weights, dy) for name, norm in norms.items()}
    return {name: dict(zip(PARTS, times, strict=True)) for name, times in in_turns(works, repeats, 3).items()}


def prepared_launch(repeats: int) -> Times:
    """Microseconds of one call of the compiled backward kernel, with its 18 arguments at hand."""
    _, launch, arguments = _launches()
    x, weight, dy = _inputs()
    args = arguments(dy, x, weight, torch.ones(M, device=x.device), torch.empty_like(x), torch.empty_like(weight))
    return in_turns({"launch": lambda: [host_us(lambda: launch(*args), x.device, calls=64)]}, repeats, 3)["launch"][0]


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main(argv: Sequence[str] | None = None) -> Path:
    """Returns the CSV file."""
    parser = harness.arguments("host_overhead", __doc__)
    parser.add_argument("--repeats", type=int, default=50, help="chains timed for each; default %(default)s")
    parser.add_argument("--norms", type=int, default=NORMS, help="norms in a chain; default %(default)s")
    args = parser.parse_args(argv)
    device, norms, rows = harness.device_to_measure(), {}, []
    for name, make in NORMS_OF.items():
        try:
            norms[name] = make()
            chains({name: norms[name]}, 1, args.norms)  # compiles
        except Exception as error:
            norms.pop(name, None)
            rows.append({"what": "both", "provider": name, "status": reason(error)})
            console.print(f"without {name}: {reason(error)}", markup=False)
    results = chains(norms, args.repeats, args.norms)
    times = {(what, name): t for name, of in results.items() for what, t in of.items()}
    if "bare Function" in norms:
        times["prepared launch", "quackish"] = prepared_launch(args.repeats)
    for (what, name), t in times.items():
        found = dict(median_us=t.median, p20_us=t.p20, p80_us=t.p80)
        rows.append({"what": what, "provider": name, "status": "ok", **found})
    path = (args.out or harness.results_dir(device)) / "host_overhead.csv"
    CsvLog(path, FIELDS, environment(device, args.commit)).write(rows)
    page = report(results, times.get(("prepared launch", "quackish")), args.norms)
    path.with_suffix(".md").write_text(f"# Host time on {device_name(device)}\n\n{page}")
    console.print(page, markup=False)
    return path


def report(results: Mapping[str, Mapping[str, Times]], launch: Times | None, norms: int) -> str:
    """A table and the verdicts, in Markdown."""
    of_torch = {name: times["both"].median / results["torch"]["both"].median for name, times in results.items()}
    lines = [
        (name, *(f"{times[what].median:.1f}" for what in PARTS), f"{of_torch[name]:.2f}")
        for name, times in results.items()
    ]
    said = []
    if ours := of_torch.get("quackish"):
        said.append(verdict(ours <= BAR, f"forward + backward: {ours:.4f} of torch's, bar {BAR}"))
    if launch:
        text = f"a prepared launch with 18 arguments: {launch.median:.3f} us, bar {LAUNCH_BAR_US}"
        said.append(verdict(launch.median <= LAUNCH_BAR_US, text))
    title = f"Host microseconds a norm, in a chain of {norms}, M {M}, N {N}"
    table = markdown_table(("provider", *PARTS, "of torch"), lines)
    return f"{title}\n\n{table}\n" + "".join(f"- {word}  {text}\n" for word, text in said)


if __name__ == "__main__":
    main()
