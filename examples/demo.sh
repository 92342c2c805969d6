#!/bin/sh
# A hyperparameter search from start to leaderboard, on a master of its own: in a temporary home, on
# a free port of this machine. Nothing is left running, also when it is interrupted.
set -eu

example=$(cd "$(dirname "$0")" && pwd)/core_api_digits
PACELINE_HOME=$(mktemp -d "${TMPDIR:-/tmp}/paceline-demo.XXXXXX")
export PACELINE_HOME
unset PACELINE_MASTER PACELINE_TOKEN
search=

clean_up() {
    status=$?
    trap '' INT TERM HUP
    trap - EXIT
    if [ -n "$search" ]; then kill "$search" 2>/dev/null || true; fi
    paceline down --timeout 2 >/dev/null || status=1
    rm -rf "$PACELINE_HOME"
    exit "$status"
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

paceline up --detach --port 0
# In the background, as a shell runs its traps only when no command is in the foreground.
paceline experiment create "$example/adaptive.yaml" "$example" --follow &
search=$!
status=0
wait "$search" || status=$?
search=
echo "The demo now removes its master with all that it shows. With your own, it stays:"
echo "paceline up --detach && paceline e create $example/adaptive.yaml $example -f"
exit "$status"
