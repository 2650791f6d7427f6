"""`DeviceFloatMultiEndedAllocator`: a float that gives its border holes back without reading them on the host."""

from __future__ import annotations

import torch

from allocator.device_release import DeviceReleasingBand
from allocator.middle import FloatMultiEndedAllocator


class DeviceFloatMultiEndedAllocator(DeviceReleasingBand, FloatMultiEndedAllocator):
    """`FloatMultiEndedAllocator` with ``strategy="device"``. `make_room` and `compact_holes` plan on the host as before."""

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
        low, high = self._values(self._read_back.post(at_low, at_high))[:2]
        if low or high:
            self.holes.set_sorted(holes[low : count - high])
            self.low_wm_page += low
            self.high_wm_page -= high
        return low + high
