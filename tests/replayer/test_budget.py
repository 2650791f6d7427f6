"""What a flush costs in host-device synchronisations, on every flush of every committed trace, for each strategy."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from replayer.checks import CheckOptions
from replayer.replay import Outcome, ReplayOptions, replay
from replayer.targets import TargetOptions

pytestmark = pytest.mark.cpu

TRACES = Path(__file__).parents[2] / "traces"
#: Events of the long trace that the test suite drives; the main job replays all of it.
UNTIL = {"kimi_gb200": 40_000}


@cache
def outcome_of(trace: str, strategy: str) -> Outcome:
    mapped = trace.startswith("vllm")
    return replay(
        ReplayOptions(
            TRACES / f"{trace}.msgpack.zst",
            TargetOptions(strategy=strategy),
            CheckOptions(),
            until=UNTIL.get(trace),
            flush_every=20 if mapped else 0,
        )
    )


WITHOUT_MOVES = ("transformers_smollm2",)
"""Traces of engines that never flush, and which leave so few holes that a flush now and then has nothing to move."""


def all_traces() -> list[str]:
    return sorted(path.name.removesuffix(".msgpack.zst") for path in TRACES.glob("*.msgpack.zst"))


@pytest.mark.parametrize("trace", all_traces())
@pytest.mark.parametrize("strategy", ["per-row", "hybrid", "batched"])
def test_every_flush_is_within_its_strategys_budget(trace: str, strategy: str) -> None:
    outcome = outcome_of(trace, strategy)
    assert outcome.verdict == "held", outcome.failure
    assert outcome.ledger_disagreements == 0
    moving = [record for record in outcome.flushes if record.moves]
    assert moving or trace in WITHOUT_MOVES, "a trace without a move proves nothing"
    for record in outcome.flushes:
        write_set = 0 if record.urgent else 1
        lookups = record.moves if strategy == "per-row" or (strategy == "hybrid" and record.moves < 16) else 0
        assert lookups <= record.device_to_host <= 1 + lookups + write_set, record
        assert record.host_to_device <= 2, record
        assert record.waits == 0, record


@pytest.mark.parametrize("trace", all_traces())
def test_strategies_move_the_same_pages(trace: str) -> None:
    moves = {
        strategy: [(record.seq, record.pool, record.moves) for record in outcome_of(trace, strategy).flushes]
        for strategy in ("per-row", "hybrid", "batched")
    }
    assert moves["per-row"] == moves["hybrid"] == moves["batched"]


def test_the_engines_states_were_compared() -> None:
    outcome = outcome_of("sglang_tiny_swa_p16", "batched")
    assert outcome.held["C15"] > 2_000
    assert outcome.logprob_compared >= 2 and outcome.logprob_largest == 0.0
