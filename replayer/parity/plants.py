"""Faults to plant in how pages are moved. A run with one of them must differ from the reference: a comparison that nothing trips proves
nothing."""

from __future__ import annotations

from typing import Any

import torch

from allocator import UnifiedMHATokenToKVPool


class LastLayerStays(UnifiedMHATokenToKVPool):
    """A page is moved without the keys and values of its last layer."""

    def move_physical_pages(self, dst_pages: torch.Tensor, src_pages: torch.Tensor, page_size: int) -> None:
        last = self.spec.layer_num - 1
        slots = (dst_pages[:, None] * page_size + torch.arange(page_size, device=dst_pages.device)).reshape(
            -1
        )
        rows = (self.k_buffer[last], self.v_buffer[last])
        before = [each.index_select(0, slots) for each in rows]
        super().move_physical_pages(dst_pages, src_pages, page_size)
        for each, kept in zip(rows, before, strict=True):
            each.index_copy_(0, slots, kept)


class CopyComesLate(UnifiedMHATokenToKVPool):
    """The tables name the new place before the bytes are there: a copy is done only when the next one is asked for, as on a stream that
    nobody ordered before the forward."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._late: list[tuple[torch.Tensor, torch.Tensor]] = []

    def move_physical_pages(self, dst_pages: torch.Tensor, src_pages: torch.Tensor, page_size: int) -> None:
        late, self._late = self._late, [(dst_pages.clone(), src_pages.clone())]
        for dst, src in late:
            super().move_physical_pages(dst, src, page_size)


PLANTS: dict[str, type[UnifiedMHATokenToKVPool]] = {
    "last-layer": LastLayerStays,
    "table-first": CopyComesLate,
}
