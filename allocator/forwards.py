"""What the running forward still reads and writes, and the pages that must wait for it.

A flush meets two hazards, both ending with the forward's done event. A *write* hazard: the forward will write a page, so copying it now
would copy bytes that are about to change. A *read* hazard: the forward reads a page at the place its kernels were launched with, so
that place may not be reused, even after the page's bytes were moved elsewhere.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

import torch


class ForwardDoneEvent(Protocol):
    """The part of ``torch.cuda.Event`` that is used: ``query()`` asks without blocking, ``wait()`` orders the current stream after
    the event without blocking the host. Neither is a synchronisation."""

    def query(self) -> bool: ...

    def wait(self) -> None: ...


def wait_on_current_stream(event: ForwardDoneEvent) -> None:
    """Order later work of this stream after ``event``; the host goes on. ``query()`` may stay false."""
    event.wait()


@dataclass
class _Waiting:
    pages_on_host: list[int] = field(default_factory=list)
    batches: list[torch.Tensor] = field(default_factory=list)


class PendingReuse:
    """Pages that were moved away while a forward may still read them, by the event they wait for.

    Several batches can wait for one event (two flushes during one forward): they add up, none replaces another
    (sgl-project/sglang#39982). The host keeps the page numbers beside the tensors, so that asking for membership and giving pages back
    costs no copy in either direction.
    """

    def __init__(self) -> None:
        self._waiting: dict[ForwardDoneEvent, _Waiting] = {}
        self._pages_on_host: set[int] = set()

    @property
    def pages_on_host(self) -> set[int]:
        """All waiting pages."""
        return self._pages_on_host

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def __len__(self) -> int:
        return len(self._pages_on_host)

    def as_mapping(self) -> dict[ForwardDoneEvent, tuple[list[int], list[torch.Tensor]]]:
        """SGLang's shape of the same thing: event to (page numbers, tensors)."""
        return {event: (entry.pages_on_host, entry.batches) for event, entry in self._waiting.items()}

    def add(self, event: ForwardDoneEvent, pages_on_host: Iterable[int], pages: torch.Tensor) -> None:
        entry = self._waiting.setdefault(event, _Waiting())
        before = len(entry.pages_on_host)
        entry.pages_on_host.extend(pages_on_host)
        entry.batches.append(pages)
        self._pages_on_host.update(entry.pages_on_host[before:])

    def release(self, *, wait: bool) -> list[torch.Tensor]:
        """Batches whose event has fired; with ``wait`` all of them, the stream being ordered after events still open."""
        released: list[torch.Tensor] = []
        fired: list[ForwardDoneEvent] = []
        for event, entry in self._waiting.items():
            if not event.query():
                if not wait:
                    continue
                wait_on_current_stream(event)
            fired.append(event)
            released.extend(entry.batches)
        for event in fired:
            self._pages_on_host.difference_update(self._waiting.pop(event).pages_on_host)
        return released

    def clear(self) -> None:
        self._waiting.clear()
        self._pages_on_host.clear()


class RunningForward:
    """The forward launched last: its done event, and the virtual token ids it writes in this pool."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.latest: ForwardDoneEvent | None = None
        self._writing: tuple[ForwardDoneEvent, torch.Tensor] | None = None
        self.transfers: dict[Hashable, ForwardDoneEvent] = {}

    def set_writing(self, done: ForwardDoneEvent, out_cache_loc_virtual: torch.Tensor | None) -> None:
        if out_cache_loc_virtual is None or out_cache_loc_virtual.numel() == 0:
            self._writing = None
        else:
            self._writing = (done, out_cache_loc_virtual)

    def stop_writing(self) -> None:
        """What the forward writes is behind this stream already."""
        self._writing = None

    @property
    def writing(self) -> tuple[ForwardDoneEvent, torch.Tensor] | None:
        return self._writing

    def unfinished_write_set(self) -> torch.Tensor | None:
        """Virtual token ids the forward has yet to write, None if there is no such forward or it is done."""
        if self._writing is None:
            return None
        if self._writing[0].query():
            self._writing = None
            return None
        return self._writing[1]

    def latest_unfinished(self) -> ForwardDoneEvent | None:
        """The done event that pages moved now must wait for, None if it has fired."""
        return None if self.latest is None or self.latest.query() else self.latest

    def settle(self) -> None:
        """Order this stream after the running forward, so that moving (its writes) and reusing (its reads) are safe. The event is
        recorded after the whole forward, so one wait covers both."""
        waited = self.latest
        if waited is not None:
            wait_on_current_stream(waited)
        if self._writing is not None:
            if self._writing[0] is not waited:
                wait_on_current_stream(self._writing[0])
            self._writing = None

    def set_transfer_done(self, key: Hashable, event: ForwardDoneEvent) -> None:
        self.transfers[key] = event

    def settle_transfers(self) -> None:
        """Order this stream after copies between this pool and the host: their pages are about to be moved or freed."""
        if not self.transfers:
            return
        events, self.transfers = self.transfers, {}
        for event in events.values():
            wait_on_current_stream(event)
