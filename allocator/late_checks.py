"""Refusals where nobody waits for an answer: `allocator.error_log` instead of an assertion, and tables that a fault freezes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property

import torch

from allocator.end import MultiEndedAllocator
from allocator.error_log import AsynchronousAssertions, ErrorLog, Fault
from allocator.errors import AllocatorError, BindError, NotAllocatedError
from allocator.read_back import ReadBack
from allocator.tables import PageTables


class GuardedTables(PageTables):
    """`PageTables` that are written as long as nothing went wrong. After that, writes go to the sentinel rows, which stay -1."""

    errors: ErrorLog | None = None

    def bind(self, virtual_pages: torch.Tensor, physical_pages: torch.Tensor) -> None:
        if self.errors is None:
            super().bind(virtual_pages, physical_pages)
            return
        ok = self.errors.ok
        virtual_rows, physical_rows = self._rows(virtual_pages, physical_pages)
        self.virtual_to_physical.index_copy_(0, virtual_rows, torch.where(ok, physical_pages, -1))
        self.physical_to_virtual.index_copy_(0, physical_rows, torch.where(ok, virtual_pages, -1))

    def unbind(self, virtual_pages: torch.Tensor, physical_pages: torch.Tensor) -> None:
        if self.errors is None:
            super().unbind(virtual_pages, physical_pages)
        else:
            super().unbind(*self._rows(virtual_pages, physical_pages))

    def _rows(
        self, virtual_pages: torch.Tensor, physical_pages: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.errors is not None
        ok = self.errors.ok
        return (
            torch.where(ok, virtual_pages, self.num_virtual_ids),
            torch.where(ok, physical_pages, self.num_pages),
        )


class LateChecks(MultiEndedAllocator):
    """What the ``device`` strategy checks. Where numbers come back at once (a CPU), as the other strategies do: before anything changes."""

    #: How numbers come back from the device.
    read_back_class: type[ReadBack] = ReadBack
    _tables: GuardedTables

    @cached_property
    def _read_back(self) -> ReadBack:
        return self.read_back_class(self.device)

    @cached_property
    def _errors(self) -> ErrorLog:
        log = ErrorLog if self.assertions == "log" else AsynchronousAssertions
        return log(self.device, self._read_back, self.sub_pool_name, self._logs_of_buffer)

    @property
    def answers_at_once(self) -> bool:
        return self._read_back.immediate

    def _logs_of_buffer(self) -> list[ErrorLog]:
        return [band._errors for band in self._bands_of_buffer() if isinstance(band, LateChecks)]

    def _new_tables(self) -> PageTables:
        tables = GuardedTables(self.num_virtual_ids, self.num_pages, self.device)
        if not self._read_back.immediate and self._errors.freezes:
            tables.errors = self._errors
        return tables

    def clear(self) -> None:
        self._errors.clear()
        super().clear()

    def _look_for_errors(self) -> None:
        """Begin a checked call.

        Raises:
            AllocatorError: what an earlier call did wrong.
        """
        if not self._read_back.immediate:
            self._errors.calls += 1
            self._errors.look()

    @contextmanager
    def _blaming_faults(self) -> Iterator[None]:
        """Around what the host works out where numbers come late. After a wrong call that it has not learned of yet its numbers make no
        sense, so if something fails, the wrong call is what is told: a negative number of live pages, an operation on no rows.

        Raises:
            AllocatorError: what an earlier call did wrong; waits for it.
        """
        try:
            yield
        except (IndexError, RuntimeError, ValueError):
            self._errors.look(wait=True)
            raise
        if self._live_pages_lazy < 0:
            self._errors.look(wait=True)

    def _require_live(self, virtual_pages: torch.Tensor, *, may_repeat: bool) -> torch.Tensor:
        if self._read_back.immediate:
            return super()._require_live(virtual_pages, may_repeat=may_repeat)
        self._look_for_errors()
        if virtual_pages.shape[0] > self.num_virtual_ids:
            raise NotAllocatedError(
                f"a free names {virtual_pages.shape[0]} pages, but there are {self.num_virtual_ids}",
                pool=self.sub_pool_name,
            )
        physical_pages = self._tables.physical_of(virtual_pages)
        if not virtual_pages.shape[0]:
            return physical_pages
        bad, then = physical_pages <= 0, None
        if may_repeat and virtual_pages.shape[0] > 1:
            then = Fault.FREED_TWICE, self._repeated_rows(self.physical_to_virtual, physical_pages, bad)
        self._errors.note(Fault.NOT_LIVE, bad, physical_pages, virtual_pages, then=then)
        return physical_pages

    def _require_unmapped(self, virtual_pages: torch.Tensor) -> None:
        if self._read_back.immediate:
            super()._require_unmapped(virtual_pages)
            return
        self._look_for_errors()
        bad = ~self._tables.is_free(virtual_pages)
        nowhere = torch.full_like(virtual_pages, -1)
        repeated = self._repeated_rows(self.virtual_to_physical, virtual_pages, bad)
        self._errors.note(Fault.NOT_FREE, bad, nowhere, virtual_pages, then=(Fault.BOUND_TWICE, repeated))

    def _require_taken(self, physical_pages: torch.Tensor, error: type[AllocatorError]) -> None:
        if self._read_back.immediate:
            super()._require_taken(physical_pages, error)
            return
        self._look_for_errors()
        low, high = self._band_on_device()
        outside = (physical_pages < low) | (physical_pages >= high)
        nowhere = torch.full_like(physical_pages, -1)
        is_bind = issubclass(error, BindError)
        fault, twice = (
            (Fault.BOUND_OUTSIDE, Fault.BOUND_TWICE) if is_bind else (Fault.OUTSIDE_BAND, Fault.FREED_TWICE)
        )
        repeated = self._repeated_rows(self.physical_to_virtual, physical_pages, outside)
        self._errors.note(fault, outside, physical_pages, nowhere, then=(twice, repeated))

    def _band_on_device(self) -> tuple[int | torch.Tensor, int | torch.Tensor]:
        """Physical pages ``[low, high)`` of the band; int64 ``[]`` what only the device knows."""
        return self._band_pages()

    @cached_property
    def _numbers(self) -> torch.Tensor:
        """int64 ``[number of pages or ids, whichever is more]``: 0, 1, 2, ...; parts of it stand where ``arange`` would be made anew."""
        longest = max(self.physical_to_virtual.shape[0], self.virtual_to_physical.shape[0])
        return torch.arange(longest, dtype=torch.int64, device=self.device)

    def _repeated_rows(self, table: torch.Tensor, rows: torch.Tensor, bad: torch.Tensor) -> torch.Tensor:
        """Which rows of ``table`` are named a second time: bool ``[n]``; what it says of bad ones does not matter. As in `_named_once`, the
        rows are numbered, the numbers read again, and what was there is put back; a bad row stands for the sentinel."""
        safe = torch.where(bad, table.shape[0] - 1, rows)
        before = table.index_select(0, safe)
        count = rows.shape[0]
        numbers = (
            self._numbers[:count]
            if count <= self._numbers.shape[0]
            else torch.arange(count, device=rows.device)
        )
        table.index_copy_(0, safe, numbers)
        repeated = table.index_select(0, safe) != numbers
        table.index_copy_(0, safe, before)
        return repeated

    def unbind(self, virtual_ids: torch.Tensor) -> None:
        if self._read_back.immediate:
            super().unbind(virtual_ids)
            return
        self._look_for_errors()
        if not virtual_ids.numel():
            return
        virtual_ids = virtual_ids.to(torch.int64)
        physical = self._tables.physical_of(virtual_ids)
        owners = self.physical_to_virtual[physical.clamp(min=0)]
        self._errors.note(Fault.STILL_OWNED, (physical <= 0) | (owners == virtual_ids), physical, virtual_ids)
        rows = torch.where(self._errors.ok, virtual_ids, self.num_virtual_ids)
        self.virtual_to_physical.index_fill_(0, rows, -1)
