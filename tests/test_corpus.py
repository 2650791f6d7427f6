"""Every committed trace replays with every check, and costs the synchronisations it cost before."""

from __future__ import annotations

from pathlib import Path

import pytest

from recorder.trace import TraceReader
from replayer.calling import FlushRecord
from tests import corpus

pytestmark = [pytest.mark.cpu, pytest.mark.timeout(900)]


@pytest.mark.parametrize("path", corpus.trace_files(), ids=corpus.name_of)
def test_trace(path: Path) -> None:
    """Every check holds, a flush costs what its lookup strategy may cost, and all strategies move the same pages."""
    expected = corpus.load_baseline()[corpus.name_of(path)]
    outcomes = {strategy: corpus.replay_trace(path, strategy) for strategy in corpus.STRATEGIES}
    for strategy, outcome in outcomes.items():
        assert outcome.verdict == "held", (strategy, outcome.failure)
        assert (outcome.dropped, outcome.gap, outcome.ledger_disagreements) == (0, None, 0)
        assert any(flush.moves for flush in outcome.flushes), "a trace without a move proves nothing"
        for flush in outcome.flushes:
            check_budget(flush, strategy)
        # Not equal? `python -m tests.corpus` shows the difference, `--update` takes the new figures over.
        assert corpus.figures(outcome) == expected[strategy]
    cuts = [outcome.options.until for outcome in outcomes.values() if outcome.options.until is not None]
    moves = [
        # The flushes that drain the pools at the end of a shortened replay have its last event's number.
        [
            (each.seq, each.pool, each.moves)
            for each in outcome.flushes
            if not cuts or each.seq < min(cuts) - 1
        ]
        for outcome in outcomes.values()
    ]
    assert all(each == moves[0] for each in moves[1:])


def check_budget(flush: FlushRecord, strategy: str) -> None:
    """Nothing with `device`; else one read of the holes, one of the write set while a forward runs, and what lookups read a page."""
    if strategy == "device":
        assert flush.device_to_host == flush.host_to_device == flush.waits == 0, flush
        return
    write_set = 0 if flush.urgent else 1
    lookups = flush.moves if strategy == "per-row" or (strategy == "hybrid" and flush.moves < 16) else 0
    assert lookups <= flush.device_to_host <= 1 + lookups + write_set, flush
    assert flush.host_to_device <= 2, flush
    assert flush.waits == 0, flush


def test_the_engines_states_were_compared() -> None:
    outcome = corpus.replay_trace(corpus.TRACES / f"sglang_tiny_swa_p16{corpus.SUFFIX}", "batched")
    assert outcome.held["C15"] > 2_000
    assert outcome.logprob_compared >= 2 and outcome.logprob_largest == 0.0


def test_the_baseline_knows_these_traces_and_no_other() -> None:
    assert set(corpus.load_baseline()) == {corpus.name_of(path) for path in corpus.trace_files()}


def test_the_readme_of_the_traces_names_each_with_its_events() -> None:
    text = (corpus.TRACES / "README.md").read_text(encoding="utf-8")
    for path in corpus.trace_files():
        with TraceReader(path) as reader:
            footer = reader.find_footer()
        assert footer is not None
        kind = reader.header.provenance.kind
        (row,) = [line for line in text.splitlines() if line.startswith(f"| `{corpus.name_of(path)}` |")]
        assert f"| {kind} |" in row
        assert row.endswith(f"| {footer.events:,} |"), (row, footer.events)


def test_the_corpus_stays_small() -> None:
    assert sum(path.stat().st_size for path in corpus.trace_files()) < 12 << 20


def test_what_a_serving_engine_did_was_recorded_by_kvtape() -> None:
    """Not one file of the corpus says `recorded` and comes from somewhere else."""
    for path in corpus.trace_files():
        with TraceReader(path) as reader:
            header = reader.header
        if header.provenance.kind in ("recorded", "driven"):
            assert header.extra.get("run"), path.name
            assert header.provenance.hardware


def test_a_served_model_made_twenty_thousand_calls() -> None:
    events = []
    for path in corpus.trace_files():
        with TraceReader(path) as reader:
            footer = reader.find_footer()
            if reader.header.provenance.kind == "recorded" and footer is not None:
                events.append(footer.events)
    assert max(events) >= 20_000
