"""Allocs that take places in two pools: all of them, or none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from allocator import kv_store_for
from allocator.errors import (
    BindError,
    InvalidRequestError,
    PageAlignmentError,
)
from tests.allocator.composite_state import check, composite_state, live_pages
from tests.allocator.small_composites import (
    ENDS,
    every_strategy,
    every_window,
    ids,
    lay,
    make,
)

pytestmark = pytest.mark.cpu


def whole_extend(made: Any, count: int) -> Callable[[], Any]:
    none, seq = torch.zeros(1, dtype=torch.int64), ids(count)
    return lambda: made.alloc_extend(none, none, seq, seq, none - 1, count)


def tail(made: Any, count: int, tail_len: int) -> Callable[[], Any]:
    none, seq = torch.zeros(1, dtype=torch.int64), ids(count)
    return lambda: made.alloc_extend_swa_tail(none, none, seq, seq, none - 1, count, tail_len)


def decode(made: Any, last: torch.Tensor) -> Callable[[], Any]:
    seq = ids(made.page_size * 3 + 1)
    return lambda: made.alloc_decode(seq, seq, last[-1:])


ALLOCS: dict[str, Callable[[Any, torch.Tensor], Callable[[], Any]]] = {
    "alloc": lambda made, held: lambda: made.alloc(3 * made.page_size),
    "alloc_extend": lambda made, held: whole_extend(made, 10),
    "alloc_extend_swa_tail": lambda made, held: tail(made, 14, 6),
    "alloc_decode": lambda made, held: decode(made, held),
}


class Broken(RuntimeError):
    """Something that is none of the allocator's own refusals."""


def break_before(pool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(pages: torch.Tensor) -> None:
        raise Broken("before anything was taken")

    monkeypatch.setattr(pool, "alloc_with_virtual", fail)


def break_inside(pool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """After places were taken and bound, where their bytes are zeroed."""

    def fail(pages: torch.Tensor) -> None:
        raise Broken("while it was under way")

    monkeypatch.setattr(pool, "_zero_pages", fail)


BREAKS: dict[str, Callable[[Any, pytest.MonkeyPatch], None]] = {
    "window side, before": lambda made, patch: break_before(made.swa_attn_allocator, patch),
    "window side, inside": lambda made, patch: break_inside(made.swa_attn_allocator, patch),
    "full side, inside": lambda made, patch: break_inside(made.full_attn_allocator, patch),
}


@every_strategy
@every_window
@pytest.mark.parametrize("lazy", [True, False], ids=["lazy", "eager"])
@pytest.mark.parametrize("where", BREAKS)
@pytest.mark.parametrize("kind", ALLOCS)
def test_an_exception_inside_an_alloc_leaves_all_pools_as_they_were(
    kind: str, where: str, lazy: bool, layout: str, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F8, F9, F10: the first pool's pages, ids and their order included; and the next answer is what it would have been."""
    made, twin = (make(layout, strategy=strategy, lazy=lazy, store=kv_store_for) for _ in range(2))
    calls = []
    for each in (made, twin):
        held = lay(each, 12 * each.page_size)
        each.free(held[4:12])  # holes, which an alloc takes first
        each.free_swa(held[20:24])
        calls.append(ALLOCS[kind](each, held))
    before = composite_state(made)
    with monkeypatch.context() as patch:
        BREAKS[where](made, patch)
        with pytest.raises(Broken):
            calls[0]()
    assert composite_state(made) == before == composite_state(twin)
    check(made)
    assert calls[0]().tolist() == calls[1]().tolist()
    assert composite_state(made) == composite_state(twin)


@every_window
def test_an_id_that_is_bound_on_the_window_side_still_is_refused_and_nothing_is_taken(layout: str) -> None:
    made = make(layout)
    tokens = lay(made, 8)
    following = made.full_attn_allocator.free_virtual_ids[:1]
    made.swa_attn_allocator.alloc_with_virtual(following)
    before = composite_state(made)
    with pytest.raises(BindError) as refused:
        made.alloc(8)
    assert refused.value.ids == following.tolist() and refused.value.pool == "swa"
    assert composite_state(made) == before
    assert (made.translate_kv_loc(tokens) > 0).all()


@every_strategy
@every_window
@pytest.mark.parametrize("count", [1, 4, 5, 13, 16])
def test_only_the_tail_of_a_request_gets_window_places(layout: str, strategy: str, count: int) -> None:
    for tail_len in range(count + 1):
        made = make(layout, strategy=strategy)
        tokens = tail(made, count, tail_len)()
        first = (count - tail_len) // 4 * 4 if tail_len else count
        bound = [position >= first for position in range(count)]
        assert (made.translate_loc_from_full_to_swa(tokens) > 0).tolist() == bound
        assert (made.translate_kv_loc(tokens) > 0).all()
        check(made)


def test_a_tail_that_begins_in_an_old_page_binds_new_pages_only() -> None:
    made = make(ENDS)
    old = whole_extend(made, 6)()
    prefix, seq = ids(6), ids(15)
    places = live_pages(made.swa_attn_allocator)
    tokens = made.alloc_extend_swa_tail(prefix, prefix, seq, seq, old[-1:], 9, 9)
    assert tokens[:2].tolist() == [int(old[-1]) + 1, int(old[-1]) + 2]
    assert len(live_pages(made.swa_attn_allocator)) == len(places) + 2
    assert places.items() <= live_pages(made.swa_attn_allocator).items()


def test_a_tail_longer_than_what_is_new_and_several_requests_are_refused() -> None:
    made = make(ENDS)
    with pytest.raises(InvalidRequestError, match="a tail of 6 tokens for 1 request"):
        tail(made, 5, 6)()
    none = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(InvalidRequestError, match="2 request"):
        made.alloc_extend_swa_tail(none, none, none + 4, none + 4, none - 1, 8, 4)
    with pytest.raises(PageAlignmentError, match="6 tokens"):
        made.alloc(6)
