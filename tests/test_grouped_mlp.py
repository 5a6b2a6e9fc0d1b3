"""grouped_mlp and grouped_mm: values and gradients against fp64, semantics, autograd, by every path.

Tests that take `where` run on the portable path, with emulated kernels and, on a GPU, with kernels.
"""

import functools
import itertools
import math
import types
import warnings
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F

from quackish import errors, grouped_mlp, grouped_mm
from quackish.configs.choose import choose
from quackish.configs.grouped_gemm import TILES
from quackish.errors import PortablePathWarning, UnsupportedError
from quackish.gpu import H200
from quackish.ops.device import Device, device_of, substitute, why_unsupported
from quackish.ops.grouped_mlp import autograd
from quackish.ops.grouped_mlp.kernel_steps import steps_of
from quackish.ops.kernel_for import Kernel
from quackish.reference import grouped_mlp as reference
from quackish.testing import assert_deterministic
from quackish.testing.errors import error, same_bits
from tests import buffer_layouts, emulated_kernels
from tests.wrapper_tensor import Wrapper

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
SIZES = (0, 1, 63, 64, 65, 0, 127, 129, 0)
TAIL = 7
NAMES = ("x", "w1", "w2", "w3", "b1", "b2", "scales")  # what may get a gradient

on_every_path = pytest.mark.parametrize(
    "where",
    [
        "portable-cpu",
        "emulated-cpu",
        *(pytest.param(name, marks=pytest.mark.gpu) for name in ("portable-cuda", "kernels-cuda")),
    ],
    indirect=True,
)


class Where(NamedTuple):
    """A path and its device."""

    device: str
    backend: str
    dtypes: tuple[torch.dtype, ...]  # that are worth a test

    def run(self, case, dy, **options):
        return step(grouped_mlp, case, dy, backend=self.backend, **options)


@pytest.fixture
def where(request, monkeypatch, poisoned):
    kind, device = request.param.split("-")
    if kind == "portable":
        yield Where(device, "reference", (FP64, BF16))
        return
    if kind == "emulated":
        with substitute("cpu", Device(H200, emulated_kernels.kernel_for)):
            yield Where(device, "cute", (BF16, FP16))
        return
    if reason := why_unsupported("grouped_mlp", "grouped_gemm", torch.device("cuda", torch.cuda.current_device())):
        pytest.skip(reason)
    yield Where(device, "cute", (BF16, FP16))


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

    functions = dict(
        swiglu=lambda gate, up: F.silu(gate) * up,
        geglu=lambda gate, up: F.gelu(gate, approximate="tanh") * up,
        clamped_swiglu=lambda gate, up: (
            (1 - at_most_7(-at_most_7(up))) * at_most_7(gate) * torch.sigmoid(1.702 * at_most_7(gate))
        ),
        silu=F.silu,
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


def group_rows(case, g):
    start, end = [0, *case["offs"].tolist()][g : g + 2]
    return slice(start, end)


KINDS = [(a, split) for a in reference.ACTIVATIONS for split in (False, True) if a in reference.GATED or not split]


# Values ---------------------------------------------------------------------------------------------------------------


@on_every_path
@pytest.mark.parametrize("biases, scales", list(itertools.product([False, True], repeat=2)))
@pytest.mark.parametrize("activation, split", KINDS)
def test_against_a_loop_over_experts_in_fp64(activation, split, biases, scales, where):
    for dtype in where.dtypes:
        how = dict(activation=activation, split=split, biases=biases, scales=scales, device=where.device, dtype=dtype)
        case, dy = make(**how) if where.backend == "reference" else make(h=72, i=88, **how)
        want = step(experts, in_fp64(case), dy.double(), kept=None if dtype == FP64 else dtype)
        want["y"] = experts(**in_fp64(case))  # forward goes on with what was not rounded
        got, theirs = where.run(case, dy), step(experts, case, dy)
        assert got.keys() == want.keys()
        for name, truth in want.items():
            assert got[name].dtype == dtype
            ours = error(got[name], truth)
            if dtype == FP64:
                assert ours.within(1e-14, 1e-9), name  # 1 + tanh of a gate far below 0 cancels
            else:  # one rounding of the result, and one of what the last product multiplies
                bound = error(theirs[name], truth).norm
                assert ours.norm <= min(1.02 * bound, 0.5 * torch.finfo(dtype).eps), (name, ours, bound)
        for name, recomputed in where.run(case, dy, recompute=True).items():
            assert same_bits(recomputed, got[name]), name


@on_every_path
def test_no_gradient_at_the_limits_of_clamped_swiglu(where):
    """Preactivations that are exactly -7 or 7: gate has no gradient at 7, up at neither."""
    h = 8
    eye = torch.eye(h, dtype=where.dtypes[0], device=where.device)
    for dtype in where.dtypes:
        x = torch.tensor([[7.0, -7.0, 6.5, 7.5, -6.5, -7.5, 0.5, 1.0]], dtype=dtype, device=where.device)
        case = dict(
            x=x.requires_grad_(), w1=torch.cat([eye, eye.flip(1)])[None].to(dtype), w2=eye[None].to(dtype),
            offs=torch.tensor([1], dtype=torch.int32, device=where.device), activation="clamped_swiglu",
        )  # fmt: skip
        got = where.run(case, torch.ones_like(x))
        want = step(experts, in_fp64(case), torch.ones_like(x).double())
        for name, truth in want.items():
            assert error(got[name], truth).norm <= 2 * torch.finfo(dtype).eps, name


@on_every_path
@pytest.mark.parametrize("activation", reference.ACTIVATIONS)
def test_a_preactivation_beyond_fp16_is_infinite_in_forward_too(activation, where):
    """65519 rounds to 65504 and 65520 to infinity. Backward reads the rounded one."""
    i, gates, up = 8, [65519.0, 65520.0, -65519.0, -65520.0], 2.0**-9
    x = torch.zeros(4, 8)
    for row, gate in zip(x, gates, strict=True):
        row[0], row[1], row[2] = 256.0, math.copysign(1.0, gate) * (abs(gate) - 65504), up
    x[2:, 0] *= -1.0
    w1 = torch.zeros(1, 2 * i, 8)
    w1[0, :i, 0], w1[0, :i, 1], w1[0, i:, 2] = 255.875, 1.0, 1.0
    w1 = w1 if activation in reference.GATED else w1[:, :i]
    case = dict(
        x=x, w1=w1, w2=2.0**-10 * torch.eye(8, i)[None], offs=torch.tensor([4], dtype=torch.int32),
        scales=torch.full((4,), 2.0**-20 if activation == "relu2" else 1.0),
    )  # fmt: skip
    case = {name: t.to(where.device, t.dtype if name in ("offs", "scales") else FP16) for name, t in case.items()}
    case = {name: t.requires_grad_(name != "offs") for name, t in case.items()} | dict(activation=activation)
    got = where.run(case, torch.ones_like(case["x"]))
    # Row by row: whether gate's infinity reaches the result, which is as in PyTorch.
    gate = torch.tensor(gates).half().float()
    z = torch.stack([gate, torch.full_like(gate, up)], 1) if activation in reference.GATED else gate[:, None]
    finite = reference.activate(z, activation)[:, 0].isfinite()
    assert finite.tolist() == [True, activation == "clamped_swiglu", True, activation == "relu2"]
    for name in ("y", "x"):
        assert torch.equal(got[name].isfinite().all(1).cpu(), finite), name
    with torch.no_grad():
        assert same_bits(grouped_mlp(**case, backend=where.backend), got["y"])


@on_every_path
def test_small_and_empty_shapes(where):
    for sizes, h, i, tail in (((3,), 1, 1, 0), ((0, 0), 5, 3, 0), ((0, 0), 5, 3, 4), ((2, 0), 8, 1, 0)):
        if where.backend == "cute":
            h, i = 8 * h, 8 * i
        case, dy = make(sizes, h, i, tail=tail, device=where.device, dtype=where.dtypes[0])
        got, want = where.run(case, dy), step(experts, in_fp64(case), dy.double())
        for name, truth in want.items():
            truth = torch.zeros_like(case[name], dtype=FP64) if truth is None else truth
            assert error(got[name], truth).norm <= 0.02, (name, sizes)


@on_every_path
def test_any_strides(where):
    case, dy = make(device=where.device, dtype=where.dtypes[0], scales=True)
    want = where.run(case, dy)
    odd = dict(case)
    for name in ("w1", "w2"):  # as gpt-oss's checkpoints have them
        odd[name] = case[name].detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    odd["x"] = torch.cat([case["x"].detach()] * 2, 1)[:, :24].requires_grad_()
    odd["scales"] = case["scales"].detach()[:, None].repeat(1, 3)[:, 1].requires_grad_()
    odd["offs"] = case["offs"].repeat_interleave(2)[::2]
    assert_same(where.run(odd, dy.t().contiguous().t()), want)
    ones = dy.new_ones(())
    assert_same(where.run(case, ones.expand(dy.shape)), where.run(case, ones.expand(dy.shape).contiguous()))

    def moved(t):
        """Behind a multiple of 16 bytes."""
        return torch.cat([t.flatten()[:2], t.flatten()])[2:].view(t.shape)

    def unpacked(t):
        """Columns contiguous."""
        return t.mT if t.dim() == 2 else t

    for name in ("x", "w1", "w2", "b1", "scales"):
        odd[name] = moved(case[name].detach()).requires_grad_()
    assert_same(where.run(odd, dy), want)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, moved):
        assert_same(where.run(case, dy), want)
    alone = frozen(case, but=["x"])
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.mT.contiguous() if t.dim() == 2 else t, unpacked):
        assert_same(where.run(alone, dy), want, ["y", "x"])
    case, dy = make((1,), tail=0, device=where.device, dtype=where.dtypes[0])
    assert_same(where.run(case, dy.as_strided(dy.shape, (1, 1))), where.run(case, dy))


MANY = {
    "tiles": ([17 * g % 401 for g in range(70)], 520, 520),
    "steps": ((130, 0, 200), 512, 2056),
    "narrow steps": ((130, 0, 200), 64, 2056),
    "square tiles": ([17 * g % 401 for g in range(70)], 520, 256),
    "groups": ([g % 4 for g in range(1000)], 16, 16),
}


def test_many_tiles_are_all_tiles():
    launched = set()

    def kernel_for(name, problem, gpu):
        launched.add((problem.epilogue, problem.cluster_tile))
        return Kernel(lambda *args: None, choose(name, problem, gpu).config)

    with substitute("cpu", Device(H200, kernel_for)):
        for sizes, h, i in MANY.values():
            step(grouped_mlp, *make(sizes, h, i, dtype=BF16))
    assert launched == {(epilogue, tile) for epilogue, tiles in TILES.items() for tile in tiles}


@pytest.mark.gpu
@pytest.mark.parametrize("where", ["kernels-cuda"], indirect=True)
@pytest.mark.parametrize("sizes, h, i", MANY.values(), ids=MANY)
def test_many_tiles_steps_and_groups(sizes, h, i, where):
    """Clusters with several tiles, odd numbers of them too, and the config for deep products."""
    case, dy = make(sizes, h, i, device=where.device, dtype=BF16)
    want = {**step(experts, in_fp64(case), dy.double(), kept=BF16), "y": experts(**in_fp64(case))}
    got = where.run(case, dy)
    for name, truth in want.items():
        assert error(got[name], truth).norm <= 0.5 * torch.finfo(BF16).eps, name
    for _ in range(20):
        assert_same(where.run(case, dy), got)


@pytest.mark.gpu
def test_more_than_2_31_elements():
    """The last group's results are those of a call with that group alone."""
    h, i, sizes = 64, 3648, (300_000, 65)
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator, device="cuda").bfloat16()

    x, dy, w1, w2 = normal(sum(sizes), h), normal(sum(sizes), h), normal(2, 2 * i, h), normal(2, h, i)
    scales = torch.rand(sum(sizes), generator=generator, device="cuda")
    assert 2 * i * x.shape[0] > 2**31

    def run(first_group):
        rows = slice(sum(sizes[:first_group]), None)
        leaves = [t.detach().requires_grad_() for t in (x[rows], w1[first_group:], w2[first_group:], scales[rows])]
        offs = torch.tensor(sizes[first_group:], device="cuda").cumsum(0, dtype=torch.int32)
        y = grouped_mlp(*leaves[:3], offs, scales=leaves[3], backend="cute")
        return y.detach(), *torch.autograd.grad(y, leaves, dy[rows])

    for name, got, want in zip(("y", "x", "w1", "w2", "scales"), run(0), run(1), strict=True):
        got = got[-want.shape[0] :]
        # PyTorch adds the parts of a scale's gradient, in an order that may depend on the number of rows.
        assert error(got, want.double()).norm <= 1e-5 if name == "scales" else same_bits(got, want), name


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [2**14, 2**20, 2**24])
def test_long_sums_stay_within_the_stated_bound(rows):
    """A weight gradient is one chain of fp32 sums: docs/grouped_mlp.md, "Memory and numerics"."""
    generator = torch.Generator("cuda").manual_seed(0)
    a, b = (torch.rand(rows, 64, generator=generator, device="cuda").bfloat16() for _ in range(2))
    offs = torch.tensor([rows], dtype=torch.int32, device="cuda")
    steps = steps_of(device_of(torch.device("cuda", torch.cuda.current_device())))
    got = steps.weight_gradient(a, b, offs, FP32)[0].double()
    truth = sum(x.double().T @ y.double() for x, y in zip(a.split(2**20), b.split(2**20), strict=True))
    worst = ((got - truth).abs() / truth).max()
    print(f"{rows} rows: {worst:.2e}")
    assert worst <= rows * 2.0**-27 + 2.0**-20


def test_mixed_dtypes_and_autocast():
    case, dy = make()
    case = {k: t.detach().float().requires_grad_() if k in NAMES else t for k, t in case.items()}
    with torch.autocast("cpu", BF16):
        got = step(grouped_mlp, case, dy.bfloat16())
        assert same_bits(grouped_mlp(**{**case, "x": case["x"].bfloat16()}), got["y"])
        assert grouped_mm(case["x"], case["w1"].mT, case["offs"]).dtype == BF16
    rounded = {k: t.detach().bfloat16().requires_grad_() if k in ("x", "w1", "w2") else t for k, t in case.items()}
    want = step(grouped_mlp, rounded, dy.bfloat16())
    assert got["y"].dtype == BF16
    for name, t in want.items():
        assert same_bits(got[name], t if name == "y" else t.float())
        assert name == "y" or got[name].dtype == case[name].dtype


# Semantics ------------------------------------------------------------------------------------------------------------


@on_every_path
@pytest.mark.parametrize("activation", reference.ACTIVATIONS)
def test_rows_of_no_group_are_zero_and_reach_nothing(activation, where):
    case, dy = make(activation=activation, device=where.device, dtype=where.dtypes[0])
    want = where.run(case, dy)
    for name in ("y", "x", "scales"):
        assert not want[name][-TAIL:].count_nonzero()
    nan = frozen(case)
    for t in (nan["x"], nan["scales"], dy):
        t[-TAIL:] = torch.nan
    assert_same(where.run(case, dy), want)


@on_every_path
def test_each_step_ignores_rows_of_no_group(where):
    case, dy = make(split=True, device=where.device, dtype=where.dtypes[0])
    x, w1, w2, w3, b1, b2, scales = (case[name].detach() for name in NAMES)
    offs, steps = case["offs"], autograd.steps_for("grouped_mlp", x, case["w2"].shape[2], case["offs"], where.backend)
    all_needed, dtype = reference.Needs(True, True, True), x.dtype
    z, act = steps.up(x, w1, w3, b1, scales, offs, "swiglu", True)
    kept = z.clone()  # down_backward may rely on the zeros of `up`
    for name, step in dict(
        up=lambda: steps.up(x, w1, w3, b1, scales, offs, "swiglu", True),
        down=lambda: steps.down(act, w2, b2, offs),
        down_backward=lambda: steps.down_backward(dy, w2, kept, scales, offs, "swiglu", all_needed),
        rows_gradient=lambda: steps.rows_gradient(z, w1, w3, offs),
        weight_gradient=lambda: steps.weight_gradient(z, x, offs, dtype),
        bias_gradient=lambda: steps.bias_gradient(z, offs, dtype),
    ).items():
        for t in (x, dy, scales, z, act):
            t[-TAIL:] = 1.0
        want = step()
        for t in (x, dy, scales, z, act):
            t[-TAIL:] = torch.nan
        results = step()
        for got, expected in zip(*([t] if isinstance(t, torch.Tensor) else t for t in (results, want)), strict=True):
            assert same_bits(got, expected), name
            assert got.isfinite().all()
            assert got.shape[0] != dy.shape[0] or not got[-TAIL:].count_nonzero(), name


@on_every_path
@pytest.mark.parametrize("name", ["x", "dy", "scales"])
@pytest.mark.parametrize("activation", reference.ACTIVATIONS)
def test_a_nan_in_a_live_row_stays_in_its_row_and_its_groups_weights(activation, name, where):
    case, dy = make(activation=activation, device=where.device, dtype=where.dtypes[0])
    clean, group, row = where.run(case, dy), 4, 64 + 64 + 3
    {**frozen(case), "dy": dy}[name][row] = torch.nan
    got = where.run(case, dy)
    others = torch.arange(dy.shape[0], device=where.device) != row
    for rows in ("y", "x", "scales"):
        assert same_bits(got[rows][others], clean[rows][others])
    assert got["x"][row].isnan().all()
    if name != "dy":
        assert got["y"][row].isnan().all()
    for weight in ("w1", "w2", "b1", "b2"):
        is_group = torch.arange(len(SIZES), device=where.device) == group
        assert same_bits(got[weight][~is_group], clean[weight][~is_group])
        if weight != "b2" or name == "dy":
            assert got[weight][group].isnan().any(), weight


@on_every_path
def test_a_nan_in_the_weights_of_a_group_stays_in_its_rows(where):
    case, dy = make(device=where.device, dtype=where.dtypes[0])
    clean, group = where.run(case, dy), 4
    for name in ("w1", "w2", "b1", "b2"):
        frozen(case)[name][group] = torch.nan
    for name in ("w1", "w2", "b1", "b2"):
        frozen(case)[name][5] = torch.nan  # group 5 has no rows
    got, rows = where.run(case, dy), group_rows(case, group)
    for name in ("y", "x", "scales"):
        inside = torch.zeros(dy.shape[0], dtype=torch.bool, device=where.device)
        inside[rows] = True
        assert got[name][inside].isnan().all()
        assert same_bits(got[name][~inside], clean[name][~inside])


@on_every_path
def test_an_empty_group_has_zero_gradients_and_leaves_buffers_alone(where):
    case, dy = make(device=where.device, dtype=where.dtypes[0], split=True)
    empty = torch.tensor(SIZES, device=where.device) == 0
    grads = where.run(case, dy)
    for name in ("w1", "w2", "w3", "b1", "b2"):
        assert not grads[name][empty].count_nonzero()
    outs = {f"grad_{name}_out": torch.full_like(case[name], -0.0, dtype=FP32) for name in ("w1", "w2", "w3")}
    before = {name: t.clone() for name, t in outs.items()}
    where.run(case, dy, **outs)
    for name, t in outs.items():
        assert same_bits(t[empty], before[name][empty])
        assert t[~empty].count_nonzero()


@on_every_path
@pytest.mark.parametrize("split", [False, True])
def test_gradients_are_added_to_buffers(split, where):
    for dtype in where.dtypes:
        case, dy = make(device=where.device, dtype=dtype, split=split)
        names = ("w1", "w2", "w3") if split else ("w1", "w2")
        want, exact = where.run(case, dy), step(experts, in_fp64(case), dy.double())
        for out_dtype in {FP32, dtype}:
            outs = {f"grad_{name}_out": torch.ones_like(case[name], dtype=out_dtype) for name in names}
            for _ in range(2):
                got = where.run(case, dy, **outs)
                assert_same(got, want, [name for name in want if name not in names])
                assert all(got[name] is None for name in names)
            for name in names:
                out = outs[f"grad_{name}_out"]
                bound = error(want[name], exact[name]).norm + torch.finfo(out_dtype).eps
                assert error(out, 1 + 2 * exact[name]).norm <= bound
    out = torch.zeros_like(case["w1"])
    where.run(frozen(case, but=["x"]), dy, grad_w1_out=out)
    assert not out.count_nonzero()


@on_every_path
@pytest.mark.parametrize("layout", buffer_layouts.NAMES)
def test_buffers_of_any_strides(layout, where):
    """Weight gradients are added to the buffer's elements and to nothing around them."""
    names = ("w1", "w2", "w3")
    for dtype in where.dtypes:
        case, dy = make(device=where.device, dtype=dtype, split=True)
        for out_dtype in {FP32, dtype}:
            plain = {f"grad_{name}_out": torch.ones_like(case[name], dtype=out_dtype) for name in names}
            where.run(case, dy, **plain)
            strided = {
                f"grad_{name}_out": buffer_layouts.ones_in(layout, case[name].shape, out_dtype, where.device)
                for name in names
            }
            where.run(case, dy, **{name: view for name, (view, _) in strided.items()})
            for name, (view, whole) in strided.items():
                assert same_bits(view.contiguous(), plain[name]), name
                assert buffer_layouts.are_neighbours_unchanged(view, whole), name


@on_every_path
def test_gate_and_up_buffers_are_halves_of_one(where):
    case, dy = make(device=where.device, dtype=where.dtypes[-1], split=True)
    want = [torch.ones_like(case[name], dtype=FP32) for name in ("w1", "w3")]
    both = torch.ones_like(torch.cat(want, 1))
    gate, up = both.chunk(2, 1)
    where.run(case, dy, grad_w1_out=want[0], grad_w3_out=want[1])
    where.run(case, dy, grad_w1_out=gate, grad_w3_out=up)
    assert same_bits(both, torch.cat(want, 1))


BAD_OFFSETS = {
    "decreases": [3, 9, 5, 12],
    "to the start": [300, 0, 5, 12],
    "passes R": [3, 5, 9, 331],
    "negative": [-2, 5, 9, 12],
    "huge": [3, 2**31 - 1, 9, 12],
    "wraps": [2**31 - 1, -2, 9, 12],  # differences in int32 are not negative
}


@pytest.mark.parametrize("kind", BAD_OFFSETS)
def test_illegal_offsets_on_a_cpu(kind):
    case, _ = make((3, 2, 4, 3), tail=318)
    case["offs"] = torch.tensor(BAD_OFFSETS[kind], dtype=torch.int32)
    words = {
        "decreases": r"offs\[2\] is 5, after 9; expected offsets that do not decrease",
        "to the start": r"offs\[1\] is 0, after 300",
        "passes R": r"offs\[3\] is 331; expected at most 330, the number of rows",
        "negative": r"offs\[0\] is -2, after 0",
        "huge": r"offs\[1\] is 2147483647; expected at most 330",
        "wraps": r"offs\[0\] is 2147483647; expected at most 330",
    }
    with pytest.raises(ValueError, match=f"grouped_mlp: {words[kind]}"):
        grouped_mlp(**case)
    with pytest.raises(ValueError, match=f"grouped_mm: {words[kind]}"):
        grouped_mm(case["x"], case["w1"].mT, case["offs"])


@on_every_path
@pytest.mark.parametrize("kind", BAD_OFFSETS)
def test_illegal_offsets_make_all_results_nan(kind, where, monkeypatch):
    monkeypatch.setattr(autograd, "check_offs", lambda *args: None)  # as on a GPU
    case, dy = make((3, 2, 0, 3), tail=322, device=where.device, dtype=where.dtypes[0])
    case["offs"] = torch.tensor(BAD_OFFSETS[kind], dtype=torch.int32, device=where.device)
    for name, t in where.run(case, dy).items():
        assert t.isnan().all(), name
    out = torch.zeros_like(case["w1"], dtype=FP32)
    where.run(case, dy, grad_w1_out=out)
    assert out.isnan().all()


@on_every_path
@pytest.mark.parametrize("seed", [0, 1])
def test_a_row_does_not_depend_on_other_rows(seed, where):
    # relu2: of transcendental functions, torch's own bits on a CPU depend on where an element is
    activations = reference.ACTIVATIONS if where.device == "cuda" and where.backend == "cute" else ["relu2"]
    for activation, dtype in itertools.product(activations, where.dtypes):
        case, dy = make(activation=activation, device=where.device, dtype=dtype, seed=seed, h=64, i=48)
        whole = where.run(case, dy)
        for row in (0, 1, 63, 64, 127, 128, 191, 192, 193, 319, 320, 447):
            group = int(torch.searchsorted(case["offs"].cpu(), row, right=True))
            alone = {k: t.detach()[row : row + 1] if k in ("x", "scales") else t for k, t in case.items()}
            alone["x"].requires_grad_()
            alone["offs"] = (torch.arange(len(SIZES), device=where.device) >= group).int()
            got = where.run(alone, dy[row : row + 1])
            assert same_bits(got["y"][0], whole["y"][row]), row
            assert same_bits(got["x"][0], whole["x"][row]), row
        with torch.no_grad():
            assert same_bits(grouped_mlp(**case, backend=where.backend), whole["y"])


@on_every_path
def test_the_same_bits_on_every_run(where):
    case, _ = make(device=where.device, dtype=where.dtypes[0])
    rest = {k: case.pop(k) for k in ("offs", "activation")}
    names, tensors = list(case), list(case.values())

    def call(*tensors):
        return grouped_mlp(**dict(zip(names, tensors, strict=True)), **rest, backend=where.backend)

    assert_deterministic(call, *tensors, runs=20 if where.device == "cuda" else 3)


# Work and memory ------------------------------------------------------------------------------------------------------


@pytest.fixture
def calls(monkeypatch):
    """Steps and matrix products as they run: [name, ...]."""
    seen = []

    def counted(name):
        @functools.wraps(getattr(reference, name))
        def step(*args, **options):
            seen.append(name)
            return getattr(reference, name)(*args, **options)

        return step

    names = ("up", "down", "down_backward", "rows_gradient", "weight_gradient", "bias_gradient")
    steps = types.SimpleNamespace(**{name: counted(name) for name in names})
    monkeypatch.setattr(autograd, "steps_for", lambda *args: steps)
    rows_times = reference.rows_times
    monkeypatch.setattr(reference, "rows_times", lambda *args: seen.append("matmul") or rows_times(*args))
    return seen


@pytest.mark.parametrize(
    "trained, backward",
    [
        ("x w1 w2", "down_backward matmul weight_gradient rows_gradient matmul weight_gradient"),
        ("w1 w2", "down_backward matmul weight_gradient weight_gradient"),
        ("x w2", "down_backward matmul weight_gradient rows_gradient matmul"),
        ("x w1", "down_backward matmul rows_gradient matmul weight_gradient"),
        ("x", "down_backward matmul rows_gradient matmul"),
        ("w1", "down_backward matmul weight_gradient"),
        ("w2", "down_backward weight_gradient"),
        ("scales", "down_backward matmul"),
        ("b2", "bias_gradient"),
    ],
)
def test_products_for_frozen_arguments_are_not_run(trained, backward, calls):
    case, dy = make()
    want = step(experts, case, dy)
    del calls[:]
    got = step(grouped_mlp, frozen(case, but=trained.split()), dy)
    assert calls == ["up", "matmul", "down", "matmul", *backward.split()]
    assert set(got) == {"y", *trained.split()}
    for name in got:
        torch.testing.assert_close(got[name], want[name])


@pytest.fixture
def launches(monkeypatch):
    """What kernels are launched for, as on an H200: [(problem, arguments), ...]. They do nothing."""
    seen = []

    def kernel_for(name, problem, gpu):
        config = choose(name, problem, gpu).config
        return Kernel(lambda args, stream: seen.append((problem, args)), config)

    with substitute("cpu", Device(H200, kernel_for)):
        yield seen


@pytest.mark.parametrize(
    "trained, backward",
    [
        ("x w1 w2 scales", "down_backward dw2 down dw1"),
        ("w1 w2", "down_backward dw2 dw1"),
        ("x", "down_backward down"),
        ("w1", "down_backward dw1"),
        ("w2", "dw2"),
        ("scales", "down_backward"),
    ],
)
def test_launches_for_frozen_arguments(trained, backward, launches):
    """Each is one launch, in bf16 and without copies."""
    h, i = 64, 32
    case, dy = make(h=h, i=i, dtype=BF16, biases=False)
    step(grouped_mlp, frozen(case, but=trained.split()), dy)
    weights = {(h, i): "dw2", (2 * i, h): "dw1"}
    kinds = [p.epilogue if p.along == "m" else weights[args.m, args.n] for p, args in launches]
    assert kinds == ["up", "down", *backward.split()]
    of = dict(zip(kinds, (args for _, args in launches), strict=True))  # "down" of backward in place of forward's
    assert {args.rows for args in of.values()} == {dy.shape[0]}
    assert {args.groups for args in of.values()} == {len(SIZES)}
    assert {args.offs for args in of.values()} == {case["offs"].data_ptr()}
    for kind, a, b in (("up", "x", "w1"), ("down_backward", "dy", "w2"), ("dw2", "dy", None), ("dw1", None, "x")):
        if kind in of:
            tensors = {"dy": dy, **case}
            assert a is None or of[kind].a == tensors[a].data_ptr()
            assert b is None or of[kind].b == tensors[b].data_ptr()


def test_the_halves_of_the_preactivations_gradient_are_not_copied(launches):
    """With w3: a weight's gradient reads its half by a stride. The kernel adds to fp32 buffers."""
    h, i = 64, 32
    case, dy = make(h=h, i=i, dtype=BF16, split=True, biases=False)
    outs = {"grad_w1_out": torch.zeros(case["w1"].shape), "grad_w3_out": torch.zeros_like(case["w3"])}
    step(grouped_mlp, case, dy, **outs)
    (gate, to_gate), (up, to_up) = launches[-2:]
    dz = launches[2][1].d
    assert (to_gate.a, to_up.a) == (dz, dz + 2 * i)
    assert to_gate.a_stride == to_up.a_stride == 2 * i
    assert (gate.accumulate, gate.out_dtype, to_gate.d) == (True, "float32", outs["grad_w1_out"].data_ptr())
    assert (up.accumulate, up.out_dtype) == (True, "float32")
    assert to_up.d != outs["grad_w3_out"].data_ptr()


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("trained", [NAMES, ("b2",), ()])
def test_saved_for_backward(trained, recompute):
    case, dy = make(dtype=BF16)
    case = frozen(case, but=trained)
    given = {t.data_ptr() for t in case.values() if isinstance(t, torch.Tensor)}
    extra = []

    def pack(t):
        if t.data_ptr() not in given:
            extra.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        grouped_mlp(**case, recompute=recompute)
    assert sum(t.nbytes for t in extra) == (4 * dy.shape[0] * 16 if len(trained) > 1 and not recompute else 0)


# torch ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recompute", [False, True])
def test_compiles_without_a_graph_break(recompute):
    case, dy = make(split=True, dtype=BF16)
    compiled, want = torch.compile(grouped_mlp, fullgraph=True, backend="aot_eager"), step(grouped_mlp, case, dy)
    assert_same(step(compiled, case, dy, recompute=recompute), want)
    case["w3"] = case["w3"].detach()  # its buffer stays as it is
    outs = [
        {f"grad_{name}_out": torch.zeros_like(case[name], dtype=FP32) for name in ("w1", "w2", "w3")} for _ in range(2)
    ]
    assert_same(step(compiled, case, dy, recompute=recompute, **outs[0]), step(grouped_mlp, case, dy, **outs[1]))
    assert_same(*outs)
    assert [name for name, t in outs[0].items() if t.count_nonzero()] == ["grad_w1_out", "grad_w2_out"]
    with torch.no_grad():
        assert same_bits(compiled(**case), want["y"])
        b = case["w1"].mT
        assert same_bits(torch.compile(grouped_mm, fullgraph=True, backend="aot_eager")(case["x"], b, case["offs"]),
                         grouped_mm(case["x"], b, case["offs"]))  # fmt: skip


@pytest.mark.parametrize("kind", ["2d3d", "3d2d", "2d2d"])
def test_grouped_mm_compiles_for_many_numbers_of_rows(kind):
    torch.compiler.reset()
    compiled = torch.compile(grouped_mm, fullgraph=True, backend="aot_eager")
    for sizes in ((3, 0, 5, 1), (2, 4, 0, 7), (1, 1, 1, 1)):  # sizes become symbolic at the second call
        a, b, offs = mm_case(kind, sizes=sizes)
        got, want = compiled(a, b, offs), grouped_mm(a, b, offs)
        assert same_bits(got, want)
        assert_same(*(dict(zip("ab", torch.autograd.grad(y.sum(), (a, b)), strict=True)) for y in (got, want)))


def test_operators_are_registered_as_torch_expects():
    case, _ = make((2, 0, 3), 4, 3, tail=1)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    inputs = [case.get(name) for name in ("x", "w1", "w3", "b1", "w2", "b2", "scales", "offs")]
    torch.library.opcheck(autograd.mlp_op, (*inputs, None, None, None, "swiglu", True, "auto"), test_utils=tests)
    torch.library.opcheck(autograd.rows_op, (case["x"], case["w1"], case["offs"], "auto"), test_utils=tests)
    torch.library.opcheck(autograd.sum_op, (case["x"], case["x"], case["offs"], "auto"), test_utils=tests)


def test_what_is_refused():
    case, dy = make((2, 1), 4, 3, tail=0)
    with pytest.raises(RuntimeError, match=r"grouped_mlp: create_graph=True \(double backward\) is not supported"):
        torch.autograd.grad(grouped_mlp(**case).sum(), case["x"], create_graph=True)
    with pytest.raises(RuntimeError, match="is_grads_batched=True"):
        torch.autograd.grad(grouped_mlp(**case), case["x"], dy.expand(2, *dy.shape), is_grads_batched=True)
    for transformed in (
        lambda: torch.func.grad(lambda x: grouped_mlp(**{**case, "x": x}).sum())(case["x"]),
        lambda: torch.func.vmap(lambda x: grouped_mlp(**{**case, "x": x}))(torch.stack([case["x"]] * 2)),
        lambda: torch.func.vmap(lambda x: grouped_mm(x, case["w1"].mT, case["offs"]))(torch.stack([case["x"]] * 2)),
    ):
        with pytest.raises(UnsupportedError, match=r"torch\.func transforms and forward-mode AD are not supported"):
            transformed()
    with pytest.raises(
        UnsupportedError, match=r'grouped_mlp: no kernel for cpu tensors\. backend="auto" runs the portable'
    ):
        grouped_mlp(**case, backend="cute")
    with pytest.raises(
        UnsupportedError, match=r'grouped_mm: no kernel for cpu tensors\. backend="auto" runs the portable'
    ):
        grouped_mm(case["x"], case["w1"].mT, case["offs"], backend="cute")


def test_backward_twice_and_no_input_is_written():
    case, dy = make()
    before = {k: t.detach().clone() for k, t in case.items() if k in NAMES}
    y = grouped_mlp(**case)
    wanted = [case[name] for name in NAMES if name in case]
    first = torch.autograd.grad(y, wanted, dy, retain_graph=True)
    second = torch.autograd.grad(y, wanted, dy)
    assert all(map(same_bits, first, second))
    assert all(same_bits(case[k].detach(), t) for k, t in before.items())


def test_subclasses_and_modes_see_operators():
    case, dy = make()
    want = step(grouped_mlp, case, dy)
    wrapped = Wrapper(dy)
    assert_same(step(grouped_mlp, case, wrapped), want)
    assert wrapped.seen == ["quackish.grouped_mlp_bwd.default"]
    wrapped = Wrapper(case["x"].detach())
    assert same_bits(grouped_mlp(**{**frozen(case), "x": wrapped}), want["y"])
    assert wrapped.seen == ["quackish.grouped_mlp_fwd.default"]


def test_a_meta_tensor_gives_shapes():
    case, _ = make()
    meta = {k: t.detach().to("meta") if isinstance(t, torch.Tensor) else t for k, t in case.items()}
    assert grouped_mlp(**meta).shape == case["x"].shape
    meta = {k: t.requires_grad_() if k in NAMES else t for k, t in meta.items()}
    for name, got in step(grouped_mlp, meta, torch.empty_like(meta["x"])).items():
        assert (got.shape, got.device.type) == (meta["x" if name == "y" else name].shape, "meta"), name


E, R, H, I = 3, 5, 4, 2  # noqa: E741
WRONG = {
    "x is a list; expected a torch.Tensor": dict(x=[1.0]),
    "w1 is a DTensor": dict(w1=type("DTensor", (torch.Tensor,), {})),
    "offs is on meta but x is on cpu": dict(offs=torch.zeros(E, dtype=torch.int32, device="meta")),
    r"x is \(1, 5, 4\); expected \(R, H\) with H >= 1: flatten": dict(x=torch.zeros(1, R, H)),
    r"w2 is \(3, 5, 2\) but x is \(5, 4\); expected \(E, 4, I\)": dict(w2=torch.zeros(E, 5, I)),
    r"w2 is \(0, 4, 2\)": dict(w2=torch.zeros(0, H, I)),
    r"w1 is \(3, 2, 4\) but .* expected \(3, 4, 4\) as \[gate; up\], or w3 beside it": dict(w1=torch.zeros(E, I, H)),
    r'w1 is \(3, 4, 4\) but .* activation "relu2"; expected \(3, 2, 4\)': dict(activation="relu2"),
    r"w1 is \(2, 4, 4\)": dict(w1=torch.zeros(2, 2 * I, H)),
    r"w3 is \(3, 4, 2\) .* expected \(3, 2, 4\)": dict(w1=torch.zeros(E, I, H), w3=torch.zeros(E, H, I)),
    'w3 is given but activation is "silu", which has no gate': dict(activation="silu", w3=torch.zeros(E, I, H)),
    r"b1 is \(3, 2\) .* expected \(3, 4\)": dict(b1=torch.zeros(E, I)),
    r"b2 is \(4,\) .* expected \(3, 4\)": dict(b2=torch.zeros(H)),
    r"scales is \(5, 1\) .* expected \(5,\)": dict(scales=torch.zeros(R, 1)),
    r"offs is \(4,\) .* expected \(3,\)": dict(offs=torch.zeros(E + 1, dtype=torch.int32)),
    "offs is torch.int64; expected torch.int32, as": dict(offs=torch.zeros(E, dtype=torch.int64)),
    "x is torch.int32; expected bfloat16, float16": dict(x=torch.zeros(R, H, dtype=torch.int32)),
    "w2 is torch.float64; expected torch.float32, as x is": dict(w2=torch.zeros(E, H, I, dtype=FP64)),
    "scales is torch.bool; expected bfloat16": dict(scales=torch.zeros(R, dtype=torch.bool)),
    "activation is 'swigl'; expected one of .*; did you mean swiglu": dict(activation="swigl"),
    "recompute is a int; expected True or False": dict(recompute=1),
    "backend is 'cuda'; expected one of 'auto'": dict(backend="cuda"),
    r"grad_w1_out is \(3, 2, 4\) .* expected \(3, 4, 4\)": dict(grad_w1_out=torch.zeros(E, I, H)),
    "grad_w2_out is torch.float16; expected torch.float32 or w2's": dict(grad_w2_out=torch.zeros(E, H, I, dtype=FP16)),
    "grad_w3_out is given but w3 is None": dict(grad_w3_out=torch.zeros(E, I, H)),
    "grad_w1_out requires grad": dict(grad_w1_out=torch.zeros(E, 2 * I, H, requires_grad=True)),
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_arguments(message):
    right = dict(
        x=torch.zeros(R, H), w1=torch.zeros(E, 2 * I, H), w2=torch.zeros(E, H, I),
        offs=torch.zeros(E, dtype=torch.int32),
    )  # fmt: skip
    grouped_mlp(**right)
    wrong = dict(right, **WRONG[message])
    if isinstance(wrong["w1"], type):
        wrong["w1"] = right["w1"].as_subclass(wrong["w1"])
    with pytest.raises((ValueError, TypeError), match=f"grouped_mlp: {message}"):
        grouped_mlp(**wrong)


def test_memory_that_was_freed_before_backward():
    for name in ("x", "grad_w1_out"):
        case, dy = make(dtype=BF16)
        case["grad_w1_out"] = torch.zeros_like(case["w1"], dtype=FP32)
        y = grouped_mlp(**case)
        case[name].untyped_storage().resize_(0)
        with pytest.raises(ValueError, match=f"grouped_mlp: {name} has shape .* but no memory"):
            y.backward(dy)


def test_a_buffer_must_not_share_memory():
    case, _ = make()
    with pytest.raises(
        ValueError, match="grouped_mlp: grad_w1_out shares memory with w1, expected a buffer of its own"
    ):
        grouped_mlp(**case, grad_w1_out=case["w1"].detach())
    for buffer in buffer_layouts.overlapping(case["w1"].shape):
        with pytest.raises(ValueError, match=r"grouped_mlp: grad_w1_out has shape .* so its elements share memory"):
            grouped_mlp(**case, grad_w1_out=buffer)


# grouped_mm -----------------------------------------------------------------------------------------------------------


def mm_case(kind, dtype=FP64, device="cpu", sizes=(3, 0, 5, 1), tail=2, m=6, k=7, n=4):
    e, r = len(sizes), sum(sizes) + tail
    shapes = {"2d3d": ((r, k), (e, k, n)), "3d2d": ((e, m, k), (k, r)), "2d2d": ((m, r), (r, n))}
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(s, generator=generator, dtype=FP64).to(device, dtype).requires_grad_() for s in shapes[kind])
    return a, b, torch.tensor(sizes).cumsum(0, dtype=torch.int32).to(device)


def mm_by_loop(kind, a, b, offs):
    ends = offs.tolist()
    groups = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
    if kind == "2d3d":
        rows = [a[s] @ b[g] for g, s in enumerate(groups)]
        return torch.cat([*rows, a.new_zeros(a.shape[0] - ends[-1], b.shape[2])])
    if kind == "3d2d":
        columns = [a[g] @ b[:, s] for g, s in enumerate(groups)]
        return torch.cat([*columns, a.new_zeros(a.shape[1], b.shape[1] - ends[-1])], 1)
    return torch.stack([a[:, s] @ b[s] for s in groups])


@on_every_path
@pytest.mark.parametrize("kind", ["2d3d", "3d2d", "2d2d"])
def test_grouped_mm(kind, where):
    for dtype in where.dtypes:
        a, b, offs = mm_case(kind, dtype, where.device, sizes=(3, 0, 129, 64), m=72, k=88, n=40)
        got, (da, db) = grouped_mm(a, b, offs, backend=where.backend), (a.detach().double(), b.detach().double())
        truth = mm_by_loop(kind, da.requires_grad_(), db.requires_grad_(), offs)
        dy = torch.randn(truth.shape, dtype=FP64).to(where.device, dtype)
        grads, want = torch.autograd.grad(got, (a, b), dy), torch.autograd.grad(truth, (da, db), dy.double())
        assert got.is_contiguous()
        for result, exact in zip((got, *grads), (truth, *want), strict=True):
            assert result.dtype == dtype
            assert error(result, exact).norm <= 0.6 * torch.finfo(dtype).eps + 1e-6 * (dtype != FP64) + 1e-15
        nan_a, nan_b = a.detach().clone(), b.detach().clone()  # NaN in rows of no group
        for t, dim in ((nan_a, {"2d3d": 0, "2d2d": 1}.get(kind)), (nan_b, {"3d2d": 1, "2d2d": 0}.get(kind))):
            if dim is not None:
                t.narrow(dim, t.shape[dim] - 2, 2).fill_(torch.nan)
        assert same_bits(grouped_mm(nan_a, nan_b, offs, backend=where.backend), got)


@pytest.mark.parametrize("kind", ["2d3d", "3d2d", "2d2d"])
def test_derivatives_of_grouped_mm(kind):
    a, b, offs = mm_case(kind, m=2, k=3, n=2)
    assert torch.autograd.gradcheck(lambda a, b: grouped_mm(a, b, offs), (a, b))
    assert torch.autograd.gradgradcheck(lambda a, b: grouped_mm(a, b, offs), (a, b))
    theirs = getattr(F, "grouped_mm", None)
    if theirs is not None:
        a, b, offs = mm_case(kind, FP32, tail=0, m=8, k=8, n=8, sizes=(3, 0, 4, 9))
        torch.testing.assert_close(grouped_mm(a, b, offs), theirs(a, b, offs=offs))


def test_grouped_mm_without_offsets_is_bmm():
    a, b = torch.randn(3, 4, 5), torch.randn(3, 5, 6)
    assert same_bits(grouped_mm(a, b), torch.bmm(a, b))


@pytest.mark.parametrize(
    "a, b, offs, message",
    [
        ((4,), (2, 4, 3), 2, r"a is \(4,\); expected 2 or 3 dimensions"),
        ((5, 4), (2, 3, 4), 2, r"a is \(5, 4\) and b is \(2, 3, 4\); expected as many columns of a as rows of b"),
        ((5, 4), (2, 4, 3), 3, r"offs is \(3,\), a is .*; expected \(2,\)"),
        ((5, 4), (2, 4, 3), None, "offs is None; expected the end of each group"),
        ((2, 5, 4), (2, 4, 3), 2, "offs is given; expected None: all groups have the same size"),
        ((2, 5, 4), (3, 4, 3), None, "expected as many groups in a as in b"),
        ((5, 4), (0, 4, 3), 0, r"offs is \(0,\)"),
        ((5, 0), (2, 0, 3), 2, "expected no dimension of 0 but that which offs divides"),
    ],
)
def test_wrong_arguments_of_grouped_mm(a, b, offs, message):
    offs = None if offs is None else torch.zeros(offs, dtype=torch.int32)
    with pytest.raises(ValueError, match=f"grouped_mm: .*{message}"):
        grouped_mm(torch.zeros(a), torch.zeros(b), offs)
    with pytest.raises(TypeError, match=r"grouped_mm: b is torch\.float64; expected torch\.float32, as a is"):
        grouped_mm(torch.zeros(5, 4), torch.zeros(2, 4, 3, dtype=FP64), torch.zeros(2, dtype=torch.int32))


# A GPU ----------------------------------------------------------------------------------------------------------------

on_gpu_paths = pytest.mark.parametrize("where", ["portable-cuda", "kernels-cuda"], indirect=True)


@pytest.mark.gpu
@on_gpu_paths
def test_nothing_synchronizes(where):
    for dtype in where.dtypes:
        case, dy = make(h=72, i=88, dtype=dtype, device="cuda")
        a, b, offs = mm_case("2d2d", dtype, "cuda", m=72, k=88, n=40)
        outs = {f"grad_{name}_out": torch.zeros_like(case[name]) for name in ("w1", "w2")}
        where.run(case, dy, **outs)  # compiles
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            where.run(case, dy)
            where.run(case, dy, **outs)
            torch.autograd.grad(grouped_mm(a, b, offs, backend=where.backend).sum(), (a, b))
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@on_gpu_paths
def test_a_cuda_graph_with_other_offsets(where):
    case, dy = make(h=72, i=88, dtype=where.dtypes[-1], device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        where.run(case, dy)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        static = where.run(case, dy)
    for sizes in ((448, *[0] * 8), [0] * 9, [0] * 8 + [455], (1, 127, 128, 129, 0, 2, 40, 3, 4), SIZES):
        case["offs"].copy_(torch.tensor(sizes).cumsum(0, dtype=torch.int32))
        frozen(case)["x"].normal_()
        graph.replay()
        replayed = {name: t.clone() for name, t in static.items()}
        assert_same(where.run(case, dy), replayed)
    case["offs"][2] = 1 << 30
    graph.replay()
    assert all(t.isnan().all() for t in static.values())


@pytest.mark.gpu
def test_one_warning_a_reason():
    errors._warned.clear()
    case, _ = make(dtype=FP32, device="cuda")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(2):
            grouped_mlp(**case)
            grouped_mm(case["x"], case["w1"].mT, case["offs"])
    messages = [str(w.message) for w in seen if w.category is PortablePathWarning]
    assert len(messages) == 2
    assert all("no kernel for torch.float32" in message for message in messages)
