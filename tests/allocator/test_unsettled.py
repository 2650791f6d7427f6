"""What the host knows while numbers are on their way: bounds that hold whatever has arrived, and exact once all has."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from random import Random
from typing import Any, cast

import pytest
import torch

from allocator.float_registers import FloatRegisters, Growth, SpanBounds
from allocator.unsettled import (
    Entry,
    Flushed,
    Journal,
    Numbers,
    Packed,
    PackedPerhaps,
    PendingBatch,
    Released,
    Returned,
    Took,
)

pytestmark = pytest.mark.cpu

PAGES = 40


class Posted:
    """A ticket whose numbers arrive when the test says so."""

    def __init__(self, *values: int) -> None:
        self._values, self.arrived = list(values), False

    def ready(self) -> bool:
        return self.arrived

    def wait(self) -> None:
        self.arrived = True

    def values(self) -> list[int]:
        assert self.arrived
        return self._values


class Pool:
    """The exact numbers of a pool of `PAGES` pages, and a `Journal` that is told what a flush's host is told."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.live = random.randint(5, 20)
        self.band = self.live + random.randint(0, 8)
        self.pending = self.late_ids = 0
        self.waiting: list[tuple[PendingBatch, int]] = []
        self.posted: list[Posted] = []
        self.journal = Journal(Numbers(self.band, self.live, 0))

    @property
    def holes(self) -> int:
        return self.band - self.live - self.pending

    def post(self, *values: int) -> Any:
        self.posted.append(Posted(*values))
        return self.posted[-1]

    def step(self) -> None:
        calls = (
            self.take,
            self.release,
            self.release_uncounted,
            self.flush,
            self.give_back,
            self.pack,
            self.pack_perhaps,
        )
        self.random.choices(calls, weights=(4, 3, 3, 5, 2, 1, 2))[0]()  # fmt: skip

    def take(self) -> None:
        bounds = self.journal.bounds
        pages = self.random.randint(0, min(6, PAGES - bounds.live - bounds.waiting))
        self.live += pages
        self.band = max(self.band, self.live + self.pending)
        self.journal.add(Took(pages))

    def release(self) -> None:
        pages = self.random.randint(0, min(4, self.live))
        self.live -= pages
        self.journal.add(Released(pages))

    def release_uncounted(self) -> None:
        least = self.random.randint(0, min(2, self.live))
        pages = self.random.randint(least, min(6, self.live))
        self.live -= pages
        self.late_ids += pages - least
        self.journal.add(Released(least, self.post(pages)))

    def flush(self) -> None:
        touching = self.random.randint(0, self.holes)
        moves = self.random.randint(0, min(self.holes - touching, self.live))
        self.band -= touching
        batch = None
        if self.random.random() < 0.7:
            bound = moves + self.random.randint(0, 3)
            batch = PendingBatch(torch.arange(bound), torch.tensor(moves), bound, None)
            self.pending += moves
            self.waiting.append((batch, moves))
        self.journal.add(Flushed(batch, self.post(touching, moves)))

    def give_back(self) -> None:
        if self.waiting:
            batch, pages = self.waiting.pop(0)
            self.pending -= pages
            self.journal.add(Returned(batch))

    def pack(self) -> None:
        while self.waiting:
            self.give_back()
        self.band = self.live
        self.journal.add(Packed())

    def pack_perhaps(self) -> None:
        is_made = self.random.random() < 0.5
        batches = [batch for batch, _ in self.waiting]
        self.journal.add(PackedPerhaps(self.post(int(is_made)), batches, torch.tensor(is_made)))
        assert all(batch.size is None for batch in batches)
        if is_made:
            self.band, self.pending = self.live, 0
            self.waiting = [(batch, 0) for batch in batches]

    def arrive(self) -> None:
        """Some numbers, in the order in which they were posted."""
        late = [ticket for ticket in self.posted if not ticket.arrived]
        for ticket in late[: self.random.randint(0, len(late))]:
            ticket.arrived = True

    def check(self) -> None:
        bounds = self.journal.bounds
        assert bounds.band >= self.band and bounds.live >= self.live
        assert bounds.live + bounds.waiting >= self.live + self.pending
        assert all(int(batch.count) == pages for batch, pages in self.waiting)
        assert all(batch.most >= pages for batch, pages in self.waiting)
        assert all(batch.size in (None, pages) for batch, pages in self.waiting)
        if self.journal.live_is_known():
            assert bounds.live == self.live


@pytest.mark.parametrize("seed", range(60))
def test_bounds_hold_whatever_has_arrived_and_are_exact_in_the_end(seed: int) -> None:
    random = Random(seed)
    pool = Pool(random)
    for _ in range(40):
        pool.step()
        pool.check()
        if random.random() < 0.3:
            before = pool.journal.bounds
            pool.arrive()
            is_done = pool.journal.work_off()
            after = pool.journal.bounds
            assert after.band <= before.band and after.live <= before.live
            assert is_done == (not pool.journal._entries)
            assert pool.journal.under_way == sum(not ticket.arrived for ticket in pool.posted)
            pool.check()
    pool.journal.wait()
    assert all(ticket.arrived for ticket in pool.posted) and pool.journal.work_off()
    exact = Numbers(pool.band, pool.live, pool.pending, pool.late_ids)
    assert pool.journal.known == exact == pool.journal.bounds
    assert exact.holes == pool.holes
    assert all(batch.size == pages for batch, pages in pool.waiting)


def test_what_nothing_is_on_its_way_of_is_taken_in_at_once() -> None:
    journal = Journal(Numbers(10, 8, 0))
    entries: list[Entry] = [Released(3), Took(1), Packed()]
    for entry in entries:
        journal.add(entry)
    assert journal.youngest() is None and journal.under_way == 0 and journal.live_is_known()
    assert journal.work_off() and journal.known == Numbers(6, 6, 0)


def test_what_came_after_a_number_that_has_arrived_is_not_forgotten() -> None:
    """Two flushes, pages handed out in between and after: the first one's numbers are there, the second one's are not."""
    first, second = Posted(2, 1), Posted(1, 0)
    batch = PendingBatch(torch.arange(3), torch.tensor(1), 3, None)
    journal = Journal(Numbers(20, 12, 0))
    for entry in (Flushed(batch, cast(Any, first)), Took(4), Flushed(None, cast(Any, second)), Took(3)):
        journal.add(entry)
    assert journal.bounds == Numbers(22, 19, 3)
    first.arrived = True
    assert not journal.work_off()
    assert journal.known == Numbers(18, 16, 1) and journal.bounds == Numbers(20, 19, 1)
    assert (batch.moved, journal.under_way, journal.youngest()) == (1, 1, second)


# -- floats


def spans(bounds: SpanBounds, gap_low: int, gap_high: int) -> Iterator[tuple[int, int, int, int]]:
    """What a float may be within bounds: its live pages, its holes, and the gaps below and above it."""
    size = bounds.high - bounds.low
    for live in range(bounds.least_live, bounds.most_live + 1):
        if not live:
            whole = gap_low + size + gap_high
            yield 0, 0, whole, whole
            continue
        most = 0 if bounds.is_known else size - live
        for below, above in itertools.product(range(most + 1), repeat=2):
            if below + above <= most and gap_low + below >= 0 and gap_high + above >= 0:
                yield live, size - below - above - live, gap_low + below, gap_high + above


@pytest.mark.parametrize("is_known", [True, False], ids=["its span", "a bound"])
def test_a_float_promises_the_least_that_it_may_have(is_known: bool) -> None:
    for size, gap_low, gap_high in itertools.product(range(1, 7), range(-2, 6), range(-2, 6)):
        for least, most in itertools.combinations_with_replacement(range(size + 1), 2):
            bounds = SpanBounds(10, 10 + size, least, most, is_known)
            has = [holes + max(low, high) for _, holes, low, high in spans(bounds, gap_low, gap_high)]
            certain = bounds.certain_pages(gap_low, gap_high)
            if not has:
                continue  # bands would overlap, wherever the span is
            assert certain <= max(0, min(has)), (bounds, gap_low, gap_high)
            if min(gap_low, gap_high) >= 0 and (least or (most and not is_known)):
                assert certain == min(has), (bounds, gap_low, gap_high)


@pytest.mark.parametrize("on_device", [True, False], ids=["neighbours late", "neighbours known"])
@pytest.mark.parametrize(
    ("low", "high", "holes", "region", "most"),
    [
        (10, 16, 2, (7, 18), 5),
        (10, 16, 2, (9, 20), 6),
        (10, 16, 0, (10, 16), 0),
        (10, 16, 3, (12, 14), 3),  # neighbours that are not where they can be, in a frozen buffer
        (30, 30, 0, (7, 18), 11),  # nowhere: all that is between the neighbours
        (30, 30, 0, (18, 7), 0),
    ],
)
def test_what_a_float_can_hand_out_is_told_on_the_device(
    low: int, high: int, holes: int, region: tuple[int, int], most: int, on_device: bool
) -> None:
    def register(value: int) -> torch.Tensor:
        return torch.tensor(value)

    registers = FloatRegisters(
        holes=torch.arange(low + 1, low + 1 + holes), count=register(holes), low=register(low), high=register(high),
        takes_high=register(0) > 0, is_dirty=register(0) > 0, late_ids=register(0), num_pages=30,
    )  # fmt: skip
    between = (register(region[0]), register(region[1])) if on_device else region
    lacking = [bool(registers.lacks(want, between)) for want in range(most + 3)]
    assert lacking == [False] * (most + 1) + [True] * 2


@pytest.mark.parametrize(
    ("bounds", "holes"),
    [
        (SpanBounds(10, 20, 4, 7), 3),
        (SpanBounds(10, 20, 4, 7, is_known=False), 0),
        (SpanBounds(10, 20, 0, 7), 0),  # it may be nowhere
    ],
)
def test_holes_that_are_there_for_certain(bounds: SpanBounds, holes: int) -> None:
    assert bounds.least_holes == holes


def test_what_a_request_does_to_the_bounds_of_a_float() -> None:
    bounds = SpanBounds(10, 20, 4, 7)
    bounds.take(2, Growth(0, 0, (3, 30), None))
    assert bounds == SpanBounds(10, 20, 6, 9)
    bounds.release(1, 4)
    assert bounds == SpanBounds(10, 20, 2, 8)
    bounds.take(3, Growth(2, 0, (9, 30), None))
    assert bounds == SpanBounds(9, 20, 5, 11, is_known=False)
    bounds.take(1, Growth(1, 4, (3, 22), None))
    assert bounds == SpanBounds(8, 22, 6, 12, is_known=False)
    bounds.release(1, 9)
    assert bounds == SpanBounds(8, 22, 0, 11, is_known=False)
    bounds.take(2, Growth(0, 0, (3, 30), (5, 7)))
    assert bounds == SpanBounds(5, 22, 2, 13, is_known=False)
