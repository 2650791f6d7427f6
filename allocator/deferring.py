"""`DeferringBand`: what an END pool does while numbers of its flushes are on their way from the device.

Calls that need no such number go on as always. The others work on `allocator.unsettled.Registers`, and what the host says about sizes
are lower bounds. Whatever must be exact (a watermark that is asked for, a request that the bounds would refuse) waits for the device, which
`blocking_reads` counts.
"""

from __future__ import annotations

from abc import abstractmethod

import torch

from allocator.device_pending import DevicePendingReuse
from allocator.forwards import ForwardDoneEvent
from allocator.late_ids import LateIds
from allocator.late_lists import BoundedHoleList
from allocator.read_back import SLOTS, Ticket
from allocator.unsettled import Entry, Journal, Numbers, PendingBatch, Registers, Released, Returned, Took


class DeferringBand(LateIds):
    """An END pool that is *settled* (``_journal`` is None; everything is exact) or not."""

    _pending: DevicePendingReuse
    holes: BoundedHoleList
    _journal: Journal | None = None
    _registers: Registers
    #: Goes up with whatever changes what a flush could do, apart from the running forward.
    _version = 0
    #: After a flush that has done all it could: the version it left, and the write set it met.
    _idle: tuple[int, tuple[ForwardDoneEvent, torch.Tensor] | None] | None = None

    def clear(self) -> None:
        self._version += 1
        self._journal = None
        self._pending = DevicePendingReuse()
        self.holes = BoundedHoleList(self.device)
        super().clear()

    # -- the watermark: exact for whoever asks, a bound inside

    @property
    def watermark_physical(self) -> int:
        """The next free page in the direction of growth. Waits for the device while that is on its way."""
        self._settle()
        return self._mark

    @watermark_physical.setter
    def watermark_physical(self, page: int) -> None:
        self._mark = page

    def _mark_of(self, band: int) -> int:
        """The watermark of a band of so many pages."""
        return self.min_page_index + band if self.grow_direction == "up" else self.num_pages - 1 - band

    def _allocated_pages(self) -> int:
        mark = self._mark
        return mark - self.min_page_index if self.grow_direction == "up" else self.num_pages - 1 - mark

    def _byte_low_frontier(self) -> int:
        first = self.min_page_index if self.grow_direction == "up" else self._mark + 1
        return first * self.entry_bytes_per_page

    def _byte_high_frontier(self) -> int:
        end = self._mark if self.grow_direction == "up" else self.num_pages
        return end * self.entry_bytes_per_page

    def _band_pages(self) -> tuple[int, int]:
        if self.grow_direction == "up":
            return self.min_page_index, self._mark
        return self._mark + 1, self.num_pages

    def _band_on_device(self) -> tuple[int | torch.Tensor, int | torch.Tensor]:
        if self._journal is None:
            return self._band_pages()
        mark = self._registers.mark
        return (self.min_page_index, mark) if self.grow_direction == "up" else (mark + 1, self.num_pages)

    def _unsettle_registers(self) -> Registers:
        self._unsettle()
        return self._registers

    def _byte_low_frontier_on_device(self) -> int | torch.Tensor:
        if self._journal is None or self.grow_direction == "up":
            return self._byte_low_frontier()
        return (self._registers.mark + 1) * self.entry_bytes_per_page

    def _byte_high_frontier_on_device(self) -> int | torch.Tensor:
        if self._journal is None or self.grow_direction == "down":
            return self._byte_high_frontier()
        return self._registers.mark * self.entry_bytes_per_page

    # -- what else must be exact when it is asked for

    @property
    def _pending_reuse(self) -> dict[ForwardDoneEvent, tuple[list[int], list[torch.Tensor]]]:
        self._settle()
        return super()._pending_reuse

    @property
    def _pending_reuse_pages_cpu(self) -> set[int]:
        self._settle()
        return super()._pending_reuse_pages_cpu

    @property
    def live_page_count(self) -> int:
        self._settle_live()
        return super().live_page_count

    def allocated_count(self) -> int:
        self._settle_live()
        return super().allocated_count()

    def _settle_live(self) -> None:
        if not self._knows_live():
            self._settle()

    def _knows_live(self) -> bool:
        return self._journal is None or self._journal.live_is_known()

    def _certain_size(self) -> int:
        self._poll_chain()
        return max(0, super()._certain_size())

    def _certain_schedulable_size(self) -> int:
        self._poll_chain()
        return max(0, super()._certain_schedulable_size())

    def _current_gap_bytes(self) -> int:
        """Less than nothing where bounds of this band and of the next one overlap, which the bands do not: as many of the holes that the
        bound of this one shows are not there then."""
        if self._journal is None:
            return super()._current_gap_bytes()
        if self.grow_direction == "up":
            return self._chain_low_frontier_above_bytes() - self._byte_high_frontier()
        return self._byte_low_frontier() - self._chain_high_frontier_below_bytes()

    # -- settling

    def _poll(self) -> None:
        """Take in numbers that have arrived. Asks, never waits."""
        journal = self._journal
        if journal is None:
            return
        is_done = journal.work_off()
        self._pending.drop_empty()
        if not is_done:
            self._show_bounds(journal.bounds)
            return
        known = journal.known
        self._journal = None
        self._mark = self._mark_of(known.band)
        self._live_pages_lazy = known.live
        self.holes.len_bound = None
        pages = self._registers.holes[: known.holes]
        if self._registers.ascending:
            self.holes.set_sorted(pages)
        else:
            self.holes.set_unsorted(pages)
        self._settle_ids(known.late_ids)
        del self._registers

    def _settle(self) -> None:
        """Take in all numbers; waits for those that are on their way."""
        if self._journal is None:
            return
        self._poll()
        if self._journal is not None:
            self._journal.wait()
            self._poll()
            # What was written to the log before these numbers has come with them.
            self._errors.look()

    def _youngest_ticket(self) -> Ticket | None:
        return None if self._journal is None else self._journal.youngest()

    def _show_bounds(self, bounds: Numbers) -> None:
        self._mark = self._mark_of(bounds.band)
        self._live_pages_lazy = bounds.live
        self.holes.len_bound = bounds.holes

    @property
    def _is_settled(self) -> bool:
        return self._journal is None

    def _unsettle(self) -> Journal:
        """The journal; begins one, with registers on the device, if the pool was settled."""
        if self._journal is None:
            self._journal = Journal(
                Numbers(self._allocated_pages(), self._live_pages_lazy, len(self._pending))
            )
            pages, is_sorted = self.holes.pages, self.holes.is_sorted

            def register(value: int) -> torch.Tensor:
                return torch.full((), value, dtype=torch.int64, device=self.device)

            self._registers = Registers(pages, register(pages.shape[0]), register(self._mark), is_sorted)
        elif self._journal.under_way >= SLOTS // 2:
            # More read-backs than that under way would need each other's slots.
            self._settle()
            return self._unsettle()
        return self._journal

    def _note(self, entry: Entry) -> None:
        assert self._journal is not None
        self._journal.add(entry)
        self._show_bounds(self._journal.bounds)

    # -- calls while unsettled

    def flush_opportunistic(self) -> int:
        self._poll()
        # Holes and pending pages that are only bounds do not say that there is nothing to pack.
        if self._journal is not None and self.lazy_compaction:
            return self._flush(urgent=False)
        return super().flush_opportunistic()

    def bind(self, virtual_ids: torch.Tensor, physical_ids: torch.Tensor) -> None:
        self._version += 1
        super().bind(virtual_ids, physical_ids)

    def unbind(self, virtual_ids: torch.Tensor) -> None:
        self._version += 1
        super().unbind(virtual_ids)

    def take_physical_pages(self, num_pages: int) -> torch.Tensor | None:
        self._version += 1
        if not self._poll_chain() and num_pages * self.page_size > self._certain_size():
            self._settle_chain()
        if self._read_back.immediate:
            return super().take_physical_pages(num_pages)
        if self._journal is not None:
            return self._take_late(num_pages)
        with self._blaming_faults():
            taken = super().take_physical_pages(num_pages)
        return taken if taken is None else self._unless_frozen(taken)

    def _take_late(self, num_pages: int) -> torch.Tensor:
        """Pages that are certain to be there."""
        self._version += 1
        with self._blaming_faults():
            self._unsettle()
            self._note(Took(num_pages))
            taken = self._registers.take(num_pages, self._numbers, grows_up=self.grow_direction == "up")
        return self._unless_frozen(taken)

    def _release_physical(self, physical_pages: torch.Tensor) -> None:
        self._version += 1
        if self._read_back.immediate:
            super()._release_physical(physical_pages)
            return
        with self._blaming_faults():
            self._poll()
            if self._journal is None:
                super()._release_physical(physical_pages)
                return
            count = physical_pages.shape[0]
            self._registers.append(physical_pages, count, self._numbers, self.num_pages)
            self._note(Released(count))
            if not self.lazy_compaction:
                self._compact_uncounted()

    def _release_late(
        self,
        virtual_pages: torch.Tensor,
        physical_pages: torch.Tensor,
        count: torch.Tensor,
        *,
        least: int = 1,
    ) -> None:
        ticket = self._read_back.post(count)
        self._version += 1
        with self._blaming_faults():
            self._unsettle()
            self._append_late_ids(virtual_pages, count, least)
            self._registers.append(physical_pages, count, self._numbers, self.num_pages)
            self._note(Released(least, ticket))
            if not self.lazy_compaction:
                self._compact_uncounted()

    @abstractmethod
    def _compact_uncounted(self) -> None:
        """Eager mode: fill the places that the registers hold as holes, whose number only the device knows."""

    def _take_back_pending(self, *, wait: bool) -> None:
        if not self._pending:
            return
        released = self._pending.release_batches(wait=wait)
        self._version += bool(released)
        self._poll()
        if self._journal is None:
            if released:
                self.holes.add(*(batch.exact() for batch in released))
            return
        for batch in released:
            self._registers.append(batch.pages, batch.count, self._numbers, self.num_pages)
            self._note(Returned(batch))

    def _unchanged_since_idle(self) -> bool:
        """Whether the last flush did all it could and nothing but the running forward can have changed since. Engines without work flush by
        the thousand while a forward runs."""
        return self._idle is not None and self._idle[0] == self._version

    def _note_idle(self, *, is_capped: bool, holds_back: bool) -> None:
        """A flush that is not urgent is over. Unless its cap ended it, all that could move has moved; and what it vacated, if it vacated
        anything, was held back and is no hole yet (``holds_back``). Until something changes, another one would do nothing."""
        is_idle = holds_back and not is_capped
        self._idle = (self._version, self._forward.writing) if is_idle else None

    def _hold_back(self, reader: ForwardDoneEvent, batch: PendingBatch) -> None:
        """Pages moved away that an unfinished forward may still read."""
        self._pending.add_batch(reader, batch)
