"""Frees of both sides and of one, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from allocator.errors import (
    AllocatorError,
    BindError,
    DuplicateFreeError,
    NotAllocatedError,
    PageAlignmentError,
    StillPairedError,
)
from tests.allocator.composite_state import check, composite_state, live_pages
from tests.allocator.small_composites import (
    ENDS,
    LAYOUTS,
    every_strategy,
    every_window,
    ids,
    lay,
    make,
    pages_of,
)

pytestmark = pytest.mark.cpu


@every_strategy
@every_window
@pytest.mark.parametrize("as_segment", [True, False], ids=["segment", "any ids"])
@pytest.mark.parametrize("page_size", [1, 4])
def test_the_window_side_goes_alone_and_the_full_side_later(
    page_size: int, as_segment: bool, layout: str, strategy: str
) -> None:
    made = make(layout, page_size, strategy=strategy)
    tokens = lay(made, 8 * page_size)
    left, kept = tokens[: 5 * page_size], tokens[5 * page_size :]
    full_places = live_pages(made.full_attn_allocator)
    if as_segment:
        made.free_swa_segment(left, start_pos=0)
    else:
        made.free_swa(left)
        made.free_swa(left)  # has none any more: nothing happens
    assert (made.translate_loc_from_full_to_swa(left) == 0).all()
    assert (made.translate_loc_from_full_to_swa(kept) > 0).all()
    assert live_pages(made.full_attn_allocator) == full_places
    check(made)
    if as_segment:
        made.free_full_segment(left, start_pos=0)
        made.free_segment(kept, start_pos=5 * page_size)
    else:
        made.free_full(left)
        made.free(kept)
    assert not live_pages(made.full_attn_allocator) and not live_pages(made.swa_attn_allocator)
    check(made)


def of(*pages: int) -> torch.Tensor:
    """The tokens of these virtual pages of 4."""
    return torch.cat([torch.arange(4 * page, 4 * page + 4) for page in pages])


# Of eight pages, 3 to 10, page 7 is free and page 8 is outside the window.
REFUSED: list[tuple[str, type[AllocatorError], list[int], Callable[[Any], object]]] = [
    ("a -1 beside a live id (sglang#38836)", NotAllocatedError, [-1], lambda a: a.free(ids(12, -1))),
    ("the same in free_swa", NotAllocatedError, [-1], lambda a: a.free_swa(ids(12, -1))),
    ("an id past the end in free_swa", NotAllocatedError, [10_000], lambda a: a.free_swa(ids(12, 10_000))),
    ("the padding page (sglang#38519)", NotAllocatedError, [0], lambda a: a.free(ids(0, 12))),
    ("a segment with the padding page", NotAllocatedError, [0], lambda a: a.free_segment(of(0, 3), start_pos=0)),
    ("a page freed before", NotAllocatedError, [7], lambda a: a.free(ids(28))),
    ("a segment outside the window", NotAllocatedError, [8], lambda a: a.free_segment(of(8), start_pos=0)),
    ("half a segment outside the window", NotAllocatedError, [8], lambda a: a.free_segment(of(3, 8), start_pos=0)),
    ("window pages that are gone", NotAllocatedError, [8], lambda a: a.free_swa_segment(of(4, 8), start_pos=0)),
    ("the full side of a pair", StillPairedError, [3], lambda a: a.free_full(ids(12, 13))),
    ("the full side of a pair, as a segment", StillPairedError, [3, 4], lambda a: a.free_full_segment(of(3, 4), start_pos=0)),
    ("a page twice in a segment (vllm#42571)", DuplicateFreeError, [3], lambda a: a.free_segment(of(3, 3), start_pos=0)),
    ("a segment from inside a page", PageAlignmentError, [], lambda a: a.free_segment(of(3)[1:], start_pos=1)),
    ("segments that share a page", PageAlignmentError, [], lambda a: a.free_segments([(of(3, 4)[:5], 0), (of(4)[:2], 4)])),
    ("a window place for an id that has one", BindError, [3], lambda a: a.set_full_to_swa_mapping(of(3), of(2))),
    ("a window place that was not taken", BindError, [50], lambda a: a.set_full_to_swa_mapping(of(8), of(50))),
    ("window places that are not whole pages", PageAlignmentError, [], lambda a: a.set_full_to_swa_mapping(ids(33, 34), ids(9, 10))),
    ("more ids than window places", PageAlignmentError, [], lambda a: a.set_full_to_swa_mapping(ids(32, 33), ids(8))),
]  # fmt: skip


@every_strategy
@pytest.mark.parametrize("in_group", [False, True], ids=["alone", "in a group"])
@pytest.mark.parametrize(
    ("error", "bad", "call"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED]
)
def test_a_wrong_call_names_the_ids_and_changes_nothing(
    error: type[AllocatorError], bad: list[int], call: Callable[[Any], object], in_group: bool, strategy: str
) -> None:
    """F14, F15, F16, F19: refused when it is made, in a group too, on either side."""
    made = make(ENDS, strategy=strategy)
    tokens = lay(made, 32)
    assert pages_of(made, tokens) == list(range(3, 11))
    made.free(of(7))
    made.free_swa(of(8))
    if in_group:
        made.free_group_begin()
    before = composite_state(made)
    with pytest.raises(error) as refused:
        call(made)
    assert refused.value.ids == bad
    if in_group:
        made.free_group_end()
    assert composite_state(made) == before
    check(made)


@every_strategy
def test_a_second_free_of_one_page_is_refused_by_its_number(strategy: str) -> None:
    """F15: one token of the page, later another one."""
    for layout in LAYOUTS:
        made = make(layout, strategy=strategy)
        tokens = lay(made, 8)
        made.free(tokens[:1])
        before = composite_state(made)
        with pytest.raises(NotAllocatedError) as refused:
            made.free(tokens[1:2])
        assert refused.value.ids == pages_of(made, tokens[:1])
        assert composite_state(made) == before


@every_window
def test_nothing_is_freed_by_no_ids(layout: str) -> None:
    made = make(layout)
    lay(made, 8)
    before = composite_state(made)
    for nothing in (None, ids()):
        made.free(nothing)
        made.free_swa(nothing)
        made.free_full(nothing)
        made.free_segment(nothing, start_pos=0)
        made.free_swa_segment(nothing, start_pos=0)
        made.free_full_segment(nothing, start_pos=0)
    assert composite_state(made) == before
