"""The strategy `device` replays every trace of the corpus without a synchronisation, whether numbers are there at once or come late."""

from __future__ import annotations

from pathlib import Path

import pytest

from replayer.replay import ReplayOptions, replay
from replayer.targets import TargetOptions
from tests import corpus

pytestmark = [pytest.mark.cpu, pytest.mark.timeout(900)]

DELAYED = "tests.allocator.delayed:SlowEnd,tests.allocator.delayed:SlowFloat"


@pytest.mark.parametrize("path", corpus.trace_files(), ids=corpus.name_of)
@pytest.mark.parametrize("allocator", ["kvtape", DELAYED], ids=["numbers at once", "numbers late"])
def test_the_device_strategy_never_synchronises(path: Path, allocator: str) -> None:
    outcome = replay(
        ReplayOptions(
            path,
            TargetOptions(allocator=allocator, strategy="device"),
            until=10_000,
            flush_every=corpus.flush_every(path),
            drain=allocator == "kvtape",  # which asks for everything that is exact
        )
    )
    assert outcome.verdict == "held", outcome.failure
    assert outcome.ledger_disagreements == 0
    assert any(record.moves for record in outcome.flushes), "a trace without a move proves nothing"
    waiting = {
        name: counts
        for name, counts in outcome.sync_calls.items()
        if counts["device_to_host"] or counts["host_to_device"] or counts["waits"]
    }
    # Counted apart: an alloc that bounds alone would refuse waits for the numbers of the flushes before it.
    capacity = sum(counts["device_to_host"] for name, counts in waiting.items() if name.startswith("alloc"))
    assert not [name for name in waiting if not name.startswith("alloc")], waiting
    assert capacity * 100 <= len(outcome.flushes)
    if allocator == "kvtape":
        assert not waiting
