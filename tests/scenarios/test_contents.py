"""What pages hold, whose ids index which table, and what is recorded of ids that change."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from allocator import STRATEGIES, MultiEndedAllocator
from recorder.staging import Staging
from replayer.content import ByteStore
from replayer.targets import TargetOptions, build_pools
from tests.composite_scenario import SWA, CompositeScenario
from tests.scenario import PoolShape, Scenario, _Silent, header_for
from tests.scenarios.everywhere import holds_everywhere

pytestmark = pytest.mark.cpu

PAGED = (PoolShape("full", "down", page_size=4), PoolShape("swa", "up", page_size=4, layer_num=2))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_rows_that_nobody_wrote_read_as_finite(strategy: str) -> None:
    """sgl-project/sglang#33974: a freed page is poisoned with NaN, handed out again, and half of its rows are written."""
    state = build_pools(
        header_for(PAGED, 64 * 64 * 4), TargetOptions(strategy=strategy, kv="full"), _Silent()
    )["full"]
    pool, store = state.allocator, state.store
    assert isinstance(store, ByteStore)
    tokens = pool.alloc(16)
    places = pool.translate_kv_loc(tokens)
    for views in store.rows.layer_views().values():
        for view in views:
            view[places] = torch.nan
    pool.free(tokens)
    again = pool.translate_kv_loc(pool.alloc(16))
    assert set(again.tolist()) & set(places.tolist())
    for views in store.rows.layer_views().values():
        for view in views:
            view[again[::2]] = 1.0
            assert view[again].isfinite().all()


def test_rows_that_nobody_wrote_are_looked_at(tmp_path: Path) -> None:
    """sgl-project/sglang#33974, in a trace: half a page that had tokens of another request."""
    s = Scenario(tmp_path / "s.msgpack.zst", PAGED)
    ids = s.alloc("full", 16)
    assert ids
    s.free("full", ids[4:8])
    half = s.alloc_extend("full", [0], [2], [-1])
    assert half
    s.alloc_decode("full", [3], [half[-1]])
    for outcome in holds_everywhere(s.close()).values():
        assert outcome.held["C6"] > 0


def test_tables_have_the_size_of_the_id_space(tmp_path: Path) -> None:
    """sgl-project/sglang#37560: cheap pages own the ids, dear pages lie on the other side; ids go beyond its page count."""
    s = CompositeScenario(tmp_path / "s.msgpack.zst", SWA)
    full, swa = s.pools["full"], s.pools["swa"]
    assert full.num_virtual_ids > swa.num_pages
    assert swa.virtual_to_physical.shape == full.virtual_to_physical.shape
    ids: list[int] = []
    while not ids or max(ids) // 4 <= swa.num_pages:  # ids are handed out in turn, however few pages live
        taken = s.take(16)
        assert taken
        s.give(ids)
        ids = taken
    places = s.composite.translate_loc_from_full_to_swa(torch.tensor(ids))
    assert (places > 0).all() and len(set(places.tolist())) == len(ids)
    s.flush_all()
    for outcome in holds_everywhere(s.close()).values():
        assert outcome.held["C13"] > 0


class _Overwriting(MultiEndedAllocator):
    """Answers views of memory that it writes to at the next free."""

    _answers: torch.Tensor

    def alloc(self, need_size: int) -> torch.Tensor | None:
        tokens = super().alloc(need_size)
        assert tokens is not None
        self._answers = tokens
        return tokens.view(-1)

    def free(self, free_index: torch.Tensor | None, *, _pages: torch.Tensor | None = None) -> None:
        super().free(free_index, _pages=_pages)
        self._answers.fill_(-9)


def test_a_recorder_keeps_ids_as_they_were_when_it_saw_them() -> None:
    """NVIDIA/Megatron-LM#6584: what an alloc answers may be a view that a later free overwrites."""
    header = header_for(PAGED, 64 * 64 * 4)
    target = TargetOptions(allocator=f"{__name__}:{_Overwriting.__name__}", kv="stamp")
    pool = build_pools(header, target, _Silent())["full"].allocator
    staging = Staging(1 << 20)
    answer = pool.alloc(16)
    ids = answer.tolist()
    captured = staging.capture(answer)
    pool.free(answer[:4].clone())
    assert answer.tolist() == [-9] * 16
    released = staging.release(captured)
    assert released is not None and released.tolist() == ids
