"""What format 1.2 added: level ``composite`` and its calls, host copies, leases with virtual ids; and what older files may not have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from trace_tools import (
    complete,
    drain,
    encode_frames,
    frame_maps,
    read_everything,
    small_header,
    write_events,
)

from recorder.trace import (
    COMPOSITE,
    SCHEMA,
    DamagedTrace,
    EventKind,
    Header,
    ImpossibleEvent,
    NewerTrace,
    PoolHeader,
    TraceReader,
    TraceWriter,
)
from recorder.trace.header import header_from_map, header_to_map

pytestmark = pytest.mark.cpu

ON_COMPOSITE = [
    {"kind": EventKind.ALLOC, "value": 32, "result": list(range(32, 64))},
    {"kind": EventKind.FREE, "list0": list(range(32, 48)), "list1": [2]},
    {"kind": EventKind.FREE_SWA, "list0": [32, 33, 48]},
    {"kind": EventKind.SLOT_ALLOC, "pool": 1, "value": 1, "result": [3]},
    {"kind": EventKind.FREE, "pool": 0, "list0": [48, 49]},
    {"kind": EventKind.LEASE_BEGIN, "pool": 0, "value": 1, "list0": [7], "list1": [3]},
]
ANYWHERE = [
    {
        "kind": EventKind.BACKUP_BEGIN,
        "pool": 0,
        "value": 1,
        "list0": [7, 8],
        "list1": [0, 1],
        "list2": [3, 4],
    },
    {"kind": EventKind.LOAD_BACK_BEGIN, "pool": 1, "value": 2, "list0": [7, 8], "list1": [0, 1]},
    {"kind": EventKind.HOST_COPY_DONE, "value": 1},
    {"kind": EventKind.HOST_COPY_DONE, "pool": 1, "value": 2},
    {"kind": EventKind.HOST_FREE, "pool": 1, "list0": [0, 1]},
    {"kind": EventKind.LEASE_BEGIN, "pool": 0, "value": 1, "list0": [7], "list1": [3]},
]


def timed(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"time_us": at, **event} for at, event in enumerate(events)]


def test_calls_on_a_composite_come_back(tmp_path: Path) -> None:
    written = timed(ON_COMPOSITE + ANYWHERE)
    path = write_events(tmp_path / "t.msgpack.zst", written, small_header(level=COMPOSITE))
    found, _, reader = read_everything(path)
    assert found == [complete(event) for event in written]
    assert reader.header.level == COMPOSITE


def test_host_copies_are_of_every_level(tmp_path: Path) -> None:
    written = timed(ANYWHERE)
    found, _, _ = read_everything(write_events(tmp_path / "t.msgpack.zst", written))
    assert found == [complete(event) for event in written]


@pytest.mark.parametrize("event", ON_COMPOSITE[:4], ids=lambda event: event["kind"].name)
def test_a_writer_of_sub_pools_refuses_calls_on_a_composite(tmp_path: Path, event: dict[str, Any]) -> None:
    with TraceWriter(tmp_path / "t.msgpack.zst", small_header()) as writer:
        writer.append(EventKind.CLEAR, time_us=0)
        with pytest.raises(
            ImpossibleEvent,
            match=f"event 1 .{event['kind'].name}. (has pool -1|is none of a trace of level sub_pool)",
        ):
            writer.append(time_us=0, **event)


@pytest.mark.parametrize("event", ON_COMPOSITE[:4], ids=lambda event: event["kind"].name)
def test_a_reader_of_sub_pools_refuses_calls_on_a_composite(tmp_path: Path, event: dict[str, Any]) -> None:
    path = write_events(tmp_path / "t.msgpack.zst", timed([event]), small_header(level=COMPOSITE))
    maps = frame_maps(path)
    maps[0]["level"] = "sub_pool"
    path.write_bytes(encode_frames(maps))
    with pytest.raises(ImpossibleEvent, match=r"of no pool|which a trace of level sub_pool has not"):
        drain(path)


def test_a_call_that_needs_a_pool_needs_one_in_a_composite_too(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "t.msgpack.zst", small_header(level=COMPOSITE)) as writer:
        writer.append(EventKind.CLEAR, time_us=0)
        for kind in (EventKind.SLOT_ALLOC, EventKind.MAKE_ROOM):
            with pytest.raises(ImpossibleEvent, match="pool -1"):
                writer.append(kind, time_us=0, value=1)


def test_levels_nobody_knows(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="level is 'page', none of sub_pool, composite"):
        TraceWriter(tmp_path / "t.msgpack.zst", small_header(level="page"))
    path = write_events(tmp_path / "t.msgpack.zst", timed(ANYWHERE))
    maps = frame_maps(path)
    maps[0]["level"] = "page"
    path.write_bytes(encode_frames(maps))
    with pytest.raises(DamagedTrace, match="level"):
        TraceReader(path)
    maps[0]["format"] = [1, 9]
    path.write_bytes(encode_frames(maps))
    with pytest.raises(NewerTrace, match=r"format 1\.9"):
        TraceReader(path)


def test_a_header_without_a_level_is_of_sub_pools() -> None:
    body = header_to_map(small_header())
    del body["level"]
    header = header_from_map(body)
    assert isinstance(header, Header) and header.level == "sub_pool"
    assert all(isinstance(pool, PoolHeader) for pool in header.pools)


def test_what_is_new_has_the_last_numbers() -> None:
    """Numbers of event kinds are never given again."""
    assert [kind.value for kind in EventKind] == list(range(1, 42))
    assert EventKind.MARK == 26 and EventKind.HOST_FREE == 41
    assert {kind for kind, schema in SCHEMA.items() if schema.composite_only} == set(EventKind) - {
        EventKind(number) for number in (*range(1, 27), *range(38, 42))
    }
