"""An END pool while numbers of its last flushes are still on their way from the device.

A flush that is not urgent leaves two numbers that only the device knows: how many boundary holes it gave back, and how many pages it
moved. Until they arrive, the host keeps *bounds* and a *journal* of what was done since, and the device keeps the exact state in
`Registers`: calls go on with gathers and masks instead of slices. When the numbers arrive, the journal is worked off and the pool is what
it would have been.

Three numbers say it all: ``band`` (pages between the buffer's end and the watermark), ``live`` and ``pending``; holes are what is left of
the band. Their upper bounds give *lower* bounds of every size that is promised: what a pool can hand out is its reach less live less
pending pages, and its neighbour's reach ends at its band. An allocation never makes a bound worse: it takes holes first, so afterwards the
band is the larger of what it was and of ``live + pending``, whatever the numbers are.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

import torch

from allocator.read_back import Ticket

#: Larger than any page, and its negative smaller: where padding rows sort to.
FAR = 2**40


@dataclass
class Numbers:
    """Pages in the band, live ones, pending ones; and ids that went back to the free list beyond those that were sure to."""

    band: int
    live: int
    pending: int
    late_ids: int = 0

    @property
    def waiting(self) -> int:
        """Pending pages. The sum of their bounds may be more than there is room for."""
        return min(self.pending, self.band - self.live)

    @property
    def holes(self) -> int:
        return self.band - self.live - self.waiting


@dataclass(eq=False)
class PendingBatch:
    """Pages that one flush moved away: the first ``count`` rows of ``pages`` (int64 ``[bound]``).

    ``moved`` is how many that were on the host, None until it is known, and ``in_doubt`` the flushes of which is not known yet whether
    they have taken the pages back.
    """

    pages: torch.Tensor
    count: torch.Tensor | int
    bound: int
    moved: int | None
    in_doubt: int = 0

    @property
    def size(self) -> int | None:
        """``count`` on the host, None until it is known."""
        return None if self.in_doubt else self.moved

    @property
    def most(self) -> int:
        return self.bound if self.moved is None else self.moved

    def exact(self) -> torch.Tensor:
        """int64 ``[size]``; only once the size is known."""
        return self.pages[: self.size]


class Entry:
    """One thing that was done. ``ticket`` brings what the host does not know of it."""

    ticket: Ticket | None = None

    def apply(self, numbers: Numbers, values: list[int] | None) -> None:
        """Do it to ``numbers``: exact ones with the ticket's ``values``, upper bounds without."""


@dataclass
class Took(Entry):
    """Pages were handed out."""

    pages: int

    def apply(self, numbers: Numbers, values: list[int] | None) -> None:
        waiting = numbers.waiting
        numbers.live += self.pages
        numbers.band = max(numbers.band, numbers.live + waiting)


@dataclass
class Released(Entry):
    """Live pages became holes: ``pages`` of them, or as many as the ticket says and at least ``pages``."""

    pages: int
    ticket: Ticket | None = None

    def apply(self, numbers: Numbers, values: list[int] | None) -> None:
        released = self.pages if values is None else values[0]
        numbers.live -= released
        numbers.late_ids += released - self.pages


@dataclass
class Returned(Entry):
    """Pages of a batch that waited became holes."""

    batch: PendingBatch

    def apply(self, numbers: Numbers, values: list[int] | None) -> None:
        numbers.pending -= self.batch.most


@dataclass
class Flushed(Entry):
    """A flush that was not urgent; the ticket brings the boundary holes and the moves."""

    batch: PendingBatch | None
    ticket: Ticket | None = None

    def apply(self, numbers: Numbers, values: list[int] | None) -> None:
        if values is not None:
            numbers.band -= values[0]
            if self.batch is not None:
                self.batch.moved = values[1]
        if self.batch is not None:
            numbers.pending += self.batch.most


@dataclass
class Packed(Entry):
    """An urgent flush: no hole is left, and nothing waits."""

    def apply(self, numbers: Numbers, values: list[int] | None) -> None:
        numbers.band, numbers.pending = numbers.live, 0


class PackedPerhaps(Entry):
    """An urgent flush that was made only if the device found it needed; the ticket says whether.

    Args:
        batches: what waited. Their pages went with the flush, if there was one.
        condition: whether it is made, bool ``[]`` on the device.
    """

    def __init__(self, ticket: Ticket, batches: list[PendingBatch], condition: torch.Tensor) -> None:
        self.ticket, self._batches = ticket, batches
        for batch in batches:
            batch.in_doubt += 1
            batch.count = torch.where(condition, 0, batch.count)

    def apply(self, numbers: Numbers, values: list[int] | None) -> None:
        if values is None:
            return
        if values[0]:
            numbers.band, numbers.pending = numbers.live, 0
        for batch in self._batches:
            batch.in_doubt -= 1
            if values[0]:
                batch.moved = 0


class Journal:
    """What is known for certain, what was done since, and the bounds that follow."""

    def __init__(self, known: Numbers) -> None:
        self.known = known
        self.bounds = replace(known)
        self._entries: deque[Entry] = deque()

    @property
    def under_way(self) -> int:
        """Entries of which numbers are on their way."""
        return sum(entry.ticket is not None for entry in self._entries)

    def add(self, entry: Entry) -> None:
        self._entries.append(entry)
        entry.apply(self.bounds, None)

    def live_is_known(self) -> bool:
        """Whether ``bounds.live`` is exact: only a free of tokens, whose pages are not counted yet, leaves it open."""
        return not any(isinstance(entry, Released) and entry.ticket is not None for entry in self._entries)

    def youngest(self) -> Ticket | None:
        """The ticket posted last, None if there is none."""
        return next((entry.ticket for entry in reversed(self._entries) if entry.ticket is not None), None)

    def wait(self) -> None:
        """Wait for all numbers: for the youngest first, because those posted before it on the same stream are there then too."""
        for entry in reversed(self._entries):
            if entry.ticket is not None:
                entry.ticket.wait()

    def work_off(self) -> bool:
        """Apply entries whose numbers have arrived; whether that was all of them. Asks, never waits."""
        before = len(self._entries)
        while self._entries:
            entry = self._entries[0]
            if entry.ticket is not None and not entry.ticket.ready():
                break
            entry.apply(self.known, None if entry.ticket is None else entry.ticket.values())
            self._entries.popleft()
        if len(self._entries) != before:
            self.bounds = replace(self.known)
            for entry in self._entries:
                entry.apply(self.bounds, None)
        return not self._entries


@dataclass
class Registers:
    """The exact state, on the device.

    ``holes``: int64 ``[capacity]``, the first ``count`` (int64 ``[]``) of them valid, in the order of the list; ``ascending`` if those are
    sorted. ``mark``: the watermark, int64 ``[]``.
    """

    holes: torch.Tensor
    count: torch.Tensor
    mark: torch.Tensor
    ascending: bool

    def sorted(self, numbers: torch.Tensor, *, padding: int) -> torch.Tensor:
        """The valid holes ascending, with ``padding`` for the others at the end where that sorts to; int64 ``[capacity]``."""
        valid = numbers[: self.holes.shape[0]] < self.count
        return torch.sort(torch.where(valid, self.holes, padding))[0]

    def append(
        self, pages: torch.Tensor, count: torch.Tensor | int, numbers: torch.Tensor, most: int
    ) -> None:
        """Add the first ``count`` of ``pages`` to the list, which never has more than ``most``."""
        longer = torch.cat([self.holes, pages])
        # Within the list whatever happened: in a frozen pool the number may be anything.
        rows = (numbers[: pages.shape[0]] + self.count).clamp(0, longer.shape[0] - 1)
        longer.index_copy_(0, rows, pages)
        self.holes, self.count, self.ascending = longer[:most], self.count + count, False

    def take(self, want: int, numbers: torch.Tensor, *, grows_up: bool) -> torch.Tensor:
        """Hand out ``want`` pages as `MultiEndedAllocator.take_physical_pages` would: int64 ``[want]``."""
        rows, count, mark = numbers[:want], self.count, self.mark
        capacity = self.holes.shape[0]
        if capacity:
            ascending = self.holes if self.ascending else self.sorted(numbers, padding=FAR)
            last = capacity - 1
            in_order = (
                ascending[rows.clamp(max=last)]
                if grows_up
                else ascending[(rows + (count - want)).clamp(0, last)]
            )
            # A request that takes all holes gets them in the order of the list.
            as_listed = self.holes[rows.clamp(max=last)]
            from_holes = torch.where(count > want, in_order, as_listed)
        else:
            ascending, from_holes = self.holes, self.holes.new_zeros(want)
        beyond = rows - count
        if grows_up:
            fresh = mark + beyond
        else:
            # Pages past the watermark come ascending on their own, and descending behind holes.
            fresh = torch.where(count == 0, (mark - want + 1) + rows, mark - beyond)
        grown = (want - count).clamp(min=0)
        self.mark = mark + grown if grows_up else mark - grown
        if capacity:
            self.holes = ascending[want:] if grows_up else ascending
        self.count, self.ascending = (count - want).clamp(min=0), True
        return torch.where(rows < count, from_holes, fresh)
