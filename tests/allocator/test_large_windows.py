"""Flushes over windows of hundreds of pages move what the walk over pages moves, whichever way the window's live pages are found."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from allocator import device_end
from allocator.device_end import LARGE_WINDOW
from allocator.device_plan import descending_by_rank, selected
from tests.allocator.pools import two_ends, whole_state

pytestmark = pytest.mark.cpu


class Running:
    def query(self) -> bool:
        return False

    def wait(self) -> None: ...


def flushed(strategy: str, pool: str, holes: int, seed: int, urgent: bool) -> tuple[int, dict[str, Any]]:
    """A band of 2,000 pages with ``holes`` holes, half of them near the watermark; what a flush moved, and the state after it."""
    full, swa = two_ends(strategy=strategy, page_size=1, total_bytes=6000 * 64)
    made = full if pool == "full" else swa
    tokens = made.alloc(2000)
    assert tokens is not None
    generator = torch.Generator().manual_seed(seed)
    near = 1999 - torch.randperm(holes, generator=generator)[: holes // 2]
    far = torch.randperm(2000 - holes, generator=generator)[: holes - holes // 2]
    made.free(tokens[torch.cat([far, near])])
    if not urgent:
        made.set_latest_forward_done_event(Running())
    return int(made._flush(urgent=urgent)), whole_state(made)


@pytest.mark.parametrize("pool", ["full", "swa"], ids=["down", "up"])
@pytest.mark.parametrize("urgent", [True, False], ids=["urgent", "during a forward"])
@pytest.mark.parametrize("holes", [LARGE_WINDOW - 1, LARGE_WINDOW, LARGE_WINDOW + 1, 900])
def test_a_large_window_is_packed_as_by_the_walk(holes: int, urgent: bool, pool: str) -> None:
    for seed in range(3):
        expected = flushed("batched", pool, holes, seed, urgent)
        assert expected[0] > holes // 4
        assert flushed("device", pool, holes, seed, urgent) == expected


@pytest.mark.parametrize("pool", ["full", "swa"], ids=["down", "up"])
@pytest.mark.parametrize("urgent", [True, False], ids=["urgent", "during a forward"])
def test_holes_in_a_wide_band_are_not_counted_into_order(
    urgent: bool, pool: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = flushed("batched", pool, LARGE_WINDOW, 7, urgent)
    sorted_at: list[tuple[int, int]] = []

    def watched(pages: torch.Tensor, low: int, high: int) -> torch.Tensor:
        sorted_at.append((low, high))
        return descending_by_rank(pages, low, high)

    monkeypatch.setattr(device_end, "descending_by_rank", watched)
    assert flushed("device", pool, LARGE_WINDOW, 7, urgent) == expected
    assert len(sorted_at) == 1
    monkeypatch.setattr(device_end, "DENSE", 1)
    assert flushed("device", pool, LARGE_WINDOW, 7, urgent) == expected
    assert len(sorted_at) == 1


@pytest.mark.parametrize("count", [1, 2, 50, 700])
def test_ranks_sort_and_select_as_sort_and_a_mask_do(count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    pages = 40 + torch.randperm(700, generator=generator)[:count]
    assert torch.equal(descending_by_rank(pages, 40, 740), torch.sort(pages, descending=True)[0])
    is_wanted = torch.rand(count, generator=generator) < 0.5
    wanted = pages[is_wanted]
    assert torch.equal(selected(pages, is_wanted, wanted.shape[0]), wanted)
