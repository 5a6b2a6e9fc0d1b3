"""The user's table of tuned configs: (kernel, problem, GPU) -> a config measured faster than the analytical choice.

It is `tuned.json` in the user's config folder or in QUACKISH_CONFIG_DIR, written by `quackish tune`. An entry
is valid for the GPU (name and target) it was measured on, with the same versions of quackish, DSL and CUDA. It does not
depend on the number of rows (M) or whether they are packed, because the bits of a norm's row must not depend on these.
"""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

from quackish.device import files, toolchain, variables
from quackish.errors import warn_once
from quackish.gpu import Gpu

_FORMAT = 2


@dataclasses.dataclass(frozen=True)
class Row:
    """An entry of the table."""

    kernel: str  # KernelSpec.name
    gpu: str  # Gpu.name
    target: str
    toolchain: dict[str, str]
    problem: dict[str, Any]
    config: dict[str, Any]
    measured: str  # a sentence: date, hardware, speedup

    @property
    def key(self) -> str:
        """What a row is found by, beside the toolchain."""
        return json.dumps([self.kernel, self.gpu, self.target, self.problem], sort_keys=True)

    def is_current(self) -> bool:
        """True if it was measured with the installed toolchain."""
        return self.toolchain == toolchain.versions()


def make_row(problem: Any, gpu: Gpu, config: Any, measured: str) -> Row:
    """A row for the installed toolchain."""
    fields = dataclasses.asdict(config)
    return Row(problem.spec.name, gpu.name, gpu.target, toolchain.versions(), _fields(problem), fields, measured)


def find(problem: Any, gpu: Gpu) -> Row | None:
    """The row for `problem` on `gpu` with the installed toolchain; None if there is none."""
    if not rows():
        return None
    key = Row(problem.spec.name, gpu.name, gpu.target, {}, _fields(problem), {}, "").key
    return next((row for row in rows() if row.key == key and row.is_current()), None)


def _fields(problem: Any) -> dict[str, Any]:
    """A problem as the table has it: as if packed, because the config must not depend on that."""
    fields = _plain(problem)
    return fields | {"packed": True} if "packed" in fields else fields


def _plain(problem: Any) -> dict[str, Any]:
    """Like dataclasses.asdict, but parts of the problem keep the names of their classes."""
    fields = {field.name: getattr(problem, field.name) for field in dataclasses.fields(problem)}
    return {
        name: {type(value).__name__: _plain(value)} if dataclasses.is_dataclass(value) else value
        for name, value in fields.items()
    }


# The file ------------------------------------------------------------------------------------------------------------


def path() -> Path:
    """Where the table is, or would be."""
    import platformdirs

    return Path(variables.get(variables.CONFIG_DIR) or platformdirs.user_config_dir("quackish")) / "tuned.json"


@functools.cache
def rows() -> list[Row]:
    """The rows of the file, read once per process or `rows.cache_clear()`."""
    return read()


def read() -> list[Row]:
    """The rows of the file. Empty if there is no file; empty with one warning if it is damaged."""
    try:
        content = json.loads(path().read_text(encoding="utf-8"))
        if content["format"] != _FORMAT:
            raise ValueError(f"its format is not {_FORMAT}")
        return [Row(**row) for row in content["rows"]]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        warn_once(
            f"The table of tuned configs {path()} is not used, analytical choices are ({reason}). "
            "Delete it, or tune again.",
            RuntimeWarning,
        )
        return []


def put(row: Row, keep: bool = True) -> bool:
    """Replaces the row of the same problem, GPU and toolchain, or with keep=False removes it.

    Returns whether it existed. The file is written atomically. Raises OSError.
    """
    before = read()
    after = [other for other in before if (other.key, other.toolchain) != (row.key, row.toolchain)]
    existed = len(after) < len(before)
    if keep or existed:
        after += [row] * keep
        content = json.dumps({"format": _FORMAT, "rows": [dataclasses.asdict(row) for row in after]}, indent=1) + "\n"
        path().parent.mkdir(parents=True, exist_ok=True)
        files.write(path(), content.encode())
    return existed
