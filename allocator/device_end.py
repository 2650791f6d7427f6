"""`DeviceMultiEndedAllocator`: an END pool whose flush is planned on the device, with no host round trip.

What the host must know of a flush follows from lengths (`allocator.device_plan` says why), and what does not comes back through page-locked
memory (`allocator.read_back`). Placement is that of the other strategies, call for call.
"""

from __future__ import annotations

from typing import Final

import torch

from allocator.device_plan import live_places
from allocator.errors import CorruptMappingError
from allocator.late_flush import LateFlush
from allocator.unsettled import PendingBatch

#: Places of a window from which on its live pages are not searched one by one: each search walks further then.
LARGE_WINDOW: Final = 512


class DeviceMultiEndedAllocator(LateFlush):
    """`MultiEndedAllocator` with ``strategy="device"``. Here is the flush where numbers are there at once (a CPU); `LateFlush` has the one
    where they are not."""

    # -- flush

    def _flush(self, *, urgent: bool) -> int:
        """One compaction pass; returns pages moved. No synchronisation."""
        if not self.lazy_compaction:
            return 0
        self._look_for_errors()
        if urgent:
            self._version += 1
        if self.moves_blocked():
            self._take_back_pending(wait=False)
            return 0
        self._forward.settle_transfers()
        self._take_back_pending(wait=urgent)
        if not self._read_back.immediate:
            with self._blaming_faults():
                return self._pack_late() if urgent else self._pack_in_part_late()
        if not len(self.holes):
            return 0
        return self._pack() if urgent else self._pack_in_part()

    def _pack(self) -> int:
        """The urgent pass: the ``H`` pages next to the watermark end up vacant, so it retreats by ``H``."""
        holes = self.holes.sorted()
        count = holes.shape[0]
        grows_up = self.grow_direction == "up"
        mark = self._mark
        low = mark - count if grows_up else mark + 1
        owners = self._tables.physical_to_virtual[low : low + count]
        is_live = owners >= 0
        moves = self._read_back.read(torch.count_nonzero(is_live))[0]
        self._require_places(holes, moves, low)
        if moves:
            self._forward.settle()
            # Pages descending, holes ascending: the page nearest the watermark gets the farthest hole, whichever way the pool grows.
            dst_pages = holes[:moves] if grows_up else holes[count - moves :]
            self._move_out_of(owners, is_live, low, dst_pages)
        self._mark = mark - count if grows_up else mark + count
        self.holes.set_sorted(holes[:0])
        return moves

    def _require_places(self, vacant: torch.Tensor, live: int, low: int) -> None:
        """Outside the window of ``len(vacant)`` pages from ``low`` on there are as many of the vacant pages (ascending) as live ones in it.

        Raises:
            CorruptMappingError: there are not.
        """
        count = vacant.shape[0]
        grows_up = self.grow_direction == "up"
        border = low if grows_up else low + count
        # So many are if the border lies between two neighbours of the list, and they are asked where it lies.
        below = live if grows_up else count - live
        neighbours = self._read_back.read_row(vacant[max(0, below - 1) : below + 1])
        fits = (below == 0 or neighbours[0] < border) and (below == count or neighbours[-1] >= border)
        if not fits:
            raise self._contradiction(vacant, live, low)

    def _move_out_of(
        self, owners: torch.Tensor, is_live: torch.Tensor, low: int, dst_pages: torch.Tensor
    ) -> torch.Tensor:
        """Move the live pages out of the window that begins at page ``low``, the last one to the first of ``dst_pages``.

        Args:
            owners: the window's part of the inverse table, int64 ``[window]``, a view of it.
            is_live: which of them have one, bool ``[window]``.
            dst_pages: int64 ``[moves]``, as many as there are live pages.

        Returns:
            The pages moved, descending.
        """
        moves = dst_pages.shape[0]
        down = self._numbers_down
        longest = down.shape[0]
        inverse = self._tables.physical_to_virtual
        if moves == owners.shape[0]:
            src_pages = down[longest - low - moves : longest - low]
        else:
            src_pages = self._live_pages_down(is_live, moves, low)
        virtual_pages = inverse.index_select(0, src_pages)
        self._kvcache.move_physical_pages(dst_pages, src_pages, self.page_size)
        self._tables.bind(virtual_pages, dst_pages)
        owners.fill_(-1)
        return src_pages

    def _live_pages_down(self, is_live: torch.Tensor, count: int, low: int) -> torch.Tensor:
        """The ``count`` live pages of a window that begins at page ``low``, descending."""
        rank = torch.cumsum(is_live, 0)
        if is_live.shape[0] < LARGE_WINDOW:
            down = self._numbers_down
            ordinals = down[-1 - count : -1]  # count, ..., 2, 1
            return torch.searchsorted(rank, ordinals) + low
        # Every page writes itself to its row, those that are not live to one row more: two operations more, and no search for each page.
        row = torch.where(is_live, count - rank, count)
        pages = self._numbers[low : low + is_live.shape[0]]
        return torch.empty_like(pages[: count + 1]).scatter_(0, row, pages)[:count]

    def _pack_in_part(self) -> int:
        """Any other pass: up to the cap, and up to the first page that the running forward will write.

        Mostly the cap is far and nothing waits for an event. Then the live pages of an urgent pass's window move, as far as that page."""
        holes = self.holes.sorted()
        count = holes.shape[0]
        tokens = self._forward.unfinished_write_set()
        if self._unchanged_since_idle() and self._idle is not None and self._forward.writing is self._idle[1]:
            return 0
        if self._pending or count > self._lazy_max_moves_per_call:
            return self._pack_up_to_a_limit(holes, None if tokens is None else self._pages_written(tokens))
        grows_up = self.grow_direction == "up"
        mark = self._mark
        low = mark - count if grows_up else mark + 1
        owners = self._tables.physical_to_virtual[low : low + count]
        is_live = owners >= 0
        # A hole touches the watermark exactly if it is where it would be if all did.
        is_touching = holes == self._numbers[low : low + count]
        moves, touching = self._read_back.read(
            torch.count_nonzero(is_live), torch.count_nonzero(is_touching)
        )[:2]
        self._require_places(holes, moves, low)
        if moves and tokens is not None:
            page = self._read_back.read(self._nearest_of(self._pages_written(tokens)))[0]
            if low <= page < low + count:
                # Of the window only what is nearer to the watermark than the first page about to be written.
                nearer = slice(page + 1 - low, None) if grows_up else slice(0, page - low)
                owners, is_live, low = owners[nearer], is_live[nearer], page + 1 if grows_up else low
                moves = self._read_back.read(torch.count_nonzero(is_live))[0]
        if touching:
            self._mark = mark - touching if grows_up else mark + touching
        if not moves:
            if touching:
                self.holes.set_sorted(holes[: count - touching] if grows_up else holes[touching:])
            self._note_idle(is_capped=False, holds_back=True)
            return 0
        dst_pages = holes[:moves] if grows_up else holes[count - moves :]
        src_pages = self._move_out_of(owners, is_live, low, dst_pages)
        self.holes.set_sorted(
            holes[moves : count - touching] if grows_up else holes[touching : count - moves]
        )
        holds_back = self._vacate_pages(src_pages if grows_up else src_pages.flip(0))
        self._note_idle(is_capped=moves == self._lazy_max_moves_per_call, holds_back=holds_back)
        return moves

    def _pack_up_to_a_limit(self, holes: torch.Tensor, written: torch.Tensor | None) -> int:
        """The same where the cap may end it, or pages in pending reuse lie in between: pair by pair.

        Args:
            holes: ascending, not empty.
            written: pages that the running forward has yet to write, as `_pages_written` gives them.
        """
        holes = self._retreat_over_touching(holes)
        count = holes.shape[0]
        cap = self._lazy_max_moves_per_call
        most = min(count, cap, self._live_pages_lazy)
        if not most:
            return 0
        grows_up = self.grow_direction == "up"
        mark = self._mark
        window = min(count + len(self._pending), self._allocated_pages())
        inverse = self.physical_to_virtual
        owners = inverse[mark - window : mark].flip(0) if grows_up else inverse[mark + 1 : mark + 1 + window]
        at = live_places(owners).places(self._numbers_from_one(most))
        # From here on in pages. Where there is no further live page, ``at`` is the first place past the window, which may not move.
        if grows_up:
            src_pages, dst_pages, stop = (mark - 1) - at, holes[:most], mark - 1 - window
        else:
            src_pages, dst_pages, stop = at + (mark + 1), holes[count - most :].flip(0), mark + 1 + window
        blocked = None
        if written is not None:
            nearest = self._nearest_of(written)
            blocked = nearest.clamp(min=stop) if grows_up else nearest.clamp(max=stop)
        if grows_up:
            beyond = dst_pages.clamp(min=stop) if blocked is None else torch.maximum(dst_pages, blocked)
            is_move = src_pages > beyond
        else:
            beyond = dst_pages.clamp(max=stop) if blocked is None else torch.minimum(dst_pages, blocked)
            is_move = src_pages < beyond
        moves = self._read_back.read(torch.count_nonzero(is_move))[0]
        if not moves:
            self._note_idle(is_capped=False, holds_back=True)
            return 0
        if moves != most:
            src_pages, dst_pages = src_pages[:moves], dst_pages[:moves]
        virtual_pages = inverse.index_select(0, src_pages)
        self._kvcache.move_physical_pages(dst_pages, src_pages, self.page_size)
        self._tables.remap_moved(virtual_pages, src_pages, dst_pages)
        self.holes.set_sorted(holes[moves:] if grows_up else holes[: count - moves])
        self._note_idle(is_capped=moves == cap, holds_back=self._vacate_pages(src_pages))
        return moves

    def _retreat_over_touching(self, holes: torch.Tensor) -> torch.Tensor:
        """Give back the holes (ascending) that touch the watermark; returns the others."""
        count = holes.shape[0]
        grows_up = self.grow_direction == "up"
        first = self._mark - count if grows_up else self._mark + 1
        # As many pages as there are holes, up to the watermark: a hole touches it exactly if it is where it would be if all did.
        touching = self._read_back.read(torch.count_nonzero(holes == self._numbers[first : first + count]))[0]
        if not touching:
            return holes
        holes = holes[: count - touching] if grows_up else holes[touching:]
        self.holes.set_sorted(holes)
        self._mark += -touching if grows_up else touching
        return holes

    def _pages_written(self, tokens: torch.Tensor) -> torch.Tensor:
        """Physical pages of virtual token ids, -1 for those freed since; int64 ``[n]``."""
        return self._tables.physical_of(self._pages_named(tokens))

    def _nearest_of(self, pages: torch.Tensor) -> torch.Tensor:
        """The page nearest the watermark, or one beyond the band's other end if none is in the band; int64 ``[]``."""
        if self.grow_direction == "up":
            return pages.amax()
        # Padding tokens are on page 0, and tokens freed since on -1.
        return torch.where(pages <= self._mark, self.num_pages, pages).amin()

    def _vacate_pages(self, src_pages: torch.Tensor) -> bool:
        """Sources of a move: holes at once, or held back, which is told, while a forward may still read them."""
        reader = self._forward.latest_unfinished()
        if reader is None:
            self.holes.add(src_pages)
            return False
        count = src_pages.shape[0]
        self._hold_back(reader, PendingBatch(src_pages, count, count, count))
        return True

    def _compact_now(self, freed_pages: torch.Tensor) -> None:
        """Eager mode: as `_pack`, but pages keep their order: the lowest of the window goes to the lowest place freed outside it."""
        freed = torch.sort(freed_pages)[0]
        if not self._read_back.immediate:
            self._compact_late(freed)
            return
        count = freed.shape[0]
        grows_up = self.grow_direction == "up"
        low = self._mark - count if grows_up else self._mark + 1
        owners = self._tables.physical_to_virtual[low : low + count]
        is_live = owners >= 0
        moves = self._read_back.read(torch.count_nonzero(is_live))[0]
        self._require_places(freed, moves, low)
        self._retreat(count)
        if moves:
            dst_pages = freed[:moves] if grows_up else freed[count - moves :]
            self._move_out_of(owners, is_live, low, dst_pages.flip(0))

    def _contradiction(self, vacant: torch.Tensor, live: int, low: int) -> CorruptMappingError:
        high = low + vacant.shape[0]
        places = int(torch.count_nonzero(vacant < low if self.grow_direction == "up" else vacant >= high))
        return CorruptMappingError(
            f"physical pages [{low}, {high}) are to be vacated: the inverse table names {live} live among them, but the holes "
            f"leave {places} places beyond them. A page inside the band is neither hole nor pending, yet no virtual page maps to it, "
            "or is a hole and still mapped",
            pool=self.sub_pool_name,
            state=self.allocator_state_str(),
        )
