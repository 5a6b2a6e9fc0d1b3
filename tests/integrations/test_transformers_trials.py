"""Which norms, losses and experts quackish.integrations.transformers accepts, and what its trials leave alone."""

import copy
import pickle
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import quackish
from tests import idle_kernels
from tests.integrations.test_transformers import SIZES, V, assert_same_step, interleaved, step, tiny

transformers = pytest.importorskip("transformers", minversion="5")
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm  # noqa: E402
from transformers.models.idefics.modeling_idefics import IdeficsRMSNorm  # noqa: E402
from transformers.models.llama.modeling_llama import LlamaRMSNorm  # noqa: E402
from transformers.models.llama4.modeling_llama4 import Llama4TextL2Norm  # noqa: E402

from quackish.integrations.transformers import (  # noqa: E402
    applied,
    apply,
    experts,
    head,
    mlps,
    norms,
    report,
    residuals,
    revert,
    rotaries,
    scaled_experts,
)

CACHES = norms._formulas, head._trials, experts._forms, mlps._forms, residuals._trials, scaled_experts._forms


def is_patched(module: nn.Module) -> bool:
    return hasattr(type(module), "_quackish_unpatched")


# Norms ----------------------------------------------------------------------------------------------------------------


class OwnNorm(nn.Module):
    """An RMSNorm under another name, as in a model's own code."""

    def __init__(self, size: int = 32, eps: float = 1e-3):
        super().__init__()
        self.weight, self.my_eps = nn.Parameter(torch.ones(size)), eps

    def scaled(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.my_eps)

    def forward(self, x):
        return (self.scaled(x.float()) * self.weight).to(x.dtype)


class MeanSubtracted(OwnNorm):
    def scaled(self, x):
        return super().scaled(x - x.mean(-1, keepdim=True))


class ScaledByMax(OwnNorm):
    def scaled(self, x):
        return x / (x.abs().amax(-1, keepdim=True) + self.my_eps)


class EpsOutside(OwnNorm):
    def scaled(self, x):
        return x / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.my_eps)


class EpsOnlyAtInit(OwnNorm):
    def scaled(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-3)


class Grouped(OwnNorm):
    def scaled(self, x):
        return super().scaled(x.unflatten(-1, (2, -1))).flatten(-2)


class WeightFirst(OwnNorm):
    def forward(self, x):
        return self.scaled(x.float() * self.weight).to(x.dtype)


class DetachedRms(OwnNorm):  # equal results, another gradient
    def scaled(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.my_eps).detach()


class OtherInEvaluation(OwnNorm):
    def forward(self, x):
        return super().forward(x) * (1.0 if self.training else 2.0)


class WithGate(OwnNorm):
    def forward(self, x, gate=None):
        return super().forward(x)


class HalfOutput(OwnNorm):
    def forward(self, x):
        return super().forward(x).half()


ACCEPTED = {
    "own": OwnNorm,
    "Llama": lambda: LlamaRMSNorm(32),
    "Gemma": lambda: Gemma2RMSNorm(32),
    "16-bit weight": lambda: IdeficsRMSNorm(32),
    "no weight": Llama4TextL2Norm,
    "torch": lambda: nn.RMSNorm(32),
    "torch, eps": lambda: nn.RMSNorm(32, eps=1e-2),
    "torch, no weight": lambda: nn.RMSNorm(32, elementwise_affine=False),
}


@pytest.mark.parametrize("name", ACCEPTED)
@pytest.mark.parametrize("dtypes", [("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float32")])
def test_patched_norms(name, dtypes):
    """Results and gradients, with another eps after apply, as attributes are read at every call."""
    x_dtype, weight_dtype = (getattr(torch, dtype) for dtype in dtypes)
    torch.manual_seed(0)
    norm = ACCEPTED[name]().to(weight_dtype)
    model = nn.Sequential(norm)
    for p in norm.parameters():
        nn.init.normal_(p)
    plain = copy.deepcopy(norm)
    apply(model, head=False)
    assert is_patched(norm)
    for module in (norm, plain):
        for attribute in ("eps", "variance_epsilon", "my_eps"):
            if getattr(module, attribute, None) is not None:
                setattr(module, attribute, 0.3)
    x = torch.randn(3, 5, 32).mul(torch.tensor([[1e-4], [1e-2], [1.0], [1.0], [1e2]])).to(x_dtype)
    results = []
    for module in (norm, plain):
        leaf = x.clone().requires_grad_()
        y = module(leaf)
        y.float().square().sum().backward()
        results.append([y, leaf.grad, *[p.grad for p in module.parameters()]])
    close = 1e-5 if x_dtype == torch.float32 else 2e-2
    for got, expected in zip(*results, strict=True):
        assert got.dtype == expected.dtype
        assert (got.float() - expected.float()).abs().max() <= close * expected.float().abs().max()


LEFT = {
    MeanSubtracted: "y differs from RMSNorm",
    ScaledByMax: "y differs from RMSNorm",
    EpsOutside: "y differs from RMSNorm",
    EpsOnlyAtInit: "y differs from RMSNorm",
    Grouped: "y differs from RMSNorm",
    WeightFirst: "y differs from RMSNorm",
    DetachedRms: "the gradient of x differs from RMSNorm",
    OtherInEvaluation: "y differs from RMSNorm",
    WithGate: r"its forward takes \(x, gate\), expected one tensor",
    HalfOutput: "y has dtype torch.float16 for x in torch.float32",
    nn.LayerNorm: r"it has parameters weight \(32,\), bias \(32,\)",
}


@pytest.mark.parametrize("kind", LEFT)
def test_norms_that_compute_something_else(kind):
    model = nn.Sequential(kind(32), nn.RMSNorm(32))
    apply(model, head=False)
    assert not is_patched(model[0])
    assert is_patched(model[1])
    entry = report(model)[0]
    assert (entry.name, entry.is_patched) == ("0", False)
    assert re.search(LEFT[kind], entry.reason), entry.reason


def test_norms_with_another_private_attribute():
    """One trial does not count for both."""

    class Switched(OwnNorm):
        _subtracts_mean = False

        def scaled(self, x):
            return super().scaled(x - x.mean(-1, keepdim=True) if self._subtracts_mean else x)

    model = nn.Sequential(Switched(), Switched())
    model[1]._subtracts_mean = True
    apply(model, head=False)
    assert [is_patched(norm) for norm in model] == [True, False]


# Losses ---------------------------------------------------------------------------------------------------------------


class Model(transformers.LlamaForCausalLM):
    """Llama with another way from hidden states to the loss. The functions get what forward has as self."""

    def forward(self, input_ids=None, labels=None, logits_to_keep=0, **kwargs):
        hidden = self.model(input_ids=input_ids).last_hidden_state
        logits = self.logits_of(self, hidden)
        loss = self.loss_of(self, logits, labels, hidden, **kwargs)
        return transformers.modeling_outputs.CausalLMOutputWithPast(loss, logits)

    @staticmethod
    def logits_of(model, hidden):
        return model.lm_head(hidden)

    @staticmethod
    def loss_of(model, logits, labels, hidden, **kwargs):
        return model.loss_function(logits=logits, labels=labels, vocab_size=model.config.vocab_size, **kwargs)


def with_logits(name, logits_of):
    return type(name, (Model,), dict(logits_of=staticmethod(logits_of)))


def with_loss(name, loss_of):
    return type(name, (Model,), dict(loss_of=staticmethod(loss_of)))


def two_losses(model, logits, labels, hidden, **kwargs):
    ahead = model.loss_function(model.lm_head(hidden.roll(1, 1)), labels, V, **kwargs)
    return Model.loss_of(model, logits, labels, hidden, **kwargs) + 0.25 * ahead


def capped(model, hidden):
    logits = model.lm_head(hidden).float() * model.config.scale
    return 0.5 * (torch.tanh(logits / model.config.cap) * model.config.cap)


OURS = [
    Model,
    with_logits("ScaledHidden", lambda model, hidden: model.lm_head(hidden / 3)),
    with_logits("Capped", capped),
    with_loss("TwoLosses", two_losses),
    with_loss("Unshifted", lambda *args, **kwargs: Model.loss_of(*args, shift_labels=args[2])),
]


class Helper(Model):
    """A method of its own, whose self is the model."""

    def head(self, hidden):
        return self.lm_head(hidden)

    @staticmethod
    def logits_of(model, hidden):
        return model.head(hidden)


class Delegating(transformers.LlamaForCausalLM):
    """All of its forward is a method, whose self is the model."""

    def forward(self, input_ids=None, labels=None, logits_to_keep=0, **kwargs):
        return self.run(input_ids=input_ids, labels=labels, **kwargs)

    def run(self, **kwargs):
        return transformers.LlamaForCausalLM.forward(self, **kwargs)


def own_model(kind: type) -> nn.Module:
    config = transformers.LlamaConfig(**SIZES)
    config.scale, config.cap = 2.0, 3.0
    torch.manual_seed(0)
    model = kind(config).train()
    for p in model.parameters():
        nn.init.normal_(p, std=0.3)
    return model


@pytest.mark.parametrize("kind", OURS, ids=lambda kind: kind.__name__)
def test_own_forwards_with_a_loss_of_ours(kind):
    """The scale and the cap are those at the call, not those at apply."""
    model, plain = apply(own_model(kind), strict=True), own_model(kind)
    for _ in range(2):
        got, expected = step(model, num_items_in_batch=7), step(plain, num_items_in_batch=7)
        assert got[0].logits is None
        assert_same_step(got, expected)
        for m in (model, plain):
            m.config.scale, m.config.cap = 0.7, 1.3


NOT_OURS = [
    (with_logits("Bias", lambda model, hidden: model.lm_head(hidden) + 0.5), "unsupported operand type"),
    (with_logits("Squared", lambda model, hidden: model.lm_head(hidden) ** 2), "unsupported operand type"),
    (with_logits("Twice", lambda model, hidden: model.lm_head(hidden).tanh().tanh()), "applies tanh to logits twice"),
    (with_logits("Relu", lambda model, hidden: F.relu(model.lm_head(hidden))), "applies relu to logits"),
    (
        with_logits("Tensor", lambda model, hidden: model.lm_head(hidden) * hidden.mean()),
        "by a Tensor, expected a number",
    ),
    (with_logits("Negative", lambda model, hidden: -2.0 * model.lm_head(hidden)), "logit_scale is -2"),
    (
        with_logits("Weight", lambda model, hidden: F.linear(hidden, model.lm_head.weight)),
        "computed from a Tensor, exp",
    ),
    (Delegating, "its forward does not compute logits with self.lm_head, or not the loss with self.loss_function"),
    (Helper, "computed from a Tensor, expected lm_head's logits"),
    (
        with_loss("OwnLoss", lambda model, logits, labels, hidden, **kwargs: logits.logsumexp(-1).mean()),
        "logits.logsumexp, which",
    ),
    (
        with_loss("More", lambda *args, **kwargs: Model.loss_of(*args, **kwargs) + args[1].mean()),
        "logits.mean, which takes",
    ),
    (
        with_loss("Evaluation", lambda *args, **kwargs: Model.loss_of(*args, **kwargs) * (2 - args[0].training)),
        "its loss is not the cross entropy of lm_head's logits",
    ),
]


@pytest.mark.parametrize("kind, reason", NOT_OURS, ids=lambda value: getattr(value, "__name__", ""))
def test_forwards_with_another_loss(kind, reason):
    model = own_model(kind)
    (entry,) = [entry for entry in report(model) if entry.kind == "loss"]
    assert reason in entry.reason
    apply(model)
    assert not is_patched(model)
    assert is_patched(model.model.norm)
    assert_same_step(step(model), step(own_model(kind)), has_logits=True)


# Experts --------------------------------------------------------------------------------------------------------------


def gpt_oss() -> nn.Module:
    return tiny("GptOss", output_router_logits=False)


def test_experts_of_gpt_oss(tmp_path):
    """Sorted in memory, while state dicts have the original order; revert restores every bit."""
    model, plain = gpt_oss(), gpt_oss()
    apply(model, experts=True, strict=True)
    twins = [model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    expected, grads = step(plain)
    for twin in twins:
        got, got_grads = step(twin)
        torch.testing.assert_close(got.loss, expected.loss, rtol=1e-5, atol=0)
        for name, truth in grads.items():
            grad = interleaved(got_grads[name]) if "gate_up_proj" in name else got_grads[name]
            assert (grad - truth).abs().max() <= 1e-5 * truth.abs().max() + 1e-8, name
        torch.testing.assert_close(twin.state_dict(), plain.state_dict(), rtol=0, atol=0)
    sorted_weight = model.model.layers[0].mlp.experts.gate_up_proj
    assert not torch.equal(sorted_weight, plain.model.layers[0].mlp.experts.gate_up_proj)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(loaded.state_dict(), plain.state_dict(), rtol=0, atol=0)
    state = {name: t + 1 for name, t in plain.state_dict().items()}
    kept = copy.deepcopy(state)
    model.load_state_dict(state)
    torch.testing.assert_close(state, kept, rtol=0, atol=0)
    revert(model)
    assert [type(module) for module in model.modules()] == [type(module) for module in plain.modules()]
    torch.testing.assert_close(dict(model.named_parameters()), dict(state.items()), rtol=0, atol=0, check_stride=True)


def test_gradients_of_gpt_oss_after_revert():
    """They are put into the original order too, so that an optimizer's step after `applied` is right."""
    model, plain = gpt_oss(), gpt_oss()
    with applied(model, experts=True):
        step(model)
        kept = {name: p.grad for name, p in model.named_parameters()}
    _, grads = step(plain)
    for name, p in model.named_parameters():
        assert p.grad is kept[name]
        if p.grad is not None:
            assert (p.grad - grads[name]).abs().max() <= 1e-5 * grads[name].abs().max() + 1e-8, name


def test_experts_with_another_result_in_evaluation():
    model = tiny("Qwen3Moe")

    class Halved(type(model.model.layers[0].mlp.experts)):
        def forward(self, hidden_states, top_k_index, top_k_weights):
            out = super().forward(hidden_states, top_k_index, top_k_weights)
            return out if self.training else out / 2

    for layer in model.model.layers:
        layer.mlp.experts.__class__ = Halved
    with pytest.raises(NotImplementedError, match=r"experts: Halved .* differs from moe_mlp's"):
        apply(model, experts=True, strict=True)


@pytest.mark.parametrize("limits", [dict(swiglu_limit=3.0), dict(swiglu_alpha=1.5)])
def test_experts_of_gpt_oss_with_other_limits_are_left(limits):
    model = gpt_oss()
    for layer in model.model.layers:
        layer.mlp.experts.limit = limits.get("swiglu_limit", 7.0)
        layer.mlp.experts.alpha = limits.get("swiglu_alpha", 1.702)
    with pytest.raises(NotImplementedError, match=r"GptOssExperts .* differs from moe_mlp's"):
        apply(model, experts=True, strict=True)


def test_experts_below_a_replaced_forward_are_left():
    """It reads their weights, which must stay in their order."""
    model = gpt_oss()
    mlp = model.model.layers[0].mlp
    mlp.forward = mlp.forward
    with pytest.raises(NotImplementedError, match=r"the forward of its GptOssMLP was replaced on the instance"):
        apply(model, experts=True, strict=True)


def test_parametrized_experts_of_gpt_oss():
    """A LoRA of sorted weights would be saved in an order that other programs do not expect."""
    experts = apply(gpt_oss(), experts=True).model.layers[0].mlp.experts
    nn.utils.parametrize.register_parametrization(experts, "gate_up_proj", nn.Identity())
    with pytest.raises(NotImplementedError, match=r"parametrized, as by PEFT.*Call revert\(model\) before"):
        experts(torch.ones(2, 32), torch.zeros(2, 1, dtype=torch.long), torch.ones(2, 1))


@pytest.mark.parametrize("top_k", [1, 2])
def test_experts_of_llama_4(top_k):
    model, plain = (tiny("Llama4", num_experts_per_tok=top_k) for _ in range(2))
    classes = [type(module) for module in model.modules()]
    apply(model, experts=True, strict=True)
    assert "patched" in str(report(model)).split("Llama4TextMoe")[1]
    assert_same_step(step(model), step(plain))
    hidden = torch.randn(5, 32).repeat(4, 1)
    experts = model.model.layers[0].feed_forward.experts
    torch.testing.assert_close(experts(hidden), plain.model.layers[0].feed_forward.experts(hidden))
    assert [type(module) for module in revert(model).modules()] == classes


# Trials ---------------------------------------------------------------------------------------------------------------


def test_trials_leave_the_callers_state_alone():
    """The global random state; under autocast, no_grad, inference mode and a default device and dtype."""
    plain = tiny("Qwen3Moe")
    for context in (
        torch.autocast("cpu", torch.bfloat16), torch.no_grad(), torch.inference_mode(), torch.device("meta"),
    ):  # fmt: skip
        for cache in CACHES:
            cache.clear()
        model = tiny("Qwen3Moe")
        random = torch.get_rng_state()
        with context:
            apply(model, experts=True, strict=True)
        assert torch.equal(torch.get_rng_state(), random)
        assert_same_step(step(model), step(plain))


def test_dropout_in_a_trial():
    """Its loss is random, so it is left; the caller's random state is not used."""
    model = own_model(with_logits("Dropout", lambda model, hidden: model.lm_head(F.dropout(hidden, 0.5))))
    random = torch.get_rng_state()
    (entry,) = [entry for entry in report(model) if entry.kind == "loss"]
    assert torch.equal(torch.get_rng_state(), random)
    assert "its loss is not the cross entropy" in entry.reason


def test_models_compiled_in_place():
    """A trial calls the small copy, not the model's compiled forward."""
    model = tiny("Qwen3Moe")
    for module in model.modules():
        module.compile(backend="eager")
    apply(model, experts=True, strict=True)


def test_models_on_meta():
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    assert len(report(apply(model, strict=True)).patched) == 12


def test_each_class_is_tried_once(monkeypatch):
    for cache in CACHES:
        cache.clear()
    calls = []
    rms_norm = quackish.rms_norm
    monkeypatch.setattr(quackish, "rms_norm", lambda *args, **options: calls.append(1) or rms_norm(*args, **options))
    apply(tiny(num_hidden_layers=1))
    first = len(calls)
    apply(tiny(num_hidden_layers=4))
    assert len(calls) == first > 0
    apply(tiny(num_hidden_layers=1, rms_norm_eps=0.5))
    assert first < len(calls) <= 2 * first


def test_report_and_print():
    model = tiny("Qwen3Moe")
    before = report(model)
    assert {entry.kind for entry in before} == {"norm", "loss", "experts", "rotary", "residuals"}
    assert before.patched == []
    assert "norm: Qwen3MoeRMSNorm (model.layers.0.self_attn.q_norm and 8 more): not patched; apply(model) can" in str(
        before
    )
    assert "quackish" not in str(model)
    apply(model)
    lines = str(report(model)).splitlines()
    assert lines[-1] == "loss: Qwen3MoeForCausalLM (the model): patched"
    assert sum("experts" in line and "not patched" in line for line in lines) == 1
    assert "(norm): Qwen3MoeRMSNorm[quackish]((32,), eps=1e-06)" in str(model)
    assert "(lm_head): Linear[quackish](" in str(model)


# MLPs -----------------------------------------------------------------------------------------------------------------


class OwnMlp(nn.Module):
    """A gated MLP with its own names, as in a model's own code."""

    def __init__(self, hidden: int = 32, inner: int = 40, bias: bool = True):
        super().__init__()
        self.out = nn.Linear(inner, hidden, bias=bias)
        self.value, self.gate = nn.Linear(hidden, inner), nn.Linear(hidden, inner, bias=False)

    def act(self, t):
        return F.silu(t)

    def forward(self, x):
        return self.out(self.value(x) * self.act(self.gate(x)))


class Fused(OwnMlp):
    def __init__(self, hidden: int = 32, inner: int = 32):  # a square down projection
        super().__init__()
        del self.value
        self.out, self.gate = nn.Linear(inner, hidden, bias=False), nn.Linear(hidden, 2 * inner)

    def forward(self, x):
        gate, up = self.gate(x).chunk(2, -1)
        return self.out(self.act(gate) * up)


class UpFirst(Fused):
    def forward(self, x):
        up, gate = self.gate(x).chunk(2, -1)
        return self.out(self.act(gate) * up)


class Plain(OwnMlp):
    def __init__(self):
        super().__init__()
        del self.value

    def forward(self, x):
        return self.out(self.act(self.gate(x)))


class ExactGelu(Plain):
    def act(self, t):
        return F.gelu(t)


class TanhGelu(OwnMlp):
    def act(self, t):
        return F.gelu(t, approximate="tanh")


class QuickGelu(Plain):
    def act(self, t):
        return t * torch.sigmoid(1.702 * t)


class WithDropout(Plain):
    def forward(self, x):
        return F.dropout(super().forward(x), 0.1, self.training)


class Multiplied(OwnMlp):
    def forward(self, x):
        return super().forward(x) * 1.01


class TwoArguments(OwnMlp):
    def forward(self, x, residual):
        return super().forward(x) + residual


@pytest.mark.parametrize(
    "kind, form",
    [
        (OwnMlp, ("swiglu", "gate", "value", "out")),
        (Fused, ("swiglu", "gate", None, "out")),
        (Plain, ("silu", "gate", None, "out")),
        (ExactGelu, ("gelu_erf", "gate", None, "out")),
        (TanhGelu, ("geglu", "gate", "value", "out")),
        *((kind, None) for kind in (UpFirst, QuickGelu, WithDropout, Multiplied)),
    ],
)
def test_which_mlps_are_patched(kind, form):
    module = kind()
    entry, loss = report(module)
    assert (entry.kind, loss.kind) == ("mlp", "loss")
    if form is None:
        assert re.search(r"differs from mlp's by", entry.reason)
        return
    assert mlps.form_of(module)[:4] == form
    x = torch.randn(2, 7, 32, requires_grad=True)
    want = module(x)
    grads = torch.autograd.grad(want.sum(), [x, *module.parameters()])
    with applied(module, head=False):
        got = module(x)
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(torch.autograd.grad(got.sum(), [x, *module.parameters()]), grads)
    assert type(module) is kind


class Swish(nn.Module):
    """Its parameter is not in its repr."""

    def __init__(self, beta):
        super().__init__()
        self.beta = beta

    def forward(self, t):
        return t * torch.sigmoid(self.beta * t)


class WithModule(OwnMlp):
    def __init__(self, beta=1.0):
        super().__init__()
        self.function = Swish(beta)

    def act(self, t):
        return self.function(t)


def test_a_trial_depends_on_the_attributes_of_submodules():
    assert mlps.form_of(WithModule(1.0)).activation == "swiglu"
    assert "differs from mlp's by" in mlps.form_of(WithModule(2.0))


def test_an_activation_that_changed_runs_the_mlps_own_forward():
    module, x, seen = apply(WithModule(), head=False), torch.randn(3, 32), []
    module(x)
    hook = module.function.register_forward_hook(lambda *args: seen.append(1))
    module(x)
    assert seen == [1]
    hook.remove()
    module.function = nn.ReLU()
    torch.testing.assert_close(module(x), WithModule.forward(module, x), rtol=0, atol=0)
    assert "its function is a ReLU" in report(module)[0].reason


class Converts(OwnMlp):
    def forward(self, x):
        return super().forward(x.to(self.gate.weight.dtype))


def test_dtypes_that_an_mlp_converts():
    module, x = apply(Converts().bfloat16(), head=False), torch.randn(3, 32)
    assert torch.equal(module(x), Converts.forward(module, x))
    with pytest.raises(RuntimeError, match="dtype"):  # PyTorch's own error
        apply(OwnMlp().bfloat16(), head=False)(x)


def test_modules_that_are_no_mlps_are_not_named():
    for module in TwoArguments(), nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 5)):
        assert [entry.kind for entry in report(module)] == ["loss"]


def reparametrized(module):
    torch.nn.utils.parametrizations.weight_norm(module.gate)


BYPASSES = {
    "adapted": lambda m: setattr(m, "gate", type("Adapted", (nn.Linear,), {})(32, 40, bias=False)),
    "hook": lambda m: m.out.register_forward_hook(lambda module, args, output: output * 2),
    "hook before": lambda m: m.value.register_forward_pre_hook(lambda module, args: None),
    "replaced": lambda m: setattr(m.gate, "forward", lambda x: 2 * F.linear(x, m.gate.weight)),
    "parametrized": reparametrized,
    "another": lambda m: setattr(m, "value", nn.Sequential(m.value)),
}


@pytest.mark.parametrize("name", BYPASSES)
def test_an_mlp_whose_linears_changed_runs_its_own_forward(name, monkeypatch):
    module, x = apply(OwnMlp(), head=False), torch.randn(3, 32)
    calls, mlp = [], quackish.mlp
    monkeypatch.setattr(quackish, "mlp", lambda *args, **options: calls.append(1) or mlp(*args, **options))
    module(x)
    assert calls == [1]
    BYPASSES[name](module)
    torch.testing.assert_close(module(x), OwnMlp.forward(module, x), rtol=0, atol=0)
    assert calls == [1]
    entry, _ = report(module)
    assert entry.is_patched
    assert re.match("gate|value|out|its (gate|value) is a", entry.reason)


def test_compiled_code_and_meta_tensors_run_the_mlps_own_forward(monkeypatch):
    module, x = apply(OwnMlp(), head=False), torch.randn(3, 32)
    assert copy.deepcopy(module).to("meta")(x.to("meta")).shape == x.shape
    monkeypatch.setattr(quackish, "mlp", None)
    torch.testing.assert_close(torch.compile(module, backend="eager", fullgraph=True)(x), OwnMlp.forward(module, x))


def test_without_a_kernel_the_models_own_code_runs(monkeypatch):
    """As on GPUs that no kernel is for."""
    monkeypatch.setattr(rotaries, "backend_for", lambda t: "cute")
    monkeypatch.setattr(mlps, "backend_for", lambda t: "cute")
    model = tiny()
    expected = step(model)
    apply(model, norms=False, head=False)
    output, grads = step(model)
    assert torch.equal(output.loss, expected[0].loss)
    assert all(torch.equal(grads[name], grad) for name, grad in expected[1].items())


def test_an_mlp_on_kernels():
    module = apply(OwnMlp().bfloat16(), head=False)
    with idle_kernels.on_cpu() as launches:
        module(torch.randn(2, 3, 32, dtype=torch.bfloat16)).sum().backward()
    assert {launch.kernel for launch in launches} == {"grouped_gemm", "gemm"}  # the latter for weights and biases
    assert len(launches) == 8  # two products, the activation's gradient, three of weights and two of biases


# Rotary embeddings ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "family, form",
    [
        ("Llama", ("halves", "full", False)),
        ("Cohere", ("interleaved", "full", False)),
        ("GptOss", ("halves", "half", False)),
        ("Phi3", ("halves", "full", True)),
    ],
)
def test_which_rotary_functions_are_computed(family, form, monkeypatch):
    model = tiny(family)
    attention, expected = model.model.layers[0].self_attn, step(model)
    assert rotaries.forms_of(attention) == (("apply_rotary_pos_emb", *form),)
    calls, rotary = [], quackish.rotary
    monkeypatch.setattr(quackish, "rotary", lambda *args, **options: calls.append(1) or rotary(*args, **options))
    with applied(model, norms=False, head=False, mlp=False):
        assert_same_step(step(model), expected, has_logits=True)
    assert calls == [1] * model.config.num_hidden_layers


def glm_like(q, k, cos, sin, unsqueeze_dim=1):
    """Rotates pairs of the first elements, with the first half of the tables."""
    cos, sin = (t[..., : t.shape[-1] // 2].repeat_interleave(2, -1).unsqueeze(unsqueeze_dim) for t in (cos, sin))
    width, results = cos.shape[-1], []
    for t in (q, k):
        turned = torch.stack([-t[..., 1:width:2], t[..., :width:2]], -1).flatten(-2)
        results.append(torch.cat([t[..., :width] * cos + turned * sin, t[..., width:]], -1))
    return tuple(results)


def deepseek_like(q, k, cos, sin, unsqueeze_dim=1):
    """Reads pairs and writes halves."""
    results = []
    for t in (q, k):
        t = t.unflatten(-1, (-1, 2)).mT.flatten(-2)
        turned = torch.cat([-t.chunk(2, -1)[1], t.chunk(2, -1)[0]], -1)
        results.append(t * cos.unsqueeze(unsqueeze_dim) + turned * sin.unsqueeze(unsqueeze_dim))
    return tuple(results)


def other_way_around(q, k, cos, sin, unsqueeze_dim=1):
    return deepseek_like(q, k, cos, -sin, unsqueeze_dim)


def keys_scaled(q, k, cos, sin, unsqueeze_dim=1):
    q, k = deepseek_like(q, k, cos, sin, unsqueeze_dim)
    return q, 1.001 * k


def other_arguments(x, cos, sin):
    return x * cos


apply_rotary_pos_emb = None  # of OwnAttention; the tests set it


class OwnAttention(nn.Module):
    def forward(self, q, k, cos, sin, **options):
        return apply_rotary_pos_emb(q, k, cos, sin, **options)


class CallsSuper(OwnAttention):
    def forward(self, *args):
        return super().forward(*args)


def tables(d=16, batch=2, length=5):
    q, k = torch.randn(batch, 4, length, d), torch.randn(batch, 2, length, d)
    return q, k, torch.randn(batch, length, d), torch.randn(batch, length, d)


@pytest.mark.parametrize(
    "function, form",
    [
        (glm_like, ("interleaved", "first half", True)),
        (deepseek_like, ("interleaved_to_halves", "full", False)),
        (other_way_around, "differs from rotary's by"),
        (keys_scaled, "differs from rotary's by"),
        (other_arguments, r"its apply_rotary_pos_emb takes \(x, cos, sin\), expected q, k, cos and sin"),
    ],
)
def test_rotary_functions_of_own_attentions(function, form, monkeypatch):
    monkeypatch.setitem(globals(), "apply_rotary_pos_emb", function)
    module = OwnAttention()
    found = rotaries.forms_of(module)
    if isinstance(form, str):
        assert re.search(form, found)
        return
    assert found == (("apply_rotary_pos_emb", *form),)
    q, k, cos, sin = tables()
    with applied(module, head=False):
        for width in (16, 8) if form[2] else (16,):
            arguments = q, k, cos[..., :width], sin[..., :width]
            for got, want in zip(module(*arguments), function(*arguments), strict=True):
                torch.testing.assert_close(got, want)


apply_rotary_pos_emb_interleave = deepseek_like  # of CallsTwo


class CallsTwo(OwnAttention):
    is_interleaved = True

    def forward(self, *args):
        return apply_rotary_pos_emb_interleave(*args) if self.is_interleaved else apply_rotary_pos_emb(*args)


@pytest.mark.parametrize("other", [glm_like, keys_scaled])
def test_attentions_that_call_one_of_two_functions(other, monkeypatch):
    monkeypatch.setitem(globals(), "apply_rotary_pos_emb", other)
    module, calls, rotary = apply(CallsTwo(), head=False), [], quackish.rotary
    monkeypatch.setattr(quackish, "rotary", lambda *args, **options: calls.append(1) or rotary(*args, **options))
    for module.is_interleaved in (True, False):
        function, arguments = deepseek_like if module.is_interleaved else other, tables()
        torch.testing.assert_close(module(*arguments), function(*arguments))
    assert calls == [1] * (2 if other is glm_like else 1)


def test_calls_that_rotary_does_not_cover_run_the_files_function(monkeypatch):
    monkeypatch.setitem(globals(), "apply_rotary_pos_emb", deepseek_like)
    module, calls, rotary = apply(OwnAttention(), head=False), [], quackish.rotary
    monkeypatch.setattr(quackish, "rotary", lambda *args, **options: calls.append(1) or rotary(*args, **options))
    q, k, cos, sin = tables()
    module(q, k, cos, sin)
    assert calls == [1]
    module(q.transpose(1, 2), k.transpose(1, 2), cos, sin, unsqueeze_dim=2)
    module(q, k, cos.requires_grad_(), sin)
    cos = cos.detach()
    assert module(q.bfloat16(), k.bfloat16(), cos, sin)[0].dtype == torch.float32
    torch.compile(module, backend="eager", fullgraph=True)(q, k, cos, sin)
    monkeypatch.setitem(globals(), "apply_rotary_pos_emb", lambda *args: "a mock")  # bound after apply
    assert module(q, k, cos, sin) == "a mock"
    assert "apply_rotary_pos_emb of its file was replaced" in report(module)[0].reason
    assert calls == [1]
    assert [entry.kind for entry in report(CallsSuper())] == ["loss"]
    monkeypatch.setitem(globals(), "apply_rotary_pos_emb", deepseek_like)
    assert module(*(t.to("meta") for t in (q, k, cos, sin)))[0].shape == q.shape


def test_a_rotation_on_kernels():
    model = apply(tiny().bfloat16(), norms=False, head=False, mlp=False)
    with idle_kernels.on_cpu() as launches:
        step(model)
    assert [launch.kernel for launch in launches] == ["rotary"] * 4  # two layers, forward and backward
