"""What random programs have found in SGLang 0.5.23's own classes (docs/findings.md), shown on them and on ours."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from allocator import STRATEGIES
from allocator.errors import CorruptMappingError
from replayer.checks import CheckOptions
from replayer.fuzz.program import Program
from replayer.fuzz.shapes import CHAINS, Setting
from replayer.fuzz.sides import Disagreement
from replayer.replay import Outcome, ReplayOptions, replay
from replayer.targets import TargetOptions
from replayer.targets_sglang import install_cpu_stand_ins, sglang_version
from tests.allocator.composite_program import our_composite
from tests.engine.composites import LAYOUTS, Event, composite

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


@pytest.mark.parametrize("of_member", [False, True], ids=["composite", "sub-pool"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_segment_of_int64_that_waits_in_a_group_is_the_callers_own(layout: str, of_member: bool) -> None:
    """Its engine's rows are int32, and made into int64 they are a copy."""
    made = composite(layout, 4, lazy=True)
    full = made.full_attn_allocator
    grouping = full if of_member else made
    for dtype in (torch.int32, torch.int64):
        tokens = made.alloc(8)
        free = grouping.free_segment
        if "swa" in layout:
            made.free_swa(tokens)
            free = free if of_member else made.free_full_segment
        row = tokens.to(dtype, copy=True)
        grouping.free_group_begin()
        free(row, start_pos=0)
        row.fill_(-1)
        grouping.free_group_end()
        freed = full.free_virtual_ids[-2:].tolist()
        assert freed == ((tokens[::4] // 4).tolist() if dtype is torch.int32 else [-1, -1])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ours_takes_a_copy_of_it(strategy: str) -> None:
    made = our_composite("full and swa", 4, lazy=True, strategy=strategy)
    tokens = made.alloc(8)
    pages = (tokens[::4] // 4).tolist()
    row = tokens.clone()
    made.free_group_begin()
    made.free_segment(row, start_pos=0)
    row.fill_(-1)
    made.free_group_end()
    assert made.full_attn_allocator.free_virtual_ids[-2:].tolist() == pages


@pytest.mark.parametrize("is_ours", [False, True], ids=["SGLang", "ours"])
def test_a_load_that_is_queued_ends_every_reservation(is_ours: bool) -> None:
    """Ours follows: which places a load is for is not said to the allocator."""
    made = (
        our_composite("full and swa", 1, lazy=True, strategy="batched")
        if is_ours
        else composite("full and swa", 1, lazy=True)
    )
    swa = made.swa_attn_allocator
    tokens = made.alloc(1)
    kept = swa.alloc_physical(1)
    made.free_swa(tokens)
    made.set_full_to_swa_mapping(tokens, swa.alloc_physical(1))
    assert swa.moves_blocked()
    made.set_hicache_transfer_done_event(("one", "load"), Event())
    assert not swa.moves_blocked() and int(swa.physical_to_virtual[kept]) == -1
    made.free_swa(tokens)
    # The place that is reserved still has no id, and it is the one to be moved.
    with pytest.raises(CorruptMappingError if is_ours else RuntimeError):
        made.flush_opportunistic()
