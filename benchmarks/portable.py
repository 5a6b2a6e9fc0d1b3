"""Each operation without kernels beside PyTorch's own eager code: time and peak memory of forward and backward.

    python -m benchmarks.portable

bf16, with `quackish.use_kernels(False)`: on any GPU, what calls cost where no kernel runs. Backward of rms_norm and
rotary is timed alone. --tiny runs small shapes, to test the program, as it does without a GPU.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

import quackish
from benchmarks import harness
from quackish.bench import environment
from quackish.bench.cells import OURS, Cell, Job, shape_name
from quackish.bench.measure import Record, Run
from quackish.bench.report import markdown_table
from quackish.bench.results import CsvLog, row_of
from quackish.bench.table import BENCHES
from quackish.cli.console import NO_GPU
from quackish.text import significant

ATTENTION = "scaled_dot_product_attention"
CALLS = (  # operation, shape, options
    ("rms_norm", (8192, 4096), "normal"),
    ("rotary", (4, 32, 8, 2048, 128), "normal"),
    ("linear_cross_entropy", (4096, 2048, 32_000), "normal"),
    ("linear_cross_entropy", (4096, 2048, 128_256), "normal"),
    ("linear_divergence", (2048, 2048, 2048, 32_000), "normal"),
    ("mlp", (4096, 2048, 8192), "normal"),
    ("grouped_mlp", (16_384, 2048, 768, 128), "normal"),
    ("grouped_mlp", (8192, 2048, 3584, 8), "normal"),
    ("moe_mlp", (2048, 2048, 768, 128, 8), "normal"),
    (ATTENTION, (4, 16, 1024, 64), "attn_bias=1,H"),
    (ATTENTION, (128, 4, 128, 32), "attn_bias=1,H key_mask"),
    (ATTENTION, (2, 16, 2048, 64), "attn_bias=none attn_mask=half"),
)
EAGER = {ATTENTION: "torch-efficient", "moe_mlp": "transformers"}  # "torch" for the others
PREFACE = (
    "Without kernels, in bf16. Times are medians of forward and backward (of rms_norm and rotary: backward alone), in "
    "which both take turns; memory is the peak above inputs, with results and gradients. PyTorch is its eager code: "
    "for attention its memory-efficient kernel with one combined mask, for grouped_mlp `F.grouped_mm`, for moe_mlp "
    "Transformers' experts."
)


def measured(device: torch.device, tiny: bool) -> Iterator[tuple[Job, dict[str, Record]]]:
    """The records of each call, by provider."""
    for op, shape, data in CALLS:
        bench, eager = BENCHES[op], EAGER.get(op, "torch")
        eager = "torch-math" if device.type == "cpu" and op == ATTENTION else eager
        shape = bench.op.small if tiny or device.type == "cpu" else shape
        job = Job(Cell(op, shape, "bfloat16", bench.directions["backward"], data), (OURS, eager))
        records: dict[str, Record] = {}
        bench.measure(job.cell, job.providers, Run(device, bench.load, records.__setitem__, rounds=3, seconds=0.2))
        yield job, {name: records[name] for name in job.providers}


def line_of(job: Job, records: dict[str, Record]) -> list[str]:
    """A line of the table."""
    ours, theirs = (records[name] for name in job.providers)
    pairs = [[record.get(column) for record in (ours, theirs)] for column in ("median_ms", "peak_mb")]
    numbers = ["" if number is None else significant(number, 3) for pair in pairs for number in pair]
    ratio = "" if None in pairs[0] else f"{pairs[0][0] / pairs[0][1]:.2f}"
    failed = [f"{name}: {record['status']}" for name, record in records.items() if record["status"] != "ok"]
    call = f"{job.cell.op} {shape_name(job.cell.shape)}{job.cell.kind}"
    return [call, *numbers[:2], ratio, *numbers[2:], ", ".join([job.providers[1], *failed])]


def main(argv: Sequence[str] | None = None) -> Path:
    """Returns the CSV file."""
    device = harness.device_to_measure()
    parser = harness.arguments("portable", __doc__, csv=False)
    parser.add_argument("--tiny", action="store_true", help="small shapes, to test the program")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    path, lines = args.out / "portable.csv", []
    where = environment.environment(device, args.commit)
    log = CsvLog(path, where)
    quackish.use_kernels(False)
    try:
        for job, records in measured(device, args.tiny):
            log.write(row_of(job, name, record) for name, record in records.items())
            lines.append(line_of(job, records))
    finally:
        quackish.use_kernels(True)
        log.close()
    header = ["call", "ms", "PyTorch ms", "ratio", "peak MB", "PyTorch peak MB", "PyTorch"]
    source = f"{where['date']}, commit {where['commit']}, driver {where['driver'] or '-'}, torch {where['torch']}."
    notes = [f"**{NO_GPU}**"] * (device.type == "cpu")
    page = "\n\n".join([f"# Without kernels on {where['gpu']}", *notes, source, PREFACE, markdown_table(header, lines)])
    harness.write_page(page, path.with_suffix(".md"))
    return path


if __name__ == "__main__":
    harness.main(main)
