"""Loads of tensor memory that write their registers later than at their instruction, as late as the PTX manual permits.

"For tcgen05.ld, an intra-thread ordering through true register dependency will be respected regardless of the presence
or absence of other forms of synchronization." (PTX, Register dependencies, same thread) So a load finishes when its
warp waits for it, or computes with one of its registers. Compilers put moves of these registers in front of the wait,
which assemblers remove, so a move does not finish a load: it is done after it.
"""

import functools
from collections.abc import Callable, Iterable

from quackish.emulator.threads import Cta, Lanes, warp_mask

Register = tuple[str, int]  # width, row


class Load:
    """A load of one warp that has not finished."""

    def __init__(self, registers: Iterable[Register], steps: list[Callable[[], None]], number: int):
        self.registers = set(registers)  # the registers that it writes, and those that these are moved to
        self.steps = steps  # the load and the moves, to be done; empty if work completes at once
        self.number = number  # its number among the warp's loads, for `tensor_races`


def begin(cta: Cta, warp: int, registers: Iterable[Register], load: Callable[[], None], number: int) -> None:
    """Loads now, or with late completion when the warp needs it. Loads that nothing needs are dropped."""
    steps = []
    if cta.grid.completion.late:
        steps.append(cta.grid.completion.located(load))
    else:
        load()
    cta.pending_loads.setdefault(warp, []).append(Load(registers, steps, number))


def finish(lanes: Lanes, register: Register | None = None) -> None:
    """Finishes these warps' loads, up to the latest one that writes the register; without a register, all."""
    cta = lanes.cta
    for warp in lanes.warps():
        loads = cta.pending_loads.get(warp, [])
        count = len(loads) if register is None else _position(loads, {register})
        if count:
            del cta.pending_loads[warp]  # so that the moves finish no load
            for load in loads[:count]:
                for step in load.steps:
                    step()
                cta.tensor_races.loaded(warp, load.number)
            if count < len(loads):
                cta.pending_loads[warp] = loads[count:]


def defer(lanes: Lanes, sources: set[Register], targets: set[Register], move: Callable[[Lanes], None]) -> bool:
    """Makes a move wait for the load of its sources. False if no single pending load writes them all."""
    cta, found = lanes.cta, []
    for warp in lanes.warps():
        loads = cta.pending_loads.get(warp, [])
        position = _position(loads, sources)
        if not position:
            return False
        found.append((loads[position - 1], cta.lanes(lanes.mask & warp_mask(warp))))
    for load, part in found:
        load.registers |= targets
        if cta.grid.completion.late:
            load.steps.append(functools.partial(cta.uninitialized.follow, part, move, cta.grid.flow))
    if not cta.grid.completion.late:
        pending, cta.pending_loads = cta.pending_loads, {}  # so that the move finishes no load
        move(lanes)
        cta.pending_loads = pending
    return True


def _position(loads: list[Load], registers: set[Register]) -> int:
    """The number of loads up to the latest one that writes all these registers."""
    return max((i for i, load in enumerate(loads, 1) if registers <= load.registers), default=0)
