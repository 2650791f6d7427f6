"""Free without asking the device which pages were named: the release half of the ``device`` strategy."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from allocator.band import Side
from allocator.error_log import Fault
from allocator.late_checks import LateChecks
from allocator.read_back import Ticket
from allocator.unsettled import FAR


class DeviceReleasingBand(LateChecks):
    """What END pools and floats share of the ``device`` strategy."""

    #: While pages are asked for that the caller was told are there.
    _is_promised = False

    def _numbers_from_one(self, count: int) -> torch.Tensor:
        """int64 ``[count]``: 1, 2, ..."""
        if count < self._numbers.shape[0]:
            return self._numbers[1 : count + 1]
        return torch.arange(1, count + 1, dtype=torch.int64, device=self.device)

    @property
    def pinned_host_tensors(self) -> list[torch.Tensor]:
        """Page-locked host memory that the device copies to."""
        return self._read_back.pinned_host_tensors

    @property
    def blocking_reads(self) -> int:
        """How often the host waited for numbers that a call could not do without."""
        return self._read_back.blocking_reads

    # -- pools of this buffer whose numbers are on their way: see `allocator.deferring`

    @property
    def _is_settled(self) -> bool:
        return True

    def _poll(self) -> None:
        """Take in numbers that have arrived. Asks, never waits."""

    def _settle(self) -> None:
        """Take in all numbers; waits for those that are on their way."""

    def _chain(self) -> Iterator[DeviceReleasingBand]:
        """All pools of the buffer that may be unsettled."""
        return (band for band in self._bands_of_buffer() if isinstance(band, DeviceReleasingBand))

    @property
    def _free_phys_pages(self) -> torch.Tensor:
        self._settle()
        return self.holes.pages

    @property
    def free_virtual_ids(self) -> torch.Tensor | None:
        if self._ids_are_late():
            self._settle()
        return None if self._ids is None else self._ids.tensor()

    @free_virtual_ids.setter
    def free_virtual_ids(self, ids: torch.Tensor) -> None:
        self._settle()
        self._own_ids("free_virtual_ids").replace(ids)

    def _ids_are_late(self) -> bool:
        """Whether ids that were freed are not in the list yet."""
        return not self._is_settled

    def _poll_chain(self) -> bool:
        """Poll all pools of the buffer; whether all are settled."""
        settled = True
        if self._read_back.immediate:
            return settled
        for band in self._chain():
            band._poll()
            settled = settled and band._is_settled
        return settled

    def _drainable_hole_bytes(self, side: Side) -> int:
        """As many of the holes that the neighbour's bound shows are not there as that bound overlaps this band, which the bands do not. A
        band that works with a bound of its own has that in its gap."""
        drainable = super()._drainable_hole_bytes(side)
        if not drainable or self._read_back.immediate or not self._is_settled:
            return drainable
        below, above = self._chain_high_frontier_below_bytes(), self._chain_low_frontier_above_bytes()
        if not self._is_frontier_transparent():
            below, above = (
                (below, self._byte_low_frontier()) if side == "low" else (self._byte_high_frontier(), above)
            )
        return max(0, drainable + min(0, above - below))

    def _youngest_ticket(self) -> Ticket | None:
        """Of numbers on their way those posted last."""
        return None

    def _settle_chain(self) -> None:
        if self._read_back.immediate:
            return
        tickets = [ticket for band in self._chain() if (ticket := band._youngest_ticket()) is not None]
        if tickets:
            # On one stream all others are there then too.
            max(tickets, key=lambda ticket: ticket.number).wait()
        for band in self._chain():
            band._settle()

    def _make_sure_of(self, num_pages: int) -> bool:
        self._look_for_errors()
        if not self._poll_chain() and num_pages * self.page_size > self._certain_size():
            # Capacity would be refused on bounds alone: the one time that is worth waiting for.
            self._settle_chain()
        return super()._make_sure_of(num_pages)

    # -- the same as far as the device knows: int64 [] where the host does not

    def _low_frontier_above_on_device(self) -> int | torch.Tensor:
        above = self._neighbour("high")
        if above is None:
            return self.total_bytes
        return above._byte_low_frontier_on_device()

    def _high_frontier_below_on_device(self) -> int | torch.Tensor:
        below = self._neighbour("low")
        return 0 if below is None else below._byte_high_frontier_on_device()

    def _unless_frozen(self, taken: torch.Tensor) -> torch.Tensor:
        """Pages that are handed out. Of a buffer that was frozen by a fault the host may have a wrong idea: the padding page, not
        somebody's."""
        return torch.where(self._errors.ok, taken, 0) if self._errors.freezes else taken

    # -- alloc

    @contextmanager
    def promised(self) -> Iterator[None]:
        self._is_promised = True
        try:
            yield
        finally:
            self._is_promised = False

    def alloc_with_virtual(self, virtual_pages: torch.Tensor) -> None:
        # Its caller has looked at sizes before.
        with self.promised():
            super().alloc_with_virtual(virtual_pages)

    def _note_broken_promise(self, lacks: torch.Tensor) -> None:
        """Write down that there was no room (``lacks``: bool ``[]``) for pages that had to be there."""
        nothing = torch.full((1,), -1, dtype=torch.int64, device=self.device)
        self._errors.note(Fault.OUT_OF_ROOM, lacks.reshape(1), nothing, nothing)

    # -- free

    def free(self, free_index: torch.Tensor | None, *, _pages: torch.Tensor | None = None) -> None:
        if (
            self._frees_late()
            and _pages is None
            and self.free_group is None
            and free_index is not None
            and free_index.numel() > 0
        ):
            self._free_late(free_index)
        else:
            super().free(free_index, _pages=_pages)

    def free_named(self, token_ids: torch.Tensor, is_named: torch.Tensor, *, in_order: bool = False) -> None:
        if self._read_back.immediate or self.free_group is not None:
            super().free_named(token_ids, is_named, in_order=in_order)
        elif token_ids.shape[0] and self._frees_move() and self.moves_blocked():
            # Refused unless it frees nothing: the one case in which that must be known at once.
            super().free_named(token_ids, is_named, in_order=in_order)
        elif token_ids.shape[0]:
            self._free_named_late(token_ids, is_named, in_order=in_order)

    def those_named(self, token_ids: torch.Tensor, is_named: torch.Tensor) -> torch.Tensor:
        count = self._read_back.read(torch.count_nonzero(is_named))[0]
        if count == token_ids.shape[0]:
            return token_ids
        return token_ids.index_select(
            0, torch.searchsorted(torch.cumsum(is_named, 0), self._numbers_from_one(count))
        )

    def free_group_end(self) -> None:
        if not self._frees_late():
            super().free_group_end()
            return
        tokens, representatives = self._close_group()
        if tokens:
            self._free_late(torch.cat(tokens))
        if representatives:
            self._free_pages(torch.cat(representatives) // self.page_size, may_repeat=True)

    def _frees_late(self) -> bool:
        """Whether a free of tokens leaves the number of pages open for a while: where they have to be deduplicated."""
        return not self._read_back.immediate and not (self.page_size == 1 and self._frees_in_order_given())

    def _free_late(self, token_ids: torch.Tensor) -> None:
        """Free the pages of these tokens, each once. How many that is stays unknown to the host until a ticket has come."""
        pages = self._pages_named(token_ids)
        named = pages.shape[0]
        if named == 1:
            self._free_pages(pages, may_repeat=False)
            return
        if not self.lazy_compaction:
            self._require_open_gate()
        ascending = torch.sort(pages)[0]
        changes = torch.cumsum(ascending[1:] != ascending[:-1], 0)
        count = changes[-1] + 1
        rows = min(named, self.num_virtual_ids)
        at = torch.searchsorted(changes, self._numbers_from_one(rows - 1)).clamp(max=named - 2)
        distinct = torch.cat([ascending[:1], ascending[1:].index_select(0, at)])
        # Rows past the last page repeat the first one: it is as good or bad as it is.
        virtual_pages = torch.where(self._numbers[:rows] < count, distinct, ascending[:1])
        physical_pages = self._require_live(virtual_pages, may_repeat=False)
        if rows < named:
            # More pages than there are ids were named, so the last of them is none.
            last = ascending[-1:]
            self._errors.note(Fault.NOT_LIVE, self._tables.physical_of(last) <= 0, last, last)
        if not self.lazy_compaction:
            self._order_after_readers()
        self._tables.unbind(virtual_pages, physical_pages)
        self._release_late(virtual_pages, physical_pages, count)

    def _free_named_late(self, token_ids: torch.Tensor, is_named: torch.Tensor, *, in_order: bool) -> None:
        """`free_named` where neither the tokens nor their pages are counted until a ticket has come. Rows past the last page stand for no
        page: the tables' sentinels."""
        self._look_for_errors()
        # What is no page of the table is none of another number either.
        pages = self._pages_named(token_ids).clamp(-1, self.num_virtual_ids)
        named = pages.shape[0]
        once = in_order or (self.page_size == 1 and self._frees_in_order_given())
        if not once:
            pages = torch.sort(torch.where(is_named, pages, FAR))[0]
            is_named = pages < FAR
            is_named[1:] &= pages[1:] != pages[:-1]
        rank = torch.cumsum(is_named, 0)
        rows = min(named, self.num_virtual_ids)
        at = torch.searchsorted(rank, self._numbers_from_one(rows)).clamp(max=named - 1)
        chosen, count = pages.index_select(0, at), rank[-1].clamp(max=rows)
        is_page = self._numbers[:rows] < count
        virtual_pages = torch.where(is_page, chosen, self.num_virtual_ids)
        physical_pages = self._tables.physical_of(virtual_pages)
        is_live = physical_pages > 0
        bad, then = is_page & ~is_live, None
        if once and rows > 1:
            # What is no page, or is not live, stands for the sentinel, and that again and again.
            repeated = self._repeated_rows(self.physical_to_virtual, physical_pages, ~(is_page & is_live))
            then = Fault.FREED_TWICE, repeated & is_page
        self._errors.note(Fault.NOT_LIVE, bad, physical_pages, virtual_pages, then=then)
        if rows < named:
            # More pages than there are ids: one of them is none, or is named twice.
            is_over = rank[-1:] > rows
            self._errors.note(Fault.FREED_TWICE, is_over, physical_pages[:1], virtual_pages[:1])
        if not self.lazy_compaction:
            self._order_after_readers()
        self._tables.unbind(virtual_pages, torch.where(physical_pages > 0, physical_pages, self.num_pages))
        self._release_late(virtual_pages, physical_pages, count, least=0)

    @abstractmethod
    def _release_late(
        self,
        virtual_pages: torch.Tensor,
        physical_pages: torch.Tensor,
        count: torch.Tensor,
        *,
        least: int = 1,
    ) -> None:
        """The first ``count`` (int64 ``[]``, at least ``least``) of these unbound pages are free from now on; what the other rows hold does
        not matter."""

    def _pages_of(self, token_ids: torch.Tensor) -> tuple[torch.Tensor, bool]:
        ids = self._pages_named(token_ids)
        if self.page_size == 1 and self._frees_in_order_given():
            return ids, True
        return self._distinct(ids), False

    def _pages_named(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The page of every token id, int64 ``[n]``, in the order given."""
        ids = token_ids.to(torch.int64).reshape(-1)
        return ids if self.page_size == 1 else torch.div(ids, self.page_size, rounding_mode="floor")

    def _distinct(self, pages: torch.Tensor) -> torch.Tensor:
        """Ascending, each once, as ``unique`` gives them: sorted, and a page that equals the one before it left out."""
        count = pages.shape[0]
        if count == 1:
            return pages
        ascending = torch.sort(pages)[0]
        is_new = ascending[1:] != ascending[:-1]
        distinct = 1 + self._read_back.read(torch.count_nonzero(is_new))[0]
        if distinct == count:
            return ascending
        # The n-th distinct page lies where the n-th change of value is seen.
        changes = torch.cumsum(is_new, 0)
        at = torch.searchsorted(changes, self._numbers_from_one(distinct - 1))
        return torch.cat([ascending[:1], ascending[1:].index_select(0, at)])
