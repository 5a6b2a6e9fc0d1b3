#!/usr/bin/env python3
"""Builds every language model of the installed Transformers and compares it with and without quackish.

usage: python scripts/transformers_models.py [NAME ...] [--write docs/transformers_models.md]

Each `...ForCausalLM` and `...ForConditionalGeneration` has a small config and random weights, and runs a training step
on text on the CPU, without and with `apply(model, experts=True)`. Losses and all gradients must agree, and `revert`
must restore every bit.
"""

import argparse
import copy
import importlib
import inspect
import pkgutil
import re
import sys
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import torch
import transformers
from torch import nn

from quackish.integrations.transformers import Report, apply, report, revert

VOCABULARY = 97


def _values(**names: str) -> dict[str, int]:
    """{"hidden_size": 32, "d_model": 32} from _32="hidden_size d_model"."""
    return {name: int(value[1:]) for value, group in names.items() for name in group.split()}


# Attributes of configs
_TOKENS = _values(
    _97="vocab_size vocab_size_per_layer_input unpadded_vocab_size",
    _0="pad_token_id",
    _1="bos_token_id",
    _2="eos_token_id",
    _90="image_token_id image_token_index",
    _91="video_token_id video_token_index",
    _92="audio_token_id audio_token_index",
    _93="vision_start_token_id",
    _94="vision_end_token_id",
    _95="audio_start_token_id",
    _96="audio_end_token_id",
)
_LAYERS = _values(
    _2="num_hidden_layers n_layer n_layers num_layers decoder_layers num_decoder_layers",
    _1="encoder_layers depth layers",
)
_HEADS = _values(
    _2="num_key_value_heads",
    _4="num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads attention_heads",
    _8="head_dim d_kv kv_channels rotary_dim",
)
_SIZES = _values(
    _32="hidden_size d_model n_embd embed_dim word_embed_proj_dim embedding_size dim",
    _48="intermediate_size ffn_dim d_ff n_inner ffn_hidden_size decoder_ffn_dim encoder_ffn_dim mlp_dim",
    _64="max_position_embeddings n_positions max_seq_len model_max_length",
)
_EXPERTS = _values(
    _1="n_group topk_group first_k_dense_replace decoder_sparse_step n_shared_experts num_shared_experts "
    "moe_layer_start_index",
    _2="num_experts_per_tok moe_k moe_topk top_k_experts",
    _4="num_experts num_local_experts n_routed_experts moe_num_experts",
    _16="shared_expert_intermediate_size",
    _24="moe_intermediate_size expert_ffn_hidden_size",
)
_LATENT = _values(
    _2="index_n_heads",
    _4="index_topk",
    _8="qk_nope_head_dim qk_rope_head_dim v_head_dim",
    _16="q_lora_rank kv_lora_rank qk_head_dim index_head_dim",
)
_LINEAR = _values(
    _2="linear_num_key_heads mamba_expand expand",
    _4="linear_num_value_heads linear_num_heads mamba_d_conv mamba_n_heads mamba_num_heads time_step_rank "
    "mamba_dt_rank",
    _8="linear_key_head_dim linear_value_head_dim linear_head_dim mamba_d_state state_size ssm_state_size chunk_size "
    "mamba_chunk_size",
    _16="mamba_d_head mamba_head_dim",
    _64="mamba_d_ssm",
)
VISION = _values(
    _1="num_hidden_layers depth layers encoder_layers",
    _4="num_attention_heads num_heads attention_heads encoder_attention_heads",
    _8="head_dim",
    _14="patch_size",
    _16="num_position_embeddings",
    _28="image_size",
    _32="hidden_size embed_dim d_model out_hidden_size projection_dim output_dim vision_output_dim",
    _48="intermediate_size mlp_dim encoder_ffn_dim",
)
_TEXT = {**_TOKENS, **_LAYERS, **_HEADS, **_SIZES}
_FEW_HEADS = {**_TOKENS, **_LAYERS, **_SIZES, **_EXPERTS, **_LATENT, **_LINEAR}
_TWO = dict(num_attention_heads=2, num_key_value_heads=1)
# Tried one after the other, until a model builds and runs a step.
LEVELS = [
    {**_TEXT, **_EXPERTS, **_LATENT, **_LINEAR},
    {**_TEXT, **_EXPERTS, **_LATENT},
    {**_TEXT, **_EXPERTS},
    {**_TEXT, **_EXPERTS, **_LATENT, **_LINEAR, "num_hidden_layers": 8},
    {**_TEXT, "num_hidden_layers": 8},
    {**_TEXT, **_EXPERTS, **_LATENT, "num_key_value_heads": 4},
    {**_FEW_HEADS, **_TWO, "hidden_size": 256},  # rotary embeddings of three parts need heads of 128 or 64
    {**_FEW_HEADS, **_TWO, "hidden_size": 128},
    _FEW_HEADS,
    {**_TOKENS, **_LAYERS},
]
# What a model needs beside these values.
SPECIAL = {
    "DoryForCausalLM": dict(initializer_range=1.0),  # it divides queries by its square
    "GPTNeoForCausalLM": dict(attention_types=[[["global", "local"], 1]]),
    "Gemma3nForCausalLM": dict(num_kv_shared_layers=0),
    "Lfm2MoeForCausalLM": dict(layer_types=["conv", "full_attention"]),
    "Mamba2ForCausalLM": dict(num_heads=8),
}
LARGEST = 50_000_000  # parameters
TOLERANCE = 2e-4  # of the largest element of a gradient, in fp32


def model_classes() -> dict[str, type]:
    """Every language model of the installed Transformers, by name."""
    found = {}
    for package in pkgutil.iter_modules(transformers.models.__path__):
        try:
            module = importlib.import_module(f"transformers.models.{package.name}.modeling_{package.name}")
        except ImportError:  # a package without models, or one that needs another library
            continue
        for name, kind in vars(module).items():
            is_model = inspect.isclass(kind) and issubclass(kind, transformers.PreTrainedModel)
            if (
                is_model
                and kind.__module__ == module.__name__
                and re.search("For(CausalLM|ConditionalGeneration)$", name)
            ):
                found[name] = kind
    return dict(sorted(found.items()))


def small_config(kind: type, values: dict, vision: dict = VISION):
    """A config of a model class with those of `values` that it has, in its sub-configs too; `vision` are other ones."""

    def arguments(config_class: type, values: dict) -> dict:
        default = config_class()
        taken = {name: value for name, value in values.items() if _has(default, name)}
        for name in getattr(default, "sub_configs", {}):
            sub = getattr(default, name, None)
            if isinstance(sub, transformers.PreTrainedConfig):
                is_text = hasattr(sub, "vocab_size") and "vision" not in name and "audio" not in name
                sub_values = values if is_text else vision
                taken[name] = type(sub)(**arguments(type(sub), sub_values))
        return taken

    return kind.config_class(**arguments(kind.config_class, values))


def _has(config, name: str) -> bool:
    try:
        return hasattr(config, name)
    except Exception:  # of attributes with a value for each layer
        return False


def build(kind: type, config) -> nn.Module:
    """A model in training mode without dropout, with the same random weights in every call."""
    with torch.device("meta"):
        size = sum(p.numel() for p in kind(copy.deepcopy(config)).parameters())
    if size > LARGEST:
        raise ValueError(f"the small config has {size} parameters")
    model = kind(config).train()
    generator = torch.Generator().manual_seed(0)
    for p in model.parameters():
        if p.is_floating_point():
            mean, std = (0.0, 0.1) if p.dim() > 1 else (0.5, 0.3)
            with torch.no_grad():
                p.copy_(torch.randn(p.shape, generator=generator) * std + mean)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def text_batch(model: nn.Module) -> dict:
    """Arguments of a step on random text."""
    ids = torch.randint(3, 80, (2, 9), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, :4] = -100
    arguments, names = dict(input_ids=ids, labels=labels), inspect.signature(model.forward).parameters
    if "use_cache" in names or "kwargs" in names:
        arguments["use_cache"] = False
    for name in ("mm_token_type_ids", "token_type_ids"):
        if name in names:
            arguments[name] = torch.zeros_like(ids)
    return arguments


def step(model: nn.Module, arguments: dict) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss of one step, and the gradients."""
    torch.manual_seed(0)
    model.zero_grad()
    loss = model(**arguments).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@dataclass
class Result:
    name: str
    problem: str = ""  # why nothing could be compared
    entries: Report = field(default_factory=Report)
    differences: dict[str, float] = field(default_factory=dict)  # of the loss and the worst gradients, relative

    @property
    def is_wrong(self) -> bool:
        return any(not difference <= TOLERANCE for difference in self.differences.values())

    def patched(self, kind: str) -> tuple[int, int]:
        """How many modules of a kind are patched, and how many there are."""
        entries = [entry for entry in self.entries if entry.kind == kind]
        return sum(entry.is_patched for entry in entries), len(entries)


def compare(kind: type) -> Result:
    """Compares a model class with and without quackish."""
    result, problems = Result(kind.__name__), []
    for values in LEVELS:
        try:
            model = build(kind, small_config(kind, {**values, **SPECIAL.get(kind.__name__, {})}))
            arguments = text_batch(model)
            loss, grads = step(model, arguments)
            if not torch.isfinite(loss):
                raise ValueError("its loss is not finite")
        except Exception as error:  # anything that a model may raise
            problems.append(f"{type(error).__name__}: {' '.join(str(error).split())}")
            continue
        compare_step(model, arguments, loss, grads, result)
        return result
    result.problem = problems[0]
    return result


def compare_step(model: nn.Module, arguments: dict, loss: torch.Tensor, grads: dict, result: Result) -> None:
    """Runs a step with quackish, and writes into `result` how it differs from `loss` and `grads`, those without."""
    before = {name: t.clone() for name, t in model.state_dict().items()}
    classes = [type(module) for module in model.modules()]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            apply(model, experts=True)
    except ValueError:
        result.entries = report(model)
        return
    result.entries = report(model)
    got_loss, got = step(model, arguments)
    revert(model)
    worst = {"loss": ((got_loss - loss).abs() / loss.abs()).item()}
    largest = max(grad.abs().max().item() for grad in grads.values())  # others may be 0 but for rounding
    patched = {entry.name for entry in result.entries.patched if entry.kind == "experts"}
    for name, grad in grads.items():
        mine = got.get(name)
        if mine is None:
            worst[name] = float("inf")
            continue
        owner = name.rpartition(".")[0]
        if owner in patched and "gate_up" in name:
            mine = min((mine, interleaved(mine)), key=lambda t: (t - grad).abs().max())
        worst[name] = ((mine - grad).abs().max() / grad.abs().max().clamp(min=1e-3 * largest)).item()
    reverted = all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    reverted &= classes == [type(module) for module in model.modules()]
    worst["revert"] = 0.0 if reverted else float("inf")
    result.differences = dict(sorted(worst.items(), key=lambda item: -item[1])[:3])


def interleaved(grad: torch.Tensor) -> torch.Tensor:
    """The gradient of sorted weights in the order of gpt-oss."""
    return grad.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)


INTRODUCTION = """\
# Models of Transformers

`python scripts/transformers_models.py --write docs/transformers_models.md` wrote this page, with Transformers
{transformers} and PyTorch {torch}. It builds every `...ForCausalLM` and `...ForConditionalGeneration` on a small config
with random weights and runs a training step on text, in fp32 on a CPU, without and with `apply(model, experts=True)`.
In all models below the loss and every gradient agree within {tolerance:.0e} of the largest element, and `revert`
restores every bit.

"""


def page(results: list[Result]) -> str:
    """The page of the documentation."""
    versions = dict(transformers=transformers.__version__, torch=torch.__version__.partition("+")[0])
    built = [result for result in results if not result.problem]
    lines = []
    for ending in ("ForCausalLM", "ForConditionalGeneration"):
        group = [result for result in built if result.name.endswith(ending)]
        losses = sum(result.patched("loss")[0] for result in group)
        experts = [result.patched("experts") for result in group if result.patched("experts")[1]]
        all_patched = sum(patched == total for patched, total in experts)
        kinds = "mlp", "rotary", "residuals"
        mlps, rotary, sums = (sum(result.patched(kind)[0] > 0 for result in group) for kind in kinds)
        lines.append(
            f"- `...{ending}`: {len(group)} were compared. The loss is patched in {losses}, MLPs in {mlps}, "
            f"rotary embeddings in {rotary}, residual sums in {sums}. {len(experts)} have experts, which are all "
            f"patched in {all_patched}."
        )
    lines += [
        f"- {len(results) - len(built)} classes were not compared: they do not run on text alone, or need a config of "
        "their own.",
        "",
        '"Norms" counts patched norms of all, LayerNorms included, which are never patched. "MLPs" counts modules with',
        'the linears of one; those that are left have another activation, dropout, or other products. "Rotary" counts',
        'attention modules whose forward calls a function such as `apply_rotary_pos_emb`, and "sums" layers with a',
        "residual sum that a norm or an MLP adds.",
        "",
        "| model | loss | norms | MLPs | rotary | sums | experts | left, and why |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for result in built:
        loss, *others = (result.patched(kind) for kind in ("loss", "norm", "mlp", "rotary", "residuals", "experts"))
        left = {f"{type(entry.module).__name__}: {entry.reason}" for entry in result.entries.left if entry.is_expected}
        cells = result.name, "yes" if loss[0] else "no", *map(_of, others), cell("; ".join(sorted(left)))
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "| not compared | what its small config or step raised |", "|---|---|"]
    lines += [f"| {result.name} | {cell(result.problem)} |" for result in results if result.problem]
    return INTRODUCTION.format(**versions, tolerance=TOLERANCE) + "\n".join(lines) + "\n"


def _of(counts: tuple[int, int]) -> str:
    return f"{counts[0]} of {counts[1]}" if counts[1] else ""


def cell(text: str) -> str:
    return re.sub(r"[|<>\\]", " ", text)[:200]


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
        state = "WRONG" if result.is_wrong else "not compared" if result.problem else "compared"
        print(f"{name}: {state} {result.problem or result.differences}\n{result.entries}", flush=True)
    if options.write:
        options.write.write_text(page(results))
    if any(result.is_wrong for result in results):
        sys.exit("a model is WRONG")


if __name__ == "__main__":
    main()
