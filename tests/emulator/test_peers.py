"""Kernels of other libraries in the emulator. They are right on real cards, so where they are wrong, the emulator is.

`pip install '.[peers]'`, then `pytest --peers h100` and `pytest --peers b200` run these tests, as .ci/run does.
"""

import dataclasses
from pathlib import Path

import pytest
import torch

from quackish import emulator
from quackish.emulator.gpu import NAMED

pytestmark = pytest.mark.peers

SETTINGS = [("late", 0), ("at_once", 1)]  # completion and seed
EPS = 1e-6
SCRIPTS = Path(__file__).parents[2] / "scripts" / "emulated_programs"


both = pytest.mark.parametrize("gpu", ["h100", "b200"])
hopper = pytest.mark.parametrize("gpu", ["h100"])
blackwell = pytest.mark.parametrize("gpu", ["b200"])


@pytest.fixture(autouse=True)
def cuda(gpu, monkeypatch):
    """The library runs on a small `gpu`."""
    monkeypatch.setenv("QUACK_CACHE_ENABLED", "0")
    with emulator.replace_cuda(dataclasses.replace(NAMED[gpu], sm_count=4)):
        yield


def settings():
    """Yields the report of each setting; the test runs its kernels in each."""
    for completion, seed in SETTINGS:
        with emulator.record(completion, seed) as report:
            yield report
        assert report.launches, "no kernel was launched"


def integers(*shape: int, dtype: torch.dtype = torch.bfloat16, low: int = -2, high: int = 3) -> torch.Tensor:
    return torch.randint(low, high, shape).to(dtype)


def close(got: torch.Tensor, truth: torch.Tensor, bound: float) -> None:
    """The largest error is at most `bound` of the largest value."""
    error = (got.double() - truth).abs().max() / truth.abs().max()
    assert error <= bound, f"error {error:.2e}, bound {bound:.2e}"


# QuACK ---------------------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("m, n", [(5, 256), (3, 1000), (2, 16384)])
def test_quack_rms_norm(gpu, m, n):
    torch.manual_seed(0)
    x, weight, dy = torch.randn(m, n).bfloat16(), torch.randn(n), torch.randn(m, n).bfloat16()
    true_x, true_weight = (t.double().requires_grad_() for t in (x, weight))
    truth = true_x * torch.rsqrt(true_x.square().mean(-1, keepdim=True) + EPS) * true_weight
    truth.backward(dy.double())
    from quack.rmsnorm import rmsnorm

    for _ in settings():
        x, weight = (t.detach().requires_grad_() for t in (x, weight))
        y = rmsnorm(x, weight, eps=EPS)
        y.backward(dy)
        close(y.detach(), truth.detach(), 4e-3)
        close(x.grad, true_x.grad, 4e-3)
        close(weight.grad, true_weight.grad, 1e-5)


GEMMS = {
    "one CTA": dict(),
    "CLC scheduler": dict(is_dynamic_persistent=True),
    "batches, wide tile": dict(shape=(2, 200, 136, 72), tile_N=256),
    "two CTAs, CLC scheduler": dict(shape=(None, 300, 136, 136), tile_M=256, cluster_M=2, is_dynamic_persistent=True),
    "residual and bias": dict(epilogue=True),
}


@both
@pytest.mark.parametrize("how", GEMMS.values(), ids=GEMMS)
def test_quack_gemm(gpu, how):
    how = dict(shape=(None, 136, 72, 88), tile_M=128, tile_N=128, cluster_M=1, cluster_N=1, epilogue=False) | how
    (batches, m, n, k), epilogue = how.pop("shape"), how.pop("epilogue")
    batch = () if batches is None else (batches,)
    torch.manual_seed(0)
    a, b = integers(*batch, m, k), integers(*batch, n, k)
    truth = a.double() @ b.double().mT
    c = bias = None
    if epilogue:
        c, bias = integers(*batch, m, n), integers(1, n, dtype=torch.float32)
        truth = truth + 2 * c.double() + bias.double()
        how["beta"], how["rowvec_bias"] = 2.0, bias
    from quack.gemm import gemm

    for _ in settings():
        d = torch.full(truth.shape, float("nan")).bfloat16()
        ticket = torch.zeros(1, dtype=torch.int32) if gpu == "h100" and "is_dynamic_persistent" in how else None
        gemm(a, b, d, c, ticket, **how)
        assert torch.equal(d, truth.bfloat16())


@both
@pytest.mark.parametrize("activation", ["relu", "swiglu"])
def test_quack_gemm_with_an_activation(gpu, activation):
    torch.manual_seed(0)
    a, b = integers(136, 88), integers(88, 128)
    before = a.double() @ b.double()
    if activation == "relu":
        truth = before.relu()
    else:
        truth = torch.nn.functional.silu(before[:, ::2]) * before[:, 1::2]
    from quack.gemm_interface import gemm_act

    for _ in settings():
        preact, postact = gemm_act(a, b, activation=activation, tuned=False)
        assert torch.equal(preact, before.bfloat16())
        close(postact, truth, 0 if activation == "relu" else 4e-3)


# Calls as programs for a GPU make them, of scripts/emulated_programs; the others run by scripts/emulate_programs.py

CALLS = [
    ("h100", "cross_entropy fwd+bwd"),
    ("h100", "topk softmax fwd+bwd"),
    ("b200", "softmax fwd+bwd"),
    ("b200", "gemm split-k"),
]


@pytest.mark.parametrize("gpu, call", CALLS)
def test_quack_called_as_on_a_gpu(gpu, call, monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    with emulator.unchanged(dataclasses.replace(NAMED[gpu], sm_count=4)), emulator.record("late", 0) as report:
        import quack_calls

        torch.manual_seed(0)
        quack_calls.CALLS[call]()
    assert report.launches


# Liger ---------------------------------------------------------------------------------------------------------------


@blackwell
@pytest.mark.parametrize("m, n, k", [(100, 72, 64), (300, 264, 192), (130, 133, 64)])
def test_liger_gemm(gpu, monkeypatch, m, n, k):
    from liger_kernel.ops.cutedsl.ops import _sm100_gemm

    from tests.emulator.peer_epilogues import halve

    monkeypatch.setattr(_sm100_gemm, "_validate_epilogue_inputs", lambda *args: None)  # refuses device.type "cpu"
    torch.manual_seed(0)
    a, b = integers(m, k), integers(n, k)
    for _ in settings():
        out = torch.full((m, n), float("nan")).bfloat16()
        _sm100_gemm.run_epilogue_gemm(a, b, out, halve)
        assert torch.equal(out, (a.double() @ b.double().T / 2).bfloat16())


@blackwell
def test_liger_grouped_gemm(gpu, monkeypatch):
    from liger_kernel.ops.cutedsl.ops import _sm100_gemm

    from tests.emulator.peer_epilogues import multiply

    monkeypatch.setattr(_sm100_gemm, "_validate_epilogue_inputs", lambda *args: None)
    torch.manual_seed(0)
    a, b = integers(130, 128), integers(192, 128)
    first, second = (a.double() @ b.double().T).chunk(2, -1)
    for _ in settings():
        out = torch.full((130, 96), float("nan")).bfloat16()
        _sm100_gemm.run_grouped_epilogue_gemm_stacked(a, b, out, multiply)
        assert torch.equal(out, (first * second).bfloat16())


@both
def test_liger_cross_entropy(gpu):
    torch.manual_seed(0)
    logits, target = torch.randn(7, 1000).bfloat16(), torch.randint(1000, (7,))
    target[3] = -100
    true_logits = logits.double().requires_grad_()
    truth = torch.nn.functional.cross_entropy(true_logits, target)
    truth.backward()
    from liger_kernel.ops.cutedsl.ops import cross_entropy

    for _ in settings():
        x = logits.clone().requires_grad_()
        with torch.no_grad():
            loss, *_, grad = cross_entropy.cross_entropy_forward(x, target, None, -100, 0.0, 0.0, "mean", None, False)
        close(loss, truth.detach(), 4e-3)
        close(grad.detach(), true_logits.grad, 4e-3)


@hopper
def test_liger_linear_cross_entropy(gpu):
    torch.manual_seed(0)
    m, h, v = 128, 256, 512
    x, weight, target = torch.randn(m, h).bfloat16() / 8, torch.randn(v, h).bfloat16() / 8, torch.randint(v, (m,))
    true_x, true_weight = (t.double().requires_grad_() for t in (x, weight))
    truth = torch.nn.functional.cross_entropy(true_x @ true_weight.T, target)
    truth.backward()
    from liger_kernel.ops.cutedsl.ops import fused_linear_cross_entropy_sm90 as linear

    for _ in settings():
        loss, dx, dweight = linear.fused_linear_cross_entropy_forward_sm90(x, weight, target)
        close(loss, truth.detach(), 4e-3)
        close(dx, true_x.grad, 1e-2)
        close(dweight, true_weight.grad, 1e-2)


# flash-attn-4 --------------------------------------------------------------------------------------------------------


def attention(q, k, v, causal):
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if causal:
        rows, columns = scores.shape[-2:]
        scores = scores.masked_fill(~torch.ones(rows, columns).tril(columns - rows).bool(), float("-inf"))
    return (torch.softmax(scores, -1) @ v).transpose(1, 2)


ATTENTION = {
    "one head": dict(rows=100, columns=100, heads=1, kv_heads=1, causal=False),
    "causal, two heads of one": dict(rows=70, columns=130, heads=2, kv_heads=1, causal=True),
}


@both
@pytest.mark.parametrize("shape", ATTENTION.values(), ids=ATTENTION)
def test_flash_attention(gpu, shape):
    torch.manual_seed(0)
    q = torch.randn(1, shape["rows"], shape["heads"], 64).bfloat16()
    k, v = (torch.randn(1, shape["columns"], shape["kv_heads"], 64).bfloat16() for _ in range(2))
    grad = torch.randn_like(q)
    true = [t.double().requires_grad_() for t in (q, k, v)]
    truth = attention(*true, shape["causal"])
    truth.backward(grad.double())
    from flash_attn.cute.interface import flash_attn_func

    for _ in settings():
        own = [t.clone().requires_grad_() for t in (q, k, v)]
        out, *_ = flash_attn_func(*own, causal=shape["causal"])
        out.backward(grad)
        close(out.detach(), truth.detach(), 1e-2)
        for mine, theirs in zip(own, true, strict=True):
            close(mine.grad, theirs.grad, 1e-2)
