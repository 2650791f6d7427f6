"""Room out of the engine's prefix cache where two sides take bytes from one buffer: what is given up on either side can help both, so what
is asked for is worked out for the two together, and no more is evicted than makes a request fit."""

from __future__ import annotations

from abc import abstractmethod

from allocator.composites.evictions import EvictParams, EvictResult, PrefixCache
from allocator.composites.float_room import FloatRoom
from allocator.composites.paired import UnifiedSWAAllocatorBase


class PlannedReclaim(UnifiedSWAAllocatorBase):
    """For two sides at the two ends of a buffer, whose holes are all packed away when a request needs it: `reclaim_plan` is exact."""

    #: Which side is spared if either would do. SGLang 0.5.23 spares the full side on decode nodes and where a host tier has storage behind
    #: it; whoever knows says so here.
    prefer_swa_reclaim: bool = False

    @abstractmethod
    def reclaim_plan(
        self,
        full_tokens: float,
        swa_tokens: float,
        *,
        full_evictable_tokens: int = 0,
        swa_evictable_tokens: int = 0,
        empty_pool: bool = False,
        prefer_swa: bool = False,
    ) -> tuple[int, int] | None: ...

    def evict_to_free_tokens(
        self, tree_cache: PrefixCache | None, num_tokens: int, *, swa_num_tokens: int | None = None
    ) -> bool | None:
        """Have the cache give up the fewest tokens with which ``num_tokens`` of the full side and ``swa_num_tokens`` of the window side (by
        default as many) fit, and pack. What a free group holds back goes first.

        Returns:
            Whether they fit now; None if nothing was done, because there is no cache or all of it would not be enough.
        """
        if tree_cache is None or not tree_cache.supports_prefix_sharing():
            return None
        window = num_tokens if swa_num_tokens is None else swa_num_tokens
        self.flush_deferred_full_frees()
        plan = self.reclaim_plan(
            num_tokens, window, full_evictable_tokens=tree_cache.full_evictable_size(),
            swa_evictable_tokens=tree_cache.swa_evictable_size(), prefer_swa=self.prefer_swa_reclaim,
        )  # fmt: skip
        if plan is None:
            return None
        if plan != (0, 0):
            full_most, window_most = plan
            tree_cache.evict_for_alloc(
                EvictParams(num_tokens=full_most, swa_num_tokens=window_most),
                # One eviction can give up tokens of both sides: the plan may be fulfilled before its numbers are.
                allocation_reclaim_satisfied=lambda: self.reclaim_plan(num_tokens, window) == (0, 0),
            )
        return self.ensure_capacity(num_tokens, window)

    def reclaim_for_prealloc(
        self, tree_cache: PrefixCache | None, full_tokens: int, swa_tokens: int
    ) -> str | None:
        """Make room for a request of a decode node; None if there is, else what is missing, in words."""
        ready = self.evict_to_free_tokens(tree_cache, full_tokens, swa_num_tokens=swa_tokens)
        if ready is None:
            ready = self.ensure_capacity(full_tokens, swa_tokens)
        return None if ready else f"{full_tokens} full and {swa_tokens} window tokens do not fit together"


class PhasedReclaim(FloatRoom):
    """With states at the low end and a float between: how many pages have to go until a request fits depends on which ones lie where, so
    tokens are evicted until it would fit, and states only if that was not enough. The order is SGLang 0.5.23's."""

    def evict_to_free_tokens(self, tree_cache: PrefixCache | None, num_tokens: int) -> bool | None:
        """Have the cache give up tokens, then states, until ``num_tokens`` of both sides fit, and make the room. Of what cannot succeed
        however much is given up, nothing is begun.

        Returns:
            Whether they fit now; None without a cache.
        """
        if tree_cache is None or not tree_cache.supports_prefix_sharing():
            return None
        if num_tokens <= 0:
            return True
        self.flush_deferred_full_frees()
        pages = -(-num_tokens // self.page_size)
        tokens = pages * self.page_size
        if self._is_ready(pages):
            return True
        if not self._can_ever_fit(tree_cache, pages):
            return False
        if self.ensure_capacity(tokens, tokens):
            return True

        def would_fit() -> bool:
            return self._would_fit(pages)

        states_gone = 0
        if tree_cache.full_evictable_size() or tree_cache.swa_evictable_size():
            result = tree_cache.evict_for_alloc(
                EvictParams(num_tokens=tokens, swa_num_tokens=tokens), allocation_reclaim_satisfied=would_fit
            )
            states_gone = result.mamba_num_evicted
            if _gave_something(result) and self.ensure_capacity(tokens, tokens):
                return True
        wanted = max(0, self._states_worth(pages) - states_gone)
        if wanted and tree_cache.mamba_evictable_size():
            result = tree_cache.evict_for_alloc(
                EvictParams(mamba_num=wanted), allocation_reclaim_satisfied=would_fit
            )
            if _gave_something(result):
                return self.ensure_capacity(tokens, tokens)
        return self._is_ready(pages)

    def reclaim_for_prealloc(self, tree_cache: PrefixCache, full_tokens: int, swa_tokens: int) -> str | None:
        """Have the cache give up the window tokens that a request of a decode node is short of; the full side is within its caller's
        budget. None if there are enough, else what is missing, in words."""
        missing = swa_tokens - self.swa_available_size()
        if missing > 0:
            tree_cache.evict_for_alloc(EvictParams(swa_num_tokens=missing))
            missing = swa_tokens - self.swa_available_size()
        return f"{missing} of {swa_tokens} window tokens are not there" if missing > 0 else None

    def _is_ready(self, pages: int) -> bool:
        """Whether so many of both sides can be taken as everything lies. What is certain is asked first, and then what is."""
        self._poll()
        if self._has_ids(pages) and self._fits_as_it_lies(pages, pages):
            return True
        self._settle()
        return self._has_ids(pages) and self._fits_as_it_lies(pages, pages)

    def _would_fit(self, pages: int) -> bool:
        """Whether `ensure_capacity` is known to succeed. It may succeed all the same where this is False."""
        return self._is_ready(pages) or (
            self._has_ids(pages)
            and (self._fits_after_flush(pages) or self._room_above_float(pages) is not None)
        )

    def _can_ever_fit(self, tree_cache: PrefixCache, pages: int) -> bool:
        """By ids and bytes alone, with everything gone that the cache could give up."""
        full, swa, states = (
            tree_cache.full_evictable_size(), tree_cache.swa_evictable_size(), tree_cache.mamba_evictable_size(),
        )  # fmt: skip
        return (
            pages <= self.full_attn_allocator.free_id_count + full // self.page_size
            and pages <= self.swa_attn_allocator._index_room() + swa // self.page_size
            and self._bytes_short(pages, given_up=(states, swa, full)) == 0
        )

    def _states_worth(self, pages: int) -> int:
        """States whose bytes are those of so many pages of both sides, rounded up."""
        pair = self.full_attn_allocator.entry_bytes_per_page + self.swa_attn_allocator.entry_bytes_per_page
        return -(-pages * pair // self.mamba_allocator.entry_bytes)


def _gave_something(result: EvictResult) -> bool:
    return bool(result.num_tokens_evicted or result.swa_num_tokens_evicted or result.mamba_num_evicted)
