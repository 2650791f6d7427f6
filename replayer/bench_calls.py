"""A trace as ready-made calls, and a loop that times them with nothing in between.

A replay checks everything and so costs more than what it drives. For a measurement the trace is turned into calls beforehand: every
tensor is built, every argument bound, and between two clock readings there is one call and nothing else. The KV bytes are not there;
moving a page is a no-op for every allocator alike.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import perf_counter_ns
from typing import Any, Final

import numpy as np
import torch

from recorder.trace import SCHEMA, Chunk, EventKind, Header, ImpossibleEvent, ResultKind, TraceReader
from replayer.errors import ReplayError, UsageError

SIDES: Final = ("low", "high")
#: Kinds that SGLang answers on a CPU with a plain loop in place of its kernels: timed, and left out of totals.
KERNEL_KINDS: Final = (EventKind.ALLOC_EXTEND, EventKind.ALLOC_DECODE)
#: Kinds that are about the engine around the allocator and call nothing.
_SILENT = frozenset({EventKind.LEASE_BEGIN, EventKind.LEASE_END, EventKind.MARK})
#: Kinds whose calls return something.
_ANSWERING = frozenset(kind for kind, schema in SCHEMA.items() if schema.result)
_FREEING = (EventKind.FREE, EventKind.FREE_SEGMENT, EventKind.FREE_GROUP_END)
NOT_RECORDED: Final = object()


class ResultsDiffer(ReplayError):
    """Allocators that are measured against each other did different things: the times would compare nothing."""

    exit_code = 1


class NoBytes:
    """A ``kvcache`` without bytes: moving pages costs nothing, and none is zeroed when it is handed out."""

    def move_physical_pages(
        self, dst_pages: torch.Tensor, src_pages: torch.Tensor, page_size: int
    ) -> None: ...


class RecordedEvent:
    """A forward-done event that answers as the engine's did: first what was recorded for the call that asks, then what it said last.

    Waiting is a no-op, as on a stream whose work is done.
    """

    __slots__ = ("_answers", "done")

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.done = False
        self._answers: list[bool] = []

    def expect(self, answers_reversed: Sequence[bool]) -> None:
        self._answers = list(answers_reversed)

    def finish(self) -> None:
        self.done = True

    def query(self) -> bool:
        if self._answers:
            self.done = self._answers.pop()
        return self.done

    def wait(self) -> None: ...


class MoveGate:
    """One gate for the pools a trace shuts and opens."""

    def __init__(self) -> None:
        self.open = True

    def set(self, is_open: bool) -> None:
        self.open = is_open

    def __call__(self) -> bool:
        return self.open


@dataclass(frozen=True)
class Call:
    """One call of a trace. ``before`` runs ahead of it, untimed: what the engine's surroundings did since the last call.

    ``recorded`` is the engine's result as int64 array, integer or None, or `NOT_RECORDED`.
    """

    seq: int
    kind: EventKind
    pool: str
    method: str
    arguments: tuple[Any, ...] = ()
    keywords: Mapping[str, Any] = field(default_factory=dict)
    before: tuple[Callable[[], None], ...] = ()
    recorded: Any = NOT_RECORDED


@dataclass
class CallList:
    """The calls of one trace, in order; ``events`` and ``gate`` are theirs and start over with `reset`."""

    header: Header
    calls: list[Call]
    events: dict[int, RecordedEvent]
    gate: MoveGate
    gated_pools: frozenset[str]

    def reset(self) -> None:
        for event in self.events.values():
            event.reset()
        self.gate.set(True)


@dataclass
class Timing:
    """Nanoseconds inside calls and number of calls, by kind, of one pass over a call list."""

    nanoseconds: dict[EventKind, int]
    calls: dict[EventKind, int]

    def total(self, *, without: Sequence[EventKind] = ()) -> int:
        return sum(spent for kind, spent in self.nanoseconds.items() if kind not in without)


# -- a trace to calls


def load_calls(path: Path | str, limit: int | None = None) -> CallList:
    """The calls of a trace, all tensors built (int64, CPU); only its first ``limit`` calls if that is given, and only those before the
    first place where events are missing.

    Raises:
        TraceError: as the reader does.
        UsageError: ids of another placement rule, which no allocator here would hand out again.
    """
    with TraceReader(path) as reader:
        if reader.header.settings.get("placement") == "free":
            raise UsageError(
                f"{path}: its ids follow {reader.header.engine}'s placement, not this allocator's; bench drives recorded ids. "
                "`replay` maps them and reports the time inside the allocator"
            )
        builder = _Builder(reader.header)
        for chunk in reader.chunks():
            builder.add(chunk, limit)
            if len(chunk.drops) or (limit is not None and len(builder.calls) >= limit):
                break
    if not builder.calls:
        raise UsageError(f"{path}: no allocator call to time")
    return CallList(
        reader.header, builder.calls[:limit], builder.events, builder.gate, frozenset(builder.gated_pools)
    )


class _Builder:
    """Turns events into calls, chunk by chunk."""

    def __init__(self, header: Header) -> None:
        self.names = [pool.name for pool in header.pools]
        self.calls: list[Call] = []
        self.events: dict[int, RecordedEvent] = {}
        self.gate = MoveGate()
        self.gated_pools: set[str] = set()
        self._before: list[Callable[[], None]] = []

    def add(self, chunk: Chunk, limit: int | None) -> None:
        queries, answers = chunk.queries
        lists = (chunk.list0, chunk.list1, chunk.list2)
        end = int(chunk.drops[:, 0].min()) if len(chunk.drops) else len(chunk)
        for index in np.flatnonzero(chunk.depth[:end] == 0).tolist():
            if limit is not None and len(self.calls) >= limit:
                return
            event = _Event(
                seq=chunk.first_seq + index,
                kind=EventKind(int(chunk.kind[index])),
                pool=int(chunk.pool[index]),
                value=int(chunk.value[index]),
                value2=int(chunk.value2[index]),
                lists=tuple(ragged.get(index) for ragged in lists),
                recorded=_recorded(chunk, index),
            )
            first, last = int(queries.offsets[index]), int(queries.offsets[index + 1])
            if first != last:
                self._expect(queries.values[first:last].tolist(), answers[first:last].tolist())
            self._add_event(event)

    def _expect(self, numbers: list[int], answers: list[bool]) -> None:
        by_event: dict[int, list[bool]] = {}
        for number, answer in zip(numbers, answers, strict=True):
            by_event.setdefault(number, []).append(answer)
        for number, said in by_event.items():
            self._before.append(partial(self._event(number).expect, tuple(reversed(said))))

    def _event(self, number: int) -> RecordedEvent:
        return self.events.setdefault(number, RecordedEvent())

    def _add_event(self, event: _Event) -> None:
        kind = event.kind
        if kind in _SILENT:
            return
        if kind is EventKind.FORWARD_DONE:
            self._before.append(self._event(event.value).finish)
        elif kind is EventKind.MOVE_GATE:
            self.gated_pools.update(self._pools(event))
            self._before.append(partial(self.gate.set, bool(event.value)))
        elif kind is EventKind.FORWARD_BEGIN:
            done = self._event(event.value)
            for pool in self._pools(event)[:1]:
                self._call(
                    event,
                    pool,
                    "set_latest_forward_done_event",
                    (done,),
                    kind=EventKind.SET_LATEST_FORWARD_DONE_EVENT,
                )
                self._call(
                    event,
                    pool,
                    "set_inflight_forward",
                    (done, event.tensor(0)),
                    kind=EventKind.SET_INFLIGHT_FORWARD,
                )
        elif kind is EventKind.CLEAR:
            for pool in self._pools(event):
                self._call(event, pool, "clear")
        else:
            method, arguments, keywords = self._bound(event)
            self._call(event, self.names[event.pool], method, arguments, keywords)

    def _pools(self, event: _Event) -> list[str]:
        return self.names if event.pool < 0 else [self.names[event.pool]]

    def _call(
        self,
        event: _Event,
        pool: str,
        method: str,
        arguments: tuple[Any, ...] = (),
        keywords: Mapping[str, Any] | None = None,
        kind: EventKind | None = None,
    ) -> None:
        before, self._before = tuple(self._before), []
        self.calls.append(
            Call(
                event.seq, kind or event.kind, pool, method, arguments, keywords or {}, before, event.recorded
            )
        )

    def _bound(self, event: _Event) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
        """Method name and arguments, as SGLang 0.5.23's signatures have them."""
        kind, value, tensor = event.kind, event.value, event.tensor
        if kind is EventKind.ALLOC_EXTEND:
            prefix, seq, last = tensor(0), tensor(1), tensor(2)
            return (
                "alloc_extend",
                (prefix, prefix, seq, seq, last, value, None if event.value2 < 0 else event.value2),
                {},
            )
        if kind is EventKind.ALLOC_DECODE:
            seq = tensor(1)
            return "alloc_decode", (seq, seq, tensor(2)), {}
        if kind is EventKind.FREE:
            pages = tensor(1)
            return "free", (tensor(0),), {} if pages is None else {"_pages": pages}
        if kind is EventKind.FREE_SEGMENT:
            return "free_segment", (tensor(0),), {"start_pos": value}
        if kind is EventKind.FLUSH:
            return ("flush_for_allocation" if value else "flush_opportunistic"), (), {}
        if kind is EventKind.MAKE_ROOM:
            return "make_room", (), {"side": SIDES[value], "min_bytes": event.value2}
        if kind is EventKind.COMPACT_HOLES:
            return "compact_holes", (), {"retreat_side": SIDES[value]}
        if kind is EventKind.SET_LATEST_FORWARD_DONE_EVENT:
            return "set_latest_forward_done_event", (None if value < 0 else self._event(value),), {}
        if kind is EventKind.SET_INFLIGHT_FORWARD:
            return "set_inflight_forward", (None if value < 0 else self._event(value), tensor(0)), {}
        if kind is EventKind.RESIZE:
            return (
                "_set_capacity",
                (value,),
                {"virtual_num_pages": None if event.value2 < 0 else event.value2},
            )
        if kind is EventKind.CANCEL_PHYSICAL:
            return "cancel_physical_reservation", (tensor(0),), {}
        if kind in (EventKind.ALLOC, EventKind.ALLOC_PHYSICAL):
            return kind.name.lower(), (value,), {}
        if kind is EventKind.BIND:
            return "bind", (tensor(0), tensor(1)), {}
        if kind in (EventKind.ALLOC_WITH_VIRTUAL, EventKind.UNBIND, EventKind.FREE_PHYSICAL):
            return kind.name.lower(), (tensor(0),), {}
        if kind in (EventKind.FREE_GROUP_BEGIN, EventKind.FREE_GROUP_END):
            return kind.name.lower(), (), {}
        raise ImpossibleEvent(f"event {event.seq}: there is no call for {kind.name}")


@dataclass(frozen=True)
class _Event:
    seq: int
    kind: EventKind
    pool: int
    value: int
    value2: int
    lists: tuple[Any, ...]
    recorded: Any

    def tensor(self, slot: int) -> torch.Tensor | None:
        """The event's id list as a tensor of its own: the chunk's arrays are read-only and shared."""
        ids = self.lists[slot]
        return None if ids is None else torch.from_numpy(ids.copy())


def _recorded(chunk: Chunk, index: int) -> Any:
    kind = int(chunk.result_kind[index])
    if kind == ResultKind.NULL:
        return None
    if kind == ResultKind.IDS:
        return chunk.result.get(index)
    return int(chunk.result_value[index]) if kind == ResultKind.INTEGER else NOT_RECORDED


# -- calls to times


def time_calls(pools: Mapping[str, Any], calls: CallList) -> Timing:
    """Run the calls on fresh allocators, by pool name, and time each one. The garbage collector is off meanwhile."""
    bound = _bind(pools, calls)
    kinds = sorted({call.kind for call in calls.calls})
    number_of = {kind: number for number, kind in enumerate(kinds)}
    steps = [
        (number_of[call.kind], function, before)
        for call, (function, before) in zip(calls.calls, bound, strict=True)
    ]
    spent, counts = [0] * len(kinds), [0] * len(kinds)
    calls.reset()
    clock = perf_counter_ns
    with _collector_off():
        for number, function, before in steps:
            for action in before:
                action()
            begin = clock()
            function()
            end = clock()
            spent[number] += end - begin
            counts[number] += 1
    return Timing(dict(zip(kinds, spent, strict=True)), dict(zip(kinds, counts, strict=True)))


def check_equal(pools_by_candidate: Mapping[str, Mapping[str, Any]], calls: CallList) -> None:
    """Run the calls on every candidate side by side, untimed, on fresh allocators, and compare.

    Raises:
        ResultsDiffer: a result that is not the recorded one, or tables that differ after the last call.
    """
    bound = {name: _bind(pools, calls) for name, pools in pools_by_candidate.items()}
    calls.reset()
    for index, call in enumerate(calls.calls):
        expected, origin = call.recorded, "the trace"
        for name, steps in bound.items():
            function, before = steps[index]
            for action in before:
                action()
            result = function()
            if expected is NOT_RECORDED:
                expected, origin = result, name
            elif call.kind in _ANSWERING and not _same(result, expected):
                raise ResultsDiffer(
                    f"event {call.seq}, {call.method} on pool {call.pool!r}: {name} answers {_shown(result)}, "
                    f"{origin} has {_shown(expected)}; times of different work are not compared"
                )
    _check_same_state(pools_by_candidate)


def _bind(
    pools: Mapping[str, Any], calls: CallList
) -> list[tuple[Callable[[], Any], tuple[Callable[[], None], ...]]]:
    """Every call as a function of nothing, with what goes before it. SGLang's composites forget past moves at every free; for the
    allocator alone that is done here, untimed."""
    for name in calls.gated_pools:
        pools[name].disagg_move_gate = calls.gate
    bound: list[tuple[Callable[[], Any], tuple[Callable[[], None], ...]]] = []
    for call in calls.calls:
        allocator = pools[call.pool]
        before = call.before
        if call.kind in _FREEING and hasattr(allocator, "clear_inverse_history"):
            before = (*before, allocator.clear_inverse_history)
        method = getattr(allocator, call.method, None)
        if method is None and call.kind is EventKind.UNBIND:
            # SGLang has no such method: unified_cache/components/swa.py writes the table itself, like this.
            bound.append(
                (partial(allocator.virtual_to_physical.index_fill_, 0, call.arguments[0], -1), before)
            )
            continue
        if method is None:
            raise UsageError(
                f"{type(allocator).__name__} has no method {call.method}, which event {call.seq} calls"
            )
        bound.append((partial(method, *call.arguments, **call.keywords), before))
    return bound


class _collector_off:
    """Everything made so far is of no interest to the collector, and nothing is collected inside the block."""

    def __enter__(self) -> None:
        gc.collect()
        gc.freeze()
        gc.disable()

    def __exit__(self, *exception: object) -> None:
        gc.enable()
        gc.unfreeze()


def _same(result: Any, expected: Any) -> bool:
    if isinstance(result, torch.Tensor) and not isinstance(expected, (int, type(None))):
        ids = expected.numpy() if isinstance(expected, torch.Tensor) else expected
        return np.array_equal(result.numpy(), ids)
    return bool(result == expected) if isinstance(result, int) else result is None and expected is None


def _shown(result: Any) -> str:
    if isinstance(result, torch.Tensor):
        result = result.numpy()
    if not isinstance(result, np.ndarray):
        return repr(result)
    return f"{len(result)} ids {result[:8].tolist()}{' ...' if len(result) > 8 else ''}"


def _check_same_state(pools_by_candidate: Mapping[str, Mapping[str, Any]]) -> None:
    (first, reference), *others = pools_by_candidate.items()
    for name, pools in others:
        for pool, allocator in pools.items():
            for what, ours, theirs in _state_pairs(allocator, reference[pool]):
                if ours != theirs:
                    raise ResultsDiffer(
                        f"after the last call, {what} of pool {pool!r} is not the same in {name} and {first}"
                    )


def _state_pairs(one: Any, other: Any) -> Iterator[tuple[str, Any, Any]]:
    for what in ("virtual_to_physical", "physical_to_virtual", "free_virtual_ids"):
        yield what, _rows(getattr(one, what)), _rows(getattr(other, what))
    yield "watermark_physical", one.watermark_physical, other.watermark_physical
    yield "available_size()", one.available_size(), other.available_size()
    yield "the set of holes", sorted(_rows(one._free_phys_pages)), sorted(_rows(other._free_phys_pages))


def _rows(table: torch.Tensor | None) -> list[int]:
    return [] if table is None else table.tolist()
