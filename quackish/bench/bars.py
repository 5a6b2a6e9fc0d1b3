"""Verdicts: whether what was measured keeps a bar."""

import math
from collections.abc import Callable, Mapping, Sequence

from quackish.bench.cells import OURS, Cell, is_ours
from quackish.bench.results import Results

Verdict = tuple[str, str]  # PASS or FAIL, and what was found


def verdict(kept: bool, text: str) -> Verdict:
    return "PASS" if kept else "FAIL", text


def at_most(value: float | None, bar: float, text: str, unit: str = "") -> list[Verdict]:
    """Nothing if there is no value."""
    return [] if value is None else [verdict(round(value, 9) <= bar, f"{text}: {value:.4f}{unit}, bar {bar:g}{unit}")]


def faster(ours: float, peers: Mapping[str, float], text: str) -> list[Verdict]:
    """Whether we are faster than the fastest peer; nothing if there is none."""
    if not peers:
        return []
    best = min(peers, key=peers.__getitem__)
    found = f"{ours:.3f} ms, {best} {peers[best]:.3f} ms"
    return [verdict(ours < peers[best], f"{text}: {found} ({ours / peers[best]:.3f}), of {len(peers)}")]


def faster_than_peers(results: Results, cell: Cell, text: str) -> list[Verdict]:
    if OURS not in results.cells.get(cell, {}):
        return []
    peers = {name: results.ms(cell, name) for name in results.providers([cell]) if not is_ours(name)}
    return faster(results.ms(cell, OURS) or math.inf, peers, text)


def dominated(results: Results, cell: Cell, text: str) -> list[Verdict]:
    """Whether, for each peer's point in time and memory, a point of ours is no slower and no larger."""
    peers, free = results.peers(cell), results.not_dominated(cell)
    if not peers or len(peers) == len(results.points(cell)):
        return []
    found = f"{text}: {len(peers) - len(free)} of {len(peers)} peers' points dominated by one of ours"
    return [verdict(not free, found + (f"; not {', '.join(free)}" if free else ""))]


def every(
    results: Results, cells: Sequence[Cell], limit: float, text: str, ms_of: Callable[[Cell], float | None]
) -> list[Verdict]:
    """Whether our time is at most `limit` times `ms_of` in every cell that has one."""
    others = {cell: ms for cell in cells if (ms := ms_of(cell))}
    if not others:
        return []

    def ratio(cell: Cell) -> float:  # a cell that we failed to run is lost, not left out
        return round((results.ms(cell, OURS) or math.inf) / others[cell], 9)

    def both(cell: Cell) -> str:  # with all digits of the file, as the last one may decide
        ours = results.ms(cell, OURS)
        times = f"{1e3 * ours:.6g} us for {1e3 * others[cell]:.6g} us" if ours else "failed"
        return f"{ratio(cell):.4f} ({times}) at {' x '.join(map(str, cell.shape))} {cell.dtype}"

    missed = sorted((cell for cell in others if ratio(cell) > limit), key=ratio, reverse=True)
    found = f"{len(others) - len(missed)} of {len(others)} cells, worst {both(max(others, key=ratio))}"
    if missed[1:]:
        found += f"; missed also in {'; '.join(map(both, missed[1:]))}"
    return [verdict(not missed, f"{text}: {found}")]
