"""The vocabulary-parallel head over 1, 2 and 4 GPUs, beside one GPU, Liger's head and PyTorch's loss_parallel.

    python -m benchmarks.parallel                writes results/<GPU>/parallel.md, and a trace of each rank

Forward and backward, bf16, "mean". The program starts one process per GPU. All providers of a shape take turns in
bursts of STEPS whole steps, and the time of the slowest rank counts. GPUs of one host differ: each rank also runs the
whole vocabulary on its own GPU, alone and while all ranks do. Efficiency is such a time, divided by ranks * time.
"""

import argparse
import contextlib
import datetime
import importlib.util
import json
import math
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F

import quackish
from benchmarks import harness
from benchmarks.traces import traced
from benchmarks.verdicts import at_most, verdict
from quackish import parallel
from quackish.bench.environment import environment
from quackish.bench.report import Verdict, markdown_table
from quackish.cli import call_arguments
from quackish.gpu import gpu_of
from quackish.testing.timing import synchronize

SHAPES = ((8192, 4096, 128256), (8192, 2048, 131072))  # the other variants and libraries run the first one only
SMALL = ((64, 32, 1000),)  # without a GPU
STEPS, ROUNDS = 5, 8
OURS, ONE_GPU, ALONE = "quackish", "quackish, one GPU", "quackish, one GPU alone"
# (H, ranks): least efficiency
TARGETS = {(4096, 2): 0.97, (4096, 4): 0.94, (2048, 4): 0.88}
TIMEOUT = datetime.timedelta(seconds=120)  # where a library raises on some ranks, and others wait for these
MOST_EXPOSED = 0.03  # share of a step that is communication which nothing hides

Step = Callable[[], torch.Tensor]
Cell = dict[str, Any]  # what was found of a shape on some ranks


def providers(m: int, h: int, v: int, device: torch.device, all_of_them: bool) -> dict[str, Step]:
    """A step of each, which returns the loss."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    g = torch.Generator(device).manual_seed(0)
    x = torch.randn(m, h, generator=g, device=device, dtype=torch.bfloat16)
    w = (torch.randn(v, h, generator=g, device=device) * h**-0.5).bfloat16()
    target = torch.randint(v, (m,), generator=g, device=device)
    shard = w.chunk(ranks)[rank].clone().requires_grad_()
    part = x.chunk(ranks)[rank].clone().requires_grad_()
    x.requires_grad_()
    w.requires_grad_()

    def step(loss_of: Callable[[], torch.Tensor], *leaves: torch.Tensor) -> Step:
        def run() -> torch.Tensor:
            loss = loss_of()
            torch.autograd.grad(loss, leaves)
            return loss.detach()

        return run

    def ours(x=x, **how) -> Step:
        return step(lambda: parallel.linear_cross_entropy(x, shard, target, **how), x, shard)

    steps = {OURS: ours(), ONE_GPU: step(lambda: quackish.linear_cross_entropy(x, w, target), x, w)}
    if not all_of_them:
        return steps
    if ranks > 1:
        steps["quackish, deterministic"] = ours(deterministic=True)
        steps["quackish, sequence_parallel"] = ours(part, sequence_parallel=True)
        steps["quackish, recompute"] = ours(schedule="recompute")
    steps["PyTorch, loss_parallel"] = loss_parallel(x, shard, target)
    if device.type == "cuda" and importlib.util.find_spec("liger_kernel"):
        with contextlib.suppress(ImportError):  # an older Liger
            from liger_kernel.ops.cute.fused_linear_scaled_cross_entropy_tp import is_available
            from liger_kernel.transformers.functional import liger_fused_linear_scaled_cross_entropy_tp as liger

            path = "native" if is_available() else "its PyTorch path; the native one takes NVSHMEM"
            steps[f"liger, tp ({path})"] = step(lambda: liger(x, shard, target, dist.group.WORLD).sum() / m, x, shard)
    return steps


def loss_parallel(x: torch.Tensor, shard: torch.Tensor, target: torch.Tensor) -> Step:
    """PyTorch's head as parallelize_module makes it: DTensor logits sharded by class, cross entropy on these."""
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor import parallel as tensor_parallel

    mesh = dist.device_mesh.init_device_mesh(x.device.type, (dist.get_world_size(),))

    def run() -> torch.Tensor:
        with tensor_parallel.loss_parallel():
            whole = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
            weight = DTensor.from_local(shard, mesh, [Shard(0)], run_check=False)
            loss = F.cross_entropy(F.linear(whole, weight).float(), target)
            torch.autograd.grad(loss, [x, shard])
        return loss.detach().to_local()

    return run


# Measuring -----------------------------------------------------------------------------------------------------------


def everyone(value: Any = None) -> list:
    """The values of all ranks, which wait for each other."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def first_steps(steps: dict[str, Step], device: torch.device) -> dict[str, dict[str, Any]]:
    """Loss and MB of each, or why it failed. What fails on a rank is taken out of `steps` on all of them."""
    found = {}
    for name, step in list(steps.items()):
        loss, mb, why = math.nan, math.nan, ""
        try:
            loss, mb = step().item(), peak_mb(step, device)
        except Exception as error:  # a peer must not end the run
            why = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        whys = [why for why in everyone(why) if why]
        found[name] = {"loss": loss, "mb": max(everyone(mb)), "why": whys[0] if whys else ""}
        if whys:
            del steps[name]
    return found


def milliseconds(steps: dict[str, Step], device: torch.device) -> dict[str, list[list[float]]]:
    """Bursts of each step in rotation, per rank. ALONE is ONE_GPU while other ranks rest."""
    samples: dict[str, list[float]] = defaultdict(list)
    for _ in range(ROUNDS if device.type == "cuda" else 1):
        for name, step in steps.items():
            everyone()
            samples[name].append(burst(step, device))
        for rank in range(dist.get_world_size()):
            everyone()
            if rank == dist.get_rank():
                samples[ALONE].append(burst(steps[ONE_GPU], device))
    of_ranks = everyone(dict(samples))
    return {name: [samples[name] for samples in of_ranks] for name in samples}


def burst(step: Step, device: torch.device) -> float:
    step()
    if device.type != "cuda":
        return 1.0
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(STEPS):
        step()
    end.record()
    synchronize(device)
    return start.elapsed_time(end) / STEPS


def peak_mb(step: Step, device: torch.device) -> float:
    """Above what is allocated before, gradients included."""
    if device.type != "cuda":
        return 0.0
    synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    step()
    synchronize(device)
    return (torch.cuda.max_memory_allocated(device) - before) / 1e6


def most_mb(m: int, h: int, v: int, ranks: int, device: torch.device) -> float:
    """The one-rank formula with v / ranks, and what a rank keeps of each row and rank."""
    parser = argparse.ArgumentParser()
    call_arguments.add_arguments(parser)
    words = ["linear_cross_entropy", f"{m}x{h}x{-(-v // ranks)}", "--reduction", "none"]
    gpu = gpu_of(device.index) if device.type == "cuda" else None
    formula = call_arguments.dry_run_call(parser.parse_args(words), gpu).peak_bytes
    return (1.01 * formula + (16 * ranks + 200) * m) / 1e6 + 4


def measure(rank: int, ranks: int, store: str, found: Path, args: argparse.Namespace) -> None:
    """One process. Rank 0 adds to the cells in the file `found`, and writes the page after each."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks, timeout=TIMEOUT
    )
    shapes = SHAPES if on_gpu else SMALL
    for shape in shapes:
        steps = providers(*shape, device, all_of_them=shape == shapes[0])
        cell: Cell = {"shape": shape, "ranks": ranks, "most_mb": most_mb(*shape, ranks, device)}
        cell["steps"] = first_steps(steps, device)
        cell["ms"] = milliseconds(steps, device)
        file = f"parallel_{'x'.join(map(str, shape))}_tp{ranks}_rank{rank}"
        cell["kernels"] = {
            name: everyone(traced(steps[name], device, args.out / f"{file}{suffix}.json.gz") if on_gpu else {})
            for name, suffix in ((OURS, ""), (ONE_GPU, "_one_gpu"))
        }
        if rank == 0:
            cells = [*json.loads(found.read_text()), cell]
            found.write_text(json.dumps(cells))
            harness.write_page(page(cells, environment(device, args.commit)), args.out / "parallel.md")
        del steps
        if on_gpu:
            torch.cuda.empty_cache()
    everyone()  # rank 0 has written
    dist.destroy_process_group()


# The page ------------------------------------------------------------------------------------------------------------


def page(cells: list[Cell], about: dict[str, str]) -> str:
    """`about`: of quackish.bench.environment."""
    text = f"""# Vocabulary-parallel linear cross entropy: ms of a forward and backward

{about["gpu"]}, commit `{about["commit"]}`, driver {about["driver"]}, torch {about["torch"]}.
Efficiency is the time of one GPU / (GPUs * ms): of GPU 0 alone (the targets'), of the slowest GPU alone, and of the
slowest one while all of them run. MB are of one rank, with gradients. "exposed" is the share of a step in which the
slowest GPU runs NCCL's kernels alone: that of the GPU where it is least, as all other GPUs also wait in these kernels.

"""
    efficiencies = "of GPU 0", "of the slowest", "while all run"
    header = "M x H x V", "GPUs", "step", "ms", *efficiencies, "MB", "exposed", "loss"
    text += "".join(f"- {passed}: {what}\n" for cell in cells for passed, what in verdicts(cell)) + "\n"
    text += markdown_table(header, [line for cell in cells for line in lines_of(cell)])
    for cell in cells:
        text += f"\n## {name_of(cell)}, TP {cell['ranks']}: ms per GPU\n\n"
        names = [f"GPU {rank}" for rank in range(cell["ranks"])]
        rows = [(name, *shown(medians(cell["ms"][name]))) for name in (ALONE, ONE_GPU, OURS)]
        for name, tables in cell["kernels"].items():
            of_kernels = dict.fromkeys(kernel for table in tables for kernel in table)
            rows += [(f"{name}: {k}", *shown(table.get(k, 0.0) for table in tables)) for k in of_kernels]
        text += markdown_table(("", *names), rows)
    return text


def verdicts(cell: Cell) -> list[Verdict]:
    shape, ranks, mb, found = cell["shape"], cell["ranks"], cell["most_mb"], cell["steps"][OURS]
    if ranks == 1 or found["why"]:
        return []
    what, lines = f"{name_of(cell)}, {ranks} GPUs", []
    if (least := TARGETS.get((shape[1], ranks))) is not None:
        efficiency = efficiencies_of(cell, OURS)[0]
        lines.append(verdict(efficiency >= least, f"{what}: efficiency of GPU 0: {efficiency:.4f}, target {least}"))
    lines += at_most(exposed_of(cell), MOST_EXPOSED, f"{what}: exposed communication")
    return lines + [verdict(found["mb"] <= mb, f"{what}: MB: {found['mb']:.0f}, target {mb:.0f}")]


def lines_of(cell: Cell) -> list[tuple]:
    """A table's lines."""
    ranks, lines = cell["ranks"], []
    for name, found in cell["steps"].items():
        if found["why"]:
            lines.append((name_of(cell), ranks, name, found["why"], *[""] * 6))
            continue
        share = exposed_of(cell) if name == OURS else None
        exposed = "" if share is None else f"{share:.3f}"
        times = f"{ms_of(cell, name):.3f}", *shown(efficiencies_of(cell, name))
        lines.append((name_of(cell), ranks, name, *times, f"{found['mb']:.0f}", exposed, f"{found['loss']:.6f}"))
    return lines


def ms_of(cell: Cell, name: str) -> float:
    """The slowest rank counts in each burst."""
    return statistics.median(map(max, zip(*cell["ms"][name], strict=True)))


def efficiencies_of(cell: Cell, name: str) -> list[float]:
    """Of GPU 0 alone, of the slowest GPU alone, and of the slowest one while all run."""
    alone, at_once = medians(cell["ms"][ALONE]), medians(cell["ms"][ONE_GPU])
    return [one / (cell["ranks"] * ms_of(cell, name)) for one in (alone[0], max(alone), max(at_once))]


def exposed_of(cell: Cell) -> float | None:
    """None without traces."""
    return min((table["exposed"] / table["step"] for table in cell["kernels"][OURS] if table), default=None)


def name_of(cell: Cell) -> str:
    return "x".join(map(str, cell["shape"]))


def medians(of_ranks: list[list[float]]) -> list[float]:
    return [statistics.median(samples) for samples in of_ranks]


def shown(numbers: Iterable[float]) -> list[str]:
    return [f"{number:.3f}" for number in numbers]


def main() -> None:
    parser = harness.arguments("parallel", __doc__, csv=False)
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 2, 4], help="numbers of GPUs to measure")
    args = parser.parse_args()
    most = torch.cuda.device_count() if harness.device_to_measure().type == "cuda" else 2
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder, "cells.json")
        found.write_text("[]")
        for ranks in sorted({n for n in args.gpus if n <= most}):
            mp.spawn(measure, (ranks, f"{folder}/store{ranks}", found, args), nprocs=ranks)


if __name__ == "__main__":
    harness.main(main)
