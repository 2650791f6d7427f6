"""C2 to C5: what every page of a band is, the free lists, the counts, and the borders between bands."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from replayer.content import IntArray
from replayer.failure import CheckFailure
from replayer.oracle import shown
from replayer.pool_state import PoolState


def check_counts(state: PoolState) -> None:
    """C4 from counts, and C2 for pages that wait: batches under one event add up.

    Raises:
        CheckFailure: C2 or C4, or C3 where holes that are none explain the count.
    """
    low, high = state.band()
    holes, pending = state.holes(), state.pending()
    waiting = sum(
        batch.shape[0] for _, batches in state.allocator._pending_reuse.values() for batch in batches
    )
    if waiting != pending:
        raise CheckFailure(
            "C2",
            "pages in pending reuse are not the union of the waiting batches: some would never come back, or twice",
            state.name,
            expected=f"{pending} pages",
            found=f"{waiting} in the batches of {len(state.allocator._pending_reuse)} event(s)",
        )
    live = state.live_count()
    if high - low != live + holes + pending:
        _require_usable(state)
        raise CheckFailure(
            "C4",
            f"band [{low}, {high}) has {high - low} pages",
            state.name,
            expected=f"{live} live (by the calls) + holes + pending = {high - low}",
            found=f"{live} + {holes} + {pending} = {live + holes + pending}",
        )


def _require_usable(state: PoolState) -> None:
    """Looked at once counts are wrong: pages that may never be handed out are holes."""
    holes = _on_host(state.allocator._free_phys_pages)
    reserved = holes[(holes < state.min_page_index) | (holes >= state.num_pages)]
    if len(reserved):
        raise CheckFailure("C3", f"physical page(s) {shown(reserved)} are holes, outside the pool", state.name, [],
                           f"{state.min_page_index} to {state.num_pages - 1}", shown(reserved))  # fmt: skip


def check_reported(state: PoolState) -> None:
    """C4 for what the allocator says about itself: its live tokens are those of the calls.

    Raises:
        CheckFailure: C4.
    """
    found, expected = state.allocator.allocated_count(), state.live_count() * state.page_size
    if found != expected:
        raise CheckFailure(
            "C4",
            "allocated_count() is not what the calls left",
            state.name,
            [],
            f"{expected} tokens",
            f"{found} tokens",
        )


def check_given_up(state: PoolState) -> None:
    """C5 for a band that leaves the pool, and for pages that have left the band since it was looked at last: they hold nothing.

    Raises:
        CheckFailure: C5.
    """
    low, high = band = state.band()
    if low > high or (low < high and (low < state.min_page_index or high > state.num_pages)):
        raise CheckFailure(
            "C5", f"band [{low}, {high}) leaves [{state.min_page_index}, {state.num_pages})", state.name
        )
    before, state.last_band = state.last_band, band
    if before is None or before == band:
        return
    if low == high:
        left = np.arange(*before)
    else:
        left = np.concatenate(
            [np.arange(before[0], min(low, before[1])), np.arange(max(high, before[0]), before[1])]
        )
    left = left[left < state.num_pages]
    lost = left[(state.placed_virtual[left] > 0) | state.reserved[left]]
    if len(lost):
        raise CheckFailure(
            "C5",
            f"physical page(s) {shown(lost)} are live, and the band [{low}, {high}) has left them behind",
            state.name,
            [int(page) for page in state.placed_virtual[lost] if page > 0],
        )


def check_free_ids(state: PoolState) -> None:
    """C3 from counts: as many ids are free as do not live. Which ones are wrong is looked up only if that is not so.

    Raises:
        CheckFailure: C3.
    """
    ids = state.allocator.free_virtual_ids
    if ids is None or state.allocator.free_group:
        return
    expected = state.num_pages - state.min_page_index - state.oracle.live_count
    if ids.shape[0] != expected:
        sweep_free_ids(state)
        raise CheckFailure(
            "C3",
            "the list of free ids is too long or too short",
            state.name,
            expected=f"{expected} ids",
            found=f"{ids.shape[0]} ids",
        )


def check_frontiers(chain: Sequence[PoolState], total_bytes: int) -> None:
    """C5 for the bands: inside the buffer, in order, not overlapping in bytes. ``chain`` is low byte end to high.

    Raises:
        CheckFailure: C5.
    """
    frontier, below = 0, "the buffer's start"
    for state in chain:
        low, high = state.band()
        if low == high:
            continue
        low_byte, high_byte = low * state.page_bytes, high * state.page_bytes
        if low < state.min_page_index or high > state.num_pages or high_byte > total_bytes:
            raise CheckFailure(
                "C5", f"band [{low}, {high}) leaves [{state.min_page_index}, {state.num_pages})", state.name
            )
        if low_byte < frontier:
            raise CheckFailure(
                "C5",
                f"its band starts at byte {low_byte}, but {below} reaches to byte {frontier}",
                state.name,
                expected=f"at least {frontier}",
                found=str(low_byte),
            )
        frontier, below = high_byte, f"pool {state.name!r}"


def check_inside(state: PoolState, physical_pages: IntArray) -> None:
    """C5 for pages: inside the band.

    Raises:
        CheckFailure: C5.
    """
    low, high = state.band()
    outside = (physical_pages < low) | (physical_pages >= high)
    if outside.any():
        places = physical_pages[outside]
        raise CheckFailure(
            "C5",
            f"physical page(s) {shown(places)} are live outside the band [{low}, {high})",
            state.name,
            [int(page) for page in state.placed_virtual[places] if page > 0],
        )


def sweep_partition(state: PoolState) -> int:
    """C2, C4 and C5, page by page; the number of pages.

    Raises:
        CheckFailure: C2, C4 or C5.
    """
    low, high = state.band()
    table = state.table("physical_to_virtual")[: state.num_pages]
    live = (table >= 0) | state.reserved[: state.num_pages]
    live[0] = False  # the padding page
    holes = _on_host(state.allocator._free_phys_pages)
    batches = [_on_host(batch) for _, waiting in state.allocator._pending_reuse.values() for batch in waiting]
    pending = np.concatenate(batches) if batches else np.empty(0, dtype=np.int64)
    counts = live.astype(np.int64)
    for pages, what in ((holes, "holes"), (pending, "pending")):
        if len(pages) and not low <= pages.min() <= pages.max() < high:
            raise CheckFailure("C2", f"{what} {shown(pages[(pages < low) | (pages >= high)])} lie outside the band [{low}, {high})",
                               state.name)  # fmt: skip
        np.add.at(counts, pages, 1)
    if set(pending.tolist()) != set(state.allocator._pending_reuse_pages_cpu):
        raise CheckFailure(
            "C2",
            "the host's list of pending pages is not that of the waiting batches",
            state.name,
        )
    outside = np.concatenate([np.flatnonzero(live[:low]), high + np.flatnonzero(live[high:])])
    if len(outside):
        raise CheckFailure("C5", f"live physical page(s) {shown(outside)} outside the band [{low}, {high})", state.name,
                           [int(page) for page in table[outside] if page > 0])  # fmt: skip
    wrong = low + np.flatnonzero(counts[low:high] != 1)
    if len(wrong):
        raise CheckFailure(
            "C2",
            f"physical page(s) {shown(wrong)} are not in exactly one of live, hole, pending",
            state.name,
            [int(page) for page in table[wrong] if page > 0],
            expected="1 each",
            found=shown(counts[wrong]),
        )
    if int(live[low:high].sum()) != state.live_count():
        raise CheckFailure("C4", "live pages counted in the table", state.name, [], f"{state.live_count()} by the calls",
                           str(int(live[low:high].sum())))  # fmt: skip
    return high - low


def sweep_free_ids(state: PoolState) -> int:
    """C3: the list of free virtual ids, whole; its length.

    Raises:
        CheckFailure: C3.
    """
    if state.allocator.free_virtual_ids is None:
        return 0
    ids = _on_host(state.allocator.free_virtual_ids)
    first, end = state.min_page_index, state.num_pages
    if len(ids) and not first <= ids.min() <= ids.max() < end:
        wrong = ids[(ids < first) | (ids >= end)]
        raise CheckFailure(
            "C3",
            f"free ids {shown(wrong)} lie outside [{first}, {end})",
            state.name,
            wrong.tolist(),
        )
    counts = np.bincount(ids, minlength=end)
    if (counts > 1).any():
        twice = np.flatnonzero(counts > 1)
        raise CheckFailure(
            "C3",
            f"ids {shown(twice)} are more than once in the free list",
            state.name,
            twice.tolist(),
        )
    live = state.oracle.live[first:end]
    wrong = first + np.flatnonzero(live == (counts[first:end] > 0))
    if len(wrong):
        raise CheckFailure(
            "C3",
            f"virtual page(s) {shown(wrong)} are free and live, or neither",
            state.name,
            wrong.tolist(),
            expected=f"live: {shown(state.oracle.live[wrong].astype(np.int64))}",
            found=f"in the free list: {shown(counts[wrong])}",
        )
    return len(ids)


def _on_host(tensor: object) -> IntArray:
    pages: IntArray = tensor.cpu().numpy()  # type: ignore[attr-defined]
    return pages
