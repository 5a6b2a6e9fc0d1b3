"""What can be measured: an operation's dimensions, directions, roofs and providers."""

import dataclasses
import importlib.util
from collections.abc import Callable
from typing import Any

from quackish.bench import measure_linear_cross_entropy, measure_rms_norm
from quackish.bench import providers_linear_cross_entropy as lce
from quackish.bench import providers_rms_norm as rms
from quackish.bench.cells import Cell
from quackish.bench.models import Model

# The package that a provider needs, by the first word of its name.
PACKAGES = {"quack": "quack", "liger": "liger_kernel", "cce": "cut_cross_entropy"}


@dataclasses.dataclass(frozen=True)
class Operation:
    name: str
    title: str
    dims: tuple[str, ...]
    directions: dict[str, str]  # by the words of --direction
    roofs: dict[str, str]  # by direction
    parts: tuple[str, ...]  # what else has rows
    small: tuple[int, ...]  # no size is larger without a GPU
    unit: str  # of times people read
    providers: tuple[str, ...]
    main: dict[str, tuple[str, ...]]  # by direction: the providers where none are asked for
    load: Callable[[str], Any]
    measure: Callable[..., None]  # (cell, names, run)
    model_shapes: Callable[[Model, int], dict[tuple[int, ...], str]]  # (model, tokens) -> {shape: what it is}

    def seconds(self, cell: Cell) -> float:
        """What one provider may take in a cell, for the time that is shown as left; a guess."""
        m, *rest = cell.shape
        if len(rest) == 2:  # 30 calls of three GEMMs at 500 TFLOP/s
            return 1 + 30 * 6 * m * rest[0] * rest[1] / 5e14
        return 0.5 + 130 * 6 * m * rest[0] / 3e12


OPERATIONS = {
    op.name: op
    for op in (
        Operation(
            name="rms_norm",
            title="RMSNorm",
            dims=("m", "n"),
            directions={"forward": "forward", "backward": "backward"},
            roofs=measure_rms_norm.ROOFS,
            parts=(),
            small=(64, 1024),
            unit="us",
            providers=tuple(rms.PROVIDERS),
            main=dict.fromkeys(measure_rms_norm.ROOFS, tuple(rms.PROVIDERS)),
            load=rms.load,
            measure=measure_rms_norm.measure_cell,
            model_shapes=Model.norm_shapes,
        ),
        Operation(
            name="linear_cross_entropy",
            title="Linear cross entropy",
            dims=("m", "h", "v"),
            # Gradients may be computed in forward: a backward alone has no time.
            directions={"forward": "forward", "backward": "forward+backward"},
            roofs=measure_linear_cross_entropy.ROOFS,
            parts=(*measure_linear_cross_entropy.GEMMS, "truth"),
            small=(48, 64, 512),
            unit="ms",
            providers=lce.PROVIDERS,
            main={"forward": lce.LOSS, "forward+backward": lce.MAIN},
            load=lce.load,
            measure=measure_linear_cross_entropy.measure_cell,
            model_shapes=Model.head_shapes,
        ),
    )
}


def missing_package(provider: str) -> str | None:
    """The package that a provider needs where it is not installed, found out without importing it."""
    package = PACKAGES.get(provider.partition("-")[0])
    return package if package and importlib.util.find_spec(package) is None else None
