"""Where a barrier is missing, if two threads race."""

from typing import Any, NamedTuple

from quackish.emulator.errors import Place, ordinal


class Access(NamedTuple):
    """One of the two accesses of a race."""

    warp: int  # its number in the cluster
    place: Place


def barrier_between(cluster: Any, now: Access, earlier: Access) -> str:
    """Between which executions of instructions a barrier belongs; "" if no warp executes both instructions.

    A barrier puts accesses in the order of the program. This run may have come to them in the other order: a warp that
    has come to `now` may be behind the warp of `earlier`.
    """
    if _count(cluster, now.warp, earlier.place, now.place.ptx_line) >= earlier.place.execution:
        first, second = earlier.place, now.place
    elif _count(cluster, earlier.warp, now.place) >= now.place.execution:
        first, second = now.place, earlier.place
    else:
        return ""
    kind = "barrier"
    if now.warp == earlier.warp:
        kind = "barrier of the warp (bar.warp.sync)"
    elif now.place.cta != earlier.place.cta:
        kind = "barrier of the cluster"
    if max(first.execution, second.execution) == 1:
        return f"a {kind} belongs between {_line(first)} and {_line(second)}"
    return (
        f"a {kind} belongs between the {ordinal(first.execution)} execution of {_line(first)} and the "
        f"{ordinal(second.execution)} execution of {_line(second)}"
    )


def _count(cluster: Any, warp: int, place: Place, now: int = 0) -> int:
    """How often a warp of the cluster has executed the instruction at a place: see `Cta.executions`."""
    ctas = cluster.ctas
    rank, warp = divmod(warp, ctas[0].num_warps)
    return ctas[rank].executions(warp, place.ptx_line, now)


def _line(place: Place) -> str:
    return f"line {place.line}" if place.file else f"PTX line {place.ptx_line}"
