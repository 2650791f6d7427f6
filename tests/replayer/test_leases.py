"""Leases: places used from outside keep their bytes and their names until the lease ends; and what a trace cannot say about them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from allocator import MultiEndedAllocator
from recorder.trace import EventKind, ImpossibleEvent
from replayer.checks import CheckOptions
from replayer.errors import UsageError
from replayer.replay import Outcome, ReplayOptions, replay
from replayer.targets import TargetOptions
from tests.scenario import PoolShape, Scenario

pytestmark = pytest.mark.cpu

PAGED = (PoolShape("full", "down", page_size=4), PoolShape("swa", "up", page_size=4, layer_num=2))
THREE = (
    PoolShape("full", "down", page_size=4),
    PoolShape("swa", "float", page_size=4),
    PoolShape("mamba", "up", kind="mamba", head_dim=2),
)


def run(path: Path, allocator: str = "kvtape", kv: str = "stamp", **options: Any) -> Outcome:
    return replay(ReplayOptions(path, TargetOptions(allocator=allocator, kv=kv), CheckOptions(), **options))


def failed_at(outcome: Outcome) -> tuple[str, int] | None:
    return None if outcome.failure is None else (outcome.failure.check, outcome.failure.seq)


class GateReadOnce(MultiEndedAllocator):
    """Asks its gate at the first call of a step and remembers the answer."""

    _answer: bool | None = None

    def moves_blocked(self) -> bool:
        if self._answer is None:
            self._answer = super().moves_blocked()
        return self._answer


class StatesAreNeverBlocked(MultiEndedAllocator):
    """Attention pools heed the gate, the state pool does not (sgl-project/sglang#37417)."""

    def moves_blocked(self) -> bool:
        return self.sub_pool_name != "mamba" and super().moves_blocked()


class ExportsVirtualIds(MultiEndedAllocator):
    """Hands out virtual ids where places are asked for (sgl-project/sglang#31471)."""

    def translate_kv_loc(self, virt_tokens: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        translated = super().translate_kv_loc(virt_tokens, out=out)
        live = translated > 0
        return torch.where(live, virt_tokens, translated) if out is None else translated


def here(mutant: type[Any]) -> str:
    return f"{__name__}:{mutant.__name__}"


@pytest.mark.parametrize("kv", ["stamp", "full"])
def test_a_lease_starts_at_the_export(tmp_path: Path, kv: str) -> None:
    """sgl-project/sglang#33362: the gate was open when the loop began; what is exported in the loop stays all the same."""
    s = Scenario(tmp_path / "s.msgpack.zst", PAGED, total_bytes=2048, leases_shut_gates=True)
    ids = s.alloc("full", 16)
    assert ids
    s.free("full", ids[8:])
    assert s.alloc("swa", 4)
    s.export(1, "full", ids[:4])
    assert s.alloc("swa", 4) is None  # past the gap, unless full moves
    s.lease_end(1, "full")
    assert s.alloc("swa", 4)
    path = s.close()
    assert failed_at(run(path, kv=kv)) is None
    assert failed_at(run(path, here(GateReadOnce), kv=kv)) == ("C9", 3)


def test_no_pool_moves_under_a_lease(tmp_path: Path) -> None:
    s = Scenario(tmp_path / "s.msgpack.zst", THREE, leases_shut_gates=True)
    slots = s.alloc("mamba", 4)
    s.alloc("full", 8)
    assert slots
    s.export(1, "mamba", slots[3:])
    s.free("mamba", slots[:1])
    assert s.flush("mamba", urgent=True) == 0
    s.lease_end(1, "mamba")
    path = s.close()
    assert failed_at(run(path)) is None
    assert failed_at(run(path, here(StatesAreNeverBlocked))) == ("C9", 2)


def test_an_export_is_translated(tmp_path: Path) -> None:
    s = Scenario(tmp_path / "s.msgpack.zst", PAGED)
    ids = s.alloc("full", 12)
    assert ids
    s.free("full", ids[8:])
    assert s.flush("full", urgent=True) == 1
    moved = ids[:4]
    assert s.export(1, "full", moved) != [moved[0] // 4]
    s.lease_end(1, "full")
    path = s.close()
    assert failed_at(run(path)) is None
    outcome = replay(
        ReplayOptions(
            path,
            TargetOptions(allocator=here(ExportsVirtualIds), kv="stamp"),
            CheckOptions(enabled=frozenset({"C8"})),
        )
    )
    assert failed_at(outcome) == ("C8", 3)


def test_a_virtual_id_recorded_as_a_place_is_told(tmp_path: Path) -> None:
    s = Scenario(tmp_path / "s.msgpack.zst", PAGED)
    ids = s.alloc("full", 12)
    assert ids
    s.free("full", ids[8:])
    s.flush("full", urgent=True)
    page = ids[0] // 4
    s.lease_begin(1, "full", [page], [page])
    with pytest.raises(ImpossibleEvent, match=r"event 3 .*virtual id was exported as if it were a place"):
        run(s.close())


@pytest.mark.parametrize("kv", ["stamp", "full"])
def test_a_freed_page_keeps_its_bytes_under_its_lease(tmp_path: Path, kv: str) -> None:
    s = Scenario(tmp_path / "s.msgpack.zst", PAGED)
    ids = s.alloc("full", 12)
    assert ids
    s.export(1, "full", ids[:4])
    s.free("full", ids[:4])
    s.lease_end(1, "full")
    s.alloc("full", 4)
    path = s.close()
    assert failed_at(run(path, kv=kv)) is None
    s = Scenario(path, PAGED, force=True)
    ids = s.alloc("full", 12)
    assert ids
    s.export(1, "full", ids[:4])
    s.free("full", ids[:4])
    s.alloc("full", 4)
    s.lease_end(1, "full")
    assert failed_at(run(s.close(), kv=kv)) == ("C9", 3)


def test_bytes_left_by_a_leased_page_are_not_the_neighbours(tmp_path: Path) -> None:
    """The leased page is freed and its band retreats; the other pool grows into the same bytes."""
    s = Scenario(tmp_path / "s.msgpack.zst", PAGED, total_bytes=2048)
    ids = s.alloc("full", 24)
    assert ids
    s.export(1, "full", ids[:4])
    s.free("full", ids[:20])
    assert s.flush("full", urgent=True) == 0
    assert s.alloc("swa", 4)
    while s.alloc("swa", 4):
        pass
    s.lease_end(1, "full")
    found = run(s.close()).failure
    assert found is not None and found.check == "C9" and "under lease 1" in found.message, found


def test_bytes_that_change_by_themselves_are_seen_while_the_lease_runs(tmp_path: Path) -> None:
    s = Scenario(tmp_path / "s.msgpack.zst", PAGED)
    ids = s.alloc("full", 12)
    assert ids
    s.export(1, "full", ids[:4])
    s.free("full", ids[4:8])
    s.lease_end(1, "full")
    path = s.close()
    outcome = replay(
        ReplayOptions(
            path,
            TargetOptions(allocator=here(ZeroesTheFirstPage), kv="stamp"),
            CheckOptions(enabled=frozenset({"C8"})),
        )
    )
    assert failed_at(outcome) == ("C8", 2)


class ZeroesTheFirstPage(MultiEndedAllocator):
    """A free clears a page that is somebody else's."""

    def _release_physical(self, physical_pages: torch.Tensor) -> None:
        super()._release_physical(physical_pages)
        assert self._zero_pages is not None
        self._zero_pages(physical_pages - 1)


@pytest.mark.parametrize("kv", ["stamp", "full"])
def test_reserved_places_are_a_transfers_target(tmp_path: Path, kv: str) -> None:
    """A decode worker reserves places, somebody else's card writes them, then they get their ids."""
    shapes = (PAGED[0], PoolShape("swa", "up", page_size=4, layer_num=2, owner="full"))
    s = Scenario(tmp_path / "s.msgpack.zst", shapes)
    full = s.alloc("full", 8)
    tokens = s.alloc_physical("swa", 8)
    assert full and tokens
    places = [tokens[0] // 4, tokens[4] // 4]
    s.lease_begin(3, "swa", places, [-1, -1])
    s.lease_end(3, "swa")
    s.bind("swa", [full[0] // 4, full[4] // 4], places)
    s.free("swa", full[:4])
    assert failed_at(run(s.close(), kv=kv)) is None


@pytest.mark.parametrize("kv", ["stamp", "full"])
def test_a_target_that_is_bound_or_given_back_before_the_transfer_ends(tmp_path: Path, kv: str) -> None:
    shapes = (PAGED[0], PoolShape("swa", "up", page_size=4, layer_num=2, owner="full"))
    s = Scenario(tmp_path / "s.msgpack.zst", shapes)
    full = s.alloc("full", 12)
    tokens = s.alloc_physical("swa", 8)
    assert full and tokens
    places = [tokens[0] // 4, tokens[4] // 4]
    s.lease_begin(3, "swa", places)
    s.bind("swa", [full[0] // 4], places[:1])
    s.cancel_physical("swa", tokens[4:])
    s.lease_end(3, "swa")
    again = s.alloc_physical("swa", 4)
    assert again == tokens[4:]
    s.bind("swa", [full[4] // 4], places[1:])
    s.free("swa", full[:8])
    path = s.close()
    outcome = replay(ReplayOptions(path, TargetOptions(kv=kv), CheckOptions(every=1)))
    assert failed_at(outcome) is None, outcome.failure


def test_a_page_that_a_step_still_writes_is_no_transfers_target(tmp_path: Path) -> None:
    """vllm-project/vllm#45357: R ends at step N, its pages become a transfer's target, and step N+1, in flight, writes one of them."""
    s = Scenario(tmp_path / "s.msgpack.zst", PAGED)
    ids = s.alloc("full", 12)
    assert ids
    s.forward_begin("full", 2, writes=[ids[8]])
    s.free("full", ids[8:])
    tokens = s.alloc_physical("full", 4)
    assert tokens
    s.lease_begin(1, "full", [tokens[0] // 4])
    s.lease_end(1, "full")
    s.forward_done(2)
    assert failed_at(run(s.close())) == ("C7", 4)


def damaged(name: str, reason: str, tell: Callable[[Scenario, list[int]], None]) -> Any:
    return pytest.param(reason, tell, id=name)


@pytest.mark.parametrize(
    ("reason", "tell"),
    [
        damaged("nothing there", "hold no page and are not reserved", lambda s, ids: s.lease_begin(1, "full", [3])),
        damaged("outside", "outside pool", lambda s, ids: s.lease_begin(1, "full", [5000])),
        damaged("twice", "twice", lambda s, ids: s.lease_begin(1, "full", [s.place_of("full", ids[0] // 4)] * 2)),
        damaged("open", "open already", lambda s, ids: (s.export(1, "full", ids[:4]), s.export(1, "full", ids[4:8]))),
        damaged("ended twice", "no lease 1", lambda s, ids: (s.export(1, "full", ids[:4]), s.lease_end(1, "full"), s.lease_end(1, "full"))),
        damaged("another pool's", "no lease 1", lambda s, ids: (s.export(1, "full", ids[:4]), s.lease_end(1, "swa"))),
        damaged("dead ids", "not live", lambda s, ids: s.lease_begin(1, "full", [s.place_of("full", ids[0] // 4)], [9])),
        damaged("too many ids", "1 physical and 2 virtual", lambda s, ids: s.lease_begin(1, "full", [15], [1, 2])),
        damaged("no id for a live place", "not reserved", lambda s, ids: s.lease_begin(1, "full", [s.place_of("full", ids[0] // 4)], [-1])),
    ],
)  # fmt: skip
def test_leases_that_cannot_be(
    tmp_path: Path, reason: str, tell: Callable[[Scenario, list[int]], Any]
) -> None:
    s = Scenario(tmp_path / "s.msgpack.zst", PAGED)
    ids = s.alloc("full", 12)
    assert ids
    tell(s, ids)
    with pytest.raises(ImpossibleEvent, match=reason):
        run(s.close())


def test_a_lease_outlives_a_clear_over_nothing(tmp_path: Path) -> None:
    s = Scenario(tmp_path / "s.msgpack.zst", PAGED)
    ids = s.alloc("full", 12)
    assert ids
    s.export(1, "full", ids)
    s.pools["full"].clear()
    s.write(EventKind.CLEAR, "full")
    s.alloc("full", 12)
    s.lease_end(1, "full")
    assert failed_at(run(s.close())) is None


def test_where_ids_are_mapped_a_lease_needs_virtual_ids(tmp_path: Path) -> None:
    s = Scenario(tmp_path / "s.msgpack.zst", PAGED)
    ids = s.alloc("full", 12)
    assert ids
    s.export(1, "full", ids[:4])
    s.lease_end(1, "full")
    assert failed_at(run(s.close(), ids="mapped")) is None
    s = Scenario(tmp_path / "t.msgpack.zst", PAGED)
    ids = s.alloc("full", 12)
    assert ids
    s.lease_begin(1, "full", [s.place_of("full", ids[0] // 4)])
    with pytest.raises(UsageError, match="replay with --ids recorded"):
        run(s.close(), ids="mapped")
