"""The rows of a results file by cell and provider."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from quackish.bench import schema
from quackish.bench.cells import Cell
from quackish.bench.measured import AGAIN, OURS, is_ours
from quackish.bench.operations import Operation

Row = Mapping[str, str]


class Results:
    """Of rows for the same cell and provider the last one counts."""

    def __init__(self, op: Operation, rows: Sequence[Row]):
        self.op, self.rows = op, rows
        self.scale = {"us": 1e3, "ms": 1.0}[op.unit]  # from the columns' milliseconds to what people read
        self.cells: dict[Cell, dict[str, Row]] = defaultdict(dict)
        for row in rows:
            self.cells[schema.cell_of(row)][row["provider"]] = row

    def value(self, cell: Cell, provider: str, column: str) -> float | None:
        value = self.cells.get(cell, {}).get(provider, {}).get(column)
        return float(value) if value else None

    def ms(self, cell: Cell, provider: str) -> float | None:
        return self.value(cell, provider, "median_ms")

    def roof(self, cell: Cell) -> str:
        return self.op.roofs[cell.direction]

    def groups(self) -> dict[tuple[str, str], list[Cell]]:
        """The cells by (direction, dtype), each group sorted by the sizes that are not rows, then by rows."""
        groups: dict[tuple[str, str], list[Cell]] = defaultdict(list)
        for cell in sorted(self.cells, key=lambda cell: (cell.shape[1:], cell.shape[0])):
            groups[cell.direction, cell.dtype].append(cell)
        order = list(self.op.directions.values())
        return dict(sorted(groups.items(), key=lambda item: order.index(item[0][0])))

    def providers(self, cells: Iterable[Cell]) -> list[str]:
        """Those with a time in any of `cells`: ours, the known ones in their own order, the user's."""
        rows = [row for cell in cells for row in self.cells[cell].values()]
        names = {row["provider"] for row in rows if row["role"] in schema.COMPETING and row["median_ms"]}
        order = {name: i for i, name in enumerate(self.op.providers)}
        return sorted(names, key=lambda name: (not is_ours(name), order.get(name, len(order)), name))

    def is_wrong(self, cell: Cell, provider: str) -> bool:
        return "wrong" in self.cells[cell].get(provider, {}).get("note", "")

    def best(self, cell: Cell, ours: bool) -> str | None:
        """The fastest of ours, or of all others, that is right; None where there is none."""
        names = [n for n in self.providers([cell]) if is_ours(n) == ours and not self.is_wrong(cell, n)]
        return min(names, key=lambda name: self.ms(cell, name), default=None)

    def failures(self) -> dict[tuple[str, str], list[Cell]]:
        """The cells of each (provider, reason)."""
        found: dict[tuple[str, str], list[Cell]] = defaultdict(list)
        for cell, rows in self.cells.items():
            for name, row in rows.items():
                if row["status"] != "ok":
                    found[name, row["status"]].append(cell)
        return found

    def noise(self) -> str:
        """How far apart two measurements of the same in the same turns were."""
        pairs = ((self.ms(cell, AGAIN), self.ms(cell, OURS)) for cell in self.cells)
        apart = sorted(abs(a / b - 1) for a, b in pairs if a and b)
        if not apart:
            return "noise: not measured"
        median, most = apart[len(apart) // 2], apart[-1]
        return f"noise: quackish twice in one cell differs by {median:.1%} (median), {most:.1%} (most)"
