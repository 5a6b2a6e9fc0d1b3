"""Swizzles, matrix descriptors, fragments and tensor maps against the PTX manual's tables and examples."""

import itertools
import struct

import numpy as np
import pytest

from quackish.emulator import matrices, numbers, tensor_map
from quackish.emulator.errors import Fault
from quackish.emulator.swizzle import Swizzle

# Swizzling Modes: each cell is 16 bytes, each row 128 bytes, and the pattern repeats.
PATTERNS = {
    Swizzle.NONE: ["0 1 2 3 4 5 6 7"],
    Swizzle.B32: ["0 1 2 3 4 5 6 7", "1 0 3 2 5 4 7 6"],
    Swizzle.B64: ["0 1 2 3 4 5 6 7", "1 0 3 2 5 4 7 6", "2 3 0 1 6 7 4 5", "3 2 1 0 7 6 5 4"],
    Swizzle.B128: [
        "0 1 2 3 4 5 6 7",
        "1 0 3 2 5 4 7 6",
        "2 3 0 1 6 7 4 5",
        "3 2 1 0 7 6 5 4",
        "4 5 6 7 0 1 2 3",
        "5 4 7 6 1 0 3 2",
        "6 7 4 5 2 3 0 1",
        "7 6 5 4 3 2 1 0",
    ],
    Swizzle.B128_ATOM_32B: ["0 1 2 3 4 5 6 7", "2 3 0 1 6 7 4 5", "4 5 6 7 0 1 2 3", "6 7 4 5 2 3 0 1"],
}


@pytest.mark.parametrize("swizzle", PATTERNS)
def test_swizzles_are_the_manuals_tables(swizzle):
    rows = [list(map(int, row.split())) for row in PATTERNS[swizzle]]
    for line, cell, byte in itertools.product(range(24), range(8), (0, 15)):
        address = 128 * line + 16 * cell + byte
        assert swizzle(address) == 128 * line + 16 * rows[line % len(rows)].index(cell) + byte
    addresses = np.arange(4096)
    assert (swizzle(addresses) == [swizzle(int(address)) for address in addresses]).all()


def cute(shape, stride, coordinate):
    """The offset of a one-dimensional coordinate in a CuTe layout."""
    if isinstance(shape, int):
        return coordinate * stride
    offset = 0
    for extent, step in zip(shape, stride, strict=True):
        size = int(np.prod(extent))
        offset += cute(extent, step, coordinate % size)
        coordinate //= size
    return offset


def laid_out(matrix, layout, swizzle, start, memory):
    """Writes a matrix (rows, k) into memory by a CuTe layout ((rows, k), strides) of elements."""
    (row_shape, k_shape), (row_stride, k_stride) = layout
    for row, k in np.ndindex(matrix.shape):
        offset = cute(row_shape, row_stride, row) + cute(k_shape, k_stride, k)
        memory[swizzle(start + offset * memory.itemsize) // memory.itemsize] = matrix[row, k]


# "Exact layout" of the examples of canonical layouts: (element, MN-major, swizzle, layout, LBO, SBO in elements)
EXAMPLES = {
    "k none": ("tf32", False, Swizzle.NONE, (((8, 2), (4, 4)), ((4, 32), (1, 64))), 64, 32),
    "k 32": ("tf32", False, Swizzle.B32, (((8, 2), (4, 4)), ((8, 64), (1, 4))), None, 64),
    "mn none": ("bf16", True, Swizzle.NONE, (((8, 1, 2), (8, 2)), ((1, 8, 64), (8, 128))), 128, 64),
    "mn 32": ("bf16", True, Swizzle.B32, (((8, 2, 2), (8, 2)), ((1, 8, 128), (16, 256))), 128, 256),
    "mn 64": ("bf16", True, Swizzle.B64, (((8, 4, 2), (8, 2)), ((1, 8, 256), (32, 512))), 256, 512),
}
ENCODED_SWIZZLE = {Swizzle.NONE: 0, Swizzle.B128: 1, Swizzle.B64: 2, Swizzle.B32: 3}


def encoded(start, leading, stride, swizzle):
    return start >> 4 | (leading >> 4) << 16 | (stride >> 4) << 32 | ENCODED_SWIZZLE[swizzle] << 62


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_of_canonical_layouts(name):
    element, mn_major, swizzle, layout, leading, stride = EXAMPLES[name]
    width = matrices.ELEMENT_BYTES[element]
    rows, k = int(np.prod(layout[0][0])), 32 // width
    memory = np.zeros(8192, {2: np.uint16, 4: np.uint32}[width])
    values = np.random.default_rng(0).integers(0, 100, (rows, k)).astype(np.float32)
    bits = numbers.f32_to_bf16(values) if element == "bf16" else values.view(np.uint32)
    laid_out(bits, layout, swizzle, 2048, memory)
    descriptor = matrices.descriptor_sm90(encoded(2048, (leading or 1) * width, stride * width, swizzle))
    assert (matrices.in_shared_memory(memory, descriptor, rows, element, mn_major) == values).all()


def canonical(swizzle, mn_major, rows, k, leading, stride):
    """The manual's table "Canonical Layouts" for 16-bit elements: T is 8; LBO and SBO in elements."""
    repeats = {Swizzle.NONE: 1, Swizzle.B32: 2, Swizzle.B64: 4, Swizzle.B128: 8}[swizzle]
    if not mn_major:
        row_strides, k_strides = (8 * repeats, stride), (1, leading if swizzle is Swizzle.NONE else 8)
        return ((8, rows // 8), (8, k // 8)), (row_strides, k_strides)
    far, deep = (stride, leading) if swizzle is Swizzle.NONE else (leading, stride)
    return ((8, repeats, -(-rows // (8 * repeats))), (8, k // 8)), ((1, 8, far), (8 * repeats, deep))


@pytest.mark.parametrize("mn_major", [False, True])
@pytest.mark.parametrize("swizzle", ENCODED_SWIZZLE)
@pytest.mark.parametrize("rows", [8, 64, 200, 256])
def test_matrices_of_16_bits_in_all_layouts(swizzle, mn_major, rows):
    values = np.random.default_rng(rows).integers(-128, 128, (rows, 16)).astype(np.float32)
    leading, stride = (64 * 300, 1024) if mn_major else (8 * 8 * 33, 8 * 64)
    start = 3 * 1024 + (0 if mn_major or swizzle in (Swizzle.NONE, Swizzle.B32) else 32)  # the second tile of k
    memory = np.full(1 << 19, 0x7FFF, np.uint16)
    laid_out(
        numbers.f32_to_bf16(values), canonical(swizzle, mn_major, rows, 16, leading, stride), swizzle, start, memory
    )
    descriptor = matrices.descriptor_sm90(encoded(start, 2 * leading, 2 * stride, swizzle))
    assert (matrices.in_shared_memory(memory, descriptor, rows, "bf16", mn_major) == values).all()
    written = np.flatnonzero(memory != 0x7FFF)
    first, end = matrices.extent(descriptor, rows, "bf16", mn_major)
    assert (first, end) == (2 * written[0], 2 * written[-1] + 2)


def test_fragments_are_those_of_the_figures():
    d = np.arange(64 * 24, dtype=np.float32).reshape(64, 24)
    registers = matrices.accumulator_to_registers(d)
    assert registers.shape == (12, 128)
    # (thread, register): (row, column), read from the figure of accumulator matrix D
    points = {(0, 0): (0, 0), (0, 1): (0, 1), (0, 2): (8, 0), (0, 3): (8, 1), (0, 4): (0, 8), (0, 11): (8, 17)}
    points |= {(1, 0): (0, 2), (3, 3): (8, 7), (4, 0): (1, 0), (31, 1): (7, 7), (31, 3): (15, 7)}
    points |= {(32, 0): (16, 0), (64, 2): (40, 0), (127, 0): (55, 6), (127, 11): (63, 23)}
    for (thread, register), place in points.items():
        assert registers[register, thread] == d[place], (thread, register)
    assert (matrices.registers_to_accumulator(registers) == d).all()

    a = np.arange(64 * 16, dtype=np.float32).reshape(64, 16)
    registers = np.zeros((4, 128, 2), np.uint16)
    for thread, register, half in np.ndindex(128, 4, 2):
        warp, group, lane = thread // 32, thread % 32 // 4, thread % 4
        row = 16 * warp + group + (8 if register in (1, 3) else 0)
        column = 2 * lane + half + (8 if register in (2, 3) else 0)
        registers[register, thread, half] = np.float16(a[row, column]).view(np.uint16)
    assert (matrices.registers_to_a(registers.view(np.uint32)[..., 0], "f16") == a).all()

    tf32 = np.arange(64 * 8, dtype=np.float32).reshape(64, 8)
    registers = np.zeros((4, 128), np.float32)
    for thread, register in np.ndindex(128, 4):
        row = 16 * (thread // 32) + thread % 32 // 4 + 8 * (register % 2)
        registers[register, thread] = tf32[row, thread % 4 + 4 * (register // 2)]
    assert (matrices.registers_to_a(registers.view(np.uint32), "tf32") == tf32).all()


@pytest.mark.parametrize("n", [8, 48, 192, 256])
def test_an_integer_product_through_all_layouts(n):
    random = np.random.default_rng(n)
    a, b = (random.integers(-8, 9, (rows, 16)).astype(np.float32) for rows in (64, n))
    memory = np.zeros(1 << 16, np.uint16)
    laid_out(
        a.astype(np.float16).view(np.uint16), canonical(Swizzle.B128, False, 64, 16, 0, 512), Swizzle.B128, 0, memory
    )
    layout = canonical(Swizzle.B64, True, n, 16, 1024, 256)
    laid_out(b.astype(np.float16).view(np.uint16), layout, Swizzle.B64, 1 << 14, memory)
    of_a, of_b = (
        matrices.in_shared_memory(memory, matrices.descriptor_sm90(bits), rows, "f16", mn_major)
        for bits, rows, mn_major in [
            (encoded(0, 16, 1024, Swizzle.B128), 64, False),
            (encoded(1 << 14, 2048, 512, Swizzle.B64), n, True),
        ]
    )
    registers = matrices.accumulator_to_registers(of_a @ of_b.T)
    assert (matrices.registers_to_accumulator(registers) == a.astype(int) @ b.astype(int).T).all()


def test_what_the_manual_forbids_in_descriptors_is_refused():
    good = encoded(4096, 16, 1024, Swizzle.B128)
    assert matrices.descriptor_sm90(good) == (4096, 16, 1024, Swizzle.B128)
    for bit in (14, 30, 46, 52, 61):
        with pytest.raises(Fault, match="reserved bits"):
            matrices.descriptor_sm90(good | 1 << bit)
    with pytest.raises(NotImplementedError, match="base offset 1"):
        matrices.descriptor_sm90(good | 1 << 49)
    blackwell = good & ((1 << 62) - 1) | 1 << 46
    for mode, swizzle in {0: "NONE", 1: "B128_ATOM_32B", 2: "B128", 4: "B64", 6: "B32"}.items():
        assert matrices.descriptor_sm100(blackwell | mode << 61) == (4096, 16, 1024, Swizzle[swizzle])
    for mode in (3, 5, 7):
        with pytest.raises(Fault, match="Values 3, 5 and 7 are invalid"):
            matrices.descriptor_sm100(blackwell | mode << 61)
    for wrong in (blackwell & ~(1 << 46), blackwell | 1 << 53, blackwell | 1 << 15):
        with pytest.raises(Fault):
            matrices.descriptor_sm100(wrong)
    with pytest.raises(NotImplementedError, match="absolute"):
        matrices.descriptor_sm100(blackwell | 1 << 52)


def test_instruction_descriptors():
    bits = 1 << 4 | 1 << 7 | 1 << 10 | 1 << 16 | (256 >> 3) << 17 | (128 >> 4) << 24
    expected = matrices.InstructionDescriptor("f32", "bf16", "bf16", False, False, False, True, 128, 256)
    assert matrices.instruction_descriptor(bits, "f16", 1) == expected
    assert matrices.instruction_descriptor(bits ^ 1 << 7 ^ 1 << 10 | 1 << 13, "f16", 2).negate_a
    tf32 = matrices.instruction_descriptor(1 << 4 | 2 << 7 | 2 << 10 | (24 >> 3) << 17 | (64 >> 4) << 24, "tf32", 1)
    assert (tf32.a, tf32.m, tf32.n) == ("tf32", 64, 24)
    for wrong, ctas in [(bits | 1 << 6, 1), (bits & ~(63 << 17), 1), (bits | 15 << 24, 1), (bits | 2 << 7, 1)]:
        with pytest.raises(Fault):
            matrices.instruction_descriptor(wrong, "f16", ctas)
    with pytest.raises(Fault, match="multiple of 16"):
        matrices.instruction_descriptor(bits & ~(63 << 17) | (24 >> 3) << 17, "f16", 2)
    with pytest.raises(NotImplementedError):
        matrices.instruction_descriptor(bits | 1 << 2, "f16", 1)


def test_tensor_memory():
    assert matrices.tensor_address(0x00600100) == (0x60, 0x100)
    for outside in (0x00800000, 0x00000200):
        with pytest.raises(Fault, match="outside tensor memory"):
            matrices.tensor_address(outside)

    def filled(m, n, ctas):
        d = np.arange(m * n, dtype=np.float32).reshape(m, n)
        memories = []
        for lanes, values in matrices.accumulator_to_lanes(d, ctas):
            memories.append(np.full((128, 16), -1, np.float32))
            memories[-1][lanes, : values.shape[1]] = values
        return d, memories

    d, (one,) = filled(128, 16, 1)  # layout D: lane = row
    assert (one == d).all()
    d, (even, odd) = filled(256, 16, 2)  # layout A
    assert (even == d[:128]).all()
    assert (odd == d[128:]).all()
    d, (even, odd) = filled(128, 16, 2)  # layout B: two by two
    assert even[5, 3] == d[5, 3]
    assert even[64 + 5, 3] == d[5, 8 + 3]
    assert odd[63, 7] == d[127, 7]
    assert odd[127, 7] == d[127, 15]
    d, (one,) = filled(64, 16, 1)  # layout F: 16 of the 32 lanes of each warp
    for row, lane in {0: 0, 15: 15, 16: 32, 47: 79, 63: 111}.items():
        assert (one[lane] == d[row]).all()
    assert (one[16:32] == -1).all()


# Tensor maps

# Made by host code of CuTe DSL: bf16 (256, 1024, 1024) at 0x200000 in boxes of (1, 48, 64) with the 128-byte swizzle.
DENSE = struct.pack("<16Q", 0x200000, 0x8000246522, 0x20000, 0, 0x3FF000003FF, 0xFF, 0x3F << 56, 0x2F, *range(1, 9))
# ... and a map of ragged rows of 2048 bytes, whose addresses wrap around.
RAGGED = struct.pack(
    "<16Q", 0x400000, 0x8000244532, 0x807FFFFF80, 0, 0x3FFFFFFF000003FF, 0x7FFFFFFE7FFFFFFE, 0x1F << 56, 0x3F, *[0] * 8
)


def test_maps_that_the_compiler_encodes():
    dense = tensor_map.decode(DENSE)
    assert dense == tensor_map.TensorMap(
        0x200000, "bf16", (1024, 1024, 256), (2048, 1 << 21), (64, 48, 1), Swizzle.B128
    )
    assert (dense.rank, dense.box_bytes, dense.byte_shape) == (3, 64 * 48 * 2, (1, 48, 128))
    ragged = tensor_map.decode(RAGGED)
    assert ragged.sizes == (1024, 1 << 30, (1 << 31) - 1, (1 << 31) - 1)
    assert ragged.strides == (2048, (1 << 35) - 2048, 2048)
    assert ragged.box == (32, 64, 1, 1)
    assert ragged.swizzle is Swizzle.B64


def test_addresses_wrap_around():
    ragged = tensor_map.decode(RAGGED)
    x, row, first, second = 32, (1 << 30) - 3, 64, (1 << 24) + 5
    window = ragged.window((x, row, first, second))
    assert window.addresses.shape == (1, 1, 3)  # the box has 64 rows, and the tensor three more
    expected = [0x400000 + 2 * x + 2048 * (row + i) + ((1 << 35) - 2048) * first + 2048 * second for i in range(3)]
    assert window.addresses.ravel().tolist() == [address % 2**64 for address in expected]
    assert (window.row_bytes, window.part) == (64, (slice(0, 1), slice(0, 1), slice(0, 3), slice(0, 64)))


class Memory:
    """fp32 rows of 12 columns, in rows of 64 bytes, at address 4096."""

    def __init__(self, rows):
        self.bytes = np.arange(rows * 64, dtype=np.uint8) if rows > 99 else np.zeros(rows * 64, np.uint8)
        self.values = self.bytes.view(np.float32).reshape(rows, 16)
        self.values[:] = np.arange(rows * 16).reshape(rows, 16) + 1

    def read_rows(self, addresses, size):
        return self.bytes[self.indices(addresses, size)]

    def write_rows(self, addresses, rows):
        self.bytes[self.indices(addresses, rows.shape[1])] = rows

    def indices(self, addresses, size):
        assert addresses.min() >= 4096
        assert addresses.max() + size <= 4096 + self.bytes.size
        return (addresses - 4096).astype(int)[:, None] + np.arange(size)


SMALL = tensor_map.TensorMap(4096, "f32", (12, 5), (64,), (8, 3), Swizzle.B32)


@pytest.mark.parametrize(
    "x, y", [(0, 0), (8, 3), (-4, -1), (8, 4), (12, 0), (0, 5), (-8, 0), (0, -3), (100, 100), (4, 1)]
)
def test_boxes_are_cut_off_at_the_tensors_edges(x, y):
    memory = Memory(5)
    data = SMALL.load((x, y), memory)
    expected = np.zeros((3, 8), np.float32)
    for i, j in np.ndindex(3, 8):
        if 0 <= y + i < 5 and 0 <= x + j < 12:
            expected[i, j] = memory.values[y + i, x + j]
    assert (data.view(np.float32).reshape(3, 8) == expected).all()

    box = np.arange(1000, 1024, dtype=np.float32)
    for add in (False, True):
        if min(x, y) < 0:
            with pytest.raises(Fault, match="begins before the tensor"):
                SMALL.store((x, y), box.view(np.uint8), memory, add)
            continue
        before = memory.values.copy()
        SMALL.store((x, y), box.view(np.uint8), memory, add)
        for i, j in np.ndindex(5, 16):
            a, b = i - y, j - x
            written = 0 <= a < 3 and 0 <= b < 8 and j < 12
            new = 1000 + 8 * a + b + (before[i, j] if add else 0)
            assert memory.values[i, j] == (new if written else before[i, j])


def test_additions_of_16_bits_round_once():
    memory = Memory(1)
    target = memory.bytes[:32].view(np.uint16)
    target[:] = [0x3F80, 0x4000] * 8
    bf16 = tensor_map.TensorMap(4096, "bf16", (16,), (), (16,), Swizzle.NONE)
    added = np.full(16, 0x3B80, np.uint16)  # 2^-8: half of the last place of 1, a quarter of that of 2
    bf16.store((0,), added.view(np.uint8), memory, add=True)
    assert target.tolist() == [0x3F80, 0x4000] * 8
    f16 = tensor_map.TensorMap(4096, "f16", (16,), (), (16,), Swizzle.NONE)
    target[:] = 0x3C00
    f16.store((0,), target.copy().view(np.uint8), memory, add=True)
    assert target.tolist() == [0x4000] * 16


def test_boxes_lie_swizzled_in_shared_memory():
    offsets = SMALL.shared_offsets(2048 + 128)
    assert offsets.tolist() == [int(Swizzle.B32(2048 + 128 + i)) for i in range(96)]
    assert sorted(offsets.tolist()) == list(range(2176, 2176 + 96))
    with pytest.raises(Fault, match="not a multiple of 128"):
        SMALL.shared_offsets(64)


def changed(word, bits):
    words = list(struct.unpack("<16Q", DENSE))
    words[word] ^= bits
    return struct.pack("<16Q", *words)


@pytest.mark.parametrize(
    "data, kind, message",
    [
        (changed(0, 8), Fault, "must be 16 byte aligned"),
        (bytes(128), Fault, "are none"),
        (changed(1, 7 << 4 ^ 2 << 4), Fault, "are none"),
        (changed(1, 1 << 11), NotImplementedError, "unknown bits 0x800"),
        (changed(6, 1 << 32), NotImplementedError, "unknown bits"),
        (changed(7, 1 << 32), NotImplementedError, "unknown bits"),
        (changed(1, 3 << 7), NotImplementedError, "elements of type 9"),
        (changed(6, 0x1 << 56), Fault, "multiple of 16 bytes"),
        (changed(6, 0x40 << 56), Fault, "less than or equal to the swizzle size"),
        (changed(6, 0x20 << 56), NotImplementedError, "narrower than its swizzle"),
    ],
)
def test_maps_that_cannot_be_are_refused(data, kind, message):
    with pytest.raises(kind, match=message):
        tensor_map.decode(data)


def test_boxes_begin_at_multiples_of_16_bytes():
    for x in (1, -3, 7, 10):
        with pytest.raises(Fault, match=rf"begins at \({x}, 0\).*expected a multiple of 16 bytes"):
            SMALL.window((x, 0))


def test_coordinates_must_fit_the_rank():
    with pytest.raises(Fault, match="2 coordinates for a tensor map of rank 3"):
        tensor_map.decode(DENSE).window((0, 0))
    changed_tail = DENSE[:64] + bytes(64)  # nothing writes the second half
    assert tensor_map.decode(changed_tail) == tensor_map.decode(DENSE)
