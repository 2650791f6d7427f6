"""Faults in what a pool says it could hand out."""

from __future__ import annotations

from typing import Any

from allocator import MultiEndedAllocator
from allocator.band import Side
from tests.mutants import scenes
from tests.mutants.registry import Mutant


class RemembersCapacity(MultiEndedAllocator):
    """Capacity is computed once and kept."""

    _remembered: int | None = None

    def _certain_size(self) -> int:
        if self._remembered is None:
            self._remembered = super()._certain_size()
        return self._remembered


class MemoForgetsTheGate(MultiEndedAllocator):
    """Capacity is computed again when a band or a hole changes, and not when a gate turns."""

    _memo: tuple[Any, int] = ((), 0)

    def _certain_schedulable_size(self) -> int:
        state = tuple(
            (band._byte_low_frontier(), band._byte_high_frontier(), len(band.holes))
            for band in self._bands_of_buffer()
        )
        if self._memo[0] != state:
            self._memo = state, super()._certain_schedulable_size()
        return self._memo[1]


class CreditsBehindAGate(MultiEndedAllocator):
    """The neighbour's holes are credited while its gate is shut."""

    def _drains_on_urgent_flush(self) -> bool:
        return self.lazy_compaction


class CreditsPending(MultiEndedAllocator):
    """The neighbour's pages that wait for a forward are credited too."""

    def _drainable_hole_bytes(self, side: Side) -> int:
        neighbour = self._neighbour(side)
        waiting = 0 if neighbour is None else len(neighbour._pending) * neighbour.entry_bytes_per_page  # type: ignore[attr-defined]
        return super()._drainable_hole_bytes(side) + waiting


class CreditsInOwnPages(MultiEndedAllocator):
    """The neighbour's holes are counted as pages of this pool's size."""

    def _drainable_hole_bytes(self, side: Side) -> int:
        neighbour = self._neighbour(side)
        assert neighbour is not None
        return (
            super()._drainable_hole_bytes(side) // neighbour.entry_bytes_per_page * self.entry_bytes_per_page
        )


class CreditsNothing(MultiEndedAllocator):
    """What a flush of the neighbour would open is not counted."""

    def _certain_schedulable_size(self) -> int:
        return self._certain_size()


class ForgetsOwnHoles(MultiEndedAllocator):
    """A pool does not count its own holes as room."""

    def _available_tokens(self, extra_gap_bytes: int = 0) -> int:
        return super()._available_tokens(extra_gap_bytes) - len(self.holes) * self.page_size


class CountsHolesTwice(MultiEndedAllocator):
    """A pool counts its own holes twice."""

    def _available_tokens(self, extra_gap_bytes: int = 0) -> int:
        return super()._available_tokens(extra_gap_bytes) + len(self.holes) * self.page_size


class IgnoresTheIndexSpace(MultiEndedAllocator):
    """Bytes are counted, and not the pages that may be numbered."""

    def _index_room(self) -> int:
        return self.num_pages


class MeasuresToTheNeighboursFarEnd(MultiEndedAllocator):
    """The gap reaches to the end of the neighbour's band, and not to its border."""

    def _current_gap_bytes(self) -> int:
        neighbour = self._growth_side_neighbor()
        if neighbour is None:
            return super()._current_gap_bytes()
        return super()._current_gap_bytes() + neighbour._byte_high_frontier() - neighbour._byte_low_frontier()


class CountsWrong(MultiEndedAllocator):
    """Only what it reports of itself is wrong."""

    def allocated_count(self) -> int:
        return super().allocated_count() + self.page_size


class CountsHolesAsLive(MultiEndedAllocator):
    """Pages are counted as live as long as they are inside the band."""

    def allocated_count(self) -> int:
        return self._allocated_pages() * self.page_size


MUTANTS = [
    Mutant(RemembersCapacity, "C10", 0, scenes.capacity_changes),
    Mutant(MemoForgetsTheGate, "C10", 2, scenes.neighbour_has_holes, row="F3"),
    Mutant(CreditsBehindAGate, "C10", 2, scenes.neighbour_has_holes, row="F3"),
    Mutant(CreditsPending, "C10", 3, scenes.neighbour_waits),
    Mutant(CreditsInOwnPages, "C10", 1, scenes.neighbour_has_holes),
    Mutant(CreditsNothing, "C10", 1, scenes.neighbour_has_holes),
    Mutant(ForgetsOwnHoles, "C10", 1, scenes.neighbour_has_holes),
    Mutant(CountsHolesTwice, "C10", 1, scenes.neighbour_has_holes),
    Mutant(IgnoresTheIndexSpace, "C10", 0, scenes.fills_the_buffer),
    Mutant(MeasuresToTheNeighboursFarEnd, "C10", 0, scenes.needs_its_neighbours_holes),
    Mutant(CountsWrong, "C4", 0, scenes.allocates),
    Mutant(CountsHolesAsLive, "C4", 1, scenes.frees),
]
