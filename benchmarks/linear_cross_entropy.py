"""Time, memory and errors of linear cross entropy and every installed peer, forward + backward.

python -m benchmarks.linear_cross_entropy                    # every shape with a target
python -m benchmarks.linear_cross_entropy --only 65536x4096x128256 --append   # one of these again
python -m benchmarks.linear_cross_entropy --host --append    # host time of a call
python -m benchmarks.linear_cross_entropy --steady --append  # back-to-back steps, as a training loop runs them

`quackish bench linear_cross_entropy` measures other shapes and providers.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from benchmarks import harness
from benchmarks import targets_linear_cross_entropy as targets
from quackish.bench.cells import OURS, Cell, Job, is_ours, shape_name
from quackish.ops.linear_cross_entropy import providers as lce
from quackish.ops.linear_cross_entropy.providers import ALL, LONG, MAIN, RECOMPUTE

USUAL = (*MAIN, f"{OURS}-chunked-4096", RECOMPUTE)


def case(
    *shape: int, dtype="bfloat16", direction="forward+backward", data="normal", ignored=0.0, providers=USUAL
) -> Job:
    return Job(Cell("linear_cross_entropy", shape, dtype, direction, data, ignored), providers)


CONFIDENT = (*(name for name in ALL if is_ours(name)), "quack", "quack-2048", "quack-base", "liger", "cce", "torch")
IGNORED = (OURS, f"{OURS}-recompute", RECOMPUTE, "quack", "liger-cute-sm90", "cce", "torch")
FP32 = (OURS, "liger", "torch", "torch-compile")
MANY_ROWS = (OURS, lce.TOKENS, f"{OURS}-recompute", "torch", "torch-fp32")
JOBS = [
    case(8192, 4096, 128256, providers=ALL),
    case(8192, 4096, 128256, providers=lce.LOSS, direction="forward"),
    case(8192, 4096, 128256, providers=IGNORED, ignored=0.8),
    case(8192, 4096, 128256, providers=CONFIDENT, data="confident"),
    case(4096, 2048, 32000),
    case(8192, 2048, 151936),
    case(1024, 4096, 128256),
    case(16384, 4096, 128256),
    case(65536, 4096, 128256, providers=LONG),
    case(16384, 4096, 131072, providers=lce.PER_TOKEN),
    *(case(*cell.shape, providers=MANY_ROWS) for cell in targets.MANY_ROWS),
    *(case(8192, 4096, 128256, dtype=dtype, providers=FP32) for dtype in ("float32", "tf32")),
]
HOST = [case(128, 512, 1024, direction="host", providers=lce.HOST)]
TINY = [case(48, 64, 300, providers=(*filter(is_ours, lce.PROVIDERS), "torch"))]  # without a GPU
TINY += [case(40, 64, 300, providers=(OURS, "torch"), **how) for how in ({"direction": "forward"}, {"ignored": 0.8})]
TINY += [case(40, 64, 300, providers=(OURS, "torch"), **how) for how in ({"data": "confident"}, {"dtype": "tf32"})]


def main(argv: Sequence[str] | None = None) -> Path:
    """Returns the CSV file."""
    jobs = TINY if harness.device_to_measure().type == "cpu" else JOBS
    parser = harness.arguments("linear_cross_entropy", __doc__)
    parser.add_argument("--host", action="store_true", help="measure the host time of a call instead")
    steady_help = "measure bursts of back-to-back steps; providers rotate without pauses"
    parser.add_argument("--steady", action="store_true", help=steady_help)
    shapes = dict.fromkeys(shape_name(job.cell.shape) for job in jobs)
    parser.add_argument(
        "--only", choices=shapes, metavar="MxHxV", help="measure only this one of the shapes with targets"
    )
    args = parser.parse_args(argv)
    if args.only:
        jobs = [job for job in jobs if shape_name(job.cell.shape) == args.only]
    if args.steady:  # measures the plain steps only
        steps = [job for job in jobs if job.cell == targets.train(job.cell.shape)]
        jobs = [dataclasses.replace(job, cell=dataclasses.replace(job.cell, direction="steady")) for job in steps]
    return harness.run(HOST if args.host else jobs, targets.PAGE, args, seconds=0.8)


if __name__ == "__main__":
    harness.main(main)
