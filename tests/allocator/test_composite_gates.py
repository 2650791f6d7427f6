"""Gates, forwards and reservations of composites; making, clearing and resizing them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from allocator import UnifiedMambaSlotAllocator
from allocator.errors import (
    ConfigurationError,
)
from tests.allocator.composite_state import check, composite_state, live_pages, pools_of
from tests.allocator.small_composites import (
    ENDS,
    LAYOUTS,
    every_strategy,
    every_window,
    lay,
    make,
)
from tests.engine.composites import Event

pytestmark = pytest.mark.cpu


@every_strategy
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("setter", ["set_disagg_move_gate", "set_host_transfer_move_gate"])
def test_a_gate_holds_every_pool(setter: str, layout: str, strategy: str) -> None:
    """F7 (sgl-project/sglang#37417): states too."""
    made = make(layout, page_size=1, strategy=strategy)
    is_open = True
    getattr(made, setter)(lambda: is_open)
    tokens = lay(made, 24)
    slots = (
        UnifiedMambaSlotAllocator(made.mamba_allocator, 12, "cpu")
        if hasattr(made, "mamba_allocator")
        else None
    )
    states = None if slots is None else slots.alloc(6)
    made.free(torch.cat([tokens[3:8], tokens[16:20]]))  # far from either frontier
    if slots is not None:
        slots.free(states[:2])
    is_open = False
    assert all(pool.moves_blocked() for pool in pools_of(made).values())
    places = {name: live_pages(pool) for name, pool in pools_of(made).items()}
    made.flush_opportunistic()
    for pool in pools_of(made).values():
        pool.flush_for_allocation()
    assert {name: live_pages(pool) for name, pool in pools_of(made).items()} == places
    is_open = True
    assert made.flush_opportunistic() > 0
    moved = {name for name, pool in pools_of(made).items() if live_pages(pool) != places[name]}
    assert "full" in moved and (slots is None or "mamba" in moved)
    check(made)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_gate_needs_lazy_compaction(layout: str) -> None:
    made = make(layout, lazy=False)
    for setter in (made.set_disagg_move_gate, made.set_host_transfer_move_gate):
        with pytest.raises(ConfigurationError, match="needs lazy compaction"):
            setter(lambda: True)
    assert not any(pool.moves_blocked() for pool in pools_of(made).values())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_forwards_and_copies_are_told_to_every_pool(layout: str) -> None:
    made = make(layout)
    tokens = lay(made, 8)
    done, copied = Event(), Event()
    made.set_latest_forward_done_event(done)
    made.set_inflight_forward(done, tokens)
    made.set_hicache_transfer_done_event("load", copied)
    for name, pool in pools_of(made).items():
        assert pool._latest_forward_done_event is done
        writes = pool._inflight_forward
        assert (writes is None) == (name == "mamba" or not pool.lazy_compaction)
        assert list(pool._forward.transfers.values()) == [copied]


@every_window
def test_reserved_places_hold_everything_until_the_load_is_queued_or_called_off(layout: str) -> None:
    made = make(layout)
    swa = made.swa_attn_allocator
    tokens = lay(made, 16)
    made.free_swa(tokens[:8])
    places = swa.alloc_physical(8)
    assert swa.moves_blocked() and made.verify_byte_accounting() == []
    swa.cancel_physical_reservation(places[4:])
    made.set_full_to_swa_mapping(tokens[:4], places[:4])
    assert made.translate_loc_from_full_to_swa(tokens[:4]).tolist() == places[:4].tolist()
    assert swa.moves_blocked()
    made.set_hicache_transfer_done_event((1, "load"), Event())
    assert not swa.moves_blocked()
    check(made)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_clear_empties_everything_and_keeps_gates(layout: str) -> None:
    made = make(layout)
    empty, room = composite_state(made), made.available_size()
    is_open = False
    made.set_disagg_move_gate(lambda: is_open)
    tokens = lay(made, 16)
    made.free(tokens[:4])
    made.free_group_begin()
    made.free(tokens[4:])
    made.clear()
    assert composite_state(made) == empty and made.free_group is None
    assert all(pool.moves_blocked() for pool in pools_of(made).values())
    assert made.available_size() == room
    made.free_group_end()
    assert composite_state(made) == empty


def test_maxima_come_together() -> None:
    with pytest.raises(ConfigurationError, match="together or not at all"):
        make(ENDS, full_max_total_num_tokens=40)
    made = make(ENDS, full_max_total_num_tokens=40, swa_max_total_num_tokens=24)
    assert (made.size_full, made.size_swa, made.size) == (40, 24, 24)
    lay(made, 8)
    assert made.conserve_full_available_size() == 32 and made.conserve_swa_available_size() == 16
    assert made.full_available_size() == 32


def test_resize_takes_the_size_that_the_buffer_has() -> None:

    made = make(ENDS)
    buffer = made.unified_buffer
    with pytest.raises(ConfigurationError, match="the configuration says 5"):
        made.resize(SimpleNamespace(unified_memory_pool_bytes=5))
    tokens = lay(made, 4)
    buffer.total_bytes //= 2
    config = SimpleNamespace(unified_memory_pool_bytes=buffer.total_bytes)
    with pytest.raises(ConfigurationError, match="only an empty pool"):
        made.resize(config)
    made.free(tokens)
    made.flush_opportunistic()
    size = made.size
    made.resize(config)
    assert (
        0 < made.size < size
        and made.swa_attn_allocator.num_virtual_ids == made.full_attn_allocator.num_virtual_ids
    )
    assert made.alloc(made.available_size()) is not None
    check(made)
