"""Allocators of the ``device`` strategy on a CPU that behaves like a busy GPU: numbers come back late."""

from __future__ import annotations

from typing import Any

import torch

from allocator.device_end import DeviceMultiEndedAllocator
from allocator.device_middle import DeviceFloatMultiEndedAllocator
from allocator.read_back import ReadBack


class _LateEvent:
    """True once ``after`` questions were asked since, about anything (never, with None), or once somebody waited for it or for a later
    one. Waiting reads the device, so that a ledger sees it."""

    def __init__(self, owner: NeverReadBack, numbers: tuple[torch.Tensor, ...]) -> None:
        self._owner, self._number, self._asked_before = owner, numbers[0], owner.asked
        owner.posted += 1
        self._order = owner.posted

    def query(self) -> bool:
        owner = self._owner
        owner.asked += 1
        if owner.after is not None and owner.asked - self._asked_before > owner.after:
            owner.arrived = max(owner.arrived, self._order)
        return self._order <= owner.arrived

    def wait(self) -> None:
        """Orders a stream, of which there is one here."""

    def synchronize(self) -> None:
        self._number.tolist()
        self._owner.arrived = max(self._owner.arrived, self._order)


class NeverReadBack(ReadBack):
    """Numbers that come only when somebody waits for them."""

    after: int | None = None

    def __init__(self, device: str | torch.device) -> None:
        super().__init__(device)
        self.immediate = False
        self.posted = self.arrived = self.asked = 0

    def _mark(self, numbers: tuple[torch.Tensor, ...]) -> Any:
        return _LateEvent(self, numbers)


class SlowReadBack(NeverReadBack):
    """Numbers that come after they were asked for a few times."""

    after = 3


class NeverEnd(DeviceMultiEndedAllocator):
    read_back_class = NeverReadBack


class NeverFloat(DeviceFloatMultiEndedAllocator):
    read_back_class = NeverReadBack


class SlowEnd(DeviceMultiEndedAllocator):
    read_back_class = SlowReadBack


class SlowFloat(DeviceFloatMultiEndedAllocator):
    read_back_class = SlowReadBack
