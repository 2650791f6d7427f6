"""Faults around copies to and from the host, and places that are reserved for them."""

from __future__ import annotations

from collections.abc import Hashable

import torch

from allocator import MultiEndedAllocator
from allocator.forwards import ForwardDoneEvent
from tests.mutants import scenes
from tests.mutants.registry import Mutant


class DoesNotWaitForCopies(MultiEndedAllocator):
    """Pages are moved and freed without being ordered behind the copies that use them."""

    def set_hicache_transfer_done_event(self, transfer_key: Hashable, event: ForwardDoneEvent) -> None:
        """Forgotten at once."""


class MovesReservedPages(MultiEndedAllocator):
    """Pages are moved while places wait for their load."""

    def moves_blocked(self) -> bool:
        waiting, self._reserved_for_load = self._reserved_for_load, 0
        try:
            return super().moves_blocked()
        finally:
            self._reserved_for_load = waiting


class ReservesLivePages(MultiEndedAllocator):
    """A reservation takes places without taking them out of the holes."""

    def alloc_physical(self, need_size: int) -> torch.Tensor | None:
        holes = self.holes.pages
        tokens = super().alloc_physical(need_size)
        self.holes.set_unsorted(holes)
        return tokens


class RefusesReservations(MultiEndedAllocator):
    """A reservation is refused though there is room."""

    def alloc_physical(self, need_size: int) -> torch.Tensor | None:
        return None


class CancelKeepsThePages(MultiEndedAllocator):
    """A cancelled reservation does not give its places back."""

    def free_physical(self, free_index: torch.Tensor | None) -> None:
        """Nothing is given back."""


class CancelStillBlocks(MultiEndedAllocator):
    """After a reservation is cancelled nothing moves for ever."""

    def cancel_physical_reservation(self, free_index: torch.Tensor | None) -> None:
        before = self._reserved_for_load
        super().cancel_physical_reservation(free_index)
        self._reserved_for_load = before


class ZeroesWhatIsFreed(MultiEndedAllocator):
    """Pages are zeroed when they are freed, though somebody outside may still read them."""

    def _free_pages(self, virtual_pages: torch.Tensor, *, may_repeat: bool) -> None:
        places = self._tables.physical_of(virtual_pages)
        super()._free_pages(virtual_pages, may_repeat=may_repeat)
        if self._zero_pages is not None:
            self._zero_pages(places)


class KeepsOneCopy(MultiEndedAllocator):
    """Of several copies only the one that was queued last is waited for."""

    def set_hicache_transfer_done_event(self, transfer_key: Hashable, event: ForwardDoneEvent) -> None:
        self._forward.transfers.clear()
        super().set_hicache_transfer_done_event(transfer_key, event)


class BackupEndsReservations(MultiEndedAllocator):
    """A backup is taken for the load that reserved places wait for."""

    def set_hicache_transfer_done_event(self, transfer_key: Hashable, event: ForwardDoneEvent) -> None:
        super().set_hicache_transfer_done_event(transfer_key, event)
        self._reserved_for_load = 0


MUTANTS = [
    Mutant(DoesNotWaitForCopies, "C8", 3, scenes.copies_to_the_host),
    Mutant(MovesReservedPages, "C9", 2, scenes.reserves),
    Mutant(ReservesLivePages, "C4", 2, scenes.reserves),
    Mutant(RefusesReservations, "C10", 2, scenes.reserves),
    Mutant(CancelKeepsThePages, "C4", 4, scenes.reserves),
    Mutant(CancelStillBlocks, "C9", 4, scenes.reserves),
    Mutant(KeepsOneCopy, "C8", 4, scenes.copies_twice_to_the_host),
    Mutant(BackupEndsReservations, "C9", 3, scenes.backs_up_beside_a_reservation),
    Mutant(ZeroesWhatIsFreed, "C8", 2, scenes.lends_a_page),
]
