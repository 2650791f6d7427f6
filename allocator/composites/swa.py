"""`UnifiedSWATokenToKVPoolAllocator`: a full pool and a window pool at the two ends of one buffer."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from typing import Any

from allocator.composites.reclaim import PlannedReclaim
from allocator.end import MultiEndedAllocator
from allocator.errors import ConfigurationError
from allocator.late_room import LateRoom


class UnifiedSWATokenToKVPoolAllocator(PlannedReclaim):
    """Tokens of a model with sliding-window layers. Takes the arguments of `UnifiedSWAAllocatorBase`.

    Both sides take bytes from the gap between them, so a request is judged on what it needs of both together
    (sgl-project/sglang#39294), under the gates as they are now (#39982, #38836).
    """

    def _make_window_pool(self, **arguments: Any) -> MultiEndedAllocator:
        return self._end_class(**arguments)

    def _join_pools(self) -> None:
        self.full_attn_allocator.bind_peer(self.swa_attn_allocator)
        self.swa_attn_allocator.bind_peer(self.full_attn_allocator)

    def _move_gate_targets(self) -> tuple[MultiEndedAllocator, ...]:
        return self.full_attn_allocator, self.swa_attn_allocator

    def _chain(self) -> tuple[MultiEndedAllocator, ...]:
        full, swa = self.full_attn_allocator, self.swa_attn_allocator
        return (full, swa) if full.grow_direction == "up" else (swa, full)

    # -- what fits

    def _compute_available_size(self) -> int:
        full, swa = self.full_attn_allocator, self.swa_attn_allocator
        pools = sorted((len(pool.holes), pool.entry_bytes_per_page) for pool in (full, swa))
        (fewer, its_bytes), (more, other_bytes) = pools
        gap = full._current_gap_bytes()
        # Holes of both first; then one side extends while the other still fills holes; then both extend.
        one_extends = min(more - fewer, gap // its_bytes)
        both_extend = (gap - one_extends * its_bytes) // (its_bytes + other_bytes)
        by_index = min(len(pool.holes) + pool._index_room() for pool in (full, swa))
        # Places reserved for a load count against the ids that will name them, as in `_fits_page_demand`. SGLang 0.5.23 forgets them here,
        # and so promises more than its own `ensure_capacity` grants.
        by_ids = max(0, full.num_virtual_ids - full.min_page_index - swa.allocated_count() // self.page_size)
        return min(fewer + one_extends + both_extend, by_index, by_ids) * self.page_size

    def _fits_page_demand(
        self,
        num_full_pages: int,
        num_swa_pages: int,
        *,
        full_reclaim_pages: int = 0,
        swa_reclaim_pages: int = 0,
        compacted: bool,
        empty_pool: bool = False,
    ) -> bool:
        """Whether so many pages of each side fit together: as everything lies now, or with every hole packed away (``compacted``). Live
        pages that a cache could give up count as free, and with ``empty_pool`` all do."""
        if num_full_pages < 0 or num_swa_pages < 0:
            return False
        full, swa = self.full_attn_allocator, self.swa_attn_allocator
        ids = full.num_virtual_ids - full.min_page_index
        extension = kept_bytes = 0
        for pool, pages, reclaim in (
            (full, num_full_pages, full_reclaim_pages),
            (swa, num_swa_pages, swa_reclaim_pages),
        ):
            live = 0 if empty_pool else pool._most_live_pages()
            reclaimed = min(live, max(0, reclaim))
            kept = live - reclaimed
            if kept + pages > min(ids, pool.num_pages - pool.min_page_index):
                return False
            holes = 0 if compacted else len(pool.holes) + reclaimed
            beyond_holes = max(0, pages - holes)
            if not compacted and beyond_holes > pool._index_room():
                return False
            extension += beyond_holes * pool.entry_bytes_per_page
            kept_bytes += kept * pool.entry_bytes_per_page
        if compacted:
            return extension <= max(0, self._empty_shared_gap_bytes - kept_bytes)
        if num_full_pages > full.free_id_count + min(full_reclaim_pages, full._most_live_pages()):
            return False
        # Bounds of the two may overlap: holes that one of them shows are not all there then. Only that one's gap says so.
        return extension <= min(full._current_gap_bytes(), swa._current_gap_bytes())

    def _fits_as_it_lies(self, full_pages: int, swa_pages: int) -> bool:
        return self._fits_page_demand(full_pages, swa_pages, compacted=False)

    def _knows_live(self) -> bool:
        return all(pool._knows_live() for pool in self._move_gate_targets())

    def _compaction_allowed(self) -> bool:
        return not any(pool.moves_blocked() for pool in self._move_gate_targets())

    def ensure_capacity(self, full_tokens: int, swa_tokens: int) -> bool:
        if full_tokens < 0 or swa_tokens < 0:
            return False
        pages = self._pages_for(full_tokens), self._pages_for(swa_tokens)
        if pages == (0, 0):
            return True
        self._poll()
        if self._fits_as_it_lies(*pages):
            return True
        # On bounds alone, where sizes come late, nothing is flushed, and nothing is refused that might fit packed.
        if self._knows_live() and not self._fits_page_demand(*pages, compacted=True):
            return False
        may_pack = self._compaction_allowed()  # of an eager pool there is nothing to pack
        if may_pack and self._packs_if_lacking(*pages):
            return True
        self._settle()
        if self._fits_as_it_lies(*pages):
            return True
        if not may_pack or not self._fits_page_demand(*pages, compacted=True):
            return False
        for pool in self._move_gate_targets():
            pool.flush_for_allocation()
        return self._fits_as_it_lies(*pages)

    def _packs_if_lacking(self, full_pages: int, swa_pages: int) -> bool:
        """Whether it was left to the device to find out if the two sides have to be packed. They have room for the request then, one way or
        the other."""
        full, swa = self._move_gate_targets()
        return (
            isinstance(full, LateRoom)
            and isinstance(swa, LateRoom)
            and self._fits_page_demand(full_pages, swa_pages, compacted=True)
            and full.pack_both_if_lacking(full_pages, swa, swa_pages)
        )

    def _pages_for(self, tokens: float) -> int:
        return -(-math.ceil(tokens) // self.page_size)

    # -- what a scheduler may count on

    def reclaim_plan(
        self,
        full_tokens: float,
        swa_tokens: float,
        *,
        full_evictable_tokens: int = 0,
        swa_evictable_tokens: int = 0,
        empty_pool: bool = False,
        prefer_swa: bool = False,
    ) -> tuple[int, int] | None:
        """The fewest tokens of the two sides that a cache has to give up for a request, ``(full, window)``; None if giving up all that is
        evictable is not enough. The window side is spared first, with ``prefer_swa`` the full side."""
        if full_tokens < 0 or swa_tokens < 0:
            return None
        self._poll()
        demand = self._pages_for(full_tokens), self._pages_for(swa_tokens)
        compacted = empty_pool or not self.lazy_compaction or self._compaction_allowed()

        def fits(full_pages: int, swa_pages: int) -> bool:
            return self._fits_page_demand(
                *demand, full_reclaim_pages=full_pages, swa_reclaim_pages=swa_pages, compacted=compacted,
                empty_pool=empty_pool,
            )  # fmt: skip

        if fits(0, 0):
            return 0, 0
        if empty_pool:
            return None
        # On bounds alone, where sizes come late, nothing is refused and nothing is given up. With everything packed live pages are all
        # that counts: `allocated_count` waits for those that are not known, and mostly they are.
        if not compacted:
            self._settle()
        full_most, swa_most = (
            min(pool.allocated_count(), max(0, int(evictable))) // self.page_size
            for pool, evictable in (
                (self.full_attn_allocator, full_evictable_tokens),
                (self.swa_attn_allocator, swa_evictable_tokens),
            )
        )
        if not fits(full_most, swa_most):
            return None
        if prefer_swa:
            full_pages = _first(full_most, lambda pages: fits(pages, swa_most))
            swa_pages = _first(swa_most, lambda pages: fits(full_pages, pages))
        else:
            swa_pages = _first(swa_most, lambda pages: fits(full_most, pages))
            full_pages = _first(full_most, lambda pages: fits(pages, swa_pages))
        return full_pages * self.page_size, swa_pages * self.page_size

    def can_reserve(
        self,
        full_tokens: float,
        swa_tokens: float,
        *,
        full_evictable_tokens: int = 0,
        swa_evictable_tokens: int = 0,
        empty_pool: bool = False,
        require_token_slack: bool = False,
    ) -> bool:
        """Whether a request fits once a cache has given up all that it can; with ``require_token_slack`` one token must be left of either
        maximum."""
        if full_tokens < 0 or swa_tokens < 0:
            return False
        if require_token_slack and (full_tokens >= self.size_full or swa_tokens >= self.size_swa):
            return False
        if self._compaction_allowed():
            # Bounds are enough for a yes: more pages of an unknown number being live only takes room away.
            self._poll()
            if self._fits_page_demand(
                self._pages_for(full_tokens), self._pages_for(swa_tokens),
                full_reclaim_pages=int(full_evictable_tokens) // self.page_size,
                swa_reclaim_pages=int(swa_evictable_tokens) // self.page_size, compacted=True,
            ):  # fmt: skip
                return True
        plan = self.reclaim_plan(
            full_tokens, swa_tokens, full_evictable_tokens=full_evictable_tokens,
            swa_evictable_tokens=swa_evictable_tokens, empty_pool=empty_pool,
        )  # fmt: skip
        return plan is not None

    def prealloc_fits_assumes_reclaim(self) -> bool:
        return True

    def prealloc_ceiling_fits(self, full_tokens: int, swa_tokens: int) -> bool:
        """Whether a request fits into an empty pool (sgl-project/sglang#35158: one that never does must be known at the start)."""
        return self.can_reserve(full_tokens, swa_tokens, empty_pool=True)

    def prealloc_fits(
        self,
        tree_cache: Any,
        full_tokens: int,
        swa_tokens: int,
        *,
        full_budget_tokens: int,
        swa_budget_tokens: int | None = None,
    ) -> bool:
        """Whether a request of a decode node fits. What a budget keeps back of a side is part of the demand. ``tree_cache`` has
        ``full_evictable_size()`` and ``swa_evictable_size()``, in tokens."""
        full_evictable, swa_evictable = tree_cache.full_evictable_size(), tree_cache.swa_evictable_size()
        full_tokens += self.full_available_size() + full_evictable - full_budget_tokens
        if swa_budget_tokens is not None:
            swa_tokens += self.swa_available_size() + swa_evictable - swa_budget_tokens
        return self.can_reserve(
            full_tokens, swa_tokens, full_evictable_tokens=full_evictable, swa_evictable_tokens=swa_evictable
        )

    def swa_capacity_and_available(
        self, *, full_capacity: int, swa_capacity: int
    ) -> tuple[tuple[int, int], tuple[int, int]]:
        """(capacity, available) of the two sides, in tokens, with what the other has taken of the bytes taken into account."""
        return (
            (self.current_full_capacity, self.full_available_size()),
            (self.current_swa_capacity, self.swa_available_size()),
        )

    def resize(self, config: Any) -> None:
        """Take the size that the buffer has by now: ``config.unified_memory_pool_bytes``. Only while nothing is live.

        Raises:
            ConfigurationError: the buffer has another size, or something is live or pending.
        """
        total_bytes = config.unified_memory_pool_bytes
        if total_bytes is None or int(total_bytes) != self.unified_buffer.total_bytes:
            raise ConfigurationError(
                f"the buffer has {self.unified_buffer.total_bytes} bytes and the configuration says {total_bytes}: "
                "the buffer is made before its allocator is resized"
            )
        full, swa = self._move_gate_targets()
        for pool in (full, swa):
            if pool.allocated_count() or pool._pending_reuse:
                raise ConfigurationError(
                    f"{pool.allocated_count()} tokens are live or pages are pending; only an empty pool is resized",
                    pool=pool.sub_pool_name,
                )
        full.resize(self.unified_buffer.max_slots("full"))
        swa.resize(self.unified_buffer.max_slots("swa"), virtual_num_pages=full.num_virtual_ids)
        self._empty_shared_gap_bytes = full._current_gap_bytes()
        self._set_maxima(*self._size_when_empty())
        self._tell_host_tier()


def _first(most: int, fits: Callable[[int], bool]) -> int:
    """The least number for which ``fits`` says True, as it does for ``most`` and, once it does, from there on."""
    return bisect_left(range(most), True, key=fits)
