"""Providers of grouped_mlp, moe_mlp and mlp: quackish, PyTorch's GEMMs, Transformers, Liger and SonicMoE.

A provider of grouped_mlp takes x (r, h), w1 (e, 2i, h) as [gate; up], w2 (e, h, i), scales (r,) and offs (e,). One of
moe_mlp takes x (t, h), top_k_index (t, k), top_k_weights (t, k), w1 and w2. One of mlp takes x (m, h), w1 (i, h),
w2 (h, i) and w3 (i, h). All return y of SwiGLU MLPs, for autograd.
"""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from quackish import grouped_mlp, mlp, moe_mlp
from quackish.bench.cells import OURS
from quackish.bench.measure import imported

Mlp = Callable[..., Tensor]
grouped_mm = getattr(F, "grouped_mm", torch._grouped_mm)


def ours(**options) -> Mlp:
    return lambda x, w1, w2, scales, offs: grouped_mlp(x, w1, w2, offs, scales=scales, **options)


def ours_moe(**options) -> Mlp:
    return functools.partial(moe_mlp, **options)


def ours_dense(**options) -> Mlp:
    return lambda x, w1, w2, w3: mlp(x, w1, w2, w3=w3, **options)


def torch_mlp(activation: Callable[[Tensor, Tensor], Tensor]) -> Mlp:
    def mlp(x, w1, w2, scales, offs):
        return grouped_mm(activation(grouped_mm(x, w1.mT, offs=offs), scales), w2.mT, offs=offs)

    return mlp


def _torch_compile() -> Mlp:
    """torch_mlp with a compiled activation."""
    torch._dynamo.config.recompile_limit = 64
    return torch_mlp(torch.compile(swiglu, dynamic=False))


def swiglu(z: Tensor, scales: Tensor) -> Tensor:
    gate, up = z.chunk(2, 1)
    return (F.silu(gate) * up * scales[:, None]).to(z.dtype)


def _transformers() -> Mlp:
    """The experts of Qwen 3 MoE on F.grouped_mm."""
    from transformers.models.qwen3_moe import Qwen3MoeConfig, modeling_qwen3_moe

    @functools.cache
    def module(experts: int, h: int, i: int) -> torch.nn.Module:
        config = Qwen3MoeConfig(hidden_size=h, moe_intermediate_size=i, num_experts=experts)
        config._experts_implementation = "grouped_mm"
        with torch.device("meta"):
            return modeling_qwen3_moe.Qwen3MoeExperts(config)

    def experts(x, top_k_index, top_k_weights, w1, w2):
        weights = {"gate_up_proj": w1, "down_proj": w2}
        return torch.func.functional_call(module(*w2.shape), weights, (x, top_k_index, top_k_weights))

    return experts


def _liger() -> Mlp:
    """Liger's fused experts. A call waits for the GPU once, to read the number of tiles."""
    from liger_kernel.ops.fused_moe import LigerFusedMoEFunction

    # int32 as in its module for Transformers
    return lambda x, index, weights, w1, w2: LigerFusedMoEFunction.apply(x, w1, w2, index.int(), weights)


def _sonicmoe() -> Mlp:
    """SonicMoE after the router, with gate rows first. Its first call tunes for about a minute."""
    from sonicmoe.enums import ActivationType
    from sonicmoe.functional import TC_topk_router_metadata_triton, _DownProjection, _UpProjection

    def experts(x, top_k_index, top_k_weights, w1, w2):
        (tokens, k), num_experts, swiglu = top_k_index.shape, len(w2), ActivationType.SWIGLU
        rows = tokens * k
        sizes = num_experts, num_experts + 1, rows, rows, rows
        counts, offsets, *rows_of = (torch.empty(n, dtype=torch.int32, device=x.device) for n in sizes)
        TC_topk_router_metadata_triton(top_k_index.int(), num_experts, counts, offsets, *rows_of)
        routing = k, *rows_of, None, False  # every token has k experts
        act, z = _UpProjection.apply(x, w1.permute(1, 2, 0), None, offsets, rows, *routing, swiglu, False, True)
        weights = top_k_weights.float()
        return _DownProjection.apply(act, z, w2.permute(1, 2, 0), None, weights, offsets, tokens, *routing, swiglu)

    return experts


def torch_dense() -> Mlp:
    return lambda x, w1, w2, w3: F.linear(F.silu(F.linear(x, w1)) * F.linear(x, w3), w2)


def _torch_compile_dense() -> Mlp:
    torch._dynamo.config.recompile_limit = 64
    return torch.compile(torch_dense(), dynamic=False)


def _liger_dense() -> Mlp:
    """Liger's SwiGLU between PyTorch's matmuls, as in its MLP for Llama."""
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    return lambda x, w1, w2, w3: F.linear(LigerSiLUMulFunction.apply(F.linear(x, w1), F.linear(x, w3)), w2)


PROVIDERS: dict[str, Callable[[], Mlp]] = {
    OURS: ours,
    f"{OURS}-recompute": functools.partial(ours, recompute=True),
    "torch": lambda: torch_mlp(swiglu),
    "torch-compile": _torch_compile,
}
MOE_PROVIDERS: dict[str, Callable[[], Mlp]] = {
    OURS: ours_moe,
    "transformers": _transformers,
    "liger": _liger,
    "sonicmoe": _sonicmoe,
}

DENSE_PROVIDERS: dict[str, Callable[[], Mlp]] = {
    OURS: ours_dense,
    f"{OURS}-recompute": functools.partial(ours_dense, recompute=True),
    "torch": torch_dense,
    "torch-compile": _torch_compile_dense,
    "liger": _liger_dense,
}


def loader(providers: dict[str, Callable[[], Mlp]]) -> Callable[[str], Mlp]:
    """Loads one of `providers` by its name, or the user's "module:attribute"."""
    return lambda name: imported(name) if ":" in name else providers[name]()
