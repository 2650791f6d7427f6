"""Placement is part of the contract: on every recorded call our classes answer, and end up, exactly as SGLang 0.5.23's did."""

from __future__ import annotations

from pathlib import Path

import pytest

from allocator import STRATEGIES
from tests.golden.transcripts import DATA, Player, lines

pytestmark = pytest.mark.cpu

TRANSCRIPTS = sorted(DATA.glob("*.jsonl.zst"))


def test_all_transcripts_are_here() -> None:
    assert len(TRANSCRIPTS) == 56


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("path", TRANSCRIPTS, ids=lambda path: path.name.removesuffix(".jsonl.zst"))
def test_every_line_equals_sglang(path: Path, strategy: str) -> None:
    transcript = lines(path)
    header = next(transcript)["header"]
    player = Player(header, strategy)
    for pool in header["pools"]:
        made = player.allocators[pool["name"]]
        assert (made.entry_bytes, made.num_pages, made.min_page_index) == tuple(
            pool[key] for key in ("entry_bytes", "num_pages", "min_page_index")
        )
    for number, line in enumerate(transcript, start=2):
        result = player.call(line)
        assert result == line.get("result"), f"{path.name} line {number}: {line['op']}"
        for name, expected in line["state"].items():
            assert player.state(name, expected) == expected, (
                f"{path.name} line {number}: {line['op']}, state of {name}"
            )
