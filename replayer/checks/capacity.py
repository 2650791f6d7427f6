"""C10: what an allocator says it can hand out.

The arithmetic is written again from DESIGN's contract, over the bands as they are, so that a remembered or wrongly credited capacity
shows. Pool order is the chain, low byte end to high.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from replayer.failure import CheckFailure
from replayer.hazards import Hazards
from replayer.pool_state import Extent, PoolState


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


def check_capacities(
    chain: Sequence[PoolState], extents: Sequence[Extent], total_bytes: int
) -> list[tuple[int, int]]:
    """C10: both sizes of every pool equal a fresh recomputation under the gates as they are now; returns them.

    Args:
        extents: of the pools of ``chain``, as they are now. While these stay the same, so do the sizes.

    Raises:
        CheckFailure: C10.
    """
    return [_check_capacity(chain, extents, at, total_bytes) for at in range(len(chain))]


def _check_capacity(
    chain: Sequence[PoolState], extents: Sequence[Extent], position: int, total_bytes: int
) -> tuple[int, int]:
    state, (low, high, holes, _, _, num_pages) = chain[position], extents[position]
    below, above = _neighbours(chain, extents, position)
    floor, ceiling = _region(chain, extents, below, above, total_bytes)
    page_bytes = state.page_bytes
    taken = high - low - holes if state.is_float else high - low
    index_room = num_pages - state.min_page_index - taken
    own_holes = holes if state.lazy or state.is_float else 0
    credits = _credit(chain, extents, below), _credit(chain, extents, above)
    sizes = []
    for name, (extra_low, extra_high) in (
        ("available_size", (0, 0)),
        ("schedulable_available_size", credits),
    ):
        if state.is_float:
            gap_low, gap_high = float_gaps(state, floor, ceiling)
            by_bytes = max(gap_low + extra_low // page_bytes, gap_high + extra_high // page_bytes)
        elif state.allocator.grow_direction == "up":
            by_bytes = (max(0, ceiling - high * page_bytes) + extra_high) // page_bytes
        else:
            by_bytes = (max(0, low * page_bytes - floor) + extra_low) // page_bytes
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
    found = _neighbours(chain, [state.extent() for state in chain], position)
    below, above = (None if at is None else chain[at] for at in found)
    return below, above


def region(chain: Sequence[PoolState], position: int, total_bytes: int) -> tuple[int, int]:
    """Bytes between the neighbours of a pool: where the one below ends, and where the one above begins."""
    extents = [state.extent() for state in chain]
    return _region(chain, extents, *_neighbours(chain, extents, position), total_bytes)


def _neighbours(
    chain: Sequence[PoolState], extents: Sequence[Extent], position: int
) -> tuple[int | None, int | None]:
    """Positions in the chain."""

    def occupied(positions: Iterable[int]) -> int | None:
        for at in positions:
            low, high, holes, *_ = extents[at]
            if not chain[at].is_float or high - low - holes > 0:
                return at
        return None

    return occupied(range(position - 1, -1, -1)), occupied(range(position + 1, len(chain)))


def _region(
    chain: Sequence[PoolState],
    extents: Sequence[Extent],
    below: int | None,
    above: int | None,
    total_bytes: int,
) -> tuple[int, int]:
    return (
        0 if below is None else extents[below].high * chain[below].page_bytes,
        total_bytes if above is None else extents[above].low * chain[above].page_bytes,
    )


def _credit(chain: Sequence[PoolState], extents: Sequence[Extent], neighbour: int | None) -> int:
    """Bytes that a flush of a neighbour would open."""
    if neighbour is None or not chain[neighbour].lazy or extents[neighbour].blocked:
        return 0
    return extents[neighbour].holes * chain[neighbour].page_bytes


def float_gaps(state: PoolState, floor: int, ceiling: int) -> tuple[int, int]:
    """Free pages below and above a float between two bytes; all of them on both sides while it is empty."""
    first = max(-(-floor // state.page_bytes), state.min_page_index)
    end = min(ceiling // state.page_bytes, state.num_pages)
    low, high = state.band()
    if high - low - state.holes() == 0:
        return max(0, end - first), max(0, end - first)
    return max(0, low - first), max(0, end - high)
