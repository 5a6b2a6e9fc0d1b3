"""Swizzles: permutations of the 16-byte chunks of shared memory, for tensor maps and matrix descriptors."""

import enum
from typing import Any


class Swizzle(enum.Enum):
    """A value is (bits, chunk): `2 ** bits` neighboring chunks of `2 ** chunk` bytes change places."""

    NONE = (0, 4)
    B32 = (1, 4)
    B64 = (2, 4)
    B128 = (3, 4)
    B128_ATOM_32B = (2, 5)

    @property
    def span(self) -> int:
        """The bytes of a row of the pattern; 16 without a swizzle."""
        bits, chunk = self.value
        return 1 << (bits + chunk)

    def __call__(self, addresses: Any) -> Any:
        """Where shared memory holds what would be at `addresses` (numbers or an array) without the swizzle.

        In the tables of "Swizzling Modes" in the PTX manual, row r of 128 bytes has element e ^ r at place e, counted
        from an address that the pattern's size divides.
        """
        bits, chunk = self.value
        return addresses ^ (((addresses >> 7) & ((1 << bits) - 1)) << chunk)
