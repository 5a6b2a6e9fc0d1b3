"""A training step of Llama 3.2 1B in transformers: plain, with Liger's patch, and with quackish applied.

    python -m benchmarks.llama_step                    writes results/<GPU>/llama_step.csv and .md, in about 150 s
    python -m benchmarks.llama_step --compile model    compiles whole models instead of layers: minutes longer
    python -m benchmarks.llama_step --tiny             a tiny model on the CPU, to test this program

Random weights in bf16, 8 x 2048 random tokens, fused AdamW, one GPU. A step is forward, backward and optimizer. All
providers share weights and optimizer. The learning rate is 0: the same work, but the weights stay constant, so losses
and gradients are comparable. Whole steps run in bursts, in random order, without pauses.
"""

import copy
import csv
import functools
import gc
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.models.llama import modeling_llama

import quackish
from benchmarks import harness
from benchmarks.verdicts import at_most
from quackish.bench.environment import environment, version
from quackish.bench.measure import reason
from quackish.bench.report import markdown_table
from quackish.integrations.transformers import apply
from quackish.testing.timing import bursts

LLAMA = dict(vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32)
LLAMA |= dict(num_key_value_heads=8, max_position_embeddings=131072, rms_norm_eps=1e-5, tie_word_embeddings=True)
ROPE = dict(rope_type="llama3", rope_theta=500000.0, factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0)
LLAMA["rope_parameters"] = ROPE | dict(original_max_position_embeddings=8192)
TINY = dict(vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=8)

ROUNDING = 16 << 20  # memory_limit counts 1 MiB per buffer that the allocator may add

Key = tuple[str, str, str]  # "step" or "block", the provider, and what is compiled
KEY = ("of", "provider", "compiled")
COLUMNS = (*KEY, "median_ms", "p20_ms", "p80_ms", "relative", "peak_gb", "loss", "grad_norm", "note")
BASES = {"step": "liger", "block": "plain"}  # the provider that times are relative to
TARGETS = (
    (("step", "quackish", "no"), "relative", 0.96, "a step, time / Liger's"),
    (("step", "quackish", "no"), "peak_gb", 34.2, "its peak in GB, on an H100"),
    (("step", "quackish-as-liger", "no"), "relative", 1.0, "a step in Liger's memory, time / Liger's"),
    (("block", "quackish", "layers"), "relative", 1.01, "a compiled block, time / plain's (1 % is noise)"),
)


class Step:
    """A training step by one provider, on a copy of the model that shares all weights."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, ids: Tensor):
        self.model = copy.deepcopy(model, {id(p): p for p in model.parameters()})
        self.optimizer, self.ids = optimizer, ids
        self.replaced: dict[str, object] = {}  # globals of transformers' module that this step patches
        self.peak = 0
        self.columns: dict[str, object] = {}

    def forward_and_backward(self) -> Tensor:
        former = {name: getattr(modeling_llama, name) for name in self.replaced}
        vars(modeling_llama).update(self.replaced)
        try:
            loss = self.model(input_ids=self.ids, labels=self.ids, use_cache=False).loss
            loss.backward()
        finally:
            vars(modeling_llama).update(former)
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


def with_liger(step: Step, **which: bool) -> None:
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    before = dict(vars(modeling_llama))
    apply_liger_kernel_to_llama(model=step.model, **which)
    step.replaced = {name: value for name, value in vars(modeling_llama).items() if value is not before.get(name)}
    vars(modeling_llama).update({name: before[name] for name in step.replaced})


def with_both(step: Step) -> None:
    """quackish's norms and head, Liger's rotary embedding and SwiGLU."""
    with_liger(step, rms_norm=False, fused_linear_cross_entropy=False)
    apply(step.model)


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


def all_steps(new: Callable[[], Step], modes: Sequence[str]) -> dict[Key, Step]:
    """All steps, warmed up. A failed step has a note and no loss."""
    steps: dict[Key, Step] = {}

    def add(name: str, compiled: str, patch: Callable[[Step], object], note: str = "") -> Step:
        step = steps["step", name, compiled] = new()
        step.columns["note"] = note
        try:
            patch(step)
            compile_model(step, compiled)
            step.warm_up()
        except Exception as error:  # a peer that fails must not end the run
            step.columns = dict(note=reason(error))
        step.optimizer.zero_grad()
        gc.collect()
        print(f"{name}, compiled: {compiled}; {step.peak / 1e9:.2f} GB; {step.columns}", flush=True)
        return step

    for compiled in modes:
        add("plain", compiled, lambda step: None)
        liger = add("liger", compiled, lambda step: with_liger(step, rope=False, swiglu=False))
        add("quackish", compiled, lambda step: apply(step.model))
        add("liger-all", compiled, with_liger)
        add("quackish-and-liger", compiled, with_both)
        smallest = add("quackish-recompute", compiled, lambda step: apply(step.model, schedule="recompute"))
        if liger.peak and smallest.peak:
            limit = head_bytes(smallest) + liger.peak - smallest.peak
            within = lambda step, limit=limit: apply(step.model, memory_limit=limit)  # noqa: E731
            add("quackish-as-liger", compiled, within, f"memory_limit={limit}")
    return steps


def block(step: Step, provider: str, compiled: str) -> Callable[[], None]:
    """Forward and backward of a decoder layer. "quackish-norms" uses our norms even where `apply` does not."""
    body, layer = step.model.model, step.model.model.layers[0]
    if provider == "quackish":
        apply(step.model)
    for norm in (layer.input_layernorm, layer.post_attention_layernorm) if provider == "quackish-norms" else ():
        norm.forward = types.MethodType(
            lambda norm, x: quackish.rms_norm(x, norm.weight, eps=norm.variance_epsilon), norm
        )
    compile_model(step, compiled)
    hidden = body.embed_tokens(step.ids).detach().requires_grad_()
    position_ids = torch.arange(hidden.shape[1], device=hidden.device)[None]
    # The same arguments as in the model, so that compiled code is reused.
    kwargs = dict(attention_mask=None, position_embeddings=body.rotary_emb(hidden, position_ids), use_cache=False)
    kwargs |= dict(position_ids=position_ids, past_key_values=None)
    dy = torch.randn_like(hidden)

    def run() -> None:
        step.optimizer.zero_grad()
        hidden.grad = None
        layer(hidden, **kwargs).backward(dy)

    run()
    return run


def times_of(
    steps: Mapping[Key, Step], blocks: Mapping[Key, Callable[[], Callable]], device: torch.device
) -> dict[Key, dict]:
    """Times all steps and blocks; returns the columns of each."""
    on_gpu = device.type == "cuda"
    working = {key: step for key, step in steps.items() if "loss" in step.columns}

    def fail(key: Key, error: Exception) -> None:
        steps[key].columns["note"] = reason(error)

    times = bursts(working, device, *((5, 0.5) if on_gpu else (1, 0.01)), on_error=fail)
    # Blocks are made after the steps were timed, so that the peak memory of steps does not include them.
    times |= bursts({key: make() for key, make in blocks.items()}, device, *((10, 0.2) if on_gpu else (1, 0.01)))
    rows = {key: dict(zip(KEY, key, strict=True)) for key in (*steps, *blocks)}
    for key, measured in times.items():
        base = times.get((key[0], BASES[key[0]], key[2]))
        rows[key] |= {f"{name}_ms": f"{getattr(measured, name) / 1e3:.4g}" for name in ("median", "p20", "p80")}
        rows[key] |= {"relative": f"{measured.median / base.median:.4f}"} if base else {}
    for key, step in steps.items():
        rows[key] |= step.columns | ({"peak_gb": f"{step.peak / 1e9:.3f}"} if step.peak else {})
    return rows


def write(rows: Mapping[Key, dict], about: Mapping[str, str], path: Path) -> None:
    """Writes the page and, next to it, the CSV."""
    page = f"# A training step of Llama 3.2 1B on {about['gpu']}\n\n"
    page += f"Commit `{about['commit']}`, driver {about['driver']}, torch {about['torch']}, transformers "
    page += f"{about['transformers']}, {about['peers']}. `relative`: time / Liger's time for steps, time / plain's for "
    page += "blocks. The peak includes weights and optimizer. `liger` patches norms and head, as quackish does; "
    page += "`liger-all` also patches rotary embedding and SwiGLU; `quackish-and-liger` is quackish with these two.\n\n"
    page += markdown_table(COLUMNS, ([row.get(column, "") for column in COLUMNS] for row in rows.values())) + "\n"
    for key, column, target, text in TARGETS if about["gpu"] != "cpu" else ():
        value = rows.get(key, {}).get(column)
        page += "".join(f"- {word}: {line}\n" for word, line in at_most(value and float(value), target, text))
    harness.write_page(page, path)
    with path.with_suffix(".csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, (*about, *COLUMNS))
        writer.writeheader()
        writer.writerows(about | row for row in rows.values())


def main(argv: Sequence[str] | None = None) -> Path:
    """Returns the page."""
    parser = harness.arguments("llama_step", __doc__, csv=False)
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU, the default without a GPU")
    parser.add_argument("--compile", choices=("layers", "model"), default="layers", help="default: %(default)s")
    args = parser.parse_args(argv)
    device = torch.device("cpu") if args.tiny else harness.device_to_measure()
    on_gpu = device.type == "cuda"
    if on_gpu:  # prevents fragmentation between providers, which would make bursts wait for the driver
        torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    torch.manual_seed(0)
    with device:
        config = LlamaConfig(**LLAMA | ({} if on_gpu else TINY))
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
        ids = torch.randint(config.vocab_size, (8, 2048) if on_gpu else (2, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=True)

    def new() -> Step:
        return Step(model, optimizer, ids)

    steps = all_steps(new, ("no", args.compile))
    names = ("plain", "quackish", "quackish-norms")
    blocks = {
        ("block", name, mode): functools.partial(block, new(), name, mode)
        for mode in ("no", "layers")
        for name in names
    }
    rows = times_of(steps, blocks, device)
    about = environment(device, args.commit) | {"transformers": version("transformers")}
    path = args.out / ("llama_step.md" if on_gpu else "llama_step_tiny.md")
    write(rows, about, path)
    return path


if __name__ == "__main__":
    harness.main(main)
