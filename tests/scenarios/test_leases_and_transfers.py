"""Pages that are used from outside: exported, lent, made the target of a transfer, and read by a step that is still in flight."""

from __future__ import annotations

from pathlib import Path

import pytest

from recorder.trace import ImpossibleEvent
from replayer.replay import ReplayOptions, replay
from tests.scenario import PoolShape, Scenario
from tests.scenarios.everywhere import first_failure, holds_everywhere

pytestmark = pytest.mark.cpu

PAGED = (PoolShape("full", "down", page_size=4), PoolShape("swa", "up", page_size=4, layer_num=2))
PAGES_OF_32 = (PoolShape("full", "down", page_size=32), PoolShape("swa", "up", page_size=32))
THREE = (
    PoolShape("full", "down"),
    PoolShape("swa", "float", layer_num=2),
    PoolShape("mamba", "up", kind="mamba", layer_num=2),
)


def test_an_export_names_the_place_and_not_the_id(tmp_path: Path) -> None:
    """sgl-project/sglang#31471: until something moves, the ids of a pool that grows up are its places, and a wrong export goes unseen."""
    s = Scenario(tmp_path / "s.msgpack.zst")
    ids = s.alloc("swa", 3)
    assert ids
    assert [s.place_of("swa", page) for page in ids] == ids
    s.free("swa", ids[:1])
    assert s.flush("swa", urgent=True) == 1
    assert s.export(1, "swa", ids[2:]) == ids[:1]
    s.lease_end(1, "swa")
    holds_everywhere(s.close())


def test_a_lease_that_takes_an_id_for_a_place_is_told(tmp_path: Path) -> None:
    """sgl-project/sglang#31471, as it was: the place named is another page's, and the replay says where it really is."""
    s = Scenario(tmp_path / "s.msgpack.zst")
    ids = s.alloc("swa", 3)
    assert ids
    s.free("swa", ids[:1])
    s.flush("swa", urgent=True)
    s.lease_begin(1, "swa", [ids[2]], [ids[2]])
    with pytest.raises(ImpossibleEvent, match="which are at"):
        replay(ReplayOptions(s.close()))


def test_a_lease_starts_at_the_export(tmp_path: Path) -> None:
    """sgl-project/sglang#33362: the gate was open when the loop began; what is exported inside the loop stays where it is."""
    s = Scenario(tmp_path / "s.msgpack.zst", PAGED, total_bytes=2048, leases_shut_gates=True)
    first = s.alloc("full", 20)
    assert first
    s.free("full", first[12:])
    places = s.export(1, "full", first[:4])
    assert s.alloc("swa", 4) is None  # past the gap, unless full moves
    assert [s.place_of("full", first[0] // 4)] == places
    s.lease_end(1, "full")
    assert s.alloc("swa", 4)
    assert [s.place_of("full", first[0] // 4)] != places
    for outcome in holds_everywhere(s.close()).values():
        assert outcome.refused == 1


def test_no_pool_moves_under_a_lease(tmp_path: Path) -> None:
    """sgl-project/sglang#37417: a lease on a state slot holds the state pool still, and not attention alone."""
    s = Scenario(tmp_path / "s.msgpack.zst", THREE, total_bytes=64 * 96, leases_shut_gates=True)
    slots = s.alloc("mamba", 4)
    full, window = s.alloc("full", 8), s.alloc("swa", 4)
    assert slots and full and window
    s.export(1, "mamba", slots[3:])
    s.free("mamba", slots[:1])
    s.free("full", full[6:])
    s.free("swa", window[1:2])
    assert s.flush("mamba", urgent=True) == s.flush("full", urgent=True) == 0
    assert s.compact_holes("swa", "low") == 0
    s.lease_end(1, "mamba")
    assert s.flush("mamba", urgent=True) == 1 and s.flush("full", urgent=True) == 2
    holds_everywhere(s.close())


def test_a_transfer_waits_for_the_last_step_in_flight(tmp_path: Path) -> None:
    """vllm-project/vllm#45357: R ends at step N while N+1 runs and writes one of its pages; only then may they become a target."""
    s = Scenario(tmp_path / "s.msgpack.zst", PAGED)
    ids = s.alloc("full", 12)
    assert ids
    s.forward_begin("full", 1, writes=[ids[7]])
    s.forward_begin("full", 2, writes=[ids[8]])
    s.forward_done(1)
    s.forward_done(2)
    s.free("full", ids[8:])
    tokens = s.alloc_physical("full", 4)
    assert tokens
    s.lease_begin(1, "full", [tokens[0] // 4])
    s.lease_end(1, "full")
    s.cancel_physical("full", tokens)
    holds_everywhere(s.close())


def test_a_transfer_that_does_not_wait_is_told(tmp_path: Path) -> None:
    """vllm-project/vllm#45357, as it was: step N+1 still writes where the transfer will."""
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
    failure = first_failure(s.close())
    assert (failure.check, failure.seq) == ("C7", 4)


@pytest.mark.parametrize("settled", [True, False], ids=["by settled tokens", "by the optimistic count"])
def test_a_window_is_pruned_by_settled_tokens(tmp_path: Path, settled: bool) -> None:
    """vllm-ascend#13501: window 128, pages of 32. 159 tokens are hoped for, position 158 is settled, and it reads position 31 in page 0."""
    s = Scenario(tmp_path / "s.msgpack.zst", PAGES_OF_32, total_bytes=64 * 32 * 16)
    window = s.alloc_extend("swa", [0], [158], [-1])
    assert window
    position = s.alloc_decode("swa", [159], [window[-1]])
    assert position
    s.forward_begin("swa", 1, writes=position, reads=window[158 - 127 :])
    if settled:
        s.forward_done(1)
    s.free_segment("swa", window[:32], start=0)
    fresh = s.alloc("swa", 32 * 9)  # every place that is free
    assert fresh
    if not settled:
        s.forward_done(1)
        failure = first_failure(s.close())
        assert (failure.check, failure.seq) == ("C8", 4)
        return
    holds_everywhere(s.close())


def test_a_page_that_waits_in_a_group_is_lent_and_freed_once(tmp_path: Path) -> None:
    """NVIDIA/TensorRT-LLM#12667: pinned and unpinned while it waits in the free queue, a page is queued once."""
    s = Scenario(tmp_path / "s.msgpack.zst", PAGED)
    ids = s.alloc("full", 16)
    assert ids
    free_ids = s.pools["full"].free_virtual_ids
    assert free_ids is not None
    before = free_ids.shape[0]
    s.free_group_begin("full")
    s.free("full", ids[4:8])
    s.export(1, "full", ids[4:8])
    s.lease_end(1, "full")
    s.free_group_end("full")
    after = s.pools["full"].free_virtual_ids
    assert after is not None
    assert after.shape[0] == before + 1 and after.tolist().count(ids[4] // 4) == 1
    s.flush("full")
    holds_everywhere(s.close())
