"""What random programs have found in our allocators and in the replay, kept as small traces."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from allocator import (
    STRATEGIES,
    AllocatorError,
    MHASubPoolSpec,
    MultiEndedAllocator,
    UnifiedKVPool,
    kv_store_for,
)
from replayer.checks import CheckOptions
from replayer.fuzz.composite_program import CompositeProgram
from replayer.fuzz.shapes import COMPOSITES, Setting
from replayer.replay import ReplayOptions, replay
from replayer.targets import TargetOptions
from tests.scenario import PoolShape, Scenario

pytestmark = pytest.mark.cpu

EAGER = (
    PoolShape("full", "down", page_size=2, lazy=False),
    PoolShape("swa", "up", page_size=2, layer_num=3, lazy=False),
)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_eager_group_packs_after_its_tokens_and_again_after_its_segments(
    tmp_path: Path, strategy: str
) -> None:
    """SGLang 0.5.23 makes two frees of such a group. With one, pages end up elsewhere."""
    s = Scenario(tmp_path / "s.msgpack.zst", EAGER, 2432)
    ids = [token for _ in range(16) for token in s.alloc("full", 2) or []]
    top = s.place_of("full", ids[0] // 2)
    s.free_group_begin("full")
    s.free("full", ids[0:2])
    s.free_segment("full", ids[2:4], 0)
    s.free_group_end("full")
    # The first free brings the lowest page up to the top; the second one brings the page that is lowest then to the place below it.
    assert s.place_of("full", ids[-2] // 2) == top
    assert s.place_of("full", ids[-4] // 2) == top - 1
    outcome = replay(
        ReplayOptions(s.close(), TargetOptions(strategy=strategy, kv="full"), CheckOptions(every=1))
    )
    assert outcome.verdict == "held", outcome.failure


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_page_of_the_segments_may_move_before_it_goes(tmp_path: Path, strategy: str) -> None:
    """The replay once took the first packing's move of a page that the same group frees second for a move of nothing."""
    s = Scenario(tmp_path / "s.msgpack.zst", EAGER, 2432)
    ids = s.alloc("full", 6)
    assert ids
    s.free_group_begin("full")
    s.free_segment("full", ids[4:6], 0)
    s.free("full", ids[0:2])
    s.free_group_end("full")
    outcome = replay(
        ReplayOptions(s.close(), TargetOptions(strategy=strategy, kv="full"), CheckOptions(every=1))
    )
    assert outcome.verdict == "held", outcome.failure
    assert outcome.moved_outside_flushes == 1


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_refused_cancel_leaves_the_reservation(strategy: str) -> None:
    """An eager pool cannot pack while places are reserved, so of two reservations neither can be cancelled alone."""
    spec = MHASubPoolSpec(
        name="full", layer_num=1, grow_direction="up", head_num=1, head_dim=8, store_dtype=torch.float32
    )
    buffer = UnifiedKVPool(total_bytes=64 * 64, sub_pool_specs=[spec], device="cpu", page_size=1)
    made = MultiEndedAllocator(
        kvcache=kv_store_for(buffer, "full"),
        unified_buffer=buffer,
        sub_pool_name="full",
        device="cpu",
        is_id_owner=True,
        strategy=strategy,
    )
    first, second = made.alloc_physical(1), made.alloc_physical(1)
    assert first is not None and second is not None
    with pytest.raises(AllocatorError):
        made.cancel_physical_reservation(first)
    assert made.moves_blocked()
    made.cancel_physical_reservation(torch.cat([first, second]))
    assert made.watermark_physical == made.min_page_index and not made.moves_blocked()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_reserved_window_places_count_against_the_ids(tmp_path: Path, strategy: str) -> None:
    """A composite whose window pages are cheaper than full ones: places reserved for a load will need ids that the full side has few of.
    SGLang 0.5.23's `available_size()` forgets them and promises more than its alloc grants (tests/engine/test_findings.py)."""
    setting = Setting(COMPOSITES[1], 1, True, 4096, 8)
    path = tmp_path / "s.msgpack.zst"
    run = CompositeProgram(
        path, setting, [(strategy, TargetOptions(strategy=strategy, kv="stamp"))], "a test"
    )
    assert run.alloc_physical("swa", 3) is not None
    available = run.reference.composite.available_size()
    assert available == 2
    assert run.take(available + 1) is None
    assert run.take(available) is not None
    run.close()
    run.judge(TargetOptions(strategy=strategy))
