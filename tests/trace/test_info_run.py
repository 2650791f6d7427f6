"""`kvtape info` on a folder: the files of a run side by side, and what of it cannot be read."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
from trace_tools import frame_bytes, serving_events, small_header, write_events

from recorder.commands import info
from recorder.trace import EmptyTrace, EventKind, TraceError, TraceWriter
from replayer.main import main

pytestmark = pytest.mark.cpu


def run_info(*arguments: Path | str) -> int:
    parser = argparse.ArgumentParser()
    info.add_arguments(parser)
    return info.run(parser.parse_args([str(argument) for argument in arguments]))


def record(folder: Path, place: Any, run: str = "beef01", events: int = 30, **extra: Any) -> Path:
    number = place if isinstance(place, int) else 9
    path = folder / f"sglang.tp{number}-pp0-dp0.{100 + number}.msgpack.zst"
    header = small_header(
        rank={"tp": place, "pp": 0, "dp": 0, "tp_size": 2},
        extra={"run": run, **extra},
        engine_version="0.5.23",
    )
    with TraceWriter(path, header, chunk_events=20) as writer:
        writer.name_request(7, "aa")
        for event in serving_events(events, seed=number):
            writer.append(**event)
        if number:
            writer.dropped(4)
            writer.close("the queue was full")
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run of two processes, and a file of no run."""
    record(tmp_path, 0, pid=100)
    record(tmp_path, 1)
    write_events(tmp_path / "alone.msgpack.zst", serving_events(10))
    return tmp_path


def shown(capsys: pytest.CaptureFixture[str], *arguments: Path | str) -> str:
    assert run_info(*arguments) == 0
    return capsys.readouterr().out


def test_a_folder_shows_its_run_as_one_table(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    out = shown(capsys, folder)
    assert "run beef01" in out and out.count("provenance") == 1  # the file of no run, in full
    lines = {line.split("│")[1].strip(): line for line in out.splitlines() if "│" in line}
    first, second = (next(line for name, line in lines.items() if f"tp{rank}" in line) for rank in (0, 1))
    for line, parts in (
        (first, ("100", "test 0.5.23", "30", "clean")),
        (second, ("101", "30", "4", "clean: the")),
    ):
        assert all(part in line for part in parts), line
    total = next(line for line in out.splitlines() if "2 files" in line)
    assert [cell.strip() for cell in total.split("│")][6:10] == ["60", "0", "4", "2"]


def test_files_shows_the_run_and_every_file(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    out = shown(capsys, folder, "--files")
    assert out.count("provenance") == 3 and "run beef01" in out
    assert "the queue was full" in out and "1 named" in out


def test_a_file_is_shown_in_full(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    path = next(folder.glob("*tp1*"))
    out = shown(capsys, path)
    assert "run beef01" not in out and 'run="beef01"' in out
    assert "requests   1 named" in out and "reason     the queue was full" in out
    plain = shown(capsys, folder / "alone.msgpack.zst")
    assert "requests" not in plain and "reason" not in plain


def test_json_has_runs_and_files(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    record(folder, 5, run="cafe")
    found = json.loads(shown(capsys, folder, "--json"))
    assert [len(run["files"]) for run in found["runs"]] == [2, 1] and len(found["traces"]) == 4
    run = found["runs"][0]
    assert run["run"] == "beef01"
    sizes = sum(path.stat().st_size for path in folder.glob("*tp[01]*"))
    assert run["total"] == {
        "files": 2,
        "events": 60,
        "states": 0,
        "dropped": 4,
        "request_ids": 2,
        "bytes": sizes,
    }
    rows = run["files"]
    assert [(row["rank"], row["pid"]) for row in rows] == [("tp0-pp0-dp0", 100), ("tp1-pp0-dp0", 101)]
    assert [row["reason"] for row in rows] == ["", "the queue was full"]
    assert rows[0]["pools"] == ["pool0", "pool1"] and rows[0]["ended"] == "clean"
    by_name = {Path(trace["file"]).name: trace for trace in found["traces"]}
    assert by_name["alone.msgpack.zst"]["request_ids"] == 0
    assert by_name["sglang.tp1-pp0-dp0.101.msgpack.zst"]["reason"] == "the queue was full"
    one = json.loads(shown(capsys, folder / "alone.msgpack.zst", "--json"))
    assert one["runs"] == [] and len(one["traces"]) == 1


def test_what_a_killed_process_left_is_in_the_run(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    whole = next(folder.glob("*tp1*"))
    frames = frame_bytes(whole)
    (folder / "sglang.tp2-pp0-dp0.102.msgpack.zst.partial").write_bytes(b"".join(frames[:3]))
    (row,) = (r for r in json.loads(shown(capsys, folder, "--json"))["runs"][0]["files"] if r["pid"] == 102)
    assert (row["events"], row["ended"], row["reason"], row["error"]) == (30, "partial", "", "")


def test_a_file_of_a_run_that_cannot_be_read_is_a_line_and_an_exit_code(
    capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    frames = frame_bytes(next(folder.glob("*tp0*")))
    (folder / "sglang.tp3-pp0-dp0.103.msgpack.zst.partial").write_bytes(frames[0])
    with pytest.raises(EmptyTrace):
        run_info(folder)
    assert "3 files" in capsys.readouterr().out
    with pytest.raises(TraceError):
        run_info(folder, "--json")
    found = json.loads(capsys.readouterr().out)
    (row,) = (row for row in found["runs"][0]["files"] if row["error"])
    assert row["pid"] == 103 and "no event" in row["error"] and found["runs"][0]["total"]["events"] == 60
    assert len(found["traces"]) == 3
    assert main(["info", str(folder)]) == 65
    out, err = capsys.readouterr()
    assert "run beef01" in out and err.count("\n") == 1 and "no event" in err


def test_a_run_id_that_is_no_text_makes_no_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for number, run in enumerate((3, ["x"], "")):
        header = small_header(extra={"run": run, "pid": "nobody"})
        write_events(tmp_path / f"{number}.msgpack.zst", [{"kind": EventKind.CLEAR, "time_us": 0}], header)
    assert json.loads(shown(capsys, tmp_path, "--json"))["runs"] == []


def test_markup_and_escapes_in_a_run_are_shown_as_text(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    record(tmp_path, "[/b]\x1b", run="[red]\x1b[31m", pid=-1)
    out = shown(capsys, tmp_path)
    assert "[red]" in out and "[/b]" in out and "\x1b" not in out
