"""A real SGLang engine on a CPU, with its own allocator and with kvtape's in its place: same answers, and traces that replay on both."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

from recorder.trace import TraceReader
from replayer.plugin import VARIABLE
from replayer.replay import Outcome, ReplayOptions, replay
from replayer.targets import TargetOptions
from replayer.targets_sglang import remove_cpu_stand_ins, sglang_version
from tests.recorder.recordings import events_of

REPOSITORY = Path(__file__).parents[2]
PLUGINS = {point.name for point in entry_points(group="sglang.srt.plugins")}

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        sglang_version() != "0.5.23" or "kvtape_sglang_cpu" not in PLUGINS,
        reason="SGLang 0.5.23's engine is not set up to run on a CPU here (tools/build_sglang_env.sh)",
    ),
]

KVTAPE = [
    sys.executable,
    "-W",
    "ignore",
    "-c",
    "import sys; from replayer.main import main; sys.exit(main())",
]
RUN = [
    *(sys.executable, "-W", "ignore", "-m", "tests.engines.run_sglang", "--page-size", "16", "--lag", "3"),
    *("--requests", "12", "--rounds", "2", "--linger", "2", "--logprobs"),
]
SECONDS = 600


@dataclass
class Run:
    """An engine's run: what it answered, what it said, its recording, and what was counted if its numbers came late."""

    result: dict[str, Any]
    said: str
    trace: Path | None
    late: dict[str, Any]


def begin(folder: Path, *, is_late: bool = False, **variables: str) -> subprocess.Popen[str]:
    """Not recorded with numbers that come late: the recorder's thread asks for them too, and would be counted."""
    folder.mkdir()
    if is_late:
        variables["LATE_NUMBERS"] = str(folder / "late.json")
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("KVTAPE_") or name == "KVTAPE_MODELS"
    }
    # An engine is two processes that import the same files, and compiling those takes longer than anything else here.
    kept.pop("PYTHONDONTWRITEBYTECODE", None)
    kept["PYTHONPYCACHEPREFIX"] = str(folder.parent / "compiled")
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    record = [*KVTAPE, "record", "-o", str(folder / "run.msgpack.zst"), "--state-every", "50", "--"]
    return subprocess.Popen(
        [*([] if is_late else record), *RUN, "--out", str(folder / "out.json")], cwd=REPOSITORY, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, env={**kept, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", **variables},
    )  # fmt: skip


def end(process: subprocess.Popen[str], folder: Path) -> Run:
    said, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, said[-4000:]
    traces, late = list(folder.glob("run.*.msgpack.zst")), folder / "late.json"
    assert len(traces) == (not late.exists())
    return Run(
        json.loads((folder / "out.json").read_text(encoding="utf-8")),
        said,
        traces[0] if traces else None,
        json.loads(late.read_text(encoding="utf-8")) if late.exists() else {},
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """The same requests, served with SGLang's own allocator and with kvtape's, both recorded, and once more with kvtape's and numbers that
    come late. At the same time: most of it is starting."""
    assert "kvtape-allocator" in PLUGINS, (
        "kvtape was installed before it had this entry point: install it again"
    )
    folder = tmp_path_factory.mktemp("in place")
    begun = {
        "theirs": begin(folder / "theirs"),
        "ours": begin(folder / "ours", **{VARIABLE: "device"}),
        "late": begin(folder / "late", is_late=True, **{VARIABLE: "device"}),
    }
    try:
        return {name: end(process, folder / name) for name, process in begun.items()}
    finally:
        for process in begun.values():
            if process.poll() is None:
                process.kill()


def trace_of(run: Run) -> Path:
    assert run.trace is not None
    return run.trace


@pytest.mark.parametrize("run", ["ours", "late"])
def test_the_answers_are_the_same_token_for_token(run: str, runs: dict[str, Run]) -> None:
    theirs, ours = runs["theirs"].result, runs[run].result
    assert ours["outputs"] == theirs["outputs"]
    assert ours["logprobs"] == theirs["logprobs"]
    assert sum(map(len, theirs["logprobs"].values())) == theirs["output_tokens"] > 500
    assert ours["counts"] == theirs["counts"]
    assert theirs["counts"]["num_retractions"] > 0


def test_the_recordings_say_whose_allocator_it_was(runs: dict[str, Run]) -> None:
    headers = {}
    for name in ("theirs", "ours"):
        with TraceReader(trace_of(runs[name])) as reader:
            headers[name] = reader.header
    assert headers["ours"].settings["allocator"] == "kvtape device"
    assert headers["ours"].allocator == "SglangDeviceMultiEndedAllocator"
    assert "allocator" not in headers["theirs"].settings
    for header in headers.values():
        assert (header.engine, header.engine_version, header.settings["placement"]) == (
            "sglang",
            "0.5.23",
            "engine",
        )
    assert headers["ours"].pools == headers["theirs"].pools


def test_the_engine_asked_for_the_same_and_was_given_the_same(runs: dict[str, Run]) -> None:
    """Every allocation and every free of each sub-pool, with the ids. Which of two sub-pools hears of an eviction first varies from run to
    run, whatever the allocator, and flushes while nothing runs depend on the clock."""
    asked = {
        name: [event for event in events_of(trace_of(runs[name])) if event[0].startswith(("ALLOC", "FREE"))]
        for name in ("theirs", "ours")
    }
    for pool in (0, 1):
        ours, theirs = ([event for event in asked[name] if event[1] == pool] for name in ("ours", "theirs"))
        assert ours == theirs
        assert len(ours) > 50


def test_where_numbers_come_late_statistics_alone_wait_for_them(runs: dict[str, Run]) -> None:
    """No alloc, no free, no flush, no check of a decode step and no admission does, on one stream with the forwards. The sizes in SGLang's
    log and in its load snapshots are exact, and some are asked for right behind a free."""
    seen = runs["late"].late
    assert seen["flushes"] > 40 and seen["results"] > 300
    assert seen["left_to_the_device"] > 0
    waits = dict(seen["waits"])
    assert 0 < waits.pop("swa_capacity_and_available") < seen["flushes"]
    assert waits == {}


def moved(outcome: Outcome) -> int:
    return sum(flush.moves for flush in outcome.flushes)


@pytest.mark.parametrize("target", ["kvtape", "sglang"])
@pytest.mark.parametrize("run", ["theirs", "ours"])
def test_each_recording_replays_on_both(run: str, target: str, runs: dict[str, Run]) -> None:
    strategy = "device" if target == "kvtape" else "batched"
    try:
        outcome = replay(
            ReplayOptions(trace_of(runs[run]), target=TargetOptions(allocator=target, strategy=strategy))
        )
    finally:
        remove_cpu_stand_ins()
    assert outcome.failure is None
    assert (outcome.dropped, outcome.ids) == (0, "recorded")
    assert outcome.events > 1000
    assert moved(outcome) > 10
    assert sum(flush.urgent for flush in outcome.flushes) > 5
    assert outcome.held["C15"] > 100 and outcome.held["C6"] > 100


def test_what_cannot_be_had_is_said_and_the_engine_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    """Beside SGLang, in this process."""
    import importlib

    from allocator import sglang_plugin

    module = importlib.import_module(sglang_plugin.MODULE)
    before = dict(vars(module))
    with caplog.at_level(logging.ERROR, "kvtape"):
        sglang_plugin.install("fast")
    assert dict(vars(module)) == before
    (said,) = caplog.messages
    assert "'fast'" in said and "batched, device, hybrid, per-row" in said
