"""`DeviceFloatMultiEndedAllocator`: a float that gives its border holes back without reading them on the host."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import cast

import torch

from allocator.band import Band, Side
from allocator.device_release import DeviceReleasingBand
from allocator.middle import FloatMultiEndedAllocator
from allocator.read_back import LateCount, Ticket

#: What is to be done once the numbers of a ticket (none: at once) are there, in the order in which it was asked for.
Deferred = tuple[Ticket | None, Callable[[list[int]], None]]


class DeviceFloatMultiEndedAllocator(DeviceReleasingBand, FloatMultiEndedAllocator):
    """`FloatMultiEndedAllocator` with ``strategy="device"``. `make_room` and `compact_holes` plan on the host as before.

    Where numbers come late, a flush, and a free of tokens whose pages have to be counted, leave things to be done when the numbers are
    there, and later frees and flushes queue up behind them: none of these waits. What hands out pages, or needs the span as it is, waits
    for the queue to be done, which `blocking_reads` counts. Neighbours see the span as it was, which is never narrower.
    """

    def clear(self) -> None:
        self._deferred: deque[Deferred] = deque()
        self._is_working = False
        super().clear()

    # -- the queue

    @property
    def _is_settled(self) -> bool:
        return not self._deferred

    def _poll(self) -> None:
        self._work(wait=False)

    def _settle(self) -> None:
        if self._deferred and not self._is_working:
            self._work(wait=True)
            self._errors.look()

    def _work(self, *, wait: bool) -> None:
        if self._is_working:
            return
        self._is_working = True
        try:
            while self._deferred:
                ticket, act = self._deferred[0]
                if ticket is not None and wait:
                    ticket.wait()
                if ticket is not None and not ticket.ready():
                    return
                self._deferred.popleft()
                act([] if ticket is None else ticket.values())
        finally:
            self._is_working = False

    def _defer(self, ticket: Ticket | None, act: Callable[[list[int]], None]) -> None:
        self._deferred.append((ticket, act))
        self._poll()

    # -- the span: exact for whoever asks, as wide as it was for neighbours

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

    def _byte_low_frontier(self) -> int:
        return self._low * self.entry_bytes_per_page

    def _byte_high_frontier(self) -> int:
        return self._high * self.entry_bytes_per_page

    @property
    def live_page_count(self) -> int:
        self._settle()
        return super().live_page_count

    def allocated_count(self) -> int:
        self._settle()
        return super().allocated_count()

    def available_size(self) -> int:
        """Tokens that can be handed out now. Waits for the float's own numbers."""
        self._settle()
        return super().available_size()

    def schedulable_available_size(self) -> int:
        self._settle()
        return super().schedulable_available_size()

    # -- what needs everything as it is

    def _make_sure_of(self, num_pages: int) -> bool:
        self._settle()
        return super()._make_sure_of(num_pages)

    def _pages_for_growth(self, count: int) -> torch.Tensor | None:
        self._settle()
        return super()._pages_for_growth(count)

    def take_physical_pages(self, num_pages: int) -> torch.Tensor | None:
        self._settle()
        taken = super().take_physical_pages(num_pages)
        if taken is None or self._read_back.immediate or not self._errors.freezes:
            return taken
        # Of a buffer that was frozen by a fault the host may have a wrong idea: hand out the padding page, not somebody's.
        return torch.where(self._errors.ok, taken, 0)

    def _extend_span(self, num_pages: int) -> int | None:
        # Where a float grows depends on exactly where its neighbours end.
        self._settle_chain()
        return super()._extend_span(num_pages)

    def make_room(self, *, side: Side, min_bytes: int) -> int:
        self._settle_chain()
        self._require_no_fault()
        return super().make_room(side=side, min_bytes=min_bytes)

    def compact_holes(self, *, retreat_side: Side) -> int:
        self._settle()
        self._require_no_fault()
        return super().compact_holes(retreat_side=retreat_side)

    def _require_no_fault(self) -> None:
        """What plans on the host, from what it reads, moves nothing of a frozen buffer; it waits for the device in any case."""
        if not self._read_back.immediate:
            self._errors.look(wait=True)

    def open_side_for(self, demand: Mapping[Band, int]) -> None:
        self._settle_chain()
        super().open_side_for(demand)

    # -- free and flush

    def _free_pages(self, virtual_pages: torch.Tensor, *, may_repeat: bool) -> None:
        if self._is_settled:
            super()._free_pages(virtual_pages, may_repeat=may_repeat)
            return
        physical_pages = self._require_live(virtual_pages, may_repeat=may_repeat)
        self._order_after_readers()
        self._tables.unbind(virtual_pages, physical_pages)
        virtual_pages = virtual_pages.clone()  # the caller's, who may write to it
        self._defer(None, lambda _: self._take_back(virtual_pages, physical_pages))

    def _release_late(
        self,
        virtual_pages: torch.Tensor,
        physical_pages: torch.Tensor,
        count: torch.Tensor,
        *,
        least: int = 1,
    ) -> None:
        def act(values: list[int]) -> None:
            if values[0]:
                self._take_back(virtual_pages[: values[0]], physical_pages[: values[0]])

        self._defer(self._read_back.post(count), act)

    def _take_back(self, virtual_pages: torch.Tensor, physical_pages: torch.Tensor) -> None:
        if self._ids is not None:
            self._ids.append(virtual_pages)
        super()._release_physical(physical_pages)

    def _release_physical(self, physical_pages: torch.Tensor) -> None:
        if self._is_settled:
            super()._release_physical(physical_pages)
        else:
            self._defer(
                None, lambda _: super(DeviceFloatMultiEndedAllocator, self)._release_physical(physical_pages)
            )

    def flush_opportunistic(self) -> int:
        self._poll()
        return super().flush_opportunistic() if self._is_settled else self._flush(urgent=False)

    def _give_back_borders(self) -> int:
        if self._read_back.immediate:
            asked = self._ask_for_borders()
            return 0 if asked is None else self._shrink(asked[0], self._read_back.read(*asked[1:])[:2])
        given_back: list[int] = []

        def begin(_: list[int]) -> None:
            asked = self._ask_for_borders()
            if asked is None:
                given_back.append(0)
                return

            def finish(values: list[int]) -> None:
                given_back.append(self._shrink(asked[0], values[:2]))

            # Before whatever was asked for since.
            self._deferred.appendleft((self._read_back.post(*asked[1:]), finish))

        def read() -> int:
            self._settle()
            return given_back[0] if given_back else 0  # nothing if the pool was cleared meanwhile

        if self._is_settled or self._is_working:
            begin([])
        else:
            self._defer(None, begin)
        return given_back[0] if given_back else cast(int, LateCount(read))

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
