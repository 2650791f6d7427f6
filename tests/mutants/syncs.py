"""Hidden synchronisations: right in every result, and slower with every page that moves."""

from __future__ import annotations

from typing import Any

import torch

from allocator import MultiEndedAllocator
from allocator.lookup import hybrid, per_row
from tests.mutants import scenes
from tests.mutants.registry import Mutant

#: What a flush of the ``batched`` strategy costs: the holes are read, the write set, sources and targets go to the device in one copy.
BUDGET = {"max_syncs": 3}


class ReadsEachPage(MultiEndedAllocator):
    """The lookup reads a row of the inverse table for every moved page."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._lookup = per_row


class ReadsSmallBatches(MultiEndedAllocator):
    """The lookup reads row by row where fewer than 16 pages move."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._lookup = hybrid


class ReadsEachHole(MultiEndedAllocator):
    """Holes are read one by one."""

    def _retreat_over_boundary_holes(self) -> list[int]:
        for page in self.holes.pages.unbind():
            int(page)
        return super()._retreat_over_boundary_holes()


class CopiesOneByOne(MultiEndedAllocator):
    """Sources and targets go to the device one by one."""

    def _move(self, src_list: list[int], dst_list: list[int]) -> torch.Tensor:
        for page in (*src_list, *dst_list):
            torch.tensor(page, device=self.device)
        return super()._move(src_list, dst_list)


class AssertsOnTheHost(MultiEndedAllocator):
    """Every moved page is asserted to have an owner where the host waits for the answer."""

    def _move(self, src_list: list[int], dst_list: list[int]) -> torch.Tensor:
        for page in src_list:
            assert bool(self.physical_to_virtual[page] >= 0)
        return super()._move(src_list, dst_list)


class WaitsForTheForward(MultiEndedAllocator):
    """The write set is read token by token."""

    def _read_write_set(self) -> set[int]:
        tokens = self._forward.unfinished_write_set()
        if tokens is None:
            return set()
        pages = self._tables.physical_of(tokens // self.page_size)
        return {int(page.item()) for page in pages.unbind()}


MUTANTS = [
    Mutant(ReadsEachPage, "C11", 2, scenes.drains_many, row="F4", options=BUDGET),
    Mutant(ReadsSmallBatches, "C11", 2, scenes.drains_many, row="F4", options=BUDGET),
    Mutant(ReadsEachHole, "C11", 2, scenes.drains_many, options=BUDGET),
    Mutant(CopiesOneByOne, "C11", 2, scenes.drains_many, options=BUDGET),
    Mutant(AssertsOnTheHost, "C11", 2, scenes.drains_many, options=BUDGET),
    Mutant(WaitsForTheForward, "C11", 3, scenes.writes_many, options=BUDGET),
]
