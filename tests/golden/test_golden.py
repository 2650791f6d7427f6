"""Placement is part of the contract: on every recorded call our classes answer, and end up, exactly as SGLang 0.5.23's did."""

from __future__ import annotations

from pathlib import Path

import pytest

from allocator import STRATEGIES
from allocator.device_release import DeviceReleasingBand
from tests.allocator.delayed import NeverEnd, NeverFloat, SlowEnd, SlowFloat
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


@pytest.mark.parametrize("path", TRANSCRIPTS, ids=lambda path: path.name.removesuffix(".jsonl.zst"))
@pytest.mark.parametrize(
    ("classes", "look_every"),
    [((NeverEnd, NeverFloat), 13), ((NeverEnd, NeverFloat), 1_000_000), ((SlowEnd, SlowFloat), 5)],
    ids=["never, looked at", "never", "slow"],
)
def test_numbers_that_come_late_change_no_placement(
    path: Path, classes: tuple[type, type], look_every: int
) -> None:
    """As on a GPU that is busy: between two looks, which settle everything, the allocators work on what they know."""
    transcript = lines(path)
    player = Player(next(transcript)["header"], "device", *classes)
    for number, line in enumerate(transcript, start=2):
        result = player.call(line)
        looks = number % look_every == 0
        if looks or line["op"].startswith("alloc"):
            assert result == line.get("result"), f"{path.name} line {number}: {line['op']}"
        if not looks:
            continue
        for made in player.allocators.values():
            if isinstance(made, DeviceReleasingBand):
                made._settle()  # sizes of neighbours are exact only after that
        for name, expected in line["state"].items():
            assert player.state(name, expected) == expected, (
                f"{path.name} line {number}: {line['op']}, state of {name}"
            )
    for name, expected in line["state"].items():
        for made in player.allocators.values():
            assert isinstance(made, DeviceReleasingBand)
            made._settle()
        assert player.state(name, expected) == expected, f"{path.name}, the end: state of {name}"
