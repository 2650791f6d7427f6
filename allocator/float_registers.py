"""A float while numbers are on their way from the device: its exact state there, and what the host knows for certain.

`FloatRegisters` does on the device what `allocator.middle.FloatMultiEndedAllocator` does with numbers on the host: releases, giving back
borders, handing out pages. `SpanBounds` is the host's side: a span that is never narrower than the float's, and how many live pages there
are at least and at most. What a request is promised follows from it, whatever the numbers turn out to be.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from allocator.unsettled import FAR

#: Numbers of `FloatRegisters.report`, in their order.
LOW, HIGH, COUNT, FLAGS, GIVEN_BACK, LATE_IDS = range(6)


@dataclass
class FloatRegisters:
    """``holes``: int64 ``[capacity]``, the first ``count`` (int64 ``[]``) of them valid, in the order of the list. ``low``, ``high``: the
    span, int64 ``[]`` each, both past the last page while the float is empty. ``takes_high``: whether the next holes come from the high
    end, ``is_dirty``: whether a border page may be a hole, bool ``[]`` each. ``late_ids``: ids freed beyond those that were sure to be,
    int64 ``[]``."""

    holes: torch.Tensor
    count: torch.Tensor
    low: torch.Tensor
    high: torch.Tensor
    takes_high: torch.Tensor
    is_dirty: torch.Tensor
    late_ids: torch.Tensor
    num_pages: int

    def report(self, given_back: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What the host will be told, int64 ``[]`` each."""
        flags = torch.count_nonzero(self.takes_high) + 2 * torch.count_nonzero(self.is_dirty)
        return self.low, self.high, self.count, flags, given_back, self.late_ids

    def release(self, pages: torch.Tensor, count: torch.Tensor | int, numbers: torch.Tensor) -> None:
        """The first ``count`` of ``pages`` (int64 ``[n]``) become holes; if nothing is live then, there is no span either."""
        longer = torch.cat([self.holes, pages])
        # Within the list whatever happened: in a frozen pool the number may be anything.
        rows = (numbers[: pages.shape[0]] + self.count).clamp(0, longer.shape[0] - 1)
        longer.index_copy_(0, rows, pages)
        self.holes, self.count = longer[: self.num_pages], self.count + count
        is_empty = self.high - self.low <= self.count
        self.low = torch.where(is_empty, self.num_pages, self.low)
        self.high = torch.where(is_empty, self.num_pages, self.high)
        self.count = torch.where(is_empty, 0, self.count)
        is_dirty = self.is_dirty | (count > 0) if isinstance(count, torch.Tensor) else True
        self.is_dirty = is_dirty & ~is_empty

    def give_back_borders(self, numbers: torch.Tensor) -> torch.Tensor:
        """Shrink the span over holes at its borders; how many they were, int64 ``[]``."""
        self.is_dirty = torch.zeros_like(self.is_dirty)
        capacity = self.holes.shape[0]
        if not capacity:
            return torch.zeros_like(self.count)
        row = numbers[:capacity]
        ascending = self._ascending(row)
        is_hole = row < self.count
        # Something between the borders is live, so no hole touches both.
        at_low = torch.count_nonzero(is_hole & (ascending == row + self.low))
        at_high = torch.count_nonzero(is_hole & (ascending == row + (self.high - self.count)))
        given_back = at_low + at_high
        left = ascending.index_select(0, (row + at_low).clamp(max=capacity - 1))
        # The list keeps its order if nothing is given back: a request that takes all holes gets them as they came.
        self.holes = torch.where(given_back > 0, left, self.holes)
        self.count = self.count - given_back
        self.low, self.high = self.low + at_low, self.high - at_high
        return given_back

    def lacks(self, want: int, region: tuple[int | torch.Tensor, int | torch.Tensor]) -> torch.Tensor:
        """Whether `take` would find fewer than ``want`` pages: bool ``[]``."""
        region_low, region_high = region
        gap = torch.maximum(self.low - region_low, region_high - self.high)
        fresh = torch.where(self.high > self.low, gap, region_high - region_low)
        return self.count + fresh.clamp(min=0) < want

    def take(
        self, want: int, region: tuple[int | torch.Tensor, int | torch.Tensor], numbers: torch.Tensor
    ) -> torch.Tensor:
        """Hand out ``want`` pages as `FloatMultiEndedAllocator.take_physical_pages` would: int64 ``[want]``.

        Args:
            region: the first page between the neighbours and the one past the last, numbers or int64 ``[]``.
        """
        rows, count, capacity = numbers[:want], self.count, self.holes.shape[0]
        beyond = (want - count).clamp(min=0)
        first = self._extend(beyond, region) - count
        if not capacity:
            return rows + first
        ascending = self._ascending(numbers[:capacity])
        start = torch.where(self.takes_high, count - want, 0)
        in_order = ascending.index_select(0, (rows + start).clamp(0, capacity - 1))
        as_listed = self.holes.index_select(0, rows.clamp(max=capacity - 1))
        from_holes = torch.where(count > want, in_order, as_listed)
        kept = numbers[:capacity] + torch.where(self.takes_high, 0, want)
        self.holes = ascending.index_select(0, kept.clamp(max=capacity - 1))
        self.count = (count - want).clamp(min=0)
        self.takes_high = self.takes_high ^ (count > 0)
        return torch.where(rows < count, from_holes, rows + first)

    def _extend(
        self, beyond: torch.Tensor, region: tuple[int | torch.Tensor, int | torch.Tensor]
    ) -> torch.Tensor:
        """Grow the span by ``beyond`` pages in one piece; the first of them, int64 ``[]``."""
        region_low, region_high = region
        is_empty = self.high <= self.low
        gap_low, gap_high = self.low - region_low, region_high - self.high
        goes_up = (beyond <= gap_high) & ((gap_high >= gap_low) | (beyond > gap_low))
        middle = region_low + torch.div(region_high - region_low - beyond, 2, rounding_mode="floor")
        first = torch.where(goes_up, self.high, self.low - beyond)
        first = torch.where(is_empty, middle, first)
        self.low = torch.where(is_empty, first, torch.where(goes_up, self.low, self.low - beyond))
        self.high = torch.where(is_empty, first + beyond, torch.where(goes_up, self.high + beyond, self.high))
        return first

    def _ascending(self, row: torch.Tensor) -> torch.Tensor:
        """The valid holes ascending, and `FAR` behind them."""
        return torch.sort(torch.where(row < self.count, self.holes, FAR))[0]


@dataclass(frozen=True)
class Growth:
    """What a request may have done to the span: grown by ``below`` or ``above`` pages at most, never beyond ``limits``; or, where there may
    have been none, begun as ``middle``, None if that cannot be."""

    below: int
    above: int
    limits: tuple[int, int]
    middle: tuple[int, int] | None


@dataclass
class SpanBounds:
    """The float's span lies in ``[low, high)`` and is all of it if ``is_known``; of its pages ``least_live`` to ``most_live`` are live.
    With none it may be nowhere, and its next pages in the middle between the neighbours."""

    low: int
    high: int
    least_live: int
    most_live: int
    is_known: bool = True

    @property
    def least_holes(self) -> int:
        """Holes that are certainly there."""
        if not self.is_known or not self.least_live:
            return 0
        return self.high - self.low - self.most_live

    def certain_pages(self, gap_low: int, gap_high: int) -> int:
        """Pages that one request can be given, holes and one gap together.

        The span is the bound less ``a`` pages at its low border and ``b`` at its high one, none of them live. That makes
        ``room + max(gap_low - b, gap_high - a)`` pages, ``room`` being what is not live of the bound, and this is the least of it.

        Args:
            gap_low, gap_high: pages between the bound and the neighbours, less than nothing where bounds overlap.
        """
        room = self.high - self.low - self.most_live
        if self.is_known and self.least_live:
            return room + max(gap_low, gap_high, 0)
        apart = abs(gap_low - gap_high)
        lost = room if room <= apart else (room + apart) // 2
        certain = room + max(gap_low, gap_high) - lost
        if not self.least_live:
            certain = min(certain, gap_low + (self.high - self.low) + gap_high)
        return max(0, certain)

    def release(self, least: int, most: int) -> None:
        self.most_live -= least
        self.least_live = max(0, self.least_live - most)

    def take(self, pages: int, growth: Growth) -> None:
        """``pages`` were handed out."""
        if growth.below or growth.above or growth.middle is not None:
            self.is_known = False
        self.low = min(self.low, max(self.low - growth.below, growth.limits[0]))
        self.high = max(self.high, min(self.high + growth.above, growth.limits[1]))
        if growth.middle is not None:
            self.low, self.high = min(self.low, growth.middle[0]), max(self.high, growth.middle[1])
        self.most_live += pages
        self.least_live += pages
