"""Models of the installed Transformers with and without quackish, built by scripts/transformers_models.py."""

import importlib
import re
from pathlib import Path

import pytest

import quackish

transformers = pytest.importorskip("transformers", minversion="5")

SCRIPTS = Path(__file__).parents[1] / "scripts"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("transformers_models")


# One for each way in which models differ. (loss, norms, experts) patched: True for all, False for none.
MODELS = {
    "BambaForCausalLM": (True, None, None),  # a gated norm is left
    "DeepseekV3ForCausalLM": (True, True, True),
    "FalconForCausalLM": (True, False, None),  # LayerNorms
    "FalconH1ForCausalLM": (True, True, None),  # a scale that its backbone holds
    "Gemma3ForConditionalGeneration": (True, None, None),
    "GptOssForCausalLM": (True, True, True),
    "Llama4ForCausalLM": (True, True, True),
    "LlavaForConditionalGeneration": (True, None, None),
    "NemotronHForCausalLM": (True, None, True),  # experts without a gate
    "PaliGemmaForConditionalGeneration": (True, None, None),
    "Qwen2_5_VLForConditionalGeneration": (True, None, None),
    "Qwen3NextForCausalLM": (True, None, True),
    "T5GemmaForConditionalGeneration": (False, True, None),  # its labels are not shifted
}


@pytest.mark.parametrize("name", MODELS)
def test_model(script, name):
    result = script.compare(getattr(transformers, name))
    assert result.problem == ""
    assert not result.is_wrong, result.differences
    assert result.differences
    for kind, expected in zip(("loss", "norm", "experts"), MODELS[name], strict=True):
        patched, total = result.patched(kind)
        if expected is not None:
            assert total > 0
            assert patched == (total if expected else 0), str(result.entries)


def test_differences_are_noticed(script, monkeypatch):
    """A norm with a wrong gradient that its trial, which is cached, has not seen."""
    kind, rms_norm = transformers.LlamaForCausalLM, quackish.rms_norm
    assert not script.compare(kind).is_wrong

    def wrong(x, *args, **options):
        return rms_norm(1.001 * x - 0.001 * x.detach(), *args, **options)

    monkeypatch.setattr(quackish, "rms_norm", wrong)
    assert script.compare(kind).is_wrong


@pytest.mark.exhaustive(first=True)
def test_all_models(script):
    """Except those that docs/transformers_models.md lists as not compared: each fails with all ten small configs."""
    page = (SCRIPTS.parent / "docs/transformers_models.md").read_text(encoding="utf-8")
    failed = set(re.findall(r"^\| (\w+) \|", page.partition("\n| not compared |")[2], re.MULTILINE))
    assert len(failed) < 100
    results = [script.compare(kind) for name, kind in script.model_classes().items() if name not in failed]
    wrong = [(result.name, result.differences) for result in results if result.is_wrong]
    assert not wrong
    losses = {result.name for result in results if result.patched("loss")[0]}
    assert sum(name.endswith("ForCausalLM") for name in losses) >= 110
    assert sum(result.patched("experts")[0] > 0 for result in results) >= 44
    assert script.page(results).count("\n| ") == len(results) + 2
