"""Traces of level ``composite`` driven against SGLang's own composites, and random programs in lockstep with them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from recorder.trace import COMPOSITE, TraceReader
from replayer.checks import CheckOptions
from replayer.fuzz import session as fuzzing
from replayer.fuzz.composite_program import CompositeProgram
from replayer.fuzz.joint import joint_figures, without_known_faults
from replayer.fuzz.session import FuzzOptions, Session
from replayer.fuzz.shapes import COMPOSITES, Setting
from replayer.replay import Outcome, ReplayOptions, replay
from replayer.targets import TargetOptions
from replayer.targets_sglang import remove_cpu_stand_ins, sglang_version
from tests.mutants import composites, transfers
from tests.mutants.registry import CompositeScene

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(
        sglang_version() != "0.5.23",
        reason="SGLang 0.5.23's classes are not installed (tools/build_sglang_env.sh)",
    ),
]

SCENES = sorted(
    {
        scene.name: scene
        for module in (composites, transfers)
        for scene in vars(module).values()
        if isinstance(scene, CompositeScene)
    }.items()
)
OURS = ("kvtape batched", TargetOptions(kv="stamp"))
THEIRS = ("SGLang 0.5.23", TargetOptions("sglang", kv="stamp"))


@pytest.fixture(autouse=True)
def stand_ins_do_not_outlive_a_test() -> Iterator[None]:
    yield
    remove_cpu_stand_ins()


def judged(path: Path, allocator: str = "sglang") -> Outcome:
    return replay(ReplayOptions(path, TargetOptions(allocator, kv="stamp"), CheckOptions(every=1)))


@pytest.mark.parametrize("name", [name for name, _ in SCENES])
def test_a_composites_trace_replays_on_sglangs(name: str, tmp_path: Path) -> None:
    outcome = judged(dict(SCENES)[name].write(tmp_path))
    if name == "pairs_again":
        # sgl-project/sglang#36135: what ours does otherwise (docs/composites.md).
        assert outcome.failure is not None and (outcome.failure.check, outcome.failure.seq) == ("C13", 4)
    else:
        assert outcome.verdict == "held", outcome.failure
    assert sum(outcome.held.values()) > 0


def test_there_are_scenes_of_every_composite() -> None:
    layouts = {frozenset(shape.name for shape in scene.layout) for _, scene in SCENES}
    assert layouts == {frozenset(shape.name for shape in chain.shapes) for chain in COMPOSITES}


# -- random programs


def fuzz(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **options: object) -> Session:
    """Of programs on composites alone."""
    monkeypatch.setattr(fuzzing, "_joins", lambda number: True)
    chosen = {"minutes": 5.0, "seed": 21, "against": "sglang", "out": tmp_path / "finds", **options}
    with Session(FuzzOptions(**chosen)) as session:  # type: ignore[arg-type]
        session.run()
    return session


def test_random_programs_find_no_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = fuzz(tmp_path, monkeypatch, rounds=2, calls=50, strategies=("batched", "device"))
    assert session.finds == []
    counts = session.counts
    assert counts["programs"] > 40 and all(counts[f"chain {chain.name}"] for chain in COMPOSITES)
    for visited in ("refused", "flushes that moved", "states with pages pending", "calls behind a shut gate"):
        assert counts[visited] > 0, visited
    for kind in (
        "alloc_extend_swa_tail", "ensure_capacity", "free_swa", "free_full_segment", "free_group_end", "flush_deferred_full_frees",
        "prepare_mamba_allocation", "slot_alloc", "set_full_to_swa_mapping", "backup_begin",
    ):  # fmt: skip
        assert counts[f"call {kind}"] > 0, kind


def test_what_places_otherwise_is_found_and_its_trace_is_a_composites(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocator = "tests.fuzz.faulty:TakesHighestHole"
    session = fuzz(
        tmp_path, monkeypatch, allocator=allocator, strategies=("batched",), calls=25, programs=80, rounds=4
    )
    (find,) = session.finds
    assert "SGLang 0.5.23" in find.message and f"--allocator {allocator}" in find.command
    with TraceReader(find.trace) as reader:
        assert reader.header.level == COMPOSITE and "SGLang 0.5.23" in reader.header.provenance.how
    assert judged(find.trace).verdict == "held"
    failure = judged(find.trace, allocator).failure
    assert failure is not None and failure.check == "C15"


# -- what SGLang's are known to say otherwise is put right by its own counts, and nothing else is


def program(path: Path, chain: int, pages: int) -> CompositeProgram:
    return CompositeProgram(path, Setting(COMPOSITES[chain], 1, True, 4096, pages), [OURS, THEIRS], "a test")


def test_the_promise_that_forgets_reserved_places(tmp_path: Path) -> None:
    run = program(tmp_path / "s.msgpack.zst", 1, 8)
    theirs = run.sides[1].composite
    assert joint_figures(theirs, None) == without_known_faults(theirs, None, joint_figures(theirs, None))
    run.alloc_physical("swa", 3)
    said = joint_figures(theirs, None)
    right = without_known_faults(theirs, None, said)
    assert (said["available_size"], right["available_size"]) == (3, 2)
    assert {name for name in said if said[name] != right[name]} == {"available_size"}
    run.close()
    assert judged(run.path, "kvtape").verdict == "held"
    failure = judged(run.path).failure
    assert failure is not None and failure.check == "C10"


def test_reserved_places_of_a_float(tmp_path: Path) -> None:
    run = program(tmp_path / "s.msgpack.zst", 3, 60)
    side = run.sides[1]
    run.take(4)
    run.alloc_physical("swa", 2)
    said = joint_figures(side.composite, side.slots)
    right = without_known_faults(side.composite, side.slots, said)
    assert (said["verify_byte_accounting"], right["verify_byte_accounting"]) == (["[swa]"], [])
    # One page more is missing than was reserved: that is not known, and stays.
    side.composite.swa_attn_allocator._pending_hicache_load_pages = 1
    assert without_known_faults(side.composite, side.slots, said)["verify_byte_accounting"] == ["[swa]"]
    run.close()
