"""Turns, ratios and what `kvtape bench` prints, with and without SGLang."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import replayer.bench
import replayer.targets_sglang
from recorder.trace import EventKind, Header
from replayer.bench import SGLANG, Candidate, Measurement, kvtape_candidate, measure, turns
from replayer.bench_calls import Timing
from replayer.main import main
from tests.scenario import Scenario

pytestmark = pytest.mark.cpu


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    (tmp_path / "traces").mkdir()
    scenario = Scenario(tmp_path / "traces" / "small.msgpack.zst")
    tokens = scenario.alloc("full", 6)
    assert tokens is not None
    scenario.free("full", tokens[1:3])
    scenario.flush("full", urgent=True)
    return scenario.close()


@pytest.fixture
def without_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replayer.targets_sglang, "sglang_version", lambda: None)


@pytest.fixture
def kvtape_as_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    """Something stands where SGLang stands, so that tables with a reference are made without it."""
    monkeypatch.setattr(replayer.targets_sglang, "sglang_version", lambda: "0.0-test")
    ours = kvtape_candidate("kvtape", "per-row")
    monkeypatch.setattr(replayer.bench, "sglang_candidate", lambda: Candidate(SGLANG, ours.build))


def test_candidates_take_turns_and_the_first_round_does_not_count(trace: Path) -> None:
    order: list[str] = []
    around: Counter[str] = Counter()
    ours = kvtape_candidate("kvtape", "batched")

    def named(name: str) -> Candidate:
        def build(header: Header) -> Mapping[str, Any]:
            order.append(name)
            return ours.build(header)

        @contextmanager
        def within() -> Iterator[None]:
            around[name] += 1
            yield

        return Candidate(name, build, within)

    ticks: list[int] = []
    measured = measure(trace, [named("a"), named("b")], rounds=3, after_turn=lambda: ticks.append(1))
    # The untimed comparison first, then a round to warm up, then three that count; whoever began begins the next round second.
    assert "".join(order) == "ab" + "ab" + "ba" + "ab" + "ba"
    assert around == {"a": 4, "b": 4}
    assert len(ticks) == turns(2, 3)
    assert {name: len(rounds) for name, rounds in measured.timings.items()} == {"a": 3, "b": 3}
    assert measured.kinds == {EventKind.ALLOC: 1, EventKind.FREE: 1, EventKind.FLUSH: 1}
    assert (measured.trace, measured.call_count) == ("small", 3)


def test_a_ratio_is_taken_within_a_round() -> None:
    def timing(flush: int, decode: int) -> Timing:
        return Timing(
            {EventKind.FLUSH: flush, EventKind.ALLOC_DECODE: decode},
            {EventKind.FLUSH: 1, EventKind.ALLOC_DECODE: 1},
        )

    # The machine was ten times slower in the second round; that must not show in a ratio.
    measured = Measurement(
        "t",
        2,
        {
            "ours": [timing(1, 9), timing(20, 90), timing(3, 9)],
            "theirs": [timing(2, 9), timing(40, 90), timing(3, 9)],
        },
    )
    assert measured.ratio("ours", "theirs") == (0.5, 0.5, 1.0)
    assert measured.ratio("ours", "theirs", EventKind.ALLOC_DECODE) == (1.0, 1.0, 1.0)
    assert measured.nanoseconds("ours") == (3, 1, 20)


def test_without_sglang_the_table_says_what_was_not_measured(
    trace: Path, without_sglang: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["bench", str(trace), "--rounds", "1", "--strategy", "batched,per-row"]) == 0
    printed = capsys.readouterr().out
    assert "kvtape per-row" in printed
    assert "not measured" in printed
    assert "SGLang is not installed in this environment" in printed
    assert "tools/build_sglang_env.sh" in printed


def test_json_without_sglang_has_times_and_no_ratio(
    trace: Path, without_sglang: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", str(trace), "--rounds", "2", "--json", "--limit", "2"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["machine"]["sglang"] is None
    assert (figures["rounds"], figures["limit"]) == (2, 2)
    (one,) = figures["traces"]
    assert one["trace"] == "small"
    assert one["calls"] == 2
    assert set(one["kinds"]) == {"alloc", "free"}
    assert one["total"]["ratios"] == {"kvtape batched": {}}
    assert one["total"]["nanoseconds"]["kvtape batched"]["median"] > 0


def test_with_a_reference_every_kind_has_a_ratio(
    trace: Path, kvtape_as_sglang: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["bench", str(trace), "--rounds", "1", "--json"]) == 0
    (one,) = json.loads(capsys.readouterr().out)["traces"]
    for figures in (one["total"], *one["kinds"].values()):
        assert figures["ratios"]["kvtape batched"][SGLANG]["median"] > 0
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["bench", str(trace), "--rounds", "1"]) == 0
    printed = capsys.readouterr().out
    assert "flush: kvtape batched / sglang" in printed
    assert "SGLang 0.0-test" in printed
    assert "not measured" not in printed


def test_a_ratio_above_the_limit_fails(
    trace: Path, kvtape_as_sglang: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", str(trace), "--rounds", "1", "--max-ratio", "1e-9"]) == 1
    assert "times SGLang's time, more than 1e-09" in capsys.readouterr().err
    assert main(["bench", str(trace), "--rounds", "1", "--max-ratio", "1e9"]) == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--max-ratio", "1"], "SGLang is not installed"),
        (["--without-ranges"], "SGLang is not installed"),
        (["--strategy", "batched,batched"], "named twice"),
        (["--strategy", "clever"], "clever"),
        (["--allocator", "no_such_module:Class"], "no_such_module"),
        (["--rounds", "0"], "at least 1"),
    ],
)
def test_bad_arguments(
    trace: Path, without_sglang: None, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert main(["bench", str(trace), *arguments]) == 2
    assert said in capsys.readouterr().err


def test_no_trace_named_means_those_that_can_be_timed(
    trace: Path, without_sglang: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(trace.parent.parent)
    assert main(["bench", "--rounds", "1", "--json"]) == 0
    assert [one["trace"] for one in json.loads(capsys.readouterr().out)["traces"]] == ["small"]
    monkeypatch.chdir(trace.parent)
    assert main(["bench", "--rounds", "1"]) == 2
    assert "traces/ holds none" in capsys.readouterr().err


def test_no_such_file(tmp_path: Path, without_sglang: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", str(tmp_path / "none.msgpack.zst")]) == 66
    assert "no such file" in capsys.readouterr().err
