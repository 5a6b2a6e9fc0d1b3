"""Transformers' models with attn_implementation="quackish", beside eager attention: tiny, with random weights."""

import copy

import pytest
import torch

import quackish
from tests.test_transformers import tiny, tokens

transformers = pytest.importorskip("transformers", minversion="5")
from quackish.errors import UnsupportedError  # noqa: E402
from quackish.integrations.transformers import register_attention  # noqa: E402


@pytest.fixture(autouse=True)
def registered():
    register_attention()


@pytest.fixture
def calls(monkeypatch):
    """The keyword arguments of each call of quackish's attention."""
    found, theirs = [], quackish.scaled_dot_product_attention

    def recorded(query, key, value, mask, **options):
        found.append(dict(options, mask=mask, lengths=(query.shape[2], key.shape[2])))
        return theirs(query, key, value, mask, **options)

    monkeypatch.setattr(quackish, "scaled_dot_product_attention", recorded)
    return found


def t5(**options):
    sizes = dict(vocab_size=97, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0)
    torch.manual_seed(0)
    config = transformers.T5Config(**sizes, **{"dropout_rate": 0.0, **options})
    return transformers.T5ForConditionalGeneration(config).train()


def with_attention(model, implementation):
    """A copy. Transformers 5.17's `set_attn_implementation` leaves T5's encoder and decoder as they are."""
    other = type(model)._from_config(copy.deepcopy(model.config), attn_implementation=implementation)
    other.load_state_dict(model.state_dict())
    return other.train(model.training)


def step(model, **call):
    """The loss and all gradients."""
    loss = model(**call).loss
    loss.backward()
    return {"loss": loss.detach()} | {
        name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
    }


def assert_equal_to_eager(model, **call):
    want, got = (step(with_attention(model, name), **call) for name in ("eager", "quackish"))
    assert got.keys() == want.keys()
    for name, t in want.items():
        assert (got[name] - t).norm() <= 1e-5 * t.norm() + 1e-7, name


def batch(padding):
    """Padded on the left of row 1, or with a mask of floats (B, 1, L, L), or without padding."""
    ids = tokens(2, 9)
    labels = ids.clone()
    if padding == "none":
        return dict(input_ids=ids, labels=labels)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    labels[1, :5] = -100  # the first real token attends to nothing but itself
    if padding == "additive":
        keep = mask[:, None, None].bool() & torch.ones(9, 9, dtype=torch.bool).tril()
        mask = torch.where(keep, 0.0, torch.finfo(torch.float32).min)
    return dict(input_ids=ids, labels=labels, attention_mask=mask)


GEMMA2 = dict(sliding_window=4, attn_logit_softcapping=2.0, layer_types=["sliding_attention", "full_attention"])
MODELS = {"Llama": {}, "Gemma2": GEMMA2, "Mistral": dict(sliding_window=4), "Qwen3": {}}


@pytest.mark.parametrize("padding", ["none", "left", "additive"])
@pytest.mark.parametrize("family", MODELS)
def test_losses_and_gradients_are_those_of_eager_attention(family, padding, calls):
    """Grouped queries, sliding windows and softcaps."""
    assert_equal_to_eager(tiny(family, **MODELS[family]), **batch(padding))
    assert [call["enable_gqa"] for call in calls] == [True, True]
    assert [call["softcap"] for call in calls] == [MODELS[family].get("attn_logit_softcapping")] * 2
    has_mask = padding == "left" or (padding == "none" and family == "Mistral")
    if family != "Gemma2":
        assert [call["mask"] is not None for call in calls] == [has_mask] * 2
        assert [call["is_causal"] for call in calls] == [padding == "none" and not has_mask] * 2
    assert [call["attn_bias"] is not None for call in calls] == [padding == "additive"] * 2


def test_position_biases_have_gradients(calls):
    """T5: the bias (1, H, Lq, Lk) beside a bool mask in the encoder, and beside causality in the decoder."""
    ids, labels = tokens(2, 9), tokens(2, 7, seed=2)
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    assert_equal_to_eager(t5(), input_ids=ids, labels=labels, attention_mask=mask)
    assert {call["lengths"] for call in calls} == {(9, 9), (7, 7), (7, 9)}
    for call in calls:
        queries, keys = call["lengths"]
        assert call["attn_bias"].shape == (1, 4, queries, keys)
        assert call["is_causal"] == (keys == 7)
        assert (call["mask"] is None) == call["is_causal"]


@pytest.mark.parametrize("model", [lambda: tiny("Gemma2", **GEMMA2), t5], ids=["Gemma2", "T5"])
def test_generation(model):
    """Single queries, with a cache."""
    model, ids = model().eval(), tokens(2, 9)
    how = dict(input_ids=ids, max_new_tokens=6, do_sample=False, min_new_tokens=6)
    assert torch.equal(*(with_attention(model, name).generate(**how) for name in ("eager", "quackish")))


def test_compiles_without_graph_breaks():
    model = with_attention(tiny("Gemma2", **GEMMA2), "quackish")
    call = batch("left") | dict(use_cache=False)
    want = step(model, **call)
    model.zero_grad()
    torch.compiler.reset()
    got = step(torch.compile(model, fullgraph=True, backend="aot_eager"), **call)
    got = {name.removeprefix("_orig_mod."): t for name, t in got.items()}
    for name, t in want.items():
        torch.testing.assert_close(got[name], t)


@pytest.mark.parametrize(
    "family, options, call, message",
    [
        ("GptOss", {}, {}, r'GptOssAttention has attention sinks \(s_aux\), .* attn_implementation="eager"'),
        ("Llama", dict(attention_dropout=0.1), {}, "LlamaAttention has dropout 0.1, .* attention_dropout=0.0"),
        ("Llama", {}, dict(output_attentions=True), "asked for output_attentions, .* use attn_implementation"),
    ],
)
def test_what_is_refused(family, options, call, message):
    model = with_attention(tiny(family, **options), "quackish")
    with pytest.raises(UnsupportedError, match=message):
        model(input_ids=tokens(2, 9), **call)


def test_dropout_is_for_training_only():
    with_attention(tiny(attention_dropout=0.1).eval(), "quackish")(input_ids=tokens(2, 9))


def test_an_existing_model():
    model = tiny()
    want = model(input_ids=tokens(2, 9)).logits
    model.set_attn_implementation("quackish")
    torch.testing.assert_close(model(input_ids=tokens(2, 9)).logits, want)
