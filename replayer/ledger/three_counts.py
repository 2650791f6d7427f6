"""Synchronisations of the same calls counted three ways, which have to agree: by the ledger, by torch's own warnings, and from the CUDA
runtime's calls as the profiler sees them."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from replayer.ledger.cuda import CudaCrossCheck
from replayer.ledger.profiled import Profile
from replayer.ledger.records import WAIT
from replayer.ledger.sync_ledger import SyncLedger, SyncRecord

#: The one wait that `torch.cuda.set_sync_debug_mode` warns about; it says nothing of events and of the whole device.
_WARNED_WAIT = "torch.cuda.Stream.synchronize"


@dataclass
class Counted:
    """One call. ``warned`` and ``runtime`` are None where there is no CUDA, or the profiler saw none.

    Attributes:
        ledger: all the ledger counted.
        unwarned: those of them that torch has no warning for: waits for an event or for the whole device.
        warned: torch's warnings.
        runtime: waits and pageable copies of the CUDA runtime.
    """

    kind: Hashable
    seq: int
    ledger: int = 0
    unwarned: int = 0
    warned: int | None = None
    runtime: int | None = None
    runtime_calls: dict[str, int] | None = None

    @property
    def agrees(self) -> bool | None:
        """Whether the three tell the same; None where one of them is missing."""
        if self.warned is None or self.runtime is None:
            return None
        return self.ledger - self.unwarned == self.warned and self.ledger == self.runtime


class ThreeCounts:
    """Stands where a `SyncLedger` stands. Calls are counted inside a `session`, which is one run of the profiler.

    Attributes:
        calls: one record a call, in order of their ends; runtime counts are filled in when the session is over.
    """

    def __init__(self, device: torch.device | str) -> None:
        self._ledger = SyncLedger(device)
        self._warnings = CudaCrossCheck()
        self._open = False
        self._numbered: dict[int, Counted] = {}
        self.calls: list[Counted] = []

    @contextmanager
    def session(self) -> Iterator[None]:
        """Calls inside are counted by all three."""
        self._numbered = {}
        profile = Profile()
        with profile:
            self._open = True
            try:
                with self._warnings:
                    yield
            finally:
                self._open = False
        if profile.saw_runtime:
            for number, counted in self._numbered.items():
                findings = profile.findings.get(number)
                if findings is not None:  # else the profiler lost it: no figure is better than a zero
                    counted.runtime, counted.runtime_calls = findings.total, findings.syncs

    @contextmanager
    def call(self, kind: Hashable, seq: int = -1, *, audit: bool = False) -> Iterator[SyncRecord]:
        """As `SyncLedger.call`, which the record is from. Nothing is audited: that runs other operators."""
        if not self._open:
            with self._ledger.call(kind, seq) as record:
                yield record
            return
        counted = Counted(kind, seq)
        number = len(self._numbered)
        self._numbered[number] = counted
        before = self._warnings.so_far
        with Profile.range(number), self._ledger.call(kind, seq) as record:
            yield record
        after = self._warnings.so_far
        counted.ledger = record.total
        counted.unwarned = _unwarned(record)
        counted.warned = None if before is None or after is None else after - before
        self.calls.append(counted)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, none of the three counts."""
        has_mode = self._open and torch.cuda.is_available()
        with Profile.paused(), self._ledger.paused():
            mode = torch.cuda.get_sync_debug_mode() if has_mode else 0
            if has_mode:
                torch.cuda.set_sync_debug_mode("default")
            try:
                yield
            finally:
                if has_mode:
                    torch.cuda.set_sync_debug_mode(mode)

    def host(self, *tensors: torch.Tensor, pinned: bool = False) -> None:
        """See `SyncLedger.host`."""
        self._ledger.host(*tensors, pinned=pinned)

    def close(self) -> None:
        """See `SyncLedger.close`."""
        self._ledger.close()


def _unwarned(record: SyncRecord) -> int:
    sites = (record.sites or {}).items()
    return sum(count for site, count in sites if site.kind == WAIT and site.operation != _WARNED_WAIT)
