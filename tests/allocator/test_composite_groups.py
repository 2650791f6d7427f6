"""Free groups of composites."""

from __future__ import annotations

import pytest

from allocator.errors import (
    BindError,
    DuplicateFreeError,
    FreeGroupError,
)
from tests.allocator.composite_state import check, composite_state, live_pages
from tests.allocator.small_composites import (
    LAYOUTS,
    STATES,
    every_strategy,
    every_window,
    ids,
    lay,
    make,
    pages_of,
    window_places,
)

pytestmark = pytest.mark.cpu


@every_strategy
@pytest.mark.parametrize("layout", LAYOUTS)
def test_groups_do_not_nest_and_close_once(layout: str, strategy: str) -> None:
    """F13: nothing is released twice, whatever the caller does with begin and end."""
    made = make(layout, strategy=strategy)
    first, second = lay(made, 8), lay(made, 8)
    made.free_group_begin()
    made.free(first)
    with pytest.raises(FreeGroupError, match="do not nest"):
        made.free_group_begin()
    made.free(second)
    assert made.is_slot_allocated(int(first[0])) and made.free_group is not None
    made.free_group_end()
    after = composite_state(made)
    assert made.free_group is None and not live_pages(made.full_attn_allocator)
    made.free_group_end()
    assert composite_state(made) == after
    check(made)


@every_strategy
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_group_owns_what_was_queued(layout: str, strategy: str) -> None:
    """The caller's tensors may be written to before the group closes (Megatron-LM#6584 is the other way round)."""
    made = make(layout, strategy=strategy)
    tokens, rest = lay(made, 8), lay(made, 8)
    given = tokens.clone()
    made.free_group_begin()
    made.free(given[:4])
    made.free_segment(given[4:], start_pos=4)
    given.fill_(int(rest[0]))
    made.free_group_end()
    assert sorted(live_pages(made.full_attn_allocator)) == pages_of(made, rest)
    check(made)


@every_strategy
@every_window
def test_a_page_in_two_frees_of_a_group_is_refused_when_it_closes(layout: str, strategy: str) -> None:
    made = make(layout, strategy=strategy)
    tokens = lay(made, 16)
    made.free_group_begin()
    made.free(tokens[:8])
    made.free_segment(tokens[4:8], start_pos=4)
    before = composite_state(made)
    with pytest.raises(DuplicateFreeError) as refused:
        made.free_group_end()
    assert refused.value.ids == pages_of(made, tokens[4:8])
    assert composite_state(made) == before and made.free_group is None
    made.free_swa(tokens)
    made.free_group_begin()
    made.free_full(tokens[:8])
    made.free_full_segment(tokens[4:], start_pos=4)
    before = composite_state(made)
    with pytest.raises(DuplicateFreeError) as refused:
        made.free_group_end()
    assert refused.value.ids == pages_of(made, tokens[4:8])
    assert composite_state(made) == before and made.free_group is None
    made.free_full(tokens)
    check(made)


@every_strategy
@every_window
@pytest.mark.parametrize("as_segment", [True, False], ids=["segment", "any ids"])
def test_a_queued_free_takes_the_window_page_it_saw(as_segment: bool, layout: str, strategy: str) -> None:
    """F12 (sgl-project/sglang#36135, #36381, #36646): the id is paired with another window page before the group closes."""
    made = make(layout, strategy=strategy)
    swa = made.swa_attn_allocator
    tokens, others = lay(made, 4), lay(made, 8)
    (first,) = window_places(made, tokens)
    kept = window_places(made, others)
    second = swa.alloc_physical(4)
    made.free_group_begin()
    if as_segment:
        made.free_segment(tokens, start_pos=0)
    else:
        made.free(tokens)
    made.set_full_to_swa_mapping(tokens, second)
    made.free_group_end()
    assert window_places(made, tokens) == [int(second[0]) // 4]
    assert first not in live_pages(swa).values()
    assert swa.allocated_count() == 12 and window_places(made, others) == kept
    assert pages_of(made, tokens)[0] not in live_pages(made.full_attn_allocator)
    made.free_swa(tokens)
    check(made)


@every_strategy
@every_window
def test_a_window_page_released_in_a_group_is_not_released_again(layout: str, strategy: str) -> None:
    """F12, F13: freed on the window side after it was queued, then paired anew; and queued without a pair, then paired."""
    made = make(layout, strategy=strategy)
    swa = made.swa_attn_allocator
    tokens, unpaired = lay(made, 8), lay(made, 4)
    made.free_swa(unpaired)
    places = swa.alloc_physical(8)
    made.free_group_begin()
    made.free(tokens)
    made.free_full(unpaired)
    made.free_swa(tokens[:4])
    made.set_full_to_swa_mapping(tokens[:4], places[:4])
    made.set_full_to_swa_mapping(unpaired, places[4:])
    made.free_group_end()
    assert window_places(made, tokens) == [int(places[0]) // 4, -1]
    assert window_places(made, unpaired) == [int(places[4]) // 4]
    assert swa.allocated_count() == 8 and not live_pages(made.full_attn_allocator)
    made.free_swa(tokens)
    made.free_swa(unpaired)
    check(made)


@every_window
def test_a_window_page_that_has_another_owner_when_the_group_closes_stays(layout: str) -> None:
    """A cache takes the window page of ids that are on their way out for ids that it keeps."""
    made = make(layout)
    swa = made.swa_attn_allocator
    kept, leaving = lay(made, 4), lay(made, 4)
    made.free_swa(kept)
    (place,) = window_places(made, leaving)
    made.free_group_begin()
    made.free(leaving)
    swa.bind(kept[:1] // 4, ids(place))
    swa.unbind(leaving[:1] // 4)
    made.free_group_end()
    assert window_places(made, kept) == [place]
    assert sorted(live_pages(made.full_attn_allocator)) == pages_of(made, kept)
    check(made)


def test_what_is_queued_can_be_freed_without_closing_the_group() -> None:
    for layout in LAYOUTS:
        made = make(layout)
        tokens = lay(made, 12)
        made.free_group_begin()
        made.free(tokens[:4])
        made.free_segment(tokens[4:8], start_pos=4)
        made.flush_deferred_full_frees()
        assert sorted(live_pages(made.full_attn_allocator)) == pages_of(made, tokens[8:])
        assert made.free_group is not None
        made.free(tokens[8:])
        made.free_group_end()
        assert not live_pages(made.full_attn_allocator)


@every_strategy
def test_a_page_in_two_frees_of_a_group_with_states(strategy: str) -> None:
    made = make(STATES, strategy=strategy)
    tokens = lay(made, 16)
    made.free_group_begin()
    made.free(tokens[:8])
    made.free_segment(tokens[4:8], start_pos=4)
    before = composite_state(made)
    with pytest.raises(DuplicateFreeError) as refused:
        made.free_group_end()
    assert refused.value.ids == pages_of(made, tokens[4:8])
    assert composite_state(made) == before and made.free_group is None
    check(made)


@every_strategy
@every_window
def test_a_place_that_is_none_is_refused_before_a_waiting_id_gives_up_its_own(
    layout: str, strategy: str
) -> None:
    made = make(layout, strategy=strategy)
    tokens = lay(made, 4)
    kept = window_places(made, tokens)
    made.free_group_begin()
    made.free(tokens)
    with pytest.raises(BindError):
        made.set_full_to_swa_mapping(tokens, 4 * (made.swa_attn_allocator.num_pages - 1) + ids(0, 1, 2, 3))
    assert window_places(made, tokens) == kept
    made.free_group_end()
    assert not live_pages(made.full_attn_allocator) and not live_pages(made.swa_attn_allocator)
    check(made)
