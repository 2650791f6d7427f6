"""After a wrong call whose error has not come back yet, no pool of the buffer touches a live page, and that call is what is told."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from allocator import MultiEndedAllocator
from allocator.errors import AllocatorError, BindError, NotAllocatedError
from tests.allocator.delayed import NeverEnd, SlowEnd
from tests.allocator.pools import two_ends, whole_state
from tests.allocator.test_device_lockstep import Side

pytestmark = pytest.mark.cpu


class Unfinished:
    def query(self) -> bool:
        return False

    def wait(self) -> None: ...


def full_buffer(
    kind: type[MultiEndedAllocator], *, lazy: bool
) -> tuple[Any, Any, torch.Tensor, torch.Tensor]:
    """Two pools that fill the buffer, the rows of the first one's K, which hold 7 where it is live, and its tokens."""
    full, swa = two_ends(strategy="device", end_class=kind, lazy=lazy)
    tokens = full.alloc(full.available_size() - 16)
    assert tokens is not None
    rows = full._kvcache.k_buffer[0]
    rows[full.translate_kv_loc(tokens)] = 7
    swa.alloc(swa.available_size())
    return full, swa, rows, tokens


@pytest.mark.parametrize("lazy", [True, False], ids=["lazy", "eager"])
@pytest.mark.parametrize("kind", [SlowEnd, NeverEnd])
@pytest.mark.parametrize("pages", [1, 10])
def test_a_double_free_gives_a_neighbour_nothing_that_lives(
    pages: int, kind: type[MultiEndedAllocator], lazy: bool
) -> None:
    full, swa, rows, tokens = full_buffer(kind, lazy=lazy)
    size = full.page_size
    freed, kept = tokens[: pages * size], tokens[pages * size :]
    full.free(freed)
    places = full.translate_kv_loc(kept)
    before = rows.clone()
    full.free(freed)
    try:
        for _ in range(3):
            swa.alloc(pages * size)
            full.alloc(pages * size)
            full.flush_for_allocation()
    except NotAllocatedError as problem:
        assert problem.pool == "full"
    assert torch.equal(full.translate_kv_loc(kept), places)
    assert torch.equal(rows[places], before[places])
    assert torch.equal(rows[places], torch.full_like(rows[places], 7))


def test_a_buffer_stays_frozen_until_all_its_pools_are_cleared() -> None:
    full, swa, _, _ = full_buffer(SlowEnd, lazy=True)
    full.free(torch.arange(16, 20))
    full.free(torch.arange(16, 20))
    with pytest.raises(NotAllocatedError) as raised:
        for _ in range(10):
            swa.flush_for_allocation()
            swa.alloc(4)
    assert raised.value.pool == "full"  # the pool whose call it was
    full.clear()
    with pytest.raises(NotAllocatedError):
        for _ in range(10):
            full.alloc(4)
    swa.clear()
    full.clear()
    fresh = two_ends(strategy="device", end_class=SlowEnd)
    assert [whole_state(pool) for pool in (full, swa)] == [whole_state(pool) for pool in fresh]
    assert full.alloc(8).tolist() == fresh[0].alloc(8).tolist()


@pytest.mark.parametrize("kind", [SlowEnd, NeverEnd])
@pytest.mark.parametrize("lazy", [True, False], ids=["lazy", "eager"])
def test_what_a_wrong_call_leads_to_is_told_as_that_call(lazy: bool, kind: type[MultiEndedAllocator]) -> None:
    full, swa = two_ends(strategy="device", end_class=kind, lazy=lazy)
    for count in (160, 80, 60):
        tokens = full.alloc(160)
        assert tokens is not None
        with pytest.raises(AllocatorError) as raised:
            for _ in range(6):
                full.free(tokens[:count])
                full.flush_opportunistic()
            full.flush_for_allocation()
            full._errors.look(wait=True)
        assert isinstance(raised.value, NotAllocatedError)
        full.clear()
        swa.clear()


@pytest.mark.parametrize("kind", ["slow", "never"])
def test_a_frozen_float_moves_nothing_and_zeroes_nothing(kind: str) -> None:
    side = Side(kind, "a float between", 4, lazy=True, cap=8)
    for name, pages in (("full", 2), ("swa", 10), ("other", 2)):
        tokens = side.pools[name].alloc(pages * 4)
        assert tokens is not None
        side.stamp(name, tokens)
    made = side.pools["swa"]
    first = int(made.min_page_index)
    made.free(torch.arange(4) + (first + 3) * 4)
    before = {name: rows.clone() for name, rows in side.rows.items()}
    places = made.virtual_to_physical.tolist()
    made.free(torch.arange(4) + (first + 3) * 4)
    for call in (
        lambda: made.alloc(8),
        lambda: made.compact_holes(retreat_side="high"),
        lambda: made.make_room(side="low", min_bytes=1 << 20),
        lambda: side.pools["other"].alloc(4),
    ):
        try:
            call()
        except NotAllocatedError as problem:
            assert problem.pool == "swa"
    for name, rows in side.rows.items():
        live = side.pools[name].virtual_to_physical
        token_rows = live[live > 0][:, None] * 4 + torch.arange(4)
        assert torch.equal(rows[token_rows], before[name][token_rows]), name
    assert made.virtual_to_physical.tolist() == places


# -- what a late pool has to answer as one whose numbers are there


@pytest.mark.parametrize("kind", [MultiEndedAllocator, SlowEnd, NeverEnd])
@pytest.mark.parametrize("cap", [1, 4096])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_padding_tokens_in_a_write_set_block_nothing_and_hide_nothing(
    kind: type[MultiEndedAllocator], cap: int, dtype: torch.dtype
) -> None:
    moved = []
    for strategy, cls in (("batched", MultiEndedAllocator), ("device", kind)):
        for written in ([0, 8], [0, 159], [0]):
            full, _ = two_ends(strategy=strategy, end_class=cls)
            full._lazy_max_moves_per_call = cap
            tokens = full.alloc(160)
            assert tokens is not None
            full.free(tokens[8:24])
            full.set_latest_forward_done_event(Unfinished())
            writes = torch.tensor([0 if not token else int(tokens[token]) for token in written], dtype=dtype)
            full.set_inflight_forward(Unfinished(), writes)
            moved.append((int(full.flush_opportunistic()), full.virtual_to_physical.tolist()))
    assert moved[:3] == moved[3:]


def test_a_pool_with_bounds_packs_what_there_is() -> None:
    moved = []
    for kind in (MultiEndedAllocator, SlowEnd, NeverEnd):
        full, _ = two_ends(strategy="device", end_class=kind)
        tokens = full.alloc(40)
        assert tokens is not None
        full.free(tokens[8:20])
        full.alloc(4)
        moved.append((int(full.flush_opportunistic()), full.virtual_to_physical.tolist()))
    assert moved[0] == moved[1] == moved[2]
    assert moved[0][0] > 0


def test_a_page_past_the_watermark_is_outside_even_if_the_host_does_not_know() -> None:
    _, swa = two_ends(strategy="device", end_class=SlowEnd)
    tokens = swa.alloc(40)
    assert tokens is not None
    swa.free_segment(tokens[-16:], start_pos=0)
    swa.flush_opportunistic()
    swa.bind(torch.tensor([25]), torch.tensor([9]))
    with pytest.raises(BindError):
        for _ in range(10):
            swa.alloc(4)


def test_nothing_is_freed_or_unbound_by_no_ids() -> None:
    full, _ = two_ends(strategy="device", end_class=SlowEnd)
    tokens = full.alloc(16)
    assert tokens is not None
    before = whole_state(full)
    none = torch.empty(0, dtype=torch.int64)
    full.unbind(none)
    full.free(tokens[:4], _pages=none)
    full.free(none)
    assert whole_state(full) == before
