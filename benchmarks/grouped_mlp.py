"""The MLP of a mixture of experts, forward and backward, beside six grouped GEMMs and whole MLPs of other libraries.

    python -m benchmarks.grouped_mlp                       writes results/<GPU>/grouped_mlp.md
    python -m benchmarks.grouped_mlp --models OLMoE,Mixtral

bf16, swiglu, scales with gradient; K rows for each of 16,384 tokens (8192 for Mixtral). All providers of a cell take
turns. "six ..." are the bare matrix products: no activation, no autograd. Errors are norm-wise against fp64. "block" is
all of the experts after the router, whose choices are random; its "dscales" are the gradients of the router's weights.
"""

import functools
import importlib.util
import math
import random
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import quackish
from benchmarks import harness
from benchmarks.parallel import peak_mb
from quackish import launch
from quackish.bench.environment import environment
from quackish.bench.host import host_times
from quackish.bench.measure import reason
from quackish.bench.providers_grouped_mlp import Mlp, load, swiglu
from quackish.bench.report import Verdict, at_most, markdown_table, verdict
from quackish.testing.errors import error
from quackish.testing.timing import take_turns

MODELS = {  # H, I, experts, rows, experts of a token
    "Qwen3-30B": (2048, 768, 128, 131_072, 8),
    "OLMoE": (2048, 1024, 64, 131_072, 8),
    "gpt-oss": (2880, 2880, 32, 65_536, 4),
    "Mixtral": (4096, 14_336, 8, 16_384, 2),
}
SMALL = {"small": (64, 32, 4, 512, 2)}  # without a GPU
SPLITS = ("uniform", "Zipf", "half empty")
BLOCK = "block"
OURS, COMPILED, EAGER = "quackish", "torch, activation compiled", "torch, eager"
BARE = ("six torch.bmm", "six F.grouped_mm", "six of QuACK's grouped GEMMs")
OVER_BARE, SPEEDUP, MOST_LAUNCHES = 1.06, 1.20, 8
RESULTS = ("y", "dx", "dw1", "dw2", "dscales")

Step = Callable[[], tuple[Tensor, ...]]


class Data(NamedTuple):
    x: Tensor  # (R, H)
    w1: Tensor  # (E, 2I, H)
    w2: Tensor  # (E, H, I)
    scales: Tensor  # (R,)
    dy: Tensor  # (R, H)
    offs: Tensor  # (E,)
    sizes: list[int]


def sizes_of(split: str, rows: int, experts: int) -> list[int]:
    """Rows of each expert: the same number, in proportion to 1 / rank in random order, or none for every other one."""
    shares = [1.0] * experts
    if split == "Zipf":
        shares = [1 / (1 + rank) for rank in range(experts)]
        random.Random(0).shuffle(shares)
    elif split == "half empty":
        shares = [float(expert % 2) for expert in range(experts)]
    ends = [round(rows * sum(shares[: i + 1]) / sum(shares)) for i in range(experts)]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


def data(h: int, i: int, experts: int, rows: int, split: str, device: torch.device) -> Data:
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator, device=device) * scale).bfloat16()

    sizes = sizes_of(split, rows, experts)
    offs = torch.tensor(sizes, device=device).cumsum(0, dtype=torch.int32)
    weights = normal(experts, 2 * i, h, scale=h**-0.5), normal(experts, h, i, scale=i**-0.5)
    scales = torch.rand(rows, generator=generator, device=device)
    leaves = (t.requires_grad_() for t in (normal(rows, h), *weights, scales))
    return Data(*leaves, normal(rows, h), offs, sizes)


# Providers ------------------------------------------------------------------------------------------------------------


def whole(d: Data, mlp: Mlp, *leaves: Tensor) -> Step:
    """(y, dx, dw1, dw2, dscales)."""

    def run() -> tuple[Tensor, ...]:
        y = mlp(d.x, d.w1, d.w2, d.scales, d.offs)
        return y.detach(), *torch.autograd.grad(y, leaves or d[:4], d.dy)

    return run


def grouped_mm(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    return getattr(F, "grouped_mm", torch._grouped_mm)(a, b, offs=offs)


def six(d: Data, rows_times: Callable[[Tensor, Tensor], Tensor], sums: Callable[[Tensor, Tensor], Tensor]) -> Step:
    """rows_times(a, w): a @ w[g] of each row's group; sums(a, b): a[g].T @ b[g]."""
    x, w1, w2, dy = (t.detach() for t in (d.x, d.w1, d.w2, d.dy))
    z = torch.randn(x.shape[0], w1.shape[1], device=x.device).bfloat16()
    act = z[:, : w2.shape[2]].contiguous()

    def run() -> tuple[Tensor, ...]:
        return (
            rows_times(x, w1.mT), rows_times(act, w2.mT), rows_times(dy, w2), rows_times(z, w1), sums(z, x),
            sums(dy, act),
        )  # fmt: skip

    return run


def six_bmm(d: Data) -> Step:
    def by_group(t: Tensor) -> Tensor:
        return t.unflatten(0, (len(d.sizes), -1))

    return six(d, lambda a, w: torch.bmm(by_group(a), w), lambda a, b: torch.bmm(by_group(a).mT, by_group(b)))


def six_of_quack(d: Data) -> Step:
    from quack.gemm_interface import gemm

    ends = F.pad(d.offs, (1, 0))
    rows = functools.partial(gemm, cu_seqlens_m=ends, tuned=False)
    sums = functools.partial(gemm, cu_seqlens_k=ends, tuned=False)
    return six(d, rows, lambda a, b: sums(a.T, b))


def sonic_moe(d: Data) -> Step:
    """Its general entry, each row being a token of its own; it wants gate and up interleaved."""
    from sonicmoe.enums import ActivationType
    from sonicmoe.functional import moe_general_routing_inputs

    experts = len(d.sizes)
    w1 = d.w1.detach().unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2).requires_grad_()
    tokens = torch.arange(d.x.shape[0], dtype=torch.int32, device=d.x.device)
    expert = torch.repeat_interleave(torch.tensor(d.sizes)).to(d.x.device, torch.int32)
    stream = torch.cuda.current_stream().cuda_stream

    def mlp(*_) -> Tensor:
        weights = w1.permute(1, 2, 0), None, d.w2.permute(1, 2, 0), None
        return moe_general_routing_inputs(
            d.x, d.scales, tokens, expert, *weights, experts, stream, ActivationType.SWIGLU, False
        )[0]

    run = whole(d, mlp, d.x, w1, d.w2, d.scales)

    def step() -> tuple[Tensor, ...]:
        y, dx, dw1, *others = run()
        return y, dx, dw1.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2), *others

    return step


def providers(d: Data) -> Iterator[tuple[str, Callable[[], Step]]]:
    """How to make each provider's step. Ours come first: importing QuACK patches the DSL's tensor classes."""
    on_gpu = d.x.device.type == "cuda"
    names = {OURS: OURS, f"{OURS}, recompute": f"{OURS}-recompute", EAGER: "torch"}
    for name, of_bench in (names | ({COMPILED: "torch-compile"} if on_gpu else {})).items():
        yield name, lambda of_bench=of_bench: whole(d, load(of_bench))
    if on_gpu:
        yield "SonicMoE", lambda: sonic_moe(d)
    if len(set(d.sizes)) == 1:
        yield BARE[0], lambda: six_bmm(d)
    yield (
        BARE[1],
        lambda: six(d, lambda a, w: grouped_mm(a, w, d.offs), lambda a, b: grouped_mm(a.T, b, d.offs)),
    )
    if on_gpu and importlib.util.find_spec("quack"):
        yield BARE[2], lambda: six_of_quack(d)


class Block(NamedTuple):
    x: Tensor  # (T, H)
    w1: Tensor  # (E, 2I, H)
    w2: Tensor  # (E, H, I)
    weights: Tensor  # (T, K)
    index: Tensor  # (T, K) int64
    dy: Tensor  # (T, H)


def block_data(h: int, i: int, experts: int, rows: int, k: int, device: torch.device) -> Block:
    d = data(h, i, experts, rows, "uniform", device)
    x, dy = (t.detach()[: rows // k].clone() for t in (d.x, d.dy))
    choice = torch.rand(rows // k, experts, device=device).topk(k)
    return Block(x.requires_grad_(), d.w1, d.w2, choice.values.softmax(1).requires_grad_(), choice.indices, dy)


def block_providers(b: Block) -> Iterator[tuple[str, Callable[[], Step]]]:
    """How to make the steps of moe_mlp, of Transformers' experts on F.grouped_mm, and of Liger's fused experts."""

    def step(experts: Callable[[], Tensor], w1: Tensor = b.w1, w2: Tensor = b.w2) -> Step:
        def run() -> tuple[Tensor, ...]:
            y = experts()
            return y.detach(), *torch.autograd.grad(y, (b.x, w1, w2, b.weights), b.dy)

        return run

    def transformers() -> Step:
        from transformers.models.qwen3_moe import Qwen3MoeConfig, modeling_qwen3_moe

        experts, h, i = b.w2.shape
        config = Qwen3MoeConfig(hidden_size=h, moe_intermediate_size=i, num_experts=experts)
        config._experts_implementation = "grouped_mm"
        with torch.device("meta"):
            module = modeling_qwen3_moe.Qwen3MoeExperts(config)
        w1, w2 = module.gate_up_proj, module.down_proj = torch.nn.Parameter(b.w1), torch.nn.Parameter(b.w2)
        return step(lambda: module(b.x, b.index, b.weights), w1, w2)

    def liger() -> Step:
        from liger_kernel.ops.fused_moe import LigerFusedMoEFunction

        # int32 as in its module for Transformers; a call waits for the GPU once, to read the number of tiles
        return step(lambda: LigerFusedMoEFunction.apply(b.x, b.w1, b.w2, b.index.int(), b.weights))

    yield OURS, lambda: step(lambda: quackish.moe_mlp(b.x, b.index, b.weights, b.w1, b.w2))
    if importlib.util.find_spec("transformers"):
        yield "Transformers, F.grouped_mm", transformers
    if importlib.util.find_spec("liger_kernel"):
        yield "Liger, fused experts", liger


# Measuring ------------------------------------------------------------------------------------------------------------


def errors_of(d: Data, steps: Mapping[str, Step]) -> dict[str, tuple[float, ...]]:
    """Norm-wise errors of y and the gradients of whole MLPs, one expert after the other in fp64."""
    found = {name: step() for name, step in steps.items() if name not in BARE}
    squares = {name: [[0.0, 0.0] for _ in RESULTS] for name in found}
    start = 0
    for expert, size in enumerate(d.sizes):
        rows = slice(start, start + size)
        x, w1, w2, scales = (
            t.detach().double().requires_grad_() for t in (d.x[rows], d.w1[expert], d.w2[expert], d.scales[rows])
        )
        y = swiglu(x @ w1.T, scales) @ w2.T
        truths = y.detach(), *torch.autograd.grad(y, (x, w1, w2, scales), d.dy[rows].double())
        for name, results in found.items():
            parts = (results[0][rows], results[1][rows], results[2][expert], results[3][expert], results[4][rows])
            for part, truth, sums in zip(parts, truths, squares[name], strict=True):
                size_of = float(truth.norm())
                sums[0] += (error(part, truth).norm * (size_of or 1.0)) ** 2
                sums[1] += size_of**2
        start += size
    return {name: tuple(math.sqrt(off / of) for off, of in of_name) for name, of_name in squares.items()}


def errors_of_block(b: Block, steps: Mapping[str, Step]) -> dict[str, tuple[float, ...]]:
    """Likewise of a block: the experts' rows of y and dx are summed in fp64."""
    y, dx = (torch.zeros_like(b.x, dtype=torch.float64) for _ in range(2))
    dw1, dw2, dweights = (torch.empty_like(t, dtype=torch.float64) for t in (b.w1, b.w2, b.weights))
    for expert in range(len(b.w2)):
        token, choice = (b.index == expert).nonzero(as_tuple=True)
        x, w1, w2, weights = (
            t.detach().double().requires_grad_()
            for t in (b.x[token], b.w1[expert], b.w2[expert], b.weights[token, choice])
        )
        rows = swiglu(x @ w1.T, weights) @ w2.T
        grads = torch.autograd.grad(rows, (x, w1, w2, weights), b.dy[token].double())
        y.index_add_(0, token, rows.detach())
        dx.index_add_(0, token, grads[0])
        dw1[expert], dw2[expert], dweights[token, choice] = grads[1:]
    truths = (y, dx, dw1, dw2, dweights)
    return {
        name: tuple(error(got, truth).norm for got, truth in zip(step(), truths, strict=True))
        for name, step in steps.items()
    }


class Found(NamedTuple):
    """A provider in a cell."""

    model: str
    split: str
    name: str
    ms: float | None
    mb: float = 0.0
    errors: tuple[float, ...] = ()
    note: str = ""


def measure(model: str, shape: tuple[int, ...], split: str, device: torch.device) -> list[Found]:
    """Of a split of the rows, or of the BLOCK."""
    d = block_data(*shape, device) if split == BLOCK else data(*shape[:4], split, device)
    steps, found = {}, []
    for name, make in block_providers(d) if isinstance(d, Block) else providers(d):
        try:
            step = make()
            step()
            steps[name] = step
        except Exception as failure:  # a broken peer must not end the run
            found.append(Found(model, split, name, None, note=reason(failure)))
    errors = errors_of_block(d, steps) if isinstance(d, Block) else errors_of(d, steps)
    memory = {name: peak_mb(step, device) for name, step in steps.items()}
    times = take_turns(steps, device)
    for name, time in times.items():
        found.append(Found(model, split, name, time.median / 1e3, memory[name], errors.get(name, ())))
    return found


def verdicts(found: list[Found]) -> list[Verdict]:
    lines, speedups = [], []
    for cell in dict.fromkeys((f.model, f.split) for f in found):
        of = {f.name: f for f in found if (f.model, f.split) == cell}
        ms = {name: f.ms for name, f in of.items() if f.ms is not None}
        where, ours = ", ".join(cell), ms.get(OURS, math.inf)
        if bare := [ms[name] for name in BARE if name in ms]:
            lines += at_most(ours / min(bare), OVER_BARE, f"{where}: over the fastest six GEMMs")
        others = {name: time for name, time in ms.items() if name not in BARE and not name.startswith(OURS)}
        if others:
            fastest = min(others, key=others.__getitem__)
            text = f"{where}: {ours:.3f} ms, {fastest} {others[fastest]:.3f} ms"
            lines.append(verdict(ours < others[fastest], text))
        if COMPILED in ms:
            speedups.append(ms[COMPILED] / ours)
        if OURS in ms and EAGER in ms:
            pairs = zip(RESULTS, of[OURS].errors, of[EAGER].errors, strict=True)
            worse = [f"{name} {a:.2e} > {b:.2e}" for name, a, b in pairs if a > b]
            lines.append(verdict(not worse, f"{where}: errors at most torch's{''.join(f'; {w}' for w in worse)}"))
    if speedups:
        mean = math.prod(speedups) ** (1 / len(speedups))
        lines.append(verdict(mean >= SPEEDUP, f"{COMPILED}: {mean:.3f} times our time on average, bar {SPEEDUP}"))
    return lines


def of_the_host(device: torch.device) -> list[Verdict]:
    """Host time and launches of a step, of a small shape: that of the GPU must not show."""
    d = data(128, 128, 8, 1024, "uniform", device)
    works = {OURS: whole(d, load(OURS)), EAGER: whole(d, load("torch"))}
    times = host_times(works, device) if device.type == "cuda" else host_times(works, device, repeats=1, calls=1)
    before = launch.counters.launches
    works[OURS]()
    launches = launch.counters.launches - before
    return [
        *at_most(times[OURS].median, times[EAGER].median, f"host time, bar {EAGER}'s", " us"),
        *at_most(launches, MOST_LAUNCHES, "launches"),
    ]


def main() -> None:
    parser = harness.arguments("grouped_mlp", __doc__, csv=False)
    parser.add_argument("--models", default=",".join(MODELS), help="names, of %(default)s")
    args = parser.parse_args()
    device = harness.device_to_measure()
    shapes = {name: MODELS[name] for name in args.models.split(",")} if device.type == "cuda" else SMALL
    about, host, found = environment(device, args.commit), of_the_host(device), []
    for model, shape in shapes.items():
        for split in (*SPLITS, BLOCK):  # the page is written after each cell, for runs that are stopped
            found += measure(model, shape, split, device)
            harness.write_page(page(about, found, host), args.out / "grouped_mlp.md")


def page(about: Mapping[str, str], found: list[Found], host: list[Verdict]) -> str:
    text = "# The MLP of a mixture of experts: ms of a forward and backward\n\n"
    text += f"{about['gpu']}, commit `{about['commit']}`, driver {about['driver']}, torch {about['torch']}, "
    text += f"{about['peers'] or 'no peers'}. MB are the peak above inputs, gradients included.\n\n"
    text += "".join(f"- {word}: {line}\n" for word, line in verdicts(found) + host) + "\n"
    lines = [
        (f.model, f.split, f.name, f"{f.ms:.3f}" if f.ms else f.note, f"{f.mb:.0f}", *(f"{e:.2e}" for e in f.errors))
        + ("",) * (len(RESULTS) - len(f.errors))
        for f in found
    ]
    return text + markdown_table(("model", "split", "provider", "ms", "MB", *RESULTS), lines)


if __name__ == "__main__":
    harness.main(main)
