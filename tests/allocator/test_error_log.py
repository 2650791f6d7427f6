"""Where nobody waits for an answer, a call that cannot be right is written down on the device, freezes the pool, and raises soon after."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from allocator import MultiEndedAllocator
from allocator.errors import (
    AllocatorError,
    BindError,
    ConfigurationError,
    CorruptMappingError,
    DuplicateFreeError,
    NotAllocatedError,
)
from replayer.ledger import SyncLedger
from tests.allocator.delayed import NeverEnd, SlowEnd
from tests.allocator.pools import two_ends

pytestmark = pytest.mark.cpu

#: Calls after which the error must be there, with numbers that come at the fourth question: one read-back may be under way when the
#: fault is written down, and the next one brings it.
BOUND = 10


def ids(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def named(count: int) -> torch.Tensor:
    return torch.ones(count, dtype=torch.bool)


TWICE = (*range(8, 12), *range(8, 12))

FAULTS: list[tuple[str, type[AllocatorError], int, Callable[[MultiEndedAllocator], object]]] = [
    ("freed twice", NotAllocatedError, 4, lambda a: a.free(ids(16))),
    ("never allocated", NotAllocatedError, 40, lambda a: a.free(ids(160))),
    ("-1 beside a live id", NotAllocatedError, -1, lambda a: a.free(ids(8, -1))),
    ("the padding page", NotAllocatedError, 0, lambda a: a.free(ids(0, 8))),
    ("out of range", NotAllocatedError, 2500, lambda a: a.free(ids(10_000))),
    ("a segment that is not live", NotAllocatedError, 4, lambda a: a.free_segment(torch.arange(16, 20), start_pos=0)),
    ("one page twice in a segment", DuplicateFreeError, 2, lambda a: a.free_segment(ids(*TWICE), start_pos=0)),
    ("one page twice by its pages", DuplicateFreeError, 3, lambda a: a.free(ids(12, 12), _pages=ids(3, 3))),
    ("a named page that is not live", NotAllocatedError, 40, lambda a: a.free_named(ids(8, 160, 12), named(3))),
    ("a named page that is not live, in order", NotAllocatedError, 40, lambda a: a.free_named(ids(8, 160, 12), named(3), in_order=True)),
    ("the padding page by name", NotAllocatedError, 0, lambda a: a.free_named(ids(8, 0), named(2))),
    ("one page twice by name, in order", DuplicateFreeError, 2, lambda a: a.free_named(ids(8, 12, 9), named(3), in_order=True)),
    ("a live id bound again", BindError, 2, lambda a: a.alloc_with_virtual(ids(2))),
    ("an id out of range bound", BindError, 999, lambda a: a.alloc_with_virtual(ids(50, 999))),
    ("an id bound twice in one call", BindError, 50, lambda a: a.alloc_with_virtual(ids(50, 51, 50))),
    ("bind outside the band", BindError, 5, lambda a: a.bind(ids(50), ids(5))),
    ("bind of one place twice", BindError, 60, lambda a: a.bind(ids(50, 51), ids(60, 60))),
    ("unbind of an owner", NotAllocatedError, 2, lambda a: a.unbind(ids(2))),
    ("a physical page out of range", NotAllocatedError, 10_000, lambda a: a.free_physical(torch.arange(40_000, 40_004))),
    ("a physical page below the first", NotAllocatedError, -3, lambda a: a.free_physical(torch.arange(-12, -8))),
    ("one physical page twice", DuplicateFreeError, 63, lambda a: a.free_physical(torch.arange(252, 256).repeat(2))),
    ("a physical page that is not taken", NotAllocatedError, 1, lambda a: a.free_physical(torch.arange(4, 8))),
]  # fmt: skip


def filled(
    kind: type[MultiEndedAllocator], *, lazy: bool = True, assertions: str = "log"
) -> MultiEndedAllocator:
    full, swa = two_ends(lazy=lazy, strategy="device", end_class=kind, assertions=assertions)
    full.alloc(16)
    swa.alloc(8)
    full.free_segment(torch.arange(16, 20), start_pos=0)
    full.watermark_physical  # noqa: B018  waits until everything is known
    return full


def tables(made: MultiEndedAllocator) -> tuple[list[int], list[int]]:
    return made.virtual_to_physical.tolist(), made.physical_to_virtual.tolist()


@pytest.mark.parametrize(
    ("error", "page", "call"), [fault[1:] for fault in FAULTS], ids=[fault[0] for fault in FAULTS]
)
@pytest.mark.parametrize("lazy", [True, False], ids=["lazy", "eager"])
def test_a_fault_changes_no_table_and_raises_within_a_few_calls(
    lazy: bool, error: type[AllocatorError], page: int, call: Callable[[MultiEndedAllocator], object]
) -> None:
    full = filled(SlowEnd, lazy=lazy)
    before = tables(full)
    number = full._errors.calls + 1  # type: ignore[attr-defined]
    with pytest.raises(error) as raised:
        call(full)
        assert tables(full) == before
        for _ in range(BOUND):
            full.flush_for_allocation()
            full.alloc(4)
            assert tables(full) == before, "a frozen pool was written"
        pytest.fail(f"no error within {BOUND} calls")
    assert (raised.value.pool, raised.value.ids) == ("full", [page])
    assert "call " in str(raised.value) and f" page {page}" in str(raised.value)
    named = int(str(raised.value).split("call ")[1].split()[0])
    assert number <= named <= number + 1  # a bind is two checks
    with pytest.raises(error):
        full.alloc(4)  # again and again, until the pools of the buffer are cleared
    full.clear()
    neighbour = full._growth_side_neighbor()
    assert isinstance(neighbour, MultiEndedAllocator)
    neighbour.clear()
    tokens = full.alloc(4)
    assert tokens is not None and int(full.translate_kv_loc(tokens).min()) > 0


@pytest.mark.parametrize("lazy", [True, False], ids=["lazy", "eager"])
def test_more_pages_than_there_are(lazy: bool) -> None:
    late = filled(SlowEnd, lazy=lazy)
    before = tables(late)
    late.free(torch.arange(-4, 4000))
    assert tables(late) == before
    with pytest.raises(NotAllocatedError) as raised:
        for _ in range(BOUND):
            late.alloc(4)
    assert raised.value.ids == [-1]


@pytest.mark.parametrize("lazy", [True, False], ids=["lazy", "eager"])
@pytest.mark.parametrize("page_size", [1, 4])
def test_a_free_of_tokens_asks_the_device_nothing(page_size: int, lazy: bool) -> None:
    made = {}
    pages = [torch.tensor([first + 1, first, first + 2]) for first in (8, 2)]
    freed = [(each[:, None] * page_size + torch.arange(min(2, page_size))).reshape(-1) for each in pages]
    for kind in (NeverEnd, MultiEndedAllocator):
        full, _ = two_ends(strategy="device", lazy=lazy, end_class=kind, page_size=page_size)
        full.alloc(16 * page_size)
        with SyncLedger("cpu") as ledger:
            ledger.host(*full.pinned_host_tensors, pinned=True)  # type: ignore[attr-defined]
            for tokens in freed:
                with ledger.call("free", audit=True) as found:
                    full.free(tokens)
                assert found.total == 0
        assert ledger.disagreements == []
        made[kind] = (full.watermark_physical, *tables(full))
    assert made[NeverEnd] == made[MultiEndedAllocator]


def test_the_first_fault_is_the_one_that_is_named() -> None:
    full = filled(NeverEnd)
    full.free_segment(torch.arange(160, 164), start_pos=0)
    full.free_segment(torch.arange(200, 204), start_pos=0)
    with pytest.raises(NotAllocatedError) as raised:
        full._errors.look(wait=True)  # type: ignore[attr-defined]
    assert raised.value.ids == [40]


def test_writing_a_fault_down_asks_the_device_nothing() -> None:
    with SyncLedger("cpu") as ledger:
        full = filled(NeverEnd)
        ledger.host(*full.pinned_host_tensors, pinned=True)  # type: ignore[attr-defined]
        with ledger.call("free", audit=True) as good:
            full.free(torch.arange(8, 12))
        with ledger.call("free", audit=True) as bad:
            full.free_segment(torch.arange(160, 164), start_pos=0)
        with ledger.call("flush", audit=True) as flush:
            full.flush_opportunistic()
    assert (good.total, bad.total, flush.total) == (0, 0, 0)
    assert ledger.disagreements == []


def test_what_a_frozen_pool_hands_out_is_the_padding_page() -> None:
    """The host may have a wrong idea of what is free by then; no live page's bytes may be zeroed or written for it."""
    full = filled(NeverEnd)
    live = full.virtual_to_physical[2:4].tolist()
    full.free_segment(torch.arange(160, 164), start_pos=0)
    full.flush_for_allocation()
    tokens = full.alloc(8)
    assert tokens is not None
    assert full.translate_kv_loc(tokens).tolist() == [0] * 8
    assert full.virtual_to_physical[2:4].tolist() == live
    assert full.virtual_to_physical[0] == 0 and full.virtual_to_physical[-1] == -1
    assert full.physical_to_virtual[0] == 0 and full.physical_to_virtual[-1] == -1


@pytest.mark.parametrize("kind", [NeverEnd, MultiEndedAllocator], ids=["late", "at once"])
@pytest.mark.parametrize("lazy", [True, False], ids=["lazy", "eager"])
def test_tables_that_contradict_the_holes_are_found_by_the_next_compaction(
    kind: type[MultiEndedAllocator], lazy: bool
) -> None:
    full, _ = two_ends(strategy="device", lazy=lazy, end_class=kind)
    full.alloc(32)
    lost = int(full.virtual_to_physical[2])  # the page next to the watermark
    full.physical_to_virtual[lost] = -1
    with pytest.raises(CorruptMappingError) as raised:
        full.free(torch.arange(36, 40))
        full.flush_for_allocation()
        full._errors.look(wait=True)  # type: ignore[attr-defined]
    assert raised.value.ids == []


class _Running:
    def query(self) -> bool:
        return False

    def wait(self) -> None: ...


@pytest.mark.parametrize("pool", [0, 1], ids=["down", "up"])
@pytest.mark.parametrize("urgent", [True, False], ids=["urgent", "during a forward"])
@pytest.mark.parametrize("fault", ["a hole is mapped", "a page that is no hole is not mapped"])
def test_a_flush_finds_a_contradiction_before_it_moves_anything(fault: str, urgent: bool, pool: int) -> None:
    made = two_ends(strategy="device")[pool]
    made.alloc(64)
    if not urgent:
        made.set_latest_forward_done_event(_Running())
    mark, inverse = made.watermark_physical, made.physical_to_virtual
    near, far = (mark + 1, made.num_pages - 1) if pool == 0 else (mark - 1, made.min_page_index)
    is_hole_mapped = fault == "a hole is mapped"
    made.free(inverse[near if is_hole_mapped else far] * 4 + torch.arange(4))
    inverse[near] = 7 if is_hole_mapped else -1
    before = tables(made)
    with pytest.raises(CorruptMappingError):
        made._flush(urgent=urgent)
    assert tables(made) == before


@pytest.mark.parametrize(
    ("error", "call"), [(fault[1], fault[3]) for fault in FAULTS], ids=[fault[0] for fault in FAULTS]
)
def test_asynchronous_assertions_raise_where_a_cpu_checks_them(
    error: type[AllocatorError], call: Callable[[MultiEndedAllocator], object]
) -> None:
    full = filled(SlowEnd, assertions="async")
    before = tables(full)
    with pytest.raises(error, match="virtual page"):
        call(full)
    assert tables(full) == before


@pytest.mark.parametrize("assertions", ["log", "async"])
def test_no_assertion_fails_on_calls_that_are_right(assertions: str) -> None:
    answers = []
    for kind in (MultiEndedAllocator, SlowEnd):
        full = filled(kind, assertions=assertions)
        full.flush_for_allocation()
        tokens = full.alloc(12)
        assert tokens is not None
        full.free(tokens[2:6])
        full.flush_opportunistic()
        answers.append((tokens.tolist(), *tables(full), full.watermark_physical))
    assert answers[0] == answers[1]


def test_other_assertions_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="log, async"):
        two_ends(strategy="device", assertions="none")
