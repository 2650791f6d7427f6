"""Pending reuse for the ``device`` strategy: batches whose pages, and for a while their number, only the device knows."""

from __future__ import annotations

import torch

from allocator.forwards import ForwardDoneEvent, PendingReuse, wait_on_current_stream
from allocator.unsettled import PendingBatch


class DevicePendingReuse(PendingReuse):
    """`PendingReuse` of `PendingBatch`es. Which pages they are is read only when somebody asks."""

    def __init__(self) -> None:
        super().__init__()
        self._batches: dict[ForwardDoneEvent, list[PendingBatch]] = {}

    def __bool__(self) -> bool:
        return bool(self._batches)

    def __len__(self) -> int:
        """Pages that wait; an upper bound while a batch's size is on its way."""
        return sum(batch.most for batches in self._batches.values() for batch in batches)

    @property
    def pages_on_host(self) -> set[int]:
        """All waiting pages, once all sizes are known. Reads the device, once a batch: for checks and diagnosis."""
        return {
            page for batches in self._batches.values() for batch in batches for page in batch.exact().tolist()
        }

    def as_mapping(self) -> dict[ForwardDoneEvent, tuple[list[int], list[torch.Tensor]]]:
        exact = {event: [batch.exact() for batch in batches] for event, batches in self._batches.items()}
        return {
            event: ([page for pages in batches for page in pages.tolist()], batches)
            for event, batches in exact.items()
        }

    def add_batch(self, event: ForwardDoneEvent, batch: PendingBatch) -> None:
        self._batches.setdefault(event, []).append(batch)

    def release_batches(self, *, wait: bool) -> list[PendingBatch]:
        """Batches whose event has fired; with ``wait`` all of them, the stream being ordered after events still open."""
        released: list[PendingBatch] = []
        for event in list(self._batches):
            if not event.query():
                if not wait:
                    continue
                wait_on_current_stream(event)
            released.extend(self._batches.pop(event))
        return released

    def order_behind_readers(self) -> list[PendingBatch]:
        """All batches, which stay; the stream is ordered after events still open."""
        for event in self._batches:
            if not event.query():
                wait_on_current_stream(event)
        return [batch for batches in self._batches.values() for batch in batches]

    def drop_empty(self) -> None:
        """Forget batches of flushes that turned out to have moved nothing: idle engines flush by the thousand during one forward."""
        for event, batches in list(self._batches.items()):
            batches[:] = [batch for batch in batches if batch.size != 0]
            if not batches:
                del self._batches[event]

    def clear(self) -> None:
        super().clear()
        self._batches.clear()
