"""Virtual pages bound to physical ones by hand, and the questions that calls are asked before anything is changed."""

from __future__ import annotations

import torch

from allocator.errors import (
    AllocatorError,
    BindError,
    DuplicateFreeError,
    MoveGateClosedError,
    NotAllocatedError,
    require,
)
from allocator.mapped import MappedBand


class BindingBand(MappedBand):
    """A `MappedBand` that refuses ids that are not what a call says they are."""

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
        self._require_taken(physical_ids, BindError)
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

    # -- refusals

    def _frees_move(self) -> bool:
        """Whether every free packs the band."""
        return not self.lazy_compaction

    def _require_open_gate(self) -> None:
        if self._frees_move() and self.moves_blocked():
            raise MoveGateClosedError("eager compaction moves pages at every free, and a move gate is closed",
                                      pool=self.sub_pool_name, state=self.allocator_state_str())  # fmt: skip

    def _require_taken(self, physical_pages: torch.Tensor, error: type[AllocatorError]) -> None:
        """Every place inside the band, and named once."""
        low, high = self._band_pages()
        places = "physical page(s) {bad} are outside the band [{low}, {high}) or named twice, in {given}"

        def refused(bad: list[int]) -> AllocatorError:
            text = places.format(bad=bad, low=low, high=high, given=physical_pages.tolist())
            return error(text, pool=self.sub_pool_name, ids=bad, state=self.allocator_state_str())

        outside = (physical_pages < low) | (physical_pages >= high)
        require(
            ~outside.any(),
            "kvtape: a physical page outside the band",
            lambda: refused(physical_pages[outside].tolist()),
        )
        require(
            self._named_once(self.physical_to_virtual, physical_pages),
            "kvtape: the same physical page twice",
            lambda: refused(_repeated(physical_pages)),
        )

    def _require_unmapped(self, virtual_pages: torch.Tensor) -> None:
        """Every page in range, not the padding page, not live, and named once."""
        free = self._tables.is_free(virtual_pages)
        require(
            free.all(),
            "kvtape: bind of a virtual page that is live, reserved or out of range",
            lambda: self._not_free(virtual_pages, virtual_pages[~free].tolist()),
        )
        require(
            self._named_once(self.virtual_to_physical, virtual_pages),
            "kvtape: the same virtual page twice in one bind",
            lambda: self._not_free(virtual_pages, _repeated(virtual_pages)),
        )

    @staticmethod
    def _named_once(table: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Whether no row of ``table`` is named twice: bool, one element, on the device. Numbers the rows, reads the numbers back (a row
        named twice kept one) and restores what was there."""
        before = table.index_select(0, rows)
        numbers = torch.arange(rows.shape[0], dtype=torch.int64, device=rows.device)
        table.index_copy_(0, rows, numbers)
        once = (table.index_select(0, rows) == numbers).all()
        table.index_copy_(0, rows, before)
        return once

    def _not_free(self, virtual_pages: torch.Tensor, bad: list[int]) -> BindError:
        return BindError(
            f"virtual page(s) {bad} cannot be bound: live, reserved, out of range or named twice in {virtual_pages.tolist()}",
            pool=self.sub_pool_name,
            ids=bad,
            state=self.allocator_state_str(),
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
        return self._repeated_pages(virtual_pages)

    def _repeated_pages(self, virtual_pages: torch.Tensor) -> DuplicateFreeError:
        bad = _repeated(virtual_pages)
        return DuplicateFreeError(
            f"virtual page(s) {bad} named more than once in one free",
            pool=self.sub_pool_name,
            ids=bad,
            state=self.allocator_state_str(),
        )


def _repeated(pages: torch.Tensor) -> list[int]:
    unique, counts = torch.unique(pages, return_counts=True)
    repeated: list[int] = unique[counts > 1].tolist()
    return repeated
