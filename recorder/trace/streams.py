"""Streams: the lists of all events of one (kind, pool) in one slot, as one unit of a chunk.

A slot is one of list0, list1, list2, result, queries. A stream in a chunk is a msgpack map
`{"kind", "pool", "slot", "present"?, "lists"}`; `present` is a 0/1 column over the events of its kind and
pool (left out when every one has the list). `lists` is one of

    ["own", lengths, V]                              V as in values.py; lengths: a column, ["same", stream]
                                                     or ["value"] (the event's `value`)
    ["copy", streams, hits, lists]                   where hits is 1: the list of the latest earlier event
                                                     that is in one of `streams`; the others are in `lists`
    ["repeat", step, hits, lists]                    list k with step * k taken off each id; where hits is 1
                                                     it is the one before it, the others are in `lists`
    ["derived", stream, divisor, step, positions, V] same event, same length: ids = other // divisor + step,
                                                     except at `positions`, where they are V

A stream refers only to streams before it in the chunk, so there are no cycles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .columns import (
    BoolArray,
    Int64Array,
    check_integer,
    decode_column,
    decode_mask,
    encode_column,
    encode_mask,
    encode_plain_column,
    trial_size,
)
from .errors import DamagedTrace, UnknownForm
from .limits import MAX_CHUNK_IDS, MAX_CODEC_DEPTH
from .values import Segments, decode_values, encode_values, expand, list_starts


@dataclass
class Lists:
    """Lists end to end: `lengths` int64[m], `values` int64[sum of lengths]."""

    lengths: Int64Array
    values: Int64Array


def gather(source: Lists, picks: Int64Array) -> Lists:
    """The lists with the numbers `picks`, in that order."""
    lengths = source.lengths[picks]
    total = int(lengths.sum())
    at = expand(list_starts(source.lengths)[picks], lengths, 1, total)
    return Lists(lengths, source.values[at])


def equal_lists(ours: Lists, numbers: Int64Array, theirs: Lists, picks: Int64Array) -> BoolArray:
    """bool[k]: whether list `numbers[i]` of `ours` equals list `picks[i]` of `theirs`."""
    equal: BoolArray = ours.lengths[numbers] == theirs.lengths[picks]
    same_size = np.flatnonzero(equal)
    left, right = gather(ours, numbers[same_size]), gather(theirs, picks[same_size])
    owner = np.repeat(np.arange(len(same_size)), left.lengths)
    equal[same_size] = np.bincount(owner[left.values != right.values], minlength=len(same_size)) == 0
    return equal


def rebased(lists: Lists, step: int) -> Lists:
    """`lists` with step * k added to every id of list k."""
    return Lists(
        lists.lengths,
        lists.values
        + np.repeat(np.arange(len(lists.lengths), dtype=np.int64) * np.int64(step), lists.lengths),
    )


def merge(lengths: Int64Array, parts: list[tuple[Int64Array, Lists]]) -> Int64Array:
    """Values of lists put together from `parts`, each (list numbers, lists); together they cover all."""
    starts = list_starts(lengths)
    out = np.empty(int(lengths.sum()), dtype=np.int64)
    for numbers, lists in parts:
        out[expand(starts[numbers], lists.lengths, 1, len(lists.values))] = lists.values
    return out


def latest_earlier(events: Int64Array, sources: list[Int64Array]) -> tuple[Int64Array, Int64Array]:
    """For each event the latest strictly earlier event among `sources`: (which source, number in it), -1 for
    none.
    """
    which = np.repeat(np.arange(len(sources), dtype=np.int64), [len(source) for source in sources])
    number = np.concatenate([np.arange(len(source), dtype=np.int64) for source in sources])
    at = np.concatenate(sources)
    order = np.argsort(at, kind="stable")
    found = np.searchsorted(at[order], events, side="left") - 1
    none = found < 0
    if len(at) == 0:
        return np.full(len(events), -1, dtype=np.int64), np.full(len(events), -1, dtype=np.int64)
    picked = order[np.maximum(found, 0)]
    return np.where(none, -1, which[picked]), np.where(none, -1, number[picked])


@dataclass
class Stream:
    """One stream while it is encoded or decoded. `events` int64[m]: positions in the chunk, ascending."""

    kind: int
    pool: int
    slot: int
    events: Int64Array
    codec: Any = None
    what: str = ""


class StreamEncoder:
    """Encodes the streams of one chunk, in the order they are given; later ones may refer to earlier ones."""

    def __init__(self) -> None:
        self._done: list[tuple[Stream, Lists]] = []

    def encode(
        self,
        stream: Stream,
        lists: Lists,
        *,
        page_size: int,
        event_values: Int64Array,
        copy_from: list[int],
        derive_from: list[tuple[int, int, int]],
    ) -> Any:
        """The `lists` entry of `stream`.

        `event_values` int64[m]: the `value` of the stream's events. `copy_from`: numbers of earlier streams
        whose lists tend to come back. `derive_from`: (earlier stream, divisor, step) worth trying.
        """
        self._done.append((stream, lists))
        for number, divisor, step in derive_from:
            derived = self._derived(stream, lists, number, divisor, step, page_size)
            if derived is not None:
                return derived
        copied = self._copied(stream, lists, page_size, copy_from) if copy_from else None
        if copied is not None:
            return copied
        own = self._own(stream, lists, page_size, event_values)
        if len(lists.lengths) < 2 or len(lists.values) < 2 * len(lists.lengths):
            return own
        return min((own, self._repeated(lists, page_size)), key=trial_size)

    def _repeated(self, lists: Lists, page_size: int) -> list[Any]:
        """For lists that grow by one from event to event, like the lengths of decoding requests."""
        level = rebased(lists, -1)
        numbers = np.arange(1, len(lists.lengths), dtype=np.int64)
        hits = np.zeros(len(lists.lengths), dtype=np.bool_)
        hits[1:] = equal_lists(level, numbers, level, numbers - 1)
        rest = gather(level, np.flatnonzero(~hits))
        own = ["own", encode_column(rest.lengths), encode_plain_column(rest.values)]
        return ["repeat", 1, encode_mask(hits), own]

    def _own(self, stream: Stream, lists: Lists, page_size: int, event_values: Int64Array) -> list[Any]:
        lengths: Any
        if (
            len(event_values)
            and np.array_equal(lists.lengths, event_values)
            and len(set(lists.lengths.tolist())) > 1
        ):
            lengths = ["value"]
        else:
            lengths = self._same_lengths(stream, lists) or encode_column(lists.lengths)
        return ["own", lengths, encode_values(lists.values, lists.lengths, page_size)]

    def _same_lengths(self, stream: Stream, lists: Lists) -> list[Any] | None:
        for number, (other, other_lists) in enumerate(self._done[:-1]):
            if (other.kind, other.pool) == (stream.kind, stream.pool) and np.array_equal(
                lists.lengths, other_lists.lengths
            ):
                return ["same", number]
        return None

    def _copied(self, stream: Stream, lists: Lists, page_size: int, copy_from: list[int]) -> list[Any] | None:
        sources = [self._done[number] for number in copy_from]
        which, number = latest_earlier(stream.events, [source.events for source, _ in sources])
        hits = np.zeros(len(stream.events), dtype=np.bool_)
        for index, (_, source) in enumerate(sources):
            mine = np.flatnonzero(which == index)
            hits[mine] = equal_lists(lists, mine, source, number[mine])
        if int(hits.sum()) * 4 < len(hits):
            return None
        rest = gather(lists, np.flatnonzero(~hits))
        own = ["own", encode_column(rest.lengths), encode_values(rest.values, rest.lengths, page_size)]
        return ["copy", list(copy_from), encode_mask(hits), own]

    def _derived(
        self, stream: Stream, lists: Lists, number: int, divisor: int, step: int, page_size: int
    ) -> list[Any] | None:
        source, source_lists = self._done[number]
        picks = np.searchsorted(source.events, stream.events)
        if len(source.events) == 0 or bool((picks >= len(source.events)).any()):
            return None
        if not np.array_equal(source.events[picks], stream.events):
            return None
        if not np.array_equal(source_lists.lengths[picks], lists.lengths):
            return None
        base = gather(source_lists, picks).values // divisor + np.int64(step)
        positions = np.flatnonzero(base != lists.values).astype(np.int64)
        if len(positions) * 4 > len(base):
            return None
        patches = lists.values[positions]
        ones = np.zeros(0, dtype=np.int64)
        return [
            "derived",
            number,
            divisor,
            step,
            encode_column(positions),
            encode_values(patches, ones, page_size),
        ]


class StreamDecoder:
    """Decodes streams of one chunk on demand, each once; `lengths` never expands ids."""

    def __init__(self, streams: list[Stream], event_values: Int64Array) -> None:
        self.streams = streams
        self._event_values = event_values
        self._lengths: dict[int, Int64Array] = {}
        self._segments: dict[int, Segments] = {}
        self._values: dict[int, Int64Array] = {}
        self._claimed = 0

    def lengths(self, number: int) -> Int64Array:
        """int64[m]: length of each list of stream `number`. Raises DamagedTrace above the chunk's limit."""
        if number not in self._lengths:
            stream = self.streams[number]
            lengths = self._lengths_of(number, stream.codec, stream.events, 0)
            self._claimed += int(lengths.sum())
            if self._claimed > MAX_CHUNK_IDS:
                raise DamagedTrace(f"the lists of the chunk claim more than {MAX_CHUNK_IDS} ids")
            self._lengths[number] = lengths
        return self._lengths[number]

    def segments(self, number: int) -> Segments:
        """The ids of stream `number`, not expanded where they are stored as runs."""
        if number not in self._segments:
            stream = self.streams[number]
            lengths = self.lengths(number)
            self._segments[number] = self._values_of(number, stream.codec, stream.events, lengths)
        return self._segments[number]

    def values(self, number: int) -> Int64Array:
        """int64[sum of lengths] of stream `number`."""
        if number not in self._values:
            self._values[number] = self.segments(number).expand(int(self.lengths(number).sum()))
        return self._values[number]

    def _checked(self, lengths: Int64Array, what: str) -> Int64Array:
        if len(lengths) and (int(lengths.min()) < 0 or int(lengths.max()) > MAX_CHUNK_IDS):
            raise DamagedTrace(f"a list of {what} has an impossible length")
        if int(lengths.sum()) > MAX_CHUNK_IDS:
            raise DamagedTrace(f"the lists of {what} claim more than {MAX_CHUNK_IDS} ids")
        return lengths

    def _earlier(self, number: int, reference: Any) -> int:
        return check_integer(reference, f"a stream that {self.streams[number].what} refers to", 0, number - 1)

    def _parts(self, number: int, codec: Any, size: int, depth: int) -> list[Any]:
        if not isinstance(codec, list) or len(codec) != size or depth > MAX_CODEC_DEPTH:
            raise DamagedTrace(f"the lists of {self.streams[number].what} are in no known form")
        return codec

    def _form(self, number: int, codec: Any) -> str:
        if isinstance(codec, list) and codec and codec[0] in ("own", "copy", "repeat", "derived"):
            return str(codec[0])
        raise UnknownForm(f"the lists of {self.streams[number].what} are in no known form")

    def _lengths_of(self, number: int, codec: Any, events: Int64Array, depth: int) -> Int64Array:
        what = self.streams[number].what
        form = self._form(number, codec)
        if form == "derived":
            parts = self._parts(number, codec, 6, depth)
            source = self._earlier(number, parts[1])
            return self.lengths(source)[self._picks(number, source, events)]
        if form == "copy":
            parts = self._parts(number, codec, 4, depth)
            hits, which, picks = self._sources(number, parts, events)
            lengths = np.empty(len(events), dtype=np.int64)
            lengths[~hits] = self._lengths_of(number, parts[3], events[~hits], depth + 1)
            for index, source in enumerate(parts[1]):
                mine = hits & (which == index)
                lengths[mine] = self.lengths(source)[picks[mine]]
            return self._checked(lengths, what)
        if form == "repeat":
            parts = self._parts(number, codec, 4, depth)
            hits = self._repeats(number, parts, events)
            kept = self._lengths_of(number, parts[3], events[~hits], depth + 1)
            return self._checked(kept[np.cumsum(~hits) - 1], what)
        parts = self._parts(number, codec, 3, depth)
        claim = parts[1]
        if claim == ["value"]:
            return self._checked(self._event_values[events], what)
        if isinstance(claim, list) and len(claim) == 2 and claim[0] == "same":
            lengths = self.lengths(self._earlier(number, claim[1]))
            if len(lengths) != len(events):
                raise DamagedTrace(
                    f"the lists of {what} are said to be as long as those of a stream of another size"
                )
            return lengths
        return self._checked(
            decode_column(claim, f"{what} lengths", count=len(events), limit=len(events)), what
        )

    def _picks(self, number: int, source: int, events: Int64Array) -> Int64Array:
        """Number in stream `source` of each of `events`; all of them must be in it."""
        theirs = self.streams[source].events
        picks = np.searchsorted(theirs, events)
        if len(events) and (len(theirs) == 0 or int(picks.max()) >= len(theirs)):
            raise DamagedTrace(f"{self.streams[number].what} is derived from lists that are not there")
        if not np.array_equal(theirs[picks], events):
            raise DamagedTrace(f"{self.streams[number].what} is derived from lists that are not there")
        return picks

    def _sources(
        self, number: int, parts: list[Any], events: Int64Array
    ) -> tuple[BoolArray, Int64Array, Int64Array]:
        what = self.streams[number].what
        if not isinstance(parts[1], list) or not parts[1] or len(parts[1]) > number:
            raise DamagedTrace(f"{what} is copied from no stream")
        sources = [self._earlier(number, reference) for reference in parts[1]]
        hits = decode_mask(parts[2], f"{what} hits", len(events))
        which, picks = latest_earlier(events, [self.streams[source].events for source in sources])
        if bool((which[hits] < 0).any()):
            raise DamagedTrace(f"{what} is copied from a list before the chunk's first")
        return hits, which, picks

    def _repeats(self, number: int, parts: list[Any], events: Int64Array) -> BoolArray:
        hits = decode_mask(parts[2], f"{self.streams[number].what} hits", len(events))
        if len(hits) and hits[0]:
            raise DamagedTrace(f"the first list of {self.streams[number].what} repeats one before it")
        return hits

    def _values_of(self, number: int, codec: Any, events: Int64Array, lengths: Int64Array) -> Segments:
        what = self.streams[number].what
        form = self._form(number, codec)
        total = int(lengths.sum())
        if form == "own":
            return decode_values(codec[2], total, what)
        if form == "repeat":
            step = check_integer(codec[1], f"the step of {what}")
            hits = self._repeats(number, codec, events)
            kept = np.flatnonzero(~hits)
            ids = self._values_of(number, codec[3], events[kept], lengths[kept]).expand(
                int(lengths[kept].sum())
            )
            level = gather(Lists(lengths[kept], ids), np.cumsum(~hits) - 1)
            return Segments(rebased(level, step).values, None)
        if form == "copy":
            hits, which, picks = self._sources(number, codec, events)
            rest = np.flatnonzero(~hits)
            rest_values = self._values_of(number, codec[3], events[rest], lengths[rest])
            own = Lists(lengths[rest], rest_values.expand(int(lengths[rest].sum())))
            parts = [(rest, own)]
            for index, source in enumerate(codec[1]):
                mine = np.flatnonzero(hits & (which == index))
                if len(mine):
                    parts.append(
                        (mine, gather(Lists(self.lengths(source), self.values(source)), picks[mine]))
                    )
            return Segments(merge(lengths, parts), None)
        _, source, divisor, step, positions, patches = codec
        divisor = check_integer(divisor, f"the divisor of {what}", 1)
        step = check_integer(step, f"the step of {what}")
        source_lists = Lists(self.lengths(source), self.values(source))
        picks = self._picks(number, source, events)
        same = len(picks) == len(source_lists.lengths)
        values = source_lists.values if same else gather(source_lists, picks).values
        out = values // divisor if divisor != 1 else values.copy()
        out += np.int64(step)
        at = decode_column(positions, f"{what} positions", limit=total)
        if len(at) and (int(at.min()) < 0 or int(at.max()) >= total):
            raise DamagedTrace(f"{what} is corrected outside its lists")
        out[at] = decode_values(patches, len(at), what).expand(len(at))
        return Segments(out, None)
