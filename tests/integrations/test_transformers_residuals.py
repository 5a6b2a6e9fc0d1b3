"""Decoder layers whose residual sums norms and MLPs add."""

import copy
import functools
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn

import quackish
from quackish.integrations.transformers import apply, report, residuals, revert
from tests.integrations.test_transformers import assert_same_step, step, tiny
from tests.integrations.test_transformers_trials import OwnMlp


def residuals_of(monkeypatch, call: Callable[[], object]) -> dict[str, int]:
    """How many calls of rms_norm and mlp got a residual."""
    counts = dict(rms_norm=0, mlp=0)
    originals = {name: getattr(quackish, name) for name in counts}

    def counting(name: str, *args, **options):
        counts[name] += options.get("residual") is not None
        return originals[name](*args, **options)

    for name in counts:
        monkeypatch.setattr(quackish, name, functools.partial(counting, name))
    call()
    monkeypatch.undo()
    return counts


@pytest.mark.parametrize(
    "family, in_norms, in_mlps",
    [
        ("Llama", 1, 1),
        ("Gemma2", 1, 0),
        ("Glm4", 1, 0),
        ("GptOss", 1, 0),
        ("Phi3", 1, 0),
        ("Granite", 1, 0),
        ("Cohere", 0, 1),
    ],
)
def test_which_sums_are_added_in_norms_and_mlps(family, in_norms, in_mlps, monkeypatch):
    dropout = dict(resid_pdrop=0.5) if family == "Phi3" else {}
    model, plain = tiny(family, **dropout), tiny(family, **dropout)
    apply(model, head=False)
    for m in (model, plain):
        m.model.layers[0].register_forward_pre_hook(lambda *args: torch.manual_seed(3) and None)  # for dropout
    results = []
    counts = residuals_of(monkeypatch, lambda: results.append(step(model)))
    assert counts == dict(rms_norm=2 * in_norms, mlp=2 * in_mlps)
    assert_same_step(results[0], step(plain), has_logits=True)


class Sublayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, hidden_states, mask):
        return torch.tanh(self.linear(hidden_states)), None


class OwnLayer(nn.Module):
    """Adds as most decoder layers do."""

    def __init__(self):
        super().__init__()
        self.attention, self.mlp, self.norm = Sublayer(), OwnMlp(), nn.RMSNorm(32, eps=1e-6)

    def forward(self, hidden_states, mask):
        output, _ = self.attention(hidden_states, mask)
        hidden_states = self.between(hidden_states + output, output)
        return hidden_states + self.mlp(self.norm(hidden_states))

    def between(self, total, output):
        return total


class InPlace(OwnLayer):
    def between(self, total, output):
        total += 1
        return total


class OtherUses(OwnLayer):
    """Uses values in ways that a sum does not need."""

    def between(self, total, output):
        assert isinstance(self.norm, nn.RMSNorm)
        output = torch.cat([output, total.view(total.shape)[..., :3]], -1)[..., 3:]
        return torch.where(output > 0, total, total - output / 2) + output * 0.5


class Remembers(OwnLayer):
    def forward(self, hidden_states, mask):
        self.last = super().forward(hidden_states, mask)
        return self.last


class AddsEarlier(OwnLayer):
    def forward(self, hidden_states, mask):
        return self.norm(self.mlp(hidden_states)) + self.attention(hidden_states, mask)[0]


def results_of(layer: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    leaves = [x.clone().requires_grad_(), *layer.parameters()]
    y = layer(leaves[0], None)
    return [y.detach(), *torch.autograd.grad(y.sum(), leaves)]


@pytest.mark.parametrize(
    "kind, counts",
    [(OwnLayer, (1, 1)), (InPlace, (0, 1)), (OtherUses, (0, 1)), (Remembers, None), (AddsEarlier, None)],
)
def test_layers_compute_what_their_class_does(kind, counts, monkeypatch):
    layer, x, results = kind().double(), torch.randn(2, 5, 32, dtype=torch.float64), []
    expected = results_of(layer, x)
    apply(layer, head=False)
    found = residuals_of(monkeypatch, lambda: results.extend(results_of(layer, x)))
    torch.testing.assert_close(results, expected)
    (entry,) = [entry for entry in report(layer) if entry.kind == "residuals"]
    assert entry.is_patched == (counts is not None)
    assert found == dict(zip(found, counts or (0, 0), strict=True))
    if counts is None:
        assert "sets an attribute" in entry.reason or "no sum of it is the input" in entry.reason
    assert type(revert(layer)) is kind


def scaled(t: torch.Tensor) -> torch.Tensor:
    return 2 * t


@pytest.mark.parametrize("name", ["norm", "mlp", "mlp.gate", "attention"])
def test_hooks_see_and_change_what_they_do_without_residual_patches(name, monkeypatch):
    layer, x, seen = OwnLayer().double(), torch.randn(2, 5, 32, dtype=torch.float64), []

    def hook(module, args, output):
        seen.append(args[0].detach().clone())
        return scaled(output) if torch.is_tensor(output) else (scaled(output[0]), None)

    layer.get_submodule(name).register_forward_hook(hook)
    expected = results_of(layer, x)
    apply(layer, head=False)
    torch.testing.assert_close(results_of(layer, x), expected)
    torch.testing.assert_close(seen[0], seen[1])


def test_residuals_of_another_dtype_are_added_by_pytorch(monkeypatch):
    layer, x = OwnLayer(), torch.randn(2, 5, 32)
    layer.attention.forward = lambda hidden_states, mask: (hidden_states.bfloat16(), None)
    expected = layer(x, None)
    apply(layer, head=False)
    assert residuals_of(monkeypatch, lambda: layer(x, None)) == dict(rms_norm=0, mlp=1)
    torch.testing.assert_close(layer(x, None), expected)


class InEvaluation(OwnLayer):
    """Does what it does not in training: looks at a sum without grad. Returns a dict."""

    def forward(self, hidden_states, mask):
        output, _ = self.attention(hidden_states, mask)
        total = hidden_states + output
        if not self.training:
            with torch.no_grad():
                assert total.norm() > 0
        return {"residual": total, "output": total + self.mlp(self.norm(total))}


def test_sums_that_a_layer_looks_at_and_returns():
    layer, x = InEvaluation().double().eval(), torch.randn(2, 5, 32, dtype=torch.float64, requires_grad=True)

    def results():
        values = layer(x, None)
        grads = torch.autograd.grad(values["output"].sum() + values["residual"].sum(), [x, *layer.parameters()])
        return [*values.values(), *grads]

    expected = results()
    layer.__class__ = residuals.layer_class(InEvaluation)
    apply(layer.norm, head=False)
    apply(layer.mlp, head=False)
    torch.testing.assert_close(results(), expected)


class WithMask(OwnLayer):
    """Does with a mask what it does not in trials, which pass None: norms a sum without grad, and writes to it."""

    def forward(self, hidden_states, mask):
        output, _ = self.attention(hidden_states, mask)
        total = hidden_states + output
        if mask is not None:
            with torch.no_grad():
                score, constant = self.norm(total).sum(-1, keepdim=True), self.mlp(output)
            total = total + (score > 0) * (output**2 - 1) + constant
            same = total = total + output
            total[mask] += self.mlp(total[mask])
            total = same
        return total + self.mlp(self.norm(total))


def test_what_a_layer_does_with_a_sum_in_some_calls():
    layer, x, mask = WithMask().double(), torch.randn(2, 5, 32, dtype=torch.float64), torch.rand(2, 5) > 0.5

    def results():
        leaf = x.clone().requires_grad_()
        y = layer(leaf, mask)
        return [y.detach(), *torch.autograd.grad(y.sum(), [leaf, *layer.parameters()])]

    expected = results()
    apply(layer, head=False)
    assert any(entry.kind == "residuals" for entry in report(layer).patched)
    torch.testing.assert_close(results(), expected)


def test_a_report_after_a_linear_was_wrapped():
    layer = apply(OwnLayer(), head=False)
    layer.mlp.gate = nn.Sequential(layer.mlp.gate)  # as an adapter
    assert {entry.kind for entry in report(layer) if entry.is_patched} >= {"residuals", "norm", "mlp"}


def test_residuals_under_compile_and_in_copies(monkeypatch):
    layer, x = apply(OwnLayer().double(), head=False), torch.randn(2, 5, 32, dtype=torch.float64)
    expected = results_of(layer, x)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert residuals_of(monkeypatch, lambda other=other: results_of(other, x)) == dict(rms_norm=1, mlp=1)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    assert residuals_of(monkeypatch, lambda: results_of(compiled, x)) == dict(rms_norm=0, mlp=0)
    torch.testing.assert_close(results_of(compiled, x), expected)
    assert residuals_of(monkeypatch, lambda: results_of(applied_without(layer), x))["rms_norm"] == 0


def applied_without(layer: nn.Module) -> nn.Module:
    return apply(revert(layer), head=False, residuals=False)
