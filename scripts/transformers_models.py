#!/usr/bin/env python3
"""Builds every language model of the installed Transformers on a small config and compares it with and without quackish.

usage: python scripts/transformers_models.py [NAME ...] [--write docs/transformers_models.md]

Each `...ForCausalLM` and `...ForConditionalGeneration` runs a training step on text, with random weights on the CPU, before
`apply(model, experts=True)`, after it and after `revert`. Losses and all gradients must agree.
"""

import argparse
import copy
import gc
import importlib
import inspect
import pkgutil
import re
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
import transformers
from torch import nn

from quackish.integrations.transformers import Report, apply, report, revert

VOCABULARY = 97
# Values of a config's attributes, tried one after the other until a model builds and runs a step.
_TEXT = dict(
    vocab_size=VOCABULARY, vocab_size_per_layer_input=VOCABULARY, unpadded_vocab_size=VOCABULARY, max_position_embeddings=64, n_positions=64, max_seq_len=64, model_max_length=64,
    hidden_size=32, d_model=32, n_embd=32, embed_dim=32, word_embed_proj_dim=32, embedding_size=32, dim=32,
    intermediate_size=48, ffn_dim=48, d_ff=48, n_inner=48, ffn_hidden_size=48, decoder_ffn_dim=48, encoder_ffn_dim=48, mlp_dim=48,
    num_hidden_layers=2, n_layer=2, n_layers=2, num_layers=2, decoder_layers=2, encoder_layers=1, num_decoder_layers=2, depth=1, layers=1,
    num_attention_heads=4, n_head=4, n_heads=4, num_heads=4, decoder_attention_heads=4, encoder_attention_heads=4, attention_heads=4,
    num_key_value_heads=2, head_dim=8, d_kv=8, kv_channels=8,
    pad_token_id=0, bos_token_id=1, eos_token_id=2, image_token_id=90, video_token_id=91, audio_token_id=92, image_token_index=90, video_token_index=91, audio_token_index=92,
    vision_start_token_id=93, vision_end_token_id=94, audio_start_token_id=95, audio_end_token_id=96,
)  # fmt: skip
_EXPERTS = dict(
    num_experts=4, num_local_experts=4, n_routed_experts=4, moe_num_experts=4, num_experts_per_tok=2, moe_k=2, moe_topk=2, top_k_experts=2, moe_intermediate_size=24, expert_ffn_hidden_size=24,
    n_group=1, topk_group=1, shared_expert_intermediate_size=16, first_k_dense_replace=1, decoder_sparse_step=1, n_shared_experts=1, num_shared_experts=1, moe_layer_start_index=1,
)  # fmt: skip
_LATENT = dict(q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8, qk_head_dim=16, index_head_dim=16, index_n_heads=2, index_topk=4)  # fmt: skip
_LINEAR = dict(
    linear_key_head_dim=8, linear_value_head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4, linear_head_dim=8, linear_num_heads=4, mamba_d_state=8, mamba_d_conv=4, mamba_n_heads=4, mamba_d_head=16, mamba_expand=2, state_size=8,
    mamba_num_heads=4, mamba_head_dim=16, expand=2, time_step_rank=4, ssm_state_size=8, mamba_dt_rank=4, chunk_size=8, mamba_chunk_size=8,
)  # fmt: skip
_VISION = dict(
    hidden_size=32, embed_dim=32, intermediate_size=48, mlp_dim=48, num_hidden_layers=1, depth=1, layers=1, num_attention_heads=4, num_heads=4, attention_heads=4, head_dim=8, image_size=28, patch_size=14,
    out_hidden_size=32, projection_dim=32, output_dim=32, vision_output_dim=32, num_position_embeddings=16, d_model=32, encoder_layers=1, encoder_attention_heads=4, encoder_ffn_dim=48,
)  # fmt: skip
LEVELS = [
    {**_TEXT, **_EXPERTS, **_LATENT, **_LINEAR},
    {**_TEXT, **_EXPERTS, **_LATENT},
    {**_TEXT, **_EXPERTS},
    {**_TEXT, **_EXPERTS, **_LATENT, **_LINEAR, "num_hidden_layers": 8},
    {**_TEXT, "num_hidden_layers": 8},
    {name: value for name, value in {**_TEXT, **_EXPERTS}.items() if name not in ("head_dim", "num_key_value_heads")},
    {name: value for name, value in _TEXT.items() if "token" in name or "vocab" in name or "layers" in name},
]
LARGEST = 40_000_000  # parameters


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
            if is_model and kind.__module__ == module.__name__ and re.search("For(CausalLM|ConditionalGeneration)$", name):
                found[name] = kind
    return dict(sorted(found.items()))


def small_config(kind: type, values: dict):
    """A config of a model class with those of `values` that it has, in its sub-configs too."""

    def arguments(config_class: type, values: dict) -> dict:
        default = config_class()
        taken = {name: value for name, value in values.items() if hasattr(default, name)}
        for name, sub_class in getattr(default, "sub_configs", {}).items():
            sub = getattr(default, name, None)
            if isinstance(sub, transformers.PreTrainedConfig):
                is_text = hasattr(sub, "vocab_size") and "vision" not in name and "audio" not in name
                sub_values = values if is_text else _VISION
                taken[name] = type(sub)(**arguments(type(sub), sub_values))
        return taken

    return kind.config_class(**arguments(kind.config_class, values))


def build(kind: type, config) -> nn.Module:
    """A model in training mode, with the same random weights in every call. Draws without the global generator's seed."""
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


def step(model: nn.Module) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss of one step on random text, and the gradients."""
    ids = torch.randint(3, 80, (2, 9), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, :4] = -100
    arguments = dict(input_ids=ids, labels=labels)
    if "mm_token_type_ids" in inspect.signature(model.forward).parameters:
        arguments["mm_token_type_ids"] = torch.zeros_like(ids)
    if "token_type_ids" in inspect.signature(model.forward).parameters:
        arguments["token_type_ids"] = torch.zeros_like(ids)
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
    differences: dict[str, float] = field(default_factory=dict)  # of the loss and the worst gradient, relative
    seconds: float = 0.0


def compare(kind: type) -> Result:
    """Compares a model class with and without quackish."""
    result, start = Result(kind.__name__), time.perf_counter()
    model = None
    for values in LEVELS:
        try:
            model = build(kind, small_config(kind, values))
            loss, grads = step(model)
            if not torch.isfinite(loss):
                raise ValueError("its loss is not finite")
            break
        except Exception as error:  # anything that a model may raise
            model = None
            result.problem = result.problem or f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"[:150]
    if model is not None:
        result.problem = ""
        _compare(model, loss, grads, result)
    result.seconds = time.perf_counter() - start
    return result


def _compare(model: nn.Module, loss: torch.Tensor, grads: dict, result: Result) -> None:
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
    got_loss, got = step(model)
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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    classes = model_classes()
    for name, kind in classes.items():
        if not options.names or name in options.names:
            signal.alarm(120)
            r = compare(kind)
            kinds = {k: f"{sum(e.is_patched for e in r.entries if e.kind == k)}/{sum(e.kind == k for e in r.entries)}" for k in ("norm", "loss", "experts")}
            print(name, f"{r.seconds:.1f}", r.problem or (kinds, {k: f"{v:.1g}" for k, v in r.differences.items()}), flush=True)
            if options.names:
                print(r.entries)
            gc.collect()


if __name__ == "__main__":
    main()
