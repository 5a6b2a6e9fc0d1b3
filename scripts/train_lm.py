"""Trains a small language model on text with quackish's ops, and the same model in plain PyTorch.

    python scripts/train_lm.py                     # the standard library's sources; 3 minutes on two busy cores
    python scripts/train_lm.py --steps 330         # for a lower loss
    python scripts/train_lm.py --data my_texts/    # any file or folder
    python scripts/train_lm.py --seeds 0,1         # twice, with different weights and batches

On a GPU matmuls are in bf16 (autocast), and a third model, PyTorch with head and logits in fp32, shows which of the
first two is closer to exact. All start from the same weights and see the same batches, in alternating steps. At the end
(or after Ctrl-C or SIGTERM) a table compares losses, step time and memory; figure, curves and a summary go to --out.
"""

import argparse
import csv
import dataclasses
import json
import math
import os
import platform
import random
import sys
import sysconfig
import time
from itertools import accumulate
from pathlib import Path
from statistics import mean, median

if __name__ == "__main__":
    import ctrl_c

    ctrl_c.end_at_once()

import torch
from torch import Tensor

try:
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    import quackish
    from lm_model import QUACKISH, TORCH, TORCH_FP32, LanguageModel, Ops
    from quackish.bench.looks import color_of
    from quackish.cli.console import progress
    from quackish.cli.interrupt import end_on_sigterm
    from quackish.cli.parser import output_folder, positive
    from quackish.text import fill, text_table
except ImportError as error:
    sys.exit(f"train_lm.py: {error}. Install the project with what this script needs: pip install -e '.[bench]'")

VALIDATION_SHARE = 0.05
VALIDATION_BATCHES = 8
VALIDATION_SEED = 1  # all seeds of a run have the same validation windows
# The last is compared with. On a CPU all models are fp32, so that TORCH_FP32 would equal TORCH.
VARIANTS = {"cpu": (QUACKISH, TORCH), "cuda": (QUACKISH, TORCH, TORCH_FP32)}
COLORS = {QUACKISH.name: color_of("quackish"), TORCH.name: color_of("torch"), TORCH_FP32.name: "#a0a0a0"}


@dataclasses.dataclass(frozen=True)
class Size:
    """Sizes of model and training.

    2 bytes per token give a vocabulary of 65536: as in a real model, the head then takes much of the time and most of
    the memory. With 1 byte it is 256.
    """

    steps: int
    batch: int
    seq: int
    dim: int
    layers: int
    token_bytes: int
    lr: float

    @property
    def vocab(self) -> int:
        return 256**self.token_bytes


SIZES = {
    "cpu": Size(steps=40, batch=16, seq=128, dim=128, layers=4, token_bytes=1, lr=1e-3),
    "cuda": Size(steps=300, batch=16, seq=1024, dim=1024, layers=8, token_bytes=2, lr=4e-4),
}


# --- the text


def read_text(data: Path | None) -> bytes:
    """The bytes of a file or of all files in a folder; by default the sources of the Python standard library."""
    if data is None:
        root = Path(sysconfig.get_path("stdlib"))
        files = [p for p in root.rglob("*.py") if "site-packages" not in p.relative_to(root).parts]
    else:
        files = [data] if data.is_file() else [p for p in data.rglob("*") if p.is_file()]
    files.sort(key=str)
    random.Random(0).shuffle(files)  # a fixed order in which the held-out end resembles the rest
    return b"\n".join(p.read_bytes() for p in files)


def tokenize(text: bytes, token_bytes: int) -> Tensor:
    text = text[: len(text) // token_bytes * token_bytes]
    tokens = torch.zeros(len(text) // token_bytes, dtype=torch.int32)
    for column in torch.frombuffer(bytearray(text), dtype=torch.uint8).view(-1, token_bytes).unbind(1):
        tokens = tokens * 256 + column
    return tokens


class Batches:
    """Batch i is `batch` random windows of the tokens, determined by the seed. All data is on the device in advance."""

    def __init__(self, tokens: Tensor, count: int, size: Size, seed: int, device: torch.device):
        starts = torch.randint(
            len(tokens) - size.seq, (count, size.batch, 1), generator=torch.Generator().manual_seed(seed)
        )
        self.windows = starts.to(device)
        self.offsets = torch.arange(size.seq + 1, device=device)
        self.tokens = tokens.to(device)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        """Tokens and their targets, the next tokens; both (batch, seq)."""
        window = self.tokens[self.windows[i] + self.offsets].long()
        return window[:, :-1], window[:, 1:]


# --- the training


class Run:
    """One model with its optimizer, losses and step times."""

    def __init__(self, ops: Ops, size: Size, seed: int, device: torch.device):
        torch.manual_seed(seed)
        self.name = ops.name
        self.size = size
        self.device = device
        self.model = LanguageModel(size.vocab, size.dim, size.layers, size.seq, ops).to(device)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=size.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )
        warmup = max(1, size.steps // 20)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer,
            lambda i: min((i + 1) / warmup, 0.1 + 0.45 * (1 + math.cos(math.pi * i / size.steps))),
        )
        self.losses = torch.full((size.steps,), math.nan, device=device)
        self.marks = []  # (start, end) of each step

    def loss(self, tokens: Tensor, target: Tensor) -> Tensor:
        # Weights are fp32; on a GPU matmuls and the activations between them are bf16.
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            return self.model(tokens, target)

    def step(self, i: int, tokens: Tensor, target: Tensor) -> None:
        """One training step, without synchronizing with the GPU."""
        start = self.mark()
        loss = self.loss(tokens, target)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        self.losses[i] = loss.detach()
        self.marks.append((start, self.mark()))

    def mark(self) -> torch.cuda.Event | float:
        """The current time on the device's clock."""
        if self.device.type != "cuda":
            return time.perf_counter() * 1e3
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def step_ms(self) -> list[float]:
        if self.device.type != "cuda":
            return [end - start for start, end in self.marks]
        torch.cuda.synchronize(self.device)
        return [start.elapsed_time(end) for start, end in self.marks]

    @torch.no_grad()
    def validation_loss(self, batches: Batches) -> float:
        return torch.stack([self.loss(*batches[i]) for i in range(VALIDATION_BATCHES)]).mean().item()

    def peak_bytes(self, tokens: Tensor, target: Tensor) -> int:
        """Peak memory of one forward and backward above weights and optimizer state, including gradients."""
        self.optimizer.zero_grad()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            before = torch.cuda.memory_allocated(self.device)
            self.loss(tokens, target).backward()
            return torch.cuda.max_memory_allocated(self.device) - before
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            self.loss(tokens, target).backward()
        events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
        return max(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))


def train(runs: list[Run], batches: Batches, steps: int, title: str) -> int:
    """Trains all runs in alternating steps. Returns the number of completed steps, fewer after Ctrl-C or SIGTERM."""
    every = max(1, steps // 100)  # showing the loss synchronizes with the GPU
    done, text, show = 0, title, progress(steps, "steps")
    with end_on_sigterm():
        try:
            for i in range(steps):
                batch = batches[i]
                for run in runs:
                    run.step(i, *batch)
                done = i + 1
                if done % every == 0:
                    losses = ", ".join(f"{run.name} {run.losses[i].item():.4f}" for run in runs)
                    text = f"{title}: {losses}"
                show(done, text)
        except KeyboardInterrupt:
            print(f"Stopped after {done} of {steps} steps.")
    return done


# --- the report


@dataclasses.dataclass(frozen=True)
class Trained:
    """Results of one seed, by name of the variant."""

    seed: int
    curves: dict[str, list[float]]  # losses of the completed steps
    step_ms: dict[str, list[float]]
    results: dict[str, dict[str, float]]

    @property
    def steps(self) -> int:
        return len(self.curves[self.exact])

    @property
    def exact(self) -> str:
        """The variant with fp32 logits."""
        return list(self.curves)[-1]

    @property
    def window(self) -> int:
        """Number of steps that smoothed curves average."""
        return max(1, self.steps // 20)

    def smoothed(self) -> dict[str, list[float]]:
        return {name: smooth(curve, self.window) for name, curve in self.curves.items()}

    def differences(self) -> dict[str, list[float]]:
        """Smoothed curves of the other variants minus that of fp32 logits."""
        smoothed = self.smoothed()
        exact = smoothed.pop(self.exact)
        return {name: [a - b for a, b in zip(curve, exact, strict=True)] for name, curve in smoothed.items()}

    def distances(self) -> dict[str, dict[str, float]]:
        return {
            name: {"largest": (most := max(curve, key=abs)), "at_step": curve.index(most) + 1, "mean": mean(curve)}
            for name, curve in self.differences().items()
        }

    def summary(self) -> dict:
        """The entry in summary.json."""
        distances = self.distances()
        return {"seed": self.seed, "steps_done": self.steps, "runs": self.results, "from_fp32_logits": distances}


def train_seed(seed: int, args: argparse.Namespace, validation: Batches) -> Trained | None:
    """None if it was stopped before the end of the first step."""
    size = args.size
    runs = [Run(ops, size, seed, args.device) for ops in VARIANTS[args.device.type]]
    batches = Batches(args.training, size.steps, size, seed, args.device)
    done = train(runs, batches, size.steps, f"seed {seed}")
    if done == 0:
        return None
    curves = {run.name: run.losses[:done].tolist() for run in runs}
    step_ms = {run.name: run.step_ms()[:done] for run in runs}
    results = {}
    for run in runs:
        loss = run.validation_loss(validation)
        results[run.name] = {
            "final_loss": smooth(curves[run.name], max(1, done // 20))[-1],
            "validation_loss": loss,
            "validation_bits_a_byte": loss / math.log(2) / size.token_bytes,
            "step_ms": median(step_ms[run.name]),
            "peak_bytes": run.peak_bytes(*batches[0]),
        }
    return Trained(seed, curves, step_ms, results)


def smooth(losses: list[float], window: int) -> list[float]:
    """The mean over the last `window` steps at each step (fewer at the beginning)."""
    return [sum(part) / len(part) for i in range(len(losses)) for part in [losses[max(0, i + 1 - window) : i + 1]]]


def table(trained: list[Trained]) -> str:
    names, rows = list(trained[0].curves), []
    for one in trained:
        steps, window, smoothed = one.steps, one.window, one.smoothed()
        rows.append([f"seed {one.seed}: loss at step 1", *(f"{curve[0]:.4f}" for curve in one.curves.values())])
        for i in sorted({max(1, steps * quarter // 4) for quarter in (1, 2, 3, 4)} - {1}):
            label = f"mean loss, steps {i + 1 - min(i, window)}-{i}" if window > 1 else f"loss at step {i}"
            rows.append([label, *(f"{curve[i - 1]:.4f}" for curve in smoothed.values())])
        results = one.results.values()
        rows.append(["validation loss, nats per token", *(f"{r['validation_loss']:.4f}" for r in results)])
        rows.append(["validation loss, bits per byte", *(f"{r['validation_bits_a_byte']:.4f}" for r in results)])
        distance = one.distances().values()
        rows.append(["largest difference **", *(f"{d['largest']:+.4f}" for d in distance), ""])
        rows.append(["    at step", *(str(d["at_step"]) for d in distance), ""])
        rows.append(["mean difference **", *(f"{d['mean']:+.4f}" for d in distance), ""])
    step_ms = (median(ms for one in trained for ms in one.step_ms[name]) for name in names)
    rows.append(["step, median ms", *(f"{ms:.1f}" for ms in step_ms)])
    peaks = (max(one.results[name]["peak_bytes"] for one in trained) for name in names)
    rows.append(["peak memory of a step, MB *", *(f"{peak / 1e6:.1f}" for peak in peaks)])
    title, body = "The same model, the same batches", text_table(["", *names], rows, "l" + "r" * len(names))
    notes = "* with gradients, without weights and optimizer state\n"
    notes += f"** of smoothed training losses, from {trained[0].exact}"
    return f"{title}\n\n{body}\n\n{notes}"


def figure(trained: list[Trained], title: str, out: Path) -> list[Path]:
    """Smoothed loss curves and their difference from the exact one: colors are variants, dashes are seeds."""
    fig = Figure(figsize=(8, 6), layout="constrained")
    top, bottom = fig.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    dashes = [("-", "--", "-.", ":")[i % 4] for i in range(len(trained))]
    exact = trained[0].exact
    bottom.axhline(0, color=COLORS[exact], linewidth=0.8)
    for one, style in zip(trained, dashes, strict=True):
        steps = range(1, one.steps + 1)
        for ax, curves in ((top, one.smoothed()), (bottom, one.differences())):
            for name, curve in curves.items():
                wide = ax is top and name == exact  # visible below the other curves, which may equal it
                look = dict(linewidth=4, alpha=0.4) if wide else dict(linewidth=1.3)
                ax.plot(steps, curve, style, color=COLORS[name], zorder=2 + (name != exact), **look)
    handles = [Line2D([], [], color=COLORS[name], label=name) for name in trained[0].curves]
    if len(trained) > 1:
        styles = zip(trained, dashes, strict=True)
        handles += [Line2D([], [], color="gray", linestyle=style, label=f"seed {one.seed}") for one, style in styles]
    window = trained[0].window
    top.set_title(title, fontsize=10)
    top.set_ylabel("training loss, nats per token" + (f"\n(mean of {window} steps)" if window > 1 else ""))
    top.legend(handles=handles)
    bottom.set(xlabel="step", ylabel=f"difference from\n{exact}")
    for ax in (top, bottom):
        ax.grid(alpha=0.25)
    paths = [out / "loss.png", out / "loss.svg"]
    for path in paths:
        fig.savefig(path, dpi=150)
    return paths


def write_curves(path: Path, trained: list[Trained]) -> None:
    with path.open("w", newline="") as f:
        writer = csv.writer(f)
        writer.writerow(["seed", "step", *(f"{name} {what}" for what in ("loss", "ms") for name in trained[0].curves)])
        for one in trained:
            columns = (range(1, one.steps + 1), *one.curves.values(), *one.step_ms.values())
            writer.writerows([one.seed, *row] for row in zip(*columns, strict=True))


# --- the command


def seeds_of(text: str) -> tuple[int, ...]:
    words = text.split(",")
    if not all(word.isdecimal() for word in words) or len(set(words)) < len(words):
        raise argparse.ArgumentTypeError(f"{text}: expected distinct comma-separated integers, such as 0,1")
    return tuple(map(int, words))


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--data", type=Path, help="a file or a folder; default: the standard library's *.py")
    out_help = "output folder; default: %(default)s"
    parser.add_argument("--out", type=output_folder, default="out/train_lm", help=out_help)
    parser.add_argument("--device", choices=SIZES, default="cuda" if torch.cuda.is_available() else "cpu")
    seeds_help = "comma-separated; each seed trains all models once; default: 0"
    parser.add_argument("--seeds", type=seeds_of, default=(0,), metavar="N[,...]", help=seeds_help)
    steps = ", ".join(f"{size.steps} on {device}" for device, size in SIZES.items())
    parser.add_argument("--steps", type=positive, help=f"default: {steps}")
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: PyTorch sees no CUDA device here")
    if args.data is not None and not args.data.exists():
        parser.error(f"--data {args.data}: no such file or folder")
    args.size = SIZES[args.device]
    args.size = dataclasses.replace(args.size, steps=args.steps or args.size.steps)
    args.device = torch.device(args.device)

    args.tokens = tokenize(read_text(args.data), args.size.token_bytes)
    held_out = int(len(args.tokens) * VALIDATION_SHARE)
    if held_out <= args.size.seq:
        parser.error(
            f"--data {args.data}: {len(args.tokens)} tokens are too few: the held-out {VALIDATION_SHARE:.0%} must be "
            f"longer than a window of {args.size.seq}. Give more text."
        )
    args.training, args.validation = args.tokens[:-held_out], args.tokens[-held_out:]
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    size, device = args.size, args.device
    args.out.mkdir(parents=True, exist_ok=True)

    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # silences the profiler that peak_bytes uses
    # Reproducible results: cuBLAS and the backward of attention need these settings.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False

    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    with torch.device("meta"):
        model = LanguageModel(size.vocab, size.dim, size.layers, size.seq, TORCH)
    parameters = sum(p.numel() for p in model.parameters())
    title = f"{parameters / 1e6:.1f} M parameters, vocabulary {size.vocab}, {size.batch} x {size.seq} tokens, {machine}"
    text = f"{args.data or 'the Python standard library'}, {len(args.tokens) / 1e6:.1f} M tokens"
    print(fill(f"{title}; text: {text}", indent="  "))
    if device.type == "cpu":
        gpu = "its kernels, which take less time and memory than PyTorch, need a GPU"
        print(fill(f"On a CPU quackish runs its portable path in plain PyTorch; {gpu}."))

    validation = Batches(args.validation, VALIDATION_BATCHES, size, VALIDATION_SEED, device)
    trained: list[Trained] = []
    for seed in args.seeds:
        one = train_seed(seed, args, validation)
        trained += [one] if one else []
        if one is None or one.steps < size.steps:
            break
    if not trained:
        return 130

    summary = {
        "machine": machine,
        "versions": {"quackish": quackish.__version__, "torch": torch.__version__, "python": platform.python_version()},
        "size": dataclasses.asdict(size),
        "data": str(args.data or "the Python standard library"),
        "seeds": [one.summary() for one in trained],
    }
    print(table(trained))
    paths = figure(trained, title, args.out)
    paths += [args.out / "curves.csv", args.out / "summary.json"]
    write_curves(paths[-2], trained)
    paths[-1].write_text(json.dumps(summary, indent=2) + "\n")
    print(fill(f"wrote {', '.join(map(str, paths))}", indent="  "))
    return 0 if sum(one.steps for one in trained) == len(args.seeds) * size.steps else 130


if __name__ == "__main__":
    ctrl_c.run(main)
