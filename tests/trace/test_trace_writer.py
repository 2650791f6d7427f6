"""What the writer refuses, and what it leaves behind when something goes wrong."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trace_tools import (
    complete,
    drain,
    read_everything,
    serving_events,
    small_header,
    some_state,
    write_events,
)

from recorder.trace import (
    EmptyTrace,
    EventKind,
    ImpossibleEvent,
    OutputExists,
    OutputRefused,
    StateRow,
    TooManyIds,
    TraceReader,
    TraceWriteFailed,
    TraceWriter,
)
from recorder.trace.limits import MAX_EVENT_IDS

pytestmark = pytest.mark.cpu


def test_the_name_appears_only_after_a_clean_close(tmp_path: Path) -> None:
    path = tmp_path / "t.msgpack.zst"
    with TraceWriter(path, small_header()) as writer:
        writer.append(EventKind.CLEAR, time_us=0)
        assert [entry.name for entry in tmp_path.iterdir()] == ["t.msgpack.zst.partial"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["t.msgpack.zst"]


def test_an_exception_leaves_the_partial(tmp_path: Path) -> None:
    path = tmp_path / "t.msgpack.zst"
    with pytest.raises(KeyError), TraceWriter(path, small_header(), chunk_events=4) as writer:
        for event in serving_events(10):
            writer.append(**event)
        raise KeyError
    assert not path.exists()
    assert drain(tmp_path / "t.msgpack.zst.partial")[0] == 8


@pytest.mark.parametrize("existing", ["t.msgpack.zst", "t.msgpack.zst.partial"])
def test_nothing_is_overwritten_without_force(tmp_path: Path, existing: str) -> None:
    (tmp_path / existing).write_bytes(b"precious")
    with pytest.raises(OutputExists, match="--force") as caught:
        TraceWriter(tmp_path / "t.msgpack.zst", small_header())
    assert caught.value.exit_code == 2 and (tmp_path / existing).read_bytes() == b"precious"
    write_events(tmp_path / "t.msgpack.zst", serving_events(5), force=True)
    assert drain(tmp_path / "t.msgpack.zst")[0] == 5


def test_closing_without_an_event_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    with (
        pytest.raises(EmptyTrace, match="at least one event"),
        TraceWriter(tmp_path / "t.zst", small_header()),
    ):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(OutputRefused, match="cannot be written") as caught:
        TraceWriter(tmp_path / "no" / "t.msgpack.zst", small_header())
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("room", [0, 1, 700, 1500, 2500])
def test_a_full_disk_is_a_typed_error_and_leaves_a_readable_prefix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    left = [room]
    real_write = os.write

    def write(file: int, data: Any) -> int:
        if left[0] <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = real_write(file, bytes(data)[: left[0]])
        left[0] -= written
        return written

    monkeypatch.setattr(os, "write", write)
    written = serving_events(200)
    with pytest.raises(
        TraceWriteFailed, match=r"No space left.*first \d+ events stay readable|cannot be written"
    ):
        write_events(tmp_path / "t.msgpack.zst", written, chunk_events=20)
    monkeypatch.undo()
    partial = tmp_path / "t.msgpack.zst.partial"
    if partial.stat().st_size == 0 or room < 1000:
        with pytest.raises(EmptyTrace):
            drain(partial)
        return
    found, _, reader = read_everything(partial)
    assert found == [complete(event) for event in written[: len(found)]] and 0 < len(found) < 200
    assert reader.ended == "partial"


def test_a_writer_that_failed_or_closed_refuses_more(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "t.msgpack.zst", small_header())
    writer.append(EventKind.CLEAR, time_us=0)
    writer.close()
    writer.close()
    for call in (
        lambda: writer.append(EventKind.CLEAR, time_us=0),
        lambda: writer.dropped(1),
        lambda: writer.state(some_state(0)),
        writer.flush,
    ):
        with pytest.raises(TraceWriteFailed, match="closed"):
            call()


LIMITED = """
    import resource, signal, sys
    sys.path.insert(0, {tests!r})
    from pathlib import Path
    from trace_tools import serving_events, write_events
    from recorder.trace import TraceWriteFailed
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
    try:
        write_events(Path({path!r}), serving_events(500), chunk_events=20)
    except TraceWriteFailed as problem:
        print(problem)
"""

KILLED = """
    import os, signal, sys
    sys.path.insert(0, {tests!r})
    from pathlib import Path
    from trace_tools import serving_events, small_header
    from recorder.trace import TraceWriter
    writer = TraceWriter(Path({path!r}), small_header(), chunk_events=20)
    for number, event in enumerate(serving_events(100)):
        writer.append(**event)
        if number == 70:
            os.kill(os.getpid(), signal.SIGKILL)
"""


def run_code(code: str, path: Path) -> subprocess.CompletedProcess[str]:
    here = Path(__file__).parent
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code).format(tests=str(here), path=str(path))],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(here.parents[1])},
        check=False,
    )


def test_a_file_size_limit_of_the_system_leaves_a_readable_prefix(tmp_path: Path) -> None:
    assert resource.RLIMIT_FSIZE is not None and signal.SIGXFSZ
    done = run_code(LIMITED, tmp_path / "t.msgpack.zst")
    assert "File too large" in done.stdout, done.stderr
    events, reader = drain(tmp_path / "t.msgpack.zst.partial")
    assert events > 0 and events % 20 == 0 and reader.ended == "partial"
    assert f"its first {events} events stay readable" in done.stdout


def test_a_kill_loses_only_the_open_chunk(tmp_path: Path) -> None:
    done = run_code(KILLED, tmp_path / "t.msgpack.zst")
    assert done.returncode == -signal.SIGKILL
    found, _, reader = read_everything(tmp_path / "t.msgpack.zst.partial")
    assert found == [complete(event) for event in serving_events(100)[:60]]
    assert reader.ended == "partial"


@pytest.mark.parametrize(
    ("event", "message"),
    [
        ({"kind": EventKind.FREE, "pool": 2, "list0": []}, "pool 2"),
        ({"kind": EventKind.FREE, "pool": -1, "list0": []}, "pool -1"),
        ({"kind": EventKind.FREE, "pool": 0}, "not all the lists"),
        ({"kind": EventKind.FREE, "pool": 0, "list0": [], "list2": []}, "a list that its kind does not have"),
        (
            {"kind": EventKind.FREE, "pool": 0, "list0": [], "result": 3},
            "a result that its kind does not have",
        ),
        ({"kind": EventKind.FLUSH, "pool": 0, "value": 2}, "value 2"),
        ({"kind": EventKind.FLUSH, "pool": 0, "value": 0, "result": [1]}, "a result that its kind"),
        ({"kind": EventKind.ALLOC, "pool": 0}, "no value"),
        ({"kind": EventKind.CLEAR, "depth": 256}, "depth 256"),
        ({"kind": EventKind.CLEAR, "request": 2**63}, "64 bits"),
        ({"kind": EventKind.CLEAR, "time_us": 2**70}, "64 bits"),
    ],
)
def test_events_outside_the_schema_are_refused_and_not_written(
    tmp_path: Path, event: dict[str, Any], message: str
) -> None:
    with TraceWriter(tmp_path / "t.msgpack.zst", small_header()) as writer:
        writer.append(EventKind.CLEAR, time_us=0)
        with pytest.raises(ImpossibleEvent, match=message) as caught:
            writer.append(**{"time_us": 1, **event})
        assert caught.value.exit_code == 65
        writer.append(EventKind.CLEAR, time_us=2)
    assert [event["time_us"] for event in read_everything(tmp_path / "t.msgpack.zst")[0]] == [0, 2]


def test_an_unknown_kind_cannot_be_written(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "t.msgpack.zst", small_header()) as writer:
        writer.append(EventKind.CLEAR, time_us=0)
        with pytest.raises(ValueError, match="99"):
            writer.append(99, time_us=0)


@pytest.mark.parametrize(
    "ids",
    [
        [1.5],
        [[1, 2]],
        ["a"],
        [2**63],
        [2**70],
        np.zeros((2, 2), dtype=np.int64),
        np.array([2**63], dtype=np.uint64),
    ],
)
def test_ids_that_are_no_integers_of_64_bits_are_refused(tmp_path: Path, ids: Any) -> None:
    with TraceWriter(tmp_path / "t.msgpack.zst", small_header()) as writer:
        writer.append(EventKind.CLEAR, time_us=0)
        with pytest.raises(ValueError, match="integer"):
            writer.append(EventKind.FREE, pool=0, time_us=0, list0=ids)


def test_more_ids_than_a_chunk_holds_are_refused(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "t.msgpack.zst", small_header()) as writer:
        writer.append(EventKind.CLEAR, time_us=0)
        with pytest.raises(TooManyIds, match=str(MAX_EVENT_IDS)):
            writer.append(
                EventKind.FREE, pool=0, time_us=0, list0=np.zeros(MAX_EVENT_IDS + 1, dtype=np.int64)
            )


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (StateRow(1, {}), "after event 1"),
        (StateRow(-2, {}), "after event -2"),
        (StateRow(0, {"pool0": {"x": b"short"}}), "12 bytes"),
        (StateRow(0, {"pool0": {"x": 2**63}}), "64 bits"),
        (StateRow(0, {"pool0": {"x": True}}), "neither"),
    ],
)
def test_states_that_cannot_be_are_refused(tmp_path: Path, state: StateRow, message: str) -> None:
    with TraceWriter(tmp_path / "t.msgpack.zst", small_header()) as writer:
        writer.append(EventKind.CLEAR, time_us=0)
        with pytest.raises(ValueError, match=message):
            writer.state(state)
        writer.state(StateRow(0, {"pool0": {"x": None, "y": -5}}))
    assert read_everything(tmp_path / "t.msgpack.zst")[1] == [StateRow(0, {"pool0": {"y": -5}})]


def test_a_state_before_the_first_event_can_be_kept(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "t.msgpack.zst", small_header()) as writer:
        writer.state(StateRow(-1, {"pool0": {"holes": 3}}))
        writer.append(EventKind.CLEAR, time_us=0)
        with pytest.raises(ValueError, match="later event"):
            writer.state(StateRow(0, {}))
            writer.state(StateRow(-1, {}))
    assert read_everything(tmp_path / "t.msgpack.zst")[1][0] == StateRow(-1, {"pool0": {"holes": 3}})


@pytest.mark.parametrize(
    ("field", "value"), [("format", (1, 0)), ("pools", "full"), ("engine", 3), ("total_bytes", -1)]
)
def test_a_header_that_could_not_be_read_is_not_written(tmp_path: Path, field: str, value: Any) -> None:
    header = small_header()
    setattr(header, field, value)
    with pytest.raises((ValueError, TypeError, AttributeError)):
        TraceWriter(tmp_path / "t.msgpack.zst", header)
    assert list(tmp_path.iterdir()) == []


def test_the_provenance_must_be_a_known_kind(tmp_path: Path) -> None:
    header = small_header()
    header.provenance.kind = "found in the street"
    with pytest.raises(ValueError, match="recorded, driven, converted"):
        TraceWriter(tmp_path / "t.msgpack.zst", header)


def test_a_flush_makes_everything_so_far_survive(tmp_path: Path) -> None:
    path = tmp_path / "t.msgpack.zst"
    writer = TraceWriter(path, small_header())
    for event in serving_events(7):
        writer.append(**event)
    writer.flush()
    with TraceReader(tmp_path / "t.msgpack.zst.partial") as reader:
        assert sum(len(chunk) for chunk in reader.chunks()) == 7
    writer.close()
    assert drain(path)[0] == 7
