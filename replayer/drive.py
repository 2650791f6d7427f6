"""Events to calls: drives one trace against the pools under test, one event after another.

`Driver` knows what each kind of event means for the allocator, the oracle and the simulated forwards. What is checked, and when, is
`replayer.checks`; what becomes of a failure is `replayer.replay`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from recorder.trace import Chunk, EventKind, ImpossibleEvent
from replayer.blame import ids_in
from replayer.calling import MoveLog
from replayer.checks.decoding import DecodeStep
from replayer.checks.growth import extend_growth, whole_pages_growth
from replayer.content import IntArray
from replayer.failure import CheckFailure
from replayer.flush_events import FlushEvents
from replayer.forward_events import ForwardEvents
from replayer.hazards import Hazards, ReplayEvent
from replayer.oracle import Growth, TraceContradiction
from replayer.pool_state import PoolState
from replayer.reservation_events import ReservationEvents
from replayer.transfer_events import TransferEvents

if TYPE_CHECKING:
    from replayer.checks import Checks
    from replayer.ledger import SyncLedger


class Driver(ForwardEvents, TransferEvents, ReservationEvents, FlushEvents):
    """State of one replay while it runs.

    Args:
        pools: fresh, from `replayer.targets.build_pools`.
        hazards, moves: the log the pools' stores write to.
        checks: None drives and judges nothing (timing).
        ledger: None counts nothing.
        ids: whether recorded ids are this allocator's own (same placement rule) or are mapped to it.
        flush_every: flush every pool urgently after this many calls; 0 never (engines that never flush).
        flush_when_short: flush a pool urgently before an alloc that the gap beyond its band cannot serve.
        int32_rows: segments come as they lie in SGLang's ``req_to_token``, int32; else as int64, like all other ids.
    """

    def __init__(
        self,
        pools: dict[str, PoolState],
        hazards: Hazards,
        moves: MoveLog,
        *,
        checks: Checks | None,
        ledger: SyncLedger | None,
        ids: str,
        flush_every: int = 0,
        flush_when_short: bool = False,
        int32_rows: bool = False,
    ) -> None:
        super().__init__(pools, hazards, moves, checks, ledger, ids)
        self._segment_dtype = torch.int32 if int32_rows else torch.int64
        self.flush_every, self.flush_when_short = flush_every, flush_when_short
        self.driven = self.nested = self.refused = 0
        self._asked: list[ReplayEvent] = []
        self._group: dict[str, list[IntArray] | None] = {}
        self._handlers: dict[int, Callable[[PoolState, int], None]] = {
            int(kind): getattr(self, "_" + kind.name.lower(), self._of_a_composite) for kind in EventKind
        }
        #: The same for events that name no pool.
        self._without_pool = dict(self._handlers)
        if hazards.leases_shut_gates:
            self._install_gates(self.by_number)

    # -- one chunk, one event

    def drive(
        self, chunk: Chunk, stop_before: int | None = None, each: Callable[[], None] | None = None
    ) -> bool:
        """Drive a chunk's events; ``each`` runs after every event. False if ``stop_before`` was reached.

        Raises:
            CheckFailure: the first check that did not hold, with event and call filled in.
            ImpossibleEvent: an event that cannot have happened.
        """
        columns = zip(chunk.kind.tolist(), chunk.pool.tolist(), chunk.depth.tolist(), strict=True)
        self._load(chunk)
        queries, answers = chunk.queries
        query_bounds, asked, answered = queries.offsets.tolist(), queries.values.tolist(), answers.tolist()
        handlers, without_pool, pools, nobody = (
            self._handlers,
            self._without_pool,
            self.by_number,
            self.by_number[0],
        )
        seq = chunk.first_seq
        for index, (kind, pool, depth) in enumerate(columns):
            if stop_before is not None and seq >= stop_before:
                return False
            self.seq = seq
            seq += 1
            if depth:
                self.nested += 1
                continue
            first, last = query_bounds[index], query_bounds[index + 1]
            if first != last:
                self._expect_answers(asked[first:last], answered[first:last])
            try:
                if pool >= 0:
                    handlers[kind](pools[pool], index)
                else:
                    without_pool[kind](nobody, index)
            except TraceContradiction as error:
                raise ImpossibleEvent(
                    f"event {self.seq} ({EventKind(kind).name.lower()}) cannot have happened: {error}. The trace is wrong, or events "
                    "before it are missing"
                ) from None
            except CheckFailure as failure:
                failure.seq = self.seq if failure.seq < 0 else failure.seq
                failure.call = failure.call or self._describe(kind, pool, index)
                raise
            if self._asked:
                self._forget_answers()
            self.driven += 1
            if self.flush_every and self.driven % self.flush_every == 0:
                self._flush_after_event()
            if each is not None:
                each()
        return True

    def _of_a_composite(self, state: PoolState, index: int) -> None:
        raise TraceContradiction("it is a call on a composite, and this trace has sub-pools only")

    def _flush_after_event(self) -> None:
        try:
            self._flush_by_policy(self.by_number)
        except CheckFailure as failure:
            failure.seq, failure.call = self.seq, f"the flush after event {self.seq} (--flush-every)"
            raise

    def _describe(self, kind: int, pool: int, index: int) -> str:
        name = self.by_number[pool].name if pool >= 0 else "all pools"
        return f"{EventKind(kind).name.lower()} on {name}" if kind != EventKind.FLUSH else (
            f"{'urgent' if self._value[index] else 'opportunistic'} flush of {name}"
        )  # fmt: skip

    def _expect_answers(self, numbers: list[int], answers: list[bool]) -> None:
        for number, answer in zip(numbers, answers, strict=True):
            event = self._event(number)
            event.answers.append(answer)
            self._asked.append(event)

    def _forget_answers(self) -> None:
        for event in self._asked:
            # Answers the allocator did not ask for are known all the same: an engine was told so.
            if any(event.answers):
                event.answers.clear()
                event.fired = True
                self.hazards.finished_through(event.number)
            event.answers.clear()
        self._asked.clear()
        self._judge_log()

    # -- alloc

    def _alloc(self, state: PoolState, index: int) -> None:
        need = self._value[index]
        self._before_alloc(state, need)
        result = self._call("alloc", state.allocator.alloc, need)
        self._grown(state, index, result, need, lambda tokens: whole_pages_growth(state, tokens, need))

    def _alloc_extend(self, state: PoolState, index: int) -> None:
        prefix, seq, own_last, need = self._lengths(state, index)
        new_pages = self._value2[index]
        if new_pages >= 0 and new_pages * state.page_size != need:
            raise TraceContradiction(
                f"num_new_pages is {new_pages}, but its lengths need {need // state.page_size}"
            )
        self._before_alloc(state, need)
        prefix_host, seq_host = self._host(self._tensor(0, index)), self._host(self._tensor(1, index))
        result = self._call(
            "alloc_extend",
            state.allocator.alloc_extend,
            self._on_device(self._tensor(0, index)),
            prefix_host,
            self._on_device(self._tensor(1, index)),
            seq_host,
            self._on_device(torch.from_numpy(own_last) if not self.ids.identity else self._tensor(2, index)),
            self._value[index],
            None if new_pages < 0 else new_pages,
        )
        self._grown(
            state,
            index,
            result,
            need,
            lambda tokens: extend_growth(state, tokens, prefix, seq, own_last),
        )

    def _lengths(self, state: PoolState, index: int) -> tuple[IntArray, IntArray, IntArray, int]:
        """What an ``alloc_extend`` is given, ``last_loc`` as the allocator's own tokens, and the tokens of the new pages it needs.

        Raises:
            TraceContradiction: lengths that do not fit together.
        """
        prefix, seq, last = (self._must(slot, index) for slot in range(3))
        fits = len(prefix) == len(seq) == len(last) and not (prefix > seq).any() and not (prefix < 0).any()
        if not fits or int((seq - prefix).sum()) != self._value[index]:
            raise TraceContradiction(
                "its prefix_lens, seq_lens, last_loc and extend_num_tokens do not fit together"
            )
        own_last = last if self.ids.identity else self.ids.tokens(state, last)
        size = state.page_size
        return prefix, seq, own_last, size * int((-(-seq // size) + prefix // -size).sum())

    def _alloc_decode(self, state: PoolState, index: int) -> None:
        seq, last = self._must(1, index), self._must(2, index)
        own_last = self.ids.tokens(state, last)
        step = DecodeStep.asked(seq, own_last, state.page_size)
        need = step.new_pages * state.page_size
        if self.checks is not None:
            step.require_last_tokens(state)
        self._before_alloc(state, need)
        result = self._call(
            "alloc_decode",
            state.allocator.alloc_decode,
            self._on_device(self._tensor(1, index)),
            self._host(self._tensor(1, index)),
            self._on_device(torch.from_numpy(own_last) if not self.ids.identity else self._tensor(2, index)),
        )
        self._grown(state, index, result, need, lambda tokens: step.growth(state, tokens))

    def _host(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.ledger is not None:
            self.ledger.host(tensor)
        return tensor

    def _before_alloc(self, state: PoolState, need: int) -> None:
        if need < 0 or need % state.page_size:
            raise TraceContradiction(
                f"{need} tokens are no multiple of pool {state.name!r}'s page size {state.page_size}"
            )
        if not state.header.is_id_owner:
            raise TraceContradiction(
                f"pool {state.name!r} is indexed by another pool's ids and cannot hand out its own"
            )
        if (
            self.flush_when_short
            and need > state.allocator.available_size() - state.holes() * state.page_size
        ):
            self._flush_by_policy([state])
        if self.checks is not None and need:  # what asks for no page cannot be refused
            self.checks.before_alloc(state)

    def _grown(
        self,
        state: PoolState,
        index: int,
        result: torch.Tensor | None,
        need: int,
        growth: Callable[[IntArray], Growth],
    ) -> None:
        """What an alloc answered, against the recorded answer and the oracle."""
        tokens = ids_in(result, self.call_name, state.name)
        if tokens is None:
            self.refused += 1
        if self.checks is None:
            self.hazards.log.clear()
            recorded = self._ids(3, index)
            if tokens is not None and recorded is not None and not self.ids.identity:
                self.ids.learn(state, recorded, tokens)
            return
        self._judge_log()
        recorded = self._ids(3, index)
        known = self._result_kind[index]
        self.checks.alloc_answered(state, need, tokens, recorded, known, identity=self.ids.identity)
        if tokens is None or result is None:
            return
        if not self.ids.identity and recorded is not None:
            self.ids.learn(state, recorded, tokens)
        grown = growth(tokens)
        self.checks.new_pages(state, grown)
        self.checks.answered(self.seq, state, result, tokens)

    def _alloc_with_virtual(self, state: PoolState, index: int) -> None:
        self._require_guest(state, "alloc_with_virtual")
        pages = self.ids.pages(state, self._must(0, index))
        state.oracle.require_pages(pages, "alloc_with_virtual")
        if state.oracle.live[pages].any() or len(np.unique(pages)) != len(pages):
            raise TraceContradiction(
                f"alloc_with_virtual names pages of {state.name!r} that are live, or one page twice"
            )
        if self.checks is not None:
            self.checks.before_alloc(state)
        self._call(
            "alloc_with_virtual", state.allocator.alloc_with_virtual, self._pages_tensor(0, index, pages)
        )
        if self.checks is None:
            return
        self._judge_log()
        state.oracle.start_pages(pages, state.page_size)
        self.checks.placed(state, pages)

    # -- free

    def _free(self, state: PoolState, index: int) -> None:
        tokens = self._must(0, index)
        pages = np.unique(tokens // state.page_size) if state.page_size > 1 else tokens
        named = self._ids(1, index)
        if named is not None and not np.array_equal(
            np.sort(named), pages if state.page_size > 1 else np.sort(pages)
        ):
            raise TraceContradiction("free: the pages it names are not those of its token ids")
        own = self._freeing(state, pages)
        arguments: dict[str, Any] = {}
        if named is not None:
            arguments["_pages"] = self._pages_tensor(
                1, index, own if self.ids.identity else self.ids.pages(state, named)
            )
        if self.ids.identity:
            token_tensor = self._on_device(self._tensor(0, index))
        else:
            token_tensor = self._on_device(torch.from_numpy(self.ids.tokens(state, tokens)))
        self._call_free("free", state.allocator.free, token_tensor, **arguments)
        self._freed(state, own)

    def _call_free(self, name: str, free: Callable[..., Any], tokens: torch.Tensor, **arguments: Any) -> None:
        """Free ids in a tensor that is overwritten afterwards, as an engine may do with its own: what is queued must be a copy."""
        if "start_pos" in arguments:
            # SGLang 0.5.23 keeps a view of an int64 segment that a group holds back (docs/findings.md). Its engine frees rows of int32.
            tokens = tokens.to(self._segment_dtype)
        if self.checks is None:
            self._call(name, free, tokens, **arguments)
            return
        tokens = tokens.clone()
        self._call(name, free, tokens, **arguments)
        tokens.fill_(-1)

    def _free_segment(self, state: PoolState, index: int) -> None:
        tokens, start = self._must(0, index), self._value[index]
        if start % state.page_size or (len(tokens) and tokens[0] % state.page_size):
            raise TraceContradiction(
                f"free_segment starts at position {start}, no border of {state.page_size}-token pages"
            )
        own = self._freeing(state, tokens[:: state.page_size] // state.page_size)
        tensor = (
            self._tensor(0, index) if self.ids.identity else torch.from_numpy(self.ids.tokens(state, tokens))
        )
        self._call_free(
            "free_segment", state.allocator.free_segment, self._on_device(tensor), start_pos=start
        )
        self._freed(state, own)

    def _freeing(self, state: PoolState, recorded_pages: IntArray) -> IntArray:
        """Pages about to be freed, as this allocator numbers them; judged before the call."""
        pages = self.ids.pages(state, recorded_pages)
        queued = self._group.get(state.name)
        if queued is None:
            state.require_may_compact()
            self._order_eager(state)
        if self.checks is not None:
            state.oracle.require_live(pages, "free")
            if queued and np.isin(pages, np.concatenate(queued)).any():
                raise TraceContradiction("C13: free names pages that its free group holds already")
            self.checks.before_free(state, pages)
        if queued is not None:
            queued.append(pages)
        return pages

    def _order_eager(self, state: PoolState | None = None) -> None:
        """An eager pool orders its stream behind the forward stream at every free. That stream is an argument of SGLang's which a replay
        does not have, so what it does is done here: every forward launched is over."""
        for each in [state] if state is not None else self.by_number:
            if not each.lazy and not each.is_float and each.last_forward >= 0:
                self.hazards.finished_through(each.last_forward)

    def _freed(self, state: PoolState, pages: IntArray, *, in_steps: bool = False) -> None:
        """``in_steps``: an eager pool frees these in several releases, each of which moves pages, also pages that the next one frees."""
        if self.checks is None:
            self.hazards.log.clear()
            return
        if self._group.get(state.name) is not None:
            self._judge_log()
            self.checks.queued(state, pages)
            return
        if in_steps and not state.lazy and not state.is_float:
            state.releasing = np.zeros(state.oracle.num_virtual_ids, dtype=np.bool_)
            state.releasing[pages] = True
            self._judge_log()
            state.releasing = None
            self.checks.freed(state, pages)
        else:
            self.checks.freed(state, pages)
            self._judge_log()
        self.checks.after_free(state, pages)

    def _free_group_begin(self, state: PoolState, index: int) -> None:
        if self._group.get(state.name) is not None:
            raise TraceContradiction(f"a free group of pool {state.name!r} is open already")
        self._group[state.name] = []
        self._call("free_group_begin", state.allocator.free_group_begin)

    def _free_group_end(self, state: PoolState, index: int) -> None:
        queued = self._group.get(state.name)
        if queued is None:
            raise TraceContradiction(f"no free group of pool {state.name!r} is open")
        if queued:
            state.require_may_compact()
            self._order_eager(state)
        self._group[state.name] = None
        self._call("free_group_end", state.allocator.free_group_end)
        if queued:
            self._freed(state, np.concatenate(queued), in_steps=True)

    def _forget_group(self, state: PoolState) -> None:
        self._group.pop(state.name, None)
