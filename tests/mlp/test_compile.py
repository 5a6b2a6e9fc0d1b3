"""grouped_mlp and grouped_mm compiled and traced: torch.compile, operators, subclasses, meta tensors."""

import pytest
import torch

from quackish import grouped_mlp, grouped_mm
from quackish.ops.mlp import operators
from quackish.testing.errors import same_bits
from tests.mlp.cases import BF16, FP32, NAMES, assert_same, assert_same_values, frozen, make, mm_case, step
from tests.wrapper_tensor import Wrapper


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
        named = [dict(zip("ab", torch.autograd.grad(y.sum(), (a, b)), strict=True), y=y) for y in (got, want)]
        assert_same_values(*named)


def test_operators_are_registered_as_torch_expects():
    case, _ = make((2, 0, 3), 4, 3, tail=1)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    inputs = [case.get(name) for name in ("x", "w1", "w3", "b1", "w2", "b2", "scales", "offs")]
    torch.library.opcheck(
        operators.grouped_forward.overload, (*inputs, None, None, None, None, "swiglu", True, "auto"), test_utils=tests
    )
    torch.library.opcheck(operators.rows.overload, (case["x"], case["w1"], case["offs"], "auto"), test_utils=tests)
    torch.library.opcheck(operators.group_sums.overload, (case["x"], case["x"], case["offs"], "auto"), test_utils=tests)


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
