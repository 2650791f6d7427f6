"""Numbers on their way from the device: when they are there, what waiting costs, and what stands for them meanwhile."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from allocator.read_back import ROW, SLOTS, LateCount, ReadBack
from replayer.ledger import SyncLedger
from tests.allocator.delayed import NeverEnd, NeverReadBack, SlowReadBack
from tests.allocator.pools import two_ends, whole_state

pytestmark = pytest.mark.cpu


def on_device(number: int) -> torch.Tensor:
    """A tensor that a ledger takes for one of the device: code for a GPU names it."""
    return torch.full((), number, device="cpu")


def test_on_a_cpu_numbers_are_there_at_once_and_cost_no_synchronisation() -> None:
    read_back = ReadBack("cpu")
    with SyncLedger("cpu") as ledger:
        ledger.host(*read_back.pinned_host_tensors, pinned=True)
        with ledger.call("post", audit=True) as record:
            ticket = read_back.post(on_device(7), on_device(9))
            assert ticket.ready() and ticket.values()[:2] == [7, 9]
    assert record.total == 0 and ledger.disagreements == []
    assert read_back.blocking_reads == 0


@pytest.mark.parametrize("length", [1, 2, ROW, ROW + 1, 1000])
def test_one_number_and_two_neighbours_come_without_a_synchronisation(length: int) -> None:
    read_back = ReadBack("cpu")
    with SyncLedger("cpu") as ledger:
        ledger.host(*read_back.pinned_host_tensors, pinned=True)
        with ledger.call("read", audit=True) as record:
            numbers = 10 * torch.arange(length, device="cpu")
            assert read_back.read_one(on_device(7)) == 7
            for first in {0, length // 2, length - 1}:
                second = min(first + 1, length - 1)
                assert read_back.read_two(numbers, first, second) == (10 * first, 10 * second)
    assert record.total == 0 and ledger.disagreements == []


def test_late_numbers_are_read_by_waiting() -> None:
    read_back = NeverReadBack("cpu")
    assert read_back.read_one(on_device(7)) == 7
    assert read_back.read_two(torch.arange(100), 40, 41) == (40, 41)
    assert read_back.blocking_reads == 2


def test_memory_that_is_not_page_locked_would_be_counted() -> None:
    read_back = ReadBack("cpu")
    with SyncLedger("cpu") as ledger:
        ledger.host(*read_back.pinned_host_tensors)
        with ledger.call("post") as record:
            read_back.post(on_device(7))
    assert record.device_to_host == 1


def test_late_numbers_are_waited_for_once_and_counted() -> None:
    read_back = NeverReadBack("cpu")
    with SyncLedger("cpu") as ledger:
        ledger.host(*read_back.pinned_host_tensors, pinned=True)
        with ledger.call("post") as posting:
            ticket = read_back.post(on_device(7))
            assert not ticket.ready()
        with ledger.call("wait") as waiting:
            ticket.wait()
            ticket.wait()
    assert ticket.values()[0] == 7
    assert (posting.total, waiting.total, read_back.blocking_reads) == (0, 1, 1)


def test_numbers_come_by_themselves_too() -> None:
    ticket = SlowReadBack("cpu").post(on_device(7))
    asked = [ticket.ready() for _ in range(5)]
    assert asked == [False, False, False, True, True]


def test_a_ticket_keeps_its_numbers_when_its_slot_is_used_again() -> None:
    read_back = NeverReadBack("cpu")
    kept = read_back.post(on_device(7))
    for number in range(SLOTS):
        read_back.post(on_device(100 + number))
    assert kept.ready() and kept.values()[0] == 7


def test_a_late_count_is_a_number_to_whoever_asks() -> None:
    asked = []

    def read() -> int:
        asked.append(None)
        return 5

    count = LateCount(read)
    both = count + LateCount(read) + 1
    assert not asked, "adding up flushes must not wait for them"
    assert int(both) == 11 and 1 + count == 6
    assert count == 5 and count != 4 and count > 4 and count < 6 and bool(count)
    assert [10, 20, 30, 40, 50, 60][count] == 60 and repr(count) == "5" and hash(count) == hash(5)


def test_the_answer_of_a_late_flush_waits_when_it_is_looked_at() -> None:
    full, _ = two_ends(strategy="device", end_class=NeverEnd)
    full.alloc(64)
    full.free(torch.arange(60, 68))
    waited = full.blocking_reads  # type: ignore[attr-defined]
    moved = full.flush_for_allocation()
    assert full.blocking_reads == waited  # type: ignore[attr-defined]
    assert moved == 2
    assert full.blocking_reads == waited + 1  # type: ignore[attr-defined]


def test_hundreds_of_flushes_that_nobody_asks_about_keep_few_numbers_under_way() -> None:
    """An idle engine flushes on and on while a forward runs."""

    class Running:
        def query(self) -> bool:
            return False

        def wait(self) -> None: ...

    late, _ = two_ends(strategy="device", end_class=NeverEnd)
    plain, _ = two_ends()
    for full in (late, plain):
        full.alloc(240)
        full.free(torch.arange(80, 120))
        event = Running()
        full.set_latest_forward_done_event(event)
        full.set_inflight_forward(event, torch.arange(40, 44))
        for _ in range(500):
            full.flush_opportunistic()
    assert len(late._pending._batches) <= 1  # type: ignore[attr-defined]
    assert late.blocking_reads <= 500 // 16  # type: ignore[attr-defined]
    assert late._read_back.posted <= 4  # type: ignore[attr-defined]
    assert whole_state(late) == whole_state(plain)


@pytest.mark.parametrize("lazy", [True, False], ids=["lazy", "eager"])
def test_a_free_of_tokens_finds_each_page_once_without_asking_how_many(lazy: bool) -> None:
    full, _ = two_ends(strategy="device", lazy=lazy)
    plain, _ = two_ends(lazy=lazy)
    tokens = torch.tensor([39, 8, 30, 9, 31, 8, 36, 20])
    for made in (full, plain):
        made.alloc(64)
    with SyncLedger("cpu") as ledger:
        ledger.host(*full.pinned_host_tensors, pinned=True)  # type: ignore[attr-defined]
        with ledger.call("free", audit=True) as record:
            full.free(tokens)
    plain.free(tokens)
    assert record.total == 0 and ledger.disagreements == []
    assert whole_state(full) == whole_state(plain)


def test_late_counts_are_numbers() -> None:
    reads = []

    def count(value: int) -> LateCount:
        return LateCount(lambda: reads.append(value) or value)

    total: Any = 0
    for value in range(1000):
        total = total + count(value)
    assert not reads, "a sum waits for nothing"
    assert int(total) == 499_500 == total
    assert len(reads) == 1000
    five = count(5)
    assert five < 5.5 and not five > 5.5 and five == 5.0 and five >= 5 and five <= count(5) and five != 6
    assert (five - 2, 7 - five, five * 3, 3 * five, f"{five:03d}", float(five)) == (3, 2, 15, 15, "005", 5.0)
    assert five != "5" and {five: 1}[count(5)] == 1
    assert len([value for value in reads if value == 5]) == 4  # each is asked once


def test_a_copy_that_nobody_wants_any_more_is_over_before_its_place_is_used_again() -> None:
    waited: list[int] = []

    class Event:
        def __init__(self, number: int) -> None:
            self.number = number

        def query(self) -> bool:
            return False

        def wait(self) -> None:
            waited.append(self.number)

    class OnStreams(ReadBack):
        def __init__(self) -> None:
            super().__init__("cpu")
            self.immediate, self.posted = False, 0

        def _mark(self, numbers: tuple[torch.Tensor, ...]) -> Any:
            self.posted += 1
            return Event(self.posted)

    read_back = OnStreams()
    for number in range(SLOTS + 2):
        read_back.post(torch.tensor(number))
    assert waited == [1, 2]
    assert read_back.blocking_reads == 0
