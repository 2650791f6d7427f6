"""A check that no fault trips proves nothing: each check is shown one, and must name the event at which the state went wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from replayer.checks import CheckOptions
from replayer.replay import Outcome, ReplayOptions, replay
from replayer.targets import TargetOptions
from tests.scenario import PoolShape, Scenario

pytestmark = pytest.mark.cpu

PAGED = (PoolShape("full", "down", page_size=4), PoolShape("swa", "up", page_size=4, layer_num=2))


def run(path: Path, mutant: str, **checks: object) -> Outcome:
    target = TargetOptions(
        allocator=f"tests.replayer.mutants:{mutant}" if mutant != "kvtape" else "kvtape", kv="full"
    )
    return replay(ReplayOptions(path, target, CheckOptions(**checks)))  # type: ignore[arg-type]


def moves_in_one_flush(s: Scenario) -> int:
    ids = s.alloc("full", 8)
    assert ids
    s.free("full", ids[5:8])
    assert s.flush("full", urgent=True) == 3
    s.free("full", ids[:5])
    return 2


def two_batches_one_event(s: Scenario) -> int:
    ids = s.alloc("full", 12)
    assert ids
    s.free("full", ids[1:3])
    s.forward_begin("full", 1)
    s.flush("full")
    s.free("full", ids[3:5])
    s.flush("full")
    s.forward_done(1)
    s.flush("full")
    return 5


def frees(s: Scenario) -> int:
    ids = s.alloc("full", 6)
    assert ids
    s.free("full", ids[1:4])
    s.flush("full")
    return 1


def allocates(s: Scenario) -> int:
    s.alloc("full", 6)
    return 0


def grows_into_the_neighbour(s: Scenario) -> int:
    s.alloc("swa", 10)
    s.alloc("full", s.pools["full"].available_size())
    s.alloc("full", 8)
    return 2


def moves_what_is_written(s: Scenario) -> int:
    ids = s.alloc("full", 6)
    assert ids
    s.free("full", ids[0:1])
    s.free("full", ids[5:6])
    s.forward_begin("full", 1, writes=[ids[1], ids[4]])
    s.flush("full")
    s.forward_done(1)
    return 4


def reuses_what_is_read(s: Scenario) -> int:
    ids = s.alloc("full", 6)
    assert ids
    s.free("full", ids[4:5])
    s.forward_begin("full", 1, writes=None)
    s.flush("full")
    s.alloc("full", 2)
    s.forward_done(1)
    return 4


def moves_a_page(s: Scenario) -> int:
    ids = s.alloc("full", 16)
    assert ids
    s.free("full", ids[12:16])
    s.flush("full", urgent=True)
    return 2


def needs_its_neighbours_holes(s: Scenario) -> int:
    swa = s.alloc("swa", 10)
    assert swa
    s.alloc("full", s.pools["full"].available_size())
    s.free("swa", swa[2:6])
    assert s.alloc("full", 4) is not None
    return 3


def moves_many(s: Scenario) -> int:
    ids = s.alloc("full", 30)
    assert ids
    s.free("full", ids[20:30])
    s.flush("full")
    return 2


def moves_behind_a_gate(s: Scenario) -> int:
    ids = s.alloc("full", 6)
    assert ids
    s.free("full", ids[4:5])
    s.move_gate(is_open=False)
    s.flush("full", urgent=True)
    s.move_gate(is_open=True)
    return 2


def capacity_changes(s: Scenario) -> int:
    ids = s.alloc("full", 6)
    assert ids
    s.free("full", ids[4:5])
    s.flush("full", urgent=True)
    return 0


def decodes(s: Scenario) -> int:
    ids = s.alloc_extend("full", [0], [5], [-1])
    assert ids
    s.alloc_decode("full", [6], [ids[-1]])
    return 1


CASES: list[tuple[str, str, Callable[[Scenario], int], tuple[PoolShape, ...] | None, dict[str, object]]] = [
    ("StaleInverse", "C1", moves_in_one_flush, None, {}),
    ("SecondBatchReplacesFirst", "C2", two_batches_one_event, None, {}),
    ("FreesIdTwice", "C3", frees, None, {}),
    ("LosesAHole", "C4", frees, None, {}),
    ("OverlapsItsNeighbour", "C5", grows_into_the_neighbour, None, {}),
    ("ClearsBeforeCopying", "C6", moves_in_one_flush, None, {}),
    ("IgnoresWriteSet", "C7", moves_what_is_written, None, {}),
    ("ReusesAtOnce", "C8", reuses_what_is_read, None, {}),
    ("IgnoresGate", "C9", moves_behind_a_gate, None, {}),
    ("RemembersCapacity", "C10", capacity_changes, None, {}),
    ("NeverPacks", "C12", moves_in_one_flush, None, {}),
    ("DecodesPastTheToken", "C13", decodes, PAGED, {}),
    (
        "TranslatesToTheNextPage",
        "C14",
        moves_in_one_flush,
        None,
        {"enabled": frozenset({"C14"}), "logprob_every": 1},
    ),
    ("TranslatesByAnOldTable", "C1", moves_in_one_flush, None, {}),
    ("MovesHalfPages", "C6", moves_a_page, PAGED, {}),
    ("MovesAllButTheLast", "C4", moves_in_one_flush, None, {}),
    ("IgnoresItsBound", "C12", moves_many, None, {}),
    ("SkipsIdleFlushes", "C12", moves_many, None, {}),
    ("CountsWrong", "C4", allocates, None, {}),
    ("NeverAsksItsNeighbour", "C10", needs_its_neighbours_holes, None, {}),
]


@pytest.mark.parametrize(
    ("mutant", "check", "scenario", "shapes", "options"), CASES, ids=[case[0] for case in CASES]
)
def test_each_fault_is_named_at_its_event(
    tmp_path: Path,
    mutant: str,
    check: str,
    scenario: Callable[[Scenario], int],
    shapes: tuple[PoolShape, ...] | None,
    options: dict[str, object],
) -> None:
    made = Scenario(
        tmp_path / "s.msgpack.zst",
        shapes or (PoolShape("full", "down"), PoolShape("swa", "up", layer_num=2)),
        results=False,
        move_cap=4,
    )
    event = scenario(made)
    path = made.close()
    healthy = run(path, "kvtape", **options)
    assert healthy.verdict == "held", healthy.failure
    outcome = run(path, mutant, **options)
    assert outcome.failure is not None, f"{mutant} survived"
    assert (outcome.failure.check, outcome.failure.seq) == (check, event), outcome.failure


def test_another_placement_is_told_from_a_fault(tmp_path: Path) -> None:
    """C15 sees that places differ; with mapped ids the same allocator is judged on its own and holds."""
    path = Path(__file__).parents[2] / "traces" / "kimi_gb200.msgpack.zst"
    recorded = replay(
        ReplayOptions(
            path,
            TargetOptions(allocator="tests.replayer.mutants:TakesHighestHole"),
            CheckOptions(),
            until=8000,
        )
    )
    assert recorded.failure is not None and recorded.failure.check == "C15"
    mapped = replay(
        ReplayOptions(
            path,
            TargetOptions(allocator="tests.replayer.mutants:TakesHighestHole"),
            CheckOptions(),
            until=8000,
            ids="mapped",
            drain=False,
        )
    )
    assert mapped.verdict == "held", mapped.failure


def test_damage_outside_a_flush_is_narrowed_to_its_event(tmp_path: Path) -> None:
    """A sweep at the end meets a wrong table row; the second pass names the free that wrote it."""
    made = Scenario(tmp_path / "s.msgpack.zst", results=False)
    first = made.alloc("full", 5)
    second = made.alloc("full", 5)
    assert first and second
    made.alloc("swa", 3)
    made.free("full", second[2:4])
    made.alloc("swa", 2)
    made.alloc("swa", 1)
    outcome = run(made.close(), "LosesAHole")
    assert outcome.failure is not None
    assert (outcome.failure.check, outcome.failure.seq, outcome.narrowed_from) == ("C4", 3, 5)
