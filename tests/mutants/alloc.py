"""Faults in handing out: ids, places, growth of requests, and what a refused request leaves behind."""

from __future__ import annotations

from typing import Any

import torch

from allocator import MultiEndedAllocator
from tests.mutants import scenes
from tests.mutants.registry import Mutant


class LosesIdsWhenRefused(MultiEndedAllocator):
    """Ids are taken before it is known whether there is room, and a refusal does not give them back."""

    def alloc(self, need_size: int) -> torch.Tensor | None:
        tokens = super().alloc(need_size)
        if tokens is None:
            self._own_ids("alloc").drop(1)
        return tokens


class KeepsRoomWhenRefused(MultiEndedAllocator):
    """The watermark has moved before it is known whether there is room, and a refusal does not move it back."""

    def _make_sure_of(self, num_pages: int) -> bool:
        if super()._make_sure_of(num_pages):
            return True
        self.watermark_physical += 1 if self.grow_direction == "up" else -1
        return False


class TakesHolesWhenRefused(MultiEndedAllocator):
    """Holes are taken before it is known whether there is room, and a refusal does not give them back."""

    def _make_sure_of(self, num_pages: int) -> bool:
        if super()._make_sure_of(num_pages):
            return True
        self.holes.clear()
        return False


class NeverAsksItsNeighbour(MultiEndedAllocator):
    """Promises what a flush of the neighbour would give, and does not flush it."""

    def _make_sure_of(self, num_pages: int) -> bool:
        return num_pages * self.page_size <= self.available_size()


class FlushesItself(MultiEndedAllocator):
    """A pool short of room flushes itself, which trades a hole for a page of gap, and not its neighbour."""

    def _make_sure_of(self, num_pages: int) -> bool:
        self.flush_for_allocation()
        return num_pages * self.page_size <= self.available_size()


class AsksTheOtherSide(MultiEndedAllocator):
    """A pool short of room flushes the neighbour on the side to which it does not grow."""

    def _growth_side_neighbor(self) -> Any:
        return self._neighbour("low" if self.grow_direction == "up" else "high")


class OverlapsItsNeighbour(MultiEndedAllocator):
    """Knows its capacity, and grows beyond it into the next band."""

    def _make_sure_of(self, num_pages: int) -> bool:
        return True

    def _extend_watermark(self, num_pages: int) -> bool:
        self.watermark_physical += num_pages if self.grow_direction == "up" else -num_pages
        return True


class OverlapsByAPage(MultiEndedAllocator):
    """The last page before the next band may be one that reaches into it: off by one at the border."""

    def _make_sure_of(self, num_pages: int) -> bool:
        return super()._make_sure_of(num_pages - 1)

    def _extend_watermark(self, num_pages: int) -> bool:
        if super()._extend_watermark(num_pages):
            return True
        if not super()._extend_watermark(num_pages - 1):
            return False
        self.watermark_physical += 1 if self.grow_direction == "up" else -1
        return True


class TakesTheSink(MultiEndedAllocator):
    """A pool that grows up begins one page too low, where padding is written."""

    def _reset_watermarks(self) -> None:
        super()._reset_watermarks()
        if self.grow_direction == "up":
            self.watermark_physical -= 1


class HandsOutIdsTwice(MultiEndedAllocator):
    """Ids stay in the free list when they are handed out."""

    def alloc(self, need_size: int) -> torch.Tensor | None:
        ids = self._own_ids("alloc")
        before = ids._head
        tokens = super().alloc(need_size)
        ids._head = before
        return tokens


class ServesOneMore(MultiEndedAllocator):
    """An alloc answers one token more than was asked for."""

    def alloc(self, need_size: int) -> torch.Tensor | None:
        tokens = super().alloc(need_size)
        return None if tokens is None else torch.cat([tokens, tokens[-1:] + 1])


class ServesOneLess(MultiEndedAllocator):
    """An alloc answers one token less than was asked for."""

    def alloc(self, need_size: int) -> torch.Tensor | None:
        tokens = super().alloc(need_size)
        return None if tokens is None else tokens[:-1]


class DecodesPastTheToken(MultiEndedAllocator):
    """A decode answers the token after the next one."""

    def alloc_decode(
        self, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor, last_loc: torch.Tensor
    ) -> torch.Tensor | None:
        tokens = super().alloc_decode(seq_lens, seq_lens_cpu, last_loc)
        return None if tokens is None else tokens + 1


class DecodesIntoANewPage(MultiEndedAllocator):
    """A decode takes a page though the last one has room."""

    def alloc_decode(
        self, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor, last_loc: torch.Tensor
    ) -> torch.Tensor | None:
        first_of_page = torch.ones_like(seq_lens_cpu)
        return super().alloc_decode(first_of_page, first_of_page, last_loc)


class LeavesTheTailPage(MultiEndedAllocator):
    """A request that grows starts in a new page though its last one has room."""

    def alloc_extend(
        self,
        prefix_lens: torch.Tensor,
        prefix_lens_cpu: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        last_loc: torch.Tensor,
        extend_num_tokens: int,
        num_new_pages: int | None = None,
    ) -> torch.Tensor | None:
        nothing, grown = torch.zeros_like(prefix_lens), seq_lens - prefix_lens
        return super().alloc_extend(nothing, nothing, grown, grown, last_loc, extend_num_tokens)


class DoesNotZero(MultiEndedAllocator):
    """Pages are handed out as their last owner left them."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._zero_pages = None


class ZeroesByVirtualId(MultiEndedAllocator):
    """Virtual pages are zeroed as if they were places."""

    def _take_and_bind(self, virtual_pages: torch.Tensor, num_pages: int) -> torch.Tensor | None:
        taken = super()._take_and_bind(virtual_pages, num_pages)
        if taken is not None and self._zero_pages is not None:
            self._zero_pages(virtual_pages)
        return taken


class KeepsTakenHoles(MultiEndedAllocator):
    """A hole that is handed out stays a hole."""

    def take_physical_pages(self, num_pages: int) -> torch.Tensor | None:
        holes = self.holes.pages
        taken = super().take_physical_pages(num_pages)
        if taken is not None:
            self.holes.set_unsorted(holes)
        return taken


class DoesNotCountWhatItTakes(MultiEndedAllocator):
    """Pages taken out of holes are not counted as live."""

    def take_physical_pages(self, num_pages: int) -> torch.Tensor | None:
        holes, live = len(self.holes), self._live_pages_lazy
        taken = super().take_physical_pages(num_pages)
        if taken is not None and holes:
            self._live_pages_lazy = live
        return taken


class TakesFreshPagesFirst(MultiEndedAllocator):
    """Pages beyond the watermark are handed out before holes: correct in every way, but not where the engine puts them."""

    def take_physical_pages(self, num_pages: int) -> torch.Tensor | None:
        holes, self.holes = self.holes, type(self.holes)(self.device)
        try:
            return super().take_physical_pages(num_pages)
        finally:
            self.holes = holes


class TakesHighestHole(MultiEndedAllocator):
    """Pages are handed out in reverse order: correct in every way, but not where the engine puts them."""

    def take_physical_pages(self, num_pages: int) -> torch.Tensor | None:
        taken = super().take_physical_pages(num_pages)
        return None if taken is None else taken.flip(0)


class BindsANeighboursPage(MultiEndedAllocator):
    """The inverse table gets the virtual pages of a batch in another order than the table."""

    def _take_and_bind(self, virtual_pages: torch.Tensor, num_pages: int) -> torch.Tensor | None:
        taken = super()._take_and_bind(virtual_pages, num_pages)
        if taken is not None:
            self.physical_to_virtual.index_copy_(0, taken, virtual_pages.roll(1))
        return taken


class AnswersAView(MultiEndedAllocator):
    """An alloc answers memory of its own, which a later call overwrites."""

    _answer: torch.Tensor | None = None

    def alloc(self, need_size: int) -> torch.Tensor | None:
        tokens = super().alloc(need_size)
        if tokens is None:
            return None
        if self._answer is None:
            self._answer = torch.empty(self.max_slots, dtype=torch.int64, device=self.device)
        answer = self._answer[: tokens.shape[0]]
        answer.copy_(tokens)
        return answer


MUTANTS = [
    Mutant(LosesIdsWhenRefused, "C3", 2, scenes.refuses_too_much),
    Mutant(KeepsRoomWhenRefused, "C4", 2, scenes.refuses_too_much),
    Mutant(TakesHolesWhenRefused, "C4", 4, scenes.refuses_with_holes),
    Mutant(NeverAsksItsNeighbour, "C10", 3, scenes.needs_its_neighbours_holes, row="F9"),
    Mutant(FlushesItself, "C10", 3, scenes.needs_its_neighbours_holes),
    Mutant(AsksTheOtherSide, "C10", 3, scenes.needs_its_neighbours_holes),
    Mutant(OverlapsItsNeighbour, "C5", 2, scenes.grows_into_the_neighbour),
    Mutant(OverlapsByAPage, "C5", 2, scenes.grows_by_a_page, variant="down"),
    Mutant(OverlapsByAPage, "C5", 2, scenes.up_meets_down, variant="up"),
    Mutant(TakesTheSink, "C5", 0, scenes.allocates),
    Mutant(HandsOutIdsTwice, "C3", 0, scenes.allocates),
    Mutant(ServesOneMore, "C13", 0, scenes.allocates),
    Mutant(ServesOneLess, "C13", 0, scenes.allocates),
    Mutant(DecodesPastTheToken, "C13", 1, scenes.decodes),
    Mutant(DecodesIntoANewPage, "C13", 1, scenes.decodes),
    Mutant(LeavesTheTailPage, "C13", 2, scenes.decodes),
    Mutant(DoesNotZero, "C6", 2, scenes.reuses_a_page, row="F11"),
    Mutant(ZeroesByVirtualId, "C6", 1, scenes.allocates_much),
    Mutant(KeepsTakenHoles, "C4", 2, scenes.takes_holes),
    Mutant(DoesNotCountWhatItTakes, "C4", 2, scenes.takes_holes),
    Mutant(TakesFreshPagesFirst, "C15", 2, scenes.allocates_into_holes),
    Mutant(TakesHighestHole, "C15", 0, scenes.allocates_into_holes),
    Mutant(BindsANeighboursPage, "C1", 0, scenes.binds_shared_ids),
    Mutant(AnswersAView, "C13", 2, scenes.allocates, row="F22"),
]
