"""A float of the strategy `device` whose numbers come late: frees and flushes queue up behind them, and none waits."""

from __future__ import annotations

import pytest
import torch

from allocator.errors import NotAllocatedError, OutOfRoomError
from allocator.float_registers import SpanBounds
from replayer.ledger import SyncLedger
from tests.allocator.test_device_lockstep import Side

pytestmark = pytest.mark.cpu

PAGE = 4


def chain(kind: str) -> Side:
    """A float of 10 pages between two ends, numbers all there."""
    side = Side(kind, "a float between", PAGE, lazy=True, cap=8)
    for name, pages in (("full", 2), ("swa", 10), ("other", 2)):
        assert side.pools[name].alloc(pages * PAGE) is not None
    return side


def state(side: Side) -> dict[str, object]:
    made = side.pools["swa"]
    return {
        "span": (made.low_wm_page, made.high_wm_page),
        "holes": made._free_phys_pages.tolist(),
        "ids": made.free_virtual_ids.tolist(),
        "v2p": made.virtual_to_physical.tolist(),
        "p2v": made.physical_to_virtual.tolist(),
        "sizes": [pool.available_size() for pool in side.pools.values()],
    }


def pages_of(side: Side, *pages: int) -> torch.Tensor:
    """Two tokens of each virtual page, in no order."""
    tokens = torch.tensor(pages)[:, None] * PAGE + torch.tensor([1, 0])
    return tokens.reshape(-1)


def test_frees_and_flushes_wait_for_nothing() -> None:
    late, other = chain("never"), chain("batched")
    first = int(other.pools["swa"].min_page_index)
    freed = [pages_of(late, *(first + page for page in each)) for each in ((1, 0, 5), (9, 8), (3, 4), (2,))]
    made = late.pools["swa"]
    moved = []
    with SyncLedger("cpu") as ledger:
        ledger.host(*made.pinned_host_tensors, pinned=True)
        for number, tokens in enumerate(freed):
            with ledger.call("free", audit=True) as found:
                made.free(tokens)
            assert found.total == 0
            with ledger.call("flush", audit=True) as found:
                moved.append(made.flush_opportunistic() if number % 2 else made.flush_for_allocation())
            assert found.total == 0
    assert ledger.disagreements == []
    assert made.blocking_reads == 0
    answers = []
    for number, tokens in enumerate(freed):
        other.pools["swa"].free(tokens)
        flushed = other.pools["swa"]
        answers.append(flushed.flush_opportunistic() if number % 2 else flushed.flush_for_allocation())
    assert [int(each) for each in moved] == answers
    assert sum(answers) > 0, "a float that gives nothing back proves nothing"
    assert state(late) == state(other)
    assert made.blocking_reads > 0


def test_what_needs_the_span_as_it_is_waits() -> None:
    late, other = chain("never"), chain("batched")
    first = int(other.pools["swa"].min_page_index)
    for side in (late, other):
        made = side.pools["swa"]
        made.free(pages_of(side, first, first + 1, first + 4))
        made.flush_opportunistic()
        made.free_segment(torch.arange(PAGE) + (first + 9) * PAGE, start_pos=0)
        made.flush_opportunistic()
    taken = [side.pools["swa"].alloc(3 * PAGE).tolist() for side in (late, other)]
    assert taken[0] == taken[1]
    assert state(late) == state(other)


def test_neighbours_see_the_span_as_wide_as_it_was() -> None:
    late, other = chain("never"), chain("batched")
    first = int(other.pools["swa"].min_page_index)
    before = late.pools["full"].available_size()
    for side in (late, other):
        side.pools["swa"].free(pages_of(side, *range(first, first + 3), *range(first + 7, first + 10)))
        side.pools["swa"].flush_opportunistic()
    assert late.pools["full"].available_size() == before  # a lower bound of what is there
    wanted = other.pools["full"].available_size()
    assert wanted > before
    # Asked for all of it, the pool waits for the float's numbers in place of refusing.
    assert late.pools["full"].alloc(wanted) is not None
    assert other.pools["full"].alloc(wanted) is not None
    assert state(late) == state(other)


def test_a_pool_that_is_cleared_forgets_what_was_under_way() -> None:
    late = chain("never")
    made = late.pools["swa"]
    first = int(made.min_page_index)
    made.free(pages_of(late, first, first + 1))
    answer = made.flush_opportunistic()
    made.clear()
    assert int(answer) == 2, "what it gave back, it gave back"
    fresh = Side("never", "a float between", PAGE, lazy=True, cap=8).pools["swa"]
    assert made.free_virtual_ids.tolist() == fresh.free_virtual_ids.tolist()
    assert made.alloc(PAGE).tolist() == fresh.alloc(PAGE).tolist()


@pytest.mark.parametrize("turns", [1, 2])
def test_whose_turn_it_is_outlives_a_clear(turns: int) -> None:
    """Holes are taken from the two ends in turn, and a clear does not begin anew, as in SGLang 0.5.23."""
    taken = []
    for side in (chain("never"), chain("batched")):
        made = side.pools["swa"]
        first = int(made.min_page_index)
        made.free(pages_of(side, *range(first + 1, first + 7)))
        for _ in range(turns):
            assert made.alloc(PAGE) is not None
        for pool in side.pools.values():
            pool.clear()
        assert made.alloc(10 * PAGE) is not None
        made.free(pages_of(side, *range(first + 1, first + 7)))
        ids = made.alloc(2 * PAGE)
        taken.append(made.translate_kv_loc(ids).tolist())
    assert taken[0] == taken[1]


def test_what_fits_for_certain_waits_for_nothing() -> None:
    """Allocs behind frees and flushes whose numbers have not come: as many as fit whatever these turn out to be."""
    late, other = chain("never"), chain("batched")
    made = late.pools["swa"]
    first = int(made.min_page_index)
    freed = [pages_of(late, first + 5, first + 4, first + 1), pages_of(late, first + 9)]
    answers: dict[str, list[object]] = {"late": [], "other": []}
    with SyncLedger("cpu") as ledger:
        ledger.host(*made.pinned_host_tensors, pinned=True)
        for name, side in (("late", late), ("other", other)):
            pool = side.pools["swa"]
            for tokens in freed:
                for method, arguments in (
                    ("free", (tokens,)),
                    ("alloc", (PAGE,)),
                    ("flush_opportunistic", ()),
                    ("alloc", (PAGE,)),
                ):
                    with ledger.call(method, audit=True) as found:
                        answer = getattr(pool, method)(*arguments)
                    if name == "late":
                        assert found.total == 0, method
                    answers[name].append(answer)
    assert made.blocking_reads == 0 and not made._is_settled and not made._knows_live()
    assert [
        each if each is None else torch.as_tensor(each).tolist() for each in map(plain, answers["late"])
    ] == [each if each is None else torch.as_tensor(each).tolist() for each in map(plain, answers["other"])]
    assert state(late) == state(other)


def plain(answer: object) -> object:
    return answer if answer is None or isinstance(answer, torch.Tensor) else int(answer)  # type: ignore[call-overload]


def test_a_request_beyond_what_is_certain_waits_once() -> None:
    late, other = chain("never"), chain("batched")
    first = int(late.pools["swa"].min_page_index)
    for side in (late, other):
        side.pools["swa"].free(pages_of(side, first, first + 3, first + 9))
        side.pools["swa"].flush_opportunistic()
    made = late.pools["swa"]
    certain = made.available_size()
    wanted = other.pools["swa"].available_size()
    assert 0 < certain < wanted and made.blocking_reads == 0
    assert made.alloc(wanted).tolist() == other.pools["swa"].alloc(wanted).tolist()
    assert made.blocking_reads == 1
    assert state(late) == state(other)


def test_an_end_beside_a_float_that_may_be_empty_takes_only_what_is_certain() -> None:
    """All its pages are freed by tokens, so that only the device knows that the float is gone."""
    late, other = chain("never"), chain("batched")
    first = int(late.pools["swa"].min_page_index)
    sizes = {}
    for name, side in (("late", late), ("other", other)):
        side.pools["swa"].free(pages_of(side, *range(first, first + 10)))
        sizes[name] = side.pools["full"].available_size()
    assert 0 < sizes["late"] < sizes["other"]
    for side in (late, other):
        assert side.pools["full"].alloc(sizes["late"]) is not None
    assert late.pools["swa"].blocking_reads == late.pools["full"].blocking_reads == 0
    assert late.pools["swa"].alloc(PAGE).tolist() == other.pools["swa"].alloc(PAGE).tolist()
    assert late.pools["swa"].blocking_reads == 0
    assert state(late) == state(other)


@pytest.mark.parametrize("side", ["low", "high"])
@pytest.mark.parametrize(("kind", "reads"), [("at once", 0), ("never", 1)])
def test_room_is_made_with_one_read_of_numbers(kind: str, reads: int, side: str) -> None:
    """Holes in the middle and at the far border, numbers all there: what is left to be read is where the pages go."""
    made, other = chain(kind), chain("batched")
    first = int(other.pools["swa"].min_page_index)
    opened = {}
    ledger = SyncLedger("cpu")
    ledger.host(*made.pools["swa"].pinned_host_tensors, pinned=True)
    for name, each in (("made", made), ("other", other)):
        pool = each.pools["swa"]
        pool.free_segment(torch.arange(2 * PAGE) + (first + 4) * PAGE, start_pos=0)
        border = first if side == "high" else first + 9
        pool.free_segment(torch.arange(PAGE) + border * PAGE, start_pos=0)
        open_now = pool._gap_bytes(side)
        wanted = open_now + 3 * pool.entry_bytes_per_page
        with ledger, ledger.call(name, audit=True) as found:
            opened[name] = pool.make_room(side=side, min_bytes=wanted)
        assert opened[name] >= wanted
        if name == "made":
            assert (found.total, pool.blocking_reads) == (reads, reads)
    assert opened["made"] == opened["other"] and ledger.disagreements == []
    assert state(made) == state(other)


@pytest.mark.parametrize("side", ["low", "high"])
@pytest.mark.parametrize("kind", ["at once", "never"])
@pytest.mark.parametrize("method", ["make_room", "compact_holes"])
def test_a_shift_of_all_pages_reads_once_and_sends_nothing(method: str, kind: str, side: str) -> None:
    """The one read is of where the pages are."""
    made, other = chain(kind), chain("batched")
    first = int(other.pools["swa"].min_page_index)
    answers = {}
    ledger = SyncLedger("cpu")
    ledger.host(*made.pools["swa"].pinned_host_tensors, pinned=True)
    for name, each in (("made", made), ("other", other)):
        pool = each.pools["swa"]
        for page in (1, 2, 4, 5, 7, 8):
            pool.free_segment(torch.arange(PAGE) + (first + page) * PAGE, start_pos=0)
        before = pool.low_wm_page, pool.high_wm_page
        with ledger, ledger.call(name, audit=True) as found:
            if method == "make_room":
                wanted = pool._gap_bytes(side) + 4 * pool.entry_bytes_per_page  # as many as are live
                answers[name] = pool.make_room(side=side, min_bytes=wanted)
                assert answers[name] >= wanted
            else:
                answers[name] = pool.compact_holes(retreat_side=side)
        assert (pool.low_wm_page, pool.high_wm_page) != before and not len(pool.holes)
        if name == "made":
            assert (found.total, found.host_to_device) == (1, 0)
            assert pool.blocking_reads == (kind == "never")
    assert answers["made"] == answers["other"] and ledger.disagreements == []
    assert state(made) == state(other)


def test_room_that_is_not_there_is_not_made() -> None:
    made, other = chain("at once"), chain("batched")
    for each in (made, other):
        pool = each.pools["swa"]
        for page in (8, 6):
            pool.free_segment(torch.arange(PAGE) + (int(pool.min_page_index) + page) * PAGE, start_pos=0)
        before = state(each)
        low, high = pool._gap_pages()
        assert low == 0 and high and before["holes"] == [8 + pool.low_wm_page, 6 + pool.low_wm_page]
        assert pool.make_room(
            side="high", min_bytes=(high + 2) * pool.entry_bytes_per_page
        ) == pool._gap_bytes("high")
        assert state(each) == before


@pytest.mark.parametrize("too_many", [0, 1])
def test_pages_that_were_promised_are_taken_without_a_wait(too_many: int) -> None:
    late, other = chain("never"), chain("batched")
    first = int(late.pools["swa"].min_page_index)
    for side in (late, other):
        side.pools["swa"].free(pages_of(side, first, first + 3, first + 9))
        side.pools["swa"].flush_opportunistic()
    made, batched = late.pools["swa"], other.pools["swa"]
    certain, exact = (pool.available_size() // PAGE for pool in (made, batched))
    assert certain < exact
    ids = torch.arange(first + 10, first + 10 + exact + too_many)
    made.alloc_with_virtual(ids)
    assert made.blocking_reads == 0
    if not too_many:
        batched.alloc_with_virtual(ids)
        assert state(late) == state(other)
        return
    for pool in (made, batched):
        with pytest.raises(OutOfRoomError):
            pool.alloc_with_virtual(ids)
            pool._errors.look(wait=True)


def test_bounds_go_on_from_what_has_arrived() -> None:
    """Two frees of tokens, of which the numbers of the first are there."""
    side = chain("never")
    made = side.pools["swa"]
    low, first = made.low_wm_page, int(made.min_page_index)
    made.free(pages_of(side, *range(first + 2, first + 5)))
    arrived = made._read_back.posted
    made.free(pages_of(side, first + 6, first + 7))
    assert made._bounds == SpanBounds(low, low + 10, 0, 8)
    made._read_back.arrived = arrived
    made._poll()
    assert made._bounds == SpanBounds(low, low + 10, 3, 6)
    assert len(made.holes) == 4 and made.blocking_reads == 0


@pytest.mark.parametrize("border", ["low", "high"])
@pytest.mark.parametrize("pages", [0, 1, 4])  # none: all holes are closed; 4: as many as are taken to be live
def test_room_in_a_frozen_buffer_ends_in_the_error_of_the_wrong_call(border: str, pages: int) -> None:
    """What such a float takes for its holes may be anything, and must not be where it reads or writes."""
    made = chain("never").pools["swa"]
    first = int(made.min_page_index)
    made.free_segment(torch.arange(5 * PAGE) + (first + 3) * PAGE, start_pos=0)
    made.free_segment(torch.arange(PAGE) + (made.num_virtual_ids - 1) * PAGE, start_pos=0)  # not live
    before = made.virtual_to_physical.tolist()
    with pytest.raises(NotAllocatedError) as raised:
        if pages:
            made.make_room(side=border, min_bytes=made._gap_bytes(border) + pages * made.entry_bytes_per_page)
        else:
            made.compact_holes(retreat_side=border)
    assert raised.value.ids == [made.num_virtual_ids - 1]
    assert made.virtual_to_physical.tolist() == before


@pytest.mark.parametrize("emptied", [False, True], ids=["somewhere", "perhaps nowhere"])
@pytest.mark.parametrize("late", ["full", "other"])
def test_where_a_float_grows_is_not_asked_of_the_device_while_a_neighbour_is_late(
    late: str, emptied: bool
) -> None:
    placed = []
    for kind in ("never", "batched"):
        side = chain(kind)
        made, neighbour = side.pools["swa"], side.pools[late]
        first = int(neighbour.min_page_index)
        neighbour.free(pages_of(side, first, first + 1))
        own = int(made.min_page_index)
        made.free(pages_of(side, *range(own, own + (10 if emptied else 3))))
        with SyncLedger("cpu") as ledger:
            for pool in side.pools.values() if kind == "never" else ():
                ledger.host(*pool.pinned_host_tensors, pinned=True)
            with ledger.call("alloc", audit=True) as record:
                tokens = made.alloc(4 * PAGE)
        assert kind == "batched" or (record.total, ledger.disagreements) == (0, [])
        assert kind == "batched" or not (made._is_settled or neighbour._is_settled)
        placed.append(made.translate_kv_loc(tokens).tolist())
    assert placed[0] == placed[1]
