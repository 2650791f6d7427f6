"""`DeviceFloatMultiEndedAllocator`: a float that gives its border holes back without reading them on the host."""

from __future__ import annotations

import torch

from allocator.band import Side
from allocator.late_middle import LateFloat


class DeviceFloatMultiEndedAllocator(LateFloat):
    """`FloatMultiEndedAllocator` with ``strategy="device"``. Here is what it gives back where numbers are there at once (a CPU);
    `LateFloat` has what is done where they are not."""

    def _give_back_borders(self) -> int:
        if not self._read_back.immediate:
            return self._give_back_borders_late()
        asked = self._ask_for_borders()
        return 0 if asked is None else self._shrink(asked[0], self._read_back.read(*asked[1:])[:2])

    def _leave_border(self, side: Side, count: int) -> bool:
        """As on the host, with one read: how many holes there are beyond the pages that leave, and where the span ends afterwards."""
        # The list keeps its order if nothing moves: a request that takes all holes gets them as they came.
        low, high, holes = self._low, self._high, torch.sort(self.holes.pages)[0]
        num_holes, is_high = holes.shape[0], side == "high"
        live = high - low - num_holes
        is_live, rank = self._ranks(holes)
        ordinals = self._numbers_from_one(count)
        src_pages = torch.searchsorted(rank, (live + 1) - ordinals if is_high else ordinals) + low
        nearest = src_pages[-1]
        beyond = torch.count_nonzero(holes < nearest if is_high else holes > nearest)
        # Holes, farthest first, and behind them pages past the far border.
        row = self._numbers[:count]
        dst_pages = (low - 1) - (row - beyond) if is_high else high + (row - beyond)
        if num_holes:
            farthest = holes if is_high else holes.flip(0)
            in_hole = farthest.index_select(0, row.clamp(max=num_holes - 1))
            dst_pages = torch.where(row < beyond, in_hole, dst_pages)
        staying = (1, live - count) if is_high else (count + 1, live)
        first, last = (torch.searchsorted(rank, self._numbers[ordinal]) + low for ordinal in staying)
        places, new_low, new_last, fault = self._read_back.read(
            beyond,
            torch.minimum(first, dst_pages.amin()),
            torch.maximum(last, dst_pages.amax()),
            self._errors.log[0],
        )[:4]
        self._require_none(fault)
        if count - places > self._gap_pages()[0 if is_high else 1]:
            return False
        self._move_pages(src_pages, dst_pages)
        begin, end = min(low, new_low), max(high, new_last + 1)
        is_hole = torch.ones(end - begin, dtype=torch.bool, device=self.device)
        is_hole[low - begin : high - begin] = ~is_live
        is_hole.index_fill_(0, src_pages - begin, True).index_fill_(0, dst_pages - begin, False)
        self._low, self._high = new_low, new_last + 1
        unfilled = torch.cumsum(is_hole[new_low - begin : self._high - begin], 0)
        left = self._numbers_from_one(self._high - new_low - live)
        self.holes.set_sorted(torch.searchsorted(unfilled, left) + new_low)
        self._holes_dirty = False
        return True

    def _shift_to(self, first: int) -> int:
        """As on the host, with one read: where the live pages are, on which it depends how many can move at a time."""
        live = self._live_pages()
        _, rank = self._ranks(self.holes.pages)
        src_pages = torch.searchsorted(rank, self._numbers_from_one(live)) + self._low
        *places, fault = self._read_back.read_all(torch.cat([src_pages, self._errors.log[:1]]))
        self._require_none(fault)
        moved = 0
        for begin, end in self._shift_in_parts(places, first):
            self._move_pages(src_pages[begin:end], self._numbers[first + begin : first + end])
            moved += end - begin
        self._end_span_at(first, live)
        return moved

    def _require_none(self, fault: int) -> None:
        """Nothing moves in a frozen buffer: what was worked out there makes no sense. ``fault`` was read from the error log."""
        self._look_for_errors()
        if fault:
            self._errors.look(wait=True)

    def _ranks(self, holes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of every page of the span whether it is live (bool ``[n]``), and how many are up to and with it (int64 ``[n]``)."""
        is_live = torch.ones(self._high - self._low, dtype=torch.bool, device=self.device)
        # In a frozen buffer holes may be anything, and an index out of range ends a CUDA context.
        is_live.index_fill_(0, (holes - self._low).clamp(0, self._high - self._low - 1), False)
        return is_live, torch.cumsum(is_live, 0)

    def _move_pages(self, src_pages: torch.Tensor, dst_pages: torch.Tensor) -> None:
        """Bytes and tables; int64 ``[n]`` each, no page in both."""
        virtual_pages = self.physical_to_virtual.index_select(0, src_pages)
        self._kvcache.move_physical_pages(dst_pages, src_pages, self.page_size)
        self._tables.remap_moved(virtual_pages, src_pages, dst_pages)

    def _ask_for_borders(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """The holes, ascending, and how many of them touch the low and the high border (int64 ``[]`` each); None if nothing is to do."""
        if self._park_if_empty() or not self._holes_dirty or not self._hole_pages():
            self._holes_dirty = False
            return None
        self._holes_dirty = False
        # The list keeps its order if nothing is given back: a request that takes all holes gets them as they came.
        holes = torch.sort(self.holes.pages)[0]
        numbers = self._numbers[: holes.shape[0]]
        # Something between the borders is live, so no hole touches both.
        at_low = torch.count_nonzero(holes == numbers + self._low)
        at_high = torch.count_nonzero(holes == numbers + (self._high - holes.shape[0]))
        return holes, at_low, at_high

    def _shrink(self, holes: torch.Tensor, touching: list[int]) -> int:
        low, high = touching
        if low or high:
            self.holes.set_sorted(holes[low : holes.shape[0] - high])
            self._low += low
            self._high -= high
        return low + high
