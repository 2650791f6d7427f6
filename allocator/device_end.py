"""`DeviceMultiEndedAllocator`: an END pool whose flush is planned on the device, with no host round trip.

What the host must know of a flush follows from lengths (`allocator.device_plan` says why), and what does not comes back through page-locked
memory (`allocator.read_back`). Placement is that of the other strategies, call for call.
"""

from __future__ import annotations

from functools import cached_property
from typing import Final

import torch

from allocator.device_plan import descending_by_rank, live_places, selected
from allocator.errors import CorruptMappingError
from allocator.free_lists import HoleList
from allocator.late_room import LateRoom
from allocator.unsettled import FAR, PendingBatch

#: Places of a window, or holes, from which on none is treated with a branch of its own: there are too many to predict them.
LARGE_WINDOW: Final = 768
#: Pages of a band for each hole up to which holes are sorted by counting, which passes over the whole band.
DENSE: Final = 16


class DeviceMultiEndedAllocator(LateRoom):
    """`MultiEndedAllocator` with ``strategy="device"``. Here is the flush where numbers are there at once (a CPU); `LateFlush` has the one
    where they are not, `LateRoom` what an alloc does then."""

    # -- flush

    def _flush(self, *, urgent: bool) -> int:
        """One compaction pass; returns pages moved. No synchronisation."""
        if not self.lazy_compaction:
            return 0
        is_immediate = self._read_back.immediate
        if not is_immediate:
            self._look_for_errors()
        if urgent:
            self._version += 1
        if self.moves_blocked():
            self._take_back_pending(wait=False)
            return 0
        if self._forward.transfers:
            self._forward.settle_transfers()
        if self._pending:
            self._take_back_pending(wait=urgent)
        if is_immediate:
            return self._pack() if urgent else self._pack_in_part()
        with self._blaming_faults():
            return self._pack_late() if urgent else self._pack_in_part_late()

    # What a short flush takes is calls more than work: so there are few of them, torch's and Python's.

    def _pack(self) -> int:
        """The urgent pass: the ``H`` pages next to the watermark end up vacant, so it retreats by ``H``."""
        holes = self.holes
        count = holes.pages.shape[0]
        if not count:
            return 0
        grows_up = self.grow_direction == "up"
        mark = self._mark
        low = mark - count if grows_up else mark + 1
        owners = self._tables.physical_to_virtual[low : low + count]
        is_live = owners >= 0
        moves = self._read_back.read_one(is_live.count_nonzero())
        dst_pages = self._places_for(moves, holes, low)
        if moves:
            self._forward.settle()
            self._move_out_of(owners, is_live, low, dst_pages)
        self._mark = mark - count if grows_up else mark + count
        holes.clear()
        return moves

    def _places_for(self, live: int, holes: HoleList, low: int) -> torch.Tensor:
        """The places of the ``live`` pages in the window that begins at page ``low`` and has as many pages as there are ``holes``: those
        holes that lie outside.

        Returns:
            int64 ``[live]``, descending: in the order of the pages by number, so that the page nearest the watermark gets the hole farthest
            from it.

        Raises:
            CorruptMappingError: another number of holes lies outside.
        """
        pages = holes.pages
        count = pages.shape[0]
        grows_up = self.grow_direction == "up"
        # The holes farthest from the watermark, one more than there are live pages or all, descending.
        most = live + 1 if live < count else count
        if holes.is_sorted:
            down = (pages[:most] if grows_up else pages[count - most :]).flip(0)
        elif count >= LARGE_WINDOW and self._is_dense(count):
            down = descending_by_rank(pages, *self._band_pages())
            down = down[count - most :] if grows_up else down[:most]
        else:
            down = pages.topk(most, -1, not grows_up)[0]  # the largest, or the smallest
            if grows_up:
                down = down.flip(0)
        # As many lie outside as there are live pages if the border is between that many and the next, and they are asked where they lie.
        if grows_up:
            following, last = self._read_back.read_two(down, 0, most - live if live else 0)
            fits = (not live or last < low) and (live == count or following >= low)
        else:
            last, following = self._read_back.read_two(down, live - 1 if live else 0, most - 1)
            fits = (not live or last >= low + count) and (live == count or following < low + count)
        if not fits:
            raise self._contradiction(pages, live, low)
        if live == count:
            return down
        return down[1:] if grows_up else down[:live]

    def _is_dense(self, count: int) -> bool:
        """Whether ``count`` holes are sorted faster by counting, which takes time in proportion to the band, than by comparing them."""
        return count >= LARGE_WINDOW and self._allocated_pages() <= DENSE * count

    def _sorted_holes(self) -> torch.Tensor:
        """All holes, ascending; int64 ``[n]``."""
        holes = self.holes
        if not holes.is_sorted and self._is_dense(len(holes)):
            holes.set_sorted(descending_by_rank(holes.pages, *self._band_pages()).flip(0))
        return holes.sorted()

    def _move_out_of(
        self, owners: torch.Tensor, is_live: torch.Tensor, low: int, dst_pages: torch.Tensor
    ) -> torch.Tensor:
        """Move the live pages out of the window that begins at page ``low``, the lowest to the first of ``dst_pages``.

        Args:
            owners: the window's part of the inverse table, int64 ``[window]``, a view of it.
            is_live: which of its pages have one, bool ``[window]``.
            dst_pages: int64 ``[moves]``, as many as there are live pages.

        Returns:
            The pages moved, ascending.
        """
        moves, window = dst_pages.shape[0], owners.shape[0]
        pages = self._numbers[low : low + window]
        tables = self._tables
        if moves == window:
            src_pages, virtual_pages = pages, owners.clone()
        else:
            if window < LARGE_WINDOW:
                src_pages = pages.where(is_live, self._far).topk(moves, -1, False)[0]  # the smallest
            else:
                src_pages = selected(pages, is_live, moves)
            virtual_pages = tables.physical_to_virtual.index_select(0, src_pages)
        self._kvcache.move_physical_pages(dst_pages, src_pages, self.page_size)
        tables.bind(virtual_pages, dst_pages)
        owners.fill_(-1)
        return src_pages

    @cached_property
    def _far(self) -> torch.Tensor:
        """A number beyond those of all pages, int64 ``[]``."""
        return torch.full((), FAR, dtype=torch.int64, device=self.device)

    def _pack_in_part(self) -> int:
        """Any other pass: up to the cap, and up to the first page that the running forward will write.

        Mostly the cap is far and nothing waits for an event. Then the live pages of an urgent pass's window move, as far as that page."""
        holes = self.holes
        count = holes.pages.shape[0]
        if not count:
            return 0
        tokens = self._forward.unfinished_write_set()
        if self._unchanged_since_idle() and self._idle is not None and self._forward.writing is self._idle[1]:
            return 0
        if self._pending or count > self._lazy_max_moves_per_call:
            return self._pack_up_to_a_limit(None if tokens is None else self._pages_written(tokens))
        grows_up = self.grow_direction == "up"
        mark = self._mark
        low = mark - count if grows_up else mark + 1
        high = low + count
        owners = self._tables.physical_to_virtual[low:high]
        is_live = owners >= 0
        live = moves = self._read_back.read_one(is_live.count_nonzero())
        stop = None
        if live and tokens is not None:
            page = self._first_page_written(tokens)
            if low <= page < high:
                stop = page
        touching = 0
        if live < count or stop is not None:
            ascending = self._sorted_holes()
            # A hole touches the watermark exactly if it is where it would be if all did.
            is_touching = ascending == self._numbers[low:high]
            touching = self._read_back.read_one(is_touching.count_nonzero())
        if live or touching < count:
            dst_pages = self._places_for(live, holes, low)
        if stop is not None:
            # Of the window only what is nearer to the watermark than the first page about to be written.
            nearer = slice(stop + 1 - low, None) if grows_up else slice(stop - low)
            owners, is_live, low = owners[nearer], is_live[nearer], stop + 1 if grows_up else low
            moves = self._read_back.read_one(is_live.count_nonzero())
            dst_pages = dst_pages[live - moves :] if grows_up else dst_pages[:moves]
        if touching:
            self._mark = mark - touching if grows_up else mark + touching
        if moves + touching == count:
            holes.clear()
        elif moves or touching:
            holes.set_sorted(
                ascending[moves : count - touching] if grows_up else ascending[touching : count - moves]
            )
        if not moves:
            self._note_idle(is_capped=False, holds_back=True)
            return 0
        src_pages = self._move_out_of(owners, is_live, low, dst_pages)
        holds_back = self._vacate_pages(src_pages.flip(0) if grows_up else src_pages)
        self._note_idle(is_capped=moves == self._lazy_max_moves_per_call, holds_back=holds_back)
        return moves

    def _pack_up_to_a_limit(self, written: torch.Tensor | None) -> int:
        """The same where the cap may end it, or pages in pending reuse lie in between: pair by pair.

        Args:
            written: pages that the running forward has yet to write, as `_pages_written` gives them.
        """
        holes = self._retreat_over_touching(self._sorted_holes())
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

    def _first_page_written(self, tokens: torch.Tensor) -> int:
        """The page nearest the watermark that the running forward has yet to write (``tokens``: virtual ids); one outside the band if
        there is none."""
        pages = self._pages_written(tokens)
        if self.grow_direction == "down":
            lowest = self._read_back.read_one(pages.min())
            if lowest > self._mark:
                return lowest
        return self._read_back.read_one(self._nearest_of(pages))

    def _nearest_of(self, pages: torch.Tensor) -> torch.Tensor:
        """The page nearest the watermark, or one beyond the band's other end if none is in the band; int64 ``[]``."""
        if self.grow_direction == "up":
            return pages.max()
        # Padding tokens are on page 0, and tokens freed since on -1.
        return torch.where(pages <= self._mark, self.num_pages, pages).min()

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
        ascending = torch.sort(freed_pages)[0]
        if not self._read_back.immediate:
            self._compact_late(ascending)
            return
        freed = HoleList(self.device)
        freed.set_sorted(ascending)
        count = ascending.shape[0]
        low = self._mark - count if self.grow_direction == "up" else self._mark + 1
        owners = self._tables.physical_to_virtual[low : low + count]
        is_live = owners >= 0
        moves = self._read_back.read_one(is_live.count_nonzero())
        dst_pages = self._places_for(moves, freed, low)
        self._retreat(count)
        if moves:
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
