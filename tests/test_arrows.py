"""Which package may know which: read from the source of every module, what is imported inside functions or for types included."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).parents[1]
OURS = ("allocator", "recorder", "replayer")
#: By the package (or part of one) that imports: what of ours it may import. The longest name that fits counts.
MAY_IMPORT = {
    "allocator": ("allocator",),
    "recorder.trace": ("recorder.trace",),
    "recorder": ("recorder",),
    "replayer": ("replayer", "allocator", "recorder.trace"),
}
#: Modules of ours that are named in text, to be loaded by that name: the command line, which stands above both packages, and the recorder's
#: module about our own engine, which it reaches as it reaches other people's.
MAY_NAME = {
    "replayer.main": re.compile(r"recorder\.(commands\.\w+|plugin:\w+)"),
    "recorder.engines.parity": re.compile(r"replayer\.parity\.notices"),
}
MODULE = re.compile(rf"({'|'.join(OURS)})(\.\w+)+(:\w+)?")


def modules() -> list[Path]:
    return sorted(path for package in OURS for path in (ROOT / package).rglob("*.py"))


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def imported(tree: ast.AST, module: str, *, is_package: bool) -> Iterator[str]:
    """Every module and name that is imported, from the root."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = module.split(".")
            base = base[: len(base) - node.level + is_package] if node.level else []
            yield from (".".join([*base, *filter(None, [node.module]), alias.name]) for alias in node.names)


def named(tree: ast.AST) -> Iterator[str]:
    """Texts that are nothing but the name of a module of ours, or of a function in one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and MODULE.fullmatch(node.value):
            yield node.value


def wrong_arrows(source: str, module: str, *, is_package: bool = False) -> list[str]:
    package = max((known for known in MAY_IMPORT if is_within(module, known)), key=len)
    allowed = MAY_IMPORT[package]
    tree = ast.parse(source)

    def may(name: str) -> bool:
        return name.split(".")[0] not in OURS or any(is_within(name, one) for one in allowed)

    found = [name for name in imported(tree, module, is_package=is_package) if not may(name)]
    exception = MAY_NAME.get(module)
    for name in named(tree):
        if not may(name.partition(":")[0]) and not (exception and exception.fullmatch(name)):
            found.append(name)
    return found


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_a_module_knows_only_what_it_may(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    assert wrong_arrows(source, name_of(path), is_package=path.name == "__init__.py") == []


@pytest.mark.parametrize(
    ("module", "source", "wrong"),
    [
        ("replayer.parity.run", "from recorder import process", ["recorder.process"]),
        ("replayer.parity.run", "import recorder.trace, recorder.settings", ["recorder.settings"]),
        ("replayer.parity.run", "from recorder.engines.blocks import put_mark", ["recorder.engines.blocks.put_mark"]),
        ("replayer.parity.run", "def f():\n    from recorder.trace import Header", []),
        ("replayer.parity.run", "from recorder import trace", []),
        ("replayer.parity.run", "from recorder.tracery import x", ["recorder.tracery.x"]),
        ("replayer.parity.run", "load('recorder.plugin:parity')", ["recorder.plugin:parity"]),
        ("replayer.main", "load('recorder.plugin:parity')", []),
        ("replayer.main", "load('recorder.session')", ["recorder.session"]),
        ("replayer.main", "from recorder.plugin import parity", ["recorder.plugin.parity"]),
        ("recorder.session", "from .settings import Settings\nfrom . import trace", []),
        ("recorder.session", "from allocator import UnifiedKVPool", ["allocator.UnifiedKVPool"]),
        ("recorder.session", "if TYPE_CHECKING:\n    import replayer.replay", ["replayer.replay"]),
        ("recorder.trace.writer", "from ..settings import Settings", ["recorder.settings.Settings"]),
        ("recorder.trace.writer", "from .errors import TraceError\nimport numpy", []),
        ("allocator.end", "from recorder.trace import Header", ["recorder.trace.Header"]),
        ("allocator.composites.swa", "from ..end import x\nfrom replayer import y", ["replayer.y"]),
    ],
)  # fmt: skip
def test_what_is_wrong_is_found(module: str, source: str, wrong: list[str]) -> None:
    assert wrong_arrows(source, module) == wrong


def test_a_package_counts_its_dots_from_itself() -> None:
    assert wrong_arrows("from .end import x", "allocator", is_package=True) == []
    assert wrong_arrows("from ..session import x", "recorder.trace", is_package=True) == [
        "recorder.session.x"
    ]
