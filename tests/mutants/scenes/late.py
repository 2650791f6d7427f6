"""Frees of tokens, whose pages nobody counts where numbers come late, and calls that meet them. See `tests.mutants.scenes` for how to read
the comments."""

from __future__ import annotations

from tests.mutants.registry import Tape, scene
from tests.mutants.scenes.shapes import PAGED, PAGED_FLOATING

PAGE = 4


def tokens(ids: list[int] | None, *pages: int) -> list[int]:
    """Two tokens of each of these pages of a request."""
    assert ids
    return [ids[PAGE * page + offset] for page in pages for offset in (2, 1)]


@scene(shapes=PAGED, total_bytes=64 * 64 * 4, results=True)
def reuses_uncounted_holes(s: Tape) -> None:
    ids = s.alloc("swa", 10 * PAGE)  # abcdefghij|
    s.free("swa", tokens(ids, 6, 2, 3))  # ab..ef.hij|
    s.alloc("swa", PAGE)  # 2: the lowest of the holes
    s.state()
    s.alloc("swa", PAGE)  # 3: the next one
    s.flush("swa")


@scene(shapes=PAGED, total_bytes=64 * 64 * 4)
def asks_for_more_than_was_freed(s: Tape) -> None:
    s.alloc("swa", 10 * PAGE)
    ids = s.alloc("full", s.pools["full"].available_size())
    assert ids
    s.free("full", ids[4:7])  # 2: one page
    assert s.alloc("full", 2 * PAGE) is None  # 3


@scene(shapes=PAGED, total_bytes=64 * 64 * 4)
def packs_its_neighbour(s: Tape) -> None:
    swa = s.alloc("swa", 10 * PAGE)
    s.alloc("full", s.pools["full"].available_size())
    s.free("swa", tokens(swa, 3, 1, 4))
    assert s.alloc("full", 2 * PAGE) is not None  # 3: of what packing the neighbour opens
    s.flush("swa")


@scene(shapes=PAGED, total_bytes=64 * 64 * 4, results=True)
def needs_no_neighbour(s: Tape) -> None:
    swa = s.alloc("swa", 10 * PAGE)
    full = s.alloc("full", s.pools["full"].available_size())
    s.free("swa", tokens(swa, 3, 1, 4))
    s.free("full", tokens(full, 5, 7, 8))
    s.alloc("full", 3 * PAGE)  # 4: holes of its own are enough
    s.state()


@scene()
def takes_back_behind_a_gate(s: Tape) -> None:
    ids = s.alloc("full", 8)
    assert ids
    s.free("full", ids[5:7])
    s.forward_begin("full", 1)
    s.flush("full")  # 3: pages wait for forward 1
    s.move_gate(is_open=False)
    s.forward_done(1)
    s.flush("full")  # 6: they come back, and nothing moves
    s.alloc("full", 2)


@scene(shapes=PAGED_FLOATING, total_bytes=64 * 96 * 4, results=True)
def float_reuses_uncounted_holes(s: Tape) -> None:
    mid = s.alloc("mid", 10 * PAGE)  # abcdefghij
    s.free("mid", tokens(mid, 7, 2, 3, 5))  # ab..e.g.ij
    s.alloc("mid", PAGE)  # 2: the lowest hole
    s.alloc("mid", PAGE)  # 3: the highest
    s.state()


@scene(shapes=PAGED_FLOATING, total_bytes=64 * 96 * 4)
def float_gives_back_uncounted(s: Tape) -> None:
    mid = s.alloc("mid", 10 * PAGE)
    s.free("mid", tokens(mid, 1, 4, 0))  # 1: ..cd.fghij
    assert s.flush("mid") == 2  # 2: cd.fghij
    s.free("mid", tokens(mid, 9))


@scene(shapes=PAGED_FLOATING, total_bytes=64 * 96 * 4)
def meets_a_float(s: Tape) -> None:
    mid = s.alloc("mid", 10 * PAGE)
    s.move_gate(is_open=False)
    s.free("mid", tokens(mid, 4, 2))  # 2: how many pages these are is on its way
    assert s.alloc("full", s.pools["full"].available_size() + PAGE) is None  # 3
