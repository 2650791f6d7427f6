"""Places that somebody outside the allocator uses by their physical ids: a lease, a copy to or from the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from replayer.content import IntArray, Mask
from replayer.oracle import PageRecords

if TYPE_CHECKING:
    from replayer.pool_state import PoolState


@dataclass
class Hold:
    """Some places of one pool, as they were when the hold began.

    ``virtual``: the virtual pages that were there, int64 ``[n]``, -1 for a place that was only reserved. ``generations``, ``records``:
    of these pages, without meaning where there was none.
    """

    number: int
    state: PoolState
    places: IntArray
    virtual: IntArray
    generations: IntArray
    records: PageRecords

    @property
    def same(self) -> Mask:
        """Which of the pages still live as what they were, wherever they are."""
        oracle, pages = self.state.oracle, np.maximum(self.virtual, 0)
        alive: Mask = (
            (self.virtual >= 0) & oracle.live[pages] & (oracle.generation[pages] == self.generations)
        )
        return alive

    def expected(self) -> PageRecords:
        """What the places hold if nobody touched them: the contents of now for pages that still live, else those of the beginning."""
        return self.records.replaced(self.same, self.state.oracle.records_of(np.maximum(self.virtual, 0)))

    def deliver(self, records: PageRecords) -> tuple[IntArray, PageRecords]:
        """``records`` (of all places) have been written to the places. A page that was there and still lives holds them now, wherever it
        is; so does a page that a reserved place was bound to meanwhile; a place that is still reserved keeps them for such a page.

        Returns:
            The pages that hold something new, and what.
        """
        state = self.state
        owners = state.placed_virtual[self.places]
        pages = np.where(self.same, self.virtual, np.where(self.virtual < 0, owners, -1))
        has_page = pages >= 0
        state.oracle.adopt(pages[has_page], records.kept(has_page))
        waits = (self.virtual < 0) & (owners < 0) & state.reserved[self.places]
        state.arrive(self.places[waits], records.kept(waits))
        return pages[has_page], records.kept(has_page)

    def part(self, rows: Mask) -> Hold:
        """The same hold of some of its places."""
        return Hold(
            self.number,
            self.state,
            self.places[rows],
            self.virtual[rows],
            self.generations[rows],
            self.records.kept(rows),
        )

    def let_go(self) -> None:
        """The pool was cleared: nothing is held any more."""
        none = np.zeros(len(self.places), dtype=np.bool_)
        self.records = self.records.kept(none)
        self.places, self.virtual, self.generations = (
            self.places[none],
            self.virtual[none],
            self.generations[none],
        )


def begin_hold(number: int, state: PoolState, places: IntArray) -> Hold:
    """A hold on places as they are now."""
    places = places.copy()
    virtual = state.placed_virtual[places]
    pages = np.maximum(virtual, 0)
    return Hold(
        number, state, places, virtual, state.oracle.generation[pages].copy(), state.oracle.records_of(pages)
    )


def over_abandoned_bytes(hold: Hold, state: PoolState, places: IntArray) -> IntArray:
    """Places of the hold that hold nothing of its pool any more, and whose bytes are among those of ``places`` of another pool."""
    own = hold.state
    if own is state or not len(places):
        return np.empty(0, dtype=np.int64)
    left = hold.places[(own.placed_virtual[hold.places] < 0) & ~own.reserved[hold.places]]
    if not len(left):
        return left
    starts = np.sort(places) * state.page_bytes
    # The last of the other pool's places that begins below the end of each place held.
    before = np.searchsorted(starts, (left + 1) * own.page_bytes, side="left") - 1
    reaches = starts[np.maximum(before, 0)] + state.page_bytes > left * own.page_bytes
    overlapping: IntArray = left[(before >= 0) & reaches]
    return overlapping
