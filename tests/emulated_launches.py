"""The kernels between cuBLAS's GEMMs in plain PyTorch, called like the compiled ones: with addresses and numbers."""

import ctypes
import math

import torch

BF16, FP32 = torch.bfloat16, torch.float32
TILE_N, ROW_TILE, HEADROOM = 256, 128, 60.0


def memory(address, dtype, shape, strides=None):
    """What lies there, on the CPU."""
    if address is None:
        return None
    strides = strides or [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    count = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    bytes_there = (ctypes.c_byte * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(bytes_there, dtype=dtype).as_strided(shape, strides)


def live_rows(a):
    return max(0, min(int(memory(a.num_live, torch.int32, (1,))) - a.start, a.rows))


def flags_of(a):
    return memory(a.flags, torch.int32, (1 + -(-a.rows // ROW_TILE),))


def _weighted(a, weight):
    return torch.where((weight == 0) & (a == -torch.inf), 0.0, a * weight)


def encode(x):
    bits = x.contiguous().view(torch.int32)
    return torch.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


def decode(code):
    return torch.where(code >= 0, code, code ^ 0x7FFFFFFF).view(FP32)


def exp(p):
    out_dtype, bias_dtype = (None if name is None else getattr(torch, name) for name in (p.out_dtype, p.bias_dtype))

    def kernel(a):
        n, rows, tiles = a.n, a.rows, a.tiles
        assert a.z_stride % TILE_N == 0
        live = live_rows(a)
        logits = memory(a.z, FP32, (rows, n), (a.z_stride, 1))[:live].clone()
        if a.bias is not None:
            logits += memory(a.bias, bias_dtype, (n,)).float()
        d = torch.ones_like(logits)
        if p.softcap:
            logits = a.softcap * torch.tanh(logits / a.softcap)
            d = 1 - (logits / a.softcap).square()
        weight = torch.ones(n) if a.class_weight is None else memory(a.class_weight, FP32, (n,))
        target = memory(a.slot_target, torch.int32, (rows,))[:live, None] - a.v0
        out = torch.zeros(rows, n)
        if p.kind == "softmax":
            row_shift, target_logit = memory(a.row_shift, FP32, (rows,))[:live], memory(a.target_logit, FP32, (rows,))
            row_max_bits, flags = memory(a.row_max_bits, torch.int32, (rows,)), flags_of(a)
            part_sum, part_wsum = (memory(t, FP32, (rows, 2 * tiles)) for t in (a.part_sum, a.part_wsum))
            for c in range(0, n, TILE_N):
                part, tile = logits[:, c : c + TILE_N], a.tile0 + c // TILE_N
                highest = torch.where(part.isnan(), -torch.inf, part).amax(1)
                above = highest > row_shift + HEADROOM
                shift = torch.where(above, highest, row_shift)
                out[:live, c : c + TILE_N] = torch.exp(part - shift[:, None])
                part_sum[:live, tile] = out[:live, c : c + TILE_N].sum(1)
                part_sum[:live, tiles + tile] = shift
                if part_wsum is not None:
                    part_wsum[:live, tile] = _weighted(part, weight[c : c + TILE_N]).sum(1)
                    part_wsum[:live, tiles + tile] = 0
                i = above.nonzero()[:, 0]
                row_max_bits[i] = torch.maximum(row_max_bits[i], encode(highest[i]))
                flags[1 + i // ROW_TILE] = 1
                flags[0] |= len(i) > 0
            i = ((target >= 0) & (target < n)).nonzero()[:, 0]
            target_logit[i] = logits[i, target[i, 0]]
        else:
            row_shift, scale, coef_target, coef_smooth = memory(a.coefs, FP32, (rows, 4))[:live].T[:, :, None]
            value = scale * torch.exp(logits - row_shift)
            if p.smoothing:
                value = value - coef_smooth * weight
            out[:live] = value - torch.where(target == torch.arange(n), coef_target, 0.0)
        out[:live] *= d
        if a.out is not None:
            memory(a.out, out_dtype, (rows, n), (a.out_stride, 1)).copy_(out)

    return kernel


def rescale(p):
    def kernel(a):
        live, there = live_rows(a), slice(a.tile0, a.tile0 + -(-a.n // TILE_N))
        sums = memory(a.part_sum, FP32, (a.rows, 2 * a.tiles))[:live]
        shifts = sums[:, a.tiles :][:, there]
        flagged = flags_of(a)[1 + torch.arange(live) // ROW_TILE] != 0
        row_max = decode(memory(a.row_max_bits, torch.int32, (a.rows,))[:live, None])
        factor = torch.where(flagged[:, None] & (shifts != row_max), torch.exp(shifts - row_max), 1.0)
        shifts.zero_()
        sums[:, there] *= factor
        if p.stored:
            exp_logits = memory(a.exp_logits, BF16, (a.rows, a.n), (a.exp_logits_stride, 1))[:live]
            exp_logits.copy_(exp_logits.float() * factor.repeat_interleave(TILE_N, 1)[:, : a.n])

    return kernel


def clear(p):
    def kernel(a):
        memory(a.out, getattr(torch, p.dtype), (a.rows, p.h))[live_rows(a) :] = 0

    return kernel


def scatter(p):
    dtype = getattr(torch, p.dx_dtype)

    def kernel(a):
        live = live_rows(a)
        acc = memory(a.acc, FP32, (a.rows, p.h))[:live]
        if a.row_scale is not None:
            acc = acc * memory(a.row_scale, FP32, (a.rows,))[:live, None]
        rows_of_x = memory(a.order, torch.int32, (a.start + a.rows,))[a.start : a.start + live]
        for r, row in zip(rows_of_x, acc, strict=True):
            memory(a.dx + int(r) * p.h * dtype.itemsize, dtype, (p.h,)).copy_(row)

    return kernel


KERNELS = {"LceExp": exp, "LceRescale": rescale, "LceClear": clear, "LceScatter": scatter}


def get(kernel_class, problem, config, target):
    """In place of launch.get."""
    specs, kernel = problem.args, KERNELS[kernel_class.__name__](problem)

    def launch(a, stream):
        assert type(a) is type(specs)
        assert [arg is None for arg in a] == [spec is None for spec in specs]
        kernel(a)

    return launch


def mm(a, b, out):
    out.copy_(a.float() @ b.float())


def addmm(a, b, out):
    out.add_(a.float() @ b.float())
