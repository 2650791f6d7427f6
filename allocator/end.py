"""`MultiEndedAllocator`: the allocator of one END pool, growing from one end of the shared buffer towards the middle.

Start reading at `MultiEndedAllocator._flush`, which is what this project measures. Behaviour and names follow SGLang 0.5.23's class of
the same name (``mem_cache/allocator/unified_sub_pool.py``); placement is pinned by transcripts recorded from it.
"""

from __future__ import annotations

from typing import Any

import torch

from allocator.errors import ConfigurationError, OutOfRoomError
from allocator.lookup import DEFAULT_STRATEGY, DEVICE_STRATEGY
from allocator.plan import boundary_holes, plan_moves
from allocator.release import ReleasingBand
from allocator.sequences import decode_token_ids, extend_token_ids, new_pages_decode, new_pages_extend


class MultiEndedAllocator(ReleasingBand):
    """Hands out virtual token ids, keeps their pages packed at one end of the buffer. Takes the arguments of `MappedBand`.

    With ``strategy="device"`` what is made is a `allocator.device_end.DeviceMultiEndedAllocator`, whose placement is the same.
    """

    def __new__(cls, **arguments: Any) -> MultiEndedAllocator:
        return super().__new__(cls._class_for(arguments.get("strategy", DEFAULT_STRATEGY)))

    @classmethod
    def _class_for(cls, strategy: str) -> type[MultiEndedAllocator]:
        """The class that is made when this one is asked for with ``strategy``."""
        from allocator.device_end import DeviceMultiEndedAllocator

        if strategy != DEVICE_STRATEGY and issubclass(cls, DeviceMultiEndedAllocator):
            raise ConfigurationError(
                f"{cls.__name__} plans its flushes on the device: its strategy is {DEVICE_STRATEGY!r}, not {strategy!r}"
            )
        if strategy != DEVICE_STRATEGY or issubclass(cls, DeviceMultiEndedAllocator):
            return cls
        if cls is MultiEndedAllocator:
            return DeviceMultiEndedAllocator
        raise ConfigurationError(
            f"{cls.__name__} keeps the flush that plans on the host; for strategy {DEVICE_STRATEGY!r} derive it from "
            f"{DeviceMultiEndedAllocator.__name__}"
        )

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
        until the forward is done. Synchronisations: the holes are read if they changed (one), with an unfinished forward its write set
        (one), and sources and targets of moves go to the device in one blocking copy.
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
        holes_on_host = self.holes.on_host()
        grows_up = self.grow_direction == "up"
        touching = boundary_holes(holes_on_host, self.watermark_physical, grows_up)
        if touching:
            keep = slice(0, len(holes_on_host) - touching) if grows_up else slice(touching, None)
            holes_on_host = holes_on_host[keep]
            self.holes.set_sorted(self.holes.pages[keep], holes_on_host)
            self._retreat(touching)
        return holes_on_host

    def _retreat(self, num_pages: int) -> None:
        self.watermark_physical += -num_pages if self.grow_direction == "up" else num_pages

    def _read_write_set(self) -> set[int]:
        """Physical pages the unfinished forward will write, on the host: one read, its size that of the batch."""
        tokens = self._forward.unfinished_write_set()
        if tokens is None:
            return set()
        virtual_pages = torch.div(tokens.to(torch.int64), self.page_size, rounding_mode="floor")
        pages = self._tables.physical_of(virtual_pages)  # -1 for tokens freed since: no page is numbered so
        return set(pages.tolist())

    def _move(self, src_list: list[int], dst_list: list[int]) -> torch.Tensor:
        """Copy the pages' bytes, then point the tables at them. Returns the sources as a tensor."""
        src_pages, dst_pages = torch.tensor(
            [src_list, dst_list], dtype=torch.int64, device=self.device
        ).unbind()
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
        low, high = (
            (self.watermark_physical, old_mark) if grows_up else (old_mark + 1, self.watermark_physical + 1)
        )
        vacated = set(freed)
        src_list = [page for page in range(low, high) if page not in vacated]
        dst_list = [page for page in freed if not low <= page < high]
        if src_list:
            self._move(src_list, dst_list)

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
        token_ids = extend_token_ids(
            prefix_lens, seq_lens, last_loc, new_pages, extend_num_tokens, self.page_size
        )
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

    def make_sure_of(self, need_size: int) -> bool:
        """Whether ``need_size`` tokens can be handed out, after having made room for them if there was none."""
        return self._make_sure_of(-(-need_size // self.page_size))

    def _make_sure_of(self, num_pages: int) -> bool:
        """Whether ``num_pages`` can be handed out, after asking the neighbour for room if they cannot. The one shortfall ladder:
        flush the growth-side neighbour (never this pool: that trades one hole for one page of gap), then have a float move over."""
        need_size = num_pages * self.page_size
        if need_size <= self._certain_size():
            return True
        neighbour = self._growth_side_neighbor()
        if neighbour is None:
            return False
        neighbour.flush_for_allocation()  # type: ignore[attr-defined]
        if need_size <= self._certain_size():
            return True
        blocker = self._growth_side_neighbor()
        open_side_for = getattr(blocker, "open_side_for", None)
        if open_side_for is not None:
            open_side_for({self: num_pages})
        return need_size <= self._certain_size()

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
            if (
                mark > self.num_pages
                or mark > self._chain_low_frontier_above_bytes() // self.entry_bytes_per_page
            ):
                return False
        else:
            mark = self.watermark_physical - num_pages
            below = self._chain_high_frontier_below_bytes()
            if mark + 1 < self.min_page_index or (mark + 1) * self.entry_bytes_per_page < below:
                return False
        self.watermark_physical = mark
        return True
