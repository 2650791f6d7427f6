"""The traces that show the faults, most of them good for several. Comments give the pages of the pool, lowest first:
letters are live, ``.`` is a hole, ``-`` waits for a forward, ``|`` is the watermark.

``full`` grows down from page 63, ``swa`` up from page 1; in chains with a float, ``mid`` lies between ``full`` and ``mamba``.
"""

from __future__ import annotations

from tests.mutants.registry import Tape, scene
from tests.scenario import PoolShape

PAGED = (PoolShape("full", "down", page_size=4), PoolShape("swa", "up", page_size=4, layer_num=2))
SHARED = (PoolShape("full", "down"), PoolShape("swa", "up", layer_num=2, owner="full"))
EAGER = (PoolShape("full", "down", lazy=False), PoolShape("swa", "up", layer_num=2, lazy=False))
ALONE = (PoolShape("full", "down"),)
FLOATING = (
    PoolShape("full", "down"),
    PoolShape("mid", "float", layer_num=2),
    PoolShape("mamba", "up", kind="mamba", layer_num=2),
)

# -- flush


@scene()
def packs_down(s: Tape) -> None:
    ids = s.alloc("full", 8)  # |abcdefgh
    assert ids
    s.free("full", ids[5:8])  # |abcde...
    assert s.flush("full", urgent=True) == 3  # |decba, or what is left of it
    s.free("full", ids[:5])


@scene()
def packs_up(s: Tape) -> None:
    ids = s.alloc("swa", 8)  # abcdefgh|
    assert ids
    s.free("swa", ids[:3])  # ...defgh|
    assert s.flush("swa", urgent=True) == 3  # hgfde|
    s.free("swa", ids[3:])


@scene()
def retreats_down(s: Tape) -> None:
    ids = s.alloc("full", 8)
    assert ids
    s.free("full", [*ids[:2], ids[4]])  # |..cd.fgh
    assert s.flush("full") == 1  # |dcfgh
    s.free("full", ids[5:])


@scene()
def retreats_up(s: Tape) -> None:
    ids = s.alloc("swa", 8)
    assert ids
    s.free("swa", [ids[3], *ids[6:]])  # abc.ef..|
    assert s.flush("swa") == 1  # abcfe|
    s.free("swa", ids[:3])


@scene()
def gives_back_down(s: Tape) -> None:
    ids = s.alloc("full", 8)
    assert ids
    s.free("full", ids[:3])  # |...defgh
    assert s.flush("full") == 0  # |defgh
    s.alloc("full", 2)


@scene()
def gives_back_up(s: Tape) -> None:
    ids = s.alloc("swa", 8)
    assert ids
    s.free("swa", ids[5:])  # abcde...|
    assert s.flush("swa") == 0  # abcde|
    s.alloc("swa", 2)


@scene()
def cursors_meet(s: Tape) -> None:
    ids = s.alloc("swa", 9)
    assert ids
    s.free("swa", [ids[2], ids[7]])  # ab.defg.i|
    assert s.flush("swa") == 1  # abidefg|.. with holes behind
    s.free("swa", ids[:2])


@scene()
def drains_in_part(s: Tape) -> None:
    ids = s.alloc("full", 8)
    assert ids
    s.free("full", [ids[1], ids[6], ids[7]])  # |a.cdef..
    assert s.flush("full", urgent=True) == 2  # of three pages next to the watermark two are live


@scene()
def frees_out_of_order(s: Tape) -> None:
    ids = s.alloc("swa", 10)
    assert ids
    s.free("swa", [ids[6], ids[1], ids[4], ids[2]])  # a..d.f.hij|
    s.flush("swa")  # ajidhf|
    s.free("swa", ids[7:])


@scene()
def scattered_holes(s: Tape) -> None:
    ids = s.alloc("full", 8)
    assert ids
    s.free("full", [ids[2], ids[6], ids[7]])  # |ab.def..
    s.flush("full")  # |edfba with holes in front
    s.free("full", ids[3:6])


@scene()
def moves_many(s: Tape) -> None:
    ids = s.alloc("full", 30)
    assert ids
    s.free("full", ids[20:30])
    s.flush("full")  # its bound is 4 moves
    s.flush("full", urgent=True)


@scene()
def drains_many(s: Tape) -> None:
    ids = s.alloc("full", 30)
    assert ids
    s.free("full", ids[20:30])
    assert s.flush("full", urgent=True) == 10  # no bound holds for an urgent flush
    s.free("full", ids[:5])


@scene(results=True)
def packs_as_recorded(s: Tape) -> None:
    ids = s.alloc("full", 12)
    assert ids
    s.free("full", ids[5:9])
    s.flush("full", urgent=True)
    s.state()


@scene(move_cap=1)
def retreats_with_a_bound(s: Tape) -> None:
    ids = s.alloc("full", 8)
    assert ids
    s.free("full", [*ids[:2], ids[4], ids[6]])  # |..cd.f.h
    s.flush("full")  # one move of two
    s.flush("full")


@scene(shapes=PAGED, total_bytes=64 * 64 * 4)
def moves_a_page(s: Tape) -> None:
    ids = s.alloc("full", 16)  # 4 pages
    assert ids
    s.free("full", ids[12:16])
    assert s.flush("full", urgent=True) == 1


@scene(shapes=EAGER)
def packs_at_every_free(s: Tape) -> None:
    ids = s.alloc("full", 8)
    assert ids
    s.free("full", [ids[2], ids[5], ids[7]])  # |abdeg at once
    s.free("full", ids[3:5])


# -- forwards and gates


@scene()
def two_batches_one_event(s: Tape) -> None:
    ids = s.alloc("full", 12)
    assert ids
    s.free("full", ids[1:3])
    s.forward_begin("full", 1)
    s.flush("full")  # 3: pages wait for forward 1
    s.free("full", ids[3:5])
    s.flush("full")  # 5: more wait for the same event
    s.forward_done(1)
    s.flush("full")  # 7: all of them come back
    s.alloc("full", 4)


@scene()
def read_while_moving(s: Tape) -> None:
    ids = s.alloc("full", 6)
    assert ids
    s.free("full", ids[4:5])  # |abcd.f
    s.forward_begin("full", 1, writes=None)
    s.flush("full")  # 3: |-bcdaf, forward 1 may read a at its old place
    s.alloc("full", 2)
    s.forward_done(1)
    s.flush("full")  # 6


@scene()
def two_forwards(s: Tape) -> None:
    ids = s.alloc("full", 10)
    assert ids
    s.free("full", ids[8:9])
    s.forward_begin("full", 1)
    s.flush("full")  # 3: one page waits for forward 1
    s.forward_begin("full", 2)
    s.free("full", ids[6:7])
    s.flush("full")  # 6: one more waits for forward 2
    s.forward_done(1)
    s.flush("full")  # 8: the first comes back, the second does not
    s.forward_done(2)


@scene()
def urgent_while_reading(s: Tape) -> None:
    ids = s.alloc("full", 10)
    assert ids
    s.free("full", ids[8:9])
    s.forward_begin("full", 1)
    s.flush("full")  # 3: one page waits for forward 1
    s.free("full", ids[5:7])
    s.flush("full", urgent=True)  # 5: ordered behind forward 1
    s.alloc("full", 4)
    s.forward_done(1)


@scene()
def moves_what_is_written(s: Tape) -> None:
    ids = s.alloc("full", 6)
    assert ids
    s.free("full", [ids[0], ids[5]])  # |.bcde.
    s.forward_begin("full", 1, writes=[ids[1], ids[4]])
    s.flush("full")  # 3: stops at b
    s.forward_done(1)


@scene(shapes=PAGED, total_bytes=64 * 64 * 4)
def writes_in_pages(s: Tape) -> None:
    ids = s.alloc("full", 24)  # 6 pages
    assert ids
    s.free("full", ids[20:24])
    s.forward_begin("full", 1, writes=[ids[3]])
    s.flush("full")  # 3: stops at the first page
    s.forward_done(1)


@scene()
def writes_many(s: Tape) -> None:
    ids = s.alloc("full", 16)
    assert ids
    s.free("full", ids[12:14])
    s.forward_begin("full", 1, writes=ids[4:12])
    s.flush("full")  # 3
    s.forward_done(1)


@scene()
def urgent_while_writing(s: Tape) -> None:
    ids = s.alloc("full", 6)
    assert ids
    s.free("full", ids[4:6])
    s.forward_begin("full", 1, writes=[ids[0]])
    s.flush("full", urgent=True)  # 3: ordered behind forward 1, which wrote a where it was
    s.forward_done(1)


@scene()
def writes_nothing_next(s: Tape) -> None:
    ids = s.alloc("full", 6)
    assert ids
    s.forward_begin("full", 1, writes=[ids[0]])
    s.forward_begin("full", 2, writes=None)
    s.forward_done(2)
    s.free("full", ids[4:6])
    s.flush("full")  # 5: nothing runs


@scene()
def flushes_behind_a_gate(s: Tape) -> None:
    ids = s.alloc("full", 6)
    assert ids
    s.free("full", ids[4:5])
    s.move_gate(is_open=False)
    s.flush("full", urgent=True)  # 3: nothing
    s.flush("full")  # 4: nothing
    s.move_gate(is_open=True)  # 5
    s.flush("full")


@scene()
def shuts_a_gate_later(s: Tape) -> None:
    ids = s.alloc("full", 8)
    assert ids
    s.move_gate(is_open=True)
    s.free("full", ids[6:8])
    s.flush("full")
    s.free("full", ids[3:4])
    s.move_gate(is_open=False)  # 5
    s.flush("full")


@scene(shapes=FLOATING, total_bytes=64 * 96)
def leases_a_state(s: Tape) -> None:
    """The states' gate is shut while one of them is copied out by its place (sgl-project/sglang#37417)."""
    slots = s.alloc("mamba", 4)
    s.alloc("full", 4)
    assert slots
    s.move_gate(is_open=False)
    s.lease_begin(1, "mamba", [s.place_of("mamba", slots[3])])
    s.free("mamba", slots[:1])
    s.flush("mamba", urgent=True)  # 5
    s.lease_end(1, "mamba")
    s.move_gate(is_open=True)


# -- alloc and free


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


# -- capacity


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


# -- floats


@scene(shapes=FLOATING, total_bytes=64 * 96)
def float_makes_room(s: Tape) -> None:
    mid = s.alloc("mid", 8)
    assert mid
    room = s.pools["full"].available_size()
    s.free("mid", mid[2:5])
    s.flush("full")
    s.make_room("mid", "high", (room + 2) * 64)  # 3: moves to the low side
    s.alloc("full", room + 1)


@scene(shapes=FLOATING, total_bytes=64 * 96)
def float_has_no_room(s: Tape) -> None:
    s.alloc("mid", 8)
    s.alloc("full", 4)
    s.make_room("mid", "high", 64 * 96)  # 2: more than there is
    s.flush("full")


@scene(shapes=FLOATING, total_bytes=64 * 96)
def float_gives_way(s: Tape) -> None:
    s.alloc("mid", 8)
    room = s.pools["full"].available_size()
    s.alloc("full", room + 2)  # 1: more than its gap; the float moves over


@scene(shapes=FLOATING, total_bytes=64 * 96)
def float_behind_a_gate(s: Tape) -> None:
    """sgl-project/sglang#39982: while the gate is shut the float stays, and the alloc fails."""
    s.alloc("mid", 8)
    room = s.pools["full"].available_size()
    s.move_gate(is_open=False)
    assert s.alloc("full", room + 2) is None  # 2
    s.move_gate(is_open=True)


@scene(shapes=FLOATING, total_bytes=64 * 96)
def float_is_written(s: Tape) -> None:
    mid = s.alloc("mid", 8)
    assert mid
    room = s.pools["full"].available_size()
    s.forward_begin("mid", 1, writes=mid[6:8])
    s.flush("full")
    s.make_room("mid", "high", (room + 2) * 64)  # 3: ordered behind forward 1
    s.forward_done(1)


@scene(shapes=FLOATING, total_bytes=64 * 96)
def float_gives_back(s: Tape) -> None:
    mid = s.alloc("mid", 10)
    assert mid
    s.free("mid", [mid[0], mid[1], mid[4], mid[9]])  # ..cd.fghi.
    assert s.flush("mid") == 3  # 2: cd.fghi
    s.free("mid", mid[5:9])


@scene(shapes=FLOATING, total_bytes=64 * 96)
def float_reuses(s: Tape) -> None:
    mid = s.alloc("mid", 10)
    assert mid
    s.free("mid", mid[3:6])
    s.alloc("mid", 2)  # 2: two of the holes
    s.alloc("mid", 2)  # 3: the last one, and a page beyond


@scene(shapes=FLOATING, total_bytes=64 * 96)
def float_packs(s: Tape) -> None:
    mid = s.alloc("mid", 10)
    assert mid
    s.free("mid", [mid[1], mid[4]])  # a.cd.fghij
    s.compact_holes("mid", "high")  # 2: acdfghij
    s.free("mid", mid[5:7])
    s.compact_holes("mid", "low")  # 4
    s.free("mid", mid[7:])


@scene(shapes=FLOATING, total_bytes=64 * 96)
def float_empties(s: Tape) -> None:
    mid = s.alloc("mid", 8)
    assert mid
    s.free("mid", mid[3:5])  # 1
    s.free("mid", mid[:3])
    s.flush("mid")  # 3
    s.free("mid", mid[5:])  # 4: empty; its neighbours look through
    s.alloc("full", s.pools["full"].available_size())
    s.flush("full")


@scene(shapes=FLOATING, total_bytes=64 * 96)
def float_grows(s: Tape) -> None:
    s.alloc("full", 10)
    s.alloc("mid", 4)
    s.alloc("mid", s.pools["mid"].available_size())  # 2: up to one neighbour
    s.alloc("mid", s.pools["mid"].available_size())  # 3: and to the other
    s.alloc("mid", 1)  # 4: refused


@scene(shapes=FLOATING, total_bytes=64 * 96, results=True)
def float_places(s: Tape) -> None:
    mid = s.alloc("mid", 10)
    s.state()
    assert mid
    s.free("mid", mid[2:8])
    s.alloc("mid", 2)  # 2: the lowest holes
    s.alloc("mid", 2)  # 3: the highest
    s.state()


# -- copies, reservations, leases


@scene(shapes=PAGED, total_bytes=64 * 64 * 4)
def copies_to_the_host(s: Tape) -> None:
    ids = s.alloc("full", 16)
    assert ids
    s.backup(1, "full", ids[:8], [0, 1])
    s.free("full", ids[12:16])
    s.flush("full", urgent=True)  # 3: ordered behind the copy
    s.copy_done(1)


@scene(shapes=PAGED, total_bytes=64 * 64 * 4)
def reserves(s: Tape) -> None:
    ids = s.alloc("full", 24)
    assert ids
    s.free("full", [*ids[4:8], *ids[16:20]])
    tokens = s.alloc_physical("full", 4)  # 2: one of two holes
    assert tokens
    assert s.flush("full", urgent=True) == 0  # 3: nothing moves until the load is queued, or cancelled
    s.cancel_physical("full", tokens)  # 4
    s.flush("full", urgent=True)


@scene(shapes=PAGED, total_bytes=64 * 64 * 4)
def lends_a_page(s: Tape) -> None:
    ids = s.alloc("full", 16)
    assert ids
    s.export(1, "full", ids[4:8])
    s.free("full", ids[4:8])  # 2: its bytes are still read
    s.lease_end(1, "full")


@scene()
def copies_twice_to_the_host(s: Tape) -> None:
    ids = s.alloc("full", 8)  # |abcdefgh
    assert ids
    s.backup(1, "full", ids[:1], [0])
    s.backup(2, "full", ids[5:6], [1])
    s.free("full", ids[3:4])
    s.flush("full", urgent=True)  # 4: a page that a copy reads is moved
    s.copy_done(1)
    s.copy_done(2)


@scene()
def backs_up_beside_a_reservation(s: Tape) -> None:
    ids, places = s.alloc("full", 8), s.alloc_physical("full", 2)
    assert ids and places
    s.free("full", ids[3:5])
    s.backup(1, "full", ids[:1], [0])  # 3
    assert s.flush("full", urgent=True) == 0
    s.copy_done(1)
    s.cancel_physical("full", places)
    s.flush("full", urgent=True)
