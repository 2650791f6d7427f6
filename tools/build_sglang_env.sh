#!/usr/bin/env bash
# Builds an environment with SGLang and its unified memory pool, serving on a CPU, in which kvtape records and is measured:
#
#     tools/build_sglang_env.sh DIR
#     DIR/bin/kvtape bench traces/*.msgpack.zst
#     DIR/bin/python -m tests.engines.run_sglang --out run.json
#
# Pinned versions. An environment that is complete is left as it is; one that is not is built anew. kvtape is installed editable.
# PYTHON names the interpreter (python3), SGLANG_VERSION another version (0.5.18 is the other one that is known to work).
# A CPU build of torch is enough: which build pip finds depends on the indexes it is set up with.
set -euo pipefail

SGLANG_VERSION=${SGLANG_VERSION:-0.5.23}
PLACEHOLDERS=(sgl_kernel soundfile torchvision)

if [ $# -ne 1 ]; then
    echo "usage: $0 DIR" >&2
    exit 2
fi
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/engine_env.sh"
cd "$here/.."
mapfile -t plugin < <(find tests/engines/sglang_cpu -name '*.py' -o -name '*.toml' | grep -v egg-info | sort)
CHOICE=$SGLANG_VERSION env_begin sglang-env "$1" tools/build_sglang_env.sh tools/sglang_env/*.* "${plugin[@]}"

say "pinned requirements (torch, triton and what SGLang imports)"
env_install "$here/sglang_env/requirements.txt"
if [ -f "$here/sglang_env/requirements-$SGLANG_VERSION.txt" ]; then
    env_install "$here/sglang_env/requirements-$SGLANG_VERSION.txt"
fi

say "sglang $SGLANG_VERSION, without its dependencies"
pip_install "sglang==$SGLANG_VERSION"

cp "$here/sglang_env/placeholder.py" "$packages/kvtape_placeholder.py"
for name in "${PLACEHOLDERS[@]}"; do
    mkdir -p "$packages/$name"
    printf 'from kvtape_placeholder import stand_in\n\nstand_in(__name__)\n' >"$packages/$name/__init__.py"
done
say "placeholders for ${PLACEHOLDERS[*]}"

# From a copy: building it in place would leave a build folder there.
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
cp -r "$repository/tests/engines/sglang_cpu/." "$copy"
pip_install --no-build-isolation "$copy"
say "the plugin that stands in for a GPU"

SGLANG_USE_CPU_ENGINE=1 "$python" -W ignore - <<'PYTHON'
import importlib.metadata

import torch

try:
    from sglang.srt.mem_cache.allocator.unified_sub_pool import MultiEndedAllocator
except ModuleNotFoundError:
    from sglang.srt.mem_cache.multi_ended_allocator import MultiEndedAllocator

# What a server imports on top of what an engine does.
import sglang.srt.entrypoints.http_server

print(f"sglang-env: {MultiEndedAllocator.__name__} of sglang {importlib.metadata.version('sglang')} imports beside torch {torch.__version__}")
PYTHON
env_finish
