"""Copies, reservations, leases. See `tests.mutants.scenes` for how to read the comments."""

from __future__ import annotations

from tests.mutants.registry import Tape, scene
from tests.mutants.scenes.shapes import PAGED


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
