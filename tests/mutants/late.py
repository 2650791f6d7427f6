"""Faults of the ``device`` strategy where numbers come late, as on a GPU."""

from __future__ import annotations

from typing import Any

import torch

from allocator.device_pending import DevicePendingReuse
from allocator.float_registers import FloatRegisters
from allocator.flush_ops import TorchFlush, Window
from allocator.forwards import ForwardDoneEvent
from allocator.unsettled import Entry, Flushed, Journal, Numbers, PendingBatch, Registers, Released
from tests.allocator.delayed import NeverEnd, NeverFloat
from tests.mutants import scenes
from tests.mutants.composites import leaves_the_window
from tests.mutants.registry import CompositeScene, Mutant, Scene


class _MovesPadding(TorchFlush):
    def _first(
        self, moves: torch.Tensor, src_pages: torch.Tensor, dst_pages: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return src_pages, dst_pages


class LateMovesEveryRow(NeverEnd):
    """Numbers late: rows of a plan that are no moves are moved too."""

    flush_ops_class = _MovesPadding


class _UnmapsPadding(TorchFlush):
    def move(self, moves: torch.Tensor, src_pages: torch.Tensor, dst_pages: torch.Tensor) -> torch.Tensor:
        src = super().move(moves, src_pages, dst_pages)
        self._tables.physical_to_virtual.index_fill_(0, src, -1)
        return src


class LateUnmapsPadding(NeverEnd):
    """Numbers late: rows of a plan that are no moves unmap the padding page."""

    flush_ops_class = _UnmapsPadding


class LateHoldsNothingBack(NeverEnd):
    """Numbers late: pages moved away under a forward are forgotten."""

    def _hold_back(self, reader: ForwardDoneEvent, batch: PendingBatch) -> None:
        pass


class LateFreesFirstTwice(NeverEnd):
    """Numbers late: of the pages named by tokens, one is counted too many."""

    def _release_late(
        self,
        virtual_pages: torch.Tensor,
        physical_pages: torch.Tensor,
        count: torch.Tensor,
        *,
        least: int = 1,
    ) -> None:
        super()._release_late(virtual_pages, physical_pages, count + 1, least=least)


class _NothingIsWritten(TorchFlush):
    def _blocked_from(
        self, written: torch.Tensor | None, is_void: torch.Tensor | None, mark: torch.Tensor, window: Window
    ) -> torch.Tensor | int:
        return window.size


class LateIgnoresWrites(NeverEnd):
    """Numbers late: the write set stops no walk."""

    flush_ops_class = _NothingIsWritten


# -- registers of an END pool


class _FromTheOtherEnd(Registers):
    def take(self, want: int, numbers: torch.Tensor, *, grows_up: bool) -> torch.Tensor:
        listed = self.sorted(numbers, padding=-1)
        self.holes, self.ascending = listed.flip(0), True
        return super().take(want, numbers, grows_up=grows_up)


class _TakesAndKeeps(Registers):
    def take(self, want: int, numbers: torch.Tensor, *, grows_up: bool) -> torch.Tensor:
        before = self.holes, self.count
        taken = super().take(want, numbers, grows_up=grows_up)
        self.holes, self.count = before
        return taken


class _WithRegisters(NeverEnd):
    registers_class: type[Registers] = Registers

    def _unsettle(self) -> Journal:
        journal = super()._unsettle()
        self._registers.__class__ = self.registers_class
        return journal


class LateTakesFromTheOtherEnd(_WithRegisters):
    """Numbers late: holes are handed out from the watermark's end, not from the far one."""

    registers_class = _FromTheOtherEnd


class LateHandsOutTwice(_WithRegisters):
    """Numbers late: holes that were handed out stay on the list."""

    registers_class = _TakesAndKeeps


# -- what waits for a forward


class _ReturnsTwice(DevicePendingReuse):
    def release_batches(self, *, wait: bool) -> list[PendingBatch]:
        return super().release_batches(wait=wait) * 2


class _OneBatch(DevicePendingReuse):
    def add_batch(self, event: ForwardDoneEvent, batch: PendingBatch) -> None:
        self._batches[event] = [batch]


class _ReturnsUnfinished(DevicePendingReuse):
    def release_batches(self, *, wait: bool) -> list[PendingBatch]:
        released = [batch for batches in self._batches.values() for batch in batches]
        self._batches.clear()
        return released


class _WithPending(NeverEnd):
    pending_class: type[DevicePendingReuse] = DevicePendingReuse

    def clear(self) -> None:
        super().clear()
        self._pending = self.pending_class()


class LateReturnsABatchTwice(_WithPending):
    """Numbers late: pages that waited for a forward come back twice."""

    pending_class = _ReturnsTwice


class LateKeepsOneBatch(_WithPending):
    """Numbers late: two flushes during one forward, and only the second one's pages come back."""

    pending_class = _OneBatch


class LateReturnsUnfinished(_WithPending):
    """Numbers late: pages come back though the forward that reads them still runs."""

    pending_class = _ReturnsUnfinished


# -- what the host makes of numbers


class _Swapped(Flushed):
    def apply(self, numbers: Numbers, values: list[int] | None) -> None:
        super().apply(numbers, None if values is None else [values[1], values[0]])


class LateTakesMovesForTouching(NeverEnd):
    """Numbers late: the moves of a flush are taken for the holes it gave back, and these for the moves."""

    def _note(self, entry: Entry) -> None:
        if isinstance(entry, Flushed):
            entry = _Swapped(entry.batch, entry.ticket)
        super()._note(entry)


class _OneMore(Released):
    def apply(self, numbers: Numbers, values: list[int] | None) -> None:
        super().apply(numbers, values)
        numbers.live -= values is None


class LatePromisesAPageMore(NeverEnd):
    """Numbers late: of a free of tokens one page more than is certain is promised."""

    def _note(self, entry: Entry) -> None:
        if isinstance(entry, Released):
            entry = _OneMore(entry.pages, entry.ticket)
        super()._note(entry)


class LateLosesIds(NeverEnd):
    """Numbers late: of the ids that a free of tokens gave back, those that were not certain are lost."""

    def _settle_ids(self, more: int) -> None:
        super()._settle_ids(0)


class LateEagerMovesNothing(NeverEnd):
    """Numbers late: an eager free retreats and moves nothing."""

    def _compact_uncounted(self) -> None:
        registers, count = self._registers, self._registers.count
        self._vacate_registers(
            registers.mark - count if self.grow_direction == "up" else registers.mark + count
        )


# -- a flush that is made if the device finds pages lacking


class LatePacksInAnyCase(NeverEnd):
    """Numbers late: a neighbour is packed though nothing was lacking."""

    def _flush_if(self, condition: torch.Tensor) -> None:
        super()._flush_if(torch.ones_like(condition))


class LatePacksInNoCase(NeverEnd):
    """Numbers late: what was lacking is taken, and the neighbour is not packed for it."""

    def _flush_if(self, condition: torch.Tensor) -> None:
        super()._flush_if(torch.zeros_like(condition))


# -- tokens that are named, or not


class LateFreesTheUnnamed(NeverEnd):
    """Numbers late: of the tokens of a free, the window pages of those go that have none, and no others."""

    def _free_named_late(self, token_ids: torch.Tensor, is_named: torch.Tensor, *, in_order: bool) -> None:
        super()._free_named_late(token_ids, ~is_named, in_order=in_order)


# -- floats


class _BorderTwice(FloatRegisters):
    def give_back_borders(self, numbers: torch.Tensor) -> torch.Tensor:
        low = self.low
        given_back = super().give_back_borders(numbers)
        self.low = self.low + (self.low - low)
        return given_back


class _OtherEnd(FloatRegisters):
    def take(self, want: int, region: tuple[Any, Any], numbers: torch.Tensor) -> torch.Tensor:
        self.takes_high = ~self.takes_high
        return super().take(want, region, numbers)


class _NoLateIds(FloatRegisters):
    def report(self, given_back: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (*super().report(given_back)[:-1], torch.zeros_like(self.late_ids))


class _WithFloatRegisters(NeverFloat):
    registers_class: type[FloatRegisters] = FloatRegisters

    def _unsettle(self) -> FloatRegisters:
        registers = super()._unsettle()
        registers.__class__ = self.registers_class
        return registers


class LateGivesABorderBackTwice(_WithFloatRegisters):
    """Numbers late: a float gives back twice as many pages at its low border as are holes."""

    registers_class = _BorderTwice


class LateFloatTakesTheOtherEnd(_WithFloatRegisters):
    """Numbers late: a float takes its holes from the end whose turn it is not."""

    registers_class = _OtherEnd


class LateFloatLosesIds(_WithFloatRegisters):
    """Numbers late: of the ids that a free of tokens gave a float back, those that were not certain are lost."""

    registers_class = _NoLateIds


class LateFloatEndsTooSoon(NeverFloat):
    """Numbers late: to the neighbour above, a float seems to end two pages before it does."""

    def _byte_high_frontier(self) -> int:
        return super()._byte_high_frontier() - (0 if self._is_settled else 2 * self.entry_bytes_per_page)


def _mutant(fault: type[Any], check: str, event: int, scene: Scene | CompositeScene, **more: Any) -> Mutant:
    return Mutant(fault, check, event, scene, strategy="device", **more)


MUTANTS = [
    _mutant(LateMovesEveryRow, "C5", 2, scenes.drains_in_part),
    _mutant(LateUnmapsPadding, "C1", 2, scenes.drains_in_part),
    _mutant(LateHoldsNothingBack, "C4", 3, scenes.read_while_moving),
    _mutant(LateFreesFirstTwice, "C3", 1, scenes.frees_tokens_of_pages),
    _mutant(LateIgnoresWrites, "C7", 3, scenes.moves_what_is_written),
    _mutant(LateTakesFromTheOtherEnd, "C15", 2, scenes.reuses_uncounted_holes),
    _mutant(LateHandsOutTwice, "C2", 3, scenes.reuses_uncounted_holes),
    _mutant(LateReturnsABatchTwice, "C4", 6, scenes.takes_back_behind_a_gate),
    _mutant(LateKeepsOneBatch, "C4", 5, scenes.two_batches_one_event, row="F1"),
    _mutant(LateReturnsUnfinished, "C8", 5, scenes.two_batches_one_event),
    _mutant(LateTakesMovesForTouching, "C8", 3, scenes.read_while_moving),
    _mutant(LatePromisesAPageMore, "C5", 3, scenes.asks_for_more_than_was_freed),
    _mutant(LateLosesIds, "C3", 1, scenes.frees_tokens_of_pages),
    _mutant(LateEagerMovesNothing, "C5", 1, scenes.packs_at_every_free),
    _mutant(LatePacksInAnyCase, "C15", 4, scenes.needs_no_neighbour),
    _mutant(LatePacksInNoCase, "C5", 3, scenes.packs_its_neighbour),
    _mutant(LateFreesTheUnnamed, "C1", 1, leaves_the_window),
    _mutant(LateGivesABorderBackTwice, "C5", 2, scenes.float_gives_back_uncounted),
    _mutant(LateFloatTakesTheOtherEnd, "C15", 3, scenes.float_reuses_uncounted_holes),
    _mutant(LateFloatLosesIds, "C3", 1, scenes.float_gives_back_uncounted),
    _mutant(LateFloatEndsTooSoon, "C5", 3, scenes.meets_a_float),
]  # fmt: skip
