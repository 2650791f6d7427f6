"""`UnifiedMambaTokenToKVPoolAllocator`: a full pool and a pool of recurrent states at the two ends of one buffer."""

from __future__ import annotations

from typing import Any

import torch

from allocator.composites.members import Composite
from allocator.composites.states import StateDonor
from allocator.end import MultiEndedAllocator
from allocator.errors import FreeGroupError
from allocator.forwards import ForwardDoneEvent
from allocator.pool import UnifiedKVPool


class UnifiedMambaTokenToKVPoolAllocator(StateDonor, Composite):
    """Tokens of a model with recurrent layers. A request's state comes from `allocator.composites.state_slots.UnifiedMambaSlotAllocator`
    over ``mamba_allocator``; ids of tokens and of states have nothing to do with each other.

    Args:
        unified_buffer: the shared buffer; its pools are named ``full`` and ``mamba``.
        kvcache: has ``full_kv_pool`` and ``mamba_pool``, which move pages; see `allocator.kv_store.KVCache`.
        device: where tables and ids live.
        page_size: tokens in a page of the full pool. A page of the state pool is a slot.
        need_sort, forward_stream, lazy_compaction, strategy: see `allocator.mapped.MappedBand`.
        end_class: what allocates the two pools, `MultiEndedAllocator` by default.

    Decode context parallelism, which SGLang's class knows, is not supported.
    """

    def __init__(
        self,
        *,
        unified_buffer: UnifiedKVPool,
        kvcache: Any,
        device: str | torch.device,
        page_size: int = 1,
        **settings: Any,
    ) -> None:
        super().__init__(
            unified_buffer=unified_buffer, kvcache=kvcache, device=device, page_size=page_size, **settings
        )
        self.full_attn_allocator = self._end_class(
            kvcache=kvcache.full_kv_pool,
            sub_pool_name="full",
            is_id_owner=True,
            page_size=page_size,
            **self._common,
        )
        self.mamba_allocator = self._end_class(
            kvcache=kvcache.mamba_pool, sub_pool_name="mamba", is_id_owner=True, page_size=1, **self._common
        )
        self.full_attn_allocator.bind_peer(self.mamba_allocator)
        self.mamba_allocator.bind_peer(self.full_attn_allocator)
        self.free_group: list[torch.Tensor] | None = None
        #: Token ids that stand for whole pages, of the open group.
        self.free_page_reps_group: list[torch.Tensor] | None = None
        if hasattr(kvcache.full_kv_pool, "host_transfer_translate"):
            kvcache.full_kv_pool.host_transfer_translate = self.full_attn_allocator.translate_kv_loc

    def _move_gate_targets(self) -> tuple[MultiEndedAllocator, ...]:
        return self.full_attn_allocator, self.mamba_allocator

    def _chain(self) -> tuple[MultiEndedAllocator, ...]:
        full, states = self.full_attn_allocator, self.mamba_allocator
        return (full, states) if full.grow_direction == "up" else (states, full)

    # -- sizes, in tokens

    @property
    def size(self) -> int:
        """Live tokens and those that can be handed out: it goes up and down with what the states take."""
        return self.available_size() + self.full_attn_allocator.allocated_count()

    @property
    def size_full(self) -> int:
        return self.full_attn_allocator.max_slots - 1

    @property
    def draft_virtual_id_space(self) -> int:
        return self.size_full

    @property
    def size_mamba(self) -> int:
        """Slots of the state pool, as if it had the buffer for itself."""
        return self.mamba_allocator.max_slots - 1

    def available_size(self) -> int:
        """Tokens that can be handed out, what a flush of the state pool would give included: `alloc` makes it."""
        self._settle()
        return self.full_attn_allocator.schedulable_available_size()

    full_available_size = available_size

    def _has_room_for(self, num_tokens: int) -> bool:
        return (
            self.full_attn_allocator._certain_schedulable_size() >= num_tokens
            or self.available_size() >= num_tokens
        )

    def mamba_slot_full_token_cost(self) -> int:
        """Full tokens that one state takes the bytes of, rounded up."""
        return -(-self.mamba_allocator.entry_bytes_per_page // self.full_attn_allocator.entry_bytes)

    def prealloc_fits(
        self,
        tree_cache: Any,
        full_tokens: int,
        swa_tokens: int,
        *,
        full_budget_tokens: int,
        swa_budget_tokens: int | None = None,
    ) -> bool:
        """Whether a request of a decode node is within the caller's budget; there is no window side."""
        return full_tokens <= full_budget_tokens and (
            swa_budget_tokens is None or swa_tokens <= swa_budget_tokens
        )

    def get_extend_allocation_demand(
        self,
        prefix_lens_cpu: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        *,
        conservative_num_tokens: int,
        shard_size: int,
    ) -> int:
        """Tokens that `alloc_extend` may take: the caller's own estimate, as SGLang's class answers."""
        return conservative_num_tokens

    def debug_print(self) -> str:
        return (
            f"#full-available={self.full_attn_allocator.available_size()}, "
            f"#mamba-available={self.mamba_allocator.available_size()}"
        )

    def prepare_mamba_allocation(self, target_size: int) -> None:
        """Make room for ``target_size`` states if that is possible; if it is not, nothing is flushed (sgl-project/sglang#34441)."""
        self.flush_deferred_full_frees()
        if target_size <= self.mamba_allocator._certain_size():
            return
        self._settle()
        if target_size <= self.mamba_allocator.schedulable_available_size():
            self.mamba_allocator.make_sure_of(target_size)

    # -- alloc: of the full pool

    def alloc(self, need_size: int) -> torch.Tensor | None:
        """``need_size`` virtual token ids (a multiple of the page size), int64 ``[need_size]``; None if short."""
        return self.full_attn_allocator.alloc(need_size)

    def alloc_extend(
        self,
        prefix_lens: torch.Tensor,
        prefix_lens_cpu: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        last_loc: torch.Tensor,
        extend_num_tokens: int,
        num_new_pages: int | None = None,
    ) -> torch.Tensor | None:
        """See `allocator.end.MultiEndedAllocator.alloc_extend`."""
        return self.full_attn_allocator.alloc_extend(
            prefix_lens, prefix_lens_cpu, seq_lens, seq_lens_cpu, last_loc, extend_num_tokens, num_new_pages
        )

    def alloc_decode(
        self, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor, last_loc: torch.Tensor
    ) -> torch.Tensor | None:
        """See `allocator.end.MultiEndedAllocator.alloc_decode`."""
        return self.full_attn_allocator.alloc_decode(seq_lens, seq_lens_cpu, last_loc)

    # -- free

    def free(self, free_index: torch.Tensor | None) -> None:
        """Free the pages of these virtual token ids (int ``[n]``; any subset of a page's tokens frees it once).

        Raises:
            NotAllocatedError, DuplicateFreeError: nothing was freed.
        """
        if free_index is None or free_index.numel() == 0:
            return
        tokens = free_index.detach().to(torch.int64)
        if self.free_group is None:
            self.full_attn_allocator.free(tokens)
        else:
            self._require_freeable([tokens], [])
            self.free_group.append(tokens.clone())

    def free_segment(self, free_index: torch.Tensor | None, *, start_pos: int) -> None:
        """Free consecutive tokens of one request from position ``start_pos`` on, a page border.

        Raises:
            PageAlignmentError: no page border.
            NotAllocatedError, DuplicateFreeError: nothing was freed.
        """
        if free_index is None or free_index.numel() == 0:
            return
        if self.page_size == 1:
            self.free(free_index)
            return
        representatives = self._representatives(free_index, start_pos)
        if self.free_page_reps_group is None:
            self._free_representatives(representatives)
        else:
            self._require_freeable([], [representatives])
            self.free_page_reps_group.append(representatives.clone())

    def free_full(self, free_index: torch.Tensor | None) -> None:
        """There is no other side: `free`."""
        self.free(free_index)

    def free_full_segment(self, free_index: torch.Tensor | None, *, start_pos: int) -> None:
        """There is no other side: the pages of these ids, from a page border on."""
        self._require_page_border(start_pos)
        self.free(free_index)

    def free_group_begin(self) -> None:
        """Hold frees of tokens back until `free_group_end`.

        Raises:
            FreeGroupError: a group is open already (sgl-project/sglang#36739).
        """
        if self.free_group is not None:
            raise FreeGroupError("a free group is open already; free groups do not nest")
        self.free_group, self.free_page_reps_group = [], []

    def free_group_end(self) -> None:
        """Free what was queued. Without an open group nothing happens, as in SGLang.

        Raises:
            NotAllocatedError, DuplicateFreeError: nothing of the group was freed; the group is closed.
        """
        tokens, representatives = self.free_group or [], self.free_page_reps_group or []
        self.free_group = self.free_page_reps_group = None
        together = [torch.cat(tokens)] if tokens else []
        pages = [torch.cat(representatives)] if representatives else []
        self._require_freeable(together, pages)
        for token_ids in together:
            self.full_attn_allocator.free(token_ids)
        for token_ids in pages:
            self._free_representatives(token_ids)

    def flush_deferred_full_frees(self) -> None:
        """Free what was queued and go on with an empty group."""
        if self.free_group or self.free_page_reps_group:
            self.free_group_end()
            self.free_group_begin()

    def _free_representatives(self, representatives: torch.Tensor) -> None:
        pages = torch.div(representatives, self.page_size, rounding_mode="floor")
        self.full_attn_allocator.free(representatives, _pages=pages)

    def _require_freeable(self, tokens: list[torch.Tensor], segments: list[torch.Tensor]) -> None:
        if self._answers_at_once and (tokens or segments):
            self.full_attn_allocator.require_freeable(tokens, segments)

    # -- the rest

    def set_inflight_forward(
        self, forward_done: ForwardDoneEvent, out_cache_loc_virtual: torch.Tensor | None
    ) -> None:
        self.full_attn_allocator.set_inflight_forward(forward_done, out_cache_loc_virtual)
        self.mamba_allocator.set_inflight_forward(forward_done, None)

    def get_cpu_copy(
        self, indices: torch.Tensor, mamba_indices: Any = None, req_pool_index: Any = None
    ) -> Any:
        """A copy of these tokens on the host, by the pools' own memory, which is told places (sgl-project/sglang#31471)."""
        places = self.translate_kv_indices_for_transfer(indices)
        return self._kvcache.get_cpu_copy(places, mamba_indices=mamba_indices, req_pool_index=req_pool_index)

    def load_cpu_copy(
        self, kv_cache_cpu: Any, indices: torch.Tensor, mamba_indices: Any = None, req_pool_index: Any = None
    ) -> Any:
        """The way back of `get_cpu_copy`."""
        places = self.translate_kv_indices_for_transfer(indices)
        return self._kvcache.load_cpu_copy(
            kv_cache_cpu, places, mamba_indices=mamba_indices, req_pool_index=req_pool_index
        )

    def clear(self) -> None:
        """Back to empty, an open free group included."""
        for pool in self._move_gate_targets():
            pool.clear()
        self.free_group = self.free_page_reps_group = None
