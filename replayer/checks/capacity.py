"""C10: what an allocator says it can hand out.

The arithmetic is written again from DESIGN's contract, over the bands as they are, so that a remembered or wrongly credited capacity
shows. Pool order is the chain, low byte end to high.
"""

from __future__ import annotations

from collections.abc import Sequence

from replayer.failure import CheckFailure
from replayer.hazards import Hazards
from replayer.pool_state import PoolState

#: What the recomputation reads of a chain: per pool its band, holes, whether a gate is shut, and its pages (a resize changes them).
Capacities = tuple[tuple[tuple[int, int], int, bool, int], ...]


def inputs_of(chain: Sequence[PoolState]) -> Capacities:
    """Equal inputs give equal capacities, so a recomputation is needed only when these change."""
    return tuple(
        (state.band(), state.holes(), state.allocator.moves_blocked(), state.allocator.num_pages)
        for state in chain
    )


def check_remembered(state: PoolState, expected: tuple[int, int]) -> None:
    """C10 again, where nothing that the capacities follow from has changed since ``expected`` was computed.

    Raises:
        CheckFailure: C10.
    """
    found = (state.allocator.available_size(), state.allocator.schedulable_available_size())
    if found != expected:
        raise CheckFailure(
            "C10",
            "the sizes changed though no band, hole or gate did",
            state.name,
            [],
            str(expected),
            str(found),
        )


def check_capacity(chain: Sequence[PoolState], position: int, total_bytes: int) -> tuple[int, int]:
    """C10: both sizes equal a fresh recomputation under the gates as they are now; returns the two sizes.

    Raises:
        CheckFailure: C10.
    """
    state = chain[position]
    below, above = neighbours(chain, position)
    low, high = state.band()
    floor, ceiling = region(chain, position, total_bytes)
    holes = state.holes()
    taken = high - low - holes if state.is_float else high - low
    index_room = state.num_pages - state.min_page_index - taken
    sizes = []
    for name, credit in (("available_size", False), ("schedulable_available_size", True)):
        extra_low = _credit(below) if credit else 0
        extra_high = _credit(above) if credit else 0
        if state.is_float:
            gap_low, gap_high = float_gaps(state, floor, ceiling)
            by_bytes = max(gap_low + extra_low // state.page_bytes, gap_high + extra_high // state.page_bytes)
        elif state.allocator.grow_direction == "up":
            by_bytes = (max(0, ceiling - high * state.page_bytes) + extra_high) // state.page_bytes
        else:
            by_bytes = (max(0, low * state.page_bytes - floor) + extra_low) // state.page_bytes
        own_holes = holes if state.lazy or state.is_float else 0
        expected = (min(by_bytes, index_room) + own_holes) * state.page_size
        found = getattr(state.allocator, name)()
        if found != expected:
            raise CheckFailure("C10", f"{name}() is not what the bands and gates leave", state.name, [],
                               f"{expected} tokens", f"{found} tokens")  # fmt: skip
        sizes.append(expected)
    return sizes[0], sizes[1]


def check_gate(state: PoolState, hazards: Hazards) -> None:
    """C9 and C10 rest on it: the allocator knows whether the gate is open, now, and takes nothing else for a shut one.

    Raises:
        CheckFailure: C9.
    """
    expected = not hazards.may_move(state.name) or state.awaiting_load > 0
    found = state.allocator.moves_blocked()
    if found != expected and (state.lazy or state.is_float):
        raise CheckFailure(
            "C9", "moves_blocked() is not what the gate says", state.name, [], str(expected), str(found)
        )


def neighbours(chain: Sequence[PoolState], position: int) -> tuple[PoolState | None, PoolState | None]:
    """The next pools below and above that hold bytes: an empty float is transparent."""

    def occupied(states: Sequence[PoolState]) -> PoolState | None:
        return next((s for s in states if not s.is_float or s.band()[1] - s.band()[0] - s.holes() > 0), None)

    return occupied(list(reversed(chain[:position]))), occupied(chain[position + 1 :])


def region(chain: Sequence[PoolState], position: int, total_bytes: int) -> tuple[int, int]:
    """Bytes between the neighbours of a pool: where the one below ends, and where the one above begins."""
    below, above = neighbours(chain, position)
    return (
        0 if below is None else below.band()[1] * below.page_bytes,
        total_bytes if above is None else above.band()[0] * above.page_bytes,
    )


def _credit(neighbour: PoolState | None) -> int:
    if neighbour is None or not neighbour.lazy or neighbour.allocator.moves_blocked():
        return 0
    return neighbour.holes() * neighbour.page_bytes


def float_gaps(state: PoolState, floor: int, ceiling: int) -> tuple[int, int]:
    """Free pages below and above a float between two bytes; all of them on both sides while it is empty."""
    first = max(-(-floor // state.page_bytes), state.min_page_index)
    end = min(ceiling // state.page_bytes, state.num_pages)
    low, high = state.band()
    if high - low - state.holes() == 0:
        return max(0, end - first), max(0, end - first)
    return max(0, low - first), max(0, end - high)
