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
            for shape, name in op.model_shapes(model, count).items():
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
    suffix = Path(text).suffix.lower()
    if suffix in (".yaml", ".yml"):
        return _from_yaml(op, Path(text))
    if suffix == ".csv":
        return _from_csv(op, Path(text))
    return [_shape(op, part, "--shapes") for part in text.split(",")]


def _from_yaml(op: Operation, path: Path) -> list[tuple[int, ...]]:
    """A list of "8192x4096" or {m: 8192, n: 4096}; or a mapping in which the operation's name has such a list."""
    import yaml

    try:
        content = yaml.safe_load(_text(path))
    except yaml.YAMLError as error:
        raise ValueError(f"--shapes {path}: not YAML: {error}") from error
    if isinstance(content, Mapping):
        if op.name not in content:
            raise ValueError(f"--shapes {path}: has no {op.name}; it has {', '.join(map(str, content)) or 'nothing'}")
        content = content[op.name]
    if not isinstance(content, list) or not content:
        raise ValueError(f"--shapes {path}: expected a list of shapes such as {_example(op)}, got {content!r}")
    return [_shape(op, entry, f"--shapes {path}: entry {i}") for i, entry in enumerate(content, 1)]


def _from_csv(op: Operation, path: Path) -> list[tuple[int, ...]]:
    """A column for each dimension, under its name; other columns are left alone."""
    reader = csv.DictReader(_text(path).splitlines(), skipinitialspace=True)
    columns = [name.strip() for name in reader.fieldnames or []]
    if absent := [dim for dim in op.dims if dim not in columns]:
        raise ValueError(
            f"--shapes {path}: has no column {', '.join(absent)}; it has {', '.join(columns) or 'none'}, "
            f"expected {', '.join(op.dims)}"
        )
    reader.fieldnames = columns
    return [_shape(op, row, f"--shapes {path}:{reader.line_num}") for row in reader]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ValueError(f"--shapes {path}: {error.strerror}") from error


def _shape(op: Operation, entry: str | Mapping, where: str) -> tuple[int, ...]:
    try:
        if isinstance(entry, Mapping):
            shape = parse_shape(shape_name(tuple(int(entry[dim]) for dim in op.dims)))
        else:
            shape = parse_shape(entry)
        expected = too_large(shape) if len(shape) == len(op.dims) else _example(op)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        expected = _example(op)
    if expected:
        raise ValueError(f"{where}: {entry!r} is no shape of {op.name}; expected {expected}")
    return shape


def _example(op: Operation) -> str:
    sizes = {"m": 8192, "n": 4096, "h": 4096, "v": 128256}
    return f"{'x'.join(map(str.upper, op.dims))} such as {shape_name(tuple(sizes[dim] for dim in op.dims))}"
