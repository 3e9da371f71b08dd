#!/usr/bin/env bash
# tests/failure: engine, image, tests. Without Docker it fails, and says so; ROQ_WITHOUT_DOCKER=1 passes it over, and says so.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

without() {
    printf '\n%s\n' '!!! ============================================================================== !!!'
    printf '!!! %s\n' "$1" "The failure tests (clusters in containers) DID NOT RUN."
    printf '%s\n\n' '!!! ============================================================================== !!!'
}

if ! tools/docker.sh start; then
    if [ "${ROQ_WITHOUT_DOCKER:-}" = 1 ]; then
        without "No Docker engine can be had here, and ROQ_WITHOUT_DOCKER=1."
        exit 0
    fi
    without "No Docker engine can be had here. ROQ_WITHOUT_DOCKER=1 goes without."
    exit 1
fi
.venv/bin/python tools/image.py >/dev/null
exec tools/pytest.sh failure "$@"
