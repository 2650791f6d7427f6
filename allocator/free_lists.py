"""The two lists of free things: virtual ids waiting to be handed out, and holes inside a band."""

from __future__ import annotations

import torch


class FreeVirtualIds:
    """Free virtual page ids, first in first out: handed out from the front, freed ids to the back.

    The ids live in a buffer with room for as many again, so that a free copies what was freed and not the whole list. Handed-out ids
    are views; a full buffer is replaced, never rewritten, so such a view keeps its values (Megatron-LM#6584 is the opposite case).
    """

    def __init__(self, first: int, end: int, device: str | torch.device) -> None:
        self._capacity = max(0, end - first)
        self._head, self._tail = 0, self._capacity
        self._buffer = torch.empty(2 * self._capacity, dtype=torch.int64, device=device)
        torch.arange(first, end, out=self._buffer[: self._capacity], device=device)

    def __len__(self) -> int:
        return self._tail - self._head

    def tensor(self) -> torch.Tensor:
        """int64 ``[len(self)]`` in the order in which they will be handed out; a view."""
        return self._buffer[self._head : self._tail]

    def replace(self, ids: torch.Tensor) -> None:
        """Take ``ids`` as the whole list."""
        self._capacity = max(self._capacity, ids.shape[0])
        self._restart(ids)

    def peek(self, count: int) -> torch.Tensor:
        """The next ``count`` ids, still in the list."""
        return self._buffer[self._head : self._head + count]

    def drop(self, count: int) -> None:
        """Remove the next ``count`` ids."""
        self._head += count

    @property
    def position(self) -> int:
        """Where the list begins; for `go_back_to`."""
        return self._head

    def go_back_to(self, position: int) -> None:
        """Undo every `drop` since the list began at ``position``; nothing may have been appended in between."""
        self._head = position

    def append(self, ids: torch.Tensor) -> None:
        """Freed ids go to the back, in the order given."""
        end = self._tail + ids.shape[0]
        if end > self._buffer.shape[0]:
            self._restart(torch.cat([self.tensor(), ids]))
            return
        self._buffer[self._tail : end] = ids
        self._tail = end

    def _restart(self, ids: torch.Tensor) -> None:
        count = ids.shape[0]
        self._buffer = torch.empty(max(2 * self._capacity, count), dtype=torch.int64, device=ids.device)
        self._buffer[:count] = ids
        self._head, self._tail = 0, count


class HoleList:
    """Physical pages inside a band that hold nothing. Kept in the order they came until a sorted view is needed.

    A request that takes *all* holes gets them in that order, unsorted: part of the placement contract (golden transcripts).

    Attributes:
        pages: int64 ``[len(self)]`` of physical page ids, in no promised order; to be read, and replaced by the methods only.
        is_sorted: whether they are known to be ascending; likewise.
    """

    def __init__(self, device: str | torch.device) -> None:
        self._none = torch.empty(0, dtype=torch.int64, device=device)
        self.clear()

    def clear(self) -> None:
        self.pages, self.is_sorted = self._none, True
        self._on_host: list[int] | None = None

    def __len__(self) -> int:
        return self.pages.shape[0]

    def set_sorted(self, ascending: torch.Tensor, on_host: list[int] | None = None) -> None:
        """Replace the list by an ascending one; ``on_host`` is the same list where the host has it already."""
        self.pages, self.is_sorted, self._on_host = ascending, True, on_host

    def set_unsorted(self, pages: torch.Tensor) -> None:
        self.pages, self.is_sorted, self._on_host = pages, pages.shape[0] < 2, None

    def state(self) -> tuple[torch.Tensor, bool, list[int] | None]:
        """All there is to know of the list, for `go_back_to`. Its parts are replaced, never written to."""
        return self.pages, self.is_sorted, self._on_host

    def go_back_to(self, state: tuple[torch.Tensor, bool, list[int] | None]) -> None:
        self.pages, self.is_sorted, self._on_host = state

    def add(self, *batches: torch.Tensor) -> None:
        self.set_unsorted(torch.cat([self.pages, *batches]) if len(self) or len(batches) > 1 else batches[0])

    def sorted(self) -> torch.Tensor:
        """Ascending; sorts on the device, and only if something came in since the last time. No synchronisation."""
        if not self.is_sorted:
            self.set_sorted(torch.sort(self.pages)[0])
        return self.pages

    def on_host(self) -> list[int]:
        """Ascending, on the host. Reads the device once, and not again while the list stays as it is: flushes that can do nothing but
        wait for an event come by the thousand."""
        if self._on_host is None:
            self._on_host = self.sorted().tolist()
        return self._on_host

    def take(self, count: int, end: str) -> torch.Tensor:
        """Remove and return ``count`` pages, the lowest (``end="low"``) or the highest (``"high"``), ascending; all of them come in
        the order they were added."""
        if count == len(self):
            taken = self.pages
            self.set_sorted(taken[:0])
            return taken
        ascending = self.sorted()
        if end == "low":
            taken, rest = ascending[:count], ascending[count:]
        else:
            keep = len(self) - count
            taken, rest = ascending[keep:], ascending[:keep]
        self.set_sorted(rest)
        return taken
