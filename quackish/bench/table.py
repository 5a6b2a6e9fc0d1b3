"""How each operation is measured, by name."""

from quackish.bench.definition import Bench
from quackish.ops import parts

BENCHES: dict[str, Bench] = {bench.op.name: bench for measure in parts("measure") for bench in measure.BENCHES}
