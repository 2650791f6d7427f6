"""Free without asking the device which pages were named: the release half of the ``device`` strategy."""

from __future__ import annotations

from functools import cached_property

import torch

from allocator.read_back import ReadBack, Ticket
from allocator.release import ReleasingBand


class DeviceReleasingBand(ReleasingBand):
    """What END pools and floats share of the ``device`` strategy."""

    #: How numbers come back from the device.
    read_back_class: type[ReadBack] = ReadBack
    #: How often the host waited for numbers that could not be done without.
    blocking_reads = 0

    @cached_property
    def _read_back(self) -> ReadBack:
        return self.read_back_class(self.device)

    @cached_property
    def _numbers(self) -> torch.Tensor:
        """int64 ``[num_pages + 1]``: 0, 1, 2, ...; parts of it are what ``arange`` would make anew."""
        return torch.arange(self._tables.physical_to_virtual.shape[0], dtype=torch.int64, device=self.device)

    @property
    def pinned_host_tensors(self) -> list[torch.Tensor]:
        """Page-locked host memory that the device copies to."""
        return self._read_back.pinned_host_tensors

    def _values(self, ticket: Ticket) -> list[int]:
        """A ticket's numbers; waits for them, and counts it, if they are not there yet."""
        if not ticket.ready():
            self.blocking_reads += 1
            ticket.wait()
        return ticket.values()

    def _pages_of(self, token_ids: torch.Tensor) -> tuple[torch.Tensor, bool]:
        ids = token_ids.to(torch.int64)
        if self.page_size == 1:
            if self._frees_in_order_given():
                return ids, True
        else:
            ids = torch.div(ids, self.page_size, rounding_mode="floor")
        return self._distinct(ids), False

    def _distinct(self, pages: torch.Tensor) -> torch.Tensor:
        """Ascending, each once, as ``unique`` gives them: sorted, and a page that equals the one before it left out."""
        count = pages.shape[0]
        if count == 1:
            return pages
        ascending = torch.sort(pages)[0]
        is_new = ascending[1:] != ascending[:-1]
        ticket = self._read_back.post(torch.count_nonzero(is_new))
        distinct = 1 + self._values(ticket)[0]
        if distinct == count:
            return ascending
        # The n-th distinct page lies where the n-th change of value is seen.
        changes = torch.cumsum(is_new, 0)
        at = torch.searchsorted(changes, self._numbers_from_one(distinct - 1))
        return torch.cat([ascending[:1], ascending[1:].index_select(0, at)])

    def _numbers_from_one(self, count: int) -> torch.Tensor:
        """int64 ``[count]``: 1, 2, ..."""
        return self._numbers[1 : count + 1]
