"""The ledger: counts the synchronisations inside allocator calls, by call, kind and source line."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Hashable
from threading import get_ident
from types import TracebackType
from typing import Final

import torch

from replayer.ledger.book import Book
from replayer.ledger.hooks import listen
from replayer.ledger.modes import FunctionMode, OperatorMode
from replayer.ledger.places import Places
from replayer.ledger.records import CallRecord, Disagreement, KindOfCallCounts, SyncCounts, SyncSite


class SyncRecord(CallRecord):
    """The context manager that :meth:`SyncLedger.call` gives, good for one call; see :class:`CallRecord`."""

    __slots__ = ("_ledger", "_starts_audit")

    def __init__(self, ledger: SyncLedger, kind: Hashable, seq: int, audited: bool) -> None:
        super().__init__(kind, seq, audited)
        self._ledger: SyncLedger | None = ledger
        self._starts_audit = False

    def __enter__(self) -> SyncRecord:
        ledger = self._ledger
        if ledger is None:
            raise RuntimeError("this record stands for a call that is over: ask the ledger for another one")
        book = ledger._book
        counts = book.kinds.get(self.kind)
        if counts is None:
            counts = book.kinds[self.kind] = KindOfCallCounts()
        counts.calls += 1
        outer = self.outer = book.current
        if outer is None:
            ledger._functions.__enter__()  # type: ignore[no-untyped-call]
            book.thread = get_ident()
        if self.audited and ledger._functions.operators is None:
            ledger._operators.__enter__()  # type: ignore[no-untyped-call]
            ledger._functions.operators = ledger._operators
            self._starts_audit = True
        book.current = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        ledger = self._ledger
        if ledger is None:
            return
        if self._starts_audit:
            ledger._functions.operators = None
            ledger._operators.__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]
        if self.outer is None:
            ledger._functions.__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]
        ledger._book.current = self.outer
        self._ledger = self.outer = None


class Pause:
    """The context manager that :meth:`SyncLedger.paused` gives."""

    __slots__ = ("_ledger", "_off")

    def __init__(self, ledger: SyncLedger) -> None:
        self._ledger = ledger
        self._off = torch._C.DisableTorchFunction()

    def __enter__(self) -> None:
        self._ledger._book.paused += 1
        self._ledger._operators.paused = True
        self._off.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._off.__exit__(kind, error, traceback)
        book = self._ledger._book
        book.paused -= 1
        self._ledger._operators.paused = book.paused > 0


class SyncLedger:
    """Counts synchronisations between host and device inside the calls it is shown.

    On a real device the tensors say where they live. With ``device="cpu"`` the CPU stands in for a GPU: every
    tensor is taken for a device tensor unless it was declared with :meth:`host`, or a call made it the way
    host tensors are made (``torch.tensor(list)`` without a device, ``.cpu()``) or computed it from such only.

    A ledger belongs to one thread. While it is open, the functions named in :mod:`replayer.ledger.hooks` are
    wrapped; :meth:`close`, leaving it as a context manager, or its end of life puts them back.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device: Final = torch.device(device)
        self._places = Places(self.device)
        self._book = Book(self._places)
        self._functions = FunctionMode(self._places, self._book)
        self._operators = OperatorMode(self._places, self._book)
        self._close = weakref.finalize(self, listen(self._book))

    @property
    def disagreements(self) -> list[Disagreement]:
        """What audited calls found; the counts stay those of the functions."""
        return self._book.disagreements

    def call(self, kind: Hashable, seq: int = -1, *, audit: bool = False) -> SyncRecord:
        """A context manager around one allocator call; gives the call's record.

        Args:
            kind: what :meth:`by_kind_of_call` groups by.
            seq: the call's number, for disagreements.
            audit: also watch the operators that run inside functions, and note in :attr:`disagreements` where
                they read the device another number of times than was counted. Costs several times more.
        """
        return SyncRecord(self, kind, seq, audit)

    def host(self, *tensors: torch.Tensor, pinned: bool = False) -> None:
        """Declare tensors to be on the host in a GPU run, for as long as they live (``seq_lens_cpu``, say).

        Without effect on a real device. Torch functions cost more while such a tensor is alive.

        Args:
            tensors: the tensors.
            pinned: whether they would be in page-locked memory.
        """
        for tensor in tensors:
            self._places.declare_host(tensor, pinned=pinned)

    def wait(self, operation: str = "wait") -> None:
        """Count one wait for the device: of a simulated event or stream that torch knows nothing of."""
        self._book.waited(operation)

    def paused(self) -> Pause:
        """A context manager inside which nothing is counted: for work of the replayer's own during a call."""
        return Pause(self)

    def totals(self) -> SyncCounts:
        """Synchronisations of all calls so far."""
        totals = self._book.totals
        return SyncCounts(totals.device_to_host, totals.host_to_device, totals.waits)

    def by_line(self) -> dict[str, SyncCounts]:
        """The totals by source line, ``file:line``, most first."""
        lines: dict[str, SyncCounts] = {}
        for site, count in self._book.sites.items():
            lines.setdefault(site.line, SyncCounts()).add(site.kind, count)
        return dict(sorted(lines.items(), key=lambda item: (-item[1].total, item[0])))

    def by_site(self) -> Counter[SyncSite]:
        """The totals by source line, kind and operation."""
        return Counter(self._book.sites)

    def by_kind_of_call(self) -> dict[Hashable, KindOfCallCounts]:
        """The totals by kind of call, and numbers of calls; a call inside a call counts for its own kind."""
        return {
            kind: KindOfCallCounts(counts.device_to_host, counts.host_to_device, counts.waits, counts.calls)
            for kind, counts in self._book.kinds.items()
        }

    def close(self) -> None:
        """Put the wrapped functions back. What was counted stays readable."""
        self._close()

    def __enter__(self) -> SyncLedger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
