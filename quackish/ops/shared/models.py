"""Public models, whose shapes the tools know by name.

Sizes are those of each model's config.json on Hugging Face.
"""

from collections.abc import Mapping
from typing import NamedTuple

Shapes = dict[tuple[int, ...], str]  # {shape: name of the model and layer}


class Model(NamedTuple):
    name: str
    source: str  # on huggingface.co
    hidden: int  # hidden_size
    vocab: int  # vocab_size
    norms: Mapping[str, tuple[int, int]] = {}  # norms of other sizes: {name: (N, rows per token)}
    experts: tuple[int, int, int] | None = None  # intermediate size, number of experts, experts per token
    intermediate: int | None = None  # intermediate_size, of dense layers

    def norm_shapes(self, tokens: int) -> Shapes:
        """(M, N) of all norms."""
        shapes: Shapes = {(tokens * rows, n): f"{self.name} {norm}" for norm, (n, rows) in self.norms.items()}
        return {(tokens, self.hidden): self.name} | shapes

    def head_shapes(self, tokens: int) -> Shapes:
        """(M, H, V) of the language model head."""
        return {(tokens, self.hidden, self.vocab): self.name}

    def mlp_shapes(self, tokens: int) -> Shapes:
        """(M, H, I) of the dense MLPs; empty for a model without them."""
        return {} if self.intermediate is None else {(tokens, self.hidden, self.intermediate): self.name}

    def expert_shapes(self, tokens: int) -> Shapes:
        """(R, H, I, E) of the experts; empty for a dense model."""
        if self.experts is None:
            return {}
        intermediate, count, per_token = self.experts
        return {(tokens * per_token, self.hidden, intermediate, count): self.name}

    def moe_shapes(self, tokens: int) -> Shapes:
        """(T, H, I, E, K) of the experts and their router; empty for a dense model."""
        return {} if self.experts is None else {(tokens, self.hidden, *self.experts): self.name}


def _qk(head_dim: int, heads: int, kv_heads: int) -> dict[str, tuple[int, int]]:
    """QK-norm: one row of head_dim per attention head and per key-value head."""
    return {"q_norm": (head_dim, heads), "k_norm": (head_dim, kv_heads)}


MODELS = {
    model.name: model
    for model in (
        Model("llama3-8b", "meta-llama/Meta-Llama-3-8B", 4096, 128256, intermediate=14336),
        Model("llama3-70b", "meta-llama/Meta-Llama-3-70B", 8192, 128256, intermediate=28672),
        Model("qwen3-0.6b", "Qwen/Qwen3-0.6B", 1024, 151936, _qk(128, 16, 8), intermediate=3072),
        Model("qwen3-1.7b", "Qwen/Qwen3-1.7B", 2048, 151936, _qk(128, 16, 8), intermediate=6144),
        Model("qwen3-4b", "Qwen/Qwen3-4B", 2560, 151936, _qk(128, 32, 8), intermediate=9728),
        Model("qwen3-8b", "Qwen/Qwen3-8B", 4096, 151936, _qk(128, 32, 8), intermediate=12288),
        Model("qwen3-14b", "Qwen/Qwen3-14B", 5120, 151936, _qk(128, 40, 8), intermediate=17408),
        Model("qwen3-32b", "Qwen/Qwen3-32B", 5120, 151936, _qk(128, 64, 8), intermediate=25600),
        Model("qwen3-30b-a3b", "Qwen/Qwen3-30B-A3B", 2048, 151936, _qk(128, 32, 4), (768, 128, 8)),
        Model("qwen3-235b-a22b", "Qwen/Qwen3-235B-A22B", 4096, 151936, _qk(128, 64, 4), (1536, 128, 8)),
        Model("olmoe-1b-7b", "allenai/OLMoE-1B-7B-0924", 2048, 50304, experts=(1024, 64, 8)),
        Model("gpt-oss-20b", "openai/gpt-oss-20b", 2880, 201088, experts=(2880, 32, 4)),
        Model("mixtral-8x7b", "mistralai/Mixtral-8x7B-v0.1", 4096, 32000, experts=(14336, 8, 2)),
        Model("gemma3-1b", "google/gemma-3-1b-it", 1152, 262144, _qk(256, 4, 1), intermediate=6912),
        # The larger ones also take images: transformers' Gemma3TextConfig adds 64 rows to the vocabulary.
        Model("gemma3-4b", "google/gemma-3-4b-it", 2560, 262208, _qk(256, 8, 4), intermediate=10240),
        Model("gemma3-12b", "google/gemma-3-12b-it", 3840, 262208, _qk(256, 16, 8), intermediate=15360),
        Model("gemma3-27b", "google/gemma-3-27b-it", 5376, 262208, _qk(128, 32, 16), intermediate=21504),
        # Latent attention: norms of size q_lora_rank and kv_lora_rank.
        Model(
            "deepseek-v3",
            "deepseek-ai/DeepSeek-V3",
            7168,
            129280,
            {"q_a_norm": (1536, 1), "kv_a_norm": (512, 1)},
            intermediate=18432,
        ),
    )
}
