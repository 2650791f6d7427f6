"""What is checked around flushes, gates, and calls that make a float move."""

from __future__ import annotations

from abc import abstractmethod

from replayer.checks.capacity import check_capacities, check_gate
from replayer.checks.held_back import already_over, check_returned
from replayer.checks.mapping import sweep_tables
from replayer.checks.progress import check_flushed
from replayer.checks.reservations import Reservations
from replayer.checks.room import check_borders, check_made_room, check_packed, could_open
from replayer.failure import CheckFailure
from replayer.hazards import Hazards, ReplayEvent
from replayer.pool_state import PoolState


class FlushChecks(Reservations):
    """The part of `replayer.checks.Checks` about these events."""

    def __init__(self, hazards: Hazards) -> None:
        super().__init__(hazards)
        self._over: list[ReplayEvent] = []
        self._judged_before: int | None = None
        self._could_open = False
        #: The pool whose flush event was checked by `flushed`, until the event is over, and while the chain is checked after it.
        self._just_flushed: PoolState | None = None
        self._flushed_now: PoolState | None = None

    @abstractmethod
    def _check_pool(self, state: PoolState) -> None:
        """Borders, lists and counts of one pool."""

    def gate_turned(self) -> None:
        """C9 and C10 again: a gate, or a lease that shuts one, turned, and no call told the allocators."""
        if self.on("C9"):
            for state in self.chain:
                check_gate(state, self.hazards)
        if self.on("C10"):
            check_capacities(self.chain, [state.extent() for state in self.chain], self.total_bytes)
        self.hold("C9", len(self.chain))
        self.hold("C10", len(self.chain))

    def before_flush(self, state: PoolState) -> None:
        """What is known to be over before the call."""
        self._over = already_over(state)
        self._judged_before = self.hazards.judged_through

    def flushed(self, state: PoolState, urgent: bool, result: int, moved: int) -> None:
        """A flush event, whatever the allocator made of it: it tells the moves it made, and it packs (C12)."""
        if state.is_float:
            self._check_pool(state)
            if self.on("C12"):
                check_borders(state)
                self.hold("C12")
            return
        if not state.lazy:
            return
        if result != moved and self.on("C1"):
            sweep_tables(state)  # if pages were remapped whose bytes were not moved, that is what is wrong
        self._check_pool(state)
        if result != moved:
            self._fail(CheckFailure("C4", "a flush returned another number than it moved", state.name, [], f"{moved} pages moved",
                                    f"returned {result}"))  # fmt: skip
        try:
            check_flushed(
                state, urgent=urgent, moves=moved, hazards=self.hazards, judged_before=self._judged_before
            )
            check_returned(state, self._over, self.hazards, urgent=urgent)
        except CheckFailure as failure:
            self._fail(failure)
        self.hold("C12")
        self._just_flushed = state

    def before_make_room(self, state: PoolState, side: str, min_bytes: int) -> None:
        """Whether the float could open so much, and may."""
        self._could_open = self.hazards.may_move(state.name) and not state.allocator.moves_blocked() and could_open(
            self.chain, self.chain.index(state), side, min_bytes, self.total_bytes
        )  # fmt: skip

    def made_room(self, state: PoolState, side: str, min_bytes: int, answer: int) -> None:
        self._check_pool(state)
        try:
            check_made_room(
                self.chain, self.chain.index(state), side=side, min_bytes=min_bytes, answer=answer,
                could=self._could_open, total_bytes=self.total_bytes,
            )  # fmt: skip
        except CheckFailure as failure:
            self._fail(failure)
        self.hold("C10")
        self.hold("C12")

    def holes_compacted(self, state: PoolState) -> None:
        self._check_pool(state)
        if self.on("C12"):
            check_packed(state, self.hazards)
            self.hold("C12")
