"""Inputs, truth and paths shared by the tests of grouped_mlp and grouped_mm."""

from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F

from quackish import grouped_mlp
from quackish.ops.mlp import reference
from quackish.testing.errors import error, same_bits
from tests.emulator_cases import BLACKWELL, HOPPER

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
SIZES = (0, 1, 63, 64, 65, 0, 127, 129, 0)
# For the emulator, which is slow. On B200 so many rows per group that two CTAs share a tile, on B300 one CTA has it.
FEW = {"h200": (0, 1, 65, 0, 129), "b200": (129, 0, 257), "b300": (0, 1, 127, 129, 257)}
TAIL = 7
NAMES = ("x", "w1", "w2", "w3", "b1", "b2", "scales")  # what may get a gradient

# Rows of each group, H, I. Together they run every tile.
MANY = {
    "tiles": ([17 * g % 401 for g in range(70)], 520, 520),
    "steps": ((130, 0, 200), 512, 2056),
    "narrow steps": ((130, 0, 200), 64, 2056),
    "square tiles": ([17 * g % 401 for g in range(70)], 520, 256),
    "groups": ([g % 4 for g in range(1000)], 16, 16),
}


PATHS = [
    "portable-cpu",
    "emulated-cpu",
    *(pytest.param(name, marks=pytest.mark.gpu) for name in ("portable-cuda", "kernels-cuda")),
]
IN_EMULATOR = [pytest.param(f"kernels-{name}", marks=pytest.mark.exhaustive) for name in HOPPER + BLACKWELL]
# "blocks" is the portable path on a CPU as on a GPU: in batches of blocks, without sizes of groups.
on_every_path = pytest.mark.parametrize("where", ["blocks-cpu", *PATHS], indirect=True)
on_every_path_and_emulator = pytest.mark.parametrize("where", ["blocks-cpu", *PATHS, IN_EMULATOR[0]], indirect=True)


class Where(NamedTuple):
    """A path and its device."""

    device: str
    backend: str
    dtypes: tuple[torch.dtype, ...]  # that are worth a test
    sizes: tuple[int, ...] = SIZES

    def run(self, case, dy, **options):
        return step(grouped_mlp, case, dy, backend=self.backend, **options)


def make(
    sizes=SIZES, h=24, i=16, *, activation="swiglu", dtype=FP64, device="cpu", split=False, biases=True, scales=True,
    tail=TAIL, seed=0,
):  # fmt: skip
    """Arguments of grouped_mlp, all of which require grad; `split`: with w3."""
    generator = torch.Generator().manual_seed(seed)
    e, r, gated = len(sizes), sum(sizes) + tail, activation in reference.GATED

    def normal(*shape, scale=1.0):
        t = scale * torch.randn(shape, generator=generator, dtype=FP64)
        return t.to(device, dtype).requires_grad_()

    hidden = 2 * i if gated else i
    case = dict(
        x=normal(r, h), w1=normal(e, i if split else hidden, h, scale=0.8), w2=normal(e, h, i, scale=i**-0.5),
        offs=torch.tensor(sizes).cumsum(0, dtype=torch.int32).to(device), activation=activation,
    )  # fmt: skip
    if split:
        case["w3"] = normal(e, i, h, scale=0.8)
    if biases:
        case["b1"], case["b2"] = normal(e, hidden), normal(e, h)
    if scales:
        case["scales"] = torch.rand(r, generator=generator, dtype=FP64).to(device, dtype).requires_grad_()
    dy = torch.randn(r, h, generator=generator, dtype=FP64).to(device, dtype)
    return case, dy


def step(function, case, dy, **options):
    """{"y": ..., and gradients by argument}"""
    y = function(**case, **options)
    wanted = {n: case[n] for n in NAMES if case.get(n) is not None and case[n].requires_grad}
    grads = torch.autograd.grad(y, list(wanted.values()), dy, allow_unused=True) if wanted else ()
    return {"y": y.detach(), **dict(zip(wanted, grads, strict=True))}


def experts(x, w1, w2, offs, *, w3=None, activation="swiglu", b1=None, b2=None, scales=None, kept=None):
    """What a user writes without quackish, and the truth in fp64: a loop over experts, by autograd.

    kept: the dtype that the preactivation is rounded to, which decides on which side of a clamp it is.
    """

    def at_most_7(t):  # with gradient 0 at 7, where that of torch's clamp depends on its version
        return torch.where(t >= 7, 7.0, t)

    def gelu(t):  # in fp64, the truth, without 1 + erf, which cancels far below 0
        return t * torch.special.log_ndtr(t).exp() if t.dtype == FP64 else F.gelu(t)

    functions = dict(
        swiglu=lambda gate, up: F.silu(gate) * up,
        geglu=lambda gate, up: F.gelu(gate, approximate="tanh") * up,
        geglu_erf=lambda gate, up: gelu(gate) * up,
        reglu=lambda gate, up: F.relu(gate) * up,
        clamped_swiglu=lambda gate, up: (
            (1 - at_most_7(-at_most_7(up))) * at_most_7(gate) * torch.sigmoid(1.702 * at_most_7(gate))
        ),
        silu=F.silu,
        gelu_tanh=lambda z: F.gelu(z, approximate="tanh"),
        gelu_erf=gelu,
        relu2=lambda z: F.relu(z).square(),
    )
    ys, start = [], 0
    for g, end in enumerate(offs.tolist()):
        rows = x[start:end]
        z = rows @ w1[g].T if w3 is None else torch.cat([rows @ w1[g].T, rows @ w3[g].T], 1)
        z = z if b1 is None else z + b1[g]
        z = z if kept is None else z + (z.to(kept).to(z.dtype) - z).detach()
        act = functions[activation](*(z.chunk(2, 1) if activation in reference.GATED else (z,)))
        act = act if scales is None else act * scales[start:end, None]
        y = act @ w2[g].T
        ys.append(y if b2 is None else y + b2[g])
        start = end
    return torch.cat([*ys, x.new_zeros(x.shape[0] - start, x.shape[1])])


def in_fp64(case):
    return {
        k: t.detach().double().requires_grad_(t.requires_grad) if k in NAMES and t is not None else t
        for k, t in case.items()
    }


def frozen(case, but=()):
    """The case with no argument that requires grad but these."""
    return {k: t.detach() if k in NAMES and k not in but else t for k, t in case.items()}


def assert_same(got, want, names=None):
    for name in names or want:
        assert same_bits(got[name], want[name]), name


def assert_same_values(got, want, names=None):
    """`assert_same` for other strides; in fp64 up to rounding, as PyTorch's matmuls depend on them on some CPUs."""
    for name in names or want:
        if want[name].dtype == FP64:
            assert error(got[name], want[name]).norm <= 1e-14, name
        else:
            assert same_bits(got[name], want[name]), name


def mm_case(kind, dtype=FP64, device="cpu", sizes=(3, 0, 5, 1), tail=2, m=6, k=7, n=4):
    e, r = len(sizes), sum(sizes) + tail
    shapes = {"2d3d": ((r, k), (e, k, n)), "3d2d": ((e, m, k), (k, r)), "2d2d": ((m, r), (r, n))}
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(s, generator=generator, dtype=FP64).to(device, dtype).requires_grad_() for s in shapes[kind])
    return a, b, torch.tensor(sizes).cumsum(0, dtype=torch.int32).to(device)
