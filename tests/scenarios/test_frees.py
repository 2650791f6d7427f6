"""Frees that name too much, too little, twice, or what is nobody's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from allocator import STRATEGIES
from allocator.errors import DuplicateFreeError, FreeGroupError, NotAllocatedError
from recorder.trace import EventKind, ImpossibleEvent
from replayer.replay import ReplayOptions, replay
from replayer.targets import TargetOptions, build_pools
from tests.composite_scenario import SWA, CompositeScenario
from tests.scenario import PoolShape, Scenario, _Silent, header_for
from tests.scenarios.everywhere import holds_everywhere

pytestmark = pytest.mark.cpu

PAGED = (PoolShape("full", "down", page_size=4), PoolShape("swa", "up", page_size=4, layer_num=2))


def holdings(allocator: object) -> tuple[object, ...]:
    """What a refused call may not change."""
    return (
        allocator.virtual_to_physical.tolist(),  # type: ignore[attr-defined]
        allocator.physical_to_virtual.tolist(),  # type: ignore[attr-defined]
        allocator.free_virtual_ids.tolist(),  # type: ignore[attr-defined]
        allocator._free_phys_pages.tolist(),  # type: ignore[attr-defined]
        allocator.watermark_physical,  # type: ignore[attr-defined]
        allocator.allocated_count(),  # type: ignore[attr-defined]
    )


def fresh(strategy: str, page_size: int = 4) -> object:
    shapes = tuple(
        PoolShape(s.name, s.grow_direction, page_size=page_size, layer_num=s.layer_num) for s in PAGED
    )
    header = header_for(shapes, 64 * 64 * page_size)
    return build_pools(header, TargetOptions(strategy=strategy, kv="stamp"), _Silent())["full"].allocator


def ids_of(*tokens: int) -> torch.Tensor:
    return torch.tensor(tokens, dtype=torch.int64)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_page_is_freed_by_its_first_token_and_not_again_by_another(strategy: str) -> None:
    """sgl-project/sglang#27779: one release; the second free is an error that names the page."""
    pool = fresh(strategy)
    tokens = pool.alloc(16).tolist()  # type: ignore[attr-defined]
    pool.free(ids_of(tokens[4]))  # type: ignore[attr-defined]
    before = holdings(pool)
    with pytest.raises(NotAllocatedError) as caught:
        pool.free(ids_of(tokens[6]))  # type: ignore[attr-defined]
    assert caught.value.ids == [tokens[4] // 4] and str(tokens[4] // 4) in str(caught.value)
    assert holdings(pool) == before


def test_a_trace_that_frees_a_page_twice_is_the_traces_fault(tmp_path: Path) -> None:
    """sgl-project/sglang#27779: an engine did that, no allocator."""
    s = Scenario(tmp_path / "s.msgpack.zst", PAGED)
    ids = s.alloc("full", 16)
    assert ids
    s.free("full", [ids[4]])
    s.write(EventKind.FREE, "full", list0=[ids[6]])
    with pytest.raises(ImpossibleEvent, match=r"C13.*not live"):
        replay(ReplayOptions(s.close()))


def test_tokens_of_a_page_free_it_once(tmp_path: Path) -> None:
    """sgl-project/sglang#27779: any of its tokens, in any number."""
    s = Scenario(tmp_path / "s.msgpack.zst", PAGED)
    ids = s.alloc("full", 16)
    assert ids
    s.free("full", [ids[6], ids[4], ids[7]])
    assert s.pools["full"].allocated_count() == 12
    s.flush("full")
    holds_everywhere(s.close())


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("page_size", [1, 4])
def test_minus_one_is_refused_and_named(strategy: str, page_size: int) -> None:
    """sgl-project/sglang#38836: free `[a, -1]` changes nothing, not even for `a`."""
    pool = fresh(strategy, page_size)
    tokens = pool.alloc(4 * page_size).tolist()  # type: ignore[attr-defined]
    before = holdings(pool)
    with pytest.raises(NotAllocatedError, match="-1") as caught:
        pool.free(ids_of(tokens[0], -1))  # type: ignore[attr-defined]
    assert caught.value.ids == [-1]
    assert holdings(pool) == before


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_block_twice_in_one_list_is_released_at_most_once(strategy: str) -> None:
    """vllm-project/vllm#42571: for whole pages named by the caller that is an error; nothing enters the free list twice."""
    pool = fresh(strategy)
    tokens = pool.alloc(16)  # type: ignore[attr-defined]
    before = holdings(pool)
    twice = torch.cat([tokens[4:8], tokens[4:8]])
    with pytest.raises(DuplicateFreeError) as caught:
        pool.free_segment(twice, start_pos=4)  # type: ignore[attr-defined]
    assert caught.value.ids == [int(tokens[4]) // 4]
    assert holdings(pool) == before
    pool.free(twice)  # type: ignore[attr-defined]
    free_ids = pool.free_virtual_ids.tolist()  # type: ignore[attr-defined]
    assert free_ids.count(int(tokens[4]) // 4) == 1 and len(set(free_ids)) == len(free_ids)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_groups_end_once_and_do_not_nest(strategy: str) -> None:
    """sgl-project/sglang#36739, #36646: begin, free, end, end releases once; a nested begin is refused, and the open group goes on."""
    pool = fresh(strategy)
    tokens = pool.alloc(16)  # type: ignore[attr-defined]
    pool.free_group_begin()  # type: ignore[attr-defined]
    pool.free(tokens[:4])  # type: ignore[attr-defined]
    with pytest.raises(FreeGroupError, match="nest"):
        pool.free_group_begin()  # type: ignore[attr-defined]
    pool.free(tokens[4:8])  # type: ignore[attr-defined]
    pool.free_group_end()  # type: ignore[attr-defined]
    before = holdings(pool)
    assert pool.allocated_count() == 8  # type: ignore[attr-defined]
    with pytest.raises(FreeGroupError, match="no free group"):
        pool.free_group_end()  # type: ignore[attr-defined]
    assert holdings(pool) == before


def test_a_segment_whose_window_has_passed_frees_no_padding(tmp_path: Path) -> None:
    """sgl-project/sglang#38519: entries without a window page read as page 0, which never enters a list."""
    s = CompositeScenario(tmp_path / "s.msgpack.zst", SWA)
    ids = s.take(24)
    assert ids
    s.free_swa_segment(ids[:8])
    swa, full = s.composite.swa_attn_allocator, s.composite.full_attn_allocator
    assert s.composite.translate_loc_from_full_to_swa(torch.tensor(ids[:8])).eq(0).all()
    with pytest.raises(NotAllocatedError, match="swa"):
        s.composite.free_segment(torch.tensor(ids[:16]), start_pos=0)  # refused as a whole
    s.free_full_segment(ids[:8])
    s.give_segment(ids[8:16], 8)
    for pages in (swa._free_phys_pages, full._free_phys_pages, full.free_virtual_ids):
        assert 0 not in pages.tolist()
    assert swa.allocated_count() == full.allocated_count() == 8
    assert (int(swa.virtual_to_physical[0]), int(swa.physical_to_virtual[0])) == (0, 0)
    s.flush_all()
    holds_everywhere(s.close())


def test_a_queued_free_releases_the_window_page_it_was_queued_with(tmp_path: Path) -> None:
    """sgl-project/sglang#36135, #36381, #36646: the id is paired again before the group closes; the first slot goes, the second stays."""
    s = CompositeScenario(tmp_path / "s.msgpack.zst", SWA)
    ids = s.take(16)
    assert ids
    swa = s.composite.swa_attn_allocator
    page = ids[4] // 4
    first = int(swa.virtual_to_physical[page])
    s.group_begin()
    s.give(ids[4:8])  # queued with the first slot
    second = s.alloc_physical("swa", 4)
    assert second
    s.set_full_to_swa_mapping(ids[4:8], second)
    s.group_end()
    assert int(swa.virtual_to_physical[page]) == second[0] // 4 != first
    assert int(swa.physical_to_virtual[first]) == -1
    assert int(s.composite.full_attn_allocator.virtual_to_physical[page]) == -1
    s.free_physical("swa", second)
    s.take(8)
    holds_everywhere(s.close())
