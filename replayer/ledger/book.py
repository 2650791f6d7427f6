"""Where synchronisations are written down, for the call that is open."""

from __future__ import annotations

from collections.abc import Hashable
from threading import get_ident
from typing import Final

import torch

from replayer.ledger.lines import asking_line
from replayer.ledger.places import Places, Syncs
from replayer.ledger.records import (
    DEVICE_TO_HOST,
    HOST_TO_DEVICE,
    WAIT,
    CallRecord,
    Disagreement,
    KindOfCallCounts,
    SyncCounts,
    SyncKind,
    SyncSite,
)


class Book:
    """Counts of all calls so far; the modes and the hooks write here, the ledger reads.

    Attributes:
        current: the innermost open call.
        thread: the thread whose calls are counted; hooks fire in any.
        paused: how many pauses are open.
    """

    __slots__ = (
        "__weakref__",
        "_places",
        "current",
        "disagreements",
        "kinds",
        "paused",
        "sites",
        "thread",
        "totals",
    )

    def __init__(self, places: Places) -> None:
        self._places: Final = places
        self.current: CallRecord | None = None
        self.thread = 0
        self.paused = 0
        self.totals = SyncCounts()
        self.sites: dict[SyncSite, int] = {}
        self.kinds: dict[Hashable, KindOfCallCounts] = {}
        self.disagreements: list[Disagreement] = []

    def counted(self, operation: str, syncs: Syncs) -> None:
        """A torch function synchronised; called by a mode, so on the right thread and in a call."""
        device_to_host, host_to_device = syncs
        if device_to_host:
            self._write(DEVICE_TO_HOST, operation, device_to_host)
        if host_to_device:
            self._write(HOST_TO_DEVICE, operation, host_to_device)

    def disagreed(self, function: str, counted: int, observed: int, operators: tuple[str, ...]) -> None:
        """The operators below a function read the device another number of times than was counted."""
        call = self.current
        if call is not None:
            self.disagreements.append(
                Disagreement(call.kind, call.seq, asking_line(), function, counted, observed, operators)
            )

    def waited(self, operation: str) -> None:
        """The host waited for the device, in whichever thread."""
        if self._is_open_here():
            self._write(WAIT, operation, 1)

    def made_on_host(self, tensor: torch.Tensor) -> None:
        """A tensor was made from memory of the host, in whichever thread."""
        if self._is_open_here():
            self._places.declare_host(tensor)

    def _is_open_here(self) -> bool:
        return self.current is not None and not self.paused and self.thread == get_ident()

    def _write(self, kind: SyncKind, operation: str, count: int) -> None:
        call = self.current
        if call is None:
            return
        site = SyncSite(asking_line(), kind, operation)
        self.totals.add(kind, count)
        self.kinds[call.kind].add(kind, count)
        self.sites[site] = self.sites.get(site, 0) + count
        while call is not None:
            call.add(site, count)
            call = call.outer
