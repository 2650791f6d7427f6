"""Where our composites do otherwise than SGLang 0.5.23's, on purpose: what SGLang's do is shown, so that a release which does otherwise is
noticed (docs/composites.md)."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from allocator import UnifiedMambaSlotAllocator
from allocator.errors import BindError, DuplicateFreeError, NotAllocatedError, StillPairedError
from replayer.targets_sglang import sglang_version
from tests.allocator.composite_program import our_composite
from tests.allocator.composite_state import check, live_pages
from tests.engine.composites import LAYOUTS, Event, composite

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(
        sglang_version() != "0.5.23", reason="SGLang 0.5.23 is not installed (tools/build_sglang_env.sh)"
    ),
    pytest.mark.usefixtures("sglang_on_a_cpu"),
]

ENDS, STATES, THREE = LAYOUTS


def both(layout: str, page_size: int = 1) -> Iterator[tuple[Any, bool]]:
    yield composite(layout, page_size, lazy=True), False
    yield our_composite(layout, page_size, lazy=True, strategy="batched"), True


def holes(pool: Any) -> list[int]:
    return sorted(pool._free_phys_pages.tolist())


@pytest.mark.parametrize("layout", [ENDS, THREE])
def test_an_id_that_is_paired_anew_before_its_group_closes(layout: str) -> None:
    for made, is_ours in both(layout):
        swa = made.swa_attn_allocator
        tokens, _ = made.alloc(1), made.alloc(3)
        first = int(swa.virtual_to_physical[tokens])
        second = swa.alloc_physical(1)
        made.free_group_begin()
        made.free(tokens)
        made.set_full_to_swa_mapping(tokens, second)
        made.free_group_end()
        assert holes(swa) == ([first] if is_ours else [int(second)])
        lost = int(swa.virtual_to_physical[tokens]) == -1 and int(swa.physical_to_virtual[first]) == int(
            tokens
        )
        assert lost != is_ours


@pytest.mark.parametrize("call", ["free_segment", "free_swa_segment"])
@pytest.mark.parametrize("layout", [ENDS, THREE])
def test_segments_without_window_pages(layout: str, call: str) -> None:
    for made, is_ours in both(layout, 4):
        tokens, _ = made.alloc(8), made.alloc(16)
        made.free_swa(tokens)
        before = holes(made.swa_attn_allocator)
        if is_ours:
            with pytest.raises(NotAllocatedError):
                getattr(made, call)(tokens, start_pos=0)
            assert holes(made.swa_attn_allocator) == before
            check(made)
        else:
            getattr(made, call)(tokens, start_pos=0)
            assert holes(made.swa_attn_allocator)[:2] == [-1, -1]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("bad", [-1, 0])
def test_ids_that_are_none(layout: str, bad: int) -> None:
    for made, is_ours in both(layout):
        tokens, _ = made.alloc(1), made.alloc(3)
        wrong = torch.cat([tokens, torch.tensor([bad])])
        if is_ours:
            with pytest.raises(NotAllocatedError) as refused:
                made.free(wrong)
            assert refused.value.ids == [bad]
            check(made)
        else:
            made.free(wrong)
            assert bad in holes(made.full_attn_allocator)
            assert bad in made.full_attn_allocator.free_virtual_ids.tolist()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_page_twice_in_a_group(layout: str) -> None:
    for made, is_ours in both(layout):
        tokens, _ = made.alloc(1), made.alloc(3)
        made.free_group_begin()
        made.free(tokens)
        made.free(tokens)
        if is_ours:
            with pytest.raises(DuplicateFreeError) as refused:
                made.free_group_end()
            assert refused.value.ids == tokens.tolist()
            check(made)
        else:
            made.free_group_end()
            assert made.full_attn_allocator.free_virtual_ids.tolist().count(int(tokens)) == 2


@pytest.mark.parametrize("layout", [ENDS, THREE])
def test_the_full_side_of_a_pair_alone(layout: str) -> None:
    for made, is_ours in both(layout):
        tokens, _ = made.alloc(1), made.alloc(3)
        if is_ours:
            with pytest.raises(StillPairedError) as refused:
                made.free_full(tokens)
            assert refused.value.ids == tokens.tolist()
            check(made)
        else:
            made.free_full(tokens)
            assert int(tokens) in live_pages(made.swa_attn_allocator)
            assert int(tokens) in made.full_attn_allocator.free_virtual_ids.tolist()


@pytest.mark.parametrize("layout", [ENDS, THREE])
def test_a_window_place_for_an_id_that_has_one(layout: str) -> None:
    for made, is_ours in both(layout):
        swa = made.swa_attn_allocator
        tokens = made.alloc(1)
        first, second = int(swa.virtual_to_physical[tokens]), swa.alloc_physical(1)
        if is_ours:
            with pytest.raises(BindError) as refused:
                made.set_full_to_swa_mapping(tokens, second)
            assert refused.value.ids == tokens.tolist()
            check(made)
        else:
            made.set_full_to_swa_mapping(tokens, second)
            # Two places say that they are the id's, and the first is no hole.
            assert [int(swa.physical_to_virtual[page]) for page in (first, int(second))] == [int(tokens)] * 2
            assert holes(swa) == []


@pytest.mark.parametrize("layout", [ENDS, THREE])
def test_the_window_pool_raises_inside_an_alloc(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(RuntimeError): ...

    def fail(pages: torch.Tensor) -> None:
        raise Broken

    for made, is_ours in both(layout):
        made.alloc(4)
        free, live = (
            made.full_attn_allocator.free_virtual_ids.tolist(),
            made.full_attn_allocator.allocated_count(),
        )
        monkeypatch.setattr(made.swa_attn_allocator, "alloc_with_virtual", fail)
        with pytest.raises(Broken):
            made.alloc(4)
        kept = made.full_attn_allocator.allocated_count() - live
        assert kept == (0 if is_ours else 4)
        assert (made.full_attn_allocator.free_virtual_ids.tolist() == free) == is_ours


@pytest.mark.parametrize("layout", [ENDS, THREE])
def test_pages_of_both_sides_out_of_the_same_bytes(layout: str) -> None:
    for made, is_ours in both(layout):
        pages = made.available_size() + 1
        assert made.new_pages_available(pages, pages) != is_ours
        assert made.alloc(pages) is None


def test_a_copy_of_states_with_three_pools() -> None:
    for made, is_ours in both(THREE):
        made.set_hicache_transfer_done_event("backup", Event())
        states = made.mamba_allocator
        waiting = states._forward.transfers if is_ours else states._hicache_transfer_done_events
        assert bool(waiting) == is_ours


def test_a_group_of_states_begun_twice() -> None:
    theirs = importlib.import_module("sglang.srt.mem_cache.unified_memory_pool").UnifiedMambaSlotAllocator
    for made, is_ours in both(STATES):
        slots = (UnifiedMambaSlotAllocator if is_ours else theirs)(made.mamba_allocator, 12, "cpu")
        slots.alloc_group_begin(3)
        slots.alloc_group_begin(2)
        slots.alloc_group_end()
        assert slots.available_size() == (12 if is_ours else 9)


def test_reserved_pages_of_a_float_are_not_lost() -> None:
    for made, is_ours in both(THREE):
        made.alloc(4)
        made.swa_attn_allocator.alloc_physical(2)
        assert (made.verify_byte_accounting() == []) == is_ours
