"""What the ledger hands out: counts, the places they come from, and where its two levels disagree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

SyncKind = Literal["device_to_host", "host_to_device", "wait"]

DEVICE_TO_HOST: Final = "device_to_host"
HOST_TO_DEVICE: Final = "host_to_device"
WAIT: Final = "wait"


class SyncSite(NamedTuple):
    """One source line that synchronises, and with what."""

    line: str  # "allocator/end.py:120": the innermost frame outside torch and the ledger
    kind: SyncKind
    operation: str  # "Tensor.tolist"


@dataclass(slots=True)
class SyncCounts:
    """Numbers of synchronisations, by kind."""

    device_to_host: int = 0
    host_to_device: int = 0
    waits: int = 0

    @property
    def total(self) -> int:
        """All three kinds together."""
        return self.device_to_host + self.host_to_device + self.waits

    def add(self, kind: SyncKind, count: int) -> None:
        """Add ``count`` synchronisations of one kind."""
        if kind == DEVICE_TO_HOST:
            self.device_to_host += count
        elif kind == HOST_TO_DEVICE:
            self.host_to_device += count
        else:
            self.waits += count


@dataclass(slots=True)
class KindOfCallCounts(SyncCounts):
    """The same for all calls of one kind, and how many calls there were.

    What happens in a call inside a call counts for the inner one's kind only: the kinds add up to the totals.
    """

    calls: int = 0


class CallRecord:
    """One allocator call and what it synchronised, calls inside it included.

    Attributes:
        kind: the kind of call, as given to ``SyncLedger.call``.
        seq: its number, as given.
        audited: whether the operators inside functions were watched too.
        outer: the call it runs in, while it runs.
        device_to_host, host_to_device, waits: numbers of synchronisations.
        sites: the same by source line, kind and operation; ``None`` if there were none.
    """

    __slots__ = ("audited", "device_to_host", "host_to_device", "kind", "outer", "seq", "sites", "waits")

    def __init__(self, kind: Hashable, seq: int, audited: bool) -> None:
        self.kind = kind
        self.seq = seq
        self.audited = audited
        self.outer: CallRecord | None = None
        self.device_to_host = 0
        self.host_to_device = 0
        self.waits = 0
        self.sites: dict[SyncSite, int] | None = None

    @property
    def total(self) -> int:
        """All three kinds together."""
        return self.device_to_host + self.host_to_device + self.waits

    @property
    def lines(self) -> Counter[str]:
        """Synchronisations by source line; empty if there were none."""
        lines: Counter[str] = Counter()
        for site, count in (self.sites or {}).items():
            lines[site.line] += count
        return lines

    def add(self, site: SyncSite, count: int) -> None:
        """Add ``count`` synchronisations at one place."""
        if site.kind == DEVICE_TO_HOST:
            self.device_to_host += count
        elif site.kind == HOST_TO_DEVICE:
            self.host_to_device += count
        else:
            self.waits += count
        if self.sites is None:
            self.sites = {site: count}
        else:
            self.sites[site] = self.sites.get(site, 0) + count


class Disagreement(NamedTuple):
    """An audited torch function whose operators read the device more, or less, often than was counted."""

    kind_of_call: Hashable
    seq: int
    line: str
    function: str  # as torch names it; "" for an operator below a function that no mode sees
    counted: int  # device-to-host reads by the table of functions
    observed: int  # and by the operators that ran
    operators: tuple[str, ...]  # all operators that ran, "aten.nonzero.default"
