#!/usr/bin/env bash
# Everything `make test` does once .venv is there: the checks, unit and model tests (two minutes), integration tests,
# Spark tests (a real PySpark), interop tests (other people's programs), failure tests (containers).
# Every section runs even if an earlier one failed; the exit code tells whether all passed.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
QUICK_SECONDS_MAX=180
failed=()

section() {
    local name=$1 begun=$SECONDS
    shift
    printf '\n=== %s\n' "$name"
    "$@" || failed+=("$name")
    seconds=$((SECONDS - begun))
    printf '=== %s: %s s\n' "$name" "$seconds"
}

section "checks" tools/check.sh
section "unit and model tests" .venv/bin/python -m pytest -q -n 2 --dist worksteal tests/unit tests/model
if [ "$seconds" -gt "$QUICK_SECONDS_MAX" ]; then
    printf '=== unit and model tests took longer than %s s: make them quicker\n' "$QUICK_SECONDS_MAX"
fi
section "integration tests" .venv/bin/python -m pytest -q --durations=10 tests/integration
section "Spark tests" .venv/bin/python -m pytest -q --durations=10 tests/spark
section "set-up of the interop tests" tools/setup.sh interop
section "interop tests" env CI=1 .venv/bin/python -m pytest -q --durations=10 tests/interop
section "failure tests" tools/failure.sh

if [ ${#failed[@]} -gt 0 ]; then
    printf '\ntest: FAILED: %s\n' "$(IFS=,; echo "${failed[*]}")" >&2
    exit 1
fi
printf '\ntest: all passed\n'
