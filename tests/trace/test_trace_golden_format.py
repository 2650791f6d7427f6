"""Files of released format versions stay readable for ever: every decoded value of one file per version is pinned.

`data/format_1_0.msgpack.zst` was written once, when format 1.0 was made, and is never written again; the values it
must give are beside it. It holds every event kind, every kind of result and every column and list form of the format.
`data/format_1_1.msgpack.zst` and `data/format_1_2.msgpack.zst` in the same way hold what those versions added.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from trace_tools import frame_maps, read_everything

from recorder.trace import SCHEMA, UNSET, EventKind, MarkCode, ResultKind, StateRow, TraceReader

pytestmark = pytest.mark.cpu

DATA = Path(__file__).parent / "data"
GOLDEN = DATA / "format_1_0.msgpack.zst"
VERSIONS = ("1_0", "1_1", "1_2")
LAST_KIND = {"1_0": EventKind.MARK, "1_1": EventKind.MARK, "1_2": EventKind.HOST_FREE}


def golden(version: str) -> tuple[Path, dict[str, Any]]:
    """(file of a version, the values it must give)."""
    found: dict[str, Any] = json.loads((DATA / f"format_{version}.json").read_text())
    return DATA / f"format_{version}.msgpack.zst", found


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    return golden("1_0")[1]


@pytest.mark.parametrize("version", VERSIONS)
def test_every_event_of_a_released_format_is_as_it_was(version: str) -> None:
    path, expected = golden(version)
    events, states, reader = read_everything(path)
    for event in events:
        event["kind"] = EventKind(event["kind"]).name
        event["queries"] = [list(query) for query in event["queries"]]
        if event["result"] is UNSET:
            event["result"] = {"not_recorded": True}
    assert events == expected["events"]
    assert {event["kind"] for event in events} == {
        kind.name for kind in EventKind if kind <= LAST_KIND[version]
    }
    assert states == [StateRow(after, figures(pools)) for after, pools in expected["states"]]
    assert reader.ended == "clean" and reader.footer is not None
    # A key that a version did not have yet reads as "as before".
    assert dataclasses.asdict(reader.footer) == {"reason": "", **expected["footer"]}


def figures(pools: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {
        pool: {
            name: bytes.fromhex(value) if isinstance(value, str) else value for name, value in state.items()
        }
        for pool, state in pools.items()
    }


@pytest.mark.parametrize("version", VERSIONS)
def test_the_header_of_a_released_format_is_as_it_was(version: str) -> None:
    path, expected = golden(version)
    with TraceReader(path) as reader:
        header = dataclasses.asdict(reader.header)
    header["format"] = list(header["format"])
    assert header == expected["header"]


@pytest.mark.parametrize("version", VERSIONS)
def test_chunks_drops_and_names_of_a_released_format_are_as_they_were(version: str) -> None:
    path, expected = golden(version)
    with TraceReader(path) as reader:
        chunks = list(reader.chunks())
    assert [len(chunk) for chunk in chunks] == expected["chunks"]
    drops = [[chunk.first_seq + at, lost] for chunk in chunks for at, lost in chunk.drops.tolist()]
    assert drops == expected["drops"] and drops
    names = [[[number, name] for number, name in chunk.request_ids.items()] for chunk in chunks]
    assert names == expected.get("request_ids", [[] for _ in chunks])
    assert {kind for chunk in chunks for kind in chunk.result_kind.tolist()} == set(ResultKind)


def test_seek_in_format_1_0_goes_where_it_went() -> None:
    with TraceReader(GOLDEN) as reader:
        reader.seek(299)
        assert next(reader.chunks()).first_seq == 150


def test_the_golden_file_of_format_1_1_holds_what_was_added() -> None:
    path, expected = golden("1_1")
    assert expected["footer"]["reason"] and sum(map(len, expected["request_ids"])) == 3
    marks = [event for event in expected["events"] if event["kind"] == "MARK"]
    assert MarkCode.TRANSFER in {event["value"] for event in marks}
    names = {name for _, pools in expected["states"] for state in pools.values() for name in state}
    assert {"virtual_to_physical_mix64", "free_virtual_ids_mix64", "virtual_to_physical_blake2b"} <= names
    assert frame_maps(path)[0]["format"] == [1, 1]


def test_the_golden_file_of_format_1_2_holds_what_was_added() -> None:
    path, expected = golden("1_2")
    assert frame_maps(path)[0]["format"] == [1, 2] and expected["header"]["level"] == "composite"
    events = expected["events"]
    on_composite = {event["kind"] for event in events if event["pool"] == -1}
    assert {kind.name for kind, schema in SCHEMA.items() if schema.composite} <= on_composite
    assert any(event["kind"] == "LEASE_BEGIN" and event["list1"] for event in events)


def test_the_golden_file_holds_every_form_of_the_format(expected: dict[str, Any]) -> None:
    forms: set[str] = set()
    for body in frame_maps(GOLDEN)[1:]:
        collect_forms(body, forms)
    assert sorted(forms) == expected["forms"]
    for form in (
        "const",
        "scaled",
        "runs",
        "paged",
        "own",
        "same",
        "value",
        "copy",
        "repeat",
        "derived",
        "present",
    ):
        assert form in forms
    for width in (1, 2, 4, 8):
        assert {f"plain{width}", f"delta{width}"} <= forms


def collect_forms(value: Any, forms: set[str]) -> None:
    """Names of the column, value and list forms inside a frame's map."""
    if isinstance(value, dict):
        forms.update({"present"} & value.keys())
        for inner in value.values():
            collect_forms(inner, forms)
    elif isinstance(value, list):
        if value and isinstance(value[0], str):
            width = {"plain": 2, "delta": 3}.get(value[0])
            forms.add(value[0] if width is None else f"{value[0]}{value[width]}")
        for inner in value:
            collect_forms(inner, forms)
