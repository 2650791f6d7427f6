"""A chunk of events as arrays: what the reader hands out, and how it is decoded from a chunk frame."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from .columns import BoolArray, Int64Array, check_integer, decode_column, decode_mask
from .errors import DamagedTrace, ImpossibleEvent, NewerTrace, TraceError
from .header import Header
from .limits import (
    FORMAT_MAJOR,
    FORMAT_MINOR,
    MAX_CHUNK_EVENTS,
    MAX_CHUNK_NAMES,
    MAX_NAME_CHARACTERS,
    MAX_STREAMS,
)
from .schema import (
    ARGUMENT_SLOTS,
    NONE,
    QUERY_SLOT,
    RESULT_SLOT,
    SCHEMA,
    SLOT_NAMES,
    EventKind,
    KindSchema,
    ResultKind,
)
from .streams import Stream, StreamDecoder
from .values import Segments, expand, list_starts

Uint8Array = npt.NDArray[np.uint8]
Int16Array = npt.NDArray[np.int16]

_LAST_KIND = max(EventKind)


@dataclass
class Ragged:
    """One list per event: event i's is `values[offsets[i]:offsets[i + 1]]` where `present[i]`, else None.

    `values` int64[total], `offsets` int64[n + 1], `present` bool[n]. The arrays are read-only views shared
    with the chunk: copy before writing.
    """

    values: Int64Array
    offsets: Int64Array
    present: BoolArray

    def get(self, index: int) -> Int64Array | None:
        """The list of event `index` (within the chunk), or None."""
        if not self.present[index]:
            return None
        return self.values[self.offsets[index] : self.offsets[index + 1]]


class Chunk:
    """Consecutive events. `seq`, `time_us`, `request`, `value`, `value2`, `result_value` are int64[n],
    `kind`, `depth`, `result_kind` uint8[n], `pool` int16[n].

    `list0`, `list1`, `list2`, `result` and `queries` are decoded on first access; DamagedTrace then when they
    are not well formed. `drops` int64[k, 2]: (index in the chunk, events that were not recorded before it).
    `request_ids`: number to name of requests named in this chunk (as a rule those first seen in it).
    """

    def __init__(
        self,
        first_seq: int,
        columns: dict[str, Any],
        decoder: StreamDecoder,
        locate: Callable[[DamagedTrace], TraceError],
    ) -> None:
        self.first_seq = first_seq
        self.kind: Uint8Array = columns["kind"]
        self.pool: Int16Array = columns["pool"]
        self.depth: Uint8Array = columns["depth"]
        self.time_us: Int64Array = columns["time_us"]
        self.request: Int64Array = columns["request"]
        self.value: Int64Array = columns["value"]
        self.value2: Int64Array = columns["value2"]
        self.result_kind: Uint8Array = columns["result_kind"]
        self.result_value: Int64Array = columns["result_value"]
        self._answers_column: Any = columns["answers"]
        self._answers: BoolArray | None = None
        self.drops: Int64Array = columns["drops"]
        self.request_ids: dict[int, str] = columns["request_ids"]
        self.extra: dict[str, Any] = columns["extra"]
        self._decoder = decoder
        self._locate = locate
        self._lists: dict[int, Ragged] = {}

    def __len__(self) -> int:
        return len(self.kind)

    @property
    def seq(self) -> Int64Array:
        """int64[n]: event numbers, without gaps."""
        return np.arange(self.first_seq, self.first_seq + len(self), dtype=np.int64)

    @property
    def list0(self) -> Ragged:
        return self.lists(0)

    @property
    def list1(self) -> Ragged:
        return self.lists(1)

    @property
    def list2(self) -> Ragged:
        return self.lists(2)

    @property
    def result(self) -> Ragged:
        """Ids that calls returned; absent unless `result_kind` is IDS."""
        return self.lists(RESULT_SLOT)

    @property
    def queries(self) -> tuple[Ragged, BoolArray]:
        """(event numbers per event in the order asked, answers bool[total] beside the ragged's values)."""
        ragged = self.lists(QUERY_SLOT)
        if self._answers is None:
            try:
                self._answers = decode_mask(self._answers_column, "answers", len(ragged.values))
            except DamagedTrace as problem:
                raise self._locate(problem) from None
        return ragged, self._answers

    def lists(self, slot: int) -> Ragged:
        """The lists of one slot (0 to 2: arguments, 3: result, 4: event numbers queried), decoded once."""
        if slot not in self._lists:
            try:
                self._lists[slot] = self._decode(slot)
            except DamagedTrace as problem:
                raise self._locate(problem) from None
        return self._lists[slot]

    def list_lengths(self, slot: int) -> Int64Array:
        """int64[n]: number of ids in each event's list, 0 where there is none. Ids are not expanded."""
        try:
            lengths = np.zeros(len(self), dtype=np.int64)
            for number, stream in enumerate(self._decoder.streams):
                if stream.slot == slot:
                    lengths[stream.events] = self._decoder.lengths(number)
            return lengths
        except DamagedTrace as problem:
            raise self._locate(problem) from None

    def list_present(self, slot: int) -> BoolArray:
        """bool[n]: which events have a list in `slot`."""
        present = np.zeros(len(self), dtype=np.bool_)
        for stream in self._decoder.streams:
            if stream.slot == slot:
                present[stream.events] = True
        return present

    def _decode(self, slot: int) -> Ragged:
        streams = [(n, stream) for n, stream in enumerate(self._decoder.streams) if stream.slot == slot]
        present = self.list_present(slot)
        lengths = np.zeros(len(self), dtype=np.int64)
        for number, stream in streams:
            lengths[stream.events] = self._decoder.lengths(number)
        offsets = np.zeros(len(self) + 1, dtype=np.int64)
        np.cumsum(lengths, out=offsets[1:])
        if len(streams) == 1:
            values = self._decoder.values(streams[0][0])
        else:
            values = self._interleave([number for number, _ in streams], offsets)
        values.flags.writeable = False
        return Ragged(values, offsets, present)

    def _interleave(self, numbers: list[int], offsets: Int64Array) -> Int64Array:
        """Ids of several streams in the order of their events.

        Where every list begins with a segment, the segments are put in order and expanded once; else the ids
        are.
        """
        total = int(offsets[-1])
        parts = [(self._decoder.streams[number].events, *self._pieces(number)) for number in numbers]
        pieces = np.zeros(len(self), dtype=np.int64)
        for events, theirs, _ in parts:
            pieces[events] = theirs
        first = list_starts(pieces)
        starts = np.empty(int(pieces.sum()), dtype=np.int64)
        counts = np.ones(len(starts), dtype=np.int64)
        for events, theirs, segments in parts:
            at = expand(first[events], theirs, 1, len(segments.starts))
            starts[at] = segments.starts
            if segments.counts is not None:
                counts[at] = segments.counts
        return expand(starts, counts, 1, total) if total > len(starts) else starts

    def _pieces(self, number: int) -> tuple[Int64Array, Segments]:
        """(segments per list, segments) of a stream; single ids where a segment runs over the border of a
        list.
        """
        lengths, segments = self._decoder.lengths(number), self._decoder.segments(number)
        if segments.counts is None:
            return lengths, segments
        borders = np.concatenate((list_starts(segments.counts), [int(lengths.sum())]))
        begins = list_starts(lengths)
        at = np.searchsorted(borders, begins)
        if not np.array_equal(borders[at], begins):
            return lengths, Segments(self._decoder.values(number), None)
        return np.diff(np.append(at, len(segments.counts))), segments


def decode_chunk(
    body: dict[str, Any],
    header: Header,
    locate: Callable[[DamagedTrace], TraceError],
    first_seq: int | None,
) -> Chunk:
    """Chunk of a chunk frame's map; `first_seq` is the event number it must begin with (None: any).

    Raises DamagedTrace (not located yet), ImpossibleEvent or NewerTrace.
    """
    count = check_integer(body.get("events"), "the number of events of the chunk", 1, MAX_CHUNK_EVENTS)
    first = check_integer(body.get("first_seq"), "the chunk's first event number", 0, 1 << 60)
    if first_seq is not None and first != first_seq:
        raise DamagedTrace(f"the chunk starts with event {first} where event {first_seq} must come")
    groups = _groups(body, header, first)
    codes = decode_column(body.get("codes"), "codes", count=count, limit=count)
    if int(codes.min()) < 0 or int(codes.max()) >= len(groups):
        raise DamagedTrace("an event of the chunk is of no (kind, pool) of the chunk")
    small: npt.NDArray[np.uint8] | npt.NDArray[np.uint16]
    small = codes.astype(np.uint8) if len(groups) <= 256 else codes.astype(np.uint16)
    order = np.argsort(small, kind="stable")
    sizes = np.bincount(small, minlength=len(groups))
    if int(sizes.min()) == 0:
        raise DamagedTrace("the chunk's table names a kind and pool of no event")
    bounds = [0, *np.cumsum(sizes).tolist()]
    members = [order[low:high] for low, high in pairwise(bounds)]
    grouped = {
        name: decode_column(body.get(name), name, count=count, limit=count)
        for name in ("request", "value", "value2", "depth", "result_kind")
    }
    for name, high in (("depth", 255), ("result_kind", int(max(ResultKind)))):
        if int(grouped[name].min()) < 0 or int(grouped[name].max()) > high:
            raise DamagedTrace(f"column {name} of the chunk holds what it cannot")

    def by_event(name: str) -> Int64Array:
        if body[name][0] == "const":
            return grouped[name]
        out = np.empty(count, dtype=np.int64)
        out[order] = grouped[name]
        return out

    table = np.array(groups, dtype=np.int64)
    columns: dict[str, Any] = {
        "kind": table[:, 0].astype(np.uint8).take(small),
        "pool": table[:, 1].astype(np.int16).take(small),
        "time_us": decode_column(body.get("time_us"), "time_us", count=count, limit=count),
        "depth": by_event("depth").astype(np.uint8),
        "result_kind": by_event("result_kind").astype(np.uint8),
        "request": by_event("request"),
        "value": by_event("value"),
        "value2": by_event("value2"),
        "result_value": np.full(count, NONE, dtype=np.int64),
    }
    integers = order[grouped["result_kind"] == ResultKind.INTEGER]
    columns["result_value"][integers] = decode_column(
        body.get("result_value"), "result_value", count=len(integers), limit=count
    )
    streams = _streams(body, groups, members, columns["result_kind"])
    decoder = StreamDecoder(streams, columns["value"])
    columns["drops"] = _drops(body, count)
    columns["request_ids"] = _request_ids(body)
    columns["answers"] = body.get("answers", ["const", 0, 0])
    columns["extra"] = {key: body[key] for key in body if key not in _CHUNK_KEYS}
    chunk = Chunk(first, columns, decoder, locate)
    _validate(chunk, groups, members, streams, grouped, bounds)
    return chunk


_CHUNK_KEYS = frozenset(
    [
        "kind",
        "trace",
        "events",
        "first_seq",
        "groups",
        "codes",
        "time_us",
        "request",
        "value",
        "value2",
        "depth",
        "result_kind",
        "result_value",
        "streams",
        "answers",
        "drops",
        "request_ids",
    ]
)


def _groups(body: dict[str, Any], header: Header, first: int) -> list[tuple[int, int]]:
    raw = body.get("groups")
    if not isinstance(raw, list) or not raw or len(raw) > 65536:
        raise DamagedTrace("the chunk has no table of kinds and pools")
    groups = []
    for item in raw:
        if not isinstance(item, list) or len(item) != 2:
            raise DamagedTrace("the chunk's table of kinds and pools is not well formed")
        kind = check_integer(item[0], "an event kind", 0, 255)
        pool = check_integer(item[1], "a pool number", -(1 << 15), (1 << 15) - 1)
        if not 1 <= kind <= _LAST_KIND:
            if header.format[1] > FORMAT_MINOR:
                raise NewerTrace(
                    f"the chunk from event {first} on holds events of kind {kind}, which this kvtape (format "
                    f"{FORMAT_MAJOR}.{FORMAT_MINOR}) does not know: a kvtape that knows format "
                    f"{FORMAT_MAJOR}.{header.format[1]} is needed"
                )
            raise ImpossibleEvent(f"the chunk from event {first} on holds events of the unknown kind {kind}")
        if not -1 <= pool < len(header.pools):
            raise ImpossibleEvent(
                f"the chunk from event {first} on holds {EventKind(kind).name} events of pool {pool}; "
                f"the header has {len(header.pools)} pools"
            )
        if not SCHEMA[EventKind(kind)].occurs_at(header.level):
            raise ImpossibleEvent(
                f"the chunk from event {first} on holds {EventKind(kind).name} events, which a trace of level "
                f"{header.level} has not"
            )
        if pool < 0 and SCHEMA[EventKind(kind)].needs_pool_at(header.level):
            raise ImpossibleEvent(
                f"the chunk from event {first} on holds {EventKind(kind).name} events of no pool"
            )
        groups.append((kind, pool))
    if len(set(groups)) != len(groups):
        raise DamagedTrace("the chunk's table of kinds and pools names one twice")
    return groups


def _streams(
    body: dict[str, Any], groups: list[tuple[int, int]], members: list[Int64Array], result_kind: Uint8Array
) -> list[Stream]:
    raw = body.get("streams")
    if not isinstance(raw, list) or len(raw) > MAX_STREAMS:
        raise DamagedTrace("the chunk has no list of streams")
    number_of = {group: number for number, group in enumerate(groups)}
    streams: list[Stream] = []
    seen: set[tuple[int, int, int]] = set()
    for item in raw:
        if not isinstance(item, dict):
            raise DamagedTrace("a stream of the chunk is not a map")
        kind, pool, slot = item.get("kind"), item.get("pool"), item.get("slot")
        if type(kind) is not int or type(pool) is not int or (kind, pool) not in number_of:
            raise DamagedTrace("a stream of the chunk belongs to no kind and pool of the chunk")
        if type(slot) is not int or not 0 <= slot < len(SLOT_NAMES) or (kind, pool, slot) in seen:
            raise DamagedTrace("a stream of the chunk is in no slot, or in one that is taken")
        seen.add((kind, pool, slot))
        events = members[number_of[kind, pool]]
        what = f"{EventKind(kind).name} {SLOT_NAMES[slot]} of pool {pool}"
        if slot == RESULT_SLOT:
            events = events[result_kind[events] == ResultKind.IDS]
        elif "present" in item:
            events = events[decode_mask(item["present"], f"{what} present", len(events))]
        streams.append(Stream(kind, pool, slot, events, item.get("lists"), what))
    return streams


def _drops(body: dict[str, Any], count: int) -> Int64Array:
    if "drops" not in body:
        return np.zeros((0, 2), dtype=np.int64)
    flat = decode_column(body["drops"], "drops", limit=2 * (count + 1))
    if len(flat) % 2:
        raise DamagedTrace("the chunk's drops are no pairs")
    drops = flat.reshape(-1, 2)
    if len(drops) and (int(drops.min()) < 0 or int(drops[:, 0].max()) > count or int(drops[:, 1].min()) < 1):
        raise DamagedTrace("the chunk's drops are impossible")
    return drops


def _request_ids(body: dict[str, Any]) -> dict[int, str]:
    pairs = body.get("request_ids", [])
    if not isinstance(pairs, list) or len(pairs) > MAX_CHUNK_NAMES:
        raise DamagedTrace("the chunk's names of requests are no list, or too many")
    names: dict[int, str] = {}
    for pair in pairs:
        if not isinstance(pair, list) or len(pair) != 2 or not isinstance(pair[1], str):
            raise DamagedTrace("the chunk names a request in an unknown way")
        number = check_integer(pair[0], "the number of a request that is named", 0)
        if number in names:
            raise DamagedTrace(f"the chunk names request {number} twice")
        if len(pair[1]) > MAX_NAME_CHARACTERS:
            raise DamagedTrace(f"the name of request {number} has {len(pair[1])} characters")
        names[number] = pair[1]
    return names


def _validate(
    chunk: Chunk,
    groups: list[tuple[int, int]],
    members: list[Int64Array],
    streams: list[Stream],
    grouped: dict[str, Int64Array],
    bounds: list[int],
) -> None:
    """Check every event against the schema table, one (kind, pool) at a time: `grouped` columns are in that
    order.
    """
    by_group: dict[tuple[int, int], dict[int, Stream]] = {}
    for stream in streams:
        by_group.setdefault((stream.kind, stream.pool), {})[stream.slot] = stream
    kinds = len(ResultKind)
    owners = np.repeat(np.arange(len(groups), dtype=np.int64) * kinds, np.diff(bounds))
    results = (
        np.bincount(owners + grouped["result_kind"], minlength=len(groups) * kinds)
        .reshape(-1, kinds)
        .tolist()
    )
    lowest = np.minimum.reduceat(grouped["value"], bounds[:-1]).tolist()
    highest = np.maximum.reduceat(grouped["value"], bounds[:-1]).tolist()
    for number, (group, events) in enumerate(zip(groups, members, strict=True)):
        schema = SCHEMA[EventKind(group[0])]
        found = by_group.get(group, {})
        for slot in ARGUMENT_SLOTS:
            there = found.get(slot)
            if there is not None and len(there.events) and not schema.list_meaning(slot):
                _refuse(chunk, int(there.events[0]), f"a list{slot}")
            if slot in schema.required and (there is None or len(there.events) < len(events)):
                missing = events if there is None else np.setdiff1d(events, there.events)
                _refuse(chunk, int(missing[0]), f"no list{slot} ({schema.list_meaning(slot)})")
        part = slice(bounds[number], bounds[number + 1])
        for kind in ResultKind:
            if results[number][kind] and kind not in schema.results:
                at = int(np.argmax(grouped["result_kind"][part] == kind))
                _refuse(chunk, int(events[at]), f"a result of kind {kind.name}")
        if results[number][ResultKind.IDS] and RESULT_SLOT not in found:
            at = int(np.argmax(grouped["result_kind"][part] == ResultKind.IDS))
            _refuse(chunk, int(events[at]), "a result of ids and no ids")
        if schema.needs_value:
            _check_values(chunk, schema, events, grouped["value"][part], lowest[number], highest[number])


def _check_values(
    chunk: Chunk, schema: KindSchema, events: Int64Array, values: Int64Array, lowest: int, highest: int
) -> None:
    """Refuse an event without the `value` its kind needs; `lowest` and `highest` are those of `values`."""
    if schema.choices:
        low, high = min(schema.choices), max(schema.choices)
        if low <= lowest and highest <= high:
            return
        at = int(np.argmax((values < low) | (values > high)))
    elif lowest <= NONE and bool((values == NONE).any()):
        at = int(np.argmax(values == NONE))
    else:
        return
    _refuse(chunk, int(events[at]), f"value {int(values[at])} ({schema.value})")


def _refuse(chunk: Chunk, index: int, what: str) -> None:
    kind = EventKind(int(chunk.kind[index]))
    raise ImpossibleEvent(
        f"event {chunk.first_seq + index} ({kind.name}, pool {int(chunk.pool[index])}) has {what}, "
        "which no event of its kind has"
    )
