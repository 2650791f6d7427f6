"""A float where numbers come late: frees, flushes and requests that fit for certain go on without them.

A request that what is known for certain does not cover waits: it would have to be refused otherwise. So do `make_room` and `compact_holes`,
which go on from exact numbers. `blocking_reads` counts it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

import torch

from allocator.band import Band, Side
from allocator.float_registers import (
    COUNT,
    FLAGS,
    GIVEN_BACK,
    HIGH,
    LATE_IDS,
    LOW,
    FloatRegisters,
    Growth,
    SpanBounds,
)
from allocator.late_ids import LateIds
from allocator.late_lists import BoundedHoleList
from allocator.middle import FloatMultiEndedAllocator
from allocator.read_back import SLOTS, LateCount, Ticket


@dataclass
class _Done:
    """One thing that was done: what it does to bounds, and what brings the exact state after it."""

    bound: Callable[[SpanBounds], None]
    ticket: Ticket


#: Before the first `clear`; holds nothing whatever is appended.
_NOTHING_DONE: deque[_Done] = deque(maxlen=0)


class LateFloat(LateIds, FloatMultiEndedAllocator):
    """A float that is *settled* (``_journal`` is empty; everything is exact) or not."""

    holes: BoundedHoleList
    _registers: FloatRegisters
    _bounds: SpanBounds
    _journal: deque[_Done] = _NOTHING_DONE

    def clear(self) -> None:
        if self._journal:  # the end whose turn it is outlives a clear
            last = self._journal[-1].ticket
            last.wait()
            self._next_hole_end = "high" if last.values()[FLAGS] & 1 else "low"
        self._journal = deque()
        self.holes = BoundedHoleList(self.device)
        super().clear()

    # -- settling

    @property
    def _is_settled(self) -> bool:
        return not self._journal

    def _poll(self) -> None:
        known: list[int] | None = None
        while self._journal and self._journal[0].ticket.ready():
            known = self._journal.popleft().ticket.values()
        if known is None:
            return
        low, high, count, flags = known[LOW], known[HIGH], known[COUNT], known[FLAGS]
        if self._journal:
            live = high - low - count
            self._bounds = SpanBounds(low, high, live, live)
            for done in self._journal:
                done.bound(self._bounds)
            self._show_bounds()
            return
        pages = self._registers.holes[:count]
        del self._registers
        self._low, self._high = low, high
        self.holes.len_bound = None
        self.holes.set_unsorted(pages)
        self._next_hole_end = "high" if flags & 1 else "low"
        self._holes_dirty = bool(flags & 2)
        self._settle_ids(known[LATE_IDS])

    def _settle(self) -> None:
        if not self._journal:
            return
        self._poll()
        if self._journal:
            # Those posted before it on the same stream are there then too.
            self._journal[-1].ticket.wait()
            self._poll()
            self._errors.look()

    def _youngest_ticket(self) -> Ticket | None:
        return self._journal[-1].ticket if self._journal else None

    def _unsettle(self) -> FloatRegisters:
        if len(self._journal) >= SLOTS // 2:
            # More read-backs than that under way would need each other's slots.
            self._settle()
        if not self._journal:

            def register(value: int) -> torch.Tensor:
                return torch.full((), value, dtype=torch.int64, device=self.device)

            pages, live = self.holes.pages, self._high - self._low - len(self.holes)
            self._bounds = SpanBounds(self._low, self._high, live, live)
            self._registers = FloatRegisters(
                holes=pages, count=register(pages.shape[0]), low=register(self._low), high=register(self._high),
                takes_high=register(self._next_hole_end == "high") > 0, is_dirty=register(self._holes_dirty) > 0,
                late_ids=register(0), num_pages=self.num_pages,
            )  # fmt: skip
        return self._registers

    def _note(self, bound: Callable[[SpanBounds], None], given_back: torch.Tensor | None = None) -> Ticket:
        registers = self._registers
        if given_back is None:
            given_back = torch.zeros_like(registers.count)
        ticket = self._read_back.post(*registers.report(given_back))
        self._journal.append(_Done(bound, ticket))
        bound(self._bounds)
        self._show_bounds()
        return ticket

    def _show_bounds(self) -> None:
        bounds = self._bounds
        self._low, self._high = bounds.low, bounds.high
        self.holes.len_bound = bounds.least_holes

    # -- the span: exact for whoever asks, as wide as it may be for neighbours

    @property
    def low_wm_page(self) -> int:
        """First page of the span. Waits for the device while what it is is on its way."""
        self._settle()
        return self._low

    @low_wm_page.setter
    def low_wm_page(self, page: int) -> None:
        self._low = page

    @property
    def high_wm_page(self) -> int:
        """The page past the span; as `low_wm_page`."""
        self._settle()
        return self._high

    @high_wm_page.setter
    def high_wm_page(self, page: int) -> None:
        self._high = page

    def _span_pages(self) -> int:
        return self._high - self._low

    def _live_pages(self) -> int:
        return super()._live_pages() if self._is_settled else self._bounds.most_live

    def _byte_low_frontier(self) -> int:
        return self._low * self.entry_bytes_per_page

    def _byte_high_frontier(self) -> int:
        return self._high * self.entry_bytes_per_page

    def _byte_low_frontier_on_device(self) -> int | torch.Tensor:
        if self._is_settled:
            return self._byte_low_frontier()
        registers = self._registers
        return torch.where(
            registers.high > registers.low,
            registers.low * self.entry_bytes_per_page,
            self._low_frontier_above_on_device(),
        )

    def _byte_high_frontier_on_device(self) -> int | torch.Tensor:
        if self._is_settled:
            return self._byte_high_frontier()
        registers = self._registers
        return torch.where(
            registers.high > registers.low,
            registers.high * self.entry_bytes_per_page,
            self._high_frontier_below_on_device(),
        )

    def _band_on_device(self) -> tuple[int | torch.Tensor, int | torch.Tensor]:
        if self._is_settled:
            return self._band_pages()
        return self._registers.low, self._registers.high

    def _knows_live(self) -> bool:
        return self._is_settled

    @property
    def live_page_count(self) -> int:
        self._settle()
        return super().live_page_count

    def allocated_count(self) -> int:
        self._settle()
        return super().allocated_count()

    # -- sizes: lower bounds while numbers are on their way

    def _certain_size(self) -> int:
        self._poll_chain()
        if self._is_settled:
            return super()._certain_size()
        return self._bounds.certain_pages(*self._certain_gaps()) * self.page_size

    def _certain_schedulable_size(self) -> int:
        self._settle()
        return super()._certain_schedulable_size()

    def _certain_gaps(self) -> tuple[int, int]:
        """Pages below and above the span's bound, up to the neighbours' bounds."""
        low, high = self._region_bounds_pages()
        return self._low - low, high - self._high

    # -- alloc

    def take_physical_pages(self, num_pages: int) -> torch.Tensor | None:
        if self._read_back.immediate:
            return super().take_physical_pages(num_pages)
        is_exact = self._poll_chain() or (self._is_settled and num_pages <= len(self.holes))
        if not is_exact and num_pages * self.page_size > self._certain_size():
            if self._is_promised:
                self._note_broken_promise(self._lacks(num_pages))
            else:
                self._settle_chain()
                is_exact = True
        with self._blaming_faults():
            if not is_exact:
                return self._unless_frozen(self._take_late(num_pages))
            taken = super().take_physical_pages(num_pages)
        return taken if taken is None else self._unless_frozen(taken)

    def _neighbours_are_settled(self) -> bool:
        return all(
            neighbour is None or neighbour._is_settled
            for neighbour in (self._neighbour("low"), self._neighbour("high"))
        )

    def _lacks(self, num_pages: int) -> torch.Tensor:
        """Whether ``num_pages`` are more than can be handed out: bool ``[]``, on the device, exact."""
        return self._unsettle().lacks(num_pages, self._region_on_device())

    def _take_late(self, num_pages: int) -> torch.Tensor:
        """Pages that are certain to be there."""
        registers = self._unsettle()
        growth = self._growth(num_pages)
        taken = registers.take(num_pages, self._region_on_device(), self._numbers)
        self._note(lambda bounds: bounds.take(num_pages, growth))
        return taken

    def _growth(self, num_pages: int) -> Growth:
        """What handing out so many pages may do to the span."""
        bounds = self._bounds
        grows = max(0, num_pages - bounds.least_holes)
        if not self._neighbours_are_settled():
            # A float that was nowhere begins in the middle between its neighbours, wherever that is.
            limits = self.min_page_index, self.num_pages
            return Growth(grows, grows, limits, None if bounds.least_live else limits)
        limits = low, high = self._region_bounds_pages()
        if not bounds.least_live:
            first = low + (high - low - num_pages) // 2
            return Growth(grows, grows, limits, (first, first + num_pages))
        gap_low, gap_high = self._certain_gaps()
        if bounds.is_known and gap_high >= gap_low and grows <= gap_high:
            return Growth(0, grows, limits, None)
        if bounds.is_known and gap_low > gap_high and grows <= gap_low:
            return Growth(grows, 0, limits, None)
        return Growth(grows, grows, limits, None)

    def _region_on_device(self) -> tuple[int | torch.Tensor, int | torch.Tensor]:
        """`_region_bounds_pages`, exact."""
        below, above = self._high_frontier_below_on_device(), self._low_frontier_above_on_device()
        page_bytes = self.entry_bytes_per_page
        low: int | torch.Tensor
        high: int | torch.Tensor
        if isinstance(below, int):
            low = max(-(-below // page_bytes), self.min_page_index)
        else:
            low = torch.div(below + (page_bytes - 1), page_bytes, rounding_mode="floor").clamp(
                min=self.min_page_index
            )
        if isinstance(above, int):
            high = min(above // page_bytes, self.num_pages)
        else:
            high = torch.div(above, page_bytes, rounding_mode="floor").clamp(max=self.num_pages)
        return low, high

    def _extend_span(self, num_pages: int) -> int | None:
        # Where a float grows depends on exactly where its neighbours end.
        self._settle_chain()
        return super()._extend_span(num_pages)

    # -- what moves pages

    def make_room(self, *, side: Side, min_bytes: int) -> int:
        self._settle_chain()
        with self._blaming_faults():
            return super().make_room(side=side, min_bytes=min_bytes)

    def compact_holes(self, *, retreat_side: Side) -> int:
        self._settle()
        with self._blaming_faults():
            return super().compact_holes(retreat_side=retreat_side)

    def open_side_for(self, demand: Mapping[Band, int]) -> None:
        self._settle_chain()
        super().open_side_for(demand)

    # -- free and flush

    def _release_late(
        self,
        virtual_pages: torch.Tensor,
        physical_pages: torch.Tensor,
        count: torch.Tensor,
        *,
        least: int = 1,
    ) -> None:
        most = physical_pages.shape[0]
        with self._blaming_faults():
            registers = self._unsettle()
            self._append_late_ids(virtual_pages, count, least)
            registers.late_ids = registers.late_ids + (count - least)
            registers.release(physical_pages, count, self._numbers)
            self._holes_dirty = True
            self._note(lambda bounds: bounds.release(least, most))

    def _release_physical(self, physical_pages: torch.Tensor) -> None:
        if self._read_back.immediate:
            super()._release_physical(physical_pages)
            return
        self._poll()
        if self._is_settled:
            super()._release_physical(physical_pages)
            return
        count = physical_pages.shape[0]
        with self._blaming_faults():
            registers = self._unsettle()
            registers.release(physical_pages, count, self._numbers)
            self._holes_dirty = True
            self._note(lambda bounds: bounds.release(count, count))

    def flush_opportunistic(self) -> int:
        self._poll()
        if self._is_settled:
            return super().flush_opportunistic()
        return self._flush(urgent=False) if self._holes_dirty else 0

    def _give_back_borders_late(self) -> int:
        self._poll()
        if self._is_settled and (self._park_if_empty() or not self._holes_dirty or not self._hole_pages()):
            self._holes_dirty = False
            return 0
        registers = self._unsettle()
        given_back = registers.give_back_borders(self._numbers)
        self._holes_dirty = False

        def bound(bounds: SpanBounds) -> None:
            bounds.is_known = False

        ticket = self._note(bound, given_back)

        def read() -> int:
            ticket.wait()
            return ticket.values()[GIVEN_BACK]

        return cast(int, LateCount(read))
