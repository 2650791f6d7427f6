"""A few numbers on their way from the device to the host, without the host waiting for them.

The device writes them into page-locked memory by a copy that does not block, and an event behind the copy is only ever *asked*. Where the
device is the CPU, the copy is done when it returns, so the numbers are there at once; on CUDA they come some time later, and whoever needs
them before that works with bounds (`allocator.unsettled`) or waits, which is a synchronisation and is counted here.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any

import torch

#: Read-backs that can be under way at once; an allocator has a handful of calls between two polls.
SLOTS = 128
#: int64 numbers in one read-back.
WIDTH = 6
#: Numbers up to which a whole tensor is copied to have some of them: a view of those would cost more than copying all.
ROW = 256


class Ticket:
    """One read-back: ask `ready`, then take `values`; or `wait` for them.

    Attributes:
        number: how many were posted before, by any pool.
    """

    __slots__ = ("__weakref__", "_event", "_owner", "_row", "_values", "number")

    def __init__(self, owner: ReadBack, row: Any, event: Any = None) -> None:
        self._owner, self._row, self._event = owner, row, event
        self.number = next(_posted)
        self._values: list[int] | None = None

    # A recorder's thread may ask for the same number as the engine's: the event is looked up once in each call.

    def ready(self) -> bool:
        """Whether the numbers are there. Asks, never waits."""
        event = self._event
        if event is None or not event.query():
            return event is None
        self._event = None
        return True

    def wait(self) -> None:
        """Wait until the numbers are there: a synchronisation, unless they are."""
        event = self._event
        if event is None or self.ready():
            return
        self._owner.blocking_reads += 1
        event.synchronize()
        self._event = None

    def values(self) -> list[int]:
        """The numbers, and behind them what is left of older ones; only once `ready` said so or `wait` returned."""
        if self._values is None:
            values = self._row.tolist()
            # Looked at again: whoever needs the place in memory has taken these numbers out first, perhaps meanwhile.
            if self._values is None:
                self._values = values
        return self._values

    def awaited(self) -> list[int]:
        """The numbers, once they are there: `wait`, if they are not."""
        self.wait()
        return self.values()


#: Numbers of tickets.
_posted = itertools.count()


class ReadBack:
    """Page-locked memory for `SLOTS` read-backs, used in turn.

    Attributes:
        immediate: whether numbers are there as soon as they are posted.
        blocking_reads: how often somebody waited for numbers that could not be done without.
        pinned_host_tensors: every tensor that the device copies to. On a CPU that stands in for a GPU, who counts synchronisations has to
            be told that they are page-locked.
    """

    def __init__(self, device: str | torch.device) -> None:
        on_cuda = torch.device(device).type == "cuda"
        self.immediate = not on_cuda
        self.blocking_reads = 0
        # On the host, also where somebody has made another device torch's default.
        memory = torch.empty(SLOTS, WIDTH, dtype=torch.int64, device="cpu", pin_memory=on_cuda)
        # For numbers that are read as soon as they are written.
        row = torch.empty(ROW, dtype=torch.int64, device="cpu", pin_memory=on_cuda)
        # One tensor a number, made once: making a view costs as much as the copy.
        self._cells = [list(row.unbind()) for row in memory.unbind()]
        self._rows = list(memory.numpy())
        self._row_cells, self._row, self._first_cell = row[:WIDTH].unbind(), row.numpy(), row[0]
        self._prefixes = [row[:count] for count in range(ROW + 1)]  # by how many numbers
        self._tickets: list[weakref.ref[Ticket] | None] = [None] * SLOTS
        self._events: list[Any] = [None] * SLOTS
        self._next = 0
        self.pinned_host_tensors = [
            memory,
            row,
            *(cell for cells in self._cells for cell in cells),
            *self._row_cells,
            self._first_cell,
            *self._prefixes,
        ]

    def post(self, *numbers: torch.Tensor) -> Ticket:
        """Send numbers (int64, on the device, one element each, at most `WIDTH` of them) on their way."""
        slot = self._next
        self._next = (slot + 1) % SLOTS
        if not self.immediate:
            self._vacate(slot)
        for cell, number in zip(self._cells[slot], numbers, strict=False):
            cell.copy_(number, non_blocking=True)
        if self.immediate:
            return Ticket(self, self._rows[slot])
        event = self._mark(numbers)
        ticket = Ticket(self, self._rows[slot], event)
        self._tickets[slot], self._events[slot] = weakref.ref(ticket), event
        return ticket

    def read(self, *numbers: torch.Tensor) -> list[int]:
        """`post` and take the values, for whoever knows that they are there at once, or cannot do without them."""
        if self.immediate:
            for cell, number in zip(self._row_cells, numbers, strict=False):
                cell.copy_(number, non_blocking=True)
            values: list[int] = self._row[:WIDTH].tolist()
            return values
        ticket = self.post(*numbers)
        ticket.wait()
        return ticket.values()

    def read_one(self, number: torch.Tensor) -> int:
        """`read` for one number."""
        if not self.immediate:
            return self.read(number)[0]
        self._first_cell.copy_(number, True)  # non_blocking
        value: int = self._row.item(0)
        return value

    def read_two(self, numbers: torch.Tensor, first: int, second: int) -> tuple[int, int]:
        """`read` for two neighbours, or one number twice: ``numbers[first]`` and ``numbers[second]`` (int64 ``[n]``)."""
        if not self.immediate:
            values = self.read(numbers[first], numbers[second])
            return values[0], values[1]
        count = numbers.shape[0]
        if count > ROW:
            numbers = numbers[first : second + 1]
            first, second, count = 0, second - first, second - first + 1
        self._prefixes[count].copy_(numbers, True)  # non_blocking
        value = self._row.item
        return value(first), value(second)

    def read_all(self, numbers: torch.Tensor) -> list[int]:
        """Numbers of any count (int64 ``[n]``) that cannot be done without: one blocking read."""
        self.blocking_reads += not self.immediate
        values: list[int] = numbers.tolist()
        return values

    def _mark(self, numbers: tuple[torch.Tensor, ...]) -> Any:
        """An event behind the copies just queued: on the stream of their device, which need not be the current one."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(numbers[0].device))
        return event

    def _vacate(self, slot: int) -> None:
        """Numbers that somebody still wants must be out of the slot before it is used again, and a copy that is under way behind it."""
        reference = self._tickets[slot]
        ticket = None if reference is None else reference()
        event, self._events[slot] = self._events[slot], None
        if ticket is not None:
            ticket.wait()
            ticket.values()
        elif event is not None and not event.query():
            # Nobody wants them any more. The copy may be on another stream, which this one is then ordered after; the host goes on.
            event.wait()


class LateCount:
    """A number that is still on its way and stands where a call answers an ``int``: asking what it is waits for it.

    Sums of such numbers and of integers are such a number again: that is what callers make of flushes' answers (SGLang's composites), and
    they need not wait for it either.
    """

    __slots__ = ("_sum",)

    def __init__(self, *parts: Callable[[], int], known: int = 0) -> None:
        # In one attribute: a recorder's thread may ask while the engine's does, and must not see half of a change.
        self._sum = parts, known

    def __int__(self) -> int:
        parts, known = self._sum
        if parts:
            known += sum(read() for read in parts)
            self._sum = (), known
        return known

    __index__ = __int__

    def __float__(self) -> float:
        return float(int(self))

    def __bool__(self) -> bool:
        return int(self) != 0

    def __eq__(self, other: object) -> bool:
        return int(self) == (int(other) if isinstance(other, LateCount) else other)

    def __lt__(self, other: float | LateCount) -> bool:
        return int(self) < (int(other) if isinstance(other, LateCount) else other)

    def __le__(self, other: float | LateCount) -> bool:
        return int(self) <= (int(other) if isinstance(other, LateCount) else other)

    def __gt__(self, other: float | LateCount) -> bool:
        return not self <= other

    def __ge__(self, other: float | LateCount) -> bool:
        return not self < other

    def __hash__(self) -> int:
        return hash(int(self))

    def __add__(self, other: int | LateCount) -> LateCount:
        parts, known = self._sum
        more, added = other._sum if isinstance(other, LateCount) else ((), int(other))
        return LateCount(*parts, *more, known=known + added)

    __radd__ = __add__

    def __sub__(self, other: int | LateCount) -> int:
        return int(self) - int(other)

    def __rsub__(self, other: int) -> int:
        return other - int(self)

    def __mul__(self, other: int) -> int:
        return int(self) * other

    __rmul__ = __mul__

    def __repr__(self) -> str:
        return str(int(self))

    def __format__(self, spec: str) -> str:
        return format(int(self), spec)


class LateCountPerhaps(LateCount):
    """The same of a call that is made only if the device finds it needed. A sum with others says nothing of that."""

    __slots__ = ("_made",)

    def __init__(self, count: Callable[[], int], made: Callable[[], bool]) -> None:
        super().__init__(count)
        self._made = made

    def was_made(self) -> bool:
        """Whether it was. Waits for it: a recorder asks, in its writer's thread."""
        return self._made()
