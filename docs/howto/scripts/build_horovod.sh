#!/usr/bin/env bash
# Build Horovod 0.28.1 for the torch of a virtual environment:
# build_horovod.sh ENVIRONMENT. Processes communicate by gloo, which
# comes with Horovod, on CPUs; no MPI is needed. Needs g++, make and
# cmake 3.13.
set -euo pipefail
environment=$(cd "$1" && pwd)
python=$environment/bin/python
fail() { echo "$1" >&2; exit 1; }
for tool in g++ make cmake; do
    command -v $tool >/dev/null ||
        fail "$tool is needed to build Horovod: install it"
done
"$python" -c 'import torch' || fail "$1 has no torch: install it"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# What setup.py and Horovod import. Nothing builds in an environment of
# its own, which would bring another torch.
"$python" -m pip install --quiet 'setuptools>=77' wheel packaging \
    cloudpickle psutil pyyaml
"$python" -m pip download --quiet --no-deps --no-binary :all: \
    --no-build-isolation --dest "$work" horovod==0.28.1
tar -xzf "$work"/horovod-0.28.1.tar.gz -C "$work"
cd "$work"/horovod-0.28.1

# The headers of torch 2.13 need C++20, and Horovod sets C++14.
sed -i 's/set(CMAKE_CXX_STANDARD 14)/set(CMAKE_CXX_STANDARD 20)/' \
    CMakeLists.txt horovod/torch/CMakeLists.txt

export HOROVOD_WITH_GLOO=1 HOROVOD_WITH_PYTORCH=1
export HOROVOD_WITHOUT_MPI=1 HOROVOD_WITHOUT_TENSORFLOW=1
export HOROVOD_WITHOUT_MXNET=1
export MAKEFLAGS="-j${HOROVOD_BUILD_JOBS:-$(nproc)}"
# Horovod's copy of gloo asks for a version that cmake 4 has dropped.
export CMAKE_POLICY_VERSION_MINIMUM=3.5
export PATH=$environment/bin:$PATH
"$python" -m pip install --no-deps --no-build-isolation .
cd /
"$python" -c 'import horovod.torch as hvd
assert hvd.gloo_built(); print("Horovod is built, with gloo")'
