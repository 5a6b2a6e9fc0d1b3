"""Linear cross entropy's GEMMs: compiled for Hopper on any host; on a GPU each launcher against the emulation."""

import dataclasses
import itertools

import pytest
import torch

from quackish import config, kernels, launch
from quackish.configs.gemm import (
    NUM_TICKETS,
    SOFTMAX_TILE_N,
    GemmProblem,
    gemm_config,
    gemm_smem_bytes,
    gemm_why_illegal,
    num_tail_splits,
    splits_dw_tail,
)
from quackish.gpu import H200
from quackish.ops.linear_cross_entropy.launches import DlogitsCall, LceKernels, LogitsCall
from quackish.testing.device import poison_free_memory
from quackish.testing.errors import error, same_bits
from tests.emulated_kernels import NO_SLOT, decode, encode, lce_kernels, with_cut_off
from tests.variants import some

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
NAN = float("nan")
LOGITS = "logits", "recompute_flagged"
CALLS = {**dict.fromkeys(LOGITS, LogitsCall), "dlogits": DlogitsCall}


# Compiled -----------------------------------------------------------------------------------------------------------


def problems():
    for dtype, out in ("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float16", "float16"), ("float16", "float32"):
        dw = dict(a_major="m", b_major="n", live="k")
        yield GemmProblem("store", dtype, out, **dw)
        yield GemmProblem("store", dtype, out, **dw, split_k_tail=True)
        yield GemmProblem("store", dtype, out, **dw, split_k_tail=True, scaled=True)
        if out == "bfloat16":
            for split_k_tail in (False, True):
                yield GemmProblem("store", dtype, out, **dw, split_k_tail=split_k_tail, rounding_residual=True)
        if out == "float32":
            yield GemmProblem("store", dtype, out, **dw, accumulate=True)
            yield GemmProblem("store", dtype, out, **dw, accumulate=True, split_k_tail=True, scaled=True)
            yield GemmProblem("store", dtype, out, **dw, accumulate=True, split_k_tail=True)
            yield GemmProblem("store", dtype, out, b_major="n")
            yield GemmProblem("store", dtype, out, b_major="n", accumulate=True)
        for split in (False, True):
            for split_k_tail in (False, True):
                yield GemmProblem("rows", dtype, out, b_major="n", a_in_two=split, split_k_tail=split_k_tail)
    for bias, softcap in itertools.product((None, "bfloat16", "float32"), (False, True)):
        for smoothing, weighted in (False, False), (True, False), (True, True):
            options = dict(bias_dtype=bias, softcap=softcap, smoothing=smoothing, weighted=weighted)
            yield GemmProblem("dlogits", "bfloat16", "bfloat16", **options)
            for recompute in (False, True):
                yield GemmProblem("softmax", "bfloat16", None, **options, recompute_flagged=recompute)
                if not smoothing:
                    for split in (False, True):
                        yield GemmProblem(
                            "softmax", "bfloat16", "bfloat16", **options, recompute_flagged=recompute, d_in_two=split
                        )
    yield GemmProblem("softmax", "float16", None, bias_dtype="float16")
    yield GemmProblem("dlogits", "float16", "float16", bias_dtype="float16")


@pytest.mark.parametrize("problem", list(some(problems(), 12)), ids=str)
def test_compiles(problem):
    config = gemm_config(problem, H200)
    used = launch.resources(kernels.find("lce_gemm", H200), problem, config, H200.target)
    assert used.stack_bytes == used.local_loads == used.local_stores == 0, (used, config)
    assert used.smem_bytes <= H200.smem_bytes, (used, config)


@pytest.mark.parametrize(
    "tiles, k_tiles, splits",
    [(512, 2004, 250), (1024, 2004, 238), (64, 2004, 0), (66, 2004, 0), (16, 2004, 64), (676, 64, 64), (700, 64, 0)],
)
def test_tails_are_split_where_clusters_would_idle(tiles, k_tiles, splits):
    got = num_tail_splits(tiles, k_tiles, 66)
    assert got == (splits or tiles % 66)
    m, n, k = tiles * 256, 256, k_tiles * 64
    room, floats = gemm_config(GemmProblem("rows", "bfloat16", "bfloat16"), H200).tail_room(m, n, k, 66)
    assert (room, floats) == (max(66, got), max(66, got) * 256 * 256)


# Against the emulation, on a GPU ------------------------------------------------------------------------------------


class Case:
    """The same buffers twice: for a kernel on the GPU, and for the emulation on the CPU."""

    def __init__(self, m=300, h=264, v=1000, live=None, dtype=BF16, seed=0):
        make = torch.Generator().manual_seed(seed)
        self.m, self.h, self.v, self.dtype = m, h, v, dtype
        self.live = m if live is None else live
        self.x = torch.randn(m, h, generator=make).to(dtype)
        self.x[self.live :] = 0  # as gather leaves it, up to the end of the tile
        self.w = (torch.randn(v, h, generator=make) * 2 / h**0.5).to(dtype)
        self.slot_target = torch.randint(0, v, (m,), generator=make, dtype=torch.int32)
        self.order = torch.randperm(m, generator=make).int()
        self.num_live = torch.tensor([self.live], dtype=torch.int32)
        self.row_shift = (self.x.float() * self.w[self.slot_target.long()].float()).sum(1)
        self.e = torch.randn(m, -(-v // 64) * 64, generator=make).to(dtype)
        self.row_scale = torch.rand(m, generator=make) + 0.5


def both(name, *args):
    """The arguments after the launch of `name` on the GPU, and after the emulation of it; arguments that are views of
    one another must not be given."""
    emulated = [_copy(a, "cpu") if isinstance(a, torch.Tensor) else a for a in args]
    on_gpu = [_copy(a, "cuda") if isinstance(a, torch.Tensor) else a for a in args]
    gpu = LceKernels(torch.device("cuda", torch.cuda.current_device()))
    for k, given in (lce_kernels(), emulated), (gpu, on_gpu):
        getattr(k, name)(*([CALLS[name](*given)] if name in CALLS else given))
    torch.cuda.synchronize()
    return [a.cpu() if isinstance(a, torch.Tensor) else a for a in on_gpu], emulated


def _copy(t, device):
    """With the same strides: a matrix may be columns of a larger one."""
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device).copy_(t)


def close(got, truth, eps):
    found = error(got, truth.to(FP64))
    return found.within(eps, 16 * eps)


SHAPES = [
    dict(),
    dict(m=1, v=2, h=8),
    dict(m=129, v=257, h=72),
    dict(m=640, v=2056, h=512, live=500),
    dict(m=256, live=0),
    dict(m=1500, v=5003, h=96, live=1025),
]


def padded_nan(rows, columns):
    return torch.full((rows, -(-columns // 64) * 64), NAN, dtype=BF16)[:, :columns]


def softmax_args(c, softcap=None, bias=None, stored=True, wsum=False, weight=None, v_split=0):
    tiles = -(-c.v // SOFTMAX_TILE_N)
    e = e2 = None
    if stored:
        e = padded_nan(c.m, v_split or c.v)
        e2 = padded_nan(c.m, c.v - v_split) if v_split else None
    part_sum, part_wsum = (torch.full((c.m, tiles), NAN) for _ in range(2))
    row_shift = c.row_shift if softcap is None else softcap * torch.tanh(c.row_shift / softcap)
    return (
        c.x, c.w, bias, weight, row_shift, c.slot_target, c.num_live, 0, softcap or 0.0, e, e2, v_split, part_sum,
        part_wsum if wsum else None, torch.full((c.m,), NAN), encode(row_shift),
        torch.zeros(1 + -(-c.m // 128), dtype=torch.int32),
    )  # fmt: skip


E, E2, SUM, WSUM, ZT, TOP, FLAGS = 9, 10, 12, 13, 14, 15, 16  # of these arguments


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("options", ["plain", "softcap", "bias", "fp32 bias", "statistics", "smoothing", "weighted"])
def test_softmax(shape, options):
    c = Case(**shape)
    bias = torch.randn(c.v, generator=torch.Generator().manual_seed(5))
    given = {
        "plain": {},
        "softcap": dict(softcap=3.0),
        "bias": dict(bias=bias.to(BF16)),
        "fp32 bias": dict(bias=bias, softcap=2.0),
        "statistics": dict(stored=False),
        "smoothing": dict(stored=False, wsum=True, bias=bias),
        "weighted": dict(stored=False, wsum=True, weight=torch.rand(c.v)),
    }[options]
    got, truth = both("logits", *softmax_args(c, **given))
    rows = c.live
    for at, eps in (E, 0.003), (SUM, 1e-5), (WSUM, 1e-4), (ZT, 1e-5):
        if truth[at] is not None:
            assert close(got[at][:rows], truth[at][:rows], eps), at
    assert got[FLAGS].sum() == 0


@pytest.mark.gpu
@pytest.mark.parametrize("v_split", [192, 256, 1280])
def test_softmax_into_two_buffers(v_split):
    c = Case(v=1504)
    far = torch.tensor([3, 130, 299])
    c.x[far] = c.x[far] * 60
    whole, _ = both("recompute_flagged", *both("logits", *softmax_args(c))[0])
    split, _ = both("recompute_flagged", *both("logits", *softmax_args(c, v_split=v_split))[0])
    assert whole[FLAGS].sum() > 0
    assert same_bits(whole[E], torch.cat([split[E], split[E2]], 1))
    for at in (SUM, ZT, TOP, FLAGS):
        assert same_bits(whole[at], split[at])


@pytest.mark.gpu
def test_rows_far_above_their_reference_are_done_again_and_others_keep_their_bits():
    c = Case(m=400, v=3000, h=128)
    once, _ = both("logits", *softmax_args(c))
    far = torch.tensor([3, 130, 131, 399])
    c.x[far] = c.x[far] * 60
    c.row_shift = (c.x.float() * c.w[c.slot_target.long()].float()).sum(1)
    got, truth = both("logits", *softmax_args(c))
    flagged = truth[FLAGS][1:].nonzero()[:, 0].tolist()
    assert 0 < len(flagged)
    assert same_bits(got[FLAGS], truth[FLAGS])
    # the GPU's maxima are of sums in another order
    again, _ = both("recompute_flagged", *got)
    row_shift = torch.where(got[TOP] >= 0, got[TOP], got[TOP] ^ 0x7FFFFFFF).view(FP32)
    a = c.x.double() @ c.w.double().T
    assert close(again[E], torch.exp(a - row_shift.double()[:, None]), 0.003 + 1e-4 * a.abs().max())
    assert (again[SUM][far].sum(1) < 1e27).all()
    near = torch.ones(400, dtype=torch.bool)
    near[far] = False
    for at in (E, SUM, ZT):
        assert same_bits(again[at][near], once[at][near])


@pytest.mark.gpu
@pytest.mark.parametrize("row", [5, 130, 300, 399, 599])  # of all 128 rows that have a flag, the only one
def test_one_row_is_done_again_wherever_it_is(row):
    c = Case(m=600, h=128)
    c.x[row] = c.x[row] * 60
    c.row_shift = (c.x.float() * c.w[c.slot_target.long()].float()).sum(1)
    got, _ = both("recompute_flagged", *both("logits", *softmax_args(c))[0])
    assert got[FLAGS].nonzero()[:, 0].tolist() == [0, 1 + row // 128]
    a = c.x[row].double() @ c.w.double().T
    torch.testing.assert_close(
        got[SUM][row].double().sum(), torch.exp(a - decode(got[TOP])[row]).sum(), rtol=0.01, atol=0
    )


@pytest.mark.gpu
def test_recompute_flagged_leaves_all_alone_without_flags():
    c = Case()
    got, _ = both("recompute_flagged", *softmax_args(c))
    assert got[E].isnan().all()
    assert got[SUM].isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("options", ["plain", "fp16", "softcap", "bias", "smoothing", "weighted"])
def test_dlogits(shape, options):
    c = Case(**shape, dtype=FP16 if options == "fp16" else BF16)
    make = torch.Generator().manual_seed(7)
    coefs = torch.rand(c.m, 4, generator=make)
    coefs[:, 0] = torch.logsumexp(c.x.float() @ c.w.float().T, 1)
    coefs[c.live :] = 0
    coefs[c.live :, 0] = 2e38
    softcap = 3.0 if options == "softcap" else 0.0
    bias = torch.randn(c.v, generator=make).to(BF16) if options == "bias" else None
    weight = torch.rand(c.v, generator=make) if options == "weighted" else None
    smoothing = options in ("smoothing", "weighted")
    e = torch.full((c.m, -(-c.v // 64) * 64), NAN, dtype=c.dtype)[:, : c.v]
    got, truth = both("dlogits", c.x, c.w, bias, coefs, c.slot_target, c.num_live, 0, weight, softcap, smoothing, 0, e)
    padded = min(c.m, -(-c.live // 64) * 64)
    assert close(got[-1][: c.live], truth[-1][: c.live], 0.005)
    assert (got[-1][c.live : padded] == 0).all()


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("out", [BF16, FP32], ids=str)
def test_dx_to_the_rows_of_order(shape, out):
    c = Case(**shape)
    dx = torch.full((c.m, c.h), NAN, dtype=out)
    got, truth = both("dx", c.e[:, : c.v], None, 0, c.w, c.row_scale, c.order, c.num_live, 0, dx, False)
    rows = c.order[: c.live].long()
    assert close(got[8][rows], truth[8][rows], 0.004 if out == BF16 else 1e-5)
    assert got[8][c.order[c.live :].long()].isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize("v_split", [64, 448])
def test_dx_of_e_in_two_buffers(v_split):
    c = Case(v=1003)
    dx = torch.full((c.m, c.h), NAN, dtype=BF16)
    e, e2 = c.e[:, :v_split].contiguous(), c.e[:, v_split : c.v]
    got, truth = both("dx", e, e2, v_split, c.w, c.row_scale, c.order, c.num_live, 0, dx, False)
    assert close(got[8], truth[8], 0.004)


@pytest.mark.gpu
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("start", [0, 100])
def test_dx_in_fp32_rows_of_the_chunk(accumulate, start):
    c = Case(m=600, live=256)
    out = torch.randn(c.m, c.h) if accumulate else torch.full((c.m, c.h), NAN)
    got, truth = both("dx", c.e[:, : c.v], None, 0, c.w, None, None, c.num_live, start, out, accumulate)
    rows = c.live - start
    assert close(got[8][:rows], truth[8][:rows], 1e-5)
    assert same_bits(got[8][256:], out[256:])  # rows of the last tile that has live ones are nobody's


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("out,accumulate", [(BF16, False), (FP16, False), (FP32, False), (FP32, True)], ids=str)
def test_dw(shape, out, accumulate):
    c = Case(**shape, dtype=FP16 if out == FP16 else BF16)
    dw = torch.randn(c.v, c.h) if accumulate else torch.full((c.v, c.h), NAN, dtype=out)
    got, truth = both("dw", c.e[:, : c.v], c.x, c.num_live, 0, dw, accumulate)
    assert close(got[4], truth[4], 1e-5 if out == FP32 else 0.004)


@pytest.mark.gpu
@pytest.mark.parametrize("out,accumulate", [(FP16, False), (FP32, True)], ids=str)
def test_dw_times_a_factor_of_the_device(out, accumulate):
    c = Case(**SHAPES[0], dtype=FP16)
    dw = torch.randn(c.v, c.h) if accumulate else torch.full((c.v, c.h), NAN, dtype=out)
    factor = torch.tensor([2.0**-12])
    args = "dw", c.e[:, : c.v], c.x, c.num_live, 0, dw, accumulate, None, None, None, factor
    got, truth = both(*args)
    assert close(got[4], truth[4], 1e-5 if out == FP32 else 0.004)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_dw_keeps_what_rounding_takes(shape):
    c = Case(**shape)
    places = torch.full((c.v,), NO_SLOT, dtype=torch.int32)
    places[::3] = torch.randperm(len(places[::3])).int()
    dw, rest = torch.full((c.v, c.h), NAN, dtype=BF16), torch.full((len(places[::3]) + 1, c.h), 77, dtype=torch.int16)
    got, truth = both("dw", c.e[:, : c.v], c.x, c.num_live, 0, dw, False, None, places, rest)
    exact = c.e[: c.live, : c.v].double().T @ c.x[: c.live].double()
    for args in got, truth:
        rounded, kept = args[4], args[8]
        assert close(with_cut_off(rounded[::3], kept[places[::3].long()]).double(), exact[::3], 2e-5)
        assert close(rounded, exact, 0.004)
        assert (kept[-1] == 77).all()


@pytest.mark.gpu
def test_dw_cuts_off_what_rounding_takes_in_ties_and_at_the_ends():
    upper = torch.tensor([0.0, 1.0, 1 + 2**-7, 1.0, 1 + 2**-7, 1.0, 1.0, torch.inf])
    lower = torch.tensor([0.0, 2**-8, 2**-8, 2**-8 + 2**-15, -(2**-8), 2**-8 - 2**-16, 2**-9, 0.0])
    x = torch.stack([torch.cat([upper, -upper]), torch.cat([lower, -lower])]).to(BF16)
    e, places = torch.ones(2, 8, dtype=BF16), torch.arange(8, dtype=torch.int32)
    dw, rest = torch.zeros(8, 16, dtype=BF16), torch.zeros(8, 16, dtype=torch.int16)
    num_live = torch.tensor([2], dtype=torch.int32)
    want = x.float().sum(0)
    for args in both("dw", e, x, num_live, 0, dw, False, None, places, rest):
        assert same_bits(args[4][0], want.to(BF16))
        assert torch.allclose(with_cut_off(args[4], args[8]), want.expand(8, 16), rtol=2**-23, atol=0)


COOPERATIVE = dict(pingpong=False, num_stages=4)
# Tiles for each cluster of two CTAs: none for some, one, two, three.
FEW_AND_MANY = [  # v: a multiple of 8, as results come back without gaps and are recomputed
    dict(m=500, v=392, live=60),
    dict(m=1000, v=2056),
    dict(m=1500, v=4104, live=1290),
    dict(m=2048, v=4120),
]


@pytest.mark.gpu
@pytest.mark.parametrize("h", [64, 264, 704])  # 1, 5 and 11 steps along k
@pytest.mark.parametrize("shape", FEW_AND_MANY, ids=str)
def test_logits_have_the_same_bits_however_tiles_are_shared(shape, h):
    c = Case(**shape, h=h)
    c.x[30] = c.x[30] * 60
    runs = []
    for forced in ({}, COOPERATIVE, dict(group=3, group_along="n")):
        with config(lce_logits=forced):
            runs += [
                both("recompute_flagged", *both("logits", *softmax_args(c, v_split=v_split))[0])[0]
                for v_split in (0, 256)
            ]
    (whole, split), truth = runs[:2], both("recompute_flagged", *both("logits", *softmax_args(c))[1])[1]
    assert whole[FLAGS].sum() > 0
    others = torch.arange(c.live) != 30  # of which one number is most of the norm
    assert close(whole[E][: c.live][others], truth[E][: c.live][others], 0.005)
    assert same_bits(whole[E][: c.live], torch.cat([split[E], split[E2]], 1)[: c.live])
    for one, other in zip((whole, split) * 2, runs[2:], strict=True):
        for at in (E, SUM, ZT):
            assert same_bits(one[at][: c.live], other[at][: c.live])


@pytest.mark.gpu
@pytest.mark.parametrize("shape", FEW_AND_MANY, ids=str)
def test_statistics_have_the_same_bits_however_tiles_are_shared(shape):
    c = Case(**shape, h=264)
    got, _ = both("logits", *softmax_args(c, stored=False))
    with config(lce_logits=COOPERATIVE):
        other, _ = both("logits", *softmax_args(c, stored=False))
    stored, _ = both("logits", *softmax_args(c))
    for at in (SUM, ZT):
        assert same_bits(got[at][: c.live], other[at][: c.live])
        assert same_bits(got[at][: c.live], stored[at][: c.live])


@pytest.mark.gpu
@pytest.mark.parametrize("h", [64, 264, 704])
@pytest.mark.parametrize("shape", FEW_AND_MANY, ids=str)
def test_dlogits_have_the_same_bits_however_tiles_are_shared(shape, h):
    c = Case(**shape, h=h)
    coefs = torch.rand(c.m, 4, generator=torch.Generator().manual_seed(7))
    args = c.x, c.w, None, coefs, c.slot_target, c.num_live, 0, None, 0.0, False, 0, padded_nan(c.m, c.v)
    got, truth = both("dlogits", *args)
    assert close(got[-1][: c.live], truth[-1][: c.live], 0.005)
    for forced in (COOPERATIVE, COOPERATIVE | dict(tile_n=256), COOPERATIVE | dict(tile_n=128)):
        with config(lce_dlogits=forced):
            other, _ = both("dlogits", *args)
        assert same_bits(got[-1][: c.live], other[-1][: c.live])


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 130, 700])  # 1, 3 and 11 steps along k
@pytest.mark.parametrize("places", [False, True])
@pytest.mark.parametrize("v", [700, 10_000, 20_000])  # a tile for ten clusters, two for most, four for most
def test_dw_has_the_same_bits_however_tiles_are_shared(v, places, m):
    c = Case(m=m, h=520, v=v)
    given = ()
    if places:
        at = torch.arange(v, dtype=torch.int32)
        at, rest = torch.where(at % 50 == 0, at // 50, NO_SLOT), torch.zeros(-(-v // 50), c.h, dtype=torch.int16)
        given = at, rest
    args = c.e[:, : c.v], c.x, c.num_live, 0, torch.full((c.v, c.h), NAN, dtype=BF16), False, None, *given
    got, truth = both("dw", *args)
    assert close(got[4], truth[4], 0.004)
    for tile in (
        COOPERATIVE | dict(tile_m=128, tile_n=256),
        dict(tile_m=128, tile_n=192),
        dict(tile_m=128, tile_n=128),
    ):
        with config(lce_dw=tile):
            other, _ = both("dw", *args)
        assert same_bits(got[4], other[4])
        assert not places or same_bits(got[8], other[8])


@pytest.mark.gpu
@pytest.mark.parametrize("accumulate", [False, True])
def test_dw_in_fp32_has_the_same_bits_however_tiles_are_shared(accumulate):
    c = Case(m=300, h=520, v=10_000)
    args = c.e[:, : c.v], c.x, c.num_live, 0, torch.randn(c.v, c.h), accumulate
    got, truth = both("dw", *args)
    assert close(got[4], truth[4], 1e-5)
    with config(lce_dw=COOPERATIVE | dict(tile_m=128, tile_n=256)):
        other, _ = both("dw", *args)
    assert same_bits(got[4], other[4])


@pytest.mark.parametrize("problem", list(problems()), ids=str)
def test_which_problems_go_ping_pong(problem):
    p, pingpong = problem, gemm_config(problem, H200).pingpong
    if p.epilogue in ("softmax", "dlogits"):
        out = p.epilogue == "dlogits" or p.out_dtype is not None
        assert pingpong == (not p.recompute_flagged and (not out or not (p.smoothing or (p.softcap and p.bias_dtype))))
    else:
        assert pingpong == (p.live == "k" and not p.split_k_tail)


def test_recompute_flagged_runs_the_same_code_whatever_is_forced():
    """`config(lce_logits=...)` holds for both launches of the logits; the second is always cooperative."""
    problem = GemmProblem("softmax", "bfloat16", "bfloat16", recompute_flagged=True)
    made = gemm_config(problem, H200)
    forced = dataclasses.replace(made, pingpong=True)
    assert gemm_why_illegal(problem, forced, H200) is None
    kernel = kernels.find("lce_gemm", H200)
    assert kernel(problem, forced).config == kernel(problem, made).config == made
    assert gemm_smem_bytes(problem, forced) == gemm_smem_bytes(problem, made)


def test_the_tail_of_dw_is_split_if_tiles_are_few():
    assert not splits_dw_tail(128_256, 4096, 132)
    assert not splits_dw_tail(10_496, 2048, 132)  # 448 tiles: 14 of 66 clusters idle in the tail
    assert splits_dw_tail(1000, 512, 132)  # 12 tiles
    assert splits_dw_tail(384 * 67, 128, 132)
    assert not splits_dw_tail(384 * 66, 128, 132)


@pytest.mark.gpu
def test_dx_scattered_by_narrow_tiles():
    c = Case(m=2000, h=1032, v=1000)
    args = c.e[:, : c.v], None, 0, c.w, c.row_scale, c.order, c.num_live, 0, torch.zeros(c.m, c.h, dtype=BF16), False
    got, _ = both("dx", *args)
    with config(lce_dx=dict(tile_n=192)):  # an odd number of 64-column buffers
        other, _ = both("dx", *args)
    assert same_bits(got[8], other[8])


@pytest.mark.gpu
def test_dw_reads_nothing_past_the_live_rows_tile():
    c = Case(m=640, live=130)
    c.e[192:], c.x[192:] = NAN, NAN
    c.e[130:192] = 1.0
    got, truth = both("dw", c.e[:, : c.v], c.x, c.num_live, 0, torch.full((c.v, c.h), NAN), False)
    assert close(got[4], truth[4], 1e-5)


@pytest.mark.gpu
def test_the_same_bits_on_every_run():
    c = Case(m=1500, v=5003, h=512, live=1100)
    runs = [both("logits", *softmax_args(c))[0] for _ in range(3)]
    dws = [both("dw", c.e[:, : c.v], c.x, c.num_live, 0, torch.zeros(c.v, c.h), True)[0][4] for _ in range(3)]
    for other in runs[1:]:
        assert all(same_bits(runs[0][at][:1100], other[at][:1100]) for at in (E, SUM, ZT))
    assert same_bits(dws[0], dws[1])
    assert same_bits(dws[0], dws[2])


# 256 x 256 tiles on 66 clusters: few and deep, so that many clusters share one; a wave and a tail of two; no tail;
# splits in several rounds.
SHARED = [
    dict(m=300, h=264, v=20_000),
    dict(m=300, h=264, v=20_000, live=200, start=128),
    dict(m=4400, h=1024, v=20_000, live=4300),
    dict(m=640, h=512, v=6400, live=0),
    dict(m=20_000, h=264, v=300),
    dict(m=12_000, h=1024, v=4400, live=9000),
    dict(m=2300, h=1024, v=70_000),
    dict(m=6500, h=768, v=66_000, live=6400),
    dict(m=8448, h=1024, v=24_000, live=7424),  # no tail if all rows are live, so room for 66 splits; these want 250
]


@pytest.mark.gpu
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("shape", SHARED, ids=str)
def test_clusters_share_the_tiles_of_the_tail(shape, split, monkeypatch):
    from quackish.ops.linear_cross_entropy import launches

    monkeypatch.setattr(launches, "splits_dw_tail", lambda *sizes: True)

    shape = dict(shape)
    m, h, v, start = shape["m"], shape["h"], shape["v"], shape.get("start", 0)
    live = shape.get("live", m)
    make = torch.Generator("cuda").manual_seed(0)
    e = torch.randn(m, -(-v // 64) * 64, generator=make, device="cuda", dtype=BF16)[:, :v]
    w = torch.randn(v, h, generator=make, device="cuda", dtype=BF16)
    x = torch.randn(m, h, generator=make, device="cuda", dtype=BF16)
    x[live:], e[live:] = 0, 0
    scale = torch.rand(m, generator=make, device="cuda")
    order = torch.randperm(m + start, generator=make, device="cuda").int()
    num_live = torch.tensor([live + start], dtype=torch.int32, device="cuda")
    tickets = torch.zeros(NUM_TICKETS, dtype=torch.int32, device="cuda")
    k = LceKernels(torch.device("cuda", torch.cuda.current_device()))

    def run():
        poison_free_memory()
        dx = torch.full((m + start, h), NAN, dtype=BF16, device="cuda")
        dw, total = torch.full((v, h), NAN, dtype=BF16, device="cuda"), torch.ones(v, h, device="cuda")
        first, second = (e[:, :128].contiguous(), e[:, 128:]) if split else (e, None)
        k.dx(first, second, 128, w, scale, order, num_live, start, dx, False, tickets)
        k.dw(e, x, num_live, start, dw, False, tickets)
        k.dw(e, x, num_live, start, total, True, tickets)
        assert not tickets.any()
        return dx, dw, total

    dx, dw, total = run()
    rows = order[start : start + live].long()
    assert close(dx[rows], (e[:live].double() @ w.double()) * scale[:live, None], 0.004)
    others = torch.ones(m + start, dtype=torch.bool, device="cuda").index_fill_(0, rows, False)
    assert dx[others].isnan().all()
    want = e.double().T @ x.double()
    assert close(dw, want, 0.004)
    assert close(total, want + 1, 1e-5)
    for _ in range(5):
        assert all(same_bits(a, b) for a, b in zip(run(), (dx, dw, total), strict=True))
