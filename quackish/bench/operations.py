"""What can be measured: an operation's dimensions, directions, roofs and providers."""

import dataclasses
import fnmatch
import re
from collections.abc import Callable, Sequence
from typing import Any

from quackish.bench import measure_grouped_mlp, measure_linear_cross_entropy, measure_rms_norm
from quackish.bench import providers_grouped_mlp as mlp
from quackish.bench import providers_linear_cross_entropy as lce
from quackish.bench import providers_rms_norm as rms
from quackish.bench.cells import MLP_GEMMS
from quackish.errors import did_you_mean


@dataclasses.dataclass(frozen=True)
class Operation:
    name: str
    title: str
    dims: tuple[str, ...]  # ("M", "N")
    directions: dict[str, str]  # by the words of --direction
    roofs: dict[str, str]  # by direction
    small: tuple[int, ...]  # no size is larger without a GPU
    unit: str  # of times people read
    example: str  # of a shape
    providers: tuple[str, ...]
    main: dict[str, tuple[str, ...]]  # by direction: the default providers
    load: Callable[[str], Any]  # a provider by its name
    measure: Callable[..., None]  # (cell, providers, run)
    variants: str = "(?!)"  # a regular expression of further providers

    @property
    def form(self) -> str:
        """Of a shape: "MxN"."""
        return "x".join(self.dims)

    def matching(self, patterns: Sequence[str]) -> tuple[str, ...]:
        """The providers that any pattern matches: variants first, the user's (module:attribute) last.

        ValueError for a pattern that matches none.
        """
        own = [name for name in patterns if ":" in name]
        variants = [n for n in patterns if n not in (*self.providers, *own) and re.fullmatch(self.variants, n)]
        patterns = [pattern for pattern in patterns if pattern not in (*variants, *own)]
        for pattern in patterns:
            if not fnmatch.filter(self.providers, pattern):
                known, hint = ", ".join(self.providers), did_you_mean(pattern, self.providers)
                raise ValueError(f"--providers {pattern}: no such provider; there are {known}{hint}")
        found = [name for name in self.providers if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]
        return (*variants, *found, *own)


RMS_NORM = Operation(
    name="rms_norm",
    title="RMSNorm",
    dims=("M", "N"),
    directions={"forward": "forward", "backward": "backward"},
    roofs=measure_rms_norm.ROOFS,
    small=(64, 1024),
    unit="us",
    example="8192x4096",
    providers=tuple(rms.PROVIDERS),
    main=dict.fromkeys(measure_rms_norm.ROOFS, tuple(rms.PROVIDERS)),
    load=rms.load,
    measure=measure_rms_norm.measure,
)
LINEAR_CROSS_ENTROPY = Operation(
    name="linear_cross_entropy",
    title="Linear cross entropy",
    dims=("M", "H", "V"),
    # Gradients may be computed in forward: a backward alone has no time.
    directions={"forward": "forward", "backward": "forward+backward"},
    roofs=measure_linear_cross_entropy.ROOFS,
    small=(48, 64, 512),
    unit="ms",
    example="8192x4096x128256",
    providers=lce.PROVIDERS,
    main={"forward": lce.LOSS, "forward+backward": lce.MAIN},
    load=lce.load,
    measure=measure_linear_cross_entropy.measure,
    variants=r"quackish-(chunked|recompute)-[1-9]\d*",
)
GROUPED_MLP = Operation(
    name="grouped_mlp",
    title="Grouped MLP",
    dims=("R", "H", "I", "E"),
    directions={"forward": "forward", "backward": "forward+backward"},
    roofs=MLP_GEMMS,
    small=(64, 64, 32, 4),
    unit="ms",
    example="131072x2048x768x128",
    providers=tuple(mlp.PROVIDERS),
    main=dict.fromkeys(MLP_GEMMS, tuple(mlp.PROVIDERS)),
    load=mlp.load,
    measure=measure_grouped_mlp.measure,
)
OPERATIONS = {op.name: op for op in (RMS_NORM, LINEAR_CROSS_ENTROPY, GROUPED_MLP)}
