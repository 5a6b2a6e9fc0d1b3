"""What grouped_mlp runs and keeps: matrix products, launches, tiles, memory, and autograd's use of them."""

import functools
import types

import pytest
import torch

from quackish import grouped_mlp, mlp
from quackish.device.choose import choose
from quackish.device.kernel_device import KernelDevice, substitute
from quackish.device.kernel_for import CompiledKernel
from quackish.gpu import H200
from quackish.ops.mlp import groups, operators, reference
from quackish.ops.mlp.gemm_problems import TILES, Down, DownBackward, Up
from quackish.testing.errors import same_bits
from tests.mlp.cases import BF16, MANY, NAMES, SIZES, experts, frozen, make, step

# Matrix products and launches -----------------------------------------------------------------------------------------


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
    monkeypatch.setattr(operators, "steps_for", lambda *args: steps)
    rows_times = groups.Groups.rows_times
    monkeypatch.setattr(groups.Groups, "rows_times", lambda *args: seen.append("matmul") or rows_times(*args))
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

    def kernel_for(problem, gpu):
        config = choose(problem, gpu).config
        return CompiledKernel(lambda args, stream: seen.append((problem, args)), config)

    with substitute("cpu", KernelDevice(H200, kernel_for)):
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
    names = {Up: "up", Down: "down", DownBackward: "down_backward"}
    kinds = [names[type(p.epilogue)] if p.along == "m" else weights[args.m, args.n] for p, args in launches]
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
    assert (gate.epilogue.accumulate, gate.out_dtype, to_gate.d) == (True, "float32", outs["grad_w1_out"].data_ptr())
    assert (up.epilogue.accumulate, up.out_dtype) == (True, "float32")
    assert to_up.d != outs["grad_w3_out"].data_ptr()


@pytest.mark.exhaustive
def test_many_tiles_are_all_tiles():
    launched = set()

    def kernel_for(problem, gpu):
        launched.add((type(problem.epilogue), problem.cluster_tile))
        return CompiledKernel(lambda *args: None, choose(problem, gpu).config)

    with substitute("cpu", KernelDevice(H200, kernel_for)):
        for sizes, h, i in MANY.values():
            step(grouped_mlp, *make(sizes, h, i, dtype=BF16))
    assert launched == {(epilogue, tile) for epilogue, tiles in TILES.items() for tile in tiles}


# Memory ---------------------------------------------------------------------------------------------------------------


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


def test_backward_twice_and_no_input_is_written():
    case, dy = make()
    before = {k: t.detach().clone() for k, t in case.items() if k in NAMES}
    y = grouped_mlp(**case)
    wanted = [case[name] for name in NAMES if name in case]
    first = torch.autograd.grad(y, wanted, dy, retain_graph=True)
    second = torch.autograd.grad(y, wanted, dy)
    assert all(map(same_bits, first, second))
    assert all(same_bits(case[k].detach(), t) for k, t in before.items())


def test_one_group_needs_no_offsets(launches):
    """So mlp launches nothing but products."""
    x, w1, w2 = (torch.randn(shape).to(BF16).requires_grad_() for shape in ((24, 64), (64, 64), (64, 32)))
    mlp(x, w1, w2).sum().backward()
    grouped, plain = "grouped_gemm", "gemm"
    assert [p.spec.name for p, _ in launches] == [grouped, grouped, grouped, plain, grouped, plain]
    assert all((p.max_groups, args.groups, args.offs) == (1, 1, None) for p, args in launches if p.spec.name == grouped)
