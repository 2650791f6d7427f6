"""Events that are not about ids: forwards, gates, and the end of everything in a pool."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import numpy as np
import torch

from replayer.content import IntArray, same_ids
from replayer.event_arguments import EventArguments
from replayer.hazards import ReplayEvent
from replayer.oracle import TraceContradiction
from replayer.pool_state import PoolState
from replayer.tokens import Tokens


class ForwardEvents(EventArguments):
    """One method per kind of event, named after it: ``(pool, index in the chunk)``."""

    @abstractmethod
    def _forget_group(self, state: PoolState) -> None:
        """A pool was emptied, its open free group with it."""

    def _set_latest_forward_done_event(self, state: PoolState, index: int) -> None:
        event = None if self._value[index] < 0 else self._launched(state, index)
        self._call("set_latest_forward_done_event", state.allocator.set_latest_forward_done_event, event)
        self.hazards.set_latest(state.name, event)

    def _set_inflight_forward(self, state: PoolState, index: int) -> None:
        self._write_set(state, index)

    def _forward_begin(self, state: PoolState, index: int) -> None:
        event = self._launched(state, index)
        self._call("set_latest_forward_done_event", state.allocator.set_latest_forward_done_event, event)
        self.hazards.set_latest(state.name, event)
        self._write_set(state, index)
        reads = self._ids(1, index)
        if reads is not None and len(reads) and self.checks is not None:
            own = self.ids.tokens(state, reads)
            state.oracle.require_pages(own // state.page_size, "the read set")
            self.hazards.begin_reading(state, event, own)

    def _launched(self, state: PoolState, index: int) -> ReplayEvent:
        """The event of a forward that is launched now. Numbers rise with launches: a forward that is over takes with it all before."""
        number = self._value[index]
        if number < state.last_forward:
            raise TraceContradiction(
                f"forward {number} is launched after forward {state.last_forward}; event numbers must rise"
            )
        state.last_forward = number
        return self._event(number)

    def _write_set(self, state: PoolState, index: int) -> None:
        event = self._launched(state, index)
        written = self._ids(0, index)
        own = None if written is None or not len(written) else self.ids.tokens(state, written)
        if own is None:
            tensor = None
        else:
            tensor = self._on_device(self._tensor(0, index) if self.ids.identity else torch.from_numpy(own))
        self._call("set_inflight_forward", state.allocator.set_inflight_forward, event, tensor)
        if self.checks is None:
            return
        self.hazards.begin_writing(state, event, None if own is None else self._written_live(state, own))

    def _written_live(self, state: PoolState, ids: IntArray) -> Tokens:
        """Tokens of a write set that have a place: padding and what was freed before the launch have none."""
        latest = state.latest
        if latest is not None and latest.endings == state.oracle.endings and same_ids(ids, latest.tokens.ids):
            return latest.tokens
        tokens = Tokens.split(ids, state.page_size)
        try:
            live = state.oracle.live[tokens.pages]
        except IndexError:
            live = None
        if live is None or np.count_nonzero(ids < 0):
            raise TraceContradiction(f"the write set names tokens outside pool {state.name!r}")
        return tokens if np.count_nonzero(live) == len(tokens) else tokens.kept(live)

    def _forward_done(self, state: PoolState, index: int) -> None:
        event = self._event(self._value[index])
        event.fired = True
        self.hazards.finished_through(event.number)
        self._judge_log()

    def _move_gate(self, state: PoolState, index: int) -> None:
        is_open = bool(self._value[index])
        states = self.by_number if self.chunk.pool[index] < 0 else [state]
        for each in states:
            self.hazards.gate_open[each.name] = is_open
        self._install_gates(states)
        if self.checks is not None:
            self.checks.gate_turned()

    def _install_gates(self, states: Sequence[PoolState]) -> None:
        """The engine's gate, which is asked at every call, for pools that have none yet."""
        for each in states:
            if each.allocator.disagg_move_gate is None and (each.lazy or each.is_float):
                each.allocator.disagg_move_gate = lambda name=each.name: self.hazards.may_move(name)

    def _clear(self, state: PoolState, index: int) -> None:
        states = self.by_number if self.chunk.pool[index] < 0 else [state]
        for each in states:
            self._call("clear", each.allocator.clear)
            self._emptied(each)

    def _resize(self, state: PoolState, index: int) -> None:
        pages, ids = self._value[index] // state.page_size, self._value2[index]
        known = ids == -1 or (not state.header.is_id_owner and 0 < ids <= state.header.num_virtual_ids)
        if not known or not state.min_page_index < pages <= state.header.num_pages:
            raise TraceContradiction(f"pool {state.name!r} cannot be resized to {pages} pages and {ids} ids")
        # SGLang's name for it; its `resize` is another call, which takes a configuration.
        resize = getattr(state.allocator, "_set_capacity", None) or state.allocator.resize
        self._call("resize", resize, self._value[index], virtual_num_pages=None if ids < 0 else ids)
        state.oracle.resize(state.allocator.num_virtual_ids)
        self._emptied(state)

    def _emptied(self, state: PoolState) -> None:
        self.hazards.forget(state)
        state.oracle.clear()
        state.clear()
        self._forget_group(state)

    def _mark(self, state: PoolState, index: int) -> None:
        """A mark says something about the engine; the allocator is not involved."""
