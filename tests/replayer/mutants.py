"""Allocators with one fault each; `test_mutants.py` says which check must see it, and at which event."""

from __future__ import annotations

from typing import Any

import torch

from allocator import MultiEndedAllocator
from allocator.forwards import ForwardDoneEvent, PendingReuse, _Waiting


class StaleInverse(MultiEndedAllocator):
    """A move forgets to write the inverse entry at the new place."""

    def _move(self, src_list: list[int], dst_list: list[int]) -> torch.Tensor:
        src = super()._move(src_list, dst_list)
        self.physical_to_virtual.index_fill_(0, torch.tensor(dst_list), -1)
        return src


class _Replacing(PendingReuse):
    def add(self, event: ForwardDoneEvent, pages_on_host: Any, pages: torch.Tensor) -> None:
        listed = list(pages_on_host)
        self._waiting[event] = _Waiting(listed, [pages])
        self.pages_on_host.update(listed)


class SecondBatchReplacesFirst(MultiEndedAllocator):
    """Two flushes during one forward: only the second one's pages come back (sgl-project/sglang#39982)."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._pending = _Replacing()


class FreesIdTwice(MultiEndedAllocator):
    """A freed id enters the free list twice."""

    def _free_pages(self, virtual_pages: torch.Tensor, *, may_repeat: bool) -> None:
        super()._free_pages(virtual_pages, may_repeat=may_repeat)
        assert self._ids is not None
        self._ids.append(virtual_pages[:1])


class LosesAHole(MultiEndedAllocator):
    """The last page of a free is forgotten."""

    def _release_physical(self, physical_pages: torch.Tensor) -> None:
        super()._release_physical(physical_pages[:-1] if physical_pages.shape[0] > 1 else physical_pages)


class OverlapsItsNeighbour(MultiEndedAllocator):
    """Knows its capacity, and grows beyond it into the next band."""

    def _make_sure_of(self, num_pages: int) -> bool:
        return True

    def _extend_watermark(self, num_pages: int) -> bool:
        self.watermark_physical += num_pages if self.grow_direction == "up" else -num_pages
        return True


class ClearsBeforeCopying(MultiEndedAllocator):
    """The source is zeroed before its bytes are copied."""

    def _move(self, src_list: list[int], dst_list: list[int]) -> torch.Tensor:
        self._zero_pages(torch.tensor(src_list))
        return super()._move(src_list, dst_list)


class IgnoresWriteSet(MultiEndedAllocator):
    def _read_write_set(self) -> set[int]:
        return set()


class ReusesAtOnce(MultiEndedAllocator):
    """Moved-out pages are holes at once, though a forward still reads them."""

    def _vacate(self, src_pages: torch.Tensor, src_list: list[int]) -> None:
        self.holes.add(src_pages)


class IgnoresGate(MultiEndedAllocator):
    def moves_blocked(self) -> bool:
        return False


class RemembersCapacity(MultiEndedAllocator):
    """Capacity is computed once and kept."""

    _remembered: int | None = None

    def available_size(self) -> int:
        if self._remembered is None:
            self._remembered = super().available_size()
        return self._remembered


class NeverPacks(MultiEndedAllocator):
    """A flush gives up before moving anything."""

    def _flush(self, *, urgent: bool) -> int:
        return 0


class DecodesPastTheToken(MultiEndedAllocator):
    def alloc_decode(
        self, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor, last_loc: torch.Tensor
    ) -> torch.Tensor | None:
        tokens = super().alloc_decode(seq_lens, seq_lens_cpu, last_loc)
        return None if tokens is None else tokens + 1


class TranslatesToTheNextPage(MultiEndedAllocator):
    """Tables and bytes are right; the translation that readers use is not."""

    def translate_kv_loc(self, virt_tokens: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        shifted = super().translate_kv_loc(virt_tokens, out=out) + self.page_size
        return shifted.clamp_(max=self.max_slots - 1)


class TranslatesByAnOldTable(MultiEndedAllocator):
    """Translates by a copy of the table that every alloc renews, and no flush."""

    _copy: torch.Tensor | None = None

    def _take_and_bind(self, virtual_pages: torch.Tensor, num_pages: int) -> torch.Tensor | None:
        taken = super()._take_and_bind(virtual_pages, num_pages)
        self._copy = self.virtual_to_physical.clone()
        return taken

    def translate_kv_loc(self, virt_tokens: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        current = self._tables.virtual_to_physical
        self._tables.virtual_to_physical = current if self._copy is None else self._copy
        try:
            return super().translate_kv_loc(virt_tokens, out=out)
        finally:
            self._tables.virtual_to_physical = current


class MovesHalfPages(MultiEndedAllocator):
    """Asks for moves of half a page."""

    def _move(self, src_list: list[int], dst_list: list[int]) -> torch.Tensor:
        self.page_size, size = self.page_size // 2, self.page_size
        try:
            return super()._move(src_list, dst_list)
        finally:
            self.page_size = size


class MovesAllButTheLast(MultiEndedAllocator):
    """The bytes of the last page of a batch stay behind."""

    def _move(self, src_list: list[int], dst_list: list[int]) -> torch.Tensor:
        store, self._kvcache = self._kvcache, _AllButTheLast(self._kvcache)
        try:
            return super()._move(src_list, dst_list)
        finally:
            self._kvcache = store


class _AllButTheLast:
    def __init__(self, store: Any) -> None:
        self._store = store

    def move_physical_pages(self, dst_pages: torch.Tensor, src_pages: torch.Tensor, page_size: int) -> None:
        self._store.move_physical_pages(dst_pages[:-1], src_pages[:-1], page_size)


class IgnoresItsBound(MultiEndedAllocator):
    """An opportunistic flush moves as many pages as it likes."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)

    def _flush(self, *, urgent: bool) -> int:
        bound, self._lazy_max_moves_per_call = self._lazy_max_moves_per_call, 10**6
        try:
            return super()._flush(urgent=urgent)
        finally:
            self._lazy_max_moves_per_call = bound


class SkipsIdleFlushes(MultiEndedAllocator):
    def flush_opportunistic(self) -> int:
        return 0


class CountsWrong(MultiEndedAllocator):
    """Only what it reports of itself is wrong."""

    def allocated_count(self) -> int:
        return super().allocated_count() + self.page_size


class NeverAsksItsNeighbour(MultiEndedAllocator):
    """Promises what a flush of the neighbour would give, and does not flush it."""

    def _make_sure_of(self, num_pages: int) -> bool:
        return num_pages * self.page_size <= self.available_size()


class TakesHighestHole(MultiEndedAllocator):
    """Correct in every way, but places otherwise than the engine."""

    def take_physical_pages(self, num_pages: int) -> torch.Tensor | None:
        taken = super().take_physical_pages(num_pages)
        return None if taken is None else taken.flip(0)
