"""Transformers' models with attn_implementation="quackish", beside eager attention: tiny, with random weights."""

import copy

import pytest
import torch

import quackish
from tests.integrations.test_transformers import tiny, tokens

transformers = pytest.importorskip("transformers", minversion="5")
from quackish.errors import UnsupportedError  # noqa: E402
from quackish.integrations.transformers import attention, register_attention  # noqa: E402
from quackish.integrations.transformers.masks import CausalMask, GuardedMask, plain, quackish_mask  # noqa: E402


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
@pytest.mark.parametrize("cache", [None, "static"])
def test_generation(model, cache):
    """Single queries, with a cache."""
    model, ids = model().eval(), tokens(2, 9)
    how = dict(input_ids=ids, max_new_tokens=6, do_sample=False, min_new_tokens=6, cache_implementation=cache)
    assert torch.equal(*(with_attention(model, name).generate(**how) for name in ("eager", "quackish")))


@pytest.mark.exhaustive
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
        ("Llama", {}, dict(output_attentions=True), 'asked for output_attentions, .* attn_implementation="eager"'),
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


# Masks for code that adds them. BloomAttention does, and gets them if the early check does not know the model.


def test_attention_code_of_its_own_is_refused_when_a_model_is_built():
    for kind in ("Bloom", "Falcon", "GPTNeo"):
        config = getattr(transformers, f"{kind}Config")(attn_implementation="quackish")
        with pytest.raises(UnsupportedError, match=f'{kind}ForCausalLM has attention code of its own, .*"eager"'):
            getattr(transformers, f"{kind}ForCausalLM")(config)


@pytest.mark.parametrize("padding", ["none", "left"])
def test_a_mask_is_never_added(padding, monkeypatch):
    monkeypatch.setattr(attention, "_has_own_attention", lambda module: False)
    sizes = dict(vocab_size=97, hidden_size=32, n_layer=1, n_head=4)
    config = transformers.BloomConfig(**sizes, attn_implementation="quackish")
    model = transformers.BloomForCausalLM(config)
    with pytest.raises(UnsupportedError, match=r"BloomAttention uses \w*add\w*\(\) on an attention mask"):
        model(**batch(padding))
    if padding == "none":
        torch.compiler.reset()
        with pytest.raises(UnsupportedError, match="on an attention mask"):
            torch.compile(model, backend="eager")(**batch(padding))


def masks():
    """Masks of causality alone and of padding, each beside the same bool mask."""
    keep = torch.ones(2, 5, dtype=torch.bool)
    causal = keep.new_ones(5, 5).tril().expand(2, 1, 5, 5)
    keep[1, :2] = False
    return [
        (quackish_mask(2, 5, 5), causal),
        (quackish_mask(2, 5, 5, attention_mask=keep), causal & keep[:, None, None]),
    ]


def test_what_a_mask_allows():
    """What does the same to a bool and an additive mask keeps it guarded. What needs a bool mask may read it."""
    q = torch.randn(2, 1, 5, 8)
    other = torch.ones(5, dtype=torch.bool)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    for mask, want in masks():
        for f in (
            lambda m: m[:, :, 1:, :4],
            lambda m: m.to("cpu").expand(2, 3, 5, 5),
            lambda m: torch.cat([m, m], -1),
            lambda m: m & other,
            lambda m: m.chunk(2)[1],
            lambda m: m.mT,
        ):
            assert isinstance(f(mask), GuardedMask)
            assert torch.equal(plain(f(mask)), f(want))
        for f in (lambda m: ~m, lambda m: torch.where(m, 1.0, 2.0), lambda m: sdpa(q, q, q, attn_mask=m)):
            assert type(f(mask)) is torch.Tensor
            torch.testing.assert_close(f(mask), f(want), rtol=0, atol=0)
        assert (mask.shape, mask.dtype, mask.ndim) == (want.shape, torch.bool, 4)
    assert not isinstance(masks()[0][0].mT, CausalMask)
    assert isinstance(masks()[0][0].to("cpu"), CausalMask)  # no memory, and PyTorch's causal kernels
    assert masks()[0][0].untyped_storage().nbytes() == 1


def test_what_a_mask_refuses():
    scores = torch.zeros(2, 1, 5, 5)
    for mask, _ in masks():
        for f in (
            lambda m: scores + m,
            lambda m: scores.add_(m),
            lambda m: scores.masked_fill(m, -1.0),
            lambda m: scores.copy_(m),
            lambda m: torch.baddbmm(m[0], scores[0], scores[0]),
            lambda m: torch.where(scores > 0, m, False),
            lambda m: torch.cat([m, scores], -1),
            lambda m: m.masked_fill(m, False),
            lambda m: m.to(torch.bool),
            lambda m: m.to(scores),
            lambda m: m.bool(),
            lambda m: m.float(),
            lambda m: m == 0,
            lambda m: 1 - m,
            lambda m: torch.logical_and(m, m),
            lambda m: m.all(),
            lambda m: m.new_zeros(3),
        ):
            with pytest.raises(UnsupportedError, match="on an attention mask that only quackish's attention can read"):
                f(mask)


def test_masks_in_compiled_code():
    """They are made there, or enter it, as when a layer is compiled or generation prepares the masks."""

    def f(x, mask):
        if mask is None:
            mask = quackish_mask(2, 5, 5)
        return attention.attention_forward(torch.nn.Module(), x, x, x, mask[:, :, :, : x.shape[2]])[0]

    x = torch.randn(2, 1, 5, 8)
    causal, padded = masks()
    for mask, want in (causal, padded, (None, causal[1])):
        torch.compiler.reset()
        got = torch.compile(f, fullgraph=True, backend="aot_eager")(x, mask)
        torch.testing.assert_close(got, f(x, want))


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant):
    model = with_attention(tiny(), "quackish")
    want = step(model, **batch("left"))
    model.zero_grad()
    model.gradient_checkpointing_enable(dict(use_reentrant=reentrant))
    got = step(model, **batch("left"))
    for name, t in want.items():
        torch.testing.assert_close(got[name], t)


@pytest.mark.parametrize("what", ["position_ids", "cu_seq_lens", "seq_idx"])
def test_packed_sequences_do_not_see_each_other(what):
    """Three of 4, 3 and 2 tokens."""
    ids = tokens(1, 9)
    eager, ours = (with_attention(tiny(), name) for name in ("eager", "quackish"))
    want = torch.cat([eager(input_ids=part).logits for part in ids.split([4, 3, 2], 1)], 1)
    starts = torch.tensor([0, 4, 7, 9], dtype=torch.int32)
    call = {
        "position_ids": dict(position_ids=torch.cat([torch.arange(n) for n in (4, 3, 2)])[None]),
        "cu_seq_lens": dict(cu_seq_lens_q=starts, cu_seq_lens_k=starts, max_length_q=4, max_length_k=4),
        "seq_idx": dict(seq_idx=torch.arange(3).repeat_interleave(torch.tensor([4, 3, 2]))[None]),
    }[what]
    torch.testing.assert_close(ours(input_ids=ids, use_cache=False, **call).logits, want, rtol=1e-5, atol=1e-5)
    if what != "position_ids":
        with pytest.raises(UnsupportedError, match="expects all tokens of the packed batch in one call"):
            cache = ours(input_ids=ids, use_cache=True).past_key_values
            ours(input_ids=ids[:, :1], past_key_values=cache, **call)
    if what == "cu_seq_lens":
        with pytest.raises(UnsupportedError, match="cu_seq_lens_q is given alone"):
            ours(input_ids=ids, use_cache=False, cu_seq_lens_q=starts)


def test_unknown_arguments_are_refused_by_name():
    model = with_attention(tiny(), "quackish")
    for name in ("indices", "block_indices", "my_option"):
        with pytest.raises(UnsupportedError, match=f"LlamaAttention passes the argument '{name}' to its attention"):
            model(input_ids=tokens(2, 9), **{name: torch.zeros(1)})
        model(input_ids=tokens(2, 9), **{name: None})
    model(input_ids=tokens(2, 9), num_items_in_batch=torch.tensor(3))
