"""Allocs that bounds alone would refuse, and that wait for nothing all the same: see `allocator.late_room`."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from allocator import MHASubPoolSpec, UnifiedKVPool, kv_store_for
from allocator.errors import NotAllocatedError, OutOfRoomError
from replayer.ledger import SyncLedger
from tests.allocator.delayed import NeverEnd
from tests.allocator.pools import two_ends, whole_state
from tests.allocator.test_device_lockstep import Side
from tests.engine.composites import Event

pytestmark = pytest.mark.cpu

PAGE = 4


class Pair:
    """Two ends with numbers that never come, beside two with strategy `batched`. ``swa`` has 18 of 31 pages."""

    def __init__(self) -> None:
        self.late = two_ends(page_size=PAGE, strategy="device", end_class=NeverEnd)
        self.plain = two_ends(page_size=PAGE)
        self.events: list[Event] = []
        self.swa("alloc", 18 * PAGE)

    def full(self, method: str, *arguments: Any, **keywords: Any) -> Any:
        return self._both(0, method, *arguments, **keywords)

    def swa(self, method: str, *arguments: Any, **keywords: Any) -> Any:
        return self._both(1, method, *arguments, **keywords)

    def _both(self, pool: int, method: str, *arguments: Any, **keywords: Any) -> Any:
        """Call both; answers that are tokens must be equal."""
        answers = [getattr(pools[pool], method)(*arguments, **keywords) for pools in (self.late, self.plain)]
        if method.startswith("alloc"):
            found, expected = (None if each is None else each.tolist() for each in answers)
            assert found == expected, method
        return answers[0]

    def forward(self, writes: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)) -> None:
        """A forward that runs from now on, and what it writes in either pool."""
        self.events.append(Event())
        for both in (self.late, self.plain):
            for pool, tokens in zip(both, writes, strict=True):
                pool.set_latest_forward_done_event(self.events[-1])
                pool.set_inflight_forward(self.events[-1], tokens)

    def arrive(self) -> None:
        """All numbers that were sent are there."""
        for pool in self.late:
            read_back = pool._read_back  # type: ignore[attr-defined]
            read_back.arrived = read_back.posted

    @property
    def waits(self) -> int:
        return sum(pool.blocking_reads for pool in self.late)  # type: ignore[attr-defined]

    def same(self) -> bool:
        for pool in self.late:
            pool._settle()  # type: ignore[attr-defined]
        return all(
            whole_state(late) == whole_state(plain) for late, plain in zip(self.late, self.plain, strict=True)
        )


def pages(*numbers: int) -> torch.Tensor:
    """Every token of these pages, ascending: a segment for each."""
    return (torch.tensor(numbers)[:, None] * PAGE + torch.arange(PAGE)).reshape(-1)


def free_swa_pages(pair: Pair, *numbers: int) -> None:
    pair.swa("free_segment", pages(*numbers), start_pos=0)


@pytest.mark.parametrize("freed", [(17, 18), (2, 3)], ids=["there as it lies", "there once it is packed"])
def test_the_device_finds_out_whether_the_neighbour_has_to_be_packed(freed: tuple[int, int]) -> None:
    pair = Pair()
    free_swa_pages(pair, *freed)
    pair.forward()
    pair.swa("flush_opportunistic")
    plain_full, plain_swa = pair.plain
    moved = plain_swa._pending.pages_on_host
    late_full = pair.late[0]
    wanted = late_full.available_size() + 2 * PAGE
    is_there = wanted <= plain_full.available_size()
    assert is_there == (not moved) == (freed == (17, 18))
    ledger = SyncLedger("cpu")
    with ledger:
        for pool in pair.late:
            ledger.host(*pool.pinned_host_tensors, pinned=True)  # type: ignore[attr-defined]
        with ledger.call("alloc", audit=True) as record:
            taken = late_full.alloc(wanted)
    assert (record.total, ledger.disagreements, pair.waits) == (0, [], 0)
    expected = plain_full.alloc(wanted)
    assert taken is not None and expected is not None and taken.tolist() == expected.tolist()
    assert not plain_swa._pending and pair.same()


@pytest.mark.parametrize("method", ["available_size", "schedulable_available_size"])
def test_sizes_take_in_what_has_arrived(method: str) -> None:
    pair = Pair()
    free_swa_pages(pair, 2, 3, 17, 18)
    pair.forward()
    pair.swa("flush_opportunistic")
    full, exact = pair.late[0], getattr(pair.plain[0], method)()
    assert getattr(full, method)() < exact
    pair.arrive()
    assert getattr(full, method)() == exact
    assert pair.waits == 0


def test_what_is_certain_to_be_there_is_not_left_to_the_device() -> None:
    pair = Pair()
    free_swa_pages(pair, 2, 3)
    pair.forward()
    pair.swa("flush_opportunistic")
    swa: Any = pair.late[1]
    posted = swa._read_back.posted
    pair.full("alloc", pair.late[0].available_size())
    assert swa._read_back.posted == posted
    assert pair.waits == 0 and pair.same()


@pytest.mark.parametrize("is_settled", [True, False], ids=["settled", "late itself"])
def test_a_pool_that_grows_up_need_not_wait_for_the_one_above_it_either(is_settled: bool) -> None:
    pair = Pair()
    for _ in range(20):
        pair.full("alloc", PAGE)
    pair.full("free_segment", pages(2, 3, 5, 6), start_pos=0)
    pair.forward()
    pair.full("flush_opportunistic")
    if not is_settled:
        free_swa_pages(pair, 4)
        pair.swa("flush_opportunistic")
    # What waits comes back, and two pages of ``full`` are one here.
    most = pair.plain[1].available_size() + len(pair.plain[0]._pending) // 2 * PAGE
    assert pair.late[1].available_size() < most
    assert pair.swa("alloc", most) is not None
    assert pair.waits == 0 and pair.same()


def test_a_request_that_may_have_to_be_refused_waits() -> None:
    pair = Pair()
    free_swa_pages(pair, 2, 3)
    pair.forward()
    pair.swa("flush_opportunistic")
    most = pair.plain[0].schedulable_available_size() + 4 * PAGE  # what is pending comes back too
    assert pair.full("alloc", most + PAGE) is None
    assert pair.waits == 1
    assert pair.same()


@pytest.mark.parametrize("more", [0, 1], ids=["there", "one page more than there is"])
def test_who_takes_pages_without_asking_for_room_waits_for_what_bounds_do_not_cover(more: int) -> None:
    pair = Pair()
    free_swa_pages(pair, 17, 18)
    pair.forward()
    pair.swa("flush_opportunistic")
    exact = pair.plain[0].available_size()
    assert pair.late[0].available_size() < exact
    answers = [pools[0].take_physical(exact + more * PAGE) for pools in (pair.late, pair.plain)]
    assert [answer is None for answer in answers] == [bool(more)] * 2
    if not more:
        assert answers[0].tolist() == answers[1].tolist()
    assert pair.waits == 1 and pair.same()


def test_pages_that_two_flushes_may_have_taken_back_are_counted_once() -> None:
    """They wait for a forward. How many they are is told before it is whether the first of the flushes was made."""
    pair = Pair()
    swa: Any = pair.late[1]
    free_swa_pages(pair, 2, 3)
    pair.forward()
    pair.swa("flush_opportunistic")
    (batch,) = next(iter(swa._pending._batches.values()))
    moved = swa._journal._entries[0].ticket
    pair.full("alloc", pair.late[0].available_size() + 2 * PAGE)
    swa._read_back.arrived = moved._event._order
    swa._poll()
    assert (batch.moved, batch.in_doubt, batch.size, batch.most) == (2, 1, None, 2)
    free_swa_pages(pair, 5, 6)
    pair.full("alloc", 3 * PAGE)
    assert batch.in_doubt == 2 and pair.waits == 0
    assert pair.same()
    assert (batch.in_doubt, batch.size) == (0, 0)
    assert swa._live_pages_lazy == 14 and not swa._pending


@pytest.mark.parametrize("more", [2, 4, 6, 8])
def test_holes_of_a_neighbour_that_may_have_been_packed_are_not_counted_on(more: int) -> None:
    """``full`` has taken what packing ``swa`` opened, past the end that the host knows of ``swa``: holes it shows there are none."""
    pair = Pair()
    free_swa_pages(pair, 2, 3)
    pair.forward()
    pair.swa("flush_opportunistic")
    free_swa_pages(pair, 5, 6)
    assert pair.full("alloc", pair.late[0].available_size() + more * PAGE) is not None
    assert len(pair.late[1].holes) == 2 and pair.waits == 0
    for late, plain in zip(pair.late, pair.plain, strict=True):
        assert late.schedulable_available_size() <= plain.schedulable_available_size()
    assert pair.waits == 0 and pair.same()


@pytest.mark.parametrize("method", ["available_size", "schedulable_available_size"])
def test_no_size_is_less_than_nothing(method: str) -> None:
    """Bounds of the two pools overlap."""
    pair = Pair()
    free_swa_pages(pair, 2, 3)
    pair.forward()
    pair.swa("flush_opportunistic")
    assert pair.full("alloc", pair.late[0].available_size() + 4 * PAGE) is not None
    assert pair.late[1]._current_gap_bytes() < 0
    assert [getattr(pool, method)() for pool in pair.late] == [0, 0]
    assert pair.waits == 0


def test_nor_across_a_float_that_is_nowhere() -> None:
    late, plain = (Side(kind, "a float between", PAGE, lazy=True, cap=8) for kind in ("never", "batched"))
    for side in (late, plain):
        other, event = side.pools["other"], Event()
        tokens = other.alloc(10 * PAGE)
        other.free_segment(tokens[PAGE : 3 * PAGE], start_pos=0)
        for name in ("full", "other"):
            side.pools[name].set_latest_forward_done_event(event)
        other.flush_opportunistic()
        other.free_segment(tokens[4 * PAGE : 6 * PAGE], start_pos=0)
    full = late.pools["full"]
    wanted = full.available_size() + 11 * PAGE
    for side in (late, plain):
        assert side.pools["full"].alloc(wanted) is not None
    assert full.blocking_reads == late.pools["other"].blocking_reads == 0
    assert late.pools["other"]._journal is not None and len(late.pools["other"].holes) == 2
    for name, pool in late.pools.items():
        if name != "other":
            assert pool.schedulable_available_size() <= plain.pools[name].schedulable_available_size(), name


class Reader(Event):
    """A forward that notes that the stream was ordered behind it."""

    is_waited_for = False

    def wait(self) -> None:
        self.is_waited_for = True


def test_a_flush_that_is_made_perhaps_is_ordered_behind_every_reader_of_what_waits() -> None:
    pair = Pair()
    free_swa_pages(pair, 2, 3)
    swa, first, second = pair.late[1], Reader(), Reader()
    swa.set_latest_forward_done_event(first)
    swa.flush_opportunistic()
    swa.set_latest_forward_done_event(second)
    assert pair.late[0].alloc(pair.late[0].available_size() + 2 * PAGE) is not None
    assert first.is_waited_for and second.is_waited_for
    assert pair.waits == 0


def with_promise(too_many: int) -> tuple[Pair, torch.Tensor]:
    """The numbers of ``swa`` are on their way; ids for as many pages as it has room for, which is more than it can be certain of, and
    ``too_many`` besides."""
    pair = Pair()
    pair.full("alloc", 20 * PAGE)
    free_swa_pages(pair, 16, 17, 18)
    pair.forward()
    pair.swa("flush_opportunistic")
    certain, exact = (pools[1].available_size() // PAGE for pools in (pair.late, pair.plain))
    assert 0 < certain < exact
    return pair, torch.arange(19, 19 + exact + too_many)


def test_what_one_alloc_was_granted_is_not_granted_to_the_next_call() -> None:
    pair = Pair()
    free_swa_pages(pair, 2, 3)
    pair.forward()
    pair.swa("flush_opportunistic")
    late = pair.late[0]
    first = int(late.alloc(late.available_size() + 4 * PAGE)[-1]) // PAGE + 1
    late.alloc_with_virtual(torch.arange(first, first + 4))
    assert pair.waits == 0
    with pytest.raises(OutOfRoomError):
        late._errors.look(wait=True)


def test_a_fault_that_has_arrived_is_told_before_a_neighbour_is_packed_perhaps() -> None:
    pair = Pair()
    free_swa_pages(pair, 2, 3)
    pair.forward()
    pair.swa("flush_opportunistic")
    late = pair.late[0]
    late.alloc(4 * PAGE)
    wanted = late.available_size() + 2 * PAGE
    late.free_segment(pages(40), start_pos=0)
    late._read_back.arrived = late._read_back.posted
    with pytest.raises(NotAllocatedError):
        late.alloc(wanted)


def test_pages_that_were_promised_are_taken_without_a_wait() -> None:
    pair, ids = with_promise(0)
    for pools in (pair.late, pair.plain):
        pools[1].alloc_with_virtual(ids)
    assert pair.waits == 0
    assert pair.same()


@pytest.mark.parametrize("fails", [False, True])
def test_a_promise_ends_with_the_call_that_it_was_made_for(fails: bool) -> None:
    pair, ids = with_promise(0)
    late: Any = pair.late[1]
    if fails:
        with pytest.raises(InterruptedError), late.promised():
            raise InterruptedError
    else:
        late.alloc_with_virtual(ids)
    assert not late._is_settled
    assert late.alloc((len(ids) + 1) * PAGE) is None
    late._errors.look(wait=True)


@pytest.mark.parametrize("too_many", [0, 1])
def test_the_padding_page_is_none_that_could_have_been_promised(too_many: int) -> None:
    """With the buffer for itself, a pool that grows down has bytes for it."""
    spec = MHASubPoolSpec(
        name="full", layer_num=1, grow_direction="down", head_num=1, head_dim=16, store_dtype=torch.float16
    )
    buffer = UnifiedKVPool(total_bytes=64 * 64, sub_pool_specs=[spec], device="cpu", page_size=PAGE)
    pool: Any = NeverEnd(
        kvcache=kv_store_for(buffer, "full"), unified_buffer=buffer, sub_pool_name="full", device="cpu", is_id_owner=False,
        virtual_num_pages=20, page_size=PAGE, lazy_compaction=True, strategy="device",
    )  # fmt: skip
    pool.alloc_with_virtual(torch.arange(1, 16))
    pool.free(pages(5, 6)[1:-1])
    assert not pool._is_settled and pool.available_size() == PAGE
    pool.alloc_with_virtual(torch.arange(16, 18 + too_many))
    with pytest.raises(OutOfRoomError) if too_many else nullcontext():
        pool._errors.look(wait=True)
    assert pool.physical_to_virtual[0] == 0 and pool.virtual_to_physical[18] == -1


def test_a_promise_that_does_not_hold_is_told_later() -> None:
    pair, ids = with_promise(1)
    late = pair.late[1]
    tables = [pool.virtual_to_physical.tolist() for pool in pair.late]
    late.alloc_with_virtual(ids)
    assert pair.waits == 0
    with pytest.raises(OutOfRoomError, match="more pages than could be handed out"):
        late._errors.look(wait=True)  # type: ignore[attr-defined]
    with pytest.raises(OutOfRoomError):
        pair.late[0].alloc(PAGE)
    assert [pool.virtual_to_physical.tolist() for pool in pair.late] == tables
    with pytest.raises(OutOfRoomError):
        pair.plain[1].alloc_with_virtual(ids)
