"""Verdicts on targets, for the pages of the programs here."""

import math
from collections.abc import Callable, Iterable, Sequence

from quackish.bench.cells import OURS, Cell
from quackish.bench.report import Verdict
from quackish.bench.results import Results


def verdict(kept: bool, text: str) -> Verdict:
    return "PASS" if kept else "FAIL", text


def at_most(value: float | None, target: float, text: str, unit: str = "") -> list[Verdict]:
    """PASS if `value` is at most `target`. Empty without a value."""
    if value is None:
        return []
    return [verdict(round(value, 9) <= target, f"{text}: {value:.4f}{unit}, target {target:g}{unit}")]


def faster(results: Results, cell: Cell, name: str, peers: Iterable[str], text: str) -> list[Verdict]:
    """PASS if `name`, a provider of quackish, is faster than all `peers`. Empty without peers."""
    times = {peer: results.ms(cell, peer) for peer in peers}
    if not times or name not in results.cells[cell]:
        return []
    ours, best = results.ms(cell, name) or math.inf, min(times, key=times.__getitem__)
    numbers = f"{ours:.3f} ms, {best} {times[best]:.3f} ms ({ours / times[best]:.3f}), of {len(times)}"
    return [verdict(ours < times[best], f"{text}: {numbers}")]


def dominated(results: Results, cell: Cell, text: str) -> list[Verdict]:
    """PASS if for each peer a point of quackish is at least as good in both time and memory."""
    peers, better = results.peers(cell), results.not_dominated(cell)
    if not peers or len(peers) == len(results.points(cell)):
        return []
    count = f"{text}: {len(peers) - len(better)} of {len(peers)} peers' points dominated by one of ours"
    return [verdict(not better, count + (f"; not {', '.join(better)}" if better else ""))]


def every(
    results: Results, cells: Sequence[Cell], limit: float, text: str, ms_of: Callable[[Cell], float | None]
) -> list[Verdict]:
    """PASS if our time is at most `limit` times `ms_of(cell)` in every cell where that is not None."""
    theirs = {cell: ms for cell in cells if (ms := ms_of(cell))}
    if not theirs:
        return []

    def ratio(cell: Cell) -> float:  # inf for a cell that quackish failed to run
        return round((results.ms(cell, OURS) or math.inf) / theirs[cell], 9)

    def both(cell: Cell) -> str:  # prints all digits of the file, because the last one may decide
        ours = results.ms(cell, OURS)
        times = f"{1e3 * ours:.6g} us for {1e3 * theirs[cell]:.6g} us" if ours else "failed"
        return f"{ratio(cell):.4f} ({times}) at {' x '.join(map(str, cell.shape))} {cell.dtype}"

    missed = sorted((cell for cell in theirs if ratio(cell) > limit), key=ratio, reverse=True)
    summary = f"{len(theirs) - len(missed)} of {len(theirs)} cells, worst {both(max(theirs, key=ratio))}"
    if missed[1:]:
        summary += f"; missed also in {'; '.join(map(both, missed[1:]))}"
    return [verdict(not missed, f"{text}: {summary}")]
