"""C12: whether a flush gets anywhere."""

from __future__ import annotations

import numpy as np

from replayer.content import IntArray
from replayer.failure import CheckFailure
from replayer.hazards import Hazards
from replayer.oracle import shown
from replayer.pool_state import PoolState


def check_flushed(
    state: PoolState, *, urgent: bool, moves: int, hazards: Hazards, judged_before: int | None = None
) -> None:
    """C12 after one flush of a lazy END pool with its gate open: an urgent flush leaves no hole; any other one leaves the live pages packed
    at the origin, as far as no bound and no page about to be written stopped it.

    Args:
        judged_before: the last forward that was known to be over before the flush. If another ended meanwhile it is not known what the
            flush had to mind; None if that is not known.

    Raises:
        CheckFailure: C12, or C2 for a hole that is live.
    """
    if not urgent and moves > state.move_cap:
        raise CheckFailure(
            "C12",
            "an opportunistic flush ignored its bound",
            state.name,
            [],
            f"at most {state.move_cap} moves",
            f"{moves} moves",
        )
    holes = state.holes()
    if not holes or not hazards.may_move(state.name) or state.awaiting_load:
        return
    if urgent:
        raise CheckFailure(
            "C12", "an urgent flush left holes in the band", state.name, [], "0 holes", f"{holes} holes"
        )
    # An event that has not fired stops an allocator, also where a later forward's end says that this one is over.
    runs = (
        not hazards.nothing_runs(state.name)
        or state.pending() > 0
        or bool(hazards.places_to_be_written(state))
    )
    if moves >= state.move_cap or (runs and judged_before != hazards.judged_through):
        return
    seen = (state.changes, hazards.epoch)
    if seen == state.flush_seen:
        return  # engines without work flush by the thousand, and a sort each time would cost more than they do
    state.flush_seen = seen
    pages = np.sort(state.allocator._free_phys_pages.cpu().numpy())
    _require_dead(state, pages)
    if runs:
        _require_stopped(state, pages, hazards)
    else:
        _require_packed(state, pages)


def _require_dead(state: PoolState, holes: IntArray) -> None:
    live = state.taken(holes)
    if np.count_nonzero(live):
        raise CheckFailure(
            "C2",
            f"physical page(s) {shown(holes[live])} are holes and live",
            state.name,
            [int(page) for page in state.placed_virtual[holes[live]] if page > 0],
        )


def _require_packed(state: PoolState, holes: IntArray) -> None:
    low, high = state.band()
    count = len(holes)
    grows_up = state.allocator.grow_direction == "up"
    packed = np.arange(high - count, high) if grows_up else np.arange(low, low + count)
    if not np.array_equal(holes, packed):
        raise CheckFailure("C12", "a flush that nothing held back left holes among live pages", state.name, [],
                           f"holes next to the watermark: {shown(packed)}", shown(holes))  # fmt: skip


def _require_stopped(state: PoolState, holes: IntArray, hazards: Hazards) -> None:
    """While a forward runs: the live page nearest the watermark has no hole beyond it, or is about to be written."""
    low, high = state.band()
    # Of so many pages at least one is neither hole nor waiting, if there is one in the band.
    window = min(high - low, len(holes) + state.pending() + 1)
    grows_up = state.allocator.grow_direction == "up"
    near = np.arange(high - 1, high - 1 - window, -1) if grows_up else np.arange(low, low + window)
    live = near[state.taken(near)]
    if not len(live):
        return
    page, hole = int(live[0]), int(holes[0] if grows_up else holes[-1])
    could_move = page > hole if grows_up else page < hole
    if could_move and page not in hazards.places_to_be_written(state):
        raise CheckFailure(
            "C12",
            f"a flush left physical page {page} at the watermark's side though no forward writes it and hole {hole} lies beyond it",
            state.name,
            [int(state.placed_virtual[page])] if state.placed_virtual[page] > 0 else [],
        )


def check_eager(state: PoolState) -> None:
    """An eager END pool closes its holes at every free.

    Raises:
        CheckFailure: C12.
    """
    if not state.lazy and not state.is_float and state.holes():
        raise CheckFailure(
            "C12", "an eager pool has holes", state.name, [], "0 holes", f"{state.holes()} holes"
        )
