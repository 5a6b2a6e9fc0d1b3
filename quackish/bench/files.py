"""The files of results: CSV that survives a killed run, and Markdown."""

import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path


class CsvLog:
    """A CSV file with a fixed header, flushed with every write: a run that is killed keeps what it measured.

    With `append` the rows that the file has are kept; where they have another header it is a ValueError.
    """

    def __init__(self, path: Path, fields: Sequence[str], constants: Mapping[str, str], append: bool = False):
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self._constants = path, constants
        append = append and path.exists()
        if append:
            with path.open(newline="") as file:
                header = next(csv.reader(file), [])
            if header != list(fields):
                raise ValueError(f"{path}: its columns are {', '.join(header)}; expected {', '.join(fields)}")
        self._file = path.open("a" if append else "w", newline="")
        self._writer = csv.DictWriter(self._file, fields)
        if not append:
            self._writer.writeheader()

    def write(self, rows: Iterable[Mapping[str, object]]) -> None:
        for row in rows:
            self._writer.writerow({key: _plain(value) for key, value in {**self._constants, **row}.items()})
        self._file.flush()


def _plain(value: object) -> object:
    return float(f"{value:.6g}") if isinstance(value, float) else value


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines) + "\n"
