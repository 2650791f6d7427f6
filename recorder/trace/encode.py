"""Turns buffered events into the msgpack map of a chunk frame."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from .columns import Int64Array, encode_column, encode_mask
from .schema import NONE, RESULT_SLOT, EventKind, ResultKind
from .streams import Lists, Stream, StreamEncoder

_ALLOCATING = frozenset({EventKind.ALLOC, EventKind.ALLOC_EXTEND, EventKind.ALLOC_DECODE})


COLUMNS: Final = (
    "kind",
    "pool",
    "depth",
    "time_us",
    "request",
    "value",
    "value2",
    "result_kind",
    "result_value",
)
pack_row: Final = struct.Struct(f"<{len(COLUMNS)}q").pack
"""One event's integers, in the order of COLUMNS, as bytes; struct.error for one that is no integer of 64 bits."""


@dataclass
class EventBuffer:
    """Events waiting for their chunk. `rows`: what `pack_row` gives, end to end. `lists` maps (kind, pool, slot)
    to the positions of the events that have such a list, and their ids.
    """

    rows: bytearray = field(default_factory=bytearray)
    events: int = 0
    lists: dict[tuple[int, int, int], tuple[list[int], list[Int64Array]]] = field(default_factory=dict)
    answers: dict[int, list[bool]] = field(default_factory=dict)
    drops: list[tuple[int, int]] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)
    ids: int = 0

    def __len__(self) -> int:
        return self.events

    def add_list(self, kind: int, pool: int, slot: int, ids: Int64Array) -> None:
        """Give the next event, of `kind` on `pool`, a list in `slot`."""
        entry = self.lists.get((kind, pool, slot))
        if entry is None:
            entry = self.lists[kind, pool, slot] = ([], [])
        entry[0].append(self.events)
        entry[1].append(ids)

    def columns(self) -> dict[str, Int64Array]:
        """int64[n] of each of COLUMNS."""
        table = np.frombuffer(self.rows, dtype="<i8").reshape(self.events, len(COLUMNS))
        return dict(zip(COLUMNS, np.ascontiguousarray(table.T).astype(np.int64, copy=False), strict=True))


def encode_chunk(buffer: EventBuffer, first_seq: int, page_sizes: Sequence[int]) -> dict[str, Any]:
    """Map of a chunk frame. `page_sizes`: tokens per page of each pool of the header."""
    count = len(buffer)
    columns = buffer.columns()
    pairs, codes = np.unique((columns["kind"] << 16) + columns["pool"] + 1, return_inverse=True)
    groups = [(pair >> 16, (pair & 0xFFFF) - 1) for pair in pairs.tolist()]
    order = np.argsort(codes, kind="stable")
    members = np.split(order, np.cumsum(np.bincount(codes, minlength=len(groups)))[:-1])
    body: dict[str, Any] = {
        "kind": "chunk",
        "events": count,
        "first_seq": first_seq,
        "groups": [list(group) for group in groups],
        "codes": encode_column(codes),
        "time_us": encode_column(columns["time_us"]),
    }
    integers = order[columns["result_kind"][order] == ResultKind.INTEGER]
    for name in ("request", "value", "value2", "depth", "result_kind"):
        body[name] = encode_column(columns[name][order])
    body["result_value"] = encode_column(columns["result_value"][integers])
    body["streams"] = _encode_streams(buffer, groups, members, columns["value"], page_sizes)
    if buffer.answers:
        body["answers"] = encode_mask(
            np.array(
                [answer for event in sorted(buffer.answers) for answer in buffer.answers[event]],
                dtype=np.bool_,
            )
        )
    if buffer.names:
        body["request_ids"] = [[number, name] for number, name in buffer.names.items()]
    if buffer.drops:
        body["drops"] = encode_column(np.array(buffer.drops, dtype=np.int64).ravel())
    return body


def _encode_streams(
    buffer: EventBuffer,
    groups: list[tuple[int, int]],
    members: list[Int64Array],
    values: Int64Array,
    page_sizes: Sequence[int],
) -> list[dict[str, Any]]:
    encoder = StreamEncoder()
    numbers: dict[tuple[int, int, int], int] = {}
    streams: list[dict[str, Any]] = []
    sizes = {group: len(events) for group, events in zip(groups, members, strict=True)}
    for key in sorted(buffer.lists):
        kind, pool, slot = key
        events, lists = buffer.lists[key]
        at = np.array(events, dtype=np.int64)
        ragged = Lists(np.array([len(ids) for ids in lists], dtype=np.int64), np.concatenate(lists))
        item: dict[str, Any] = {"kind": kind, "pool": pool, "slot": slot}
        if slot != RESULT_SLOT and len(events) < sizes[kind, pool]:
            mask = np.zeros(len(values), dtype=np.bool_)
            mask[at] = True
            item["present"] = encode_mask(mask[members[groups.index((kind, pool))]])
        item["lists"] = encoder.encode(
            Stream(kind, pool, slot, at),
            ragged,
            page_size=_page_size(page_sizes, pool),
            event_values=values[at],
            copy_from=_sources(numbers, key),
            derive_from=_relatives(numbers, key, page_sizes),
        )
        numbers[key] = len(streams)
        streams.append(item)
    return streams


def _page_size(page_sizes: Sequence[int], pool: int) -> int:
    """Tokens per page of a pool; of no pool (a composite, whose token pools have one size) the largest there is."""
    return max(page_sizes, default=1) if pool == NONE else page_sizes[pool]


def _sources(numbers: dict[tuple[int, int, int], int], key: tuple[int, int, int]) -> list[int]:
    """Streams whose lists tend to come back in the stream `key`: what allocs returned, in every pool.

    A forward's write set is what the alloc before it returned; a pool without ids of its own is given the
    owner's.
    """
    kind, _, slot = key
    if slot != 0 or EventKind(kind) in _ALLOCATING:
        return []
    return [
        number
        for other, number in numbers.items()
        if other[2] == RESULT_SLOT and EventKind(other[0]) in _ALLOCATING
    ]


def _relatives(
    numbers: dict[tuple[int, int, int], int], key: tuple[int, int, int], page_sizes: Sequence[int]
) -> list[tuple[int, int, int]]:
    """(stream, divisor, step) that tend to give the stream `key` from another list of the same event."""
    kind, pool, slot = key
    last_loc, freed = numbers.get((kind, pool, 2)), numbers.get((kind, pool, 0))
    if slot == RESULT_SLOT and kind == EventKind.ALLOC_DECODE and last_loc is not None:
        return [(last_loc, 1, 1)]
    if slot == 1 and kind == EventKind.FREE and freed is not None:
        return [(freed, _page_size(page_sizes, pool), 0)]
    return []
