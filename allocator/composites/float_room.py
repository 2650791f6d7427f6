"""What fits into a buffer with a float in the middle, and what may be moved to make a request fit.

A request takes its full pages first, off the high end, then its window pages: holes of the float, the rest in one piece below or above its
span. Every rule here is an inequality on frontiers, in bytes; the float's pages are counted on its own grid.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping

from allocator.band import Band
from allocator.composites.paired import UnifiedSWAAllocatorBase
from allocator.end import MultiEndedAllocator
from allocator.middle import FloatMultiEndedAllocator


class FloatRoom(UnifiedSWAAllocatorBase):
    """The capacity half of `allocator.composites.mamba_swa.UnifiedMambaSWATokenToKVPoolAllocator`. The ladder, and so what is moved for
    whom, is that of SGLang 0.5.23 (``unified_hybrid_swa.py``)."""

    swa_attn_allocator: FloatMultiEndedAllocator
    mamba_allocator: MultiEndedAllocator

    # -- what fits now

    def _fits_as_it_lies(self, full_pages: int, swa_pages: int) -> bool:
        """Whether so many pages of both sides can be taken as everything lies."""
        full, swa = self.full_attn_allocator, self.swa_attn_allocator
        full_beyond = max(0, full_pages - len(full.holes))
        swa_beyond = max(0, swa_pages - len(swa.holes))
        if full_beyond > full._index_room() or swa_pages > len(swa.holes) + swa._index_room():
            return False
        full_bytes = full_beyond * full.entry_bytes_per_page
        if full_bytes > full._current_gap_bytes():
            return False
        states_end = swa._chain_high_frontier_below_bytes()
        return swa_beyond <= self._float_room(states_end, full._byte_low_frontier() - full_bytes)

    def _float_room(self, low_byte: int, high_byte: int) -> int:
        """Pages in one piece that the float can grow by, between a low and a high neighbour that end there."""
        swa = self.swa_attn_allocator
        if swa._is_frontier_transparent():
            return swa.pages_in_band(low_byte=low_byte, high_byte=high_byte)
        return max(
            swa.pages_in_band(low_byte=low_byte, high_byte=swa._byte_low_frontier()),
            swa.pages_in_band(low_byte=swa._byte_high_frontier(), high_byte=high_byte),
        )

    def _compute_available_size(self) -> int:
        most = min(
            len(pool.holes) + pool._index_room()
            for pool in (self.full_attn_allocator, self.swa_attn_allocator)
        )
        # A larger demand leaves less of the gap and asks for more: what does not fit never fits again.
        too_many = bisect_left(range(1, most + 1), True, key=lambda n: not self._fits_as_it_lies(n, n))
        return too_many * self.page_size

    # -- making it fit

    def ensure_capacity(self, full_tokens: int, swa_tokens: int) -> bool:
        if full_tokens < 0 or swa_tokens < 0:
            return False
        full_pages, swa_pages = (-(-int(tokens) // self.page_size) for tokens in (full_tokens, swa_tokens))
        self._poll()
        if self._fits_as_it_lies(full_pages, swa_pages):
            return True
        # On bounds alone, where sizes come late, nothing is refused and nothing is moved.
        self._settle()
        if self._fits_as_it_lies(full_pages, swa_pages):
            return True
        if full_tokens != swa_tokens:
            return self._make_room_for_both(full_pages, swa_pages)
        pages = full_pages
        if not self._has_ids(pages):
            return False
        if self._fits_after_flush(pages):
            # What was worked out holds for the float's span as it is: it must not be trimmed before.
            self._flush_ends()
            return self._fits_as_it_lies(pages, pages)
        if self._room_above_float(pages) is not None:
            return self._move_float_down(pages)
        if self._bytes_short(pages) > 0:
            return False
        return self._make_room_for_both(pages, pages)

    def _flush_ends(self) -> None:
        self.full_attn_allocator.flush_for_allocation()
        self.mamba_allocator.flush_for_allocation()
        self._settle()

    def _make_room_for_both(self, full_pages: int, swa_pages: int) -> bool:
        """Pack everything, and if that is not enough, have the float move. It goes first: what it gives back without moving anything may
        be all that is needed."""
        for pool in (self.swa_attn_allocator, self.full_attn_allocator, self.mamba_allocator):
            pool.flush_for_allocation()
        self._settle()
        if self._fits_as_it_lies(full_pages, swa_pages):
            return True
        demand: Mapping[Band, int] = {
            self.full_attn_allocator: full_pages,
            self.swa_attn_allocator: swa_pages,
            self.mamba_allocator: 0,
        }
        self.swa_attn_allocator.open_side_for(demand)
        return self._fits_as_it_lies(full_pages, swa_pages)

    def _move_float_down(self, pages: int) -> bool:
        self._flush_ends()
        if not self._has_ids(pages):
            return False
        if self._fits_as_it_lies(pages, pages):
            return True
        min_bytes = self._room_above_float(pages, flush_ends=False)
        if min_bytes is None:
            return False
        self.swa_attn_allocator.make_room(side="high", min_bytes=min_bytes)
        return self._has_ids(pages) and self._fits_as_it_lies(pages, pages)

    # -- what would fit

    def _has_ids(self, pages: int) -> bool:
        """Whether there are ids, and numbers of window pages, for so many."""
        return (
            pages <= self.full_attn_allocator.free_id_count and pages <= self.swa_attn_allocator._index_room()
        )

    def _frontiers_after(self, pages: int, *, flush_ends: bool = True) -> tuple[int, int, int]:
        """In bytes: where the full band begins before and after it was given ``pages``, and where the states end, both ends having been
        packed as far as gates let them. Pages in pending reuse count as taken: nobody knows when their reader is done."""
        full, states = self.full_attn_allocator, self.mamba_allocator
        full_packed, states_packed = (
            len(pool.holes) if flush_ends and pool._drains_on_urgent_flush() else 0 for pool in (full, states)
        )
        before = full._byte_low_frontier() + full_packed * full.entry_bytes_per_page
        beyond_holes = max(0, pages - (len(full.holes) - full_packed))
        after = before - beyond_holes * full.entry_bytes_per_page
        return before, after, states._byte_high_frontier() - states_packed * states.entry_bytes_per_page

    def _full_can_reach(self, byte: int) -> bool:
        full = self.full_attn_allocator
        return byte >= full.min_page_index * full.entry_bytes_per_page

    def _fits_after_flush(self, pages: int) -> bool:
        """Whether packing the two ends is enough for ``pages`` of both sides."""
        swa = self.swa_attn_allocator
        _, full_begins, states_end = self._frontiers_after(pages)
        if not self._full_can_reach(full_begins):
            return False
        if swa._is_frontier_transparent():
            return pages <= self._float_room(states_end, full_begins)
        if full_begins < swa._byte_high_frontier():
            return False
        return max(0, pages - len(swa.holes)) <= self._float_room(states_end, full_begins)

    def _room_above_float(self, pages: int, *, flush_ends: bool = True) -> int | None:
        """Bytes to open above the float so that ``pages`` of both sides fit there, if the room below it takes what has to leave; else None.
        The float's holes are not counted on."""
        swa = self.swa_attn_allocator
        if swa._is_frontier_transparent() or swa.moves_blocked():
            return None
        before, after, states_end = self._frontiers_after(pages, flush_ends=flush_ends)
        if not self._full_can_reach(after):
            return None
        page_bytes = swa.entry_bytes_per_page
        span_end = min(after // page_bytes, swa.num_pages) - pages
        leaving = swa.high_wm_page - span_end
        room_below = swa.low_wm_page - max(-(-states_end // page_bytes), swa.min_page_index)
        if leaving <= 0 or room_below < leaving:
            return None
        return (min(before // page_bytes, swa.num_pages) - span_end) * page_bytes

    def _bytes_short(self, pages: int, *, given_up: tuple[int, int, int] = (0, 0, 0)) -> int:
        """Bytes that are missing however everything is moved; 0 promises nothing. ``given_up``: states, window and full tokens that
        would be gone by then."""
        chain = self._chain()
        live = sum(
            max(0, pool.allocated_count() - gone) * pool.entry_bytes
            for pool, gone in zip(chain, given_up, strict=True)
        )
        sink = min(pool.min_page_index * pool.entry_bytes_per_page for pool in chain)
        pair = self.full_attn_allocator.entry_bytes_per_page + self.swa_attn_allocator.entry_bytes_per_page
        return max(0, pages * pair + live + sink - self.unified_buffer.total_bytes)
