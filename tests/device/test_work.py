"""Bytes and FLOPs of launches, compared with tensors and the kernels' signatures."""

import dataclasses
import inspect

import pytest
import torch

from quackish import ops
from quackish.device.choose import choose
from quackish.device.spec import loaded
from quackish.device.work import LAUNCH_US, Estimate, Work, describe, estimate
from quackish.gpu import H200, Roofs
from quackish.kernels.gemm.problem import Store
from quackish.ops.attention.problems import (
    AttentionMaskProblem,
    AttentionOrderProblem,
    AttentionRowsProblem,
)
from quackish.ops.attention.score_problems import (
    AttentionBiasProblem,
    AttentionForwardProblem,
    AttentionKeysProblem,
    AttentionProductProblem,
    AttentionQueriesBiasProblem,
    AttentionQueriesProblem,
)
from quackish.ops.attention.small_problems import AttentionSmallBackwardProblem, AttentionSmallForwardProblem
from quackish.ops.linear_cross_entropy.gemm_problems import Dlogits, LceGemmProblem, Softmax
from quackish.ops.linear_cross_entropy.row_problems import (
    LceBiasProblem,
    LceCompactProblem,
    LceGatherProblem,
    LceRowsProblem,
    LceScatterProblem,
    LceTargetsProblem,
)
from quackish.ops.mlp import gemm_problems as mlp
from quackish.ops.mlp.problems import TokenRowsProblem
from quackish.ops.rms_norm.api import rms_norm_backward, rms_norm_forward
from quackish.ops.rms_norm.problems import RmsNormBwdProblem, RmsNormFwdProblem
from quackish.ops.rotary.problems import RotaryProblem

BF16, FP32 = "bfloat16", "float32"

SPECS = ops.specs()
SAMPLES = [problem for spec in SPECS.values() for problem in spec.samples]


def test_every_kernel_describes_itself():
    for name, spec in SPECS.items():
        assert spec.name == name
        assert spec.problem.spec is spec
        assert spec.samples
        assert {type(problem) for problem in spec.samples} == {spec.problem}
        for variant in spec.on.values():
            assert (variant.why_illegal is None) == (variant.tuning == ""), name


# Arguments -----------------------------------------------------------------------------------------------------------


def named(kind):
    """A NamedTuple of its fields' names; those that are NamedTuples too have theirs."""
    defaults = kind._field_defaults
    return kind(*(named(type(d)) if isinstance(d := defaults.get(f), tuple) else f for f in kind._fields))


@pytest.mark.parametrize("name", SPECS)
def test_sizes_are_arguments(name):
    found = SPECS[name].sizes_of(named(type(SPECS[name].samples[0].args)))
    assert found.items() >= {size: size for size in SPECS[name].sizes}.items()  # and `more_sizes`


def absent(args):
    return [absent(arg) if isinstance(arg, tuple) else arg is None for arg in args]


@pytest.mark.parametrize("problem", SAMPLES, ids=lambda problem: problem.spec.name)
def test_fake_args_match_the_problem(problem):
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
    kernel_class = loaded(problem.spec.on["sm_90"].kernel)
    fake, _ = kernel_class(problem, choose(problem, H200).config).fake_args()
    assert [*inspect.signature(kernel_class.__call__).parameters] == ["self", "args", "stream"]
    assert type(fake) is type(problem.args)
    assert absent(fake) == absent(problem.args)


# Work ----------------------------------------------------------------------------------------------------------------


def work(problem, sizes):
    return problem.spec.work(problem, sizes)


def nbytes(*tensors):
    return sum(t.numel() * t.itemsize for t in tensors if t is not None)


def name_of(t):
    return None if t is None else str(t.dtype).removeprefix("torch.")


@pytest.mark.parametrize("residual_dtype", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_work_of_rms_norm(dtype, with_bias, residual_dtype):
    m, n = 5, 24
    x, weight = torch.randn(m, n, dtype=dtype), torch.randn(n)
    bias = torch.randn(n, dtype=dtype) if with_bias else None
    with_residual = residual_dtype is not None
    residual = torch.randn(m, n, dtype=torch.float32) if with_residual else None
    y, res, rstd = rms_norm_forward(x, weight, bias, residual=residual, residual_dtype=residual_dtype)
    names, res_dtype = map(name_of, (x, y, weight, bias, residual)), name_of(res) if with_residual else None
    launch_work = work(RmsNormFwdProblem(n, *names, res_dtype=res_dtype), dict(m=m))
    assert launch_work.bytes_read == nbytes(x, weight, bias, residual)
    assert launch_work.bytes_written == nbytes(y, res if with_residual else None, rstd)

    dres = torch.randn_like(res) if with_residual else None
    wanted = dict(dbias=with_bias, dresidual=with_residual, dx_dtype=dtype, dbias_dtype=dtype)
    dx, dweight, dbias, dresidual = rms_norm_backward(y, res, weight, rstd, dres=dres, **wanted)
    second = dresidual if dresidual is not None and dresidual.dtype != dtype else None
    names = map(name_of, (res, y, weight, dres, dx, second, dweight, dbias))
    launch_work = work(RmsNormBwdProblem(n, *names), dict(m=m))
    assert launch_work.bytes_read == nbytes(y, res, weight, rstd, dres)
    assert launch_work.bytes_written == nbytes(dx, second, dweight, dbias)


def test_work_of_gemms():
    m, n, k = 512, 1000, 64
    sizes = dict(m=m, n=n, k=k)
    a, b, e = (torch.empty(shape, dtype=torch.bfloat16) for shape in ((m, k), (n, k), (m, n)))
    part = torch.empty(m, 6)  # 6 tiles of 192 classes
    cases = {
        LceGemmProblem(Softmax(), BF16, BF16): ((a, b), (e, part)),
        LceGemmProblem(Softmax(), BF16, None): ((a, b), (part,)),
        LceGemmProblem(Softmax(smoothing=True, weighted=True), BF16, BF16): ((a, b), (e, part, part)),
        LceGemmProblem(Dlogits(), BF16, BF16): ((a, b), (e,)),
        LceGemmProblem(Store(accumulate=True), BF16, FP32): ((a, b, e.float()), (e.float(),)),
    }
    for problem, (read, written) in cases.items():
        assert work(problem, sizes) == Work(nbytes(*read), nbytes(*written), 2 * m * n * k), problem
    assert work(LceGemmProblem(Softmax(recompute_flagged=True), BF16, BF16), sizes).flops == 0


def test_work_of_grouped_gemms():
    rows, h, i, groups = 512, 48, 130, 4
    sizes = dict(rows=rows, n=i, k=h, groups=groups)
    x, act, z = (torch.empty(rows, n, dtype=torch.bfloat16) for n in (h, i, 2 * i))
    w, parts, dw = torch.empty(groups, i, h, dtype=torch.bfloat16), torch.empty(3, rows), torch.empty(groups, h, i)

    def problem(epilogue, **options):
        return mlp.MlpGemmProblem(epilogue, BF16, 64, BF16, **options)

    cases = {
        problem(mlp.Up("swiglu", scaled=True)): ((x, w, w), (act,), 2 * i * h),
        problem(mlp.Up("swiglu", scaled=True, keeps=True), b_in_two=True): ((x, w, w), (z, act), 2 * i * h),
        problem(mlp.Up("silu", keeps=True)): ((x, w), (act, act), i * h),
        problem(mlp.Down()): ((x, w), (act,), i * h),
        problem(mlp.Down(), b_in_two=True): ((x, x, w, w), (act,), 2 * i * h),
        problem(mlp.DownBackward("swiglu", scaled=True)): ((x, w, z), (z, act, parts), i * h),
        problem(mlp.DownBackward("silu")): ((x, w, act), (act, act), i * h),
    }
    for one, (read, written, products) in cases.items():
        assert work(one, sizes) == Work(nbytes(*read), nbytes(*written), 2 * rows * products), one
    sizes = dict(rows=rows, m=h, n=i, groups=groups)
    for accumulate in (False, True):
        one = mlp.MlpGemmProblem(mlp.Store(accumulate), BF16, 64, FP32)
        read = nbytes(x, act, dw if accumulate else None)
        assert work(one, sizes) == Work(read, nbytes(dw), 2 * rows * h * i)


def test_work_of_attention():
    batch, heads, group, num_q, num_k, d = 2, 4, 2, 24, 40, 64
    sizes = dict(batch=batch, heads=heads, group=group, num_q=num_q, num_k=num_k, d=d)
    sizes |= dict(bias_batch=batch, bias_heads=heads, mask_batch=batch, mask_heads=1)
    q, k = (torch.empty(batch, h, n, d, dtype=torch.bfloat16) for h, n in ((heads, num_q), (heads // group, num_k)))
    bias, mask = torch.empty(batch, heads, num_q, num_k), torch.empty(batch, 1, num_q, num_k, dtype=torch.bool)
    product = 2 * bias.numel() * d
    fields = dict(dtype=BF16, d=64, bias_dtype=FP32, mask=True)

    def counts(name, problem):
        found = work(problem, sizes | dict(parts=3))
        blocks = 0 if name in ("attention_bwd_rows", "attention_bwd_product") else batch * heads  # of 64 x 64
        assert found.exponentials == 64 * 64 * blocks
        return found.bytes_read, found.bytes_written, found.flops

    scores = nbytes(bias, mask)
    assert counts("attention_fwd", AttentionForwardProblem(**fields)) == (
        nbytes(q, k, k) + scores, nbytes(q), 2 * product
    )  # fmt: skip
    assert counts("attention_bwd_keys", AttentionKeysProblem(**fields, dbias=True)) == (
        nbytes(q, q, k, k) + scores, nbytes(k, k, bias), 4 * product
    )  # fmt: skip
    assert counts("attention_bwd_queries", AttentionQueriesProblem(**fields)) == (
        nbytes(q, q, k, k) + scores, nbytes(q), 3 * product
    )  # fmt: skip
    rows, lse = AttentionRowsProblem(BF16, dlse=True), torch.empty(batch, heads, num_q)
    assert counts("attention_bwd_rows", rows) == (nbytes(q, q, lse, lse), nbytes(lse, lse), 2 * q.numel())
    for name in ("bias_batch", "bias_heads", "mask_batch", "mask_heads"):
        del sizes[name]
    assert counts("attention_bwd_product", AttentionProductProblem(BF16, 64, mask=True, mask_aligned=False)) == (
        nbytes(bias.to(torch.bfloat16), k), nbytes(q), product
    )  # fmt: skip
    sizes |= dict(bias_batch=batch, bias_heads=heads, mask_batch=batch, mask_heads=1)
    sizes["bias_batch"] = 1
    assert counts("attention_bwd_bias", AttentionBiasProblem(**fields, in_parts=True)) == (
        nbytes(q, q, k, k, bias[:1], mask), 3 * nbytes(bias[:1]), 2 * product
    )  # fmt: skip
    assert counts("attention_bwd_queries_bias", AttentionQueriesBiasProblem(**fields, in_parts=True)) == (
        nbytes(q, q, k, k, bias[:1], mask), nbytes(q) + 3 * nbytes(bias[:1]), 3 * product
    )  # fmt: skip
    sizes |= dict(group=1, batches=1, heads_of_bias=heads)
    k, lse = torch.empty(batch, heads, num_k, d, dtype=torch.bfloat16), torch.empty(batch, heads, num_q)
    assert counts("attention_small_fwd", AttentionSmallForwardProblem(**fields)) == (
        nbytes(q, k, k, bias[:1], mask), nbytes(q), 2 * product
    )  # fmt: skip
    assert counts("attention_small_bwd", AttentionSmallBackwardProblem(**fields, dlse=True, dbias_dtype=FP32)) == (
        nbytes(q, q, q, k, k, lse, lse, bias[:1], mask), nbytes(q, k, k) + 3 * nbytes(bias[:1]), 5 * product
    )  # fmt: skip
    of_mask = dict(batches=batch, heads=1, rows=num_q, columns=130)  # three blocks of 64 columns
    assert work(AttentionMaskProblem(by_vectors=False), of_mask) == Work(2 * 24 * 130, 2 * 3, 0)
    of_mask = dict(batches=batch, heads=1, num_q=200, num_k=130)  # 4 x 3 blocks, and two tiles of both
    assert work(AttentionOrderProblem(), of_mask) == Work(2 * 12, 2 * 4 * (2 + 2), 0)


def test_work_of_token_rows():
    tokens, k, n = 512, 4, 64
    x, of_experts = (torch.empty(rows, n, dtype=torch.bfloat16) for rows in (tokens, tokens * k))
    rows, sizes = torch.empty(tokens, k, dtype=torch.int64), dict(tokens=tokens, k=k)
    copy, total = (work(TokenRowsProblem(op, n, BF16), sizes) for op in ("copy", "sum"))
    assert copy == Work(nbytes(x, rows), nbytes(of_experts), 0)
    assert total == Work(nbytes(of_experts, rows), nbytes(x), of_experts.numel())


def test_work_of_rotary():
    batch, q_heads, k_heads, length, d, rotary_dim = 2, 3, 1, 5, 24, 16
    sizes = dict(tokens=batch * length, length=length, q_heads=q_heads, k_heads=k_heads)
    q, k = (torch.empty(batch, heads, length, d, dtype=torch.bfloat16) for heads in (q_heads, k_heads))
    for half_table, table_batch in ((False, 1), (True, 1), (True, batch)):
        table = torch.empty(table_batch, length, rotary_dim // (1 + half_table))
        problem = RotaryProblem(d, BF16, FP32, rotary_dim, half_table=half_table)
        found = work(problem, sizes | dict(table_rows=table_batch * length))
        assert (found.bytes_read, found.bytes_written) == (nbytes(q, k, table, table), nbytes(q, k))


def test_work_of_row_kernels():
    rows, h, v, tiles = 512, 64, 1000, 4
    x, w, e = (torch.empty(shape, dtype=torch.bfloat16) for shape in ((rows, h), (v, h), (rows, v)))
    row, acc, part, classes = (torch.empty(shape) for shape in ((rows,), (rows, h), (rows, tiles), (v,)))
    cases = [
        ("lce_compact", LceCompactProblem("int32"), (row,), (row,)),
        ("lce_gather", LceGatherProblem(h, BF16, "int64"), (x, w[:rows]), (x,)),
        ("lce_rows", LceRowsProblem(True), (part,), (row, row, row)),
        ("lce_rows", LceRowsProblem(False, "coefs"), (), (row,) * 4),
        ("lce_rows", LceRowsProblem(True, "scale", h, BF16), (part, x), (row, row, row, x)),
        ("lce_targets", LceTargetsProblem(h, BF16, BF16), (x, w[:rows]), (w[:rows],)),
        ("lce_bias", LceBiasProblem(BF16, False, True), (e, classes), (classes,)),
        ("lce_scatter", LceScatterProblem(h, BF16), (acc,), (x,)),
    ]
    sizes = dict(m=rows, rows=rows, n=v, v=v, v0=0, v1=v, tiles=tiles)
    for name, problem, read, written in cases:
        launch_work = work(problem, sizes)
        assert (launch_work.bytes_read, launch_work.bytes_written) == (nbytes(*read), nbytes(*written)), (name, problem)


def test_estimate():
    roofs = Roofs(copy=1e12, add=2e12, gemm=1e14, source="data sheet")
    assert estimate(Work(10**9, 10**9, 0), roofs).us == pytest.approx(2000)
    assert estimate(Work(2 * 10**9, 10**9, 0), roofs).us == pytest.approx(1500)  # two reads to a write
    assert estimate(Work(10**9, 10**9, 10**12), roofs) == Estimate(10_000, "tensor cores", 10_000)
    assert estimate(Work(1000, 1000, 1000), roofs) == Estimate(LAUNCH_US, "launch", LAUNCH_US)
    roofs = dataclasses.replace(roofs, exponentials=1e12)
    scores = estimate(Work(10**9, 10**9, 10**11, exponentials=10**10), roofs)
    assert scores == Estimate(10_000, "exponentials", 10_000 * 3 + 2000 + 1000 + LAUNCH_US)


def test_describe_omits_defaults():
    problem = RmsNormFwdProblem(4096, BF16, BF16, FP32, aligned=False)
    assert describe(problem, dict(m=8)) == "m=8 n=4096 x=bf16 y=bf16 weight=fp32 aligned=False"
    assert describe(object(), dict(m=8)) == "m=8"
    logits = LceGemmProblem(Softmax(bias_dtype=BF16, softcap=True), BF16, None, d_in_two=True)
    assert describe(logits, {}) == "epilogue=Softmax bias=bf16 softcap dtype=bf16 d_in_two"
