"""How far outputs of RMSNorm are from fp64, norm-wise, and whether they repeat byte for byte.

The truth is computed from the rounded inputs, in chunks of rows: fp64 of a large cell is never held whole.
"""

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from quackish.reference.rms_norm import rms_norm_bwd, rms_norm_fwd, rms_norm_rstd
from quackish.testing.errors import same_bits
from quackish.testing.timing import Work

CHUNK_ELEMENTS = 1 << 25


def rstd_of(x: Tensor, eps: float) -> Tensor:
    """(m,) fp32."""
    return torch.cat([rms_norm_rstd(x[at], eps, torch.float64).float() for at in _chunks(x)])


def forward_errors(
    x: Tensor, weight: Tensor, eps: float, outputs: Mapping[str, tuple], elements: int = CHUNK_ELEMENTS
) -> dict[str, dict[str, float]]:
    """‖y - truth‖ / ‖truth‖ of each provider's (y, ...)."""
    norm = _NormWise(outputs)
    for at in _chunks(x, elements):
        y, _, _ = rms_norm_fwd(x[at].double(), weight.double(), None, None, eps)
        norm.add(y, {name: out[0][at] for name, out in outputs.items()})
    return {name: {"err_y": error} for name, error in norm.errors().items()}


def backward_errors(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    eps: float,
    outputs: Mapping[str, tuple],
    elements: int = CHUNK_ELEMENTS,
) -> dict[str, dict[str, float]]:
    """The same for each provider's (dx, dweight)."""
    dx_norm, dw_norm = _NormWise(outputs), _NormWise(outputs)
    total = torch.zeros_like(weight, dtype=torch.float64)
    for at in _chunks(x, elements):
        rstd = rms_norm_rstd(x[at], eps, torch.float64)
        dx, _, dweight, _ = rms_norm_bwd(dy[at], x[at], weight, rstd, None, 0.0, torch.float64, None, torch.float64)
        dx_norm.add(dx, {name: out[0][at] for name, out in outputs.items()})
        total += dweight
    dw_norm.add(total, {name: out[1] for name, out in outputs.items()})
    dx_errors, dw_errors = dx_norm.errors(), dw_norm.errors()
    return {name: {"err_dx": dx_errors[name], "err_dweight": dw_errors[name]} for name in outputs}


def is_deterministic(work: Work, runs: int = 3) -> bool:
    """Whether `runs` runs give the same bytes; the outputs of a graph are poisoned with NaN before each."""
    first = None
    for _ in range(runs):
        if work.is_graph:
            for t in work.outputs:
                t.fill_(float("nan"))
        outputs = work.run()
        now = [t.clone() for t in (work.outputs if work.is_graph else outputs)]
        if first is not None and not all(map(same_bits, first, now)):
            return False
        first = first or now
    return True


class _NormWise:
    """‖got - truth‖ / ‖truth‖ for several names over chunks; summed where the tensors are, read once."""

    def __init__(self, names: Iterable[str]):
        self._truth, self._diff = 0.0, dict.fromkeys(names, 0.0)

    def add(self, truth: Tensor, got: Mapping[str, Tensor]) -> None:
        self._truth += truth.square().sum()
        for name, t in got.items():
            self._diff[name] += (t.double() - truth).square().sum()

    def errors(self) -> dict[str, float]:
        return {name: float((diff / self._truth).sqrt()) for name, diff in self._diff.items()}


def _chunks(x: Tensor, elements: int = CHUNK_ELEMENTS) -> Iterator[slice]:
    rows = max(1, elements // x.shape[1])
    return (slice(start, start + rows) for start in range(0, x.shape[0], rows))
