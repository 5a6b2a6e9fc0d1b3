"""What the user asks for as shapes: named models, "8192x4096,..." or a YAML or CSV file."""

import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from quackish.bench import models
from quackish.bench.cells import parse_shape, shape_name, too_large
from quackish.bench.operations import Operation

Shapes = dict[tuple[int, ...], str]  # with what each is: names of models, "" for the user's own


def wanted(op: Operation, patterns: Sequence[str], tokens: Sequence[int], own: Sequence[str]) -> Shapes:
    """The models' shapes for each number of tokens, then the user's; each shape once, with all its names."""
    names: dict[tuple[int, ...], list[str]] = {}
    for model in models.find(patterns):
        for count in tokens:
            for shape, name in model.shapes(count, len(op.dims)).items():
                if expected := too_large(shape):
                    raise ValueError(f"--tokens {count}: {name} is {shape_name(shape)}; expected {expected}")
                names.setdefault(shape, []).append(name)
    for text in own:
        for shape in _own(op, text):
            names.setdefault(shape, [])
    return {shape: ", ".join(dict.fromkeys(of)) for shape, of in names.items()}


def small(op: Operation, shapes: Iterable[tuple[int, ...]]) -> Shapes:
    """The same, each size cut to what a CPU does in a moment."""
    return {tuple(map(min, shape, op.small)): "" for shape in shapes}


def _own(op: Operation, text: str) -> list[tuple[int, ...]]:
    """Shapes as words, or a file: a YAML list (or one under the operation's name), or a CSV with op.dims as columns."""
    path, where = Path(text), f"--shapes {text}"
    if path.suffix.lower() not in (".yaml", ".yml", ".csv"):
        return [_shape(op, part, "--shapes") for part in text.split(",")]
    import yaml

    try:
        content = path.read_text(encoding="utf-8-sig")
        if path.suffix.lower() == ".csv":
            entries = list(csv.DictReader(content.splitlines(), skipinitialspace=True))
        else:
            entries = yaml.safe_load(content)
    except (OSError, yaml.YAMLError) as error:
        raise ValueError(f"{where}: {error}") from error
    if isinstance(entries, Mapping):
        entries = entries.get(op.name)
    if not isinstance(entries, list) or not entries:
        raise ValueError(f"{where}: expected a list of shapes of {op.name}, {_example(op)}; got {content[:200]!r}")
    return [_shape(op, entry, f"{where}: entry {i}") for i, entry in enumerate(entries, 1)]


def _shape(op: Operation, entry: str | Mapping, where: str) -> tuple[int, ...]:
    expected = _example(op)
    try:
        text = shape_name([int(entry[dim]) for dim in op.dims]) if isinstance(entry, Mapping) else entry
        shape = parse_shape(text)
        if len(shape) == len(op.dims):
            expected = too_large(shape)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        pass
    if expected:
        raise ValueError(f"{where}: {entry!r} is no shape of {op.name}; expected {expected}")
    return shape


def _example(op: Operation) -> str:
    """ "MxN such as 8192x4096"."""
    sizes = {"m": 8192, "n": 4096, "h": 4096, "v": 128256}
    return f"{'x'.join(map(str.upper, op.dims))} such as {shape_name([sizes[dim] for dim in op.dims])}"
