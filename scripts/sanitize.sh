#!/usr/bin/env bash
# Runs NVIDIA's compute-sanitizer over small shapes of every kernel; fails if it reports errors.
#   scripts/sanitize.sh [program.py [arguments]]        default: -m tests.sanitize_shapes
# Logs go to out/sanitize/.
set -euo pipefail
cd "$(dirname "$0")/.."
[ $# -gt 0 ] || set -- -m tests.sanitize_shapes
PATH="$PATH:${CUDA_HOME:-/usr/local/cuda}/bin"
if ! command -v compute-sanitizer >/dev/null; then
    echo "sanitize.sh: no compute-sanitizer on PATH; install the CUDA toolkit, or: pip install nvidia-cuda-sanitizer-api" >&2
    exit 2
fi
python=$(command -v python || command -v python3)
mkdir -p out/sanitize
rm -f out/sanitize/*
# PyTorch's allocator packs tensors into large blocks, where memcheck cannot detect accesses past the end of a tensor.
export PYTORCH_NO_CUDA_MEMORY_CACHING=1

echo "== $*"
"$python" "$@" # compiles the kernels for the runs below

tools=(memcheck racecheck synccheck) pids=()
for tool in "${tools[@]}"; do
    # Errors returned by API calls are not reported: libraries probe for driver features, and PyTorch raises the others.
    compute-sanitizer --tool "$tool" --report-api-errors no --error-exitcode 99 --print-limit 0 \
        --log-file "out/sanitize/$tool.log" "$python" "$@" >"out/sanitize/$tool.out" 2>&1 &
    pids+=($!)
done
failed=0
for i in "${!tools[@]}"; do
    log="out/sanitize/${tools[i]}.log" rc=0
    wait "${pids[i]}" || rc=$?
    # Warnings of racecheck do not change the exit code, but they are counted in the summary.
    summary=$(grep -s SUMMARY "$log" || true)
    if [ "$rc" -eq 0 ] && [ -n "$summary" ] && ! grep -qv "SUMMARY: 0 " <<<"$summary"; then
        echo "${tools[i]}: clean"
    else
        failed=1
        echo "${tools[i]}: FAILED with exit code $rc; see $log" "$summary"
    fi
done
exit $failed
