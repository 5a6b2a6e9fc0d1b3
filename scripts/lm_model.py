"""A small Llama-style language model, with quackish's two ops in it or in plain PyTorch, with bf16 or fp32 logits.

The model is the same code for all: `Ops` holds the only two things that differ. RMSNorm is before each half of a
block, on the queries and keys, and at the end; SwiGLU, rotary positions, causal attention, and a head of its own.
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
    logits = F.linear(x, head_weight)  # all of them at once: tokens * vocabulary numbers
    return F.cross_entropy(logits.flatten(0, -2), target.flatten())


def torch_head_loss_fp32(x: Tensor, head_weight: Tensor, target: Tensor) -> Tensor:
    """Exact but slow and large: neither inputs nor logits are rounded to autocast's 16 bits."""
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
        q = self.ops.rms_norm(q, self.q_norm, eps=EPS)  # a slice of the packed buffer: no copy is needed
        k = self.ops.rms_norm(k, self.k_norm, eps=EPS)
        q, k, v = rotate(q, *rotary).transpose(1, 2), rotate(k, *rotary).transpose(1, 2), v.transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.attn_out(y.transpose(1, 2).flatten(-2))

    def mlp(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.mlp_out(F.silu(gate) * up)

    def forward(self, x: Tensor, stream: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        # Adding to the residual stream and normalising it is one op: y = norm(res), res = x + stream.
        y, stream = self.ops.rms_norm(x, self.attn_norm, residual=stream, eps=EPS)
        y, stream = self.ops.rms_norm(self.attention(y, rotary), self.mlp_norm, residual=stream, eps=EPS)
        return self.mlp(y), stream


class LanguageModel(nn.Module):
    """forward(tokens, target) -> the mean cross entropy in nats a token."""

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
                # The two that write to the residual stream start smaller, so that depth does not make it grow.
                nn.init.normal_(p, std=0.02 / (2 * layers) ** 0.5 if name.endswith("_out.weight") else 0.02)

    def forward(self, tokens: Tensor, target: Tensor) -> Tensor:
        stream = self.embedding(tokens)
        x = torch.zeros_like(stream)
        for block in self.blocks:
            x, stream = block(x, stream, (self.cos, self.sin))
        y, _ = self.ops.rms_norm(x, self.final_norm, residual=stream, eps=EPS)
        return self.ops.head_loss(y, self.head, target)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions: each pair (x1, x2) of a head turns by an angle that grows with the position."""
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).to(x.dtype)
