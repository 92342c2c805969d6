#!/bin/sh
# Build Horovod against the torch of an environment: sh install_horovod.sh BIN_OF_ENVIRONMENT
#
# Horovod 0.28.1, its last release, asks for C++14, while the headers of torch need C++17 or later.
# Nothing in the environment can change that, so two of its CMake files are edited.
set -eu
bin=$(cd "$1" && pwd)
version=0.28.1
sources=$(mktemp -d)
trap 'rm -rf "$sources"' EXIT
cd "$sources"
pip() { "$bin/python" -m pip --disable-pip-version-check --quiet "$@"; }

pip download --no-deps --no-binary horovod --no-build-isolation "horovod==$version"
tar xzf "horovod-$version.tar.gz"
for file in CMakeLists.txt horovod/torch/CMakeLists.txt; do
  sed "s/set(CMAKE_CXX_STANDARD 14)/set(CMAKE_CXX_STANDARD 17)/" \
    "horovod-$version/$file" > edited && mv edited "horovod-$version/$file"
done
PATH="$bin:$PATH" HOROVOD_WITH_PYTORCH=1 HOROVOD_WITH_GLOO=1 HOROVOD_WITHOUT_MPI=1 \
  HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1 \
  pip install --no-build-isolation --no-deps "./horovod-$version"
