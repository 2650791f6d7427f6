"""Faults in moving bytes: by the allocator that orders the copy, and by the kv store that makes it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from allocator import MultiEndedAllocator
from tests.mutants import scenes
from tests.mutants.registry import Mutant


class ClearsBeforeCopying(MultiEndedAllocator):
    """The source is zeroed before its bytes are copied."""

    def _move(self, src_list: list[int], dst_list: list[int]) -> torch.Tensor:
        assert self._zero_pages is not None
        self._zero_pages(torch.tensor(src_list))
        return super()._move(src_list, dst_list)


class ClearsTheTarget(MultiEndedAllocator):
    """The target is zeroed after the bytes were copied, as if it had been handed out."""

    def _move(self, src_list: list[int], dst_list: list[int]) -> torch.Tensor:
        src = super()._move(src_list, dst_list)
        assert self._zero_pages is not None
        self._zero_pages(torch.tensor(dst_list))
        return src


class MovesHalfPages(MultiEndedAllocator):
    """Asks for moves of half a page."""

    def _move(self, src_list: list[int], dst_list: list[int]) -> torch.Tensor:
        self.page_size, size = self.page_size // 2, self.page_size
        try:
            return super()._move(src_list, dst_list)
        finally:
            self.page_size = size


class _Store:
    """A kv store with a fault in its copy: what ``_kept`` gives is put back after each move, so that it did not move."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def zero_physical_pages(self, pages: torch.Tensor) -> None:
        self._store.zero_physical_pages(pages)

    def move_physical_pages(self, dst_pages: torch.Tensor, src_pages: torch.Tensor, page_size: int) -> None:
        slots = (dst_pages[:, None] * page_size + torch.arange(page_size)).reshape(-1)
        before = [(view, rows, view[rows].clone()) for view, rows in self._kept(slots, page_size)]
        self._store.move_physical_pages(dst_pages, src_pages, page_size)
        for view, rows, values in before:
            view[rows] = values

    def _views(self, part: str) -> list[torch.Tensor]:
        views: list[torch.Tensor] = self._store.rows.layer_views()[part]
        return views

    def _kept(self, slots: torch.Tensor, page_size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Rows of a layer (a view of all slots, and the slots) that stay as they were."""
        raise NotImplementedError


class _WithStore(MultiEndedAllocator):
    store: type[_Store]

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**{**arguments, "kvcache": self.store(arguments["kvcache"])})


class _LastLayer(_Store):
    def _kept(self, slots: torch.Tensor, page_size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for part in ("k", "v"):
            yield self._views(part)[-1], slots


class LeavesTheLastLayer(_WithStore):
    """The kv store moves every layer but the last."""

    store = _LastLayer


class _Values(_Store):
    def _kept(self, slots: torch.Tensor, page_size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for view in self._views("v"):
            yield view, slots


class MovesKeysOnly(_WithStore):
    """The kv store moves K and leaves V."""

    store = _Values


class _SecondHalf(_Store):
    def _kept(self, slots: torch.Tensor, page_size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for part in ("k", "v"):
            for view in self._views(part):
                yield view, slots[slots % page_size >= page_size // 2]


class MovesFirstHalves(_WithStore):
    """The kv store moves the first half of each page."""

    store = _SecondHalf


class _LastPage(_Store):
    def _kept(self, slots: torch.Tensor, page_size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for part in ("k", "v"):
            for view in self._views(part):
                yield view, slots[-page_size:]


class LeavesTheLastPage(_WithStore):
    """The kv store copies every page of a batch but the last."""

    store = _LastPage


class _Backwards(_Store):
    def move_physical_pages(self, dst_pages: torch.Tensor, src_pages: torch.Tensor, page_size: int) -> None:
        pages = self._store._pages
        before = pages[dst_pages].clone()
        self._store.move_physical_pages(dst_pages, src_pages, page_size)
        pages[src_pages], pages[dst_pages] = before, before


class CopiesTheWrongWay(_WithStore):
    """The kv store copies from the target to the source."""

    store = _Backwards


class _FirstPage(_Store):
    def move_physical_pages(self, dst_pages: torch.Tensor, src_pages: torch.Tensor, page_size: int) -> None:
        self._store.move_physical_pages(dst_pages, src_pages, page_size)
        self._store._pages[dst_pages] = self._store._pages[src_pages[0]].clone()


class CopiesTheFirstPage(_WithStore):
    """The kv store copies the first page of a batch to every target."""

    store = _FirstPage


class _AllButTheLast(_Store):
    def move_physical_pages(self, dst_pages: torch.Tensor, src_pages: torch.Tensor, page_size: int) -> None:
        self._store.move_physical_pages(dst_pages[:-1], src_pages[:-1], page_size)


class AsksForAllButTheLast(MultiEndedAllocator):
    """The last page of a batch is remapped, and no copy is asked for."""

    def _move(self, src_list: list[int], dst_list: list[int]) -> torch.Tensor:
        store, self._kvcache = self._kvcache, _AllButTheLast(self._kvcache)
        try:
            return super()._move(src_list, dst_list)
        finally:
            self._kvcache = store


class ShufflesABatch(MultiEndedAllocator):
    """Bytes go to the targets in another order than the table says."""

    def _move(self, src_list: list[int], dst_list: list[int]) -> torch.Tensor:
        store, self._kvcache = self._kvcache, _Rolled(self._kvcache)
        try:
            return super()._move(src_list, dst_list)
        finally:
            self._kvcache = store


class _Rolled(_Store):
    def move_physical_pages(self, dst_pages: torch.Tensor, src_pages: torch.Tensor, page_size: int) -> None:
        self._store.move_physical_pages(dst_pages.roll(1), src_pages, page_size)


MUTANTS = [
    Mutant(ClearsBeforeCopying, "C6", 2, scenes.packs_down),
    Mutant(ClearsTheTarget, "C6", 2, scenes.packs_down),
    Mutant(MovesHalfPages, "C6", 2, scenes.moves_a_page),
    Mutant(LeavesTheLastLayer, "C6", 2, scenes.packs_up),
    Mutant(MovesKeysOnly, "C6", 2, scenes.packs_up),
    Mutant(MovesFirstHalves, "C6", 2, scenes.moves_a_page),
    Mutant(LeavesTheLastPage, "C6", 2, scenes.packs_down),
    Mutant(CopiesTheWrongWay, "C6", 2, scenes.packs_down),
    Mutant(CopiesTheFirstPage, "C6", 2, scenes.packs_down),
    Mutant(AsksForAllButTheLast, "C1", 2, scenes.packs_down),
    Mutant(ShufflesABatch, "C1", 2, scenes.packs_down),
]
