#!/usr/bin/env bash
# The whole local ritual: lint, format, then every test. Arguments go to pytest: scripts/check.sh -k rms_norm
set -euo pipefail
cd "$(dirname "$0")/.."
python=$(command -v python || command -v python3)

"$python" -m ruff check .
"$python" -m ruff format --check .
# Tests without a GPU: a process a core, each with one thread. Those with one: one after the other.
OMP_NUM_THREADS=1 "$python" -m pytest -q -m "not gpu" -n auto "$@"
"$python" -m pytest -q -m gpu "$@"
