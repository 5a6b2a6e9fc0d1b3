"""All kernels but RMSNorm's in plain PyTorch, called like the compiled ones with addresses of CPU memory.

They round where the kernels round and write only what the kernels write, so that memory a kernel does not write keeps
its initial value: NaN in the tests. `lce_kernels()` has the methods that the schedules call.

They stay, next to the emulator that runs the compiled kernels, where tests go through many shapes and options: forward
and backward of linear cross entropy of 200 x 64 x 300 take 0.014 s of CPU on them and 1.8 s in the emulator, which
compiles new problems first (15 s in all). They are also what compiled kernels are compared with, one by one.
"""

import collections
import ctypes
import dataclasses
import math

import torch

from quackish.device.arguments import Ptr
from quackish.device.choose import choose
from quackish.device.kernel_device import KernelDevice
from quackish.device.kernel_for import CompiledKernel
from quackish.gpu import H200
from quackish.kernels.gemm.problem import NUM_TICKETS, Store
from quackish.ops.linear_cross_entropy import gemm_problems as lce
from quackish.ops.linear_cross_entropy import row_problems, row_state
from quackish.ops.linear_cross_entropy.launches import LceKernels
from quackish.ops.linear_cross_entropy.row_problems import NO_SLOT, ROW_TILE
from quackish.ops.linear_cross_entropy.row_state import RowStateParts
from quackish.ops.mlp import gemm_problems as mlp
from quackish.ops.mlp import reference
from quackish.ops.mlp.groups import Groups
from quackish.ops.mlp.problems import TokenRowsProblem
from quackish.ops.shared import problems as shared

I16, I32, I64, BF16, FP32 = torch.int16, torch.int32, torch.int64, torch.bfloat16, torch.float32
HUGE, HEADROOM, SMALLEST_RATIO, LEAST_LOG2, LOG2_E = 2e38, 60.0, 2.0**-20, -256.0, math.log2(math.e)
SOFTMAX_TILE_N = lce.SOFTMAX_TILE_N["sm_90"]
CPU = torch.device("cpu")
SMALL = dataclasses.replace(H200, sm_count=4)  # takes little scratch for GEMMs


def device():
    """A small GPU with these kernels, for CPU tensors."""
    return KernelDevice(SMALL, kernel_for)


def lce_kernels():
    return LceKernels(device())


def counted(on):
    """Counts the launches of linear_cross_entropy on a KernelDevice."""
    on.cache["linear_cross_entropy"] = k = Counted(LceKernels(on))
    return k


class Counted:
    """Wraps kernels and counts their launches in `calls`, by method or by the type of `launch`'s arguments."""

    def __init__(self, kernels):
        self.kernels, self.calls = kernels, collections.Counter()

    def __getattr__(self, name):
        method = getattr(self.kernels, name)
        if name in ("num_tiles", "loop", "ranges") or not callable(method):
            return method

        def counted(*args, **kwargs):
            self.calls[type(args[0]).__name__ if name == "launch" else name] += 1
            return method(*args, **kwargs)

        return counted


def kernel_for(problem, gpu):
    """Replaces quackish.device.kernel_for.kernel_for. Checks which arguments are None, and alignment."""
    check_fields(problem)
    if hasattr(problem, "epilogue"):
        check_fields(problem.epilogue)

    def launch(args, stream):
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            return KERNELS[problem.spec.name](problem, checked(args, problem.args, problem))

    return CompiledKernel(launch, choose(problem, gpu).config)


def check_fields(p):
    """A field that is not in KNOWN would be ignored."""
    unknown = {field.name for field in dataclasses.fields(p)} - set(KNOWN[type(p)].split())
    assert not unknown, (
        f"tests/emulated_kernels.py does not know {', '.join(sorted(unknown))} of {type(p).__name__}: "
        "compute what it changes there, and add it to KNOWN"
    )


def checked(args, specs, problem):
    """`args` as a NamedTuple like `specs`. The same ones must be None, and addresses aligned as specified."""
    if not isinstance(specs, tuple):
        assert (args is None) == (specs is None), (problem, args, specs)
        assert not (isinstance(specs, Ptr) and specs.aligned and args % 16), (problem, args, specs)
        return args
    assert type(args) in (tuple, type(specs)), (problem, args, specs)
    assert len(args) == len(specs), (problem, args, specs)
    return specs._make(checked(arg, spec, problem) for arg, spec in zip(args, specs, strict=True))


def memory(address, dtype, shape, strides=None):
    """The tensor at an address; None if the address is None."""
    if address is None:
        return None
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    strides = strides or [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    count = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    buffer = (ctypes.c_byte * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(buffer, dtype=dtype).as_strided(shape, strides)


def dtype_of(name):
    return None if name is None else getattr(torch, name)


def with_row_state(a, start=0):
    """As in quackish/ops/linear_cross_entropy/kernels/row_kernel.py, with addresses."""
    pairs = zip(row_state.DESCRIPTIONS, row_state.parts_at(a.state, a.m), strict=True)
    return a._replace(state=RowStateParts(*(address + 4 * start * part.by_slot for part, address in pairs)))


def live_rows(num_live, start, rows):
    """(live rows of a chunk, live rows rounded up to whole tiles)"""
    if num_live is None:
        return rows, rows
    live = max(0, min(int(memory(num_live, I32, (1,))) - start, rows))
    return live, min(rows, -(-live // ROW_TILE) * ROW_TILE)


def encode(x):
    bits = x.contiguous().view(I32)
    return torch.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


def decode(code):
    return torch.where(code >= 0, code, code ^ 0x7FFFFFFF).view(FP32)


def encode_argmax(a, first):
    """The code of each row's argmax. Column 0 of the logits is class `first`; NaN is ignored."""
    a = torch.where(a.isnan(), -torch.inf, a) + 0.0  # -0.0 + 0.0 is 0.0
    return (encode(a.amax(1)).long() << 32) | (0x7FFFFFFF - first - a.argmax(1))


def sum_elog(e, log):
    """Each row's sum of e * log2(e), with log = ln(e)."""
    return (e * (log * LOG2_E).clamp(min=LEAST_LOG2)).sum(1)


def rounding_residual_of(x):
    """The bits of x minus the bits of x rounded to bf16, in 16 bits; for ties that round down, one less."""
    residual = x.view(I32) - (x.bfloat16().view(I16).int() << 16)
    return residual.clamp(max=0x7FFF).to(I16)


def add_residual(rounded, residual):
    return ((rounded.view(I16).int() << 16) + residual.int()).view(FP32)


def weighted(a, weight):
    return torch.where((weight == 0) & (a == -torch.inf), 0.0, a * weight)


def with_softcap(p, a, softcap):
    """(logits, the softcap's derivative)"""
    if not p.softcap:
        return a, torch.ones_like(a)
    a = softcap * torch.tanh(a / softcap)
    return a, 1 - (a / softcap).square()


def logit_scale_of(a):
    return 1.0 if a.logit_scale is None else memory(a.logit_scale, FP32, (1,))


# Around the GEMMs -----------------------------------------------------------------------------------------------------


def compact(p, a):
    a = with_row_state(a)
    target = memory(a.target, dtype_of(p.target_dtype), (a.m,)).long()
    live = target != a.ignore_index
    memory(a.state.order, I32, (a.m,)).copy_(torch.cat([live.nonzero()[:, 0], (~live).nonzero()[:, 0]]))
    memory(a.state.num_live, I32, (1,))[0] = live.sum()
    memory(a.state.tickets, I32, (NUM_TICKETS,)).zero_()
    counted = live & (target >= 0) & (target < a.v)
    divisor = torch.tensor(1.0)
    if counted.any():
        if p.divisor == "tensor":
            divisor = memory(a.num_items_at, FP32, (1,))[0]
        elif p.divisor == "float":
            divisor = torch.tensor(a.num_items)
        elif a.class_weight is not None:
            divisor = memory(a.class_weight, dtype_of(p.class_weight_dtype), (a.v,))[target[counted]].float().sum()
        elif p.divisor == "weights":
            divisor = counted.sum()
    memory(a.state.inv_divisor, FP32, (1,))[0] = 1.0 / divisor


def gather(p, a):
    a = with_row_state(a, a.start)
    live, padded = live_rows(a.state.num_live, a.start, a.rows)
    r = memory(a.state.order, I32, (a.start + a.rows,))[a.start :].long()
    m = int(r.max()) + 1
    dtype = dtype_of(p.dtype)
    x, w = memory(a.x, dtype, (m, p.h), (a.x_stride, 1)), memory(a.w, dtype, (a.v, p.h))
    live_x = memory(a.live_x, dtype, (a.rows, p.h))
    live_x[:live], live_x[live:padded] = x[r[:live]], 0
    if p.only_live_x:
        return
    t = memory(a.target, dtype_of(p.target_dtype), (m,))[r[:live]].long()
    is_class = (t >= 0) & (t < a.v)
    index = t.masked_fill(~is_class, 0)
    z = (x[r[:live]].float() * w[index].float()).sum(1)
    if a.bias is not None:
        z = z + memory(a.bias, dtype_of(p.bias_dtype), (a.v,))[index].float()
    z, _ = with_softcap(p, z, a.softcap)
    row_shift = memory(a.state.row_shift, FP32, (a.rows,))
    row_shift.fill_(HUGE)
    row_shift[:live] = torch.where((z > -HUGE) & (z < HUGE), z, -HUGE)
    memory(a.state.row_max_bits, I32, (a.rows,)).copy_(encode(row_shift))
    slot_target = memory(a.state.slot_target, I32, (a.rows,))
    slot_target.fill_(-1)
    slot_target[:live] = torch.where(is_class, t, -1).int()
    memory(a.state.flags, I32, (1 + -(-a.rows // ROW_TILE),)).zero_()
    if a.dx is not None:
        memory(a.dx, dtype_of(p.dx_dtype), (m, p.h))[r[live:]] = 0
    stats = (a.state.log_prob, a.state.entropy) if p.return_stats else ()
    for out in (a.loss, a.state.lse, *stats):
        memory(out, FP32, (m,))[r[live:]] = 0
    if p.return_stats:
        memory(a.state.predicted, I32, (m,))[r[live:]] = -1
        memory(a.argmax_bits, I64, (a.rows,)).fill_(-(2**63))


def rows(p, a):
    a = with_row_state(a, a.start)
    live, padded = live_rows(a.state.num_live, a.start, a.rows)
    if a.first_slot_of_class is not None:
        memory(a.first_slot_of_class, I32, (a.v,)).fill_(NO_SLOT)
    r = memory(a.state.order, I32, (a.start + a.rows,))[a.start :][:live].long()
    m = int(r.max()) + 1 if live else 0
    lse, loss, grad_lse = (
        memory(t, FP32, (m,)) for t in (a.state.lse, a.stats and a.stats.loss, a.grads and a.grads.lse)
    )
    entropy = memory(a.state.entropy, FP32, (m,)) if p.return_stats or p.grad_entropy else None
    slots = a.state.row_sum, a.state.target_logit, a.state.row_scale
    row_sum, target_logit, row_scale = (memory(t, FP32, (a.rows,)) for t in slots)
    row_max = decode(memory(a.state.row_max_bits, I32, (a.rows,))[:live])
    t = memory(a.state.slot_target, I32, (a.rows,))[:live].long()
    weight = torch.ones(live)
    if a.options.class_weight is not None:
        weight = memory(a.options.class_weight, dtype_of(p.class_weight_dtype), (a.v,))[t.clamp(min=0)].float()
    weight = weight.masked_fill(t < 0, float("nan")) * (1 - a.options.label_smoothing)
    total = float(a.v) if a.options.total_weight is None else memory(a.options.total_weight, FP32, (1,))
    smooth_weight = a.options.label_smoothing / a.v
    inv_divisor, logit_scale = memory(a.options.inv_divisor, FP32, (1,)), logit_scale_of(a.options)
    if p.stats:
        row_sum[:live] = memory(a.stats.part_sum, FP32, (a.rows, a.tiles))[:live].sum(1)
        log_total = row_sum[:live].log()
        row_lse = logit_scale * row_max + log_total
        nll = logit_scale * (row_max - target_logit[:live]) + log_total
        row_loss = torch.where((weight == 0) & ~nll.isnan(), 0.0, weight * nll)
        if p.label_smoothing:
            sums = memory(a.stats.part_wsum, FP32, (a.rows, a.tiles))[:live].sum(1)
            row_loss = row_loss + smooth_weight * (total * row_lse - logit_scale * sums)
        loss[r], lse[r] = inv_divisor * (row_loss + a.options.z_loss * row_lse.square()), row_lse
        if p.return_stats:
            memory(a.state.log_prob, FP32, (m,))[r] = (-nll).masked_fill(t < 0, float("nan"))
            mean = memory(a.stats.part_elog, FP32, (a.rows, a.tiles))[:live].sum(1) / row_sum[:live]
            entropy[r] = (log_total - mean / LOG2_E).clamp(min=0.0)
            classes = 0x7FFFFFFF - (memory(a.stats.argmax_bits, I64, (a.rows,))[:live] & 0x7FFFFFFF)
            memory(a.state.predicted, I32, (m,))[r] = classes.int().masked_fill(row_lse.isnan(), -1)
    if p.grads == "none":
        return
    row_lse, g = lse[r], inv_divisor * logit_scale
    if p.grad_loss == "scalar":
        g = g * memory(a.grads.loss, FP32, (1,))
    elif p.grad_loss == "rows":
        g = g * memory(a.grads.loss, FP32, (m,))[r]
    coef_target = g * weight
    coef_softmax = g * (weight + (smooth_weight * total if p.label_smoothing else 0) + 2 * a.options.z_loss * row_lse)
    if grad_lse is not None:
        coef_softmax = coef_softmax + logit_scale * grad_lse[r]
    if p.grad_log_prob:
        grad_log_prob = logit_scale * memory(a.grads.log_prob, FP32, (m,))[r]
        coef_softmax, coef_target = coef_softmax - grad_log_prob, coef_target - grad_log_prob
    if p.grads == "coefs":
        if p.grad_entropy:
            grad_entropy = logit_scale * memory(a.grads.entropy, FP32, (m,))[r]
            coef_softmax = coef_softmax + grad_entropy * (row_sum[:live].log() - entropy[r])
            coef_entropy = memory(a.coef_entropy, FP32, (a.rows,))
            coef_entropy[:live], coef_entropy[live:padded] = -grad_entropy / LOG2_E / row_sum[:live], 0
        coefs = memory(a.coefs, FP32, (a.rows, 4))
        columns = row_max, coef_softmax / row_sum[:live], coef_target, (g * smooth_weight).expand(live)
        coefs[:live], coefs[live:padded] = torch.stack(columns, 1), torch.tensor([HUGE, 0.0, 0.0, 0.0])
        return
    smallest = SMALLEST_RATIO * coef_target.abs()
    smallest = torch.where(coef_softmax >= 0, smallest, -smallest)
    coef_softmax = torch.where(coef_softmax.abs() < smallest.abs(), smallest, coef_softmax)
    total, a_t = row_sum[:live], target_logit[:live]
    ratio = torch.where(coef_softmax == 0, 0.0, coef_target / coef_softmax)
    entry = torch.exp(logit_scale * (a_t - row_max)) - ratio * total
    if p.softcap:
        entry = entry * (1 - (a_t / a.options.softcap).square())
    write_targets(a, a.v, t, entry)
    rounded = entry.bfloat16().float()
    correction = torch.where((t >= 0) & (ratio != 0) & (rounded != 0), entry / rounded, 1.0)  # of the rounding
    row_scale[:live] = coef_softmax / total * torch.where(correction.isnan(), 1.0, correction)
    row_scale[live:padded] = 0
    if a.scaled_x is not None:
        live_x, scaled_x = (memory(t, dtype_of(p.dtype), (a.rows, p.h)) for t in (a.live_x, a.scaled_x))
        scaled_x[:live] = (live_x[:live].float() * row_scale[:live, None]).to(scaled_x.dtype)
        scaled_x[live:padded] = 0


def parts_of_exp_logits(a, v):
    """(tensor, first class, end) of each buffer."""
    e = a.exp_logits
    split = v if e.second is None else e.split
    yield memory(e.first, BF16, (a.rows, split), (e.first_stride, 1)), 0, split
    if e.second is not None:
        yield memory(e.second, BF16, (a.rows, v - split), (e.second_stride, 1)), split, v


def write_targets(a, v, t, values):
    i = torch.arange(len(t))
    for part, first, last in parts_of_exp_logits(a, v):
        inside = (t >= first) & (t < last)
        part[i[inside], t[inside] - first] = values[inside].to(BF16)


def sort(p, a):
    a = with_row_state(a, a.start)
    live, _ = live_rows(a.state.num_live, a.start, a.rows)
    slot_target = memory(a.state.slot_target, I32, (a.rows,))[:live]
    t, i, grad = slot_target.long(), torch.arange(live), torch.zeros(live)
    row_scale = memory(a.state.row_scale, FP32, (a.rows,))
    for part, first, last in parts_of_exp_logits(a, a.v):
        inside = (t >= first) & (t < last)
        grad[inside] = row_scale[i[inside]] * part[i[inside], t[inside] - first].float()
        part[i[inside], t[inside] - first] = 0
    index = memory(a.index, I64, (a.rows,))
    slots = t.argsort(stable=True) if index is None else index[:live]
    order = memory(a.state.order, I32, (a.start + a.rows,))[a.start :][:live]
    memory(a.state.sorted_target, I32, (a.rows,))[:live] = slot_target[slots]
    memory(a.state.sorted_row, I32, (a.rows,))[:live] = order[slots]
    memory(a.state.sorted_grad, FP32, (a.rows,))[:live] = grad[slots]
    if a.first_slot_of_class is not None:
        first_slot, classes = memory(a.first_slot_of_class, I32, (a.v,)), t[slots]
        slot = ((classes >= 0) & (classes < a.v)).nonzero()[:, 0]
        first_slot.scatter_reduce_(0, classes[slot], slot.int(), "amin")


def targets(p, a):
    a = with_row_state(a, a.start)
    live, _ = live_rows(a.state.num_live, a.start, a.rows)
    pair = a.state.sorted_target, a.state.sorted_row
    sorted_target, sorted_row = (memory(t, I32, (a.rows,))[:live].long() for t in pair)
    dw = memory(a.dw, dtype_of(p.dw_dtype), (a.v1 - a.v0, p.h))
    slots = ((sorted_target >= a.v0) & (sorted_target < a.v1)).nonzero()[:, 0]
    if not len(slots):
        return
    r = sorted_row[slots]
    x = memory(a.x, dtype_of(p.dtype), (int(r.max()) + 1, p.h), (a.x_stride, 1))
    rows = memory(a.state.sorted_grad, FP32, (a.rows,))[slots, None] * x[r].float()
    sums = torch.zeros(dw.shape).index_add_(0, sorted_target[slots] - a.v0, rows)
    classes = sorted_target[slots].unique() - a.v0
    before = dw[classes].float()
    if a.rounding_residual is not None:
        first = torch.searchsorted(sorted_target, classes + a.v0)
        before = add_residual(dw[classes], memory(a.rounding_residual, I16, (a.rows, p.h))[first])
    dw[classes] = (before + sums[classes]).to(dw.dtype)


def bias(p, a):
    live, _ = live_rows(a.num_live, a.start, a.rows)
    total = memory(a.exp_logits, dtype_of(p.dtype), (a.rows, a.n), (a.exp_logits_stride, 1))[:live].float()
    if a.row_scale is not None:
        total = total * memory(a.row_scale, FP32, (a.rows,))[:live, None]
    db = memory(a.db, FP32, (a.n,))
    db.copy_(db + total.sum(0) if p.accumulate else total.sum(0))


def scatter(p, a):
    a = with_row_state(a, a.start)
    live, _ = live_rows(a.state.num_live, a.start, a.rows)
    acc = memory(a.acc, FP32, (a.rows, p.h))[:live]
    r = memory(a.state.order, I32, (a.start + a.rows,))[a.start :][:live].long()
    if live:
        memory(a.dx, dtype_of(p.dx_dtype), (int(r.max()) + 1, p.h))[r] = acc.to(dtype_of(p.dx_dtype))


def scale(p, a):
    factor = memory(a.factor, FP32, (1,))
    for address, n in ((a.out, a.n), (a.out2, a.n2)):
        out = memory(address, dtype_of(p.dtype), (n,))
        if factor != 1:
            out.copy_(out.float() * factor)


# GEMM -----------------------------------------------------------------------------------------------------------------


def gemm(p, a):
    dtype, out_dtype = dtype_of(p.dtype), dtype_of(p.out_dtype)
    m, n, k, split = a.m, a.n, a.k, a.split
    assert a.tail is None or not memory(a.tail.tickets, I32, (NUM_TICKETS,)).any()
    assert split % 64 == 0
    live, padded = live_rows(a.num_live, a.start, k if p.live == "k" else m)
    if p.a_major == "m":  # the last step along k includes rows past the live ones
        steps = min(padded, -(-live // 64) * 64) if p.live else k
        A = memory(a.a, dtype, (steps, m), (a.a_stride, 1)).T
        B = memory(a.b, dtype, (steps, n), (a.b_stride, 1)).T
        live = padded = m
    else:
        A = memory(a.a, dtype, (padded, split if p.a_in_two else k), (a.a_stride, 1))
        if p.a_in_two:
            A = torch.cat([A, memory(a.second, dtype, (padded, k - split), (a.second_stride, 1))], 1)
        if p.b_major == "k":
            B = memory(a.b, dtype, (n, k), (a.b_stride, 1))
        else:
            B = memory(a.b, dtype, (k, n), (a.b_stride, 1)).T
    acc = A.float() @ B.float().T
    D = [memory(a.d, out_dtype, (m, split if p.d_in_two else n), (a.d_stride, 1)), None]
    if p.d_in_two:
        D[1] = memory(a.second, out_dtype, (m, n - split), (a.second_stride, 1))
    EPILOGUES[type(p.epilogue)](p.epilogue, acc, a.epilogue, D, live, a.start, m, n)


def with_bias(p, acc, bias, softcap, n):
    if bias is not None:
        acc = acc + memory(bias, dtype_of(p.bias_dtype), (n,)).float()
    return with_softcap(p, acc, softcap)


def softmax_epilogue(p, acc, a, D, live, start, m, n):
    flags = memory(a.flags, I32, (1 + -(-m // ROW_TILE),))
    row_max_bits, slot_target = memory(a.row_max_bits, I32, (m,)), memory(a.slot_target, I32, (m,)).long()
    target_logit = memory(a.target_logit, FP32, (m,))
    part_sum, part_wsum = (memory(t, FP32, (m, a.tiles)) for t in (a.part_sum, a.part_wsum))
    assert a.tiles == -(-n // SOFTMAX_TILE_N)
    i = torch.arange(len(acc))
    if p.recompute_flagged:
        i = i[flags[1 + i // ROW_TILE] != 0]
        shift = decode(row_max_bits[i])
    else:
        shift = memory(a.row_shift, FP32, (m,))[i]
    z, d = with_bias(p, acc[i], a.bias, a.softcap, n)
    logit_scale = logit_scale_of(a)
    e, first = torch.exp(logit_scale * (z - shift[:, None])), 0
    for part in D:
        if part is not None:
            assert part.stride(0) % 8 == 0
            part[i] = (e * d)[:, first : first + part.shape[1]].to(part.dtype)
            first = part.shape[1]
    for tile, c in enumerate(range(0, n, SOFTMAX_TILE_N)):
        columns = slice(c, min(c + SOFTMAX_TILE_N, n))
        part_sum[i, tile] = e[:, columns].sum(1)
        if part_wsum is not None:
            part = z[:, columns]
            if a.class_weight is not None:
                part = weighted(part, memory(a.class_weight, FP32, (n,))[columns])
            part_wsum[i, tile] = part.sum(1)
        if p.return_stats:
            logs = logit_scale * (z[:, columns] - shift[:, None])
            memory(a.part_elog, FP32, (m, a.tiles))[i, tile] = sum_elog(e[:, columns], logs)
    if p.return_stats and not p.recompute_flagged:
        argmax_bits = memory(a.argmax_bits, I64, (m,))
        argmax_bits[i] = torch.maximum(argmax_bits[i], encode_argmax(z, 0))
    is_class = slot_target[i] >= 0
    target_logit[i[is_class]] = z[is_class].gather(1, slot_target[i][is_class][:, None])[:, 0]
    if not p.recompute_flagged:
        row_max = torch.where(z.isnan(), -torch.inf, z).amax(1)
        above = logit_scale * row_max > logit_scale * shift + HEADROOM
        row_max_bits[i[above]] = torch.maximum(row_max_bits[i[above]], encode(row_max[above]))
        flags[1 + i[above] // ROW_TILE] = 1
        flags[0] |= int(above.any())


def dlogits_epilogue(p, acc, a, D, live, start, m, n):
    z, d = with_bias(p, acc, a.bias, a.softcap, n)
    row_shift, coef_softmax, coef_target, coef_smooth = memory(a.coefs, FP32, (m, 4))[: len(z)].T[:, :, None]
    logs = logit_scale_of(a) * (z - row_shift)
    if p.entropy:
        log2 = (logs * LOG2_E).clamp(min=LEAST_LOG2)
        coef_softmax = coef_softmax + memory(a.coef_entropy, FP32, (m,))[: len(z), None] * log2
    value = coef_softmax * torch.exp(logs)
    if p.smoothing:
        weight = 1.0 if a.class_weight is None else memory(a.class_weight, FP32, (a.v0 + n,))[a.v0 :]
        value = value - coef_smooth * weight
    slot_target = memory(a.slot_target, I32, (m,))[: len(z), None]
    value = value - torch.where(slot_target == torch.arange(a.v0, a.v0 + n), coef_target, 0.0)
    D[0][: len(z)] = (value * d).to(D[0].dtype)


def rows_epilogue(p, acc, a, D, live, start, m, n):
    row_scale, order = memory(a.row_scale, FP32, (m,)), memory(a.order, I32, (start + m,))
    r = order[start : start + live].long()
    if live:
        out = memory(D[0].data_ptr(), D[0].dtype, (int(r.max()) + 1, n), (D[0].stride(0), 1))
        out[r] = (acc[:live] * row_scale[:live, None]).to(out.dtype)


def store_epilogue(p, acc, a, D, live, start, m, n):
    acc, out = acc[:live], D[0][:live]
    if p.scaled:
        acc = acc * memory(a.factor, FP32, (1,))
    out.copy_(out + acc if p.accumulate else acc)


def residual_epilogue(p, acc, a, D, live, start, m, n):
    D[0].copy_(acc)
    first_slots = memory(a.first_slot_of_class, I32, (m,))
    classes = (first_slots != NO_SLOT).nonzero()[:, 0]
    if len(classes):
        slots = first_slots[classes].long()
        memory(a.rounding_residual, I16, (int(slots.max()) + 1, n))[slots] = rounding_residual_of(acc[classes])


EPILOGUES = {
    lce.Softmax: softmax_epilogue,
    lce.Dlogits: dlogits_epilogue,
    lce.RowsOut: rows_epilogue,
    Store: store_epilogue,
    lce.StoreWithResidual: residual_epilogue,
}


# grouped_mlp ----------------------------------------------------------------------------------------------------------


def grouped_gemm(p, a):
    dtype, out = dtype_of(p.dtype), dtype_of(p.out_dtype)

    def groups_of(a):
        offs = torch.tensor([a.rows], dtype=I32) if p.max_groups == 1 else memory(a.offs, I32, (a.groups,))
        return Groups(offs, a.rows)

    def weights(a, address, n):
        if p.b_major == "k":
            return memory(address, dtype, (a.groups, n, a.k))
        return memory(address, dtype, (a.groups, a.k, n)).mT

    def sums(a):
        assert a.a_stride >= a.m
        assert a.a_stride % 8 == 0
        groups = groups_of(a)
        A, B = memory(a.a, dtype, (a.rows, a.m), (a.a_stride, 1)), memory(a.b, dtype, (a.rows, a.n))
        D, total = memory(a.d, out, (a.groups, a.m, a.n)), groups.sum_of_products(A, B)
        D.copy_(torch.where(groups.has_rows[:, None, None], D + total, D) if p.epilogue.accumulate else total)

    def rows(a):
        groups = groups_of(a)
        e, o = a.epilogue, p.epilogue
        is_up, width = isinstance(o, mlp.Up), a.n * (1 + getattr(o, "gated", False))
        bs = [weights(a, a.b, width if is_up and not p.b_in_two else a.n)]
        bs += [weights(a, a.second, a.n)] if p.b_in_two else []
        if is_up:
            A = memory(a.a, dtype, (a.rows, a.k))
            acc = groups.rows_times(A, *bs)
        else:
            parts = memory(a.a, dtype, (a.rows, a.k * len(bs))).chunk(len(bs), 1)
            acc = sum(groups.rows_times(part, b) for part, b in zip(parts, bs, strict=True))
        if getattr(o, "biased", False):
            acc = acc + memory(e.bias, FP32, (a.groups, acc.shape[1])).index_select(0, groups.of_row)
        if getattr(o, "residual", False):
            acc = acc + memory(e.residual, dtype, (a.rows, a.n)).float()
        acc, scales = groups.defined(acc), None
        if getattr(o, "scaled", False):
            scales = torch.where(groups.is_live, memory(e.scales, FP32, (a.rows,)), 0.0)[:, None]
        if isinstance(o, mlp.Down):
            memory(a.d, out, (a.rows, a.n)).copy_(acc)
        elif is_up:
            acc = reference.overflow_as_fp16(acc) if dtype is torch.float16 else acc
            if o.keeps:
                memory(e.preactivation, dtype, (a.rows, width)).copy_(acc)
            f = reference.activate(acc, o.activation)
            memory(a.d, out, (a.rows, a.n)).copy_(f * scales if o.scaled else f)
        else:
            z = memory(e.preactivation, dtype, (a.rows, width)).float()
            f = reference.activate(z, o.activation)
            if o.scaled:
                parts = [part.sum(1) for part in (acc * f).split(mlp.DSCALES_COLUMNS, 1)]
                memory(e.dscales_parts, FP32, (len(parts), a.rows)).copy_(torch.stack(parts))
            df, dz = acc * scales if o.scaled else acc, memory(a.d, out, (a.rows, width))
            reference.activation_gradient(df, reference.derivatives(z, o.activation), dz)
            memory(e.act, dtype, (a.rows, a.n)).copy_(f * scales if o.scaled else f)

    return rows(a) if p.along == "m" else sums(a)


def token_rows(p, args):
    x, rows, out, tokens, k = args
    assert x % 16 == out % 16 == 0
    dtype, of_tokens, of_rows = dtype_of(p.dtype), (tokens, p.n), (tokens * k, p.n)
    rows = memory(rows, I64, (tokens, k))
    if p.op == "copy":
        memory(out, dtype, of_rows)[rows] = memory(x, dtype, of_tokens)[:, None].expand(-1, k, -1)
        return
    total = torch.zeros(of_tokens)
    for one in rows.T:
        total += memory(x, dtype, of_rows)[one].float()
    memory(out, dtype, of_tokens).copy_(total)


KERNELS = dict(
    grouped_gemm=grouped_gemm, lce_gemm=gemm, lce_compact=compact, lce_gather=gather, lce_rows=rows, lce_sort=sort,
    lce_targets=targets, lce_bias=bias, lce_scatter=scatter, scale=scale,
    token_rows=token_rows, gemm=gemm,
)  # fmt: skip

# The fields of problems and epilogues that are taken into account here, or that change no result
_LOGITS = "bias_dtype softcap smoothing weighted logit_scale"
KNOWN = {
    row_problems.LceCompactProblem: "target_dtype class_weight_dtype divisor",
    row_problems.LceGatherProblem: (
        "h dtype target_dtype bias_dtype dx_dtype softcap only_live_x x_aligned return_stats"
    ),
    row_problems.LceRowsProblem: (
        "stats grads h dtype class_weight_dtype label_smoothing softcap grad_loss grad_lse exp_logits_split "
        "first_slot_of_class logit_scale return_stats grad_log_prob grad_entropy"
    ),
    row_problems.LceSortProblem: "exp_logits_split first_slot_of_class presorted",
    row_problems.LceTargetsProblem: "h dtype dw_dtype x_aligned rounding_residual",
    row_problems.LceBiasProblem: "dtype row_scale accumulate wide",
    row_problems.LceScatterProblem: "h dx_dtype",
    shared.ScaleProblem: "dtype",
    shared.StoreGemmProblem: "epilogue dtype out_dtype a_major b_major live a_in_two d_in_two split_k_tail",
    lce.LceGemmProblem: "epilogue dtype out_dtype a_major b_major live a_in_two d_in_two split_k_tail",
    lce.Softmax: f"{_LOGITS} return_stats recompute_flagged",
    lce.Dlogits: f"{_LOGITS} entropy",
    lce.RowsOut: "",
    lce.StoreWithResidual: "",
    Store: "scaled accumulate",
    mlp.MlpGemmProblem: "epilogue dtype max_groups out_dtype b_major b_in_two cluster_tile",
    mlp.Up: "activation scaled biased keeps",
    mlp.Down: "biased residual",
    mlp.DownBackward: "activation scaled",
    mlp.Store: "accumulate",
    TokenRowsProblem: "op n dtype",
}
