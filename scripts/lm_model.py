"""A small Llama-style language model with quackish's ops or in plain PyTorch, with bf16 or fp32 logits.

All variants share the model; only `Ops` differs. RMSNorm precedes attention and MLP, normalizes queries and keys, and
ends the model. It has SwiGLU, rotary positions, causal attention and an untied head.
"""

import dataclasses
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quackish

EPS = 1e-6
HEAD_DIM = 64


@dataclasses.dataclass(frozen=True)
class Ops:
    """rms_norm(x, weight) -> y, or with residual=r -> (y, x + r); head_loss(x, head_weight, target) -> mean loss."""

    name: str
    rms_norm: Callable
    head_loss: Callable


def torch_rms_norm(x: Tensor, weight: Tensor, residual: Tensor | None = None, eps: float = EPS):
    res = x if residual is None else residual + x
    y = F.rms_norm(res, weight.shape, weight.to(res.dtype), eps)  # mixed dtypes would take PyTorch's slow path
    return y if residual is None else (y, res)


def torch_head_loss(x: Tensor, head_weight: Tensor, target: Tensor) -> Tensor:
    logits = F.linear(x, head_weight)  # tokens * vocabulary elements
    return F.cross_entropy(logits.flatten(0, -2), target.flatten())


def torch_head_loss_fp32(x: Tensor, head_weight: Tensor, target: Tensor) -> Tensor:
    """More exact, but slower and larger: inputs and logits are not rounded to autocast's 16 bits."""
    with torch.autocast(x.device.type, enabled=False):
        return torch_head_loss(x.float(), head_weight.float(), target)


QUACKISH = Ops("quackish", quackish.rms_norm, quackish.linear_cross_entropy)
TORCH = Ops("PyTorch", torch_rms_norm, torch_head_loss)
TORCH_FP32 = Ops("PyTorch, fp32 logits", torch_rms_norm, torch_head_loss_fp32)


class Block(nn.Module):
    def __init__(self, dim: int, ops: Ops):
        super().__init__()
        hidden = 64 * round(dim * 8 / 3 / 64)
        self.ops = ops
        self.attn_norm = nn.Parameter(torch.ones(dim))
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.q_norm = nn.Parameter(torch.ones(HEAD_DIM))
        self.k_norm = nn.Parameter(torch.ones(HEAD_DIM))
        self.attn_out = nn.Linear(dim, dim, bias=False)
        self.mlp_norm = nn.Parameter(torch.ones(dim))
        self.gate_up = nn.Linear(dim, 2 * hidden, bias=False)
        self.mlp_out = nn.Linear(hidden, dim, bias=False)

    def attention(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (3, -1, HEAD_DIM))  # (batch, seq, 3, heads, head_dim)
        q, k, v = qkv.unbind(2)
        q = self.ops.rms_norm(q, self.q_norm, eps=EPS)  # a slice of the packed buffer, without a copy
        k = self.ops.rms_norm(k, self.k_norm, eps=EPS)
        q, k, v = rotate(q, *rotary).transpose(1, 2), rotate(k, *rotary).transpose(1, 2), v.transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.attn_out(y.transpose(1, 2).flatten(-2))

    def mlp(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.mlp_out(F.silu(gate) * up)

    def forward(self, x: Tensor, stream: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        # One op adds to the residual stream and normalizes it: res = x + stream, y = norm(res).
        y, stream = self.ops.rms_norm(x, self.attn_norm, residual=stream, eps=EPS)
        y, stream = self.ops.rms_norm(self.attention(y, rotary), self.mlp_norm, residual=stream, eps=EPS)
        return self.mlp(y), stream


class LanguageModel(nn.Module):
    """forward(tokens, target) -> mean cross entropy in nats per token."""

    def __init__(self, vocab: int, dim: int, layers: int, seq: int, ops: Ops):
        super().__init__()
        self.ops = ops
        self.embedding = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(Block(dim, ops) for _ in range(layers))
        self.final_norm = nn.Parameter(torch.ones(dim))
        self.head = nn.Parameter(torch.empty(vocab, dim))
        angle = torch.arange(seq)[:, None] * 10_000.0 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        self.register_buffer("cos", angle.cos()[:, None], persistent=False)  # (seq, 1, head_dim / 2)
        self.register_buffer("sin", angle.sin()[:, None], persistent=False)
        for name, p in self.named_parameters():
            if p.ndim == 2:
                # Weights that write to the residual stream start smaller, so that it does not grow with depth.
                nn.init.normal_(p, std=0.02 / (2 * layers) ** 0.5 if name.endswith("_out.weight") else 0.02)

    def forward(self, tokens: Tensor, target: Tensor) -> Tensor:
        stream = self.embedding(tokens)
        x = torch.zeros_like(stream)
        for block in self.blocks:
            x, stream = block(x, stream, (self.cos, self.sin))
        y, _ = self.ops.rms_norm(x, self.final_norm, residual=stream, eps=EPS)
        return self.ops.head_loss(y, self.head, target)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding: rotates each pair (x1, x2) of a head by an angle proportional to the position."""
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).to(x.dtype)
