"""vLLM block-pool logs become traces: lifetimes of blocks, marks, and impossible logs named by line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from recorder.imports.convert import convert_log
from recorder.imports.errors import LogError
from recorder.trace import EventKind, Header, MarkCode, TraceReader

pytestmark = pytest.mark.cpu

INIT = {
    "kind": "pool_init",
    "t": 1_000_000,
    "num_blocks": 8,
    "hash_block_size": 4,
    "null_block": 0,
    "req": None,
}


def line(kind: str, t: int = 5_000_999, req: str | None = None, **fields: Any) -> dict[str, Any]:
    return {"kind": kind, "t": t, "req": req, **fields}


def write_log(path: Path, *lines: dict[str, Any], init: dict[str, Any] = INIT) -> Path:
    path.write_text("".join(json.dumps(item) + "\n" for item in (init, *lines)))
    return path


def convert(tmp_path: Path, *lines: dict[str, Any], **fields: Any) -> tuple[Header, list[tuple[Any, ...]]]:
    """(header, events as (kind, pool, value, value2, ids, pages, result, request))."""
    output = tmp_path / "t.msgpack.zst"
    convert_log(write_log(tmp_path / "log.jsonl", *lines, **fields), output, force=True)
    found = []
    with TraceReader(output) as reader:
        for chunk in reader.chunks():
            for index in range(len(chunk)):
                lists = [
                    None if ids is None else ids.tolist()
                    for ids in (chunk.list0.get(index), chunk.list1.get(index), chunk.result.get(index))
                ]
                found.append(
                    (
                        EventKind(int(chunk.kind[index])).name,
                        int(chunk.pool[index]),
                        int(chunk.value[index]),
                        int(chunk.value2[index]),
                        *lists,
                        int(chunk.request[index]),
                    )
                )
    return reader.header, found


def freed(*pages: int, request: int = -1) -> tuple[Any, ...]:
    return ("FREE", 0, -1, -1, [page * 4 for page in pages], list(pages), None, request)


def allocated(*pages: int, request: int = -1) -> tuple[Any, ...]:
    tokens = [page * 4 + offset for page in pages for offset in range(4)]
    return ("ALLOC", 0, 4 * len(pages), -1, None, None, tokens, request)


def test_the_pool_is_one_of_tokens_without_the_null_block(tmp_path: Path) -> None:
    header, _ = convert(tmp_path, line("alloc", ids=[1]))
    (pool,) = header.pools
    assert (pool.kind, pool.grow_direction, pool.page_size, pool.num_pages) == ("tokens", "down", 4, 8)
    assert (pool.min_page_index, pool.num_virtual_ids, pool.is_id_owner) == (1, 8, True)
    assert header.settings == {"placement": "free"} and header.engine == "vllm"
    assert "nominal" in header.extra["entry_bytes"] and header.total_bytes == 8 * 4 * pool.entry_bytes
    assert header.provenance.kind == "recorded" and header.provenance.extra["log_ended"] == "clean"


def test_bytes_of_a_token_are_taken_from_the_log_when_it_has_them(tmp_path: Path) -> None:
    header, _ = convert(tmp_path, line("alloc", ids=[1]), init={**INIT, "entry_bytes": 77})
    assert header.pools[0].entry_bytes == 77 and header.extra == {}


def test_a_block_released_without_a_hash_is_freed_at_once(tmp_path: Path) -> None:
    _, events = convert(
        tmp_path,
        line("alloc", ids=[5, 2, 3], req="b"),
        line("free", ids=[3, 2, 0, 5], released=[3, 5], cached=[], req="a"),
    )
    assert events == [allocated(5, 2, 3, request=0), freed(3, 5, request=1)]


def test_a_cached_block_lives_until_it_is_evicted(tmp_path: Path) -> None:
    _, events = convert(
        tmp_path,
        line("alloc", ids=[1, 2, 3]),
        line("cache_full", ids=[1, 2], hashes=["a", "b"]),
        line("free", ids=[3, 2, 1], released=[3, 2, 1], cached=[2, 1]),
        line("touch", ids=[1], revived=[1]),
        line("evict", ids=[2]),
        line("alloc", ids=[3, 2]),
    )
    assert events == [allocated(1, 2, 3), freed(3), freed(2), allocated(3, 2)]


def test_an_eviction_of_a_block_in_use_frees_nothing(tmp_path: Path) -> None:
    _, events = convert(
        tmp_path,
        line("alloc", ids=[1]),
        line("evict", ids=[1]),
        line("free", ids=[1], released=[1], cached=[]),
    )
    assert events == [allocated(1), freed(1)]


def test_a_shared_block_is_freed_by_its_last_holder(tmp_path: Path) -> None:
    _, events = convert(
        tmp_path,
        line("alloc", ids=[1, 2]),
        line("touch", ids=[1], revived=[]),
        line("free", ids=[2, 1], released=[2], cached=[]),
        line("free", ids=[1], released=[1], cached=[]),
    )
    assert events == [allocated(1, 2), freed(2), freed(1)]


def test_a_reset_evicts_every_cached_block(tmp_path: Path) -> None:
    _, events = convert(
        tmp_path,
        line("alloc", ids=[1, 2, 3]),
        line("free", ids=[1, 2, 3], released=[1, 2, 3], cached=[2, 3]),
        line("reset", ok=False),
        line("reset", ok=True),
        line("alloc", ids=[3]),
    )
    reset = ("MARK", -1, MarkCode.CACHE_RESET, 2, None, None, None, -1)
    assert events == [allocated(1, 2, 3), freed(1), reset, freed(2, 3), allocated(3)]


def test_request_events_become_marks_and_ids_small_numbers(tmp_path: Path) -> None:
    _, events = convert(
        tmp_path,
        line("arrive", req="7-ab", prompt=100, max_tokens=5),
        line("arrive", req="9-cd", prompt=50, max_tokens=5),
        line("alloc", req="9-cd", ids=[1]),
        line("alloc_slots", req="9-cd", n=1, computed=0, hit=0, status="WAITING", new=[1]),
        line("alloc_fail", req="7-ab", n=100, computed=0, status="WAITING"),
        line("step", n=50, reqs=1),
        line("preempt", req="9-cd", ntok=51, computed=50),
        line("req_free", req="9-cd", status="RUNNING", ntok=51),
        line("req_free", req="7-ab", status="FINISHED_STOPPED", ntok=100),
    )
    marks = [
        (MarkCode(value).name, figure, request)
        for kind, _, value, figure, *_, request in events
        if kind == "MARK"
    ]
    assert marks == [
        ("REQUEST_ARRIVE", 100, 0),
        ("REQUEST_ARRIVE", 50, 1),
        ("ALLOC_FAIL", 100, 0),
        ("STEP", 1, -1),
        ("PREEMPT", 50, 1),
        ("REQUEST_FINISH", 100, 0),
    ]


def test_times_are_in_microseconds(tmp_path: Path) -> None:
    convert(tmp_path, line("alloc", ids=[1], t=5_000_999))
    with TraceReader(tmp_path / "t.msgpack.zst") as reader:
        assert next(reader.chunks()).time_us.tolist() == [5000]


@pytest.mark.parametrize(
    ("lines", "number", "message"),
    [
        ([line("alloc", ids=[1]), line("alloc", ids=[1])], 3, "hands out block 1, which is in use"),
        ([line("alloc", ids=[8])], 2, "block 8 in a pool of 8"),
        ([line("alloc", ids=[2, 2])], 2, "twice in 'ids'"),
        ([line("alloc", ids="all")], 2, "field 'ids' is text, not a list"),
        ([line("alloc", ids=[1.5])], 2, "an element of field 'ids' is a fraction"),
        ([line("alloc")], 2, "field 'ids' is missing"),
        ([line("free", ids=[1], released=[1], cached=[])], 2, "releases block 1, which nobody holds"),
        ([line("alloc", ids=[1]), line("free", ids=[1], released=[], cached=[1])], 3, "was not released"),
        ([line("touch", ids=[1], revived=[1])], 2, "revives block 1, which is not in the cache"),
        ([line("evict", ids=[1])], 2, "neither in the cache nor held"),
        ([line("reset", ok=1)], 2, "field 'ok' is an integer"),
        ([line("step", n=1)], 2, "field 'reqs' is missing"),
        ([line("dance")], 2, "unknown kind 'dance'"),
        ([line("arrive", req=4, prompt=1)], 2, "field 'req' is an integer"),
        ([{"kind": "step", "reqs": 1}], 2, "field 't' is missing"),
        ([line("cache_full")], None, "no call"),
    ],
)
def test_an_impossible_log_is_named_with_its_line(
    tmp_path: Path, lines: list[dict[str, Any]], number: int | None, message: str
) -> None:
    log = write_log(tmp_path / "log.jsonl", *lines)
    with pytest.raises(LogError) as caught:
        convert_log(log, tmp_path / "t.msgpack.zst")
    assert message in str(caught.value) and caught.value.line == number
    assert [entry.name for entry in tmp_path.iterdir()] == ["log.jsonl"]


@pytest.mark.parametrize(
    "init", [{**INIT, "num_blocks": 1}, {**INIT, "hash_block_size": 0}, {**INIT, "num_blocks": "8"}]
)
def test_a_pool_that_cannot_be_is_refused(tmp_path: Path, init: dict[str, Any]) -> None:
    with pytest.raises(LogError, match="line 1: "):
        convert(tmp_path, line("alloc", ids=[1]), init=init)


def test_a_log_cut_in_its_last_line_gives_the_rest(tmp_path: Path) -> None:
    log = write_log(tmp_path / "log.jsonl", line("alloc", ids=[1]), line("alloc", ids=[2]))
    log.write_bytes(log.read_bytes()[:-5])
    done = convert_log(log, tmp_path / "t.msgpack.zst")
    assert (done.events, done.log_ended) == (1, "cut")
