"""`MultiEndedAllocator`: the allocator of one END pool, growing from one end of the shared buffer towards the middle.

Start reading at `MultiEndedAllocator._flush`, which is what this project measures. Behaviour and names follow SGLang 0.5.23's class of
the same name (``mem_cache/allocator/unified_sub_pool.py``); placement is pinned by transcripts recorded from it.
"""

from __future__ import annotations

import os
from collections.abc import Hashable
from typing import Any

import torch

from allocator.band import Band
from allocator.errors import (
    BindError,
    ConfigurationError,
    DuplicateFreeError,
    FreeGroupError,
    MoveGateClosedError,
    NotAllocatedError,
    NotIdOwnerError,
    OutOfRoomError,
    PageAlignmentError,
    require,
)
from allocator.forwards import ForwardDoneEvent, PendingReuse, RunningForward
from allocator.free_lists import FreeVirtualIds, HoleList
from allocator.lookup import DEFAULT_STRATEGY, lookup_for
from allocator.plan import boundary_holes, plan_moves
from allocator.pool import UnifiedKVPool
from allocator.sequences import decode_token_ids, extend_token_ids, new_pages_decode, new_pages_extend
from allocator.tables import PageTables

#: Moves of one non-urgent flush, so that a long backlog does not hold up the scheduler (SGLang's setting and default).
MAX_MOVES_ENV = "SGLANG_LAZY_COMPACTION_MAX_MOVES_PER_CALL"
DEFAULT_MAX_MOVES = 4096


class MultiEndedAllocator(Band):
    """Hands out virtual token ids, keeps their pages packed at one end of the buffer.

    Args:
        kvcache: moves (and, if it can, zeroes) whole physical pages; see `allocator.kv_store.KVCache`.
        unified_buffer: the shared buffer, for sizes.
        sub_pool_name: which of its pools this is.
        device: where tables and ids live.
        is_id_owner: whether virtual ids are this pool's own. A pool indexed by another pool's ids has ``virtual_num_pages`` of them.
        page_size: slots in a page, 1 to 256.
        lazy_compaction: record holes on free and pack in `_flush`; otherwise pack at every free.
        strategy: mapping lookup of a flush, see `allocator.lookup`.
        shards_under_dcp: only False; decode context parallelism is not supported.
        need_sort: accepted for SGLang's signature; transfers are not this class's business.
        forward_stream: with eager compaction, the stream that frees are ordered after.

    Raises:
        ConfigurationError: contradictory arguments.
    """

    def __init__(
        self,
        *,
        kvcache: Any,
        unified_buffer: UnifiedKVPool,
        sub_pool_name: str,
        device: str | torch.device,
        is_id_owner: bool,
        virtual_num_pages: int | None = None,
        page_size: int = 1,
        shards_under_dcp: bool = False,
        need_sort: bool = False,
        forward_stream: Any = None,
        lazy_compaction: bool = False,
        strategy: str = DEFAULT_STRATEGY,
    ) -> None:
        super().__init__()
        self.sub_pool_name = sub_pool_name
        if shards_under_dcp:
            raise ConfigurationError("decode context parallelism is not supported", pool=sub_pool_name)
        if is_id_owner and virtual_num_pages is not None:
            raise ConfigurationError("only a pool indexed by another pool's ids takes virtual_num_pages", pool=sub_pool_name)
        if not 1 <= page_size <= 256:
            raise ConfigurationError(f"page_size must be 1 to 256, not {page_size}", pool=sub_pool_name)
        self.spec = unified_buffer.spec(sub_pool_name)
        self.unified_buffer = unified_buffer
        self.total_bytes = unified_buffer.total_bytes
        self.grow_direction = self.spec.grow_direction
        self.entry_bytes = self.spec.entry_bytes()
        self.page_size = self.pool_page_size = page_size
        self.entry_bytes_per_page = self.entry_bytes * page_size
        self.max_slots = self.size = unified_buffer.max_slots(sub_pool_name)
        self.num_pages = self.max_slots // page_size
        self.min_slot_index = unified_buffer.min_slot_index(sub_pool_name)
        self.min_page_index = -(-self.min_slot_index // page_size)
        self.dtype = self.spec.get_dtype()
        self.device = device
        self.is_id_owner = is_id_owner
        self.need_sort = need_sort
        self.forward_stream = forward_stream
        self.lazy_compaction = lazy_compaction
        self.strategy = strategy
        self._lookup = lookup_for(strategy)
        self._kvcache = kvcache
        self._zero_pages = getattr(kvcache, "zero_physical_pages", None)
        self._lazy_max_moves_per_call = int(os.environ.get(MAX_MOVES_ENV, DEFAULT_MAX_MOVES))
        self.num_virtual_ids = self.num_pages if virtual_num_pages is None else virtual_num_pages
        if self.num_virtual_ids <= 0:
            raise ConfigurationError("the id space is empty", pool=sub_pool_name)
        self._tables = PageTables(self.num_virtual_ids, self.num_pages, device)
        self._offsets = torch.arange(page_size, dtype=torch.int64, device=device)
        self.holes = HoleList(device)
        self._pending = PendingReuse()
        self._forward = RunningForward()
        self.clear()

    # -- state

    def clear(self) -> None:
        """Back to empty. Tables keep their storage (captured graphs read it); gates and neighbours stay."""
        self._tables.clear()
        self._ids = FreeVirtualIds(self.min_page_index, self.num_pages, self.device) if self.is_id_owner else None
        self.holes.clear()
        self._pending.clear()
        self._forward.clear()
        self._reserved_for_load = 0
        self._live_pages_lazy = 0
        self.free_group: list[torch.Tensor] | None = None
        self.free_page_reps_group: list[torch.Tensor] | None = None
        self._reset_watermarks()

    def _reset_watermarks(self) -> None:
        self.watermark_physical = self.min_page_index if self.grow_direction == "up" else self.num_pages - 1

    def resize(self, max_slots: int, *, virtual_num_pages: int | None = None) -> None:
        """Use only the first ``max_slots`` slots (and ids) from now on, and start empty. Tables keep their storage.

        Raises:
            ConfigurationError: larger than what the tables were made for, or no page left.
        """
        num_pages = max_slots // self.page_size
        num_ids = num_pages if virtual_num_pages is None else virtual_num_pages
        fits = self.min_page_index < num_pages < self._tables.physical_to_virtual.shape[0]
        if not fits or not 0 < num_ids < self._tables.virtual_to_physical.shape[0]:
            raise ConfigurationError(
                f"cannot resize to {num_pages} pages and {num_ids} ids: the tables hold "
                f"{self._tables.physical_to_virtual.shape[0] - 1} and {self._tables.virtual_to_physical.shape[0] - 1}, "
                f"and pages below {self.min_page_index} are reserved",
                pool=self.sub_pool_name,
            )
        self.num_pages = self._tables.num_pages = num_pages
        self.num_virtual_ids = self._tables.num_virtual_ids = num_ids
        self.max_slots = self.size = num_pages * self.page_size
        self.clear()

    _set_capacity = resize

    @property
    def virtual_to_physical(self) -> torch.Tensor:
        """int64 ``[num_virtual_ids + 1]``: physical page of a virtual page, -1 unmapped; the last row is a sentinel."""
        return self._tables.virtual_to_physical

    @property
    def physical_to_virtual(self) -> torch.Tensor:
        """int64 ``[num_pages + 1]``: virtual page on a physical page, -1 none; the last row is a sentinel."""
        return self._tables.physical_to_virtual

    @property
    def free_virtual_ids(self) -> torch.Tensor | None:
        """int64, free virtual pages in the order they will be handed out; None for a pool indexed by another pool's ids."""
        return None if self._ids is None else self._ids.tensor()

    @free_virtual_ids.setter
    def free_virtual_ids(self, ids: torch.Tensor) -> None:
        self._own_ids("free_virtual_ids").replace(ids)

    def get_kvcache(self) -> Any:
        return self._kvcache

    # -- the same state under the names SGLang's other files read

    @property
    def _free_phys_pages(self) -> torch.Tensor:
        return self.holes.pages

    @property
    def _pending_reuse(self) -> dict[ForwardDoneEvent, tuple[list[int], list[torch.Tensor]]]:
        return self._pending.as_mapping()

    @property
    def _pending_reuse_pages_cpu(self) -> set[int]:
        return self._pending.pages_on_host

    @property
    def live_page_count(self) -> int:
        return self._live_pages_lazy

    @property
    def _latest_forward_done_event(self) -> ForwardDoneEvent | None:
        return self._forward.latest

    @property
    def _inflight_forward(self) -> tuple[ForwardDoneEvent, torch.Tensor] | None:
        return self._forward.writing

    @property
    def _pending_hicache_load_pages(self) -> int:
        return self._reserved_for_load

    def clear_inverse_history(self) -> None:
        """SGLang keeps a list of past moves and has its callers clear it; no such list is kept here."""

    # -- sizes and frontiers

    def _allocated_pages(self) -> int:
        """Pages inside the band: live ones, holes, pending ones."""
        if self.grow_direction == "up":
            return max(0, self.watermark_physical - self.min_page_index)
        return max(0, self.num_pages - 1 - self.watermark_physical)

    def allocated_count(self) -> int:
        """Live tokens (whole pages of them)."""
        return (self._live_pages_lazy if self.lazy_compaction else self._allocated_pages()) * self.page_size

    def _byte_low_frontier(self) -> int:
        first = self.min_page_index if self.grow_direction == "up" else self.watermark_physical + 1
        return first * self.entry_bytes_per_page

    def _byte_high_frontier(self) -> int:
        end = self.watermark_physical if self.grow_direction == "up" else self.num_pages
        return end * self.entry_bytes_per_page

    def is_slot_allocated(self, slot: int) -> bool:
        """Whether the page of this virtual token id is live. Reads the device: one synchronisation, for diagnosis only."""
        page = slot // self.page_size
        return 0 <= page < self.num_virtual_ids and int(self.virtual_to_physical[page].item()) != -1

    def allocator_state_str(self) -> str:
        return (
            f"grow_direction={self.grow_direction}, page_size={self.page_size}, pages [{self.min_page_index}, {self.num_pages}), "
            f"watermark_physical={self.watermark_physical}, allocated_pages={self._allocated_pages()}, "
            f"holes={len(self.holes)}, pending={len(self._pending)}, ids={self.num_virtual_ids}, owner={self.is_id_owner}, "
            f"lazy={self.lazy_compaction}, strategy={self.strategy}"
        )

    # -- alloc

    def alloc(self, need_size: int) -> torch.Tensor | None:
        """``need_size`` virtual token ids (a multiple of the page size), int64 ``[need_size]``, page by page; None if short.

        Raises:
            NotIdOwnerError, PageAlignmentError.
        """
        ids = self._own_ids("alloc")
        num_pages = self._whole_pages(need_size)
        if num_pages <= 0:
            return torch.empty(0, dtype=torch.int64, device=self.device)
        if not self._make_sure_of(num_pages) or num_pages > len(ids):
            return None
        virtual_pages = ids.peek(num_pages)
        if self._take_and_bind(virtual_pages, num_pages) is None:
            return None
        ids.drop(num_pages)
        return self._expand_pages_to_tokens(virtual_pages)

    def alloc_with_virtual(self, virtual_pages: torch.Tensor) -> None:
        """Back these virtual *pages* (int64 ``[n]``, ids of the pool that owns them) with physical pages of this pool.

        Raises:
            BindError: a page that is live here already, the padding page, one out of range, one named twice.
            OutOfRoomError: not enough room; the caller is expected to have checked.
        """
        count = virtual_pages.shape[0]
        if count == 0:
            return
        self._require_unmapped(virtual_pages)
        if self._take_and_bind(virtual_pages, count) is None:
            raise OutOfRoomError(
                f"{count} page(s) asked for, {self.available_size() // self.page_size} available",
                pool=self.sub_pool_name,
                state=self.allocator_state_str(),
            )

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
        """Ids for requests that grow from ``prefix_lens`` to ``seq_lens`` (int ``[bs]``, and the same in host memory).

        Returns:
            int64 ``[extend_num_tokens]``, request after request, or None if short. See `allocator.sequences`.
        """
        if num_new_pages is None:
            num_new_pages = new_pages_extend(prefix_lens_cpu, seq_lens_cpu, self.page_size)
        new_pages = self._pages_for_growth(num_new_pages)
        if new_pages is None:
            return None
        token_ids = extend_token_ids(prefix_lens, seq_lens, last_loc, new_pages, extend_num_tokens, self.page_size)
        return token_ids if self._commit_growth(new_pages, num_new_pages) else None

    def alloc_decode(
        self, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor, last_loc: torch.Tensor
    ) -> torch.Tensor | None:
        """One more token for every request; ``seq_lens`` (int ``[bs]``) counts it. int64 ``[bs]``, or None if short."""
        num_new_pages = new_pages_decode(seq_lens_cpu, self.page_size)
        new_pages = self._pages_for_growth(num_new_pages)
        if new_pages is None:
            return None
        token_ids = decode_token_ids(seq_lens, last_loc, new_pages, self.page_size)
        return token_ids if self._commit_growth(new_pages, num_new_pages) else None

    def alloc_physical(self, need_size: int) -> torch.Tensor | None:
        """Reserve physical slots without ids, for a load from the host; nothing moves until it is queued or cancelled."""
        num_pages = self._whole_pages(need_size)
        if num_pages <= 0:
            return torch.empty(0, dtype=torch.int64, device=self.device)
        if not self._make_sure_of(num_pages):
            return None
        pages = self.take_physical_pages(num_pages)
        if pages is None:
            return None
        self._reserved_for_load += num_pages
        return self._expand_pages_to_tokens(pages)

    def _pages_for_growth(self, count: int) -> torch.Tensor | None:
        ids = self._own_ids("alloc_extend and alloc_decode")
        if count > len(ids) or not self._make_sure_of(count):
            return None
        return ids.peek(count)

    def _commit_growth(self, virtual_pages: torch.Tensor, count: int) -> bool:
        if count:
            if self._take_and_bind(virtual_pages, count) is None:
                return False
            self._own_ids("alloc").drop(count)
        return True

    def _make_sure_of(self, num_pages: int) -> bool:
        """Whether ``num_pages`` can be handed out, after asking the neighbour for room if they cannot. The one shortfall ladder:
        flush the growth-side neighbour (never this pool: that trades one hole for one page of gap), then have a float move over."""
        need_size = num_pages * self.page_size
        if need_size <= self.available_size():
            return True
        neighbour = self._growth_side_neighbor()
        if neighbour is None:
            return False
        neighbour.flush_for_allocation()  # type: ignore[attr-defined]
        if need_size <= self.available_size():
            return True
        blocker = self._growth_side_neighbor()
        open_side_for = getattr(blocker, "open_side_for", None)
        if open_side_for is not None:
            open_side_for({self: num_pages})
        return need_size <= self.available_size()

    def _take_and_bind(self, virtual_pages: torch.Tensor, num_pages: int) -> torch.Tensor | None:
        physical_pages = self.take_physical_pages(num_pages)
        if physical_pages is None:
            return None
        self._tables.bind(virtual_pages, physical_pages)
        if self._zero_pages is not None:
            self._zero_pages(physical_pages)
        return physical_pages

    def take_physical_pages(self, num_pages: int) -> torch.Tensor | None:
        """Physical pages, holes first, then the watermark; int64 ``[num_pages]``, or None with nothing changed."""
        from_holes = min(num_pages, len(self.holes))
        beyond = num_pages - from_holes
        if beyond and not self._extend_watermark(beyond):
            return None
        self._live_pages_lazy += num_pages
        grows_up = self.grow_direction == "up"
        if not from_holes:
            first = self.watermark_physical - beyond if grows_up else self.watermark_physical + 1
            return torch.arange(first, first + beyond, dtype=torch.int64, device=self.device)
        taken = self.holes.take(from_holes, "low" if grows_up else "high")
        if not beyond:
            return taken
        mark = self.watermark_physical
        span = (mark - beyond, mark, 1) if grows_up else (mark + beyond, mark, -1)
        return torch.cat([taken, torch.arange(*span, dtype=torch.int64, device=self.device)])

    def take_physical(self, need_size: int) -> torch.Tensor | None:
        """`take_physical_pages`, sized in tokens."""
        return self.take_physical_pages(max(0, self._whole_pages(need_size)))

    def _extend_watermark(self, num_pages: int) -> bool:
        """Grow by ``num_pages`` unless the index space or the next band is in the way."""
        if self.grow_direction == "up":
            mark = self.watermark_physical + num_pages
            if mark > self.num_pages or mark > self._chain_low_frontier_above_bytes() // self.entry_bytes_per_page:
                return False
        else:
            mark = self.watermark_physical - num_pages
            below = self._chain_high_frontier_below_bytes()
            if mark + 1 < self.min_page_index or (mark + 1) * self.entry_bytes_per_page < below:
                return False
        self.watermark_physical = mark
        return True

    # -- bind, unbind, translate

    def bind(self, virtual_ids: torch.Tensor, physical_ids: torch.Tensor) -> None:
        """Map virtual pages to physical pages that are already taken (int64 ``[n]`` each): a reserved page, or a page whose
        owner changes (`unbind` the old owner next).

        Raises:
            BindError: a virtual page that is live, or a physical page outside the band.
        """
        if virtual_ids.numel() == 0:
            return
        virtual_ids, physical_ids = virtual_ids.to(torch.int64), physical_ids.to(torch.int64)
        self._require_unmapped(virtual_ids)
        low, high = self._band_pages()
        require(
            ((physical_ids >= low) & (physical_ids < high)).all(),
            "kvtape: bind to a physical page outside the band",
            lambda: BindError(
                f"physical pages {physical_ids.tolist()} are not all inside the band [{low}, {high})",
                pool=self.sub_pool_name,
                ids=physical_ids.tolist(),
                state=self.allocator_state_str(),
            ),
        )
        self._tables.bind(virtual_ids, physical_ids)

    def unbind(self, virtual_ids: torch.Tensor) -> None:
        """Forget virtual pages whose physical page has another owner by now (the second half of a transfer: SGLang 0.5.23 writes
        the table itself, in ``unified_cache/components/swa.py``). The pages stay live under the new owner.

        Raises:
            NotAllocatedError: a page that is not live, or that is still the owner: its physical page would be lost.
        """
        virtual_ids = virtual_ids.to(torch.int64)
        physical = self._tables.physical_of(virtual_ids)
        owners = self.physical_to_virtual[physical.clamp(min=0)]
        require(
            ((physical > 0) & (owners != virtual_ids)).all(),
            "kvtape: unbind of a page that is not live or still owns its place",
            lambda: NotAllocatedError(
                f"unbind of virtual pages {virtual_ids.tolist()}, mapped to {physical.tolist()} and owned by {owners.tolist()}",
                pool=self.sub_pool_name,
                ids=virtual_ids.tolist(),
                state=self.allocator_state_str(),
            ),
        )
        self.virtual_to_physical.index_fill_(0, virtual_ids, -1)

    def translate_kv_loc(self, virt_tokens: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """Virtual to physical token ids, any shape, int64; unmapped and out-of-range ids become 0. See `PageTables.translate`."""
        return self._tables.translate(virt_tokens, self.page_size, out)

    def _band_pages(self) -> tuple[int, int]:
        """Physical pages ``[low, high)`` of the band."""
        if self.grow_direction == "up":
            return self.min_page_index, self.watermark_physical
        return self.watermark_physical + 1, self.num_pages

    # -- free

    def free(self, free_index: torch.Tensor, *, _pages: torch.Tensor | None = None) -> None:
        """Free the pages of these virtual token ids (any subset of a page's tokens frees it once).

        ``_pages`` are the pages of ``free_index`` where the caller has them already, each once; finding them costs a sort and, for
        page sizes over 1, a synchronisation.

        Raises:
            NotAllocatedError, DuplicateFreeError: nothing was freed.
            MoveGateClosedError: eager compaction would have to move pages.
        """
        if free_index is None or free_index.numel() == 0:
            return
        if self.free_group is not None:
            self.free_group.append(free_index.clone())
            return
        if _pages is not None:
            self._free_pages(_pages.to(torch.int64), may_repeat=True)
        else:
            pages, may_repeat = self._pages_of(free_index)
            self._free_pages(pages, may_repeat=may_repeat)

    def free_segment(self, free_index: torch.Tensor, *, start_pos: int) -> None:
        """Free consecutive tokens of one request that start at position ``start_pos``, a page border: every ``page_size``-th id
        names a page, so no sort is needed.

        Raises:
            PageAlignmentError: ``start_pos`` is no page border.
            NotAllocatedError, DuplicateFreeError: nothing was freed.
        """
        if free_index is None or free_index.numel() == 0:
            return
        if self.page_size == 1:
            self.free(free_index)
            return
        if start_pos % self.page_size:
            raise PageAlignmentError(f"a segment starts at position {start_pos}, not at a border of {self.page_size}-token pages",
                                     pool=self.sub_pool_name)  # fmt: skip
        representatives = free_index[:: self.page_size].to(torch.int64)
        if self.free_page_reps_group is not None:
            self.free_page_reps_group.append(representatives.clone())
        else:
            self._free_pages(representatives // self.page_size, may_repeat=True)

    def free_group_begin(self) -> None:
        """Hold frees back until `free_group_end`.

        Raises:
            FreeGroupError: a group is open already.
        """
        if self.free_group is not None:
            raise FreeGroupError("a free group is open already; free groups do not nest", pool=self.sub_pool_name)
        self.free_group, self.free_page_reps_group = [], []

    def free_group_end(self) -> None:
        """Free what was queued, as one release.

        Raises:
            FreeGroupError: no group is open.
            NotAllocatedError, DuplicateFreeError: nothing of the group was freed; the group is closed.
        """
        if self.free_group is None or self.free_page_reps_group is None:
            raise FreeGroupError("no free group is open", pool=self.sub_pool_name)
        tokens, representatives = self.free_group, self.free_page_reps_group
        self.free_group = self.free_page_reps_group = None
        batches: list[torch.Tensor] = []
        may_repeat = False
        if tokens:
            pages, may_repeat = self._pages_of(torch.cat(tokens))
            batches.append(pages)
        if representatives:
            batches.append(torch.cat(representatives) // self.page_size)
            may_repeat = True
        if batches:
            self._free_pages(torch.cat(batches), may_repeat=may_repeat)

    def _pages_of(self, token_ids: torch.Tensor) -> tuple[torch.Tensor, bool]:
        """Virtual pages of token ids, and whether a page may be named twice."""
        ids = token_ids.to(torch.int64)
        if self.page_size == 1 and self._frees_in_order_given():
            return ids, True
        return torch.unique(torch.div(ids, self.page_size, rounding_mode="floor")), False

    def _frees_in_order_given(self) -> bool:
        """At page size 1 nothing needs to be deduplicated, and freed ids return in the caller's order; SGLang's eager END sorts."""
        return self.lazy_compaction

    def _free_pages(self, virtual_pages: torch.Tensor, *, may_repeat: bool) -> None:
        physical_pages = self._require_live(virtual_pages, may_repeat=may_repeat)
        if not self.lazy_compaction:
            self._require_open_gate()
            self._order_after_readers()
        self._tables.unbind(virtual_pages, physical_pages)
        if self._ids is not None:
            self._ids.append(virtual_pages)
        self._release_physical(physical_pages)

    def _release_physical(self, physical_pages: torch.Tensor) -> None:
        """Pages that hold nothing any more: holes when lazy, packed away at once when eager."""
        self._live_pages_lazy -= physical_pages.shape[0]
        if self.lazy_compaction:
            self.holes.add(physical_pages)
        else:
            self._compact_now(physical_pages)

    def free_physical(self, free_index: torch.Tensor) -> None:
        """Release physical slots (token ids in whole pages) reserved by `alloc_physical`, bound meanwhile or not."""
        if free_index is None or free_index.numel() == 0:
            return
        self._whole_pages(free_index.numel())
        physical_pages = free_index.to(torch.int64)[:: self.page_size] // self.page_size
        if not self.lazy_compaction:
            self._require_open_gate()
        self._order_after_readers()
        virtual_pages = self.physical_to_virtual.index_select(0, physical_pages)
        # Rows without an owner write -1 into the sentinel, which holds -1 already; a mask would ask the device how many there are.
        self.virtual_to_physical.index_fill_(0, torch.where(virtual_pages < 0, self.num_virtual_ids, virtual_pages), -1)
        self.physical_to_virtual.index_fill_(0, physical_pages, -1)
        self._release_physical(physical_pages)

    def cancel_physical_reservation(self, free_index: torch.Tensor) -> None:
        """Give back reserved slots whose load was never queued.

        Raises:
            NotAllocatedError: more pages than are reserved.
        """
        if free_index is None or free_index.numel() == 0:
            return
        pages = self._whole_pages(free_index.numel())
        if pages > self._reserved_for_load:
            raise NotAllocatedError(f"{pages} reserved page(s) cancelled, {self._reserved_for_load} are reserved",
                                    pool=self.sub_pool_name, state=self.allocator_state_str())  # fmt: skip
        self._reserved_for_load -= pages
        self.free_physical(free_index)

    # -- the running forward

    def set_latest_forward_done_event(self, event: ForwardDoneEvent | None) -> None:
        """The done event of the forward launched last; pages moved from now on may still be read until it fires."""
        self._forward.latest = event

    def set_inflight_forward(self, forward_done: ForwardDoneEvent, out_cache_loc_virtual: torch.Tensor | None) -> None:
        """The virtual token ids that the forward just launched writes in this pool; None if it writes none."""
        if self.lazy_compaction:
            self._forward.set_writing(forward_done, out_cache_loc_virtual)

    def set_hicache_transfer_done_event(self, transfer_key: Hashable, event: ForwardDoneEvent) -> None:
        """A copy to or from the host was queued; moves and frees are ordered after it. A queued load ends the reservation of
        `alloc_physical` (SGLang marks loads by the key ``"load"`` or a tuple that ends in it)."""
        self._forward.set_transfer_done(transfer_key, event)
        if transfer_key == "load" or (isinstance(transfer_key, tuple) and transfer_key[-1] == "load"):
            self._reserved_for_load = 0

    def _order_after_readers(self) -> None:
        self._forward.settle_transfers()
        if self.forward_stream is not None and not self.lazy_compaction:
            torch.cuda.current_stream().wait_stream(self.forward_stream)

    # -- flush

    def flush_for_allocation(self) -> int:
        """Pack the band completely because a neighbour needs room; returns pages moved."""
        return self._flush(urgent=True)

    def flush_opportunistic(self) -> int:
        """Pack what can be packed without waiting, between batches; returns pages moved."""
        if not self.lazy_compaction or not (len(self.holes) or self._pending):
            return 0
        return self._flush(urgent=False)

    def _flush(self, *, urgent: bool) -> int:
        """One compaction pass; returns pages moved.

        An urgent pass is ordered after the running forward and then packs completely. Any other pass moves at most
        ``_lazy_max_moves_per_call`` pages, stops at the first page the forward will write, and what it moves stays in pending reuse
        until the forward is done. Synchronisations: the holes are read (one), and with an unfinished forward its write set (one).
        """
        if not self.lazy_compaction:
            return 0
        if self.moves_blocked():
            self._take_back_pending(wait=False)
            return 0
        self._forward.settle_transfers()
        self._take_back_pending(wait=urgent)
        interior = self._retreat_over_boundary_holes()
        if not interior:
            return 0
        if urgent:
            self._forward.settle()
        plan = plan_moves(
            interior,
            self.watermark_physical,
            grows_up=self.grow_direction == "up",
            pending=self._pending.pages_on_host,
            write_set=tuple if urgent else self._read_write_set,
            max_moves=None if urgent else self._lazy_max_moves_per_call,
        )
        src_pages = self._move(plan.src_pages, plan.dst_pages) if plan.src_pages else None
        if urgent:
            # Every interior hole is now on the frontier side, whether it was there or a page left it: the band ends before them.
            self._retreat(len(interior))
            self.holes.clear()
        elif src_pages is not None:
            self._keep_unfilled(len(plan.dst_pages))
            self._vacate(src_pages, plan.src_pages)
        return len(plan.src_pages)

    def _take_back_pending(self, *, wait: bool) -> None:
        if self._pending:
            released = self._pending.release(wait=wait)
            if released:
                self.holes.add(*released)

    def _retreat_over_boundary_holes(self) -> list[int]:
        """Give back holes that touch the watermark; returns the others, ascending, on the host: the flush's one read."""
        if not len(self.holes):
            return []
        holes_on_host: list[int] = self.holes.sorted().tolist()
        grows_up = self.grow_direction == "up"
        touching = boundary_holes(holes_on_host, self.watermark_physical, grows_up)
        if touching:
            keep = slice(0, len(holes_on_host) - touching) if grows_up else slice(touching, None)
            self.holes.set_sorted(self.holes.pages[keep])
            self._retreat(touching)
            return holes_on_host[keep]
        return holes_on_host

    def _retreat(self, num_pages: int) -> None:
        self.watermark_physical += -num_pages if self.grow_direction == "up" else num_pages

    def _read_write_set(self) -> set[int]:
        """Physical pages the unfinished forward will write, on the host: one read, its size that of the batch."""
        tokens = self._forward.unfinished_write_set()
        if tokens is None:
            return set()
        pages = torch.div(self.translate_kv_loc(tokens), self.page_size, rounding_mode="floor")
        return set(pages.tolist())

    def _move(self, src_list: list[int], dst_list: list[int]) -> torch.Tensor:
        """Copy the pages' bytes, then point the tables at them. Returns the sources as a tensor."""
        src_pages, dst_pages = torch.tensor([src_list, dst_list], dtype=torch.int64, device=self.device).unbind()
        virtual_pages = self._lookup(self.physical_to_virtual, src_list, src_pages, self.sub_pool_name)
        self._kvcache.move_physical_pages(dst_pages, src_pages, self.page_size)
        self._tables.remap_moved(virtual_pages, src_pages, dst_pages)
        return src_pages

    def _keep_unfilled(self, filled: int) -> None:
        pages = self.holes.pages
        self.holes.set_sorted(pages[filled:] if self.grow_direction == "up" else pages[:-filled])

    def _vacate(self, src_pages: torch.Tensor, src_list: list[int]) -> None:
        """Sources of a move: holes at once, or pending while a forward may still read them."""
        reader = self._forward.latest_unfinished()
        if reader is None:
            self.holes.add(src_pages)
        else:
            self._pending.add(reader, src_list, src_pages)

    def _compact_now(self, freed_pages: torch.Tensor) -> None:
        """Eager mode: fill the freed pages at once, so that the band never has holes."""
        freed: list[int] = torch.sort(freed_pages)[0].tolist()
        grows_up = self.grow_direction == "up"
        old_mark = self.watermark_physical
        self._retreat(len(freed))
        low, high = (self.watermark_physical, old_mark) if grows_up else (old_mark + 1, self.watermark_physical + 1)
        vacated = set(freed)
        src_list = [page for page in range(low, high) if page not in vacated]
        dst_list = [page for page in freed if not low <= page < high]
        if src_list:
            self._move(src_list, dst_list)

    # -- refusals

    def _own_ids(self, what: str) -> FreeVirtualIds:
        if self._ids is None:
            raise NotIdOwnerError(f"{what}: this pool is indexed by another pool's ids", pool=self.sub_pool_name)
        return self._ids

    def _whole_pages(self, tokens: int) -> int:
        if tokens > 0 and tokens % self.page_size:
            raise PageAlignmentError(
                f"{tokens} tokens are no multiple of the page size {self.page_size}",
                pool=self.sub_pool_name,
                state=self.allocator_state_str(),
            )
        return tokens // self.page_size

    def _require_open_gate(self) -> None:
        if self.moves_blocked():
            raise MoveGateClosedError("eager compaction moves pages at every free, and a move gate is closed",
                                      pool=self.sub_pool_name, state=self.allocator_state_str())  # fmt: skip

    def _require_unmapped(self, virtual_pages: torch.Tensor) -> None:
        """Every page in range, not the padding page, not live, and named once."""
        in_range = (virtual_pages > 0) & (virtual_pages < self.num_virtual_ids)
        mapped = self._tables.physical_of(virtual_pages)
        require(
            (in_range & (mapped < 0)).all(),
            "kvtape: bind of a virtual page that is live, reserved or out of range",
            lambda: BindError(
                f"virtual pages {virtual_pages.tolist()} are not all free: out of range, reserved, or mapped to {mapped.tolist()}",
                pool=self.sub_pool_name,
                ids=virtual_pages[~(in_range & (mapped < 0))].tolist(),
                state=self.allocator_state_str(),
            ),
        )

    def _require_live(self, virtual_pages: torch.Tensor, *, may_repeat: bool) -> torch.Tensor:
        """Physical pages of virtual pages that are about to be freed; every one must be live, and named once."""
        physical_pages = self._tables.physical_of(virtual_pages)
        require(
            (physical_pages > 0).all(),
            "kvtape: free of a page that is not live (double free, never allocated, -1 or the padding page)",
            lambda: self._not_allocated(virtual_pages, physical_pages),
        )
        if may_repeat and virtual_pages.shape[0] > 1:
            # Number the pages in the inverse table, whose rows are about to be cleared anyway: a page named twice keeps one number.
            numbers = torch.arange(virtual_pages.shape[0], dtype=torch.int64, device=virtual_pages.device)
            self.physical_to_virtual.index_copy_(0, physical_pages, numbers)
            require(
                (self.physical_to_virtual.index_select(0, physical_pages) == numbers).all(),
                "kvtape: the same page twice in one free",
                lambda: self._named_twice(virtual_pages, physical_pages),
            )
        return physical_pages

    def _not_allocated(self, virtual_pages: torch.Tensor, physical_pages: torch.Tensor) -> NotAllocatedError:
        bad = virtual_pages[physical_pages <= 0].tolist()
        return NotAllocatedError(
            f"free of virtual page(s) {bad}, which are not allocated (freed before, never allocated, or no page at all); "
            f"token ids {[page * self.page_size for page in bad]} and up. The call named {virtual_pages.shape[0]} page(s)",
            pool=self.sub_pool_name,
            ids=bad,
            state=self.allocator_state_str(),
        )

    def _named_twice(self, virtual_pages: torch.Tensor, physical_pages: torch.Tensor) -> DuplicateFreeError:
        self.physical_to_virtual.index_copy_(0, physical_pages, virtual_pages)
        pages, counts = torch.unique(virtual_pages, return_counts=True)
        bad = pages[counts > 1].tolist()
        return DuplicateFreeError(
            f"virtual page(s) {bad} named more than once in one free",
            pool=self.sub_pool_name,
            ids=bad,
            state=self.allocator_state_str(),
        )

    def _expand_pages_to_tokens(self, pages: torch.Tensor) -> torch.Tensor:
        """Token ids of whole pages, int64 ``[n * page_size]``; never a view of what it was given."""
        if self.page_size == 1:
            return pages.clone()
        return (pages[:, None] * self.page_size + self._offsets).reshape(-1)
