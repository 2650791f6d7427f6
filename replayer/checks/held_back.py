"""C8 and C12 for pages that were moved away while a forward may still read them: they wait as long as it runs, and no longer."""

from __future__ import annotations

from collections.abc import Collection

from replayer.failure import CheckFailure
from replayer.hazards import Hazards, ReplayEvent
from replayer.pool_state import PoolState


def note_moved(state: PoolState, reader: ReplayEvent | None, pages: int) -> None:
    """``pages`` were moved away in a lazy pool while the event of ``reader`` (None: nothing) had not fired."""
    if reader is not None and state.lazy:
        state.held_back[reader] = state.held_back.get(reader, 0) + pages


def already_over(state: PoolState) -> list[ReplayEvent]:
    """Events that have fired by now and that pages wait for: the next flush must take these pages back."""
    return [event for event in state.held_back if event.fired]


def check_held_back(state: PoolState, hazards: Hazards) -> None:
    """C8: as many pages wait as unfinished forwards may still read. A page that does not wait can be handed out before its reader is done.

    Raises:
        CheckFailure: C8.
    """
    reading, through = 0, hazards.judged_through
    for event, pages in reversed(state.held_back.items()):  # numbers rise from launch to launch
        if event.number <= through:
            break
        reading += pages
    if not reading:
        return
    waiting = state.pending()
    if waiting < reading:
        raise CheckFailure(
            "C8",
            "pages that an unfinished forward reads at their old place do not wait for it any more",
            state.name,
            expected=f"at least {reading} pages in pending reuse",
            found=f"{waiting} pages",
        )


def check_returned(
    state: PoolState, over: Collection[ReplayEvent], hazards: Hazards, *, urgent: bool
) -> None:
    """C12 after a flush that nothing forbade: what waited for events that had fired before it (``over``) is back, after an urgent one
    everything.

    Raises:
        CheckFailure: C12.
    """
    if not hazards.may_move(state.name) or state.awaiting_load:
        return
    waiting = state.pending()
    if urgent or not waiting:
        # Also of forwards that are known to be over only from a later one: their events need never fire.
        state.held_back.clear()
    for event in over:
        state.held_back.pop(event, None)
    if not waiting:
        return
    most = sum(state.held_back.values())
    if waiting > most:
        raise CheckFailure(
            "C12",
            "pages still wait for a forward that is over",
            state.name,
            expected=f"at most {most} pages in pending reuse",
            found=f"{waiting} pages",
        )
