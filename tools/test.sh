#!/usr/bin/env bash
# The tests in tiers, once .venv is there:  tools/test.sh quick | rest | all
#   quick  checks, unit and model tests but long searches, and of simulations, integration, Spark and failure tests those marked `quick`
#   rest   what quick leaves out; interop tests (other people's programs) too
#   all    both, every test once
# How many run at a time: tools/pytest.sh. Each section of tests tells its ten slowest, each section
# its time, the last lines tell all times. Every section runs even if an earlier one failed; the exit code tells whether all passed.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
QUICK_SECONDS_MAX=600 # on two cores with nothing else to do
tier=${1:-}
case "$tier" in
quick) which="quick " chosen=(-m quick) ;;
rest) which="other " chosen=(-m "not quick") ;;
all) which="" chosen=() ;;
*) printf 'usage: tools/test.sh quick | rest | all\n' >&2 && exit 2 ;;
esac
failed=()
times=()

section() {
    local name=$1 begun=$SECONDS seconds
    shift
    printf '\n=== %s\n' "$name"
    "$@" || failed+=("$name")
    seconds=$((SECONDS - begun))
    times+=("$(printf '%6s s  %s' "$seconds" "$name")")
    printf '=== %s: %s s\n' "$name" "$seconds"
}

if [ "$tier" != rest ]; then
    # The types are checked on one processor. On the other one what tests import is compiled meanwhile, once instead of by every
    # worker at the same time. Whatever is wrong there, the sections will say.
    tools/pytest.sh unit -n 0 --collect-only -q tests/simulation tests/integration tests/failure >/dev/null 2>&1 &
    compiling=$!
    section "checks" tools/check.sh
    wait "$compiling"
fi
case "$tier" in
quick) section "unit and model tests" tools/pytest.sh unit -m "not long" ;;
rest) section "long searches of models" tools/pytest.sh unit -m long ;;
all) section "unit and model tests" tools/pytest.sh unit ;;
esac
section "${which}simulated clusters" tools/pytest.sh simulation "${chosen[@]}"
section "${which}integration tests" tools/pytest.sh integration "${chosen[@]}"
section "${which}Spark tests" tools/pytest.sh spark "${chosen[@]}"
if [ "$tier" != quick ]; then
    section "set-up of the interop tests" tools/setup.sh interop
    section "interop tests" env CI=1 tools/pytest.sh interop
fi
section "${which}failure tests" tools/failure.sh "${chosen[@]}"

printf '\n=== times\n'
printf '%s\n' "${times[@]}" "$(printf '%6s s  all' "$SECONDS")"
if [ "$tier" = quick ] && [ "$SECONDS" -gt "$QUICK_SECONDS_MAX" ]; then
    printf '=== the quick tests took longer than %s s, which is the limit: make them quicker, or unmark some\n' "$QUICK_SECONDS_MAX"
fi
if [ ${#failed[@]} -gt 0 ]; then
    printf '\ntest: FAILED: %s\n' "$(IFS=,; echo "${failed[*]}")" >&2
    exit 1
fi
printf '\ntest: all passed\n'
