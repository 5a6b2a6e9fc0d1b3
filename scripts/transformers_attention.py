#!/usr/bin/env python3
"""Runs every language model of the installed Transformers with quackish's attention, beside eager attention.

usage: python scripts/transformers_attention.py [NAME ...] [--write docs/transformers_attention.md]

The models are those of transformers_models.py, with small configs and random weights. Each runs a training step on text
with padding in one row and one without, with attn_implementation="eager" and "quackish". Losses, logits and all
gradients must agree, or the model must raise UnsupportedError.
"""

import argparse
import copy
import sys
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import torch
import transformers
from torch import nn

from quackish.errors import UnsupportedError
from quackish.integrations.transformers import attention, register_attention
from transformers_models import LEVELS, SPECIAL, TOLERANCE, build, cell, model_classes, small_config, text_batch

PADDED = 3  # tokens at the left of row 1
# Layers with attention in models of which few have it.
HYBRID = {
    "BailingHybridForCausalLM": dict(layer_group_size=2),
    "BambaForCausalLM": dict(attn_layer_indices=[1]),
    "GraniteMoeHybridForCausalLM": dict(layer_types=["mamba", "attention"], layers_block_type=["mamba", "attention"]),
    "JambaForCausalLM": dict(attn_layer_period=2, attn_layer_offset=1),
    "KimiLinearForCausalLM": dict(layer_types=["linear_attention", "full_attention"]),
    "Lfm3ForCausalLM": dict(layer_types=["conv", "full_attention"]),
    "Lfm3VlForConditionalGeneration": dict(layer_types=["conv", "full_attention"]),
    "RecurrentGemmaForCausalLM": dict(block_types=["recurrent", "attention"]),
}


@dataclass
class Result:
    name: str
    problem: str = ""  # why nothing could be compared
    refused: str = ""  # the message of UnsupportedError
    calls: int = 0  # of quackish's attention function
    differences: dict[str, float] = field(default_factory=dict)  # the worst ones, relative

    @property
    def is_wrong(self) -> bool:
        return any(not difference <= TOLERANCE for difference in self.differences.values())

    @property
    def state(self) -> str:
        if self.problem:
            return "not compared"
        return "refused" if self.refused else "WRONG" if self.is_wrong else "same"


def steps(model: nn.Module) -> dict[str, torch.Tensor]:
    """Losses, logits and gradients of a step with and without padding. Logits of padding are left out."""
    found = {}
    for padded in (True, False):
        arguments = text_batch(model)
        keep = torch.ones_like(arguments["input_ids"])
        if padded:
            keep[1, :PADDED] = 0
            arguments["attention_mask"] = keep
            arguments["labels"][1, : PADDED + 1] = -100
        torch.manual_seed(0)
        model.zero_grad()
        output = model(**arguments)
        output.loss.backward()
        name = "padded " if padded else ""
        found[f"{name}loss"] = output.loss.detach()
        logits = getattr(output, "logits", None)
        if isinstance(logits, torch.Tensor) and logits.shape[:2] == keep.shape:
            found[f"{name}logits"] = logits.detach()[keep.bool()]
        found |= {name + key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
    return found


def compare(kind: type) -> Result:
    """Compares quackish's attention and eager attention, in the first config with attention in which the model runs."""
    best, problems = None, []
    for values in LEVELS:
        try:
            config = small_config(kind, {**values, **SPECIAL.get(kind.__name__, {}), **HYBRID.get(kind.__name__, {})})
            if getattr(config, "decoder_start_token_id", None) is None:
                config.decoder_start_token_id = 0
            want = steps(_build(kind, config, "eager"))
            if not all(torch.isfinite(t).all() for t in want.values()):
                raise ValueError("its loss or gradients are not finite")
        except Exception as error:  # anything that a model may raise
            problems.append(f"{type(error).__name__}: {' '.join(str(error).split())}")
            continue
        result = _compare(kind, config, want)
        if result.calls or result.state != "same":
            return result
        best = best or result
    return best or Result(kind.__name__, problems[0])


def _build(kind: type, config, implementation: str) -> nn.Module:
    config = copy.deepcopy(config)
    config._attn_implementation = implementation
    model = build(kind, config)
    for module in model.modules():
        for name, value in vars(module).items():
            if "dropout" in name and isinstance(value, float):
                setattr(module, name, 0.0)
    return model


def _compare(kind: type, config, want: dict[str, torch.Tensor]) -> Result:
    result = Result(kind.__name__)
    register_attention()
    theirs = attention.attention_forward

    def counted(*args, **options):
        result.calls += 1
        return theirs(*args, **options)

    transformers.AttentionInterface.register("quackish", counted)
    try:
        got = steps(_build(kind, config, "quackish"))
    except UnsupportedError as error:
        result.refused = str(error)
        return result
    except Exception as error:
        result.differences = {f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]: float("inf")}
        return result
    finally:
        register_attention()
    worst = {}
    for padding in ("padded ", ""):
        names = [name for name in want if name.startswith("padded ") == bool(padding)]
        grads = [name for name in names if name.removeprefix(padding) not in ("loss", "logits")]
        largest = max(want[name].abs().max().item() for name in grads)  # others may be 0 but for rounding
        for name in names:
            scale = want[name].abs().max().clamp(min=1e-3 * largest if name in grads else 0)
            mine = got.get(name)
            worst[name] = float("inf") if mine is None else ((mine - want[name]).abs().max() / scale).item()
    result.differences = dict(sorted(worst.items(), key=lambda item: -item[1])[:3])
    return result


INTRODUCTION = """\
# Attention in models of Transformers

`python scripts/transformers_attention.py --write docs/transformers_attention.md` wrote this page, with Transformers
{transformers} and PyTorch {torch}. It runs every `...ForCausalLM` and `...ForConditionalGeneration` that
[runs on text with a small config](transformers_models.md) with
[`attn_implementation="quackish"`](guides/transformers.md#attention) beside `"eager"`: training steps in fp32 on a CPU,
with padding in one row and without. Losses, logits and every gradient agree within {tolerance:.0e} of the largest
element, or the model raises an `UnsupportedError`.

"""


def page(results: list[Result]) -> str:
    """The page of the documentation."""
    versions = dict(transformers=transformers.__version__, torch=torch.__version__.partition("+")[0])
    same, refused, left = ([r for r in results if r.state == state] for state in ("same", "refused", "not compared"))
    lines = [
        f"- {len(same)} models are the same. In {sum(not r.calls for r in same)} of them quackish's attention does not "
        "run: they have none, or code of their own with masks of their own.",
        f"- {len(refused)} models are refused.",
        f"- {len(left)} classes were not compared.",
        "",
        "| refused | why |",
        "|---|---|",
    ]
    lines += [f"| {r.name} | {cell(r.refused.partition('; ')[0])} |" for r in refused]
    lines += ["", "| the same | runs quackish's attention |", "|---|---|"]
    lines += [f"| {r.name} | {'yes' if r.calls else 'no'} |" for r in same]
    lines += ["", "| not compared | what its small config or step raised |", "|---|---|"]
    lines += [f"| {r.name} | {cell(r.problem)} |" for r in left]
    return INTRODUCTION.format(**versions, tolerance=TOLERANCE) + "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("names", nargs="*", help="classes, by default all")
    parser.add_argument("--write", type=Path, help="the page to write")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    results = []
    for name, kind in model_classes().items():
        if options.names and name not in options.names:
            continue
        results.append(result := compare(kind))
        print(f"{name}: {result.state} {result.problem or result.refused or result.differences}", flush=True)
    if options.write:
        options.write.write_text(page(results))
    if any(result.is_wrong for result in results):
        sys.exit("a model is WRONG")


if __name__ == "__main__":
    main()
