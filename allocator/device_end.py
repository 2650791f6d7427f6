"""`DeviceMultiEndedAllocator`: an END pool whose flush is planned on the device, with no host round trip.

What the host must know of a flush follows from lengths (`allocator.device_plan` says why), and what does not comes back through page-locked
memory (`allocator.read_back`). Placement is that of the other strategies, call for call.
"""

from __future__ import annotations

import torch

from allocator.device_plan import count_moves, first_blocked, live_places
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
        mark = self.watermark_physical
        low, high = (mark - count, mark) if grows_up else (mark + 1, mark + 1 + count)
        owners = self.physical_to_virtual[low:high]
        beyond = holes < low if grows_up else holes >= high
        ticket = self._read_back.post(torch.count_nonzero(owners >= 0), torch.count_nonzero(beyond))
        moves, places = self._values(ticket)[:2]
        if moves != places:
            raise self._contradiction(moves, places, low, high)
        if moves:
            self._forward.settle()
            # From the frontier on: for a pool that grows up that is from the window's end.
            at = live_places(owners.flip(0) if grows_up else owners).places(self._numbers_from_one(moves))
            src_pages = (high - 1) - at if grows_up else at + low
            dst_pages = holes[:moves] if grows_up else holes[count - moves :].flip(0)
            self._move_pages(src_pages, dst_pages)
        self._retreat(count)
        self.holes.clear()
        return moves

    def _pack_in_part(self) -> int:
        """Any other pass: up to the cap, and up to the first page that the running forward will write."""
        holes = self.holes.sorted()
        count = holes.shape[0]
        grows_up = self.grow_direction == "up"
        mark = self.watermark_physical
        nearest_first = (mark - 1) - holes.flip(0) if grows_up else holes - (mark + 1)
        touching = torch.count_nonzero(nearest_first == self._numbers[:count])
        most = min(count, self._lazy_max_moves_per_call, self._live_pages_lazy)
        if not most:
            self._give_back(holes, self._values(self._read_back.post(touching))[0], 0)
            return 0
        window = min(count + len(self._pending), self._allocated_pages())
        owners = (
            self.physical_to_virtual[mark - window : mark]
            if grows_up
            else self.physical_to_virtual[mark + 1 : mark + 1 + window]
        )
        at = live_places(owners.flip(0) if grows_up else owners).places(self._numbers_from_one(most))
        farthest_first = nearest_first.flip(0)[:most]
        writing = self._forward.unfinished_write_set()
        blocked_from: torch.Tensor | int = window
        if writing is not None:
            virtual_pages = torch.div(writing, self.page_size, rounding_mode="floor")
            blocked_from = first_blocked(self._tables.physical_of(virtual_pages), mark, grows_up, window)
        ticket = self._read_back.post(touching, count_moves(at, farthest_first, blocked_from))
        given_back, moves = self._values(ticket)[:2]
        if moves:
            at = at[:moves]
            src_pages = (mark - 1) - at if grows_up else at + (mark + 1)
            self._move_pages(src_pages, holes[:moves] if grows_up else holes[count - moves :].flip(0))
        self._give_back(holes, given_back, moves)
        if moves:
            self._vacate_pages(src_pages)
        return moves

    def _give_back(self, holes: torch.Tensor, touching: int, filled: int) -> None:
        """Boundary holes leave the band, filled ones the list; ``holes`` are all of them, ascending."""
        if touching or filled:
            end = holes.shape[0]
            kept = (
                holes[filled : end - touching]
                if self.grow_direction == "up"
                else holes[touching : end - filled]
            )
            self.holes.set_sorted(kept)
            self._retreat(touching)

    def _move_pages(self, src_pages: torch.Tensor, dst_pages: torch.Tensor) -> None:
        """Copy the pages' bytes, then point the tables at them."""
        virtual_pages = self.physical_to_virtual.index_select(0, src_pages)
        self._kvcache.move_physical_pages(dst_pages, src_pages, self.page_size)
        self._tables.remap_moved(virtual_pages, src_pages, dst_pages)

    def _vacate_pages(self, src_pages: torch.Tensor) -> None:
        reader = self._forward.latest_unfinished()
        if reader is None:
            self.holes.add(src_pages)
        else:
            count = src_pages.shape[0]
            self._hold_back(reader, PendingBatch(src_pages, count, count, count))

    def _compact_now(self, freed_pages: torch.Tensor) -> None:
        """Eager mode: as `_pack`, but pages keep their order: the lowest of the window goes to the lowest place freed outside it."""
        freed = torch.sort(freed_pages)[0]
        if not self._read_back.immediate:
            self._compact_late(freed)
            return
        count = freed.shape[0]
        grows_up = self.grow_direction == "up"
        old_mark = self.watermark_physical
        self._retreat(count)
        low, high = (old_mark - count, old_mark) if grows_up else (old_mark + 1, old_mark + 1 + count)
        owners = self.physical_to_virtual[low:high]
        beyond = freed < low if grows_up else freed >= high
        ticket = self._read_back.post(torch.count_nonzero(owners >= 0), torch.count_nonzero(beyond))
        moves, places = self._values(ticket)[:2]
        if moves != places:
            raise self._contradiction(moves, places, low, high)
        if moves:
            src_pages = live_places(owners).places(self._numbers_from_one(moves)) + low
            self._move_pages(src_pages, freed[:moves] if grows_up else freed[count - moves :])

    def _contradiction(self, live: int, places: int, low: int, high: int) -> CorruptMappingError:
        return CorruptMappingError(
            f"physical pages [{low}, {high}) are to be vacated: the inverse table names {live} live among them, but the holes "
            f"leave {places} places beyond them. A page inside the band is neither hole nor pending, yet no virtual page maps to it, "
            "or is a hole and still mapped",
            pool=self.sub_pool_name,
            state=self.allocator_state_str(),
        )
