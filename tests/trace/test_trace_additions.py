"""What format 1.1 added: names of requests, why a recording ended, chunks bounded by ids, lists taken as they are, mix64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trace_tools import (
    complete,
    drain,
    encode_frames,
    frame_maps,
    read_everything,
    serving_events,
    small_header,
    write_events,
)

from recorder.trace import DamagedTrace, EventKind, ImpossibleEvent, TraceReader, TraceWriter
from recorder.trace.digests import mix64
from recorder.trace.limits import (
    CLOSE_CHUNK_IDS,
    MAX_CHUNK_NAMES,
    MAX_NAME_CHARACTERS,
    MAX_REASON_CHARACTERS,
)

pytestmark = pytest.mark.cpu

CLEAR = {"kind": EventKind.CLEAR, "time_us": 0}


def names_of(path: Path) -> list[dict[int, str]]:
    with TraceReader(path) as reader:
        return [chunk.request_ids for chunk in reader.chunks()]


def test_a_request_is_named_in_the_chunk_of_its_first_event(tmp_path: Path) -> None:
    path = tmp_path / "t.msgpack.zst"
    with TraceWriter(path, small_header(), chunk_events=2) as writer:
        for number in range(5):
            if number != 3:
                writer.name_request(number, f"request {number}")
            writer.append(EventKind.CLEAR, time_us=0, request=number)
    assert names_of(path) == [{0: "request 0", 1: "request 1"}, {2: "request 2"}, {4: "request 4"}]


def test_a_name_given_after_the_last_event_is_not_lost(tmp_path: Path) -> None:
    path = tmp_path / "t.msgpack.zst"
    with TraceWriter(path, small_header()) as writer:
        writer.append(EventKind.CLEAR, time_us=0, request=1 << 62)
        writer.name_request(1 << 62, "late")
    assert names_of(path) == [{1 << 62: "late"}]


def test_names_are_cut_and_made_writable(tmp_path: Path) -> None:
    path = tmp_path / "t.msgpack.zst"
    with TraceWriter(path, small_header()) as writer:
        writer.name_request(1, "x" * 1000)
        writer.name_request(2, "half \ud800 of a pair")
        writer.name_request(3, "")
        writer.append(**CLEAR)
        for number in (-1, 1 << 63):
            with pytest.raises(ValueError, match="no request's number"):
                writer.name_request(number, "x")
    assert names_of(path) == [{1: "x" * MAX_NAME_CHARACTERS, 2: r"half \ud800 of a pair", 3: ""}]


def test_more_names_than_a_chunk_holds_close_it(tmp_path: Path) -> None:
    path = tmp_path / "t.msgpack.zst"
    with TraceWriter(path, small_header(), chunk_events=65536) as writer:
        for number in range(MAX_CHUNK_NAMES + 5):
            writer.name_request(number, str(number))
            writer.append(EventKind.CLEAR, time_us=0, request=number)
    found = names_of(path)
    assert [len(names) for names in found] == [MAX_CHUNK_NAMES, 5]
    assert found[1][MAX_CHUNK_NAMES] == str(MAX_CHUNK_NAMES)
    with TraceWriter(path, small_header(), force=True) as writer:
        for number in range(MAX_CHUNK_NAMES):
            writer.name_request(number, "")
        with pytest.raises(ValueError, match="no event came"):
            writer.name_request(MAX_CHUNK_NAMES, "")
        writer.append(**CLEAR)
    assert [len(names) for names in names_of(path)] == [MAX_CHUNK_NAMES]


@pytest.mark.parametrize(
    "pairs",
    [
        3,
        {"1": "x"},
        [1],
        [[1]],
        [[1, "a", 2]],
        [[-1, "a"]],
        [["1", "a"]],
        [[1, b"a"]],
        [[1, None]],
        [[True, "a"]],
        [[1, "a"], [1, "b"]],
        [[1, "a" * (MAX_NAME_CHARACTERS + 1)]],
        [[number, ""] for number in range(MAX_CHUNK_NAMES + 1)],
    ],
    ids=lambda pairs: repr(pairs)[:20],
)
def test_names_that_cannot_be_are_damage(tmp_path: Path, pairs: Any) -> None:
    path = write_events(tmp_path / "t.msgpack.zst", [CLEAR])
    maps = frame_maps(path)
    maps[1]["request_ids"] = pairs
    path.write_bytes(encode_frames(maps))
    with pytest.raises(DamagedTrace, match=r"name|request") as caught:
        drain(path)
    assert caught.value.frame == 1


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        ("", ""),
        ("the disk is full", "the disk is full"),
        ("x" * 9999, "x" * MAX_REASON_CHARACTERS),
        ("\udcff", r"\udcff"),
    ],
)
def test_why_a_recording_ended_is_kept(tmp_path: Path, reason: str, expected: str) -> None:
    path = tmp_path / "t.msgpack.zst"
    writer = TraceWriter(path, small_header())
    writer.append(**CLEAR)
    writer.close(reason)
    _, reader = drain(path)
    assert reader.footer is not None and (reader.footer.reason, reader.footer.extra) == (expected, {})


@pytest.mark.parametrize(
    "reason", [3, None, b"x", "x" * (MAX_REASON_CHARACTERS + 1)], ids=lambda r: repr(r)[:5]
)
def test_a_reason_that_cannot_be_is_damage(tmp_path: Path, reason: Any) -> None:
    path = write_events(tmp_path / "t.msgpack.zst", [CLEAR])
    maps = frame_maps(path)
    maps[2]["reason"] = reason
    path.write_bytes(encode_frames(maps))
    with pytest.raises(DamagedTrace, match="reason"):
        drain(path)


def test_the_footer_is_found_without_a_pass(tmp_path: Path) -> None:
    path = tmp_path / "t.msgpack.zst"
    with TraceWriter(path, small_header(), chunk_events=3) as writer:
        for event in serving_events(30):
            writer.append(**event)
        writer.dropped(4)
        writer.close("enough")
    with TraceReader(path) as reader:
        chunks = reader.chunks()
        next(chunks)
        found = reader.find_footer()
        assert found is not None and (found.events, found.dropped, found.reason) == (30, 4, "enough")
        assert sum(len(chunk) for chunk in chunks) == 27
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    with TraceReader(path) as reader:
        assert reader.find_footer() is None


def test_a_chunk_is_closed_before_its_lists_hold_too_many_ids(tmp_path: Path) -> None:
    written = [{"kind": EventKind.FREE, "pool": 0, "time_us": n, "list0": list(range(30))} for n in range(10)]
    written.insert(4, {"kind": EventKind.FREE, "pool": 0, "time_us": 0, "list0": list(range(500))})
    path = write_events(tmp_path / "t.msgpack.zst", written, chunk_ids=100)
    with TraceReader(path) as reader:
        assert [len(chunk) for chunk in reader.chunks()] == [3, 1, 1, 3, 3]
    assert read_everything(path)[0] == [complete(event) for event in written]
    for ids in (0, CLOSE_CHUNK_IDS + 1):
        with pytest.raises(ValueError, match="ids"):
            TraceWriter(tmp_path / "u.msgpack.zst", small_header(), chunk_ids=ids)


def test_trusted_lists_are_written_as_they_are(tmp_path: Path) -> None:
    events = serving_events(300)
    plain = write_events(tmp_path / "a.msgpack.zst", events, small_header(uuid="same"))
    with TraceWriter(tmp_path / "b.msgpack.zst", small_header(uuid="same")) as writer:
        for event in events:
            arrays = {
                name: np.array(value, dtype=np.int64)
                if isinstance(value, list) and name != "queries"
                else value
                for name, value in event.items()
            }
            writer.append(**arrays, trusted=True)
    assert (tmp_path / "b.msgpack.zst").read_bytes() == plain.read_bytes()


def test_lists_are_copied_unless_they_are_trusted(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "t.msgpack.zst", small_header()) as writer:
        for trusted in (False, True):
            ids = np.array([1, 2], dtype=np.int64)
            writer.append(EventKind.FREE, pool=0, time_us=0, list0=ids, trusted=trusted)
            ids[0] = 9
    assert [event["list0"] for event in read_everything(tmp_path / "t.msgpack.zst")[0]] == [[1, 2], [9, 2]]


def test_a_trusted_event_is_checked_against_the_schema(tmp_path: Path) -> None:
    ids = np.array([1], dtype=np.int64)
    with TraceWriter(tmp_path / "t.msgpack.zst", small_header()) as writer:
        writer.append(**CLEAR)
        for wrong in ({"list2": ids}, {"list0": ids, "pool": 7}, {"list0": ids, "result": ids}, {}):
            with pytest.raises(ImpossibleEvent):
                writer.append(EventKind.FREE, **{"pool": 0, "time_us": 0, **wrong}, trusted=True)
        assert writer.events == 1
    assert len(read_everything(tmp_path / "t.msgpack.zst")[0]) == 1


def mix64_of_integers(ids: list[int]) -> int:
    """The formula of docs/trace-format.md, with Python's integers."""

    def signed(number: int) -> int:
        number &= 2**64 - 1
        return number - 2**64 if number >> 63 else number

    total = 0
    for place, number in enumerate(ids):
        x = signed(number * 0x9E3779B97F4A7C15 + place * 0xC2B2AE3D27D4EB4F)
        x ^= x >> 32
        x = signed(x * 0xFF51AFD7ED558CCD)
        x ^= x >> 29
        total += x
    return signed(total)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(st.integers(-1, 5000), st.integers(-(2**63), 2**63 - 1)), max_size=50))
def test_mix64_is_the_formula(ids: list[int]) -> None:
    assert mix64(np.array(ids, dtype=np.int64)) == mix64_of_integers(ids)


@pytest.mark.parametrize("size", [65535, 65536, 65537, 200_001])
def test_mix64_of_a_large_table_is_one_sum(size: int) -> None:
    table = np.arange(size, dtype=np.int64)[::-1].copy()
    assert mix64(table) == mix64_of_integers(table.tolist())


def test_mix64_sees_order_length_and_places() -> None:
    tables = [[], [0], [0, 0], [1, 2, 3], [1, 3, 2], [3, 2, 1], [1, 2], [-1, 2, 3]]
    found = [mix64(np.array(table, dtype=np.int64)) for table in tables]
    # A 0 in place 0 adds nothing; a table's length is known beside its figure.
    assert found[:2] == [0, 0] and len(set(found)) == len(found) - 1


def test_mix64_with_torch_is_the_same() -> None:
    import torch

    ids = torch.randint(-1, 1 << 40, (5000,), dtype=torch.int64, generator=torch.Generator().manual_seed(1))
    x = ids * (0x9E3779B97F4A7C15 - 2**64) + torch.arange(5000) * (0xC2B2AE3D27D4EB4F - 2**64)
    x ^= x >> 32
    x *= 0xFF51AFD7ED558CCD - 2**64
    x ^= x >> 29
    assert int(x.sum()) == mix64(ids.numpy())
