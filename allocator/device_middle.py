"""`DeviceFloatMultiEndedAllocator`: a float that gives its border holes back without reading them on the host."""

from __future__ import annotations

import torch

from allocator.late_middle import LateFloat


class DeviceFloatMultiEndedAllocator(LateFloat):
    """`FloatMultiEndedAllocator` with ``strategy="device"``. Here is what it gives back where numbers are there at once (a CPU);
    `LateFloat` has what is done where they are not. `make_room` and `compact_holes` plan on the host as before."""

    def _give_back_borders(self) -> int:
        if not self._read_back.immediate:
            return self._give_back_borders_late()
        asked = self._ask_for_borders()
        return 0 if asked is None else self._shrink(asked[0], self._read_back.read(*asked[1:])[:2])

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
