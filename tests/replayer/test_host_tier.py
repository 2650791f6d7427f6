"""Copies to and from the host: places as they were when a copy was queued, bytes as they are when it is over, contents after the trip."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from allocator import MultiEndedAllocator
from recorder.trace import EventKind, ImpossibleEvent
from replayer import host_pool
from replayer.checks import CheckOptions
from replayer.errors import UsageError
from replayer.replay import Outcome, ReplayOptions, replay
from replayer.targets import TargetOptions
from tests.scenario import PoolShape, Scenario

pytestmark = pytest.mark.cpu

PAGED = (
    PoolShape("full", "down", page_size=4),
    PoolShape("swa", "up", page_size=4, layer_num=2, owner="full"),
)
EVERYTHING = CheckOptions(every=1)


def run(
    path: Path, allocator: str = "kvtape", kv: str = "stamp", checks: CheckOptions = EVERYTHING, **target: str
) -> Outcome:
    ids = target.pop("ids", "auto")
    return replay(ReplayOptions(path, TargetOptions(allocator=allocator, kv=kv, **target), checks, ids=ids))


def failed_at(outcome: Outcome) -> tuple[str, int] | None:
    return None if outcome.failure is None else (outcome.failure.check, outcome.failure.seq)


def here(mutant: type[Any]) -> str:
    return f"{__name__}:{mutant.__name__}"


class DoesNotWaitForCopies(MultiEndedAllocator):
    """Moves and reuses places without ordering its stream behind the copies that use them."""

    def _order_after_readers(self) -> None: ...

    def set_hicache_transfer_done_event(self, transfer_key: Any, event: Any) -> None:
        super().set_hicache_transfer_done_event(transfer_key, event)
        self._forward.transfers.clear()


class ReservesTheSamePlaceTwice(MultiEndedAllocator):
    def alloc_physical(self, need_size: int) -> torch.Tensor | None:
        tokens = super().alloc_physical(need_size)
        return None if tokens is None else tokens[: self.page_size].repeat(need_size // self.page_size)


class MovesReservedPlaces(MultiEndedAllocator):
    """Forgets that a load is to come."""

    def alloc_physical(self, need_size: int) -> torch.Tensor | None:
        tokens = super().alloc_physical(need_size)
        self._reserved_for_load = 0
        return tokens


@pytest.mark.parametrize("kv", ["stamp", "full"])
@pytest.mark.parametrize("strategy", ["per-row", "hybrid", "batched", "device"])
def test_a_round_trip_gives_the_same_bytes_under_new_ids(tmp_path: Path, kv: str, strategy: str) -> None:
    s = Scenario(tmp_path / "s.msgpack.zst", PAGED)
    old = s.alloc_extend("full", [0], [10], [-1])
    assert old
    s.forward_begin("full", 1, writes=old[4:6])
    s.forward_done(1)
    s.backup(1, "full", old, [5, 7, 6])
    s.copy_done(1, "full")
    s.free("full", old)
    s.alloc("full", 16)
    new = s.alloc("full", 12)
    assert new and set(new).isdisjoint(old)
    s.load_back(2, "full", new, [5, 7, 6])
    s.copy_done(2)
    s.flush("full", urgent=True)
    s.free("full", new)
    s.host_free("full", [5, 6, 7])
    assert failed_at(run(s.close(), kv=kv, strategy=strategy)) is None


@pytest.mark.parametrize("kv", ["stamp", "full"])
def test_a_load_into_reserved_places_that_are_bound_before_or_after_it(tmp_path: Path, kv: str) -> None:
    s = Scenario(tmp_path / "s.msgpack.zst", PAGED)
    full = s.alloc("full", 16)
    assert full
    pages = [token // 4 for token in full[::4]]
    s.alloc_with_virtual("swa", pages[:2])
    s.backup(1, "swa", full[:8], [0, 1])
    s.copy_done(1)
    s.free("swa", full[:8])
    for number, early in ((2, True), (3, False)):
        tokens = s.alloc_physical("swa", 8)
        assert tokens
        places = [tokens[0] // 4, tokens[4] // 4]
        if early:
            s.bind("swa", pages[:2], places)
        s.load_back_places(number, "swa", places, [0, 1])
        if early:
            s.copy_done(number)
        else:
            s.copy_done(number)
            s.bind("swa", pages[2:], places)
    s.free("swa", full[:8])
    s.flush("swa", urgent=True)
    assert failed_at(run(s.close(), kv=kv)) is None


@pytest.mark.parametrize("kv", ["stamp", "full"])
def test_a_flush_waits_for_the_copies_of_the_pages_it_moves(tmp_path: Path, kv: str) -> None:
    s = Scenario(tmp_path / "s.msgpack.zst", PAGED)
    ids = s.alloc("full", 16)
    assert ids
    s.free("full", ids[12:])
    s.backup(1, "full", ids[:4], [0])
    assert s.flush("full", urgent=True) == 1
    s.copy_done(1)
    s.free("full", ids[4:8])
    s.load_back(2, "full", ids[8:12], [0])
    s.flush("full", urgent=True)
    s.copy_done(2)
    path = s.close()
    assert failed_at(run(path, kv=kv)) is None
    assert failed_at(run(path, here(DoesNotWaitForCopies), kv=kv)) == ("C8", 3)


@pytest.mark.parametrize("kv", ["stamp", "full"])
def test_a_load_lands_where_it_was_queued(tmp_path: Path, kv: str) -> None:
    s = Scenario(tmp_path / "s.msgpack.zst", PAGED)
    ids = s.alloc("full", 16)
    assert ids
    s.backup(1, "full", ids[4:8], [0])
    s.copy_done(1)
    s.free("full", ids[12:])
    s.load_back(2, "full", ids[:4], [0])
    assert s.flush("full", urgent=True) == 1
    s.copy_done(2)
    path = s.close()
    assert failed_at(run(path, kv=kv)) is None
    mutant = here(DoesNotWaitForCopies)
    assert failed_at(run(path, mutant, kv=kv)) == ("C7", 5)
    # Without C7 the bytes tell, when they have landed in the place that the page left.
    contents = CheckOptions(every=1, enabled=frozenset({"C6"}))
    assert failed_at(run(path, mutant, kv=kv, checks=contents)) == ("C6", 6)


def test_a_source_that_is_freed_and_handed_out_fails_the_backup(tmp_path: Path) -> None:
    """The engine's rule: a copy's source is free only when the copy is over. Here it breaks it."""
    s = Scenario(tmp_path / "s.msgpack.zst", PAGED)
    ids = s.alloc("full", 16)
    assert ids
    s.backup(1, "full", ids[:4], [0])
    s.free("full", ids[:4])
    s.alloc("full", 4)
    s.copy_done(1)
    path = s.close()
    assert failed_at(run(path)) == ("C8", 3)


@pytest.mark.parametrize("mutant", [None, ReservesTheSamePlaceTwice, MovesReservedPlaces])
def test_reservations(tmp_path: Path, mutant: type[Any] | None) -> None:
    s = Scenario(tmp_path / "s.msgpack.zst", PAGED)
    full = s.alloc("full", 4)
    assert full
    s.alloc_with_virtual("swa", [full[0] // 4])
    tokens = s.alloc_physical("swa", 8)
    assert tokens
    s.cancel_physical("swa", tokens[:4])
    s.flush("swa", urgent=True)
    s.free_physical("swa", tokens[4:])
    assert s.alloc_physical("swa", 4000) is None
    expected = {None: None, ReservesTheSamePlaceTwice: ("C2", 2), MovesReservedPlaces: ("C9", 2)}[mutant]
    assert failed_at(run(s.close(), "kvtape" if mutant is None else here(mutant))) == expected


def test_a_refused_reservation_that_was_promised(tmp_path: Path) -> None:
    s = Scenario(tmp_path / "s.msgpack.zst", PAGED)
    s.write(EventKind.ALLOC_PHYSICAL, "swa", value=8)
    assert failed_at(run(s.close(), here(RefusesReservations))) == ("C10", 0)


class RefusesReservations(MultiEndedAllocator):
    def alloc_physical(self, need_size: int) -> torch.Tensor | None:
        return None


def test_a_clear_ends_what_it_finds(tmp_path: Path) -> None:
    s = Scenario(tmp_path / "s.msgpack.zst", PAGED)
    ids = s.alloc("full", 8)
    assert ids
    s.backup(1, "full", ids[:4], [0])
    s.copy_done(1)
    s.backup(2, "full", ids[4:], [1])
    s.load_back(3, "full", ids[:4], [0])
    s.pools["full"].clear()
    s.write(EventKind.CLEAR, "full")
    s.copy_done(2)
    s.copy_done(3)
    s.host_free("full", [0])
    new = s.alloc("full", 4)
    assert new
    s.load_back(4, "full", new, [1])
    s.copy_done(4)
    assert failed_at(run(s.close())) is None


def damaged(name: str, reason: str, tell: Callable[[Scenario, list[int]], None]) -> Any:
    return pytest.param(reason, tell, id=name)


def _twice_over(s: Scenario, ids: list[int]) -> None:
    s.backup(1, "full", ids[:4], [0])
    s.copy_done(1)
    s.copy_done(1)


def _numbered_twice(s: Scenario, ids: list[int]) -> None:
    s.backup(1, "full", ids[:4], [0])
    s.copy_done(1)
    s.backup(1, "full", ids[:4], [1])


def _occupied(s: Scenario, ids: list[int]) -> None:
    s.backup(1, "full", ids[:4], [0])
    s.copy_done(1)
    s.backup(2, "full", ids[4:8], [0])


def _overlapping(s: Scenario, ids: list[int]) -> None:
    s.backup(1, "full", ids[:8], [0, 1])
    s.backup(2, "full", ids[8:12], [1])


def _too_early(s: Scenario, ids: list[int]) -> None:
    s.backup(1, "full", ids[:4], [0])
    s.load_back(2, "full", ids[4:8], [0])


def _given_up(s: Scenario, ids: list[int]) -> None:
    s.backup(1, "full", ids[:4], [0])
    s.copy_done(1)
    s.host_free("full", [0])
    s.load_back(2, "full", ids[4:8], [0])


def _freed_while_read(s: Scenario, ids: list[int]) -> None:
    s.backup(1, "full", ids[:4], [0])
    s.copy_done(1)
    s.load_back(2, "full", ids[4:8], [0])
    s.host_free("full", [0])


def _reserved_only(s: Scenario, ids: list[int]) -> None:
    tokens = s.alloc_physical("swa", 4)
    assert tokens
    s._begin_copy(EventKind.BACKUP_BEGIN, 1, "swa", [tokens[0] // 4], [0], None)


def _cancelled_after_its_load(s: Scenario, ids: list[int]) -> None:
    tokens = s.alloc_physical("swa", 4)
    assert tokens
    s.backup(1, "full", ids[:4], [0])
    s.write(EventKind.CANCEL_PHYSICAL, "swa", list0=[*tokens, *range(100, 104)])


@pytest.mark.parametrize(
    ("reason", "tell"),
    [
        damaged("never written", "no backup to them is over", lambda s, ids: s.load_back(1, "full", ids[:4], [3])),
        damaged("backup not over", "no backup to them is over", _too_early),
        damaged("given up", "no backup to them is over", _given_up),
        damaged("occupied", "hold a page, or a copy is filling", _occupied),
        damaged("overlapping", "hold a page, or a copy is filling", _overlapping),
        damaged("a slot twice", "named twice", lambda s, ids: s.backup(1, "full", ids[:8], [3, 3])),
        damaged("a slot below 0", "below 0", lambda s, ids: s.backup(1, "full", ids[:4], [-3])),
        damaged("slots too few", r"2 page\(s\) names 1 host slot", lambda s, ids: s.backup(1, "full", ids[:8], [3])),
        damaged("over twice", "none of that number runs", _twice_over),
        damaged("never begun", "none of that number runs", lambda s, ids: s.copy_done(9)),
        damaged("numbered twice", "begun before", _numbered_twice),
        damaged("freed while read", "while a load reads them", _freed_while_read),
        damaged("freed while empty", "no backup to them is over", lambda s, ids: s.host_free("full", [8])),
        damaged("reserved only", "hold nothing yet", _reserved_only),
        damaged("not whole pages", "not whole pages|not reserved", _cancelled_after_its_load),
    ],
)  # fmt: skip
def test_copies_that_cannot_be(
    tmp_path: Path, reason: str, tell: Callable[[Scenario, list[int]], Any]
) -> None:
    s = Scenario(tmp_path / "s.msgpack.zst", PAGED)
    ids = s.alloc("full", 12)
    assert ids
    tell(s, ids)
    with pytest.raises(ImpossibleEvent, match=reason):
        run(s.close())


def test_where_ids_are_mapped_copies_need_virtual_ids(tmp_path: Path) -> None:
    s = Scenario(tmp_path / "s.msgpack.zst", PAGED)
    ids = s.alloc("full", 12)
    assert ids
    s.backup(1, "full", ids[:4], [0])
    s.copy_done(1)
    s.load_back(2, "full", ids[4:8], [0])
    s.copy_done(2)
    assert failed_at(run(s.close(), ids="mapped")) is None
    s = Scenario(tmp_path / "t.msgpack.zst", PAGED)
    ids = s.alloc("full", 12)
    assert ids
    s._begin_copy(EventKind.BACKUP_BEGIN, 1, "full", [s.place_of("full", ids[0] // 4)], [0], None)
    with pytest.raises(UsageError, match="replay with --ids recorded"):
        run(s.close(), ids="mapped")


def test_a_host_pool_has_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_pool, "MAX_HOST_BYTES", 100)
    s = Scenario(tmp_path / "s.msgpack.zst", PAGED)
    ids = s.alloc("full", 12)
    assert ids
    s.backup(1, "full", ids, np.arange(3).tolist())
    s.copy_done(1)
    path = s.close()
    assert failed_at(run(path)) is None
    with pytest.raises(UsageError, match="--kv stamp"):
        run(path, kv="full")


def test_timing_needs_no_bytes(tmp_path: Path) -> None:
    s = Scenario(tmp_path / "s.msgpack.zst", PAGED)
    ids = s.alloc("full", 12)
    assert ids
    s.backup(1, "full", ids[:4], [0])
    s.export(1, "full", ids[:4])
    s.lease_end(1, "full")
    s.copy_done(1)
    s.load_back(2, "full", ids[4:8], [0])
    s.copy_done(2)
    s.host_free("full", [0])
    outcome = replay(ReplayOptions(s.close(), TargetOptions(kv="stamp"), checks=None, ledger=False))
    assert outcome.verdict == "held" and outcome.events == 8
