"""Trains a small Llama with the Trainer of transformers, without and with quackish, and plots the losses.

    python scripts/finetune.py --data my_texts/    # a file or folder; default: the Python standard library's sources

All models start from the same random weights and see the same batches. They train in bf16 autocast, and one more run of
PyTorch in fp32: the figure has the differences to it, which come from rounding. Nothing is downloaded: a token is one
byte of the text, on a GPU two, so that the head has a realistic share of the step. On a GPU it takes about a minute.
"""

import argparse
import sys
import time
from pathlib import Path
from statistics import mean, median

if __name__ == "__main__":
    import ctrl_c

    ctrl_c.end_at_once()

import torch
from torch import Tensor

try:
    from matplotlib.figure import Figure
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        PrinterCallback,
        Trainer,
        TrainerCallback,
        TrainingArguments,
        default_data_collator,
    )

    from quackish.bench.looks import color_of
    from quackish.cli.parser import output_folder
    from quackish.integrations.transformers import apply
    from train_lm import read_text, smooth, tokenize
except ImportError as error:
    sys.exit(f"finetune.py: {error}. Install what this script needs: pip install -e '.[bench]' transformers accelerate")

EXACT = "torch in fp32"
SIZES = {  # seq: tokens per sequence; token_bytes: 1 for a vocabulary of 256, 2 for 65536
    "cpu": dict(steps=60, batch=8, seq=64, hidden=128, token_bytes=1, lr=2e-3),
    "cuda": dict(steps=150, batch=16, seq=1024, hidden=512, token_bytes=2, lr=1e-3),
}


class Curve(TrainerCallback):
    """The loss and the time of each step."""

    def __init__(self):
        self.losses, self.times = [], []

    def on_log(self, args, state, control, logs, **kwargs):
        if "loss" in logs:
            self.losses.append(logs["loss"])
            self.times.append(time.perf_counter())

    @property
    def step_ms(self) -> float:
        """The median, because the first steps also compile kernels."""
        return 1e3 * median(end - start for start, end in zip(self.times, self.times[1:], strict=False))


def train(name: str, size: argparse.Namespace, sequences: list[dict[str, Tensor]]) -> Curve:
    """Trains one model and prints a summary line. The first batch of sequences is held out."""
    on_gpu = size.device == "cuda"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256**size.token_bytes,
        hidden_size=size.hidden,
        intermediate_size=3 * size.hidden,
        num_hidden_layers=4,
        num_attention_heads=size.hidden // 64,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    if name == "quackish":
        apply(model)
    options = TrainingArguments(
        output_dir=str(size.out),
        max_steps=size.steps,
        per_device_train_batch_size=size.batch,
        learning_rate=size.lr,
        bf16=name != EXACT,
        use_cpu=not on_gpu,
        logging_steps=1,
        disable_tqdm=True,
        save_strategy="no",
    )
    curve = Curve()
    trainer = Trainer(model, options, default_data_collator, train_dataset=sequences[size.batch :], callbacks=[curve])
    trainer.remove_callback(PrinterCallback)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    trainer.train()
    peak = f", peak {torch.cuda.max_memory_allocated() / 1e9:.2f} GB" if on_gpu else ""
    last, held_out = mean(curve.losses[-10:]), trainer.evaluate(sequences[: size.batch])["eval_loss"]
    print(f"{name}: loss {last:.4f} (last 10 steps), held out {held_out:.4f}, {curve.step_ms:.1f} ms per step{peak}")
    return curve


def figure(curves: dict[str, Curve], window: int, path: Path) -> None:
    """The smoothed losses, and below them the differences to those in fp32, whose largest are printed."""
    fig = Figure(figsize=(8, 5), layout="constrained")
    top, bottom = fig.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    smoothed = {name: smooth(curve.losses, window) for name, curve in curves.items()}
    for (name, losses), style in zip(smoothed.items(), ("-", ":", "--"), strict=True):
        color = "gray" if name == EXACT else color_of(name)
        top.plot(losses, style, label=f"{name}, {curves[name].step_ms:.1f} ms per step", color=color)
        if name != EXACT:
            difference = [a - b for a, b in zip(losses, smoothed[EXACT], strict=True)]
            bottom.plot(difference, style, color=color)
            print(f"{name} - {EXACT}: at most {max(map(abs, difference)):.4f} (mean of {window} steps)")
    top.set_ylabel(f"training loss, nats per token\n(mean of {window} steps)")
    top.legend()
    bottom.set(xlabel="step", ylabel="minus fp32")
    fig.savefig(path, dpi=150)


def main(argv: list[str] | None = None) -> dict[str, Curve]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--data", type=Path, help="a file or a folder")
    parser.add_argument("--out", type=output_folder, default="out/finetune", help="default: %(default)s")
    parser.add_argument("--device", choices=SIZES, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, help="default: 60 on cpu, 150 on cuda")
    args = parser.parse_args(argv)
    size = argparse.Namespace(**SIZES[args.device] | {k: v for k, v in vars(args).items() if v is not None})
    tokens = tokenize(read_text(args.data), size.token_bytes).long()
    windows = tokens[: len(tokens) // size.seq * size.seq].view(-1, size.seq)
    if len(windows) < 2 * size.batch:
        parser.error(f"--data {args.data}: {len(tokens)} tokens, expected at least {2 * size.batch * size.seq}")
    torch.manual_seed(0)
    chosen = torch.randperm(len(windows))[: size.batch * (size.steps + 1)]
    args.out.mkdir(parents=True, exist_ok=True)
    sequences = [{"input_ids": window, "labels": window} for window in windows[chosen]]
    curves = {name: train(name, size, sequences) for name in (EXACT, "torch", "quackish")}
    figure(curves, max(1, size.steps // 20), args.out / "finetune.png")
    print("wrote", args.out / "finetune.png")
    return curves


if __name__ == "__main__":
    main()
