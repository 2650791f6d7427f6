"""What a composite answers a scheduler while numbers are on their way from the device: from what is certain, if that is enough."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.allocator.cached_program import CachedProgram
from tests.allocator.composite_program import our_composite
from tests.allocator.composite_state import pools_of
from tests.allocator.delayed import NeverEnd, NeverFloat, SlowEnd, SlowFloat
from tests.allocator.late_pair import INNER, OUTER, PAGE, Pair, counted_in_part, flushed
from tests.allocator.small_composites import ENDS, STATES, THREE, make
from tests.engine.composites import LAYOUTS, Event

pytestmark = pytest.mark.cpu


class Cache:
    """Nothing to give up."""

    def supports_prefix_sharing(self) -> bool:
        return True

    def full_evictable_size(self) -> int:
        return 0

    swa_evictable_size = mamba_evictable_size = full_evictable_size

    def evict_for_alloc(self, params: Any, **keywords: Any) -> Any:
        raise AssertionError("nothing is asked of a cache if there is room")


QUESTIONS: dict[str, Callable[[Any], Any]] = {
    "evict_to_free_tokens": lambda made: made.evict_to_free_tokens(Cache(), 2 * PAGE) in (None, True),
    "check_decode_capacity": lambda made: made.check_decode_capacity(num_tokens=2 * PAGE, tree_cache=Cache()),
    "no cache": lambda made: made.check_decode_capacity(num_tokens=2 * PAGE, tree_cache=None),
    "no tokens": lambda made: made.check_decode_capacity(num_tokens=0, tree_cache=None),
    "prepare_mamba_allocation": lambda made: made.prepare_mamba_allocation(1) is None,
}


@pytest.mark.parametrize(
    ("layout", "question"),
    [
        (layout, question)
        for layout in LAYOUTS
        for question in QUESTIONS
        if layout != ENDS or question != "prepare_mamba_allocation"  # it has no states
    ],
)
def test_a_scheduler_is_answered_from_what_is_certain(layout: str, question: str) -> None:
    pair = Pair(layout)
    tokens = pair.call("alloc", 24 * PAGE)
    if layout != STATES:
        for made in pair.both:
            made.free_swa(tokens[: 3 * PAGE])
    for made in pair.both:
        made.free(tokens[4 * PAGE + 1 : 9 * PAGE - 1])
    waited = sum(pool.blocking_reads for pool in pools_of(pair.late).values())
    assert not pair.is_settled
    assert QUESTIONS[question](pair.late) and QUESTIONS[question](pair.plain)
    assert sum(pool.blocking_reads for pool in pools_of(pair.late).values()) == waited
    assert not pair.is_settled and pair.same()


@pytest.mark.parametrize("layout", [ENDS, THREE])
def test_a_cache_is_not_asked_for_what_has_arrived(layout: str) -> None:
    """The pages of one free of tokens are counted by now, and those of another are not."""
    pair = Pair(layout)
    tokens = torch.cat([pair.call("alloc", PAGE) for _ in range(pair.plain.available_size() // PAGE)])
    counted_in_part(pair, tokens)
    found, waits = pair.ask("evict_to_free_tokens", Cache(), 4 * PAGE)
    assert found and waits == 0 and not pair.is_settled


@pytest.mark.parametrize("target", ["certain", "there", "there once tokens are packed"])
@pytest.mark.parametrize("layout", [STATES, THREE])
def test_room_for_states_is_made_as_if_all_were_known(layout: str, target: str) -> None:
    pair = Pair(layout)
    tokens = torch.cat([pair.call("alloc", PAGE) for _ in range(pair.plain.available_size() // PAGE)])
    pair.forward()
    pages = tokens.reshape(-1, PAGE)
    for made in pair.both:
        made.free_segment(pages[-8:-4].reshape(-1), start_pos=0)
        made.free_segment(pages[-3:].reshape(-1), start_pos=0)
        made.flush_opportunistic()
    states = pair.plain.mamba_allocator
    there = states.available_size()
    number = {
        "certain": pair.late.mamba_allocator._certain_size(),
        "there": there,
        "there once tokens are packed": max(there + 1, states.schedulable_available_size()),
    }[target]
    assert (number < there) == (target == "certain")
    _, waits = pair.ask("prepare_mamba_allocation", number)
    assert (waits == 0) == (not pair.is_settled) == (target == "certain")
    assert states.available_size() >= number
    assert pair.same()


def test_what_was_made_sure_of_is_not_asked_for_again() -> None:
    """A decode step that fits once both sides are packed, which is left to the device: it is a yes, and no size is needed."""
    pair = flushed(INNER)
    waited = sum(pool.blocking_reads for pool in pools_of(pair.late).values())
    for made in pair.both:
        assert made.check_decode_capacity(num_tokens=3 * PAGE, tree_cache=Cache())
    assert sum(pool.blocking_reads for pool in pools_of(pair.late).values()) == waited
    assert pair.same()


def test_what_is_not_certain_is_waited_for_where_there_is_no_cache_to_ask() -> None:
    for pages, is_there in ((3, True), (4, False)):
        pair = flushed(OUTER)
        found, waits = pair.ask("check_decode_capacity", num_tokens=pages * PAGE, tree_cache=None)
        assert found == is_there and waits > 0


def test_so_it_is_of_tokens_beside_states() -> None:
    """What is certain, to the last token, is not waited for; what is there besides is, and what is not is refused."""
    pair = Pair(STATES)
    tokens = pair.call("alloc", pair.plain.available_size())
    for made in pair.both:
        made.free(tokens[1 : 3 * PAGE - 1])
    certain = pair.late.full_attn_allocator._certain_size()
    assert certain == PAGE
    for there, waits_for_it in ((certain, False), (3 * PAGE, True), (3 * PAGE + 1, False)):
        found, waits = pair.ask("check_decode_capacity", num_tokens=there, tree_cache=None)
        assert found == (there <= 3 * PAGE) and (waits > 0) == waits_for_it, there
    assert pair.same()


def test_holes_of_states_count_for_tokens_without_a_wait() -> None:
    """`alloc` packs them."""
    pair = Pair(STATES)
    for made in pair.both:
        made.mamba_allocator.alloc(6)
    tokens = pair.call("alloc", pair.plain.available_size())
    for made in pair.both:
        made.mamba_allocator.free_segment(torch.arange(2, 4), start_pos=0)
        made.free(tokens[1 : 3 * PAGE - 1])
    certain = pair.late.full_attn_allocator._certain_size()
    found, waits = pair.ask("check_decode_capacity", num_tokens=certain + PAGE, tree_cache=None)
    assert found and waits == 0 and not pair.is_settled


def test_a_decode_step_without_a_new_page_is_not_looked_at() -> None:
    """Bounds of the two sides may overlap, and no number of pages fits between them then."""
    pair = flushed(INNER)
    pair.ask("alloc", 3 * PAGE)
    assert not pair.late._fits_as_it_lies(0, 0)
    found, waits = pair.ask("check_decode_capacity", num_tokens=0, tree_cache=None)
    assert found and waits == 0
    found, waits = pair.ask("check_decode_capacity", num_tokens=1, tree_cache=None)
    assert not found and waits > 0


@pytest.mark.parametrize("late", ["never", "slow"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_as_much_is_asked_of_a_cache_where_numbers_come_late(layout: str, late: str) -> None:
    end, middle = {"never": (NeverEnd, NeverFloat), "slow": (SlowEnd, SlowFloat)}[late]
    classes = {"end_class": end} | ({"float_class": middle} if layout == THREE else {})
    plain = CachedProgram(our_composite(layout, PAGE, lazy=True, strategy="batched"), 6)
    other = CachedProgram(our_composite(layout, PAGE, lazy=True, strategy="device", **classes), 6)
    for number in range(150):
        assert other.step() == plain.step(), number
        if number % 30 == 29:
            assert (other.sizes(), other.places()) == (plain.sizes(), plain.places()), number
    assert other.cache.asked == plain.cache.asked
    assert len(plain.cache.asked) >= 5


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pools_that_are_known_to_be_packed_by_now_are_not_asked_to_pack(
    layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair(layout)
    tokens = pair.call("alloc", 8 * PAGE)
    for made in pair.both:
        made.free(tokens[-2 * PAGE + 1 : -1])
        made.flush_opportunistic()
        made.flush_opportunistic()  # what the first one vacated
    assert not pair.is_settled
    pair.arrive()
    for pool in pools_of(pair.late).values():
        monkeypatch.setattr(pool, "flush_opportunistic", None)
    assert pair.late.flush_opportunistic() == 0
    assert pair.is_settled and pair.same()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_idle_engine_waits_for_nothing(layout: str) -> None:
    pair = Pair(layout)
    tokens = pair.call("alloc", 8 * PAGE)
    for made in pair.both:
        made.free(tokens[2 * PAGE + 1 : 4 * PAGE - 1])
        for _ in range(3):
            made.flush_opportunistic()
    assert sum(pool.blocking_reads for pool in pools_of(pair.late).values()) == 0
    assert not pair.is_settled and pair.same()


@pytest.mark.parametrize(
    ("layout", "name"), [(ENDS, "full"), (ENDS, "swa"), (STATES, "mamba"), (THREE, "swa"), (THREE, "mamba")]
)
def test_one_pool_with_holes_is_packed(layout: str, name: str) -> None:
    made = make(layout, PAGE)
    tokens, pool = made.alloc(8 * PAGE), pools_of(made)[name]
    if name == "mamba":
        pool.free(pool.alloc(4)[1:2])
    else:
        made.free_swa_segment(tokens[-PAGE:], start_pos=0)
    if name == "full":
        made.flush_opportunistic()
        made.free_full_segment(tokens[-PAGE:], start_pos=0)
    assert [other for other, each in pools_of(made).items() if not each._is_packed()] == [name]
    made.flush_opportunistic()
    made.flush_opportunistic()
    assert pool._is_packed()


@pytest.mark.parametrize("strategy", ["batched", "device"])
def test_pages_that_waited_for_a_forward_are_taken_back(strategy: str) -> None:
    made, forward = make(ENDS, PAGE, strategy=strategy), Event()
    tokens = torch.cat([made.alloc(PAGE) for _ in range(8)])
    made.set_latest_forward_done_event(forward)
    made.free_segment(tokens[PAGE : 3 * PAGE], start_pos=0)
    made.flush_opportunistic()
    waiting = made.available_size()
    assert not any(len(pool.holes) for pool in pools_of(made).values())
    forward.fired = True
    made.flush_opportunistic()
    assert made.available_size() == waiting + 2 * PAGE


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pools_with_nothing_to_pack_are_not_asked_to(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An idle engine asks thousands of times a second, and whoever records would write each time down."""
    made = make(layout, PAGE, strategy="device")
    tokens = [made.alloc(PAGE) for _ in range(8)]
    asked = []
    for pool in pools_of(made).values():
        flush = pool.flush_opportunistic
        monkeypatch.setattr(
            pool, "flush_opportunistic", lambda flush=flush: asked.append(flush()) or asked[-1]
        )
    assert made.flush_opportunistic() == 0 and asked == []
    # A float keeps what it cannot give back.
    made.free_segment(tokens[-1 if layout == THREE else 1], start_pos=0)
    assert made.flush_opportunistic() + made.flush_opportunistic() > 0 and asked
    asked.clear()
    assert made.flush_opportunistic() == 0 and asked == []
