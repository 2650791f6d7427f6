"""Copies of ids on their way from the engine's thread to the writer's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recorder.staging import LOST, PinnedRing, Staging, arrived, lost
from tests.recorder.fake_cuda import FakeCuda

pytestmark = pytest.mark.cpu

MEMORY = 1 << 20


@pytest.fixture(autouse=True)
def tensors_without_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU tensor has no memory that a stream could hold on to."""
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: None)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 64, 65, 5000])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_a_copy_is_no_alias(count: int, dtype: torch.dtype) -> None:
    staging = Staging(MEMORY)
    ids = torch.arange(count, dtype=dtype)
    captured = staging.capture(ids)
    ids.fill_(-7)
    found = staging.release(captured)
    assert found is not None
    assert found.dtype == np.int64
    assert found.tolist() == list(range(count))


def test_views_that_are_not_contiguous_and_tables_of_two_dimensions() -> None:
    staging = Staging(MEMORY)
    table = torch.arange(1000).reshape(10, 100)
    for view in (table[:, 3], table[2:4, ::7], table.T[:80], table[3:3]):
        found = staging.release(staging.capture(view))
        assert found is not None
        assert found.tolist() == view.reshape(-1).tolist()


def test_lists_are_copied_and_none_stays_none() -> None:
    staging = Staging(MEMORY)
    given_list = [4, 5]
    captured = staging.capture(given_list)
    given_list.append(6)
    found = staging.release(captured)
    assert found is not None and found.tolist() == [4, 5]
    assert staging.release(staging.capture(None)) is None


def test_large_copies_have_a_bound_and_what_is_released_counts_no_more() -> None:
    staging = Staging(MEMORY)
    large = torch.arange(MEMORY // 8 // 2)
    first, second = staging.capture(large), staging.capture(large)
    assert staging.capture(large) is LOST
    assert staging.held_bytes == MEMORY
    staging.release(first)
    third = staging.capture(large)
    staging.release(second)
    staging.release(third)
    assert staging.held_bytes == 0


def test_a_device_copy_waits_for_the_engines_stream_on_the_device_only() -> None:
    cuda = FakeCuda(fires=False)
    staging = Staging(MEMORY, cuda=cuda)
    captured = staging.capture(torch.tensor([5, 6, 7], dtype=torch.int32))
    (event,) = cuda.events
    assert event.recorded_on.waited_for == [cuda.engine_stream]
    assert not arrived((captured,))
    assert not arrived(("call", (1, None, captured)))
    event.copied = True
    assert arrived(("call", (1, None, captured)))
    found = staging.release(captured)
    assert found is not None and found.tolist() == [5, 6, 7]


def test_ids_in_the_ring_are_not_the_tensors_memory() -> None:
    staging = Staging(MEMORY, cuda=FakeCuda())
    ids = torch.arange(10)
    captured = staging.capture(ids)
    ids.zero_()
    found = staging.release(captured)
    again = staging.capture(torch.full((10,), 99))
    assert found is not None and found.tolist() == list(range(10))
    assert again is not None


def test_a_full_ring_refuses_and_goes_on_when_it_has_been_read() -> None:
    ring = PinnedRing(100, torch.device("cpu"), FakeCuda())
    pieces = [ring.copy(torch.arange(40)), ring.copy(torch.arange(40))]
    assert ring.copy(torch.arange(40)) is None
    assert pieces[0].take().tolist() == list(range(40))
    # 40 are free at the start and 20 at the end, where 30 do not fit: the piece goes to the start.
    third = ring.copy(torch.arange(100, 130))
    assert pieces[1].take().tolist() == list(range(40))
    assert third.take().tolist() == list(range(100, 130))


@given(st.lists(st.tuples(st.integers(1, 40), st.booleans()), max_size=200))
def test_pieces_of_the_ring_never_overlap(steps: list[tuple[int, bool]]) -> None:
    """Copies of random sizes, read in their order at random times: each piece still holds what was copied into it."""
    patch = pytest.MonkeyPatch()
    patch.setattr(torch.Tensor, "record_stream", lambda self, stream: None)
    try:
        ring = PinnedRing(128, torch.device("cpu"), FakeCuda())
        waiting: list[tuple[Any, list[int]]] = []
        for stamp, (count, read_one) in enumerate(steps, 1):
            if read_one and waiting:
                piece, expected = waiting.pop(0)
                assert piece.take().tolist() == expected
            new = ring.copy(torch.full((count,), stamp))
            if new is None:
                assert sum(len(expected) for _, expected in waiting) + 2 * count > 128 - 40
            else:
                waiting.append((new, [stamp] * count))
        for piece, expected in waiting:
            assert piece.take().tolist() == expected
        # Everything is free again: as much as the ring holds fits, wherever its head is, in two pieces at most.
        for _ in range(2):
            last = ring.copy(torch.zeros(64))
            assert last is not None
            last.take()
    finally:
        patch.undo()


def test_who_may_wait_waits_for_memory_instead_of_losing_ids() -> None:
    waits: list[int] = []
    held: list[Any] = []

    def may_wait(so_far: int) -> bool:
        waits.append(so_far)
        if len(waits) == 3:
            staging.release(held.pop())
        return True

    staging = Staging(MEMORY, may_wait)
    large = torch.arange(MEMORY // 8)
    held.append(staging.capture(large))
    assert staging.capture(large) is not LOST
    assert len(waits) == 3
    assert staging.capture(torch.arange(MEMORY // 8 + 1)) is LOST  # would never fit


def test_lost_ids_are_found_in_an_event() -> None:
    assert lost(("write", 1, (1, None, LOST)))
    assert not lost(("write", 1, (1, None, [3]), b"12345678"))
