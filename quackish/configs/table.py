"""The user's table of measured rows: for this problem, on this GPU, this config was faster than the analytical choice.

It is `tuned.json` in the user's config folder or in QUACKISH_CONFIG_DIR; `python -m quackish tune` writes it. A row
counts for the GPU (name and target) that it was measured on, with the same quackish, DSL and CUDA. It is independent
of the number of rows (M), and of whether they are packed: a row of a norm's result has the same bits in any batch and
layout.
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

    def counts(self) -> bool:
        """Whether this toolchain made it."""
        return self.toolchain == toolchain.versions()


def make_row(kernel: str, problem: Any, gpu: Gpu, config: Any, measured: str) -> Row:
    made_with, fields = toolchain.versions(), dataclasses.asdict(config)
    return Row(kernel, gpu.name, gpu.target, made_with, _fields(problem), fields, measured)


def find(kernel: str, problem: Any, gpu: Gpu) -> Row | None:
    """The row that counts for `problem` on `gpu`."""
    if not rows():
        return None
    key = Row(kernel, gpu.name, gpu.target, {}, _fields(problem), {}, "").key
    return next((row for row in rows() if row.key == key and row.counts()), None)


def _fields(problem: Any) -> dict[str, Any]:
    fields = dataclasses.asdict(problem)
    return fields | {"packed": True} if "packed" in fields else fields


# The file ------------------------------------------------------------------------------------------------------------


def path() -> Path:
    import platformdirs

    return Path(os.environ.get("QUACKISH_CONFIG_DIR") or platformdirs.user_config_dir("quackish")) / "tuned.json"


@functools.cache
def rows() -> list[Row]:
    """Read once a process, until `rows.cache_clear()`."""
    return read()


def read() -> list[Row]:
    """Empty without a file, and with one warning if it is damaged."""
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
    """Replaces the row for the same problem, GPU and toolchain, or with keep=False removes it; whether there was one.

    The file is written whole or not at all. Raises OSError.
    """
    before = read()
    after = [other for other in before if (other.key, other.toolchain) != (row.key, row.toolchain)]
    found = len(after) < len(before)
    if keep or found:
        after += [row] * keep
        content = json.dumps({"format": _FORMAT, "rows": [dataclasses.asdict(row) for row in after]}, indent=1) + "\n"
        path().parent.mkdir(parents=True, exist_ok=True)
        files.write(path(), content.encode())
    return found
