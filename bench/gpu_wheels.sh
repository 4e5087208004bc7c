#!/usr/bin/env bash
# Makes the folder of wheels that bench/gpu.sh takes to a machine without a network: bench/gpu_wheels.sh FOLDER
#
# The machine has Python 3.12 with PyTorch, JAX, transformers and their dependencies. What planetary needs besides is
# downloaded for it, whatever this machine's own Python is, and planetary itself is built from this tree.
set -euo pipefail

out=${1:?usage: bench/gpu_wheels.sh FOLDER}
python=${PYTHON:-python3}
most_mib=40
mkdir -p "$out"
platforms=()
for n in 39 36 35 34 31 28 27 24 17; do platforms+=(--platform "manylinux_2_${n}_x86_64"); done
platforms+=(--platform manylinux2014_x86_64 --platform manylinux1_x86_64)
iree=$("$python" -c "import importlib.metadata as m; print(m.version('iree-base-runtime'))")
# IREE loads modules of its own version only: the one that bench/gpu/prepare.py compiles with here.
"$python" -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
    "${platforms[@]}" -d "$out" \
    "iree-base-runtime==$iree" msgspec pycapnp cryptography cffi pycparser starlette uvicorn
tree=$(mktemp -d) # a build in this tree would leave its files there, and the next one take them along
trap 'rm -rf "$tree"' EXIT
cp -r "$(dirname "$0")"/../{pyproject.toml,README.md,LICENSE,src} "$tree"
"$python" -m pip wheel -q --no-deps -w "$out" "$tree"
bytes=$(cat "$out"/*.whl | wc -c)
ls -l "$out"
echo "$((bytes / 1048576)) MiB of at most $most_mib"
[ "$bytes" -le $((most_mib * 1048576)) ] || { echo "too large" >&2; exit 1; }
