"""Transformers' models with and without quackish: tiny, with random weights."""

import collections
import copy
import dataclasses
import pickle
import subprocess
import sys
import types

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import quackish
from tests.cuda_graphs import captured, no_synchronization

transformers = pytest.importorskip("transformers", minversion="5")
from quackish.device import kernel_device  # noqa: E402
from quackish.errors import UnsupportedError  # noqa: E402
from quackish.gpu import H100  # noqa: E402
from quackish.integrations.transformers import applied, apply, experts, report, revert, subclass  # noqa: E402
from quackish.integrations.transformers.experts import form_of  # noqa: E402

V = 97
SIZES = dict(
    vocab_size=V, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
MOE = dict(
    output_router_logits=True, num_experts=4, num_local_experts=4, num_experts_per_tok=2, moe_intermediate_size=24,
    decoder_sparse_step=1, shared_expert_intermediate_size=16,
)  # fmt: skip
GEMMA = dict(head_dim=8, query_pre_attn_scalar=8)
OPTIONS = {
    "Cohere": dict(use_qk_norm=True),
    "Gemma": GEMMA,
    "Gemma2": dict(GEMMA, final_logit_softcapping=3.0),
    "Gemma3": dict(GEMMA, final_logit_softcapping=3.0),
    "GptOss": dict(head_dim=8),
    "Granite": dict(logits_scaling=4.0),
    "Llama4": dict(head_dim=8, intermediate_size_mlp=48, num_local_experts=4, interleave_moe_layer_step=1),
    "Mixtral": MOE,
    "Olmoe": MOE,
    "Qwen2Moe": MOE,
    "Qwen3": dict(head_dim=8),
    "Qwen3Moe": dict(MOE, head_dim=8),
}


def tiny(family: str = "Llama", **options) -> nn.Module:
    """The same weights in every call, in training mode."""
    name = f"{family}TextConfig" if family in ("Gemma3", "Llama4") else f"{family}Config"
    config = getattr(transformers, name)(**{**SIZES, **OPTIONS.get(family, {}), **options})
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).train()
    for p in model.parameters():
        nn.init.normal_(p, std=0.2) if p.dim() > 1 else nn.init.normal_(p, mean=0.5, std=0.3)
    return model


def tokens(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, V, shape or (2, 9), generator=torch.Generator().manual_seed(seed))


def batch() -> dict[str, torch.Tensor]:
    ids = tokens()
    labels = ids.clone()
    labels[0, :4] = -100
    return dict(input_ids=ids, labels=labels)


def step(model: nn.Module, **inputs):
    """The output, and every gradient."""
    model.zero_grad()
    output = model(**batch() | inputs)
    output["loss"].sum().backward()
    return output, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_step(got, expected, close=1e-5, has_logits=False):
    """Compares loss, its shape and class, and gradients within `close` of their largest elements."""
    (output, grads), (plain_output, plain_grads) = got, expected
    assert isinstance(output, type(plain_output))
    assert list(output) == [name for name in plain_output if name != "logits" or has_logits]
    assert output["loss"].shape == plain_output["loss"].shape
    torch.testing.assert_close(output["loss"], plain_output["loss"], rtol=close, atol=0)
    assert grads.keys() == plain_grads.keys()
    for name, grad in grads.items():
        truth = plain_grads[name]
        assert (grad - truth).abs().max() <= close * truth.abs().max() + 1e-8, name


FAMILIES = [
    "Cohere", "Cohere2", "Gemma", "Gemma2", "Gemma3", "Granite", "Llama", "Mistral", "Mixtral", "Olmo", "Olmo2",
    "Olmo3", "Olmoe", "Phi", "Phi3", "Qwen2", "Qwen2Moe", "Qwen3", "Qwen3Moe", "SmolLM3",
]  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_step_matches_unpatched_model(family):
    model, plain = tiny(family), tiny(family)
    classes = [type(module) for module in model.modules()]
    keys = list(model.state_dict())
    with applied(model, chunk_size=5):
        patched = {type(m).__name__ for m in model.modules() if hasattr(type(m), "_quackish_unpatched")}
        names = {type(m).__name__ for m in plain.modules()}
        parts = {f"{family}{part}" for part in ("RMSNorm", "MLP", "Attention", "DecoderLayer")}
        parts -= {"Olmo2DecoderLayer", "Olmo3DecoderLayer", "PhiDecoderLayer"}  # they add after norms and dropout
        assert patched == {f"{family}ForCausalLM", "Linear", *(parts & names)}
        got, expected = step(model), step(plain)
        assert_same_step(got, expected)
        if plain.config.to_dict().get("output_router_logits"):
            assert len(got[0].router_logits) == 2
            torch.testing.assert_close(got[0].aux_loss, expected[0].aux_loss, rtol=1e-5, atol=0)
        assert list(model.state_dict()) == keys
        model.eval(), plain.eval()
        torch.testing.assert_close(model(**batch()).logits, plain(**batch()).logits, rtol=1e-5, atol=1e-5)
    assert [type(module) for module in model.modules()] == classes


def interleaved(grad: torch.Tensor) -> torch.Tensor:
    """[gate; up], as quackish sorts gpt-oss's weights, in gpt-oss's order."""
    return torch.stack(grad.chunk(2, dim=-1), dim=-1).flatten(-2)


@pytest.mark.parametrize("family", ["Mixtral", "Olmoe", "Qwen2Moe", "Qwen3Moe"])
def test_step_with_experts_matches_unpatched_model(family, monkeypatch):
    calls = []
    moe_mlp = quackish.moe_mlp
    monkeypatch.setattr(quackish, "moe_mlp", lambda *args, **options: calls.append(args) or moe_mlp(*args, **options))
    model, plain = tiny(family), tiny(family)
    classes = [type(module) for module in model.modules()]
    with applied(model, experts=True):
        calls.clear()  # trials
        assert_same_step(step(model), step(plain))
        assert len(calls) == 2  # one per layer
        with torch.autocast("cpu", torch.bfloat16):
            dtypes = {m.model.layers[0].mlp(torch.ones(1, 1, 32)).dtype for m in (model, plain)}
            assert dtypes == {torch.float32}
        with pytest.raises(ValueError, match="patched by quackish already"):
            apply(model, norms=False, head=False, experts=True)
    assert [type(module) for module in model.modules()] == classes
    assert_same_step(step(apply(model)), step(plain))
    assert len(calls) == 3


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    "family, experts",
    [
        *((family, False) for family in ("Llama", "Gemma2", "Qwen3Moe")),
        ("Qwen3Moe", True),
        ("GptOss", True),
        ("Llama4", True),
    ],
)
@pytest.mark.filterwarnings("error::quackish.errors.PortablePathWarning")
def test_bf16_error_is_within_that_of_unpatched_model(family, experts, device):
    plain = tiny(family).to(device, torch.bfloat16)
    inputs = {name: t.to(device) for name, t in batch().items()}
    truth, grads_truth = step(copy.deepcopy(plain).float(), **inputs)
    expected, grads_expected = step(plain, **inputs)
    # not rotary: in these small models its other roundings, which are fewer, send tokens to other experts
    got, grads_got = step(apply(plain, experts=experts, rotary=False, strict=True), **inputs)
    if family == "GptOss":
        grads_got = {name: interleaved(grad) if "gate_up" in name else grad for name, grad in grads_got.items()}
    assert got.loss.dtype == torch.float32
    # one number, or a bias of few elements, may have a small error by luck
    assert (got.loss - truth.loss).abs() <= 1.5 * (expected.loss - truth.loss).abs() + 2**-9 * truth.loss
    for name, grad in grads_truth.items():
        error, allowed = ((grads[name].float() - grad).norm() for grads in (grads_got, grads_expected))
        assert grads_got[name].dtype == torch.bfloat16
        assert error <= 1.5 * allowed + 2**-7 * grad.norm(), name


@pytest.mark.parametrize("family", ["Qwen3", "Gemma2", "Olmo2"])
def test_autocast_keeps_dtypes(family):
    model, dtypes = tiny(family), collections.defaultdict(set)
    for name, module in model.model.named_modules():
        if list(module.parameters(recurse=False)):
            module.register_forward_hook(lambda module, _, output, name=name: dtypes[name].add(output.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(**batch(), skip_logits=False)
        with applied(model):
            got = model(**batch())
    assert {name for name, seen in dtypes.items() if len(seen) > 1} == set()
    torch.testing.assert_close(got.loss, expected.loss, rtol=1e-2, atol=0)


def test_arguments_of_the_loss():
    model, plain = apply(tiny()), tiny()
    shifted = nn.functional.pad(batch()["labels"][:, 1:], (0, 1), value=-100)
    for arguments in (
        dict(num_items_in_batch=7),
        dict(num_items_in_batch=torch.tensor(7)),
        dict(num_items_in_batch=torch.tensor(7.0)),
        dict(num_items_in_batch=torch.tensor([7])),  # DataParallel
        dict(num_items_in_batch=torch.tensor([[7]])),
        dict(num_items_in_batch=torch.tensor([7, 3])),
        dict(num_items_in_batch=7.5),
        dict(ignore_index=5, labels=batch()["labels"].clamp(5)),
        dict(shift_labels=shifted.roll(1, 0).reshape(-1)),
        dict(attention_mask=torch.ones(2, 9).tril(6), output_hidden_states=True),
    ):
        got, expected = step(model, **arguments), step(plain, **arguments)
        assert_same_step(got, expected)
    as_tuple = model(tokens(), None, labels=tokens(), return_dict=False)
    torch.testing.assert_close(as_tuple[0], plain(tokens(), labels=tokens()).loss)
    assert type(as_tuple) is tuple
    output = model(tokens(), labels=tokens())
    cache = type(output.past_key_values)
    assert [type(part) for part in as_tuple] == [torch.Tensor, type(None), cache]  # None in the place of logits
    assert [type(part) for part in output[:]] == [torch.Tensor, type(None), cache]
    assert output[1] is None
    assert list(output) == [name for name in plain(**batch()) if name != "logits"]
    assert type(pickle.loads(pickle.dumps(output))) is type(plain(tokens()))
    only_shifted = model(tokens(), shift_labels=shifted).loss
    torch.testing.assert_close(only_shifted, plain(**batch()).loss)


@pytest.mark.parametrize("name", ["labels", "shift_labels"])
def test_labels_with_wrong_shape(name):
    with pytest.raises(ValueError, match=r"labels have shape \(2, 8\), expected \(2, 9\)"):
        apply(tiny())(tokens(), **{name: tokens(2, 8)})


@pytest.mark.parametrize("family", ["Llama", "Qwen3Moe"])
def test_arguments_of_trl(family):
    model = apply(tiny(family))
    inputs = dict(batch(), num_items_in_batch=torch.tensor(7), return_token_accuracy=True, use_token_scaling=False)
    output = model(**inputs, skip_logits=True)
    with_logits = model(**inputs, skip_logits=False)
    target = inputs["labels"][:, 1:]
    target[:] = torch.where(target == -100, target, with_logits.logits.argmax(-1)[:, :-1])  # all predicted, except:
    target[1, :3] = (target[1, :3] + 1) % V
    output = model(**inputs, skip_logits=True)
    assert output.logits is None
    torch.testing.assert_close(output.token_accuracy, torch.tensor(10 / 13))
    leaves, structure = torch.utils._pytree.tree_flatten(output)  # as FSDP does
    assert torch.utils._pytree.tree_unflatten(leaves, structure).token_accuracy is output.token_accuracy
    for training in (True, False):
        with pytest.raises(NotImplementedError, match="use_token_scaling is True, expected False"):
            model.train(training)(tokens(), labels=tokens(), use_token_scaling=True)


def test_logits_on_request():
    model, plain = apply(tiny()), tiny()
    ids = tokens()
    assert model(ids, labels=ids).logits is None
    for arguments in (dict(), dict(labels=ids, skip_logits=False)):
        torch.testing.assert_close(model(ids, **arguments).logits, plain(ids).logits)
    assert model(ids, labels=ids[:, -2:], logits_to_keep=2).logits.shape == (2, 2, V)
    model.eval()
    assert model(ids, labels=ids).logits is not None
    assert model(ids, labels=ids, skip_logits=True).logits is None
    model.loss_function = lambda logits, labels, vocab_size, **kwargs: logits.sum()  # the user's own loss
    assert model(ids, labels=ids, skip_logits=True).logits is not None


def test_generate_and_save_pretrained(tmp_path):
    model, plain = apply(tiny()), tiny()
    prompt = tokens(1, 4)
    torch.testing.assert_close(
        model.eval().generate(prompt, max_new_tokens=5, do_sample=False),
        plain.eval().generate(prompt, max_new_tokens=5, do_sample=False),
    )
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.architectures == ["LlamaForCausalLM"]
    assert type(loaded) is transformers.LlamaForCausalLM
    torch.testing.assert_close(loaded.state_dict(), plain.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("tied", [False, True])
def test_checkpointing_and_a_resized_vocabulary(tied):
    model, plain = apply(tiny(tie_word_embeddings=tied)), tiny(tie_word_embeddings=tied)
    for m in (model, plain):
        torch.manual_seed(2)
        m.resize_token_embeddings(V + 6)
        m.gradient_checkpointing_enable()
    labels = tokens() + 6
    assert_same_step(step(model, labels=labels), step(plain, labels=labels))
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied


def test_copies_use_their_own_parameters():
    model = apply(tiny())
    twin = copy.deepcopy(model)
    revert(model)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    output, _ = step(twin)
    assert output.logits is None
    torch.testing.assert_close(output.loss, tiny()(**batch()).loss)
    replica = twin.model.norm._replicate_for_data_parallel()
    replica.weight = torch.zeros(32)
    assert replica(torch.ones(2, 32)).count_nonzero() == 0


def patched_model(family, experts):
    """A patched model, and the classes that its modules had before."""
    # Transformers records no router logits of an unpickled model, patched or not.
    model = tiny(family, tie_word_embeddings=family == "Gemma2", output_router_logits=False)
    classes = [type(module) for module in model.modules()]
    apply(model, experts=experts, chunk_size=5)
    return model, classes


PICKLED = [("Llama", False), ("Gemma2", False), ("Qwen3Moe", True)]


@pytest.mark.parametrize("family, experts", PICKLED)
def test_pickles_are_patched(family, experts):
    """Their steps have the same bits."""
    model, classes = patched_model(family, experts)
    pickles = [pickle.dumps(model, protocol) for protocol in (0, pickle.HIGHEST_PROTOCOL)]
    output, grads = step(model)
    for twin in (copy.deepcopy(model), *map(pickle.loads, pickles)):
        assert [type(module) for module in twin.modules()] == [type(module) for module in model.modules()]
        got, got_grads = step(twin)
        torch.testing.assert_close((got.loss, got_grads), (output.loss, grads), rtol=0, atol=0)
        assert [type(module) for module in revert(twin).modules()] == classes


STEPS_OF_A_FILE = """
import sys, torch
results = []
for model, inputs in torch.load(sys.argv[1], weights_only=False):
    output = model(**inputs)
    output.loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    results.append((output.loss, output.logits, grads))
torch.save(results, sys.argv[1])
"""


@pytest.mark.exhaustive
def test_pickles_are_patched_in_a_process_that_imports_only_torch(tmp_path):
    file, models = tmp_path / "models.pt", [patched_model(*how)[0] for how in PICKLED]
    torch.save([(model, batch()) for model in models], file)
    subprocess.run([sys.executable, "-c", STEPS_OF_A_FILE, file], check=True, timeout=300)
    for model, (loss, logits, got_grads) in zip(models, torch.load(file), strict=True):
        output, grads = step(model)
        assert logits is None
        torch.testing.assert_close((loss, got_grads), (output.loss, grads), rtol=0, atol=0)


@pytest.mark.parametrize("module", ["", "model.norm", "lm_head", "model.layers.1.mlp.experts"])
def test_class_of_a_patched_module_makes_unpatched_ones(module, tmp_path):
    model, plain = apply(tiny("Qwen3Moe"), experts=True), tiny("Qwen3Moe")
    model.save_pretrained(tmp_path)
    patched, unpatched = (type(m.get_submodule(module)) for m in (model, plain))
    arguments = {"": (model.config,), "model.norm": (8,), "lm_head": (8, 8)}.get(module, (model.config,))
    quackish.errors._warned.clear()
    message = f"new {unpatched.__name__} is not patched; call .*apply"
    made = []
    for _ in range(2):  # each new model
        with pytest.warns(quackish.errors.PortablePathWarning, match=message):
            made.append(patched(*arguments))
    if not module:
        made.append(patched.from_pretrained(tmp_path))
        assert_same_step(step(apply(made[-1].train())), step(plain))
        revert(made[-1])
    for new in made:
        assert [type(m) for m in new.modules()] == [type(m) for m in plain.get_submodule(module).modules()]


@pytest.mark.integrations
@pytest.mark.parametrize("wrapped_first", [False, True])
@pytest.mark.parametrize("head", ["frozen", "lora", "trained"])
def test_peft(head, wrapped_first):
    peft = pytest.importorskip("peft", reason="needs the extra integrations")
    lora = peft.LoraConfig(
        target_modules=["q_proj", "lm_head"] if head == "lora" else ["q_proj"],
        modules_to_save=["lm_head"] if head == "trained" else None,
        init_lora_weights=False,
        task_type="CAUSAL_LM",
    )

    def wrapped(model):
        torch.manual_seed(3)
        return peft.get_peft_model(model, copy.deepcopy(lora))

    plain = wrapped(tiny())
    model = apply(wrapped(tiny())) if wrapped_first else wrapped(apply(tiny()))
    if head == "lora" and wrapped_first:
        (left,) = report(model).left
        assert "lm_head is adapted by PEFT, expected a torch.nn.Linear: leave it out" in left.reason
        torch.testing.assert_close(model(**batch()).logits, plain(**batch()).logits)
    elif head == "lora":  # adds to the logits
        quackish.errors._warned.clear()
        with pytest.warns(quackish.errors.PortablePathWarning, match="leave it out of PEFT's target_modules"):
            output = model(**batch())
        torch.testing.assert_close(output.logits, plain(**batch()).logits)
        assert type(model.base_model.model.lm_head.lora_A["default"]) is nn.Linear
    else:
        assert_same_step(step(model), step(plain))


def test_replaced_head():
    model = apply(tiny())
    model.lm_head = nn.Linear(32, V, bias=False)
    quackish.errors._warned.clear()
    with pytest.warns(quackish.errors.PortablePathWarning, match=r"modules.linear.Linear, .* call revert\(model\) and"):
        assert model(**batch()).logits is not None
    assert apply(revert(model))(**batch()).logits is None


class RenamedRMSNorm(nn.Module):
    pass


class Temperature(nn.Module):
    """A head that scales the logits of the one it wraps, and passes all else on."""

    def __init__(self, head):
        super().__init__()
        self.head = head

    def __getattr__(self, name):
        return super().__getattr__(name) if name == "head" else getattr(self.head, name)

    def forward(self, *args, **kwargs):
        return self.head(*args, **kwargs) / 2


def forward_of_liger(self, input_ids):
    pass


REFUSED = {
    "head": (lambda m: setattr(m, "lm_head", nn.Identity()), "lm_head is an Identity, expected a torch.nn.Linear"),
    "wrapped head": (
        lambda m: setattr(m, "lm_head", Temperature(m.lm_head)),
        "lm_head is a Temperature, expected a torch.nn.Linear",
    ),
    "sequence": (
        lambda m: setattr(m, "lm_head", nn.Sequential(nn.Dropout(), m.lm_head)),
        "lm_head is a Sequential, expected a torch.nn.Linear",
    ),
    "loss": (lambda m: setattr(m, "loss_function", sum), "loss_function is .*sum"),
    "forward": (
        lambda m: setattr(m, "forward", types.MethodType(forward_of_liger, m)),
        r"loss: LlamaForCausalLM \(the model\): its forward was replaced on the instance",
    ),
    "hook": (  # accelerate's hooks copy the name of the method they replace
        lambda m: setattr(m.model.norm, "forward", m.model.norm.forward),
        r"norm: LlamaRMSNorm \(model.norm\): its forward was replaced on the instance, as hooks of accelerate do",
    ),
    "hook of the head": (
        lambda m: m.lm_head.register_forward_hook(lambda module, args, output: output * 2),
        r"lm_head: it has the hook .*<lambda>, which may read or change inputs or outputs",
    ),
    "norm": (
        lambda m: setattr(m.model, "norm", RenamedRMSNorm()),
        r"norm: RenamedRMSNorm \(model.norm\): no attribute holds",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_left_and_refused(name):
    """What cannot be patched is left, and named; strict=True patches nothing."""
    model = tiny()
    spoil, message = REFUSED[name]
    spoil(model)
    classes = [type(module) for module in model.modules()]
    with pytest.raises(ValueError, match=f"strict=True and quackish cannot patch: .*{message}"):
        apply(model, strict=True)
    assert [type(module) for module in model.modules()] == classes
    quackish.errors._warned.clear()
    with pytest.warns(quackish.errors.PortablePathWarning, match=message):
        apply(model)
    (left,) = report(model).left
    assert left.name == ("model.norm" if "norm" in message else "")
    assert len(report(model).patched) == 11


WRONG = {
    "sharded": (
        lambda m: setattr(m.model.norm, "__class__", type("FSDPLlamaRMSNorm", (type(m.model.norm),), {})),
        "has an FSDPLlamaRMSNorm, expected a model before FSDP shards it",
    ),
    "twice": (apply, "patched by quackish already; revert"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_models(name):
    model = tiny()
    spoil, message = WRONG[name]
    spoil(model)
    classes = [type(module) for module in model.modules()]
    with pytest.raises(ValueError, match=message):
        apply(model)
    assert [type(module) for module in model.modules()] == classes


@pytest.mark.parametrize("function", [apply, report, revert])
def test_what_is_no_module(function):
    with pytest.raises(TypeError, match=rf"{function.__name__}: model is 'meta-llama.*, a str, expected .*: load it"):
        function("meta-llama/Llama-3.2-1B")


def test_unsupported_models(monkeypatch):
    with pytest.raises(ValueError, match="a DataParallel is no model of Transformers"):
        apply(nn.DataParallel(tiny()), strict=True)
    with pytest.raises(ValueError, match="schedule is 'fast', expected one of auto, "):
        apply(tiny("Llama"), schedule="fast")
    with pytest.raises(ValueError, match="nothing to patch in a Linear"):
        apply(nn.Linear(2, 2), head=False)
    monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", forward_of_liger)
    with pytest.raises(ValueError, match=r"loss: LlamaForCausalLM .*its trial raised TypeError: forward_of_liger"):
        apply(tiny(), strict=True)


@pytest.mark.parametrize(
    "hidden_act, activation", [("gelu", "geglu_erf"), ("gelu_pytorch_tanh", "geglu"), ("relu", "reglu")]
)
def test_experts_with_other_activations(hidden_act, activation):
    experts = tiny("Qwen3Moe", hidden_act=hidden_act).model.layers[0].mlp.experts
    assert form_of(experts).activation == activation


def test_unsupported_experts():
    message = r"experts: Qwen3MoeExperts \(model.layers.0.mlp.experts and 1 more\): output 1 differs from moe_mlp's by"
    with pytest.raises(UnsupportedError, match=message):
        apply(tiny("Qwen3Moe", hidden_act="tanh"), experts=True, strict=True)
    with pytest.raises(ValueError, match="nothing to patch in a LlamaForCausalLM with norms=False, head=False, mlp=F"):
        apply(tiny(), norms=False, head=False, mlp=False, rotary=False, experts=True)
    with pytest.raises(UnsupportedError, match="experts=True and a LlamaForCausalLM has no experts"):
        apply(tiny(), experts=True, strict=True)


class UsersLlama(transformers.LlamaForCausalLM):
    pass


def test_users_subclass():
    model, plain = UsersLlama(tiny().config).train(), tiny()
    model.load_state_dict(plain.state_dict())
    assert_same_step(step(apply(model)), step(plain))
    assert type(revert(model)) is UsersLlama


def test_applied_reverts_only_what_it_patched():
    model = apply(tiny(), norms=False, mlp=False, rotary=False)
    with applied(model, head=False):
        assert hasattr(type(model.model.norm), "_quackish_unpatched")
    assert not hasattr(type(model.model.norm), "_quackish_unpatched")
    assert model(**batch()).logits is None


def test_norms_called_by_keyword():
    norm, x = tiny().model.norm, torch.randn(3, 32)
    expected = norm(hidden_states=x)
    apply(norm, head=False)
    torch.testing.assert_close(norm(hidden_states=x), expected)


def test_norms_that_zero_3_sharded():
    """Outside of forward, parameters are empty, and have their shape as `ds_shape`."""
    model = tiny()
    for p in model.parameters():
        p.ds_shape, p.data = p.shape, torch.empty(0)
    assert len(report(apply(model, strict=True)).patched) == 10  # MLPs are left


def test_parts():
    model = tiny()
    base = apply(model.model, head=False, mlp=False, rotary=False)
    assert model(**batch()).logits is not None
    assert hasattr(type(base.norm), "_quackish_unpatched")
    apply(model, norms=False, mlp=False, rotary=False)
    assert model(**batch()).logits is None
    model.lm_head.__class__ = type("FSDPLinear", (type(model.lm_head),), {})  # as fully_shard does
    with pytest.raises(ValueError, match="an FSDPLinear was wrapped after apply"):
        revert(model)


@pytest.mark.integrations
def test_trainer(tmp_path):
    pytest.importorskip("accelerate", reason="needs the extra integrations")
    examples = [dict(input_ids=row.tolist(), labels=row.tolist(), unused=1) for row in tokens(8, 9)]
    arguments = transformers.TrainingArguments(
        output_dir=tmp_path, use_cpu=True, max_steps=2, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        report_to=[], save_strategy="no", disable_tqdm=True, seed=4, optim="sgd", learning_rate=0.1,
    )  # fmt: skip
    models = apply(tiny()), tiny()
    losses = []
    for model in models:
        trainer = transformers.Trainer(model, arguments, train_dataset=examples)
        losses.append(trainer.train().training_loss)
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    before = tiny().state_dict()
    for (name, got), expected in zip(models[0].state_dict().items(), models[1].state_dict().values(), strict=True):
        assert not torch.equal(got, before[name])
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("family", ["Llama", "Qwen3Moe"])
def test_a_gpu_without_kernels_runs_the_models_own_code(family, monkeypatch):
    model, plain = apply(tiny(family), head=False, experts=True), tiny(family)
    for module in (subclass, experts):
        monkeypatch.setattr(module, "lacks_kernels", lambda args, kwargs: True)
    for name in ("rms_norm", "rotary", "mlp", "moe_mlp"):
        monkeypatch.setattr(quackish, name, None)
    (got, grads), (want, plain_grads) = step(model), step(plain)
    assert torch.equal(got.logits, want.logits)
    assert all(map(torch.equal, grads.values(), plain_grads.values()))


def test_fake_tensors_on_a_gpu_that_does_not_exist():
    norm = apply(tiny("Llama")).model.norm
    with FakeTensorMode():
        x = torch.empty(2, 9, 32, device="cuda")
        assert torch.func.functional_call(norm, {"weight": x[0, 0]}, (x,)).device.type == "cuda"


@pytest.mark.parametrize("family, expected", [("sm_80", True), ("sm_90", False), ("sm_120", True)])
def test_which_gpus_have_no_kernels(family, expected, monkeypatch):
    gpu = dataclasses.replace(H100, family=family)
    device = types.SimpleNamespace(gpu=gpu)
    monkeypatch.setattr(kernel_device, "_find", lambda where: device)
    assert kernel_device.is_gpu_without_kernels(torch.device("cuda", 0)) == expected
    assert not kernel_device.is_gpu_without_kernels(torch.device("cpu"))


@pytest.mark.parametrize("family", ["Llama", pytest.param("Olmoe", marks=pytest.mark.exhaustive)])
def test_compiled_without_graph_breaks(family):
    torch._dynamo.reset()
    codes = []

    def backend(graph, inputs):
        codes.append(graph.code)
        return graph

    model, plain = (tiny(family, output_router_logits=False) for _ in range(2))
    apply(model, experts=family == "Olmoe")
    model.compile(backend=backend, fullgraph=True)
    assert_same_step(step(model), step(plain))
    (code,) = codes
    assert "rms_norm" not in code  # the compiler fuses norms
    assert "linear_cross_entropy" in code
    assert ("grouped_mlp" in code) == (family == "Olmoe")


@pytest.mark.gpu
@pytest.mark.filterwarnings("error::quackish.errors.PortablePathWarning")
@pytest.mark.parametrize("family", ["Llama", "Gemma2", "Qwen3Moe"])
def test_no_sync_and_a_graphed_step(family):
    """Three steps replayed from a CUDA graph give the weights of three eager steps."""
    experts = family == "Qwen3Moe"
    options = dict(output_router_logits=False) if experts else {}
    options |= dict(hidden_size=128, intermediate_size=256, head_dim=32, use_cache=False, pad_token_id=None)
    ids = tokens(2, 64).cuda()
    # Without a mask, Transformers synchronizes to check whether sequences are packed.
    mask = torch.full((1, 1, 64, 64), -1e9, dtype=torch.bfloat16, device="cuda").triu(1)
    inputs = dict(input_ids=ids, labels=ids, attention_mask=mask, num_items_in_batch=torch.tensor(100.0).cuda())
    if family == "Gemma2":
        inputs["attention_mask"] = dict(full_attention=mask, sliding_attention=mask)
    models = [apply(tiny(family, **options).to("cuda", torch.bfloat16), experts=experts) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in models]

    def train(i):
        optimizers[i].zero_grad(set_to_none=True)
        loss = models[i](**inputs).loss
        loss.backward()
        optimizers[i].step()
        return loss

    train(0)  # compiles
    with no_synchronization():
        train(0)
    for _ in range(3):
        expected = train(0)

    graph, loss = captured(lambda: train(1))
    for _ in range(3):
        graph.replay()
    torch.testing.assert_close(loss, expected, rtol=1e-3, atol=1e-3)
    for got, truth in zip(models[1].parameters(), models[0].parameters(), strict=True):
        torch.testing.assert_close(got, truth, rtol=2e-2, atol=2e-3)
