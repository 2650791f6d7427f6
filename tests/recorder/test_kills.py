"""kill -9 at random moments: every chunk that was written is read back, the loss is named, and the prefix replays."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from recorder.trace import TraceError, TraceReader, finish_partial
from replayer.replay import ReplayOptions, replay
from tests.recorder.kill_victims import EVENTS, SOURCE
from tests.recorder.recordings import events_of

pytestmark = [pytest.mark.cpu, pytest.mark.timeout(600)]

KILLS = 200
REPOSITORY = Path(__file__).parents[2]


def test_two_hundred_kills(tmp_path: Path) -> None:
    moments = random.Random(20261129)
    expected = events_of(SOURCE, until=EVENTS)
    kept: list[int] = []
    replayed: set[int] = set()
    with subprocess.Popen(
        [sys.executable, "-m", "tests.recorder.kill_victims"],
        cwd=REPOSITORY, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as victims:  # fmt: skip
        assert victims.stdin is not None and victims.stdout is not None
        assert victims.stdout.readline() == "ready\n"
        for number in range(KILLS):
            folder = tmp_path / str(number)
            folder.mkdir()
            victims.stdin.write(f"{folder}\n")
            victims.stdin.flush()
            pid = int(victims.stdout.readline())
            if number == 0:
                seconds = seconds_to_write(folder / "run.msgpack.zst.partial")
            else:
                time.sleep(moments.uniform(0.0, 1.2 * seconds))
            os.kill(pid, signal.SIGKILL)
            assert victims.stdout.readline() == "gone\n"
            kept.append(check(folder, expected, replayed))
        victims.stdin.close()
    # The moments were spread over the whole recording, from before the first chunk to after the last.
    assert len(set(kept)) > 40
    assert min(kept) < 200
    assert max(kept) > EVENTS // 2


def seconds_to_write(partial: Path) -> float:
    """How long a victim takes here and now for all of its events: until its file has not grown for half a second."""
    start = grown = time.monotonic()
    size = -1
    while time.monotonic() - grown < 0.5:
        found = partial.stat().st_size if partial.exists() else -1
        if found != size or found <= 0:
            size, grown = found, time.monotonic()
        assert grown - start < 60.0
        time.sleep(0.002)
    return grown - start


def check(folder: Path, expected: list[tuple[object, ...]], replayed: set[int]) -> int:
    """Number of events kept; what was kept is a prefix, closes, and, now and then, replays with every check."""
    partial = folder / "run.msgpack.zst.partial"
    if not partial.exists() or partial.stat().st_size == 0:
        return 0
    whole_chunks = chunks_on_disk(partial)
    try:
        found = events_of(partial)
    except TraceError:
        assert whole_chunks == 0
        return 0
    assert found == expected[: len(found)]
    path = finish_partial(partial, "killed by the test")
    with TraceReader(path) as reader:
        chunks = list(reader.chunks())
        assert reader.footer is not None
        assert (reader.footer.events, reader.footer.reason) == (len(found), "killed by the test")
    assert len(chunks) == whole_chunks
    # A replay costs more than a kill: one for each thousand events reached, and the shortest prefixes.
    if len(found) // 300 not in replayed:
        replayed.add(len(found) // 300)
        outcome = replay(ReplayOptions(path, ledger=False))
        assert outcome.failure is None
        assert outcome.reason == "killed by the test"
    return len(found)


def chunks_on_disk(partial: Path) -> int:
    """Chunks whose bytes are all there, counted with nothing but a zstd decompressor."""
    import msgpack
    import zstandard

    data = partial.read_bytes()
    count = 0
    while data:
        decoder = zstandard.ZstdDecompressor().decompressobj()
        try:
            content = decoder.decompress(data)
        except zstandard.ZstdError:
            break
        if not decoder.eof:
            break
        count += msgpack.unpackb(content, strict_map_key=False)["kind"] == "chunk"
        data = decoder.unused_data
    return count
