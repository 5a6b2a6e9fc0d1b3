"""Attention with a learned bias or a mask, against PyTorch's SDPA, FlexAttention, cuEquivariance and FlashAttention 4.

    python -m benchmarks.attention                          # every cell with a target: about 6 minutes on an H200
    python -m benchmarks.attention --quick                  # the main cells
    python -m benchmarks.attention --only 16x2048 --append  # the cells whose name has these words, again

16 heads, head dimensions of 64 and 128, 8192 queries in all; and the sizes of triangles, windows, graphs and T5. Before
the run, processes compile the kernels of quackish and FlexAttention for all cells at once, into their caches on disk.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks import harness
from benchmarks.verdicts import at_most, verdict
from quackish.bench import report
from quackish.bench.cells import OURS, Cell, Job, data_of, is_ours, options_of
from quackish.bench.report import Verdict
from quackish.bench.results import Results
from quackish.bench.table import BENCHES
from quackish.ops.attention import measure as measure_attention
from quackish.ops.attention.providers import ABOUT, PROVIDERS
from quackish.ops.attention.tools import ATTENTION, BIASES, MASKS

FORWARD, TRAIN, HOST = "forward", "forward+backward", "host"
HEADS, TOKENS = 16, 8192
HEAD_DIMS, LENGTHS = (64, 128), (2048, 512, 4096, 8192)
SPEEDUP, SPEEDUP_OF_MASKS = 2.5, 1.5
OVER_HOST = 1.1  # host time over that of memory-efficient SDPA
SHORTEST = 2048  # queries, from which SPEEDUP is the target
MEMORY = 64  # bytes per row of the scores, besides results and gradients
ERROR = {"err_y": 0.75 * 2**-8} | dict.fromkeys(measure_attention.ERRORS[1:], 2**-8)  # rounding to bf16: 2**-9 at most

BIASED = (OURS, "torch-math", "torch-efficient", "torch-cudnn", "flex")
MASKED = (*BIASED, "flex-block-mask")
COMPILED = (OURS, "flex", "flex-block-mask", "fa4")  # `first_step` compiles their kernels


def case(length: int, d: int, direction: str = TRAIN, providers: Sequence[str] = BIASED, **options: object) -> Job:
    shape = max(1, TOKENS // length), HEADS, length, d
    return Job(Cell(ATTENTION.name, shape, "bfloat16", direction, data_of(options)), tuple(providers))


def masks(length: int, d: int) -> list[Job]:
    return [case(length, d, providers=MASKED, attn_bias="none", attn_mask=kind) for kind in MASKS]


# By title: batch, heads, length, head dimension, and the options of a call
SMALL: dict[str, tuple[tuple[int, ...], dict[str, object]]] = {
    "triangle attention, L 256": ((256, 4, 256, 32), dict(attn_bias="1,H", key_mask=True)),
    "triangle attention, L 384": ((384, 4, 384, 32), dict(attn_bias="1,H", key_mask=True)),
    "Swin, windows of 64": ((256, 4, 64, 32), dict(attn_bias="1,H")),
    "Swin, windows of 49": ((1024, 3, 49, 32), dict(attn_bias="1,H")),
    "Graphormer": ((64, 32, 128, 24), {}),
    "pair bias": ((1, 16, 1024, 24), {}),
    "T5": ((8, 16, 512, 64), dict(attn_bias="1,H")),
    "triangle attention, L 768": ((768, 4, 768, 32), dict(attn_bias="1,H", key_mask=True)),
}
SMALL_PROVIDERS = (OURS, "torch-efficient", "flex", "cuequivariance")
SMALL_TARGETS = {(768, 4, 768, 32): 1 / 0.68, (256, 4, 64, 32): 1 / 1.3}  # the least speedup; 1 for other shapes

_OTHERS = [bias for bias in BIASES if bias != "B,H"]
QUICK = [
    case(2048, 64, providers=(*BIASED, "fa4")),
    case(2048, 64, FORWARD),
    *(case(length, d) for length in LENGTHS for d in HEAD_DIMS if (length, d) != (2048, 64)),
    *masks(4096, 64),
]
JOBS = [  # the most important ones first, because a run may be cut off
    *QUICK,
    *(
        Job(Cell(ATTENTION.name, shape, "bfloat16", TRAIN, data_of(options)), SMALL_PROVIDERS, title)
        for title, (shape, options) in SMALL.items()
    ),
    Job(Cell(ATTENTION.name, (2, 4, 64, 32), "bfloat16", HOST, "attn_bias=1,H"), (OURS, "torch-efficient")),
    *(case(2048, d, attn_bias=bias) for d in HEAD_DIMS for bias in _OTHERS),
    *(case(2048, 64, attn_bias=bias, bias_dtype="float32") for bias in BIASES),
    *masks(4096, 128),
    *(case(length, 64, attn_bias=bias) for length in (512, 4096) for bias in _OTHERS),
    *(case(length, d, FORWARD) for length in LENGTHS for d in HEAD_DIMS if (length, d) != (2048, 64)),
    *(case(length, 128, bias_dtype="float32") for length in (512, 2048)),
    case(2048, 64, causal=True),
    case(2048, 64, providers=MASKED, attn_mask="top"),
    *(case(length, 128, attn_bias=bias) for length in (512, 4096) for bias in _OTHERS),
    case(2048, 64, providers=(*BIASED, "fa4"), attn_bias="none"),
]
_TINY = (OURS, "torch-math", "torch-efficient")
TINY = [  # without a GPU
    Job(Cell(ATTENTION.name, ATTENTION.small, "bfloat16", direction, data_of(options)), _TINY)
    for direction, options in (
        (TRAIN, {}), (FORWARD, {}), (TRAIN, {"attn_bias": "1,H", "bias_dtype": "float32", "causal": True}),
        (TRAIN, {"attn_bias": "none", "attn_mask": "blocks"}), (TRAIN, {"attn_mask": "top"}),
        (TRAIN, {"attn_bias": "none"}), (HOST, {"attn_bias": "1,H"}),
    )
]  # fmt: skip


# Verdicts -------------------------------------------------------------------------------------------------------------


def target_of(cell: Cell) -> float | None:
    """How many times as long the fastest other library may at least take; None for plain calls, which are PyTorch's.

    Host time has a target of its own.
    """
    if cell.direction == HOST:
        return None
    options = options_of(cell.data)
    if cell.direction == TRAIN and options.get("attn_bias") == "1,H" and cell.shape in SMALL_TARGETS:
        return SMALL_TARGETS[cell.shape]
    if options.get("attn_bias") == "none":
        return SPEEDUP_OF_MASKS if "attn_mask" in options else None
    return SPEEDUP if cell.direction == TRAIN and not options and cell.shape[2] >= SHORTEST else 1.0


def rivals_of(cell: Cell, results: Results) -> list[str]:
    """The other libraries with right results. The target of a mask alone is against FlexAttention."""
    only = ("flex", "flex-block-mask") if target_of(cell) == SPEEDUP_OF_MASKS else tuple(PROVIDERS)
    return [name for name in results.providers([cell]) if name in only and not is_ours(name)]


def verdicts(results: Results) -> list[Verdict]:
    lines = [line for cell in results.cells for line in (_host if cell.direction == HOST else _speed)(results, cell)]
    return lines + _memory(results) + _errors(results)


def _speed(results: Results, cell: Cell) -> list[Verdict]:
    target = target_of(cell)
    times = {name: results.ms(cell, name) for name in rivals_of(cell, results) if not results.is_wrong(cell, name)}
    if target is None or not times or OURS not in results.cells[cell]:
        return []
    ours, best = results.ms(cell, OURS), min(times, key=times.__getitem__)
    if not ours or results.is_wrong(cell, OURS):
        return [verdict(False, f"{cell}: {results.cells[cell][OURS]['status']}, or wrong results")]
    speedup = round(times[best] / ours, 9)
    numbers = f"{times[best]:.3f} ms / {ours:.3f} ms = {speedup:.3f}"
    least = results.ratio(cell, OURS, results.roof(cell))
    over = f"; ours is {least:.2f} times the minimum" if least else ""
    is_met = speedup > target if target == 1.0 else speedup >= target
    return [verdict(is_met, f"{cell}: {best} / ours: {numbers}, target {target:g}{over}")]


def _host(results: Results, cell: Cell) -> list[Verdict]:
    ours, theirs = results.ms(cell, OURS), results.ms(cell, "torch-efficient")
    return at_most(ours and theirs and ours / theirs, OVER_HOST, f"{cell}: host time / memory-efficient SDPA's")


def _memory(results: Results) -> list[Verdict]:
    """The peak is linear in the length, besides the bias's gradient."""
    shares = {}
    for cell in results.cells:
        if target_of(cell) is not None and (mb := results.value(cell, OURS, "peak_mb")) is not None:
            shares[cell] = 1e6 * mb / least_bytes(cell)
    if not shares:
        return []
    more = [f"{cell} {share:.3f}" for cell, share in sorted(shares.items(), key=lambda of: -of[1]) if share > 1]
    text = f"peak memory / (results, gradients, {MEMORY} bytes per row) at most 1: {len(shares) - len(more)}"
    return [verdict(not more, f"{text} of {len(shares)} cells{'; more in ' * bool(more)}{'; '.join(more)}")]


def least_bytes(cell: Cell) -> int:
    """The bytes of results and gradients in 16 bits (the bias's in its dtype), and MEMORY per row of the scores."""
    batch, heads, length, d = cell.shape
    options, rows = options_of(cell.data), batch * heads * length
    if cell.direction == FORWARD:
        return rows * (2 * d + MEMORY)
    bias = options.get("attn_bias", "B,H")
    sizes = [] if bias == "none" else [1 if one else n for one, n in zip(BIASES[bias], cell.shape, strict=False)]
    itemsize = 4 if options.get("bias_dtype") == "float32" else 2
    of_bias = sizes[0] * sizes[1] * length**2 * itemsize if sizes else 0
    return rows * (4 * 2 * d + MEMORY) + of_bias


def _errors(results: Results) -> list[Verdict]:
    found = {
        (cell, name): error / ERROR[name]
        for cell in results.cells
        for name in ERROR
        if (error := results.value(cell, OURS, name)) is not None
    }
    if not found:
        return []
    over = [f"{name} {share:.2f} in {cell}" for (cell, name), share in found.items() if not share <= 1]
    text = f"errors against fp64 / what rounding to bf16 explains: at most {max(found.values()):.3f}, target 1"
    return [verdict(not over, f"{text}{'; ' * bool(over)}{'; '.join(over)}")]


PAGE = report.Page(
    preface="Times are medians of plain calls, in which all providers take turns in random order; backward is the "
    "difference of forward+backward and forward. The roof is computed for each cell, not measured: bytes of inputs and "
    "outputs or FLOPs (two matmuls in forward, five in backward) at the speeds that `explain` uses. With a mask only "
    "tiles of 64 x 64 in which a key takes part count. Memory is the peak above inputs, with results and gradients. "
    "Errors are norm-wise against fp64. Without words a cell has a bias (B, H, L, L) in bf16 with gradient; "
    "`attn_bias` gives its first two sizes. Masks (B, 1, L, L) are bool: half of the keys at random, the top quarter "
    "of each row (2048 keys at most), or the diagonal and a random quarter of all blocks of 128 x 128.",
    figures=lambda results, path: [],
    verdicts=verdicts,
    about=ABOUT,
)


# Running --------------------------------------------------------------------------------------------------------------


def first_step(cell: Cell, name: str) -> None:
    args, do = measure_attention.make(cell, harness.device_to_measure())
    measure_attention.step(BENCHES[cell.op].load(name), args, do)()


def select(jobs: Iterable[Job], words: str) -> list[Job]:
    """The jobs whose cell has `words` in its name. ValueError if there are none."""
    if not (found := [job for job in jobs if words in str(job.cell)]):
        raise ValueError(f"--only is {words!r}; expected words such as 4x16x2048x64, or attn_mask")
    return found


def main(argv: Sequence[str] | None = None) -> Path:
    """Returns the CSV file."""
    on_gpu = harness.device_to_measure().type == "cuda"
    parser = harness.arguments("attention", __doc__)
    parser.add_argument("--quick", action="store_true", help="the main cells")
    parser.add_argument("--only", default="", metavar="WORDS", help="only cells with these words in their name")
    args = parser.parse_args(argv)
    jobs = select((QUICK if args.quick else JOBS) if on_gpu else TINY, args.only)
    if on_gpu and not args.report:
        harness.warm_up(jobs, COMPILED, first_step)
    return harness.run(jobs, PAGE, args, rounds=5, seconds=0.2)


if __name__ == "__main__":
    harness.main(main)
