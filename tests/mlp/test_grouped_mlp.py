"""grouped_mlp: values and gradients against fp64, and which rows and groups they depend on, by every path.

Tests that take `where` run on the portable path, with emulated kernels and, on a GPU, with kernels.
"""

import itertools
import math

import pytest
import torch

from quackish import grouped_mlp, grouped_mm
from quackish.ops.mlp import operators, reference
from quackish.testing import assert_deterministic
from quackish.testing.errors import error, same_bits
from tests import buffer_layouts
from tests.mlp.cases import (
    BF16,
    FP16,
    FP32,
    FP64,
    IN_EMULATOR,
    NAMES,
    PATHS,
    SIZES,
    TAIL,
    assert_same,
    assert_same_values,
    experts,
    frozen,
    in_fp64,
    make,
    on_every_path,
    on_every_path_and_emulator,
    step,
)

# Values ---------------------------------------------------------------------------------------------------------------


KINDS = [(a, split) for a in reference.ACTIVATIONS for split in (False, True) if a in reference.GATED or not split]


def paths_and_options():
    """(where, biases, scales, activation, split). In the emulator each activation once, one without options.

    Biases without scales, and the opposite, are exhaustive.

    The emulated clamped_swiglu is in test_no_gradient_at_the_limits_of_clamped_swiglu.
    """
    for biases, scales in itertools.product([False, True], repeat=2):
        for kind in KINDS:
            marks = [pytest.mark.exhaustive] * (biases != scales)
            for path in (*PATHS[:2], *["blocks-cpu"] * (biases and scales)):
                yield pytest.param(path, biases, scales, *kind, marks=marks)
            for path in PATHS[2:]:
                yield pytest.param(*path.values, biases, scales, *kind, marks=path.marks)
    late, at_once, on_b200, on_b300 = IN_EMULATOR
    for path, has_options, activation, split in (
        (late, True, "swiglu", True), (at_once, False, "silu", False), (late, True, "relu2", False),
        (late, True, "geglu_erf", True), (on_b200, True, "geglu", True), (on_b300, True, "reglu", True),
    ):  # fmt: skip
        yield pytest.param(*path.values, has_options, has_options, activation, split, marks=path.marks)


@pytest.mark.parametrize("where, biases, scales, activation, split", list(paths_and_options()), indirect=["where"])
def test_against_a_loop_over_experts_in_fp64(where, biases, scales, activation, split):
    """In the emulator, only cases with `split` recompute and have gradients of w1 and the biases."""
    in_full = where.sizes is SIZES or split
    for dtype in where.dtypes:
        how = dict(activation=activation, split=split, biases=biases, scales=scales, device=where.device, dtype=dtype)
        case, dy = make(**how) if where.backend == "reference" else make(where.sizes, h=72, i=88, **how)
        case = case if in_full else frozen(case, but=["x", "w2", "scales"])
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
        for name, recomputed in where.run(case, dy, recompute=True).items() if in_full else ():
            assert same_bits(recomputed, got[name]), name


@on_every_path_and_emulator
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


@pytest.mark.parametrize(
    "activation, where",
    [
        pytest.param(activation, *path.values, marks=path.marks)
        for activation in reference.ACTIVATIONS
        for path in (*map(pytest.param, PATHS[:2]), *PATHS[2:], IN_EMULATOR[0])
        if path is not IN_EMULATOR[0] or activation in ("swiglu", "relu2")
    ],
    indirect=["where"],
)
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
    assert finite.tolist() == [True, activation == "clamped_swiglu", True, activation in ("reglu", "relu2")]
    for name in ("y", "x"):
        assert torch.equal(got[name].isfinite().all(1).cpu(), finite), name
    with torch.no_grad():
        assert same_bits(grouped_mlp(**case, backend=where.backend), got["y"])


@on_every_path_and_emulator
def test_small_and_empty_shapes(where):
    for sizes, h, i, tail in (((3,), 1, 1, 0), ((0, 0), 5, 3, 0), ((0, 0), 5, 3, 4), ((2, 0), 8, 1, 0)):
        if where.backend == "cute":
            h, i = 8 * h, 8 * i
        case, dy = make(sizes, h, i, tail=tail, device=where.device, dtype=where.dtypes[0])
        got, want = where.run(case, dy), step(experts, in_fp64(case), dy.double())
        for name, truth in want.items():
            truth = torch.zeros_like(case[name], dtype=FP64) if truth is None else truth
            assert error(got[name], truth).norm <= 0.02, (name, sizes)


@pytest.mark.parametrize("where", ["blocks-cpu", PATHS[2]], indirect=True)
@pytest.mark.parametrize(
    "sizes, tail",
    [((0, 0, 448, 0, 0, 0, 1, 0, 0), 7), ((0, 1, 0, 0, 2, 0, 0, 0, 0), 1), ((128, 1, 127, 0, 129, 0, 0, 0, 64), 0)],
)
def test_groups_of_several_blocks_and_of_none(sizes, tail, where, monkeypatch):
    case, dy = make(sizes, tail=tail, split=True, device=where.device)
    want = step(experts, in_fp64(case), dy)
    for name, got in where.run(case, dy).items():
        assert error(got, want[name]).within(1e-14, 1e-9), name
    monkeypatch.setattr(operators, "check_offs", lambda *args: None)  # as on a GPU
    case["offs"][-1] = len(dy) + 1
    assert all(t.isnan().all() for t in where.run(case, dy).values())


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
    assert_same_values(where.run(odd, dy.t().contiguous().t()), want)
    ones = dy.new_ones(())
    assert_same_values(where.run(case, ones.expand(dy.shape)), where.run(case, ones.expand(dy.shape).contiguous()))

    def moved(t):
        """Behind a multiple of 16 bytes."""
        return torch.cat([t.flatten()[:2], t.flatten()])[2:].view(t.shape)

    def unpacked(t):
        """Columns contiguous."""
        return t.mT if t.dim() == 2 else t

    for name in ("x", "w1", "w2", "b1", "scales"):
        odd[name] = moved(case[name].detach()).requires_grad_()
    assert_same_values(where.run(odd, dy), want)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, moved):
        assert_same_values(where.run(case, dy), want)
    alone = frozen(case, but=["x"])
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.mT.contiguous() if t.dim() == 2 else t, unpacked):
        assert_same_values(where.run(alone, dy), want, ["y", "x"])
    case, dy = make((1,), tail=0, device=where.device, dtype=where.dtypes[0])
    assert_same_values(where.run(case, dy.as_strided(dy.shape, (1, 1))), where.run(case, dy))


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


@pytest.mark.exhaustive
@pytest.mark.parametrize("where", [IN_EMULATOR[1]], indirect=True)
@pytest.mark.parametrize("h, i", [(16, 200), (200, 128), (200, 520)])
def test_every_tile_in_the_emulator(h, i, where):
    """With few rows: the tiles depend on H and I. The widest tile needs more columns, see below."""
    case, dy = make((5, 0, 130), h, i, dtype=BF16)
    want = {**step(experts, in_fp64(case), dy.double(), kept=BF16), "y": experts(**in_fp64(case))}
    for name, got in where.run(case, dy).items():
        assert error(got, want[name]).norm <= 0.5 * torch.finfo(BF16).eps, name


@pytest.mark.exhaustive
@pytest.mark.parametrize("where", [IN_EMULATOR[1]], indirect=True)
def test_the_tile_of_many_steps_in_the_emulator(where):
    """128x512: 512 columns and at least 4096 steps along k."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(shape, generator=generator).to(BF16) for shape in ((3, 4096), (1, 4096, 512)))
    got = grouped_mm(a, b, torch.tensor([3], dtype=torch.int32))
    assert error(got, a.double() @ b[0].double()).norm <= 0.5 * torch.finfo(BF16).eps


WIDTHS = [(72, 16), (200, 16), (512, 4096)]  # (H, I), for each tile of Down on an H200


@pytest.mark.parametrize(
    "where, h, i",
    [
        pytest.param(*path.values, *sizes, marks=path.marks)
        for path in (*map(pytest.param, PATHS[:2]), *PATHS[2:], *IN_EMULATOR)
        for sizes in WIDTHS
    ],
    indirect=["where"],
)
def test_a_residual_is_added_before_the_only_rounding(where, h, i):
    """All sums are exact in fp32. Emulated kernels raise a Fault if they read outside of the residual."""
    sizes = where.sizes if i < 4096 else (3, 0, 1)
    offs = torch.tensor(sizes).cumsum(0, dtype=torch.int32).to(where.device)
    groups, rows, generator = len(sizes), sum(sizes) + TAIL, torch.Generator().manual_seed(0)
    for dtype in where.dtypes:

        def integers(*shape, high=8, dtype=dtype):
            return torch.randint(-high, high, shape, generator=generator).to(where.device, dtype)

        act, w2, b2, residual = integers(rows, i), integers(groups, h, i), integers(groups, h), integers(rows, h)
        residual, b2 = residual / 4 + 64, b2 / 2
        residual[-TAIL:] = torch.nan
        steps = operators.steps_for("grouped_mlp", act, i, groups, where.backend)
        moved = torch.cat([residual.flatten()[:1], residual.flatten()])[1:].view(residual.shape)  # not aligned
        for bias, added in ((b2, residual), (None, moved)):
            want = torch.zeros_like(residual, dtype=FP64)
            for g, end in enumerate(offs.tolist()):
                of_group = slice(end - sizes[g], end)
                want[of_group] = act[of_group].double() @ w2[g].double().T + residual[of_group]
                want[of_group] += 0 if bias is None else bias[g]
            assert torch.equal(steps.down(act, w2, bias, offs, added), want.to(residual))
        assert steps.down(act, w2, b2, offs.flip(0), residual).isnan().all()


# Rows and groups ------------------------------------------------------------------------------------------------------


def group_rows(case, g):
    start, end = [0, *case["offs"].tolist()][g : g + 2]
    return slice(start, end)


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
    offs, (_, num_columns) = case["offs"], case["w2"].shape[1:]
    steps = operators.steps_for("grouped_mlp", x, num_columns, len(offs), where.backend)
    all_needed, dtype = reference.Needs(True, True, True), x.dtype
    z, act = steps.up(x, w1, w3, b1, scales, offs, "swiglu", True)
    kept = z.clone()  # down_backward may rely on the zeros of `up`
    for name, run in dict(
        up=lambda: steps.up(x, w1, w3, b1, scales, offs, "swiglu", True),
        down=lambda: steps.down(act, w2, b2, offs),
        down_backward=lambda: steps.down_backward(dy, w2, kept, scales, offs, "swiglu", all_needed),
        rows_gradient=lambda: steps.rows_gradient(z, w1, w3, offs),
        weight_gradient=lambda: steps.weight_gradient(z, x, offs, dtype),
        bias_gradient=lambda: steps.bias_gradient(z, offs, dtype),
    ).items():
        for t in (x, dy, scales, z, act):
            t[-TAIL:] = 1.0
        want = run()
        for t in (x, dy, scales, z, act):
            t[-TAIL:] = torch.nan
        results = run()
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
    monkeypatch.setattr(operators, "check_offs", lambda *args: None)  # as on a GPU
    case, dy = make((3, 2, 0, 3), tail=322, device=where.device, dtype=where.dtypes[0])
    case["offs"] = torch.tensor(BAD_OFFSETS[kind], dtype=torch.int32, device=where.device)
    for name, t in where.run(case, dy).items():
        assert t.isnan().all(), name
    out = torch.zeros_like(case["w1"], dtype=FP32)
    where.run(case, dy, grad_w1_out=out)
    assert out.isnan().all()


@pytest.mark.parametrize("where", [path for path in PATHS if "portable-cuda" not in str(path)], indirect=True)
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


# Buffers --------------------------------------------------------------------------------------------------------------


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
