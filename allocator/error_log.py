"""What went wrong, written down on the device, because asking the device at every call would cost what this strategy avoids.

A device assertion (``torch._assert_async``) surfaces somewhere later and takes the CUDA context with it. Here the first bad row of a call
goes into four numbers on the device, and from then on all pools of the buffer are *frozen*: tables are no longer written and nothing
moves, so that no live page is overwritten by calls made before the host knows. The log comes back through page-locked memory and is looked
at, without waiting, at every later call; what it holds becomes a typed error. The pools are of no use after that until each was cleared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Final

import torch

from allocator.errors import (
    AllocatorError,
    BindError,
    CorruptMappingError,
    DuplicateFreeError,
    NotAllocatedError,
    OutOfRoomError,
    require,
)
from allocator.read_back import ReadBack, Ticket

FAULTS: Final = 256
"""More than there are kinds of faults."""


class Fault(IntEnum):
    """What a call did wrong; 0 is nothing."""

    NOT_LIVE = 1
    FREED_TWICE = 2
    NOT_FREE = 3
    BOUND_TWICE = 4
    OUTSIDE_BAND = 5
    STILL_OWNED = 6
    CONTRADICTION = 7
    BOUND_OUTSIDE = 8
    OUT_OF_ROOM = 9


_ERRORS: dict[Fault, tuple[type[AllocatorError], str]] = {
    Fault.NOT_LIVE: (NotAllocatedError, "freed a page that is not allocated (freed before, never allocated, or no page at all)"),
    Fault.FREED_TWICE: (DuplicateFreeError, "freed a page that it named more than once"),
    Fault.NOT_FREE: (BindError, "bound a virtual page that is live, reserved or out of range"),
    Fault.BOUND_TWICE: (BindError, "named the same page twice"),
    Fault.OUTSIDE_BAND: (NotAllocatedError, "named a physical page outside the band"),
    Fault.BOUND_OUTSIDE: (BindError, "bound a physical page outside the band"),
    Fault.STILL_OWNED: (NotAllocatedError, "unbound a page that is not live or still owns its place"),
    Fault.OUT_OF_ROOM: (OutOfRoomError, "backed virtual pages with more pages than could be handed out"),
    Fault.CONTRADICTION: (
        CorruptMappingError,
        "found that tables and holes contradict each other: a page inside the band is neither hole nor pending, yet no virtual page "
        "maps to it, or it is a hole and still mapped",
    ),
}  # fmt: skip
_OF_NO_PAGE = (Fault.OUT_OF_ROOM, Fault.CONTRADICTION)


class ErrorLog:
    """The log of one pool, and of the others of its buffer: a fault freezes them all.

    The host learns of a fault late. Until then its idea of where the pool ends may be wrong, so that a neighbour would be handed pages that
    are in use here.

    Args:
        device: where it is written.
        read_back: brings it to the host.
        pool: the pool's name.
        siblings: the logs of all pools of the buffer, this one among them, always in the same order.

    Attributes:
        calls: checked calls so far; errors name a call by this number.
        ok: whether nothing went wrong yet in the buffer, bool ``[]`` on the device.
        freezes: whether a fault stops all writing.
    """

    freezes = True

    def __init__(
        self,
        device: str | torch.device,
        read_back: ReadBack,
        pool: str = "",
        siblings: Callable[[], Sequence[ErrorLog]] | None = None,
    ) -> None:
        self._device, self._read_back = device, read_back
        self.pool = pool
        self._siblings: Callable[[], Sequence[ErrorLog]] = siblings or (lambda: [self])
        self.calls = 0
        self._begin()

    def _begin(self) -> None:
        # Fault, call, physical page, virtual page; replaced and never written in place, as a read-back of the last one may be under way.
        self._log = torch.zeros(4, dtype=torch.int64, device=self._device)
        self.ok = torch.ones((), dtype=torch.bool, device=self._device)
        self._ticket: Ticket | None = None
        self._is_news = False
        self._found: list[int] | None = None

    def clear(self) -> None:
        """Forget what went wrong. Pools of a frozen buffer stay frozen until all of them have been cleared."""
        self._begin()
        logs = self._siblings()
        ok = self.ok
        for log in logs:
            if log is not self:
                ok = ok & (log._log[0] == 0)
                log._is_news = True  # what this log was about to tell
                log._send()
        for log in logs:
            log.ok = ok

    def code(self, fault: Fault) -> int:
        """The number that stands for a fault of this pool."""
        logs = self._siblings()
        return int(fault) + FAULTS * next(number for number, log in enumerate(logs) if log is self)

    def note(
        self,
        fault: Fault,
        bad: torch.Tensor,
        physical: torch.Tensor,
        virtual: torch.Tensor,
        *,
        then: tuple[Fault, torch.Tensor] | None = None,
    ) -> None:
        """Write down the first of ``bad`` rows (bool ``[n]``, n > 0), if there is one and nothing was written before.

        Args:
            then: another fault and the rows that have it (bool ``[n]``), to be written down if none has the first one. What it says of rows
                that have the first one does not matter.
        """
        rank = bad if then is None else torch.where(bad, 2, then[1])
        worst, first = rank.max(0, keepdim=True)  # the first of equals
        call = torch.full((1,), self.calls, dtype=torch.int64, device=self._device)
        if then is None:
            is_bad, code = worst, torch.full_like(call, self.code(fault))
        else:
            is_bad, code = worst > 0, torch.where(worst > 1, self.code(fault), self.code(then[0]))
        entry = torch.cat([code, call, physical.index_select(0, first), virtual.index_select(0, first)])
        self._write(self.ok & is_bad[0], entry)

    @property
    def log(self) -> torch.Tensor:
        """`code` of a fault, call, physical page, virtual page: int64 ``[4]`` on the device, never written in place."""
        return self._log

    def adopt(self, log: torch.Tensor, ok: torch.Tensor) -> None:
        """Go on with what a kernel made of `log` and `ok` (bool ``[]``) as `note` would have."""
        self._write(self.ok & ~ok, log)

    def _write(self, is_new: torch.Tensor, entry: torch.Tensor) -> None:
        ok = self.ok & ~is_new
        for log in self._siblings():
            log._log = torch.where(is_new, entry, log._log)
            log.ok = ok
        self._is_news = True
        self._send()

    def _send(self) -> None:
        if self._ticket is None and self._is_news:
            self._ticket = self._read_back.post(*self._log.unbind())
            self._is_news = False

    def look(self, *, wait: bool = False) -> None:
        """Raise what has come back so far; with ``wait`` all that was written.

        Raises:
            AllocatorError: the kind that the first fault of a pool of this buffer calls for; again at every later look, until all of
                them have been cleared.
        """
        logs = self._siblings()
        for log in logs:
            log._take_in(wait)
            if log._found is not None:
                code, call, physical, virtual = log._found[:4]
                number, fault = divmod(code, FAULTS)
                error, text = _ERRORS[Fault(fault)]
                # Calls that name physical pages have no virtual one to tell.
                page = physical if virtual == -1 and physical != -1 else virtual
                raise error(
                    f"checked call {call} of this pool (of {logs[number].calls} so far) {text}: virtual page {virtual}, physical page "
                    f"{physical}. All pools of the buffer have been frozen since and can only be cleared",
                    pool=logs[number].pool,
                    ids=[] if Fault(fault) in _OF_NO_PAGE else [page],
                )

    def _take_in(self, wait: bool) -> None:
        while self._found is None and self._ticket is not None:
            if wait:
                self._ticket.wait()
            elif not self._ticket.ready():
                return
            values = self._ticket.values()
            self._ticket = None
            if values[0]:
                self._found = values
            else:
                self._send()
                if not wait:
                    return


class AsynchronousAssertions(ErrorLog):
    """``assertions="async"``: what SGLang does since sgl-project/sglang#34066, for comparison. A CPU raises at once."""

    freezes = False

    def note(
        self,
        fault: Fault,
        bad: torch.Tensor,
        physical: torch.Tensor,
        virtual: torch.Tensor,
        *,
        then: tuple[Fault, torch.Tensor] | None = None,
    ) -> None:
        """Assert that no row is bad."""
        error, text = _ERRORS[fault]

        def found() -> AllocatorError:
            pages = virtual[bad].tolist()
            return error(f"checked call {self.calls} of this pool {text}: virtual page(s) {pages}", ids=pages)

        require(~bad.any(), f"kvtape: a call {text}", found)
        if then is not None:
            self.note(then[0], then[1] & ~bad, physical, virtual)
