"""The kernels around the GEMMs of linear cross entropy: compiled on any host, run on a GPU against fp64 formulas."""

import itertools

import pytest
import torch

from quackish.device import choose
from quackish.device.cuda import dtype_of
from quackish.device.kernel_device import device_of
from quackish.kernels.gemm.problem import NUM_TICKETS
from quackish.ops.linear_cross_entropy import reference, row_state
from quackish.ops.linear_cross_entropy.calls import ExpLogits, RowState
from quackish.ops.linear_cross_entropy.launch_problems import made
from quackish.ops.linear_cross_entropy.launches import LceKernels, order_by_class
from quackish.ops.linear_cross_entropy.row_problems import (
    NO_SLOT,
    WIDE_BIAS,
    BiasArgs,
    GatherArgs,
    GradsArgs,
    LceBiasProblem,
    LceCompactProblem,
    LceGatherProblem,
    LceRowsProblem,
    LceScatterProblem,
    LceSortProblem,
    LceTargetsProblem,
    LossArgs,
    RowsArgs,
    ScatterArgs,
    SortArgs,
    StatsArgs,
    TargetsArgs,
)
from quackish.ops.shared.problems import ScaleProblem
from quackish.testing.errors import same_bits
from tests.emulated_kernels import HUGE, decode, encode, rounding_residual_of
from tests.variants import all_pairs, check_compiles, on_gpus, one_per_kernel

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
NAN, INF = float("nan"), float("inf")
LOG2_E = 1.4426950408889634


# Compiled -----------------------------------------------------------------------------------------------------------


def problems():
    """(kernel, problem)"""
    weights = (None, "float32", "bfloat16")
    for target, weight in itertools.product(("int32", "int64"), weights):
        yield "lce_compact", LceCompactProblem(target, weight, "weights")
    for divisor in ("one", "float", "tensor"):
        yield "lce_compact", LceCompactProblem("int64", None, divisor)
    for h in (8, 1000, 16_384):
        yield "lce_gather", LceGatherProblem(h, "bfloat16", "int64")
        yield "lce_gather", LceGatherProblem(h, "float16", "int32", *["float32"] * 2, softcap=True, x_aligned=False)
    yield "lce_gather", LceGatherProblem(4096, "bfloat16", "int64", "bfloat16", "bfloat16", True)
    yield "lce_gather", LceGatherProblem(4096, "bfloat16", only_live_x=True)
    yield "lce_gather", LceGatherProblem(4096, "bfloat16", "int64", return_stats=True)
    for stats, grads, smoothing in itertools.product((True, False), ("none", "coefs"), (True, False)):
        if stats or grads != "none":
            for weight, loss in (None, "one"), ("float32", "scalar"), ("bfloat16", "rows"):
                options = dict(class_weight_dtype=weight, label_smoothing=smoothing)
                if grads != "none":
                    options |= dict(grad_loss=loss, grad_lse=loss != "one", logit_scale=loss != "one")
                yield "lce_rows", LceRowsProblem(stats, grads, **options)
                options |= dict(grad_log_prob=grads != "none", grad_entropy=grads != "none")
                yield "lce_rows", LceRowsProblem(stats, grads, **options, return_stats=stats)
    for stats, h in itertools.product((True, False), (0, 8, 1000, 16_384)):
        of_x = dict(h=h, dtype="bfloat16" if h else None)
        yield "lce_rows", LceRowsProblem(stats, "scale", **of_x)
        options = dict(class_weight_dtype="float32", softcap=True, grad_loss="rows", grad_lse=True)
        options |= dict(exp_logits_split=True, first_slot_of_class=stats, logit_scale=True)
        options |= dict(return_stats=stats, grad_log_prob=True)
        yield "lce_rows", LceRowsProblem(stats, "scale", **of_x, **options)
    for options in itertools.product((False, True), repeat=3):
        yield "lce_sort", LceSortProblem(*options)
    for h, dtype, aligned in itertools.product((8, 1000, 16_384), ("bfloat16", "float32"), (True, False)):
        for residual in (False, True) if dtype == "bfloat16" else (False,):
            yield "lce_targets", LceTargetsProblem(h, "bfloat16", dtype, aligned, residual)
    for fields in itertools.product((True, False), (True, False), (False, True)):
        yield "lce_bias", LceBiasProblem("bfloat16", *fields)
    yield "lce_bias", LceBiasProblem("float16", True, True, False)
    for dtype in ("bfloat16", "float16", "float32"):
        yield "scale", ScaleProblem(dtype)
        for h in (8, 1000, 4096):
            yield "lce_scatter", LceScatterProblem(h, dtype)


CTAS_PER_SM = {"lce_compact": 1, "lce_sort": 2, "lce_targets": 3, "lce_bias": 2}  # 4 of other kernels


@pytest.mark.parametrize(
    "name, problem, gpu",
    one_per_kernel(on_gpus(all_pairs(problems()))),
    ids=lambda value: getattr(value, "target", str(value)),
)
def test_compiles(name, problem, gpu):
    check_compiles(name, problem, choose.analytical(problem, gpu).config, gpu, CTAS_PER_SM.get(name, 4))


# On a GPU -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lce():
    return LceKernels(device_of(torch.device("cuda", torch.cuda.current_device())))


def random(*shape, dtype=FP32, seed=0, scale=1.0):
    generator = torch.Generator("cuda").manual_seed(seed)
    return (torch.randn(shape, generator=generator, device="cuda") * scale).to(dtype)


def poisoned(*shape, dtype=FP32):
    return torch.full(shape, NAN if dtype.is_floating_point else -77, dtype=dtype, device="cuda")


def untouched(t):
    return bool(t.isnan().all()) if t.is_floating_point() else bool((t == -77).all())


def targets(m, v, ignored=0.0, dtype=torch.int64, ignore_index=-100, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    t = torch.randint(0, v, (m,), generator=generator, device="cuda")
    return t.masked_fill(torch.rand(m, generator=generator, device="cuda") < ignored, ignore_index).to(dtype)


def rounded_up(n):
    return -(-max(n, 0) // 128) * 128


def order_of(target, ignore_index=-100):
    live = target != ignore_index
    order = torch.cat([live.nonzero()[:, 0], (~live).nonzero()[:, 0]]).int()
    return order, live.sum().int().reshape(1)


def close(got, want, rtol=1e-6, atol=0.0):
    torch.testing.assert_close(got.double(), want.double(), rtol=rtol, atol=atol, equal_nan=True)


def launch(lce, args, name, **fields):
    """args: tensors in place of addresses, and a RowState in place of its address."""
    lce.launch(addresses(args), lambda: made(name, **fields))


def addresses(a):
    if isinstance(a, RowState):
        return a.address
    if isinstance(a, tuple):
        return a._make(map(addresses, a))
    return a.data_ptr() if isinstance(a, torch.Tensor) else a


def state_of(lce, m, start=0, **parts):
    """A RowState for m rows with these parts, by slot from slot `start` on. Everything else is poisoned."""
    state = RowState.new(lce.device, m, True)
    for name, part in row_state.DESCRIPTIONS._asdict().items():
        n = {"tickets": NUM_TICKETS, "num_live": 1, "inv_divisor": 1}.get(name, m)
        state.tensor(name, n).fill_(NAN if part.dtype == "float32" else -77)
        if name in parts:
            part_of(state, name, start, len(parts[name])).copy_(parts[name])
    return state


def part_of(state, name, start, rows):
    """A part of the state: by slot for `rows` slots from `start` on, otherwise its first `rows` numbers."""
    first = start if getattr(row_state.DESCRIPTIONS, name).by_slot else 0
    return state.tensor(name, first + rows)[first:]


# compact ---


def compact(lce, target, class_weight=None, num_items=None, ignore_index=-100, v=100, mean=True):
    state = state_of(lce, target.shape[0])
    lce.compact(target, class_weight, num_items, ignore_index, v, mean, state)
    order, num_live, inverse = state.tensor("order"), state.tensor("num_live", 1), state.tensor("inv_divisor", 1)
    return order, num_live, inverse, state.tensor("tickets", NUM_TICKETS)


def check_compact(lce, target, class_weight=None, num_items=None, ignore_index=-100, v=100, mean=True):
    order, num_live, inverse, tickets = compact(lce, target, class_weight, num_items, ignore_index, v, mean)
    assert not tickets.any()
    want_order, want_live = order_of(target, ignore_index)
    assert torch.equal(order, want_order)
    assert torch.equal(num_live, want_live)
    rows = reference.rows_of(target, v, class_weight, ignore_index, FP64)
    want = reference.mean_divisor(rows, num_items).reciprocal() if mean else torch.ones((), device="cuda")
    close(inverse, want.reshape(1), rtol=2e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("ignored", [0.0, 0.3, 0.99, 1.0])
@pytest.mark.parametrize("m", [0, 1, 31, 33, 255, 1024, 8191, 8192, 8193, 16_385, 1 << 20])
def test_compact(lce, m, ignored, dtype):
    target = targets(m, 100, ignored, dtype, seed=m)
    check_compact(lce, target)
    check_compact(lce, target, mean=False)


@pytest.mark.gpu
@pytest.mark.parametrize("ignore_index", [-100, 5, 0, -1, 10**6])
def test_compact_with_invalid_targets(lce, ignore_index):
    target = targets(5000, 100, 0.2, ignore_index=ignore_index)
    target[::7], target[1::7], target[2::70], target[3::70] = -1, 100, 2**40, -(2**40) + 5
    for class_weight in (None, random(100).abs()):
        check_compact(lce, target, class_weight, ignore_index=ignore_index)
    no_class = torch.full((300,), 100, device="cuda")
    check_compact(lce, no_class)
    check_compact(lce, no_class, num_items=7.0)


@pytest.mark.gpu
def test_compact_divisors(lce):
    target = targets(9000, 100, 0.5)
    everything_ignored = torch.full_like(target, -100)
    for items in (3.0, 4096, torch.tensor(17.0, device="cuda"), torch.tensor(17, device="cuda"), torch.tensor(5)):
        check_compact(lce, target, num_items=items)
        check_compact(lce, target, random(100).abs(), items)
        check_compact(lce, everything_ignored, num_items=items)
        check_compact(lce, target, num_items=items, mean=False)
    for dtype in (FP32, BF16, FP16):
        check_compact(lce, target, random(100, dtype=dtype).abs())
        check_compact(lce, everything_ignored, random(100, dtype=dtype).abs())
    check_compact(lce, target, torch.zeros(100, device="cuda"))  # 1 / 0


# gather ---


def gather(lce, x, w, target, order, num_live, start, rows, bias=None, softcap=None, dx_dtype=None):
    m, h = x.shape
    state = state_of(lce, m, order=order, num_live=num_live)
    slots = {name: part_of(state, name, start, rows) for name in ("slot_target", "row_shift", "row_max_bits")}
    out = dict(
        live_x=poisoned(rows, h, dtype=x.dtype),
        **slots,
        flags=part_of(state, "flags", start, 1 + -(-rows // 128)),
        dx=poisoned(m, h, dtype=dx_dtype) if dx_dtype else None,
        loss=poisoned(m),
        lse=state.tensor("lse"),
    )
    aligned = (x.data_ptr() | x.stride(0) * 2) % 16 == 0
    args = dict(state=state, x=x, live_x=out["live_x"], x_stride=x.stride(0), m=m, start=start, rows=rows, v=w.shape[0])
    fields = dict(h=h, dtype=x.dtype, x_aligned=aligned)
    all_args = args | dict(w=w, bias=bias, target=target, dx=out["dx"], loss=out["loss"], softcap=softcap or 0.0)
    launch(
        lce, GatherArgs(**all_args), LceGatherProblem, **fields, target_dtype=target.dtype, bias_dtype=dtype_of(bias),
        dx_dtype=dx_dtype, softcap=bool(softcap),
    )  # fmt: skip
    before, again = state.memory.clone(), args | dict(live_x=poisoned(rows, h, dtype=x.dtype), softcap=0.0)
    launch(lce, GatherArgs(**again), LceGatherProblem, **fields, only_live_x=True)
    assert same_bits(again["live_x"], out["live_x"])
    assert torch.equal(state.memory, before)
    return out


def check_gather(lce, x, w, target, start=0, rows=None, bias=None, softcap=None, dx_dtype=None):
    m, v = x.shape[0], w.shape[0]
    rows = m - start if rows is None else rows
    order, num_live = order_of(target)
    out = gather(lce, x, w, target, order, num_live, start, rows, bias, softcap, dx_dtype)
    live = min(max(int(num_live) - start, 0), rows)
    padded = min(rounded_up(live), rows)
    r = order[start : start + rows].long()
    t = target[r[:live]].long()
    is_class = (t >= 0) & (t < v)
    index = t.where(is_class, 0)

    assert same_bits(out["live_x"][:live], x[r[:live]])
    assert not out["live_x"][live:padded].any()
    assert untouched(out["live_x"][padded:])
    assert torch.equal(out["slot_target"][:live], t.where(is_class, -1).int())
    assert (out["slot_target"][live:] == -1).all()
    products = x[r[:live]].double() * w[index].double()
    z = products.sum(1)
    if bias is not None:
        z += bias[index].double()
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    row_shift = out["row_shift"][:live].double()
    finite = z.isfinite()
    noise = 1e-6 * (products.abs().sum(1) + z.abs())
    assert ((row_shift - z).abs() <= noise)[finite].all()
    assert (row_shift[~finite] == torch.tensor(-HUGE)).all()
    assert (out["row_shift"][live:] == torch.tensor(HUGE)).all()
    assert torch.equal(out["row_max_bits"], encode(out["row_shift"]))
    assert not out["flags"].any()

    ignored = torch.zeros(m, dtype=torch.bool, device="cuda")
    ignored[r[live:]] = True
    for name in ("dx", "loss", "lse"):
        if out[name] is not None:
            assert not out[name][ignored].any(), name
            assert untouched(out[name][~ignored]), name
    return out


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 127, 128, 129, 1000])
@pytest.mark.parametrize("h", [8, 264, 1000, 1024, 4096, 4104])
def test_gather(lce, h, m):
    for dtype, ignored in itertools.product((BF16, FP16), (0.0, 0.4, 1.0)):
        x, w = random(m, h, dtype=dtype), random(300, h, dtype=dtype, seed=1)
        check_gather(lce, x, w, targets(m, 300, ignored, torch.int32))
        check_gather(lce, x, w, targets(m, 300, ignored), bias=random(300), dx_dtype=FP32)


@pytest.mark.gpu
@pytest.mark.parametrize("dx_dtype", [None, BF16, FP16, FP32])
@pytest.mark.parametrize("bias_dtype", [None, BF16, FP32])
@pytest.mark.parametrize("softcap", [None, 30.0, 0.5])
def test_gather_options(lce, softcap, bias_dtype, dx_dtype):
    x, w = random(700, 520, dtype=BF16), random(300, 520, dtype=BF16, seed=1)
    bias = random(300, dtype=bias_dtype) if bias_dtype else None
    check_gather(lce, x, w, targets(700, 300, 0.3), 0, None, bias, softcap, dx_dtype)


@pytest.mark.gpu
def test_gather_odd_rows(lce):
    x, w, target = random(400, 136, dtype=BF16), random(300, 136, dtype=BF16, seed=1), targets(400, 300, 0.2)
    target[::9], target[1::9], target[2::90] = -1, 300, 2**40
    x[5], x[6, 3], x[7] = NAN, INF, 0
    bias = random(300)
    bias[100:200] = -INF
    out = check_gather(lce, x, w, target, bias=bias, dx_dtype=BF16)
    assert out["row_shift"].isfinite().all()
    check_gather(lce, x, w, target, bias=bias, softcap=10.0)


@pytest.mark.gpu
def test_gather_beyond_2_to_the_31_elements(lce):
    memory = torch.empty(2**31 + 5000, dtype=BF16, device="cuda")
    x = memory.as_strided((2, 4096), (2**31, 1))
    x.copy_(random(2, 4096, dtype=BF16))
    check_gather(lce, x, random(300, 4096, dtype=BF16, seed=1), targets(2, 300))


@pytest.mark.gpu
def test_gather_waits_for_compact(lce):
    """compact is one CTA, so without the wait gather would run at the same time."""
    m, v = 1 << 18, 100
    x, w, target = random(m, 8, dtype=BF16), random(v, 8, dtype=BF16, seed=1), targets(m, v, 0.5)
    want_order, want_live = order_of(target)
    live, rows = int(want_live), want_order.long()
    for _ in range(3):  # the first run compiles
        state, live_x, loss = state_of(lce, m), poisoned(m, 8, dtype=BF16), poisoned(m)
        args = GatherArgs(
            state=state, x=x, live_x=live_x, w=w, target=target, loss=loss, x_stride=x.stride(0), softcap=0.0, m=m,
            start=0, rows=m, v=v,
        )  # fmt: skip
        torch.cuda._sleep(5_000_000)  # both are launched before either runs
        lce.compact(target, None, None, -100, v, False, state)
        launch(lce, args, LceGatherProblem, h=8, dtype=BF16, target_dtype=target.dtype)
        slot_target = state.tensor("slot_target")
        assert torch.equal(slot_target[:live], target[rows[:live]].int())
        assert same_bits(live_x[:live], x[rows[:live]])
        assert (slot_target[live:] == -1).all()


# rows ---


class Chunk:
    """The results of the logits GEMM for a chunk, computed from fp32 logits a (m, v)."""

    def __init__(self, a, target, *, start=0, rows=None, softcap=None, class_weight=None, tile_n=256):
        m, self.v = a.shape
        self.m, self.start, self.rows = m, start, m - start if rows is None else rows
        self.a, self.target, self.softcap, self.class_weight = a, target, softcap, class_weight
        self.order, self.num_live = order_of(target)
        self.live = min(max(int(self.num_live) - start, 0), self.rows)
        self.padded = min(rounded_up(self.live), self.rows)
        self.r = self.order[start : start + self.rows].long()[: self.live]
        t = target[self.r].long()
        self.is_class = (t >= 0) & (t < self.v)
        self.t = t.where(self.is_class, 0)
        live_a = a[self.r]

        def all_rows(live_values, dtype=FP32):
            out = poisoned(self.rows, *live_values.shape[1:], dtype=dtype)
            out[: self.live] = live_values
            return out

        target_logit = live_a.gather(1, self.t[:, None])[:, 0]
        row_shift = target_logit.where(target_logit.isfinite(), -HUGE)
        row_max = live_a.amax(1)
        row_shift = torch.where(row_max > row_shift + 60, row_max, row_shift)
        self.target_logit = all_rows(target_logit.where(self.is_class, NAN))
        self.slot_target = all_rows(t.where(self.is_class, -1), torch.int32)
        self.row_max_bits = all_rows(encode(row_shift), torch.int32)
        shift_log2 = (row_shift * torch.tensor(LOG2_E, device="cuda")).double()
        e = torch.exp2(live_a.double() * float(torch.tensor(LOG2_E)) - shift_log2[:, None]).float()
        d = 1.0 if softcap is None else 1 - (live_a / softcap).square()
        self.exp_logits = all_rows((e * d).to(BF16), BF16)
        tiles = -(-self.v // tile_n)

        def parts(values):
            padded = torch.nn.functional.pad(values.double(), (0, tiles * tile_n - self.v))
            return all_rows(padded.view(self.live, tiles, tile_n).sum(2).float())

        self.part_sum = parts(e)
        self.part_wsum = parts(live_a if class_weight is None else live_a.double() * class_weight.double())
        self.total_weight = None if class_weight is None else class_weight.float().sum()

    def outputs(self):
        """Poisons what the kernel writes."""
        self.state, self.loss, self.coefs = None, poisoned(self.m), poisoned(self.rows, 4)
        self.lse, self.row_sum, self.row_scale = poisoned(self.m), poisoned(self.rows), poisoned(self.rows)
        self.one = torch.ones(1, device="cuda")

    def run(
        self, lce, stats, grads, *, label_smoothing=0.0, z_loss=0.0, v_split=0, first_slots=None, inv_divisor=None,
        grad_loss=None, grad_lse=None, exp_logits=None, exp_logits2=None, live_x=None, scaled_x=None,
    ):  # fmt: skip
        """Launches the kernel with the arguments that these statistics and gradients need."""
        if stats:
            self.outputs()
        parts = ("order", "num_live", "slot_target", "row_max_bits", "target_logit", "lse", "row_sum", "row_scale")
        state = state_of(lce, self.m, self.start, **{name: getattr(self, name) for name in parts})
        for name in ("lse", "row_sum", "row_scale"):
            setattr(self, name, part_of(state, name, self.start, len(getattr(self, name))))
        self.state = state  # keeps the memory
        options = LossArgs(
            class_weight=self.class_weight, total_weight=self.total_weight if label_smoothing else None,
            softcap=self.softcap or 0.0, z_loss=z_loss, label_smoothing=label_smoothing,
            inv_divisor=self.one if inv_divisor is None else inv_divisor,
        )  # fmt: skip
        part_wsum = self.part_wsum if label_smoothing else None
        stats_args = StatsArgs(part_sum=self.part_sum, part_wsum=part_wsum, loss=self.loss) if stats else None
        grads_args = GradsArgs(loss=grad_loss, lse=grad_lse)
        has_grads = grads != "none" and any(g is not None for g in grads_args)
        e = ExpLogits(exp_logits, v_split, exp_logits2)
        args = RowsArgs(
            state=state, options=options, stats=stats_args, grads=grads_args if has_grads else None,
            exp_logits=e.args() if grads == "scale" else None, live_x=live_x, scaled_x=scaled_x,
            coefs=self.coefs if grads == "coefs" else None, first_slot_of_class=first_slots, v=self.v,
            tiles=self.part_sum.shape[1], m=self.m, start=self.start, rows=self.rows,
        )  # fmt: skip
        launch(
            lce, args, LceRowsProblem, stats=stats, grads=grads, h=0 if live_x is None else live_x.shape[1],
            dtype=dtype_of(live_x), class_weight_dtype=dtype_of(self.class_weight), label_smoothing=label_smoothing > 0,
            softcap=grads == "scale" and self.softcap is not None,
            grad_loss="one" if grad_loss is None else "rows" if grad_loss.dim() else "scalar",
            grad_lse=grad_lse is not None, exp_logits_split=exp_logits2 is not None,
            first_slot_of_class=first_slots is not None,
        )  # fmt: skip

    def truth(self, label_smoothing=0.0, z_loss=0.0, g=1.0, grad_lse=None):
        """loss, lse, (coef_softmax, coef_target, coef_smooth) of the live rows, in fp64."""
        a, s = self.a[self.r].double(), label_smoothing
        weight = torch.ones(self.live, dtype=FP64, device="cuda")
        if self.class_weight is not None:
            weight = self.class_weight.double()[self.t]
        weight = weight.where(self.is_class, NAN) * (1 - s)
        lse = torch.logsumexp(a, 1)
        nll = lse - a.gather(1, self.t[:, None])[:, 0]
        loss = torch.where((weight == 0) & ~nll.isnan(), 0.0, weight * nll)
        all_weights = torch.ones(self.v, dtype=FP64, device="cuda")
        if self.class_weight is not None:
            all_weights = self.class_weight.double()
        if s:
            loss = loss + s / self.v * ((lse[:, None] - a) * all_weights).sum(1)
        loss = loss + z_loss * lse.square()
        g = g.double()[self.r] if isinstance(g, torch.Tensor) and g.dim() else float(g)
        coef_softmax = g * (weight + s / self.v * all_weights.sum() + 2 * z_loss * lse)
        if grad_lse is not None:
            coef_softmax = coef_softmax + grad_lse.double()[self.r]
        coef_smooth = torch.as_tensor(g * s / self.v, device="cuda", dtype=FP64).expand(self.live)
        return loss, lse, (coef_softmax, g * weight, coef_smooth)

    def check_stats(self, label_smoothing=0.0, z_loss=0.0, rtol=1e-6, atol=5e-6, inverse=1.0):
        loss, lse, _ = self.truth(label_smoothing, z_loss)
        close(self.loss[self.r], inverse * loss, rtol, atol)
        close(self.lse[self.r], lse, rtol, atol)
        total = self.part_sum[: self.live].double().sum(1)
        close(self.row_sum[: self.live], total, 2e-6)
        others = torch.ones(self.m, dtype=torch.bool, device="cuda")
        others[self.r] = False
        for t in (self.loss[others], self.lse[others], self.row_sum[self.live :]):
            assert untouched(t)


@pytest.mark.gpu
@pytest.mark.parametrize("v", [1, 100, 256, 257, 1000, 20_000, 128_256])
@pytest.mark.parametrize("m", [1, 127, 300])
def test_stats(lce, m, v):
    for ignored in (0.0, 0.5, 1.0):
        chunk = Chunk(random(m, v, scale=4.0), targets(m, v, ignored))
        chunk.run(lce, True, "none")
        chunk.check_stats()


def incoming(kind, m):
    return {"one": None, "scalar": torch.tensor(0.37, device="cuda"), "rows": random(m, seed=7)}[kind]


@pytest.mark.gpu
@pytest.mark.parametrize("stats", [True, False])
@pytest.mark.parametrize("kind", ["one", "scalar", "rows"])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.2])
@pytest.mark.parametrize("weighted", [False, True])
def test_coefs(lce, weighted, label_smoothing, kind, stats):
    m, v = 500, 300
    weight, grad_loss, grad_lse = random(v).abs() if weighted else None, incoming(kind, m), None
    if kind != "one":
        grad_lse = random(m, seed=8)
    target = targets(m, v, 0.4)
    target[::11] = v
    inverse = torch.full((1,), 0.25, device="cuda")
    options = dict(label_smoothing=label_smoothing, z_loss=1e-2)
    for start, rows in ((0, 500), (128, 100), (256, 244), (450, 50)):
        chunk = Chunk(random(m, v, scale=4.0), target, start=start, rows=rows, class_weight=weight)
        chunk.outputs()
        chunk.lse[chunk.r] = chunk.truth(**options)[1].float()
        chunk.row_sum[: chunk.live] = chunk.part_sum[: chunk.live].sum(1)
        grads = dict(inv_divisor=inverse, grad_loss=grad_loss, grad_lse=grad_lse)
        chunk.run(lce, stats, "coefs", **options, **grads)
        g = 0.25 if grad_loss is None else grad_loss * 0.25
        _, lse, (coef_softmax, coef_target, coef_smooth) = chunk.truth(**options, g=g, grad_lse=grad_lse)
        row_shift = decode(chunk.row_max_bits[: chunk.live]).double()
        want = torch.stack([row_shift, coef_softmax * torch.exp(row_shift - lse), coef_target, coef_smooth], 1)
        close(chunk.coefs[: chunk.live], want, 5e-6, 1e-6)
        padding = chunk.coefs[chunk.live : chunk.padded]
        assert torch.equal(padding, torch.tensor([HUGE, 0, 0, 0], device="cuda").expand_as(padding))
        assert untouched(chunk.coefs[chunk.padded :])


def check_scale(lce, chunk, live_x, stats, *, z_loss=0.0, grad_loss=None, grad_lse=None, split=0, in_place=True):
    """row_scale * exp_logits is the gradient of the logits, up to the bf16 rounding of exp_logits; at the target
    row_scale undoes the rounding."""
    inverse = torch.full((1,), 0.25, device="cuda")
    chunk.outputs()
    if not stats:
        chunk.run(lce, True, "none", z_loss=z_loss)
    before = live_x.clone()
    scaled_x = live_x if in_place else torch.full_like(live_x, NAN)
    e, e2 = chunk.exp_logits.clone(), None
    if split:
        e2, e = e[:, split:].clone(), e[:, :split].clone()
    given = dict(inv_divisor=inverse, grad_loss=grad_loss, grad_lse=grad_lse, exp_logits=e, exp_logits2=e2)
    chunk.run(lce, stats, "scale", z_loss=z_loss, v_split=split, live_x=live_x, scaled_x=scaled_x, **given)
    if stats:
        chunk.check_stats(z_loss=z_loss, inverse=0.25)
    e = e if e2 is None else torch.cat([e, e2], 1)
    n, live = torch.arange(chunk.live, device="cuda"), chunk.live

    g = 0.25 if grad_loss is None else grad_loss * 0.25
    _, lse, (coef_softmax, coef_target, _) = chunk.truth(z_loss=z_loss, g=g, grad_lse=grad_lse)
    smallest = coef_target.abs() * 2**-20
    coef_softmax = torch.where(coef_softmax.abs() < smallest, smallest.copysign(coef_softmax), coef_softmax)
    scale, total = chunk.row_scale[:live].double(), chunk.row_sum[:live].double()
    noise = 1e-6 * (coef_softmax.abs() + 2 * coef_target.abs()) / total  # a sum of terms that may nearly cancel
    rounding = 2**-8 * (coef_softmax / total).abs()
    assert ((scale - coef_softmax / total).abs() <= rounding + noise)[chunk.is_class & coef_softmax.isfinite()].all()
    a = chunk.a[chunk.r].double()
    p = torch.exp(a - lse[:, None])
    want = coef_softmax[:, None] * p
    want[n, chunk.t] -= coef_target
    if chunk.softcap is not None:
        want *= 1 - (a / chunk.softcap).square()
    good = chunk.is_class & want.isfinite().all(1)
    got = scale[:, None] * e[:live].double()
    atol = 1e-6 * (coef_softmax.abs() + coef_target.abs())[:, None].expand_as(want)
    assert ((got - want).abs() <= 2**-7 * want.abs() + atol)[good].all()
    at_target = (n, chunk.t)
    exact = (got - want).abs()[at_target] <= 1e-5 * want.abs()[at_target] + atol[at_target]
    assert exact[good & (coef_target != 0)].all()
    assert scale[~chunk.is_class].isnan().all()
    # only the target's element of a live row is written
    same = torch.ones_like(e, dtype=torch.bool)
    same[n[chunk.is_class], chunk.t[chunk.is_class]] = False
    assert torch.equal(e[same].view(torch.int16), chunk.exp_logits[same].view(torch.int16))
    # scaled_x
    want_x = (before[:live].float() * chunk.row_scale[:live, None]).to(scaled_x.dtype)
    close(scaled_x[:live], want_x, 0.0)  # NaN has many bits
    assert not scaled_x[live : chunk.padded].any()
    assert not chunk.row_scale[live : chunk.padded].any()
    assert untouched(chunk.row_scale[chunk.padded :])
    if in_place:
        assert same_bits(scaled_x[chunk.padded :], before[chunk.padded :])
    else:
        assert untouched(scaled_x[chunk.padded :])
        assert same_bits(live_x, before)


@pytest.mark.gpu
@pytest.mark.parametrize("stats", [True, False])
@pytest.mark.parametrize("kind", ["one", "scalar", "rows"])
@pytest.mark.parametrize("softcap", [None, 20.0])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("split", [0, 136])
def test_scale_of_rows(lce, split, weighted, softcap, kind, stats):
    m, v, h = 500, 300, 520
    weight = random(v).abs() if weighted else None
    if weighted:
        weight[::7] = 0
    a = random(m, v, scale=4.0)
    if softcap is not None:
        a = softcap * torch.tanh(a / softcap)
    target = targets(m, v, 0.4)
    target[::11] = v
    for start, rows in ((0, 500), (128, 100), (256, 244), (450, 50)):
        chunk = Chunk(a, target, start=start, rows=rows, softcap=softcap, class_weight=weight)
        grads = dict(grad_loss=incoming(kind, m), grad_lse=random(m, seed=8) if kind != "one" else None)
        live_x = random(rows, h, dtype=BF16)
        check_scale(lce, chunk, live_x, stats, z_loss=1e-3, split=split, in_place=stats, **grads)


@pytest.mark.gpu
@pytest.mark.parametrize("h", [8, 256, 1000, 1024, 4096, 4104])
def test_scale_of_rows_of_any_length(lce, h):
    chunk = Chunk(random(200, 300, scale=4.0), targets(200, 300, 0.3))
    check_scale(lce, chunk, random(200, h, dtype=BF16), True)


@pytest.mark.gpu
@pytest.mark.parametrize("v", [1, 300, 70_000])
def test_rows_fill_first_slot_of_class(lce, v):
    chunk, first_slots = Chunk(random(40, v), targets(40, v, 0.3)), poisoned(v + 5, dtype=torch.int32)
    chunk.run(lce, True, "scale", exp_logits=chunk.exp_logits.clone(), first_slots=first_slots[:v])
    assert (first_slots[:v] == NO_SLOT).all()
    assert untouched(first_slots[v:])


@pytest.mark.gpu
def test_gradients_that_nearly_cancel(lce):
    """coef_softmax is 0, tiny or negative while coef_target is not; or both are 0."""
    m, v = 130, 300
    chunk = Chunk(random(m, v, scale=4.0), targets(m, v))
    grad_loss = torch.ones(m, device="cuda")
    grad_lse = torch.tensor([-0.25, -0.25 + 1e-8, -1.0, 0.25, 0.0], device="cuda").repeat(m // 5)
    grad_loss[4::5] = 0
    check_scale(lce, chunk, random(m, 64, dtype=BF16), True, grad_loss=grad_loss, grad_lse=grad_lse)
    assert not chunk.row_scale[4::5].any()


# sort, targets, bias, scatter, scale ---


class Sorted:
    """Arguments and results of `lce_sort`. Some classes have many rows."""

    def __init__(self, lce, m, v, live, start=0, rows=None, split=0, seed=0):
        self.m, self.v, self.start, self.rows = m, v, start, m - start if rows is None else rows
        rows, self.split = self.rows, split
        generator = torch.Generator("cuda").manual_seed(seed)
        slot_target = (torch.rand(rows, device="cuda", generator=generator) ** 3 * v).int()
        slot_target[rows // 3 :: 7] = -1
        self.e, self.e2 = random(rows, 8 * (v // 8 + 1), dtype=BF16, seed=seed)[:, :v], None
        if split:
            self.e, self.e2 = self.e[:, :split].clone(), self.e[:, split:].clone()
        self.state = state_of(
            lce, m, start, order=torch.randperm(m, device="cuda").int(),
            num_live=torch.tensor([live], dtype=torch.int32, device="cuda"), slot_target=slot_target,
            row_scale=random(rows, seed=seed + 1),
        )  # fmt: skip

    def __getattr__(self, name):
        """A part of the state."""
        return part_of(self.state, name, self.start, 1 if name == "num_live" else self.rows)

    def run(self, lce, first_slots=None, index=None):
        args = SortArgs(
            state=self.state, exp_logits=ExpLogits(self.e, self.split or self.v, self.e2).args(),
            first_slot_of_class=first_slots, index=index, v=self.v, m=self.m, start=self.start, rows=self.rows,
        )  # fmt: skip
        launch(
            lce, args, LceSortProblem, exp_logits_split=self.e2 is not None,
            first_slot_of_class=first_slots is not None, presorted=index is not None,
        )  # fmt: skip


def launch_targets(lce, x, state, start, rows, v0, dw, residual=None):
    args = TargetsArgs(
        state=state, x=x, dw=dw, rounding_residual=residual, x_stride=x.stride(0), v0=v0, v1=v0 + dw.shape[0],
        m=state.m, start=start, rows=rows,
    )  # fmt: skip
    aligned = (x.data_ptr() | x.stride(0) * 2) % 16 == 0
    launch(
        lce, args, LceTargetsProblem, h=x.shape[1], dtype=x.dtype, dw_dtype=dw.dtype, x_aligned=aligned,
        rounding_residual=residual is not None,
    )  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("presorted", [False, True])
@pytest.mark.parametrize("split", [0, 136])
@pytest.mark.parametrize(
    "m, live, start, rows",
    [(1, 1, 0, 1), (1, 0, 0, 1), (31, 31, 0, 31), (33, 33, 0, 33), (1000, 777, 0, 1000), (5000, 4999, 1024, 2048),
     (5000, 1030, 1024, 2048), (5000, 100, 1024, 2048), (9001, 9001, 0, 9001)],
)  # fmt: skip
def test_sort(lce, m, live, start, rows, split, presorted):
    c = Sorted(lce, m, 500, live, start, rows, split)
    e, e2, slot_target, scale = c.e, c.e2, c.slot_target, c.row_scale
    outs, order = (c.sorted_target, c.sorted_row, c.sorted_grad), c.state.tensor("order")
    whole = e.clone() if e2 is None else torch.cat([e, e2], 1)
    first_slots = torch.full((500,), NO_SLOT, dtype=torch.int32, device="cuda")
    index = order_by_class(slot_target, c.num_live, start) if presorted else None
    c.run(lce, first_slots, index)
    n = max(0, min(live - start, rows))
    i, t = torch.arange(n, device="cuda"), slot_target[:n].long()
    grad = torch.where(t < 0, 0.0, scale[:n] * whole[i, t.clamp(min=0)].float())
    by_class = t.argsort(stable=True)
    wants = slot_target[:n], order[start : start + n], grad
    for out, want in zip(outs, wants, strict=True):
        assert same_bits(out[:n], want[by_class])
        assert untouched(out[n:])
    has_rows = torch.zeros(500, dtype=torch.bool, device="cuda").index_fill_(0, t[t >= 0], True)
    assert torch.equal(first_slots != NO_SLOT, has_rows)
    assert torch.equal(first_slots[has_rows].long(), torch.searchsorted(outs[0][:n], has_rows.nonzero()[:, 0].int()))
    whole[i[t >= 0], t[t >= 0]] = 0
    assert same_bits(e if e2 is None else torch.cat([e, e2], 1), whole)


@pytest.mark.gpu
@pytest.mark.parametrize("dw_dtype", [BF16, FP32])
@pytest.mark.parametrize("h", [8, 264, 1000, 2048, 4104])
@pytest.mark.parametrize("m, live, start", [(1, 1, 0), (700, 650, 0), (3000, 2900, 1024)])
def test_targets(lce, m, live, start, h, dw_dtype):
    v = 300
    for v0, n, padding in ((0, v, 0), (64, 100, 0), (0, v, 3)):  # with padding, rows of x are not aligned
        x = random(m, h + padding, dtype=BF16, seed=h)[:, :h]
        c = Sorted(lce, m, v, live, start)
        c.run(lce)
        n_live = min(live - start, c.rows)
        sorted_target, sorted_row, sorted_grad = (t[:n_live] for t in (c.sorted_target, c.sorted_row, c.sorted_grad))
        before = random(n, h, dtype=dw_dtype, seed=9)
        dw = before.clone()
        launch_targets(lce, x, c.state, start, c.rows, v0, dw)
        slots = ((sorted_target >= v0) & (sorted_target < v0 + n)).nonzero()[:, 0]
        classes = sorted_target[slots].long() - v0
        terms = sorted_grad[slots, None].double() * x[sorted_row[slots].long()].double()
        want = before.double().index_add(0, classes, terms)
        size = before.double().abs().index_add(0, classes, terms.abs())
        bound = size * (2**-20 + (2**-8 if dw_dtype == BF16 else 0.0)) + 1e-30
        assert ((dw.double() - want).abs() <= bound).all()
        others = torch.ones(n, dtype=torch.bool, device="cuda").index_fill_(0, classes, False)
        assert same_bits(dw[others], before[others])
        again = before.clone()
        launch_targets(lce, x, c.state, start, c.rows, v0, again)
        assert same_bits(again, dw)


@pytest.mark.gpu
@pytest.mark.parametrize("h", [8, 256, 520, 2048])
@pytest.mark.parametrize("count", [1, 7, 8, 9, 33, 257, 5001])
def test_targets_of_a_class_with_many_rows(lce, count, h):
    """From MANY_ROWS on, the rows are divided among a CTA's warps, 32 slots per warp at a time."""
    others = 3  # rows of the previous and of the next class
    m = count + 2 * others
    slot_target = torch.full((m,), 7, dtype=torch.int32, device="cuda")
    slot_target[:others], slot_target[m - others :] = 6, 8
    grad, row = random(m, seed=1), torch.randperm(m, device="cuda").int()
    x, live = random(m, h, dtype=BF16), torch.tensor([m], dtype=torch.int32, device="cuda")
    state = state_of(lce, m, num_live=live, sorted_target=slot_target, sorted_row=row, sorted_grad=grad)
    dw = torch.zeros(10, h, device="cuda")
    launch_targets(lce, x, state, 0, m, 0, dw)
    for t in range(10):
        slots = slot_target == t
        close(dw[t], grad[slots].double() @ x[row[slots].long()].double(), rtol=1e-4, atol=1e-3)
    again = torch.zeros(10, h, device="cuda")
    launch_targets(lce, x, state, 0, m, 0, again)
    assert same_bits(again, dw)

    # with the rounding residual of a bf16 dw
    before = random(10, h, seed=2)
    residual = torch.full((m, h), 12345, dtype=torch.int16, device="cuda")
    residual[[0, others, m - others]] = rounding_residual_of(before[6:9])
    rounded = before.to(BF16)
    launch_targets(lce, x, state, 0, m, 0, rounded, residual)
    want = before.double() + dw.double()
    close(rounded[6:9], want[6:9], rtol=2**-8, atol=1e-6)
    assert same_bits(rounded[[0, 5, 9]], before[[0, 5, 9]].to(BF16))


@pytest.mark.gpu
@pytest.mark.parametrize("n", [1, 8, 63, 64, 1000, 32_767, 32_768, 40_001])
@pytest.mark.parametrize("rows, live", [(1, 1), (300, 300), (300, 129), (300, 0), (2000, 1777)])
def test_bias(lce, rows, live, n):
    ld = -(-n // 64) * 64
    for dtype, scaled, accumulate in itertools.product((BF16, FP16), (True, False), (True, False)):
        e = random(rows, ld, dtype=dtype)
        e[live:] = NAN
        e[:, n:] = NAN
        row_scale = poisoned(rows)
        row_scale[:live] = random(live, seed=1)
        num_live = torch.tensor([live + 17], dtype=torch.int32, device="cuda")
        db = random(n, seed=2) if accumulate else poisoned(n)
        before = db.double()
        args = BiasArgs(
            exp_logits=e, row_scale=row_scale if scaled else None, db=db, num_live=num_live, exp_logits_stride=ld,
            start=17, rows=rows, n=n,
        )  # fmt: skip
        launch(lce, args, LceBiasProblem, dtype=dtype, row_scale=scaled, accumulate=accumulate, wide=n >= WIDE_BIAS)
        terms = e[:live, :n].double()
        if scaled:
            terms = terms * row_scale[:live, None].double()
        want = terms.sum(0) + (before if accumulate else 0)
        assert ((db - want).abs() <= 1e-6 * (terms.abs().sum(0) + want.abs()) + 1e-30).all()


@pytest.mark.gpu
def test_bias_beyond_2_to_the_31_elements_and_its_bits(lce):
    rows, ld = 17_000, 128_256
    e = torch.zeros(rows, ld, dtype=BF16, device="cuda")
    e[:, 64:200] = random(rows, 136, dtype=BF16)
    num_live = torch.tensor([rows], dtype=torch.int32, device="cuda")
    results = []
    for _ in range(5):
        db = poisoned(136)
        args = BiasArgs(
            exp_logits=e[:, 64:200], db=db, num_live=num_live, exp_logits_stride=ld, start=0, rows=rows, n=136
        )
        launch(lce, args, LceBiasProblem, dtype=BF16, row_scale=False, accumulate=False)
        results.append(db)
    close(results[0], e[:, 64:200].double().sum(0), 1e-5, 1e-3)
    assert all(same_bits(db, results[0]) for db in results)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("h", [8, 1000, 1024, 4096, 4104])
def test_scatter(lce, h, dtype):
    m = 300
    order, num_live = order_of(targets(m, 10, 0.4))
    for start, rows in ((0, 300), (0, 1), (64, 128), (250, 50)):
        acc, dx = random(rows, h), poisoned(m, h, dtype=dtype)
        state = state_of(lce, m, order=order, num_live=num_live)
        args = ScatterArgs(state=state, acc=acc, dx=dx, m=m, start=start, rows=rows)
        launch(lce, args, LceScatterProblem, h=h, dx_dtype=dtype)
        live = min(max(int(num_live) - start, 0), rows)
        want = poisoned(m, h, dtype=dtype)
        want[order[start : start + live].long()] = acc[:live].to(dtype)
        assert same_bits(dx, want)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("n", [1, 7, 8, 9, 1000, 8191, 1_000_003, 40_000_000])
def test_scale(lce, n, dtype):
    for factor in (1.0, 0.5, -1.7, 0.0, NAN):
        out = random(n + 64, dtype=dtype)
        want = out.clone()
        want[:n] = (out[:n].float() * factor).to(dtype)
        lce.scale(out[:n], torch.tensor([factor], device="cuda"))
        close(out, want, 0.0)  # NaN has many bits


@pytest.mark.gpu
@pytest.mark.parametrize("n2", [0, 7, 5000, 300_000])
def test_scale_of_two(lce, n2):
    for n in (0, 1000, 200_001):
        out, out2, factor = random(n, dtype=BF16), random(n2, dtype=BF16, seed=1), torch.tensor([0.3], device="cuda")
        wants = [(t.float() * factor).to(BF16) for t in (out, out2)]
        lce.scale(out, factor, out2)
        assert same_bits(out, wants[0])
        assert same_bits(out2, wants[1])


@pytest.mark.gpu
def test_scale_beyond_2_to_the_31_elements(lce):
    out = torch.ones(2**31 + 12_345, dtype=BF16, device="cuda")
    lce.scale(out, torch.tensor([3.0], device="cuda"))
    assert (out[-20_000:] == 3).all()
    assert (out[:20_000] == 3).all()
    assert out.view(-1)[::4099].eq(3).all()
