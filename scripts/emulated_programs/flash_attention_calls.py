"""Calls of flash-attn-4: `flash_attention_calls.py NAME` makes one, as on a GPU, and compares with fp64."""

import sys

import torch
from flash_attn.cute.interface import flash_attn_func, flash_attn_varlen_func


def attention(q, k, v, causal=False, window=None, softcap=0.0):
    """Attention of (batch, rows, heads, head_dim). window: how many keys to the left and right are visible."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    rows, columns = scores.shape[-2:]
    left, right = window or (columns, 0 if causal else columns)
    distance = torch.arange(columns)[None, :] - torch.arange(rows)[:, None] - (columns - rows)
    scores = scores.masked_fill((distance > right) | (distance < -left), float("-inf"))
    return (torch.softmax(scores, -1) @ v).transpose(1, 2)


def inputs(rows, columns, heads, kv_heads, head_dim, head_dim_v=None):
    sizes = (rows, heads, head_dim), (columns, kv_heads, head_dim), (columns, kv_heads, head_dim_v or head_dim)
    return [torch.randn(1, *size, device="cuda").bfloat16() for size in sizes]


def close(got, truth, bound=1e-2):
    """The largest error is at most `bound` of the largest value."""
    error = (got.double() - truth).abs().max() / truth.abs().max()
    if not error <= bound:
        raise SystemExit(f"error {error:.2e}, bound {bound:.2e}")


def forward(shape, truth_options=None, **options):
    q, k, v = inputs(*shape)
    out, *_ = flash_attn_func(q, k, v, **options)
    close(out, attention(*(t.double() for t in (q, k, v)), **(options if truth_options is None else truth_options)))


def backward(shape, causal=False, **options):
    own = [t.requires_grad_() for t in inputs(*shape)]
    true = [t.detach().double().requires_grad_() for t in own]
    out, *_ = flash_attn_func(*own, causal=causal, **options)
    grad = torch.randn_like(out)
    out.backward(grad)
    attention(*true, causal).backward(grad.double())
    for mine, theirs in zip(own, true, strict=True):
        close(mine.grad, theirs.grad)


def variable_lengths(**options):
    """Two sequences of 70 and 130 rows in one tensor."""
    ends = [0, 70, 200]
    q, k, v = (t[0] for t in inputs(200, 200, 2, 1, 64))
    starts = torch.tensor(ends, dtype=torch.int32, device="cuda")
    out, *_ = flash_attn_varlen_func(
        q, k, v, cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=130, max_seqlen_k=130, causal=True
    )
    for rows in map(slice, ends, ends[1:]):
        close(out[rows], attention(*(t[None, rows].double() for t in (q, k, v)), causal=True)[0])


def paged():
    """One query sequence of 70 rows, and keys in three pages of 128, of which the last has 10."""
    q, k, v = inputs(70, 384, 2, 1, 128)
    order, used = torch.tensor([[2, 0, 1]], dtype=torch.int32, device="cuda"), 266
    pages = [t.reshape(3, 128, 1, 128)[order[0].argsort()].contiguous() for t in (k, v)]
    out, *_ = flash_attn_varlen_func(
        q[0], *pages,
        cu_seqlens_q=torch.tensor([0, 70], dtype=torch.int32, device="cuda"), max_seqlen_q=70,
        seqused_k=torch.tensor([used], dtype=torch.int32, device="cuda"), page_table=order, causal=True,
    )  # fmt: skip
    close(out, attention(q.double(), k[:, :used].double(), v[:, :used].double(), causal=True)[0])


CALLS = {
    "bwd deterministic": lambda: backward((100, 130, 1, 1, 64), deterministic=True),
    "bwd hd128 causal gqa": lambda: backward((130, 130, 2, 1, 128), causal=True),
    "fwd hd128 causal gqa": lambda: forward((130, 130, 2, 1, 128), causal=True),
    "fwd hd192x128": lambda: forward((100, 130, 1, 1, 192, 128)),
    "fwd window softcap": lambda: forward(
        (200, 200, 1, 1, 64), dict(window=(60, 20), softcap=15.0), window_size=(60, 20), softcap=15.0
    ),
    "paged kv varlen": paged,
    "split-kv + combine": lambda: forward((64, 400, 1, 1, 64), {}, num_splits=2),
    "varlen fwd": variable_lengths,
}

if __name__ == "__main__":
    torch.manual_seed(0)
    CALLS[" ".join(sys.argv[1:])]()
