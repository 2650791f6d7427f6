"""Room for an alloc while numbers are on their way: what bounds alone would refuse, and the host need not wait for all the same.

Two requests go on without the numbers.

- The neighbour may have to be packed, which the exact sizes decide and only the device knows. If the request is certain to fit once it is
  packed, it fits either way: the flush is made *if the device finds the pages lacking*, rows of its plan being no moves otherwise, and the
  host has its answer before it knows which it was.
- `alloc_with_virtual` cannot answer "no": its caller has looked at sizes before (composites do), so it takes what it was promised,
  and a promise that does not hold is written to the error log.
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch

from allocator.late_flush import LateFlush
from allocator.read_back import LateCountPerhaps
from allocator.unsettled import FAR, PackedPerhaps


class LateRoom(LateFlush):
    """The shortfall ladder of an END pool where numbers come late."""

    #: Pages that may be taken though bounds do not promise them: the device was asked to make sure of them.
    _granted = 0
    #: While an urgent flush is made that depends on it: whether it happens, bool ``[]`` on the device. Else None.
    flush_condition: torch.Tensor | None = None

    def clear(self) -> None:
        self._granted = 0
        super().clear()

    # -- asking for room

    def make_sure_of(self, need_size: int) -> bool:
        is_sure = super().make_sure_of(need_size)
        self._granted = 0  # others may take it before this pool does
        return is_sure

    def _make_sure_of(self, num_pages: int) -> bool:
        self._granted = 0
        if not self._read_back.immediate and not self._poll_chain():
            if self._is_promised:
                self._look_for_errors()
                return True
            neighbour = self._packed_is_enough(num_pages)
            if neighbour is not None:
                self._look_for_errors()
                neighbour._flush_if(self._lacks(num_pages))
                if self._ids is None or num_pages <= len(self._ids):
                    self._granted = num_pages
                return True
        return super()._make_sure_of(num_pages)

    def _packed_is_enough(self, num_pages: int) -> LateRoom | None:
        """The neighbour on the growth side, if bounds do not promise the pages as everything lies, and do once it is packed."""
        neighbour = self._growth_side_neighbor()
        if (
            num_pages * self.page_size <= self._certain_size()
            or not isinstance(neighbour, LateRoom)
            or not neighbour._drains_on_urgent_flush()
            or self._may_lack_ids(num_pages)
        ):
            return None
        packed = neighbour._mark_of(neighbour._live_pages_lazy)
        if self.grow_direction == "up":
            gap = (packed + 1) * neighbour.entry_bytes_per_page - self._byte_high_frontier()
        else:
            gap = self._byte_low_frontier() - packed * neighbour.entry_bytes_per_page
        if self._is_settled:
            gap = max(0, gap)  # the bands do not overlap, whatever the neighbour's bound says
        fresh = min(gap // self.entry_bytes_per_page, self._index_room())
        return neighbour if num_pages <= fresh + len(self.holes) else None

    def _lacks(self, num_pages: int) -> torch.Tensor:
        """Whether ``num_pages`` are more than can be handed out as everything lies: bool ``[]``, on the device, exact."""
        registers = self._unsettle_registers()
        if self.grow_direction == "up":
            gap = self._low_frontier_above_on_device() - registers.mark * self.entry_bytes_per_page
            room = self.num_pages - registers.mark
        else:
            own_low = (registers.mark + 1) * self.entry_bytes_per_page
            gap = own_low - self._high_frontier_below_on_device()
            room = registers.mark + (1 - self.min_page_index)
        by_bytes = torch.div(gap.clamp(min=0), self.entry_bytes_per_page, rounding_mode="floor")
        return torch.minimum(by_bytes, room) + registers.count < num_pages

    def take_physical_pages(self, num_pages: int) -> torch.Tensor | None:
        if self._granted and num_pages <= self._granted:
            self._granted = 0
            return self._take_late(num_pages)
        self._granted = 0
        if (
            self._is_promised
            and not self._read_back.immediate
            and not self._poll_chain()
            and num_pages * self.page_size > self._certain_size()
        ):
            self._note_broken_promise(self._lacks(num_pages))
            return self._take_late(num_pages)
        return super().take_physical_pages(num_pages)

    # -- an urgent flush that happens or not

    def pack_both_if_lacking(self, num_pages: int, other: LateRoom, num_other_pages: int) -> bool:
        """Pack this pool and the one at the other end if the device finds that so many pages of the two cannot be taken together as
        everything lies. Only where both may move their pages, and it is known that so many fit once they are packed, ids included.

        Returns:
            Whether that was left to the device. If not nothing has happened: all is known.
        """
        if self._poll_chain():
            return False
        lacks = self._lacks_together(num_pages, other, num_other_pages)
        self._flush_if(lacks)
        other._flush_if(lacks)
        return True

    def _lacks_together(self, num_pages: int, other: LateRoom, num_other_pages: int) -> torch.Tensor:
        """Whether so many pages of both are more than can be taken as everything lies, out of the one gap between them: bool ``[]``. Bytes
        are all that counts: neither pool has fewer pages of its own than there is room for in the gap."""
        low, high = (self, other) if self.grow_direction == "up" else (other, self)
        gap = high._byte_low_frontier_on_device() - low._byte_high_frontier_on_device()
        need, other_need = (
            (pages - pool._unsettle_registers().count).clamp(min=0) * pool.entry_bytes_per_page
            for pool, pages in ((self, num_pages), (other, num_other_pages))
        )
        return need + other_need > gap

    def _flush_if(self, condition: torch.Tensor) -> None:
        """`flush_for_allocation` if ``condition`` (bool ``[]``) holds; only of a pool that may move its pages."""
        self.flush_condition = condition
        try:
            self.flush_for_allocation()
        finally:
            self.flush_condition = None

    def _take_back_pending(self, *, wait: bool) -> None:
        if self.flush_condition is None:
            super()._take_back_pending(wait=wait)

    def _pack_late(self) -> int:
        return super()._pack_late() if self.flush_condition is None else self._pack_if(self.flush_condition)

    def _pack_if(self, condition: torch.Tensor) -> int:
        """The urgent pass with registers: no hole and nothing pending is left if ``condition`` holds, nothing changes otherwise."""
        registers, numbers = self._unsettle_registers(), self._numbers
        grows_up = self.grow_direction == "up"
        batches = self._pending.order_behind_readers()
        everything = replace(registers)
        for batch in batches:
            everything.append(batch.pages, batch.count, numbers, self.num_pages)
        window = min(everything.holes.shape[0], self._allocated_pages())
        if not window:
            return 0
        padding = FAR if grows_up else -1
        ascending = torch.where(condition, everything.sorted(numbers, padding=padding), padding)
        count = torch.where(condition, everything.count, 0)
        plan = self._flush_ops.plan(
            self._window(registers.mark, window, count), ascending, min(self._live_pages_lazy, window)
        )
        ticket = self._order_after_forward(plan.moves)
        self._carry_out(plan)
        registers.mark = registers.mark - count if grows_up else registers.mark + count
        registers.count = torch.where(condition, 0, registers.count)
        decided = self._read_back.post(torch.count_nonzero(condition))
        self._note(PackedPerhaps(decided, batches, condition))
        return cast(
            int,
            LateCountPerhaps(lambda: ticket.awaited()[0], lambda: bool(decided.awaited()[0])),
        )
