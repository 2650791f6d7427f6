"""SGLang call logs become traces: every argument and result, cut logs, and bad lines named by number."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import zstandard

from recorder.imports.convert import convert_log
from recorder.imports.errors import BadOverride, LogError, LogNotFound
from recorder.trace import Chunk, EventKind, OutputExists, ResultKind, TraceReader

pytestmark = pytest.mark.cpu

POOL = {
    "kind": "mha",
    "page_size": 16,
    "layer_num": 1,
    "entry_bytes": 256,
    "num_pages": 75,
    "min_page_index": 3,
    "lazy_compaction": True,
}
HEADER = {
    "engine": "sglang",
    "engine_version": "0.5.23",
    "provenance": "recorded",
    "how": "a test",
    "device": "cpu",
    "total_bytes": 307200,
    "pools": [
        {"name": "full", "grow_direction": "down", "num_virtual_ids": 75, "is_id_owner": True, **POOL},
        {"name": "swa", "grow_direction": "up", "num_virtual_ids": 75, "is_id_owner": False, **POOL},
    ],
}


def runs(*numbers: int) -> dict[str, list[int]]:
    return {"runs": list(numbers)}


def call(op: str, *args: Any, pool: str = "full", t_us: int = 5, **fields: Any) -> dict[str, Any]:
    return {"op": op, "pool": pool, "args": list(args), "t_us": t_us, **fields}


EVENT = {"event": 7}
CALLS: list[dict[str, Any]] = [
    call("alloc", 32, result=runs(48, 32), request=3, state={"full": {"holes": 1, "watermark": 70}}),
    call("alloc", 16, result=None, t_us=6),
    call(
        "alloc_extend",
        runs(0, 1),
        runs(0, 1),
        runs(5, 1),
        runs(5, 1),
        runs(-1, 1),
        5,
        kwargs={"num_new_pages": 1},
        result=runs(48, 5),
    ),
    call("alloc_extend", [0], [0], [5], [5], [-1], 5, None, result=[80, 81, 82, 83, 84]),
    call("alloc_decode", runs(6, 1, 9, 1), runs(6, 1, 9, 1), runs(52, 1, 88, 1), result=runs(53, 1, 89, 1)),
    call("alloc_with_virtual", runs(3, 2), pool="swa", result=None),
    call("bind", runs(3, 1), runs(9, 1), pool="swa"),
    call("unbind", runs(3, 1), pool="swa"),
    call("free", runs(48, 1, 64, 1), kwargs={"_pages": runs(3, 2)}),
    call("free", runs(48, 16)),
    call("free_segment", runs(48, 16), kwargs={"start_pos": 32}),
    call("free_group_begin"),
    call("free_group_end"),
    call("flush_for_allocation", result=4),
    call("flush_opportunistic", result=0, event_queries=[[7, False], [6, True]]),
    call("make_room", kwargs={"side": "high", "min_bytes": 4096}, result=8192),
    call("compact_holes", kwargs={"retreat_side": "low"}, result=2, depth=1),
    call("alloc_physical", 16, result=runs(160, 16)),
    call("free_physical", runs(160, 16)),
    call("cancel_physical_reservation", runs(160, 16)),
    call("set_latest_forward_done_event", EVENT),
    call("set_latest_forward_done_event", None),
    call("set_inflight_forward", EVENT, runs(53, 1)),
    call("set_inflight_forward", EVENT, None),
    call("move_gate", False),
    call("clear"),
]


def write_log(path: Path, calls: list[dict[str, Any]], *, footer: bool = True, header: Any = HEADER) -> Path:
    lines = [{"header": header}, *({"seq": number, **line} for number, line in enumerate(calls))]
    if footer:
        lines.append({"footer": {"events": len(calls), "end": "clean"}})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def only_chunk(path: Path) -> Chunk:
    with TraceReader(path) as reader:
        (chunk,) = reader.chunks()
        return chunk


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return write_log(tmp_path / "log.jsonl", CALLS)


def test_every_call_becomes_one_event(tmp_path: Path, log: Path) -> None:
    done = convert_log(log, tmp_path / "t.msgpack.zst")
    assert (done.events, done.engine, done.log_ended, done.states) == (len(CALLS), "sglang", "clean", 1)
    chunk = only_chunk(tmp_path / "t.msgpack.zst")
    kinds = [EventKind(int(kind)).name.lower() for kind in chunk.kind]
    renamed = {
        "flush_for_allocation": "flush",
        "flush_opportunistic": "flush",
        "cancel_physical_reservation": "cancel_physical",
    }
    assert kinds == [renamed.get(line["op"], line["op"]) for line in CALLS]
    assert chunk.pool.tolist() == [0 if line["pool"] == "full" else 1 for line in CALLS]
    assert chunk.request.tolist()[:2] == [3, -1] and chunk.time_us.tolist()[:2] == [5, 6]


@pytest.mark.parametrize(
    ("index", "expected"),
    [
        (0, {"value": 32, "result": list(range(48, 80))}),
        (1, {"value": 16, "result_kind": ResultKind.NULL}),
        (
            2,
            {
                "value": 5,
                "value2": 1,
                "list0": [0],
                "list1": [5],
                "list2": [-1],
                "result": [48, 49, 50, 51, 52],
            },
        ),
        (3, {"value": 5, "value2": -1, "list1": [5], "result": [80, 81, 82, 83, 84]}),
        (4, {"value": -1, "list0": None, "list1": [6, 9], "list2": [52, 88], "result": [53, 89]}),
        (5, {"list0": [3, 4], "result_kind": ResultKind.NOT_RECORDED}),
        (6, {"list0": [3], "list1": [9]}),
        (7, {"list0": [3], "list1": None}),
        (8, {"list0": [48, 64], "list1": [3, 4]}),
        (9, {"list0": list(range(48, 64)), "list1": None}),
        (10, {"value": 32, "list0": list(range(48, 64))}),
        (13, {"value": 1, "result_value": 4}),
        (14, {"value": 0, "result_value": 0, "queries": [(7, False), (6, True)]}),
        (15, {"value": 1, "value2": 4096, "result_value": 8192}),
        (16, {"value": 0, "result_value": 2, "depth": 1}),
        (17, {"value": 16, "result": list(range(160, 176))}),
        (20, {"value": 7}),
        (21, {"value": -1}),
        (22, {"value": 7, "list0": [53]}),
        (23, {"value": 7, "list0": None}),
        (24, {"value": 0}),
    ],
)
def test_arguments_and_results_arrive(
    tmp_path: Path, log: Path, index: int, expected: dict[str, Any]
) -> None:
    convert_log(log, tmp_path / "t.msgpack.zst")
    chunk = only_chunk(tmp_path / "t.msgpack.zst")
    queries, answers = chunk.queries
    begin, end = queries.offsets[index], queries.offsets[index + 1]
    found: dict[str, Any] = {
        "queries": list(zip(queries.values[begin:end].tolist(), answers[begin:end].tolist(), strict=True)),
        **{
            name: int(getattr(chunk, name)[index])
            for name in ("value", "value2", "depth", "result_kind", "result_value")
        },
    }
    for name in ("list0", "list1", "list2", "result"):
        ids = getattr(chunk, name).get(index)
        found[name] = None if ids is None else ids.tolist()
    assert {name: found[name] for name in expected} == expected


def test_the_header_says_where_the_trace_comes_from(tmp_path: Path) -> None:
    header = {**HEADER, "workload": "some requests", "geometry": "tiny", "model": "m", "settings": {"x": 1}}
    log = write_log(tmp_path / "calls.jsonl", CALLS, header=header)
    convert_log(log, tmp_path / "t.msgpack.zst")
    with TraceReader(tmp_path / "t.msgpack.zst") as reader:
        found = reader.header
    assert found.settings == {"placement": "engine", "move_cap": 4096, "x": 1}
    assert (found.engine, found.engine_version, found.device, found.model) == ("sglang", "0.5.23", "cpu", "m")
    assert (found.provenance.kind, found.provenance.how, found.provenance.source) == (
        "recorded",
        "a test",
        "some requests",
    )
    assert found.provenance.extra == {"log": "calls.jsonl", "log_ended": "clean"}
    assert found.extra == {"geometry": "tiny"}
    assert [pool.is_id_owner for pool in found.pools] == [True, False]
    assert found.pools[1].num_virtual_ids == 75


def test_the_same_log_gives_the_same_bytes(tmp_path: Path, log: Path) -> None:
    convert_log(log, tmp_path / "a.msgpack.zst")
    convert_log(log, tmp_path / "b.msgpack.zst")
    convert_log(log, tmp_path / "c.msgpack.zst", overrides={"model": "other"})
    contents = [(tmp_path / f"{name}.msgpack.zst").read_bytes() for name in "abc"]
    assert contents[0] == contents[1] != contents[2]


def test_a_compressed_log_is_read(tmp_path: Path, log: Path) -> None:
    packed = tmp_path / "log.jsonl.zst"
    packed.write_bytes(zstandard.compress(log.read_bytes()))
    convert_log(packed, tmp_path / "t.msgpack.zst")
    assert len(only_chunk(tmp_path / "t.msgpack.zst")) == len(CALLS)


@pytest.mark.parametrize("cut", [0, 1, 9])
def test_a_log_cut_by_a_kill_gives_its_whole_lines(tmp_path: Path, cut: int) -> None:
    log = write_log(tmp_path / "log.jsonl", CALLS, footer=False)
    data = log.read_bytes()
    log.write_bytes(data[: len(data) - cut])
    done = convert_log(log, tmp_path / "t.msgpack.zst")
    assert (done.log_ended, done.events) == ("cut", len(CALLS) - (cut > 1))
    with TraceReader(tmp_path / "t.msgpack.zst") as reader:
        assert reader.header.provenance.extra["log_ended"] == "cut"


def test_a_cut_compressed_log_gives_its_whole_lines(tmp_path: Path) -> None:
    calls = [call("free", [number * number % 1009, number], t_us=number**3) for number in range(20_000)]
    log = write_log(tmp_path / "log.jsonl", calls, footer=False)
    packed = tmp_path / "log.jsonl.zst"
    data = zstandard.ZstdCompressor(level=1).compress(log.read_bytes())
    packed.write_bytes(data[: len(data) * 3 // 4])
    done = convert_log(packed, tmp_path / "t.msgpack.zst")
    assert done.log_ended == "cut" and 10_000 < done.events < 16_000
    with TraceReader(tmp_path / "t.msgpack.zst") as reader:
        times = [time for chunk in reader.chunks() for time in chunk.time_us.tolist()]
    assert times == [number**3 for number in range(done.events)]


def test_states_are_kept_when_they_differ_or_every_256_calls(tmp_path: Path) -> None:
    digest = "0123456789abcdef01234567"
    calls = []
    for number in range(600):
        state = {"full": {"holes": 0 if number < 10 else 1, "virtual_to_physical_blake2b": digest}}
        calls.append(call("clear", state=state))
    convert_log(write_log(tmp_path / "log.jsonl", calls), tmp_path / "t.msgpack.zst")
    with TraceReader(tmp_path / "t.msgpack.zst") as reader:
        rows = list(reader.states())
    assert [row.after_seq for row in rows] == [0, 10, 266, 522]
    assert rows[1].pools == {"full": {"holes": 1, "virtual_to_physical_blake2b": bytes.fromhex(digest)}}


def changed(change: dict[str, Any], op: str = "alloc") -> list[dict[str, Any]]:
    """The calls with the first `op` changed; a value of ... takes the field out."""
    calls: list[dict[str, Any]] = json.loads(json.dumps(CALLS))
    line = next(line for line in calls if line["op"] == op)
    for name, value in change.items():
        if value is ...:
            del line[name]
        else:
            line[name] = value
    return calls


BAD_LINES: list[tuple[str, dict[str, Any], str]] = [
    ("alloc", {"op": "malloc"}, "unknown op 'malloc'"),
    ("alloc", {"op": ...}, "field 'op' is missing"),
    ("alloc", {"op": 3}, "field 'op' is an integer"),
    ("alloc", {"pool": "gpu"}, "unknown pool 'gpu'"),
    ("alloc", {"pool": ...}, "field 'pool' is missing"),
    ("alloc", {"t_us": ...}, "field 't_us' is missing"),
    ("alloc", {"t_us": 1.5}, "field 't_us' is a fraction, not an integer"),
    ("alloc", {"t_us": 2**64}, "field 't_us' is an integer out of range"),
    ("alloc", {"args": []}, "alloc: argument 'need_size' is missing"),
    ("alloc", {"args": [1, 2]}, "alloc takes 1 arguments, 2 are given"),
    ("alloc", {"args": ["32"]}, "alloc: need_size is text"),
    ("alloc", {"args": [-1]}, "no value"),
    ("alloc", {"args": 32}, "args must be a list"),
    ("alloc", {"kwargs": {"speed": 1}}, "no argument 'speed'"),
    ("alloc", {"kwargs": {"need_size": 1}}, "given twice"),
    ("alloc", {"result": 5}, "result is an integer"),
    ("alloc", {"result": {"runs": [1]}}, "not pairs"),
    ("alloc", {"result": {"runs": [1, 0]}}, "length 0"),
    ("alloc", {"result": {"runs": [1, 2**40]}}, "the limit for one call"),
    ("alloc", {"result": {"runs": [1, "2"]}}, "not an integer"),
    ("alloc", {"result": {"ids": []}}, "result is an object, not ids"),
    ("alloc", {"seq": 9}, "seq 9 where 0 must come"),
    ("alloc", {"state": 3}, "field 'state' is not an object"),
    ("alloc", {"state": {"gpu": {}}}, "not that of a pool"),
    ("alloc", {"state": {"full": {"holes": 1.5}}}, "state figure 'holes' is a fraction"),
    ("alloc", {"state": {"full": {"d": "zz"}}}, "not a digest in hexadecimal"),
    ("alloc", {"state": {"full": {"d": "00ff"}}}, "2 bytes, not 12"),
    ("flush_opportunistic", {"event_queries": 3}, "'event_queries' is not a list"),
    ("flush_opportunistic", {"event_queries": [[1, 2]]}, "pair of event number and answer"),
    ("flush_opportunistic", {"result": "2"}, "result is text"),
    ("make_room", {"kwargs": {"side": "left", "min_bytes": 1}}, "neither 'low' nor 'high'"),
    ("set_inflight_forward", {"args": [7, None]}, "neither null nor"),
    ("set_latest_forward_done_event", {"args": [{"event": "7"}]}, "event is text"),
    ("move_gate", {"args": [1]}, "open is neither true nor false"),
    ("compact_holes", {"depth": 900}, "depth 900"),
    ("free", {"args": [None]}, "free_index is null"),
]


@pytest.mark.parametrize(("op", "change", "message"), BAD_LINES)
def test_a_bad_line_is_named_with_its_number(
    tmp_path: Path, op: str, change: dict[str, Any], message: str
) -> None:
    log = write_log(tmp_path / "log.jsonl", changed(change, op))
    number = 2 + next(index for index, line in enumerate(CALLS) if line["op"] == op)
    with pytest.raises(LogError) as caught:
        convert_log(log, tmp_path / "t.msgpack.zst")
    assert message in str(caught.value)
    assert f"{log}, line {number}: " in str(caught.value)
    assert caught.value.exit_code == 65 and caught.value.line == number
    assert [entry.name for entry in tmp_path.iterdir()] == ["log.jsonl"]


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("", None, "the log is empty"),
        ("\n\n", None, "the log is empty"),
        ("{bad json}\n{}\n", 1, "not a line of JSON"),
        ('{"header": {"pools": [{}]', None, "only line is cut"),
        ("[1, 2]\n{}\n", 1, "a JSON list where an object must be"),
        ("[" * 100_000 + "\n{}\n", 1, "not a line of JSON"),
        ('{"op": "alloc"}\n{}\n', 1, "neither a"),
        ('{"header": 3}\n{}\n', 1, "field 'header' is not an object"),
        ('{"header": {}}\n{}\n', 1, "field 'pools' is missing"),
        ('{"header": {"pools": []}}\n{}\n', 1, "no pools"),
        ('{"header": {"pools": [3]}}\n{}\n', 1, "not an object"),
        ('{"header": {"pools": [{"name": "x"}]}}\n{}\n', 1, "is missing"),
    ],
)
def test_a_log_that_is_none_is_refused(tmp_path: Path, text: str, line: int | None, message: str) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text(text)
    with pytest.raises(LogError) as caught:
        convert_log(log, tmp_path / "t.msgpack.zst")
    assert message in str(caught.value) and caught.value.exit_code == 65
    if line is not None:
        assert caught.value.line == line


def test_a_bad_line_in_the_middle_is_not_taken_for_a_cut(tmp_path: Path, log: Path) -> None:
    lines = log.read_text().splitlines()
    lines[4] = lines[4][:30]
    log.write_text("\n".join(lines) + "\n")
    with pytest.raises(LogError, match=r"line 5: not a line of JSON"):
        convert_log(log, tmp_path / "t.msgpack.zst")


@pytest.mark.parametrize(
    ("tail", "message"),
    [
        ('{"footer": {"events": 3}}\n', "the footer counts 3 calls, the log has 26"),
        ('{"footer": 3}\n', "the footer has no count"),
        ('{"footer": {"events": 26}}\n{"op": "clear", "pool": "full", "t_us": 1}\n', "after the footer"),
    ],
)
def test_a_footer_that_does_not_fit_is_refused(tmp_path: Path, tail: str, message: str) -> None:
    log = write_log(tmp_path / "log.jsonl", CALLS, footer=False)
    with open(log, "a") as file:
        file.write(tail)
    with pytest.raises(LogError, match=message):
        convert_log(log, tmp_path / "t.msgpack.zst")


def test_a_log_without_a_call_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LogError, match="no call"):
        convert_log(write_log(tmp_path / "log.jsonl", []), tmp_path / "t.msgpack.zst")


@pytest.mark.parametrize(
    "field", [{"kind": "gpu"}, {"page_size": 0}, {"grow_direction": "left"}, {"layout": 3}]
)
def test_a_header_that_no_trace_can_have_is_refused(tmp_path: Path, field: dict[str, Any]) -> None:
    header = json.loads(json.dumps(HEADER))
    header["pools"][0].update(field)
    with pytest.raises(LogError, match=r"line 1: ") as caught:
        convert_log(write_log(tmp_path / "log.jsonl", CALLS, header=header), tmp_path / "t.msgpack.zst")
    assert caught.value.exit_code == 65


def test_a_missing_log_is_not_found(tmp_path: Path) -> None:
    for path in (tmp_path / "none.jsonl", tmp_path):
        with pytest.raises(LogNotFound) as caught:
            convert_log(path, tmp_path / "t.msgpack.zst")
        assert caught.value.exit_code == 66


def test_a_damaged_compressed_log_is_refused(tmp_path: Path, log: Path) -> None:
    packed = tmp_path / "log.jsonl.zst"
    data = bytearray(zstandard.ZstdCompressor(write_checksum=True).compress(log.read_bytes()))
    data[len(data) // 2] ^= 0x55
    packed.write_bytes(data)
    with pytest.raises(LogError, match=r"compressed log is damaged|line"):
        convert_log(packed, tmp_path / "t.msgpack.zst")


def test_an_output_that_exists_is_kept(tmp_path: Path, log: Path) -> None:
    output = tmp_path / "t.msgpack.zst"
    output.write_bytes(b"precious")
    with pytest.raises(OutputExists, match="--force"):
        convert_log(log, output)
    assert output.read_bytes() == b"precious"
    convert_log(log, output, force=True)
    assert len(only_chunk(output)) == len(CALLS)


def test_a_failed_conversion_keeps_what_was_there(tmp_path: Path) -> None:
    output = tmp_path / "t.msgpack.zst"
    output.write_bytes(b"precious")
    log = write_log(tmp_path / "log.jsonl", changed({"op": "malloc"}, "clear"))
    with pytest.raises(LogError):
        convert_log(log, output, force=True)
    assert output.read_bytes() == b"precious"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["log.jsonl", "t.msgpack.zst"]


def test_the_engine_can_be_demanded(tmp_path: Path, log: Path) -> None:
    convert_log(log, tmp_path / "t.msgpack.zst", engine="sglang")
    with pytest.raises(LogError, match="a log of sglang, not of vllm"):
        convert_log(log, tmp_path / "u.msgpack.zst", engine="vllm")


def test_header_fields_can_be_set(tmp_path: Path, log: Path) -> None:
    overrides = {
        "model": "Kimi-K3",
        "engine_version": "0.5",
        "settings.move_cap": "64",
        "provenance.hardware": "a CPU",
        "pools.swa.layout": '{"head_num": 2, "dtype": "float32"}',
        "pools.full.note": "not json",
        "weather": [1, 2],
    }
    convert_log(log, tmp_path / "t.msgpack.zst", overrides=overrides)
    with TraceReader(tmp_path / "t.msgpack.zst") as reader:
        header = reader.header
    assert (header.model, header.engine_version, header.settings["move_cap"]) == ("Kimi-K3", "0.5", 64)
    assert header.provenance.hardware == "a CPU" and header.extra == {"weather": [1, 2]}
    assert header.pools[1].layout == {"head_num": 2, "dtype": "float32"}
    assert header.pools[0].extra == {"note": "not json"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("pools.gpu.layout", {}),
        ("nowhere.at.all", 1),
        ("format", [2, 0]),
        ("pools", []),
        ("pools.full.page_size", 0),
        ("settings", "text"),
        ("model.name", "x"),
    ],
)
def test_header_fields_that_cannot_be_set_are_a_usage_error(
    tmp_path: Path, log: Path, name: str, value: Any
) -> None:
    with pytest.raises(BadOverride, match="--set") as caught:
        convert_log(log, tmp_path / "t.msgpack.zst", overrides={name: value})
    assert caught.value.exit_code == 2
    assert [entry.name for entry in tmp_path.iterdir()] == ["log.jsonl"]
