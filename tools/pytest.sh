#!/usr/bin/env bash
# The tests of a folder as people and CI run them:  tools/pytest.sh unit | simulation | integration | spark | interop [pytest's options]
# Of unit, model, simulation and integration tests two run at a time. Integration tests of one file stay together, in their order: they may
# share a cluster, or what a machine has once. (failure tests: tools/failure.sh)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
case "${1:-}" in
unit) chosen=(-n 2 --dist worksteal tests/unit tests/model) ;; # nothing is shared: whoever is done takes from the other one
simulation) chosen=(-n 2 --dist worksteal tests/simulation) ;;
integration) chosen=(-n 2 --dist loadfile tests/integration) ;;
spark | interop) chosen=("tests/$1") ;;
*) printf 'usage: tools/pytest.sh unit | simulation | integration | spark | interop\n' >&2 && exit 2 ;;
esac
exec .venv/bin/python -m pytest -q --durations=10 "${chosen[@]}" "${@:2}"
