"""A training step of models of transformers: plain, with Liger's whole patch, and with quackish applied.

    python -m benchmarks.llama_step                      writes results/<GPU>/llama_step.csv and .md
    python -m benchmarks.llama_step --models llama-8b    4 layers of an 8B; the others' rows stay
    python -m benchmarks.llama_step --compile no model   "no": eager; default: no layers
    python -m benchmarks.llama_step --tiny               a tiny model on the CPU, to test this program

Random weights in bf16, random tokens, fused AdamW, one GPU. A step is forward, backward and optimizer. All providers
share weights and optimizer. The learning rate is 0: the same work, but the weights stay constant, so losses and
gradients are comparable. Whole steps run in bursts, in random order, without pauses.
"""

import copy
import csv
import gc
import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, PreTrainedConfig, Qwen3Config

import quackish
from benchmarks import harness
from benchmarks.verdicts import at_most
from quackish.bench.environment import environment, version
from quackish.bench.measure import reason
from quackish.bench.report import markdown_table
from quackish.integrations.transformers import apply
from quackish.testing.timing import bursts

LLAMA: dict[str, Any] = dict(vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16)
LLAMA |= dict(num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=131072, rms_norm_eps=1e-5)
LLAMA |= dict(tie_word_embeddings=True)
ROPE = dict(rope_type="llama3", rope_theta=500000.0, factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0)
LLAMA["rope_parameters"] = ROPE | dict(original_max_position_embeddings=8192)
LLAMA_8B = LLAMA | dict(hidden_size=4096, intermediate_size=14336, num_hidden_layers=4, tie_word_embeddings=False)
QWEN3 = dict(vocab_size=151936, hidden_size=2048, intermediate_size=6144, num_hidden_layers=28, head_dim=128)
QWEN3 |= dict(num_attention_heads=16, num_key_value_heads=8, tie_word_embeddings=True)
GEMMA3 = dict(vocab_size=262144, hidden_size=1152, intermediate_size=6912, num_hidden_layers=26, head_dim=256)
GEMMA3 |= dict(num_attention_heads=4, num_key_value_heads=1, sliding_window=512)
TINY = dict(vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=8)


class Model(NamedTuple):
    title: str
    config: Callable[..., PreTrainedConfig]
    sizes: dict[str, Any]
    tokens: tuple[int, int]
    liger: str  # the function of liger_kernel.transformers
    compiled: bool = False  # whether compiled layers are measured by default


MODELS = {
    "llama-1b": Model("Llama 3.2 1B", LlamaConfig, LLAMA, (8, 2048), "apply_liger_kernel_to_llama", True),
    "llama-8b": Model("4 layers of Llama 3 8B", LlamaConfig, LLAMA_8B, (4, 2048), "apply_liger_kernel_to_llama", True),
    "qwen3-1.7b": Model("Qwen3 1.7B", Qwen3Config, QWEN3, (4, 2048), "apply_liger_kernel_to_qwen3"),
    "gemma3-1b": Model("Gemma 3 1B", Gemma3TextConfig, GEMMA3, (4, 2048), "apply_liger_kernel_to_gemma3_text"),
}
TINY_MODEL = Model("a tiny Llama", LlamaConfig, LLAMA | TINY, (2, 16), "apply_liger_kernel_to_llama", True)

ROUNDING = 16 << 20  # memory_limit counts 1 MiB per buffer that the allocator may add

Key = tuple[str, str, str]  # the model, the provider, and what is compiled: "no", "layers" or "model"
KEY = ("model", "provider", "compiled")
COLUMNS = (*KEY, "median_ms", "p20_ms", "p80_ms", "vs_liger", "vs_plain", "peak_gb", "loss", "grad_norm", "note")
BASES = {"vs_liger": "liger", "vs_plain": "plain"}  # column of a ratio of times -> its divisor
# (key, column, target), and whether the target of "peak_gb" is a multiple of Liger's
TARGETS = (
    (("llama-1b", "quackish", "no"), "vs_liger", 0.93),
    (("llama-1b", "quackish", "no"), "peak_gb", 0.90),
    (("llama-8b", "quackish", "no"), "vs_liger", 0.84),
    (("llama-8b", "quackish", "no"), "peak_gb", 1.02),
    (("llama-1b", "quackish", "layers"), "vs_plain", 0.89),
    (("llama-8b", "quackish", "layers"), "vs_plain", 0.89),
    (("qwen3-1.7b", "quackish", "no"), "vs_liger", 0.95),
    (("gemma3-1b", "quackish", "no"), "vs_liger", 0.95),
)


class Step:
    """A training step by one provider."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, ids: Tensor):
        self.model, self.optimizer, self.ids = model, optimizer, ids
        self.globals: dict[str, object] = {}  # of the model's module, if this step patches some
        self.replaced: dict[str, object] = {}  # what it patches
        self.peak = 0
        self.columns: dict[str, object] = {}

    def forward_and_backward(self) -> Tensor:
        former = {name: self.globals[name] for name in self.replaced}
        self.globals.update(self.replaced)
        try:
            loss = self.model(input_ids=self.ids, labels=self.ids, use_cache=False).loss
            loss.backward()
        finally:
            self.globals.update(former)
        return loss.detach()

    def __call__(self) -> None:
        if self.ids.is_cuda:
            torch.cuda.reset_peak_memory_stats()
        self.forward_and_backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.ids.is_cuda:
            self.peak = max(self.peak, torch.cuda.max_memory_allocated())

    def warm_up(self) -> None:
        """Compiles, then measures the loss, the norm of all gradients, and the peak."""
        loss = self.forward_and_backward()
        norms = [torch.linalg.vector_norm(p.grad, dtype=torch.float32) for p in self.model.parameters()]
        self.columns |= dict(loss=f"{loss:.5f}", grad_norm=f"{torch.stack(norms).norm():.5f}")
        self()
        self.peak = 0
        self()


def sharing_weights(model: nn.Module) -> nn.Module:
    """A copy of the model with the same parameters."""
    return copy.deepcopy(model, {id(p): p for p in model.parameters()})


def with_liger(step: Step, function: str) -> None:
    step.globals = vars(sys.modules[type(step.model).__module__])
    before = dict(step.globals)
    getattr(importlib.import_module("liger_kernel.transformers"), function)(model=step.model)
    step.replaced = {name: value for name, value in step.globals.items() if value is not before.get(name)}
    step.globals.update({name: before[name] for name in step.replaced})


def compile_model(step: Step, compiled: str) -> None:
    # On a CPU, Inductor would compile C++ for a minute.
    backend = "inductor" if step.ids.is_cuda else "aot_eager"
    for module in {"no": [], "layers": step.model.model.layers, "model": [step.model]}[compiled]:
        module.compile(backend=backend)


def head_bytes(step: Step) -> int:
    """The memory of "recompute" besides inputs and gradients, as memory_limit counts it."""
    weight = step.model.lm_head.weight
    hidden = torch.randn(*step.ids.shape, weight.shape[1], dtype=weight.dtype, device=weight.device, requires_grad=True)
    start = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    quackish.linear_cross_entropy(hidden, weight, step.ids, schedule="recompute").backward()
    step.optimizer.zero_grad()
    return torch.cuda.max_memory_allocated() - start - hidden.nbytes - weight.nbytes + ROUNDING


def all_steps(name: str, model: Model, new: Callable[[], Step], modes: Sequence[str]) -> dict[Key, Step]:
    """All steps of a model, warmed up. A failed step has a note and no loss."""
    steps: dict[Key, Step] = {}

    def add(provider: str, compiled: str, patch: Callable[[Step], object], note: str = "") -> Step:
        step = steps[name, provider, compiled] = new()
        step.columns["note"] = note
        try:
            patch(step)
            compile_model(step, compiled)
            step.warm_up()
        except Exception as error:  # a peer that fails must not end the run
            step.columns = dict(note=reason(error))
        step.optimizer.zero_grad()
        gc.collect()
        print(f"{name}, {provider}, compiled: {compiled}; {step.peak / 1e9:.2f} GB; {step.columns}", flush=True)
        return step

    for compiled in modes:
        add("plain", compiled, lambda step: None)
        liger = add("liger", compiled, lambda step: with_liger(step, model.liger))
        ours = add("quackish", compiled, lambda step: apply(step.model))
        if 0 < liger.peak < ours.peak and compiled == "no":  # within Liger's memory
            smallest = add("quackish-recompute", compiled, lambda step: apply(step.model, schedule="recompute"))
            limit = head_bytes(smallest) + liger.peak - smallest.peak
            within = lambda step, limit=limit: apply(step.model, memory_limit=limit)  # noqa: E731
            add("quackish-as-liger", compiled, within, f"memory_limit={limit}")
    return steps


def times_of(steps: Mapping[Key, Step], device: torch.device) -> dict[Key, dict]:
    """Times all steps; returns the columns of each."""
    working = {key: step for key, step in steps.items() if "loss" in step.columns}

    def fail(key: Key, error: Exception) -> None:
        steps[key].columns["note"] = reason(error)

    times = bursts(working, device, *((5, 0.5) if device.type == "cuda" else (1, 0.01)), on_error=fail)
    rows = {}
    for key, step in steps.items():
        row = rows[key] = dict(zip(KEY, key, strict=True)) | step.columns
        if key in times:
            row |= {f"{name}_ms": f"{getattr(times[key], name) / 1e3:.4g}" for name in ("median", "p20", "p80")}
            for column, provider in BASES.items():
                if base := times.get((key[0], provider, key[2])):
                    row[column] = f"{times[key].median / base.median:.4f}"
        row |= {"peak_gb": f"{step.peak / 1e9:.3f}"} if step.peak else {}
    return rows


def measure(name: str, model: Model, modes: Sequence[str], device: torch.device) -> dict[Key, dict]:
    """The columns of each step of a model."""
    torch.manual_seed(0)
    with device:
        config = model.config(**model.sizes)
        module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
        ids = torch.randint(config.vocab_size, model.tokens)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.0, fused=True)
    return times_of(all_steps(name, model, lambda: Step(sharing_weights(module), optimizer, ids), modes), device)


def verdicts(rows: Mapping[Key, dict]) -> list[tuple[str, str]]:
    lines = []
    for key, column, target in TARGETS:
        row, liger = rows.get(key, {}), rows.get((key[0], "liger", key[2]), {})
        value, text = row.get(column), f"{' '.join(key)}: time / {BASES.get(column, '')}'s"
        if column == "peak_gb":
            text = f"{' '.join(key)}: memory / liger's"
            value = value and liger.get("peak_gb") and float(value) / float(liger["peak_gb"])
        lines += at_most(value and float(value), target, text)
    return lines


def write(rows: Mapping[Key, dict], about: Mapping[str, str], path: Path) -> None:
    """Writes the CSV, which keeps its rows of other keys, and the page."""
    kept: dict[Key, dict] = {}
    if path.with_suffix(".csv").exists():
        with path.with_suffix(".csv").open(newline="") as file:
            kept = {tuple(row[name] for name in KEY): row for row in csv.DictReader(file) if set(KEY) <= row.keys()}
    measured = {(model, compiled) for model, _, compiled in rows}  # whose ratios are of one run
    found = {key: row for key, row in kept.items() if (key[0], key[2]) not in measured} | {
        key: {**about, **row} for key, row in rows.items()
    }
    page = f"# Training steps on {about['gpu']}\n\n"
    commits = ", ".join(f"`{commit}`" for commit in dict.fromkeys(row["commit"] for row in found.values()))
    page += f"Commit {commits}, driver {about['driver']}, torch {about['torch']}, transformers "
    page += f"{about['transformers']}, {about['peers']}. `vs_liger` and `vs_plain`: time / that provider's. The peak "
    page += "includes weights and optimizer. `liger` is Liger's whole patch, `quackish` is `apply(model)`.\n\n"
    page += markdown_table(COLUMNS, ([row.get(column, "") for column in COLUMNS] for row in found.values())) + "\n"
    page += "".join(f"- {word}: {line}\n" for word, line in verdicts(found) if about["gpu"] != "cpu")
    harness.write_page(page, path)
    with path.with_suffix(".csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, (*about, *COLUMNS), restval="", extrasaction="ignore")
        writer.writeheader()
        writer.writerows(found.values())


def main(argv: Sequence[str] | None = None) -> Path:
    """Returns the page."""
    parser = harness.arguments("llama_step", __doc__, csv=False)
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU, the default without a GPU")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="default: all")
    modes_help = 'what is compiled; default: "no", and "layers" of Llamas'
    parser.add_argument("--compile", nargs="+", choices=("no", "layers", "model"), help=modes_help)
    args = parser.parse_args(argv)
    device = torch.device("cpu") if args.tiny else harness.device_to_measure()
    on_gpu = device.type == "cuda"
    if on_gpu:  # prevents fragmentation between providers, which would make bursts wait for the driver
        torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    about = environment(device, args.commit) | {"transformers": version("transformers")}
    path = args.out / ("llama_step.md" if on_gpu else "llama_step_tiny.md")
    rows: dict[Key, dict] = {}
    for name, model in ({name: MODELS[name] for name in args.models} if on_gpu else {"tiny": TINY_MODEL}).items():
        rows |= measure(name, model, args.compile or ("no", "layers")[: 1 + model.compiled], device)
        gc.collect()
        torch._dynamo.reset()
        if on_gpu:
            torch.cuda.empty_cache()
        write(rows, about, path)  # after each model, so that an interrupted run keeps the others
    return path


if __name__ == "__main__":
    harness.main(main)
