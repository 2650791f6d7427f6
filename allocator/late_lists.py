"""The two lists of free things where their lengths may be on their way from the device."""

from __future__ import annotations

import torch

from allocator.free_lists import FreeVirtualIds, HoleList


class BoundedHoleList(HoleList):
    """A `HoleList` whose length can be a lower bound for a while (``len_bound``); its pages are in `allocator.unsettled.Registers` then."""

    def __init__(self, device: str | torch.device) -> None:
        self.len_bound: int | None = None
        super().__init__(device)

    def __len__(self) -> int:
        return self.pages.shape[0] if self.len_bound is None else self.len_bound


class LateFreeVirtualIds(FreeVirtualIds):
    """`FreeVirtualIds` that take batches of ids whose number is on its way. ``len`` counts those that are certainly there."""

    def __init__(self, first: int, end: int, device: str | torch.device, numbers: torch.Tensor) -> None:
        super().__init__(first, end, device)
        self._counting = numbers  # int64 0, 1, 2, ..., as long as any list
        self._end: torch.Tensor | None = None  # where the list ends, int64 [], once the host does not know
        self._most = 0  # and where it ends at most

    @property
    def is_late(self) -> bool:
        return self._end is not None

    def replace(self, ids: torch.Tensor) -> None:
        self._end = None
        super().replace(ids)

    def append(self, ids: torch.Tensor) -> None:
        if self._end is None:
            super().append(ids)
        else:
            self.append_late(ids, ids.shape[0], ids.shape[0])

    def append_late(self, ids: torch.Tensor, count: torch.Tensor | int, least: int) -> None:
        """The first ``count`` of ``ids`` (int64 ``[n]``) go to the back, ``least`` of them certainly."""
        if self._end is None:
            self._end = torch.full((), self._tail, dtype=torch.int64, device=ids.device)
            self._most = self._tail
        added = ids.shape[0]
        if self._most + added > self._buffer.shape[0]:
            self._move_to_front(added)
        self._buffer.index_copy_(0, self._counting[:added] + self._end, ids)
        self._end = self._end + count
        self._tail += least
        self._most += added

    def settle(self, more: int) -> None:
        """The host knows now: ``more`` ids are there beyond those that certainly were."""
        if self._end is not None:
            self._tail += more
            self._end = None

    def _move_to_front(self, room: int) -> None:
        assert self._end is not None
        used = self._most - self._head
        buffer = torch.empty(
            max(2 * self._capacity, used + room), dtype=torch.int64, device=self._buffer.device
        )
        buffer[:used] = self._buffer[self._head : self._most]
        self._buffer = buffer
        self._end = self._end - self._head
        self._tail, self._most, self._head = self._tail - self._head, used, 0
