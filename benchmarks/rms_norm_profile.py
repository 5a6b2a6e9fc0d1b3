"""RMSNorm over the grid as `quackish.profile` sees it: the share of this card's measured bandwidth in each launch.

    python -m benchmarks.rms_norm_profile

Every cell of more than 100 MB should reach 85 % of the roof: a copy for forward, an add for backward. The L2 is cleared
before each call, and the host is ahead of the GPU. Rows go to rms_norm_profile.csv.
"""

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path

import torch

import quackish
from benchmarks import harness
from benchmarks.harness import console
from benchmarks.rms_norm import GRID, Cell
from quackish.bench.environment import ENVIRONMENT, environment
from quackish.bench.files import CsvLog
from quackish.gpu import Roofs
from quackish.profiling import Launch, measured_roofs
from quackish.testing.timing import CLEAR_BYTES
from quackish.work import floor

FIELDS = (*ENVIRONMENT, "kernel", "config", "m", "n", "bytes", "median_us", "gb_per_s", "roof_gb_per_s", "pct_of_roof")
LARGE, BAR = 100e6, 85.0  # bytes; % of the roof


def launches(cell: Cell, device: torch.device, times: int = 10) -> list[Launch]:
    """Of `times` calls, forward and backward."""
    of_x = dict(dtype=cell.dtype, device=device)
    x, dy = torch.randn(cell.m, cell.n, **of_x, requires_grad=True), torch.randn(cell.m, cell.n, **of_x)
    weight = torch.randn(cell.n, **of_x, requires_grad=True)
    cold = torch.empty(CLEAR_BYTES, dtype=torch.uint8, device=device)
    torch.autograd.grad(quackish.rms_norm(x, weight, backend="cute"), (x, weight), dy)
    torch.cuda._sleep(10_000_000)
    with quackish.profile() as p:
        for _ in range(times):
            cold.zero_()
            y = quackish.rms_norm(x, weight, backend="cute")
            cold.zero_()
            torch.autograd.grad(y, (x, weight), dy)
    return p.launches


def rows_of(found: Sequence[Launch], roofs: Roofs) -> list[dict[str, object]]:
    rows = []
    for kernel in dict.fromkeys(launch.kernel for launch in found):
        of_kernel = [launch for launch in found if launch.kernel == kernel]
        first, us = of_kernel[0], 1e3 * statistics.median(launch.ms for launch in of_kernel)
        least = floor(first.work, roofs).us
        speeds = dict(gb_per_s=1e-3 * first.work.bytes / us, roof_gb_per_s=1e-3 * first.work.bytes / least)
        sizes = dict(m=first.sizes["m"], n=first.problem.n, bytes=first.work.bytes)
        rows.append(
            dict(kernel=kernel, config=first.config, **sizes, median_us=us, **speeds, pct_of_roof=100 * least / us)
        )
    return rows


def main(argv: Sequence[str] | None = None) -> Path:
    """Returns the CSV file."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rms_norm_profile", description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, help="folder of the results; default benchmarks/results/<GPU>")
    parser.add_argument("--commit", help="recorded where there is no git to ask")
    args = parser.parse_args(argv)
    device = harness.device_to_measure()
    if device.type != "cuda":
        parser.error("a GPU is needed: there are no launches to see without one")
    roofs = measured_roofs(torch.cuda.current_device())
    log = CsvLog(
        (args.out or harness.results_dir(device)) / "rms_norm_profile.csv", FIELDS, environment(device, args.commit)
    )
    rows = [row for cell in GRID for row in rows_of(launches(cell, device), roofs)]
    log.write(rows)
    for kernel in ("rms_norm_fwd", "rms_norm_bwd"):
        large = [row for row in rows if row["kernel"] == kernel and row["bytes"] > LARGE]
        kept = [row for row in large if row["pct_of_roof"] >= BAR]
        worst = min(large, key=lambda row: row["pct_of_roof"])
        console.print(
            f"{'PASS' if len(kept) == len(large) else 'FAIL'}  {kernel}: {len(kept)} of {len(large)} cells of more "
            f"than 100 MB reach {BAR:.0f} % of the roof; worst {worst['pct_of_roof']:.1f} at {worst['m']} x {worst['n']}",
            markup=False,
        )
    return log.path


if __name__ == "__main__":
    main()
