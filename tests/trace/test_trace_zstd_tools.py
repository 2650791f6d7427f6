"""Other people's tools read the file: the zstd command, and a plain msgpack stream reader."""

from __future__ import annotations

import io
import shutil
import subprocess
from pathlib import Path

import msgpack
import pytest
import zstandard
from trace_tools import frame_maps, serving_events, write_events

pytestmark = pytest.mark.cpu

ZSTD = shutil.which("zstd")
needs_zstd = pytest.mark.skipif(ZSTD is None, reason="the zstd command is not installed")


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write_events(tmp_path / "t.msgpack.zst", serving_events(200), chunk_events=60, states_every=20)


@needs_zstd
@pytest.mark.parametrize("level", [1, 3, 19])
def test_the_zstd_command_accepts_the_file(tmp_path: Path, level: int) -> None:
    path = write_events(tmp_path / "t.msgpack.zst", serving_events(200), chunk_events=60, level=level)
    done = subprocess.run([str(ZSTD), "-t", str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@needs_zstd
def test_the_zstd_command_and_a_msgpack_stream_reader_see_every_frame(trace: Path) -> None:
    done = subprocess.run([str(ZSTD), "-dc", str(trace)], capture_output=True, check=True)
    maps = list(msgpack.Unpacker(io.BytesIO(done.stdout), strict_map_key=False))
    assert maps == frame_maps(trace)
    assert [body["kind"] for body in maps] == ["header", *["chunk", "state"] * 4, "footer"]
    assert maps[0]["signature"] == "kvtape" and maps[1]["events"] == 60


@needs_zstd
def test_the_zstd_command_sees_a_flipped_bit(trace: Path) -> None:
    data = bytearray(trace.read_bytes())
    data[len(data) // 2] ^= 1
    trace.write_bytes(data)
    done = subprocess.run([str(ZSTD), "-t", str(trace)], capture_output=True, check=False)
    assert done.returncode != 0


def test_every_frame_has_a_checksum_and_says_its_size(trace: Path) -> None:
    data = trace.read_bytes()
    with open(trace, "rb") as file:
        from recorder.trace.frames import read_frame

        offset, frames = 0, 0
        while (frame := read_frame(file, offset)) is not None:
            if not frame.skippable:
                parameters = zstandard.get_frame_parameters(data[frame.offset :])
                assert parameters.has_checksum and parameters.content_size == frame.content_size
                frames += 1
            offset = frame.end
    assert frames == 10 and offset == len(data)
