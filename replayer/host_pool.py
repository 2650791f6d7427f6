"""The host tier: what was copied out of device pools, slot by slot, with the bytes and what they should be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from replayer.content import IntArray
from replayer.errors import UsageError
from replayer.oracle import PageRecords, TraceContradiction, shown
from replayer.pool_state import PoolState

#: A trace may name any slot; what is kept for the slots it fills is bounded.
MAX_HOST_BYTES = 2 * 2**30


@dataclass
class _Slot:
    """One page on the host. ``content``: None while a backup to it runs. ``readers``: loads that are not over."""

    content: Any = None
    record: PageRecords | None = None
    readers: int = 0


class HostPool:
    """Host slots of all device pools; a slot holds one page of one pool."""

    def __init__(self) -> None:
        self._slots: dict[str, dict[int, _Slot]] = {}
        self._bytes = 0

    def reserve(self, state: PoolState, slots: IntArray) -> None:
        """A backup to these slots was queued.

        Raises:
            TraceContradiction: a slot named twice, one that holds a page already, or one that a copy is filling.
        """
        _require_once(slots)
        pages = self._slots.setdefault(state.name, {})
        taken = [slot for slot in slots.tolist() if slot in pages]
        if taken:
            raise TraceContradiction(
                f"host slot(s) {shown(np.array(taken))} of pool {state.name!r} hold a page, or a copy is filling them"
            )
        pages.update((slot, _Slot()) for slot in slots.tolist())

    def fill(self, state: PoolState, slots: IntArray, content: Any, records: PageRecords) -> None:
        """A backup has landed: ``content`` is what `KVStore.read_raw` gave, page by page."""
        self._bytes += content.nbytes
        if self._bytes > MAX_HOST_BYTES:
            raise UsageError(
                f"the trace's host pool holds more than {MAX_HOST_BYTES} bytes; replay with --kv stamp"
            )
        pages = self._slots[state.name]
        for row, slot in enumerate(slots.tolist()):
            pages[slot].content = content[row : row + 1]
            pages[slot].record = records.kept(np.array([row]))

    def begin_reading(self, state: PoolState, slots: IntArray) -> None:
        """A load from these slots was queued.

        Raises:
            TraceContradiction: a slot named twice, one never written, or one whose backup is not over.
        """
        _require_once(slots)
        self._require_written(state, slots, "loaded from")
        for slot in slots.tolist():
            self._slots[state.name][slot].readers += 1

    def read(self, state: PoolState, slots: IntArray) -> tuple[list[Any], PageRecords]:
        """A load has landed: the bytes of each slot, and what they should be."""
        pages = [self._slots[state.name][slot] for slot in slots.tolist()]
        for page in pages:
            page.readers -= 1
        records = [page.record for page in pages if page.record is not None]
        return [page.content for page in pages], PageRecords.joined(records, state.page_size)

    def stop_reading(self, state: PoolState, slots: IntArray) -> None:
        """A load will never land."""
        for slot in slots.tolist():
            self._slots[state.name][slot].readers -= 1

    def free(self, state: PoolState, slots: IntArray) -> None:
        """Slots are given up.

        Raises:
            TraceContradiction: a slot that holds nothing, or that an unfinished copy uses.
        """
        _require_once(slots)
        self._require_written(state, slots, "freed")
        pages = self._slots.get(state.name, {})
        busy = [slot for slot in slots.tolist() if pages[slot].readers]
        if busy:
            raise TraceContradiction(
                f"host slot(s) {shown(np.array(busy))} of pool {state.name!r} are freed while a load reads them"
            )
        for slot in slots.tolist():
            self._bytes -= pages.pop(slot).content.nbytes

    def _require_written(self, state: PoolState, slots: IntArray, what: str) -> None:
        pages = self._slots.get(state.name, {})
        empty = [slot for slot in slots.tolist() if slot not in pages or pages[slot].content is None]
        if empty:
            raise TraceContradiction(
                f"host slot(s) {shown(np.array(empty))} of pool {state.name!r} are {what}, but no backup to them is over"
            )


def _require_once(slots: IntArray) -> None:
    if len(slots) and slots.min() < 0:
        raise TraceContradiction(f"host slots {shown(slots[slots < 0])} are below 0")
    if len(np.unique(slots)) != len(slots):
        raise TraceContradiction(f"one host slot is named twice in {shown(slots)}")
