"""Which cells are drawn together: families that differ in one dimension, a panel each."""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from quackish.bench.cells import Cell, shape_name
from quackish.bench.results import Results

COLUMNS = 5  # of panels, at most


class Panel(NamedTuple):
    cells: list[Cell]
    axis: int | None  # the dimension in which they differ; None where it is more than one
    row: int
    column: int

    @property
    def xs(self) -> list[int]:
        return [i if self.axis is None else cell.shape[self.axis] for i, cell in enumerate(self.cells)]

    @property
    def ticks(self) -> list[str]:
        """Sizes as "8k"; k is 1000 for vocabularies, which are no powers of two."""
        if self.axis is None:
            return [shape_name(cell.shape) for cell in self.cells]
        k = 1000 if self.axis == 2 else 1024
        return [f"{x / k:.3g}k" if x >= k else str(x) for x in self.xs]

    def title(self, dims: Sequence[str]) -> str:
        """The direction, and what all have in common: "backward, N 4096"."""
        cell, axis = self.cells[0], self.axis
        sizes = (
            []
            if axis is None
            else [f"{d.upper()} {n}" for d, n in zip(dims, cell.shape, strict=True) if d != dims[axis]]
        )
        return ", ".join([cell.direction, *sizes, *([] if cell.dtype == "bfloat16" else [cell.dtype])])


def panels(results: Results) -> list[Panel]:
    """Every cell in at least one; another direction or dtype begins a new row."""
    found: list[Panel] = []
    for cells in results.groups().values():
        row = found[-1].row + 1 if found else 0
        for i, (axis, family) in enumerate(_families(cells, len(results.op.dims))):
            found.append(Panel(family, axis, row + i // COLUMNS, i % COLUMNS))
    return found


def _families(cells: Sequence[Cell], dims: int) -> list[tuple[int | None, list[Cell]]]:
    """Lines along the rows where there are any, then along the other dimensions; what is on no line stays together."""
    families: list[tuple[int | None, list[Cell]]] = []
    covered: set[Cell] = set()
    for axis in range(dims):
        lines: dict[tuple[int, ...], list[Cell]] = defaultdict(list)
        for cell in cells:
            lines[cell.shape[:axis] + cell.shape[axis + 1 :]].append(cell)
        new = [line for line in lines.values() if len(line) > 1 and not covered.issuperset(line)]
        families += [(axis, sorted(line, key=lambda cell: cell.shape[axis])) for line in new]
        covered.update(cell for line in new for cell in line)
    rest = [cell for cell in cells if cell not in covered]
    return families + ([(None, rest)] if rest else [])
