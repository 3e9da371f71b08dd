#!/bin/sh
# base.sh [PACKAGE…]: what an image stands on: a Python, an init that reaps, these Debian packages, the user, the folders that it
# may write. What the base has is not installed again.
set -eu
missing=
command -v python3 >/dev/null || missing="python3-minimal libpython3-stdlib"
command -v tini >/dev/null || missing="$missing tini"
for package in "$@"; do
    dpkg -s "$package" >/dev/null 2>&1 || missing="$missing $package"
done
if [ -n "$missing" ]; then
    apt-get update -qq
    # shellcheck disable=SC2086  # one word per package
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing
    rm -rf /var/lib/apt/lists/*
fi
python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed in the base" >&2; exit 1; }
useradd --system --uid 550 --user-group --home-dir /data roq
install -d -m 700 -o roq -g roq /data /cards
install -d -m 755 /etc/roq
