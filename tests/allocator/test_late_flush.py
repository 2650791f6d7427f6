"""Flushes of an END pool where numbers come late, one after another: what the one leaves open the next one must not get wrong."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch

from allocator import MultiEndedAllocator
from allocator.errors import MoveGateClosedError, NotAllocatedError
from allocator.read_back import SLOTS
from tests.allocator.delayed import NeverEnd
from tests.allocator.pools import two_ends, whole_state
from tests.allocator.test_device_lockstep import CHAINS, KINDS, Lockstep, Side
from tests.allocator.test_device_lockstep import Event as LockstepEvent
from tests.allocator.test_late_room import PAGE, Pair, pages

pytestmark = pytest.mark.cpu

#: Of a pool of 18 pages, page 18 next to the watermark, whose page 16 a forward writes: what is called before its last flush, and whether
#: that one may move the page. An urgent flush that moves anything is ordered behind the forward, which then has written.
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
@pytest.mark.parametrize("pool", [0, 1], ids=["down", "up"])
@pytest.mark.parametrize("hazard", HAZARDS)
def test_what_a_forward_writes_stays_until_an_urgent_flush_has_moved_something(
    hazard: str, pool: int, arrives: bool
) -> None:
    calls, may_move = HAZARDS[hazard]
    pair = Pair()
    call, first = (pair.swa, 1) if pool else (pair.full, 2)
    if not pool:
        for _ in range(18):
            pair.full("alloc", PAGE)
    written = pages(15 + first)
    writes = (None, written) if pool else (written, None)
    pair.forward(writes)
    for name, *numbers in calls:
        if name == "free":
            call("free_segment", pages(*(number - 1 + first for number in numbers)), start_pos=0)
        elif name == "forward":
            pair.forward(writes)
        else:
            call("flush_for_allocation" if name == "urgent" else "flush_opportunistic")
        if arrives:
            pair.arrive()
    places = pair.plain[pool].virtual_to_physical.tolist()
    call("flush_opportunistic")
    assert (pair.plain[pool].virtual_to_physical.tolist() != places) == may_move
    assert pair.waits == 0 and pair.same()


@pytest.mark.parametrize("then", ["nothing", "alloc", "another forward", "urgent"])
@pytest.mark.parametrize("pool", [0, 1], ids=["down", "up"])
def test_pages_that_wait_come_back_before_it_is_known_how_many_they_are(pool: int, then: str) -> None:
    pair = Pair()
    call, first = (pair.swa, 1) if pool else (pair.full, 2)
    if not pool:
        pair.full("alloc", 18 * PAGE)
    call("free_segment", pages(first + 2, first + 7, first + 11), start_pos=0)
    pair.forward()
    call("flush_opportunistic")
    assert pair.plain[pool]._pending
    pair.events[-1].fired = True
    if then == "another forward":
        pair.forward()
    call("free_segment", pages(first + 9), start_pos=0)
    call("flush_opportunistic")
    if then == "urgent":
        call("flush_for_allocation")
    elif then != "nothing":
        call("alloc", PAGE)
    assert pair.waits == 0 and pair.same()


@pytest.mark.parametrize("pool", [0, 1], ids=["down", "up"])
def test_pages_that_a_flush_vacates_are_handed_out_from_the_far_end_too(pool: int) -> None:
    """Nothing reads them any more, so they are holes at once, nearest the watermark first, behind a list that was sorted before."""
    pair = Pair()
    call, first = (pair.swa, 1) if pool else (pair.full, 2)
    if not pool:
        for _ in range(18):
            pair.full("alloc", PAGE)
    call("free_segment", pages(first + 2, first + 7, first + 4), start_pos=0)
    call("alloc", PAGE)
    assert pair.plain[pool].holes.is_sorted
    call("flush_opportunistic")
    call("alloc", PAGE)
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


@pytest.mark.parametrize("call", ["alloc", "alloc_extend"])
@pytest.mark.parametrize("name", ["full", "swa", "other"])
def test_ids_that_may_not_have_come_back_yet_are_waited_for(name: str, call: str) -> None:
    """Of a free of tokens one page is certain; the request takes all that were freed, and there are no other ids."""
    answers = []
    for kind in ("never", "batched"):
        pool = Side(kind, "a float between", PAGE, lazy=True, cap=8).pools[name]
        tokens = pool.alloc(6 * PAGE)
        beyond = pool.free_virtual_ids
        assert beyond is not None
        pool.free_virtual_ids = beyond[:0]
        pool.free(tokens[2 * PAGE : 6 * PAGE])
        if call == "alloc":
            taken = pool.alloc(4 * PAGE)
        else:
            none, lens = torch.zeros(1, dtype=torch.int64), torch.tensor([4 * PAGE])
            taken = pool.alloc_extend(none, none, lens, lens, none - 1, 4 * PAGE)
        answers.append((taken.tolist(), pool.virtual_to_physical.tolist()))
        assert kind == "batched" or pool.blocking_reads == 1
    assert answers[0] == answers[1]


def test_ids_are_waited_for_where_a_neighbour_would_have_to_be_packed_too() -> None:
    pair = Pair()
    tokens = pair.full("alloc", pair.late[0].available_size())
    for late_or_plain in (pair.late, pair.plain):
        late_or_plain[0].free_virtual_ids = torch.empty(0, dtype=torch.int64)
    pair.swa("free_segment", pages(2, 3, 5, 6), start_pos=0)
    pair.forward()
    pair.swa("flush_opportunistic")
    pair.full("free", tokens[2 * PAGE : 6 * PAGE].flip(0))
    assert pair.full("alloc", 4 * PAGE) is not None
    assert pair.same()


@pytest.mark.parametrize("name", ["full", "swa"])
def test_frees_of_which_no_number_comes_are_waited_for_once_in_a_while(name: str) -> None:
    """Half of the read-backs that fit are under way at most, and one wait is for all of them."""
    rounds, states = 2 * SLOTS, []
    for kind in ("never", "batched"):
        pool = Side(kind, "a float between", PAGE, lazy=True, cap=8).pools[name]
        tokens = pool.alloc(8 * PAGE)
        for _ in range(rounds):
            pool.free(tokens[: PAGE - 1])
            tokens = torch.cat([tokens[PAGE:], pool.alloc(PAGE)])
        if kind == "never":
            assert 0 < pool.blocking_reads <= 2 * rounds // (SLOTS // 2)
        states.append((whole_state(pool), tokens.tolist()))
    assert states[0] == states[1]


@pytest.mark.parametrize("wanted", [1, 2])
@pytest.mark.parametrize("way", ["down", "up"])
def test_neighbours_know_where_a_float_may_have_grown_to(way: str, wanted: int) -> None:
    """A free of which nothing has come yet leaves the span as it is, so that it is known which way the float grows."""
    frontiers = []
    for kind in ("never", "batched"):
        side = Side(kind, "a float between", PAGE, lazy=True, cap=8)
        pool = side.pools["swa"]
        tokens = pool.alloc(6 * PAGE)
        side.pools["full" if way == "down" else "other"].alloc(4 * PAGE)
        pool.free(tokens[3 * PAGE - 1 : 3 * PAGE + 1])
        assert pool.alloc((2 + wanted) * PAGE) is not None
        frontiers.append((pool._byte_low_frontier(), pool._byte_high_frontier()))
        assert kind == "batched" or not pool._is_settled
    (low, high), (exact_low, exact_high) = frontiers
    assert low <= exact_low and high >= exact_high
    assert (low == exact_low) == (way == "up") and (high == exact_high) == (way == "down")


@pytest.mark.parametrize("way", ["down", "up"])
def test_neighbours_know_where_a_float_may_have_begun_anew(way: str) -> None:
    """As far as is known for certain it may be nowhere: then its next page is in the middle, which a neighbour has moved away meanwhile."""
    frontiers = []
    for kind in ("never", "batched"):
        side = Side(kind, "a float between", PAGE, lazy=True, cap=8)
        pool, neighbour = side.pools["swa"], side.pools["full" if way == "down" else "other"]
        tokens = pool.alloc(3 * PAGE)
        neighbour.alloc(neighbour.available_size())
        pool.free(tokens.flip(0))
        assert pool.alloc(PAGE) is not None
        frontiers.append((pool._byte_low_frontier(), pool._byte_high_frontier()))
        assert kind == "batched" or not pool._is_settled
    (low, high), (exact_low, exact_high) = frontiers
    assert low <= exact_low and high >= exact_high


@pytest.mark.parametrize("below", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("wanted", [1, 3, 6])
def test_a_float_grows_where_the_others_do(wanted: int, below: int) -> None:
    """Both gaps from one side wider to the other side wider, the borders moved by holes given back just before."""
    states, frontiers = [], []
    for kind in ("never", "batched"):
        side = Side(kind, "a float between", PAGE, lazy=True, cap=8)
        pool = side.pools["swa"]
        tokens = pool.alloc(8 * PAGE)
        low, high = pool._gap_pages()
        pool.free(tokens[: below * PAGE])
        pool.free(tokens[7 * PAGE :])
        pool.flush_opportunistic()
        assert pool.alloc(wanted * PAGE) is not None
        frontiers.append((pool._byte_low_frontier(), pool._byte_high_frontier()))
        states.append((whole_state(pool), low, high))
    (low, high), (exact_low, exact_high) = frontiers
    assert low <= exact_low and high >= exact_high
    assert states[0] == states[1]


@pytest.mark.parametrize("chain", ["two ends", "large pages above"])
@pytest.mark.parametrize("name", ["full", "swa"])
def test_the_page_nearest_the_reserved_ones_moves_as_any_other(name: str, chain: str) -> None:
    """A pool that takes all of the buffer."""
    states = []
    for kind in ("never", "batched"):
        side = Side(kind, chain, PAGE, lazy=True, cap=8)
        pool = side.pools[name]
        tokens = [pool.alloc(PAGE) for _ in range(pool.available_size() // PAGE)]
        assert not pool.available_size() and int(pool.physical_to_virtual[pool.min_page_index]) > 0
        for token_ids in tokens[2:4]:
            side.stamp(name, token_ids)
            pool.free_segment(token_ids, start_pos=0)
        side.stamp(name, torch.cat(tokens[4:]))
        pool.flush_for_allocation()
        assert not side.misplaced(name, torch.cat(tokens[4:]))
        states.append(whole_state(pool))
    assert states[0] == states[1]


@pytest.mark.parametrize("lazy", [True, False], ids=["lazy", "eager"])
@pytest.mark.parametrize("page_size", [1, PAGE])
def test_named_tokens_give_their_pages_back_in_the_order_of_the_others(page_size: int, lazy: bool) -> None:
    """Some of them twice, where pages are told apart: with pages of one token and lazy compaction they are taken as they come."""
    tells_apart = page_size > 1 or not lazy
    states = []
    for strategy, kind in (("device", NeverEnd), ("batched", MultiEndedAllocator)):
        pool = two_ends(page_size=page_size, lazy=lazy, strategy=strategy, end_class=kind)[0]
        tokens = pool.alloc(12 * page_size).flip(0)
        if tells_apart:
            tokens = torch.cat([tokens, tokens[: 3 * page_size]])
        pool.free_named(tokens, tokens // page_size % 3 > 0)
        assert strategy == "batched" or pool.blocking_reads == 0  # type: ignore[attr-defined]
        states.append(whole_state(pool))
    assert states[0] == states[1]


@pytest.mark.parametrize("pool", [0, 1], ids=["down", "up"])
@pytest.mark.parametrize("page_size", [1, PAGE])
@pytest.mark.parametrize("lazy", [True, False], ids=["lazy", "eager"])
def test_nothing_is_freed_of_a_pool_that_holds_nothing(lazy: bool, page_size: int, pool: int) -> None:
    """The requests that a composite frees have all left the window, and so have the others."""
    states = []
    for strategy, kind in (("device", NeverEnd), ("batched", MultiEndedAllocator)):
        made = two_ends(page_size=page_size, lazy=lazy, strategy=strategy, end_class=kind)[pool]
        for _ in range(2):
            made.free_named(torch.arange(4, 9) * page_size, torch.zeros(5, dtype=torch.bool))
            made.flush_for_allocation()
        assert strategy == "batched" or made.blocking_reads == 0  # type: ignore[attr-defined]
        made.alloc_with_virtual(torch.tensor([5, 6, 7]))
        states.append(whole_state(made))
    assert states[0] == states[1]


def test_a_free_by_name_that_may_not_move_anything_is_refused_unless_it_frees_nothing() -> None:
    """Eager compaction, and a place that is reserved for a load from the host."""
    states = []
    for strategy, kind in (("device", NeverEnd), ("batched", MultiEndedAllocator)):
        made = two_ends(page_size=PAGE, lazy=False, strategy=strategy, end_class=kind)[1]
        tokens = made.alloc(4 * PAGE)
        assert made.alloc_physical(PAGE) is not None
        made.free_named(tokens, torch.zeros_like(tokens, dtype=torch.bool))
        with pytest.raises(MoveGateClosedError):
            made.free_named(tokens, tokens < 2 * PAGE)
        states.append(whole_state(made))
    assert states[0] == states[1]


class Calls:
    """A program of few kinds of calls, so that flushes meet what the flush before them has left open, on all kinds of allocators."""

    def __init__(self, seed: int) -> None:
        self.random = random = Random(seed)
        self.machine = Lockstep()
        self.machine.start(
            chain=random.choice(sorted(CHAINS)), page=random.choice([1, 4]), lazy=random.random() < 0.9,
            cap=random.choice([2, 4096]), look_every=random.choice([6, 1000]),
        )  # fmt: skip
        self.main = random.choice(self.machine.names)
        for name in self.machine.names:
            self.machine.grant(name, self.machine.call(name, "alloc", 6 * self.machine.size))

    def run(self, steps: int) -> None:
        weights = {
            self.alloc: 4, self.free: 6, self.flush: 7, self.urgent: 2, self.forward: 3, self.done: 3, self.clear: 0.4,
            self.machine.promise: 2,
        }  # fmt: skip
        for _ in range(steps):
            self.name = self.random.choice([self.main] * 4 + self.machine.names)
            self.random.choices(list(weights), list(weights.values()))[0]()
        self.machine.teardown()

    def alloc(self) -> None:
        pages = self.random.choice([1, 1, 2, 3, 7])
        self.machine.grant(self.name, self.machine.call(self.name, "alloc", pages * self.machine.size))

    def free(self) -> None:
        live, size = self.machine.live[self.name], self.machine.size
        pages = sorted({token // size for token in live})
        if not pages:
            return
        chosen = self.random.sample(pages, min(len(pages), self.random.randint(1, 4)))
        whole = [page * size + offset for page in chosen for offset in range(size)]
        self.machine.live[self.name] = [token for token in live if token // size not in chosen]
        if self.random.random() < 0.4:
            self.machine.call(self.name, "free_segment", torch.tensor(whole), start_pos=0)
        else:
            self.random.shuffle(whole)
            self.machine.call(self.name, "free", torch.tensor(whole))

    def flush(self) -> None:
        self.machine.call(self.name, "flush_opportunistic")

    def urgent(self) -> None:
        self.machine.call(self.name, "flush_for_allocation")

    def forward(self) -> None:
        if not self.machine.lazy:
            return
        events = {kind: LockstepEvent() for kind in KINDS}
        self.machine.events.append(events)
        for name in self.machine.ends:
            live = self.machine.live[name]
            writes = torch.tensor(self.random.sample(live, min(len(live), 2))) if live else None
            for kind, side in self.machine.sides.items():
                side.pools[name].set_latest_forward_done_event(events[kind])
                side.pools[name].set_inflight_forward(events[kind], writes)

    def clear(self) -> None:
        for name in self.machine.names:
            self.machine.live[name] = []
            self.machine.call(name, "clear")

    def done(self) -> None:
        if self.machine.events:
            for event in self.machine.events.pop(0).values():
                event.fired = True


@pytest.mark.parametrize("seed", range(40))
def test_flushes_one_after_another_leave_what_the_others_leave(seed: int) -> None:
    Calls(seed).run(60)
