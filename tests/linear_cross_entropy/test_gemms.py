"""The GEMMs of linear cross entropy: compiled on any host, and compared with PyTorch code."""

import dataclasses
import itertools
from types import SimpleNamespace

import pytest
import torch

from quackish import config
from quackish.device.cuda import dtype_of
from quackish.device.kernel_device import device_of
from quackish.gpu import H200
from quackish.kernels.gemm.problem import NUM_TICKETS, Store
from quackish.kernels.gemm.sm90_config import gemm_smem_bytes, gemm_why_illegal, num_tail_splits
from quackish.ops.linear_cross_entropy import row_state
from quackish.ops.linear_cross_entropy.calls import ExpLogits, ProblemFields, RowState
from quackish.ops.linear_cross_entropy.gemm_problems import (
    Dlogits,
    DlogitsArgs,
    LceGemmProblem,
    ResidualArgs,
    RowsOut,
    RowsOutArgs,
    Softmax,
    SoftmaxArgs,
    StoreWithResidual,
    gemm_config,
)
from quackish.ops.linear_cross_entropy.launches import LceKernels
from quackish.ops.shared.problems import splits_dw_tail
from quackish.testing import assert_deterministic
from quackish.testing.errors import error, same_bits
from tests import emulated_kernels
from tests.emulated_kernels import HUGE, NO_SLOT, add_residual, decode, encode, lce_kernels
from tests.linear_cross_entropy.cases import PATHS
from tests.variants import check_compiles, one_per_epilogue

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
NAN = float("nan")


# Compiled -----------------------------------------------------------------------------------------------------------


def problems():
    for dtype, out in ("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float16", "float16"), ("float16", "float32"):
        epilogues = [(Store(), False), (Store(), True), (Store(scaled=True), True)]
        if out == "bfloat16":
            epilogues += [(StoreWithResidual(), split_k_tail) for split_k_tail in (False, True)]
        if out == "float32":
            epilogues += [(dataclasses.replace(given, accumulate=True), split) for given, split in epilogues]
        if dtype == "float16":  # the code of bfloat16 with other conversions
            epilogues = epilogues[-1:]
        if out == "float32":
            for accumulate in (False, True):
                yield LceGemmProblem(Store(accumulate=accumulate), dtype, out, b_major="n")
        for epilogue, split in epilogues:
            yield LceGemmProblem(epilogue, dtype, out, a_major="m", b_major="n", live="k", split_k_tail=split)
        for split, split_k_tail in itertools.product((False, True), repeat=2):
            if dtype == "bfloat16" or (split and split_k_tail):
                yield LceGemmProblem(RowsOut(), dtype, out, b_major="n", a_in_two=split, split_k_tail=split_k_tail)
    for bias, softcap in (None, True), ("bfloat16", False), ("float32", False):
        yield LceGemmProblem(Dlogits(bias_dtype=bias, softcap=softcap), "bfloat16", "bfloat16")
        yield LceGemmProblem(Softmax(bias_dtype=bias, softcap=softcap), "bfloat16", "bfloat16", d_in_two=True)
    # The fewest and the most options that read or scale logits, with all others.
    for logit_scale, (bias, softcap) in itertools.product((False, True), ((None, False), ("float32", True))):
        for smoothing, weighted in (False, False), (True, False), (True, True):
            options = dict(bias_dtype=bias, softcap=softcap, smoothing=smoothing, weighted=weighted)
            options["logit_scale"] = logit_scale
            # recompute_flagged takes fewer registers: it does not track the maximum
            recompute = (False,) if logit_scale else (False, True)
            for stats, flagged in itertools.product((False, True), recompute):
                epilogue = Softmax(**options, return_stats=stats, recompute_flagged=flagged)
                yield LceGemmProblem(epilogue, "bfloat16", None)
                if not smoothing:
                    for split in (False,) if stats else (False, True):
                        yield LceGemmProblem(epilogue, "bfloat16", "bfloat16", d_in_two=split)
            for entropy in (False, True):
                yield LceGemmProblem(Dlogits(**options, entropy=entropy), "bfloat16", "bfloat16")
    yield LceGemmProblem(Softmax(bias_dtype="float16"), "float16", None)
    yield LceGemmProblem(Dlogits(bias_dtype="float16"), "float16", "float16")


@pytest.mark.exhaustive
@pytest.mark.parametrize("problem", one_per_epilogue(problems()), ids=str)
def test_compiles(problem):
    check_compiles("lce_gemm", problem, gemm_config(problem, H200), H200)


@pytest.mark.parametrize(
    "tiles, k_tiles, splits",
    [(512, 2004, 250), (1024, 2004, 238), (64, 2004, 0), (66, 2004, 0), (16, 2004, 64), (676, 64, 64), (700, 64, 0)],
)
def test_tails_are_split_if_clusters_would_idle(tiles, k_tiles, splits):
    got = num_tail_splits(tiles, k_tiles, 66)
    assert got == (splits or tiles % 66)
    m, n, k = tiles * 256, 256, k_tiles * 64
    room, floats = gemm_config(LceGemmProblem(RowsOut(), "bfloat16", "bfloat16"), H200).tail_room(m, n, k, 66)
    assert (room, floats) == (max(66, got), max(66, got) * 256 * 256)


# Against the emulation of ours ---------------------------------------------------------------------------------------


class Case:
    """Rows [start, start + rows) of a call, the first `live` of them live; NaN after the last tile with live rows."""

    def __init__(self, rows=300, h=264, v=1000, live=None, start=0, dtype=BF16, seed=0):
        make = torch.Generator().manual_seed(seed)
        self.rows, self.h, self.v, self.start, self.dtype = rows, h, v, start, dtype
        self.live = live = rows if live is None else live
        padded = -(-live // 128) * 128
        self.x = torch.randn(rows, h, generator=make).to(dtype)
        self.w = (torch.randn(v, h, generator=make) * 2 / h**0.5).to(dtype)
        self.slot_target = torch.randint(0, v, (rows,), generator=make, dtype=torch.int32)
        self.order = torch.randperm(start + rows, generator=make).int()
        self.num_live = torch.tensor([start + live], dtype=torch.int32)
        self.update_shift()
        self.e = torch.randn(rows, -(-v // 64) * 64, generator=make).to(dtype)[:, :v]
        self.row_scale = torch.rand(rows, generator=make) + 0.5
        self.bias = torch.randn(v, generator=make)
        self.weight = torch.rand(v, generator=make)
        self.x[live:], self.x[padded:], self.slot_target[live:] = 0, NAN, -1
        self.row_scale[live:], self.row_scale[padded:] = 0, NAN

    def update_shift(self):
        self.row_shift = (self.x.float() * self.w[self.slot_target.long()].float()).sum(1)
        self.row_shift[self.live :] = HUGE

    def grow(self, rows, factor=60):
        """Raises logits far above row_shift, so that these rows are flagged."""
        self.x[rows] = self.x[rows] * factor


def state_of(k, num_live, m):
    """A RowState for m rows with the tickets and num_live of GEMMs."""
    state = RowState.new(k.device, m)
    state.tensor("tickets", NUM_TICKETS).zero_()
    state.tensor("num_live", 1).copy_(num_live)
    return state


def launch(k, method, **args):
    """The arguments of a method of the kernels after a launch, on the CPU. No two tensors may overlap.

    In `args` an epilogue has tensors instead of addresses, and the state is num_live.
    """
    device = "cpu" if k.device.index is None else torch.device("cuda", k.device.index)
    args = {name: copied(a, device) for name, a in args.items()}
    rows = next(args[name] for name in ("live_x", "scaled_x", "e") if name in args)
    rows = (rows.first if isinstance(rows, ExpLogits) else rows).shape[0]
    state = state_of(k, args["state"], args["start"] + rows)
    names = [name for name in ("epilogue", "residual") if args.get(name) is not None]
    args |= {name: in_state(args[name], state, args["start"]) for name in names}
    getattr(k, method)(**args | {name: addresses(args[name]) for name in names} | dict(state=state))
    assert not state.tensor("tickets", NUM_TICKETS).any()
    return SimpleNamespace(**{name: copied(a, "cpu") for name, a in args.items()})


def in_state(epilogue, state, start):
    """The epilogue with its parts of the RowState in the state's memory."""
    parts = {}
    for name in set(epilogue._fields) & set(row_state.DESCRIPTIONS._fields):
        t = getattr(epilogue, name)
        if t is not None:
            first = start if getattr(row_state.DESCRIPTIONS, name).by_slot else 0
            parts[name] = state.tensor(name, first + len(t))[first:].copy_(t)
    return epilogue._replace(**parts)


def problem_fields(c, epilogue, bias, smoothing=False, stats=False):
    """The KernelCall.fields of a call with a Case's rows and this epilogue."""
    return ProblemFields(
        h=c.h, dtype=c.dtype, target_dtype=torch.int64, bias_dtype=bias, class_weight_dtype=None,
        softcap=epilogue.softcap > 0, smoothing=smoothing, weighted=epilogue.class_weight is not None,
        logit_scale=epilogue.logit_scale is not None, return_stats=stats, x_aligned=True,
    )  # fmt: skip


def addresses(epilogue):
    return epilogue._make(a.data_ptr() if isinstance(a, torch.Tensor) else a for a in epilogue)


def copied(args, device):
    """Tensors keep their strides: a matrix may be columns of a larger one."""
    if isinstance(args, tuple):
        return args._make(copied(a, device) for a in args)
    if not isinstance(args, torch.Tensor):
        return args
    return torch.empty_strided(args.shape, args.stride(), dtype=args.dtype, device=device).copy_(args)


def ours():
    return LceKernels(device_of(torch.device("cuda", torch.cuda.current_device())))


def both(k, method, **args):
    """The arguments after a launch by k, and after the emulation of ours."""
    return [launch(kernels, method, **args) for kernels in (k, lce_kernels())]


def close(got, truth, eps):
    return error(got, truth.to(FP64)).within(eps, 16 * eps)


def test_emulated_kernels_refuse_options_that_they_do_not_know(monkeypatch):
    known = dataclasses.make_dataclass("Known", [("margin", bool, False)], bases=(Softmax,), frozen=True)
    monkeypatch.setitem(emulated_kernels.KNOWN, known, emulated_kernels.KNOWN[Softmax])
    with pytest.raises(AssertionError, match=r"tests/emulated_kernels\.py does not know margin of Known: "):
        emulated_kernels.kernel_for(LceGemmProblem(known(), "bfloat16", "bfloat16"), H200)


SHAPES = [
    dict(),
    dict(rows=1, v=2, h=8),
    dict(rows=129, v=257, h=72, live=100, start=64),
    dict(rows=640, v=2056, h=512, live=500),
    dict(rows=256, live=0, start=128),
    dict(rows=1500, v=5003, h=96, live=1025),
]
ON_LAUNCHERS = PATHS[3:]  # a GPU
IN_EMULATOR = [
    pytest.param(f"kernels-{name}", marks=pytest.mark.exhaustive)
    for name in ("h200/late/0", "b200/late/0", "b300/at_once/0")
]


def on_launchers(names, values, few, shapes=None, runs_on_blackwell=False):
    """Parametrizes the arguments `names`, the path and, with `shapes`, the shape.

    The emulator is slow: `few` of the values, with one shape, and at_once only for the first of them without shapes.
    Hopper's kernels run every other of these; on a GPU they run all. With `runs_on_blackwell`, the first of them runs
    in every run of the tests on Blackwell, where no other one does.
    """
    cases = []
    for value, path, shape in itertools.product(values, ON_LAUNCHERS + IN_EMULATOR, shapes or [None]):
        is_late = path not in ON_LAUNCHERS and "late" in path.values[0]
        is_one = (shapes is None or shape is shapes[2]) and (is_late or (shapes is None and value == few[0]))
        is_emulated = value in few and is_one and (path is not IN_EMULATOR[0] or value in few[::2])
        if path in ON_LAUNCHERS or is_emulated:
            arguments = [*(value if isinstance(value, tuple) else (value,)), *path.values, *([shape] if shapes else [])]
            always = runs_on_blackwell and path is IN_EMULATOR[1] and value == few[0]
            cases.append(pytest.param(*arguments, marks=() if always else path.marks, id="-".join(map(str, arguments))))
    return pytest.mark.parametrize(f"{names}, path{', shape' if shapes else ''}", cases, indirect=["path"])


SOFTMAX = {
    "plain": {},
    "softcap": dict(softcap=3.0),
    "bias": dict(bias=BF16),
    "fp32 bias": dict(bias=FP32, softcap=2.0),
    "statistics": dict(stored=False),
    "smoothing": dict(stored=False, wsum=True, bias=FP32),
    "weighted": dict(stored=False, wsum=True, weighted=True),
    "stats": dict(stats=True),
    "weighted stats": dict(stored=False, wsum=True, weighted=True, bias=FP32, softcap=2.0, stats=True),
}


def padded_nan(rows, columns, dtype=BF16):
    return torch.full((rows, -(-columns // 64) * 64), NAN, dtype=dtype)[:, :columns]


def softmax(c, k=None, softcap=None, bias=None, stored=True, wsum=False, weighted=False, stats=False, v_split=0):
    """What the logits of a Case by k (default: our kernels on the GPU) write."""
    k = k or ours()
    part_sum, part_wsum, part_elog = (torch.full((c.rows, k.num_tiles(c.v)), NAN) for _ in range(3))
    row_shift = c.row_shift if softcap is None else softcap * torch.tanh(c.row_shift / softcap)
    row_shift[c.live :] = HUGE
    epilogue = SoftmaxArgs(
        bias=None if bias is None else c.bias.to(bias), class_weight=c.weight if weighted else None,
        row_shift=row_shift, slot_target=c.slot_target, row_max_bits=encode(row_shift),
        flags=torch.zeros(1 + -(-c.rows // 128), dtype=torch.int32), part_sum=part_sum,
        target_logit=torch.full((c.rows,), NAN), part_wsum=part_wsum if wsum else None,
        part_elog=part_elog if stats else None, argmax_bits=torch.full((c.rows,), -(2**63)) if stats else None,
        softcap=softcap or 0.0, tiles=part_sum.shape[1],
    )  # fmt: skip
    exp_logits = padded_nan(c.rows, v_split or c.v) if stored else None
    exp_logits2 = padded_nan(c.rows, c.v - v_split) if stored and v_split else None
    out = ExpLogits(exp_logits, v_split, exp_logits2)
    shared = problem_fields(c, epilogue, bias, wsum, stats)
    after = launch(
        k, "logits", live_x=c.x, w=c.w, out=out, epilogue=epilogue, shared=shared, state=c.num_live, start=c.start
    )
    return SimpleNamespace(exp_logits=after.out.first, exp_logits2=after.out.second, **after.epilogue._asdict())


@on_launchers("options", SOFTMAX, ["plain", "fp32 bias", "smoothing", "weighted stats"], SHAPES)
def test_softmax(shape, options, path):
    c = Case(**shape)
    got, truth = (softmax(c, k, **SOFTMAX[options]) for k in (path.kernels, lce_kernels()))
    live = slice(c.live)
    for name, eps in ("part_sum", 2e-5), ("part_wsum", 2e-4), ("part_elog", 2e-4):
        sums, true_sums = getattr(got, name), getattr(truth, name)
        assert sums is None or close(sums[live].sum(1), true_sums[live].sum(1), eps)
    assert close(got.target_logit[live], truth.target_logit[live], 2e-5)
    assert got.exp_logits is None or close(got.exp_logits[live], truth.exp_logits[live], 0.004)
    assert same_bits(got.row_max_bits[live], truth.row_max_bits[live])
    if got.argmax_bits is not None:
        assert same_bits(got.argmax_bits[live] & 0x7FFFFFFF, truth.argmax_bits[live] & 0x7FFFFFFF)
    assert got.flags.sum() == 0


@on_launchers(
    "softcap, stored", [(None, True), (None, False), (500.0, True), (500.0, False)], [(None, True), (500.0, False)]
)
def test_flagged_rows_are_recomputed_and_others_keep_their_bits(softcap, stored, path):
    c = Case(rows=400, v=3000 if path.device.type == "cuda" else 300, h=128)
    options = dict(softcap=softcap, stored=stored)
    before = softmax(c, path.kernels, **options)
    flagged = torch.tensor([3, 130, 131, 399])
    c.grow(flagged)
    c.update_shift()
    got, truth = (softmax(c, k, **options) for k in (path.kernels, lce_kernels()))
    assert got.flags[0] == 1
    assert same_bits(got.flags, truth.flags)
    row_shift = decode(got.row_max_bits)  # the GPU sums logits in another order
    assert close(row_shift, decode(truth.row_max_bits), 1e-5)
    a = c.x.double() @ c.w.double().T
    a = a if softcap is None else softcap * torch.tanh(a / softcap)
    e, d = torch.exp(a - row_shift.double()[:, None]), 1.0 if softcap is None else 1 - (a / softcap).square()
    eps = 1e-4 * a.abs().max()  # a few units in the last place of such logits
    assert close(got.part_sum.sum(1), e.sum(1), eps)
    assert not stored or close(got.exp_logits, e * d, 0.004 + eps)
    others = torch.ones(400, dtype=torch.bool)
    others[flagged] = False
    for name in ("exp_logits", "part_sum", "target_logit", "row_max_bits"):
        t = getattr(got, name)
        assert t is None or same_bits(t[others], getattr(before, name)[others])


def dlogits(c, k, epilogue, smoothing=False):
    out = padded_nan(c.rows, c.v, c.dtype)
    shared = problem_fields(c, epilogue, dtype_of(epilogue.bias), smoothing)
    args = dict(epilogue=epilogue, shared=shared, state=c.num_live, start=c.start)
    return launch(k, "dlogits", live_x=c.x, w=c.w, out=out, **args).out


@on_launchers(
    "options", ["plain", "fp16", "softcap", "bias", "smoothing", "weighted", "entropy"],
    ["fp16", "softcap", "bias", "weighted", "entropy"], SHAPES,
)  # fmt: skip
def test_dlogits(shape, options, path):
    c = Case(**shape, dtype=FP16 if options == "fp16" else BF16)
    coefs = torch.rand(c.rows, 4, generator=torch.Generator().manual_seed(7))
    coefs[: c.live, 0] = torch.logsumexp(c.x[: c.live].float() @ c.w.float().T, 1)
    coefs[c.live :] = torch.tensor([HUGE, 0, 0, 0])
    epilogue = DlogitsArgs(
        bias=c.bias.to(BF16) if options == "bias" else None,
        class_weight=c.weight if options == "weighted" else None,
        coefs=coefs,
        slot_target=c.slot_target,
        coef_entropy=-coefs[:, 1] if options == "entropy" else None,
        softcap=3.0 if options == "softcap" else 0.0,
        v0=0,
    )
    smoothing = options in ("smoothing", "weighted")
    got, truth = dlogits(c, path.kernels, epilogue, smoothing), dlogits(c, lce_kernels(), epilogue, smoothing)
    assert close(got[: c.live], truth[: c.live], 0.005)
    padded = min(c.rows, -(-c.live // 64) * 64)
    assert (got[c.live : padded] == 0).all()


def dx(c, k, e, out):
    """dx to the rows of c.order."""
    epilogue = RowsOutArgs(c.row_scale, c.order)
    return launch(k, "dx", e=e, w=c.w, state=c.num_live, start=c.start, out=out, epilogue=epilogue).out


@on_launchers("out", [BF16, FP32], [BF16, FP32], SHAPES, runs_on_blackwell=True)
def test_dx_to_the_rows_of_order(shape, out, path):
    c = Case(**shape)
    before = torch.full((c.start + c.rows, c.h), NAN, dtype=out)
    for v_split in (n for n in (0, 64, 448) if n < c.v):
        e, e2 = (c.e[:, :v_split].contiguous(), c.e[:, v_split:]) if v_split else (c.e, None)
        got, truth = (dx(c, k, ExpLogits(e, v_split, e2), before) for k in (path.kernels, lce_kernels()))
        rows = c.order[c.start : c.start + c.live].long()
        assert close(got[rows], truth[rows], 0.004 if out == BF16 else 1e-5)
        assert got[torch.ones(len(got), dtype=torch.bool).index_fill_(0, rows, False)].isnan().all()


@on_launchers("accumulate, start", [(False, 0), (False, 100), (True, 0), (True, 100)], [(False, 0), (True, 100)])
def test_dx_in_fp32_rows_of_the_chunk(accumulate, start, path):
    c = Case(rows=600, live=256, start=start)
    out = torch.randn(c.rows, c.h) if accumulate else torch.full((c.rows, c.h), NAN)
    args = dict(e=ExpLogits(c.e), w=c.w, state=c.num_live, start=start, out=out, accumulate=accumulate)
    got, truth = (after.out for after in both(path.kernels, "dx", **args))
    assert close(got[: c.live], truth[: c.live], 1e-5)
    assert same_bits(got[c.live :], out[c.live :])


def dw_args(c, out, accumulate=False, residual=None, factor=None):
    args = dict(out=out, accumulate=accumulate, residual=residual, factor=factor)
    return dict(e=c.e, scaled_x=c.x, state=c.num_live, start=c.start, **args)


DW = [  # out, accumulate, factor; our kernels have no factor of a bf16 result
    (BF16, False, None), (FP16, False, None), (FP32, False, None), (FP32, True, None),
    (FP16, False, 2.0**-12), (FP32, False, 2.0**-12), (FP32, True, 2.0**-12),
]  # fmt: skip


@on_launchers("out, accumulate, factor", DW, [DW[0], DW[2], DW[4], DW[6]], SHAPES)
def test_dw(shape, out, accumulate, factor, path):
    c = Case(**shape, dtype=FP16 if out == FP16 or factor else BF16)
    dw = torch.randn(c.v, c.h) if accumulate else torch.full((c.v, c.h), NAN, dtype=out)
    factor = None if factor is None else torch.tensor([factor])
    got, truth = (after.out for after in both(path.kernels, "dw", **dw_args(c, dw, accumulate, factor=factor)))
    assert close(got, truth, 1e-5 if out == FP32 else 0.004)


# Only ours -----------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("row", [5, 130, 300, 399, 599])
def test_any_single_row_is_recomputed(row):
    c = Case(rows=600, h=128)
    c.grow(row)
    c.update_shift()
    got = softmax(c)
    assert got.flags.nonzero()[:, 0].tolist() == [0, 1 + row // 128]
    a = c.x[row].double() @ c.w.double().T
    want = torch.exp(a - decode(got.row_max_bits)[row]).sum()
    torch.testing.assert_close(got.part_sum[row].double().sum(), want, rtol=0.01, atol=0)


@pytest.mark.gpu
def test_recompute_flagged_without_flags_changes_nothing():
    c = Case()
    k = ours()
    gemm = k._gemm

    def only_second(*values):
        found, recompute_flagged = gemm(*values), values[-1]
        return found if recompute_flagged else found._replace(launch=lambda *args: None)

    k._gemm = only_second
    got = softmax(c, k)
    assert got.exp_logits.isnan().all()
    assert got.part_sum.isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_dw_keeps_rounding_residual(shape):
    c = Case(**shape)
    first_slots = torch.full((c.v,), NO_SLOT, dtype=torch.int32)
    first_slots[::3] = torch.randperm(len(first_slots[::3])).int()
    dw = torch.full((c.v, c.h), NAN, dtype=BF16)
    residual = torch.full((len(first_slots[::3]) + 1, c.h), 77, dtype=torch.int16)
    exact = c.e[: c.live].double().T @ c.x[: c.live].double()
    for after in both(
        ours(),
        "dw",
        **dw_args(c, dw, residual=ResidualArgs(first_slots, residual)),
    ):
        residual = after.residual.rounding_residual
        unrounded = add_residual(after.out[::3], residual[first_slots[::3].long()])
        assert close(unrounded.double(), exact[::3], 2e-5)
        assert close(after.out, exact, 0.004)
        assert (residual[-1] == 77).all()


@pytest.mark.gpu
def test_dw_rounding_residual_of_ties_and_extremes():
    upper = torch.tensor([0.0, 1.0, 1 + 2**-7, 1.0, 1 + 2**-7, 1.0, 1.0, torch.inf])
    lower = torch.tensor([0.0, 2**-8, 2**-8, 2**-8 + 2**-15, -(2**-8), 2**-8 - 2**-16, 2**-9, 0.0])
    x = torch.stack([torch.cat([upper, -upper]), torch.cat([lower, -lower])]).to(BF16)
    e, first_slots = torch.ones(2, 8, dtype=BF16), torch.arange(8, dtype=torch.int32)
    dw, residual = torch.zeros(8, 16, dtype=BF16), torch.zeros(8, 16, dtype=torch.int16)
    num_live = torch.tensor([2], dtype=torch.int32)
    want = x.float().sum(0)
    args = dict(e=e, scaled_x=x, state=num_live, start=0, out=dw, accumulate=False)
    for after in both(ours(), "dw", **args, residual=ResidualArgs(first_slots, residual)):
        assert same_bits(after.out[0], want.to(BF16))
        unrounded = add_residual(after.out, after.residual.rounding_residual)
        assert torch.allclose(unrounded, want.expand(8, 16), rtol=2**-23, atol=0)


COOPERATIVE = dict(pingpong=False, num_stages=4)
# Cases with up to one, two and three tiles per cluster of two CTAs.
FEW_AND_MANY = [  # v: a multiple of 8, because copies have no gaps between rows
    dict(rows=500, v=392, live=60),
    dict(rows=1000, v=2056),
    dict(rows=1500, v=4104, live=1290),
    dict(rows=2048, v=4120),
]


@pytest.mark.gpu
@pytest.mark.parametrize("h", [64, 264, 704])  # 1, 5 and 11 steps along k
@pytest.mark.parametrize("shape", FEW_AND_MANY, ids=str)
def test_logits_bits_are_independent_of_the_config(shape, h):
    c = Case(**shape, h=h)
    c.x[30] = c.x[30] * 60
    runs = []
    for forced in ({}, COOPERATIVE, dict(group=3, group_along="n")):
        with config(lce_logits=forced):
            runs += [softmax(c, v_split=v_split) for v_split in (0, 256)]
    whole, truth = runs[0], softmax(c, lce_kernels())
    assert whole.flags.sum() > 0
    others = torch.arange(c.live) != 30  # a single number is most of row 30's norm
    assert close(whole.exp_logits[: c.live][others], truth.exp_logits[: c.live][others], 0.005)
    assert same_bits(whole.flags, runs[1].flags)
    assert same_bits(whole.row_max_bits[: c.live], runs[1].row_max_bits[: c.live])
    for other in runs[1:]:
        blocks = [t for t in (other.exp_logits, other.exp_logits2) if t is not None]
        assert same_bits(whole.exp_logits[: c.live], torch.cat(blocks, 1)[: c.live])
        for name in ("part_sum", "target_logit"):
            assert same_bits(getattr(whole, name)[: c.live], getattr(other, name)[: c.live])
    for forced in ({}, COOPERATIVE):  # statistics alone
        with config(lce_logits=forced):
            other = softmax(c, stored=False)
        for name in ("part_sum", "target_logit"):  # of tiles that are not flagged
            assert same_bits(getattr(whole, name)[128 : c.live], getattr(other, name)[128 : c.live])


@pytest.mark.gpu
@pytest.mark.parametrize("h", [64, 264, 704])
@pytest.mark.parametrize("shape", FEW_AND_MANY, ids=str)
def test_dlogits_bits_are_independent_of_the_config(shape, h):
    c = Case(**shape, h=h)
    coefs = torch.rand(c.rows, 4, generator=torch.Generator().manual_seed(7))
    epilogue = DlogitsArgs(coefs=coefs, slot_target=c.slot_target, softcap=0.0, v0=0)
    got, truth = dlogits(c, ours(), epilogue), dlogits(c, lce_kernels(), epilogue)
    assert close(got[: c.live], truth[: c.live], 0.005)
    for forced in (COOPERATIVE, COOPERATIVE | dict(tile_n=256), COOPERATIVE | dict(tile_n=128)):
        with config(lce_dlogits=forced):
            assert same_bits(got[: c.live], dlogits(c, ours(), epilogue)[: c.live])


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 130, 700])  # 1, 3 and 11 steps along k
@pytest.mark.parametrize("keep_residual", [False, True])
@pytest.mark.parametrize("v", [700, 10_000, 20_000])  # a tile for ten clusters, two for most, four for most
def test_dw_bits_are_independent_of_the_config(v, keep_residual, m):
    c = Case(rows=m, h=520, v=v)
    residual = None
    if keep_residual:
        classes = torch.arange(v, dtype=torch.int32)
        first_slots = torch.where(classes % 50 == 0, classes // 50, NO_SLOT)
        residual = ResidualArgs(first_slots, torch.zeros(-(-v // 50), c.h, dtype=torch.int16))
    args = dw_args(c, torch.full((c.v, c.h), NAN, dtype=BF16), residual=residual)
    got, truth = both(ours(), "dw", **args)
    assert close(got.out, truth.out, 0.004)
    wide = COOPERATIVE | dict(tile_m=128, tile_n=256)
    for tile in (wide, dict(tile_m=128, tile_n=192), dict(tile_m=128, tile_n=128)):
        with config(lce_dw=tile):
            other = launch(ours(), "dw", **args)
        assert same_bits(got.out, other.out)
        assert not keep_residual or same_bits(got.residual.rounding_residual, other.residual.rounding_residual)
    if not keep_residual:  # summed in fp32
        for accumulate in (False, True):
            args = dw_args(c, torch.randn(c.v, c.h), accumulate)
            got = launch(ours(), "dw", **args)
            with config(lce_dw=wide):
                assert same_bits(got.out, launch(ours(), "dw", **args).out)


def test_recompute_flagged_ignores_a_forced_pingpong():
    """`config(lce_logits=...)` applies to both launches of the logits; the second is always cooperative."""
    problem = LceGemmProblem(Softmax(recompute_flagged=True), "bfloat16", "bfloat16")
    default = gemm_config(problem, H200)
    forced = dataclasses.replace(default, pingpong=True)
    assert gemm_why_illegal(problem, forced, H200) is None
    kernel = LceGemmProblem.spec.kernel_class(H200)
    assert kernel(problem, forced).config == kernel(problem, default).config == default
    assert gemm_smem_bytes(problem, forced) == gemm_smem_bytes(problem, default)


def test_dw_tail_is_split_if_tiles_are_few():
    assert not splits_dw_tail(128_256, 4096, H200)
    assert not splits_dw_tail(10_496, 2048, H200)  # 448 tiles: 14 of 66 clusters idle in the tail
    assert splits_dw_tail(1000, 512, H200)  # 12 tiles
    assert splits_dw_tail(384 * 67, 128, H200)
    assert not splits_dw_tail(384 * 66, 128, H200)


@pytest.mark.gpu
def test_dx_scattered_by_narrow_tiles():
    c = Case(rows=2000, h=1032, v=1000)
    out = torch.zeros(c.rows, c.h, dtype=BF16)
    got = dx(c, ours(), ExpLogits(c.e), out)
    with config(lce_dx=dict(tile_n=192)):  # an odd number of 64-column buffers
        assert same_bits(got, dx(c, ours(), ExpLogits(c.e), out))


# 256 x 256 tiles on 66 clusters: few tiles with many splits; a wave and a tail of two tiles; no tail; splits in several
# rounds.
SHARED = [
    dict(rows=300, h=264, v=20_000),
    dict(rows=300, h=264, v=20_000, live=200, start=128),
    dict(rows=4400, h=1024, v=20_000, live=4300),
    dict(rows=640, h=512, v=6400, live=0),
    dict(rows=20_000, h=264, v=300),
    dict(rows=12_000, h=1024, v=4400, live=9000),
    dict(rows=2300, h=1024, v=70_000),
    dict(rows=6500, h=768, v=66_000, live=6400),
    dict(rows=8448, h=1024, v=24_000, live=7424),  # scratch for 66 splits, as all rows have no tail; 250 wanted
]


@pytest.mark.gpu
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("shape", SHARED, ids=str)
def test_clusters_share_the_tiles_of_the_tail(shape, split, monkeypatch):
    from quackish.ops.linear_cross_entropy import launches

    monkeypatch.setattr(launches, "splits_dw_tail", lambda *sizes: True)

    m, h, v, start = shape["rows"], shape["h"], shape["v"], shape.get("start", 0)
    live = shape.get("live", m)
    make = torch.Generator("cuda").manual_seed(0)
    e = torch.randn(m, -(-v // 64) * 64, generator=make, device="cuda", dtype=BF16)[:, :v]
    w = torch.randn(v, h, generator=make, device="cuda", dtype=BF16)
    x = torch.randn(m, h, generator=make, device="cuda", dtype=BF16)
    x[live:], e[live:] = 0, 0
    scale = torch.rand(m, generator=make, device="cuda")
    order = torch.randperm(m + start, generator=make, device="cuda").int()
    num_live = torch.tensor([live + start], dtype=torch.int32, device="cuda")
    k = LceKernels(device_of(torch.device("cuda", torch.cuda.current_device())))
    state = state_of(k, num_live, m + start)

    def run():
        dx = torch.full((m + start, h), NAN, dtype=BF16, device="cuda")
        dw, total = torch.full((v, h), NAN, dtype=BF16, device="cuda"), torch.ones(v, h, device="cuda")
        exp_logits = ExpLogits(e[:, :128].contiguous(), 128, e[:, 128:]) if split else ExpLogits(e)
        k.dx(exp_logits, w, state, start, dx, False, True, RowsOutArgs(scale.data_ptr(), order.data_ptr()))
        k.dw(e, x, state, start, dw, False, True)
        k.dw(e, x, state, start, total, True, True)
        assert not state.tensor("tickets", NUM_TICKETS).any()
        return dx, dw, total

    dx, dw, total = run()
    rows = order[start : start + live].long()
    assert close(dx[rows], (e[:live].double() @ w.double()) * scale[:live, None], 0.004)
    others = torch.ones(m + start, dtype=torch.bool, device="cuda").index_fill_(0, rows, False)
    assert dx[others].isnan().all()
    want = e.double().T @ x.double()
    assert close(dw, want, 0.004)
    assert close(total, want + 1, 1e-5)
    assert_deterministic(run, runs=6)
