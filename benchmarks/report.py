"""The page and the figures of a CSV again, for example after a run that was killed.

python -m benchmarks.report benchmarks/results/H200/rms_norm.csv ...
"""

import sys
from pathlib import Path

from benchmarks import linear_cross_entropy, rms_norm
from quackish.bench import report, schema

PAGES = {"cells": rms_norm.PAGE, "mode": linear_cross_entropy.PAGE}  # by a column that only these files have

if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        columns = schema.read_csv(path)[0]
        report.report(path, next((page for name, page in PAGES.items() if name in columns), report.BENCH))
