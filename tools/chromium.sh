#!/usr/bin/env bash
# Where Chromium is, for the browser tests of the console:  tools/chromium.sh
# Prints its path. As root on Debian it is installed when it is missing; otherwise one sentence says what to install.
# ROQ_CHROMIUM names another one.
set -euo pipefail

say() { printf 'chromium: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

find_chromium() {
    local name
    for name in ${ROQ_CHROMIUM:-chromium chromium-browser google-chrome}; do
        command -v "$name" && return
    done
    return 1
}

find_chromium && exit
[ -z "${ROQ_CHROMIUM:-}" ] || die "ROQ_CHROMIUM names $ROQ_CHROMIUM, which is no program."
[ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || die "no Chromium here: install it (on Debian: apt-get install chromium)."
export DEBIAN_FRONTEND=noninteractive
say "installing chromium with apt-get"
apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core >/dev/null 2>&1 ||
    { apt-get update -qq >/dev/null && apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core >/dev/null; } ||
    die "chromium can't be installed here: apt-get install chromium says why."
find_chromium || die "chromium was installed, and is not found."
