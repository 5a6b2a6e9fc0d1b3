"""Models of the installed Transformers with and without quackish, built by scripts/transformers_models.py.

scripts/transformers_attention.py runs the same ones with quackish's attention.
"""

import importlib
import re
from pathlib import Path

import pytest

import quackish

transformers = pytest.importorskip("transformers", minversion="5")

SCRIPTS = Path(__file__).parents[2] / "scripts"


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


def _not_compared(page):
    text = (SCRIPTS.parent / page).read_text(encoding="utf-8")
    failed = set(re.findall(r"^\| (\w+) \|", text.partition("\n| not compared |")[2], re.MULTILINE))
    assert 0 < len(failed) < 100
    return failed


@pytest.mark.exhaustive(first=True)
def test_all_models(script):
    """Except those that docs/transformers_models.md lists as not compared: each fails with all ten small configs."""
    failed = _not_compared("docs/transformers_models.md")
    results = [script.compare(kind) for name, kind in script.model_classes().items() if name not in failed]
    wrong = [(result.name, result.differences) for result in results if result.is_wrong]
    assert not wrong
    losses = {result.name for result in results if result.patched("loss")[0]}
    assert sum(name.endswith("ForCausalLM") for name in losses) >= 110
    assert sum(result.patched("experts")[0] > 0 for result in results) >= 44
    assert script.page(results).count("\n| ") == len(results) + 2


@pytest.fixture
def attention_script(script):
    return importlib.import_module("transformers_attention")


# "" for those that compute the same, and else why not.
ATTENTION = {
    "BloomForCausalLM": "has attention code of its own",
    "DeepseekV32ForCausalLM": "passes the argument 'indices'",
    "FalconForCausalLM": "has attention code of its own",
    "Gemma2ForCausalLM": "",
    "GPTNeoForCausalLM": "has attention code of its own",
    "Inkling2ForCausalLM": r"has attention sinks \(sinks\)",
    "Qwen3NextForCausalLM": "",
    "T5GemmaForConditionalGeneration": "",
}


@pytest.mark.parametrize("name", ATTENTION)
def test_attention(attention_script, name):
    if not hasattr(transformers, name):
        pytest.skip(f"Transformers {transformers.__version__} has no {name}")
    result = attention_script.compare(getattr(transformers, name))
    assert (result.problem, result.is_wrong) == ("", False)
    assert bool(result.refused) == bool(ATTENTION[name])
    assert re.search(ATTENTION[name], result.refused)


def test_differences_of_attention_are_noticed(attention_script, monkeypatch):
    attend = quackish.scaled_dot_product_attention

    def wrong(*args, **options):
        return attend(*args, **options | {"is_causal": False})

    monkeypatch.setattr(quackish, "scaled_dot_product_attention", wrong)
    assert attention_script.compare(transformers.LlamaForCausalLM).is_wrong


@pytest.mark.exhaustive(first=True)
def test_attention_of_all_models(script, attention_script):
    failed = _not_compared("docs/transformers_attention.md")
    results = [attention_script.compare(kind) for name, kind in script.model_classes().items() if name not in failed]
    assert not [(result.name, result.differences) for result in results if result.is_wrong]
    assert sum(result.state == "same" and result.calls > 0 for result in results) >= 190
    assert attention_script.page(results).count("\n| ") == len(results) + 3
