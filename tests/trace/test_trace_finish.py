"""`finish_partial`: what a killed writer leaves becomes a trace; what is damaged or empty stays as it is."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from trace_tools import (
    complete,
    drain,
    encode_frames,
    frame_bytes,
    frame_maps,
    read_everything,
    serving_events,
    small_header,
    some_state,
    write_events,
)

from recorder.trace import (
    DamagedTrace,
    EmptyTrace,
    NewerTrace,
    NotATrace,
    OutputExists,
    OutputRefused,
    TraceError,
    TraceNotFound,
    TraceReader,
    TraceWriteFailed,
    TraceWriter,
    finish_partial,
)

pytestmark = pytest.mark.cpu

NAME = "t.msgpack.zst"
WHY = "the engine was killed"
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A closed trace of 40 events in chunks of 9, with states and a drop."""
    path = tmp_path_factory.mktemp("whole") / NAME
    with TraceWriter(path, small_header(), chunk_events=9) as writer:
        for number, event in enumerate(serving_events(40)):
            if number == 12:
                writer.dropped(5)
            writer.append(**event)
            if number % 10 == 0:
                writer.state(some_state(number))
    return path


@pytest.fixture(scope="module")
def written() -> list[dict[str, Any]]:
    return [complete(event) for event in serving_events(40)]


def left_behind(folder: Path, data: bytes) -> Path:
    partial = folder / f"{NAME}.partial"
    partial.write_bytes(data)
    return partial


def test_a_file_cut_at_any_byte_is_closed_or_left_alone(
    whole: Path, written: list[dict[str, Any]], tmp_path: Path
) -> None:
    data, frames = whole.read_bytes(), frame_bytes(whole)
    first_chunk_ends = len(frames[0]) + len(frames[1])
    footer_ends = sum(map(len, frames[:-1]))
    kept = set()
    for size in range(len(data) + 1):
        partial = left_behind(tmp_path, data[:size])
        if size < first_chunk_ends:
            with pytest.raises((EmptyTrace, DamagedTrace)):
                finish_partial(partial, WHY)
            assert partial.read_bytes() == data[:size]
            assert list(tmp_path.iterdir()) == [partial]
            continue
        final = finish_partial(partial, WHY)
        assert list(tmp_path.iterdir()) == [final] and final.name == NAME
        events, _, reader = read_everything(final)
        assert events == written[: len(events)] and len(events) in (9, 18, 27, 36, 40)
        assert reader.ended == "clean" and reader.recovered is None and reader.footer is not None
        assert reader.footer.reason == ("" if size >= footer_ends else WHY)
        assert reader.footer.dropped == (5 if len(events) > 9 else 0)
        with TraceReader(final) as sought:
            sought.seek(len(events) - 1)
            assert next(sought.chunks()).first_seq == (len(events) - 1) // 9 * 9
        kept.add(len(events))
        final.unlink()
    assert kept == {9, 18, 27, 36, 40}


def test_what_is_written_after_a_cut_is_what_the_writer_would_have_written(
    whole: Path, tmp_path: Path
) -> None:
    frames = frame_bytes(whole)
    for lost in (1, 2):
        final = finish_partial(left_behind(tmp_path, b"".join(frames[:-lost])), "")
        assert final.read_bytes() == whole.read_bytes()
        final.unlink()


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 10_000), st.integers(0, 3000), st.booleans())
def test_a_torn_frame_and_zero_bytes_are_cut_off(
    whole: Path,
    written: list[dict[str, Any]],
    tmp_path_factory: pytest.TempPathFactory,
    size: int,
    zeros: int,
    whole_frames: bool,
) -> None:
    data, frames = whole.read_bytes(), frame_bytes(whole)
    bounds = [sum(map(len, frames[:number])) for number in range(2, len(frames))]
    size = bounds[size % len(bounds)] if whole_frames else bounds[0] + size % (len(data) - bounds[0])
    folder = tmp_path_factory.mktemp("zeros")
    partial = left_behind(folder, data[:size] + bytes(zeros))
    try:
        final = finish_partial(partial, WHY)
    except DamagedTrace:
        # Zeros inside a frame make a frame of them whose checksum is wrong: that is no end that is known.
        assert zeros and not whole_frames
        assert partial.read_bytes() == data[:size] + bytes(zeros)
        return
    events, _, reader = read_everything(final)
    assert events == written[: len(events)] and reader.ended == "clean"
    assert len(events) >= 9


def test_a_file_that_was_closed_and_not_renamed_is_renamed(whole: Path, tmp_path: Path) -> None:
    final = finish_partial(left_behind(tmp_path, whole.read_bytes()), WHY)
    assert final.read_bytes() == whole.read_bytes()


def test_a_damaged_file_is_refused_and_left_as_it_is(whole: Path, tmp_path: Path) -> None:
    frames = frame_bytes(whole)
    for number in (1, 2, 3):
        damaged = bytearray(b"".join(frames[:-2]))
        damaged[sum(map(len, frames[:number])) + len(frames[number]) // 2] ^= 0x10
        partial = left_behind(tmp_path, bytes(damaged))
        with pytest.raises(DamagedTrace) as caught:
            finish_partial(partial, WHY)
        assert caught.value.path == partial and partial.read_bytes() == bytes(damaged)


def test_no_flipped_bit_is_taken_for_a_cut(
    whole: Path, written: list[dict[str, Any]], tmp_path: Path
) -> None:
    frames = frame_bytes(whole)
    data = b"".join(frames[:-2])
    for place in range(len(frames[0]), len(data), 7):
        flipped = bytearray(data)
        flipped[place] ^= 1 << place % 8
        partial = left_behind(tmp_path, bytes(flipped))
        try:
            final = finish_partial(partial, WHY)
        except TraceError:
            assert partial.read_bytes() == bytes(flipped)
            continue
        events = read_everything(final)[0]
        # Only the last frame can look as if the file ended inside it.
        assert events == written[: len(events)] and len(events) >= 36
        final.unlink()


def test_a_header_alone_is_no_trace(tmp_path: Path) -> None:
    TraceWriter(tmp_path / NAME, small_header()).abort()
    partial = tmp_path / f"{NAME}.partial"
    before = partial.read_bytes()
    with pytest.raises(EmptyTrace, match="no event"):
        finish_partial(partial, WHY)
    assert partial.read_bytes() == before and list(tmp_path.iterdir()) == [partial]


@pytest.mark.parametrize(
    ("data", "error"), [(b"", EmptyTrace), (b"hello" * 9, NotATrace), (bytes(99), NotATrace)]
)
def test_what_is_no_trace_is_refused(tmp_path: Path, data: bytes, error: type[TraceError]) -> None:
    partial = left_behind(tmp_path, data)
    with pytest.raises(error):
        finish_partial(partial, WHY)
    assert partial.read_bytes() == data


def test_only_a_partial_is_closed(whole: Path, tmp_path: Path) -> None:
    with pytest.raises(OutputRefused, match="left behind"):
        finish_partial(whole, WHY)
    with pytest.raises(TraceNotFound):
        finish_partial(tmp_path / f"{NAME}.partial", WHY)


def test_nothing_is_overwritten_unless_asked_for(whole: Path, tmp_path: Path) -> None:
    partial = left_behind(tmp_path, b"".join(frame_bytes(whole)[:-2]))
    (tmp_path / NAME).write_bytes(b"precious")
    with pytest.raises(OutputExists):
        finish_partial(partial, WHY)
    assert (tmp_path / NAME).read_bytes() == b"precious" and partial.exists()
    assert drain(finish_partial(partial, WHY, force=True))[0] == 40


def test_a_newer_minor_version_is_left_to_those_who_know_it(whole: Path, tmp_path: Path) -> None:
    maps = frame_maps(whole)
    maps[0]["format"] = [1, 99]
    partial = left_behind(tmp_path, encode_frames(maps[:-1]))
    with pytest.raises(NewerTrace, match=r"1\.99"):
        finish_partial(partial, WHY)


def test_a_partial_of_format_1_0_is_closed(tmp_path: Path) -> None:
    golden = frame_bytes(HERE / "data" / "format_1_0.msgpack.zst")
    final = finish_partial(left_behind(tmp_path, b"".join(golden[:-2])), WHY)
    _, reader = drain(final)
    assert reader.footer is not None and (reader.footer.events, reader.footer.dropped) == (370, 510)
    assert (reader.header.format, reader.footer.reason) == ((1, 0), WHY)


@pytest.mark.parametrize("room", [0, 1, 100])
def test_a_full_disk_leaves_the_sound_frames(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    frames = frame_bytes(whole)
    good = b"".join(frames[:-2])
    partial = left_behind(tmp_path, good + frames[-2][:20])
    left, real_write = [room], os.write

    def write(file: int, data: Any) -> int:
        if left[0] <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        count = real_write(file, bytes(data)[: left[0]])
        left[0] -= count
        return count

    monkeypatch.setattr(os, "write", write)
    with pytest.raises(TraceWriteFailed, match=r"No space left.*40 events stay readable"):
        finish_partial(partial, WHY)
    monkeypatch.undo()
    assert partial.read_bytes() == good
    assert drain(finish_partial(partial, WHY))[0] == 40


def test_closing_that_is_killed_can_be_done_again(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every prefix of what it adds, which is what a kill leaves: the steps are truncate, append, rename."""
    frames = frame_bytes(whole)
    good = b"".join(frames[:-2])
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
    partial = left_behind(tmp_path, good + frames[-2][:9])
    with pytest.raises(KeyboardInterrupt):
        finish_partial(partial, WHY)
    added = partial.read_bytes()
    monkeypatch.undo()
    assert added.startswith(good) and len(added) > len(good)
    for size in range(len(good), len(added) + 1):
        final = finish_partial(left_behind(tmp_path, added[:size]), WHY)
        assert final.read_bytes() == added, size
        final.unlink()


WRITES = """
    import sys, time
    sys.path.insert(0, {tests!r})
    from pathlib import Path
    from trace_tools import serving_events, small_header
    from recorder.trace import TraceWriter
    writer = TraceWriter(Path({path!r}), small_header(), chunk_events=20)
    for event in serving_events(100):
        writer.append(**event)
    print("written", flush=True)
    sys.stdin.readline()
"""


def start_writer(path: Path) -> subprocess.Popen[str]:
    code = textwrap.dedent(WRITES).format(tests=str(HERE), path=str(path))
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(HERE.parents[1])},
    )  # fmt: skip
    assert process.stdout is not None and process.stdout.readline() == "written\n"
    return process


def test_a_living_writer_is_left_alone_and_a_killed_one_is_closed(tmp_path: Path) -> None:
    path = tmp_path / NAME
    partial = tmp_path / f"{NAME}.partial"
    with start_writer(path) as process:
        try:
            before = partial.read_bytes()
            with pytest.raises(OutputRefused, match="still writing"):
                finish_partial(partial, WHY)
            with pytest.raises(OutputRefused, match="another process"):
                TraceWriter(path, small_header(), force=True)
            assert partial.read_bytes() == before and before
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
    events, _, reader = read_everything(finish_partial(partial, WHY))
    assert events == [complete(event) for event in serving_events(100)[:80]]
    assert reader.footer is not None and reader.footer.reason == WHY


def test_a_survey_counts_what_there_is(tmp_path: Path) -> None:
    path = write_events(tmp_path / NAME, serving_events(50), chunk_events=20, states_every=7)
    with TraceReader(path) as reader:
        found = reader.survey()
        assert (found.events, found.states, found.first_seq) == (50, 8, [0, 20, 40])
        assert found.ended == "clean" and found.footer is not None and found.end <= path.stat().st_size
