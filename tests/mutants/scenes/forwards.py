"""Flushes while forwards run, gates and leases. See `tests.mutants.scenes` for how to read the comments."""

from __future__ import annotations

from tests.mutants.registry import Tape, scene
from tests.mutants.scenes.shapes import FLOATING, PAGED


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
