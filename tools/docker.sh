#!/usr/bin/env bash
# The Docker engine for tests/failure:  tools/docker.sh start | stop | compose | compose-command
# start: does nothing when an engine answers. Otherwise, as root on Debian: install docker.io if there is no dockerd, and run
# one of our own with its data and log in a temporary folder. It changes no firewall rule and forwards nothing: the test
# networks are closed ones, reached through their own bridge only.  stop: end the engine that start started.
# compose: say how docker/compose.yaml is started here. Debian's docker.io has no Compose; its docker-compose (1.29) will do.
# compose-command: print how Compose is called here; as root on Debian it is installed when it is missing.
set -euo pipefail

WAIT_SECONDS=60
# One for all checkouts: an engine serves a machine.
FOLDER=${ROQ_DOCKER_FOLDER:-${TMPDIR:-/tmp}/roq-docker}

say() { printf 'docker: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

answers() { command -v docker >/dev/null && timeout 10 docker info >/dev/null 2>&1; }

install_packages() {
    export DEBIAN_FRONTEND=noninteractive
    say "installing $* with apt-get"
    apt-get install -y -qq --no-install-recommends "$@" >/dev/null 2>&1 && return
    apt-get update -qq >/dev/null && apt-get install -y -qq --no-install-recommends "$@" >/dev/null
}

running() {
    [ -s "$FOLDER/pid" ] && [ "$(cat "/proc/$(cat "$FOLDER/pid")/comm" 2>/dev/null)" = dockerd ]
}

launch() {
    mkdir -p "$FOLDER"
    running && return
    rm -f "$FOLDER/pid"
    say "starting dockerd, log in $FOLDER/log"
    setsid dockerd \
        --iptables=false --ip6tables=false --ip-forward=false --ip-masq=false --bridge=none \
        --data-root "$FOLDER/data" --exec-root "$FOLDER/exec" --pidfile "$FOLDER/pid" "$@" \
        >>"$FOLDER/log" 2>&1 </dev/null &
}

start() {
    answers && return
    [ -z "${DOCKER_HOST:-}" ] || die "no Docker engine answers at DOCKER_HOST=$DOCKER_HOST."
    [ "$(id -u)" = 0 ] || die "no Docker engine answers: install docker.io, start it, and join the group docker."
    if ! command -v dockerd >/dev/null; then
        command -v apt-get >/dev/null || die "no Docker engine here: install Docker."
        install_packages docker.io || die "docker.io can't be installed here."
    fi
    local option tried
    for option in "" "" --storage-driver=vfs; do  # twice: what a killed engine left may keep the first try from starting
        launch $option
        for ((tried = 0; tried < WAIT_SECONDS * 5; tried++)); do
            answers && { say "engine $(docker version --format '{{.Server.Version}}')"; return; }
            # The pid file comes late; an engine that gave up leaves none.
            [ "$tried" -lt 25 ] || running || break
            sleep 0.2
        done
        stop
    done
    tail -n 5 "$FOLDER/log" >&2
    die "dockerd does not start here, see $FOLDER/log"
}

stop() {
    running || return 0
    local pid tried
    pid=$(cat "$FOLDER/pid")
    kill "$pid"
    for ((tried = 0; tried < 150; tried++)); do
        running || return 0
        sleep 0.2
    done
    kill -KILL "$pid"
}

compose_command() {
    if docker compose version >/dev/null 2>&1; then
        echo docker compose
    elif command -v docker-compose >/dev/null; then
        echo docker-compose
    else
        return 1
    fi
}

compose() {
    local command arguments="-p roq -f docker/compose.yaml up -d"
    command=$(compose_command) || {
        say "a cluster of containers needs Compose, which is not here (on Debian: apt-get install docker-compose)"
        command=docker-compose
    }
    say "a cluster of containers: $command $arguments"
    say "where no registry has zookeeper:3.9: ZOOKEEPER_IMAGE=roq-test $command $arguments"
}

had_compose_command() {
    compose_command && return
    [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null && install_packages docker-compose && compose_command ||
        die "no Compose here: install docker-compose."
}

case "${1:-}" in
start) start ;;
stop) stop ;;
compose) compose ;;
compose-command) had_compose_command ;;
*) die "usage: tools/docker.sh start | stop | compose | compose-command" ;;
esac
