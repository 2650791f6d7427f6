"""Free: give virtual pages back, and remember or close the holes they leave."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch

from allocator.binding import BindingBand
from allocator.errors import (
    AllocatorError,
    DuplicateFreeError,
    FreeGroupError,
    NotAllocatedError,
    PageAlignmentError,
    require,
)


class ReleasingBand(BindingBand):
    """The release half of an allocator. `MultiEndedAllocator._flush` or `_compact_now` closes the holes."""

    @abstractmethod
    def _compact_now(self, freed_pages: torch.Tensor) -> None:
        """Fill the freed pages (int64 ``[n]``, physical) at once: eager mode."""

    # -- free

    def free(self, free_index: torch.Tensor | None, *, _pages: torch.Tensor | None = None) -> None:
        """Free the pages of these virtual token ids (any subset of a page's tokens frees it once).

        ``_pages`` are the pages of ``free_index`` where the caller has them already, each once; finding them costs a sort and, for
        page sizes over 1, a synchronisation.

        Raises:
            NotAllocatedError, DuplicateFreeError: nothing was freed.
            MoveGateClosedError: eager compaction would have to move pages.
        """
        if free_index is None or free_index.numel() == 0:
            return
        if self.free_group is not None:
            self.free_group.append(free_index.clone())
            return
        if _pages is not None:
            self._free_pages(_pages.to(torch.int64), may_repeat=True)
        else:
            pages, may_repeat = self._pages_of(free_index)
            self._free_pages(pages, may_repeat=may_repeat)

    def free_named(self, token_ids: torch.Tensor, is_named: torch.Tensor, *, in_order: bool = False) -> None:
        """`free` of those of these virtual token ids (int64 ``[n]``) for which ``is_named`` (bool ``[n]``) says so; there may be none.

        Args:
            in_order: each id stands for a page, named once, and pages are freed in the order given.

        Raises:
            NotAllocatedError, DuplicateFreeError, MoveGateClosedError: as `free`.
        """
        named = self.those_named(token_ids, is_named)
        self.free(named, _pages=self._page_numbers(named) if in_order else None)

    def those_named(self, token_ids: torch.Tensor, is_named: torch.Tensor) -> torch.Tensor:
        """``token_ids[is_named]``: how many that is must be known, which takes a synchronisation."""
        return token_ids[is_named]

    def free_segment(self, free_index: torch.Tensor | None, *, start_pos: int) -> None:
        """Free consecutive tokens of one request that start at position ``start_pos``, a page border: every ``page_size``-th id
        names a page, so no sort is needed.

        Raises:
            PageAlignmentError: ``start_pos`` is no page border.
            NotAllocatedError, DuplicateFreeError: nothing was freed.
        """
        if free_index is None or free_index.numel() == 0:
            return
        if self.page_size == 1:
            self.free(free_index)
            return
        if start_pos % self.page_size:
            raise PageAlignmentError(f"a segment starts at position {start_pos}, not at a border of {self.page_size}-token pages",
                                     pool=self.sub_pool_name)  # fmt: skip
        representatives = free_index[:: self.page_size].to(torch.int64)
        if self.free_page_reps_group is not None:
            self.free_page_reps_group.append(representatives.clone())
        else:
            self._free_pages(representatives // self.page_size, may_repeat=True)

    def free_group_begin(self) -> None:
        """Hold frees back until `free_group_end`.

        Raises:
            FreeGroupError: a group is open already.
        """
        if self.free_group is not None:
            raise FreeGroupError(
                "a free group is open already; free groups do not nest", pool=self.sub_pool_name
            )
        self.free_group, self.free_page_reps_group = [], []

    def free_group_end(self) -> None:
        """Free what was queued. An eager pool packs twice, after the tokens and after the segments, as SGLang 0.5.23's does.

        Raises:
            FreeGroupError: no group is open.
            NotAllocatedError, DuplicateFreeError: nothing of the group was freed; the group is closed.
        """
        tokens, representatives = self._close_group()
        if not representatives:
            if tokens:
                pages, may_repeat = self._pages_of(torch.cat(tokens))
                self._free_pages(pages, may_repeat=may_repeat)
            return
        segments = torch.cat(representatives) // self.page_size
        if not tokens:
            self._free_pages(segments, may_repeat=True)
            return
        pages, _ = self._pages_of(torch.cat(tokens))
        together = torch.cat([pages, segments])
        if self.lazy_compaction:
            self._free_pages(together, may_repeat=True)
            return
        self._require_open_gate()
        # All of it is looked at before any of it goes; that leaves numbers in the inverse table, which the second free would read.
        physical_pages = self._require_live(together, may_repeat=True)
        self._tables.physical_to_virtual.index_copy_(0, physical_pages, together)
        self._free_pages(pages, may_repeat=True)
        self._free_pages(segments, may_repeat=False)

    def _close_group(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Token ids, and representatives of pages, that the group has queued."""
        if self.free_group is None or self.free_page_reps_group is None:
            raise FreeGroupError("no free group is open", pool=self.sub_pool_name)
        tokens, representatives = self.free_group, self.free_page_reps_group
        self.free_group = self.free_page_reps_group = None
        return tokens, representatives

    def _pages_of(self, token_ids: torch.Tensor) -> tuple[torch.Tensor, bool]:
        """Virtual pages of token ids, and whether a page may be named twice."""
        ids = token_ids.to(torch.int64)
        if self.page_size == 1 and self._frees_in_order_given():
            return ids, True
        return torch.unique(torch.div(ids, self.page_size, rounding_mode="floor")), False

    def _frees_in_order_given(self) -> bool:
        """At page size 1 nothing needs to be deduplicated, and freed ids return in the caller's order; SGLang's eager END sorts."""
        return self.lazy_compaction

    def _free_pages(self, virtual_pages: torch.Tensor, *, may_repeat: bool) -> None:
        if not self.lazy_compaction:
            # First: looking for repeats leaves the inverse table's rows in a state in which only a free may leave them.
            self._require_open_gate()
        physical_pages = self._require_live(virtual_pages, may_repeat=may_repeat)
        if not self.lazy_compaction:
            self._order_after_readers()
        self._tables.unbind(virtual_pages, physical_pages)
        if self._ids is not None:
            self._ids.append(virtual_pages)
        self._release_physical(physical_pages)

    def require_freeable(self, tokens: Sequence[torch.Tensor], segments: Sequence[torch.Tensor] = ()) -> None:
        """What `free` would refuse of these lists of token ids, one call for each, is refused now, and nothing changes. Tokens in
        ``segments`` stand for a page each.

        Raises:
            NotAllocatedError: a page that is not live.
            DuplicateFreeError: a page in two lists, or twice where each must be named once.
        """
        lists = [
            (self._page_numbers(ids), self.page_size == 1 and self._frees_in_order_given()) for ids in tokens
        ]
        lists += [(self._page_numbers(ids), True) for ids in segments]
        pages = torch.cat([pages for pages, _ in lists])
        physical_pages = self._tables.physical_of(pages)
        require(
            (physical_pages > 0).all(),
            "kvtape: free of a page that is not live (double free, never allocated, -1 or the padding page)",
            lambda: self._not_allocated(pages, physical_pages),
        )
        # As in `_named_once`, with one number for all pages of a list that may repeat.
        starts = torch.arange(pages.shape[0], dtype=torch.int64, device=pages.device)
        sizes = [pages.shape[0] for pages, _ in lists]
        numbers = torch.cat([
            part if named_once else part[:1].expand(part.shape[0])
            for part, (_, named_once) in zip(starts.split(sizes), lists, strict=True)
        ])  # fmt: skip
        table = self.virtual_to_physical
        table.index_copy_(0, pages, numbers)
        disjoint = (table.index_select(0, pages) == numbers).all()
        table.index_copy_(0, pages, physical_pages)
        require(disjoint, "kvtape: the same page twice in one free", lambda: self._twice_in(lists))

    def _page_numbers(self, token_ids: torch.Tensor) -> torch.Tensor:
        return torch.div(token_ids.to(torch.int64), self.page_size, rounding_mode="floor")

    def _twice_in(self, lists: Sequence[tuple[torch.Tensor, bool]]) -> DuplicateFreeError:
        once = [pages if named_once else torch.unique(pages) for pages, named_once in lists]
        return self._repeated_pages(torch.cat(once))

    def _release_physical(self, physical_pages: torch.Tensor) -> None:
        """Pages that hold nothing any more: holes when lazy, packed away at once when eager."""
        self._live_pages_lazy -= physical_pages.shape[0]
        if self.lazy_compaction:
            self.holes.add(physical_pages)
        else:
            self._compact_now(physical_pages)

    def free_physical(self, free_index: torch.Tensor | None) -> None:
        """Release physical slots (token ids in whole pages) reserved by `alloc_physical`, bound meanwhile or not.

        Raises:
            NotAllocatedError: a page outside the band or named twice; nothing was released.
        """
        if free_index is None or free_index.numel() == 0:
            return
        self._whole_pages(free_index.numel())
        physical_pages = free_index.to(torch.int64)[:: self.page_size] // self.page_size
        self._require_taken(physical_pages, NotAllocatedError)
        if not self.lazy_compaction:
            self._require_open_gate()
        self._order_after_readers()
        # Clamped: where a bad page is only written down (`allocator.error_log`), it must not be looked up either.
        virtual_pages = torch.take(self.physical_to_virtual, physical_pages.clamp(-1, self.num_pages))
        # Rows without an owner write -1 into the sentinel, which holds -1 already; a mask would ask the device how many there are.
        self._tables.unbind(
            torch.where(virtual_pages < 0, self.num_virtual_ids, virtual_pages), physical_pages
        )
        self._release_physical(physical_pages)

    def cancel_physical_reservation(self, free_index: torch.Tensor | None) -> None:
        """Give back reserved slots whose load was never queued.

        Raises:
            NotAllocatedError: more pages than are reserved, or a page that is not taken; nothing was given back.
            MoveGateClosedError: eager compaction would move pages while others are reserved; nothing was given back.
        """
        if free_index is None or free_index.numel() == 0:
            return
        pages = self._whole_pages(free_index.numel())
        if pages > self._reserved_for_load:
            raise NotAllocatedError(f"{pages} reserved page(s) cancelled, {self._reserved_for_load} are reserved",
                                    pool=self.sub_pool_name, state=self.allocator_state_str())  # fmt: skip
        # Lowered first: an eager pool packs as it frees, which it may not do while places are reserved.
        self._reserved_for_load -= pages
        try:
            self.free_physical(free_index)
        except AllocatorError:
            self._reserved_for_load += pages
            raise
