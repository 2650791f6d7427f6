"""C10 and C12 for floats: the room they open, what they answer about it, and whether they moved where they could."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from replayer.checks.capacity import float_gaps, neighbours, region
from replayer.failure import CheckFailure
from replayer.hazards import Hazards
from replayer.pool_state import PoolState

SIDES = ("low", "high")


def open_bytes(chain: Sequence[PoolState], position: int, side: str, total_bytes: int) -> int:
    """Bytes between a float and its neighbour on ``side``, in whole pages of the float; of an empty float, the whole region."""
    state = chain[position]
    gaps = float_gaps(state, *region(chain, position, total_bytes))
    return gaps[SIDES.index(side)] * state.page_bytes


def could_open(
    chain: Sequence[PoolState], position: int, side: str, min_bytes: int, total_bytes: int
) -> bool:
    """Whether a float can open ``min_bytes`` on ``side``: by moving just enough of the live pages there to holes beyond them and past its
    other border, or, if that takes all of them, by packing. It may be able to even where this says no."""
    state = chain[position]
    low, high = state.band()
    live = np.flatnonzero(state.placed_virtual[low:high] >= 0)
    gap_low, gap_high = float_gaps(state, *region(chain, position, total_bytes))
    opened = (gap_low if side == "low" else gap_high) * state.page_bytes
    if opened >= min_bytes:
        return True
    free = gap_low + gap_high + (high - low - len(live))
    if not len(live) or free * state.page_bytes < min_bytes:
        return False
    needed = -(-(min_bytes - opened) // state.page_bytes)
    if needed >= len(live):
        return True
    if side == "high":
        holes_beyond = int(live[-needed]) - (len(live) - needed)
    else:
        holes_beyond = (high - low - 1 - int(live[needed - 1])) - (len(live) - needed)
    return needed - holes_beyond <= (gap_low if side == "high" else gap_high)


def check_made_room(
    chain: Sequence[PoolState],
    position: int,
    *,
    side: str,
    min_bytes: int,
    answer: int,
    could: bool,
    total_bytes: int,
) -> None:
    """``make_room`` answers what is open, and opened what it could (``could``: `could_open` before the call, no gate being shut).

    Raises:
        CheckFailure: C10 or C12.
    """
    state = chain[position]
    found = open_bytes(chain, position, side, total_bytes)
    if answer != found:
        raise CheckFailure("C10", f"make_room({side!r}) does not answer what is open there", state.name, [],
                           f"{found} bytes", f"{answer} bytes")  # fmt: skip
    if could and found < min_bytes:
        raise CheckFailure("C12", f"make_room({side!r}) left room unopened that moving pages over would give", state.name, [],
                           f"at least {min_bytes} bytes", f"{found} bytes")  # fmt: skip


def check_packed(state: PoolState, hazards: Hazards) -> None:
    """``compact_holes`` leaves none, unless a gate is shut.

    Raises:
        CheckFailure: C12.
    """
    if state.holes() and hazards.may_move(state.name) and not state.awaiting_load:
        raise CheckFailure(
            "C12", "compact_holes left holes", state.name, [], "0 holes", f"{state.holes()} holes"
        )


def check_borders(state: PoolState) -> None:
    """A flush of a float leaves a live page at each border of its span, or no span.

    Raises:
        CheckFailure: C12.
    """
    low, high = state.band()
    for page in (low, high - 1) if high > low else ():
        if state.placed_virtual[page] < 0 and not state.reserved[page]:
            raise CheckFailure(
                "C12", f"a flush left a hole at the border of the span: physical page {page}", state.name
            )


def check_refused(
    chain: Sequence[PoolState], position: int, need: int, hazards: Hazards, total_bytes: int
) -> None:
    """An END pool whose neighbour is a float got no room: then the float could not give it, slack of one page included.

    Raises:
        CheckFailure: C12.
    """
    state = chain[position]
    if state.is_float:
        return
    side, step = ("low", 1) if state.allocator.grow_direction == "up" else ("high", -1)
    below, above = neighbours(chain, position)
    neighbour = above if step == 1 else below
    if neighbour is None or not neighbour.is_float or neighbour.allocator.moves_blocked():
        return
    if not hazards.may_move(neighbour.name):
        return
    low, high = state.band()
    pages = need // state.page_size
    index_room = state.num_pages - state.min_page_index - (high - low)
    beyond_holes = max(0, pages - (state.holes() if state.lazy else 0))
    # A float asks this of its neighbour for the whole request, and the neighbour must be able to number the pages.
    if pages > index_room:
        return
    wanted = (beyond_holes + 1) * state.page_bytes
    if could_open(chain, list(chain).index(neighbour), side, wanted, total_bytes):
        raise CheckFailure("C12", f"refused {need} tokens though its neighbour {neighbour.name!r} could have moved over", state.name, [],
                           "served", "None")  # fmt: skip
