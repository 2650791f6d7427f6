"""What the reader says about files that are whole, unfinished, foreign, newer or empty, and how it seeks."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zstandard
from trace_tools import (
    chunk_events,
    complete,
    drain,
    encode_frames,
    frame_bytes,
    frame_maps,
    read_everything,
    serving_events,
    small_header,
    some_state,
    write_events,
)

from recorder.trace import (
    DamagedTrace,
    EmptyTrace,
    EventKind,
    ImpossibleEvent,
    NewerTrace,
    NoSuchEvent,
    NotATrace,
    StateBatch,
    TraceError,
    TraceNotFound,
    TraceReader,
    TraceWriter,
)
from recorder.trace.columns import encode_column

pytestmark = pytest.mark.cpu


def test_a_missing_file_is_not_found(tmp_path: Path) -> None:
    for path in (tmp_path / "none.msgpack.zst", tmp_path):
        with pytest.raises(TraceNotFound) as caught:
            TraceReader(path)
        assert caught.value.exit_code == 66 and str(path) in str(caught.value)


def test_an_empty_file_is_an_empty_trace(tmp_path: Path) -> None:
    path = tmp_path / "t.msgpack.zst"
    path.touch()
    with pytest.raises(EmptyTrace, match="the file is empty") as caught:
        TraceReader(path)
    assert caught.value.exit_code == 65


def test_a_trace_without_an_event_is_an_empty_trace(tmp_path: Path) -> None:
    path = write_events(tmp_path / "t.msgpack.zst", serving_events(9))
    path.write_bytes(frame_bytes(path)[0])
    with TraceReader(path) as reader, pytest.raises(EmptyTrace, match=r"no event .*no footer"):
        list(reader.items())


FOREIGN: dict[str, bytes] = {
    "text": b"op,pool,ids\nalloc,full,3\n",
    "gzip": gzip.compress(b"hello " * 100),
    "json": json.dumps({"kind": "header", "signature": "kvtape"}).encode(),
    "msgpack": msgpack.packb({"kind": "header", "signature": "kvtape"}),
    "short": b"\x00\x01",
    "zeros": bytes(100),
    "zstd of text": zstandard.compress(b"some text " * 50),
    "zstd of text with a checksum": zstandard.ZstdCompressor(write_checksum=True).compress(
        b"some text " * 50
    ),
    "zstd of a list": zstandard.ZstdCompressor(write_checksum=True).compress(msgpack.packb([1, 2])),
    "zstd of another map": zstandard.ZstdCompressor(write_checksum=True).compress(
        msgpack.packb({"kind": "header"})
    ),
    "zstd without a content size": zstandard.ZstdCompressor(
        write_checksum=True, write_content_size=False
    ).compress(msgpack.packb({"kind": "header", "signature": "kvtape"})),
    "skippable frame": b"\x5e\x2a\x4d\x18\x04\x00\x00\x00abcd",
}


@pytest.mark.parametrize("content", FOREIGN.values(), ids=FOREIGN.keys())
def test_a_foreign_file_is_not_a_trace(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "foreign.msgpack.zst"
    path.write_bytes(content)
    with pytest.raises(NotATrace, match=r"not a kvtape trace|not the header") as caught:
        TraceReader(path)
    assert str(path) in str(caught.value) and caught.value.exit_code == 65


def test_a_call_log_is_not_a_trace(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl.zst"
    log.write_bytes(zstandard.compress(b'{"header": {}}\n' * 5000))
    with pytest.raises(NotATrace):
        TraceReader(log)


def changed(path: Path, change: Any, frame: int = 0) -> Path:
    """The trace with one frame's map changed (and no index)."""
    maps = frame_maps(path)
    change(maps[frame])
    path.write_bytes(encode_frames(maps))
    return path


def test_a_newer_major_version_says_which_one_is_needed(tmp_path: Path) -> None:
    path = write_events(tmp_path / "t.msgpack.zst", serving_events(9))
    changed(path, lambda body: body.update(format=[2, 3]))
    with pytest.raises(NewerTrace, match=r"format 2\.3.*knows format 2 is needed") as caught:
        TraceReader(path)
    assert str(path) in str(caught.value) and caught.value.exit_code == 65


def test_a_newer_minor_version_is_read_and_its_keys_are_kept(tmp_path: Path) -> None:
    written = serving_events(40)
    path = write_events(tmp_path / "t.msgpack.zst", written)
    maps = frame_maps(path)
    maps[0].update(format=[1, 7], mood="good")
    maps[0]["pools"][0]["colour"] = 3
    maps[0]["provenance"]["weather"] = "rain"
    maps[1]["novelty"] = [1, 2]
    maps.insert(2, {"kind": "novelty", "trace": maps[0]["uuid"]})
    maps[-1]["signed_by"] = "someone"
    path.write_bytes(encode_frames(maps))
    found, _, reader = read_everything(path)
    assert found == [complete(event) for event in written]
    header = reader.header
    assert header.format == (1, 7) and header.extra == {"mood": "good"}
    assert header.pools[0].extra == {"colour": 3} and header.provenance.extra == {"weather": "rain"}
    assert reader.footer is not None and reader.footer.extra == {"signed_by": "someone"}
    with TraceReader(path) as again:
        assert next(again.chunks()).extra == {"novelty": [1, 2]}


def test_an_unknown_frame_of_the_same_version_is_damage(tmp_path: Path) -> None:
    path = write_events(tmp_path / "t.msgpack.zst", serving_events(9))
    changed(path, lambda body: body.update(kind="novelty"), frame=1)
    with pytest.raises(DamagedTrace, match="unknown kind 'novelty'"):
        drain(path)


def one_event(tmp_path: Path, **event: Any) -> Path:
    fields = {"kind": EventKind.FREE, "pool": 0, "time_us": 5, "list0": [16, 32], **event}
    return write_events(tmp_path / "t.msgpack.zst", [{"kind": EventKind.CLEAR, "time_us": 1}, fields])


def test_an_event_kind_of_a_newer_minor_is_refused_with_what_is_needed(tmp_path: Path) -> None:
    path = one_event(tmp_path)
    maps = frame_maps(path)
    maps[0]["format"] = [1, 4]
    group = next(item for item in maps[1]["groups"] if item[0] == EventKind.FREE)
    group[0] = maps[1]["streams"][0]["kind"] = 77
    path.write_bytes(encode_frames(maps))
    with pytest.raises(NewerTrace, match=r"kind 77.*knows format 1\.4 is needed") as caught:
        drain(path)
    assert f"{path}, frame 1, byte" in str(caught.value)
    maps[0]["format"] = [1, 0]
    path.write_bytes(encode_frames(maps))
    with pytest.raises(ImpossibleEvent, match="unknown kind 77"):
        drain(path)


@pytest.mark.parametrize(
    "form", [["own", ["const", 1, 2], ["woven", 3]], ["woven", 3], ["own", ["woven", 1, 2], ["const", 2, 2]]]
)
def test_a_form_of_a_newer_minor_is_refused_with_what_is_needed(tmp_path: Path, form: Any) -> None:
    path = one_event(tmp_path)
    maps = frame_maps(path)
    maps[1]["streams"][0]["lists"] = form
    path.write_bytes(encode_frames(maps))
    with pytest.raises(DamagedTrace, match="form"):
        drain(path)
    maps[0]["format"] = [1, 4]
    path.write_bytes(encode_frames(maps))
    with pytest.raises(NewerTrace, match=r"frame 1, byte \d+: .*knows format 1\.4 is needed"):
        drain(path)


def set_group(index: int, value: int) -> Any:
    def change(body: dict[str, Any]) -> None:
        number = next(n for n, item in enumerate(body["groups"]) if item[0] == EventKind.FREE)
        body["groups"][number][index] = value
        body["streams"][0][("kind", "pool")[index]] = value

    return change


def drop_lists(body: dict[str, Any]) -> None:
    body["streams"] = []


def absent_list(body: dict[str, Any]) -> None:
    body["streams"][0]["present"] = ["const", 1, 0]
    body["streams"][0]["lists"] = ["own", ["const", 0, 0], ["const", 0, 0]]


def other_slot(body: dict[str, Any]) -> None:
    body["streams"].append({**body["streams"][0], "slot": 2})


def null_result(body: dict[str, Any]) -> None:
    body["result_kind"] = ["const", 2, 1]


def ids_result(body: dict[str, Any]) -> None:
    body["result_kind"] = ["const", 2, 2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_group(1, 2), "FREE events of pool 2; the header has 2 pools"),
        (set_group(1, -1), "FREE events of no pool"),
        (set_group(1, -2), "FREE events of pool -2"),
        (drop_lists, r"event 1 \(FREE, pool 0\) has no list0 \(token ids\)"),
        (absent_list, r"event 1 \(FREE, pool 0\) has no list0"),
        (other_slot, r"event 1 \(FREE, pool 0\) has a list2"),
        (null_result, r"has a result of kind NULL"),
        (ids_result, r"has a result of kind IDS"),
    ],
)
def test_impossible_events_are_refused_with_their_place(tmp_path: Path, change: Any, message: str) -> None:
    path = changed(one_event(tmp_path), change, frame=1)
    with pytest.raises(ImpossibleEvent, match=message) as caught:
        drain(path)
    assert f"{path}, frame 1, byte " in str(caught.value) and caught.value.exit_code == 65


@pytest.mark.parametrize(
    ("event", "value", "message"),
    [
        ({"kind": EventKind.FLUSH, "value": 1}, 2, r"FLUSH.* has value 2 \(urgent 0/1\)"),
        ({"kind": EventKind.FLUSH, "value": 1}, -1, r"FLUSH.* has value -1"),
        ({"kind": EventKind.MOVE_GATE, "value": 0}, 5, r"MOVE_GATE.* has value 5"),
        ({"kind": EventKind.ALLOC, "value": 16}, -1, r"ALLOC.* has value -1 \(need_size \(tokens\)\)"),
    ],
)
def test_impossible_values_are_refused(
    tmp_path: Path, event: dict[str, Any], value: int, message: str
) -> None:
    path = write_events(tmp_path / "t.msgpack.zst", [{"pool": 0, "time_us": 5, **event}])
    changed(path, lambda body: body.update(value=["const", 1, value]), frame=1)
    with pytest.raises(ImpossibleEvent, match=message):
        drain(path)


def test_frees_of_ids_that_cannot_be_are_data(tmp_path: Path) -> None:
    path = one_event(tmp_path, list0=[-1, 2**60])
    assert read_everything(path)[0][1]["list0"] == [-1, 2**60]


HEADER_DAMAGE: dict[str, Any] = {
    "no pools": lambda body: body.pop("pools"),
    "pools not a list": lambda body: body.update(pools=3),
    "pool not a map": lambda body: body.update(pools=[3]),
    "page size zero": lambda body: body["pools"][0].update(page_size=0),
    "page size text": lambda body: body["pools"][0].update(page_size="16"),
    "name missing": lambda body: body["pools"][0].pop("name"),
    "kind unknown": lambda body: body["pools"][0].update(kind="gpu"),
    "direction unknown": lambda body: body["pools"][0].update(grow_direction="left"),
    "owner not a flag": lambda body: body["pools"][0].update(is_id_owner=1),
    "layout not a map": lambda body: body["pools"][0].update(layout=[]),
    "two of one name": lambda body: body["pools"].append(body["pools"][0]),
    "too many pools": lambda body: body.update(pools=body["pools"] * 600),
    "uuid a number": lambda body: body.update(uuid=7),
    "settings a list": lambda body: body.update(settings=[1]),
    "provenance text": lambda body: body.update(provenance="driven"),
    "no version": lambda body: body.pop("format"),
    "version of text": lambda body: body.update(format=["1", "0"]),
}


@pytest.mark.parametrize("change", HEADER_DAMAGE.values(), ids=HEADER_DAMAGE.keys())
def test_a_wrong_header_is_damage_in_frame_0(tmp_path: Path, change: Any) -> None:
    path = changed(write_events(tmp_path / "t.msgpack.zst", serving_events(3)), change)
    with pytest.raises(DamagedTrace, match="header") as caught:
        TraceReader(path)
    assert (caught.value.frame, caught.value.offset) == (0, 0)


@pytest.mark.parametrize("with_index", [True, False])
def test_seek_equals_reading_from_the_start(tmp_path: Path, with_index: bool) -> None:
    written = serving_events(230)
    path = write_events(tmp_path / "t.msgpack.zst", written, chunk_events=32, states_every=20)
    if not with_index:
        path.write_bytes(b"".join(frame_bytes(path)[:-2]))
    for seq in (0, 1, 31, 32, 33, 100, 191, 192, 229):
        with TraceReader(path) as reader:
            reader.seek(seq)
            items = list(reader.items())
            assert (reader.ended == "clean") == with_index
            assert (reader.recovered is None) == with_index
            assert next(iter(reader.chunks())).first_seq == 0
        chunks = [item for item in items if not isinstance(item, StateBatch)]
        states = [row for item in items if isinstance(item, StateBatch) for row in item]
        first = 32 * (seq // 32)
        assert chunks[0].first_seq == first
        found = [event for chunk in chunks for event in chunk_events(chunk)]
        assert found == [complete(event) for event in written[first:]]
        assert [row.after_seq for row in states] == [n for n in range(0, 230, 20) if n >= first]


@pytest.mark.parametrize("with_index", [True, False])
def test_seek_outside_the_trace_is_refused(tmp_path: Path, with_index: bool) -> None:
    path = write_events(tmp_path / "t.msgpack.zst", serving_events(50), chunk_events=20)
    if not with_index:
        path.write_bytes(b"".join(frame_bytes(path)[:-1]))
    with TraceReader(path) as reader:
        for seq in (-1, 50, 10**12):
            with pytest.raises(NoSuchEvent) as caught:
                reader.seek(seq)
            assert caught.value.exit_code == 2
        assert next(reader.chunks()).first_seq == 0


def test_states_come_beside_the_chunk_of_their_event(tmp_path: Path) -> None:
    path = write_events(tmp_path / "t.msgpack.zst", serving_events(40), chunk_events=10, states_every=1)
    with TraceReader(path) as reader:
        items = list(reader.items())
        rows = list(reader.states())
    for chunk, batch in zip(items[::2], items[1::2], strict=True):
        assert not isinstance(chunk, StateBatch) and isinstance(batch, StateBatch)
        assert batch.after_seq.tolist() == chunk.seq.tolist()
    assert [row.pools["pool0"] for row in rows] == [some_state(number).pools["pool0"] for number in range(40)]


@pytest.mark.parametrize(
    "change",
    [
        lambda body: body.update(rows=-1),
        lambda body: body.update(rows=2**40),
        lambda body: body.update(after_seq=["const", body["rows"], 10**6]),
        lambda body: body.update(after_seq=encode_column(body_range(body["rows"]))),
        lambda body: body.update(pools=[]),
        lambda body: body["pools"].update(pool0=4),
        lambda body: body["pools"]["pool0"].update(holes=4),
        lambda body: body["pools"]["pool0"].update(holes={"integers": ["const", 1, 1]}),
        lambda body: body["pools"]["pool0"].update(holes={"digests": b"abc", "width": 12}),
        lambda body: body["pools"]["pool0"].update(holes={"digests": 7, "width": 12}),
        lambda body: body["pools"]["pool0"].update(holes={"digests": b"", "width": 0}),
    ],
)
def test_damaged_states_are_refused(tmp_path: Path, change: Any) -> None:
    path = write_events(tmp_path / "t.msgpack.zst", serving_events(40), states_every=7)
    changed(path, change, frame=2)
    with pytest.raises(DamagedTrace) as caught:
        drain(path)
    assert caught.value.frame == 2


def body_range(rows: int) -> Any:
    import numpy as np

    return np.arange(rows, 0, -1, dtype=np.int64)


@pytest.mark.parametrize(
    ("name", "value"),
    [("events", 41), ("states", 5), ("dropped", 3), ("events", None), ("dropped_at_end", -1)],
)
def test_a_footer_that_counts_otherwise_is_damage(tmp_path: Path, name: str, value: Any) -> None:
    path = write_events(tmp_path / "t.msgpack.zst", serving_events(40), states_every=7)
    changed(path, lambda body: body.update({name: value}), frame=3)
    with pytest.raises(DamagedTrace, match="footer"):
        drain(path)


def test_the_partial_of_a_killed_writer_is_read(tmp_path: Path) -> None:
    written = serving_events(95)
    path = tmp_path / "t.msgpack.zst"
    writer = TraceWriter(path, small_header(), chunk_events=30)
    for event in written:
        writer.append(**event)
    writer.abort()
    partial = tmp_path / "t.msgpack.zst.partial"
    assert not path.exists()
    found, _, reader = read_everything(partial)
    assert found == [complete(event) for event in written[:90]]
    assert reader.ended == "partial" and reader.footer is None
    assert reader.recovered is not None
    assert (reader.recovered.last_seq, reader.recovered.bytes_missing) == (89, 0)
    assert reader.recovered.byte_offset == partial.stat().st_size
    with TraceReader(partial) as early:
        assert early.ended == "partial"


def test_an_index_that_lies_is_noticed(tmp_path: Path) -> None:
    from recorder.trace.index import index_frame

    path = write_events(tmp_path / "t.msgpack.zst", serving_events(60), chunk_events=20)
    frames = frame_bytes(path)
    offsets = [sum(map(len, frames[:number])) for number in range(len(frames))]
    honest = index_frame([1, 2, 3], offsets[1:4], [0, 20, 40])
    assert frames[-1] == honest
    for lie in (
        index_frame([1, 2, 3], offsets[1:4], [0, 21, 40]),
        index_frame([1, 2, 3], [offsets[1], offsets[2] + 1, offsets[3]], [0, 20, 40]),
        index_frame([1, 3], [offsets[1], offsets[3]], [0, 20]),
    ):
        path.write_bytes(b"".join([*frames[:-1], lie]))
        with pytest.raises(TraceError):
            drain(path)
        with TraceReader(path) as reader, pytest.raises(DamagedTrace):
            reader.seek(25)
            list(reader.chunks())


def test_damage_in_a_list_is_named_when_the_list_is_decoded(tmp_path: Path) -> None:
    path = one_event(tmp_path)
    changed(
        path,
        lambda body: body["streams"][0].update(lists=["own", ["const", 1, 2], ["plain", 2, 3, 0, b""]]),
        1,
    )
    with TraceReader(path) as reader:
        chunk = next(reader.chunks())
        assert chunk.kind.tolist() == [EventKind.CLEAR, EventKind.FREE]
        with pytest.raises(DamagedTrace, match="FREE list0 of pool 0") as caught:
            _ = chunk.list0
    assert (caught.value.path, caught.value.frame) == (path, 1)
