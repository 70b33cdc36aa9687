#!/bin/sh
# Outlives the process that started a server: standard input is a pipe from it, and the pipe's end is its end, however it
# came. Then the server is stopped at once and its directory removed.
#
#   watchdog.sh DATA_DIRECTORY [DIRECTORY_TO_REMOVE]
data=$1
remove=${2:-}
cat >/dev/null

# The working directory tells a server of ours from a stranger that was given its number, and a zombie has none.
server_is_up() {
    pid=$(head -n 1 "$data/postmaster.pid" 2>/dev/null) && [ -n "$pid" ] &&
        [ "$(readlink "/proc/$pid/cwd" 2>/dev/null)" = "$data" ]
}

signal=QUIT
tries=0
while server_is_up; do
    kill -s "$signal" "$pid" 2>/dev/null
    # Nothing can be waited for here: the server is no child of this process.
    sleep 0.05
    tries=$((tries + 1))
    [ "$tries" -lt 200 ] || signal=KILL
done
[ -z "$remove" ] || rm -rf "$remove"
