"""The page and the figures of a CSV again, for example after a run that was killed.

python -m benchmarks.report benchmarks/results/H200/rms_norm.csv ...
"""

import sys
from pathlib import Path

from benchmarks import linear_cross_entropy, rms_norm
from quackish.bench import report

PAGES = {"rms_norm": rms_norm.PAGE, "linear_cross_entropy": linear_cross_entropy.PAGE}  # by the name of the file

if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        report.report(path, PAGES[path.stem])
