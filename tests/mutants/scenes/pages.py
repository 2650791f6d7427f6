"""Pages handed out and given back, and what a pool says it has. See `tests.mutants.scenes` for how to read the comments."""

from __future__ import annotations

from tests.mutants.registry import Tape, scene
from tests.mutants.scenes.shapes import ALONE, PAGED, SHARED


@scene()
def frees(s: Tape) -> None:
    ids = s.alloc("full", 6)
    assert ids
    s.free("full", ids[1:4])
    s.flush("full")
    s.alloc("full", 2)


@scene()
def allocates(s: Tape) -> None:
    s.alloc("full", 6)
    s.alloc("swa", 3)
    s.alloc("full", 2)


@scene()
def allocates_much(s: Tape) -> None:
    s.alloc("full", 40)
    s.alloc("full", 10)


@scene(results=True)
def allocates_into_holes(s: Tape) -> None:
    ids = s.alloc("full", 20)
    assert ids
    s.state()
    s.free("full", ids[4:9])
    s.alloc("full", 3)  # 2: the highest of the holes
    s.state()


@scene(results=True)
def allocates_again(s: Tape) -> None:
    ids = s.alloc("full", 60)
    assert ids
    s.free("full", ids[10:20])
    s.alloc("full", 6)  # 2: the ids that were never used, then the freed ones
    s.state()


@scene()
def refuses_too_much(s: Tape) -> None:
    s.alloc("swa", 10)
    s.alloc("full", 30)
    assert s.alloc("full", 30) is None  # 2: nothing changes
    s.alloc("full", 4)


@scene()
def refuses_with_holes(s: Tape) -> None:
    s.alloc("swa", 10)
    ids = s.alloc("full", 30)
    assert ids
    s.free("full", ids[4:6])
    s.move_gate(is_open=True)
    assert s.alloc("full", 30) is None  # 4: nothing changes
    s.alloc("full", 4)


@scene()
def takes_holes(s: Tape) -> None:
    ids = s.alloc("full", 8)
    assert ids
    s.free("full", ids[2:5])
    s.alloc("full", 2)  # 2: two of the three holes
    s.alloc("full", 3)


@scene()
def grows_by_a_page(s: Tape) -> None:
    s.alloc("swa", 10)
    s.alloc("full", s.pools["full"].available_size())
    s.alloc("full", 1)  # 2: refused


@scene()
def exports_after_a_move(s: Tape) -> None:
    """sgl-project/sglang#31471: until something moves, virtual ids of a pool that grows up are its places."""
    ids = s.alloc("swa", 3)
    assert ids
    s.free("swa", ids[:1])
    assert s.flush("swa", urgent=True) == 1  # 2


@scene()
def grows_into_the_neighbour(s: Tape) -> None:
    s.alloc("swa", 10)
    s.alloc("full", s.pools["full"].available_size())
    s.alloc("full", 8)  # 2: refused
    s.alloc("swa", 1)  # 3: refused


@scene()
def up_meets_down(s: Tape) -> None:
    s.alloc("full", 10)
    s.alloc("swa", s.pools["swa"].available_size())
    s.alloc("swa", 1)  # 2: refused


@scene(shapes=ALONE, total_bytes=64 * 32)
def fills_the_buffer(s: Tape) -> None:
    s.alloc("full", s.pools["full"].available_size())
    s.alloc("full", 1)  # 1: the low end is for padding


@scene()
def needs_its_neighbours_holes(s: Tape) -> None:
    swa = s.alloc("swa", 10)
    assert swa
    s.alloc("full", s.pools["full"].available_size())
    s.free("swa", swa[2:6])
    assert s.alloc("full", 4) is not None  # 3


@scene(shapes=PAGED, total_bytes=64 * 64 * 4)
def decodes(s: Tape) -> None:
    ids = s.alloc_extend("full", [0], [5], [-1])
    assert ids
    s.alloc_decode("full", [6], [ids[-1]])  # 1: in the page it has
    s.alloc_extend("full", [6], [10], [ids[-1] + 1])  # 2: that page first


@scene(shapes=PAGED, total_bytes=64 * 64 * 4)
def reuses_a_page(s: Tape) -> None:
    ids = s.alloc("full", 16)
    assert ids
    s.free("full", ids[4:8])
    s.alloc_extend("full", [0], [2], [-1])  # 2: half of a page that had tokens of another request
    s.flush("full")


@scene(shapes=SHARED)
def binds_shared_ids(s: Tape) -> None:
    ids = s.alloc("full", 6)
    assert ids
    s.alloc_with_virtual("swa", ids[:4])  # 1
    s.free("swa", ids[:2])
    s.flush("swa", urgent=True)


@scene(shapes=PAGED, total_bytes=64 * 64 * 4)
def frees_some_tokens_of_a_page(s: Tape) -> None:
    ids = s.alloc("full", 16)
    assert ids
    s.free("full", [ids[4], ids[5], ids[7]])  # 1: one page
    s.flush("full")


@scene(shapes=PAGED, total_bytes=64 * 64 * 4)
def frees_tokens_of_pages(s: Tape) -> None:
    ids = s.alloc("full", 20)
    assert ids
    s.free("full", [ids[1], ids[4], ids[6], ids[12]])  # 1: three pages
    s.flush("full")


@scene(shapes=PAGED, total_bytes=64 * 64 * 4)
def frees_a_segment(s: Tape) -> None:
    ids = s.alloc_extend("full", [0], [14], [-1])
    assert ids
    s.free_segment("full", ids[4:], start=4)  # 1: three pages, the last of them half full
    s.flush("full")


@scene(shapes=PAGED, total_bytes=64 * 64 * 4)
def frees_in_a_group(s: Tape) -> None:
    ids = s.alloc("full", 24)
    assert ids
    s.free_group_begin("full")
    s.free("full", ids[8:12])  # 2
    s.free_segment("full", ids[12:20], start=12)  # 3
    s.free_group_end("full")  # 4
    s.flush("full")
    s.free_group_begin("full")
    s.free("full", ids[:4])
    s.free_group_end("full")  # 8


@scene()
def clears(s: Tape) -> None:
    ids = s.alloc("full", 10)
    assert ids
    s.free("full", ids[8:9])
    s.forward_begin("full", 1)
    s.flush("full")
    s.free("full", ids[4:6])
    s.clear()  # 5: with holes, and with a page that waits
    s.alloc("full", 5)


@scene()
def capacity_changes(s: Tape) -> None:
    ids = s.alloc("full", 6)
    assert ids
    s.free("full", ids[4:5])
    s.flush("full", urgent=True)


@scene()
def neighbour_has_holes(s: Tape) -> None:
    swa = s.alloc("swa", 8)
    assert swa
    s.free("swa", swa[2:5])  # 1
    s.move_gate(is_open=False)  # 2: no credit
    s.move_gate(is_open=True)  # 3
    s.alloc("full", 2)


@scene()
def neighbour_waits(s: Tape) -> None:
    swa = s.alloc("swa", 8)
    assert swa
    s.free("swa", swa[2:4])
    s.forward_begin("swa", 1)
    s.flush("swa")  # 3: pages wait; no flush of now can count on them
    s.forward_done(1)
