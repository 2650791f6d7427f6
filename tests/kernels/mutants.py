"""Kernels with one fault planted in each: what a comparison must find."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

from allocator.kernels import move, plan

#: Name: module, text in it, what stands there instead. All places of the text are replaced.
MUTANTS: dict[str, tuple[ModuleType, str, str]] = {
    "source cleared before it is read": (
        move,
        "        owner = tl.load(physical_to_virtual",
        "        tl.store(physical_to_virtual + src, tl.full([ROWS], -1, tl.int64), mask=(row < rows) & is_move)\n"
        "        owner = tl.load(physical_to_virtual",
    ),
    "source not cleared": (
        move,
        "tl.store(physical_to_virtual + src, tl.full([ROWS], -1, tl.int64), mask=is_owned)",
        "pass",
    ),
    "target not mapped": (move, "tl.store(physical_to_virtual + dst, owner, mask=is_owned)", "pass"),
    "last word of a page stays behind": (move, "mask=word < PAGE_WORDS", "mask=word < PAGE_WORDS - 1"),
    "one chunk of a page": (move, "moves * CHUNKS, ", "moves, "),
    "last page stays behind": (move, "moves * CHUNKS, ", "(moves - 1) * CHUNKS, "),
    "moves in a frozen pool": (move, "tl.load(ok) != 0", "tl.load(ok) >= 0"),
    "sources not reported": (move, "tl.store(moved + row, src", "tl.store(moved + row, dst"),
    "a pool that grows down is taken for one that grows up": (plan, "return mark + 1 + place", "return mark - 1 - place"),
    "inclusive prefix sum in one block": (plan, "rank = tl.cumsum(is_live, 0) - is_live", "rank = tl.cumsum(is_live, 0)"),
    "inclusive prefix sum in many blocks": (
        plan,
        "rank = before + tl.cumsum(is_live, 0) - is_live",
        "rank = before + tl.cumsum(is_live, 0)",
    ),
    "a block counts itself among those before it": (plan, "other < block,", "other <= block,"),
    "holes from the near end": (plan, "at = num_holes - 1 - rank", "at = rank"),
    "window ends at the launch, not at the extent": (plan, "(place < window) & (place < extent)", "(place < window)"),
    "contradictions go unnoticed": (plan, "is_wrong = live != beyond", "is_wrong = live < 0"),
    "a log is overwritten": (plan, "was_ok & is_wrong", "is_wrong"),
}  # fmt: skip


def planted(name: str, folder: Path) -> ModuleType:
    """The module with the fault in it, from a file of its own: kernels are made from their source."""
    module, text, instead = MUTANTS[name]
    source = Path(module.__file__ or "").read_text(encoding="utf-8")
    assert text in source, f"{name}: {text!r} is no longer there"
    path = folder / "mutant.py"
    path.write_text(source.replace(text, instead), encoding="utf-8")
    spec = importlib.util.spec_from_file_location("mutant", path)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def attribute_of(name: str) -> str:
    """What the module is called where it is used."""
    return MUTANTS[name][0].__name__.rsplit(".", 1)[1]
