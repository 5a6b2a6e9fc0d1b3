"""Softmax for the tools."""

from quackish.ops.shared.for_tools import Args, Imported, Maker, Operation, Options, SelfTest
from quackish.ops.softmax.problems import FORWARD_SPEC


def _make(new: Maker, shape: tuple[int, ...], options: Options) -> Args:
    return {"x": new.rows(*shape, seed=0)}


SOFTMAX = Operation(
    name="softmax",
    title="Softmax",
    function=Imported("quackish.ops.softmax.api", "softmax"),
    results=("y",),
    leaves=("x",),
    spec=FORWARD_SPEC,
    dims=("M", "N"),
    example="8192x1024",
    small=(64, 1000),
    make=_make,
    options={},
    self_tests={"": SelfTest((257, 1024)), "rows not aligned": SelfTest((37, 1001))},
)
FUNCTIONS = (SOFTMAX,)
