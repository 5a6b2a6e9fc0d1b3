"""A training step of Llama 3.2 1B by plain transformers, quackish and Unsloth's full fine-tuning.

    python -m benchmarks.unsloth_step                  writes results/<GPU>/unsloth_step.md; needs Unsloth
    python -m benchmarks.unsloth_step --tiny           a tiny model on the CPU, to test this program

Unsloth changes transformers when it is imported. So each provider runs in processes of its own, which take turns and
read the same weights and tokens. Unsloth compiles layers, so the others are measured with compiled layers too, and
keeps the weights of norms in fp32. A step is forward, backward and optimizer, as in llama_step.py. What processes print
goes to unsloth_step.log: Unsloth says there what it compiled, and what it could not.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks import harness
from quackish.bench.environment import environment, version
from quackish.bench.report import markdown_table
from quackish.testing.timing import bursts

PROVIDERS = ("plain", "quackish", "unsloth", "plain, layers compiled", "quackish, layers compiled")
TURNS = 2  # processes of one provider differed by 0.4 % at most on an H200
OFFLINE = dict.fromkeys(("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "UNSLOTH_DISABLE_STATISTICS"), "1")
ALLOCATOR = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}  # as Unsloth sets it


def save(folder: Path, device: torch.device) -> None:
    """Random weights, tokens, and a tokenizer, without which Unsloth loads no model."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

    from benchmarks.llama_step import LLAMA, TINY

    torch.manual_seed(0)
    with device:
        config = LlamaConfig(**LLAMA | ({} if device.type == "cuda" else TINY))
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        ids = torch.randint(config.vocab_size, (8, 2048) if device.type == "cuda" else (2, 16))
    model.save_pretrained(folder)
    torch.save(ids.cpu(), folder / "ids.pt")
    special = dict(unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    words = list(special.values()) + [f"w{i}" for i in range(4, config.vocab_size)]
    tokens = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=tokens, **special).save_pretrained(folder)


def load(provider: str, folder: Path, device: torch.device) -> Any:
    library = provider.partition(",")[0]
    if library == "unsloth":
        from unsloth import FastLanguageModel

        options = dict(load_in_4bit=False, full_finetuning=True, use_gradient_checkpointing=False, max_seq_length=2048)
        return FastLanguageModel.from_pretrained(str(folder), dtype=torch.bfloat16, **options)[0]
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device)
    if library == "quackish":
        from quackish.integrations.transformers import apply

        apply(model)
    return model


def measure(provider: str, folder: Path, device: torch.device) -> dict[str, Any]:
    """In a process of its own: the loss, the norm of all gradients, milliseconds, and the peak in GB."""
    from benchmarks.llama_step import Step, compile_model

    model = load(provider, folder, device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=True)
    step = Step(model, optimizer, torch.load(folder / "ids.pt").to(device))
    compile_model(step, "layers" if provider.endswith("layers compiled") else "no")
    step.warm_up()
    times = bursts({provider: step}, device, *((5, 0.5) if device.type == "cuda" else (1, 0.01)))
    return step.columns | dict(ms=times[provider].median / 1e3, gb=step.peak / 1e9)


def in_a_process(provider: str, folder: Path, options: Sequence[str], log: Path) -> dict[str, Any]:
    """`measure`, or a note if it fails."""
    command = [sys.executable, "-m", "benchmarks.unsloth_step", "--measure", provider, "--folder", str(folder)]
    command += options
    variables = os.environ | OFFLINE | ALLOCATOR | {"UNSLOTH_COMPILE_LOCATION": str(folder / "unsloth")}
    done = subprocess.run(command, env=variables, capture_output=True, text=True)
    with log.open("a", encoding="utf-8") as file:
        file.write(f"# {provider}\n{done.stdout}{done.stderr}\n")
    if done.returncode:
        return dict(note=(done.stderr.strip().splitlines() or [""])[-1])
    return json.loads(next(line for line in reversed(done.stdout.splitlines()) if line.startswith("{")))


def row(provider: str, turns: Sequence[Mapping[str, Any]]) -> list[str]:
    if note := next((turn["note"] for turn in turns if "note" in turn), ""):
        return [provider, *[""] * 6, note]
    ms = [turn["ms"] for turn in turns]
    last = turns[-1]
    numbers = (median(ms), min(ms), max(ms), max(turn["gb"] for turn in turns))
    return [provider, *(f"{x:.4g}" for x in numbers), last["loss"], last["grad_norm"], ""]


def page_of(about: Mapping[str, Any], turns: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    page = f"# Training steps beside Unsloth, Llama 3.2 1B, on {about['gpu']}\n\n"
    page += f"Commit `{about['commit']}`, driver {about['driver']}, torch {about['torch']}, transformers "
    page += f"{version('transformers')}, unsloth {version('unsloth')}. Processes of each provider, in turns: "
    page += f"{len(turns[PROVIDERS[-1]])}. Times are medians of them, and the fastest and the slowest. The peak, the "
    page += "largest, includes weights and optimizer. Loss and norm are those of the last process.\n\n"
    header = ("provider", "ms", "least", "most", "peak GB", "loss", "norm of gradients", "note")
    return page + markdown_table(header, [row(*item) for item in turns.items()])


def main(argv: Sequence[str] | None = None) -> Path | None:
    """Returns the page, which is written after each turn."""
    parser = harness.arguments("unsloth_step", __doc__, csv=False)
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU, the default without a GPU")
    parser.add_argument("--measure", choices=PROVIDERS, help=argparse.SUPPRESS)  # for the processes
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.measure == "unsloth":
        import unsloth  # noqa: F401  before anything imports transformers
    device = torch.device("cpu") if args.tiny else harness.device_to_measure()
    if args.measure:
        print(json.dumps(measure(args.measure, args.folder, device)))
        return None
    options = ["--tiny"] * args.tiny
    turns: dict[str, list[dict[str, Any]]] = {provider: [] for provider in PROVIDERS}
    path = args.out / ("unsloth_step.md" if device.type == "cuda" else "unsloth_step_tiny.md")
    args.out.mkdir(parents=True, exist_ok=True)
    log = path.with_suffix(".log")
    log.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as name:
        save(Path(name), device)
        for _ in range(TURNS if device.type == "cuda" else 1):
            for provider in PROVIDERS:
                turns[provider].append(in_a_process(provider, Path(name), options, log))
                print(provider, turns[provider][-1], flush=True)
            harness.write_page(page_of(environment(device, args.commit), turns), path)
    return path


if __name__ == "__main__":
    harness.main(main)
