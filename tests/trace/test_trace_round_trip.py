"""What is written comes back, whatever it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from trace_tools import (
    chunk_events,
    complete,
    read_everything,
    serving_events,
    small_header,
    some_state,
    write_events,
)

from recorder.trace import (
    COMPOSITE,
    NONE,
    SCHEMA,
    UNSET,
    EventKind,
    Header,
    PoolHeader,
    Provenance,
    ResultKind,
    TraceReader,
    TraceWriter,
)
from recorder.trace.columns import decode_column, decode_mask, encode_column, encode_mask
from recorder.trace.streams import Lists, Stream, StreamDecoder, StreamEncoder
from recorder.trace.values import decode_values, encode_values

pytestmark = pytest.mark.cpu

INT64 = st.integers(-(2**63), 2**63 - 1)
SMALL = st.integers(-3, 200)
QUICK = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


def ids() -> st.SearchStrategy[list[int]]:
    """Lists of ids: runs, page representatives, small numbers, anything."""
    run = st.builds(
        lambda start, length, stride: [start + stride * place for place in range(length)],
        st.integers(-5, 5000),
        st.integers(0, 70),
        st.sampled_from([1, 1, 16, -1, 0, 7]),
    )
    joined = st.lists(run, max_size=4).map(lambda runs: [number for part in runs for number in part])
    return st.one_of(joined, joined, st.lists(SMALL, max_size=6), st.lists(INT64, max_size=6))


@st.composite
def events(draw: st.DrawFn) -> dict[str, Any]:
    """Any event the schema allows."""
    kind = draw(st.sampled_from(list(EventKind)))
    schema = SCHEMA[kind]
    event: dict[str, Any] = {"kind": kind, "time_us": draw(st.one_of(st.integers(0, 10**6), INT64))}
    event["pool"] = draw(st.integers(0 if schema.needs_pool_at(COMPOSITE) else -1, 1))
    event["value"] = draw(
        st.sampled_from(schema.choices) if schema.choices else st.one_of(st.integers(0, 99), INT64)
    )
    if schema.needs_value and event["value"] == NONE:
        event["value"] = 0
    event["value2"] = draw(st.one_of(st.just(-1), INT64))
    event["depth"] = draw(st.sampled_from([0, 0, 0, 1, 255]))
    event["request"] = draw(st.one_of(st.just(-1), st.integers(0, 50)))
    for slot in range(3):
        if schema.list_meaning(slot):
            optional = slot not in schema.required
            event[f"list{slot}"] = draw(st.one_of(st.none(), ids()) if optional else ids())
    result = draw(st.sampled_from(sorted(schema.results)))
    event["result"] = {
        ResultKind.NOT_RECORDED: st.just(UNSET),
        ResultKind.NULL: st.none(),
        ResultKind.IDS: ids(),
        ResultKind.INTEGER: INT64,
    }[result]
    event["result"] = draw(event["result"])
    event["queries"] = draw(st.lists(st.tuples(st.integers(0, 99), st.booleans()), max_size=3))
    return event


@QUICK
@given(st.lists(events(), min_size=1, max_size=40), st.sampled_from([1, 2, 7, 100]))
def test_any_events_come_back(
    tmp_path_factory: pytest.TempPathFactory, written: list[dict[str, Any]], chunk: int
) -> None:
    path = tmp_path_factory.mktemp("any") / "t.msgpack.zst"
    write_events(path, written, small_header(level=COMPOSITE), chunk_events=chunk, level=1)
    found, _, reader = read_everything(path)
    assert found == [complete(event) for event in written]
    assert reader.ended == "clean" and reader.recovered is None
    assert reader.footer is not None and reader.footer.events == len(written)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("chunk", [3, 64, 8192])
def test_serving_events_come_back(tmp_path: Path, page_size: int, chunk: int) -> None:
    written = serving_events(700)
    header = small_header(page_size=page_size)
    path = write_events(tmp_path / "t.msgpack.zst", written, header, chunk_events=chunk, states_every=9)
    found, states, _ = read_everything(path)
    assert found == [complete(event) for event in written]
    expected = [some_state(number) for number in range(0, 700, 9)]
    for row in expected:
        del row.pools["pool1"]["free_virtual_ids_blake2b"]
    assert states == expected


@QUICK
@given(st.lists(INT64, max_size=80))
def test_any_column_comes_back(numbers: list[int]) -> None:
    values = np.array(numbers, dtype=np.int64)
    assert decode_column(encode_column(values), "c", count=len(values), limit=100).tolist() == numbers


@pytest.mark.parametrize(
    "numbers",
    [
        [-(2**63), 2**63 - 1, 0, -1],
        [2**63 - 1, -(2**63)] * 40,
        list(range(200)),
        [5] * 300,
        [2**40 + 3 * number for number in range(100)],
        [0, 255, 0, 256],
    ],
)
def test_extreme_columns_come_back(numbers: list[int]) -> None:
    values = np.array(numbers, dtype=np.int64)
    assert decode_column(encode_column(values), "c", count=len(values), limit=1000).tolist() == numbers


def test_a_column_takes_the_narrowest_width() -> None:
    wide = np.array([1000, 1255, 1000, 1001], dtype=np.int64)
    assert encode_column(wide)[2:4] == [1, 1000]
    assert encode_column(np.full(9, -4, dtype=np.int64)) == ["const", 9, -4]
    assert encode_column(np.arange(0, 10**7, 10**5, dtype=np.int64))[0] == "delta"


@QUICK
@given(st.lists(st.booleans(), max_size=40))
def test_any_mask_comes_back(bits: list[bool]) -> None:
    mask = np.array(bits, dtype=np.bool_)
    assert decode_mask(encode_mask(mask), "m", len(mask)).tolist() == bits


@QUICK
@given(st.lists(ids(), min_size=1, max_size=12), st.sampled_from([1, 2, 16, 64]))
def test_any_ids_come_back_from_their_codec(lists: list[list[int]], page_size: int) -> None:
    values = np.array([number for part in lists for number in part], dtype=np.int64)
    lengths = np.array([len(part) for part in lists], dtype=np.int64)
    codec = encode_values(values, lengths, page_size)
    assert decode_values(codec, len(values), "v").expand(len(values)).tolist() == values.tolist()


def test_page_representatives_and_contiguous_tokens_are_both_short() -> None:
    pages = np.arange(500, 3000, dtype=np.int64)
    lengths = np.array([2500], dtype=np.int64)
    assert encode_values(pages * 64, lengths, 64) == [
        "scaled",
        64,
        ["runs", 1, ["const", 1, 500], ["const", 1, 2500]],
    ]
    tokens = np.arange(64000, 64000 + 640, dtype=np.int64)
    paged = encode_values(tokens, np.array([640], dtype=np.int64), 64)
    assert paged[0] == "paged" and paged[3:] == [["const", 10, 0], ["const", 10, 64]]


def encode_stream(
    lists: list[list[int]], others: list[tuple[list[int], list[list[int]]]] | None = None
) -> Any:
    """Codec of `lists` at events 1, 3, 5.. after streams of (events, lists) it may copy from."""
    encoder = StreamEncoder()
    streams = []
    for events_, values in others or []:
        stream = Stream(1, 0, 3, np.array(events_, dtype=np.int64))
        stream.codec = encoder.encode(
            stream,
            ragged(values),
            page_size=1,
            event_values=np.zeros(0, dtype=np.int64),
            copy_from=[],
            derive_from=[],
        )
        streams.append(stream)
    stream = Stream(20, 0, 0, np.arange(1, 2 * len(lists), 2, dtype=np.int64))
    stream.codec = encoder.encode(
        stream,
        ragged(lists),
        page_size=1,
        event_values=np.zeros(len(lists), dtype=np.int64),
        copy_from=list(range(len(streams))),
        derive_from=[],
    )
    streams.append(stream)
    decoder = StreamDecoder(streams, np.zeros(2 * len(lists) + 2, dtype=np.int64))
    assert decoder.lengths(len(streams) - 1).tolist() == [len(part) for part in lists]
    assert decoder.values(len(streams) - 1).tolist() == [number for part in lists for number in part]
    return stream.codec


def ragged(lists: list[list[int]]) -> Lists:
    """Lists of plain lists."""
    return Lists(
        np.array([len(part) for part in lists], dtype=np.int64),
        np.array([number for part in lists for number in part], dtype=np.int64),
    )


def test_a_write_set_that_equals_the_alloc_before_it_is_a_copy() -> None:
    allocs = [[5, 9, 300], [6, 10, 301, 77], []]
    codec = encode_stream(allocs, [([0, 2, 4], allocs)])
    assert codec[0] == "copy" and codec[3] == ["own", ["const", 0, 0], ["const", 0, 0]]


def test_a_copy_may_come_from_several_streams_and_miss() -> None:
    codec = encode_stream([[1, 2], [3], [4, 4]], [([0], [[1, 2]]), ([2, 4], [[3], [9, 9]])])
    assert codec[0] == "copy"
    assert decode_mask(codec[2], "hits", 3).tolist() == [True, True, False]


def test_decoding_requests_repeat_from_step_to_step() -> None:
    random = np.random.default_rng(0)
    lists, lengths = [], random.integers(0, 100_000, 30)
    for step in range(300):
        if step % 50 == 49:
            lengths = np.append(np.delete(lengths, step % 7), random.integers(0, 100_000))
        lengths = lengths + 1
        lists.append(lengths.tolist())
    codec = encode_stream(lists)
    assert codec[0] == "repeat" and int(decode_mask(codec[2], "hits", 300).sum()) == 293


@QUICK
@given(st.lists(ids(), min_size=1, max_size=10), st.lists(ids(), min_size=1, max_size=10))
def test_any_stream_comes_back(lists: list[list[int]], others: list[list[int]]) -> None:
    encode_stream(lists, [(list(range(0, 2 * len(others), 2)), others)])


def test_numpy_arrays_are_copied_when_they_are_given(tmp_path: Path) -> None:
    given_ids = np.array([64, 128], dtype=np.int32)
    path = tmp_path / "t.msgpack.zst"
    with TraceWriter(path, small_header()) as writer:
        writer.append(EventKind.FREE, pool=0, time_us=1, list0=given_ids)
        given_ids[:] = -7
        wide = np.array([1, 2], dtype=np.int64)
        writer.append(EventKind.FREE, pool=0, time_us=1, list0=wide)
        wide[:] = -7
    assert [event["list0"] for event in read_everything(path)[0]] == [[64, 128], [1, 2]]


def test_absent_empty_and_null_are_three_things(tmp_path: Path) -> None:
    written = [
        {"kind": EventKind.FREE, "pool": 0, "time_us": 0, "list0": [], "list1": None},
        {"kind": EventKind.FREE, "pool": 0, "time_us": 0, "list0": [1], "list1": []},
        {"kind": EventKind.ALLOC, "pool": 0, "time_us": 0, "value": 0, "result": []},
        {"kind": EventKind.ALLOC, "pool": 0, "time_us": 0, "value": 0, "result": None},
        {"kind": EventKind.ALLOC, "pool": 0, "time_us": 0, "value": 0},
    ]
    found, _, _ = read_everything(write_events(tmp_path / "t.msgpack.zst", written))
    assert found == [complete(event) for event in written]


def test_the_header_comes_back_whole_with_unknown_keys(tmp_path: Path) -> None:
    header = Header(
        engine="sglang",
        engine_version="0.5.23",
        allocator="MultiEndedAllocator",
        settings={"move_cap": 4096, "nested": {"a": [1, 2.5, None, True]}},
        pools=[
            PoolHeader(
                name="full",
                kind="mla",
                grow_direction="down",
                page_size=64,
                entry_bytes=1152,
                layer_num=1,
                num_pages=10,
                min_page_index=1,
                num_virtual_ids=10,
                is_id_owner=False,
                lazy_compaction=False,
                layout={"kv_lora_rank": 512},
                extra={"future": "kept"},
            )
        ],
        total_bytes=2**40,
        device="cuda:0",
        model="Kimi",
        rank={"tp": 3},
        clock_unit="us",
        drop_policy="oldest",
        level="sub_pool",
        provenance=Provenance("driven", how="h", source="s", hardware="w", extra={"log": "l"}),
        extra={"weather": ["rain"]},
    )
    path = write_events(tmp_path / "t.msgpack.zst", serving_events(2), header=None)
    write_events(path, [{"kind": EventKind.CLEAR, "time_us": 0}], header, force=True)
    with TraceReader(path) as reader:
        assert reader.header == header


def test_list_lengths_need_no_expansion(tmp_path: Path) -> None:
    path = write_events(tmp_path / "t.msgpack.zst", serving_events(500))
    with TraceReader(path) as reader:
        for chunk in reader.chunks():
            for slot in range(5):
                lengths = chunk.list_lengths(slot)
                ragged_ = chunk.lists(slot)
                assert lengths.tolist() == np.diff(ragged_.offsets).tolist()
                assert chunk.list_present(slot).tolist() == ragged_.present.tolist()


def test_decoded_lists_cannot_be_written_to(tmp_path: Path) -> None:
    path = write_events(tmp_path / "t.msgpack.zst", serving_events(50))
    with TraceReader(path) as reader:
        chunk = next(reader.chunks())
        with pytest.raises(ValueError, match="read-only"):
            chunk.result.values[0] = 1


def test_dropped_events_are_counted_where_they_were_lost(tmp_path: Path) -> None:
    path = tmp_path / "t.msgpack.zst"
    with TraceWriter(path, small_header(), chunk_events=2) as writer:
        for number in range(4):
            if number in (1, 3):
                writer.dropped(10 * number)
                writer.dropped(1)
            writer.append(EventKind.CLEAR, time_us=number)
        writer.dropped(7)
        writer.flush()
        writer.dropped(2)
    with TraceReader(path) as reader:
        drops = [
            (chunk.first_seq + index, count)
            for chunk in reader.chunks()
            for index, count in chunk.drops.tolist()
        ]
        assert reader.footer is not None
        assert (drops, reader.footer.dropped, reader.footer.dropped_at_end) == (
            [(1, 11), (3, 31), (4, 7)],
            51,
            2,
        )


def test_large_lists_close_a_chunk_early(tmp_path: Path) -> None:
    tokens = np.arange(1 << 21, dtype=np.int64)
    written = [{"kind": EventKind.FREE, "pool": 0, "time_us": n, "list0": tokens} for n in range(5)]
    path = write_events(tmp_path / "t.msgpack.zst", written)
    with TraceReader(path) as reader:
        sizes = []
        for chunk in reader.chunks():
            sizes.append(len(chunk))
            assert all(np.array_equal(chunk.list0.get(index), tokens) for index in range(len(chunk)))
    assert sizes == [2, 2, 1]


def test_chunk_event_helper_sees_every_field(tmp_path: Path) -> None:
    written = serving_events(30)
    path = write_events(tmp_path / "t.msgpack.zst", written)
    with TraceReader(path) as reader:
        assert len([event for chunk in reader.chunks() for event in chunk_events(chunk)]) == 30
