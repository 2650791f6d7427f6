"""Leases: from beginning to end somebody outside reads or writes places by their physical ids, a transfer as a rule.

A place leased with a page in it is read; one that is only reserved is the target of a transfer, whose bytes are there when the lease ends.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from replayer.content import IntArray, page_words
from replayer.failure import CheckFailure
from replayer.holds import Hold, begin_hold, over_abandoned_bytes
from replayer.oracle import PageRecords, TraceContradiction, shown
from replayer.pool_state import PoolState

#: Added to a pool's number in the stamps of what transfers bring, so that they are no page's own.
_BROUGHT = 1 << 20


class Leases:
    """The open leases of a replay, by number and pool."""

    def __init__(self) -> None:
        self._open: dict[tuple[int, str], Hold] = {}

    def __bool__(self) -> bool:
        return bool(self._open)

    def begin(self, number: int, state: PoolState, places: IntArray) -> Hold:
        """
        Raises:
            TraceContradiction: the lease is open in this pool.
        """
        if (number, state.name) in self._open:
            raise TraceContradiction(f"lease {number} of pool {state.name!r} is open already")
        hold = self._open[number, state.name] = begin_hold(number, state, places)
        state.leased[places] += 1
        return hold

    def end(self, number: int, state: PoolState, *, on: Callable[[str], bool]) -> int:
        """The lease is over: its pages must be where they were, and their bytes what they should be; how many were looked at.

        Raises:
            CheckFailure: C8 or C9, if ``on`` says so.
            TraceContradiction: no such lease is open.
        """
        hold = self._open.pop((number, state.name), None)
        if hold is None:
            raise TraceContradiction(f"no lease {number} of pool {state.name!r} is open")
        state.leased[hold.places] -= 1
        if on("C9"):
            _require_names(hold)
        if on("C8"):
            _require_bytes(hold)
        self._bring(hold)
        return len(hold.places)

    def look(self, *, on: Callable[[str], bool]) -> int:
        """What `end` looks at, while leases are open; how many pages.

        Raises:
            CheckFailure: C8 or C9, if ``on`` says so.
        """
        for hold in self._open.values():
            if on("C9"):
                _require_names(hold)
            if on("C8"):
                _require_bytes(hold)
        return sum(len(hold.places) for hold in self._open.values())

    def overwritten(self, state: PoolState, places: IntArray) -> Hold | None:
        """A lease of another pool, of a page freed meanwhile, whose bytes are among those of these places."""
        if not self._open:
            return None
        return next(
            (hold for hold in self._open.values() if len(over_abandoned_bytes(hold, state, places))), None
        )

    def forget(self, state: PoolState) -> None:
        """The pool was cleared. Its leases stay open, over nothing."""
        for hold in self._open.values():
            if hold.state is state:
                hold.let_go()

    def drop(self) -> None:
        """The trace is over."""
        for hold in self._open.values():
            hold.state.leased[hold.places] -= 1
        self._open.clear()

    @staticmethod
    def _bring(hold: Hold) -> None:
        """What a transfer wrote to reserved places: a stamp of its own for each, which a later ``bind`` gives to a page."""
        targets, state = hold.part(hold.virtual < 0), hold.state
        count, size = len(targets.places), state.page_size
        if not count:
            return
        words = page_words(_BROUGHT + state.number, targets.places, np.full(count, hold.number))
        brought = PageRecords(
            words, np.full(count, size, dtype=np.int64), np.zeros((count, size), dtype=np.uint8)
        )
        state.store.write_pages(targets.places, state.oracle.contents_of(brought))
        targets.deliver(brought)


def _require_names(hold: Hold) -> None:
    state, same = hold.state, hold.same
    pages, places = hold.virtual[same], hold.places[same]
    found = state.rows("physical_to_virtual", places)
    if not np.array_equal(found, pages):
        wrong = found != pages
        raise CheckFailure(
            "C9",
            f"physical page(s) {shown(places[wrong])} of lease {hold.number} name other virtual pages than when it began",
            state.name,
            pages[wrong][:16].tolist(),
            expected=shown(pages[wrong]),
            found=shown(found[wrong]),
        )


def _require_bytes(hold: Hold) -> None:
    state = hold.state
    held = hold.virtual >= 0
    expected = state.oracle.contents_of(hold.expected().kept(held))
    wrong = state.store.differing(hold.places[held], expected).any(axis=1)
    if wrong.any():
        raise CheckFailure(
            "C8",
            f"the bytes under lease {hold.number} changed, at physical page(s) {shown(hold.places[held][wrong])}",
            state.name,
            hold.virtual[held][wrong][:16].tolist(),
            expected="the bytes that were exported",
            found="others",
        )
