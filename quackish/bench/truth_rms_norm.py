"""The inputs of a cell of RMSNorm, and how far outputs are from fp64, norm-wise.

The truth is computed from the rounded inputs, in chunks of rows.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor

from quackish.bench.providers_rms_norm import EPS
from quackish.bench.truth import chunks
from quackish.reference.rms_norm import rms_norm_bwd, rms_norm_fwd, rms_norm_rstd
from quackish.testing import inputs

CHUNK_ELEMENTS = 1 << 25


@dataclasses.dataclass(frozen=True)
class Data:
    x: Tensor  # (m, n)
    dy: Tensor  # (m, n)
    weight: Tensor  # (n,)
    rstd: Tensor  # (m,) fp32
    out: Tensor  # (m, n), which the roofs write

    @classmethod
    def make(cls, m: int, n: int, dtype: torch.dtype, device: torch.device) -> "Data":
        shapes = ((m, n), (m, n), (n,))
        x, dy, weight = (inputs.rows(s, dtype, seed=i, device=device) for i, s in enumerate(shapes))
        rstd = [rms_norm_rstd(x[at], EPS, torch.float64).float() for at in chunks(m, n, CHUNK_ELEMENTS)]
        return cls(x, dy, weight, torch.cat(rstd), torch.empty_like(x))


def errors(
    direction: str, data: Data, outputs: Mapping[str, tuple], elements: int = CHUNK_ELEMENTS
) -> dict[str, dict[str, float]]:
    """‖got - truth‖ / ‖truth‖ of each provider's (y, ...) or (dx, dweight)."""
    squares: dict[tuple[str, str], Tensor | float] = defaultdict(float)  # stay where the tensors are, read once
    columns = {"forward": ["err_y"], "backward": ["err_dx", "err_dweight"]}[direction]

    def add(column: str, truth: Tensor, got: Mapping[str, Tensor]) -> None:
        squares[column, ""] += truth.square().sum()
        for name, t in got.items():
            squares[column, name] += (t.double() - truth).square().sum()

    dweight = torch.zeros_like(data.weight, dtype=torch.float64)
    for at in chunks(*data.x.shape, elements):
        x = data.x[at]
        if direction == "forward":
            truth = rms_norm_fwd(x.double(), data.weight.double(), None, None, EPS)[0]
        else:
            rstd, fp64 = rms_norm_rstd(x, EPS, torch.float64), torch.float64
            truth, _, part, _ = rms_norm_bwd(data.dy[at], x, data.weight, rstd, None, 0.0, fp64, None, fp64)
            dweight += part
        add(columns[0], truth, {name: out[0][at] for name, out in outputs.items()})
    if direction == "backward":
        add("err_dweight", dweight, {name: out[1] for name, out in outputs.items()})
    return {name: {c: float((squares[c, name] / squares[c, ""]).sqrt()) for c in columns} for name in outputs}
