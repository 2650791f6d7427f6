"""What the engine environments are made of, as far as it can be tried without an engine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from replayer.errors import UsageError
from replayer.targets_sglang import build_sglang_pools, sglang_version
from tests.scenario import TWO_ENDS, header_for

pytestmark = pytest.mark.cpu

TOOLS = Path(__file__).parents[2] / "tools"
BUILDERS = ("build_sglang_env.sh", "build_vllm_env.sh", "build_model_env.sh")
REQUIREMENTS = sorted(path.relative_to(TOOLS).as_posix() for path in TOOLS.glob("*_env/requirements*.txt"))


@pytest.fixture
def placeholders(tmp_path: Path) -> Path:
    """A folder with a placeholder for ``absent_kernels``, laid out as the builder does it."""
    source = (TOOLS / "sglang_env" / "placeholder.py").read_text(encoding="utf-8")
    (tmp_path / "kvtape_placeholder.py").write_text(source, encoding="utf-8")
    (tmp_path / "absent_kernels").mkdir()
    init = "from kvtape_placeholder import stand_in\n\nstand_in(__name__)\n"
    (tmp_path / "absent_kernels" / "__init__.py").write_text(init, encoding="utf-8")
    return tmp_path


def run_in(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )


def test_every_name_of_a_placeholder_imports(placeholders: Path) -> None:
    code = (
        "import absent_kernels, absent_kernels.deep.er as deeper\n"
        "from absent_kernels.ops import gemm, MODES\n"
        "assert absent_kernels.__version__ and deeper.__name__ == 'absent_kernels.deep.er'\n"
        "assert repr(MODES.FAST) == '<placeholder absent_kernels.ops.MODES.FAST>'\n"
        "assert not hasattr(gemm, '__wrapped__')\n"
    )
    done = run_in(placeholders, code)
    assert done.returncode == 0, done.stderr


def test_using_a_placeholder_names_what_was_used(placeholders: Path) -> None:
    done = run_in(placeholders, "from absent_kernels.ops import gemm\ngemm(1, 2)")
    assert done.returncode == 1
    assert "NotImplementedError: absent_kernels.ops.gemm is a placeholder" in done.stderr


def test_other_packages_are_not_made_up(placeholders: Path) -> None:
    done = run_in(placeholders, "import absent_kernels\nimport absent_kernels_too")
    assert "No module named 'absent_kernels_too'" in done.stderr


@pytest.mark.parametrize("requirements", REQUIREMENTS)
def test_everything_in_an_environment_is_pinned(requirements: str) -> None:
    lines = (TOOLS / requirements).read_text(encoding="utf-8").splitlines()
    wanted = [line for line in lines if line and not line.startswith("#")]
    assert wanted
    assert [line for line in wanted if line.count("==") != 1] == []
    names = [line.split("==")[0].lower().replace("_", "-") for line in wanted]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("builder", BUILDERS)
@pytest.mark.parametrize("arguments", [(), ("one", "two")])
def test_a_builder_wants_one_folder(builder: str, arguments: tuple[str, ...]) -> None:
    done = subprocess.run(
        ["bash", str(TOOLS / builder), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "usage:" in done.stderr


@pytest.mark.parametrize("builder", BUILDERS)
def test_a_builder_leaves_other_folders_alone(builder: str, tmp_path: Path) -> None:
    (tmp_path / "something").write_text("of somebody's", encoding="utf-8")
    done = subprocess.run(
        ["bash", str(TOOLS / builder), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert "is no Python environment" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["something"]


def test_without_sglang_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("sglang.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "sglang", None)
    with pytest.raises(UsageError, match=r"tools/build_sglang_env\.sh"):
        build_sglang_pools(header_for(TWO_ENDS, 64 * 64), kvcache_for=lambda name: None)


def test_asking_for_the_version_imports_nothing() -> None:
    code = "import sys\nfrom replayer.targets_sglang import sglang_version\nsglang_version()\nassert 'sglang' not in sys.modules"
    done = run_in(TOOLS.parent, code)
    assert done.returncode == 0, done.stderr
    assert sglang_version() is None or isinstance(sglang_version(), str)
