"""Writes the tables of docs/ that have measurements, from benchmarks/results, where each value is recorded.

python scripts/measurement_tables.py            # writes the pages
python scripts/measurement_tables.py --check    # exit status 1 if a table is out of date
"""

import csv
import functools
import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import page_tables

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results"
DOCS = ROOT / "docs"
CARDS = ("H200", "H100")

Row = dict[str, str]
Table = Iterator[Sequence[str]]


# Recorded results -----------------------------------------------------------------------------------------------------


@functools.cache
def rows_of(file: str) -> list[Row]:
    """The rows of a CSV, or those of all tables of a Markdown page, with the heading above each as "section"."""
    text = (RESULTS / file).read_text(encoding="utf-8")
    if file.endswith(".csv"):
        return list(csv.DictReader(text.splitlines()))
    rows, section, titles = [], "", None
    for line in text.splitlines():
        cells = [cell.strip().strip("*").strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|"):
            section, titles = line.lstrip("# ") if line.startswith("#") else section, None
        elif titles is None:
            titles = cells
        elif not set(line) <= set("|- "):
            rows.append(dict(zip(titles, cells, strict=True)) | {"section": section})
    return rows


def find(file: str, **where: str) -> Row | None:
    """The last row that has these values, was measured and is not wrong: a later run replaces an earlier one."""
    found = [row for row in rows_of(file) if all(row.get(name) == value for name, value in where.items())]
    found = [row for row in found if row.get("status", "ok") == "ok" and "wrong: " not in row.get("note", "")]
    return found[-1] if found else None


def significant(x: float, digits: int = 3) -> str:
    return f"{x:.{max(0, digits - 1 - math.floor(math.log10(abs(x))))}f}"


def ms(row: Row | None) -> str:
    return significant(float(row["median_ms"])) if row else ""


def us(row: Row | None) -> str:
    return f"{1e3 * float(row['median_ms']):.1f}" if row else ""


def gb(row: Row | None) -> str:
    return f"{float(row['peak_mb']) / 1e3:.{2 if float(row['peak_mb']) > 100 else 4}f}" if row else ""


def of_roof(row: Row | None) -> str:
    return f"{float(row['median_ms']) / float(row['roof_ms']):.3f}" if row else ""


def of_shape(shape: str) -> str:
    return ", ".join(shape.split("x"))


# The pages ------------------------------------------------------------------------------------------------------------


def miss_rows() -> Table:
    """Every target that a page of results marks as missed."""
    yield "results", "missed targets"
    for file in sorted(RESULTS.rglob("*.md")):
        name = file.relative_to(RESULTS).as_posix()
        misses = re.findall(r"^- FAIL: (.*?)(?:; missed also in .*)?$", file.read_text(encoding="utf-8"), re.MULTILINE)
        if misses:
            yield f"[{name}](../../benchmarks/results/{name})", "<br>".join(misses)


def run_rows() -> Table:
    """Which results come from which commit and day, the newest first."""
    yield "card", "commit", "day", "results"
    runs: dict[tuple[str, str], tuple[set[str], set[str]]] = {}
    for card in CARDS:
        for file in (RESULTS / card).rglob("*.*"):
            name = file.relative_to(RESULTS).as_posix()
            for commit, day in runs_of(name):
                days, results = runs.setdefault((card, commit[:7]), (set(), set()))
                days.update({day} - {""})
                title = file.relative_to(RESULTS / card).with_suffix("").as_posix()
                results.add(f"[{title}](../../benchmarks/results/{name})")
    for (card, commit), (days, results) in sorted(
        runs.items(), key=lambda run: (run[0][0], max(run[1][0], default=""), run[0][1]), reverse=True
    ):
        yield card, f"`{commit}`", ", ".join(sorted(days)), ", ".join(sorted(results))


def runs_of(name: str) -> set[tuple[str, str]]:
    """(commit, day or "") of a CSV, or of a page that a program wrote without one: it states commit and driver."""
    file = RESULTS / name
    if file.suffix == ".csv":
        return {(row["commit"], row["date"][:10]) for row in rows_of(name)}
    if file.suffix != ".md" or file.with_suffix(".csv").exists():
        return set()
    stated = re.search(r"[Cc]ommit `([0-9a-f]+)`, driver", file.read_text(encoding="utf-8"))
    return {(stated[1], "")} if stated else set()


NORMS = [f"{m}x{n}" for m in (4096, 65536) for n in (256, 1024, 4096, 8192)]
NORM_PROVIDERS = {
    "torch.add": "add", "quackish": "quackish", "QuACK": "quack", "Liger (CuTe)": "liger-cute",
    "Liger (Triton)": "liger-triton", "PyTorch": "torch",
}  # fmt: skip


def norm_rows(card: str) -> Table:
    yield "M x N", *NORM_PROVIDERS
    for shape in NORMS:
        where = dict(shape=shape, dtype="bfloat16", direction="backward")
        cells = [us(find(f"{card}/rms_norm.csv", provider=name, **where)) for name in NORM_PROVIDERS.values()]
        yield shape.replace("x", " x "), *cells


def norm_host_rows() -> Table:
    yield "", *(f"{card}: {what}" for card in CARDS for what in ("us", "of PyTorch's"))
    for title, name in {**NORM_PROVIDERS, "PyTorch": "torch"}.items():
        found = [find(f"{card}/host_overhead.md", provider=name) for card in CARDS]
        if all(found):
            yield title, *(row[column] for row in found for column in ("us", "of torch"))


LOSSES = [
    "1024x4096x128256", "4096x2048x32000", "8192x2048x151936", "8192x4096x128256", "16384x4096x128256",
    "65536x4096x128256",
]  # fmt: skip
LOSS_PROVIDERS = {
    "quackish": "quackish", '`"recompute"`': "quackish-recompute", "QuACK, fastest": "quack*", "Liger": "liger",
    "Liger, Hopper kernels": "liger-cute-sm90",
    "cut-cross-entropy": "cce", "torch.compile": "torch-compile", "PyTorch": "torch",
}  # fmt: skip
HEADLINE = dict(shape="8192x4096x128256", data="normal", ignored="0.0")
BOTH_WAYS = dict(data="normal", ignored="0.0", direction="forward+backward")


def find_loss(file: str, provider: str, **where: str) -> Row | None:
    """With "quack*": QuACK's fastest setting."""
    where = {"dtype": "bfloat16", **BOTH_WAYS, **where}
    if not provider.endswith("*"):
        return find(file, provider=provider, **where)
    names = {row["provider"] for row in rows_of(file) if re.fullmatch(provider[:-1] + r"(-.*)?", row["provider"])}
    found = [row for name in names if (row := find(file, provider=name, **where))]
    return min(found, key=lambda row: float(row["median_ms"]), default=None)


def loss_rows(card: str) -> Table:
    yield "M, H, V", "3 GEMMs", *LOSS_PROVIDERS
    file = f"{card}/linear_cross_entropy.csv"
    for shape in LOSSES:
        names = ["three-gemms", *LOSS_PROVIDERS.values()]
        yield of_shape(shape), *(ms(find_loss(file, name, shape=shape)) for name in names)


def loss_memory_rows() -> Table:
    yield "M, H, V", *LOSS_PROVIDERS
    for shape in LOSSES:
        found = (find_loss("H200/linear_cross_entropy.csv", name, shape=shape) for name in LOSS_PROVIDERS.values())
        yield of_shape(shape), *map(gb, found)


def schedule_rows() -> Table:
    yield "schedule", "ms", "of 3 GEMMs", "peak GB"
    for title, name in {
        '`"stored"`': "stored", '`"chunked"`': "chunked", '`"recompute"`': "recompute",
        '`"recompute"`, `chunk_size=1024`': "recompute-1024",
    }.items():  # fmt: skip
        row = find_loss("H200/linear_cross_entropy.csv", f"quackish-{name}", **HEADLINE)
        yield title, ms(row), of_roof(row), gb(row)


def limit_rows() -> Table:
    yield "`memory_limit`, MB", "ms", "peak GB"
    peak = ""
    for row in rows_of("H200/schedules.md"):
        name, _, limit = row.get("call", "").strip("`").partition("=")
        if name == "memory_limit" and row["peak GB"] != peak:  # larger limits that allow the same are left out
            peak = row["peak GB"]
            yield f"{int(limit) / 1e6:.0f}", row["ms"], peak


def torch_kernel_rows() -> Table:
    yield "", "ms", "peak GB", "error of dW"
    for title, name in {
        "quackish": "quackish",
        "PyTorch 2.15's kernel, chunks of 256 rows (its default)": "benchmarks.torch_kernel:rows_256",
        "the same, chunks of 4096 rows": "benchmarks.torch_kernel:rows_4096",
    }.items():
        row = find_loss("H200/torch_2_15/linear_cross_entropy.csv", name, **HEADLINE)
        yield title, ms(row), gb(row), f"{float(row['err_dweight']):.4f}"


def token_rows() -> Table:
    yield "", *(f"{name}: {unit}" for name in ("quackish", "Liger", "PyTorch, chunks") for unit in ("ms", "peak GB"))
    for title, names in {
        "gradients of the loss": ["quackish-tokens", "liger-scaled-loss", ""],
        "gradients of the loss and the entropy": ["quackish-tokens-entropy", "liger-scaled", "torch-chunked-stats"],
    }.items():
        found = (find_loss("H200/linear_cross_entropy.csv", name, shape="16384x4096x131072") for name in names)
        yield title, *(cell(row) for row in found for cell in (ms, gb))


def few_classes_rows() -> Table:
    names = {
        "quackish": "quackish", 'quackish, `reduction="none"`': "quackish-tokens",
        "PyTorch, bf16 logits": "torch", "PyTorch, fp32 logits": "torch-fp32",
    }  # fmt: skip
    yield "M", *names
    for m in (65536, 262144, 1048576):
        found = (find_loss("H200/linear_cross_entropy.csv", name, shape=f"{m}x512x256") for name in names.values())
        yield f"{m:,}", *map(ms, found)


def ignored_rows() -> Table:
    yield "", "80 % of the rows ignored: ms", "none ignored: ms", "ratio"
    for card in CARDS:
        file, where = f"{card}/linear_cross_entropy.csv", HEADLINE | {"ignored": "0.8"}
        some, none = (find_loss(file, name, **where) for name in ("quackish", "quackish (none ignored)"))
        yield card, ms(some), ms(none), f"{float(some['median_ms']) / float(none['median_ms']):.3f}"


def loss_host_rows() -> Table:
    yield "", *CARDS
    names = {
        '`"chunked"`': "quackish", '`"stored"`': "quackish-stored", "PyTorch, eager": "torch", "QuACK": "quack",
        "Liger": "liger",
    }  # fmt: skip
    for title, name in names.items():
        found = (
            find_loss(f"{card}/linear_cross_entropy.csv", name, shape="128x512x1024", direction="host")
            for card in CARDS
        )
        yield title, *(f"{1e3 * float(row['median_ms']):.0f}" for row in found)


def error_rows() -> Table:
    """The largest errors over the shapes of the table of times."""
    yield "", "data", "quackish", "PyTorch"
    for column, title in {"err_loss": "loss", "err_dx": "dX", "err_dweight": "dW"}.items():
        for data in ("normal", "confident"):
            cells = []
            for name in ("quackish", "torch"):
                found = [find_loss("H200/linear_cross_entropy.csv", name, shape=s, data=data) for s in LOSSES]
                cells.append(f"{max(float(row[column]) for row in found if row and row[column]):.1e}")
            yield title, {"normal": "random"}.get(data, data), *cells


EXPERTS = {
    "Qwen3-30B": "131072x2048x768x128", "OLMoE": "131072x2048x1024x64", "gpt-oss": "65536x2880x2880x32",
    "Mixtral": "16384x4096x14336x8",
}  # fmt: skip
SPLITS = {"uniform": "normal", "Zipf": "zipf"}


def mlp_h200(provider: str, model: str, split: str = "uniform") -> Row | None:
    where = dict(shape=EXPERTS[model], data=SPLITS[split], direction="forward+backward")
    return find("H200/grouped_mlp.csv", provider=provider, **where)


def mlp_rows() -> Table:
    names = {"quackish": "quackish", "PyTorch": "torch-compile", "six GEMMs": "six-gemms"}
    yield "model", "split", *(f"{card}: {title}" for card in CARDS for title in names)
    for model in EXPERTS:
        for split in SPLITS:
            on_h200 = (ms(mlp_h200(name, model, split)) for name in names.values())
            yield model, split, *on_h200, *mlp_h100_times(model, split)


def mlp_h100_times(model: str, split: str) -> list[str]:
    found = [row for row in rows_of("H100/grouped_mlp.md") if (row["model"], row["split"]) == (model, split)]
    times = {row["provider"]: row["ms"] for row in found}
    fastest = min((time for name, time in times.items() if name.startswith("six ")), key=float)
    return [significant(float(x)) for x in (times["quackish"], times["torch, activation compiled"], fastest)]


def mlp_memory_rows() -> Table:
    names = {"quackish": "quackish", "PyTorch": "torch-compile", "PyTorch, not compiled": "torch"}
    yield "model", *names
    for model in EXPERTS:
        yield model, *(gb(mlp_h200(name, model)) for name in names.values())


def expert_rows() -> Table:
    titles = ("`moe_mlp`", "Transformers", "Liger", "SonicMoE")
    h200 = (f"{title}: {unit}" for title in titles for unit in ("ms", "GB"))
    yield "model", *h200, *(f"H100: {title}: ms" for title in titles[:2])
    for model, shape in MOE.items():
        found = [find("H200/moe_mlp.csv", shape=shape, provider=name) for name in MOE_PROVIDERS]
        blocks = [
            find("H100/grouped_mlp.md", model=model, split="block", provider=name)
            for name in ("quackish", "Transformers, F.grouped_mm")
        ]
        h200 = (cell for row in found for cell in (ms(row), gb(row)))
        yield model, *h200, *(significant(float(row["ms"])) for row in blocks)


MOE_PROVIDERS = ("quackish", "transformers", "liger", "sonicmoe")
MOE = {
    "Qwen3-30B": "16384x2048x768x128x8", "OLMoE": "16384x2048x1024x64x8", "gpt-oss": "16384x2880x2880x32x4",
    "Mixtral": "8192x4096x14336x8x2",
}  # fmt: skip


ATTENTION = {"quackish": "quackish", "FlexAttention": "flex", "memory-efficient SDPA": "torch-efficient"}


def attention_ms(shape: str, data: str, names: Sequence[str]) -> Iterator[str]:
    where = dict(shape=shape, data=data, direction="forward+backward")
    for name in names:
        yield ms(find("H200/scaled_dot_product_attention.csv", provider=name, **where))


def attention_rows() -> Table:
    yield "B, H, L, D", "bias", *ATTENTION, "computed minimum"
    names = (*ATTENTION.values(), "minimum")
    for length, batch in ((512, 16), (2048, 4), (8192, 1)):
        for d in (64, 128):
            shape = f"{batch}x16x{length}x{d}"
            yield of_shape(shape), "(B, H, L, L), bf16", *attention_ms(shape, "normal", names)
    for bias in ("1,H", "B,1", "1,1"):
        cells = attention_ms("4x16x2048x64", f"attn_bias={bias}", names)
        yield "4, 16, 2048, 64", f"({bias.replace(',', ', ')}, L, L), bf16", *cells
    for bias in ("B,H", "1,H"):
        cells = attention_ms("4x16x2048x64", f"attn_bias={bias} bias_dtype=float32", names)
        yield "4, 16, 2048, 64", f"({bias.replace(',', ', ')}, L, L), fp32", *cells


def small_attention_rows() -> Table:
    """The sizes with a title in benchmarks/attention.py."""
    names = ATTENTION | {"cuEquivariance": "cuequivariance"}
    yield "what", "B, H, L, D", *names
    rows = [row for row in rows_of("H200/scaled_dot_product_attention.csv") if row["models"]]
    for title, shape, data in dict.fromkeys((row["models"], row["shape"], row["data"]) for row in rows):
        yield title, of_shape(shape), *attention_ms(shape, data, tuple(names.values()))


def attention_mask_rows() -> Table:
    names = {"quackish": "quackish", "FlexAttention": "flex-block-mask", "cuDNN SDPA": "torch-cudnn"}
    yield "mask", "D", *names
    for title, mask in {"random half": "half", "the top 1024 of a row": "top", "blocks of 128": "blocks"}.items():
        for d in (64, 128):
            of_mask = f"attn_bias=none attn_mask={mask}"
            yield title, str(d), *attention_ms(f"2x16x4096x{d}", of_mask, tuple(names.values()))


def sharded_rows() -> Table:
    yield "step", "ms", "efficiency, of GPU 0", "of GPU 1", "MB per rank"
    file, shape = "H200/parallel.md", "8192x4096x128256"
    alone = find(file, section=f"{shape}, TP 2: ms per GPU", **{"": "quackish, one GPU alone"})
    for title, step in {
        "sharded": "quackish", "`deterministic=True`": "quackish, deterministic",
        "`sequence_parallel=True`": "quackish, sequence_parallel", '`schedule="recompute"`': "quackish, recompute",
        "PyTorch's `loss_parallel`": "PyTorch, loss_parallel",
        "Liger's tensor-parallel head, its PyTorch path": "liger, tp (its PyTorch path; the native one takes NVSHMEM)",
    }.items():  # fmt: skip
        row = find(file, step=step, **{"M x H x V": shape})
        of_gpu = (f"{float(alone[gpu]) / (2 * float(row['ms'])):.3f}" for gpu in ("GPU 0", "GPU 1"))
        yield title, row["ms"], *of_gpu, row["MB"]


STEPS = {
    "Llama 3.2 1B": "llama-1b", "4 layers of Llama 3 8B": "llama-8b", "Qwen3 1.7B": "qwen3-1.7b",
    "Gemma 3 1B": "gemma3-1b",
}  # fmt: skip


def step_rows(compiled: str) -> Table:
    providers = {"unpatched": "plain", "Liger's whole patch": "liger", "`apply(model)`": "quackish"}
    yield "card", "model", *(f"{title}: {unit}" for title in providers for unit in ("ms", "GB")), "time / Liger's"
    for card in CARDS:
        for title, model in STEPS.items():
            where = dict(model=model, compiled=compiled)
            rows = [find(f"{card}/llama_step.csv", provider=p, **where) for p in providers.values()]
            if any(rows):
                cells = [row[column] if row else "" for row in rows for column in ("median_ms", "peak_gb")]
                yield card, title, *(f"{float(cell):.1f}" if cell else "" for cell in cells), rows[-1]["vs_liger"]


DENSE_PROVIDERS = {"quackish": "quackish", "Liger": "liger", "PyTorch": "torch-compile"}


def dense_shapes() -> dict[str, None]:
    return dict.fromkeys(row["shape"] for row in rows_of("H200/mlp.csv") if row["direction"] != "host")


def dense_rows() -> Table:
    names = {**DENSE_PROVIDERS, "matmuls": "six-gemms"}
    yield "tokens, H, I", *(f"{card}: {title}" for card in CARDS for title in names)
    for shape in dense_shapes():
        found = (find(f"{card}/mlp.csv", shape=shape, provider=p) for card in CARDS for p in names.values())
        yield of_shape(shape), *map(ms, found)


def dense_memory_rows() -> Table:
    yield "tokens, H, I", *DENSE_PROVIDERS
    for shape in dense_shapes():
        found = (find("H200/mlp.csv", shape=shape, provider=name) for name in DENSE_PROVIDERS.values())
        yield of_shape(shape), *map(gb, found)


def rotary_rows() -> Table:
    names = {"quackish": "quackish", "a copy": "mul", "Liger": "liger", "PyTorch, compiled": "torch-compile"}
    yield "batch, heads of q and k, length, D", *(f"{card}: {title}" for card in CARDS for title in names)
    for shape in ("8x32x8x2048x64", "4x32x8x4096x128"):
        where = dict(shape=shape, direction="forward")
        found = (find(f"{card}/rotary.csv", provider=p, **where) for card in CARDS for p in names.values())
        yield of_shape(shape), *map(us, found)


def distillation_rows(card: str, units: dict[str, Callable[[Row | None], str]]) -> Table:
    providers = {"quackish": "quackish", "TRL": "trl", "Liger": "liger", "PyTorch": "torch-compile"}
    titles = (f"{title}: {unit}" for title in providers for unit in units)
    yield "tokens, H of student and teacher, V", "beta", "four matmuls: ms", *titles
    file, where = f"{card}/linear_divergence.csv", dict(direction="forward+backward")
    cells = [(row["shape"], row["data"]) for row in rows_of(file) if row["direction"] != "host"]
    for shape, data in dict.fromkeys(cells):
        roof, *rows = (
            find(file, shape=shape, data=data, provider=name, **where) for name in ("four-gemms", *providers.values())
        )
        if rows[0] is None:  # a run that was interrupted
            continue
        yield of_shape(shape), data.removeprefix("beta="), ms(roof), *(c(row) for row in rows for c in units.values())


def portable_rows() -> Table:
    yield "call", "quackish: ms", "PyTorch: ms", "ratio", "quackish: MB", "PyTorch: MB"
    rows = rows_of("H200/portable.csv")
    for ours, theirs in zip(rows[::2], rows[1::2], strict=True):
        times, peaks = ([float(row[column]) for row in (ours, theirs)] for column in ("median_ms", "peak_mb"))
        call = f"`{ours['op']}` {of_shape(ours['shape'])}" + (f", {ours['data']}" if ours["data"] != "normal" else "")
        yield call, *map(significant, times), f"{times[0] / times[1]:.2f}", *map(significant, peaks)


def olmoe_rows() -> Table:
    yield "", *(f"{card}: ms" for card in CARDS), "peak GB", "loss"
    for name in ("plain", "apply(model)", "apply(model, experts=True)"):
        rows = [find(f"{card}/moe_step.md", provider=name) for card in CARDS]
        title = "unpatched" if name == "plain" else f"`{name}`"
        yield title, *(row["ms"] for row in rows), rows[0]["peak GB"], rows[0]["loss"]


def trl_rows() -> Table:
    providers = ("TRL", "apply()", "apply() and layers")
    yield "loss", *(f"{name}: {unit}" for name in providers for unit in ("ms", "GB")), "time / TRL's"
    for loss in ("SFT", "DPO", "GRPO"):
        rows = [find("H200/trl_step.md", loss=loss, provider=name) for name in providers]
        yield loss, *(row[column] for row in rows for column in ("ms", "peak GB")), rows[-1]["time / TRL's"]


def unsloth_rows() -> Table:
    columns = ("ms", "peak GB", "loss", "norm of gradients")
    yield "", *columns
    titles = {"plain": "unpatched", "quackish": "`apply(model)`", "unsloth": "Unsloth"}
    for name in ("plain", "plain, layers compiled", "unsloth", "quackish", "quackish, layers compiled"):
        row = find("H200/unsloth_step.md", provider=name)
        provider, *compiled = name.split(", ")
        yield ", ".join([titles[provider], *compiled]), *(row[column] for column in columns)


def first_call_rows() -> Table:
    yield "", "compiled: seconds", "loaded: seconds"
    for op in ("rms_norm", "linear_cross_entropy"):
        rows = [find("first_use.md", first=op, cache=cache) for cache in ("cold", "warm")]
        yield f"`{op}`", *(significant(float(row["seconds"]), 2) for row in rows)


TABLES: dict[str, page_tables.Tables] = {
    "faq.md": {"first calls": first_call_rows},
    "guides/portable_path.md": {"portable": portable_rows},
    "measurements/index.md": {"runs": run_rows, "misses": miss_rows},
    "measurements/rms_norm.md": {
        "h200": functools.partial(norm_rows, "H200"), "h100": functools.partial(norm_rows, "H100"),
        "host": norm_host_rows,
    },
    "measurements/linear_cross_entropy.md": {
        "h200": functools.partial(loss_rows, "H200"), "h100": functools.partial(loss_rows, "H100"),
        "memory": loss_memory_rows, "schedules": schedule_rows, "limits": limit_rows, "tokens": token_rows,
        "few classes": few_classes_rows, "ignored": ignored_rows,
        "torch 2.15": torch_kernel_rows, "host": loss_host_rows, "errors": error_rows,
    },
    "measurements/grouped_mlp.md": {
        "times": mlp_rows, "memory": mlp_memory_rows, "experts": expert_rows,
    },
    "measurements/attention.md": {
        "times": attention_rows, "masks": attention_mask_rows, "small": small_attention_rows,
    },
    "measurements/parallel.md": {"times": sharded_rows},
    "measurements/decoder.md": {"mlp": dense_rows, "mlp memory": dense_memory_rows, "rotary": rotary_rows},
    "measurements/distillation.md": {
        "H200": functools.partial(distillation_rows, "H200", {"ms": ms, "GB": gb}),
        "H100": functools.partial(distillation_rows, "H100", {"ms": ms}),
    },
    "measurements/training_steps.md": {
        "eager": functools.partial(step_rows, "no"), "compiled": functools.partial(step_rows, "layers"),
        "olmoe": olmoe_rows, "trl": trl_rows, "unsloth": unsloth_rows,
    },
}  # fmt: skip

if __name__ == "__main__":
    pages = {DOCS / page: tables for page, tables in TABLES.items()}
    sys.exit(page_tables.main(__doc__, pages, Path(__file__).name))
