#!/bin/sh
# Prove on a GPU what Paceline promises there; see `gpu.py`. Needs Python with torch, and no network:
# what else is missing is taken from the folder `wheels`, which `make gpu-wheels` fills.
# Usage: sh benchmarks/gpu.sh [--device cpu] [--results DIRECTORY] [PART ...]
# PYTHON names the interpreter; by default python3.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3}
path=$("$python" "$here/gpu_install.py")
PYTHONPATH=$path exec "$python" "$here/gpu.py" "$@"
