"""A program that calls every public function with its options. mypy checks its types; tests/test_types.py runs it."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import assert_type

import quackish
from quackish.types import Activation, Backend, Reduction, Schedule

Loss = Tensor | tuple[Tensor, Tensor] | tuple[Tensor, quackish.LinearCrossEntropyStats]


def norms(backend: Backend = "auto") -> None:
    x, residual = torch.randn(4, 8, requires_grad=True), torch.randn(4, 8)
    weight, bias = nn.Parameter(torch.ones(8)), torch.zeros(8)
    assert_type(quackish.rms_norm(x, weight), Tensor)
    quackish.rms_norm(x, None).sum().backward()
    y = quackish.rms_norm(
        x, weight, bias, eps=1e-6, weight_offset=1.0, out_dtype=torch.bfloat16, dweight_out=torch.zeros(8),
        backend=backend,
    )  # fmt: skip
    assert_type(y, Tensor)
    assert_type(quackish.rms_norm(x, weight, residual=None), Tensor)
    y, res = quackish.rms_norm(x, weight, residual=residual, residual_dtype=torch.float32)
    assert_type(res, Tensor)
    maybe: Tensor | None = residual
    if backend == "cute":
        maybe = None
    assert_type(quackish.rms_norm(x, weight, residual=maybe), Tensor | tuple[Tensor, Tensor])

    output = quackish.rms_norm_forward(
        x, weight, bias, eps=None, weight_offset=0.0, residual=residual, residual_dtype=torch.float32,
        out_dtype=torch.float32, backend=backend,
    )  # fmt: skip
    assert_type(output.rstd, Tensor)
    y, res, rstd = output
    grads = quackish.rms_norm_backward(
        y, res, weight, rstd, weight_offset=0.0, dres=res, dx=True, dweight=True, dbias=True, dresidual=True,
        dx_dtype=torch.float32, dresidual_dtype=torch.float32, dbias_dtype=torch.float32, backend=backend,
    )  # fmt: skip
    assert_type(grads.dx, Tensor | None)
    assert_type(quackish.rms_norm_backward(y, res, weight, rstd)[1], Tensor | None)

    norm = quackish.RMSNorm(
        8, 1e-6, True, "cpu", torch.float32, bias=True, weight_offset=1.0, residual_dtype=torch.float32,
        out_dtype=torch.float32, backend=backend,
    )  # fmt: skip
    assert_type(norm(x), Tensor)
    norm(x, dweight_out=torch.zeros(8)).sum().backward()
    y, res = norm(x, residual)
    assert_type(norm.forward(x, residual), tuple[Tensor, Tensor])
    assert_type(norm(x, maybe), Tensor | tuple[Tensor, Tensor])
    assert_type(norm.bias, nn.Parameter | None)
    plain: nn.RMSNorm = norm
    assert_type(plain.forward(x), Tensor)

    def rejected() -> None:
        quackish.rms_norm(x, weight, epsilon=1e-6)  # type: ignore[call-overload]
        quackish.rms_norm(x, weight, backend="triton")  # type: ignore[call-overload]
        quackish.rms_norm(x, weight, residual=residual).sum()  # type: ignore[attr-defined]
        quackish.rms_norm(x)  # type: ignore[call-overload]
        quackish.RMSNorm(8, backend="triton")  # type: ignore[arg-type]
        norm(x, weight_out=weight)  # type: ignore[call-overload]


def losses(reduction: Reduction = "sum", schedule: Schedule = "recompute", backend: Backend = "auto") -> None:
    x, w = torch.randn(4, 8, requires_grad=True), torch.randn(16, 8, requires_grad=True)
    target, bias = torch.tensor([1, 2, 3, -100]), torch.zeros(16)
    lce = quackish.linear_cross_entropy
    lce(x, w, target).backward()
    loss = lce(
        x, w, target, linear_bias=bias, weight=torch.ones(16), reduction="mean", ignore_index=-100,
        label_smoothing=0.1, softcap=30.0, logit_scale=torch.tensor(0.5), z_loss=1e-4, num_items=torch.tensor(3),
        grad_weight_out=torch.zeros(16, 8), schedule="chunked", chunk_size=2, memory_limit=1 << 30, backend=backend,
        return_lse=False, return_stats=False,
    )  # fmt: skip
    assert_type(loss, Tensor)
    assert_type(lce(x, w, target, reduction=reduction, return_lse=True), tuple[Tensor, Tensor])
    loss, stats = lce(x, w, target, schedule=schedule, return_stats=True)
    assert_type(stats, quackish.LinearCrossEntropyStats)
    (loss + stats.entropy.sum()).backward()
    flag = bool(torch.rand(()) < 2)
    assert_type(lce(x, w, target, return_lse=flag), Loss)

    module = quackish.LinearCrossEntropyLoss(
        8, 16, out_features=(), bias=True, device=torch.device("cpu"), dtype=torch.float32, reduction=reduction,
        weight=torch.ones(16), ignore_index=None, label_smoothing=0.1, options=None, softcap=30.0, logit_scale=0.5,
        z_loss=1e-4, schedule=schedule, chunk_size=2, memory_limit=None, backend=backend,
    )  # fmt: skip
    module(x, target).sum().backward()
    assert_type(module(x, target, grad_weight_out=torch.zeros(16, 8)), Tensor)
    assert_type(module(x, target, return_lse=True), tuple[Tensor, Tensor])
    assert_type(module.forward(x, target, return_stats=True)[1], quackish.LinearCrossEntropyStats)
    assert_type(module(x, target, return_stats=flag), Loss)

    def rejected() -> None:
        lce(x, w, target, reduction="average")  # type: ignore[call-overload]
        lce(x, w, target, schedule="chunks")  # type: ignore[call-overload]
        lce(x, w, target, backend="triton")  # type: ignore[call-overload]
        lce(x, w, target, smoothing=0.1)  # type: ignore[call-overload]
        lce(x, w, target, return_lse=True).backward()  # type: ignore[attr-defined]
        quackish.LinearCrossEntropyLoss(8, 16, schedule="chunks")  # type: ignore[arg-type]
        module(x, target, reduction="sum")  # type: ignore[call-overload]


def parallel_losses(x: Tensor, shard: Tensor, target: Tensor, group: torch.distributed.ProcessGroup) -> None:
    """Not run: needs several ranks."""
    lce = quackish.parallel.linear_cross_entropy
    lce(x, shard, target).backward()
    loss = lce(
        x, shard, target, group=group, vocab_start=0, sequence_parallel=True, deterministic=True, linear_bias=None,
        weight=None, reduction="mean", ignore_index=None, label_smoothing=0.0, softcap=None, logit_scale=None,
        z_loss=0.0, num_items=None, grad_weight_out=None, schedule="stored", chunk_size=None, memory_limit=None,
        backend="auto",
    )  # fmt: skip
    assert_type(loss, Tensor)
    assert_type(lce(x, shard, target, group=group, return_lse=True), tuple[Tensor, Tensor])
    assert_type(lce(x, shard, target, return_stats=True)[1], quackish.LinearCrossEntropyStats)
    head = quackish.parallel.VocabParallelHead(8, 16, sequence_parallel=True, deterministic=True, schedule="stored")
    head(x, target, num_items=4).backward()
    assert_type(head(x, target, return_lse=True), tuple[Tensor, Tensor])

    def rejected() -> None:
        lce(x, shard, target, sequence_paralel=True)  # type: ignore[call-overload]
        lce(x, shard, target, schedule="chunks")  # type: ignore[call-overload]
        quackish.parallel.VocabParallelHead(8, 16, schedule="chunks")  # type: ignore[arg-type]


def experts(activation: Activation = "swiglu", backend: Backend = "auto") -> None:
    x, w1, w2 = torch.randn(6, 8, requires_grad=True), torch.randn(2, 16, 8), torch.randn(2, 8, 16)
    w3, b1, b2, scales = torch.randn(2, 16, 8), torch.zeros(2, 32), torch.zeros(2, 8), torch.ones(6)
    offs, outs = torch.tensor([2, 6], dtype=torch.int32), [torch.zeros_like(w) for w in (w1, w2, w3)]
    y = quackish.grouped_mlp(
        x, w1, w2, offs, w3=w3, activation=activation, b1=b1, b2=b2, scales=scales, recompute=True,
        grad_w1_out=outs[0], grad_w2_out=outs[1], grad_w3_out=outs[2], backend=backend,
    )  # fmt: skip
    assert_type(y, Tensor)
    y.sum().backward()
    assert_type(quackish.grouped_mm(x, w1.mT, offs, backend=backend), Tensor)
    index, weights = torch.zeros(6, 1, dtype=torch.int64), torch.ones(6, 1)
    y = quackish.moe_mlp(
        x, index, weights, w1, w2, w3=w3, activation=activation, b1=b1, b2=b2, recompute=True, grad_w1_out=outs[0],
        grad_w2_out=outs[1], grad_w3_out=outs[2], backend=backend,
    )  # fmt: skip
    assert_type(y, Tensor)

    def rejected() -> None:
        quackish.grouped_mlp(x, w1, w2, offs, activation="gelu")  # type: ignore[arg-type]
        quackish.grouped_mm(x, w1, offs, backend="triton")  # type: ignore[arg-type]
        quackish.moe_mlp(x, index, weights, w1, w2, scales=scales)  # type: ignore[call-arg]
        quackish.moe_mlp(x, index, weights, w1, w2, recomputes=True)  # type: ignore[call-arg]


def divergence(x: Tensor, w: Tensor, teacher_x: Tensor, teacher_w: Tensor, mask: Tensor, bias: Tensor) -> None:
    loss: Tensor = quackish.linear_divergence(
        x, w, teacher_x, teacher_w, mask=mask, beta=0.5, temperature=2.0, reduction="none", linear_bias=bias,
        teacher_bias=bias, softcap=30.0, teacher_softcap=30.0, logit_scale=0.5, teacher_logit_scale=2.0,
        grad_weight_out=w, memory_limit=1 << 30, backend="auto",
    )  # fmt: skip
    both: tuple[Tensor, Tensor] = quackish.linear_divergence(
        x, w, teacher_x, teacher_w, return_entropy=True, num_items=5
    )
    if loss.any() or both[1].any():
        quackish.linear_divergence(x, w, teacher_x, teacher_w, reduction="all")  # type: ignore[call-overload]
        quackish.linear_divergence(x, w, teacher_x)  # type: ignore[call-overload]


def dense(activation: Activation = "swiglu", backend: Backend = "auto") -> None:
    x, w1, w2, w3 = torch.randn(2, 6, 8), torch.randn(16, 8), torch.randn(8, 16), torch.randn(16, 8)
    b1, b2, b3, outs = torch.zeros(16), torch.zeros(8), torch.zeros(16), [torch.zeros_like(w) for w in (w1, w2, w3)]
    y = quackish.mlp(
        x, w1, w2, w3=w3, b1=b1, b3=b3, b2=b2, activation=activation, residual=x, recompute=True, grad_w1_out=outs[0],
        grad_w3_out=outs[2], grad_w2_out=outs[1], backend=backend,
    )  # fmt: skip
    assert_type(y, Tensor)

    def rejected() -> None:
        quackish.mlp(x, w1, w2, activation="gelu")  # type: ignore[arg-type]
        quackish.mlp(x, w1, w2, w3)  # type: ignore[call-arg]


def tools() -> None:
    def double(x: Tensor) -> Tensor:
        return 2 * x

    x = torch.randn(4, 8)
    with quackish.config(rms_norm_backward=dict(num_stages=4)), quackish.profile() as profile:
        quackish.testing.assert_deterministic(double, x, runs=2)
        quackish.testing.assert_close_to_fp64(double, double, x, slack=2.0)
    assert_type(profile, quackish.profile)
    rows: Sequence[dict[str, Any]] = profile.rows()
    assert not rows
    assert_type(quackish.__version__, str)
    try:
        quackish.rms_norm(x, None, backend="cute")
    except quackish.UnsupportedError as error:
        assert_type(error, quackish.UnsupportedError)

    def rejected() -> None:
        quackish.rms_nrom(x, None)  # type: ignore[attr-defined]
        quackish.integrations.llama.apply(x)  # type: ignore[attr-defined]


class Model(nn.Module):
    """Not run: stands for a model of Transformers."""


def models(model: Model) -> None:
    """Not run: needs a model of Transformers."""
    patched = quackish.integrations.transformers.apply(
        model, norms=True, head=True, experts=False, schedule="auto", chunk_size=None, memory_limit=None
    )
    assert_type(patched, Model)
    assert_type(quackish.integrations.transformers.revert(model), Model)
    assert_type(quackish.integrations.transformers.report(model).left[0].reason, str)
    with quackish.integrations.transformers.applied(model, experts=True) as patched:
        assert_type(patched, Model)

    def rejected() -> None:
        quackish.integrations.transformers.apply(model, schedule="chunks")  # type: ignore[arg-type]
        quackish.integrations.transformers.apply(model, expert=True)  # type: ignore[call-arg]
        quackish.integrations.transformers.applied(model, expert=True)  # type: ignore[call-arg]
