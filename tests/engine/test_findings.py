"""What random programs have found in SGLang 0.5.23's own classes (docs/findings.md), shown on them and on ours."""

from __future__ import annotations

from pathlib import Path

import pytest

from replayer.checks import CheckOptions
from replayer.fuzz.program import Program
from replayer.fuzz.shapes import CHAINS, Setting
from replayer.fuzz.sides import Disagreement
from replayer.replay import Outcome, ReplayOptions, replay
from replayer.targets import TargetOptions
from replayer.targets_sglang import install_cpu_stand_ins, sglang_version
from tests.engine.composites import composite

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(
        sglang_version() != "0.5.23",
        reason="SGLang 0.5.23's classes are not installed (tools/build_sglang_env.sh)",
    ),
]

OURS = ("kvtape batched", TargetOptions(kv="stamp"))
THEIRS = ("SGLang 0.5.23", TargetOptions("sglang", kv="stamp"))


def program(path: Path, *, page_size: int, move_cap: int = 4096) -> Program:
    """Of SGLang's classes and ours, whose answers are the trace's."""
    setting = Setting(CHAINS[0], page_size, True, move_cap, 30)
    return Program(path, setting, [OURS, THEIRS], "a finding of kvtape fuzz")


def judged(path: Path, allocator: str) -> Outcome:
    return replay(ReplayOptions(path, TargetOptions(allocator), CheckOptions(every=1)))


def test_alloc_decode_at_page_size_1_takes_no_page(tmp_path: Path) -> None:
    path = tmp_path / "decode.msgpack.zst"
    run = program(path, page_size=1)
    (token,) = run.alloc("full", 1) or []
    with pytest.raises(Disagreement, match="after alloc_decode"):
        run.alloc_decode("full", [2], [token])
    ours, theirs = run.sides
    assert theirs.figures("full")["allocated_count"] == 1 and ours.figures("full")["allocated_count"] == 2
    assert token + 1 in theirs.figures("full")["free_virtual_ids"], "answered, and free still"
    run.close()
    assert judged(path, "kvtape").verdict == "held"
    failure = judged(path, "sglang").failure
    assert failure is not None and (failure.check, failure.seq) == ("C1", 1)


def test_a_bound_of_0_moves_one_page(tmp_path: Path) -> None:
    path = tmp_path / "bound.msgpack.zst"
    run = program(path, page_size=1, move_cap=0)
    tokens = [token for _ in range(4) for token in run.alloc("full", 1) or []]
    run.free("full", tokens[:2])
    with pytest.raises(Disagreement, match=r"SGLang 0\.5\.23 answers 1 to flush, kvtape batched 0"):
        run.flush("full", urgent=False)
    run.close()
    assert judged(path, "kvtape").verdict == "held"
    failure = judged(path, "sglang").failure
    assert failure is not None and (failure.check, failure.seq) == ("C15", 5)


def test_available_size_of_two_sides_forgets_that_reserved_places_need_ids() -> None:
    install_cpu_stand_ins()
    made = composite("full and swa", 1, lazy=True, layers=(3, 1))
    full, swa = made.full_attn_allocator, made.swa_attn_allocator
    ids = full.num_virtual_ids - full.min_page_index
    assert swa.num_pages > ids
    assert swa.alloc_physical(ids - 2) is not None
    promised = made.available_size()
    assert promised > 2 and made.alloc(promised) is None
    assert made.alloc(2) is not None
