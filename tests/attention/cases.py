"""Calls of attention: tensors, the truth in fp64, and results of a forward and backward."""

import torch

import quackish
from quackish.ops.attention import reference
from quackish.ops.attention.reference import Inputs, Options
from quackish.testing.errors import error

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
GRADS = ("query", "key", "value", "attn_bias")


def case(
    batch=1, heads=2, num_q=70, num_k=None, d=64, kv_heads=None, bias=None, bias_dtype=None, mask=None, dtype=BF16,
    device="cpu", **options,
):  # fmt: skip
    """Keyword arguments of a call. Shapes of bias and mask are given; the mask leaves no key to row 3."""
    generator = torch.Generator().manual_seed(0)
    num_k = num_q if num_k is None else num_k

    def normal(*shape, dtype=dtype):
        return torch.randn(shape, generator=generator).to(dtype).to(device).requires_grad_()

    args = dict(query=normal(batch, heads, num_q, d))
    args |= {name: normal(batch, kv_heads or heads, num_k, d) for name in ("key", "value")}
    if kv_heads:
        args["enable_gqa"] = True
    if bias:
        args["attn_bias"] = normal(*bias, dtype=bias_dtype or dtype)
    if mask:
        keep = torch.rand(mask, generator=generator) < 0.5
        if mask[-2] > 3:
            keep[..., 3, :] = False
        args["attn_mask"] = keep.to(device)
    return args | options


LARGE = {  # options of `large_case`
    "small, own bias": dict(heads=1, bias=(1, 1, 70, 72)),
    "small, unaligned fp32 bias of all heads": dict(heads=3, bias=(1, 1, 70, 71), bias_dtype=torch.float32, dtype=FP16),
    "own bias": dict(heads=1, d=64, bias=(1, 1, 70, 72)),
    "fp32 bias of all heads, softcap, GQA": dict(
        heads=2, kv_heads=1, bias=(1, 1, 70, 72), bias_dtype=FP32, softcap=2.0, dtype=FP16
    ),
    "mask and unaligned bias of keys": dict(heads=2, d=64, bias=(1, 2, 70, 71), mask=(1, 1, 70, 71), is_causal=True),
}


def large_case(device="cpu", **options):
    """Rows from 4 on whose biases are large: equal, or equal for some keys; scores are the biases.

    In fp32 a score of the other rows is as exact as it is in fp64, or much smaller than the largest one.
    """
    args = case(**dict(num_k=options["bias"][-1], d=32, device=device) | options)
    with torch.no_grad():
        bias = args["attn_bias"]
        args["query"][:, :, 4:60] = 0
        for first, low in enumerate((-5e3, -1e9, -1e30, torch.finfo(BF16).min, 1e9, torch.finfo(bias.dtype).min)):
            rows = slice(4 + 9 * first, 13 + 9 * first)
            bias[..., rows, :] = low
            bias[..., rows, 40:] *= 1 if first % 2 else 1 + 2**-7  # bf16 has this difference
    return args


def large_products(scale, d, device="cpu"):
    """Scores of up to 2e5 without a bias, exact in fp32; some rows have several equal ones."""
    args = case(1, 1, 70, 72, d, mask=(1, 1, 70, 72), scale=scale, device=device)
    with torch.no_grad():
        for name in ("query", "key"):
            args[name].round_().clamp_(-2, 2)
    return args


def assert_large_right(got, args):
    want = truth(args)
    assert_right(got, want, args["query"].dtype)
    torch.testing.assert_close(got["lse"], want["lse"].to(got["lse"].dtype), rtol=2**-23, atol=1e-6)


def step(args, function=quackish.scaled_dot_product_attention, backend="cute", **options):
    """o, lse and the gradients for fixed gradients of both."""
    out, lse = function(**args, return_lse=True, backend=backend, **options)
    generator = torch.Generator().manual_seed(1)
    do, dlse = (torch.randn(t.shape, generator=generator).to(t.dtype).to(t.device) for t in (out, lse))
    dlse = torch.where(lse.isfinite(), dlse, 0)
    leaves = {name: args[name] for name in GRADS if name in args}
    grads = torch.autograd.grad((out, lse), list(leaves.values()), (do, dlse))
    return dict(o=out.detach(), lse=lse.detach()) | dict(zip(leaves, grads, strict=True))


def truth(args):
    """The same of the reference in fp64, on the arguments' device."""
    q, k, v, bias = (None if (t := args.get(name)) is None else t.detach().double() for name in GRADS)
    band = args.get("window") or (None, None)
    right = 0 if args.get("is_causal") else band[1]
    scale = args.get("scale", q.shape[-1] ** -0.5)
    inputs, options = Inputs(q, k, v, bias, args.get("attn_mask")), Options(scale, args.get("softcap"), band[0], right)
    out, lse, residual = reference.forward(inputs, options)
    generator = torch.Generator().manual_seed(1)
    do, dlse = (torch.randn(t.shape, generator=generator) for t in (out, lse))
    do, dlse = do.to(args["query"].dtype).to(out.device).double(), dlse.to(out.device).double()
    dlse = torch.where(lse.isfinite(), dlse, 0)
    grads = reference.backward(do, dlse, out, lse, residual, inputs, options)
    return dict(o=out, lse=lse) | {name: g for name, g in zip(GRADS, grads, strict=True) if g is not None}


def assert_right(got, want, dtype=BF16):
    """Norm-wise errors of at most 0.75 unit roundoffs for o and 1 for gradients; lse is fp32."""
    assert got.keys() == want.keys()
    live = want["lse"] != -torch.inf
    assert torch.equal(got["lse"] != -torch.inf, live)
    assert error(got["lse"][live], want["lse"][live]).norm <= 1e-5
    for name in got.keys() - {"lse"}:
        off = error(got[name], want[name]).norm
        assert off <= (0.75 if name == "o" else 1.0) * torch.finfo(dtype).eps / 2, (name, off)
