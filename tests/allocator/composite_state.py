"""What there is to see of a composite, and what must hold of it whatever was called."""

from __future__ import annotations

from typing import Any

import torch

from allocator.composites.members import Composite


def pools_of(made: Any) -> dict[str, Any]:
    return {pool.sub_pool_name: pool for pool in made._chain()}


def composite_state(made: Composite) -> dict[str, Any]:
    """Everything that a call could change, order of the lists included."""
    found = {}
    for name, pool in pools_of(made).items():
        ids = pool.free_virtual_ids
        found[name] = {
            "v2p": pool.virtual_to_physical.tolist(), "p2v": pool.physical_to_virtual.tolist(),
            "ids": None if ids is None else ids.tolist(), "holes": pool._free_phys_pages.tolist(),
            "pending": sorted(pool._pending_reuse_pages_cpu), "watermark": pool.watermark_physical,
            "span": [getattr(pool, each, None) for each in ("low_wm_page", "high_wm_page", "_next_hole_end", "_holes_dirty")],
            "live": pool.allocated_count(), "reserved": pool._pending_hicache_load_pages,
        }  # fmt: skip
    return found


def live_pages(pool: Any) -> dict[int, int]:
    """Virtual page to physical page, from the table, without the padding pair."""
    table = pool.virtual_to_physical[: pool.num_virtual_ids].tolist()
    return {virtual: physical for virtual, physical in enumerate(table) if virtual and physical >= 0}


def check(made: Any) -> None:
    """Tables, lists, bands and sizes agree, counted anew from the tables."""
    frontier = 0
    for pool in made._chain():
        name, live = pool.sub_pool_name, live_pages(pool)
        assert len(set(live.values())) == len(live), f"{name}: two ids on one page"
        for virtual, physical in live.items():
            assert int(pool.physical_to_virtual[physical]) == virtual, f"{name}: inverse of {physical}"
        assert int(pool.virtual_to_physical[0]) == int(pool.physical_to_virtual[0]) == 0
        low, high = pool._band_pages()
        holes, pending = pool._free_phys_pages.tolist(), pool._pending_reuse_pages_cpu
        taken = [*live.values(), *holes, *pending]
        assert len(set(taken)) == len(taken), f"{name}: a page is two things at once"
        assert set(taken) <= set(range(low, high)), f"{name}: pages outside [{low}, {high})"
        # Reserved pages are bound before their load is queued, which is when they stop counting as reserved.
        assert 0 <= high - low - len(taken) <= pool._pending_hicache_load_pages, (
            f"{name}: pages that are nothing"
        )
        assert 0 not in taken and all(page >= pool.min_page_index for page in taken)
        if pool.free_virtual_ids is not None:
            free = pool.free_virtual_ids.tolist()
            assert sorted([*free, *live]) == list(range(pool.min_page_index, pool.num_virtual_ids)), (
                f"{name}: ids"
            )
        if high > low and not (pool.grow_direction == "float" and not live):
            assert low * pool.entry_bytes_per_page >= frontier, f"{name}: overlaps the pool below"
            frontier = high * pool.entry_bytes_per_page
    if hasattr(made, "swa_attn_allocator"):
        orphans = set(live_pages(made.swa_attn_allocator)) - set(live_pages(made.full_attn_allocator))
        assert not orphans, f"window pages of ids that are free: {sorted(orphans)}"
    assert made.verify_byte_accounting() == []


class Stamps:
    """A value in the first bytes of every live page, which has to move with it."""

    def __init__(self, made: Any) -> None:
        self.made = made
        self._next = 1
        self._stamps: dict[str, dict[int, int]] = {name: {} for name in pools_of(made)}

    def look(self) -> int:
        """Compare what was there, stamp what is new; how many pages were compared."""
        compared = 0
        for name, pool in pools_of(self.made).items():
            pages = self.made.unified_buffer.pages(name)[:, :8]
            known, live = self._stamps[name], live_pages(pool)
            for virtual in [virtual for virtual in known if virtual not in live]:
                del known[virtual]
            for virtual, physical in live.items():
                if virtual in known:
                    found = int(pages[physical].contiguous().view(torch.int64)[0])
                    assert found == known[virtual], (
                        f"{name}: bytes of virtual page {virtual} on page {physical}"
                    )
                    compared += 1
                else:
                    known[virtual] = self._next
                    pages[physical].copy_(torch.tensor([self._next]).view(torch.uint8))
                    self._next += 1
        return compared
