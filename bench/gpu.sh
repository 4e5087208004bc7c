#!/usr/bin/env bash
# Measures planetary on an NVIDIA GPU, on a machine without a network and without planetary, within 8 minutes.
#
#     bench/gpu_wheels.sh wheels                         # where there is a network: the packages that are missing
#     python bench/gpu/prepare.py artifacts              # where planetary and IREE's compiler are
#     bench/gpu.sh --wheels wheels --artifacts artifacts # on the machine: Python 3.12, PyTorch, JAX for CUDA
#     bench/gpu.sh --rehearse                            # here: the CPU in place of the GPU, tiny sizes
#
# Results are JSON files in $OUT (default: out), one for each part, written as the part goes on. See bench/gpu/run.py
# for the other flags.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
wheels='' rest=()
while [ $# -gt 0 ]; do
    case $1 in
        --wheels) wheels=$2; shift 2 ;;
        *) rest+=("$1"); shift ;;
    esac
done
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
if [ -n "$wheels" ]; then
    python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$site" "$wheels"/*.whl
else # from this tree, beside an environment that has the rest
    site="$here/../src"
    trap - EXIT
fi
export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
python3 "$here/gpu/run.py" ${rest[@]+"${rest[@]}"}
