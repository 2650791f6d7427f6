"""Events that move pages: flushes, and the room that a float opens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from replayer.blame import number_in
from replayer.event_arguments import EventArguments
from replayer.oracle import TraceContradiction
from replayer.pool_state import PoolState

SIDES = ("low", "high")


class FlushEvents(EventArguments):
    """One method per kind of event, named after it: ``(pool, index in the chunk)``."""

    def _flush(self, state: PoolState, index: int) -> None:
        urgent = bool(self._value[index])
        method = state.allocator.flush_for_allocation if urgent else state.allocator.flush_opportunistic
        before = self.moves.moved_pages(state.name)
        if self.checks is not None:
            self.checks.before_flush(state)
        result = self._moved_by("flush", state, index, method)
        if self.checks is not None:
            self.checks.flushed(state, urgent, result, self.moves.moved_pages(state.name) - before)

    def _side(self, state: PoolState, index: int) -> str:
        if not state.is_float or self._value[index] not in (0, 1):
            raise TraceContradiction(
                f"pool {state.name!r} is no float, or {self._value[index]} is no side (0 low, 1 high)"
            )
        return SIDES[self._value[index]]

    def _make_room(self, state: PoolState, index: int) -> None:
        side, min_bytes = self._side(state, index), self._value2[index]
        if self.checks is not None:
            self.checks.before_make_room(state, side, min_bytes)
        answer = self._moved_by(
            "make_room", state, index, state.allocator.make_room, side=side, min_bytes=min_bytes
        )
        if self.checks is not None:
            self.checks.made_room(state, side, min_bytes, answer)

    def _compact_holes(self, state: PoolState, index: int) -> None:
        side = self._side(state, index)
        self._moved_by("compact_holes", state, index, state.allocator.compact_holes, retreat_side=side)
        if self.checks is not None:
            self.checks.holes_compacted(state)

    def _moved_by(
        self, name: str, state: PoolState, index: int, method: Callable[..., int], **arguments: Any
    ) -> int:
        result: int = self._call(name, method, **arguments)
        if self.checks is None:
            self.hazards.log.clear()
            return result
        result = number_in(result, name, state.name)
        self._judge_log()
        if self.ids.identity and self._result_kind[index] == 3:
            self.checks.recorded_number(state, name, result, self._result_value[index])
        return result
