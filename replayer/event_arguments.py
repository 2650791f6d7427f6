"""The arguments of one event: columns and id lists of the chunk being driven, as host arrays and as the tensors an allocator gets."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import torch

from recorder.trace import Chunk
from replayer.calling import Caller, MoveLog
from replayer.content import IntArray
from replayer.hazards import Hazards, ReplayEvent
from replayer.ids import IdMap
from replayer.oracle import TraceContradiction
from replayer.pool_state import PoolState

if TYPE_CHECKING:
    from replayer.checks import Checks
    from replayer.ledger import SyncLedger


class EventArguments(Caller):
    """Reads the events of ``chunk`` by index. ``ids`` maps recorded ids to the allocator's own."""

    def __init__(
        self,
        pools: dict[str, PoolState],
        hazards: Hazards,
        moves: MoveLog,
        checks: Checks | None,
        ledger: SyncLedger | None,
        ids: str,
    ) -> None:
        super().__init__(pools, hazards, moves, checks, ledger)
        self.ids = IdMap(self.by_number, identity=ids == "recorded")
        self.device = self.by_number[0].allocator.device
        # Whoever may still ask an event (an allocator's pending pages) holds it; the others are forgotten.
        self._events: WeakValueDictionary[int, ReplayEvent] = WeakValueDictionary()

    def _load(self, chunk: Chunk) -> None:
        self.chunk = chunk
        lists = (chunk.list0, chunk.list1, chunk.list2, chunk.result)
        self._values = tuple(column.values for column in lists)
        self._tensors = tuple(torch.from_numpy(_writable(column.values)) for column in lists)
        self._bounds = tuple(column.offsets.tolist() for column in lists)
        self._present = tuple(column.present.tolist() for column in lists)
        self._value, self._value2 = chunk.value.tolist(), chunk.value2.tolist()
        self._result_kind, self._result_value = chunk.result_kind.tolist(), chunk.result_value.tolist()

    def _event(self, number: int) -> ReplayEvent:
        event = self._events.get(number)
        if event is None:
            event = self._events[number] = ReplayEvent(number, self.hazards)
        return event

    def _ids(self, slot: int, index: int) -> IntArray | None:
        if not self._present[slot][index]:
            return None
        bounds = self._bounds[slot]
        return self._values[slot][bounds[index] : bounds[index + 1]]

    def _must(self, slot: int, index: int) -> IntArray:
        ids = self._ids(slot, index)
        if ids is None:
            raise TraceContradiction(f"its id list number {slot} is missing")
        return ids

    def _tensor(self, slot: int, index: int) -> torch.Tensor:
        """The same list as a host tensor, a new object each time so that host and device copies can be told apart."""
        bounds = self._bounds[slot]
        return self._tensors[slot][bounds[index] : bounds[index + 1]]

    def _on_device(self, host: torch.Tensor) -> torch.Tensor:
        return host if self.device == "cpu" else host.to(self.device)

    def _pages_tensor(self, slot: int, index: int, own: IntArray) -> torch.Tensor:
        return self._on_device(self._tensor(slot, index) if self.ids.identity else torch.from_numpy(own))


def _writable(values: IntArray) -> IntArray:
    """torch warns about read-only arrays; allocators only read their arguments, but one that wrote would corrupt the trace's copy."""
    return values if values.flags.writeable else values.copy()
