"""Calls on a composite: drives a trace of level ``composite`` against the composite and its members, one event after another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from recorder.trace import EventKind
from replayer.calling import MoveLog
from replayer.checks.decoding import DecodeStep
from replayer.checks.growth import extend_growth, whole_pages_growth
from replayer.checks.joint import JointChecks
from replayer.composite_frees import CompositeFrees
from replayer.content import IntArray
from replayer.hazards import Hazards
from replayer.oracle import Growth, TraceContradiction, shown
from replayer.pool_state import PoolState
from replayer.targets import Target

if TYPE_CHECKING:
    from replayer.ledger import SyncLedger


class CompositeDriver(CompositeFrees):
    """State of one replay of a trace of level ``composite`` while it runs. Events with a pool go to that member, as in `Driver`; those
    without one to the composite."""

    def __init__(
        self,
        target: Target,
        hazards: Hazards,
        moves: MoveLog,
        *,
        checks: JointChecks | None,
        ledger: SyncLedger | None,
        ids: str,
        flush_every: int = 0,
        flush_when_short: bool = False,
        int32_rows: bool = False,
    ) -> None:
        self.composite, self.slots = target.composite, target.slots
        self.full = target.pools["full"]
        self.swa, self.mamba = target.pools.get("swa"), target.pools.get("mamba")
        self.joint = checks
        super().__init__(
            target.pools, hazards, moves, checks=checks, ledger=ledger, ids=ids,
            flush_every=flush_every, flush_when_short=flush_when_short, int32_rows=int32_rows,
        )  # fmt: skip
        if self.swa is not None:
            self.ids.share(self.swa, self.full)
        self._without_pool |= {
            int(kind): getattr(self, "_joint_" + kind.name.lower())
            for kind in EventKind
            if hasattr(self, "_joint_" + kind.name.lower())
        }

    # -- alloc

    def _joint_alloc(self, state: PoolState, index: int) -> None:
        full, need = self.full, self._value[index]
        self._before_joint_alloc(need)
        result = self._call("alloc", self.composite.alloc, need)
        self._grown_together(index, result, need, lambda tokens: whole_pages_growth(full, tokens, need))

    def _joint_alloc_extend(self, state: PoolState, index: int) -> None:
        self._extend_together(index, "alloc_extend")

    def _joint_alloc_extend_swa_tail(self, state: PoolState, index: int) -> None:
        self._require_window("alloc_extend_swa_tail")
        tail = self._value2[index]
        if len(self._must(0, index)) != 1 or not 0 <= tail <= self._value[index]:
            raise TraceContradiction(
                f"a tail of {tail} tokens for {len(self._must(0, index))} request(s) that grow by {self._value[index]}"
            )
        self._extend_together(index, "alloc_extend_swa_tail", tail)

    def _extend_together(self, index: int, name: str, tail: int | None = None) -> None:
        full = self.full
        prefix, seq, own_last, need = self._lengths(full, index)
        new_pages = self._value2[index]
        if tail is None and new_pages >= 0 and new_pages * full.page_size != need:
            raise TraceContradiction(
                f"num_new_pages is {new_pages}, but its lengths need {need // full.page_size}"
            )
        self._before_joint_alloc(need)
        last = torch.from_numpy(own_last) if not self.ids.identity else self._tensor(2, index)
        result = self._call(
            name, getattr(self.composite, name), self._on_device(self._tensor(0, index)),
            self._host(self._tensor(0, index)), self._on_device(self._tensor(1, index)), self._host(self._tensor(1, index)),
            self._on_device(last), self._value[index], *(() if tail is None else (tail,)),
        )  # fmt: skip
        window = need
        if tail is not None:
            first_new, end = -(-int(prefix[0]) // full.page_size), -(-int(seq[0]) // full.page_size)
            first = (int(seq[0]) - tail) // full.page_size
            window = (end - max(first_new, first)) * full.page_size if tail else 0
        self._grown_together(
            index, result, need, lambda tokens: extend_growth(full, tokens, prefix, seq, own_last), window
        )

    def _joint_alloc_decode(self, state: PoolState, index: int) -> None:
        full = self.full
        seq, last = self._must(1, index), self._must(2, index)
        own_last = self.ids.tokens(full, last)
        step = DecodeStep.asked(seq, own_last, full.page_size)
        need = step.new_pages * full.page_size
        if self.checks is not None:
            step.require_last_tokens(full)
        self._before_joint_alloc(need)
        tensor = torch.from_numpy(own_last) if not self.ids.identity else self._tensor(2, index)
        result = self._call(
            "alloc_decode", self.composite.alloc_decode, self._on_device(self._tensor(1, index)),
            self._host(self._tensor(1, index)), self._on_device(tensor),
        )  # fmt: skip
        self._grown_together(index, result, need, lambda tokens: step.growth(full, tokens))

    def _before_joint_alloc(self, need: int) -> None:
        if need < 0 or need % self.full.page_size:
            raise TraceContradiction(f"{need} tokens are no multiple of the page size {self.full.page_size}")
        if self.flush_when_short and need > self.composite.available_size():
            self._flush_by_policy(self.by_number)
        if self.joint is not None:
            self.joint.before_joint()

    def _grown_together(
        self,
        index: int,
        result: torch.Tensor | None,
        need: int,
        growth: Callable[[IntArray], Growth],
        window: int | None = None,
    ) -> None:
        """What an alloc answered, on both sides; the new pages of the last ``window`` tokens have window pages, by default all."""
        if result is None and self.joint is not None:
            self._judge_log()
            self.joint.refused(need, need if window is None else window)
        if result is None or self.joint is None:
            self._grown(self.full, index, result, need, growth)
            return
        grown: list[Growth] = []
        self._grown(self.full, index, result, need, lambda tokens: _kept(grown, growth(tokens)))
        fresh = grown[0].new_pages
        count = len(fresh) if window is None else window // self.full.page_size
        self.joint.paired(grown[0], fresh[len(fresh) - count :])

    def _alloc_with_virtual(self, state: PoolState, index: int) -> None:
        """A window page belongs to a page that is there."""
        if state is self.swa and self.checks is not None:
            pages = self.ids.pages(state, self._must(0, index))
            self.full.oracle.require_pages(pages, "alloc_with_virtual")
            dead = pages[~self.full.oracle.live[pages]]
            if len(dead):
                raise TraceContradiction(
                    f"alloc_with_virtual names virtual page(s) {shown(dead)} that are not live in pool {self.full.name!r}"
                )
        super()._alloc_with_virtual(state, index)

    def _joint_ensure_capacity(self, state: PoolState, index: int) -> None:
        self._require_window("ensure_capacity")
        full, swa = self._value[index], self._value2[index]
        if full < 0 or swa < 0:
            raise TraceContradiction(f"ensure_capacity of {full} and {swa} tokens")
        if self.joint is not None:
            self.joint.before_joint()
        answer = bool(self._call("ensure_capacity", self.composite.ensure_capacity, full, swa))
        if self.joint is None:
            self.hazards.log.clear()
            return
        self._judge_log()
        self.joint.capacity_ensured(answer, full, swa)
        if self.ids.identity and self._result_kind[index] == 3:
            self.joint.recorded_number(self.full, "ensure_capacity", int(answer), self._result_value[index])

    # -- states

    def _joint_prepare_mamba_allocation(self, state: PoolState, index: int) -> None:
        if self.mamba is None:
            raise TraceContradiction("the composite has no states")
        if self._value[index] < 0:
            raise TraceContradiction(f"room for {self._value[index]} states")
        self._before_release()
        self._call("prepare_mamba_allocation", self.composite.prepare_mamba_allocation, self._value[index])
        self._released_group()
        if self.joint is not None:
            self.joint.prepared(self.mamba, self._value[index])

    def _slot_alloc(self, state: PoolState, index: int) -> None:
        self._require_states(state)
        need = self._value[index]
        self._before_alloc(state, need)
        result = self._call("slot_alloc", self.slots.alloc, need)
        self._grown(state, index, result, need, lambda tokens: whole_pages_growth(state, tokens, need))

    def _slot_free(self, state: PoolState, index: int) -> None:
        self._require_states(state)
        slots = self._must(0, index)
        own = self._freeing(state, slots)
        tensor = self._pages_tensor(0, index, own)
        self._call("slot_free", self.slots.free, tensor)
        self._freed(state, own)

    def _require_states(self, state: PoolState) -> None:
        if state is not self.mamba:
            raise TraceContradiction(f"pool {state.name!r} has no slots of states")

    # -- flush, forwards, gates, the end

    def _joint_flush(self, state: PoolState, index: int) -> None:
        if self._value[index]:
            raise TraceContradiction("a composite has no urgent flush; its members have")
        before = {each.name: self.moves.moved_pages(each.name) for each in self.by_number}
        if self.joint is not None:
            self.joint.before_flush_together()
        result = self._moved_by("flush", self.full, index, self.composite.flush_opportunistic)
        if self.joint is not None:
            self.joint.flushed_together(
                result, {name: self.moves.moved_pages(name) - count for name, count in before.items()}
            )

    def _joint_set_latest_forward_done_event(self, state: PoolState, index: int) -> None:
        event = None if self._value[index] < 0 else self._launched_everywhere(index)
        self._call("set_latest_forward_done_event", self.composite.set_latest_forward_done_event, event)
        for each in self.by_number:
            self.hazards.set_latest(each.name, event)

    def _joint_set_inflight_forward(self, state: PoolState, index: int) -> None:
        event = self._launched_everywhere(index)
        written = self._ids(0, index)
        own = None if written is None or not len(written) else self.ids.tokens(self.full, written)
        tensor = None
        if own is not None:
            tensor = self._on_device(self._tensor(0, index) if self.ids.identity else torch.from_numpy(own))
        self._call("set_inflight_forward", self.composite.set_inflight_forward, event, tensor)
        if self.checks is None:
            return
        for each in self.by_number:
            writes = None if own is None or each.is_state else self._written_live(each, own)
            self.hazards.begin_writing(each, event, writes)

    def _joint_forward_begin(self, state: PoolState, index: int) -> None:
        self._joint_set_latest_forward_done_event(state, index)
        self._joint_set_inflight_forward(state, index)
        reads = self._ids(1, index)
        if reads is None or not len(reads) or self.checks is None:
            return
        own = self.ids.tokens(self.full, reads)
        self.full.oracle.require_pages(own // self.full.page_size, "the read set")
        event = self._launched_everywhere(index)
        for each in self.by_number:
            if not each.is_state:
                self.hazards.begin_reading(each, event, own[each.oracle.live[own // each.page_size]])

    def _launched_everywhere(self, index: int) -> Any:
        for each in self.by_number:
            event = self._launched(each, index)
        return event

    def _move_gate(self, state: PoolState, index: int) -> None:
        """A gate of a composite is that of all its members."""
        is_open = bool(self._value[index])
        if not self.full.lazy:
            raise TraceContradiction("a composite that compacts at every free has no move gate")
        for each in self.by_number:
            self.hazards.gate_open[each.name] = is_open
        self._install_gates(self.by_number)
        if self.checks is not None:
            self.checks.gate_turned()

    def _install_gates(self, states: Sequence[PoolState]) -> None:
        if not self._gate_installed:
            self._gate_installed = True
            self._call(
                "set_disagg_move_gate",
                self.composite.set_disagg_move_gate,
                lambda: self.hazards.may_move(self.full.name),
            )

    _gate_installed = False

    def _joint_clear(self, state: PoolState, index: int) -> None:
        self._call("clear", self.composite.clear)
        self._queued = None
        for each in self.by_number:
            self._emptied(each)

    def _resize(self, state: PoolState, index: int) -> None:
        raise TraceContradiction("the pools of a composite are not resized one by one")

    # -- places used from outside

    def _exported(self, state: PoolState, tokens: torch.Tensor) -> torch.Tensor:
        export = (
            self.slots.translate
            if state is self.mamba
            else self.composite.translate_swa_indices_for_transfer
            if state is self.swa
            else self.composite.translate_kv_indices_for_transfer
        )
        answer: torch.Tensor = self._call("translate_for_transfer", export, tokens)
        return answer

    def _told_of_copies(self, state: PoolState) -> object:
        return self.composite

    def _load_queued(self, state: PoolState) -> None:
        for each in self.by_number:
            each.awaiting_load = 0


def _kept(grown: list[Growth], growth: Growth) -> Growth:
    grown.append(growth)
    return growth
