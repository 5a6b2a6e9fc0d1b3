"""The MLP and the rotary embeddings of a decoder layer, against plain matmuls, a copy, and other libraries.

    python -m benchmarks.decoder

bf16; swiglu with gate and up as two weights. Rotary: batch x heads of q x heads of k x length x D, with the strides of
(B, L, H, D).
"""

from collections.abc import Sequence
from pathlib import Path

from benchmarks import harness
from benchmarks.verdicts import at_most, faster, verdict
from quackish.bench import plots, report
from quackish.bench.cells import OURS, Cell, Job, is_ours
from quackish.bench.report import Verdict
from quackish.bench.results import Results
from quackish.bench.table import BENCHES, ERRORS

MLP = {
    (16_384, 2048, 8192): "Llama 3.2 1B",
    (8192, 4096, 14_336): "Llama 3 8B",
    (4096, 4096, 14_336): "Llama 3 8B",
    (16_384, 1536, 8960): "Qwen 2.5 1.5B",
    (1024, 4096, 14_336): "Llama 3 8B, few rows",
}
ROTARY = {(8, 32, 8, 2048, 64): "Llama 3.2 1B", (4, 32, 8, 4096, 128): "Llama 3 8B"}
HOST = {"mlp": (64, 128, 128), "rotary": (1, 4, 2, 64, 64)}  # small shapes, so that GPU time stays hidden
DIRECTIONS = {"mlp": ("forward+backward",), "rotary": ("forward", "backward")}
OVER_MATMULS, OVER_COPY, OVER_HOST, FEW_ROWS = 1.02, 1.10, 1.2, 1024


def verdicts(results: Results) -> list[Verdict]:
    lines = []
    for cell in results.cells:

        def faster_than(peer: str, text: str, cell: Cell = cell) -> list[Verdict]:
            return faster(results, cell, OURS, [peer] if results.ms(cell, peer) else [], f"{cell}: faster than {text}")

        ours, theirs = results.ms(cell, OURS), results.ms(cell, "torch")
        if cell.direction == "host":
            lines += at_most(ours and theirs and ours / theirs, OVER_HOST, f"{cell}: host time / PyTorch eager's")
            continue
        over_roof = results.ratio(cell, OURS, BENCHES[cell.op].roofs[cell.direction])
        if cell.op == "rotary":
            lines += at_most(over_roof, OVER_COPY, f"{cell}: time / copy of q and k")
            lines += faster_than("liger", "Liger")
        elif cell.shape[0] > FEW_ROWS:
            lines += at_most(over_roof, OVER_MATMULS, f"{cell}: time / plain matmuls")
        else:
            lines += faster_than("torch-compile", "compiled PyTorch")
        compared = [("peak_mb", "liger")] * (cell.op == "mlp") + [(name, "torch") for name in ERRORS]
        for column, peer in compared:
            mine, other = (results.value(cell, name, column) for name in (OURS, peer))
            if mine is not None and other is not None:
                lines.append(verdict(mine <= other, f"{cell}: {column} {mine:.4g}, {peer} {other:.4g}"))
    return lines


PAGE = report.Page(
    preface="Times are medians, of plain calls for mlp and of replayed CUDA graphs for rotary; providers take turns. "
    "The roof of mlp is its bare matmuls by torch.mm, that of rotary is a copy of q and k. Liger's rotary writes in "
    "place, ours does not. Memory is the peak above inputs, including gradients. Errors are norm-wise against fp64.",
    figures=plots.for_bench,
    verdicts=verdicts,
)


def jobs(op: str, on_gpu: bool) -> list[Job]:
    """All cells; without a GPU, small ones."""
    bench, shapes, host = BENCHES[op], {"mlp": MLP, "rotary": ROTARY}[op], HOST[op]
    names = bench.providers
    if not on_gpu:
        shapes, host = {bench.op.small: "small"}, bench.op.small
        names = tuple(name for name in names if is_ours(name) or name == "torch")
    cells = [(Cell(op, s, "bfloat16", d), note) for s, note in shapes.items() for d in DIRECTIONS[op]]
    return [Job(cell, names, note) for cell, note in cells] + [Job(Cell(op, host, "bfloat16", "host"), (OURS, "torch"))]


def main(argv: Sequence[str] | None = None) -> list[Path]:
    """Returns the CSV files."""
    args = harness.arguments("decoder", __doc__).parse_args(argv)
    on_gpu = harness.device_to_measure().type == "cuda"
    return [harness.run(jobs(op, on_gpu), PAGE, args) for op in ("mlp", "rotary")]


if __name__ == "__main__":
    harness.main(main)
