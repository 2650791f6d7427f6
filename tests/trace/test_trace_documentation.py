"""docs/trace-format.md and the code say the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from recorder.trace import SCHEMA, EventKind, MarkCode, limits

pytestmark = pytest.mark.cpu

TEXT = (Path(__file__).parents[2] / "docs" / "trace-format.md").read_text()


def rows() -> dict[int, list[str]]:
    """Cells of the event table by event number."""
    found: dict[int, list[str]] = {}
    for line in TEXT.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| ") and len(cells) == 8 and cells[0][0].isdigit():
            for number in cells[0].split(","):
                found[int(number)] = cells
    return found


def test_every_event_kind_has_its_row() -> None:
    table = rows()
    assert set(table) == {int(kind) for kind in EventKind}
    for kind, schema in SCHEMA.items():
        _, names, *meanings = table[int(kind)]
        assert kind.name.lower() in names.split(", ")
        assert meanings[:5] == [
            schema.value,
            "see below" if kind == EventKind.MARK else schema.value2,
            schema.list0,
            schema.list1,
            schema.list2,
        ]
        assert meanings[5] == schema.result


def test_every_mark_code_is_there() -> None:
    words = " ".join(TEXT.split())
    for code in MarkCode:
        assert f"{code.value} {code.name.lower()} (" in words


def test_the_limits_are_there() -> None:
    for number in (
        limits.MAX_FRAME_OBJECTS,
        limits.MAX_CHUNK_EVENTS,
        limits.MAX_CHUNK_IDS,
        limits.MAX_EVENT_IDS,
        limits.MAX_POOLS,
        limits.MAX_STATE_FIGURES,
        limits.DEFAULT_CHUNK_EVENTS,
    ):
        assert f"{number:,}" in TEXT
    assert f"{limits.MAX_FRAME_BYTES >> 20} MiB" in TEXT
    assert f"format {limits.FORMAT_MAJOR}.{limits.FORMAT_MINOR}" in TEXT.splitlines()[0]
