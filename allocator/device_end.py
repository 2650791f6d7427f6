"""`DeviceMultiEndedAllocator`: an END pool whose flush is planned on the device, with no host round trip.

What the host must know of a flush follows from lengths (`allocator.device_plan` says why), and what does not comes back through page-locked
memory (`allocator.read_back`). Placement is that of the other strategies, call for call.
"""

from __future__ import annotations

import torch

from allocator.device_plan import Sources, live_places
from allocator.errors import CorruptMappingError
from allocator.late_flush import LateFlush
from allocator.unsettled import PendingBatch


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
        owners = self.physical_to_virtual[low : low + count]
        moves, is_live = self._count_live(owners, holes, low)
        if moves:
            self._forward.settle()
            # Pages ascending, so the page nearest the watermark is the last one of a pool that grows up; it gets the lowest hole.
            src_pages = self._live_pages_of(is_live, moves, low)
            dst_pages = (holes[:moves] if grows_up else holes[count - moves :]).flip(0)
            self._move_out_of(owners, src_pages, dst_pages)
        self._mark = mark - count if grows_up else mark + count
        self.holes.clear()
        return moves

    def _count_live(self, owners: torch.Tensor, vacant: torch.Tensor, low: int) -> tuple[int, torch.Tensor]:
        """How many pages of the window of ``len(vacant)`` pages from ``low`` on are live, and which (bool ``[window]``).

        Raises:
            CorruptMappingError: ``vacant`` (ascending) has not as many places outside the window.
        """
        count = vacant.shape[0]
        is_live = owners >= 0
        outside = vacant < low if self.grow_direction == "up" else vacant >= low + count
        numbers = self._read_back.read(torch.count_nonzero(is_live), torch.count_nonzero(outside))
        live, places = numbers[0], numbers[1]
        if live != places:
            raise self._contradiction(live, places, low, low + count)
        return live, is_live

    def _live_pages_of(self, is_live: torch.Tensor, count: int, low: int) -> torch.Tensor:
        """The ``count`` live pages of a window that begins at page ``low``, ascending."""
        if count == is_live.shape[0]:
            return self._numbers[low : low + count]
        return Sources(torch.cumsum(is_live, 0)).places(self._numbers_from_one(count)) + low

    def _move_out_of(self, owners: torch.Tensor, src_pages: torch.Tensor, dst_pages: torch.Tensor) -> None:
        """Move all live pages out of a window, given its part of the inverse table."""
        if src_pages.shape[0] == owners.shape[0]:
            virtual_pages = owners.clone()
        else:
            virtual_pages = self.physical_to_virtual.index_select(0, src_pages)
        self._kvcache.move_physical_pages(dst_pages, src_pages, self.page_size)
        self._tables.bind(virtual_pages, dst_pages)
        owners.fill_(-1)

    def _pack_in_part(self) -> int:
        """Any other pass: up to the cap, and up to the first page that the running forward will write."""
        holes = self.holes.sorted()
        if self._unchanged_since_idle():
            written = self._forward.unfinished_write_set()
            if self._idle is not None and self._forward.writing is self._idle[1]:
                return 0
        else:
            holes = self._retreat_over_touching(holes)
            written = self._forward.unfinished_write_set() if holes.shape[0] else None
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
        blocked = None if written is None else self._first_written(written, stop)
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

    def _first_written(self, tokens: torch.Tensor, stop: int) -> torch.Tensor:
        """The page nearest the watermark that ``tokens`` are on, ``stop`` if that is nearer; int64 ``[]``."""
        pages = self._tables.physical_of(self._pages_named(tokens))  # -1 for tokens freed since
        if self.grow_direction == "up":
            return pages.amax().clamp(min=stop)
        return torch.where(pages < 0, stop, pages).amin().clamp(max=stop)

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
        owners = self.physical_to_virtual[low : low + count]
        moves, is_live = self._count_live(owners, freed, low)
        self._retreat(count)
        if moves:
            src_pages = self._live_pages_of(is_live, moves, low)
            self._move_out_of(owners, src_pages, freed[:moves] if grows_up else freed[count - moves :])

    def _contradiction(self, live: int, places: int, low: int, high: int) -> CorruptMappingError:
        return CorruptMappingError(
            f"physical pages [{low}, {high}) are to be vacated: the inverse table names {live} live among them, but the holes "
            f"leave {places} places beyond them. A page inside the band is neither hole nor pending, yet no virtual page maps to it, "
            "or is a hole and still mapped",
            pool=self.sub_pool_name,
            state=self.allocator_state_str(),
        )
