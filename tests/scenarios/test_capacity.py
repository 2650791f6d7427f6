"""What fits: two sides that share bytes, a neighbour's holes, a request larger than any hole, and one larger than the pool."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from allocator import MHASubPoolSpec, UnifiedKVPool
from allocator.errors import LayoutError
from tests.composite_scenario import SWA, CompositeScenario
from tests.scenario import PoolShape, Scenario
from tests.scenarios.everywhere import holds_everywhere

pytestmark = pytest.mark.cpu

#: A state of 30 KV pages' size.
LARGE_STATES = (PoolShape("full", "down"), PoolShape("mamba", "up", kind="mamba", layer_num=30, head_dim=2))


def test_two_sides_are_judged_on_the_bytes_they_share(tmp_path: Path) -> None:
    """sgl-project/sglang#39294: each side alone has room for more than both together; a coupled request is judged jointly."""
    s = CompositeScenario(tmp_path / "s.msgpack.zst", SWA, total_bytes=64 * 64)
    assert s.take(8)
    full, swa = s.pools["full"], s.pools["swa"]
    joint = s.composite.available_size()
    alone = min(full.available_size(), swa.available_size())
    assert 0 < joint < alone
    before = (full.allocated_count(), swa.allocated_count(), len(full.free_virtual_ids))  # type: ignore[arg-type]
    assert s.take(joint + 4) is None
    assert (full.allocated_count(), swa.allocated_count(), len(full.free_virtual_ids)) == before  # type: ignore[arg-type]
    assert s.take(joint)
    for outcome in holds_everywhere(s.close()).values():
        assert outcome.refused == 1


@pytest.mark.parametrize("holes", [True, False], ids=["holes", "no holes"])
def test_a_large_state_is_found_by_packing_its_neighbour_or_not_at_all(tmp_path: Path, holes: bool) -> None:
    """sgl-project/sglang#34441: the KV band is at the frontier and nothing of the states can be evicted."""
    s = Scenario(tmp_path / "s.msgpack.zst", LARGE_STATES, total_bytes=64 * 30 * 5)
    assert s.header.pools[1].entry_bytes == 30 * s.header.pools[0].entry_bytes
    kv = s.alloc("full", s.pools["full"].available_size() // 30 * 30)
    assert kv and s.pools["mamba"].available_size() == 0
    full, states = s.pools["full"], s.pools["mamba"]
    if holes:
        s.free("full", kv[20:100:2])
        assert full._current_gap_bytes() == 0
    before = (full.watermark_physical, states.watermark_physical, states.allocated_count())
    slot = s.alloc("mamba", 1)
    if holes:
        assert slot and full._free_phys_pages.shape[0] == 0
    else:
        assert slot is None
        assert (full.watermark_physical, states.watermark_physical, states.allocated_count()) == before
    holds_everywhere(s.close())


def test_a_request_larger_than_any_hole_is_served_from_their_sum(tmp_path: Path) -> None:
    """LMCache/LMCache#3187: the largest hole is smaller than the request, the sum is ample, and a report tells the two apart."""
    s = Scenario(tmp_path / "s.msgpack.zst")
    swa = s.alloc("swa", 24)
    assert swa
    s.alloc("full", s.pools["full"].available_size())
    s.free("swa", swa[0:24:3])
    holes = sorted(s.pools["swa"]._free_phys_pages.tolist())
    assert max(b - a for a, b in itertools.pairwise(holes)) > 1  # no two of them touch
    assert s.pools["full"].available_size() == 0
    assert s.alloc("full", 2 * 8)
    for outcome in holds_everywhere(s.close()).values():
        assert outcome.peaks["full"].least_available == 0
        assert sum(flush.moves for flush in outcome.flushes if flush.seq == 3) > 0


def test_a_request_larger_than_the_pool_is_refused_at_once(tmp_path: Path) -> None:
    """sgl-project/sglang#35158: a pool one page smaller than one request answers so, each time, and nothing changes or moves."""
    s = Scenario(tmp_path / "s.msgpack.zst")
    pages = s.pools["full"].num_pages - s.pools["full"].min_page_index
    for _ in range(3):
        assert s.alloc("full", pages + 1) is None
    assert s.pools["full"].allocated_count() == 0
    assert s.alloc("full", s.pools["full"].available_size())
    for outcome in holds_everywhere(s.close()).values():
        assert outcome.refused == 3 and not any(flush.moves for flush in outcome.flushes)


@pytest.mark.parametrize("pages", [1, 2])
def test_a_buffer_without_one_usable_page_is_an_error_at_the_start(pages: int) -> None:
    """sgl-project/sglang#35158: what can never serve a request says so when it is made, with what it would need."""
    import torch

    spec = MHASubPoolSpec(
        name="full", layer_num=1, grow_direction="down", head_num=1, head_dim=8, store_dtype=torch.float32
    )
    total = spec.entry_bytes() * 16 * pages
    if pages == 1:
        with pytest.raises(LayoutError, match=r"larger buffer.*") as caught:
            UnifiedKVPool(total_bytes=total, sub_pool_specs=[spec], device="cpu", page_size=16)
        assert caught.value.pool == "full"
    else:
        assert (
            UnifiedKVPool(total_bytes=total, sub_pool_specs=[spec], device="cpu", page_size=16).max_slots(
                "full"
            )
            == 32
        )
