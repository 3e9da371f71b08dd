#!/usr/bin/env bash
# Everything `make test` does once .venv is there: the checks, unit and model tests, integration tests, Spark tests (a real
# PySpark), interop tests (other people's programs), failure tests (containers). Unit, model and integration tests run two at a
# time (tools/pytest.sh). Each section of tests tells its ten slowest, each section its time, the last lines tell all times.
# Every section runs even if an earlier one failed; the exit code tells whether all passed.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
QUICK_SECONDS_MAX=180
failed=()
times=()

section() {
    local name=$1 begun=$SECONDS
    shift
    printf '\n=== %s\n' "$name"
    "$@" || failed+=("$name")
    seconds=$((SECONDS - begun))
    times+=("$(printf '%6s s  %s' "$seconds" "$name")")
    printf '=== %s: %s s\n' "$name" "$seconds"
}

section "checks" tools/check.sh
section "unit and model tests" tools/pytest.sh unit
if [ "$seconds" -gt "$QUICK_SECONDS_MAX" ]; then
    printf '=== unit and model tests took longer than %s s: make them quicker\n' "$QUICK_SECONDS_MAX"
fi
section "integration tests" tools/pytest.sh integration
section "Spark tests" tools/pytest.sh spark
section "set-up of the interop tests" tools/setup.sh interop
section "interop tests" env CI=1 tools/pytest.sh interop
section "failure tests" tools/failure.sh

printf '\n=== times\n'
printf '%s\n' "${times[@]}" "$(printf '%6s s  all' "$SECONDS")"
if [ ${#failed[@]} -gt 0 ]; then
    printf '\ntest: FAILED: %s\n' "$(IFS=,; echo "${failed[*]}")" >&2
    exit 1
fi
printf '\ntest: all passed\n'
