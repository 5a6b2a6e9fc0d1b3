"""The rows of a results file by cell and provider."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

from quackish.bench import schema
from quackish.bench.cells import Cell
from quackish.bench.measured import AGAIN, OURS, is_ours
from quackish.bench.operations import OPERATIONS
from quackish.bench.schema import Row

Point = tuple[float, float]  # milliseconds, GB


class Results:
    """Rows with the columns of schema.COLUMNS; the last row for a cell and provider counts."""

    def __init__(self, rows: Sequence[Row]):
        self.rows, self.op = rows, OPERATIONS[rows[0]["op"]]
        self.cells: dict[Cell, dict[str, Row]] = defaultdict(dict)
        for row in rows:
            self.cells[schema.cell_of(row)][row["provider"]] = row

    def scale(self, cell: Cell) -> tuple[float, str]:
        """From the columns' milliseconds to the unit that people read."""
        unit = "us" if cell.direction == "host" else self.op.unit
        return {"us": 1e3, "ms": 1.0}[unit], unit

    def value(self, cell: Cell, provider: str, column: str) -> float | None:
        value = self.cells.get(cell, {}).get(provider, {}).get(column)
        return float(value) if value else None

    def ms(self, cell: Cell, provider: str) -> float | None:
        return self.value(cell, provider, "median_ms")

    def ratio(self, cell: Cell, over: str, under: str) -> float | None:
        """Time of `over` divided by that of `under`; inf if `over` failed, None if either was not measured."""
        if over not in self.cells.get(cell, {}) or not (b := self.ms(cell, under)):
            return None
        return (self.ms(cell, over) or math.inf) / b

    def roof(self, cell: Cell) -> str:
        return self.op.roofs[cell.direction]

    def groups(self) -> dict[tuple[str, str], list[Cell]]:
        """The cells by (direction, dtype), each group sorted by the sizes that are not rows, then by rows."""
        groups: dict[tuple[str, str], list[Cell]] = defaultdict(list)
        for cell in sorted(self.cells, key=lambda cell: (cell.shape[1:], cell.shape[0], cell.data, cell.ignored)):
            groups[cell.direction, cell.dtype].append(cell)
        order = [*self.op.directions.values(), "host"]
        return dict(sorted(groups.items(), key=lambda item: order.index(item[0][0])))

    def providers(self, cells: Iterable[Cell]) -> list[str]:
        """Those with a time in any of `cells`: ours, the known ones in their own order, the user's."""
        rows = [row for cell in cells for row in self.cells.get(cell, {}).values()]
        names = {row["provider"] for row in rows if row["role"] in schema.COMPETING and row["median_ms"]}
        order = {name: i for i, name in enumerate(self.op.providers)}
        return sorted(names, key=lambda name: (not is_ours(name), order.get(name, len(order)), name))

    def is_wrong(self, cell: Cell, provider: str) -> bool:
        """Some error is NaN or too large to be rounding."""
        errors = (self.value(cell, provider, column) for column in schema.ERRORS)
        return any(not error <= schema.WRONG for error in errors if error is not None)

    def best(self, cell: Cell, ours: bool) -> str | None:
        """The fastest of ours, or of all others, whose results are right; None if there is none."""
        names = [n for n in self.providers([cell]) if is_ours(n) == ours and not self.is_wrong(cell, n)]
        return min(names, key=lambda name: self.ms(cell, name), default=None)

    def points(self, cell: Cell) -> dict[str, Point]:
        """Time and memory of each provider that has both."""
        both = {name: (self.ms(cell, name), self.value(cell, name, "peak_mb")) for name in self.providers([cell])}
        return {name: (ms, mb / 1e3) for name, (ms, mb) in both.items() if ms and mb}

    def peers(self, cell: Cell) -> dict[str, Point]:
        return {name: point for name, point in self.points(cell).items() if not is_ours(name)}

    def not_dominated(self, cell: Cell) -> list[str]:
        """Peers' points for which no point of ours is at most as slow and as large, as name, time and memory."""
        ours = [point for name, point in self.points(cell).items() if is_ours(name)]
        return [
            f"{name} ({ms:.4g} ms, {gb:.4f} GB{', wrong results' if self.is_wrong(cell, name) else ''})"
            for name, (ms, gb) in self.peers(cell).items()
            if not any(a <= ms and b <= gb for a, b in ours)
        ]

    def failures(self) -> dict[tuple[str, str], list[Cell]]:
        """The cells of each (provider, reason)."""
        found: dict[tuple[str, str], list[Cell]] = defaultdict(list)
        for cell, rows in self.cells.items():
            for name, row in rows.items():
                if row["status"] != "ok":
                    found[name, row["status"]].append(cell)
        return found

    def noise(self) -> str:
        """How far apart two measurements of the same work in the same turns were."""
        ratios = (self.ratio(cell, AGAIN, OURS) for cell in self.cells)
        apart = sorted(abs(ratio - 1) for ratio in ratios if ratio is not None and ratio < math.inf)
        if not apart:
            return "noise: not measured"
        median, most = apart[len(apart) // 2], apart[-1]
        return f"noise: quackish twice in one cell differs by {median:.1%} (median), {most:.1%} (most)"
