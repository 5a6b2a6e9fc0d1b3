"""What threads wait for when none can go on."""

from typing import NamedTuple

from quackish.emulator.errors import Fault
from quackish.emulator.threads import WARP, Cta, place_of, warp_masks, whole_warps

_MOST_GROUPS = 24  # in a message
_MOST_CTAS = 4  # that a line names
_CONVERGENCE = {
    "": "",
    "members": "the threads of their member mask",
    "warp": "the other threads of their warp",
    "warp group": "the other threads of their warp group",
}


class _Wait(NamedTuple):
    """What threads of a CTA wait for. Of CTAs that differ in nothing, it is the same."""

    rank: int  # of the CTA in its cluster
    threads: str
    what: str
    location: str


def fault(ctas: list[Cta], not_begun: str) -> Fault:
    """The Fault about CTAs that cannot go on. not_begun: why others have not begun, or ""."""
    lines = [f"  {not_begun}"] if not_begun else []
    groups: dict[_Wait, list[Cta]] = {}
    for cta in ctas:
        for wait in _waits(cta):
            groups.setdefault(wait, []).append(cta)
    lines += [_line(wait, group) for wait, group in groups.items()][:_MOST_GROUPS]
    if len(groups) > _MOST_GROUPS:
        lines.append(f"  and {len(groups) - _MOST_GROUPS} more")
    details = "\n".join(lines)
    if (found := _absent_lanes(ctas)) is not None:
        found.details = details
        return found
    loops = any(cta.grid.converged(cta, *fragment) for cta in ctas for fragment in cta.fragments.items())
    why = "threads loop, and no other thread will change what they wait for" if loops else "no thread can go on"
    return Fault("deadlock", why, details=details)


def _line(wait: _Wait, ctas: list[Cta]) -> str:
    """A line about the CTAs whose threads wait for the same."""
    if len(ctas) == 1:
        who = ctas[0].describe()
        return f"  {who}, {wait.threads}: {wait.what.replace(_ITS_CTA, str(ctas[0]))}\n    at {wait.location}"
    named = ", ".join(str(cta.index) for cta in ctas[:_MOST_CTAS])
    more = f" and {len(ctas) - _MOST_CTAS} more" if len(ctas) > _MOST_CTAS else ""
    rank = f", rank {wait.rank} of their clusters" if ctas[0].cluster.size > 1 else ""
    return f"  {len(ctas)} CTAs, {named}{more}{rank}, {wait.threads} of each: {wait.what}\n    at {wait.location}"


_ITS_CTA = "its CTA"


def _waits(cta: Cta) -> list[_Wait]:
    """What the threads of a CTA wait for."""
    program = cta.grid.program
    waits: dict[tuple[str, str], int] = {}  # (what they do, where) -> threads
    for parked in cta.parked:
        key = parked.reason().replace(str(cta), _ITS_CTA), parked.location
        waits[key] = waits.get(key, 0) | parked.mask
    for block, mask in cta.fragments.items():
        current = program.blocks[block]
        together = cta.grid.converged(cta, block, mask)
        location = program.location(block, 0) if current.size else "the end"
        if together:
            waits["poll memory" if current.polls else "loop", location] = together
        if mask & ~together:
            others = _CONVERGENCE[current.converged]
            waits[f"wait for {others} to come to the same instruction", location] = mask & ~together
    return [
        _Wait(cta.rank, cta.lanes(mask).describe(), what, location)
        for (what, location), mask in sorted(waits.items(), key=lambda item: item[1] & -item[1])
    ]


def _absent_lanes(ctas: list[Cta]) -> Fault | None:
    """The Fault about parts of a warp that wait for each other, each at another instruction of the whole warp."""
    for cta in ctas:
        parts = {block: mask & ~cta.grid.converged(cta, block, mask) for block, mask in cta.fragments.items()}
        for warp in warp_masks(cta.live):
            here = {block: mask & warp for block, mask in sorted(parts.items()) if mask & warp}
            if len(here) < 2 or sum(here.values()) != cta.live & warp:
                continue
            for block, mask in here.items():
                if missing := _members(cta, block, mask) & warp & ~mask:
                    other, elsewhere = next(item for item in here.items() if item[1] & missing)
                    return _of_absent_lanes(cta, (block, mask), (other, elsewhere), missing)
    return None


def _members(cta: Cta, block: int, mask: int) -> int:
    """The live threads that the first instruction of a block names in its member mask; 0 if it has none."""
    current = cta.grid.program.blocks[block]
    if not current.instructions[0].opcode.startswith(_WITH_MEMBERS):
        return 0
    if current.members is None:  # the constant of all lanes
        return whole_warps(mask) & cta.live
    lanes = cta.lanes(mask)
    (warp,) = lanes.warps()
    return int(lanes.active(current.members(lanes))[0]) << WARP * warp & cta.live


def _of_absent_lanes(cta: Cta, here: tuple[int, int], elsewhere: tuple[int, int], missing: int) -> Fault:
    """The Fault about threads at a block, and others of its member mask at another one. here: (block, threads)"""
    lanes = cta.lanes(here[1])
    opcode = cta.grid.program.blocks[here[0]].instructions[0].opcode
    such = "; cute.arch.warp_idx() is such an instruction" if opcode == "shfl.sync.idx.b32" else ""
    return Fault(
        "absent-lanes",
        f"{lanes.describe()} alone come to {opcode}, whose member mask also names {cta.lanes(missing).describe()}, "
        "which wait elsewhere",
        advice=f"execute it where all of these lanes come, not behind a branch that depends on the lane{such}",
        second=place_of(cta.lanes(elsewhere[1]), elsewhere[0], 0),
        second_is="the other instruction",
        place=place_of(lanes, here[0], 0),
    )


# Instructions with a member mask
_WITH_MEMBERS = ("shfl.sync", "vote.sync", "redux.sync", "elect.sync", "bar.warp.sync")
