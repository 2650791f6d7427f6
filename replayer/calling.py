"""Making the allocator's calls: timed, counted by the ledger, every flush recorded, and what they did to bytes and stream judged."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from replayer.failure import CheckFailure
from replayer.hazards import Hazards
from replayer.pool_state import PoolState

if TYPE_CHECKING:
    from replayer.checks import Checks
    from replayer.ledger import SyncLedger

#: Audit every n-th call of a kind with the operator-level mode as well: it costs four times the call.
AUDIT_EVERY = 256


@dataclass(slots=True)
class FlushRecord:
    """One flush: ``seq`` of the event it ran in, pages moved and their bytes, synchronisations, nanoseconds."""

    seq: int
    pool: str
    urgent: bool
    moves: int
    nbytes: int
    device_to_host: int
    host_to_device: int
    waits: int
    nanoseconds: int


class MoveLog:
    """What allocators do to their bytes, in order, into the hazards' log.

    A plan made on the device has rows for moves that turn out to be none: the padding page onto itself. They are told apart when somebody
    asks how many pages moved, outside the allocator's calls, because on a GPU that reads the device.
    """

    def __init__(self, log: list[tuple[Any, ...]]) -> None:
        self._log = log
        self._counted: Counter[str] = Counter()
        self._uncounted: list[tuple[str, torch.Tensor]] = []

    def moved(self, pool: str, dst_pages: torch.Tensor, src_pages: torch.Tensor) -> None:
        sources = src_pages.clone()
        self._uncounted.append((pool, sources))
        self._log.append(("moved", pool, sources, dst_pages.clone()))

    def zeroed(self, pool: str, pages: torch.Tensor) -> None:
        """Handed-out pages are judged from the tables, so nothing is noted here."""

    def moved_pages(self, pool: str) -> int:
        """Pages of the pool moved so far."""
        self._count()
        return self._counted[pool]

    def total(self) -> int:
        """Pages of all pools moved so far."""
        self._count()
        return self._counted.total()

    def _count(self) -> None:
        for pool, sources in self._uncounted:
            self._counted[pool] += int(np.count_nonzero(sources.cpu().numpy()))
        self._uncounted.clear()


class Caller:
    """The allocators under test, and what their calls have cost so far.

    Attributes:
        nanoseconds, calls: by name of call.
        flushes: one record a flush, also of those an alloc makes.
        seq, call_name: the event being driven.
    """

    def __init__(
        self,
        pools: dict[str, PoolState],
        hazards: Hazards,
        moves: MoveLog,
        checks: Checks | None,
        ledger: SyncLedger | None,
    ) -> None:
        self.pools, self.hazards, self.moves = pools, hazards, moves
        self.by_number = list(pools.values())
        self.checks, self.ledger = checks, ledger
        self.seq = -1
        self.call_name = ""
        self.nanoseconds: dict[str, int] = defaultdict(int)
        self.calls: Counter[str] = Counter()
        self.records_flushes = True
        self.flushes: list[FlushRecord] = []
        if ledger is not None:
            hazards.uncounted = ledger.paused
            for state in self.by_number:
                # On a GPU these say themselves that they are page-locked; on a CPU that stands in for one nothing tells.
                ledger.host(*getattr(state.allocator, "pinned_host_tensors", ()), pinned=True)
        for state in self.by_number:
            self._watch_flushes(state)

    def _call(self, name: str, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        self.call_name = name
        self.calls[name] += 1
        if self.ledger is None:
            begin = perf_counter_ns()
            try:
                return function(*arguments, **keywords)
            except (Exception, SystemExit) as error:
                raise self._refusal(error) from error
            finally:
                self.nanoseconds[name] += perf_counter_ns() - begin
        audit = self.calls[name] % AUDIT_EVERY == 1
        with self.ledger.call(name, self.seq, audit=audit):
            begin = perf_counter_ns()
            try:
                return function(*arguments, **keywords)
            except (Exception, SystemExit) as error:
                raise self._refusal(error) from error
            finally:
                self.nanoseconds[name] += perf_counter_ns() - begin

    def _refusal(self, error: Exception | SystemExit) -> CheckFailure:
        """A call that the oracle holds valid was refused, or crashed."""
        from allocator.errors import AllocatorError, CorruptMappingError, NotAllocatedError

        if isinstance(error, CheckFailure):
            return error
        check = (
            "C13"
            if isinstance(error, NotAllocatedError)
            else "C1"
            if isinstance(error, CorruptMappingError)
            else "CALL"
        )
        pages = list(error.ids) if isinstance(error, AllocatorError) else []
        return CheckFailure(
            check,
            f"{'a valid call' if self.checks is not None else 'a call that was not looked at'} raised {type(error).__name__}: {error}",
            getattr(error, "pool", ""),
            pages,
        )

    def _watch_flushes(self, state: PoolState) -> None:
        """Count every flush, also the ones an alloc makes: the pool's ``_flush`` is wrapped on this instance."""
        if not state.lazy:
            return
        original = state.allocator._flush

        def flush(*, urgent: bool) -> int:
            with self.hazards.uncounted():
                before = self.moves.moved_pages(state.name)
            record = nullcontext(None) if self.ledger is None else self.ledger.call("_flush", self.seq)
            with record as counted:
                begin = perf_counter_ns()
                result: int = original(urgent=urgent)
                took = perf_counter_ns() - begin
            with self.hazards.uncounted():
                moved = self.moves.moved_pages(state.name) - before
                # An urgent flush may depend on what the device finds (`allocator.late_room`).
                condition = getattr(state.allocator, "flush_condition", None)
                is_made = condition is None or bool(condition)
            syncs = (
                (0, 0, 0)
                if counted is None
                else (counted.device_to_host, counted.host_to_device, counted.waits)
            )
            if self.records_flushes and is_made:
                self.flushes.append(
                    FlushRecord(self.seq, state.name, urgent, moved, moved * state.page_bytes, *syncs, took)
                )
            return result

        state.allocator._flush = flush

    def _flush_by_policy(self, states: list[PoolState]) -> None:
        for state in states:
            self._call("flush", state.allocator.flush_for_allocation)
            self._judge_log()

    def _judge_log(self) -> None:
        """Judge, in order, what the last call did to bytes and stream."""
        log = self.hazards.log
        if not log:
            return
        try:
            if self.checks is not None:
                for entry in log:
                    if entry[0] == "finished":
                        self.hazards.judge_finished(entry[1])
                    elif entry[0] == "copied":
                        entry[1].judged = True
                    else:
                        self._judge_move(*entry[1:])
        finally:
            log.clear()
        if self.hazards.read_failures and self.checks is not None:
            raise self.hazards.read_failures[0]

    def _judge_move(self, pool: str, src: torch.Tensor, dst: torch.Tensor) -> None:
        assert self.checks is not None
        state = self.pools[pool]
        src_pages, dst_pages = src.cpu().numpy(), dst.cpu().numpy()
        is_move = (src_pages != 0) | (dst_pages != 0)
        if not is_move.all():
            src_pages, dst_pages = src_pages[is_move], dst_pages[is_move]
            if not len(src_pages):
                return
        self.checks.moved(self.seq, state, src_pages, dst_pages)
