"""`kvtape info`: the figures, the same in text and JSON, and memory that does not grow with the trace."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from trace_tools import frame_bytes, serving_events, small_header, write_events

from recorder.commands import info
from recorder.trace import EventKind, MarkCode, TraceNotFound, TraceWriter

pytestmark = pytest.mark.cpu


def run_info(*arguments: Path | str) -> int:
    parser = argparse.ArgumentParser()
    info.add_arguments(parser)
    return info.run(parser.parse_args([str(argument) for argument in arguments]))


def report(capsys: pytest.CaptureFixture[str], *arguments: Path | str) -> list[dict[str, Any]]:
    assert run_info(*arguments, "--json") == 0
    traces: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["traces"]
    return traces


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "t.msgpack.zst"
    header = small_header(model="tiny", device="cpu", settings={"move_cap": 9}, extra={"note": "[x]"})
    with TraceWriter(path, header, chunk_events=4) as writer:
        writer.append(EventKind.ALLOC, pool=0, time_us=100, value=32, result=list(range(160, 192)))
        writer.append(EventKind.ALLOC, pool=0, time_us=110, value=32, result=None)
        writer.append(
            EventKind.ALLOC_EXTEND,
            pool=0,
            time_us=120,
            value=3,
            list0=[0],
            list1=[3],
            list2=[-1],
            result=[48, 49, 50],
        )
        writer.append(EventKind.FREE, pool=0, time_us=130, list0=[160, 176], list1=[10, 11])
        writer.append(EventKind.FREE_SEGMENT, pool=1, time_us=140, value=0, list0=list(range(16)))
        writer.append(EventKind.FLUSH, pool=0, time_us=150, value=1, result=5)
        writer.append(EventKind.FLUSH, pool=0, time_us=150, value=0, result=2, depth=1)
        writer.append(EventKind.FLUSH, pool=1, time_us=150, value=0)
        writer.dropped(3)
        writer.append(EventKind.MARK, time_us=2_000_100, value=MarkCode.PREEMPT, value2=4)
        writer.append(EventKind.MARK, time_us=2_000_100, value=777)
        writer.dropped(1)
    return path


def test_the_figures_add_up(capsys: pytest.CaptureFixture[str], trace: Path) -> None:
    (found,) = report(capsys, trace)
    assert (found["events"], found["chunks"], found["dropped"], found["nested"]) == (10, 3, 4, 1)
    assert (found["first_us"], found["last_us"], found["span_us"]) == (100, 2_000_100, 2_000_000)
    assert found["kinds"]["ALLOC"] == {"pool0": 2} and found["kinds"]["MARK"] == {"-": 2}
    assert found["kinds"]["FLUSH"] == {"pool0": 2, "pool1": 1}
    assert found["marks"] == {"preempt": 1, "777": 1}
    assert found["ended"] == "clean" and found["recovery"] is None
    assert found["bytes"] == trace.stat().st_size
    first, second = found["pools"]
    expected = {
        "tokens_allocated": 35,
        "allocs_refused": 1,
        "ids_freed": 2,
        "pages_freed": 2,
        "flushes_urgent": 1,
        "flushes_other": 1,
        "pages_moved": 7,
    }
    assert {name: first[name] for name in expected} == expected
    assert (second["ids_freed"], second["flushes_other"], second["pages_moved"]) == (16, 1, 0)
    assert first["name"] == "pool0" and first["page_size"] == 16
    assert found["provenance"]["kind"] == "synthetic" and found["settings"] == {"move_cap": 9}


def test_the_text_has_the_same_figures(
    capsys: pytest.CaptureFixture[str], trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (figures,) = report(capsys, trace)
    monkeypatch.setenv("COLUMNS", "200")
    assert run_info(trace) == 0
    text = capsys.readouterr().out
    words = set(text.replace(",", " ").split())
    for name in ("uuid", "events", "bytes", "model", "dropped", "first_us", "last_us", "ended"):
        assert str(figures[name]) in words or f"{figures[name]:,}" in text, name
    for pool in figures["pools"]:
        for name in ("tokens_allocated", "ids_freed", "pages_moved", "num_pages", "entry_bytes"):
            assert any(
                name.replace("_", " ") in line and str(pool[name]) in line.replace(",", "")
                for line in text.splitlines()
            )
    for kind, counts in figures["kinds"].items():
        line = next(line for line in text.splitlines() if f" {kind.lower()} " in line)
        assert line.rstrip(" │").endswith(str(sum(counts.values())))
    assert 'note="[x]"' in text and "synthetic: made by a test" in text


def test_a_cut_trace_says_how_it_ends(capsys: pytest.CaptureFixture[str], trace: Path) -> None:
    frames = frame_bytes(trace)
    trace.write_bytes(b"".join(frames[:2]) + frames[2][:-3])
    (found,) = report(capsys, trace)
    assert found["ended"] == "cut" and found["events"] == 4
    assert found["recovery"]["bytes_missing"] >= 1 and found["recovery"]["last_seq"] == 3
    assert run_info(trace) == 0
    assert "cut: the file ends inside a frame (frame 2" in capsys.readouterr().out


def test_a_folder_stands_for_its_traces(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for name in ("b.msgpack.zst", "a.msgpack.zst"):
        write_events(tmp_path / name, serving_events(20))
    TraceWriter(tmp_path / "c.msgpack.zst", small_header()).abort()
    (tmp_path / "c.msgpack.zst.partial").write_bytes((tmp_path / "a.msgpack.zst").read_bytes())
    (tmp_path / "README.md").write_text("not a trace")
    found = report(capsys, tmp_path, tmp_path / "a.msgpack.zst")
    names = [Path(item["file"]).name for item in found]
    assert names == ["a.msgpack.zst", "b.msgpack.zst", "c.msgpack.zst.partial", "a.msgpack.zst"]


def test_a_folder_without_traces_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TraceNotFound, match="no trace in this folder"):
        run_info(tmp_path)


def test_strange_header_values_are_shown(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep: Any = 1
    for _ in range(400):
        deep = [deep]
    header = small_header(extra={"key": b"\x01\xff", "deep": deep, "not a number": float("nan")})
    header.pools[0].name = "[/red]"
    header.pools[0].layout = {"[b]": {b"k": 1, 2: "\x1b[31m"}}
    path = write_events(tmp_path / "t.msgpack.zst", serving_events(3), header)
    (found,) = report(capsys, path)
    assert found["extra"]["key"] == "01ff" and found["extra"]["not a number"] == "nan"
    assert json.dumps(found["extra"]["deep"]).strip("[]") == '"..."'
    assert found["pools"][0]["layout"] == {"[b]": {"6b": 1, "2": "\x1b[31m"}}
    monkeypatch.setenv("COLUMNS", "200")
    assert run_info(path) == 0
    text = capsys.readouterr().out
    assert "[/red]" in text and "\x1b" not in text


PEAK = """
import sys, tracemalloc
from pathlib import Path
from recorder.summary import summarize
summarize(Path(sys.argv[1]))
tracemalloc.start()
summary = summarize(Path(sys.argv[1]))
print(summary.events, tracemalloc.get_traced_memory()[1])
"""


def peak_memory(path: Path) -> tuple[int, int]:
    """(events, peak bytes of Python and numpy memory) of a summary of `path`."""
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(path)],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": root},
    )
    events, peak = done.stdout.split()
    return int(events), int(peak)


def test_memory_does_not_grow_with_the_trace(tmp_path: Path) -> None:
    events = serving_events(1000)
    peaks = {}
    for repeats in (25, 100):
        path = tmp_path / f"{repeats}.msgpack.zst"
        with TraceWriter(path, small_header(), chunk_events=500, level=1) as writer:
            for _ in range(repeats):
                for event in events:
                    writer.append(**event)
        count, peaks[repeats] = peak_memory(path)
        assert count == 1000 * repeats
    assert peaks[100] < peaks[25] * 1.1


def test_lists_are_not_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from recorder.summary import summarize
    from recorder.trace import chunk

    def refuse(*_: object) -> None:
        raise AssertionError("a list was expanded")

    path = write_events(tmp_path / "t.msgpack.zst", serving_events(300))
    monkeypatch.setattr(chunk.Chunk, "lists", refuse)
    monkeypatch.setattr(chunk.StreamDecoder, "values", refuse)
    monkeypatch.setattr(chunk.StreamDecoder, "segments", refuse)
    assert summarize(path).events == 300
