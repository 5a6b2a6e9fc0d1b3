"""Finds registers that threads access while `wgmma` uses them, and a missing `wgmma.fence`."""

import collections
from collections.abc import Callable
from typing import NamedTuple

from quackish.emulator.errors import Fault, Place
from quackish.emulator.ptx import Entry, Register, Vector

WARPS = 4  # warps per warp group
_ALL = -1  # every register


class Product(NamedTuple):
    """A `wgmma.mma_async` that is not known to be complete. Registers are bits of an integer."""

    accumulator: int
    a: int  # the registers of matrix A, if it is in registers
    shape: str
    place: Callable[[], Place]


def bits_of_registers(entry: Entry) -> dict[str, int]:
    """A bit for each register that a `wgmma` of the entry accumulates in or takes matrix A from."""
    names: dict[str, None] = {}
    for instruction in entry.instructions:
        if instruction.opcode.startswith("wgmma.mma_async"):
            vectors = [operand for operand in instruction.operands[:2] if isinstance(operand, Vector)]
            names |= dict.fromkeys(registers_of(tuple(vectors)))
    return {name: 1 << i for i, name in enumerate(names)}


def registers_of(operands: tuple) -> list[str]:
    """The names of all registers in operands, also in vectors and addresses."""
    found = []
    for operand in operands:
        if isinstance(operand, Register):
            found.append(operand.name)
        elif isinstance(operand, tuple):
            found += registers_of(operand)
    return found


class WgmmaRegisters:
    """The registers of one CTA's warp groups."""

    def __init__(self, num_warps: int, found: Callable[[Fault], None]):
        """found: gets the faults, and raises most of them"""
        self._found = found
        # Registers that were accessed since the last wgmma.fence, of each warp. "The wgmma.fence instruction must be
        # issued by all warps of the warpgroup [...] Before the first wgmma.mma_async operation in a warpgroup."
        self.unfenced = [_ALL] * num_warps
        self.open: dict[int, list[Product]] = collections.defaultdict(list)  # by warp group
        self.committed: dict[int, list[list[Product]]] = collections.defaultdict(list)
        self.busy: dict[int, int] = collections.defaultdict(int)  # all registers of the above

    def touch(self, warps: list[int], bits: int, is_move: bool) -> None:
        """Threads of the warps execute an instruction that reads or writes these registers.

        Compilers put moves between wgmma.fence and wgmma, which assemblers remove: a move needs no fence.
        """
        for warp in warps:
            if self.busy[warp // WARPS] & bits:
                self._in_use(warp // WARPS, bits)
            if not is_move:
                self.unfenced[warp] |= bits

    def _in_use(self, group: int, bits: int) -> None:
        """Reports an access of a pending product's register."""
        # "Accessing the accumulator register or the input register containing the fragments of matrix A of a
        # wgmma.mma_async instruction without first performing a wgmma.wait_group instruction that waits on a
        # wgmma-group including that wgmma.mma_async instruction is undefined behavior." (PTX, wgmma.wait_group)
        product = next(product for product in self._pending(group) if (product.accumulator | product.a) & bits)
        self._found(
            Fault(
                "wgmma-registers",
                "a register of a wgmma that may not be complete is accessed; a wgmma.wait_group of its group must be "
                "in between",
                second=product.place(),
                second_is="the wgmma",
            )
        )

    def issue(self, group: int, product: Product) -> None:
        """Adds a pending product. Reports a fence or a wait that is missing before it."""
        # "Between a register access by a thread in the warpgroup and any wgmma.mma_async instruction that accesses the
        # same registers, either as accumulator or input register containing fragments of matrix A, except when these
        # are accumulator register accesses across multiple wgmma.mma_async instructions of the same shape."
        # (PTX, wgmma.fence)
        for warp in range(WARPS * group, WARPS * group + WARPS):
            if self.unfenced[warp] & (product.accumulator | product.a):
                why = "it is the first one" if self.unfenced[warp] == _ALL else "its registers were accessed before"
                self._found(
                    Fault("wgmma-fence", f"a wgmma needs a wgmma.fence before it, because {why}, in warp {warp}")
                )
        if self.busy[group] & (product.accumulator | product.a):
            for other in self._pending(group):
                if other.accumulator & product.a or other.a & product.accumulator:
                    self._in_use(group, product.accumulator | product.a)
                if other.accumulator & product.accumulator and other.shape != product.shape:
                    self._found(
                        Fault(
                            "wgmma-registers",
                            f"a wgmma of shape {product.shape} uses the accumulator of a pending one of shape "
                            f"{other.shape}: a wgmma.wait_group and a wgmma.fence must be in between",
                            second=other.place(),
                            second_is="the pending one",
                        )
                    )
        self.open[group].append(product)
        self.busy[group] |= product.accumulator | product.a

    def fence(self, warps: list[int]) -> None:
        for warp in warps:
            self.unfenced[warp] = 0

    def commit(self, group: int) -> None:
        self.committed[group].append(self.open[group])
        self.open[group] = []

    def wait(self, group: int, allowed: int) -> None:
        """Forgets all committed groups but the latest `allowed` ones."""
        committed = self.committed[group]
        del committed[: max(len(committed) - allowed, 0)]
        self.busy[group] = 0
        for product in self._pending(group):
            self.busy[group] |= product.accumulator | product.a

    def _pending(self, group: int) -> list[Product]:
        return [product for products in (*self.committed[group], self.open[group]) for product in products]
