"""Every committed trace replays with every check, and costs the synchronisations it cost before."""

from __future__ import annotations

from pathlib import Path

import pytest

from recorder.trace import TraceReader
from tests import corpus

pytestmark = [pytest.mark.cpu, pytest.mark.timeout(900)]

CASES = [(path, strategy) for path in corpus.trace_files() for strategy in corpus.strategies_for(path)]


@pytest.mark.parametrize(
    ("path", "strategy"), CASES, ids=[f"{corpus.name_of(path)}-{strategy}" for path, strategy in CASES]
)
def test_trace(path: Path, strategy: str) -> None:
    outcome = corpus.replay_trace(path, strategy)
    assert outcome.failure is None
    assert outcome.dropped == 0
    assert outcome.gap is None
    assert outcome.ledger_disagreements == 0
    expected = corpus.load_baseline()[corpus.name_of(path)][strategy]
    # Not equal? `python -m tests.corpus` shows the difference, `--update` takes the new figures over.
    assert corpus.figures(outcome) == expected


def test_the_baseline_knows_these_traces_and_no_other() -> None:
    assert set(corpus.load_baseline()) == {corpus.name_of(path) for path in corpus.trace_files()}


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
