"""grouped_mm: values and derivatives by every path, and its errors."""

import pytest
import torch
import torch.nn.functional as F

from quackish import grouped_mm
from quackish.testing.errors import error, same_bits
from tests.mlp.cases import FP32, FP64, mm_case, on_every_path


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
