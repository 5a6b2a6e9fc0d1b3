"""Calls of quack-kernels: `quack_calls.py NAME` makes one, as on a GPU, and compares with fp64."""

import os
import sys

os.environ["QUACK_CACHE_ENABLED"] = "0"

import torch
from quack import gemm_interface, rotary
from quack.cross_entropy import cross_entropy
from quack.rmsnorm import layernorm_fwd, rmsnorm
from quack.softmax import softmax
from quack.topk import topk, topk_fwd

EPS = 1e-6


def integers(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randint(-2, 3, shape, device="cuda").to(dtype)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").bfloat16()


def close(got: torch.Tensor, truth: torch.Tensor, bound: float = 4e-3) -> None:
    """The largest error is at most `bound` of the largest value."""
    error = (got.double() - truth).abs().max() / truth.abs().max()
    if not error <= bound:
        raise SystemExit(f"error {error:.2e}, bound {bound:.2e}")


def in_fp64(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.detach().double().requires_grad_() for tensor in tensors]


def rows_of_groups() -> tuple[torch.Tensor, list[slice]]:
    """The ends of three groups of 200 rows, and the rows of each."""
    ends = [0, 70, 70, 200]
    return torch.tensor(ends, dtype=torch.int32, device="cuda"), list(map(slice, ends, ends[1:]))


def call_cross_entropy() -> None:
    logits, target = normal(7, 1000).requires_grad_(), torch.randint(1000, (7,), device="cuda")
    (true_logits,) = in_fp64(logits)
    loss, truth = cross_entropy(logits, target), torch.nn.functional.cross_entropy(true_logits, target)
    loss.backward()
    truth.backward()
    close(loss.detach(), truth.detach())
    close(logits.grad, true_logits.grad)


def call_gemm_fp8() -> None:
    a, b = integers(136, 64, dtype=torch.float8_e4m3fn), integers(80, 64, dtype=torch.float8_e4m3fn).T
    out = gemm_interface.gemm(a, b, out_dtype=torch.bfloat16, tuned=False)
    close(out, a.double() @ b.double(), 0)


def call_gemm_gather() -> None:
    ends, groups = rows_of_groups()
    a, b = integers(150, 64), integers(3, 80, 64).mT
    rows = torch.randint(150, (200,), device="cuda", dtype=torch.int32)
    out = gemm_interface.gemm(a, b, cu_seqlens_m=ends, A_idx=rows, tuned=False)
    close(out, torch.cat([a.double()[rows[group].long()] @ b[i].double() for i, group in enumerate(groups)]), 0)


def call_gemm_split_k() -> None:
    a, b = integers(136, 512), integers(80, 512).T
    close(gemm_interface.gemm(a, b, split_k=2, tuned=False), (a.double() @ b.double()).bfloat16().double(), 0)


def call_gemm_varlen_k() -> None:
    ends, groups = rows_of_groups()
    a, b = integers(200, 136).T, integers(200, 80)
    out = gemm_interface.gemm(a, b, cu_seqlens_k=ends, tuned=False)
    close(out, torch.stack([a[:, group].double() @ b[group].double() for group in groups]).bfloat16().double(), 0)


def call_gemm_varlen_m() -> None:
    ends, groups = rows_of_groups()
    a, b = integers(200, 64), integers(3, 80, 64).mT
    out = gemm_interface.gemm(a, b, cu_seqlens_m=ends, tuned=False)
    close(out, torch.cat([a[group].double() @ b[i].double() for i, group in enumerate(groups)]), 0)


def call_gemm_dact() -> None:
    a, b, before = integers(136, 64), integers(64, 80), integers(136, 80)
    dx, after = gemm_interface.gemm_dact(a, b, before, activation="relu", tuned=False)
    close(dx, (a.double() @ b.double()) * (before > 0), 0)
    close(after, before.double().relu(), 0)


def call_gemm_symmetric() -> None:
    a = integers(264, 64)
    out = gemm_interface.gemm_symmetric(a, a.T)
    close(out[-1] if isinstance(out, tuple) else out, (a.double() @ a.double().T).bfloat16().double(), 0)


def call_norms() -> None:
    x, residual, weight, bias = normal(5, 512), normal(5, 512), torch.randn(512).cuda(), torch.randn(512).cuda()
    true_x, true_residual, true_weight, true_bias = in_fp64(x, residual, weight, bias)
    given = [t.requires_grad_() for t in (x, residual, weight, bias)]
    y = rmsnorm(x, weight, bias, residual, eps=EPS)
    summed = true_x + true_residual
    truth = summed * torch.rsqrt(summed.square().mean(-1, keepdim=True) + EPS) * true_weight + true_bias
    dy = normal(5, 512)
    y.backward(dy)
    truth.backward(dy.double())
    close(y.detach(), truth.detach())
    for mine, theirs in zip(given, (true_x, true_residual, true_weight, true_bias), strict=True):
        close(mine.grad, theirs.grad, 8e-3)
    y = layernorm_fwd(x.detach(), weight.detach(), bias.detach(), eps=EPS)
    close(y, torch.nn.functional.layer_norm(true_x, (512,), true_weight, true_bias, EPS).detach())


def call_rotary() -> None:
    x, angles = normal(2, 16, 3, 64).requires_grad_(), torch.rand(16, 32, device="cuda") * 6
    (true_x,) = in_fp64(x)
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    y, dy = rotary.apply_rotary_emb(x, cos, sin), normal(2, 16, 3, 64)
    first, second = true_x.chunk(2, -1)
    c, s = cos.double()[None, :, None], sin.double()[None, :, None]
    truth = torch.cat([first * c - second * s, first * s + second * c], -1)
    y.backward(dy)
    truth.backward(dy.double())
    close(y.detach(), truth.detach())
    close(x.grad, true_x.grad)


def call_softmax(n: int = 1000) -> None:
    x, dy = normal(3, n).requires_grad_(), normal(3, n)
    (true_x,) = in_fp64(x)
    y, truth = softmax(x), true_x.softmax(-1)
    y.backward(dy)
    truth.backward(dy.double())
    close(y.detach(), truth.detach())
    close(x.grad, true_x.grad, 1e-2)


def call_topk(with_softmax: bool) -> None:
    x = torch.stack([torch.randperm(256) for _ in range(7)]).cuda().bfloat16() / 64
    x.requires_grad_(with_softmax)
    (true_x,) = in_fp64(x)
    truth, _ = true_x.topk(8, -1)
    if not with_softmax:
        values, places = topk_fwd(x, 8)
        close(values, truth.detach(), 0)
        close(x.gather(-1, places.long()), truth.detach(), 0)
        return
    truth = truth.softmax(-1)
    values, _ = topk(x, 8, softmax=True)
    dy = normal(7, 8)
    values.backward(dy)
    truth.backward(dy.double())
    close(values.detach(), truth.detach())
    close(x.grad, true_x.grad, 1e-2)


CALLS = {
    "cross_entropy fwd+bwd": call_cross_entropy,
    "gemm fp8": call_gemm_fp8,
    "gemm gather_A": call_gemm_gather,
    "gemm split-k": call_gemm_split_k,
    "gemm varlen_k (grouped)": call_gemm_varlen_k,
    "gemm varlen_m (grouped)": call_gemm_varlen_m,
    "gemm_dact": call_gemm_dact,
    "gemm_symmetric": call_gemm_symmetric,
    "rmsnorm residual bias, layernorm": call_norms,
    "rotary": call_rotary,
    "softmax fwd+bwd": call_softmax,
    "softmax n=65536 cluster": lambda: call_softmax(65536),
    "topk fwd": lambda: call_topk(False),
    "topk softmax fwd+bwd": lambda: call_topk(True),
}

if __name__ == "__main__":
    torch.manual_seed(0)
    CALLS[" ".join(sys.argv[1:])]()
