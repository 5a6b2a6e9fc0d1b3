"""mma.sync: products of small matrices in the registers of a warp. (PTX: Warp Level Matrix Multiply-Accumulate)"""

import numpy as np

from quackish.emulator import matrices, numbers
from quackish.emulator.errors import Fault
from quackish.emulator.isa import action
from quackish.emulator.threads import WARP

M, N = 16, 8


def _by_warp(registers):
    """Registers of whole warps as (warps, registers, 32)."""
    # "all threads in the warp must execute the same mma instruction" (PTX, mma)
    if registers[0].size % WARP:
        raise Fault(
            "missing-threads", f"mma.sync by {registers[0].size} threads; it needs all {WARP} threads of a warp"
        )
    return np.stack([register.reshape(-1, WARP) for register in registers], axis=1)


def _declare(k, element, element_b, d):
    width = matrices.ELEMENT_BYTES[element]
    size = k * width // 16  # registers of B: a column has 4 threads of 4 bytes each

    signature = f"{{T}} = {{b32*{2 * size}}}, {{b32*{size}}}, {{T}}".replace("T", "f32*4" if d == "f32" else "b32*2")

    @action(f"mma.sync.aligned.m{M}n{N}k{k}.row.col.{d}.{element}.{element_b}.{d}", signature, converged="warp")
    def multiply(lanes, a, b, c):
        a = matrices.fragment_to_matrix(_by_warp(a), element, M)
        b = matrices.fragment_to_matrix(_by_warp(b), element_b, N)
        accumulator = matrices.fragment_to_accumulator(_by_warp(c if d == "f32" else _unpacked(c)))
        fragment = matrices.accumulator_to_fragment(a @ b.swapaxes(1, 2) + accumulator)
        registers = fragment.swapaxes(0, 1).reshape(4, -1)
        grid = lanes.cta.grid
        grid.mmas += lanes.num_warps
        grid.flops += lanes.num_warps * 2 * M * N * k
        return registers if d == "f32" else _packed(registers)


def _unpacked(pairs):
    """Registers with pairs of fp16 as registers of fp32."""
    return [numbers.f16_to_f32(pair >> np.uint32(bit) & np.uint32(0xFFFF)) for pair in pairs for bit in (0, 16)]


def _packed(registers):
    """The inverse of `_unpacked`; rounds."""
    halves = [numbers.f32_to_f16(register) for register in registers]
    return [numbers.pack16(low, high) for low, high in zip(halves[::2], halves[1::2], strict=True)]


for _element in ("bf16", "f16"):
    for _k in (8, 16):
        _declare(_k, _element, _element, "f32")
for _k in (8, 16):
    _declare(_k, "f16", "f16", "f16")
for _k in (4, 8):
    _declare(_k, "tf32", "tf32", "f32")
for _element in ("e4m3", "e5m2"):
    for _element_b in ("e4m3", "e5m2"):
        _declare(32, _element, _element_b, "f32")
