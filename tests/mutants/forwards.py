"""Faults about what still runs: forwards that read and write, pages that wait for them, gates, leases."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from unittest import mock

import torch

from allocator import MultiEndedAllocator
from allocator import end as end_module
from allocator.forwards import ForwardDoneEvent, PendingReuse, RunningForward, _Waiting
from allocator.plan import FlushPlan, plan_moves
from tests.mutants import scenes
from tests.mutants.registry import Mutant


class _Replacing(PendingReuse):
    def add(self, event: ForwardDoneEvent, pages_on_host: Iterable[int], pages: torch.Tensor) -> None:
        listed = list(pages_on_host)
        self._waiting[event] = _Waiting(listed, [pages])
        self.pages_on_host.update(listed)


class SecondBatchReplacesFirst(MultiEndedAllocator):
    """Two flushes during one forward: only the second one's pages come back."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._pending = _Replacing()


class _Forgetful(PendingReuse):
    def add(self, event: ForwardDoneEvent, pages_on_host: Iterable[int], pages: torch.Tensor) -> None:
        self._waiting.pop(event, None)
        self._pages_on_host.clear()
        super().add(event, pages_on_host, pages)


class SecondBatchLosesFirst(MultiEndedAllocator):
    """As `SecondBatchReplacesFirst`, and the host's set of pages forgets the first batch too: the allocator's own sums stay balanced."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._pending = _Forgetful()


class NeverReturnsPending(MultiEndedAllocator):
    """Pages that wait for a forward are not taken back when it is over."""

    def _take_back_pending(self, *, wait: bool) -> None:
        pass


class _AskedOnce(PendingReuse):
    def __init__(self) -> None:
        super().__init__()
        self._answers: dict[ForwardDoneEvent, bool] = {}

    def release(self, *, wait: bool) -> list[torch.Tensor]:
        released = []
        for event in list(self._waiting):
            if self._answers.setdefault(event, event.query()):
                entry = self._waiting.pop(event)
                self._pages_on_host.difference_update(entry.pages_on_host)
                released.extend(entry.batches)
        return released


class AsksAnEventOnce(MultiEndedAllocator):
    """A forward's event is asked once, and the answer kept."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._pending = _AskedOnce()


class _Unasked(PendingReuse):
    def release(self, *, wait: bool) -> list[torch.Tensor]:
        released = [batch for entry in self._waiting.values() for batch in entry.batches]
        self.clear()
        return released


class ReleasesUnasked(MultiEndedAllocator):
    """Pages that wait for a forward come back at the next flush, whether it is over or not."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._pending = _Unasked()


class CreditsPendingTwice(MultiEndedAllocator):
    """Pages that wait for a forward are holes as well."""

    def _vacate(self, src_pages: torch.Tensor, src_list: list[int]) -> None:
        super()._vacate(src_pages, src_list)
        if self._pending:
            self.holes.add(src_pages)


class ReturnsPendingTwice(MultiEndedAllocator):
    """What comes back from waiting enters the list of holes twice."""

    def _take_back_pending(self, *, wait: bool) -> None:
        before = len(self.holes)
        super()._take_back_pending(wait=wait)
        if len(self.holes) > before:
            self.holes.add(self.holes.pages[before:])


class DropsPendingWhenUrgent(MultiEndedAllocator):
    """An urgent flush forgets what waits instead of taking it back."""

    def _take_back_pending(self, *, wait: bool) -> None:
        if wait:
            self._pending.clear()
        super()._take_back_pending(wait=wait)


class ReusesAtOnce(MultiEndedAllocator):
    """Moved-out pages are holes at once, though a forward still reads them."""

    def _vacate(self, src_pages: torch.Tensor, src_list: list[int]) -> None:
        self.holes.add(src_pages)


class WaitsForTheFirstForward(MultiEndedAllocator):
    """Pages moved away wait for the first forward that was ever launched, not for the last."""

    _first: ForwardDoneEvent | None = None

    def set_latest_forward_done_event(self, event: ForwardDoneEvent | None) -> None:
        self._first = self._first or event
        super().set_latest_forward_done_event(self._first)


class MovesWaitingPages(MultiEndedAllocator):
    """The walk takes pages that wait for a forward for live ones."""

    def _flush(self, *, urgent: bool) -> int:
        def planned(holes: list[int], watermark: int, **arguments: Any) -> FlushPlan:
            return plan_moves(holes, watermark, **{**arguments, "pending": ()})

        with mock.patch.object(end_module, "plan_moves", planned):
            return super()._flush(urgent=urgent)


class IgnoresWriteSet(MultiEndedAllocator):
    """Pages that the running forward will write are moved."""

    def _read_write_set(self) -> set[int]:
        return set()


class TakesTokensForPages(MultiEndedAllocator):
    """The write set's token ids are looked up as if they were pages."""

    def _read_write_set(self) -> set[int]:
        tokens = self._forward.unfinished_write_set()
        return set() if tokens is None else set(self._tables.physical_of(tokens).tolist())


class TakesVirtualForPhysical(MultiEndedAllocator):
    """The write set's virtual pages are taken for places."""

    def _read_write_set(self) -> set[int]:
        tokens = self._forward.unfinished_write_set()
        return set() if tokens is None else set((tokens // self.page_size).tolist())


class _KeepsWriting(RunningForward):
    def set_writing(self, done: ForwardDoneEvent, out_cache_loc_virtual: torch.Tensor | None) -> None:
        if out_cache_loc_virtual is not None:
            super().set_writing(done, out_cache_loc_virtual)


class KeepsAnOldWriteSet(MultiEndedAllocator):
    """A forward that writes nothing here leaves the write set of the one before it."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._forward = _KeepsWriting()


class _NotOrdered(RunningForward):
    def settle(self) -> None:
        pass


class UrgentDoesNotWait(MultiEndedAllocator):
    """An urgent flush is not ordered behind the running forward."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._forward = _NotOrdered()


class UrgentIgnoresReaders(MultiEndedAllocator):
    """An urgent flush takes back pages that wait, and gives them up, without being ordered behind those who read them."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._forward, self._pending = _NotOrdered(), _UrgentlyUnasked()


class _UrgentlyUnasked(_Unasked):
    def release(self, *, wait: bool) -> list[torch.Tensor]:
        return super().release(wait=wait) if wait else PendingReuse.release(self, wait=wait)


class IgnoresGate(MultiEndedAllocator):
    """Gates are not asked."""

    def moves_blocked(self) -> bool:
        return False


class GateReadOnce(MultiEndedAllocator):
    """What a gate said first is taken for what it says."""

    _said: bool | None = None

    def moves_blocked(self) -> bool:
        if self.disagg_move_gate is None:
            return False
        if self._said is None:
            self._said = super().moves_blocked()
        return self._said


class UrgentIgnoresGate(MultiEndedAllocator):
    """An urgent flush moves pages whatever the gate says."""

    def _flush(self, *, urgent: bool) -> int:
        gate = self.disagg_move_gate
        if urgent:
            self.disagg_move_gate = None
        try:
            return super()._flush(urgent=urgent)
        finally:
            self.disagg_move_gate = gate


class StatesIgnoreGate(MultiEndedAllocator):
    """Only attention pools ask the gate; states move while one of them is copied out."""

    def moves_blocked(self) -> bool:
        return super().moves_blocked() and not self.spec.is_state


class GateTakenForShut(MultiEndedAllocator):
    """A pool that has a gate never moves a page again."""

    def moves_blocked(self) -> bool:
        return self.disagg_move_gate is not None


MUTANTS = [
    Mutant(SecondBatchReplacesFirst, "C2", 5, scenes.two_batches_one_event, row="F1"),
    Mutant(SecondBatchLosesFirst, "C4", 5, scenes.two_batches_one_event, row="F1"),
    Mutant(NeverReturnsPending, "C12", 7, scenes.two_batches_one_event, row="F1"),
    Mutant(AsksAnEventOnce, "C12", 7, scenes.two_batches_one_event),
    Mutant(ReleasesUnasked, "C8", 5, scenes.two_batches_one_event),
    Mutant(CreditsPendingTwice, "C4", 3, scenes.two_batches_one_event),
    Mutant(
        ReturnsPendingTwice, "C4", 7, scenes.two_batches_one_event, named="C1",
        reason="the allocator's own assertion about the page to be moved stops the flush that counts are checked after",
    ),
    Mutant(
        DropsPendingWhenUrgent, "C4", 5, scenes.urgent_while_reading, named="C1",
        reason="the allocator's own assertion about the page to be moved stops the flush that counts are checked after",
    ),
    Mutant(ReusesAtOnce, "C8", 3, scenes.read_while_moving),
    Mutant(WaitsForTheFirstForward, "C8", 8, scenes.two_forwards),
    Mutant(MovesWaitingPages, "C1", 5, scenes.two_batches_one_event),
    Mutant(IgnoresWriteSet, "C7", 3, scenes.moves_what_is_written),
    Mutant(TakesTokensForPages, "C7", 3, scenes.writes_in_pages),
    Mutant(TakesVirtualForPhysical, "C7", 3, scenes.moves_what_is_written),
    Mutant(KeepsAnOldWriteSet, "C12", 5, scenes.writes_nothing_next),
    Mutant(UrgentDoesNotWait, "C7", 3, scenes.urgent_while_writing),
    Mutant(UrgentIgnoresReaders, "C8", 5, scenes.urgent_while_reading),
    Mutant(IgnoresGate, "C9", 2, scenes.flushes_behind_a_gate, row="F6"),
    Mutant(GateReadOnce, "C9", 5, scenes.shuts_a_gate_later, row="F6", variant="open"),
    Mutant(GateReadOnce, "C9", 5, scenes.flushes_behind_a_gate, row="F3", variant="shut"),
    Mutant(UrgentIgnoresGate, "C9", 3, scenes.flushes_behind_a_gate),
    Mutant(StatesIgnoreGate, "C9", 2, scenes.leases_a_state, row="F7"),
    Mutant(GateTakenForShut, "C9", 1, scenes.shuts_a_gate_later),
]  # fmt: skip
