"""The two tables of one pool, at page granularity, on the device: int64, -1 where unmapped.

``virtual_to_physical`` has one row per virtual page of the id space it is indexed by (its own, or another pool's) and
``physical_to_virtual`` one per physical page. Each has a trailing sentinel row that stays -1, so an id clamped to the sentinel reads
as unmapped: ids out of range are caught by the same comparison as ids that are not live, without a second check.
Virtual page 0 and physical page 0 are the padding pair, mapped to each other for ever.
"""

from __future__ import annotations

import torch


class PageTables:
    def __init__(self, num_virtual_ids: int, num_pages: int, device: str | torch.device) -> None:
        self.num_virtual_ids = num_virtual_ids
        self.num_pages = num_pages
        self.virtual_to_physical = torch.empty(num_virtual_ids + 1, dtype=torch.int64, device=device)
        self.physical_to_virtual = torch.empty(num_pages + 1, dtype=torch.int64, device=device)
        self.clear()

    def clear(self) -> None:
        for table in (self.virtual_to_physical, self.physical_to_virtual):
            table.fill_(-1)
            table[:1].fill_(0)

    def physical_of(self, virtual_pages: torch.Tensor) -> torch.Tensor:
        """Physical page of each virtual page, -1 if unmapped, negative or out of range. int64, any shape."""
        # A negative index counts from the end, where the sentinel is: below the table and past it both read -1.
        return torch.take(self.virtual_to_physical, virtual_pages.clamp(-1, self.num_virtual_ids))

    def is_free(self, virtual_pages: torch.Tensor) -> torch.Tensor:
        """Whether each id names an unmapped page of the table. bool ``[n]``; the padding page is never free."""
        rows = virtual_pages.clamp(
            0, self.num_virtual_ids
        )  # below the table is the padding page, past it the sentinel
        return (self.virtual_to_physical.index_select(0, rows) < 0) & (rows < self.num_virtual_ids)

    def bind(self, virtual_pages: torch.Tensor, physical_pages: torch.Tensor) -> None:
        """Map ``virtual_pages[i]`` and ``physical_pages[i]`` to each other."""
        # Not index_copy_, which does the same on one dimension and takes twice the time on a CPU.
        self.virtual_to_physical.scatter_(0, virtual_pages, physical_pages)
        self.physical_to_virtual.scatter_(0, physical_pages, virtual_pages)

    def unbind(self, virtual_pages: torch.Tensor, physical_pages: torch.Tensor) -> None:
        # index_fill_ hands -1 over as a kernel argument; `table[ids] = -1` would make it a host tensor and copy that, blocking.
        self.virtual_to_physical.index_fill_(0, virtual_pages, -1)
        self.physical_to_virtual.index_fill_(0, physical_pages, -1)

    def remap_moved(
        self, virtual_pages: torch.Tensor, src_pages: torch.Tensor, dst_pages: torch.Tensor
    ) -> None:
        """After the bytes were copied: point both tables at the new place and leave the old one unmapped."""
        self.bind(virtual_pages, dst_pages)
        self.physical_to_virtual.index_fill_(0, src_pages, -1)

    def translate(
        self,
        tokens: torch.Tensor,
        page_size: int,
        out: torch.Tensor | None = None,
        out_width: int | None = None,
    ) -> torch.Tensor:
        """Virtual token ids to physical token ids, any shape, int64: ``table[t // page] * page + t % page``.

        What is unmapped, negative or out of range becomes 0, the padding sink that kernels skip. With ``out`` (int64, same shape) the
        result is written there, for captured graphs that read a fixed address; with ``out_width`` too, both are one-dimensional, and the
        rows of ``out`` from ``len(tokens)`` up to that one become 0.
        """
        if out is not None and out_width is not None:
            count = tokens.numel()
            self.translate(tokens, page_size, out[:count])
            out[count:out_width].zero_()
            return out
        ids = tokens.to(torch.int64)
        if page_size == 1:
            physical = self.physical_of(ids).clamp_(min=0)
        else:
            pages = torch.div(ids, page_size, rounding_mode="floor")
            physical = (self.physical_of(pages) * page_size + (ids - pages * page_size)).clamp_(min=0)
        return physical if out is None else out.copy_(physical)
