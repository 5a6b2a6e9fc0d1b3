#!/usr/bin/env bash
# Builds the site of docs/ into out/site, and fails on a broken link. Needs the extra docs: pip install -e '.[docs]'
# Neither PyTorch nor a GPU is used: docstrings are read from the sources. Passes arguments to mkdocs.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$(command -v python || command -v python3)

export NO_MKDOCS_2_WARNING=1
"$python" -m mkdocs build --strict "$@"
echo "out/site/index.html"
