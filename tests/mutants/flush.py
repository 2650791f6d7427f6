"""Faults in a flush: which page goes where, how far the watermark retreats, what the lists say afterwards."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch

from allocator import MultiEndedAllocator
from allocator import end as end_module
from allocator.free_lists import HoleList
from allocator.plan import FlushPlan, plan_moves
from tests.mutants import scenes
from tests.mutants.registry import Mutant


class _Replanned(MultiEndedAllocator):
    """Base of mutants that plan otherwise."""

    def _flush(self, *, urgent: bool) -> int:
        with mock.patch.object(end_module, "plan_moves", self._planned):
            return super()._flush(urgent=urgent)

    def _planned(self, holes: list[int], watermark: int, **arguments: Any) -> FlushPlan:
        return plan_moves(holes, watermark, **arguments)


class _Unsorted(HoleList):
    def sorted(self) -> torch.Tensor:
        return self.pages


class LeavesHolesUnsorted(MultiEndedAllocator):
    """A flush takes the holes in the order in which they were freed."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.holes = _Unsorted(self.device)


class RetreatsTooFar(MultiEndedAllocator):
    """The watermark retreats by one page too many."""

    def _retreat(self, num_pages: int) -> None:
        super()._retreat(num_pages + 1 if num_pages else 0)


class RetreatsTooLittle(MultiEndedAllocator):
    """The watermark retreats by one page too few."""

    def _retreat(self, num_pages: int) -> None:
        super()._retreat(max(0, num_pages - 1))


class TakesDownForUp(_Replanned):
    """Plans for a pool that grows up whichever way this one grows."""

    def _planned(self, holes: list[int], watermark: int, **arguments: Any) -> FlushPlan:
        return plan_moves(holes, watermark, **{**arguments, "grows_up": True})


class TakesUpForDown(_Replanned):
    """Plans for a pool that grows down whichever way this one grows."""

    def _planned(self, holes: list[int], watermark: int, **arguments: Any) -> FlushPlan:
        return plan_moves(holes, watermark, **{**arguments, "grows_up": False})


class RetreatsTheWrongWay(MultiEndedAllocator):
    """The watermark of a pool that grows down retreats downwards."""

    def _retreat(self, num_pages: int) -> None:
        self.watermark_physical -= num_pages


class SkipsAHole(_Replanned):
    """The hole farthest from the watermark is not filled."""

    def _planned(self, holes: list[int], watermark: int, **arguments: Any) -> FlushPlan:
        kept = holes[1:] if arguments["grows_up"] else holes[:-1]
        return plan_moves(kept, watermark, **arguments)


class FillsNearHolesFirst(_Replanned):
    """Holes next to the watermark are filled before those far from it."""

    def _planned(self, holes: list[int], watermark: int, **arguments: Any) -> FlushPlan:
        live = [page for page in range(*self._band_pages()) if page not in holes]
        up = arguments["grows_up"]
        sources = live[::-1] if up else live
        targets = holes[::-1] if up else holes
        pairs = [(s, t) for s, t in zip(sources, targets, strict=False) if (t < s) == up]
        return FlushPlan([s for s, _ in pairs], [t for _, t in pairs])


class CarriesHolesBack(_Replanned):
    """Fills every hole, also those that lie before the page that would move: the two cursors pass each other."""

    def _planned(self, holes: list[int], watermark: int, **arguments: Any) -> FlushPlan:
        live = [page for page in range(*self._band_pages()) if page not in holes]
        sources = live[::-1] if arguments["grows_up"] else live
        targets = holes if arguments["grows_up"] else holes[::-1]
        count = min(len(sources), len(targets), arguments["max_moves"] or len(targets))
        return FlushPlan(sources[:count], targets[:count])


class MovesFromTheOrigin(_Replanned):
    """Live pages farthest from the watermark are moved first."""

    def _planned(self, holes: list[int], watermark: int, **arguments: Any) -> FlushPlan:
        live = [page for page in range(*self._band_pages()) if page not in holes]
        sources = live if arguments["grows_up"] else live[::-1]
        targets = holes[::-1] if arguments["grows_up"] else holes
        return FlushPlan(sources[:1], targets[:1])


class TakesHolesForLive(_Replanned):
    """The walk does not step over holes at the watermark's side."""

    def _planned(self, holes: list[int], watermark: int, **arguments: Any) -> FlushPlan:
        step = -1 if arguments["grows_up"] else 1
        targets = holes if arguments["grows_up"] else holes[::-1]
        sources = [watermark + step * (number + 1) for number in range(len(targets))]
        return FlushPlan(sources[:4], targets[:4])


class IgnoresItsBound(MultiEndedAllocator):
    """An opportunistic flush moves as many pages as it likes."""

    def _flush(self, *, urgent: bool) -> int:
        bound, self._lazy_max_moves_per_call = self._lazy_max_moves_per_call, 10**6
        try:
            return super()._flush(urgent=urgent)
        finally:
            self._lazy_max_moves_per_call = bound


class StopsShortOfItsBound(_Replanned):
    """A flush stops one page before its bound."""

    def _planned(self, holes: list[int], watermark: int, **arguments: Any) -> FlushPlan:
        bound = arguments["max_moves"]
        return plan_moves(holes, watermark, **{**arguments, "max_moves": bound and bound - 1})


class UrgentObeysTheBound(_Replanned):
    """An urgent flush stops at the bound of the others, and retreats as if it had packed."""

    def _planned(self, holes: list[int], watermark: int, **arguments: Any) -> FlushPlan:
        return plan_moves(holes, watermark, **{**arguments, "max_moves": self._lazy_max_moves_per_call})


class UrgentPacksInPart(MultiEndedAllocator):
    """An urgent flush is made like any other: up to the bound."""

    def flush_for_allocation(self) -> int:
        return self._flush(urgent=False)


class NeverPacks(MultiEndedAllocator):
    """A flush gives up before moving anything."""

    def _flush(self, *, urgent: bool) -> int:
        return 0


class SkipsIdleFlushes(MultiEndedAllocator):
    """A flush that nobody needs at once does nothing."""

    def flush_opportunistic(self) -> int:
        return 0


class CountsHolesAsMoves(MultiEndedAllocator):
    """A flush answers how many holes it met, not how many pages it moved."""

    def _flush(self, *, urgent: bool) -> int:
        holes = len(self.holes)
        super()._flush(urgent=urgent)
        return holes


class ForgetsVacatedPages(MultiEndedAllocator):
    """Pages that live pages were moved away from are remembered nowhere."""

    def _vacate(self, src_pages: torch.Tensor, src_list: list[int]) -> None:
        pass


class KeepsFilledHoles(MultiEndedAllocator):
    """Holes that were filled stay in the list."""

    def _keep_unfilled(self, filled: int) -> None:
        pass


class DropsTheWrongHoles(MultiEndedAllocator):
    """Of the holes, those are dropped that were not filled."""

    def _keep_unfilled(self, filled: int) -> None:
        pages = self.holes.pages
        self.holes.set_sorted(pages[:-filled] if self.grow_direction == "up" else pages[filled:])


class EagerLeavesHoles(MultiEndedAllocator):
    """An eager pool writes its holes down and closes none."""

    def _compact_now(self, freed_pages: torch.Tensor) -> None:
        self.holes.add(freed_pages)


class EagerForgetsToRetreat(MultiEndedAllocator):
    """An eager pool moves pages into its holes and keeps its watermark."""

    def _compact_now(self, freed_pages: torch.Tensor) -> None:
        mark = self.watermark_physical
        super()._compact_now(freed_pages)
        self.watermark_physical = mark


class EagerOnlyRetreats(MultiEndedAllocator):
    """An eager pool retreats over pages without moving what lies on them."""

    def _compact_now(self, freed_pages: torch.Tensor) -> None:
        self._retreat(freed_pages.shape[0])


MUTANTS = [
    Mutant(LeavesHolesUnsorted, "C1", 2, scenes.frees_out_of_order),
    Mutant(RetreatsTooFar, "C5", 2, scenes.gives_back_down, variant="down"),
    Mutant(RetreatsTooFar, "C5", 2, scenes.gives_back_up, variant="up"),
    Mutant(RetreatsTooFar, "C5", 2, scenes.packs_down, variant="urgent"),
    Mutant(RetreatsTooLittle, "C4", 2, scenes.gives_back_down, variant="down"),
    Mutant(RetreatsTooLittle, "C4", 2, scenes.gives_back_up, variant="up"),
    Mutant(RetreatsTooLittle, "C4", 2, scenes.packs_up, variant="urgent"),
    Mutant(TakesDownForUp, "C5", 2, scenes.packs_down),
    Mutant(TakesUpForDown, "C5", 2, scenes.packs_up),
    Mutant(RetreatsTheWrongWay, "C4", 2, scenes.packs_down),
    Mutant(SkipsAHole, "C5", 2, scenes.packs_down, variant="urgent"),
    Mutant(SkipsAHole, "C2", 2, scenes.scattered_holes, variant="opportunistic"),
    Mutant(FillsNearHolesFirst, "C12", 2, scenes.scattered_holes),
    Mutant(CarriesHolesBack, "C12", 2, scenes.cursors_meet),
    Mutant(MovesFromTheOrigin, "C2", 2, scenes.scattered_holes),
    Mutant(TakesHolesForLive, "C1", 2, scenes.frees_out_of_order),
    Mutant(IgnoresItsBound, "C12", 2, scenes.moves_many),
    Mutant(StopsShortOfItsBound, "C12", 2, scenes.moves_many),
    Mutant(UrgentObeysTheBound, "C5", 2, scenes.drains_many),
    Mutant(UrgentPacksInPart, "C12", 2, scenes.drains_many),
    Mutant(NeverPacks, "C12", 2, scenes.packs_down, row="F21"),
    Mutant(SkipsIdleFlushes, "C12", 2, scenes.moves_many),
    Mutant(CountsHolesAsMoves, "C4", 2, scenes.retreats_down),
    Mutant(ForgetsVacatedPages, "C4", 2, scenes.scattered_holes),
    Mutant(KeepsFilledHoles, "C4", 2, scenes.scattered_holes),
    Mutant(DropsTheWrongHoles, "C2", 2, scenes.scattered_holes),
    Mutant(EagerLeavesHoles, "C12", 1, scenes.packs_at_every_free),
    Mutant(EagerForgetsToRetreat, "C4", 1, scenes.packs_at_every_free),
    Mutant(EagerOnlyRetreats, "C5", 1, scenes.packs_at_every_free),
]
