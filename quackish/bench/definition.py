"""How an operation is measured: directions, roofs and providers. See quackish/ops/*/measure.py."""

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

from quackish.bench.cells import match
from quackish.ops.shared.for_tools import Operation, parse_shape
from quackish.ops.shared.models import MODELS, Shapes


@dataclasses.dataclass(frozen=True)
class Bench:
    """How one operation is measured, and how reports show the results."""

    op: Operation
    roofs: dict[str, str]  # {direction of a cell: name of its roof}
    errors: tuple[str, ...]  # columns of a results file: "err_y" is the norm-wise error of y
    providers: tuple[str, ...]
    load: Callable[[str], Any]  # loads a provider by name
    measure: Callable[..., None]  # (cell, names of providers, run): reports results to the Run
    unit: str = "ms"  # the unit of times in reports, or "us"
    # {value of --direction: direction of a cell}. Backward alone has no meaningful time if forward may do its work.
    directions: dict[str, str] = dataclasses.field(
        default_factory=lambda: {"forward": "forward", "backward": "forward+backward"}
    )
    main: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)  # {direction: providers}; default: all
    more_outputs: tuple[str, ...] = ()  # providers that compute other outputs too
    on_cpu: tuple[str, ...] = ("torch",)  # the peers that run without a GPU by default
    variants: str = "(?!)"  # a regular expression that matches further names of providers
    # {name: title in reports} of what is measured beside providers and roofs
    baselines: dict[str, str] = dataclasses.field(default_factory=dict)
    section_per_cell: bool = False  # reports have a section per cell, with time against memory; else one table

    def shapes(self, patterns: Sequence[str], tokens: Sequence[int], own: Sequence[str]) -> Shapes:
        """The shapes of the models that match `patterns`, then the user's own, with the names of their models.

        Raises ValueError for an unknown model, an invalid shape, and models without a shape for this operation.
        """
        names: dict[tuple[int, ...], list[str]] = {}
        for model in match("--model", patterns, MODELS):
            for count in tokens:
                for shape, name in self.op.model_shapes(MODELS[model], count).items():
                    names.setdefault(shape, []).append(name)
        for text in own:
            try:
                names.setdefault(parse_shape(text, self.op.form), [])
            except ValueError as error:
                raise ValueError(f"--shapes is {error}") from None
        if not names:
            known = ", ".join(self.op.models)
            raise ValueError(f"--model {' '.join(patterns)}: no shape of {self.op.name}; expected one of {known}")
        return {shape: ", ".join(dict.fromkeys(shape_names)) for shape, shape_names in names.items()}

    def matching(self, patterns: Sequence[str]) -> tuple[str, ...]:
        """The providers that match any pattern: variants first, the user's own (module:attribute) last.

        ValueError if a pattern matches none.
        """
        own = [name for name in patterns if ":" in name]
        variants = [n for n in patterns if n not in (*self.providers, *own) and re.fullmatch(self.variants, n)]
        patterns = [pattern for pattern in patterns if pattern not in (*variants, *own)]
        return (*variants, *match("--providers", patterns, self.providers), *own)
