"""`UnifiedSWAAllocatorBase`: a full pool and a sliding-window pool under one set of virtual ids.

A virtual page has a place in the full pool, which owns the ids, and as long as it is inside the window one in the window pool. Both are
taken together. The window side goes first, when the window leaves the page behind; until then the two go together.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch

from allocator.composites.free_group import PairedFreeGroup
from allocator.composites.rollback import all_or_nothing
from allocator.composites.window_frees import WindowFrees
from allocator.end import MultiEndedAllocator
from allocator.errors import ConfigurationError, InvalidRequestError, PageAlignmentError
from allocator.forwards import ForwardDoneEvent
from allocator.pool import UnifiedKVPool
from allocator.sequences import new_pages_decode, new_pages_extend


class UnifiedSWAAllocatorBase(WindowFrees):
    """What the two composites with a window share; they differ in the pools beside it, and so in what fits.

    Args:
        unified_buffer: the shared buffer; its pools are named ``full`` and ``swa``.
        kvcache: has ``full_kv_pool`` and ``swa_kv_pool``, which move pages; see `allocator.kv_store.KVCache`.
        device: where tables and ids live.
        full_max_total_num_tokens, swa_max_total_num_tokens: tokens that each side may hold, both or none of them; by default what an empty
            pool could hand out.
        page_size: tokens in a page of both pools.
        need_sort, forward_stream, lazy_compaction, strategy: see `allocator.mapped.MappedBand`.
        end_class: what allocates the pools at the ends, `MultiEndedAllocator` by default.

    Raises:
        ConfigurationError: one of the two maxima without the other.
    """

    def __init__(
        self,
        *,
        unified_buffer: UnifiedKVPool,
        kvcache: Any,
        device: str | torch.device,
        full_max_total_num_tokens: int | None = None,
        swa_max_total_num_tokens: int | None = None,
        page_size: int = 1,
        **settings: Any,
    ) -> None:
        if (full_max_total_num_tokens is None) != (swa_max_total_num_tokens is None):
            raise ConfigurationError(
                "full_max_total_num_tokens and swa_max_total_num_tokens are given together or not at all"
            )
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
        self.swa_attn_allocator = self._make_window_pool(
            kvcache=kvcache.swa_kv_pool,
            sub_pool_name="swa",
            is_id_owner=False,
            page_size=page_size,
            # Its table is looked up with the full pool's ids, however many pages it has itself (sgl-project/sglang#37560).
            virtual_num_pages=self.full_attn_allocator.num_virtual_ids,
            **self._common,
        )
        self._group: PairedFreeGroup | None = None
        self._join_pools()
        self._empty_shared_gap_bytes = self.full_attn_allocator._current_gap_bytes()
        if full_max_total_num_tokens is not None and swa_max_total_num_tokens is not None:
            self._set_maxima(int(full_max_total_num_tokens), int(swa_max_total_num_tokens))
        else:
            self._set_maxima(*self._size_when_empty())
        attach = getattr(kvcache, "attach_allocators", None)
        if attach is not None:
            attach(full_allocator=self.full_attn_allocator, swa_allocator=self.swa_attn_allocator)
        self._tell_host_tier()

    @abstractmethod
    def _make_window_pool(self, **arguments: Any) -> MultiEndedAllocator:
        """The allocator of the pool ``swa``."""

    @abstractmethod
    def _join_pools(self) -> None:
        """Make neighbours of the pools that are there by now."""

    def _size_when_empty(self) -> tuple[int, int]:
        ids = self.full_attn_allocator.free_id_count * self.page_size
        return self.full_attn_allocator.available_size(), min(self.swa_attn_allocator.available_size(), ids)

    def _set_maxima(self, full: int, swa: int) -> None:
        self._size_full = self._full_max_total_num_tokens = full
        self._size_swa = self._swa_max_total_num_tokens = swa

    def _tell_host_tier(self) -> None:
        """Pools that can be copied to the host learn how much that may be, and what makes places out of ids. Window ids come translated."""
        pools = (
            (self._kvcache.full_kv_pool, "full", self._size_full),
            (self._kvcache.swa_kv_pool, "swa", self._size_swa),
        )
        for pool, name, tokens in pools:
            if hasattr(pool, "host_capacity_tokens"):
                pool.host_capacity_tokens = tokens
                pool.host_capacity_bytes = tokens * self.unified_buffer.spec(name).entry_bytes()
        if hasattr(self._kvcache.full_kv_pool, "host_transfer_translate"):
            self._kvcache.full_kv_pool.host_transfer_translate = self.full_attn_allocator.translate_kv_loc

    # -- sizes, in tokens

    @property
    def size(self) -> int:
        return min(self._size_full, self._size_swa)

    @property
    def size_full(self) -> int:
        return self._size_full

    @property
    def size_swa(self) -> int:
        return self._size_swa

    @property
    def draft_virtual_id_space(self) -> int:
        return self.full_attn_allocator.max_slots - 1

    def available_size(self) -> int:
        """Tokens that one `alloc` can be given now, both sides together, with nothing flushed. Computed afresh at every call."""
        self._settle()
        return self._compute_available_size()

    @abstractmethod
    def _compute_available_size(self) -> int: ...

    def _has_room_for(self, num_tokens: int) -> bool:
        pages = -(-num_tokens // self.page_size)
        self._poll()
        return pages <= 0 or self._fits_as_it_lies(pages, pages) or self.available_size() >= num_tokens

    @abstractmethod
    def ensure_capacity(self, full_tokens: int, swa_tokens: int) -> bool:
        """Whether so many tokens of both sides can be handed out together, after making room if they cannot yet. Moves nothing while a
        gate is shut, or if it would not help."""

    def new_pages_available(self, num_full_pages: int, num_swa_pages: int) -> bool:
        """Whether so many pages of both sides can be taken together as everything lies. SGLang's answers for each side alone, which may be
        the same bytes twice (sgl-project/sglang#39294)."""
        self._settle()
        return self._fits_as_it_lies(num_full_pages, num_swa_pages)

    @abstractmethod
    def _fits_as_it_lies(self, full_pages: int, swa_pages: int) -> bool:
        """Whether so many pages of both sides can be taken together, with nothing flushed."""

    def schedulable_full_available_size(self) -> int:
        """Tokens of the full side alone, after a flush of its neighbour."""
        self._settle()
        return self.full_attn_allocator.schedulable_available_size()

    def schedulable_swa_available_size(self) -> int:
        """Tokens of the window side alone, after a flush of its neighbour."""
        self._settle()
        return self.swa_attn_allocator.schedulable_available_size()

    def conserve_full_available_size(self) -> int:
        """The full side's maximum less its live tokens: for a check of leaks. Bytes may have been lent meanwhile."""
        return self._full_max_total_num_tokens - self.full_attn_allocator.allocated_count()

    def conserve_swa_available_size(self) -> int:
        """The window side's maximum less its live tokens: for a check of leaks."""
        return self._swa_max_total_num_tokens - self.swa_attn_allocator.allocated_count()

    _conserve_full_available_size = conserve_full_available_size
    _conserve_swa_available_size = conserve_swa_available_size

    def full_available_size(self) -> int:
        """What a scheduler plans with for the full side: the smaller of the two above."""
        return min(self.conserve_full_available_size(), self.schedulable_full_available_size())

    def swa_available_size(self) -> int:
        """What a scheduler plans with for the window side."""
        return min(self.conserve_swa_available_size(), self.schedulable_swa_available_size())

    @property
    def current_full_capacity(self) -> int:
        return self.full_available_size() + self.full_attn_allocator.allocated_count()

    @property
    def current_swa_capacity(self) -> int:
        return self.swa_available_size() + self.swa_attn_allocator.allocated_count()

    def debug_print(self) -> str:
        return (
            f"#full-available={self.full_attn_allocator.available_size()}, "
            f"#swa-available={self.swa_attn_allocator.available_size()}, #joint-available={self.available_size()}"
        )

    # -- alloc

    def alloc(self, need_size: int) -> torch.Tensor | None:
        """``need_size`` virtual token ids (a multiple of the page size), int64 ``[need_size]``, with places on both sides; None if short.

        Raises:
            PageAlignmentError: not whole pages.
            AllocatorError: what one of the pools refused; none of them has changed.
        """
        if need_size > 0 and need_size % self.page_size:
            raise PageAlignmentError(
                f"{need_size} tokens are no multiple of the page size {self.page_size}", pool="full"
            )
        pages = need_size // self.page_size
        return self._alloc_together(pages, pages, lambda: self.full_attn_allocator.alloc(need_size))

    def alloc_extend(
        self,
        prefix_lens: torch.Tensor,
        prefix_lens_cpu: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        last_loc: torch.Tensor,
        extend_num_tokens: int,
    ) -> torch.Tensor | None:
        """Ids for requests that grow; see `allocator.end.MultiEndedAllocator.alloc_extend`. int64 ``[extend_num_tokens]``, or None."""
        pages = new_pages_extend(prefix_lens_cpu, seq_lens_cpu, self.page_size)
        return self._alloc_together(
            pages,
            pages,
            lambda: self.full_attn_allocator.alloc_extend(
                prefix_lens,
                prefix_lens_cpu,
                seq_lens,
                seq_lens_cpu,
                last_loc,
                extend_num_tokens,
                num_new_pages=pages,
            ),
        )

    def alloc_extend_swa_tail(
        self,
        prefix_lens: torch.Tensor,
        prefix_lens_cpu: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        last_loc: torch.Tensor,
        extend_num_tokens: int,
        swa_tail_len: int,
    ) -> torch.Tensor | None:
        """`alloc_extend` of one request of which only the last ``swa_tail_len`` tokens are inside the window: the pages before them get no
        place on the window side, as if they had left it.

        Raises:
            InvalidRequestError: several requests, or a tail that is longer than what is new.
        """
        if len(prefix_lens_cpu) != 1 or not 0 <= swa_tail_len <= extend_num_tokens:
            raise InvalidRequestError(
                f"a tail of {swa_tail_len} tokens for {len(prefix_lens_cpu)} request(s) that grow by {extend_num_tokens}: "
                "one request has a tail of what is new in it",
                pool="swa",
            )
        pages = new_pages_extend(prefix_lens_cpu, seq_lens_cpu, self.page_size)
        # Pages are taken in order, so those with a token of the tail are the last ones. The first may be old, and bound already.
        seq_len = int(seq_lens_cpu[0])
        end = -(-seq_len // self.page_size)
        first = (seq_len - swa_tail_len) // self.page_size
        window_pages = min(pages, end - first) if swa_tail_len else 0
        return self._alloc_together(
            pages,
            window_pages,
            lambda: self.full_attn_allocator.alloc_extend(
                prefix_lens,
                prefix_lens_cpu,
                seq_lens,
                seq_lens_cpu,
                last_loc,
                extend_num_tokens,
                num_new_pages=pages,
            ),
        )

    def alloc_decode(
        self, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor, last_loc: torch.Tensor
    ) -> torch.Tensor | None:
        """One more token for every request; ``seq_lens`` (int ``[bs]``) counts it. int64 ``[bs]``, or None if short."""
        pages = new_pages_decode(seq_lens_cpu, self.page_size)
        return self._alloc_together(
            pages, pages, lambda: self.full_attn_allocator.alloc_decode(seq_lens, seq_lens_cpu, last_loc)
        )

    def _alloc_together(
        self, num_pages: int, num_window_pages: int, alloc_full: Callable[[], torch.Tensor | None]
    ) -> torch.Tensor | None:
        """``alloc_full()`` takes ``num_pages`` pages; the last ``num_window_pages`` of them get places on the window side too."""
        if not self.ensure_capacity(num_pages * self.page_size, num_window_pages * self.page_size):
            return None
        virtual_pages = self._next_ids(num_pages)
        with all_or_nothing(virtual_pages, self.full_attn_allocator, self.swa_attn_allocator):
            with self.full_attn_allocator.promised():
                token_ids = alloc_full()
            if token_ids is not None and num_window_pages:
                with self.swa_attn_allocator.promised():
                    self.swa_attn_allocator.alloc_with_virtual(virtual_pages[num_pages - num_window_pages :])
        return token_ids

    def _next_ids(self, count: int) -> torch.Tensor:
        """The virtual pages that the full pool will hand out next, int64 ``[count]``; a view that stays as it is."""
        if count > self.full_attn_allocator.free_id_count:
            self._settle()
        return self.full_attn_allocator._own_ids("alloc").peek(count)

    def get_extend_allocation_demand(
        self,
        prefix_lens_cpu: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        *,
        conservative_num_tokens: int,
        shard_size: int,
    ) -> int:
        """Tokens that `alloc_extend` will take, in whole pages; where sequences are sharded the caller's own estimate."""
        if shard_size != 1:
            return conservative_num_tokens
        return self.page_size * new_pages_extend(prefix_lens_cpu, seq_lens_cpu, self.page_size)

    # -- ids and places

    def translate_loc_from_full_to_swa(
        self, kv_indices: torch.Tensor, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Virtual token ids to physical ones of the window side; ids that have left the window become 0."""
        return self.swa_attn_allocator.translate_kv_loc(kv_indices, out=out)

    def translate_swa_indices_for_transfer(self, kv_indices: torch.Tensor) -> torch.Tensor:
        """The same as a transfer addresses them; see `translate_kv_indices_for_transfer`."""
        return self.swa_attn_allocator.translate_kv_loc(kv_indices.to(torch.int64))

    @property
    def swa_v2p_page_table(self) -> torch.Tensor:
        return self.swa_attn_allocator.virtual_to_physical

    def get_cpu_copy(
        self, indices: torch.Tensor, mamba_indices: Any = None, req_pool_index: Any = None
    ) -> Any:
        """A copy of these virtual tokens on the host, by the pools' own memory, which has both allocators (``attach_allocators``) and makes
        places of ids itself, side by side (sgl-project/sglang#31471)."""
        return self._kvcache.get_cpu_copy(indices, mamba_indices=mamba_indices, req_pool_index=req_pool_index)

    def load_cpu_copy(
        self, kv_cache_cpu: Any, indices: torch.Tensor, mamba_indices: Any = None, req_pool_index: Any = None
    ) -> Any:
        """The way back of `get_cpu_copy`."""
        return self._kvcache.load_cpu_copy(
            kv_cache_cpu, indices, mamba_indices=mamba_indices, req_pool_index=req_pool_index
        )

    def set_inflight_forward(
        self, forward_done: ForwardDoneEvent, out_cache_loc_virtual: torch.Tensor | None
    ) -> None:
        self.full_attn_allocator.set_inflight_forward(forward_done, out_cache_loc_virtual)
        self.swa_attn_allocator.set_inflight_forward(forward_done, out_cache_loc_virtual)

    def clear(self) -> None:
        """Back to empty, an open free group included."""
        for pool in self._move_gate_targets():
            pool.clear()
        self._group = None
