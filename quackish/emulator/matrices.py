"""Matrices of tensor cores: descriptors of matrices in shared memory, fragments in registers, tensor memory.

Everything here is a function of numbers and arrays. A product is `a @ b.T` of fp32 arrays of (m, k) and (n, k): "The
accumulation order, rounding, and handling of subnormal inputs are unspecified." Quotations are from the PTX ISA.
"""

import dataclasses
import functools
from typing import NamedTuple

import numpy as np

from quackish.emulator import numbers
from quackish.emulator.errors import Fault
from quackish.emulator.swizzle import Swizzle

_REPEAT = 1024  # swizzles are functions of an address modulo this


class Descriptor(NamedTuple):
    """A matrix in shared memory. Offsets are in bytes; PTX calls them LBO and SBO."""

    start: int
    leading_offset: int
    stride_offset: int
    swizzle: Swizzle


def _field(bits: int, first: int, last: int) -> int:
    """Bits `first` to `last`, both included."""
    return bits >> first & ((1 << (last - first + 1)) - 1)


_SWIZZLES_SM90 = [Swizzle.NONE, Swizzle.B128, Swizzle.B64, Swizzle.B32]
_SWIZZLES_SM100 = {
    0: Swizzle.NONE,
    1: Swizzle.B128_ATOM_32B,
    2: Swizzle.B128,
    4: Swizzle.B64,
    6: Swizzle.B32,
}


def descriptor_sm90(bits: int) -> Descriptor:
    """Decodes a matrix descriptor of wgmma. (Matrix Descriptor Format)"""
    _refuse_bits(bits, [(14, 15), (30, 31), (46, 48), (52, 61)], "a matrix descriptor of wgmma")
    return _descriptor(bits, _SWIZZLES_SM90[_field(bits, 62, 63)])


def descriptor_sm100(bits: int) -> Descriptor:
    """Decodes a matrix descriptor of tcgen05. (Shared memory descriptor)"""
    _refuse_bits(bits, [(14, 15), (30, 31)], "a matrix descriptor of tcgen05")
    # The manual's table: bits 46 to 48 have the "Fixed constant value of 0b001", and bits 53 to 60 are zero.
    if _field(bits, 46, 48) != 1 or _field(bits, 53, 60) != 0:
        raise Fault(
            "matrix-descriptor",
            f"matrix descriptor {bits:#018x} of tcgen05: bits 46 to 48 must be 0b001, and bits 53 to 60 zero",
        )
    if _field(bits, 52, 52):
        raise NotImplementedError(f"matrix descriptor {bits:#018x} with an absolute address of the leading dimension")
    mode = _field(bits, 61, 63)
    if mode not in _SWIZZLES_SM100:
        raise Fault(
            "matrix-descriptor",
            f'matrix descriptor {bits:#018x}: swizzling mode {mode}; "Values 3, 5 and 7 are invalid"',
        )
    return _descriptor(bits, _SWIZZLES_SM100[mode])


def _refuse_bits(bits: int, reserved: list[tuple[int, int]], what: str) -> None:
    """Raises Fault if a bit in one of the reserved ranges is set."""
    for first, last in reserved:
        if _field(bits, first, last):
            raise Fault("matrix-descriptor", f"{what}, {bits:#018x}, has reserved bits set between {first} and {last}")


def _descriptor(bits: int, swizzle: Swizzle) -> Descriptor:
    """The fields that both kinds of descriptors share."""
    # "The value of base offset is 0 when the repeating pattern of the specified swizzling mode starts" at a multiple of
    # 1024, 512 or 256 bytes. "This is valid for all swizzling modes except the no-swizzle mode."
    if _field(bits, 49, 51) and swizzle is not Swizzle.NONE:
        raise NotImplementedError(f"matrix descriptor {bits:#018x} with base offset {_field(bits, 49, 51)}")
    # "matrix-descriptor-encode(x) = (x & 0x3FFFF) >> 4"
    return Descriptor(_field(bits, 0, 13) << 4, _field(bits, 16, 29) << 4, _field(bits, 32, 45) << 4, swizzle)


# Element types, by PTX's names: bytes, and a function from unsigned integers to fp32.
ELEMENT_BYTES = {"e4m3": 1, "e5m2": 1, "bf16": 2, "f16": 2, "tf32": 4}
_TO_F32 = {
    "e4m3": numbers.e4m3_to_f32,
    "e5m2": numbers.e5m2_to_f32,
    "bf16": numbers.bf16_to_f32,
    "f16": lambda bits: bits.view(np.float16).astype(np.float32),
    "tf32": lambda bits: numbers.f32_to_tf32(bits.view(np.float32)),
}


def in_shared_memory(shared: np.ndarray, descriptor: Descriptor, rows: int, element: str, mn_major: bool) -> np.ndarray:
    """A matrix of `rows` x 32 bytes of k as fp32; rows are those of A (m) or the columns of B (n).

    `shared` is the CTA's shared memory as unsigned integers of the element's size. Check its bounds with `extent`.
    """
    width = ELEMENT_BYTES[element]
    base = descriptor.start // _REPEAT * _REPEAT
    indices = _indices(rows, width, descriptor._replace(start=descriptor.start - base), mn_major)
    return _TO_F32[element](shared[base // width :][indices])


def rows_in_shared_memory(shared: np.ndarray, descriptor: int, rows: int, size: int) -> np.ndarray:
    """Rows of 16 or 32 bytes as uint32, (rows, size / 4), as tcgen05.cp reads them. shared: as uint32."""
    return shared[_indices(rows, 4, descriptor_sm100(descriptor), False)[:, : size // 4]]


def row_chunks(descriptor: int, rows: int, size: int) -> np.ndarray:
    """The numbers of the chunks of 16 bytes that `rows_in_shared_memory` reads."""
    return np.unique(_indices(rows, 4, descriptor_sm100(descriptor), False)[:, : size // 4] // 4)


@functools.lru_cache(1024)
def extent(descriptor: Descriptor, rows: int, element: str, mn_major: bool) -> tuple[int, int]:
    """The bounds in shared memory of what `in_shared_memory` reads: (first byte, one after the last byte)."""
    width = ELEMENT_BYTES[element]
    indices = _indices(rows, width, descriptor, mn_major)
    return int(indices.min()) * width, (int(indices.max()) + 1) * width


def chunks(descriptor: Descriptor, rows: int, element: str, mn_major: bool) -> np.ndarray:
    """The numbers of the chunks of 16 bytes that `in_shared_memory` reads."""
    base = descriptor.start // _REPEAT * _REPEAT
    return _chunks(rows, ELEMENT_BYTES[element], descriptor._replace(start=descriptor.start - base), mn_major) + (
        base // 16
    )


@functools.lru_cache(1024)
def _chunks(rows: int, width: int, descriptor: Descriptor, mn_major: bool) -> np.ndarray:
    return np.unique(_indices(rows, width, descriptor, mn_major) * width // 16)


@functools.lru_cache(1024)
def _indices(rows: int, width: int, descriptor: Descriptor, mn_major: bool) -> np.ndarray:
    """Indices of elements of `width` bytes: (rows, k), where k elements are 32 bytes."""
    _, leading, stride, swizzle = descriptor
    row, k = np.arange(rows)[:, None], np.arange(32 // width)[None, :]
    chunk = 16 // width  # the elements of 16 bytes; T in the manual's table "Canonical Layouts"
    if mn_major:
        if width != 2:
            raise NotImplementedError(f"a transposed matrix of elements of {width} bytes")
        span = swizzle.span // width  # rows that are side by side in an atom
        if swizzle is Swizzle.NONE:  # ((T,1,m),(8,k)):((1,T,SBO),(1T,LBO)); with a swizzle LBO and SBO change places
            leading, stride = stride, leading
        offsets = (row % span) * width + (row // span) * leading + (k % 8) * swizzle.span + (k // 8) * stride
    elif swizzle is Swizzle.NONE:  # ((8,m),(T,2k)):((1T,SBO),(1,LBO))
        offsets = (row % 8) * 16 + (row // 8) * stride + (k % chunk) * width + (k // chunk) * leading
    else:  # 128 bytes: ((8,m),(T,2k)):((8T,SBO),(1,T)); LBO is "not used, assumed to be 1"
        offsets = (row % 8) * swizzle.span + (row // 8) * stride + k * width
    return swizzle(descriptor.start + offsets) // width


# Fragments of a warp group. Thread t is thread t % 4 of group t % 32 // 4 of warp t // 32.


def accumulator_to_registers(d: np.ndarray) -> np.ndarray:
    """Converts (64, n) to (n / 2, 128): register i of each thread. (wgmma's figure of matrix D)

    Register i has row 16 * warp + 8 * (i / 2 % 2) + group and column 8 * (i / 4) + 2 * (t % 4) + i % 2.
    """
    n = d.shape[1]
    split = d.reshape(4, 2, 8, n // 8, 4, 2)  # warp, i / 2 % 2, group; i / 4, t % 4, i % 2
    return split.transpose(3, 1, 5, 0, 2, 4).reshape(n // 2, 128)


def registers_to_accumulator(registers: np.ndarray) -> np.ndarray:
    """The inverse of `accumulator_to_registers`."""
    n = 2 * len(registers)
    return registers.reshape(n // 8, 2, 2, 4, 8, 4).transpose(3, 1, 4, 0, 5, 2).reshape(64, n)


def registers_to_a(registers: np.ndarray, element: str) -> np.ndarray:
    """Converts (4, 128) uint32 registers to A as fp32, (64, 32 bytes). (wgmma: A in registers)

    Register i has row 16 * warp + 8 * (i % 2) + group and the 4 bytes of columns at 4 * (t % 4) + 16 * (i / 2).
    """
    width = ELEMENT_BYTES[element]
    bits = np.ascontiguousarray(registers).view(f"u{width}")
    split = bits.reshape(2, 2, 4, 8, 4, 4 // width)  # i / 2, i % 2; warp, group, t % 4; element
    return _TO_F32[element](np.ascontiguousarray(split.transpose(2, 1, 3, 0, 4, 5)).reshape(64, 32 // width))


# Fragments of mma.sync, (warps, registers, 32): thread t is thread t % 4 of group t / 4. (Matrix Fragments for mma)


def fragment_to_matrix(registers: np.ndarray, element: str, rows: int) -> np.ndarray:
    """Converts A (16 rows) or B (8 columns) to fp32, (warps, rows, k).

    Register i has row 8 * (i % (rows / 8)) + group and the 4 bytes of k at 4 * (t % 4) + 16 * (i / (rows / 8)).
    """
    warps, count, _ = registers.shape
    width, parts = ELEMENT_BYTES[element], rows // 8
    split = np.ascontiguousarray(registers).view(f"u{width}").reshape(warps, count // parts, parts, 8, 4, 4 // width)
    # warp, k's part, row's part, group, t % 4, element -> warp, row's part, group, k's part, t % 4, element
    return _TO_F32[element](np.ascontiguousarray(split.transpose(0, 2, 3, 1, 4, 5)).reshape(warps, rows, -1))


def accumulator_to_fragment(d: np.ndarray) -> np.ndarray:
    """Converts (warps, 16, 8) to (warps, 4, 32): register i has row 8 * (i / 2) + group, column 2 * (t % 4) + i % 2."""
    return d.reshape(-1, 2, 8, 4, 2).transpose(0, 1, 4, 2, 3).reshape(-1, 4, 32)


def fragment_to_accumulator(registers: np.ndarray) -> np.ndarray:
    """The inverse of `accumulator_to_fragment`."""
    return registers.reshape(-1, 2, 2, 8, 4).transpose(0, 1, 3, 4, 2).reshape(-1, 16, 8)


# tcgen05


@dataclasses.dataclass(frozen=True)
class InstructionDescriptor:
    """The instruction descriptor of a dense tcgen05.mma with .kind::f16, .kind::tf32 or .kind::f8f6f4."""

    d: str  # types
    a: str
    b: str
    negate_a: bool
    negate_b: bool
    mn_major_a: bool  # PTX: transpose
    mn_major_b: bool
    m: int
    n: int


_D_TYPES = {0: "f16", 1: "f32"}
_AB_TYPES = {
    "f16": {0: "f16", 1: "bf16"},
    "tf32": {2: "tf32"},
    "f8f6f4": {0: "e4m3", 1: "e5m2", 3: "e2m3", 4: "e3m2", 5: "e2m1"},
}
_D_F16 = {("f16", "f16"), *((a, b) for a in _AB_TYPES["f8f6f4"].values() for b in _AB_TYPES["f8f6f4"].values())}


def instruction_descriptor(bits: int, kind: str, ctas: int) -> InstructionDescriptor:
    """Decodes an instruction descriptor. (Instruction descriptor; Matrix Shape)

    `kind` is "f16", "tf32" or "f8f6f4"; `ctas` is 1 or 2 (.cta_group).
    """
    if bits & (1 << 6 | 1 << 23 | 1 << 29):
        raise Fault(
            "matrix-descriptor", f"instruction descriptor {bits:#010x} has reserved bits set: 6, 23 and 29 must be 0"
        )
    if _field(bits, 0, 3) or _field(bits, 30, 31):
        raise NotImplementedError(f"instruction descriptor {bits:#010x}: sparse, saturating or shifting B")
    types = _AB_TYPES[kind]
    d, a, b = _D_TYPES.get(_field(bits, 4, 5)), types.get(_field(bits, 7, 9)), types.get(_field(bits, 10, 12))
    if d is None or a is None or b is None or (d == "f16" and (a, b) not in _D_F16):
        raise Fault("matrix-descriptor", f"instruction descriptor {bits:#010x} has types that .kind::{kind} lacks")
    if a not in ELEMENT_BYTES or b not in ELEMENT_BYTES:
        raise NotImplementedError(f"instruction descriptor {bits:#010x}: elements of 4 or 6 bits ({a}, {b})")
    m, n = _field(bits, 24, 28) << 4, _field(bits, 17, 22) << 3
    shapes, step = ((64, 128), 8) if ctas == 1 else ((128, 256), 16)
    if m not in shapes or n % step or not step <= n <= 256:
        raise Fault(
            "matrix-descriptor",
            f"tcgen05.mma of {m} x {n} by {ctas} CTAs; m is one of {shapes}, n a multiple of {step} up to 256",
        )
    negate_a, negate_b, mn_major_a, mn_major_b = (bool(bits >> bit & 1) for bit in (13, 14, 15, 16))
    return InstructionDescriptor(d, a, b, negate_a, negate_b, mn_major_a, mn_major_b, m, n)


def lanes_of_rows(m: int, ctas: int) -> np.ndarray:
    """The lane of each row of A in tensor memory, for one CTA. (Data Path Layout Organization)"""
    if (m, ctas) == (128, 2):
        raise NotImplementedError("tcgen05.mma of m = 128 by two CTAs with A in tensor memory")
    return np.arange(128).reshape(4, 2, 16)[:, 0].reshape(-1) if m == 64 else np.arange(128)


def tensor_words_to_a(words: np.ndarray, element: str) -> np.ndarray:
    """Converts (rows, 8) words of tensor memory to A as fp32, (rows, 32 bytes of k)."""
    unsigned = {1: np.uint8, 2: np.uint16, 4: np.uint32}[ELEMENT_BYTES[element]]
    return _TO_F32[element](np.ascontiguousarray(words).view(unsigned))


# Fragments of tcgen05.ld and .st: register r of thread t has the word of lane `lanes[r, t]` and column `columns[r, t]`,
# counted from the address.

TENSOR_SHAPES = {"32x32b": 1, "16x32bx2": 1, "16x64b": 1, "16x128b": 2, "16x256b": 4}  # registers of .x1


class TensorFragment(NamedTuple):
    """Which words of tensor memory the registers of a warp hold."""

    lanes: np.ndarray  # (registers, 32)
    columns: np.ndarray
    width: int  # columns from the first to the last one


@functools.cache
def tensor_fragment(shape: str, count: int, half_offset: int = 0, packed: bool = False) -> TensorFragment:
    """The fragment of a load or store. (Matrix fragments)

    `count` is .num, and `half_offset` is where the second half of .16x32bx2 begins. With `packed`, a register has two
    adjacent columns, and `columns` has the first of them.
    """
    thread = np.arange(32)[None, :]
    r = np.arange(TENSOR_SHAPES[shape] * count)[:, None]
    column: np.ndarray
    if shape == "32x32b":
        lane, column = thread + 0 * r, r + 0 * thread
    elif shape == "16x32bx2":
        lane, column = thread % 16 + 0 * r, r + 0 * thread
    elif shape == "16x64b":
        lane, column = thread // 4 + 8 * (thread % 2) + 0 * r, 2 * r + thread // 2 % 2
    elif shape == "16x128b":
        lane, column = thread // 4 + 8 * (r % 2), 4 * (r // 2) + thread % 4
    else:
        assert shape == "16x256b", shape
        lane, column = thread // 4 + 8 * (r // 2 % 2), 8 * (r // 4) + 2 * (thread % 4) + r % 2
    column = column * (2 if packed else 1)
    if shape == "16x32bx2":
        column = column + thread // 16 * half_offset
    return TensorFragment(lane, column, int(column.max()) + (2 if packed else 1))


class TensorAddress(NamedTuple):
    """Bits 31-16 are the lane, bits 15-0 the column. Tensor memory has 128 lanes and 512 columns of 32 bits."""

    lane: int
    column: int


def tensor_address(bits: int) -> TensorAddress:
    """Decodes an address. Raises Fault if it is outside tensor memory."""
    address = TensorAddress(bits >> 16, bits & 0xFFFF)
    if address.lane >= 128 or address.column >= 512:
        raise Fault(
            "out-of-bounds",
            f"address {bits:#010x} is outside tensor memory: lane {address.lane}, column {address.column}",
        )
    return address


def accumulator_to_lanes(d: np.ndarray, ctas: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Where tensor memory has D, for each CTA: (lanes, values of these lanes). (Data Path Layout Organization, dense)

    Lanes count from the lane of D's address, columns from its column.
    """
    m, n = d.shape
    lanes = np.arange(128)
    if (m, ctas) == (64, 1):  # layout F: the first half of each warp's lanes
        return [(lanes.reshape(4, 2, 16)[:, 0].reshape(-1), d)]
    if (m, ctas) == (128, 2):  # layout B: a CTA has 64 rows, and the right half of D is in lanes 64 and above
        halves = [d[64 * cta : 64 * cta + 64] for cta in range(2)]
        return [(lanes, np.concatenate([half[:, : n // 2], half[:, n // 2 :]])) for half in halves]
    assert (m, ctas) in ((128, 1), (256, 2)), (m, ctas)  # layouts D and A
    return [(lanes, d[128 * cta : 128 * cta + 128]) for cta in range(ctas)]
