"""Tables of measured rows: for this problem, on this GPU, this config was faster than the analytical choice.

The user's is `tuned.json` in the user's config folder or in QUACKISH_CONFIG_DIR; `python -m quackish tune` writes it.
The shipped one lies beside this file under the same name, so a row for everybody is made by
`QUACKISH_CONFIG_DIR=quackish/configs python -m quackish tune ...`.

A row counts for the GPU (name and target) that it was measured on. Of the user's table, only rows count that the same
quackish, DSL and CUDA made; of the shipped one all do. How many rows (M) a call has is in no row, nor whether these lie
packed: a row of a norm's result has the same bits in any batch and from anywhere.
"""

import dataclasses
import functools
import json
import os
from pathlib import Path
from typing import Any

from quackish import files, toolchain
from quackish.errors import warn_once
from quackish.gpu import Gpu

_FORMAT = 1
_NAME = "tuned.json"


@dataclasses.dataclass(frozen=True)
class Row:
    kernel: str  # a name of kernels.find()
    gpu: str  # Gpu.name
    target: str
    toolchain: dict[str, str]
    problem: dict[str, Any]
    config: dict[str, Any]
    measured: str  # a sentence: when, on what, what was gained

    @property
    def key(self) -> str:
        return json.dumps([self.kernel, self.gpu, self.target, self.problem], sort_keys=True)


class Table:
    """The rows of one file; `find` is for those that count."""

    def __init__(self, path: Path, rows: list[Row], any_toolchain: bool):
        self.path, self.rows, self._any_toolchain = path, rows, any_toolchain
        self._of_key = {row.key: row for row in rows if self.counts(row)}

    def counts(self, row: Row) -> bool:
        return self._any_toolchain or row.toolchain == toolchain.versions()

    def find(self, kernel: str, problem: Any, gpu: Gpu) -> Row | None:
        return self._of_key.get(make_row(kernel, problem, gpu).key) if self._of_key else None


def make_row(kernel: str, problem: Any, gpu: Gpu, config: Any = None, measured: str = "") -> Row:
    if getattr(problem, "packed", True) is False:
        problem = dataclasses.replace(problem, packed=True)
    fields = {} if config is None else dataclasses.asdict(config)
    made_with = {} if config is None else toolchain.versions()
    return Row(kernel, gpu.name, gpu.target, made_with, dataclasses.asdict(problem), fields, measured)


# Files ---------------------------------------------------------------------------------------------------------------


def user_path() -> Path:
    import platformdirs

    return Path(os.environ.get("QUACKISH_CONFIG_DIR") or platformdirs.user_config_dir("quackish")) / _NAME


@functools.cache
def user() -> Table:
    """Read once a process; see `forget`."""
    return read(user_path(), any_toolchain=False)


@functools.cache
def shipped() -> Table:
    return read(Path(__file__).with_name(_NAME), any_toolchain=True)


def forget() -> None:
    """Both are read again when they are next asked for."""
    user.cache_clear()
    shipped.cache_clear()


def read(path: Path, any_toolchain: bool = False) -> Table:
    """No rows where there is no file, and where it is damaged, with one warning."""
    rows = []
    try:
        rows = _rows(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        pass
    except (OSError, ValueError, TypeError, KeyError) as error:
        reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        warn_once(
            f"The table of tuned configs {path} is not used, analytical choices are ({reason}). "
            "`python -m quackish tune --clear` removes it.",
            RuntimeWarning,
        )
    return Table(path, rows, any_toolchain)


def _rows(content: Any) -> list[Row]:
    if not isinstance(content, dict) or content["format"] != _FORMAT:
        raise ValueError(f"its format is not {_FORMAT}")
    rows = [Row(**row) for row in content["rows"]]
    for row in rows:
        for field in dataclasses.fields(Row):
            value = getattr(row, field.name)
            if not isinstance(value, str if field.type is str else dict):
                raise ValueError(f"{field.name} of a row is {value!r}")
    return rows


def write(path: Path, rows: list[Row]) -> None:
    """Whole or not at all. Raises OSError."""
    content = json.dumps({"format": _FORMAT, "rows": [dataclasses.asdict(row) for row in rows]}, indent=1) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write(path, content.encode())


def add(path: Path, row: Row) -> None:
    """Puts `row` into the file, in place of one for the same problem, GPU and toolchain. Raises OSError."""
    write(path, _others(path, row) + [row])


def remove(path: Path, row: Row) -> bool:
    """Takes the row out that is for the same as `row`; whether there was one. Raises OSError."""
    others = _others(path, row)
    if found := len(others) < len(read(path).rows):
        write(path, others)
    return found


def _others(path: Path, row: Row) -> list[Row]:
    return [other for other in read(path).rows if (other.key, other.toolchain) != (row.key, row.toolchain)]
