#!/usr/bin/env bash
# Builds the side environment in which kvtape is measured against SGLang's own allocator classes, on a CPU:
#
#     tools/build_sglang_env.sh DIR
#     DIR/bin/kvtape bench traces/*.msgpack.zst
#
# Pinned versions, no engine. An environment that is complete is left as it is; one that is not is built anew.
# PYTHON names the interpreter (python3). A CPU build of torch is enough: which build pip finds depends on the indexes it is set up with.
set -euo pipefail

SGLANG_VERSION=0.5.23
PLACEHOLDERS=(sgl_kernel torchvision)

if [ $# -ne 1 ]; then
    echo "usage: $0 DIR" >&2
    exit 2
fi
env_dir=$1
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
repository=$(dirname "$here")
python=$env_dir/bin/python
stamp=$env_dir/kvtape-sglang-env.sha256
started=$SECONDS

say() { echo "sglang-env: $*"; }

# The environment is what these files and this repository's place say; another place needs another path file.
wanted=$(cd "$here" && { sha256sum build_sglang_env.sh sglang_env/*.*; echo "$repository"; } | sha256sum | cut -d' ' -f1)

if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ] && [ -x "$python" ]; then
    say "$env_dir is complete"
    exit 0
fi
if [ -e "$env_dir" ] && [ ! -f "$env_dir/pyvenv.cfg" ]; then
    echo "$0: $env_dir exists and is no Python environment; name another folder" >&2
    exit 2
fi

say "a new environment in $env_dir"
"${PYTHON:-python3}" -m venv --clear "$env_dir"

say "pinned requirements (torch, triton and what SGLang imports)"
"$python" -m pip install -qq --disable-pip-version-check --no-compile --requirement "$here/sglang_env/requirements.txt"

say "sglang $SGLANG_VERSION, without its dependencies"
"$python" -m pip install -qq --disable-pip-version-check --no-compile --no-deps "sglang==$SGLANG_VERSION"

packages=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
cp "$here/sglang_env/placeholder.py" "$packages/kvtape_placeholder.py"
for name in "${PLACEHOLDERS[@]}"; do
    mkdir -p "$packages/$name"
    printf 'from kvtape_placeholder import stand_in\n\nstand_in(__name__)\n' >"$packages/$name/__init__.py"
done
say "placeholders for ${PLACEHOLDERS[*]}"

# A path file instead of an installation: the environment always measures the repository as it is now.
echo "$repository" >"$packages/kvtape.pth"
printf '#!%s\nimport sys\n\nfrom replayer.main import main\n\nsys.exit(main())\n' "$(cd "$env_dir" && pwd)/bin/python" >"$env_dir/bin/kvtape"
chmod +x "$env_dir/bin/kvtape"

"$python" -W ignore - <<'PYTHON'
import importlib.metadata

import torch
from sglang.srt.mem_cache.allocator.unified_sub_pool import FloatMultiEndedAllocator, MultiEndedAllocator

print(f"sglang-env: {MultiEndedAllocator.__name__} and {FloatMultiEndedAllocator.__name__} of sglang "
      f"{importlib.metadata.version('sglang')} import beside torch {torch.__version__}")
PYTHON
echo "$wanted" >"$stamp"
say "built in $((SECONDS - started)) s, $(du -sh "$env_dir" | cut -f1)"
