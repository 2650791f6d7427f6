"""Faults of the ``device`` strategy, where its code is its own and numbers are there at once, as on a CPU. See `tests.mutants.late`."""

from __future__ import annotations

from typing import Any

import torch

from allocator.device_end import DeviceMultiEndedAllocator
from allocator.device_middle import DeviceFloatMultiEndedAllocator
from allocator.device_pending import DevicePendingReuse
from allocator.forwards import ForwardDoneEvent
from allocator.unsettled import PendingBatch
from tests.mutants import scenes
from tests.mutants.registry import Mutant, Scene


class MovesInTheOtherOrder(DeviceMultiEndedAllocator):
    """The page nearest the watermark gets the nearest hole: correct in every way, but not where the other strategies put it."""

    def _move_out_of(
        self, owners: torch.Tensor, is_live: torch.Tensor, low: int, dst_pages: torch.Tensor
    ) -> torch.Tensor:
        return super()._move_out_of(owners, is_live, low, dst_pages.flip(0))


class KeepsTheWindowMapped(DeviceMultiEndedAllocator):
    """The window that was vacated stays in the inverse table."""

    def _move_out_of(
        self, owners: torch.Tensor, is_live: torch.Tensor, low: int, dst_pages: torch.Tensor
    ) -> torch.Tensor:
        before = owners.clone()
        moved = super()._move_out_of(owners, is_live, low, dst_pages)
        owners.copy_(before)
        return moved


class ShiftsTheWindow(DeviceMultiEndedAllocator):
    """Pages of the window are numbered from one place too far."""

    def _move_out_of(
        self, owners: torch.Tensor, is_live: torch.Tensor, low: int, dst_pages: torch.Tensor
    ) -> torch.Tensor:
        return super()._move_out_of(owners, is_live, low + 1, dst_pages)


class StopsAtTheFarthestWrite(DeviceMultiEndedAllocator):
    """Of the pages about to be written, the one farthest from the watermark stops the walk."""

    def _first_page_written(self, tokens: torch.Tensor) -> int:
        pages = self._pages_written(tokens)
        inside = pages[pages > 0]
        return int(inside.amin() if self.grow_direction == "up" else inside.amax())


class SeesNoWrite(DeviceMultiEndedAllocator):
    """The write set stops no walk."""

    def _first_page_written(self, tokens: torch.Tensor) -> int:
        return 0


class ForgetsTouchingHoles(DeviceMultiEndedAllocator):
    """Holes that touch the watermark leave the list, and the watermark stays."""

    def _retreat_over_touching(self, holes: torch.Tensor) -> torch.Tensor:
        mark = self._mark
        left = super()._retreat_over_touching(holes)
        self._mark = mark
        return left


class StaysIdle(DeviceMultiEndedAllocator):
    """After a flush that could do nothing more, a free does not end the idleness."""

    def _release_physical(self, physical_pages: torch.Tensor) -> None:
        version = self._version
        super()._release_physical(physical_pages)
        self._version = version


class ReusesVacated(DeviceMultiEndedAllocator):
    """Pages moved away are holes at once, though a forward still reads them."""

    def _vacate_pages(self, src_pages: torch.Tensor) -> bool:
        self.holes.add(src_pages)
        return False


class _OneBatch(DevicePendingReuse):
    def add_batch(self, event: ForwardDoneEvent, batch: PendingBatch) -> None:
        self._batches[event] = [batch]


class KeepsOneBatch(DeviceMultiEndedAllocator):
    """Two flushes during one forward: only the second one's pages come back."""

    def clear(self) -> None:
        super().clear()
        self._pending = _OneBatch()


class CountsEachToken(DeviceMultiEndedAllocator):
    """Tokens of one page release it once each."""

    def _distinct(self, pages: torch.Tensor) -> torch.Tensor:
        return torch.sort(pages)[0]


class SortsDistinctWrong(DeviceMultiEndedAllocator):
    """Where tokens of one page are named, the last page is left out."""

    def _distinct(self, pages: torch.Tensor) -> torch.Tensor:
        distinct = super()._distinct(pages)
        return distinct if distinct.shape[0] == pages.shape[0] else distinct[:-1]


class EagerMovesNothing(DeviceMultiEndedAllocator):
    """An eager free retreats and moves nothing."""

    def _compact_now(self, freed_pages: torch.Tensor) -> None:
        self._retreat(freed_pages.shape[0])


class CountsOneBorder(DeviceFloatMultiEndedAllocator):
    """A float gives back as many pages at its high border as at its low one."""

    def _shrink(self, holes: torch.Tensor, touching: list[int]) -> int:
        return super()._shrink(holes, [touching[0], touching[0]])


def _mutant(fault: type[Any], check: str, event: int, scene: Scene, **more: Any) -> Mutant:
    return Mutant(fault, check, event, scene, strategy="device", **more)


MUTANTS = [
    _mutant(MovesInTheOtherOrder, "C15", 2, scenes.packs_as_recorded),
    _mutant(KeepsTheWindowMapped, "C1", 2, scenes.packs_down),
    _mutant(
        ShiftsTheWindow, "C1", 2, scenes.scattered_holes, named="CALL",
        reason="the gather of a row that no page owns stops torch, before the flush returns",
    ),
    _mutant(StopsAtTheFarthestWrite, "C7", 3, scenes.moves_what_is_written),
    _mutant(SeesNoWrite, "C7", 3, scenes.moves_what_is_written),
    _mutant(ForgetsTouchingHoles, "C4", 2, scenes.retreats_with_a_bound),
    _mutant(StaysIdle, "C12", 5, scenes.two_batches_one_event),
    _mutant(ReusesVacated, "C8", 3, scenes.read_while_moving),
    _mutant(KeepsOneBatch, "C4", 5, scenes.two_batches_one_event, row="F1"),
    _mutant(CountsEachToken, "C3", 1, scenes.frees_some_tokens_of_a_page, row="F15"),
    _mutant(SortsDistinctWrong, "C1", 1, scenes.frees_tokens_of_pages),
    _mutant(EagerMovesNothing, "C5", 1, scenes.packs_at_every_free),
    _mutant(CountsOneBorder, "C5", 2, scenes.float_gives_back),
]  # fmt: skip
