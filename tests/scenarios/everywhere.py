"""Replays a scenario with every strategy and every check after every event."""

from __future__ import annotations

from pathlib import Path

from allocator import STRATEGIES
from replayer.checks import CheckOptions
from replayer.failure import CheckFailure
from replayer.replay import Outcome, ReplayOptions, replay
from replayer.targets import TargetOptions

#: Numbers of the ``device`` strategy come late, as on a GPU.
LATE = "tests.allocator.delayed:SlowEnd,tests.allocator.delayed:SlowFloat"


def holds_everywhere(path: Path, *, kv: str = "full", ledger: bool = False) -> dict[str, Outcome]:
    """An outcome for each strategy, ``late`` among them; fails on the first one that does not hold.

    The answers in the trace are those of the ``batched`` strategy, so all of them placed, moved and refused the same (C15).
    """
    targets = {strategy: TargetOptions(strategy=strategy, kv=kv) for strategy in STRATEGIES}
    targets["late"] = TargetOptions(allocator=LATE, strategy="device", kv=kv)
    outcomes = {}
    for name, target in targets.items():
        outcome = replay(ReplayOptions(path, target, CheckOptions(every=1, logprob_every=1), ledger=ledger))
        assert outcome.verdict == "held", (name, outcome.failure)
        outcomes[name] = outcome
    moves = [[(flush.seq, flush.pool, flush.moves) for flush in each.flushes] for each in outcomes.values()]
    assert all(each == moves[0] for each in moves[1:])
    return outcomes


def first_failure(path: Path) -> CheckFailure:
    """Where a trace breaks a rule that is the engine's to keep."""
    outcome = replay(ReplayOptions(path, TargetOptions(kv="full"), CheckOptions(), ledger=False))
    assert outcome.failure is not None
    return outcome.failure
