"""Faults in the two tables, and in what readers see of them."""

from __future__ import annotations

import torch

from allocator import MultiEndedAllocator
from tests.mutants import scenes
from tests.mutants.registry import Mutant


class StaleInverse(MultiEndedAllocator):
    """A move forgets to write the inverse entry at the new place."""

    def _move(self, src_list: list[int], dst_list: list[int]) -> torch.Tensor:
        src = super()._move(src_list, dst_list)
        self.physical_to_virtual.index_fill_(0, torch.tensor(dst_list), -1)
        return src


class KeepsTheOldInverse(MultiEndedAllocator):
    """A move leaves the inverse entry at the old place."""

    def _move(self, src_list: list[int], dst_list: list[int]) -> torch.Tensor:
        src = super()._move(src_list, dst_list)
        self.physical_to_virtual.index_copy_(0, src, self.physical_to_virtual[torch.tensor(dst_list)])
        return src


class KeepsTheOldPlace(MultiEndedAllocator):
    """A move updates the inverse table and not the table."""

    def _move(self, src_list: list[int], dst_list: list[int]) -> torch.Tensor:
        src = super()._move(src_list, dst_list)
        self.virtual_to_physical.index_copy_(0, self.physical_to_virtual[torch.tensor(dst_list)], src)
        return src


class UpdatesBeforeLookingUp(MultiEndedAllocator):
    """The inverse entries of the sources are cleared before they are read."""

    def _move(self, src_list: list[int], dst_list: list[int]) -> torch.Tensor:
        self.physical_to_virtual.index_fill_(0, torch.tensor(src_list), -1)
        return super()._move(src_list, dst_list)


class LooksUpTheWrongRow(MultiEndedAllocator):
    """The gather of a batch reads the rows in another order than the batch."""

    def _move(self, src_list: list[int], dst_list: list[int]) -> torch.Tensor:
        lookup = self._lookup
        self._lookup = lambda table, listed, pages, pool: lookup(table, listed, pages, pool).roll(1)
        try:
            return super()._move(src_list, dst_list)
        finally:
            self._lookup = lookup


class TranslatesByAnOldTable(MultiEndedAllocator):
    """Translates by a copy of the table that every alloc renews, and no flush."""

    _copy: torch.Tensor | None = None

    def _take_and_bind(self, virtual_pages: torch.Tensor, num_pages: int) -> torch.Tensor | None:
        taken = super()._take_and_bind(virtual_pages, num_pages)
        self._copy = self.virtual_to_physical.clone()
        return taken

    def translate_kv_loc(self, virt_tokens: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        current = self._tables.virtual_to_physical
        self._tables.virtual_to_physical = current if self._copy is None else self._copy
        try:
            return super().translate_kv_loc(virt_tokens, out=out)
        finally:
            self._tables.virtual_to_physical = current


class TranslatesToTheNextPage(MultiEndedAllocator):
    """Tables and bytes are right; the translation that readers use is not."""

    def translate_kv_loc(self, virt_tokens: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        shifted = super().translate_kv_loc(virt_tokens, out=out) + self.page_size
        return shifted.clamp_(max=self.max_slots - 1)


class TakesVirtualForAPlace(MultiEndedAllocator):
    """Exports virtual ids as if they were places, which they are until something moves."""

    def translate_kv_loc(self, virt_tokens: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        placed = super().translate_kv_loc(virt_tokens)
        wrong = torch.where(placed > 0, virt_tokens, placed)
        return wrong if out is None else out.copy_(wrong)


class DropsTheOffset(MultiEndedAllocator):
    """Every token translates to the first one of its page."""

    def translate_kv_loc(self, virt_tokens: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        first = super().translate_kv_loc(virt_tokens // self.page_size * self.page_size)
        return first if out is None else out.copy_(first)


class LeavesOutUnwritten(MultiEndedAllocator):
    """The translation is answered, and not written where ``out=`` says."""

    def translate_kv_loc(self, virt_tokens: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        return super().translate_kv_loc(virt_tokens)


class TranslatesNothingToMinusOne(MultiEndedAllocator):
    """Ids that name nothing translate to -1, where a kernel would write before the buffer."""

    def translate_kv_loc(self, virt_tokens: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        placed = super().translate_kv_loc(virt_tokens)
        placed = torch.where(placed == 0, -1, placed)
        return placed if out is None else out.copy_(placed)


class OverwritesTheSentinel(MultiEndedAllocator):
    """A free writes to the row past the table."""

    def _free_pages(self, virtual_pages: torch.Tensor, *, may_repeat: bool) -> None:
        super()._free_pages(virtual_pages, may_repeat=may_repeat)
        self.virtual_to_physical[-1:].fill_(5)


class OverwritesTheInverseSentinel(MultiEndedAllocator):
    """A free writes to the row past the inverse table."""

    def _free_pages(self, virtual_pages: torch.Tensor, *, may_repeat: bool) -> None:
        super()._free_pages(virtual_pages, may_repeat=may_repeat)
        self.physical_to_virtual[-1:].fill_(5)


class UnmapsThePaddingPage(MultiEndedAllocator):
    """A free unmaps the padding page from its place."""

    def _free_pages(self, virtual_pages: torch.Tensor, *, may_repeat: bool) -> None:
        super()._free_pages(virtual_pages, may_repeat=may_repeat)
        self.physical_to_virtual[:1].fill_(-1)


class WritesABystandersRow(MultiEndedAllocator):
    """An alloc overwrites the row of a page that has nothing to do with it."""

    def _take_and_bind(self, virtual_pages: torch.Tensor, num_pages: int) -> torch.Tensor | None:
        taken = super()._take_and_bind(virtual_pages, num_pages)
        bystander = int(virtual_pages[0]) - 1
        if taken is not None and self.virtual_to_physical[bystander] > 0:
            self.virtual_to_physical[bystander] = taken[0]
        return taken


MUTANTS = [
    Mutant(StaleInverse, "C1", 2, scenes.packs_down),
    Mutant(KeepsTheOldInverse, "C1", 2, scenes.packs_down),
    Mutant(KeepsTheOldPlace, "C1", 2, scenes.packs_down),
    Mutant(UpdatesBeforeLookingUp, "C1", 2, scenes.packs_down),
    Mutant(LooksUpTheWrongRow, "C1", 2, scenes.packs_down),
    Mutant(TranslatesByAnOldTable, "C1", 2, scenes.packs_down),
    Mutant(
        TranslatesToTheNextPage, "C14", 2, scenes.packs_down,
        options={"enabled": frozenset({"C14"}), "logprob_every": 1},
    ),
    Mutant(TakesVirtualForAPlace, "C1", 2, scenes.exports_after_a_move, row="F5"),
    Mutant(DropsTheOffset, "C1", 0, scenes.moves_a_page),
    Mutant(LeavesOutUnwritten, "C1", 0, scenes.allocates),
    Mutant(TranslatesNothingToMinusOne, "C1", 0, scenes.allocates),
    Mutant(OverwritesTheSentinel, "C1", 1, scenes.frees),
    Mutant(OverwritesTheInverseSentinel, "C1", 1, scenes.frees),
    Mutant(UnmapsThePaddingPage, "C1", 1, scenes.frees),
    Mutant(WritesABystandersRow, "C1", 2, scenes.allocates),
]  # fmt: skip
