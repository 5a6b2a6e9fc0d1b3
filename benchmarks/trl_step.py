"""Forward and backward of TRL's SFT, DPO and GRPO losses on Llama 3.2 1B, with and without quackish.

    python -m benchmarks.trl_step                      writes results/<GPU>/trl_step.md
    python -m benchmarks.trl_step --tiny               a tiny model on the CPU, to test this program

Each trainer computes its loss and its metrics of 8 sequences of 2048 tokens: SFT of all tokens, DPO of 4 pairs and GRPO
of 8 completions after prompts of 512 tokens. Random weights in bf16; no optimizer. DPO also runs a reference model.
"""

import contextlib
import copy
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import torch
import trl
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from benchmarks import harness
from benchmarks.llama_step import LLAMA, TINY
from quackish.bench.environment import environment, version
from quackish.bench.report import markdown_table
from quackish.integrations import transformers as integration
from quackish.integrations import trl as trl_integration
from quackish.testing.timing import bursts

LOSSES = ("SFT", "DPO", "GRPO")
DATA = {  # for building the trainers; the steps have inputs of their own
    "SFT": dict(text=["a"] * 8),
    "DPO": dict(prompt=["a"] * 8, chosen=["b"] * 8, rejected=["c"] * 8),
    "GRPO": dict(prompt=["a"] * 8),
}


@contextlib.contextmanager
def log_probs(**options):
    trl_integration.apply(**options)
    try:
        yield
    finally:
        trl_integration.revert()


@contextlib.contextmanager
def log_probs_and_layers(model: nn.Module):
    with log_probs(), integration.applied(model, head=False):
        yield


PROVIDERS: dict[str, Callable[[nn.Module], AbstractContextManager]] = {
    "TRL": lambda model: contextlib.nullcontext(),
    "apply()": lambda model: log_probs(),
    'apply(schedule="recompute")': lambda model: log_probs(schedule="recompute"),
    "apply() and layers": log_probs_and_layers,
}


class Step:
    """A trainer's loss and its gradients by one provider. `columns`: the loss, and the norm of all gradients."""

    def __init__(self, trainer, inputs: dict[str, Tensor], provider: str):
        self.trainer, self.inputs, self.provider, self.peak = trainer, inputs, PROVIDERS[provider], 0
        self.columns: tuple[str, ...] = ()

    def __call__(self) -> Tensor:
        model = self.trainer.model
        is_cuda = model.device.type == "cuda"
        if is_cuda:
            torch.cuda.reset_peak_memory_stats()
        with self.provider(model):
            loss = self.trainer.compute_loss(model, dict(self.inputs))
            loss.backward()
        if is_cuda:
            self.peak = max(self.peak, torch.cuda.max_memory_allocated())
        if not self.columns:
            norms = [torch.linalg.vector_norm(p.grad, dtype=torch.float32) for p in model.parameters()]
            self.columns = f"{loss.item():.5f}", f"{torch.stack(norms).norm().item():.5f}"
        model.zero_grad()

    def warm_up(self) -> None:
        for _ in range(2):
            self.peak = 0
            self()


def tokenizer() -> PreTrainedTokenizerFast:
    words = WordLevel({word: i for i, word in enumerate(("<pad>", "<eos>", "a", "b", "c"))}, unk_token="<pad>")
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), pad_token="<pad>", eos_token="<eos>")


def build(kind: str, model: nn.Module, folder: str):
    on_gpu = model.device.type == "cuda"
    options = dict(output_dir=folder, report_to=[], bf16=False, use_cpu=not on_gpu, per_device_train_batch_size=8)
    options |= dict(save_strategy="no", disable_tqdm=True, gradient_checkpointing=False)
    more = {"DPO": dict(ref_model=copy.deepcopy(model)), "GRPO": dict(reward_funcs=lambda completions, **_: [0.0])}
    return getattr(trl, f"{kind}Trainer")(
        model=model, args=getattr(trl, f"{kind}Config")(**options), train_dataset=Dataset.from_dict(DATA[kind]),
        processing_class=tokenizer(), **more.get(kind, {}),
    )  # fmt: skip


def inputs_of(kind: str, ids: Tensor, prompt: int) -> dict[str, Tensor]:
    """The inputs of the trainer's compute_loss; the first `prompt` tokens of DPO and GRPO are prompts."""
    ones = torch.ones_like(ids)
    if kind == "SFT":
        return dict(input_ids=ids, attention_mask=ones, labels=ids)
    if kind == "DPO":
        mask = ones.clone()
        mask[:, :prompt] = 0
        return dict(input_ids=ids, attention_mask=ones, completion_mask=mask)
    return dict(
        prompt_ids=ids[:, :prompt], prompt_mask=ones[:, :prompt], completion_ids=ids[:, prompt:],
        completion_mask=ones[:, prompt:], advantages=torch.linspace(-1, 1, len(ids), device=ids.device),
        num_items_in_batch=ones[:, prompt:].sum(),
    )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> Path:
    """Returns the page."""
    parser = harness.arguments("trl_step", __doc__, csv=False)
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU, the default without a GPU")
    args = parser.parse_args(argv)
    device = torch.device("cpu") if args.tiny else harness.device_to_measure()
    on_gpu = device.type == "cuda"
    if on_gpu:  # prevents fragmentation between providers, which would make bursts wait for the driver
        torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    torch.manual_seed(0)
    with device:
        config = LlamaConfig(**LLAMA | ({} if on_gpu else TINY) | dict(pad_token_id=0, eos_token_id=1))
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
        ids = torch.randint(2, config.vocab_size, (8, 2048) if on_gpu else (8, 16))
    rows = []
    for kind in LOSSES:  # one after the other, so that a peak has no other trainer's reference model
        with tempfile.TemporaryDirectory() as folder:
            shared = {id(p): p for p in model.parameters()}
            trainer = build(kind, copy.deepcopy(model, shared), folder)
        trainer.current_gradient_accumulation_steps = 1  # train() would set it
        steps = {name: Step(trainer, inputs_of(kind, ids, ids.shape[1] // 4), name) for name in PROVIDERS}
        for step in steps.values():
            step.warm_up()
        times = bursts(steps, device, *((5, 0.5) if on_gpu else (1, 0.01)))
        for name, step in steps.items():
            ms, base = times[name].median / 1e3, times["TRL"].median / 1e3
            rows.append((kind, name, f"{ms:.4g}", f"{ms / base:.3f}", f"{step.peak / 1e9:.2f}", *step.columns))
            print(*rows[-1], flush=True)
        del trainer, steps, step

    about = environment(device, args.commit)
    page = f"# TRL's losses on Llama 3.2 1B, on {about['gpu']}\n\n"
    page += f"Commit `{about['commit']}`, driver {about['driver']}, torch {about['torch']}, transformers "
    page += f"{version('transformers')}, trl {version('trl')}. {ids.numel()} tokens, forward and backward. The peak "
    page += "includes weights, and DPO's those of the reference model.\n\n"
    page += markdown_table(("loss", "provider", "ms", "time / TRL's", "peak GB", "value", "norm of gradients"), rows)
    path = args.out / ("trl_step.md" if on_gpu else "trl_step_tiny.md")
    harness.write_page(page + "\n", path)
    return path


if __name__ == "__main__":
    harness.main(main)
