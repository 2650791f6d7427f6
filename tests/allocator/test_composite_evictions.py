"""Room out of a prefix cache: the same by every strategy, no more than is needed, and nothing where it would be for nothing.

That SGLang 0.5.23's composites ask for the same is in tests/engine/test_composites_evictions.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from allocator import STRATEGIES, UnifiedMambaSlotAllocator
from tests.allocator.cached_program import Cache, CachedProgram, Entry
from tests.allocator.composite_program import our_composite
from tests.allocator.composite_state import check
from tests.allocator.delayed import NeverEnd, NeverFloat
from tests.engine.composites import LAYOUTS

pytestmark = pytest.mark.cpu

ENDS, STATES, THREE = LAYOUTS


@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name != "batched"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strategies_ask_for_the_same(layout: str, strategy: str) -> None:
    programs = [
        CachedProgram(our_composite(layout, 4, lazy=True, strategy=each), 6) for each in ("batched", strategy)
    ]
    for number in range(150):
        found = [(program.step(), program.sizes(), program.places()) for program in programs]
        assert found[0] == found[1], number
    assert len(programs[0].cache.asked) >= 5


class Held:
    """A composite whose pages are held by a cache, in entries of ``pages`` pages, and nothing else."""

    def __init__(self, layout: str, pages: int, *, states: int = 0, late: bool = False) -> None:
        settings: dict[str, Any] = {"strategy": "batched"}
        if late:
            settings = {"strategy": "device", "end_class": NeverEnd}
            if layout == THREE:
                settings["float_class"] = NeverFloat
        self.made = our_composite(layout, 4, lazy=True, **settings)
        slots = None
        if states:
            slots = UnifiedMambaSlotAllocator(self.made.mamba_allocator, states, "cpu")
        self.cache = Cache(self.made, slots)
        taken = [slots.alloc(1) for _ in range(states)]
        while (tokens := self.made.alloc(pages * 4)) is not None:
            self._add(tokens, None)
        for state in taken:
            self._add(torch.empty(0, dtype=torch.int64), state)
        self.made.flush_opportunistic()

    def _add(self, tokens: torch.Tensor, state: Any) -> None:
        self.cache.entries.append(Entry(tokens, 0, state))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_fits_already_costs_nothing(layout: str) -> None:
    held = Held(layout, 2)
    held.cache.evict_for_alloc(EvictAll())
    held.cache.asked.clear()
    held.cache.entries.append(Entry(held.made.alloc(8), 0, None))
    assert held.made.evict_to_free_tokens(held.cache, 8) in (None, True)
    assert held.made.check_decode_capacity(num_tokens=8, tree_cache=held.cache)
    assert held.cache.asked == [] and len(held.cache.entries) == 1


class EvictAll:
    num_tokens = swa_num_tokens = 1 << 30
    mamba_num = 0


@pytest.mark.parametrize("late", [False, True], ids=["at once", "late"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_more_goes_than_is_needed(layout: str, late: bool) -> None:
    held = Held(layout, 2, late=late)
    held.made.free(held.cache.entries.pop().tokens)  # so that not all of it is missing
    before = len(held.cache.entries)
    need = held.made.available_size() // 4 * 4 + 8
    assert held.made.check_decode_capacity(num_tokens=need, tree_cache=held.cache)
    assert before - len(held.cache.entries) == 1
    assert held.made.alloc(need) is not None
    check(held.made)


@pytest.mark.parametrize("layout", [ENDS, THREE])
def test_nothing_goes_for_what_can_never_fit(layout: str) -> None:
    held = Held(layout, 2)
    before = len(held.cache.entries)
    too_much = held.made.size_full * 8
    assert not held.made.evict_to_free_tokens(held.cache, too_much)
    assert not held.made.check_decode_capacity(num_tokens=too_much, tree_cache=held.cache)
    if layout == ENDS:
        text = held.made.reclaim_for_prealloc(held.cache, too_much, 4)
        assert text is not None and f"{too_much} full and 4 window tokens" in text
    assert held.cache.asked == [] and len(held.cache.entries) == before


def test_without_a_cache_nothing_is_said() -> None:
    made = our_composite(ENDS, 4, lazy=True, strategy="batched")
    assert made.evict_to_free_tokens(None, 4) is None
    assert made.check_decode_capacity(num_tokens=4, tree_cache=None)
    assert not made.check_decode_capacity(num_tokens=1 << 20, tree_cache=None)
    alone = Cache(made, None)
    alone.shares = False
    assert made.evict_to_free_tokens(alone, 1 << 20) is None and alone.asked == []


@pytest.mark.parametrize("prefer_swa", [False, True])
def test_the_side_that_is_spared(prefer_swa: bool) -> None:
    """Bytes of either side would do for the full side."""
    held = Held(ENDS, 2)
    held.made.prefer_swa_reclaim = prefer_swa
    need = held.made.schedulable_full_available_size() + 8
    assert held.made.evict_to_free_tokens(held.cache, need, swa_num_tokens=0)
    ((full, window, *_),) = held.cache.asked
    assert (full == 0) == prefer_swa and (window == 0) != prefer_swa


def test_window_tokens_for_a_decode_node() -> None:
    held = Held(THREE, 2)
    missing = held.made.swa_available_size() + 6
    assert held.made.reclaim_for_prealloc(held.cache, 0, missing) is None
    ((full, window, states, *_),) = held.cache.asked
    assert (full, window, states) == (0, 6, 0)
    text = held.made.reclaim_for_prealloc(held.cache, 0, 1 << 20)
    assert text is not None and f"of {1 << 20} window tokens" in text


def test_states_go_last() -> None:
    held = Held(THREE, 2, states=8)
    tokens = sum(len(entry.tokens) for entry in held.cache.entries)
    need = tokens + held.made.available_size() + 8
    assert held.made.evict_to_free_tokens(held.cache, need)
    first, *_, last = held.cache.asked
    assert first[2] == 0 and last[:2] == (0, 0) and 0 < last[5] <= 8
    assert held.made.alloc(need) is not None
    check(held.made)


def test_what_a_group_holds_back_goes_first() -> None:
    held = Held(ENDS, 2)
    entry = held.cache.entries.pop()
    held.made.free_group_begin()
    held.made.free(entry.tokens)
    assert held.made.evict_to_free_tokens(held.cache, 8)
    assert held.cache.asked == [] and held.made.free_group is not None
