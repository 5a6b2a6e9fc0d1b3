"""Warpgroup matrix multiplication (sm_90a).

A product reads its operands and updates its accumulator when its group completes; see `completion`.
"""

import numpy as np

from quackish.emulator import matrices
from quackish.emulator.errors import Fault
from quackish.emulator.isa import action
from quackish.emulator.threads import VIEW_OF_TYPE, WARP
from quackish.emulator.wgmma_registers import Product

GROUP = 4 * WARP
M = 64
_F32, _U32 = VIEW_OF_TYPE["f32"], VIEW_OF_TYPE["u32"]


def _uniform(values, first):
    """The one value of the warp group whose threads begin at `first`. Raises Fault if there are several."""
    # All threads of the warp group have the same descriptors and scale-d. (PTX, wgmma.mma_async)
    part = values[first : first + GROUP]
    if (part != part[0]).any():
        raise Fault("non-uniform", "an operand of wgmma that must be the same in all threads of the warp group differs")
    return part[0].item()


def _matrix(cta, bits, rows, element, mn_major):
    """A matrix in shared memory as fp32, with its rows and 32 bytes of k."""
    descriptor = matrices.descriptor_sm90(bits)
    cta.shared.check(*matrices.extent(descriptor, rows, element, mn_major))
    return matrices.in_shared_memory(
        cta.shared.views[matrices.ELEMENT_BYTES[element]], descriptor, rows, element, mn_major
    )


def _granules(cta, bits, rows, element, mn_major):
    """The granules of shared memory that a matrix is in."""
    descriptor = matrices.descriptor_sm90(bits)
    cta.shared.check(*matrices.extent(descriptor, rows, element, mn_major))
    return cta.shared.races.shadow.of_chunks(matrices.chunks(descriptor, rows, element, mn_major))


def _sign(scale):
    # imm-scale-a and imm-scale-b are 1 or -1. (PTX, wgmma.mma_async)
    if scale not in (-1, 1):
        raise Fault("invalid-operand", f"wgmma with a scale of {scale}; valid are 1 and -1")
    return np.float32(scale)


def _rows(indices):
    """Indices of registers, as a slice if they are consecutive: numpy then makes no copy."""
    begin, end = indices[0], indices[0] + len(indices)
    return slice(begin, end) if indices == tuple(range(begin, end)) else list(indices)


def _multiply(lanes, accumulator, registers_a, read_a, descriptors_b, accumulate, n, element, signs, mn_major_b):
    """Issues a product for each warp group. `read_a` gets the position of the group's first thread in `lanes`."""
    # "all threads in the warpgroup must execute the same wgmma.mma_async instruction"
    if lanes.count != GROUP * len(lanes.warp_groups()):
        raise Fault("missing-threads", f"wgmma by {lanes.count} threads; it needs the {GROUP} threads of a warp group")
    cta, rows = lanes.cta, _rows(accumulator)
    sign = np.prod([_sign(sign) for sign in signs])
    for position in range(0, lanes.count, GROUP):
        first = int(lanes.threads[position])
        bits_b, adds = _uniform(descriptors_b, position), _uniform(accumulate, position)

        matrix_a = read_a(position, first)
        races, group = cta.grid.races, first // GROUP
        races.multiply_from(cta, group, _granules(cta, bits_b, n, element, mn_major_b))
        bits = _bits(cta, accumulator), _bits(cta, registers_a)
        cta.wgmma_registers.issue(group, Product(*bits, f"m{M}n{n}", cta.grid.place()))

        def read(first=first, matrix_a=matrix_a, bits_b=bits_b, adds=adds):
            b = _matrix(cta, bits_b, n, element, mn_major_b)
            product = matrices.accumulator_to_registers((matrix_a() * sign) @ b.T)
            return lambda: _update(cta, rows, first, product, adds)

        cta.grid.mmas += 1
        cta.grid.flops += 2 * M * n * (32 // matrices.ELEMENT_BYTES[element])
        cta.grid.completion.issue((cta, "wgmma", first // GROUP), read)


def _bits(cta, indices):
    """The bits that stand for these registers in `wgmma_registers`."""
    return sum(cta.grid.program.wgmma_bits[index] for index in indices)


def _update(cta, rows, first, product, adds):
    """Stores or adds a product in the accumulator registers of the warp group from thread `first` on."""
    threads = slice(first, first + GROUP)
    registers = cta.registers.rows[_F32]
    if adds:
        registers[rows, threads] += product
    else:
        registers[rows, threads] = product


def _declare(n, element, k, element_b=None):
    element_b = element_b or element
    opcode = f"wgmma.mma_async.sync.aligned.m{M}n{n}k{k}.f32.{element}.{element_b}"
    accumulator = f"&{{f32*{n // 2}}}"
    transposes = ["immediate"] * 2 if element in ("bf16", "f16") else []

    @action(opcode, ", ".join([accumulator, "u64", "u64", "pred", "immediate", "immediate", *transposes]), "warp group")
    def multiply(lanes, indices, descriptors_a, descriptors_b, accumulate, sign_a, sign_b, mn_a=0, mn_b=0):
        def read_a(position, first):
            bits = _uniform(descriptors_a, position)
            races, cta = lanes.cta.grid.races, lanes.cta
            races.multiply_from(cta, first // GROUP, _granules(cta, bits, M, element, bool(mn_a)))
            return lambda: _matrix(lanes.cta, bits, M, element, bool(mn_a))

        _multiply(lanes, indices, (), read_a, descriptors_b, accumulate, n, element_b, (sign_a, sign_b), bool(mn_b))

    @action(
        opcode,
        ", ".join([accumulator, "&{b32*4}", "u64", "pred", "immediate", "immediate", *transposes[:1]]),
        "warp group",
    )
    def multiply_registers(lanes, indices, indices_a, descriptors_b, accumulate, sign_a, sign_b, mn_b=0):
        def read_a(position, first):
            registers = lanes.cta.registers.rows[_U32]
            return lambda: matrices.registers_to_a(registers[list(indices_a), first : first + GROUP], element)

        _multiply(
            lanes, indices, indices_a, read_a, descriptors_b, accumulate, n, element_b, (sign_a, sign_b), bool(mn_b)
        )


for _n in range(8, 257, 8):
    for _element in ("bf16", "f16"):
        _declare(_n, _element, 16)
    _declare(_n, "tf32", 8)
    for _element in ("e4m3", "e5m2"):
        for _element_b in ("e4m3", "e5m2"):
            _declare(_n, _element, 32, _element_b)


@action("wgmma.fence.sync.aligned", "", "warp")
def fence(lanes):
    """Orders accesses of registers, which are in order here; see `wgmma_registers`."""
    lanes.cta.wgmma_registers.fence(lanes.warps())


@action("wgmma.commit_group.sync.aligned", "", "warp group")
def commit(lanes):
    for group in lanes.warp_groups():
        lanes.cta.grid.completion.commit((lanes.cta, "wgmma", group))
        lanes.cta.grid.races.commit(lanes.cta, ("wgmma", group))
        lanes.cta.wgmma_registers.commit(group)


@action("wgmma.wait_group.sync.aligned", "immediate", "warp group")
def wait(lanes, allowed):
    for group in lanes.warp_groups():
        lanes.cta.grid.completion.wait((lanes.cta, "wgmma", group), allowed)
        lanes.cta.grid.races.wait(lanes, ("wgmma", group), allowed)
        lanes.cta.wgmma_registers.wait(group, allowed)
