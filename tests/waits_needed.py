"""Which of the waits that `tests.waits` counts no allocator with the same answers could do without.

python -m tests.waits_needed [NAME...]        (kimi_gb200)

An alloc of the strategy ``device`` waits where bounds alone would refuse it. Bounds may be too low, so what is asked here is whether the
wait was *needed*: whether there is a state of the device that agrees with all that the host was told, and in which the request would be
refused, while in the state that was there it was granted. Two such states, two answers: who answers without the numbers answers one of
them wrongly. States are looked for among those that flushes may have left (how many holes touched the watermark, how many pages moved
away), so what is found is a lower bound: of waits of an END pool that grows down, with nothing open at its neighbour.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from allocator.late_room import LateRoom
from allocator.read_back import Ticket
from allocator.unsettled import Entry, Flushed, Numbers, Packed, PackedPerhaps, Released, Returned, Took
from tests import corpus
from tests.allocator.arriving import ArrivingEnd, ArrivingFloat
from tests.waits import MODELS, are_known, measure

#: Parts of the holes that may have touched the watermark: of one flush, and of each of two or three.
FINE, COARSE = tuple(part / 64 for part in range(65)), (0.0, 0.5, 1.0)


@dataclass
class Asked:
    """Why a flush was made only perhaps: a neighbour below asked for ``pages``, whose band ends at byte ``frontier``."""

    pages: int
    frontier: int
    holes: int
    page_bytes: int

    def lacks(self, low_byte: int) -> bool:
        """Whether the neighbour is short of pages where the flushed band begins at ``low_byte``."""
        return max(0, low_byte - self.frontier) // self.page_bytes + self.holes < self.pages


@dataclass
class State:
    """One state of a pool on the device: pages in the band, live ones, holes."""

    band: int
    live: int
    holes: int


class WitnessEnd(ArrivingEnd):
    """Looks, before it waits, for a state in which it would refuse."""

    waits: ClassVar[int] = 0
    needed: ClassVar[int] = 0
    _asking: int | None = None
    _asked: ClassVar[dict[Entry, Asked]] = {}
    #: Whether a page became a hole since the last flush, after which no hole touched the watermark; and flushes before which one had.
    _has_new_holes = True
    _may_touch: ClassVar[set[Ticket]] = set()

    def _make_sure_of(self, num_pages: int) -> bool:
        self._asking = num_pages
        try:
            return super()._make_sure_of(num_pages)
        finally:
            self._asking = None

    def _packed_is_enough(self, num_pages: int) -> LateRoom | None:
        neighbour = super()._packed_is_enough(num_pages)
        if isinstance(neighbour, WitnessEnd) and self.grow_direction == "up":
            is_open = self._journal is not None and self._journal.under_way
            neighbour._asker = (
                None
                if is_open
                else Asked(num_pages, self._byte_high_frontier(), len(self.holes), self.entry_bytes_per_page)
            )
        return neighbour

    _asker: Asked | None = None

    def _flush_if(self, condition: torch.Tensor) -> None:
        super()._flush_if(condition)
        entry = None if self._journal is None else self._journal._entries[-1]
        if isinstance(entry, PackedPerhaps) and self._asker is not None:
            self._asked[entry] = self._asker

    def _release_physical(self, physical_pages: torch.Tensor) -> None:
        self._has_new_holes = True
        super()._release_physical(physical_pages)

    def _take_back_pending(self, *, wait: bool) -> None:
        self._has_new_holes |= bool(self._pending)
        super()._take_back_pending(wait=wait)

    def _note(self, entry: Entry) -> None:
        super()._note(entry)
        if isinstance(entry, Flushed):
            if self._has_new_holes and entry.ticket is not None:
                self._may_touch.add(entry.ticket)
            self._has_new_holes = False
        elif isinstance(entry, Released | Returned):
            self._has_new_holes = True

    def _settle_chain(self) -> None:
        want, before = self._asking, self.blocking_reads_of_chain()
        may_be_refused = want is not None and any(
            self._pages_left(state) < want for state in self._possible_states()
        )
        super()._settle_chain()
        if self.blocking_reads_of_chain() > before:
            WitnessEnd.waits += 1
            is_granted = want is not None and want * self.page_size <= self.available_size()
            WitnessEnd.needed += may_be_refused and is_granted

    def blocking_reads_of_chain(self) -> int:
        return sum(band.blocking_reads for band in self._chain())

    def _pages_left(self, state: State) -> int:
        """What can be handed out in this state once the neighbour below is packed, as it is before a request is refused; more than anybody
        asks for if bands would overlap, for it is none then."""
        low_byte, below = self._low_byte(state.band), self._neighbour("low")
        if low_byte < self._chain_high_frontier_below_bytes() or not isinstance(below, LateRoom):
            return self.num_pages
        gap = low_byte - below._mark_of(below._live_pages_lazy) * below.entry_bytes_per_page
        room = self.num_pages - self.min_page_index - state.band
        return min(gap // self.entry_bytes_per_page, room) + state.holes

    def _low_byte(self, band: int) -> int:
        return (self._mark_of(band) + 1) * self.entry_bytes_per_page

    def _possible_states(self) -> Iterator[State]:
        journal, below = self._journal, self._neighbour("low")
        if self.grow_direction == "up" or journal is None or below is None or not below._is_settled:
            return
        entries = tuple(journal._entries)
        flushes = sum(isinstance(entry, Flushed) for entry in entries)
        if flushes > 3:
            return
        left = [(touching, moved) for touching in (FINE if flushes == 1 else COARSE) for moved in (0.0, 1.0)]
        for choice in itertools.product(left, repeat=flushes):
            state = self._play(journal.known, entries, choice)
            if state is not None:
                yield state

    def _play(
        self, known: Numbers, entries: Sequence[Entry], choice: Sequence[tuple[float, float]]
    ) -> State | None:
        """The state after ``entries`` if flushes left what ``choice`` says: parts of the holes touching the watermark, and of the others
        filled. None where that is not worked out here."""
        state = State(known.band, known.live, known.holes)
        pending, moved = known.pending, {}
        choices = iter(choice)
        for entry in entries:
            if isinstance(entry, Took):
                from_holes = min(entry.pages, state.holes)
                state.holes -= from_holes
                state.band += entry.pages - from_holes
                state.live += entry.pages
            elif isinstance(entry, Released) and entry.ticket is None:
                state.live -= entry.pages
                state.holes += entry.pages
            elif isinstance(entry, Flushed):
                touching, filled = next(choices)
                retreat = round(touching * state.holes) if entry.ticket in self._may_touch else 0
                state.band -= retreat
                state.holes -= retreat
                if entry.batch is not None:
                    moved[entry.batch] = round(filled * min(entry.batch.bound, state.holes))
                    state.holes -= moved[entry.batch]
                    pending += moved[entry.batch]
            elif isinstance(entry, Returned) and entry.batch in moved:
                back = moved.pop(entry.batch)
                state.holes += back
                pending -= back
            elif isinstance(entry, Packed) or (
                isinstance(entry, PackedPerhaps)
                and entry in self._asked
                and self._asked[entry].lacks(self._low_byte(state.band))
            ):
                state.band, state.holes, pending = state.live, 0, 0
                moved = dict.fromkeys(moved, 0)
            elif not isinstance(entry, PackedPerhaps) or entry not in self._asked:
                return None
        return state


class WitnessFloat(ArrivingFloat):
    """A float beside such ends, of which nothing is said."""


def count(name: str, until: int | None = None) -> tuple[int, int, int]:
    """Flushes, waits, and waits that were needed, of a trace with one stream."""
    WitnessEnd.waits = WitnessEnd.needed = 0
    WitnessEnd._asked.clear()
    WitnessEnd._may_touch.clear()
    model = "with witnesses"
    MODELS[model] = f"{__name__}:WitnessEnd,{__name__}:WitnessFloat"
    try:
        found = measure(corpus.TRACES / f"{name}{corpus.SUFFIX}", model, until)
    finally:
        del MODELS[model]
    return found.flushes, WitnessEnd.waits, WitnessEnd.needed


def main(names: Sequence[str]) -> int:
    if not are_known(names):
        return 2
    for name in names:
        flushes, waits, needed = count(name)
        print(f"{name}: {flushes:,} flushes, {waits} waits, of which at least {needed} were needed")
    return 0


if __name__ == "__main__":
    # By its own name, under which the replay imports it.
    from tests import waits_needed

    sys.exit(waits_needed.main(sys.argv[1:] or ["kimi_gb200"]))
