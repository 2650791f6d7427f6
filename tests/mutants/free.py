"""Faults in giving back: ids, holes, groups, segments, and starting anew."""

from __future__ import annotations

import torch

from allocator import MultiEndedAllocator
from tests.mutants import scenes
from tests.mutants.registry import Mutant


class FreesIdTwice(MultiEndedAllocator):
    """A freed id enters the free list twice."""

    def _free_pages(self, virtual_pages: torch.Tensor, *, may_repeat: bool) -> None:
        super()._free_pages(virtual_pages, may_repeat=may_repeat)
        self._own_ids("free").append(virtual_pages[:1])


class LosesAnId(MultiEndedAllocator):
    """A freed id enters no list."""

    def _free_pages(self, virtual_pages: torch.Tensor, *, may_repeat: bool) -> None:
        super()._free_pages(virtual_pages, may_repeat=may_repeat)
        ids = self._own_ids("free")
        ids._tail -= 1


class FreesPageZero(MultiEndedAllocator):
    """The padding page enters the free list with what is freed."""

    def _free_pages(self, virtual_pages: torch.Tensor, *, may_repeat: bool) -> None:
        super()._free_pages(virtual_pages, may_repeat=may_repeat)
        self._own_ids("free").append(torch.zeros_like(virtual_pages[:1]))


class SwapsAnIdForPageZero(MultiEndedAllocator):
    """The padding page enters the free list in place of a page that was freed: the list is as long as it should be."""

    def _free_pages(self, virtual_pages: torch.Tensor, *, may_repeat: bool) -> None:
        super()._free_pages(virtual_pages, may_repeat=may_repeat)
        ids = self._own_ids("free")
        ids._buffer[ids._tail - 1] = 0


class FreesMinusOne(MultiEndedAllocator):
    """-1 enters the free list with what is freed."""

    def _free_pages(self, virtual_pages: torch.Tensor, *, may_repeat: bool) -> None:
        super()._free_pages(virtual_pages, may_repeat=may_repeat)
        self._own_ids("free").append(torch.full_like(virtual_pages[:1], -1))


class IdsToTheFront(MultiEndedAllocator):
    """The id freed last is handed out first."""

    def _free_pages(self, virtual_pages: torch.Tensor, *, may_repeat: bool) -> None:
        super()._free_pages(virtual_pages, may_repeat=may_repeat)
        ids = self._own_ids("free")
        ids.replace(ids.tensor().roll(virtual_pages.shape[0]))


class LosesAHole(MultiEndedAllocator):
    """The last page of a free is forgotten."""

    def _release_physical(self, physical_pages: torch.Tensor) -> None:
        super()._release_physical(physical_pages[:-1] if physical_pages.shape[0] > 1 else physical_pages)


class HoleTwice(MultiEndedAllocator):
    """A freed page is a hole twice."""

    def _release_physical(self, physical_pages: torch.Tensor) -> None:
        super()._release_physical(physical_pages)
        self.holes.add(physical_pages[:1])


class SwapsAHole(MultiEndedAllocator):
    """One hole of a free is written down as the page beside it, which lives."""

    def _release_physical(self, physical_pages: torch.Tensor) -> None:
        super()._release_physical(torch.cat([physical_pages[1:], physical_pages[-1:] + 1]))


class CountsLiveWrong(MultiEndedAllocator):
    """A free does not lower the count of live pages."""

    def _release_physical(self, physical_pages: torch.Tensor) -> None:
        super()._release_physical(physical_pages)
        self._live_pages_lazy += physical_pages.shape[0]


class KeepsFreedMapping(MultiEndedAllocator):
    """A freed page stays in the table."""

    def _free_pages(self, virtual_pages: torch.Tensor, *, may_repeat: bool) -> None:
        physical_pages = self._tables.physical_of(virtual_pages)
        super()._free_pages(virtual_pages, may_repeat=may_repeat)
        self.virtual_to_physical.index_copy_(0, virtual_pages, physical_pages)


class KeepsFreedInverse(MultiEndedAllocator):
    """The place of a freed page still names it."""

    def _free_pages(self, virtual_pages: torch.Tensor, *, may_repeat: bool) -> None:
        physical_pages = self._tables.physical_of(virtual_pages)
        super()._free_pages(virtual_pages, may_repeat=may_repeat)
        self.physical_to_virtual.index_copy_(0, physical_pages, virtual_pages)


class ReleasesEachToken(MultiEndedAllocator):
    """Every token of a page releases the page again."""

    def _pages_of(self, token_ids: torch.Tensor) -> tuple[torch.Tensor, bool]:
        return torch.div(token_ids.to(torch.int64), self.page_size, rounding_mode="floor"), False


class FreesTheNeighbourPage(MultiEndedAllocator):
    """Pages of tokens are rounded up: the last tokens of a page free the next one."""

    def _pages_of(self, token_ids: torch.Tensor) -> tuple[torch.Tensor, bool]:
        return super()._pages_of(token_ids + 1)


class DropsTheLastPage(MultiEndedAllocator):
    """A segment's last page is freed only if the segment fills it."""

    def free_segment(self, free_index: torch.Tensor | None, *, start_pos: int) -> None:
        if free_index is not None:
            free_index = free_index[: free_index.shape[0] // self.page_size * self.page_size]
        super().free_segment(free_index, start_pos=start_pos)


class StartsAPageLate(MultiEndedAllocator):
    """A segment is taken to begin one page after its start."""

    def free_segment(self, free_index: torch.Tensor | None, *, start_pos: int) -> None:
        super().free_segment(
            None if free_index is None else free_index[self.page_size :], start_pos=start_pos
        )


class GroupForgetsSegments(MultiEndedAllocator):
    """Segments that were queued in a group are not freed at its end."""

    def _close_group(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        return super()._close_group()[0], []


class GroupFreesAtOnce(MultiEndedAllocator):
    """A free inside a group is carried out at once."""

    def free(self, free_index: torch.Tensor | None, *, _pages: torch.Tensor | None = None) -> None:
        group, self.free_group = self.free_group, None
        try:
            super().free(free_index, _pages=_pages)
        finally:
            self.free_group = group


class GroupIsFreedAgain(MultiEndedAllocator):
    """What a group queued is freed again at the end of the next group."""

    _before: list[torch.Tensor] | None = None

    def _close_group(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        tokens, representatives = super()._close_group()
        queued, self._before = [*(self._before or []), *tokens], tokens
        return queued, representatives


class GroupKeepsTheCallersTensor(MultiEndedAllocator):
    """A group queues the caller's tensor, and not what was in it."""

    def free(self, free_index: torch.Tensor | None, *, _pages: torch.Tensor | None = None) -> None:
        if self.free_group is not None and free_index is not None:
            self.free_group.append(free_index)
        else:
            super().free(free_index, _pages=_pages)


class QueuesAPageTwice(MultiEndedAllocator):
    """A page that waits in a group is queued once more, and nobody looks for repeats."""

    def _close_group(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        tokens, representatives = super()._close_group()
        return tokens, [*representatives, *representatives]

    def _require_live(self, virtual_pages: torch.Tensor, *, may_repeat: bool) -> torch.Tensor:
        return super()._require_live(virtual_pages, may_repeat=False)


class ClearKeepsHoles(MultiEndedAllocator):
    """Holes outlive `clear`."""

    def clear(self) -> None:
        holes = self.holes.pages
        super().clear()
        self.holes.add(holes)


class ClearKeepsPending(MultiEndedAllocator):
    """Pages that wait outlive `clear`."""

    def clear(self) -> None:
        waiting = dict(self._pending._waiting)
        super().clear()
        self._pending._waiting = waiting


class ClearKeepsIds(MultiEndedAllocator):
    """After `clear` only those ids are free that were free before."""

    def clear(self) -> None:
        ids = getattr(self, "_ids", None)
        super().clear()
        self._ids = ids or self._ids


class ClearKeepsTables(MultiEndedAllocator):
    """Pages that were live stay mapped after `clear`."""

    def clear(self) -> None:
        table = self.virtual_to_physical.clone()
        super().clear()
        self.virtual_to_physical.copy_(table)


MUTANTS = [
    Mutant(FreesIdTwice, "C3", 1, scenes.frees, row="F19"),
    Mutant(LosesAnId, "C3", 1, scenes.frees),
    Mutant(FreesPageZero, "C3", 1, scenes.frees, row="F14"),
    Mutant(SwapsAnIdForPageZero, "C3", 1, scenes.frees, row="F14"),
    Mutant(FreesMinusOne, "C3", 1, scenes.frees, row="F16"),
    Mutant(IdsToTheFront, "C15", 2, scenes.allocates_again),
    Mutant(LosesAHole, "C4", 1, scenes.frees),
    Mutant(HoleTwice, "C4", 1, scenes.frees),
    Mutant(SwapsAHole, "C2", 1, scenes.frees),
    Mutant(CountsLiveWrong, "C4", 1, scenes.frees),
    Mutant(KeepsFreedMapping, "C1", 1, scenes.frees),
    Mutant(KeepsFreedInverse, "C1", 1, scenes.frees),
    Mutant(ReleasesEachToken, "C3", 1, scenes.frees_some_tokens_of_a_page, row="F15"),
    Mutant(FreesTheNeighbourPage, "C3", 1, scenes.frees_some_tokens_of_a_page),
    Mutant(DropsTheLastPage, "C1", 1, scenes.frees_a_segment),
    Mutant(StartsAPageLate, "C1", 1, scenes.frees_a_segment),
    Mutant(GroupForgetsSegments, "C1", 4, scenes.frees_in_a_group),
    Mutant(GroupFreesAtOnce, "C1", 2, scenes.frees_in_a_group),
    Mutant(GroupIsFreedAgain, "C13", 8, scenes.frees_in_a_group, row="F13"),
    Mutant(GroupKeepsTheCallersTensor, "C13", 4, scenes.frees_in_a_group),
    Mutant(QueuesAPageTwice, "C3", 4, scenes.frees_in_a_group, row="F20"),
    Mutant(ClearKeepsHoles, "C4", 5, scenes.clears),
    Mutant(ClearKeepsPending, "C2", 5, scenes.clears),
    Mutant(ClearKeepsIds, "C3", 5, scenes.clears),
    Mutant(ClearKeepsTables, "C1", 5, scenes.clears),
]
