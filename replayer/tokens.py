"""Token ids, split into pages and offsets once and handed on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from replayer.content import IntArray, Mask


@dataclass(slots=True)
class Tokens:
    """Some tokens of one pool, int64 ``[n]`` each: ``ids`` is ``pages * page_size + offsets``."""

    ids: IntArray
    pages: IntArray
    offsets: IntArray

    @classmethod
    def split(cls, ids: IntArray, page_size: int) -> Tokens:
        pages = ids // page_size
        return cls(ids, pages, ids - pages * page_size)

    @classmethod
    def none(cls) -> Tokens:
        return cls(*(np.empty(0, dtype=np.int64) for _ in range(3)))

    def __len__(self) -> int:
        return len(self.ids)

    def kept(self, rows: Mask) -> Tokens:
        return Tokens(self.ids[rows], self.pages[rows], self.offsets[rows])
