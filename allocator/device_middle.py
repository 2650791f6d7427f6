"""`DeviceFloatMultiEndedAllocator`: a float that gives its border holes back without reading them on the host."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from allocator.band import Band, Side
from allocator.device_release import DeviceReleasingBand
from allocator.middle import FloatMultiEndedAllocator


class DeviceFloatMultiEndedAllocator(DeviceReleasingBand, FloatMultiEndedAllocator):
    """`FloatMultiEndedAllocator` with ``strategy="device"``. `make_room` and `compact_holes` plan on the host as before."""

    # Where a float grows, and what it opens, depends on exactly where its neighbours end; that is waited for, and counted.

    def _extend_span(self, num_pages: int) -> int | None:
        self._settle_chain()
        return super()._extend_span(num_pages)

    def make_room(self, *, side: Side, min_bytes: int) -> int:
        self._settle_chain()
        return super().make_room(side=side, min_bytes=min_bytes)

    def open_side_for(self, demand: Mapping[Band, int]) -> None:
        self._settle_chain()
        super().open_side_for(demand)

    def _give_back_borders(self) -> int:
        if self._park_if_empty() or not self._holes_dirty or not self._hole_pages():
            self._holes_dirty = False
            return 0
        self._holes_dirty = False
        # The list keeps its order if nothing is given back: a request that takes all holes gets them as they came.
        holes = torch.sort(self.holes.pages)[0]
        count = holes.shape[0]
        numbers = self._numbers[:count]
        # Something between the borders is live, so no hole touches both.
        at_low = torch.count_nonzero(holes == numbers + self.low_wm_page)
        at_high = torch.count_nonzero(holes == numbers + (self.high_wm_page - count))
        low, high = self._read_back.read(at_low, at_high)[:2]
        if low or high:
            self.holes.set_sorted(holes[low : count - high])
            self.low_wm_page += low
            self.high_wm_page -= high
        return low + high
