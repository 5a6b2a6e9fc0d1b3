"""The benches of all operations, by name, and the columns and names that their results share."""

from quackish.bench.cells import A_LAUNCH, AGAIN, TRUTH
from quackish.bench.definition import Bench
from quackish.ops import parts

BENCHES: dict[str, Bench] = {bench.op.name: bench for measure in parts("measure") for bench in measure.BENCHES}
# The columns of errors in a results file.
ERRORS = tuple(dict.fromkeys(error for bench in BENCHES.values() for error in bench.errors))
# Names in the provider column of a results file that are not providers.
NOT_PROVIDERS = {A_LAUNCH, AGAIN, TRUTH}.union(
    *([*bench.roofs.values(), *bench.baselines] for bench in BENCHES.values())
)
