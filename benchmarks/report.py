"""The page and the figures of a CSV again, for example after a run that was killed.

python -m benchmarks.report benchmarks/results/H200/rms_norm.csv ...
"""

import sys
from pathlib import Path

from benchmarks import linear_cross_entropy, rms_norm
from quackish.bench import report
from quackish.bench.results import read_rows


def page_of(row: dict[str, str]) -> report.Page:
    """The programs' files have a column that those of `bench` lack."""
    if not {"data", "cells", "mode"}.intersection(row):
        return report.BENCH
    return {"rms_norm": rms_norm.PAGE, "linear_cross_entropy": linear_cross_entropy.PAGE}[row["op"]]


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        report.report(path, page_of(read_rows(path)[0]))
