#!/usr/bin/env bash
# Every check to run before a pull request: lint, format, types, tests. Passes arguments to pytest: scripts/check.sh -k rms_norm
# --exhaustive also runs slow tests and those that compile or try every variant, as CI does.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$(command -v python || command -v python3)

"$python" -m ruff check .
"$python" -m ruff format --check .
"$python" -m mypy
run() { # exit code 5: no tests were selected
    "$python" -m pytest -q "$@" || [ $? -eq 5 ]
}
# GPU tests run one after the other, the others in one process per core with one thread each. Without a GPU, collecting
# GPU tests would take 10 s. worksteal: the slow tests are in a few files, which one process would get otherwise.
if "$python" -c 'import torch; raise SystemExit(not torch.cuda.is_available())'; then
    run -m gpu "$@"
fi
OMP_NUM_THREADS=1 run -m "not gpu" -n auto --dist worksteal "$@"
