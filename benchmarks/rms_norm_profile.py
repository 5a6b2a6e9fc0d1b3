"""RMSNorm over the grid as `quackish.profile` sees it: the share of this card's measured bandwidth in each launch.

    python -m benchmarks.rms_norm_profile

Every cell of more than 100 MB should reach 85 % of what torch.mul by 1 (for forward) or torch.add (for backward) of its
size reaches in the same run; `pct_of_peak` is of the largest such speed, that of 0.5 GB and more. The L2 is cleared
before each call, and the host is ahead of the GPU. Rows go to rms_norm_profile.csv.
"""

import statistics
from collections.abc import Sequence
from pathlib import Path

import torch

import quackish
from benchmarks import harness
from benchmarks.rms_norm import GRID
from quackish.bench.console import console
from quackish.bench.environment import ENVIRONMENT, environment
from quackish.bench.measure_rms_norm import elementwise_roofs
from quackish.bench.results import CsvLog
from quackish.gpu import Roofs
from quackish.profiling import Launch, measured_roofs
from quackish.testing.timing import CLEAR_BYTES, interleave
from quackish.work import floor

FIELDS = (
    *ENVIRONMENT,
    *("kernel", "config", "m", "n", "bytes", "median_us", "gb_per_s", "roof_us", "pct_of_roof", "pct_of_peak"),
)
LARGE, BAR = 100e6, 85.0  # bytes; % of the roof
TIMES = 10


def launches(cell: tuple[int, int, str], device: torch.device) -> list[Launch]:
    """Of TIMES calls, forward and backward."""
    m, n, dtype = cell
    of_x = dict(dtype=getattr(torch, dtype), device=device)
    x, dy = torch.randn(m, n, **of_x, requires_grad=True), torch.randn(m, n, **of_x)
    weight = torch.randn(n, **of_x, requires_grad=True)
    cold = torch.empty(CLEAR_BYTES, dtype=torch.uint8, device=device)
    torch.autograd.grad(quackish.rms_norm(x, weight, backend="cute"), (x, weight), dy)
    torch.cuda._sleep(10_000_000)
    with quackish.profile() as p:
        for _ in range(TIMES):
            cold.zero_()
            y = quackish.rms_norm(x, weight, backend="cute")
            cold.zero_()
            torch.autograd.grad(y, (x, weight), dy)
    return p.launches


def roofs_of_size(cell: tuple[int, int, str], device: torch.device) -> dict[str, float]:
    """Microseconds of a mul by 1 and of an add of the cell's size, by the kernels that they are the roof of."""
    m, n, dtype = cell
    a, b, out = (torch.randn(m, n, dtype=getattr(torch, dtype), device=device) for _ in range(3))
    times = interleave(elementwise_roofs(a, b, out), device, rounds=1, block=TIMES)
    return {"rms_norm_fwd": times["mul"].median, "rms_norm_bwd": times["add"].median}


def rows_of(found: Sequence[Launch], peak: Roofs, roof_us: dict[str, float]) -> list[dict[str, object]]:
    rows = []
    for kernel in dict.fromkeys(launch.kernel for launch in found):
        of_kernel = [launch for launch in found if launch.kernel == kernel]
        first, us = of_kernel[0], 1e3 * statistics.median(launch.ms for launch in of_kernel)
        sizes = dict(m=first.sizes["m"], n=first.problem.n, bytes=first.work.bytes)
        speeds = dict(median_us=us, gb_per_s=1e-3 * first.work.bytes / us, roof_us=roof_us[kernel])
        shares = dict(pct_of_roof=100 * roof_us[kernel] / us, pct_of_peak=100 * floor(first.work, peak).us / us)
        rows.append(dict(kernel=kernel, config=first.config, **sizes, **speeds, **shares))
    return rows


def main(argv: Sequence[str] | None = None) -> Path:
    """Returns the CSV file."""
    parser = harness.arguments("rms_norm_profile", __doc__)
    args = parser.parse_args(argv)
    device = harness.device_to_measure()
    if device.type != "cuda":
        parser.error("a GPU is needed: there are no launches to see without one")
    peak, path = measured_roofs(torch.cuda.current_device()), args.out or harness.results_dir(device)
    log = CsvLog(path / "rms_norm_profile.csv", FIELDS, environment(device, args.commit))
    rows = [row for cell in GRID for row in rows_of(launches(cell, device), peak, roofs_of_size(cell, device))]
    log.write(rows)
    for kernel in ("rms_norm_fwd", "rms_norm_bwd"):
        large = [row for row in rows if row["kernel"] == kernel and row["bytes"] > LARGE]
        kept = sum(row["pct_of_roof"] >= BAR for row in large)
        of_peak = sum(row["pct_of_peak"] >= BAR for row in large)
        worst = min(large, key=lambda row: row["pct_of_roof"])
        text = f"{kept} of {len(large)} cells of more than 100 MB reach {BAR:.0f} % of the roof of their size, worst "
        text += f"{worst['pct_of_roof']:.2f} at {worst['m']} x {worst['n']}; {of_peak} reach {BAR:.0f} % of the peak"
        console().print(f"{'PASS' if kept == len(large) else 'FAIL'}  {kernel}: {text}", markup=False)
    return log.path


if __name__ == "__main__":
    main()
