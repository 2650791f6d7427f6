"""Files of released format versions stay readable for ever: every decoded value of one file per version is pinned.

`data/format_1_0.msgpack.zst` was written once, when format 1.0 was made, and is never written again; the values it
must give are beside it. It holds every event kind, every kind of result and every column and list form of the format.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from trace_tools import frame_maps, read_everything

from recorder.trace import UNSET, EventKind, ResultKind, StateRow, TraceReader

pytestmark = pytest.mark.cpu

DATA = Path(__file__).parent / "data"
GOLDEN = DATA / "format_1_0.msgpack.zst"


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DATA / "format_1_0.json").read_text())
    return found


def test_every_event_of_format_1_0_is_as_it_was(expected: dict[str, Any]) -> None:
    events, states, reader = read_everything(GOLDEN)
    for event in events:
        event["kind"] = EventKind(event["kind"]).name
        event["queries"] = [list(query) for query in event["queries"]]
        if event["result"] is UNSET:
            event["result"] = {"not_recorded": True}
    assert events == expected["events"]
    assert {event["kind"] for event in events} == set(EventKind.__members__)
    assert states == [StateRow(after, figures(pools)) for after, pools in expected["states"]]
    assert reader.ended == "clean" and reader.footer is not None
    assert dataclasses.asdict(reader.footer) == expected["footer"]


def figures(pools: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {
        pool: {
            name: bytes.fromhex(value) if isinstance(value, str) else value for name, value in state.items()
        }
        for pool, state in pools.items()
    }


def test_the_header_of_format_1_0_is_as_it_was(expected: dict[str, Any]) -> None:
    with TraceReader(GOLDEN) as reader:
        header = dataclasses.asdict(reader.header)
    header["format"] = list(header["format"])
    assert header == expected["header"]


def test_chunks_drops_and_seek_of_format_1_0_are_as_they_were(expected: dict[str, Any]) -> None:
    with TraceReader(GOLDEN) as reader:
        chunks = list(reader.chunks())
        assert [len(chunk) for chunk in chunks] == expected["chunks"]
        drops = [[chunk.first_seq + at, lost] for chunk in chunks for at, lost in chunk.drops.tolist()]
        assert drops == expected["drops"]
        reader.seek(299)
        assert next(reader.chunks()).first_seq == 150
        assert {kind for chunk in chunks for kind in chunk.result_kind.tolist()} == set(ResultKind)


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
