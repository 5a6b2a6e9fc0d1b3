"""mlp: values and gradients against fp64, what it shares with grouped_mlp, memory, buffers, compiled calls."""

import contextlib
import itertools

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import quackish
from quackish import grouped_mlp, mlp
from quackish.device.kernel_device import KernelDevice, substitute
from quackish.gpu import B200, H200
from quackish.ops.mlp import operators, reference
from quackish.ops.mlp.kernel_steps import KernelSteps
from quackish.ops.shared.problems import is_dw_cooperative
from quackish.testing import assert_deterministic
from quackish.testing.errors import error, same_bits
from tests import buffer_layouts, emulated_kernels
from tests.emulator_cases import BLACKWELL, HOPPER, QUICK, emulated
from tests.mlp.cases import (
    BF16,
    FP16,
    FP32,
    FP64,
    Where,
    assert_same,
    assert_same_values,
    experts,
    make,
    on_every_path,
)
from tests.wrapper_tensor import Wrapper

LEAVES = ("x", "w1", "w3", "b1", "b3", "w2", "b2", "residual")
KINDS = [(a, split) for a in reference.ACTIVATIONS for split in (False, True) if a in reference.GATED or not split]


def dense(rows=70, h=72, i=88, *, lead=None, residual=True, biases=True, **how):
    """(arguments of mlp, all of which require grad; dy)"""
    case, dy = make((rows,), h, i, scales=False, biases=biases, tail=0, **how)
    del case["offs"]
    generator = torch.Generator().manual_seed(1)
    args = {name: t[0] if name not in ("x", "activation") else t for name, t in case.items()}
    if biases and how.get("split"):
        args["b1"], args["b3"] = args["b1"].chunk(2)
    if residual:
        args["residual"] = torch.randn(rows, h, generator=generator, dtype=FP64).to(dy)
    if lead is not None:
        args |= {name: args[name].view(*lead, h) for name in ("x", "residual") if name in args}
        dy = dy.view(*lead, h)
    return {name: t.detach().clone().requires_grad_() if name in LEAVES else t for name, t in args.items()}, dy


def truth(x, w1, w2, *, w3=None, b1=None, b3=None, b2=None, activation="swiglu", residual=None, kept=None):
    """What a user writes without quackish, by autograd."""
    if b3 is not None:
        b1 = torch.cat([b1, b3])
    rows = x.reshape(-1, x.shape[-1])
    one = [None if t is None else t[None] for t in (w3, b1, b2)]
    offs = torch.tensor([len(rows)])
    y = experts(rows, w1[None], w2[None], offs, w3=one[0], b1=one[1], b2=one[2], activation=activation, kept=kept)
    y = y.view(x.shape)
    return y if residual is None else y + residual


def step(function, args, dy, **options):
    """{"y": ..., and gradients by argument}"""
    y = function(**args, **options)
    wanted = {n: args[n] for n in LEAVES if args.get(n) is not None and args[n].requires_grad}
    grads = torch.autograd.grad(y, list(wanted.values()), dy) if wanted else ()
    return {"y": y.detach(), **dict(zip(wanted, grads, strict=True))}


def run(where: Where, args, dy, **options):
    return step(mlp, args, dy, backend=where.backend, **options)


def in_fp64(args):
    return {n: t.detach().double().requires_grad_() if n in LEAVES else t for n, t in args.items()}


def frozen(args, but=()):
    return {n: t.detach() if n in LEAVES and n not in but else t for n, t in args.items()}


def assert_close(got, args, dy, slack=1.02):
    """Errors at most PyTorch's in the same dtype, or one rounding of the result and one of a product's operand."""
    dtype = dy.dtype
    want = step(truth, in_fp64(args), dy.double(), kept=None if dtype == FP64 else dtype)
    want["y"] = truth(**in_fp64(args)).detach()  # forward goes on with what was not rounded
    theirs = step(truth, args, dy)
    assert got.keys() == want.keys()
    for name, exact in want.items():
        ours = error(got[name], exact)
        assert got[name].shape == exact.shape
        assert got[name].dtype == dtype
        if dtype == FP64:
            assert ours.within(1e-14, 1e-9), name
        else:
            bound = min(slack * error(theirs[name], exact).norm, 0.5 * torch.finfo(dtype).eps)
            assert ours.norm <= bound, (name, ours.norm, bound)


# Values ---------------------------------------------------------------------------------------------------------------


@on_every_path
@pytest.mark.parametrize("activation, split", KINDS)
def test_against_fp64(activation, split, where):
    for dtype, (biases, residual) in itertools.product(where.dtypes, ((True, True), (False, False))):
        how = dict(activation=activation, split=split, biases=biases, residual=residual, device=where.device)
        args, dy = dense(dtype=dtype, **how)
        got = run(where, args, dy)
        assert_close(got, args, dy)
        assert_same(run(where, args, dy, recompute=True), got)


# Rows, H, I. Rows end within a tile, on one, and after several.
EMULATED = {"few rows": (21, 64, 48), "one tile": (128, 72, 88), "several tiles": (300, 200, 72)}


def check_emulated(place, sizes, **how):
    args, dy = dense(*sizes, dtype=BF16, **how)
    with emulated(place) as report:
        got = step(mlp, args, dy, backend="cute")
    assert_close(got, args, dy)
    assert {launch.kernel for launch in report.launches} == {"grouped_gemm", "gemm"}  # the latter for weights


def test_emulated():
    check_emulated(QUICK, EMULATED["few rows"], split=True)


@pytest.mark.exhaustive
@pytest.mark.parametrize("place", HOPPER + BLACKWELL)
@pytest.mark.parametrize(
    "name, activation, split",
    list(zip(EMULATED, ("swiglu", "geglu_erf", "gelu_tanh"), (False, True, False), strict=True)),
)
def test_emulated_everywhere(name, activation, split, place):
    check_emulated(place, EMULATED[name], activation=activation, split=split)


@on_every_path
def test_one_rounding_with_a_residual(where):
    """1 + 2^-8 is halfway between 1 and 1 + 2^-7, to which 2^-17 more rounds it: no 16-bit product has both."""
    x, w2 = torch.zeros(3, 8), torch.zeros(8, 8)
    x[:, :2] = 1.0
    w2[0, 0], w2[0, 1] = 2.0**-8, 2.0**-17
    x, w1, w2 = (t.to(where.device, BF16) for t in (x, torch.eye(8), w2))
    y = mlp(x, w1, w2, activation="relu2", residual=torch.ones_like(x), backend=where.backend)
    assert (y[:, 0] == 1 + 2.0**-7).all()
    assert (y[:, 1:] == 1).all()


@on_every_path
def test_it_is_grouped_mlp_with_one_group(where):
    args, dy = dense(split=True, residual=False, dtype=where.dtypes[0], device=where.device)
    got = run(where, args, dy)
    x, w1, w3, w2 = (args[name].detach().requires_grad_() for name in ("x", "w1", "w3", "w2"))
    b1 = torch.cat([args["b1"], args["b3"]]).detach()[None].requires_grad_()
    b2 = args["b2"].detach()[None].requires_grad_()
    offs = torch.tensor([len(x)], dtype=torch.int32, device=where.device)
    y = grouped_mlp(x, w1[None], w2[None], offs, w3=w3[None], b1=b1, b2=b2, backend=where.backend)
    grads = torch.autograd.grad(y, (x, w1, w3, w2, b1, b2), dy)
    want = dict(zip(("x", "w1", "w3", "w2", "b1", "b2"), grads, strict=True), y=y.detach())
    want |= {"b1": want["b1"][0, :88], "b3": want["b1"][0, 88:], "b2": want["b2"][0]}
    for name, t in want.items():
        if where.backend == "cute" and name in ("x", "y"):
            assert same_bits(got[name], t), name
        else:  # sums in another order
            assert error(got[name], t.double()).norm <= 10 * torch.finfo(t.dtype).eps, name


def test_few_tiles_of_a_weight_gradient_are_cooperative():
    for sizes in ((2048, 8192), (8192, 2048), (8960, 1536)):  # less than 8 waves
        assert is_dw_cooperative(*sizes, H200)
        assert not is_dw_cooperative(*sizes, B200)  # whose kernel has no split tail
    assert not is_dw_cooperative(14_336, 4096, H200)
    assert not is_dw_cooperative(128_256, 2048, H200)


@on_every_path
def test_shapes_of_x(where):
    args, dy = dense(24, dtype=where.dtypes[0], device=where.device)
    want = run(where, args, dy)
    for lead in ((24,), (2, 12), (2, 3, 4), (1, 24, 1)):
        more, grad = dense(24, lead=lead, dtype=where.dtypes[0], device=where.device)
        got = run(where, more, grad)
        assert got["y"].shape == got["x"].shape == got["residual"].shape == (*lead, 72)
        assert_same({n: t.view(want[n].shape) for n, t in got.items()}, want)
    one = {n: t[0] if n in ("x", "residual") else t for n, t in frozen(args).items()}
    assert mlp(**one, backend=where.backend).shape == (72,)
    for rows in (0, 1):
        few, grad = dense(rows, lead=(rows, 1), dtype=where.dtypes[0], device=where.device)
        got = run(where, few, grad)
        assert_close(got, few, grad, slack=2)
        assert rows or not any(got[name].count_nonzero() for name in ("w1", "w2", "b1", "b2"))


def test_gradients_of_a_residual_accumulate():
    """A leaf: autograd adds to its gradient in place, which must not share memory with y's."""
    args, _ = dense(6, lead=(2, 3), dtype=FP32, biases=False)
    given = torch.ones_like(args["x"])
    for _ in range(3):
        mlp(**args).backward(given)
    assert (given == 1).all()
    assert (args["residual"].grad == 3).all()


class NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return None


def test_an_undefined_gradient_of_a_residual():
    args, _ = dense(6, lead=(2, 3), dtype=FP32, biases=False)
    NoGradient.apply(mlp(**args)).sum().backward()
    assert args["residual"].grad is None


@on_every_path
def test_any_strides(where):
    args, dy = dense(split=True, dtype=where.dtypes[0], device=where.device)
    want = run(where, args, dy)
    odd = dict(args)
    for name in ("w1", "w3", "w2", "x", "residual"):
        odd[name] = args[name].detach().t().contiguous().t().requires_grad_()
    assert_same_values(run(where, odd, dy.t().contiguous().t()), want)
    for name in ("x", "w1", "w2", "b1", "residual"):
        t = args[name].detach()
        odd[name] = torch.cat([t.flatten()[:2], t.flatten()])[2:].view(t.shape).requires_grad_()
    assert_same_values(run(where, odd, dy), want)
    ones = dy.new_ones(())
    assert_same_values(run(where, args, ones.expand(dy.shape)), run(where, args, ones.expand(dy.shape).contiguous()))


@on_every_path
def test_every_subset_of_gradients(where):
    args, dy = dense(split=True, dtype=where.dtypes[0], device=where.device)
    want = run(where, args, dy)
    subsets = [names for k in (1, 2, len(LEAVES) - 1) for names in itertools.combinations(LEAVES, k)]
    for names in subsets:
        got = run(where, frozen(args, but=names), dy)
        assert got.keys() == {"y", *names}
        assert_same(got, {name: want[name] for name in got})
    with torch.no_grad():
        assert same_bits(mlp(**args, backend=where.backend), want["y"])
    assert not mlp(**frozen(args), backend=where.backend).requires_grad


def test_mixed_dtypes_and_autocast():
    args, dy = dense(split=True, dtype=FP32)
    args["residual"] = args["residual"].detach().bfloat16().requires_grad_()
    with torch.autocast("cpu", BF16):
        got = step(mlp, args, dy.bfloat16())
    weights = ("x", "w1", "w3", "w2")
    rounded = {n: t.detach().bfloat16().requires_grad_() if n in weights else t for n, t in args.items()}
    for name, t in step(mlp, rounded, dy.bfloat16()).items():
        assert same_bits(got[name], t if name == "y" else t.to(args[name].dtype)), name
    with (
        torch.autocast("cpu", BF16),
        pytest.raises(TypeError, match=r"mlp: residual is torch.float32; expected torch.b"),
    ):
        mlp(**args | dict(residual=args["residual"].float()))


@on_every_path
def test_a_nan_stays_in_its_row_and_the_weights_gradients(where):
    args, dy = dense(split=True, dtype=where.dtypes[0], device=where.device)
    clean = run(where, args, dy)
    for name in ("x", "residual", "dy"):
        args, dy = dense(split=True, dtype=where.dtypes[0], device=where.device)
        {**frozen(args), "dy": dy}[name][3] = torch.nan
        got = run(where, args, dy)
        others = torch.arange(len(dy), device=where.device) != 3
        for rows in ("y", "x", "residual"):
            assert same_bits(got[rows][others], clean[rows][others])
        assert got["y"][3].isnan().all() == (name != "dy")
        assert got["x"][3].isnan().all() == (name != "residual")
        assert got["w1"].isnan().any() == (name != "residual")


# Bits, and what backward writes ---------------------------------------------------------------------------------------


@on_every_path
def test_the_same_bits_on_every_run_and_for_every_number_of_rows(where):
    args, dy = dense(300, dtype=where.dtypes[-1], device=where.device, activation="relu2")
    names, tensors = zip(*((n, t) for n, t in args.items() if n != "activation"), strict=True)

    def call(*tensors):
        return mlp(**dict(zip(names, tensors, strict=True)), activation="relu2", backend=where.backend)

    assert_deterministic(call, *tensors, runs=20 if where.device == "cuda" else 3)
    if where.backend == "cute":
        whole = run(where, args, dy)
        for rows in (slice(0, 1), slice(3, 131), slice(299, 300)):
            part = {n: t.detach()[rows].requires_grad_() if n in ("x", "residual") else t for n, t in args.items()}
            got = run(where, part, dy[rows])
            assert all(same_bits(got[name], whole[name][rows]) for name in ("y", "x"))


@on_every_path
@pytest.mark.parametrize("recompute", [False, True])
def test_a_second_backward_has_the_same_bits(recompute, where):
    """The last one writes the preactivation's gradient over the saved preactivation."""
    args, dy = dense(split=True, dtype=where.dtypes[0], device=where.device)
    leaves = [args[name] for name in LEAVES]
    y = mlp(**args, recompute=recompute, backend=where.backend)
    first, kept = torch.autograd.grad(y, leaves, dy, retain_graph=True), y.detach().clone()
    for _ in range(2):
        assert all(map(same_bits, torch.autograd.grad(y, leaves, dy, retain_graph=True), first))
    assert all(map(same_bits, torch.autograd.grad(y, leaves, dy), first))
    assert same_bits(y.detach(), kept)


def test_backward_overwrites_the_preactivation_alone():
    """In eager mode, if autograd frees the graph. The operator is functional."""
    args, dy = dense(dtype=BF16)
    with substitute("cpu", KernelDevice(H200, emulated_kernels.kernel_for)):
        y = mlp(**args)
        saved = y.grad_fn.saved_tensors
        kept = [None if t is None else t.clone() for t in saved]

        def changed():
            pairs = zip(saved, kept, strict=True)
            return [i for i, (t, before) in enumerate(pairs) if t is not None and not same_bits(t, before)]

        options = "swiglu", *[BF16] * 2, None, *[BF16] * 3, None, "cute"
        torch.ops.quackish.mlp_bwd(dy, saved[-1], *(t if t is None else t.detach() for t in saved[:-1]), *options)
        assert changed() == []
        torch.autograd.grad(y, args["x"], dy, retain_graph=True)
        assert changed() == []
        torch.autograd.grad(y, args["x"], dy)
        assert changed() == [len(saved) - 1]


@pytest.mark.parametrize("steps", [KernelSteps, reference])
def test_a_backward_that_raised_can_run_again(steps, monkeypatch):
    args, dy = dense(dtype=BF16)
    leaves = [args[name] for name in LEAVES if name in args]
    kernels = substitute("cpu", KernelDevice(H200, emulated_kernels.kernel_for))
    with kernels if steps is KernelSteps else contextlib.nullcontext():
        want = torch.autograd.grad(mlp(**args), leaves, dy)
        y = mlp(**args)
        with monkeypatch.context() as patch:
            patch.setattr(steps, "rows_gradient", lambda *args: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                torch.autograd.grad(y, leaves, dy)
        assert all(map(same_bits, torch.autograd.grad(y, leaves, dy), want))


def test_results_and_gradients_may_be_changed_in_place():
    args, dy = dense(lead=(7, 10), dtype=FP32)
    y = mlp(**args)
    y += 1.0  # as a residual sum in a model does
    y.backward(dy)
    args["w1"].grad.mul_(2.0)
    assert not same_bits(args["w1"].grad, step(mlp, args, dy)["w1"])


@on_every_path
@pytest.mark.parametrize("layout", [None, *buffer_layouts.NAMES])
def test_weight_gradients_are_added_to_buffers(layout, where):
    args, dy = dense(split=True, dtype=where.dtypes[-1], device=where.device)
    want, exact = run(where, args, dy), step(truth, in_fp64(args), dy.double())
    for out_dtype in {FP32, dy.dtype}:
        made = {
            name: buffer_layouts.ones_in(layout or "padded", args[name].shape, out_dtype, where.device)
            for name in ("w1", "w3", "w2")
        }
        if layout is None:
            made = {name: (torch.ones_like(args[name], dtype=out_dtype).detach(), None) for name in made}
        y = mlp(**args, **{f"grad_{name}_out": view for name, (view, _) in made.items()}, backend=where.backend)
        version = made["w1"][0]._version
        for retain_graph in (True, False):
            got = torch.autograd.grad(y, [args[n] for n in LEAVES], dy, retain_graph=retain_graph, allow_unused=True)
            for name, grad in zip(LEAVES, got, strict=True):
                assert grad is None if name in made else same_bits(grad, want[name])
        assert made["w1"][0]._version > version
        for name, (view, whole) in made.items():
            bound = error(want[name], exact[name]).norm + torch.finfo(out_dtype).eps
            assert error(view, 1 + 2 * exact[name]).norm <= bound, name
            assert whole is None or buffer_layouts.are_neighbours_unchanged(view, whole), name


# Compiled, traced, refused --------------------------------------------------------------------------------------------


def test_compiles_once_for_any_number_of_rows():
    torch.compiler.reset()
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph

    compiled = torch.compile(mlp, fullgraph=True, backend=count, dynamic=None)
    for lead in ((2, 3), (3, 5), (4, 7), (6, 20)):
        args, _ = dense(lead[0] * lead[1], lead=lead, split=True, dtype=BF16)
        assert same_bits(compiled(**args), mlp(**args))
    assert len(graphs) == 2  # for the first sizes and for any sizes


@pytest.mark.parametrize("recompute", [False, True])
def test_compiled_equals_eager(recompute):
    torch.compiler.reset()
    args, dy = dense(lead=(7, 10), split=True, dtype=BF16)
    compiled, want = torch.compile(mlp, fullgraph=True, backend="aot_eager"), step(mlp, args, dy)
    assert_same(step(compiled, args, dy, recompute=recompute), want)
    outs = [{f"grad_{n}_out": torch.zeros_like(args[n], dtype=FP32) for n in ("w1", "w3", "w2")} for _ in range(2)]
    for function, buffers in zip((compiled, mlp), outs, strict=True):
        function(**args, **buffers).backward(dy)
        assert args["w1"].grad is None
    assert_same(*outs)


@pytest.mark.parametrize("place", ["portable", pytest.param(QUICK, marks=pytest.mark.exhaustive)])
def test_opcheck(place):
    args, _ = dense(5, 8, 16, dtype=BF16)
    inputs = [args.get(name) for name in ("x", "w1", "w3", "b1", "w2", "b2", "scales", "offs", "residual")]
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    with emulated(place) if place == QUICK else torch.enable_grad():
        torch.library.opcheck(
            operators.dense_forward.overload, (*inputs, None, None, None, "swiglu", True, "auto"), test_utils=tests
        )


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint(use_reentrant):
    args, dy = dense(lead=(7, 10), split=True, dtype=BF16)
    want = step(mlp, args, dy)

    def call(*tensors):
        return mlp(**dict(zip(LEAVES, tensors, strict=True)))

    leaves = [args[name] for name in LEAVES]
    y = checkpoint(call, *leaves, use_reentrant=use_reentrant)
    y.backward(dy)
    assert same_bits(y.detach(), want["y"])
    assert all(same_bits(t.grad, want[name]) for name, t in zip(LEAVES, leaves, strict=True))


def test_subclasses_and_modes_see_operators():
    args, dy = dense(dtype=BF16)
    want = step(mlp, args, dy)
    assert_same(step(mlp, args, Wrapper(dy)), want)
    wrapped = Wrapper(args["w2"].detach())
    assert same_bits(mlp(**frozen(args) | dict(w2=wrapped)), want["y"])
    assert wrapped.seen == ["quackish.mlp_fwd.default"]


def test_a_meta_tensor_gives_shapes():
    args, dy = dense(lead=(7, 10), split=True, dtype=FP16)
    meta = {n: t.detach().to("meta").requires_grad_() if n in LEAVES else t for n, t in args.items()}
    for name, got in step(mlp, meta, dy.to("meta")).items():
        assert (got.shape, got.dtype, got.device.type) == (meta["x" if name == "y" else name].shape, FP16, "meta"), name


def test_second_derivatives_and_transforms_are_refused():
    args, dy = dense(dtype=FP32)
    with pytest.raises(RuntimeError, match=r"^mlp: create_graph=True"):
        torch.autograd.grad(mlp(**args), args["x"], dy, create_graph=True)
    with pytest.raises(quackish.UnsupportedError, match=r"^mlp: torch.func"):
        torch.func.vmap(lambda x: mlp(**frozen(args) | dict(x=x, residual=None)))(args["x"].detach())
