#!/usr/bin/env bash
# The one check script, for people and CI: format, lint, types, import arrows. Runs all of them, fails if any fails.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PATH=$PWD/.venv/bin:$PATH
failed=()

step() {
    local name=$1
    shift
    printf '\n== %s\n' "$name"
    "$@" || failed+=("$name")
}

step format ruff format --check --quiet .
step lint ruff check --quiet .
step types mypy
step imports lint-imports --no-logo

if [ ${#failed[@]} -gt 0 ]; then
    printf '\ncheck: FAILED: %s   (`ruff format .` and `ruff check --fix .` repair most of the first two)\n' "${failed[*]}" >&2
    exit 1
fi
printf '\ncheck: all good\n'
