"""Faults of composites: what several pools take and give together, and which window page goes with which id."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch

from allocator import (
    UnifiedMambaSWATokenToKVPoolAllocator,
    UnifiedMambaTokenToKVPoolAllocator,
    UnifiedSWATokenToKVPoolAllocator,
)
from allocator.composites.free_group import PairedFreeGroup, Queued
from allocator.forwards import ForwardDoneEvent
from tests.composite_scenario import MAMBA, MAMBA_SWA, SWA, CompositeScenario
from tests.mutants.registry import CompositeScene, Mutant

# -- scenes


def _scene(
    layout: Any = SWA, total_bytes: int = 64 * 256, leases_shut_gates: bool = False
) -> Callable[[Callable[[CompositeScenario], None]], CompositeScene]:
    return lambda play: CompositeScene(play, layout, total_bytes, leases_shut_gates)


@_scene(total_bytes=64 * 64)
def fits_alone_and_not_together(s: CompositeScenario) -> None:
    ids = s.take(8)
    assert ids
    assert s.take(40) is None  # 1
    more = s.take(s.composite.available_size())
    assert more
    s.give(ids)
    s.flush_all()


@_scene(total_bytes=512 + 8 * 768)
def fits_once_packed(s: CompositeScenario) -> None:
    ids = s.take(32)
    assert ids
    s.free_swa(ids[:28])  # holes of the window side only, and no gap that the full side could take
    assert s.composite.available_size() == 0
    assert s.take(16)  # 2


@_scene()
def pairs_again(s: CompositeScenario) -> None:
    ids = s.take(12)
    assert ids
    s.group_begin()
    s.give(ids[4:8])
    places = s.alloc_physical("swa", 4)
    assert places
    s.set_full_to_swa_mapping(ids[4:8], places)  # 4
    s.group_end()  # 5
    s.free_physical("swa", places)
    s.take(8)


@_scene()
def leaves_the_window(s: CompositeScenario) -> None:
    ids = s.take(16)
    assert ids
    s.free_swa(ids[:8])  # 1
    s.free_full(ids[:4])
    s.give(ids[8:12])  # 3
    s.flush_all()


@_scene()
def extends_with_a_tail(s: CompositeScenario) -> None:
    ids = s.extend_swa_tail(0, 22, -1, 5)  # 0: only the last tokens are inside the window
    assert ids
    s.give(ids)


@_scene()
def groups_both_sides(s: CompositeScenario) -> None:
    ids = s.take(24)
    assert ids
    s.group_begin()
    s.give(ids[:4])
    s.give_segment(ids[4:12], 4)
    s.group_end()  # 4
    s.group_begin()
    s.give(ids[12:16])
    s.group_end()  # 7
    s.flush_all()


@_scene(MAMBA, leases_shut_gates=True)
def leases_a_slot(s: CompositeScenario) -> None:
    slots, ids = s.slot_alloc(4), s.take(8)
    assert slots and ids
    s.export(1, "mamba", slots[3:])  # 2
    s.slot_free(slots[:1])
    s.flush_all()
    s.lease_end(1, "mamba")


@_scene()
def reuses_ids(s: CompositeScenario) -> None:
    """Ids go round: they pass the number of pages that the dear side has (sgl-project/sglang#37560)."""
    ids: list[int] = []
    while not ids or max(ids) // 4 <= s.pools["swa"].num_pages:
        taken = s.take(40)
        assert taken
        s.give(ids)
        ids = taken


def fill(s: CompositeScenario, size: int) -> list[int]:
    """Allocs of so many tokens until one is refused."""
    ids: list[int] = []
    while (taken := s.take(size)) is not None:
        ids += taken
    return ids


@_scene(MAMBA, total_bytes=64 * 128)
def prepares_for_states(s: CompositeScenario) -> None:
    ids = fill(s, 16)  # 0 to 7
    s.give(ids[:64])
    slots = s.pools["mamba"].schedulable_available_size()
    assert s.pools["mamba"].available_size() < slots
    s.prepare_mamba_allocation(slots)  # 9
    s.flush("full")


@_scene(MAMBA_SWA)
def packs_the_ends_for_a_float(s: CompositeScenario) -> None:
    slots = s.slot_alloc(60)
    assert slots
    fill(s, 8)  # 1 to 8
    s.slot_free(slots[:50])
    assert s.ensure_capacity(0, 16)  # 10
    s.flush_all()


@_scene(MAMBA)
def backs_up_a_state(s: CompositeScenario) -> None:
    slots, ids = s.slot_alloc(6), s.take(8)
    assert slots and ids
    s.backup(1, "mamba", slots[4:], [0, 1])
    s.slot_free(slots[:2])
    s.flush_all()  # 4
    s.copy_done(1)


@_scene()
def writes_behind_the_window(s: CompositeScenario) -> None:
    ids = s.take(32)
    assert ids
    s.launch(1, ids[28:29])
    s.free_swa(ids[:4])
    s.flush_all()  # 3: the last page would come here, and a forward writes it
    s.forward_done(1)
    s.flush_all()


# -- mutants


class EachSideAlone(UnifiedSWATokenToKVPoolAllocator):
    """What fits is the smaller of what each side has alone."""

    def _compute_available_size(self) -> int:
        return min(self.full_attn_allocator.available_size(), self.swa_attn_allocator.available_size())


class KeepsTheFullSide(UnifiedSWATokenToKVPoolAllocator):
    """A refused request keeps what it took of the full side."""

    def ensure_capacity(self, full_tokens: int, swa_tokens: int) -> bool:
        if super().ensure_capacity(full_tokens, swa_tokens):
            return True
        self.full_attn_allocator.alloc(self.page_size)
        return False


class NeverPacksBoth(UnifiedSWATokenToKVPoolAllocator):
    """A request that would fit once the pools are packed is refused."""

    def ensure_capacity(self, full_tokens: int, swa_tokens: int) -> bool:
        return max(full_tokens, swa_tokens) <= self.available_size()


class FreesTheFullSideOnly(UnifiedSWATokenToKVPoolAllocator):
    """A free of both sides leaves the window page."""

    def _free_tokens(self, tokens: torch.Tensor, is_paired: torch.Tensor | None) -> None:
        super()._free_tokens(tokens, torch.zeros_like(tokens, dtype=torch.bool))


class PairsAWholeTail(UnifiedSWATokenToKVPoolAllocator):
    """Pages before the window get window pages too."""

    def alloc_extend_swa_tail(self, *arguments: Any) -> torch.Tensor | None:
        return self.alloc_extend(*arguments[:6])


class FreesThePaddingPage(UnifiedSWATokenToKVPoolAllocator):
    """Ids without a window page read as the padding page, which becomes a hole."""

    def free_full(self, free_index: torch.Tensor | None) -> None:
        super().free_full(free_index)
        self.swa_attn_allocator.holes.add(torch.zeros(1, dtype=torch.int64))


class _Forgetful(PairedFreeGroup):
    def _mask(self, entry: Queued) -> torch.Tensor | None:
        return entry.was_paired


class ForgetsOldClaims(UnifiedSWATokenToKVPoolAllocator):
    """A group releases the window page that its ids have when it closes, and not the one that they had when they were queued."""

    def free_group_begin(self) -> None:
        super().free_group_begin()
        assert self._group is not None
        self._group.__class__ = _Forgetful


class ReleasesAGroupTwice(UnifiedSWATokenToKVPoolAllocator):
    """The end of a group frees what the group before it held."""

    _before: list[Any] | None = None

    def free_group_end(self) -> None:
        group = self._group
        if group is not None:
            queued, self._before = self._before or [], list(group.both)
            group.both.extend(queued)
        super().free_group_end()


class ForgetsSegmentsOfAGroup(UnifiedSWATokenToKVPoolAllocator):
    """Segments that were queued are not freed at the end of the group."""

    def free_group_end(self) -> None:
        if self._group is not None:
            self._group.both_segments.clear()
        super().free_group_end()


class SizesTheTableByPages(UnifiedSWATokenToKVPoolAllocator):
    """The window side's table is as long as it has pages: ids beyond that are written to its last row."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        swa = self.swa_attn_allocator
        bind, last = swa._tables.bind, swa.num_pages

        def short(virtual_pages: torch.Tensor, physical_pages: torch.Tensor) -> None:
            bind(virtual_pages.clamp(max=last), physical_pages)

        swa._tables.bind = short  # type: ignore[method-assign]


class GatesAttentionOnly(UnifiedMambaTokenToKVPoolAllocator):
    """The state pool does not learn of the gate."""

    def set_disagg_move_gate(self, gate: Callable[[], bool]) -> None:
        self.full_attn_allocator.disagg_move_gate = gate


class ReadsTheWindowInTheFullPool(UnifiedSWATokenToKVPoolAllocator):
    """What the window's readers use translates to places of the full side."""

    def translate_loc_from_full_to_swa(
        self, kv_indices: torch.Tensor, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self.full_attn_allocator.translate_kv_loc(kv_indices, out=out)


class PlansWithAnEmptyWindow(UnifiedSWATokenToKVPoolAllocator):
    """The scheduler is told that the whole window side is left."""

    def conserve_swa_available_size(self) -> int:
        return self.size_swa


class PreparesNothing(UnifiedMambaTokenToKVPoolAllocator):
    """Nothing is packed for the states that are to be taken next."""

    def prepare_mamba_allocation(self, target_size: int) -> None:
        self.flush_deferred_full_frees()


class NeverPacksTheEnds(UnifiedMambaSWATokenToKVPoolAllocator):
    """What would fit beside the float once the ends are packed is refused."""

    def ensure_capacity(self, full_tokens: int, swa_tokens: int) -> bool:
        self._settle()
        return self._fits_as_it_lies(-(-full_tokens // self.page_size), -(-swa_tokens // self.page_size))


class CopiesOfAttentionOnly(UnifiedMambaTokenToKVPoolAllocator):
    """The state pool does not learn of copies to the host."""

    def set_hicache_transfer_done_event(self, transfer_key: Hashable, event: ForwardDoneEvent) -> None:
        self.full_attn_allocator.set_hicache_transfer_done_event(transfer_key, event)


class WritesOfTheFullSideOnly(UnifiedSWATokenToKVPoolAllocator):
    """The window pool does not learn what the running forward writes."""

    def set_inflight_forward(
        self, forward_done: ForwardDoneEvent, out_cache_loc_virtual: torch.Tensor | None
    ) -> None:
        self.full_attn_allocator.set_inflight_forward(forward_done, out_cache_loc_virtual)


MUTANTS = [
    Mutant(EachSideAlone, "C10", 0, fits_alone_and_not_together, row="F8"),
    Mutant(KeepsTheFullSide, "C4", 1, fits_alone_and_not_together, row="F8"),
    Mutant(NeverPacksBoth, "C10", 2, fits_once_packed, row="F9"),
    Mutant(FreesTheFullSideOnly, "C1", 3, leaves_the_window),
    Mutant(PairsAWholeTail, "C13", 0, extends_with_a_tail),
    Mutant(FreesThePaddingPage, "C3", 2, leaves_the_window, row="F14"),
    Mutant(ForgetsOldClaims, "C13", 5, pairs_again, row="F12"),
    Mutant(ReleasesAGroupTwice, "C13", 7, groups_both_sides, row="F13"),
    Mutant(ForgetsSegmentsOfAGroup, "C1", 4, groups_both_sides),
    Mutant(
        SizesTheTableByPages, "C13", 6, reuses_ids, row="F10", named="C1",
        reason="an id past the table is met first as one that was handed out without a place",
    ),
    Mutant(GatesAttentionOnly, "C9", 2, leases_a_slot, row="F7"),
    Mutant(ReadsTheWindowInTheFullPool, "C1", 0, leaves_the_window),
    Mutant(PlansWithAnEmptyWindow, "C10", 0, leaves_the_window),
    Mutant(PreparesNothing, "C10", 9, prepares_for_states, row="F9"),
    Mutant(NeverPacksTheEnds, "C10", 10, packs_the_ends_for_a_float, row="F9"),
    Mutant(CopiesOfAttentionOnly, "C8", 4, backs_up_a_state, row="F7"),
    Mutant(WritesOfTheFullSideOnly, "C7", 3, writes_behind_the_window),
]  # fmt: skip
