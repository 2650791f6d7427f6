"""Flushes of an END pool where numbers come late, one after another: what the one leaves open the next one must not get wrong."""

from __future__ import annotations

from typing import Any

import pytest

from allocator import MultiEndedAllocator
from allocator.errors import NotAllocatedError
from tests.allocator.delayed import NeverEnd
from tests.allocator.pools import two_ends, whole_state
from tests.allocator.test_late_room import PAGE, Pair, free_swa_pages, pages

pytestmark = pytest.mark.cpu

#: Of a pool that grows up and whose page 16 a forward writes: what is called before its last flush, and whether that one may move the page.
#: An urgent flush that moves anything is ordered behind the forward, which then has written.
HAZARDS: dict[str, tuple[list[tuple[Any, ...]], bool]] = {
    "an urgent flush that moves": ([("free", 2, 3), ("urgent",), ("free", 5)], True),
    "one that moves nothing": ([("free", 17, 18), ("urgent",), ("free", 5)], False),
    "none": ([("free", 17, 18), ("free", 5)], False),
    "one that moves, and one that does not": ([("free", 2, 3), ("urgent",), ("urgent",), ("free", 5)], True),
    "one that does not, and one that moves": (
        [("free", 18), ("urgent",), ("free", 2), ("urgent",), ("free", 5)],
        True,
    ),
    "a flush between": ([("free", 2, 3), ("urgent",), ("free", 16), ("flush",), ("free", 5)], True),
    "a forward after it": ([("free", 2, 3), ("urgent",), ("forward",), ("free", 5)], False),
    "after a flush that could do nothing": (
        [("free", 5), ("free", 17, 18), ("flush",), ("flush",), ("free", 6), ("urgent",), ("free", 7)],
        True,
    ),
}


@pytest.mark.parametrize("arrives", [True, False], ids=["arrived", "late"])
@pytest.mark.parametrize("hazard", HAZARDS)
def test_what_a_forward_writes_stays_until_an_urgent_flush_has_moved_something(
    hazard: str, arrives: bool
) -> None:
    calls, may_move = HAZARDS[hazard]
    pair = Pair()
    pair.forward(swa_writes=pages(16))
    for name, *numbers in calls:
        if name == "free":
            free_swa_pages(pair, *numbers)
        elif name == "forward":
            pair.forward(swa_writes=pages(16))
        else:
            pair.swa("flush_for_allocation" if name == "urgent" else "flush_opportunistic")
        if arrives:
            pair.arrive()
    places = pair.plain[1].virtual_to_physical.tolist()
    pair.swa("flush_opportunistic")
    assert (pair.plain[1].virtual_to_physical.tolist() != places) == may_move
    assert pair.waits == 0 and pair.same()


def test_ids_that_were_freed_by_more_tokens_than_there_are_ids() -> None:
    """A row for each token named is kept until it is known how many pages they were."""
    late, plain = (
        two_ends(page_size=PAGE, strategy=strategy, end_class=kind)[0]
        for strategy, kind in (("device", NeverEnd), ("batched", MultiEndedAllocator))
    )
    for pool in (late, plain):
        tokens = pool.alloc(pool.available_size())
        pool.alloc(PAGE)
        for chunk in tokens.flip(0).split(5 * PAGE):
            pool.free(chunk)
        pool.free(tokens[:0])
    assert late.blocking_reads == 0  # type: ignore[attr-defined]
    assert whole_state(late) == whole_state(plain)
    assert late.alloc(8 * PAGE).tolist() == plain.alloc(8 * PAGE).tolist()


def test_who_settles_a_pool_is_told_what_was_written_down_before() -> None:
    full, _ = two_ends(page_size=PAGE, strategy="device", end_class=NeverEnd)
    full.alloc(16 * PAGE)
    full.free(pages(40))
    with pytest.raises(NotAllocatedError):
        full.watermark_physical  # noqa: B018  waits for the device


def test_less_than_no_live_pages_is_told_as_the_call_that_was_wrong() -> None:
    full, _ = two_ends(page_size=PAGE, strategy="device", end_class=NeverEnd)
    full.alloc(4 * PAGE)
    full.free_segment(pages(1, 2, 3), start_pos=0)
    with pytest.raises(NotAllocatedError):
        full.free_segment(pages(2, 3), start_pos=0)
