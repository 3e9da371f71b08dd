#!/bin/sh
# install.sh dependencies EXTRA,… | roq: into the environment /opt/roq, from the wheels in /build if there are some (then there
# is a pip among them), else from the package index.
set -eu
cd /build
environment=/opt/roq

pip_install() {
    set -- install --quiet --disable-pip-version-check --no-compile -c constraints.txt "$@"
    if ls ./*.whl >/dev/null 2>&1; then
        "$environment/bin/python" "$(echo ./pip-*.whl)/pip" "$@" --no-index --find-links .
    else
        python3 -m pip --python "$environment/bin/python" "$@"
    fi
}

# Byte code that is right as long as the file is there, and nothing that only builders need.
finish() {
    find "$environment" -type f \( -name '*.pyx' -o -name '*.pxd' -o -name '*.pxi' -o -name '*.c' -o -name '*.h' \) -delete
    "$environment/bin/python" -m compileall -q --invalidation-mode unchecked-hash "$environment/lib"
}

case "$1" in
dependencies)
    if ! ls ./*.whl >/dev/null 2>&1 && ! python3 -m pip --version >/dev/null 2>&1; then
        apt-get update -qq
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends python3-pip
    fi
    python3 -m venv --without-pip "$environment"
    python3 -c '
import sys, tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
extras = [extra for extra in sys.argv[1].split(",") if extra]
print(*project["dependencies"], *(each for extra in extras for each in project["optional-dependencies"][extra]), sep="\n")
' "${2:-}" >wanted.txt
    pip_install -r wanted.txt
    ;;
roq)
    pip_install --no-deps ./source
    finish
    ;;
*)
    echo "install.sh dependencies EXTRA,… | roq" >&2
    exit 2
    ;;
esac
