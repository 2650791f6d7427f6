"""What a composite of two sides answers while numbers are on their way from the device: from what is certain, and where that is not enough
for a yes or a no, by leaving it to the device whether the sides have to be packed. Answers and places are those of strategy `batched`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from allocator.errors import NotAllocatedError, OutOfRoomError
from tests.allocator.composite_state import composite_state
from tests.allocator.late_pair import INNER, OUTER, PAGE, counted_in_part, flushed, full_pair, tokens_at

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize("layers", [(1, 3), (3, 1)], ids=["window pages larger", "full pages larger"])
@pytest.mark.parametrize("question", ["alloc", "ensure_capacity"])
@pytest.mark.parametrize("freed", [INNER, OUTER], ids=["there once they are packed", "there as they lie"])
def test_the_device_finds_out_whether_both_sides_have_to_be_packed(
    freed: slice, question: str, layers: tuple[int, int]
) -> None:
    pair = flushed(freed, layers=layers)
    wanted = 3 * PAGE
    is_there = wanted <= pair.plain.available_size()
    assert is_there == (freed == OUTER)
    arguments = (wanted,) if question == "alloc" else (wanted, wanted)
    found, waits = pair.ask(question, *arguments)
    assert found is not None and found is not False
    assert waits == 0 and not pair.is_settled
    if question == "ensure_capacity":
        _, waits = pair.ask("alloc", wanted)
        assert waits == 0
    assert pair.same()


def test_sides_of_different_size_are_judged_together_on_the_device() -> None:
    """More window pages than full ones, and the other way round."""
    for full_pages, swa_pages in ((0, 3), (3, 0), (1, 3), (3, 1), (4, 1)):
        pair = flushed(INNER)
        found, waits = pair.ask("ensure_capacity", full_pages * PAGE, swa_pages * PAGE)
        assert found and waits == 0, (full_pages, swa_pages)
        assert pair.same(), (full_pages, swa_pages)


def test_holes_are_filled_where_the_device_finds_that_nothing_has_to_be_packed() -> None:
    pair = flushed(OUTER)
    for made in pair.both:
        made.free_segment(tokens_at(made, 160), start_pos=0)
    assert len(pair.late.full_attn_allocator.holes) == len(pair.plain.full_attn_allocator.holes) == 1
    taken, waits = pair.ask("alloc", 4 * PAGE)
    assert taken is not None and waits == 0 and not pair.is_settled
    assert pair.plain.full_attn_allocator.virtual_to_physical[taken[::PAGE] // PAGE].tolist()[0] == 160
    assert pair.same()


def test_the_device_is_told_which_side_needs_how_much() -> None:
    """There is room for more pages of the full side than there would be for as many of the window side, which are larger."""
    pair = flushed(OUTER)
    for made in pair.both:
        made.free_segment(tokens_at(made, 160), start_pos=0)
    for question in ("ensure_capacity", "alloc"):
        found, waits = pair.ask(
            *((question, 8 * PAGE, PAGE) if question == "ensure_capacity" else (question, PAGE))
        )
        assert found is not None and found is not False and waits == 0
    assert pair.same()


def test_the_device_judges_both_sides_as_the_host_would() -> None:
    """Holes on both sides, more of them on one, and a gap that the host does not know of."""
    pair = flushed(OUTER)
    plain, (full, swa) = pair.plain, pair.late._move_gate_targets()
    for made in pair.both:
        made.free_swa_segment(tokens_at(made, 161, 163), start_pos=0)
        made.free_segment(tokens_at(made, 160), start_pos=0)
    judged = set()
    for full_pages in range(16):
        for swa_pages in range(10):
            lacks = not plain._fits_as_it_lies(full_pages, swa_pages)
            judged.add(lacks)
            assert bool(full._lacks_together(full_pages, swa, swa_pages)) == lacks, (full_pages, swa_pages)
            assert bool(swa._lacks_together(swa_pages, full, full_pages)) == lacks, (full_pages, swa_pages)
    assert judged == {True, False}


def test_nothing_is_left_to_the_device_where_all_is_known() -> None:
    pair = flushed(INNER)
    pair.arrive()
    found, waits = pair.ask("ensure_capacity", 3 * PAGE, 3 * PAGE)
    assert found and waits == 0
    assert pair.is_settled and pair.same()


def test_what_can_never_fit_is_refused_at_once() -> None:
    pair = flushed(INNER)
    wanted = 4 * PAGE
    for question in (
        ("ensure_capacity", wanted, wanted),
        ("can_reserve", wanted, wanted),
        ("reclaim_plan", wanted, wanted),
    ):
        found, waits = pair.ask(*question)
        assert not found and waits == 0, question
    found, waits = pair.ask("alloc", wanted)
    assert found is None and waits == 0
    assert not pair.is_settled and pair.same()


def test_what_may_not_fit_is_waited_for_where_live_pages_are_not_counted_yet() -> None:
    """A free of tokens: nobody has told the host how many pages they are."""
    pair, tokens = full_pair()
    for made in pair.both:
        made.free(tokens[5 * PAGE + 1 : 9 * PAGE - 1])
    found, waits = pair.ask("prealloc_ceiling_fits", 1000 * PAGE, PAGE)
    assert not found and waits == 0  # whatever is live
    found, waits = pair.ask("ensure_capacity", 5 * PAGE, 5 * PAGE)
    assert not found and waits > 0
    assert pair.same()


@pytest.mark.parametrize("question", ["ensure_capacity", "reclaim_plan"])
def test_numbers_that_have_arrived_are_taken_in_first(question: str) -> None:
    """How many pages a free of tokens gave back, but not what a flush after it did: live pages are known, and nothing else is."""
    pair, tokens = full_pair()
    for made in pair.both:
        made.free(tokens[5 * PAGE + 1 : 9 * PAGE - 1])
    counted = pair.posted
    for made in pair.both:
        made.flush_opportunistic()
    pair.arrive(counted)
    found, waits = pair.ask(question, 5 * PAGE, 5 * PAGE)
    assert not found and waits == 0
    assert not pair.is_settled and pair.same()


EVICTABLE = {"full_evictable_tokens": PAGE, "swa_evictable_tokens": PAGE}


@pytest.mark.parametrize(
    ("question", "keywords"),
    [
        ("can_reserve", {"full_tokens": 7 * PAGE, "swa_tokens": 5 * PAGE, **EVICTABLE}),
        ("can_reserve", {"full_tokens": 22 * PAGE, "swa_tokens": 0, **EVICTABLE}),
        ("check_decode_capacity", {"num_tokens": 4 * PAGE, "tree_cache": None}),
    ],
    ids=["what is evictable", "what is evictable, packed", "as it lies"],
)
def test_so_they_are_where_it_is_still_open_how_many_pages_are_live(
    question: str, keywords: dict[str, Any]
) -> None:
    pair, tokens = full_pair()
    counted_in_part(pair, tokens)
    found, waits = pair.ask(question, **keywords)
    assert found and waits == 0
    found, waits = pair.ask("can_reserve", 8 * PAGE, 8 * PAGE, **EVICTABLE)
    assert not found and waits > 0
    assert pair.same()


def test_what_fits_for_certain_is_not_waited_for_though_live_pages_are_not_counted() -> None:
    pair, tokens = full_pair()
    for made in pair.both:
        made.free(tokens[5 * PAGE + 1 : 9 * PAGE - 1])
        made.free_segment(tokens[: 2 * PAGE], start_pos=0)
    for question in (
        ("can_reserve", 2 * PAGE, 2 * PAGE),
        ("ensure_capacity", 2 * PAGE, 2 * PAGE),
        ("alloc", 2 * PAGE),
    ):
        posted = pair.posted
        found, waits = pair.ask(*question)
        assert found is not False and found is not None and waits == 0, question
        assert pair.posted == posted, question  # nothing is left to the device
    assert not pair.is_settled and pair.same()


def test_holes_of_a_bound_that_overlaps_the_other_side_are_none() -> None:
    """The window side was flushed and the full side has grown to where its bound still is. Then somebody asks for the full side's numbers
    alone; or they have come, and those of the window side, sent after them, have not."""
    pair, tokens = full_pair()
    for made in pair.both:
        made.set_latest_forward_done_event(None)
        made.free_segment(tokens.reshape(-1, PAGE)[OUTER].reshape(-1), start_pos=0)
        made.flush_opportunistic()
    none, length = torch.zeros(1, dtype=torch.int64), torch.tensor([13 * PAGE])
    grown = pair.call("alloc_extend_swa_tail", none, none, length, length, none - 1, 13 * PAGE, 0)
    for made in pair.both:
        assert made.full_attn_allocator.watermark_physical == 134
        made.free_full_segment(grown[2 * PAGE : 3 * PAGE], start_pos=0)
    assert pair.late.full_attn_allocator._is_settled and not pair.late.swa_attn_allocator._is_settled
    assert pair.call("ensure_capacity", 0, 3 * PAGE) is False
    assert pair.plain.alloc(PAGE) is None and pair.late.alloc(PAGE) is None
    assert pair.same()


def test_behind_a_shut_gate_nothing_is_packed_and_the_host_waits() -> None:
    pair = flushed(INNER)
    pair.shut()
    before = composite_state(pair.plain)
    found, waits = pair.ask("ensure_capacity", 3 * PAGE, 3 * PAGE)
    assert not found and waits > 0
    assert composite_state(pair.plain) == before and pair.same()


def test_what_has_to_go_behind_a_shut_gate_is_worked_out_from_what_is_there() -> None:
    """Live pages are known, and what a flush has made of the holes is not."""
    pair = flushed(OUTER)
    pair.shut()
    found, waits = pair.ask("reclaim_plan", 3 * PAGE, 3 * PAGE)
    assert found == (0, 0) and waits > 0


@pytest.mark.parametrize("shut", ["full_attn_allocator", "swa_attn_allocator"])
def test_behind_the_gate_of_one_side_neither_is_packed(shut: str) -> None:
    pair = flushed(INNER)
    for made in pair.both:
        getattr(made, shut).disagg_move_gate = lambda: False
    before = composite_state(pair.plain)
    found, _ = pair.ask("ensure_capacity", 3 * PAGE, 3 * PAGE)
    assert not found
    assert composite_state(pair.plain) == before and pair.same()


def test_nor_is_what_would_not_fit_packed_waited_for_behind_a_shut_gate() -> None:
    pair = flushed(INNER)
    pair.shut()
    found, waits = pair.ask("ensure_capacity", 4 * PAGE, 4 * PAGE)
    assert not found and waits == 0
    assert not pair.is_settled and pair.same()


def test_a_promise_of_a_composite_that_does_not_hold_is_told_later() -> None:
    """The full pool is promised what its composite was told is there; the device looks."""
    pair = flushed(INNER)
    full = pair.late.full_attn_allocator
    with full.promised():
        assert full.alloc(3 * PAGE) is not None  # nothing was packed for them
    with pytest.raises(OutOfRoomError):
        full._errors.look(wait=True)


@pytest.mark.parametrize("call", ["pack both", "take what was promised"])
def test_a_fault_that_has_arrived_is_told_before_both_sides_are_packed(call: str) -> None:
    pair = flushed(INNER)
    full, swa = pair.late.full_attn_allocator, pair.late.swa_attn_allocator
    free_already = int((full.virtual_to_physical[1 : full.num_virtual_ids] < 0).nonzero()[0]) + 1
    full.free_segment(torch.arange(free_already * PAGE, free_already * PAGE + PAGE), start_pos=0)
    full._read_back.arrived = full._read_back.posted
    full._look_for_errors()  # sends it: one is under way at a time
    full._read_back.arrived = full._read_back.posted
    before = [pool.physical_to_virtual.tolist() for pool in (full, swa)]
    with pytest.raises(NotAllocatedError), full.promised():
        if call == "pack both":
            full.pack_both_if_lacking(3, swa, 3)
        else:
            full.alloc(PAGE)
    assert [pool.physical_to_virtual.tolist() for pool in (full, swa)] == before
