"""The queue, the writer thread, and every way in which it can fail."""

from __future__ import annotations

import errno
import os
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recorder.session import ITEM_BYTES, NOT_EVENTS, Item, Session, Sink, set_clock
from recorder.settings import Settings
from recorder.staging import LOST, Staging
from recorder.trace import EventKind, Header, PoolHeader, Provenance, TraceReader
from tests.recorder.recordings import settings

pytestmark = pytest.mark.cpu

SECONDS = 20.0


def header() -> Header:
    pool = PoolHeader("full", "tokens", "down", 16, 64, 1, 4096, 1, 4096)
    return Header("test", [pool], Provenance("synthetic", how="a unit test"))


def write_free(sink: Sink, item: Item) -> None:
    _, time_us, ids = item
    sink.writer.append(EventKind.FREE, pool=0, time_us=time_us, list0=sink.ids(ids))


class Writer:
    """A session to `folder`, its failures, and a writer thread that can be held up."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        self.settings: Settings = settings(folder, **changes)
        self.staging = Staging(self.settings.memory // 4, lambda waits: self.settings.on_overflow == "block")
        self.failures: list[str] = []
        self.path = folder / "run.msgpack.zst"
        self.held = False
        self.session = Session(self.path, header(), self.settings, self.staging, self.failures.append)

    def free(self, *ids: int) -> bool:
        """One event; False where it was dropped."""
        if not self.session.has_room():
            return False
        self.session.put((self.write, self.session.clock(), list(ids)))
        return True

    def write(self, sink: Sink, item: Item) -> None:
        while self.held:
            time.sleep(0.001)
        write_free(sink, item)


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)


def firsts(path: Path) -> list[int]:
    """First id of each event."""
    with TraceReader(path) as reader:
        return [
            int(chunk.list0.values[chunk.list0.offsets[index]])
            for chunk in reader.chunks()
            for index in range(len(chunk))
        ]


def test_events_come_out_in_the_order_they_went_in(tmp_path: Path) -> None:
    writer = Writer(tmp_path, chunk_events=100)
    for number in range(1000):
        assert writer.free(number)
    writer.session.close()
    assert firsts(writer.path) == list(range(1000))
    assert writer.failures == []
    with TraceReader(writer.path) as reader:
        list(reader.items())
        assert reader.footer is not None and reader.footer.reason == ""


def test_a_full_queue_drops_counts_and_says_where(tmp_path: Path) -> None:
    writer = Writer(tmp_path, memory=4 << 20)
    writer.held = True
    taken = 0
    while writer.free(taken):
        taken += 1
    lost = 1 + sum(not writer.free(-1) for _ in range(9))
    assert 0 < taken <= (4 << 20) // 4 // ITEM_BYTES + 1
    writer.held = False
    wait_for(lambda: not writer.session.queue)
    assert writer.free(10_000)
    writer.session.close()
    with TraceReader(writer.path) as reader:
        drops = [
            (chunk.first_seq + int(at), int(count)) for chunk in reader.chunks() for at, count in chunk.drops
        ]
    assert drops == [(taken, lost)]
    assert firsts(writer.path) == [*range(taken), 10_000]
    assert writer.session.dropped == lost == 10


def test_ids_that_were_lost_drop_their_event_in_its_place(tmp_path: Path) -> None:
    import torch

    writer = Writer(tmp_path)
    writer.free(1)
    large = writer.staging.capture(torch.arange(1000))
    writer.session.put((write_four, writer.session.clock(), (large, LOST)))
    writer.free(2)
    writer.session.close()
    assert firsts(writer.path) == [1, 2]
    with TraceReader(writer.path) as reader:
        (chunk,) = list(reader.chunks())
    assert chunk.drops.tolist() == [[1, 1]]
    assert writer.session.dropped == 1
    assert writer.staging.held_bytes == 0


def test_a_state_that_was_lost_is_no_lost_event(tmp_path: Path) -> None:
    NOT_EVENTS.add(write_four)
    try:
        writer = Writer(tmp_path)
        writer.free(1)
        writer.session.put((write_four, writer.session.clock(), (LOST,)))
        writer.free(2)
        writer.session.close()
    finally:
        NOT_EVENTS.discard(write_four)
    assert writer.session.dropped == 0
    with TraceReader(writer.path) as reader:
        assert [len(chunk.drops) for chunk in reader.chunks()] == [0]


def test_drops_at_the_end_are_counted_too(tmp_path: Path) -> None:
    writer = Writer(tmp_path, memory=4 << 20)
    writer.held = True
    while writer.free(1):
        pass
    writer.held = False
    writer.session.close()
    with TraceReader(writer.path) as reader:
        last = list(reader.chunks())[-1]
        assert reader.footer is not None and reader.footer.dropped == 1
        # Behind the last event of the chunk.
        assert last.drops.tolist() == [[len(last), 1]] or reader.footer.dropped_at_end == 1


def test_blocking_loses_nothing(tmp_path: Path) -> None:
    writer = Writer(tmp_path, memory=4 << 20, on_overflow="block")
    count = 3 * writer.session.most_items
    for number in range(count):
        assert writer.free(number)
    writer.session.close()
    assert writer.session.dropped == 0
    assert firsts(writer.path) == list(range(count))


def test_blocking_ends_with_the_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recorder.session.TraceWriter.append", fails(RuntimeError("a fault")))
    writer = Writer(tmp_path, memory=4 << 20, on_overflow="block")
    end = time.monotonic() + SECONDS
    while writer.free(1):
        assert time.monotonic() < end
    assert writer.failures


def test_memory_stays_below_the_setting(tmp_path: Path) -> None:
    """The queue full of the largest small events, and of large ones, with a writer that does not move."""
    memory = 8 << 20
    writer = Writer(tmp_path, memory=memory)
    writer.held = True
    large = np.arange(100_000)
    import torch

    tensors = [torch.arange(64), torch.from_numpy(large)]
    tracemalloc.start()
    try:
        dropped = 0
        for number in range(20_000):
            captured = tuple(writer.staging.capture(tensors[number % 50 == 0]) for _ in range(4))
            dropped += any(ids is LOST for ids in captured)
            if writer.session.has_room():
                writer.session.put((write_four, writer.session.clock(), captured))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        writer.session.queue.clear()
        writer.held = False
    writer.session.close()
    assert dropped > 0
    assert writer.session.dropped > 0
    assert peak < memory


def test_memory_of_the_writer_stays_below_the_setting(tmp_path: Path) -> None:
    """Large events as fast as they go, with everything the writer thread needs to encode them."""
    import torch

    memory = 64 << 20
    writer = Writer(tmp_path, memory=memory, on_overflow="block")
    generator = torch.Generator().manual_seed(1)
    tensors = [torch.randint(0, 1 << 40, (size,), generator=generator) for size in (50_000, 64, 3000)]
    tracemalloc.start()
    try:
        written = 0
        while written < 600:
            captured = tuple(writer.staging.capture(tensors[written % 3]) for _ in range(4))
            assert not any(ids is LOST for ids in captured)
            if writer.session.has_room():
                writer.session.put((write_four, writer.session.clock(), captured))
                written += 1
        writer.session.close(seconds=SECONDS)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(firsts(writer.path)) == 4 * 600
    assert peak < memory


def write_four(sink: Sink, item: Item) -> None:
    for ids in item[2]:
        write_free(sink, (None, item[1], ids))


def test_a_chunk_is_on_disk_after_its_time(tmp_path: Path) -> None:
    writer = Writer(tmp_path, chunk_ms=30)
    writer.free(1)
    partial = tmp_path / "run.msgpack.zst.partial"
    wait_for(lambda: partial.exists() and readable(partial) == [1])
    writer.free(2)
    wait_for(lambda: readable(partial) == [1, 2])
    writer.session.close()


def readable(path: Path) -> list[int]:
    """What a reader finds in a file that is being written."""
    try:
        return firsts(path)
    except Exception:
        return []


def test_time_is_monotonic_or_the_drivers_own(tmp_path: Path) -> None:
    simulated = iter(range(100, 200, 50))
    set_clock(lambda: next(simulated))
    try:
        writer = Writer(tmp_path)
        writer.free(1)
        writer.free(2)
        writer.session.close()
    finally:
        set_clock(None)
    with TraceReader(writer.path) as reader:
        assert [time_us for chunk in reader.chunks() for time_us in chunk.time_us.tolist()] == [100, 150]


def fails(problem: BaseException) -> Callable[..., None]:
    def method(*args: Any, **kwargs: Any) -> None:
        raise problem

    return method


def test_a_writer_that_dies_ends_the_recording_and_keeps_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = Writer(tmp_path, chunk_events=10)
    for number in range(25):
        writer.free(number)
    wait_for(lambda: not writer.session.queue)
    writer.session.put((fails(RuntimeError("a fault of ours")), 0))
    wait_for(lambda: bool(writer.failures))
    assert not writer.session.active
    writer.session.close()
    assert "a fault of ours" in writer.failures[0]
    assert firsts(writer.path) == list(range(25))
    with TraceReader(writer.path) as reader:
        list(reader.items())
        assert reader.footer is not None and "a fault of ours" in reader.footer.reason


@pytest.mark.parametrize("after", [0, 500, 3000])
def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    room = [after]
    real_write = os.write

    def write(file: int, data: Any) -> int:
        fits = min(len(data), room[0])
        room[0] -= fits
        if fits == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real_write(file, bytes(data[:fits]))

    monkeypatch.setattr("recorder.trace.writer.os.write", write)
    writer = Writer(tmp_path, chunk_events=10)
    for number in range(2000):
        writer.free(number)
    wait_for(lambda: bool(writer.failures))
    writer.session.close()
    assert "No space left" in writer.failures[0]
    monkeypatch.undo()
    partial = tmp_path / "run.msgpack.zst.partial"
    if after == 3000:
        found = firsts(partial)
        assert found == list(range(len(found)))
        assert len(found) >= 10


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("no folder")
    writer = Writer(tmp_path / "file")
    wait_for(lambda: bool(writer.failures))
    writer.session.close()
    assert str(tmp_path / "file") in writer.failures[0]
    assert (tmp_path / "file").read_text() == "no folder"


def test_a_file_that_is_there_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "run.msgpack.zst").write_bytes(b"precious")
    writer = Writer(tmp_path)
    wait_for(lambda: bool(writer.failures))
    writer.session.close()
    assert "already there" in writer.failures[0]
    assert (tmp_path / "run.msgpack.zst").read_bytes() == b"precious"


def test_no_event_leaves_no_file(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    writer.session.close()
    assert list(tmp_path.iterdir()) == []
    assert writer.failures == []


def test_copies_that_never_arrive_do_not_hold_up_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recorder.session.CLOSE_SECONDS", 0.2)
    monkeypatch.setattr("recorder.session.arrived", lambda item: item[2] != [7])
    writer = Writer(tmp_path)
    writer.free(1)
    writer.free(7)
    writer.session.close(seconds=SECONDS)
    assert firsts(writer.path) == [1]
    with TraceReader(writer.path) as reader:
        list(reader.items())
        assert reader.footer is not None
        assert reader.footer.reason == "1 events were still on the device when recording ended"
