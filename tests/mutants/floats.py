"""Faults of a float: its span, its holes, and the room it makes for others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from allocator import FloatMultiEndedAllocator
from allocator.band import Side
from allocator.forwards import RunningForward
from tests.mutants import scenes
from tests.mutants.registry import Mutant


class KeepsItsSpan(FloatMultiEndedAllocator):
    """After making room the span still reaches to where it did."""

    def make_room(self, *, side: Side, min_bytes: int) -> int:
        low, high = self.low_wm_page, self.high_wm_page
        opened = super().make_room(side=side, min_bytes=min_bytes)
        if side == "high":
            self.high_wm_page = high
        else:
            self.low_wm_page = low
        return opened


class MakesRoomOnTheOtherSide(FloatMultiEndedAllocator):
    """Opens the low side when asked for the high one, and the other way round."""

    def make_room(self, *, side: Side, min_bytes: int) -> int:
        super().make_room(side=self._other(side), min_bytes=min_bytes)
        return self._gap_bytes(side)


class AnswersForTheOtherSide(FloatMultiEndedAllocator):
    """Answers what is open on the side it was not asked for."""

    def make_room(self, *, side: Side, min_bytes: int) -> int:
        super().make_room(side=side, min_bytes=min_bytes)
        return self._gap_bytes(self._other(side))


class PromisesWhatWasAskedFor(FloatMultiEndedAllocator):
    """Answers that there is as much room as was asked for, whatever there is."""

    def make_room(self, *, side: Side, min_bytes: int) -> int:
        return max(min_bytes, super().make_room(side=side, min_bytes=min_bytes))


class NeverMoves(FloatMultiEndedAllocator):
    """Answers what is open, and moves nothing."""

    def make_room(self, *, side: Side, min_bytes: int) -> int:
        return self._gap_bytes(side)


class MovesAPageTooFew(FloatMultiEndedAllocator):
    """Opens one page less than it was asked for."""

    def make_room(self, *, side: Side, min_bytes: int) -> int:
        return super().make_room(side=side, min_bytes=max(0, min_bytes - self.entry_bytes_per_page))


class IgnoresShutGate(FloatMultiEndedAllocator):
    """Moves over for a neighbour while the gate is shut."""

    def moves_blocked(self) -> bool:
        return False


class _NotOrdered(RunningForward):
    def settle(self) -> None:
        pass


class MovesWhatIsWritten(FloatMultiEndedAllocator):
    """Makes room without being ordered behind the running forward."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._forward = _NotOrdered()

    def set_inflight_forward(self, forward_done: Any, out_cache_loc_virtual: torch.Tensor | None) -> None:
        """A float keeps no write set: it waits for every forward before it moves."""


class ForgetsFreedPages(FloatMultiEndedAllocator):
    """The last page of a free is no hole."""

    def _release_physical(self, physical_pages: torch.Tensor) -> None:
        super()._release_physical(physical_pages[:-1])


class KeepsUsedHoles(FloatMultiEndedAllocator):
    """A hole that is handed out stays a hole."""

    def take_physical_pages(self, num_pages: int) -> torch.Tensor | None:
        holes = self.holes.pages
        taken = super().take_physical_pages(num_pages)
        self.holes.set_unsorted(holes)
        return taken


class ParksTooSoon(FloatMultiEndedAllocator):
    """A float with few pages left is taken for empty."""

    def _park_if_empty(self) -> bool:
        if self._live_pages() > 3:
            return False
        self.holes.clear()
        self._reset_watermarks()
        return True


class GivesBackALivePage(FloatMultiEndedAllocator):
    """The span shrinks by one page more than there are holes at its border."""

    def _give_back_borders(self) -> int:
        given_back = super()._give_back_borders()
        if given_back:
            self.high_wm_page -= 1
        return given_back


class GivesNothingBack(FloatMultiEndedAllocator):
    """Holes at the borders stay in the span."""

    def _give_back_borders(self) -> int:
        self._holes_dirty = False
        return 0


class GivesBackOneSide(FloatMultiEndedAllocator):
    """Holes at the low border are given back, those at the high one not."""

    def _give_back_borders(self) -> int:
        high, holes = self.high_wm_page, self.holes.pages
        super()._give_back_borders()
        if self.high_wm_page != high:
            regained = [page for page in holes.tolist() if page >= self.high_wm_page]
            self.holes.set_sorted(torch.cat([self.holes.pages, torch.tensor(regained)]))
            self.high_wm_page = high
        return 0


class PacksToTheFirstHole(FloatMultiEndedAllocator):
    """Packing closes the first hole only."""

    def compact_holes(self, *, retreat_side: Side) -> int:
        if len(self.holes) < 2:
            return super().compact_holes(retreat_side=retreat_side)
        kept, first = self.holes.pages[1:], self.holes.pages[:1]
        self.holes.set_sorted(first)
        live = [page for page in range(self.low_wm_page, int(kept[0])) if page != int(first[0])]
        self._move(live[:1], first.tolist())
        self.low_wm_page = live[0] + 1
        self.holes.set_sorted(kept)
        return 1


class NeverPacksHoles(FloatMultiEndedAllocator):
    """Packing does nothing."""

    def compact_holes(self, *, retreat_side: Side) -> int:
        return 0


class ShiftsInOneBatch(FloatMultiEndedAllocator):
    """A shift is made as one batch, though its places are also sources: the table loses the pages in between."""

    @staticmethod
    def _shift_in_parts(live: list[int], first: int) -> Iterator[tuple[int, int]]:
        parts = sorted(FloatMultiEndedAllocator._shift_in_parts(live, first))
        if parts:
            yield parts[0][0], parts[-1][1]


class ShiftsFromTheWrongEnd(FloatMultiEndedAllocator):
    """A shift starts with the page that moves last: it lands on one that has not moved yet."""

    @staticmethod
    def _shift_in_parts(live: list[int], first: int) -> Iterator[tuple[int, int]]:
        parts = list(FloatMultiEndedAllocator._shift_in_parts(live, first))
        rows = [(row, row + 1) for begin, end in sorted(parts) for row in range(begin, end)]
        goes_down = bool(parts) and live[parts[0][0]] > first + parts[0][0]
        yield from reversed(rows) if goes_down else rows


class AddsUpItsGaps(FloatMultiEndedAllocator):
    """Counts the room on both sides, though a request grows one side only."""

    def _available_in(self, gap_low: int, gap_high: int) -> int:
        return (gap_low + gap_high + self._hole_pages()) * self.page_size


class StandsInTheWay(FloatMultiEndedAllocator):
    """An empty float is not transparent: its neighbours end where it is parked."""

    def _is_frontier_transparent(self) -> bool:
        return False


class GrowsIntoItsNeighbour(FloatMultiEndedAllocator):
    """Grows by a page more than lies between it and the next band."""

    def _extend_span(self, num_pages: int) -> int | None:
        first = super()._extend_span(num_pages)
        if first is None and super()._extend_span(num_pages - 1) is not None:
            self.high_wm_page += 1
            return self.high_wm_page - num_pages
        return first

    def _make_sure_of(self, num_pages: int) -> bool:
        return super()._make_sure_of(num_pages - 1) if num_pages == 1 else super()._make_sure_of(num_pages)


class StartsAtABorder(FloatMultiEndedAllocator):
    """From empty, the span starts at the low border of the region: correct in every way, but not where the engine puts it."""

    def _extend_span(self, num_pages: int) -> int | None:
        low, high = self._region_bounds_pages()
        if not self._is_frontier_transparent() or num_pages > high - low:
            return super()._extend_span(num_pages)
        self.low_wm_page, self.high_wm_page = low, low + num_pages
        return low


class TakesHolesFromOneEnd(FloatMultiEndedAllocator):
    """Requests always take the lowest holes: correct in every way, but not where the engine puts them."""

    def take_physical_pages(self, num_pages: int) -> torch.Tensor | None:
        self._next_hole_end = "low"
        return super().take_physical_pages(num_pages)


MUTANTS = [
    Mutant(KeepsItsSpan, "C4", 3, scenes.float_makes_room),
    Mutant(MakesRoomOnTheOtherSide, "C12", 3, scenes.float_makes_room),
    Mutant(AnswersForTheOtherSide, "C10", 3, scenes.float_makes_room),
    Mutant(PromisesWhatWasAskedFor, "C10", 2, scenes.float_has_no_room),
    Mutant(NeverMoves, "C12", 3, scenes.float_makes_room, variant="asked"),
    Mutant(NeverMoves, "C12", 1, scenes.float_gives_way, variant="in an alloc", row="F9"),
    Mutant(MovesAPageTooFew, "C12", 3, scenes.float_makes_room),
    Mutant(IgnoresShutGate, "C9", 1, scenes.float_behind_a_gate, row="F2"),
    Mutant(MovesWhatIsWritten, "C7", 3, scenes.float_is_written),
    Mutant(ForgetsFreedPages, "C4", 1, scenes.float_empties),
    Mutant(KeepsUsedHoles, "C4", 2, scenes.float_reuses),
    Mutant(ParksTooSoon, "C5", 2, scenes.float_empties),
    Mutant(GivesBackALivePage, "C5", 2, scenes.float_gives_back),
    Mutant(GivesNothingBack, "C12", 2, scenes.float_gives_back),
    Mutant(GivesBackOneSide, "C12", 2, scenes.float_gives_back),
    Mutant(PacksToTheFirstHole, "C12", 2, scenes.float_packs),
    Mutant(NeverPacksHoles, "C12", 2, scenes.float_packs),
    Mutant(ShiftsInOneBatch, "C2", 2, scenes.float_packs),
    Mutant(ShiftsFromTheWrongEnd, "C2", 2, scenes.float_packs),
    Mutant(AddsUpItsGaps, "C10", 0, scenes.float_reuses),
    Mutant(StandsInTheWay, "C10", 4, scenes.float_empties),
    Mutant(GrowsIntoItsNeighbour, "C5", 4, scenes.float_grows),
    Mutant(StartsAtABorder, "C15", 0, scenes.float_places),
    Mutant(TakesHolesFromOneEnd, "C15", 3, scenes.float_places),
]
