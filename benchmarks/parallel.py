"""The vocabulary-parallel head over 1, 2 and 4 GPUs, beside one GPU, Liger's head and PyTorch's loss_parallel.

    python -m benchmarks.parallel                writes results/<GPU>/parallel.md, and a trace per number of GPUs

Forward and backward, bf16, "mean". The program starts one process per GPU. All providers of a shape take turns in
bursts of STEPS whole steps, and the time of the slowest rank counts. Efficiency is the time of one GPU, measured in the
run of one process, divided by ranks * time.
"""

import contextlib
import gzip
import importlib.util
import json
import statistics
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F

import quackish
from benchmarks import harness
from quackish import parallel
from quackish.bench.environment import environment
from quackish.bench.report import markdown_table
from quackish.testing.timing import synchronize

SHAPES = ((8192, 4096, 128256), (8192, 2048, 131072))
SMALL = ((64, 32, 1000),)  # without a GPU
STEPS, ROUNDS = 5, 12
ONE_GPU, OURS = "quackish, one GPU", "quackish"
# (H, ranks): least efficiency
BARS = {(4096, 2): 0.97, (4096, 4): 0.94, (2048, 4): 0.88}
MOST_EXPOSED = 0.03  # of a step: communication that nothing hides

Step = Callable[[], torch.Tensor]


def providers(m: int, h: int, v: int, device: torch.device) -> dict[str, Step]:
    """A step of each, which returns the loss."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    g = torch.Generator(device).manual_seed(0)
    x = torch.randn(m, h, generator=g, device=device, dtype=torch.bfloat16)
    w = (torch.randn(v, h, generator=g, device=device) * h**-0.5).bfloat16()
    target = torch.randint(v, (m,), generator=g, device=device)
    shard = w.chunk(ranks)[rank].clone().requires_grad_()
    part = x.chunk(ranks)[rank].clone().requires_grad_()
    x.requires_grad_()
    w = w.requires_grad_() if ranks == 1 else None

    def step(loss_of: Callable[[], torch.Tensor], *leaves: torch.Tensor) -> Step:
        def run() -> torch.Tensor:
            loss = loss_of()
            torch.autograd.grad(loss, leaves)
            return loss.detach()

        return run

    def ours(x=x, **how) -> Step:
        return step(lambda: parallel.linear_cross_entropy(x, shard, target, **how), x, shard)

    steps = {
        OURS: ours(),
        "quackish, deterministic": ours(deterministic=True),
        "quackish, sequence_parallel": ours(part, sequence_parallel=True),
        "quackish, recompute": ours(schedule="recompute"),
    }
    if w is not None:
        steps[ONE_GPU] = step(lambda: quackish.linear_cross_entropy(x, w, target), x, w)
    steps["PyTorch, loss_parallel"] = loss_parallel(x, shard, target)
    if device.type == "cuda" and importlib.util.find_spec("liger_kernel"):
        with contextlib.suppress(ImportError):  # an older Liger
            from liger_kernel.transformers.functional import liger_fused_linear_scaled_cross_entropy_tp as liger

            group = dist.group.WORLD
            steps["liger, tp"] = step(lambda: liger(x, shard, target, group).sum() / m, x, shard)
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


def slowest(number: float, device: torch.device) -> float:
    """The largest number of all ranks."""
    t = torch.tensor([number], device=device)
    dist.all_reduce(t, dist.ReduceOp.MAX)
    return t.item()


def milliseconds(steps: dict[str, Step], device: torch.device) -> dict[str, float]:
    """The median over bursts in rotation, of a step on the slowest rank."""
    samples: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(ROUNDS if device.type == "cuda" else 1):
        for name, step in steps.items():
            step()
            dist.barrier()
            samples[name].append(slowest(burst(step, device), device))
    return {name: statistics.median(times) for name, times in samples.items()}


def burst(step: Step, device: torch.device) -> float:
    if device.type != "cuda":
        step()
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


def exposed(step: Step, device: torch.device, trace: Path) -> float:
    """The share of the time of STEPS in which a GPU communicates, or waits for other ranks, and does nothing else."""
    if device.type != "cuda":
        return 0.0
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(1 + STEPS):
            step()
        synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(file))
        text = file.read_text()
    if dist.get_rank() == 0:
        trace.parent.mkdir(parents=True, exist_ok=True)
        trace.write_bytes(gzip.compress(text.encode()))
    events = [e for e in json.loads(text)["traceEvents"] if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    spans = [(e["ts"], e["ts"] + e["dur"], "nccl" in e["name"].lower()) for e in events]
    ends = sorted(end for _, end, is_nccl in spans if is_nccl)
    if ends:  # not the first step, which also waits for ranks whose profiler starts later
        begin = ends[len(ends) // (1 + STEPS) - 1]
        spans = [span for span in spans if span[0] >= begin]
    work = covered(span[:2] for span in spans if not span[2])
    everything = covered(span[:2] for span in spans)
    total = max(end for _, end, _ in spans) - min(start for start, _, _ in spans)
    return (everything - work) / total


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """The length of the union."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def measure(rank: int, ranks: int, shapes: tuple, store: str, found: str, traces: Path) -> None:
    """One process; rank 0 writes rows [(shape, ranks, provider, ms, MB, exposed, loss)] to the file `found`."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks
    )
    rows = []
    for shape in shapes:
        steps = providers(*shape, device)
        losses = {name: step().item() for name, step in steps.items()}
        memory = {name: slowest(peak_mb(step, device), device) for name, step in steps.items()}
        times = milliseconds(steps, device)
        for name, step in steps.items():
            file = traces / f"parallel_{'x'.join(map(str, shape))}_tp{ranks}.json.gz"
            share = slowest(exposed(step, device, file), device) if name == OURS else None
            rows.append((shape, ranks, name, times[name], memory[name], share, losses[name]))
        del steps
        if on_gpu:
            torch.cuda.empty_cache()
    if rank == 0:
        Path(found).write_text(json.dumps(rows))
    dist.destroy_process_group()


def lines_of(rows: list) -> list[tuple]:
    """The table's lines, with efficiency and bars."""
    one = {tuple(shape): ms for shape, _, name, ms, *_ in rows if name == ONE_GPU}
    lines = []
    for shape, ranks, name, ms, mb, share, loss in rows:
        efficiency = one[tuple(shape)] / (ranks * ms)
        bar = BARS.get((shape[1], ranks)) if name == OURS else None
        passes = "" if bar is None else f"{bar}: {'PASS' if efficiency >= bar else 'FAIL'}"
        if share is not None and ranks > 1:
            passes += f" exposed {MOST_EXPOSED}: {'PASS' if share <= MOST_EXPOSED else 'FAIL'}"
        shown = "" if share is None else f"{share:.3f}"
        cell = "x".join(map(str, shape))
        lines.append((cell, ranks, name, f"{ms:.3f}", f"{efficiency:.3f}", f"{mb:.0f}", shown, f"{loss:.6f}", passes))
    return lines


def main() -> None:
    parser = harness.arguments("parallel", __doc__, csv=False)
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 2, 4], help="numbers of GPUs; 1 is always measured")
    args = parser.parse_args()
    device = harness.device_to_measure()
    on_gpu = device.type == "cuda"
    most = torch.cuda.device_count() if on_gpu else 2
    rows = []
    for ranks in sorted({1, *(n for n in args.gpus if n <= most)}):
        with tempfile.TemporaryDirectory() as folder:
            store, found = f"{folder}/store", f"{folder}/rows.json"
            mp.spawn(measure, (ranks, SHAPES if on_gpu else SMALL, store, found, args.out), nprocs=ranks)
            rows += json.loads(Path(found).read_text())
    about = environment(device, args.commit)
    page = "# Vocabulary-parallel linear cross entropy: ms of a forward and backward\n\n"
    page += f"{about['gpu']}, commit `{about['commit']}`, driver {about['driver']}, torch {about['torch']}.\n"
    page += 'MB are of one rank, with gradients. "exposed" is the share of a step in which a GPU only communicates.\n\n'
    header = ("M x H x V", "GPUs", "step", "ms", "efficiency", "MB", "exposed", "loss", "bars")
    harness.write_page(page + markdown_table(header, lines_of(rows)), args.out / "parallel.md")


if __name__ == "__main__":
    harness.main(main)
