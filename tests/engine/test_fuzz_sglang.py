"""Random programs in lockstep with SGLang's own classes."""

from __future__ import annotations

from pathlib import Path

import pytest

from replayer.fuzz.session import FuzzOptions, Session
from replayer.targets_sglang import sglang_version

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(
        sglang_version() != "0.5.23",
        reason="SGLang 0.5.23's classes are not installed (tools/build_sglang_env.sh)",
    ),
]


def test_every_strategy_answers_and_ends_up_as_sglang_does(tmp_path: Path) -> None:
    with Session(FuzzOptions(minutes=5.0, seed=11, against="sglang", out=tmp_path, rounds=2)) as session:
        session.run()
    assert session.finds == []
    counts = session.counts
    assert session.reference_name == "SGLang 0.5.23" and counts["programs"] > 50
    assert counts["pages moved"] > 0 and counts["refused"] > 0 and counts["states with pages pending"] > 0


def test_an_allocator_that_places_otherwise_is_found(tmp_path: Path) -> None:
    options = FuzzOptions(
        minutes=3.0, seed=1, against="sglang", allocator="tests.fuzz.faulty:TakesHighestHole", strategies=("batched",),
        out=tmp_path, calls=25,
    )  # fmt: skip
    with Session(options) as session:
        session.run()
    (find,) = session.finds
    assert "SGLang 0.5.23" in find.message
