"""`UnifiedMambaSWATokenToKVPoolAllocator`: states at the low end, full tokens at the high end, a window pool floating between."""

from __future__ import annotations

import math
from typing import Any

import torch

from allocator.composites.reclaim import PhasedReclaim
from allocator.composites.states import StateDonor
from allocator.end import MultiEndedAllocator
from allocator.errors import ConfigurationError
from allocator.forwards import ForwardDoneEvent
from allocator.middle import FloatMultiEndedAllocator
from allocator.pool import UnifiedKVPool


class UnifiedMambaSWATokenToKVPoolAllocator(PhasedReclaim, StateDonor):
    """Tokens of a model with recurrent and sliding-window layers. States come from
    `allocator.composites.state_slots.UnifiedMambaSlotAllocator` over ``mamba_allocator``.

    Args:
        unified_buffer: the shared buffer; its pools are ``mamba`` (grows up), ``swa`` (floats) and ``full`` (grows down).
        kvcache: has ``full_kv_pool`` and ``swa_kv_pool``, which move pages; see `allocator.kv_store.KVCache`.
        mamba_kvcache: moves slots of the state pool.
        device: where tables and ids live.
        full_max_total_num_tokens, swa_max_total_num_tokens: tokens that each side may hold.
        page_size: tokens in a page of the token pools. A page of the state pool is a slot.
        need_sort, forward_stream, lazy_compaction, strategy: see `allocator.mapped.MappedBand`.
        end_class, float_class: what allocates the pools at the ends and the one between them, `MultiEndedAllocator` and
            `FloatMultiEndedAllocator` by default.
    """

    swa_attn_allocator: FloatMultiEndedAllocator

    def __init__(
        self,
        *,
        unified_buffer: UnifiedKVPool,
        kvcache: Any,
        mamba_kvcache: Any,
        device: str | torch.device,
        full_max_total_num_tokens: int,
        swa_max_total_num_tokens: int,
        float_class: type[FloatMultiEndedAllocator] | None = None,
        **settings: Any,
    ) -> None:
        self._float_class = float_class or FloatMultiEndedAllocator
        self._mamba_kvcache = mamba_kvcache
        super().__init__(
            unified_buffer=unified_buffer,
            kvcache=kvcache,
            device=device,
            full_max_total_num_tokens=full_max_total_num_tokens,
            swa_max_total_num_tokens=swa_max_total_num_tokens,
            **settings,
        )
        # SGLang's check of leaks takes None for "count nothing here": physical and virtual ids would be mixed.
        self.free_pages = self.release_pages = None

    def _make_window_pool(self, **arguments: Any) -> MultiEndedAllocator:
        # A float keeps its holes for its next pages, whatever the ends do.
        return self._float_class(**{**arguments, "lazy_compaction": False})

    def _join_pools(self) -> None:
        self.mamba_allocator = self._end_class(
            kvcache=self._mamba_kvcache, sub_pool_name="mamba", is_id_owner=True, page_size=1, **self._common
        )
        directions = [pool.grow_direction for pool in self._chain()]
        if directions != ["up", "float", "down"]:
            raise ConfigurationError(
                f"states grow up, the window pool floats and the full pool grows down, not {', '.join(directions)}"
            )
        for below, above in zip(self._chain()[:-1], self._chain()[1:], strict=True):
            below.bind_high_peer(above)
            above.bind_low_peer(below)

    def _move_gate_targets(self) -> tuple[MultiEndedAllocator, ...]:
        return self.full_attn_allocator, self.swa_attn_allocator, self.mamba_allocator

    def _chain(self) -> tuple[MultiEndedAllocator, ...]:
        return self.mamba_allocator, self.swa_attn_allocator, self.full_attn_allocator

    def _opportunistic_order(self) -> tuple[MultiEndedAllocator, ...]:
        return self.full_attn_allocator, self.mamba_allocator, self.swa_attn_allocator

    # -- sizes

    def mamba_slot_full_token_cost(self) -> int:
        """Tokens, both sides together, that one state takes the bytes of, rounded up."""
        token_bytes = self.full_attn_allocator.entry_bytes + self.swa_attn_allocator.entry_bytes
        return -(-self.mamba_allocator.entry_bytes_per_page // token_bytes)

    def debug_print(self) -> str:
        swa = self.swa_attn_allocator
        return (
            f"{super().debug_print()}, #mamba-available={self.mamba_allocator.available_size()}, "
            f"swa-float span=[{swa.low_wm_page},{swa.high_wm_page}) holes={swa._hole_pages()}"
        )

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
        """Whether a request fits as everything lies. Of what a cache could give up, or of an empty pool, nothing is said: False."""
        if full_tokens < 0 or swa_tokens < 0 or full_evictable_tokens or swa_evictable_tokens or empty_pool:
            return False
        self._settle()
        return self._fits_as_it_lies(self._pages_for(full_tokens), self._pages_for(swa_tokens))

    def prealloc_fits(
        self,
        tree_cache: Any,
        full_tokens: int,
        swa_tokens: int,
        *,
        full_budget_tokens: int,
        swa_budget_tokens: int | None = None,
    ) -> bool:
        """Whether a request of a decode node fits as everything lies, and within the budgets of its sides."""
        if full_tokens > full_budget_tokens or (
            swa_budget_tokens is not None and swa_tokens > swa_budget_tokens
        ):
            return False
        self._settle()
        return self._fits_as_it_lies(self._pages_for(full_tokens), self._pages_for(swa_tokens))

    def swa_capacity_and_available(
        self, *, full_capacity: int, swa_capacity: int
    ) -> tuple[tuple[int, int], tuple[int, int]]:
        """(capacity, available) of the two sides, in tokens."""
        return (
            (full_capacity, self.conserve_full_available_size()),
            (swa_capacity, self.conserve_swa_available_size()),
        )

    def prepare_mamba_allocation(self, target_size: int) -> None:
        """Make room for ``target_size`` states: pack the full pool, and have the float move away from the low end."""
        self.flush_deferred_full_frees()
        if target_size <= self.mamba_allocator._certain_size():
            return
        self._settle()
        if target_size <= self.mamba_allocator._certain_size():
            return
        self.full_attn_allocator.flush_for_allocation()
        self.mamba_allocator.make_sure_of(target_size)

    def set_inflight_forward(
        self, forward_done: ForwardDoneEvent, out_cache_loc_virtual: torch.Tensor | None
    ) -> None:
        super().set_inflight_forward(forward_done, out_cache_loc_virtual)
        self.mamba_allocator.set_inflight_forward(forward_done, None)

    def _pages_for(self, tokens: float) -> int:
        return math.ceil(tokens / self.page_size)
