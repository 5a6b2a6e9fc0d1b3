"""Rotary position embeddings: the portable path, the kernels in the emulator, strides, gradients, what is refused."""

import itertools
from typing import get_args

import pytest
import torch

import quackish
from quackish.device.choose import choose
from quackish.errors import UnsupportedError
from quackish.gpu import B200, H200
from quackish.ops.rotary.problems import LAYOUTS as KNOWN
from quackish.ops.rotary.problems import SPEC
from quackish.testing import assert_close_to_fp64, assert_deterministic
from quackish.testing.errors import same_bits
from quackish.types import RotaryLayout
from tests.emulator_cases import BLACKWELL, QUICK, emulated
from tests.rotary.cases import BF16, FP16, FP32, FP64, KERNELS, LAYOUTS, case, functions, normal, step, truth
from tests.variants import check_compiles, one_per

rotary = quackish.rotary

# Numbers --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layout, half, sizes", list(itertools.product(LAYOUTS, (False, True), ((16, 16), (16, 6), (7, 2))))
)
def test_portable(layout, half, sizes):
    d, rotary_dim = sizes
    for dtype, table_dtype, table_batch in ((BF16, FP32, 2), (FP16, FP16, 1), (FP32, BF16, 2), (FP64, FP64, 1)):
        inputs = case(
            d=d, rotary_dim=rotary_dim, dtype=dtype, table_dtype=table_dtype, half=half, table_batch=table_batch
        )
        assert_close_to_fp64(*functions(layout=layout, rotary_dim=rotary_dim), *inputs)


def check_emulated(name, where):
    sizes, options = KERNELS[name]
    options = dict(rotary_dim=sizes.get("rotary_dim"), **options)
    with emulated(where) as report:
        assert_close_to_fp64(*functions(backend="cute", **options), *case(length=37, **sizes))
    assert [launch.kernel for launch in report.launches] == ["rotary", "rotary"]  # one each way


def test_emulated():
    check_emulated("halves", QUICK)


def test_negative_bit_emulated():
    """PyTorch negates the sine of a conjugate when it reads it; kernels read memory."""
    q, k, cos, sin = case(d=16, rotary_dim=2, half=True)
    conjugate = torch.complex(cos, sin).conj()
    assert conjugate.imag.is_neg()
    with emulated(QUICK):
        found = [rotary(q, k, cos, s, rotary_dim=2) for s in (conjugate.imag, -sin)]
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name, where", list(itertools.product(KERNELS, (QUICK, "h200/at_once/1", *BLACKWELL))))
def test_emulated_everywhere(name, where):
    check_emulated(name, where)


@pytest.mark.parametrize(
    "gpu, problem", one_per(lambda gpu, problem: gpu, itertools.product((H200, B200), SPEC.samples))
)
def test_no_register_spills(gpu, problem):
    check_compiles("rotary", problem, choose(problem, gpu).config, gpu, ctas_per_sm=4)


def test_nan_stays_in_its_pair_and_other_elements_keep_their_bits():
    q, _, cos, sin = case(d=24, rotary_dim=16, grad=False)
    q.view(torch.int16)[..., 16:] = torch.arange(-4, 4) * 0x0FF1  # NaN with payloads among them
    q[0, 1, 2, 3] = torch.nan
    q[0, 2, 2, 1] = torch.inf
    for where in (None, QUICK):
        with emulated(where) if where else torch.no_grad():
            out, _ = rotary(q, None, cos, sin, rotary_dim=16)
        assert out[0, 1, 2].isnan().nonzero().flatten().tolist()[:2] == [3, 11]
        assert same_bits(out[..., 16:], q[..., 16:])
        bad = torch.zeros(out.shape[:-1] + (16,), dtype=torch.bool)
        bad[0, 1, 2, [3, 11]] = bad[0, 2, 2, [1, 9]] = True
        assert torch.equal(~out[..., :16].isfinite(), bad)


# Bits -----------------------------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
def test_bits_depend_on_the_row_alone():
    """Not on batch, length, heads, the number of CTAs, and whether rows are aligned."""
    q, k, cos, sin = inputs = case(2, 5, 1, 19, 32)
    parts = [q[1:, 1:4, 7:, :], k[1:, :, 7:, :], cos[:, 7:], sin[:, 7:]]
    with emulated(QUICK):
        whole = rotary(*inputs)
        some = rotary(*parts)
        padded = torch.empty(2, 5, 19, 33, dtype=BF16)[..., 1:].copy_(q)  # addresses of 2 bytes
        unaligned, _ = rotary(padded, None, cos, sin)
        assert_deterministic(lambda *args: rotary(*args), *case(1, 2, 1, 3, 32), runs=3)
    assert same_bits(some[0], whole[0][1:, 1:4, 7:])
    assert same_bits(some[1], whole[1][1:, :, 7:])
    assert same_bits(unaligned, whole[0])


# Strides --------------------------------------------------------------------------------------------------------------


def in_order(t, *order):
    """t's numbers, with its dimensions in this order in memory."""
    return t.permute(order).contiguous().permute(torch.tensor(order).argsort().tolist())


def layouts(t):
    """Tensors of t's shape, and whether a result has the same strides."""
    *lead, heads, length, d = range(t.dim())
    yield t.contiguous(), True
    yield in_order(t, *lead, length, heads, d), True
    yield in_order(t, heads, *lead, length, d), True
    yield in_order(t, *reversed(lead), heads, length, d), len(lead) < 2  # else batch dimensions do not fold into one
    yield torch.cat([t, t], -1)[..., t.shape[-1] :], False
    yield in_order(t, *lead, heads, d, length), False
    yield t[..., :1, :, :].expand(t.shape), False
    yield t[..., :1].expand(t.shape), False


@pytest.mark.parametrize("where", ["portable", pytest.param(QUICK, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("lead", [(), (2,), (2, 3)], ids=str)
def test_strides(lead, where):
    """Of q, its result and its gradients, whatever those of the incoming gradient are."""
    q, k = normal(*lead, 3, 5, 16), normal(*lead, 2, 5, 16, seed=1)
    batch = lead and (torch.Size(lead).numel(),)
    tables = normal(2, *batch, 5, 32, dtype=FP32, seed=2)[..., ::2]
    wide = [t.double().view(*lead, 1, 5, 16) if lead else t.double() for t in tables.contiguous()]
    with emulated(where) if where == QUICK else torch.enable_grad():
        for mine, keeps in layouts(q):
            leaf = mine.detach().requires_grad_()
            out, other = rotary(leaf, k, *tables)
            want, _ = truth(leaf.double(), None, *wide)
            assert (out - want).norm() <= 0.003 * want.norm()
            for dy in (
                in_order(out.detach(), *range(q.dim() - 2), q.dim() - 1, q.dim() - 2),
                torch.ones(()).expand(q.shape),
            ):
                (dq,) = torch.autograd.grad(out, leaf, dy.to(BF16), retain_graph=True)
                (true,) = torch.autograd.grad(want, leaf, dy.double(), retain_graph=True)
                assert (dq - true).norm() <= 0.01 * true.norm()
                assert dq.stride() == out.stride() == (mine if keeps else torch.empty(q.shape)).stride()
            assert other.is_contiguous()


def test_empty_tensors():
    for sizes in (dict(batch=0), dict(length=0), dict(q_heads=0), dict(k_heads=0)):
        inputs = case(**sizes)
        for t, like in zip(step(inputs), 2 * inputs[:2], strict=True):
            assert t.shape == like.shape
    with emulated(QUICK):
        q, k = rotary(*case(k_heads=0))
        assert (q.shape[1], k.shape[1]) == (3, 0)


# Gradients ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("needs", list(itertools.product((False, True), repeat=2)))
@pytest.mark.parametrize("where", ["portable", QUICK])
def test_every_combination_of_gradients(needs, where):
    q, k, cos, sin = case(grad=False)
    leaves = [t.requires_grad_(need) for t, need in zip((q, k), needs, strict=True)]
    true = truth(q.double(), k.double(), cos.double(), sin.double())
    with emulated(where) if where == QUICK else torch.enable_grad() as report:
        out = rotary(*leaves, cos, sin)
        for used in ((0,), (1,), (0, 1)):
            wanted = [i for i in used if needs[i]]
            if not wanted:
                continue
            leaf, dy = [leaves[i] for i in wanted], [out[i].detach() for i in used]
            got = torch.autograd.grad([out[i] for i in used], leaf, dy, retain_graph=True)
            want = torch.autograd.grad(
                [true[i] for i in wanted], leaf, [out[i].detach().double() for i in wanted], retain_graph=True
            )
            for a, b in zip(got, want, strict=True):
                assert (a - b).norm() <= 0.01 * b.norm()
    if where == QUICK:
        assert len(report.launches) == 1 + {0: 0, 1: 2, 2: 3}[sum(needs)]  # one for q and k together


def test_without_k():
    q, _, cos, sin = case()
    assert_close_to_fp64(lambda *a: rotary(a[0], None, *a[1:])[0], lambda *a: truth(a[0], None, *a[1:])[0], q, cos, sin)
    assert rotary(q, None, cos, sin)[1] is None


def test_second_derivatives():
    q, k, cos, sin = case(1, 2, 1, length=3, dtype=FP64, table_dtype=FP64, d=6)
    for layout in LAYOUTS:
        call = lambda q, k: rotary(q, k, cos, sin, layout=layout)  # noqa: B023, E731
        assert torch.autograd.gradcheck(call, (q, k))
        assert torch.autograd.gradgradcheck(call, (q, k))
    with pytest.raises(RuntimeError, match="vmap over gradients"):
        out, _ = rotary(q, k, cos, sin)
        torch.autograd.grad(out, q, torch.stack([out, out]).detach(), is_grads_batched=True)


# Refusals -------------------------------------------------------------------------------------------------------------

Q, K, TABLE = torch.ones(2, 3, 5, 8), torch.ones(2, 1, 5, 8), torch.ones(5, 8)
ERRORS = {  # arguments in place of the right ones, and the message
    "q": (dict(q=torch.ones(5, 8)), ValueError, r"q is \(5, 8\); expected \(..., heads, length, D\)"),
    "dtype of q": (dict(q=Q.long()), TypeError, "q is torch.int64; expected bfloat16"),
    "k": (dict(k=K[:, :, 1:]), ValueError, r"k is \(2, 1, 4, 8\) but q is \(2, 3, 5, 8\); expected the same sizes"),
    "dtype of k": (dict(k=K.bfloat16()), TypeError, "k is torch.bfloat16; expected torch.float32, as q is"),
    "no tensor": (dict(k=[1.0]), TypeError, "k is a list; expected a torch.Tensor or None"),
    "cos": (dict(cos=None), TypeError, "cos is None; expected a torch.Tensor"),
    "length": (dict(sin=TABLE[1:]), ValueError, r"sin is \(4, 8\) but q .*; expected \(5, W\) or \(2, 5, W\)"),
    "batch": (dict(cos=TABLE.expand(3, 5, 8)), ValueError, r"cos is \(3, 5, 8\) but q is .*\(2, 5, W\)"),
    "columns": (dict(cos=TABLE[:, :6]), ValueError, "cos has 6 columns and rotary_dim is 8; expected 8 columns, or 4"),
    "sin": (dict(sin=TABLE[:, :4]), ValueError, r"sin is \(5, 4\) but cos is \(5, 8\); expected equal shapes"),
    "dtype of sin": (dict(sin=TABLE.half()), TypeError, "sin is torch.float16; expected torch.float32, as cos is"),
    "grad": (dict(cos=torch.ones(5, 8, requires_grad=True)), ValueError, r"cos requires grad, .* cos.detach\(\)"),
    "odd": (dict(rotary_dim=3), ValueError, "rotary_dim is 3 and q is .*; expected an even number up to D"),
    "large": (dict(rotary_dim=10), ValueError, "rotary_dim is 10 and q is .*; expected an even number up to D"),
    "type": (dict(rotary_dim=4.0), TypeError, "rotary_dim is 4.0, a float; expected an int"),
    "layout": (dict(layout="half"), ValueError, "layout is 'half'; expected one of 'halves'.*did you mean halves"),
    "backend": (dict(backend="cuda"), ValueError, "backend is 'cuda'; expected one of"),
    "no kernel": (dict(backend="cute"), UnsupportedError, "rotary: no kernel for cpu tensors"),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name):
    changes, kind, message = ERRORS[name]
    args = dict(q=Q, k=K, cos=TABLE, sin=TABLE) | changes
    with pytest.raises(kind, match=f"^rotary: .*{message.removeprefix('rotary: ')}"):
        rotary(**args)


def test_layouts_are_those_of_the_type():
    assert tuple(KNOWN) == get_args(RotaryLayout)


def test_no_kernel_for_fp64():
    with emulated(QUICK), pytest.raises(UnsupportedError, match="no kernel for tables in float64; supported"):
        rotary(*case(table_dtype=FP64), backend="cute")


def test_dtensors_are_refused():
    class DTensor(torch.Tensor):
        pass

    q, k, cos, sin = case(grad=False)
    with pytest.raises(UnsupportedError, match=r"rotary: k is a DTensor; expected a plain tensor.*to_local"):
        rotary(q, k.as_subclass(DTensor), cos, sin)


def test_transforms_are_refused():
    q, _, cos, sin = case(grad=False)
    with pytest.raises(UnsupportedError, match=r"rotary: torch\.func"):
        torch.func.vmap(lambda q: rotary(q, None, cos, sin)[0])(q[None])
