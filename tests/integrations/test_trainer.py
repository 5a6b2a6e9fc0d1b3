"""The callback of Transformers' Trainer, as a configuration file would name it."""

import importlib

import pytest
import torch

import quackish

for package in ("transformers", "accelerate"):
    pytest.importorskip(package, reason="needs the extra integrations")
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments  # noqa: E402

pytestmark = pytest.mark.integrations
TARGET = "quackish.integrations.trainer.QuackishCallback"
SIZES = dict(vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)


def model_and_rows():
    torch.manual_seed(0)
    ids = torch.randint(97, (16, 12))
    return LlamaForCausalLM(LlamaConfig(**SIZES)), [dict(input_ids=row, labels=row) for row in ids]


def callback(**options):
    module, _, name = TARGET.rpartition(".")
    return getattr(importlib.import_module(module), name)(**options)


def trained(folder, callbacks=()):
    model, rows = model_and_rows()
    arguments = TrainingArguments(
        str(folder), use_cpu=True, per_device_train_batch_size=4, max_steps=4, logging_steps=1, learning_rate=1e-2,
        report_to=[], save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=rows, callbacks=list(callbacks))
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    return model, [(log["loss"], log["grad_norm"]) for log in logs]


def test_trainer_learns_the_same(tmp_path, monkeypatch):
    _, theirs = trained(tmp_path)
    calls = []
    function = quackish.linear_cross_entropy
    monkeypatch.setattr(quackish, "linear_cross_entropy", lambda *a, **kw: calls.append(kw) or function(*a, **kw))
    model, ours = trained(tmp_path, [callback(schedule="recompute")])
    steps = [call for call in calls if call["schedule"] == "recompute"]  # without those of apply's trial
    assert len(steps) == len(ours) == 4
    assert type(model.model.norm).forward is not type(model_and_rows()[0].model.norm).forward
    for got, want in zip(ours, theirs, strict=True):
        assert got == pytest.approx(want, rel=1e-4)


def test_errors_of_apply_are_raised(tmp_path):
    with pytest.raises(ValueError, match="nothing to patch"):
        trained(tmp_path, [callback(norms=False, head=False, mlp=False, rotary=False)])
    with pytest.raises(TypeError, match=r"QuackishCallback has no option 'shedule'; .* did you mean schedule"):
        callback(shedule="recompute")


@pytest.mark.parametrize(
    "options, head, norms", [({}, True, True), (dict(norms=False), True, False), (dict(head=False), False, True)]
)
def test_in_trls_trainers(options, head, norms, tmp_path):
    trl = pytest.importorskip("trl", minversion="1.16", reason="needs the extra integrations")
    from trl.trainer import utils

    from quackish.integrations.trl import revert

    model, _ = model_and_rows()
    theirs, norm = utils._ChunkedLogProbFunction, type(model.model.norm)
    arguments = trl.SFTConfig(str(tmp_path), use_cpu=True, bf16=False)
    try:
        callback(schedule="stored", **options).on_init_end(arguments, None, None, model=model)
        assert (utils._ChunkedLogProbFunction is not theirs) == head
        if head:
            assert utils._ChunkedLogProbFunction.options["schedule"] == "stored"
        assert (type(model.model.norm) is not norm) == norms
        assert type(model) is LlamaForCausalLM  # TRL computes the loss
    finally:
        revert()
