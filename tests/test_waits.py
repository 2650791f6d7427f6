"""At most one wait in a hundred flushes of any trace, where numbers come as a GPU's would (`tests.allocator.arriving`); with one stream for
allocator and forwards of any but `ONE_STREAM`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import corpus, waits_needed
from tests.waits import main, measure

pytestmark = [pytest.mark.cpu, pytest.mark.timeout(300)]

#: Of `kimi_gb200`, whose 242,108 events take half a minute; `python -m tests.waits` replays all of them.
FIRST_EVENTS = 20_000
#: More than one in a hundred: flushes under a running forward, on the stream of that forward, and a pool in which every page counts. The
#: engine that the calls are of works on a stream of its own.
ONE_STREAM = {"kimi_gb200": 2.5}
LIMITS: dict[str, dict[str, float]] = {
    "own stream": {},
    "one stream": ONE_STREAM,
}


@pytest.mark.parametrize("path", corpus.trace_files(), ids=corpus.name_of)
@pytest.mark.parametrize("model", LIMITS)
def test_an_alloc_waits_after_one_flush_in_a_hundred_at_most(path: Path, model: str) -> None:
    found = measure(path, model, until=FIRST_EVENTS)
    assert found.flushes
    assert found.per_hundred <= LIMITS[model].get(corpus.name_of(path), 1.0), found
    assert all(name.startswith("alloc") for name in found.calls), found


def test_numbers_that_never_come_are_waited_for() -> None:
    """What the test above counts can be counted."""
    found = measure(corpus.TRACES / f"sglang_tiny_swa_p16{corpus.SUFFIX}", "never")
    assert found.total > 0


def test_with_one_stream_there_are_waits_that_no_allocator_could_do_without() -> None:
    """States of the device are found that fit what the host knew and differ in the answer: for some waits, not for all."""
    _, waits, needed = waits_needed.count("kimi_gb200", FIRST_EVENTS)
    assert 0 < needed < waits


def test_a_trace_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["no_such_trace"]) == 2
    printed = capsys.readouterr()
    assert not printed.out and "no_such_trace; there are kimi_gb200" in printed.err
