#!/usr/bin/env bash
# Try what needs a CUDA card, in at most four minutes: bash tests/gpu.sh [--dry-run]
#
# With --dry-run, all of it runs on the CPU. PYTHON names the interpreter, by default python3. If it does not have
# PyTorch, a new environment in build/gpu gets it from PyPI. What else is missing comes to build/gpu-packages: from PyPI,
# or from the wheels in the folder WHEELS, on a machine that reaches no registry. These are the wheels of dshuffle
# (pip wheel --no-deps) and of all that `pip install` would bring there.
set -euo pipefail
cd "$(dirname "$0")/.."
device=cuda
[[ ${1:-} == --dry-run ]] && device=cpu
python=${PYTHON:-python3}

if ! "$python" -c 'import torch' 2>/dev/null; then
    "$python" -m venv build/gpu
    python=build/gpu/bin/python
    "$python" -m pip install -q torch
fi
export PYTHONPATH="$PWD:$PWD/build/gpu-packages${PYTHONPATH:+:$PYTHONPATH}"
if ! timeout 100 "$python" tests/benchmarks/gpu.py --help >/dev/null 2>&1; then
    from=(.)
    [[ -n ${WHEELS:-} ]] && from=(--no-index --no-deps "$WHEELS"/*.whl)
    "$python" -m pip install -q --upgrade --no-compile --target build/gpu-packages "${from[@]}"
fi
exec timeout --kill-after=5 235 "$python" tests/benchmarks/gpu.py --device "$device"
