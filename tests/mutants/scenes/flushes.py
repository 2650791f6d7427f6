"""Flushes. See `tests.mutants.scenes` for how to read the comments."""

from __future__ import annotations

from tests.mutants.registry import Tape, scene
from tests.mutants.scenes.shapes import EAGER, PAGED


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
