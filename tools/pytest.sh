#!/usr/bin/env bash
# The tests of a folder as people and CI run them:  tools/pytest.sh unit | simulation | integration | spark | failure | interop [pytest's options]
# Two processors: what computes runs two at a time, what mostly waits three. Where clusters or a Spark are shared, a file's tests stay
# together, in their order.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# Bytecode is kept, whatever the environment says: without it each of thousands of processes compiles what it imports. Not for
# Spark, whose workers start more slowly with a folder of their own (55 s became 89).
if [ "${1:-}" != spark ]; then
    unset PYTHONDONTWRITEBYTECODE
    export PYTHONPYCACHEPREFIX=$PWD/build/bytecode
fi
case "${1:-}" in
unit) chosen=(-n 3 --dist worksteal tests/unit tests/model) ;; # nothing is shared: whoever is done takes from the other one
simulation) chosen=(-n 2 --dist worksteal tests/simulation) ;;
integration) chosen=(-n 3 --dist loadfile --no-loadscope-reorder tests/integration) ;;
spark | failure) chosen=(-n 2 --dist loadfile --no-loadscope-reorder "tests/$1") ;; # failure tests: by tools/failure.sh, which makes what they need
interop) chosen=(tests/interop) ;;
*) printf 'usage: tools/pytest.sh unit | simulation | integration | spark | failure | interop\n' >&2 && exit 2 ;;
esac
exec .venv/bin/python -m pytest -q --durations=10 "${chosen[@]}" "${@:2}"
