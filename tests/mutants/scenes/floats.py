"""A float between two ends. See `tests.mutants.scenes` for how to read the comments."""

from __future__ import annotations

from tests.mutants.registry import Tape, scene
from tests.mutants.scenes.shapes import FLOATING


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
