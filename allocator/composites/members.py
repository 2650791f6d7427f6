"""`Composite`: what all composites do alike with the pools they own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any

import torch

from allocator.composites.accounting import chain_violations
from allocator.composites.evictions import Evicting
from allocator.end import MultiEndedAllocator
from allocator.errors import ConfigurationError, PageAlignmentError
from allocator.forwards import ForwardDoneEvent
from allocator.lookup import DEFAULT_STRATEGY
from allocator.pool import UnifiedKVPool


class Composite(Evicting, ABC):
    """A surface of token ids, those of the pool ``full``, over several pools of one buffer.

    Subclasses set ``full_attn_allocator`` and name all their pools in `_move_gate_targets`.
    """

    full_attn_allocator: MultiEndedAllocator

    def __init__(
        self,
        *,
        unified_buffer: UnifiedKVPool,
        kvcache: Any,
        device: str | torch.device,
        page_size: int = 1,
        need_sort: bool = False,
        forward_stream: Any = None,
        lazy_compaction: bool = False,
        strategy: str = DEFAULT_STRATEGY,
        end_class: type[MultiEndedAllocator] | None = None,
    ) -> None:
        self.unified_buffer = unified_buffer
        self._kvcache = kvcache
        self.device = device
        self.page_size = page_size
        self.need_sort = need_sort
        self.lazy_compaction = lazy_compaction
        self.strategy = strategy
        self.dtype = unified_buffer.spec("full").get_dtype()
        self._end_class = end_class or MultiEndedAllocator
        self._common: dict[str, Any] = {
            "unified_buffer": unified_buffer,
            "device": device,
            "need_sort": need_sort,
            "forward_stream": forward_stream,
            "lazy_compaction": lazy_compaction,
            "strategy": strategy,
        }
        #: Lists of pools that are not shared; here there are none to count.
        self.free_pages: torch.Tensor | None = torch.empty(0, dtype=torch.int64, device=device)
        self.release_pages: torch.Tensor | None = self.free_pages

    # -- members

    @abstractmethod
    def _move_gate_targets(self) -> tuple[MultiEndedAllocator, ...]:
        """Every pool of the buffer. A gate that one of them does not know of is none: its pages move under the transfer."""

    @abstractmethod
    def _chain(self) -> tuple[MultiEndedAllocator, ...]:
        """The same pools, from the low end of the buffer up."""

    @property
    def _answers_at_once(self) -> bool:
        return self.full_attn_allocator.answers_at_once

    def _poll(self) -> None:
        """Where sizes come late from the device, take in those that are there."""
        self.full_attn_allocator._poll_chain()

    def _settle(self) -> None:
        """Where sizes come late from the device, wait for them: what follows adds up those of several pools."""
        self.full_attn_allocator._settle_chain()

    def get_kvcache(self) -> Any:
        return self._kvcache

    def get_all_free_pages(self) -> torch.Tensor | None:
        return self.free_pages

    # -- what a scheduler asks of every allocator

    def request_slot_reserve(self, *, has_req_pool_slot: bool, prefill_tokens: int = 0) -> int:
        """Tokens that a request takes beyond its own: none."""
        return 0

    def prealloc_fits_assumes_reclaim(self) -> bool:
        """Whether `prealloc_fits` speaks of the pools as they would be once a cache has given up all that it can."""
        return False

    def prealloc_ceiling_fits(self, full_tokens: int, swa_tokens: int) -> bool | None:
        """Whether a request could ever fit; None if nothing is known beyond the caller's own bound."""
        return None

    def mamba_full_cache_donor(self) -> Composite | None:
        """Who gives up full tokens for states; None without a state pool."""
        return None

    # -- gates and forwards

    def set_disagg_move_gate(self, gate: Callable[[], bool]) -> None:
        """Nothing of any pool moves while ``gate()`` is False: peers read published addresses (sgl-project/sglang#37417: also states).

        Raises:
            ConfigurationError: eager compaction, which moves pages at every free.
        """
        self._install_gate("disagg_move_gate", gate, "a disaggregated prefill")

    def set_host_transfer_move_gate(self, gate: Callable[[], bool]) -> None:
        """Nothing of any pool moves while ``gate()`` is False: copies to or from the host are queued by place.

        Raises:
            ConfigurationError: eager compaction.
        """
        self._install_gate("host_transfer_move_gate", gate, "a host tier")

    def _install_gate(self, slot: str, gate: Callable[[], bool], feature: str) -> None:
        if not self.lazy_compaction:
            raise ConfigurationError(
                f"{feature} needs lazy compaction: the eager kind moves pages at every free, whatever a gate says"
            )
        for pool in self._move_gate_targets():
            setattr(pool, slot, gate)

    def prewarm_compaction(self) -> None:
        """Have every pool that can do so load what moves its pages."""
        for pool in self._move_gate_targets():
            prewarm = getattr(pool, "prewarm_compaction", None)
            if prewarm is not None:
                prewarm()

    def set_latest_forward_done_event(self, event: ForwardDoneEvent | None) -> None:
        """The done event of the forward launched last, for every pool."""
        for pool in self._move_gate_targets():
            pool.set_latest_forward_done_event(event)

    @abstractmethod
    def set_inflight_forward(
        self, forward_done: ForwardDoneEvent, out_cache_loc_virtual: torch.Tensor | None
    ) -> None:
        """The virtual token ids (int ``[n]``) that the forward just launched writes. States are not written by token: of them nothing is
        named."""

    def set_hicache_transfer_done_event(self, transfer_key: Hashable, event: ForwardDoneEvent) -> None:
        """A copy to or from the host was queued: every pool orders its moves and frees after it.

        SGLang's composite of three pools leaves its state pool out, which can then move a state that is being copied
        (sgl-project/sglang#37417 is the same for gates).
        """
        for pool in self._move_gate_targets():
            pool.set_hicache_transfer_done_event(transfer_key, event)

    def flush_opportunistic(self) -> int:
        """Have every pool pack what it can without waiting; returns pages moved, and those a float gave back. An idle engine asks
        thousands of times a second: where there is nothing to pack the pools are not asked."""
        self._poll()
        if all(pool._is_packed() for pool in self._move_gate_targets()):
            return 0
        moved = 0
        for pool in self._opportunistic_order():
            moved += pool.flush_opportunistic()
        return moved

    def _opportunistic_order(self) -> tuple[MultiEndedAllocator, ...]:
        return self._move_gate_targets()

    # -- the token surface: the full pool's

    def translate_kv_loc(self, loc: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """Virtual to physical token ids of the full pool; see `allocator.tables.PageTables.translate`."""
        return self.full_attn_allocator.translate_kv_loc(loc, out=out)

    def translate_write_loc(
        self, loc: torch.Tensor, *, out: torch.Tensor | None = None, out_width: int | None = None
    ) -> torch.Tensor:
        """The same of tokens about to be written. With ``out_width`` the rows of ``out`` past them, up to that many, become 0."""
        return self.full_attn_allocator.translate_write_loc(loc, out=out, out_width=out_width)

    def translate_kv_indices_for_transfer(self, kv_indices: torch.Tensor) -> torch.Tensor:
        """Physical token ids as a transfer addresses them. They hold as long as nothing moves: shut a gate first
        (sgl-project/sglang#31471, #33362)."""
        return self.full_attn_allocator.translate_kv_loc(kv_indices.to(torch.int64))

    @property
    def full_v2p_page_table(self) -> torch.Tensor:
        return self.full_attn_allocator.virtual_to_physical

    @property
    def full_p2v_page_table(self) -> torch.Tensor:
        return self.full_attn_allocator.physical_to_virtual

    def is_slot_allocated(self, slot: int) -> bool:
        """Whether the page of this virtual token id is live; reads the device."""
        return self.full_attn_allocator.is_slot_allocated(slot)

    def allocator_state_str(self) -> str:
        return self.full_attn_allocator.allocator_state_str()

    def verify_byte_accounting(self) -> list[str]:
        """What does not add up, pool by pool and between them, in words; empty if all does. Reads the device."""
        self._settle()
        return chain_violations(self._chain())

    # -- frees

    @abstractmethod
    def free_segment(self, free_index: torch.Tensor | None, *, start_pos: int) -> None: ...

    @abstractmethod
    def free_full_segment(self, free_index: torch.Tensor | None, *, start_pos: int) -> None: ...

    def free_segments(self, segments: Iterable[tuple[torch.Tensor, int]]) -> None:
        """Several ``(ids, start_pos)`` of one request. Two that share a page are refused before it would be freed twice.

        Raises:
            PageAlignmentError: a start that is no page border, or a segment that begins in the page in which one ended.
        """
        for free_index, start_pos in self._page_disjoint(segments):
            self.free_segment(free_index, start_pos=start_pos)

    def free_full_segments(self, segments: Iterable[tuple[torch.Tensor, int]]) -> None:
        """`free_segments` for the full side alone."""
        for free_index, start_pos in self._page_disjoint(segments):
            self.free_full_segment(free_index, start_pos=start_pos)

    def _page_disjoint(
        self, segments: Iterable[tuple[torch.Tensor, int]]
    ) -> Iterator[tuple[torch.Tensor, int]]:
        given = [(free_index, start_pos) for free_index, start_pos in segments if free_index.numel()]
        last_page = -1
        for free_index, start_pos in given:
            self._require_page_border(start_pos)
            if start_pos // self.page_size <= last_page:
                raise PageAlignmentError(
                    f"a segment starts at position {start_pos}, in a page of the segment before it",
                    pool="full",
                )
            last_page = (start_pos + free_index.numel() - 1) // self.page_size
        return iter(given)

    def _require_page_border(self, start_pos: int) -> None:
        if start_pos % self.page_size:
            raise PageAlignmentError(
                f"a segment starts at position {start_pos}, not at a border of {self.page_size}-token pages",
                pool="full",
            )

    def _representatives(self, free_index: torch.Tensor, start_pos: int) -> torch.Tensor:
        """One token of every page of a segment that starts at a page border, int64."""
        self._require_page_border(start_pos)
        return free_index.detach().to(torch.int64)[:: self.page_size]
