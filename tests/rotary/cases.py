"""Calls of rotary: tensors, and the truth element by element."""

import functools

import torch

import quackish

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
LAYOUTS = ("halves", "interleaved", "interleaved_to_halves")


def normal(*shape, dtype=BF16, seed=0, device="cpu"):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def case(
    batch=2, q_heads=3, k_heads=2, length=5, d=16, rotary_dim=None, dtype=BF16, table_dtype=FP32, half=False,
    table_batch=1, device="cpu", grad=True,
):  # fmt: skip
    """(q, k, cos, sin): q and k as projections give them, heads inside of tokens. All columns differ."""
    q, k = (
        normal(batch, length, heads, d, dtype=dtype, seed=seed, device=device).transpose(1, 2).requires_grad_(grad)
        for seed, heads in enumerate((q_heads, k_heads))
    )
    columns = (rotary_dim or d) // (1 + half)
    cos, sin = normal(2, table_batch, length, columns, dtype=table_dtype, seed=2, device=device)
    return q, k, cos, sin


def truth(q, k, cos, sin, rotary_dim=None, layout="halves"):
    """By PyTorch's autograd, one pair at a time."""
    size = rotary_dim or q.shape[-1]
    is_full = cos.shape[-1] == size
    if cos.dim() == 3:
        cos, sin = cos[:, None], sin[:, None]

    def rotated(x):
        columns = list(x.unbind(-1))
        for i in range(size // 2):
            split, adjacent = (i, size // 2 + i), (2 * i, 2 * i + 1)
            read, written = (
                (split if layout == "halves" else adjacent),
                (adjacent if layout == "interleaved" else split),
            )
            (c0, s0), (c1, s1) = ([t[..., at if is_full else i] for t in (cos, sin)] for at in written)
            x0, x1 = (x[..., at] for at in read)
            columns[written[0]] = x0 * c0 - x1 * s0
            columns[written[1]] = x1 * c1 + x0 * s1
        return torch.stack(columns, -1)

    return rotated(q), None if k is None else rotated(k)


def functions(**options):
    """(rotary, truth) with options."""
    named = {name: options[name] for name in ("rotary_dim", "layout") if name in options}
    return functools.partial(quackish.rotary, **options), functools.partial(truth, **named)


def step(inputs, **options):
    """[q, k, dq, dk] for random gradients."""
    q, k = quackish.rotary(*inputs, **options)
    grads = [normal(*t.shape, dtype=t.dtype, seed=7, device=t.device) for t in (q, k)]
    return [q.detach(), k.detach(), *torch.autograd.grad((q, k), inputs[:2], grads)]


# Options of `case` and of the call. More than four heads, a last vector of half size, rows that are not aligned.
KERNELS = {
    "halves": (dict(d=64, rotary_dim=32, q_heads=9, table_batch=2), {}),
    "half table, tail": (dict(d=40, rotary_dim=32, half=True, dtype=FP16, table_dtype=FP16), {}),
    "interleaved": (dict(d=16, rotary_dim=8, table_dtype=BF16), dict(layout="interleaved")),
    "interleaved, half": (dict(d=16, dtype=FP32, half=True), dict(layout="interleaved")),
    "to halves": (dict(d=32, rotary_dim=16), dict(layout="interleaved_to_halves")),
    "not aligned": (dict(d=9, rotary_dim=6, q_heads=5), {}),
    "to halves, not aligned": (dict(d=7, rotary_dim=6, half=True), dict(layout="interleaved_to_halves")),
}
