"""The launchers of LceKernels in plain PyTorch: what they read, what they write and what they leave alone.

Buffers hold what the kernels would: what no kernel writes stays as it was allocated, NaN in the tests, and E and the
gradients are rounded where the kernels round. `calls` counts launches by name.
"""

import collections
import functools

import torch

from quackish.configs.gemm import SOFTMAX_TILE_N

HUGE = 2e38
HEADROOM = 60.0
ROW_TILE = 128
SMALLEST_RATIO = 2.0**-20
NO_SLOT = 2**31 - 1


def encode(x):
    bits = x.contiguous().view(torch.int32)
    return torch.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


def decode(code):
    return torch.where(code >= 0, code, code ^ 0x7FFFFFFF).view(torch.float32)


def cut_off(x):
    """What is to be added to the bits of x, rounded to bf16, to make those of x, or one less, in 16 bits."""
    off = x.view(torch.int32) - (x.bfloat16().view(torch.int16).int() << 16)
    return off.clamp(max=0x7FFF).to(torch.int16)


def with_cut_off(rounded, rest):
    return ((rounded.view(torch.int16).int() << 16) + rest.int()).view(torch.float32)


def writable(t):
    """The same memory, but writes to it are a kernel's: autograd's version counter does not see them."""
    return None if t is None else t.data


def launcher(f):
    """Counts; and what PyTorch would do to operations but not to launches stays outside."""

    @functools.wraps(f)
    def launch(self, *args, **kwargs):
        self.calls[f.__name__] += 1
        with torch.autocast("cpu", enabled=False), torch.no_grad():
            return f(self, *args, **kwargs)

    return launch


class EmulatedKernels:
    keeps_rest = True

    def __init__(self, tile_n=SOFTMAX_TILE_N):
        self.tile_n = tile_n
        self.calls = collections.Counter()

    def num_tiles(self, v):
        return -(-v // self.tile_n)

    def _live(self, num_live, start, rows):
        """Live rows of a chunk, and the rows up to the end of their last tile."""
        live = max(0, min(int(num_live) - start, rows))
        return live, min(rows, -(-live // ROW_TILE) * ROW_TILE)

    @launcher
    def compact(self, target, class_weight, num_items, ignore_index, v, mean, order, num_live, inv_divisor, tickets):
        order, num_live, inv_divisor = map(writable, (order, num_live, inv_divisor))
        writable(tickets).zero_()
        live = target != ignore_index
        assert order.shape == target.shape
        order.copy_(torch.cat([live.nonzero()[:, 0], (~live).nonzero()[:, 0]]))
        num_live[0] = live.sum()
        counted = live & (target >= 0) & (target < v)
        divisor = torch.tensor(1.0)
        if mean and counted.any():
            if num_items is not None:
                divisor = torch.as_tensor(num_items, dtype=torch.float32)
            elif class_weight is not None:
                divisor = class_weight[target[counted].long()].sum()
            else:
                divisor = counted.sum()
        inv_divisor[0] = 1.0 / divisor

    @launcher
    def gather(
        self, x, w, bias, target, order, num_live, start, v, softcap, xc, slot_target, row_shift, row_max_bits,
        flags, dx, loss, lse
    ):  # fmt: skip
        assert x.stride(-1) == 1
        assert w.is_contiguous()
        assert target.is_contiguous()
        xc, slot_target, row_shift, row_max_bits, flags, dx, loss, lse = map(
            writable, (xc, slot_target, row_shift, row_max_bits, flags, dx, loss, lse)
        )
        rows = xc.shape[0]
        assert rows == slot_target.shape[0] == row_shift.shape[0] == row_max_bits.shape[0]
        assert flags.shape == (1 + -(-rows // ROW_TILE),)
        live, padded = self._live(num_live, start, rows)
        flags.zero_()
        r = order[start : start + rows].long()
        ignored = r[live:]
        xc[:live] = x[r[:live]]
        xc[live:padded] = 0
        t = target[r[:live]].long()
        inside = (t >= 0) & (t < v)
        t = t.masked_fill(~inside, 0)
        z = (x[r[:live]].float() * w[t].float()).sum(1)
        if bias is not None:
            z = z + bias[t].float()
        if softcap is not None:
            z = softcap * torch.tanh(z / softcap)
        z = torch.where((z > -HUGE) & (z < HUGE), z, -HUGE)
        slot_target.fill_(-1)
        slot_target[:live] = torch.where(inside, t, -1).int()
        row_shift.fill_(HUGE)
        row_shift[:live] = z
        row_max_bits.copy_(encode(row_shift))
        if dx is not None:
            dx[ignored] = 0
        if loss is not None:
            loss[ignored], lse[ignored] = 0, 0

    def _logits(self, x, w, bias, softcap):
        a = x.float() @ w.float().T
        if bias is not None:
            a = a + bias.float()
        d = torch.ones_like(a)
        if softcap is not None:
            a = softcap * torch.tanh(a / softcap)
            d = 1 - (a / softcap).square()
        return a, d

    @launcher
    def logits(self, *args):
        self._softmax(False, *args)

    @launcher
    def redo(self, *args):
        self._softmax(True, *args)

    def _softmax(
        self, redo, xc, w, bias, class_weight, row_shift, slot_target, num_live, start, softcap, e, e2, v_split,
        part_sum, part_wsum,
        target_logit, row_max_bits, flags,
    ):  # fmt: skip
        e, e2, part_sum, part_wsum, target_logit, row_max_bits, flags = map(
            writable, (e, e2, part_sum, part_wsum, target_logit, row_max_bits, flags)
        )
        _, padded = self._live(num_live, start, xc.shape[0])
        v = w.shape[0]
        a, d = self._logits(xc[:padded], w, bias, softcap)
        i = torch.arange(padded)
        if redo:
            i = i[flags[1 + i // ROW_TILE] != 0]
            a, d = a[i], d[i]
        shift = decode(row_max_bits)[i] if redo else row_shift[i]
        grown = torch.exp(a - shift[:, None])
        assert e2 is None or v_split % 64 == 0
        for part, first, last in ((e, 0, v if e2 is None else v_split), (e2, v_split, v)):
            if part is not None:
                assert part.shape == (xc.shape[0], last - first)
                assert part.stride(0) % 8 == 0
                part[i] = (grown * d)[:, first:last].to(part.dtype)
        for tile, c in enumerate(range(0, v, self.tile_n)):
            part_sum[i, tile] = grown[:, c : c + self.tile_n].sum(1)
            if part_wsum is not None:
                part = a[:, c : c + self.tile_n]
                if class_weight is not None:
                    w = class_weight[c : c + part.shape[1]]
                    part = torch.where((w == 0) & (part == -torch.inf), 0.0, part * w)
                part_wsum[i, tile] = part.sum(1)
        mine = slot_target[i] >= 0
        target_logit[i[mine]] = a[mine].gather(1, slot_target[i][mine].long()[:, None])[:, 0]
        if not redo:
            highest = torch.where(a.isnan(), -torch.inf, a).amax(1)
            above = highest > shift + HEADROOM
            row_max_bits[i[above]] = torch.maximum(row_max_bits[i[above]], encode(highest[above]))
            flags[1 + i[above] // ROW_TILE] = 1
            if above.any():
                flags[0] = 1

    @launcher
    def rows(
        self, stats, grads, *, slot_target, order, num_live, start, v, row_max_bits, lse, row_sum, inv_divisor,
        part_sum=None,
        part_wsum=None, loss=None, target_logit=None, class_weight=None, total_weight=None, softcap=None, z_loss=0.0,
        label_smoothing=0.0, grad_loss=None, grad_lse=None, e=None, e2=None, v_split=0, xc=None, xs=None,
        row_scale=None, coefs=None, places=None,
    ):  # fmt: skip
        loss, lse, row_sum, e, e2, xs, row_scale, coefs, places = map(
            writable, (loss, lse, row_sum, e, e2, xs, row_scale, coefs, places)
        )
        if places is not None:
            places.fill_(NO_SLOT)
        live, padded = self._live(num_live, start, slot_target.shape[0])
        r, t = order[start : start + live].long(), slot_target[:live].long()
        weight = torch.ones(live) if class_weight is None else class_weight[t.clamp(min=0)].float()
        weight = weight.masked_fill(t < 0, float("nan")) * (1 - label_smoothing)
        total = float(v) if class_weight is None or not label_smoothing else total_weight
        spread = label_smoothing / v
        if stats:
            row_sum[:live] = part_sum[:live].sum(1)
            log_total = row_sum[:live].log()
            row_lse = decode(row_max_bits)[:live] + log_total
            nll = decode(row_max_bits)[:live] - target_logit[:live] + log_total
            row_loss = torch.where((weight == 0) & ~nll.isnan(), 0.0, weight * nll)
            if label_smoothing:
                row_loss = row_loss + spread * (total * row_lse - part_wsum[:live].sum(1))
            loss[r], lse[r] = inv_divisor * (row_loss + z_loss * row_lse.square()), row_lse
        if grads == "none":
            return
        row_lse = lse[r]
        g = inv_divisor if grad_loss is None else inv_divisor * (grad_loss if grad_loss.dim() == 0 else grad_loss[r])
        coef_softmax, coef_target = g * (weight + spread * total + 2 * z_loss * row_lse), g * weight
        if not label_smoothing:
            coef_softmax = g * (weight + 2 * z_loss * row_lse)
        if grad_lse is not None:
            coef_softmax = coef_softmax + grad_lse[r]
        if grads == "coefs":
            coefs[:live] = torch.stack(
                [decode(row_max_bits)[:live], coef_softmax / row_sum[:live], coef_target, (g * spread).expand(live)], 1
            )
            coefs[live:padded] = torch.tensor([HUGE, 0.0, 0.0, 0.0])
            return
        smallest = SMALLEST_RATIO * coef_target.abs()
        coef_softmax = torch.where(
            coef_softmax.abs() < smallest, torch.where(coef_softmax >= 0, smallest, -smallest), coef_softmax
        )
        total = row_sum[:live]
        row_scale[:live] = coef_softmax / total
        a_t = target_logit[:live]
        at_target = (
            torch.exp(a_t - decode(row_max_bits)[:live])
            - torch.where(coef_softmax == 0, 0.0, coef_target / coef_softmax) * total
        )
        if softcap is not None:
            at_target = at_target * (1 - (a_t / softcap).square())
        i = torch.arange(live)
        for part, first, last in ((e, 0, v_split if e2 is not None else v), (e2, v_split, v)):
            if part is not None:
                mine = (t >= first) & (t < last)
                part[i[mine], t[mine] - first] = at_target[mine].to(part.dtype)
        rounded = at_target.bfloat16().float()  # what that took, the row's factor gives back
        correction = torch.where(
            (t >= 0) & (coef_target / coef_softmax != 0) & (rounded != 0), at_target / rounded, 1.0
        )
        row_scale[:live] *= torch.where(correction.isnan(), 1.0, correction)
        row_scale[live:padded] = 0
        if xs is not None:
            xs[:live] = (xc[:live].float() * row_scale[:live, None]).to(xs.dtype)
            xs[live:padded] = 0

    @launcher
    def dx(self, e, e2, v_split, w, row_scale, order, num_live, start, out, accumulate, tickets=None):
        assert tickets is None or not tickets.any()
        out = writable(out)
        live, _ = self._live(num_live, start, e.shape[0])
        e = e[:live] if e2 is None else torch.cat([e[:live], e2[:live]], 1)
        assert e.shape[1] == w.shape[0]
        acc = e.float() @ w.float()
        if row_scale is not None:
            acc = acc * row_scale[:live, None]
        if order is not None:
            out[order[start : start + live].long()] = acc.to(out.dtype)
        elif accumulate:
            out[:live] += acc
        else:
            out[:live] = acc

    @launcher
    def dw(self, e, xs, num_live, start, out, accumulate, tickets=None, places=None, rest=None, factor=None):
        assert tickets is None or not tickets.any()
        out, rest = writable(out), writable(rest)
        live, padded = self._live(num_live, start, e.shape[0])
        # the GEMM's last step along the rows goes past the live ones: what is there counts
        k = min(padded, -(-live // 64) * 64)
        acc = e[:k].float().T @ xs[:k].float()
        assert out.shape == acc.shape
        if factor is not None:
            assert rest is None
            acc = acc * factor
        if accumulate:
            assert out.dtype == torch.float32
            out += acc
        else:
            out.copy_(acc)
        if rest is not None:
            assert places.shape[0] == out.shape[0]
            listed = places != NO_SLOT
            rest[places[listed].long()] = cut_off(acc[listed])

    @launcher
    def dlogits(self, xc, w, bias, coefs, slot_target, num_live, start, class_weight, softcap, smoothing, v0, e):
        e = writable(e)
        _, padded = self._live(num_live, start, xc.shape[0])
        a, d = self._logits(xc[:padded], w, bias, softcap)
        row_shift, coef_softmax, coef_target, coef_smooth = coefs[:padded].T[:, :, None]
        z = coef_softmax * torch.exp(a - row_shift)
        if smoothing:
            z = z - coef_smooth * (1.0 if class_weight is None else class_weight[v0 : v0 + w.shape[0]])
        column = torch.arange(v0, v0 + w.shape[0])
        z = z - torch.where(slot_target[:padded, None] == column, coef_target, 0.0)
        e[:padded] = (z * d).to(e.dtype)

    @launcher
    def sort(
        self, slot_target, order, num_live, start, row_scale, e, e2, v_split, sorted_cls, sorted_row, sorted_grad,
        places=None,
        index=None,
    ):  # fmt: skip
        e, e2, places, *outs = map(writable, (e, e2, places, sorted_cls, sorted_row, sorted_grad))
        live, _ = self._live(num_live, start, slot_target.shape[0])
        t, i = slot_target[:live].long(), torch.arange(live)
        grad = torch.zeros(live)
        for part, first, last in ((e, 0, e.shape[1]), (e2, v_split, None if e2 is None else v_split + e2.shape[1])):
            if part is not None:
                mine = (t >= first) & (t < last)
                grad[mine] = row_scale[i[mine]] * part[i[mine], t[mine] - first].float()
                part[i[mine], t[mine] - first] = 0
        place = t.argsort(stable=True) if index is None else index[:live]
        for out, of_rows in zip(outs, (slot_target[:live], order[start : start + live], grad), strict=True):
            out[:live] = of_rows[place]
        if places is not None:
            listed = outs[0][:live].long()
            there = ((listed >= 0) & (listed < places.shape[0])).nonzero()[:, 0]
            places.scatter_reduce_(0, listed[there], there.int(), "amin")

    @launcher
    def targets(self, x, sorted_cls, sorted_row, sorted_grad, num_live, start, v0, dw, rest=None):
        dw = writable(dw)
        live, _ = self._live(num_live, start, sorted_cls.shape[0])
        mine = ((sorted_cls[:live] >= v0) & (sorted_cls[:live] < v0 + dw.shape[0])).nonzero()[:, 0]
        rows = sorted_grad[mine, None] * x[sorted_row[mine].long()].float()
        sums = torch.zeros(dw.shape).index_add_(0, sorted_cls[mine].long() - v0, rows)
        touched = sorted_cls[mine].long().unique() - v0
        before = dw[touched].float()
        if rest is not None:
            first = torch.searchsorted(sorted_cls[:live].long(), touched + v0)
            before = with_cut_off(dw[touched], rest[first])
        dw[touched] = (before + sums[touched]).to(dw.dtype)

    @launcher
    def bias_sum(self, e, row_scale, num_live, start, db, accumulate):
        db = writable(db)
        live, _ = self._live(num_live, start, e.shape[0])
        rows = e[:live].float()
        total = (rows if row_scale is None else rows * row_scale[:live, None]).sum(0)
        db.copy_(db + total if accumulate else total)

    @launcher
    def scatter(self, acc, order, num_live, start, dx):
        live, _ = self._live(num_live, start, acc.shape[0])
        writable(dx)[order[start : start + live].long()] = acc[:live].to(dx.dtype)

    @launcher
    def scale(self, out, factor, out2=None):
        assert factor.shape == (1,)
        assert factor.dtype == torch.float32
        assert out2 is None or out2.dtype == out.dtype  # one kernel scales both
        for scaled in (out, out2):
            if factor != 1 and scaled is not None:
                writable(scaled).copy_(scaled.float() * factor)
