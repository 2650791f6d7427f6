"""A real SGLang engine on a CPU, recorded through its plugin: what it did replays, and it answers as if nobody had watched."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

from recorder.trace import TraceReader
from replayer.replay import Outcome, ReplayOptions, replay
from replayer.targets_sglang import sglang_version

REPOSITORY = Path(__file__).parents[2]
READY = bool(
    [point for point in entry_points(group="sglang.srt.plugins") if point.name == "kvtape_sglang_cpu"]
)

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        sglang_version() != "0.5.23" or not READY,
        reason="SGLang 0.5.23's engine is not set up to run on a CPU here (tools/build_sglang_env.sh)",
    ),
]

RUN = [
    *(sys.executable, "-W", "ignore", "-m", "tests.engines.run_sglang", "--page-size", "16", "--lag", "3"),
    *("--requests", "12", "--rounds", "2", "--linger", "2"),
]
KVTAPE = [sys.executable, "-c", "import sys; from replayer.main import main; sys.exit(main())"]
SECONDS = 600


def environment(**changes: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KVTAPE_")}
    models = {name: value for name, value in os.environ.items() if name == "KVTAPE_MODELS"}
    return {**kept, **models, "PYTHONPATH": str(REPOSITORY), "HF_HUB_OFFLINE": "1", **changes}


def run(out: Path, *command: str, **changes: str) -> tuple[dict[str, list[int]], str]:
    """Outputs by request, and what was printed."""
    done = subprocess.run(
        [*command, *RUN, "--out", str(out)], env=environment(**changes), cwd=REPOSITORY, capture_output=True, text=True,
        timeout=SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    outputs: dict[str, list[int]] = json.loads(out.read_text(encoding="utf-8"))["outputs"]
    return outputs, done.stdout + done.stderr


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[int]]:
    """What the engine answers when nobody records."""
    return run(tmp_path_factory.mktemp("plain") / "out.json")[0]


def check_replay(path: Path) -> Outcome:
    outcome = replay(ReplayOptions(path))
    assert outcome.failure is None
    assert outcome.dropped == 0
    assert outcome.ids == "recorded"
    return outcome


def test_a_run_is_recorded_and_replays(tmp_path: Path, plain: dict[str, list[int]]) -> None:
    target = tmp_path / "run.msgpack.zst"
    command = [*KVTAPE, "record", "-o", str(target), "--state-every", "100", "--"]
    outputs, said = run(tmp_path / "out.json", *command)
    assert outputs == plain
    (path,) = tmp_path.glob("run.*.msgpack.zst")
    assert "full, swa" in said
    outcome = check_replay(path)
    assert outcome.events > 1000
    assert sum(flush.moves for flush in outcome.flushes) > 10
    assert outcome.held["C15"] > 100
    with TraceReader(path) as reader:
        header = reader.header
        chunks = list(reader.chunks())
        states = list(reader.states())
    assert (header.engine, header.engine_version, header.provenance.kind) == ("sglang", "0.5.23", "recorded")
    assert [pool.name for pool in header.pools] == ["full", "swa"]
    assert header.settings["page_size"] == 16
    assert len(states) > 10
    names = [name for chunk in chunks for name in chunk.request_ids.values()]
    assert len(names) >= 20
    assert all(len(name) == 16 for name in names)


@pytest.mark.parametrize("fault", ["unwritable", "full disk", "dying writer", "raising hook"])
def test_the_engine_answers_the_same_whatever_happens_to_the_recorder(
    fault: str, tmp_path: Path, plain: dict[str, list[int]]
) -> None:
    (tmp_path / "file").write_text("no folder")
    target = tmp_path / ("file" if fault == "unwritable" else ".") / "run.msgpack.zst"
    outputs, said = run(
        tmp_path / "out.json",
        KVTAPE_RECORD=str(target),
        RECORDER_FAULT="" if fault == "unwritable" else fault,
    )
    assert outputs == plain
    assert said.count("recording has ended, the engine goes on") == 1
    for path in tmp_path.glob("run.*"):
        assert replay(ReplayOptions(path)).failure is None


def scheduler_of(folder: Path) -> int:
    """The process that records: its number is in the file's name."""
    end = time.monotonic() + 300
    while time.monotonic() < end:
        for path in folder.glob("run.*.msgpack.zst.partial"):
            if path.stat().st_size > 4000:
                return int(path.name.split(".")[2])
        time.sleep(0.1)
    raise AssertionError("no recording began")


def test_a_scheduler_that_is_killed_leaves_a_prefix_that_replays(tmp_path: Path) -> None:
    target = tmp_path / "run.msgpack.zst"
    command: list[Any] = [*KVTAPE, "record", "-o", target, "--chunk-ms", "200", "--", *RUN]
    with subprocess.Popen(
        [str(part) for part in command], env=environment(), cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, start_new_session=True,
    ) as process:  # fmt: skip
        try:
            os.kill(scheduler_of(tmp_path), signal.SIGKILL)
            said, _ = process.communicate(timeout=SECONDS)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode != 0
    assert "the recorded process" in said
    (path,) = tmp_path.glob("run.*.msgpack.zst")
    outcome = check_replay(path)
    assert outcome.events > 100
    assert "without closing the file" in outcome.reason
