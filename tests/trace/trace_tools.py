"""Helpers of the trace tests: small headers, event lists, and files made of frames."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from recorder.trace import (
    NONE,
    UNSET,
    Chunk,
    EventKind,
    Header,
    PoolHeader,
    Provenance,
    ResultKind,
    StateBatch,
    StateRow,
    TraceReader,
    TraceWriter,
)
from recorder.trace.frames import compress_frame, decompress_frame, new_compressor, read_frame, unpack_map

Event = dict[str, Any]


def small_header(pools: int = 2, page_size: int = 16, **fields: Any) -> Header:
    """A header with `pools` pools of `page_size` tokens a page."""
    return Header(
        engine="test",
        pools=[
            PoolHeader(
                name=f"pool{number}",
                kind="mha",
                grow_direction=("down", "up")[number % 2],
                page_size=page_size,
                entry_bytes=256,
                layer_num=1,
                num_pages=1000,
                min_page_index=1,
                num_virtual_ids=1000,
            )
            for number in range(pools)
        ],
        provenance=Provenance("synthetic", how="made by a test"),
        **fields,
    )


def serving_events(count: int, seed: int = 0) -> list[Event]:
    """Events with the habits of a serving engine: decodes that grow by one, write sets, frees by page."""
    random = np.random.default_rng(seed)
    events: list[Event] = []
    seq_lens, last_loc = [20, 300, 7], [19, 331, 406]
    forward = 0
    while len(events) < count:
        time_us = 50 * len(events) + int(random.integers(0, 9))
        forward += 1
        seq_lens = [length + 1 for length in seq_lens]
        result = [
            loc + 1 if length % 16 != 1 else 16 * int(random.integers(2, 900))
            for loc, length in zip(last_loc, seq_lens, strict=True)
        ]
        decode = {"list1": seq_lens, "list2": last_loc, "result": result}
        events.append({"kind": EventKind.ALLOC_DECODE, "pool": 0, "time_us": time_us, **decode})
        last_loc = result
        for pool in (0, 1):
            events.append(
                {
                    "kind": EventKind.SET_INFLIGHT_FORWARD,
                    "pool": pool,
                    "time_us": time_us,
                    "value": forward,
                    "list0": None if pool else result,
                }
            )
        if random.random() < 0.2:
            tokens = int(random.integers(1, 90))
            start = 16 * int(random.integers(2, 900))
            extend = {
                "list0": [0],
                "list1": [tokens],
                "list2": [-1],
                "result": list(range(start, start + tokens)),
            }
            events.append(
                {
                    "kind": EventKind.ALLOC_EXTEND,
                    "pool": 0,
                    "time_us": time_us,
                    "value": tokens,
                    "value2": 3,
                    "request": forward,
                    **extend,
                }
            )
            seq_lens, last_loc = [*seq_lens, tokens], [*last_loc, start + tokens - 1]
        if len(seq_lens) > 3 and random.random() < 0.3:
            pages = random.integers(2, 900, 4)
            events.append(
                {
                    "kind": EventKind.FREE,
                    "pool": 0,
                    "time_us": time_us,
                    "list0": (pages * 16).tolist(),
                    "list1": pages.tolist() if random.random() < 0.5 else None,
                }
            )
            seq_lens, last_loc = seq_lens[1:], last_loc[1:]
        if random.random() < 0.3:
            events.append(
                {
                    "kind": EventKind.FLUSH,
                    "pool": int(random.integers(0, 2)),
                    "time_us": time_us,
                    "value": int(random.integers(0, 2)),
                    "result": int(random.integers(0, 5)),
                    "depth": int(random.integers(0, 2)),
                    "queries": [
                        (forward, bool(random.integers(0, 2))) for _ in range(int(random.integers(0, 3)))
                    ],
                }
            )
        if random.random() < 0.1:
            events.append(
                {"kind": EventKind.ALLOC, "pool": 1, "time_us": time_us, "value": 16, "result": None}
            )
    return events[:count]


def write_events(
    path: Path,
    events: Sequence[Event],
    header: Header | None = None,
    *,
    states_every: int = 0,
    **options: Any,
) -> Path:
    """Write `events` (keyword arguments of TraceWriter.append) to `path`, with a state every so many events."""
    with TraceWriter(path, header or small_header(), **options) as writer:
        for number, event in enumerate(events):
            writer.append(**event)
            if states_every and number % states_every == 0:
                writer.state(some_state(number))
    return path


def some_state(number: int) -> StateRow:
    """A state that depends on `number`."""
    return StateRow(
        number,
        {
            "pool0": {
                "watermark": 900 - number,
                "holes": number % 7,
                "virtual_to_physical_blake2b": b"%012d" % number,
            },
            "pool1": {"watermark": number, "free_virtual_ids_blake2b": None},
        },
    )


def chunk_events(chunk: Chunk) -> Iterator[Event]:
    """The events of a chunk as keyword arguments of TraceWriter.append, with nothing left at its default."""
    lists = [chunk.list0, chunk.list1, chunk.list2]
    results, (queries, answers) = chunk.result, chunk.queries
    for index in range(len(chunk)):
        found = [ragged.get(index) for ragged in lists]
        asked = queries.get(index)
        kind = ResultKind(int(chunk.result_kind[index]))
        result: Any = UNSET
        if kind == ResultKind.NULL:
            result = None
        elif kind == ResultKind.INTEGER:
            result = int(chunk.result_value[index])
        elif kind == ResultKind.IDS:
            ids = results.get(index)
            assert ids is not None
            result = ids.tolist()
        begin = int(queries.offsets[index])
        numbers = [] if asked is None else asked.tolist()
        yield {
            "kind": EventKind(int(chunk.kind[index])),
            "pool": int(chunk.pool[index]),
            "time_us": int(chunk.time_us[index]),
            "value": int(chunk.value[index]),
            "value2": int(chunk.value2[index]),
            "depth": int(chunk.depth[index]),
            "request": int(chunk.request[index]),
            "result": result,
            "queries": [(number, bool(answers[begin + place])) for place, number in enumerate(numbers)],
            **{f"list{slot}": None if ids is None else ids.tolist() for slot, ids in enumerate(found)},
        }


def complete(event: Event) -> Event:
    """`event` with every field that append would default."""
    defaults: Event = {
        "pool": NONE,
        "value": NONE,
        "value2": NONE,
        "depth": 0,
        "request": NONE,
        "result": UNSET,
        "queries": [],
        "list0": None,
        "list1": None,
        "list2": None,
    }
    return {**defaults, **event}


def read_everything(path: Path) -> tuple[list[Event], list[StateRow], TraceReader]:
    """(events, states, the closed reader) of a whole pass, every list decoded."""
    events: list[Event] = []
    states: list[StateRow] = []
    with TraceReader(path) as reader:
        for item in reader.items():
            if isinstance(item, StateBatch):
                states.extend(item)
            else:
                assert item.first_seq == len(events)
                events.extend(chunk_events(item))
    return events, states, reader


def frame_maps(path: Path) -> list[dict[str, Any]]:
    """The msgpack map of every data frame."""
    maps = []
    offset = 0
    with open(path, "rb") as file:
        while (frame := read_frame(file, offset)) is not None:
            offset = frame.end
            if not frame.skippable:
                maps.append(unpack_map(decompress_frame(frame)))
    return maps


def frame_bytes(path: Path) -> list[bytes]:
    """Every frame as it lies in the file, the index included."""
    data = path.read_bytes()
    parts = []
    offset = 0
    with open(path, "rb") as file:
        while (frame := read_frame(file, offset)) is not None:
            parts.append(data[frame.offset : frame.end])
            offset = frame.end
    return parts


def encode_frames(maps: Sequence[dict[str, Any]]) -> bytes:
    """Data frames with valid checksums around any maps."""
    compressor = new_compressor(1)
    return b"".join(compress_frame(body, compressor) for body in maps)


def drain(path: Path) -> tuple[int, TraceReader]:
    """(events read, the closed reader) of a whole pass that decodes every list and state."""
    events = 0
    with TraceReader(path) as reader:
        for item in reader.items():
            if isinstance(item, StateBatch):
                assert len(item.rows) == len(item)
            else:
                for slot in range(5):
                    assert len(item.lists(slot).values) == int(item.list_lengths(slot).sum())
                assert len(item.queries[1]) == len(item.queries[0].values)
                events += len(item)
    return events, reader
