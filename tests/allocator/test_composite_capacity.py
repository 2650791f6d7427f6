"""What fits together, and what is done for it: both sides of a token, states beside tokens."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from allocator import UnifiedMambaSlotAllocator
from allocator.errors import (
    ConfigurationError,
    NotAllocatedError,
)
from tests.allocator.composite_state import check, composite_state, live_pages
from tests.allocator.small_composites import (
    ENDS,
    STATES,
    THREE,
    every_strategy,
    every_window,
    ids,
    lay,
    make,
    window_places,
)

pytestmark = pytest.mark.cpu


@every_strategy
@every_window
def test_a_request_is_judged_on_what_both_sides_take_together(layout: str, strategy: str) -> None:
    """F8: each side alone has room for more than both have together."""
    made = make(layout, strategy=strategy)
    together = made.available_size()
    full, swa = made.full_attn_allocator, made.swa_attn_allocator
    assert full.available_size() > together and swa.available_size() > together
    more = together + made.page_size
    before = composite_state(made)
    assert not made.new_pages_available(more // 4, more // 4) and made.new_pages_available(
        together // 4, together // 4
    )
    assert not made.can_reserve(more, more) and made.can_reserve(together, together)
    assert made.alloc(more) is None
    assert composite_state(made) == before
    assert made.alloc(together) is not None
    check(made)


@every_strategy
def test_what_a_flush_would_give_comes_and_goes_with_the_gate(strategy: str) -> None:
    """F3: nobody calls in between, the gate alone turns."""
    made = make(ENDS, strategy=strategy)
    is_open = True
    made.set_disagg_move_gate(lambda: is_open)
    held = lay(made, made.available_size())
    made.free(held[: len(held) // 2])  # holes on the far side of both bands
    made.free_swa(held[len(held) // 2 :])
    wanted = made.available_size() + 4 * made.page_size
    assert made.can_reserve(wanted, wanted)
    opened = made.schedulable_full_available_size()
    is_open = False
    assert not made.can_reserve(wanted, wanted)
    assert made.schedulable_full_available_size() < opened
    before = composite_state(made)
    assert not made.ensure_capacity(wanted, wanted) and made.alloc(wanted) is None
    assert composite_state(made) == before
    is_open = True
    assert made.schedulable_full_available_size() == opened
    assert made.alloc(wanted) is not None
    check(made)


def test_what_can_be_reserved_is_what_there_is_a_plan_for() -> None:
    made = make(ENDS)
    lay(made, made.available_size())
    amounts = (0, 1, 8, 9, 12)
    answers = set()
    for full, swa in product(amounts, amounts):
        for gone in product((0, 4, 7, 8, 12), repeat=2):
            evictable = dict(zip(("full_evictable_tokens", "swa_evictable_tokens"), gone, strict=True))
            answer = made.can_reserve(full, swa, **evictable)
            assert answer == (made.reclaim_plan(full, swa, **evictable) is not None), (full, swa, gone)
            answers.add(answer)
    assert answers == {True, False}


def test_a_decode_step_is_judged_in_whole_pages() -> None:
    for layout in (ENDS, THREE):
        made = make(layout)
        lay(made, made.available_size() - made.page_size)
        assert made.check_decode_capacity(num_tokens=made.page_size, tree_cache=None)
        assert not made.check_decode_capacity(num_tokens=made.page_size + 1, tree_cache=None)


def test_a_decode_step_takes_pages_of_both_sides() -> None:
    made = make(ENDS)
    tokens = lay(made, made.available_size())
    made.free_swa_segment(tokens[4 * made.page_size : 9 * made.page_size], start_pos=0)
    there = made.available_size()
    assert there < 5 * made.page_size
    assert made.check_decode_capacity(num_tokens=there, tree_cache=None)
    assert not made.check_decode_capacity(num_tokens=there + 1, tree_cache=None)


def test_a_hopeless_request_moves_nothing() -> None:
    """No flush for a request that none could help."""
    made = make(ENDS)
    held = lay(made, 40)
    made.free(held[8:16])
    before = composite_state(made)
    assert not made.ensure_capacity(10_000, 0)
    assert not made.ensure_capacity(0, 10_000)
    assert not made.ensure_capacity(-1, 4)
    assert made.alloc(10_000) is None
    assert composite_state(made) == before
    assert made.ensure_capacity(0, 0)


def test_window_pages_without_ids_are_no_room() -> None:
    """Full pages are dear here, so that bytes are there for more window pages than there are ids to name them."""
    made = make(ENDS, layers=(3, 1))
    full, swa = made.full_attn_allocator, made.swa_attn_allocator
    ids_in_tokens = full.free_id_count * made.page_size
    assert swa.available_size() > ids_in_tokens
    assert made.ensure_capacity(0, ids_in_tokens) and not made.ensure_capacity(0, ids_in_tokens + 1)
    assert made.size_swa == ids_in_tokens


def test_one_side_may_need_more_than_the_other() -> None:
    for layout in (ENDS, THREE):
        made = make(layout)
        full_only = made.full_attn_allocator.available_size()
        assert made.ensure_capacity(full_only, 0)
        assert not made.ensure_capacity(full_only, 8)
        assert not made.ensure_capacity(full_only + 4, 0)


def test_the_float_moves_for_a_request_only_if_the_gate_lets_it() -> None:
    """F2, for three pools."""
    made = make(THREE, page_size=1)
    is_open = False
    made.set_host_transfer_move_gate(lambda: is_open)
    tokens = lay(made, 4)
    swa = made.swa_attn_allocator
    places = live_pages(swa)
    assert len(places) == 4
    wanted = next(count for count in range(1, 200) if not made.can_reserve(count, count))
    before = composite_state(made)
    assert made.alloc(wanted) is None
    assert composite_state(made) == before
    is_open = True
    assert made.alloc(wanted) is not None
    assert window_places(made, tokens) != [places[int(token)] for token in tokens]
    check(made)


@every_strategy
def test_counts_of_ids_and_pages_of_the_window_pool_are_apart(strategy: str) -> None:
    """F10: window pages are dear, ids are the full pool's, so ids go beyond the window pool's number of pages."""
    made = make(ENDS, page_size=1, strategy=strategy)
    full, swa = made.full_attn_allocator, made.swa_attn_allocator
    assert full.num_virtual_ids > swa.num_pages
    assert swa.num_virtual_ids == full.num_virtual_ids
    beyond = 0
    for _ in range(60):
        tokens = lay(made, 3)
        beyond = max(beyond, int(tokens.max()))
        assert (made.translate_loc_from_full_to_swa(tokens) > 0).all()
        made.free(tokens)
    assert beyond > swa.num_pages
    check(made)


@every_strategy
def test_a_state_is_found_by_packing_the_tokens_or_nothing_changes(strategy: str) -> None:
    """F9 (sgl-project/sglang#34441): a state has the bytes of many pages of tokens."""
    for layout in (STATES, THREE):
        made = make(layout, page_size=1, strategy=strategy)
        slots = UnifiedMambaSlotAllocator(made.mamba_allocator, 100, "cpu")
        first = lay(made, made.available_size())
        before = composite_state(made)
        made.prepare_mamba_allocation(3)
        assert slots.alloc(3) is None
        after = composite_state(made)
        assert {name: after[name]["v2p"] for name in after} == {name: before[name]["v2p"] for name in before}
        made.free(first[::2])  # many holes, none of them at the frontier for long
        made.prepare_mamba_allocation(3)
        states = slots.alloc(3)
        assert states is not None and (slots.translate(states) > 0).all()
        check(made)


def test_slots_of_a_group_are_given_back_and_none_is_forgotten() -> None:
    made = make(STATES)
    slots = UnifiedMambaSlotAllocator(made.mamba_allocator, 12, "cpu")
    slots.alloc_group_begin(3)
    taken = slots.alloc(1)
    assert slots.available_size() == 9
    slots.alloc_group_begin(2)
    assert slots.available_size() == 9  # one is out, two are in the new group
    slots.alloc_group_end()
    slots.alloc_group_end()
    assert slots.available_size() == 11 and slots.is_slot_allocated(int(taken[0]))
    with pytest.raises(NotAllocatedError):
        slots.free(torch.cat([taken, ids(-1)]))
    slots.free(taken)
    assert slots.available_size() == 12
    slots.alloc_group_begin(0)
    slots.alloc_group_begin(10_000)  # more than there are: one by one then
    assert slots.alloc(1) is not None
    slots.clear()
    assert slots.available_size() == 12 and slots.size == 12
    check(made)


def test_pages_of_several_slots_are_no_state_pool() -> None:
    with pytest.raises(ConfigurationError, match="one slot, not of 4"):
        UnifiedMambaSlotAllocator(make(ENDS).swa_attn_allocator, 12, "cpu")


def test_a_hopeless_number_of_states_moves_nothing() -> None:
    made = make(STATES, page_size=1)
    tokens = lay(made, 60)
    made.free(tokens[10:30])
    before = composite_state(made)
    made.prepare_mamba_allocation(10_000)
    assert composite_state(made) == before


def test_states_get_the_bytes_of_full_holes_above_the_float() -> None:
    """The float has no holes and nowhere to go before the full pool is packed."""
    made = make(THREE, page_size=1)
    none = torch.zeros(1, dtype=torch.int64)
    window = lay(made, 6)
    count = made.full_attn_allocator.available_size()
    seq = none + count
    outside = made.alloc_extend_swa_tail(none, none, seq, seq, none - 1, count, 0)
    slots = UnifiedMambaSlotAllocator(made.mamba_allocator, 100, "cpu")
    held = slots.alloc(made.mamba_allocator.available_size())
    assert held is not None and slots.alloc(1) is None
    made.free_full(outside[5 : count - 5])
    places = live_pages(made.swa_attn_allocator)
    made.prepare_mamba_allocation(1)
    assert slots.alloc(1) is not None
    assert (
        live_pages(made.swa_attn_allocator) != places
        and (made.translate_loc_from_full_to_swa(window) > 0).all()
    )
    check(made)


@every_strategy
@pytest.mark.parametrize("gate_is_open", [True, False], ids=["open", "shut"])
def test_packing_the_ends_comes_before_moving_the_float(gate_is_open: bool, strategy: str) -> None:
    """A float with no room on either side, between states and full pages that have holes."""
    made = make(THREE, page_size=1, strategy=strategy)
    made.set_disagg_move_gate(lambda: gate_is_open)
    none = torch.zeros(1, dtype=torch.int64)
    lay(made, 6)
    slots = UnifiedMambaSlotAllocator(made.mamba_allocator, 100, "cpu")
    states = slots.alloc(made.mamba_allocator.available_size())
    count = made.full_attn_allocator.available_size()
    outside = made.alloc_extend_swa_tail(none, none, none + count, none + count, none - 1, count, 0)
    slots.free(states[:-1])
    made.free_full(outside[5 : count - 5])
    assert made.available_size() == 0
    places = live_pages(made.swa_attn_allocator)
    before = composite_state(made)
    found = made.alloc(12)
    if gate_is_open:
        assert found is not None
        assert places.items() <= live_pages(made.swa_attn_allocator).items()
    else:
        assert found is None and composite_state(made) == before
    check(made)


def test_a_float_is_not_asked_to_move_where_a_gate_forbids_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made = make(THREE, page_size=1)
    is_open = True
    made.set_disagg_move_gate(lambda: is_open)
    lay(made, 4)
    wanted = next(count for count in range(1, 200) if not made.can_reserve(count, count))
    asked: list[str] = []
    monkeypatch.setattr(made.swa_attn_allocator, "make_room", lambda **how: asked.append(how["side"]))
    made.ensure_capacity(wanted, wanted)
    assert asked == ["high"]
    is_open = False
    assert not made.ensure_capacity(wanted, wanted)
