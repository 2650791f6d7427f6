"""Copies between device pools and the host, simulated as forwards are: the places are those of the moment a copy was queued, its reads
happen and its writes land when it is over, wherever the pages are by then."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from replayer.content import IntArray
from replayer.failure import CheckFailure
from replayer.holds import Hold, begin_hold, over_abandoned_bytes
from replayer.host_pool import HostPool
from replayer.oracle import PageRecords, TraceContradiction, shown
from replayer.pool_state import PoolState


class CopyEvent:
    """The done event of a copy, as the allocator is given it. ``wait()`` orders the allocator's stream behind the copy."""

    def __init__(self, copies: HostCopies, copy: HostCopy) -> None:
        self._copies, self._copy = copies, copy

    def query(self) -> bool:
        return self._copy.landed

    def wait(self, stream: Any = None) -> None:
        self._copies.finish(self._copy)


@dataclass
class HostCopy:
    """One copy of one pool. ``landed``: its effects are there. ``judged``: whatever the allocator does from now on is later."""

    hold: Hold
    slots: IntArray
    is_load: bool
    landed: bool = False
    judged: bool = False

    @property
    def name(self) -> str:
        return f"{'load' if self.is_load else 'backup'} {self.hold.number}"


class HostCopies:
    """All copies of a replay that are not over.

    Args:
        log: of the hazards; a copy's end is noted there, so that moves before it are told from moves after it.
        failed: takes what a landed copy found wrong.
    """

    def __init__(self, log: list[tuple[Any, ...]], failed: Callable[[CheckFailure], None]) -> None:
        self.host = HostPool()
        self._log, self._failed = log, failed
        self._running: dict[tuple[int, str], HostCopy] = {}
        self._told: set[tuple[int, str]] = set()

    def begin(
        self, number: int, state: PoolState, places: IntArray, slots: IntArray, *, is_load: bool
    ) -> HostCopy:
        """A copy was queued.

        Raises:
            TraceContradiction: a number used before, or host slots that cannot be written or read.
        """
        key = (number, state.name)
        if key in self._running or key in self._told:
            raise TraceContradiction(f"copy {number} of pool {state.name!r} has been begun before")
        if len(places) != len(slots):
            raise TraceContradiction(f"a copy of {len(places)} page(s) names {len(slots)} host slot(s)")
        (self.host.begin_reading if is_load else self.host.reserve)(state, slots)
        copy = self._running[key] = HostCopy(begin_hold(number, state, places), slots, is_load)
        return copy

    def done(self, number: int, state: PoolState | None) -> None:
        """The trace says that a copy is over; without a pool, those of all pools.

        Raises:
            TraceContradiction: no such copy runs.
        """
        keys = [key for key in self._running if key[0] == number and (state is None or key[1] == state.name)]
        if not keys:
            raise TraceContradiction(f"copy {number} is over, but none of that number runs")
        for key in keys:
            self.finish(self._running[key])
            del self._running[key]
            self._told.add(key)

    def finish(self, copy: HostCopy) -> None:
        """The copy's bytes are there, because the trace says so or the allocator waited for it."""
        if copy.landed:
            return
        copy.landed = True
        self._log.append(("copied", copy))
        (self._land_load if copy.is_load else self._land_backup)(copy)

    def unfinished(self, state: PoolState) -> list[HostCopy]:
        """Copies of this pool that the allocator must work around."""
        return [copy for copy in self._running.values() if copy.hold.state is state and not copy.judged]

    def overwritten(self, state: PoolState, places: IntArray) -> HostCopy | None:
        """A copy of another pool, of a page freed meanwhile, whose bytes are among those of these places."""
        for copy in self._running.values():
            if not copy.judged and len(over_abandoned_bytes(copy.hold, state, places)):
                return copy
        return None

    def forget(self, state: PoolState) -> None:
        """The pool was cleared: backups keep what they read, loads have nowhere to go."""
        for copy in self._running.values():
            if copy.hold.state is not state or copy.landed:
                continue
            if copy.is_load:
                self.host.stop_reading(state, copy.slots)
            else:
                self._land_backup(copy)
            copy.landed = copy.judged = True
            copy.hold.let_go()

    def finish_all(self) -> None:
        """The trace is over."""
        for copy in self._running.values():
            self.finish(copy)
        self._running.clear()

    # -- effects

    def _land_backup(self, copy: HostCopy) -> None:
        hold, state = copy.hold, copy.hold.state
        records = hold.expected()
        wrong = state.store.differing(hold.places, state.oracle.contents_of(records)).any(axis=1)
        if wrong.any():
            self._failed(
                CheckFailure(
                    "C8",
                    f"{copy.name} read other bytes than it was queued for, at physical page(s) {shown(hold.places[wrong])}",
                    state.name,
                    hold.virtual[wrong][:16].tolist(),
                    expected="the bytes of these virtual pages",
                    found="others",
                )
            )
        self.host.fill(state, copy.slots, state.store.read_raw(hold.places), records)

    def _land_load(self, copy: HostCopy) -> None:
        hold, state = copy.hold, copy.hold.state
        contents, records = self.host.read(state, copy.slots)
        for row, content in enumerate(contents):
            state.store.write_raw(hold.places[row : row + 1], content)
        self._require_loaded(copy, *hold.deliver(records))

    def _require_loaded(self, copy: HostCopy, pages: IntArray, records: PageRecords) -> None:
        state = copy.hold.state
        expected = state.oracle.contents_of(records)
        wrong = state.store.differing(state.placed_physical[pages], expected).any(axis=1)
        if wrong.any():
            self._failed(
                CheckFailure(
                    "C6",
                    f"{copy.name} left virtual page(s) {shown(pages[wrong])} without the bytes that were backed up",
                    state.name,
                    pages[wrong][:16].tolist(),
                    expected="what the host slots held",
                    found="other bytes",
                )
            )
