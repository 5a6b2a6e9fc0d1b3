"""Multimodal models on text with images, without and with quackish, built by scripts/transformers_models.py."""

import collections
import functools
import importlib
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

import quackish

transformers = pytest.importorskip("transformers", minversion="5")
from quackish.integrations.transformers import apply, revert  # noqa: E402
from tests.variants import one_per  # noqa: E402


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "scripts"))
    return importlib.import_module("transformers_models")


def noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(2))


# Two images, as the arguments of a model's forward.

SIDE, PATCH = 56, 14
VISION = dict(image_size=SIDE, vision_output_dim=32, projector_input_dim=32, projector_output_dim=32)
GRID = torch.tensor([[1, 4, 4], [1, 4, 8]])  # frames, rows and columns of patches


def squares(vision) -> dict:
    return dict(pixel_values=noise(2, 3, SIDE, SIDE))


def one_tile_each(vision) -> dict:
    return dict(pixel_values=noise(2, 1, 3, SIDE, SIDE))


def padded(vision) -> dict:
    return dict(pixel_values=noise(2, 3, SIDE, SIDE), image_sizes=torch.tensor([[SIDE, SIDE], [SIDE, SIDE // 2]]))


def in_two_tiles_and_whole(vision) -> dict:
    return dict(pixel_values=noise(2, 3, 3, SIDE, SIDE), image_sizes=torch.tensor([[SIDE, 2 * SIDE]] * 2))


def grid(vision) -> dict:
    """Patches of both images, one after the other."""
    elements = 3 * getattr(vision, "temporal_patch_size", 1) * PATCH**2
    return dict(pixel_values=noise(int(GRID.prod(-1).sum()), elements), image_grid_thw=GRID)


def merged_grid(vision) -> dict:
    return dict(grid(vision), image_merge_sizes=torch.tensor([2, 2]))


def grid_of_squares(vision) -> dict:
    return dict(pixel_values=noise(int(GRID.prod(-1).sum()), 3, PATCH, PATCH), image_grid_thw=GRID)


def padded_patches(vision) -> dict:
    masks = torch.tensor([[1] * 16, [1] * 8 + [0] * 8])
    shapes = torch.tensor([[4, 4], [4, 2]])
    return dict(pixel_values=noise(2, 16, 3 * PATCH**2), spatial_shapes=shapes, pixel_attention_mask=masks)


def positioned_patches(vision) -> dict:
    positions = torch.cartesian_prod(torch.arange(6), torch.arange(6)).expand(2, -1, -1)
    return dict(pixel_values=noise(2, 36, 3 * PATCH**2), image_position_ids=positions)


class Case(NamedTuple):
    images: Callable[[object], dict]
    vision: str  # the kinds of patched modules outside the language model
    values: dict | None = None  # of the config, beside the script's
    vision_values: dict | None = None


ROTARY = dict(rope_type="default", rope_theta=1e4, mrope_section=[2, 1, 1])
SECTIONS = dict(rope_parameters=ROTARY)
PER_LAYER_TYPE = dict(rope_parameters=dict(full_attention=ROTARY, sliding_attention=ROTARY))
ERNIE = dict(moe_intermediate_size=[24, 16], rope_parameters=dict(ROTARY, mrope_section=[1, 1, 2]))
PINPOINTS = dict(image_grid_pinpoints=[[SIDE, SIDE], [SIDE, 2 * SIDE], [2 * SIDE, SIDE]])
GEMMA4_VISION = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, head_dim=8,
    patch_size=PATCH, position_embedding_size=64,
)  # fmt: skip
MODELS = {
    "Aria": Case(squares, "mlp residuals", dict(projector_patch_to_query_dict={16: 4})),
    "AyaVision": Case(squares, "mlp residuals"),
    "Cohere2Vision": Case(squares, "mlp residuals"),
    "CohereCompass": Case(grid, "mlp residuals", PER_LAYER_TYPE, dict(deepstack_visual_indexes=[0])),
    "DeepseekVL": Case(squares, "mlp residuals"),
    "Ernie4_5_VLMoe": Case(grid, "norm", ERNIE),
    "Exaone4_5_": Case(grid, "mlp norm residuals", vision_values=dict(num_key_value_heads=4)),
    "Gemma3": Case(squares, "mlp norm residuals", dict(mm_tokens_per_image=4)),
    "Gemma4": Case(positioned_patches, "norm residuals", dict(vision_config=GEMMA4_VISION)),
    "Glm4v": Case(grid, "mlp norm residuals", SECTIONS),
    "GotOcr2": Case(squares, "mlp"),
    "Idefics2": Case(one_tile_each, "mlp norm residuals"),
    "Idefics3": Case(one_tile_each, "mlp residuals"),
    "InternVL": Case(squares, "mlp"),
    "Lfm2Vl": Case(padded_patches, "mlp residuals"),
    "LightOnOcr": Case(padded, "mlp norm residuals rotary"),
    "Llama4": Case(squares, "mlp residuals", vision_values=dict(intermediate_size=128)),
    "Llava": Case(squares, "mlp"),
    "LlavaNext": Case(in_two_tiles_and_whole, "mlp", PINPOINTS),
    "LlavaOnevision": Case(in_two_tiles_and_whole, "mlp residuals", PINPOINTS),
    "Mistral3": Case(padded, "mlp norm residuals rotary"),
    "Ovis2": Case(squares, "mlp norm residuals"),
    "PaddleOCRVL": Case(grid_of_squares, "mlp residuals", SECTIONS),
    "PaliGemma": Case(squares, "mlp residuals", dict(projection_dim=32)),
    "Qwen2_5_VL": Case(grid, "mlp norm residuals", SECTIONS),
    "Qwen2VL": Case(grid, "", SECTIONS),
    "Qwen3_5Moe": Case(grid, "mlp residuals"),
    "Qwen3VL": Case(grid, "mlp residuals"),
    "Qwen3VLMoe": Case(grid, "mlp residuals"),
    "SmolVLM": Case(one_tile_each, "mlp residuals"),
    "VideoLlama3": Case(merged_grid, "mlp residuals"),
    "VipLlava": Case(squares, "", dict(vision_feature_layer=[-1, -2], vision_feature_layers=[-1, -2])),
}


def tokens_of_images(model: nn.Module, images: dict) -> list[int]:
    """The number of image tokens that a model expects of each of two images."""
    get_features = (model if hasattr(model, "get_image_features") else model.model).get_image_features
    strategy = inspect.signature(get_features).parameters.get("vision_feature_select_strategy")
    if strategy is not None and strategy.default is strategy.empty:  # Llama 4 of Transformers 5.17
        images = dict(images, vision_feature_select_strategy="default")
    with torch.no_grad():
        output = get_features(**images, return_dict=True)
    features = output.last_hidden_state if output.pooler_output is None else output.pooler_output
    if isinstance(features, Tensor):
        features = features.flatten(0, -2).chunk(2)
    return [len(part) for part in features]


def batch(model: nn.Module, images: dict) -> dict:
    """Two sequences with an image in each, between text; the shorter one is padded."""
    config, lengths = model.config, tokens_of_images(model, images)
    image_token = getattr(config, "image_token_id", None) or config.image_token_index
    ids = torch.randint(3, 80, (2, max(lengths) + 10), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    for row, length in enumerate(lengths):
        ids[row, 3] = getattr(config, "vision_start_token_id", None) or ids[row, 3]
        ids[row, 4 : 4 + length] = image_token
        mask[row, 4 + length + 6 - row :] = 0
    ids[mask == 0] = 0
    is_image = ids == image_token
    labels = ids.masked_fill(is_image | (mask == 0), -100)
    arguments = dict(images, input_ids=ids, attention_mask=mask, labels=labels, use_cache=False)
    names = inspect.signature(model.forward).parameters
    types = {name: is_image.long() for name in ("mm_token_type_ids", "token_type_ids") if name in names}
    return {**arguments, **types}


class Calls:
    """Records the calls of quackish's functions: their tensors, and how many there are."""

    def __init__(self, monkeypatch):
        self.tensors, self.count, self.residuals = set(), collections.Counter(), 0
        for name in ("rms_norm", "mlp", "rotary", "linear_cross_entropy", "moe_mlp"):
            monkeypatch.setattr(quackish, name, functools.partial(self._call, name, getattr(quackish, name)))

    def _call(self, name: str, function: Callable, *args, **options):
        self.tensors.update(id(t) for t in (*args, *options.values()) if isinstance(t, Tensor))
        self.count[name] += 1
        self.residuals += options.get("residual") is not None
        return function(*args, **options)


@pytest.mark.parametrize("name", one_per(lambda name: MODELS[name][:2], MODELS))
def test_images(script, monkeypatch, name):
    kind, case = getattr(transformers, f"{name}ForConditionalGeneration", None), MODELS[name]
    if kind is None:
        pytest.skip(f"Transformers {transformers.__version__} has no {name}ForConditionalGeneration")
    if name == "Llama4":  # the forward of Transformers 5.24 reads a field that this output lacks
        output = transformers.modeling_outputs.MoeCausalLMOutputWithPast
        monkeypatch.setattr(output, "image_outputs", None, raising=False)
    values = {**script.LEVELS[0], **(case.values or {})}
    vision_values = {**script.VISION, **VISION, **(case.vision_values or {})}
    model = script.build(kind, script.small_config(kind, values, vision_values))
    arguments = batch(model, case.images(model.config.vision_config))
    loss, grads = script.step(model, arguments)
    revert(apply(model, experts=True))  # trials are cached, so that the calls below are those of the step
    calls, result = Calls(monkeypatch), script.Result(name)
    script.compare_step(model, arguments, loss, grads, result)
    assert not result.is_wrong, result.differences

    assert any("vis" in name for name in grads)
    trained = collections.defaultdict(list)
    for entry in result.entries.patched:
        if any(p.grad is not None for p in entry.module.parameters()):
            trained[entry.kind].append(entry)
    patched = {kind for kind in trained for entry in trained[kind] if not re.search("^$|language|text", entry.name)}
    assert " ".join(sorted(patched)) == case.vision
    for entry in (*trained["norm"], *trained["mlp"], *trained["loss"]):
        assert not calls.tensors.isdisjoint(map(id, entry.module.parameters())), f"{entry} did not run"
    rotations = [entry for entry in trained["rotary"] if "Pixtral" not in type(entry.module).__name__]
    assert calls.count["rotary"] == len(rotations)  # Pixtral's tables have two dimensions
    assert calls.count["moe_mlp"] == len(trained["experts"])
    assert calls.residuals >= len(trained["residuals"])
