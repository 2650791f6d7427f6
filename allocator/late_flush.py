"""The flush where the numbers it leaves come later: every row of every plan is worked out, and rows that are none become a move of the
padding page onto itself. Nothing here asks the device anything."""

from __future__ import annotations

from functools import cached_property
from typing import cast

import torch

from allocator.deferring import DeferringBand
from allocator.device_plan import live_places
from allocator.flush_ops import Holes, PackPlan, TorchFlush, Window, flush_ops_class
from allocator.forwards import ForwardDoneEvent
from allocator.read_back import LateCount, Ticket
from allocator.unsettled import FAR, Flushed, Packed, PendingBatch


class LateFlush(DeferringBand):
    """Flush and eager compaction of a `DeferringBand`."""

    #: An urgent flush that ended the running forward's write hazard if it moved anything: that forward, whether it did (bool ``[]``), and
    #: the same on its way to the host.
    _write_ended: tuple[tuple[ForwardDoneEvent, torch.Tensor] | None, torch.Tensor, Ticket] | None = None

    #: Who does the device work; None for what `allocator.flush_ops.flush_ops_class` chooses.
    flush_ops_class: type[TorchFlush] | None = None

    @cached_property
    def _flush_ops(self) -> TorchFlush:
        chosen = self.flush_ops_class or flush_ops_class(self.device)
        return chosen(
            tables=self._tables, kvcache=self._kvcache, errors=self._errors, page_size=self.page_size,
            numbers=self._numbers,
        )  # fmt: skip

    def clear(self) -> None:
        self._write_ended = None
        super().clear()
        if not self._read_back.immediate:
            self._flush_ops  # noqa: B018  who does the work is settled here, and not in the first flush of a serving engine

    def prewarm_compaction(self) -> None:
        """Compile and load what flushes launch, so that the first one does not have to while an engine serves. Nothing to do where numbers
        are there at once: other code runs there."""
        if not self._read_back.immediate:
            self._flush_ops.prewarm(
                grows_up=self.grow_direction == "up", low=self.min_page_index, high=self.num_pages
            )

    def _pack_late(self) -> int:
        """The urgent pass. Where live pages are counted it leaves nothing open: the packed band is known, whatever was not known before."""
        if self._journal is not None and not self._journal.live_is_known():
            return self._pack_uncounted()
        grows_up = self.grow_direction == "up"
        band, live = self._allocated_pages(), self._live_pages_lazy
        window = band - live
        if not window:
            return 0
        mark = self._mark_of(live)
        if self._journal is None:
            ascending = self.holes.sorted()
        else:
            ascending = self._registers.sorted(self._numbers, padding=FAR if grows_up else -1)
        # Places beyond the watermark, where the bound is not exact, hold nothing.
        vacated = self._window(mark + window if grows_up else mark - window, window)
        plan = self._flush_ops.plan(vacated, ascending, min(live, window, ascending.shape[0]))
        ticket = self._order_after_forward(plan.moves)
        self._carry_out(plan)
        if self._journal is not None:
            # What is left of it cannot change anything any more: no hole and no pending page is left, and live pages are counted.
            self._settle_ids(self._journal.known.late_ids)
            self._journal = None
            self.holes.len_bound = None
        self.holes.clear()
        self._mark = mark
        return self._later(ticket, 0)

    def _pack_uncounted(self) -> int:
        """The urgent pass while it is open how many pages a free of tokens has given back: window and watermark are the registers'."""
        self._unsettle()
        registers, numbers = self._registers, self._numbers
        grows_up = self.grow_direction == "up"
        window = min(registers.holes.shape[0], self._allocated_pages())
        if not window:
            return 0
        count, mark = registers.count, registers.mark
        ascending = registers.sorted(numbers, padding=FAR if grows_up else -1)
        plan = self._flush_ops.plan(
            self._window(mark, window, count), ascending, min(self._live_pages_lazy, window)
        )
        ticket = self._order_after_forward(plan.moves)
        self._carry_out(plan)
        self._vacate_registers(mark - count if grows_up else mark + count)
        return self._later(ticket, 0)

    def _window(self, mark: int | torch.Tensor, size: int, extent: torch.Tensor | None = None) -> Window:
        return Window(mark, size, extent, self.grow_direction == "up", self.min_page_index, self.num_pages)

    def _carry_out(self, plan: PackPlan) -> None:
        self._flush_ops.note(plan)
        if plan.src_pages.shape[0]:
            self._flush_ops.move(plan.moves, plan.src_pages, plan.dst_pages)

    def _order_after_forward(self, moves: torch.Tensor) -> Ticket:
        """Order the stream after the running forward, and send the number of moves on its way.

        The other strategies order only if a page moves, and then forget what the forward writes. Here ordering costs the host nothing, so
        it is always done, and the forgetting comes when the number is known."""
        forward = self._forward
        writing = forward.writing
        forward.settle()
        if writing is None:
            return self._read_back.post(moves)
        ends = moves > 0
        if self._write_ended is not None and self._write_ended[0] is writing:
            ends = ends | self._write_ended[1]
        ticket = self._read_back.post(moves, torch.count_nonzero(ends))
        forward.set_writing(*writing)
        self._write_ended = (forward.writing, ends, ticket)
        return ticket

    def _still_writes(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """What the unfinished forward has yet to write (virtual token ids), and whether that is void (bool ``[]``; None: it is not)."""
        tokens = self._forward.unfinished_write_set()
        ended, self._write_ended = self._write_ended, None
        if tokens is None or ended is None or self._forward.writing is not ended[0]:
            return tokens, None
        if not ended[2].ready():
            self._write_ended = ended
            return tokens, ended[1]
        if ended[2].values()[1]:
            self._forward.stop_writing()
            return None, None
        return tokens, None

    def _pack_in_part_late(self) -> int:
        """Any other pass. Boundary holes and moves stay unknown to the host until the ticket has come."""
        band, live = self._allocated_pages(), self._live_pages_lazy
        if self._journal is None and not len(self.holes):
            return 0
        written, is_void = self._still_writes()
        if (
            self._unchanged_since_idle()
            and self._write_ended is None
            and self._idle is not None
            and self._forward.writing is self._idle[1]
        ):
            return 0
        self._unsettle()
        registers = self._registers
        most_holes = min(registers.holes.shape[0], self.num_pages)
        window = min(most_holes + len(self._pending), band)
        if not window or not most_holes:
            return 0
        # Valid ones first in both orders.
        ascending = registers.sorted(self._numbers, padding=FAR)[:most_holes]
        rows = min(most_holes, self._lazy_max_moves_per_call, live)
        plan = self._flush_ops.plan_in_part(
            self._window(registers.mark, window), Holes(ascending, registers.count), rows, written, is_void
        )
        ticket = self._read_back.post(plan.touching, plan.moves)
        reader, batch = None, None
        if rows:
            src_pages = self._flush_ops.move(plan.moves, plan.src_pages, plan.dst_pages)
            reader = self._forward.latest_unfinished()
            batch = None if reader is None else PendingBatch(src_pages, plan.moves, rows, None)
        registers.holes = plan.holes
        registers.count = plan.free if batch is None else plan.unfilled
        registers.mark = plan.mark
        registers.ascending = batch is not None or not rows
        self._note(Flushed(batch, ticket))
        if reader is not None and batch is not None:
            self._hold_back(reader, batch)
        self._note_idle(is_capped=rows == self._lazy_max_moves_per_call, holds_back=batch is not None)
        return self._later(ticket, 1)

    def _compact_late(self, freed: torch.Tensor) -> None:
        """Eager mode: ``freed`` (int64 ``[n]``, ascending) are filled by the pages next to the watermark, which keep their order."""
        count = freed.shape[0]
        grows_up = self.grow_direction == "up"
        self._retreat(count)
        mark = self._mark
        low, high = (mark, mark + count) if grows_up else (mark + 1 - count, mark + 1)
        sources = live_places(self.physical_to_virtual[low:high])
        self._flush_ops.note_contradiction(freed < low if grows_up else freed >= high, sources.count)
        # Those outside the window are the first for a pool that grows up, the last for one that grows down.
        row = self._numbers[:count]
        outside = freed if grows_up else freed[(row + (count - sources.count)).clamp(max=count - 1)]
        self._flush_ops.move(sources.count, sources.places(self._numbers_from_one(count)) + low, outside)

    def _compact_uncounted(self) -> None:
        registers, numbers = self._registers, self._numbers
        grows_up = self.grow_direction == "up"
        window = min(registers.holes.shape[0], self._allocated_pages())
        count, mark = registers.count, registers.mark
        if not window:
            self._vacate_registers(mark)  # the band is empty: none of the pages named was one of this pool
            return
        ascending = registers.sorted(numbers, padding=FAR if grows_up else -1)
        rows = min(self._live_pages_lazy, window)
        plan = self._flush_ops.plan(self._window(mark, window, count), ascending, rows)
        self._flush_ops.note(plan)
        if rows:
            # Nearest the watermark first is the order of a flush; here pages keep theirs, so the places get the sources from the other end.
            other_end = (plan.moves - 1 - numbers[:rows]).clamp(0, rows - 1)
            self._flush_ops.move(plan.moves, plan.src_pages[other_end], plan.dst_pages)
        self._vacate_registers(mark - count if grows_up else mark + count)

    def _vacate_registers(self, mark: torch.Tensor) -> None:
        """The band is packed up to ``mark``."""
        registers = self._registers
        registers.mark = mark
        registers.holes, registers.count, registers.ascending = (
            registers.holes[:0],
            torch.zeros_like(registers.count),
            True,
        )
        self._note(Packed())

    @staticmethod
    def _later(ticket: Ticket, index: int) -> int:
        def read() -> int:
            ticket.wait()
            return ticket.values()[index]

        return cast(int, LateCount(read))
