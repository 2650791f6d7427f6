"""A check that no fault trips proves nothing: every mutant is named by the check for its fault, where the state is wrong first."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from allocator import STRATEGIES
from replayer.checks import CheckOptions
from replayer.replay import ReplayOptions, replay
from replayer.targets import TargetOptions
from tests.mutants import scenes
from tests.mutants.registry import CompositeScene, Mutant, Scene, all_mutants, all_scenes, run
from tests.mutants.score import Traces, find

pytestmark = pytest.mark.cpu

MUTANTS = all_mutants()
SCENES = all_scenes()
LATE = "tests.allocator.delayed:SlowEnd,tests.allocator.delayed:SlowFloat"


@pytest.fixture(scope="module")
def traces() -> Iterator[Traces]:
    with tempfile.TemporaryDirectory() as folder:
        yield Traces(Path(folder))


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.name for mutant in MUTANTS])
def test_each_fault_is_named_at_its_event(mutant: Mutant, traces: Traces) -> None:
    finding = find(mutant, traces)
    assert finding.failure is not None, f"{mutant.name} survived"
    assert finding.is_expected, finding.failure
    healthy = run(traces.of(mutant.scene), mutant.healthy, mutant.strategy, mutant.options)
    assert healthy.verdict == "held", healthy.failure


@pytest.mark.parametrize("scene", SCENES, ids=[scene.name for scene in SCENES])
def test_every_strategy_holds_where_mutants_fall(scene: Scene | CompositeScene, traces: Traces) -> None:
    targets = [TargetOptions(strategy=strategy, kv="full") for strategy in STRATEGIES]
    for target in (*targets, TargetOptions(allocator=LATE, strategy="device", kv="full")):
        outcome = replay(ReplayOptions(traces.of(scene), target, CheckOptions(every=1), ledger=False))
        assert outcome.verdict == "held", (target, outcome.failure)


def test_another_check_than_the_expected_one_is_the_exception() -> None:
    assert len(MUTANTS) >= 60
    elsewhere = [mutant for mutant in MUTANTS if mutant.named]
    assert all(mutant.reason for mutant in elsewhere)
    assert len(elsewhere) <= 0.05 * len(MUTANTS)


def test_every_check_that_is_about_an_allocator_names_a_mutant() -> None:
    assert {mutant.check for mutant in MUTANTS} == {f"C{number}" for number in range(1, 16)}


def test_another_placement_is_told_from_a_fault() -> None:
    """C15 sees that places differ; with mapped ids the same allocator is judged on its own and holds."""
    path = Path(__file__).parents[2] / "traces" / "kimi_gb200.msgpack.zst"
    target = TargetOptions(allocator="tests.mutants.alloc:TakesHighestHole")
    recorded = replay(ReplayOptions(path, target, CheckOptions(), until=8000))
    assert recorded.failure is not None and recorded.failure.check == "C15"
    mapped = replay(ReplayOptions(path, target, CheckOptions(), until=8000, ids="mapped", drain=False))
    assert mapped.verdict == "held", mapped.failure


def test_damage_outside_a_flush_is_narrowed_to_its_event(traces: Traces) -> None:
    """A sweep at the end meets a wrong count; the second pass names the free that left it."""
    outcome = run(traces.of(scenes.takes_holes), "tests.mutants.free:LosesAHole", "batched", {})
    assert outcome.failure is not None
    assert (outcome.failure.check, outcome.failure.seq, outcome.narrowed_from) == ("C4", 1, 3)
