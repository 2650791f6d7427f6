# Shared by the scripts that build engine environments; sourced, not run.
#
# env_begin NAME DIR FILE...   ends the script when DIR is complete; otherwise makes a fresh virtual environment there and sets
#                              env_dir, python and packages. FILEs, what CHOICE says and this repository's place are what DIR is built from.
# env_install REQUIREMENTS     exactly the pinned packages of a file
# env_finish                   kvtape itself, and the stamp that says DIR is complete

say() { echo "$env_name: $*"; }

env_begin() {
    env_name=$1 env_dir=$2
    shift 2
    repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
    stamp=$env_dir/kvtape-engine-env.sha256
    python=$env_dir/bin/python
    started=$SECONDS
    # Entry points and dependencies are read when kvtape is installed, so they are part of it; its code is not, it is installed editable.
    wanted=$(cd "$repository" && { sha256sum tools/engine_env.sh pyproject.toml "$@"; echo "$repository ${CHOICE:-}"; } | sha256sum | cut -d' ' -f1)
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
    packages=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
}

pip_install() { "$python" -m pip install -qq --disable-pip-version-check --no-compile --no-deps "$@"; }

# The files list all that is needed; what the engines ask for beyond that (CUDA packages above all) stays out.
env_install() { pip_install --requirement "$1"; }

env_finish() {
    # With the environment's own setuptools: nothing is fetched to build it.
    pip_install --no-build-isolation --editable "$repository"
    # For the scripts and tests that are not part of the distribution, from any folder.
    echo "$repository" >"$packages/kvtape_repository.pth"
    echo "$wanted" >"$stamp"
    say "built in $((SECONDS - started)) s, $(du -sh "$env_dir" | cut -f1)"
}
