"""Attention's kernels: their configs, and compiled without spilled registers."""

import itertools

import pytest
import torch

from quackish.device import cubin
from quackish.gpu import H200
from quackish.ops.attention.config import (
    AttentionConfig,
    AttentionMaskConfig,
    AttentionOrderConfig,
    AttentionRowsConfig,
    attention_config,
    attention_why_illegal,
    bias_parts,
    cluster_of_keys,
    keys_ahead,
    own_in_registers,
    parts_of_workers,
    resident_clusters,
)
from quackish.ops.attention.prepared import Prepared
from quackish.ops.attention.problems import (
    AttentionMaskProblem,
    AttentionOrderProblem,
    AttentionRowsProblem,
)
from quackish.ops.attention.reference import Inputs, Options
from quackish.ops.attention.score_problems import (
    AttentionBiasProblem,
    AttentionForwardProblem,
    AttentionKeysProblem,
    AttentionProductProblem,
    AttentionQueriesBiasProblem,
    AttentionQueriesProblem,
)
from quackish.ops.attention.small_problems import AttentionSmallBackwardProblem, AttentionSmallForwardProblem
from tests.variants import check_compiles, one_per, one_per_kernel

BF16, FP16, FP32 = "bfloat16", "float16", "float32"
FIELDS = [  # one of each kernel is compiled in every run of the tests
    dict(dtype=BF16, d=64, bias_dtype=BF16),
    dict(dtype=BF16, d=128, bias_dtype=BF16, softcap=True, band=True),
    dict(dtype=BF16, d=128, bias_dtype=FP32, mask=True),
    dict(dtype=FP16, d=96, bias_dtype=FP32, bias_aligned=False, mask=True, mask_aligned=False, band=True),
    dict(dtype=BF16, d=64, mask=True, band=True),
    dict(dtype=FP16, d=32, bias_dtype=FP16, mask=True, band=True, softcap=True),
    dict(dtype=BF16, d=32, bias_dtype=BF16),
    dict(dtype=FP16, d=32, bias_dtype=FP32, mask=True, mask_of_keys=True, band=True, softcap=True),
    dict(dtype=BF16, d=32, bias_dtype=BF16, mask=True, mask_of_keys=True, wide=True),
    dict(dtype=BF16, d=32, bias_dtype=BF16, wide=True),
    dict(dtype=FP16, d=32, wide=True),
    dict(dtype=BF16, d=32, bias_dtype=BF16, mask=True, mask_of_keys=True),
    dict(dtype=BF16, d=128, bias_dtype=BF16, mask=True, mask_of_keys=True),
    dict(dtype=BF16, d=64, bias_dtype=BF16, bias_aligned=False, mask=True, mask_of_keys=True),
    dict(dtype=BF16, d=64, mask=True, mask_of_keys=True),
]

SMALL_FIELDS = [
    dict(bias_dtype=BF16),
    dict(bias_dtype=BF16, bias_aligned=False),
    dict(bias_dtype=BF16, mask=True, mask_of_keys=True),
    dict(bias_dtype=FP32, mask=True, mask_of_keys=True),
    dict(bias_dtype=FP32, mask=True, mask_aligned=False, band=True),
    dict(bias_dtype=FP32, bias_aligned=False, mask=True, mask_aligned=False, band=True),
    dict(mask=True, mask_aligned=False),
]


def problems():
    for fields in FIELDS:
        has_bias = fields.get("bias_dtype") is not None
        yield "attention_fwd", AttentionForwardProblem(**fields)
        yield "attention_bwd_queries", AttentionQueriesProblem(**fields)
        yield (
            "attention_bwd_keys",
            AttentionKeysProblem(**fields, dbias=has_bias and not fields.get("wide")),
        )
        of_product = {name: fields.get(name, False) for name in ("mask", "band")}
        yield (
            "attention_bwd_product",
            AttentionProductProblem(
                fields["dtype"], fields["d"], None, True, of_product["mask"], False, of_product["band"]
            ),
        )
        if has_bias:
            yield "attention_bwd_bias", AttentionBiasProblem(**fields | dict(wide=False))
    for masked in (dict(mask=True, mask_of_keys=True), {}):
        for ctas, blocks in ((1, 3), (2, 3), (3, 3), (4, 2), (4, 3), (5, 2)):
            fields = dict(dtype=BF16, d=32, bias_dtype=BF16, ctas=ctas, blocks=blocks, in_parts=ctas > 1) | masked
            yield "attention_bwd_queries_bias", AttentionQueriesBiasProblem(**fields)
    for fields in SMALL_FIELDS:
        for pairs in (True, False):
            small = dict(dtype=BF16, d=32, pairs=pairs) | fields
            yield "attention_small_fwd", AttentionSmallForwardProblem(**small)
            bias_dtype = fields.get("bias_dtype")
            for dbias_dtype in {None, bias_dtype and FP32}:
                yield "attention_small_bwd", AttentionSmallBackwardProblem(**small, dlse=True, dbias_dtype=dbias_dtype)
            if bias_dtype == BF16:
                in_place = dict(dbias_dtype=BF16, ds_is_dbias=True)
                yield "attention_small_bwd", AttentionSmallBackwardProblem(**small, **in_place)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name, problem, gpu", one_per_kernel((*case, H200) for case in problems()))
def test_compiles_without_spills(name, problem, gpu):
    check_compiles(name, problem, attention_config(problem, gpu), gpu)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "name, problem",
    one_per(
        lambda name, problem: name,
        [
            ("attention_fwd", AttentionForwardProblem(BF16, 128, BF16)),
            ("attention_fwd", AttentionForwardProblem(BF16, 64, BF16)),
            ("attention_bwd_keys", AttentionKeysProblem(BF16, 128, BF16, dbias=True)),
            ("attention_bwd_keys", AttentionKeysProblem(BF16, 64, BF16, dbias=True)),
            ("attention_bwd_keys", AttentionKeysProblem(BF16, 128, mask=True)),
            ("attention_bwd_keys", AttentionKeysProblem(BF16, 32, BF16)),
            ("attention_bwd_keys", AttentionKeysProblem(BF16, 32, BF16, wide=True)),
            ("attention_bwd_queries", AttentionQueriesProblem(BF16, 128, BF16)),
            ("attention_bwd_queries", AttentionQueriesProblem(BF16, 64, BF16)),
            ("attention_bwd_queries_bias", AttentionQueriesBiasProblem(BF16, 32, BF16, ctas=4, blocks=3)),
        ],
    ),
)
def test_matmuls_overlap(name, problem):
    """ptxas waits for each WGMMA at once if it finds fault with a loop: then there are as many waits as WGMMAs."""
    config = attention_config(problem, H200)
    _, sass = cubin.disassemble(problem.spec.kernel_class(H200), problem, config, H200.target)
    wgmmas, waits = (sum(word in i.text for i in sass) for word in ("HGMMA", "WARPGROUP.DEPBAR"))
    assert 0 < waits < wgmmas / 2, (waits, wgmmas)


@pytest.mark.parametrize("n", [64, 200, 256, 384, 768])
def test_configs_do_not_depend_on_the_batch(n):
    """The bits of a row of o depend on the tiles: an online softmax rounds after each tile's maximum."""
    kinds, found = (AttentionForwardProblem, AttentionQueriesProblem, AttentionKeysProblem), set()
    for batch in (1, 1000):
        q = torch.empty(batch, 4, n, 32, dtype=torch.bfloat16, device="meta")
        options = Options(1.0, None, None, None)
        call = Prepared(Inputs(q, q, q, None, None), options, lambda problem: problem, H200.sm_count, True, True)
        found.add(tuple(attention_config(call.kernel(kind), H200) for kind in kinds))
    assert len(found) == 1


@pytest.mark.parametrize("dlse", [True, False])
def test_rows_compile_without_spills(dlse):
    check_compiles("attention_bwd_rows", AttentionRowsProblem(BF16, dlse), AttentionRowsConfig(), H200)


@pytest.mark.exhaustive
@pytest.mark.parametrize("by_vectors", [True, False])
def test_classes_compile_without_spills(by_vectors):
    check_compiles("attention_mask", AttentionMaskProblem(by_vectors), AttentionMaskConfig(), H200)


@pytest.mark.exhaustive
def test_order_compiles_without_spills():
    check_compiles("attention_order", AttentionOrderProblem(), AttentionOrderConfig(), H200)


def test_measured_configs():
    """The fastest of those that an H100 or H200 ran: benchmarks/results/H200/attention.md."""
    for d, forward, keys, product in (
        (64, (128, 3, 2), (128, 2, 2), (128, 4)),
        (128, (128, 2), (64, 3), (128, 3)),
    ):
        fields = dict(dtype=BF16, d=d, bias_dtype=BF16)
        of = {
            AttentionForwardProblem(**fields): forward,
            AttentionKeysProblem(**fields, dbias=True): keys,
            AttentionProductProblem(BF16, d): product,
        }
        for problem, expected in of.items():
            assert attention_config(problem, H200) == AttentionConfig(2, *expected)
        of_keys = AttentionKeysProblem(**fields, dbias=True)
        assert keys_ahead(of_keys, AttentionConfig(2, *keys)) == (d == 128)  # at d 64 fewer, larger tiles are faster
        assert not keys_ahead(of_keys, AttentionConfig(2, 64, 1))


@pytest.mark.parametrize(
    "problem, tiles",
    [
        (AttentionForwardProblem(BF16, 128, mask=True), 1),
        (AttentionKeysProblem(BF16, 64, mask=True), 2),
        (AttentionKeysProblem(BF16, 64, BF16, dbias=True), 0),
        (AttentionKeysProblem(BF16, 32, mask=True), 2),
        (AttentionQueriesProblem(BF16, 128, mask=True), 1),
    ],
)
def test_own_tiles_in_registers(problem, tiles):
    assert own_in_registers(problem, attention_config(problem, H200)) == tiles


def test_every_problem_has_a_legal_config():
    flags = (True, False)
    for d, bias, aligned, mask, mask_aligned, band, softcap in itertools.product(
        (32, 64, 96, 128), (BF16, FP32, None), flags, flags, flags, flags, flags
    ):
        fields = dict(dtype=BF16, d=d, bias_dtype=bias, bias_aligned=aligned, mask=mask, mask_aligned=mask_aligned,
                      band=band, softcap=softcap)  # fmt: skip
        found = [AttentionForwardProblem(**fields), AttentionKeysProblem(**fields, dbias=bias is not None)]
        found += [AttentionQueriesProblem(**fields), AttentionProductProblem(BF16, d, None, True, mask, False, band)]
        found += [AttentionBiasProblem(**fields)] * (bias is not None)
        if d == 32 and not softcap and not (mask and mask_aligned):
            found += [AttentionSmallForwardProblem(**fields, pairs=pairs) for pairs in flags]
            found += [AttentionSmallBackwardProblem(**fields, pairs=pairs, dbias_dtype=bias) for pairs in flags]
        for problem in found:
            assert attention_why_illegal(problem, attention_config(problem, H200), H200) is None


@pytest.mark.parametrize(
    "problem, config, why",
    [
        (AttentionForwardProblem, (1, 128, 2), "num_wgs is 1; expected 2 or 3"),
        (AttentionForwardProblem, (2, 32, 2), "tile is 32; expected one of 128, 64"),
        (AttentionForwardProblem, (2, 64, 0), "num_stages is 0; expected at least 1"),
        (AttentionForwardProblem, (2, 64, 2, 3), "own_stages is 3; expected 1 or 2"),
        (AttentionProductProblem, (2, 64, 2, 2), "own_stages is 2; expected 1: this kernel keeps no tiles"),
        (AttentionQueriesProblem, (2, 64, 1), "num_stages is 1; expected at least 2"),
        (AttentionForwardProblem, (3, 128, 2), "about 200 registers per thread, of 160; expected a"),
        (AttentionForwardProblem, (2, 128, 4), "expected fewer stages or a smaller tile"),
    ],
)
def test_illegal_configs(problem, config, why):
    assert why in attention_why_illegal(problem(BF16, 128, BF16), AttentionConfig(*config), H200)


def test_the_order_of_tiles_is_one_of_128_rows():
    why = attention_why_illegal(AttentionForwardProblem(BF16, 64, mask=True), AttentionConfig(3, 64, 2), H200)
    assert "num_wgs is 3; with a mask expected 2" in why


def test_clusters_of_keys():
    found = [cluster_of_keys(num_k) for num_k in (129, 256, 384, 512, 513, 640, 768, 769)]
    assert found == [(1, 3), (2, 2), (2, 3), (4, 2), (3, 3), (5, 2), (4, 3), None]


def test_parts_take_at_most_104_mb():
    """As the guide says: 8 parts of each worker."""
    for num_k, summed, tensors in itertools.product((128, 192, 384, 576, 768), (100, 1000, 100_000), (1, 3, 40)):
        ctas, _ = cluster_of_keys(num_k)
        tiles = tensors * -(-num_k // 128)
        parts = parts_of_workers(summed, tiles, resident_clusters(ctas, 132))
        assert parts == 1 or 4 * parts * tiles * 128 * num_k < 104e6
        assert (parts - 1) * -(-summed // parts) < summed  # none is empty


def test_parts_of_a_broadcast_sum():
    assert bias_parts(64, 1, 2048, 2048, 64, 132) == 1  # 512 tiles occupy the GPU
    assert bias_parts(64, 1, 256, 256, 64, 132) == 32  # 8 tiles, two heads each
    assert bias_parts(4, 1, 64, 64, 64, 132) == 4  # at most one part per head
    assert bias_parts(3, 1, 64, 64, 64, 132) == 1  # too few heads to divide
    assert bias_parts(768, 4, 768, 768, 32, 132) == 7  # 144 tiles: 1008 in 8 turns of 132
    assert bias_parts(256, 4, 256, 256, 32, 132) == 8  # 16 tiles: one turn of 128
    assert bias_parts(1, 64, 768, 768, 32, 132) == 1
    assert parts_of_workers(256, 4, 264) == 64  # 4 matrices each
    assert parts_of_workers(1024, 3, 264) == 86  # 12 each
    assert parts_of_workers(768, 24, 30) == 5  # 4 turns of 30 clusters
    assert parts_of_workers(1, 2048, 132) == parts_of_workers(3, 4, 264) == 1
