"""TRL's trainers with and without quackish: tiny models with random weights."""

import importlib.util
import json
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

trl = pytest.importorskip("trl", minversion="1.16", reason="needs the extra integrations")
from datasets import Dataset  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast  # noqa: E402
from trl.trainer import distillation_trainer as distillation  # noqa: E402
from trl.trainer import utils  # noqa: E402

import quackish  # noqa: E402
from quackish.errors import UnsupportedError  # noqa: E402
from quackish.integrations.trl import apply, revert  # noqa: E402
from quackish.testing.errors import error  # noqa: E402

pytestmark = pytest.mark.integrations

N, H, V = 24, 16, 97
THEIRS, THEIR_DIVERGENCE = utils._ChunkedLogProbFunction, distillation._chunked_divergence_loss
NAMES = "log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1"
TRAINERS = {  # the outputs that they ask for
    "SFT": ("log_probs", "entropy", "is_top1"),
    "DPO, KTO": ("log_probs", "entropy", "mean_logits", "is_top1"),
    "GRPO": ("log_probs", "entropy"),
    "reference model": ("log_probs",),
}


@pytest.fixture(autouse=True)
def _reverted():
    yield
    revert()


def inputs(dtype: torch.dtype, bias: bool, weight_dtype: torch.dtype | None = None) -> tuple:
    """hidden, weight, bias, targets; half of the targets have the largest logit."""
    g = torch.Generator().manual_seed(0)
    hidden, weight, b = torch.randn(N, H, generator=g), torch.randn(V, H, generator=g), torch.randn(V, generator=g)
    targets = torch.randint(V, (N,), generator=g)
    targets[::2] = (hidden @ weight.T + b * bias).argmax(1)[::2]
    leaves = [t.to(d).requires_grad_() for t, d in ((hidden, dtype), (weight, weight_dtype or dtype), (b, dtype))]
    return *leaves[:2], leaves[2] if bias else None, targets


def results(function, tensors, outputs, temperature=1.0, softcap=None, scale=1.0) -> dict[str, Tensor]:
    """What `function.apply` returns, and gradients of log-probabilities and entropy."""
    out = function.apply(*tensors, temperature, 32, softcap, scale, outputs)
    found = {name: t for name, t in zip(NAMES, out, strict=True) if t is not None and name in outputs}
    total = (found["log_probs"] * torch.arange(1, N + 1)).sum()
    if "entropy" in found:
        total = total + found["entropy"].sin().sum()
    leaves = [t for t in tensors[:3] if t is not None]
    grads = torch.autograd.grad(total, leaves)
    return found | dict(zip(("dhidden", "dweight", "dbias"), grads, strict=False))


def truth_of(temperature=1.0, softcap=None, scale=1.0) -> SimpleNamespace:
    """TRL's formula in fp64 with all logits, as an object with `apply`."""

    def of(hidden, weight, bias, targets, *_):
        z = torch.nn.functional.linear(hidden, weight, bias) * scale
        z = (z if softcap is None else softcap * torch.tanh(z / softcap)) / temperature
        log_p = z.log_softmax(1)
        log_prob = log_p.gather(1, targets[:, None])[:, 0]
        return log_prob, -(log_p.exp() * log_p).sum(1), None, z.mean(1).detach(), z.argmax(1) == targets

    return SimpleNamespace(apply=of)


def in_fp64(tensors: tuple) -> tuple:
    return *(None if t is None else t.detach().double().requires_grad_() for t in tensors[:3]), tensors[3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("outputs", TRAINERS.values(), ids=TRAINERS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(temperature=0.7),
        dict(temperature=1.5, scale=0.25),
        dict(softcap=4.0),
        dict(softcap=4.0, scale=0.5, temperature=0.7),
    ],
    ids=["plain", "temperature", "scale", "softcap", "all"],
)
def test_matches_fp64(dtype, bias, outputs, options):
    tensors = inputs(dtype, bias)
    true = results(truth_of(**options), in_fp64(tensors), outputs, **options)
    theirs = results(THEIRS, tensors, outputs, **options)
    apply()
    ours = results(utils._ChunkedLogProbFunction, tensors, outputs, **options)
    assert ours.keys() == theirs.keys()
    assert ours["log_probs"].dtype == torch.float32
    for name, got in ours.items():
        assert got.shape == theirs[name].shape
        assert got.dtype == theirs[name].dtype, name
        if got.dtype is torch.bool:
            assert torch.equal(got, true[name])
            assert 0 < got.sum() < N
            continue
        mine, its = error(got, true[name]), error(theirs[name], true[name])
        assert mine.norm <= 1.1 * its.norm + 1e-6, name
    assert not torch.equal(ours["log_probs"], theirs["log_probs"])  # its sums are in another order


def test_other_outputs_are_computed_by_trl():
    """log_sum_sq_probs is for DPO's use_weighting. Log-probabilities stay the same as those of the reference model."""
    tensors, outputs = inputs(torch.float32, False), NAMES
    theirs = results(THEIRS, tensors, outputs, softcap=4.0)
    apply()
    ours = results(utils._ChunkedLogProbFunction, tensors, outputs, softcap=4.0)
    reference = results(utils._ChunkedLogProbFunction, tensors, ("log_probs",), softcap=4.0)
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert torch.equal(ours[name], theirs[name]) == (name in NAMES[2:]), name
        assert not ours[name].requires_grad or name in NAMES[:2]
    assert torch.equal(ours["log_probs"], reference["log_probs"])


@pytest.mark.parametrize("scale, temperature, softcap", [(0.0, 1.0, None), (-1.0, 1.0, None), (1.0, 1.0, -3.0)])
def test_scales_that_are_not_positive_are_computed_by_trl(scale, temperature, softcap):
    tensors = inputs(torch.float32, False)
    theirs = results(THEIRS, tensors, ("log_probs",), temperature, softcap, scale)
    apply()
    ours = results(utils._ChunkedLogProbFunction, tensors, ("log_probs",), temperature, softcap, scale)
    assert torch.equal(ours["log_probs"], theirs["log_probs"])


@pytest.mark.parametrize("autocast", [False, True], ids=["cast_lm_head_to_fp32", "autocast"])
def test_weight_of_another_dtype(autocast):
    tensors = inputs(torch.float32, True, weight_dtype=torch.bfloat16)
    true = results(truth_of(), in_fp64(tensors), ("log_probs", "entropy", "mean_logits"))
    apply()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        ours = results(utils._ChunkedLogProbFunction, tensors, ("log_probs", "entropy", "mean_logits"))
    assert ours["mean_logits"].dtype == torch.float32
    for name, got in ours.items():
        rounded = (autocast and name != "mean_logits") or name == "dweight"
        assert error(got, true[name]).norm < (1e-2 if rounded else 1e-5), name
    assert ours["dweight"].dtype == torch.bfloat16


def test_options_and_revert():
    apply(schedule="recompute")
    apply(memory_limit=1000)  # takes the place of the first
    with pytest.raises(ValueError, match="memory_limit is 1000 bytes"):
        results(utils._ChunkedLogProbFunction, inputs(torch.float32, False), ("log_probs",))
    with pytest.raises(ValueError, match="schedule is 'fast'"):
        apply(schedule="fast")
    revert()
    assert utils._ChunkedLogProbFunction is THEIRS
    revert()
    assert utils._ChunkedLogProbFunction is THEIRS


def test_another_trl_is_refused(monkeypatch):
    class Other(torch.autograd.Function):
        @staticmethod
        def forward(ctx, hidden, weight):
            return hidden

    monkeypatch.setattr(utils, "_ChunkedLogProbFunction", Other)
    with pytest.raises(quackish.UnsupportedError, match=r"the arguments \['ctx', 'hidden', 'weight'\], expected"):
        apply()
    monkeypatch.delattr(utils, "_ChunkedLogProbFunction")
    with pytest.raises(quackish.UnsupportedError, match="the arguments None"):
        apply()
    revert()


def test_compiles():
    tensors, outputs = inputs(torch.float32, False), TRAINERS["DPO, KTO"]
    apply()

    def call(hidden, weight, bias, targets):
        return utils._ChunkedLogProbFunction.apply(hidden, weight, bias, targets, 0.7, 32, None, 1.0, outputs)

    eager = results(SimpleNamespace(apply=lambda *args: call(*args[:4])), tensors, outputs)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    got = results(SimpleNamespace(apply=lambda *args: compiled(*args[:4])), tensors, outputs)
    for name in eager:
        torch.testing.assert_close(got[name], eager[name])


# Distillation ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(num_items_in_batch=7, temperature=0.6),
        dict(student_logit_scale=0.5, teacher_logit_scale=2.0, student_final_logit_softcapping=9.0),
        dict(teacher_final_logit_softcapping=4.0, num_items_in_batch=torch.tensor(5)),
    ],
    ids=["plain", "items", "scales", "softcap"],
)
def test_divergence_of_trls_function(beta, options):
    g = torch.Generator().manual_seed(0)
    x, w, teacher_x, teacher_w, bias = (
        torch.randn(shape, generator=g) for shape in ((2, 5, 8), (33, 8), (2, 5, 12), (33, 12), (33,))
    )
    mask, leaves = torch.tensor([[1, 1, 0, 1, 1], [0, 0, 1, 1, 0]]), (x, w, bias)
    for leaf in leaves:
        leaf.requires_grad_()
    teacher_w.requires_grad_()  # TRL does not ask whether its teacher is frozen
    results = []
    for function in (distillation._chunked_divergence_loss, (apply(), distillation._chunked_divergence_loss)[1]):
        loss, *others = function(x, teacher_x, w, teacher_w, mask, beta, student_lm_head_bias=bias, **options)
        results.append([loss, *others, *torch.autograd.grad(loss, leaves)])
    assert isinstance(distillation._chunked_divergence_loss, quackish.integrations.trl._DivergenceLoss)
    torch.testing.assert_close(*results[::-1])
    revert()
    assert distillation._chunked_divergence_loss is THEIR_DIVERGENCE


def test_another_divergence_is_refused(monkeypatch):
    monkeypatch.setattr(distillation, "_chunked_divergence_loss", lambda student, teacher: None)
    with pytest.raises(UnsupportedError, match=r"_chunked_divergence_loss with the arguments \['student', 'teacher'\]"):
        apply()
    assert utils._ChunkedLogProbFunction is THEIRS


# Whole trainers -------------------------------------------------------------------------------------------------------

WORDS = "the rain in Spain stays mainly on plain and nobody minds it much today".split()
ROWS, STEPS = 16, 4


def sentences(seed: int, least: int = 2, most: int = 9) -> list[str]:
    r = random.Random(seed)
    return [" ".join(r.choices(WORDS, k=r.randint(least, most))) for _ in range(ROWS)]


def number_of_words(completions: list[str], **columns) -> list[float]:
    return [float(len(set(text.split()))) for text in completions]


PROMPTS = [f"{text} " for text in sentences(0)]
KINDS = {
    "SFT": dict(text=sentences(1)),
    "DPO": dict(prompt=PROMPTS, chosen=sentences(1), rejected=sentences(2)),
    "KTO": dict(prompt=PROMPTS, completion=sentences(1), label=[i % 2 == 0 for i in range(ROWS)]),
    "GRPO": dict(prompt=PROMPTS),
    "RLOO": dict(prompt=PROMPTS),
    "Distillation": dict(prompt=PROMPTS),
}
GENERATES = dict(num_generations=4, max_completion_length=12, beta=0.1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model and a tokenizer, as TRL loads them."""
    folder = tmp_path_factory.mktemp("model")
    vocabulary = {word: i for i, word in enumerate(("<pad>", "<eos>", "<unk>", *WORDS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = dict(pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    sizes = dict(vocab_size=48, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**sizes, pad_token_id=0, bos_token_id=1, eos_token_id=1)).save_pretrained(folder)
    return folder


def teacher(folder) -> LlamaForCausalLM:
    """A wider model with the same vocabulary."""
    config = LlamaConfig.from_pretrained(folder)
    torch.manual_seed(1)
    return LlamaForCausalLM(LlamaConfig(**{**config.to_dict(), "hidden_size": 64, "head_dim": 16}))


def train(kind: str, folder, out, **options) -> list[dict[str, float]]:
    """What a trainer logs after each step."""
    arguments = dict(
        output_dir=str(out), use_cpu=True, bf16=False, per_device_train_batch_size=4, max_steps=STEPS, logging_steps=1,
        learning_rate=1e-2, report_to=[], save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    generates, distils = kind in ("GRPO", "RLOO"), kind == "Distillation"
    if distils:
        options = dict(max_completion_length=12) | options
    trainer = getattr(trl, f"{kind}Trainer")(
        model=LlamaForCausalLM.from_pretrained(folder),
        args=getattr(trl, f"{kind}Config")(**arguments, **(GENERATES if generates else {}), **options),
        train_dataset=Dataset.from_dict(KINDS[kind]),
        processing_class=PreTrainedTokenizerFast.from_pretrained(folder),
        **(dict(reward_funcs=number_of_words) if generates else {}),
        **(dict(teacher_model=teacher(folder)) if distils else {}),
    )
    trainer.train()
    return [log for log in trainer.state.log_history if "loss" in log]


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")  # of TRL and its libraries
@pytest.mark.parametrize(
    "kind, options",
    [
        ("SFT", {}),
        ("SFT", dict(loss_type="dft")),
        ("DPO", {}),
        ("DPO", dict(use_weighting=True)),
        ("KTO", {}),
        ("GRPO", {}),
        ("GRPO", dict(entropy_coef=0.1, temperature=0.7)),
        ("GRPO", dict(cast_lm_head_to_fp32=True)),
        ("RLOO", {}),
        *(("Distillation", dict(beta=beta, temperature=0.8)) for beta in (0.0, 0.5, 1.0)),
    ],
    ids=str,
)
def test_trainers_learn_the_same(kind, options, folder, tmp_path, monkeypatch):
    theirs = train(kind, folder, tmp_path, **options)
    apply()
    patched, calls = utils._ChunkedLogProbFunction, []
    name = "linear_divergence" if kind == "Distillation" else "linear_cross_entropy"
    function = getattr(quackish, name)
    monkeypatch.setattr(quackish, name, lambda *args, **kwargs: calls.append(1) or function(*args, **kwargs))
    ours = train(kind, folder, tmp_path, **options)
    assert utils._ChunkedLogProbFunction is patched
    assert len(calls) >= STEPS
    assert len(ours) == len(theirs) == STEPS
    names = {"loss", "grad_norm"} | {"DPO": {"rewards/margins", "logits/chosen"}, "GRPO": {"reward", "kl"}}.get(
        kind, set()
    )
    assert names <= ours[0].keys() == theirs[0].keys()
    for got, want in zip(ours, theirs, strict=True):
        for name in want.keys() - {"step_time"}:
            assert got[name] == pytest.approx(want[name], rel=1e-4, abs=1e-5), name


# ZeRO-3, which gathers the head's weight for the call -----------------------------------------------------------------


def zero3_rank(rank: int, size: int, folder: str, out: str) -> None:
    import deepspeed
    from transformers.integrations import HfDeepSpeedConfig

    torch.set_num_threads(1)
    deepspeed.ops.__compatible_ops__.clear()  # DeepSpeed compiles none of its own for a minute, and uses gloo's
    torch.distributed.init_process_group("gloo", init_method=f"file://{out}/store", rank=rank, world_size=size)
    config = dict(
        train_micro_batch_size_per_gpu=2, zero_allow_untested_optimizer=True,
        zero_optimization=dict(stage=3, stage3_param_persistence_threshold=0),
    )  # fmt: skip
    kept = HfDeepSpeedConfig(config)  # TRL asks Transformers whether ZeRO-3 is on
    losses = []
    for ours in (False, True):
        model = LlamaForCausalLM.from_pretrained(folder)
        utils.add_fused_lm_head(model, outputs=("log_probs", "entropy"))
        optimizer = torch.optim.SGD(model.parameters(), lr=5.0)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        if ours:
            apply()
        ids = torch.randint(3, 17, (2, 16), generator=torch.Generator().manual_seed(rank))
        losses.append([])
        for _ in range(3):
            output = engine(input_ids=ids, labels=ids, fused_lm_head=True)
            loss = output.loss - 0.1 * output.entropy.mean()
            engine.backward(loss)
            engine.step()
            losses[-1].append(loss.item())
    del kept
    Path(out, f"{rank}.json").write_text(json.dumps(losses))
    torch.distributed.destroy_process_group()


@pytest.mark.exhaustive
def test_zero3(folder, tmp_path, monkeypatch):
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is missing: .ci/run installs it")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    for name in ("LOCAL_RANK", "RANK"):
        monkeypatch.setenv(name, "0")
    torch.multiprocessing.spawn(zero3_rank, (2, str(folder), str(tmp_path)), 2)
    for rank in range(2):
        theirs, ours = json.loads((tmp_path / f"{rank}.json").read_text())
        assert ours == pytest.approx(theirs, rel=1e-5)
        assert max(theirs) - min(theirs) > 0.1  # the weights changed
