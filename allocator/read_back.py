"""A few numbers on their way from the device to the host, without the host waiting for them.

The device writes them into page-locked memory by a copy that does not block, and an event behind the copy is only ever *asked*. Where the
device is the CPU, the copy is done when it returns, so the numbers are there at once; on CUDA they come some time later, and whoever needs
them before that works with bounds (`allocator.unsettled`) or waits, which is a synchronisation and is counted by the one who does it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

#: Read-backs that can be under way at once; an allocator has a handful of calls between two polls.
SLOTS = 64
#: int64 numbers in one read-back.
WIDTH = 4


class Ticket:
    """One read-back: ask `ready`, then take `values`."""

    __slots__ = ("_event", "_numbers")

    def __init__(self, numbers: npt.NDArray[np.int64], event: Any = None) -> None:
        self._numbers, self._event = numbers, event

    def ready(self) -> bool:
        """Whether the numbers are there. Asks, never waits."""
        if self._event is not None and self._event.query():
            self._event = None
        return self._event is None

    def wait(self) -> None:
        """Wait for the device: a synchronisation."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None

    def values(self) -> list[int]:
        """The numbers (and what is left of older ones behind them); only once `ready` said so or `wait` returned, and before `ReadBack` has posted `SLOTS` more."""
        numbers: list[int] = self._numbers.tolist()
        return numbers


class ReadBack:
    """Page-locked memory for `SLOTS` read-backs, used in turn. The owner takes a ticket's values before its turn comes again."""

    def __init__(self, device: str | torch.device) -> None:
        self._on_cuda = torch.device(device).type == "cuda"
        memory = torch.empty(SLOTS, WIDTH, dtype=torch.int64, pin_memory=self._on_cuda)
        # One tensor a number, made once: making a view costs as much as the copy.
        self._cells = [list(row.unbind()) for row in memory.unbind()]
        self._numbers = list(memory.numpy())
        self._next = 0
        #: Every tensor that the device copies to. On a CPU that stands in for a GPU, who counts synchronisations has to be told.
        self.pinned_host_tensors = [memory, *(cell for cells in self._cells for cell in cells)]

    def post(self, *numbers: torch.Tensor) -> Ticket:
        """Send numbers (int64, on the device, one element each, at most `WIDTH` of them) on their way."""
        slot = self._next
        self._next = (slot + 1) % SLOTS
        for cell, number in zip(self._cells[slot], numbers, strict=False):
            cell.copy_(number, non_blocking=True)
        if not self._on_cuda:
            return Ticket(self._numbers[slot])
        event = torch.cuda.Event()
        event.record()
        return Ticket(self._numbers[slot], event)
