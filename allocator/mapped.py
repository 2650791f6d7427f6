"""State of one pool's allocator: tables, lists, counts.

`MappedBand` holds what `allocator.binding` (bind, and what is refused), `allocator.release` (free) and `allocator.end` (alloc and flush)
work on.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from allocator.band import Band
from allocator.errors import (
    ConfigurationError,
    NotIdOwnerError,
    PageAlignmentError,
)
from allocator.forwards import ForwardDoneEvent, PendingReuse, RunningForward
from allocator.free_lists import FreeVirtualIds, HoleList
from allocator.lookup import DEFAULT_STRATEGY, lookup_for
from allocator.pool import UnifiedKVPool
from allocator.tables import PageTables

log = logging.getLogger("kvtape")

#: Moves of one non-urgent flush, so that a long backlog does not hold up the scheduler (SGLang's setting and default).
MAX_MOVES_ENV = "SGLANG_LAZY_COMPACTION_MAX_MOVES_PER_CALL"
DEFAULT_MAX_MOVES = 4096
ASSERTIONS = ("log", "async")


def most_moves() -> int:
    """Moves of one non-urgent flush, from the environment. What is no number of moves is said in the log, and the default is taken."""
    text = os.environ.get(MAX_MOVES_ENV)
    if text is None:
        return DEFAULT_MAX_MOVES
    try:
        moves = int(text)
    except ValueError:
        moves = -1
    if moves < 0:
        log.warning(
            "kvtape: %s is %r, which is no number of moves: %d is taken",
            MAX_MOVES_ENV,
            text,
            DEFAULT_MAX_MOVES,
        )
        return DEFAULT_MAX_MOVES
    return moves


class MappedBand(Band):
    """A band with its two tables, its free ids, its holes and the forwards it must mind.

    Args:
        kvcache: moves (and, if it can, zeroes) whole physical pages; see `allocator.kv_store.KVCache`.
        unified_buffer: the shared buffer, for sizes.
        sub_pool_name: which of its pools this is.
        device: where tables and ids live.
        is_id_owner: whether virtual ids are this pool's own. A pool indexed by another pool's ids has ``virtual_num_pages`` of them.
        page_size: slots in a page, 1 to 256.
        lazy_compaction: record holes on free and pack in `_flush`; otherwise pack at every free.
        strategy: mapping lookup of a flush, see `allocator.lookup`.
        assertions: what strategy ``"device"`` does about a wrong call where the host does not wait for the answer. ``"log"``: write it down
            on the device, freeze the pool, raise at a later call (`allocator.error_log`). ``"async"``: ``torch._assert_async``, as the
            other strategies and SGLang do; on CUDA that ends the context.
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
        assertions: str = "log",
    ) -> None:
        super().__init__()
        self.sub_pool_name = sub_pool_name
        if assertions not in ASSERTIONS:
            raise ConfigurationError(
                f"assertions must be one of {', '.join(ASSERTIONS)}, not {assertions!r}", pool=sub_pool_name
            )
        self.assertions = assertions
        if shards_under_dcp:
            raise ConfigurationError("decode context parallelism is not supported", pool=sub_pool_name)
        if is_id_owner and virtual_num_pages is not None:
            raise ConfigurationError(
                "only a pool indexed by another pool's ids takes virtual_num_pages", pool=sub_pool_name
            )
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
        self._lazy_max_moves_per_call = most_moves()
        self.num_virtual_ids = self.num_pages if virtual_num_pages is None else virtual_num_pages
        if self.num_virtual_ids <= 0:
            raise ConfigurationError("the id space is empty", pool=sub_pool_name)
        self._tables = self._new_tables()
        self._offsets = torch.arange(page_size, dtype=torch.int64, device=device)
        self.holes = HoleList(device)
        self._pending = PendingReuse()
        self._forward = RunningForward()
        self.clear()

    # -- state

    @property
    def answers_at_once(self) -> bool:
        """Whether a wrong call is known before anything has changed: off a CPU that would take a synchronisation."""
        return torch.device(self.device).type == "cpu"

    def clear(self) -> None:
        """Back to empty. Tables keep their storage (captured graphs read it); gates and neighbours stay."""
        self._tables.clear()
        self._ids = self._all_ids_free() if self.is_id_owner else None
        self.holes.clear()
        self._pending.clear()
        self._forward.clear()
        self._reserved_for_load = 0
        self._live_pages_lazy = 0
        self.free_group: list[torch.Tensor] | None = None
        self.free_page_reps_group: list[torch.Tensor] | None = None
        self._reset_watermarks()

    def _new_tables(self) -> PageTables:
        return PageTables(self.num_virtual_ids, self.num_pages, self.device)

    def _all_ids_free(self) -> FreeVirtualIds:
        return FreeVirtualIds(self.min_page_index, self.num_pages, self.device)

    def _reset_watermarks(self) -> None:
        self.watermark_physical = self.min_page_index if self.grow_direction == "up" else self.num_pages - 1

    def resize(self, max_slots: int, *, virtual_num_pages: int | None = None) -> None:
        """Use only the first ``max_slots`` slots (and ids) from now on, and start empty. Tables keep their storage.

        Raises:
            ConfigurationError: larger than what the tables were made for, or no page left.
        """
        if self.is_id_owner and virtual_num_pages is not None:
            raise ConfigurationError("an owner's ids follow from its pages", pool=self.sub_pool_name)
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
        self.total_bytes = self.unified_buffer.total_bytes  # SGLang's buffer may have another size by now
        self.clear()

    def _set_capacity(self, max_slots: int, *, virtual_num_pages: int | None = None) -> None:
        """SGLang's name for `resize`."""
        self.resize(max_slots, virtual_num_pages=virtual_num_pages)

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

    @property
    def free_id_count(self) -> int:
        """Virtual pages that can be handed out. A lower bound while numbers are on their way."""
        return len(self._own_ids("free_id_count"))

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
        return self._most_live_pages() * self.page_size

    def _most_live_pages(self) -> int:
        """Live pages; an upper bound while numbers are on their way."""
        return self._live_pages_lazy if self.lazy_compaction else self._allocated_pages()

    def promised(self) -> AbstractContextManager[None]:
        """While pages are taken of which the caller knows that they are there: it need not be found out here. What is asked for then and is
        not there is an error, at once or late."""
        return nullcontext()

    def _is_packed(self) -> bool:
        """Whether there is for certain no hole, and nothing in pending reuse."""
        return self._is_settled and not self._pending and not len(self.holes)

    def _knows_live(self) -> bool:
        """Whether `_most_live_pages` is exact, whatever else is on its way."""
        return True

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

    # -- translate

    def translate_kv_loc(self, virt_tokens: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """Virtual to physical token ids, any shape, int64; unmapped and out-of-range ids become 0. See `PageTables.translate`."""
        return self._tables.translate(virt_tokens, self.page_size, out)

    def translate_write_loc(
        self, widened_loc: torch.Tensor, *, out: torch.Tensor | None = None, out_width: int | None = None
    ) -> torch.Tensor:
        """`translate_kv_loc` of tokens about to be written. With ``out_width`` the rows of ``out`` past them, up to it, become 0."""
        return self._tables.translate(widened_loc, self.page_size, out, out_width)

    def _band_pages(self) -> tuple[int, int]:
        """Physical pages ``[low, high)`` of the band."""
        if self.grow_direction == "up":
            return self.min_page_index, self.watermark_physical
        return self.watermark_physical + 1, self.num_pages

    # -- the running forward

    def set_latest_forward_done_event(self, event: ForwardDoneEvent | None) -> None:
        """The done event of the forward launched last; pages moved from now on may still be read until it fires."""
        self._forward.latest = event

    def set_inflight_forward(
        self, forward_done: ForwardDoneEvent, out_cache_loc_virtual: torch.Tensor | None
    ) -> None:
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

    # -- refusals

    def _own_ids(self, what: str) -> FreeVirtualIds:
        if self._ids is None:
            raise NotIdOwnerError(
                f"{what}: this pool is indexed by another pool's ids", pool=self.sub_pool_name
            )
        return self._ids

    def _whole_pages(self, tokens: int) -> int:
        if tokens > 0 and tokens % self.page_size:
            raise PageAlignmentError(
                f"{tokens} tokens are no multiple of the page size {self.page_size}",
                pool=self.sub_pool_name,
                state=self.allocator_state_str(),
            )
        return tokens // self.page_size

    def _expand_pages_to_tokens(self, pages: torch.Tensor) -> torch.Tensor:
        """Token ids of whole pages, int64 ``[n * page_size]``; never a view of what it was given."""
        if self.page_size == 1:
            return pages.clone()
        return (pages[:, None] * self.page_size + self._offsets).reshape(-1)
