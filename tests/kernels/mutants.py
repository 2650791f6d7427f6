"""Kernels with one fault planted in each: what a comparison must find."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

from allocator.kernels import move, part_plan, plan

#: Of an urgent flush and of moves. Name: module, text in it, what stands there instead. All places of the text are replaced.
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

_LIMIT = "limit = tl.minimum(place_of(hole, mark, GROWS_UP), blocked)"
#: Of a flush that is not urgent.
PART_MUTANTS: dict[str, tuple[ModuleType, str, str]] = {
    f"in part: {name}": (part_plan, text, instead)
    for name, text, instead in [
        ("a hole is taken for one on the other side of the watermark", "return page - mark - 1", "return mark - 1 - page"),
        ("holes from the near end", "count, rank, not GROWS_UP)", "count, rank, GROWS_UP)"),
        ("touching holes are counted from the far end", "count, number, GROWS_UP)", "count, number, not GROWS_UP)"),
        ("padding touches the watermark, or counts twice", "at = count - 1 - number", "at = num_holes - 1 - number"),
        ("padding is filled", "(rank < rows) & (rank < count)", "(rank < rows)"),
        ("the cap is not looked at", "(rank < rows) & ", ""),
        ("pages move away from the far end too", _LIMIT, "limit = blocked"),
        ("what is written moves", _LIMIT, "limit = place_of(hole, mark, GROWS_UP)"),
        ("the page that is written moves, those behind it stay", "place < limit", "place < limit + 1"),
        ("ids that are void are looked at", "tl.load(is_void) != 0", "tl.load(is_void) > 1"),
        ("ids are never looked at", "tl.load(is_void) != 0", "tl.load(is_void) >= 0"),
        ("one block of ids", "range(first, end, step)", "range(first, tl.minimum(end, first + 1), step)"),
        ("some ids twice, some not at all", "num_blocks * BLOCK, GROWS_UP", "2 * num_blocks * BLOCK, GROWS_UP"),
        ("tokens are taken for pages", "tl.maximum(token, 0) // page_size", "tl.maximum(token, 0)"),
        ("unmapped pages block in a pool that grows down", "(number < end) & (place >= 0)", "number < end"),
        ("inclusive prefix sum in one block", "rank = tl.cumsum(is_live, 0) - is_live", "rank = tl.cumsum(is_live, 0)"),
        ("inclusive prefix sum in many blocks", "rank = before + tl.cumsum(is_live, 0) - is_live",
         "rank = before + tl.cumsum(is_live, 0)"),
        ("a block counts itself among those before it", "mask=other < block,", "mask=other <= block,"),
        ("a block looks only at its own ids", "blocked = tl.minimum(blocked, tl.min(places, 0))",
         "blocked = tl.load(partial + 2 * num_blocks + block)"),
        ("touching holes of one block", "touching += tl.sum(", "touching = tl.sum("),
        ("moves of some blocks", "tl.load(partial + 3 * num_blocks + other, mask=other < num_blocks",
         "tl.load(partial + 3 * num_blocks + other, mask=other < block"),
        ("the list keeps what is filled", "at = row + moves", "at = row"),
        ("the list keeps what touches", "at = row + touching", "at = row"),
        ("vacated pages are not listed, one block", "(left_holes + at, page, mask=is_move", "(left_holes + at, page, mask=(at < 0)"),
        ("vacated pages are listed one too late", "tl.load(src_pages + (row - unfilled)", "tl.load(src_pages + (row - unfilled + 1)"),
        ("the watermark moves the wrong way", "mark - touching)", "mark + touching)"),
        ("the watermark moves over filled holes", "mark + touching)", "mark + touching + moves)"),
        ("vacated pages are counted twice", "count - touching - moves)", "count - touching)"),
    ]
}  # fmt: skip


def planted(name: str, folder: Path) -> ModuleType:
    """The module with the fault in it, from a file of its own: kernels are made from their source."""
    module, text, instead = (MUTANTS | PART_MUTANTS)[name]
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
    return (MUTANTS | PART_MUTANTS)[name][0].__name__.rsplit(".", 1)[1]
