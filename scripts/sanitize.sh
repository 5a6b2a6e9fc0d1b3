#!/usr/bin/env bash
# Runs NVIDIA's compute-sanitizer over small shapes of every kernel; fails if it reports errors.
#   scripts/sanitize.sh [program.py [arguments]]        default: tests/sanitize_shapes.py
# Logs go to out/sanitize/. Known false positives are listed in scripts/sanitize_known.txt.
set -euo pipefail
cd "$(dirname "$0")/.."
[ $# -gt 0 ] || set -- tests/sanitize_shapes.py
PATH="$PATH:${CUDA_HOME:-/usr/local/cuda}/bin"
if ! command -v compute-sanitizer >/dev/null; then
    echo "sanitize.sh: no compute-sanitizer on PATH; install the CUDA toolkit, or: pip install nvidia-cuda-sanitizer-api" >&2
    exit 2
fi
python=$(command -v python || command -v python3)
mkdir -p out/sanitize
# PyTorch's allocator packs tensors into large blocks, where memcheck cannot detect accesses past the end of a tensor.
export PYTORCH_NO_CUDA_MEMORY_CACHING=1

echo "== $*"
"$python" "$@" # compiles the kernels for the four runs below

sanitize() { # NAME OPTIONS... PROGRAM...
    local name=$1 log="out/sanitize/$1.log" rc=0
    shift
    # Errors returned by API calls are not reported: libraries probe for driver features, and PyTorch raises the others.
    compute-sanitizer --report-api-errors no --error-exitcode 99 --print-limit 0 --log-file "$log" "$@" \
        >"${log%.log}.out" 2>&1 || rc=$?
    "$python" scripts/sanitize_report.py "$log" "$rc" >"${log%.log}.verdict" 2>&1 || touch "${log%.log}.failed"
}
rm -f out/sanitize/*
sanitize memcheck --tool memcheck "$python" "$@" &
sanitize racecheck --tool racecheck "$python" "$@" &
sanitize racecheck-no-bulk --tool racecheck --check-bulk-copy no "$python" "$@" &
sanitize synccheck --tool synccheck "$python" "$@" &
wait

for name in memcheck racecheck racecheck-no-bulk synccheck; do
    printf '%-18s ' "$name"
    cat "out/sanitize/$name.verdict"
done
! ls out/sanitize/*.failed >/dev/null 2>&1
