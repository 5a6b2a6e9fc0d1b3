"""Tensor maps: the 128-byte descriptors of global tensors that TMA copies boxes of.

Their format is not documented. What is here was read off the maps that the host code of CuTe DSL encodes: words are
little-endian and have 64 bits, and the last eight are never written.

    word 0      the address
    word 1      bits 4-6: rank - 1; 7-10: the element type; 13-14: the swizzle; 16: fp32 elements are tf32; 17-18: L2
                promotion; 19: the 128-byte swizzle moves chunks of 32 bytes; from bit 32: the first stride / 16
    word 2, 3   the other strides / 16, with 32 bits each; from bit 32 of word 3, four further bits for each stride
    word 4 to 6 sizes - 1, with 32 bits each
    word 6, 7   the box's sizes - 1, with 8 bits each: the first from bit 56 of word 6, the others in word 7

Quotations are from the documentation of `cuTensorMapEncodeTiled` unless they name another source.
"""

import dataclasses
import functools
import struct
from typing import Any, NamedTuple, Protocol

import numpy as np

from quackish.emulator import numbers
from quackish.emulator.errors import Fault
from quackish.emulator.swizzle import Swizzle

BYTES = 128
_MEANINGFUL = 64

# CuTe DSL sets bit 1, and bit 21 depending on the tensor's size; the driver sets neither, and an H200 copies the same.
# L2 promotion changes no copy either. Interleaved layouts, NaN for elements outside, and im2col have bits of their own,
# which are unknown.
_WITHOUT_EFFECT = 1 << 1 | 1 << 17 | 1 << 18 | 1 << 21
_TF32, _CHUNKS_OF_32 = 1 << 16, 1 << 19
_FIELDS = 7 << 4 | 15 << 7 | 3 << 13

# u8, f16, f32, bf16 and u4 (two in a byte) were seen. Integers are numbered as in CUtensorMapDataType, as u8, f16 and
# f32 are.
_ELEMENTS = {0: "u8", 1: "u16", 2: "u32", 3: "s32", 4: "u64", 5: "s64", 6: "f16", 7: "f32", 10: "bf16", 11: "u4"}
_ELEMENT_BYTES = {"u8": 1, "u16": 2, "f16": 2, "bf16": 2, "u32": 4, "s32": 4, "f32": 4, "u64": 8, "s64": 8}
_PACKED = {"u4": 2}  # how many elements of dimension 0 count as one byte here
_SWIZZLES = [Swizzle.NONE, Swizzle.B32, Swizzle.B64, Swizzle.B128]


class Memory(Protocol):
    """Global memory. A row is `size` bytes after an address; rows are arrays of bytes of shape (addresses, size)."""

    def read_rows(self, addresses: np.ndarray, size: int) -> np.ndarray: ...

    def write_rows(self, addresses: np.ndarray, rows: np.ndarray) -> None: ...


class Window(NamedTuple):
    """The part of a box that is inside the tensor, as rows of bytes."""

    addresses: np.ndarray  # uint64, of each row in global memory; its shape is that of the outer dimensions
    row_bytes: int
    part: tuple[slice, ...]  # where they are in the box, as an array of shape `TensorMap.byte_shape`


@dataclasses.dataclass(frozen=True)
class TensorMap:
    """Dimension 0 is the fastest one, as in PTX's coordinates. It counts elements, or bytes of packed ones."""

    address: int
    element: str  # such as "bf16"
    sizes: tuple[int, ...]
    strides: tuple[int, ...]  # bytes; dimension 0 has none
    box: tuple[int, ...]
    swizzle: Swizzle

    @property
    def rank(self) -> int:
        return len(self.sizes)

    @property
    def element_bytes(self) -> int:
        return _ELEMENT_BYTES.get(self.element, 1)

    @property
    def byte_shape(self) -> tuple[int, ...]:
        """The shape of the box as an array of bytes, slowest dimension first."""
        return (*reversed(self.box[1:]), self.box[0] * self.element_bytes)

    @property
    def box_bytes(self) -> int:
        """What a load adds to its mbarrier, wherever the box is: elements outside the tensor count."""
        return int(np.prod(self.byte_shape))

    def window(self, coordinates: tuple[int, ...]) -> Window:
        """The part of a box at `coordinates` that is inside the tensor; without rows if none is."""
        if len(coordinates) != self.rank:
            raise Fault("tensor-map", f"{len(coordinates)} coordinates for a tensor map of rank {self.rank}: {self}")
        coordinates = (coordinates[0] // _PACKED.get(self.element, 1), *coordinates[1:])
        # "The address of the bounding Box must also be aligned to 16 bytes." (PTX, bounding box) Otherwise an H200 ends
        # with an illegal instruction. The tensor's address and its strides are multiples of 16.
        if coordinates[0] * self.element_bytes % 16:
            raise Fault(
                "tensor-map",
                f"a box of a tensor map begins at {coordinates}: its first coordinate is at byte "
                f"{coordinates[0] * self.element_bytes} of a row; expected a multiple of 16 bytes: {self}",
            )
        spans = []
        for start, box, size in zip(coordinates, self.box, self.sizes, strict=True):
            first = min(max(0, -start), box)
            spans.append((first, max(first, min(box, size - start))))
        width = self.element_bytes
        first, last = spans[0]
        # Addresses wrap around at 2^64: maps of ragged tensors have sizes and strides that rely on it.
        addresses = np.uint64((self.address + (coordinates[0] + first) * width) % 2**64)
        for start, stride, span in zip(coordinates[1:], self.strides, spans[1:], strict=True):
            index = start + np.arange(*span, dtype=np.int64)
            addresses = index.astype(np.uint64).reshape(-1, *[1] * addresses.ndim) * np.uint64(stride) + addresses
        part = (*(slice(*span) for span in reversed(spans[1:])), slice(first * width, last * width))
        return Window(np.asarray(addresses), (last - first) * width, part)

    def load(self, coordinates: tuple[int, ...], memory: Memory) -> np.ndarray:
        """The bytes of a box; zeros outside the tensor."""
        box, window = np.zeros(self.byte_shape, np.uint8), self.window(coordinates)
        if window.addresses.size and window.row_bytes:
            inside = box[window.part]
            inside[...] = memory.read_rows(window.addresses.ravel(), window.row_bytes).reshape(inside.shape)
        return box.reshape(-1)

    def store(self, coordinates: tuple[int, ...], box: np.ndarray, memory: Memory, add: bool = False) -> None:
        """Writes the bytes of a box, or adds their numbers. Bytes past the ends of the tensor are dropped."""
        # The manual allows it, but an H200 ends with an illegal instruction. Loads may begin before the tensor.
        if min(coordinates) < 0:
            raise Fault("tensor-map", f"a store of a box at {coordinates}, which begins before the tensor: {self}")
        window = self.window(coordinates)
        if window.addresses.size and window.row_bytes:
            addresses = window.addresses.ravel()
            rows = box.reshape(self.byte_shape)[window.part].reshape(-1, window.row_bytes)
            if add:
                rows = self._added(memory.read_rows(addresses, window.row_bytes), rows)
            memory.write_rows(addresses, rows)

    def shared_offsets(self, offset: int) -> np.ndarray:
        """Where shared memory has each byte of a box that begins at `offset`, in the box's order."""
        # A multiple of 128. (CUDA Programming Guide, the table of alignments of multi-dimensional bulk copies)
        if offset % 128:
            raise Fault(
                "misaligned", f"a box of a tensor map at {offset:#x} in shared memory, which is not a multiple of 128"
            )
        return _box_offsets(self.box_bytes, offset % 1024, self.swizzle) + (offset - offset % 1024)

    def _added(self, old: np.ndarray, new: np.ndarray) -> np.ndarray:
        """The bytes of old + new."""
        floats = {"f32": numbers.add, "f16": numbers.add_f16, "bf16": numbers.add_bf16}
        dtype: Any = np.float32 if self.element == "f32" else f"u{self.element_bytes}"
        add = floats.get(self.element, np.add)
        return add(*(np.ascontiguousarray(data).view(dtype) for data in (old, new))).view(np.uint8)


def decode(data: bytes) -> TensorMap:
    """Decodes 128 bytes. Raises Fault if no map can be like that, NotImplementedError for unknown bits."""
    return _decode(bytes(data[:_MEANINGFUL]))


@functools.lru_cache(1024)
def _decode(data: bytes) -> TensorMap:
    words = struct.unpack("<8Q", data)
    flags = words[1] & 0xFFFFFFFF
    swizzle = _SWIZZLES[flags >> 13 & 3]
    known = _FIELDS | _WITHOUT_EFFECT
    if flags >> 7 & 15 == 7:
        known |= _TF32  # copies leave fp32 elements as they are here; tensor cores truncate them
    if swizzle is Swizzle.B128:
        known |= _CHUNKS_OF_32
    unknown = flags & ~known
    rank = (flags >> 4 & 7) + 1
    element = _ELEMENTS.get(flags >> 7 & 15)
    if not flags or rank > 5:
        raise Fault("tensor-map", f"the bytes at the address of a tensor map are none: {data[:16].hex()}...")
    if element is None:
        raise NotImplementedError(f"a tensor map of elements of type {flags >> 7 & 15}; known: {_ELEMENTS}")
    if unknown or words[6] >> 32 & 0xFFFFFF or words[7] >> 32:
        raise NotImplementedError(
            f"a tensor map with unknown bits {unknown:#x}, {words[6] >> 32 & 0xFFFFFF:#x}, {words[7] >> 32:#x}: "
            "interleaved, im2col, strided in elements, or filled with NaN"
        )
    halves = [half for word in words for half in (word & 0xFFFFFFFF, word >> 32)]
    strides = [(halves[3 + i] | (halves[7] >> 4 * i & 15) << 32) * 16 for i in range(rank - 1)]
    boxes = [(words[6] >> 56) + 1, *((words[7] >> 8 * i & 255) + 1 for i in range(4))]
    sizes = [size + 1 for size in halves[8 : 8 + rank]]
    packed = _PACKED.get(element, 1)
    sizes[0], boxes[0] = sizes[0] // packed, boxes[0] // packed
    decoded = TensorMap(
        address=words[0],
        element=element,
        sizes=tuple(sizes),
        strides=tuple(strides),
        box=tuple(boxes[:rank]),
        swizzle=Swizzle.B128_ATOM_32B if flags & _CHUNKS_OF_32 else swizzle,
    )
    _check(decoded)
    return decoded


# Codes of tensormap.replace: the element type here, and whether it is tf32. (PTX, tensormap.replace: elemtype)
_REPLACED_ELEMENTS = {**{code: (code, False) for code in (0, 1, 2, 3, 4, 5, 6, 7, 10)}, 11: (7, True)}


def replace(data: np.ndarray, field: str, ordinal: int, value: int) -> None:
    """Changes a field of the 128 bytes of a tensor map, as tensormap.replace does. ordinal: of a dimension or stride.

    Raises Fault for values that no map has, NotImplementedError for features that no map has here.
    """
    halves = data.view(np.uint32)
    if field == "global_address":
        halves[:2] = np.array([value], np.uint64).view(np.uint32)
    elif field == "rank":  # "this field is zero-based": rank - 1
        _set(halves, 2, 4, 3, value)
    elif field == "box_dim":
        _check_ordinal(field, ordinal, 5)
        if not 1 <= value <= 256:
            raise Fault("tensor-map", f"tensormap.replace of box_dim by {value}; valid are 1 to 256")
        word, bit = (13, 24) if ordinal == 0 else (14, 8 * (ordinal - 1))
        _set(halves, word, bit, 8, value - 1)
    elif field == "global_dim":
        _check_ordinal(field, ordinal, 5)
        halves[8 + ordinal] = (value - 1) % 2**32
    elif field == "global_stride":
        _check_ordinal(field, ordinal, 4)
        if value % 16 or value >> 40:
            raise Fault(
                "tensor-map", f"tensormap.replace of global_stride by {value}; it must be a multiple of 16 below 2^40"
            )
        halves[3 + ordinal] = value >> 4 & 0xFFFFFFFF
        _set(halves, 7, 4 * ordinal, 4, value >> 36)
    elif field == "elemtype" and value in _REPLACED_ELEMENTS:
        code, is_tf32 = _REPLACED_ELEMENTS[value]
        _set(halves, 2, 7, 4, code)
        _set(halves, 2, 16, 1, is_tf32)
    elif field == "swizzle_mode" and value < len(_SWIZZLES):
        _set(halves, 2, 13, 2, value)
    elif field == "swizzle_atomicity" and value <= 1:  # 16 or 32 bytes
        _set(halves, 2, 19, 1, value)
    elif (field, value) not in (("element_stride", 1), ("interleave_layout", 0), ("fill_mode", 0)):
        raise NotImplementedError(f"tensormap.replace of {field} by {value}")


def _set(halves: np.ndarray, word: int, bit: int, count: int, value: int) -> None:
    """Sets bits of a word."""
    mask = (1 << count) - 1
    halves[word] = int(halves[word]) & ~(mask << bit) & 0xFFFFFFFF | (value & mask) << bit


def _check_ordinal(field: str, ordinal: int, count: int) -> None:
    if not 0 <= ordinal < count:
        raise Fault("tensor-map", f"tensormap.replace of {field} {ordinal}; a tensor map has {count}")


def _check(tensor_map: TensorMap) -> None:
    """Raises Fault for what the driver refuses."""
    if tensor_map.address % 16:
        raise Fault("tensor-map", f'"globalAddress [...] must be 16 byte aligned": {tensor_map}')
    inner = tensor_map.byte_shape[-1]
    if inner % 16:
        raise Fault(
            "tensor-map",
            f'"boxDim[0] * elementSizeInBytes( tensorDataType ) must be a multiple of 16 bytes": {tensor_map}',
        )
    if tensor_map.swizzle is not Swizzle.NONE and inner > tensor_map.swizzle.span:
        raise Fault(
            "tensor-map",
            f'"the bounding box inner dimension [...] must be less than or equal to the swizzle size": {tensor_map}',
        )
    if tensor_map.swizzle is not Swizzle.NONE and inner < tensor_map.swizzle.span:
        raise NotImplementedError(f"a box that is narrower than its swizzle: {tensor_map}")


@functools.lru_cache(256)
def _box_offsets(size: int, offset: int, swizzle: Swizzle) -> np.ndarray:
    return swizzle(offset + np.arange(size, dtype=np.intp))
