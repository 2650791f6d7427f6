"""Pending reuse for the ``device`` strategy: the same batches, whose page numbers the host does not know."""

from __future__ import annotations

from allocator.forwards import PendingReuse


class DevicePendingReuse(PendingReuse):
    """`PendingReuse` that counts pages by the lengths of its batches; which pages they are is read only when somebody asks."""

    def __len__(self) -> int:
        return sum(batch.shape[0] for entry in self._waiting.values() for batch in entry.batches)

    @property
    def pages_on_host(self) -> set[int]:
        """All waiting pages. Reads the device, once a batch: for checks and diagnosis."""
        return {page for entry in self._waiting.values() for batch in entry.batches for page in batch.tolist()}
