"""What an alloc of several pools has taken, given back if it fails half way.

That cannot happen by lack of room, which is judged before. It can by a wrong call (an id that is still bound in one pool), by running out
of device memory, by an allocator under test: whoever catches that must find the pools as they were, order of the lists included, or the
next answers are other ones (sgl-project/sglang#39294, #34441, #37560 are half-done allocs of their kinds).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch

from allocator.end import MultiEndedAllocator

END_FIELDS: Final = ("watermark_physical", "_live_pages_lazy")
FLOAT_FIELDS: Final = ("low_wm_page", "high_wm_page", "_next_hole_end", "_holes_dirty")


class _Before:
    """One pool as it was."""

    def __init__(self, pool: MultiEndedAllocator) -> None:
        self._pool = pool
        #: Of a pool whose numbers are on their way there is nothing exact to go back to.
        self._is_exact = pool._is_settled
        if not self._is_exact:
            return
        self._names = FLOAT_FIELDS if pool.grow_direction == "float" else END_FIELDS
        self._values = self._read()
        self._holes = pool.holes.state()
        self._first_id = None if pool._ids is None else pool._ids.position

    def _read(self) -> list[Any]:
        return [getattr(self._pool, name) for name in self._names]

    def go_back(self, virtual_pages: torch.Tensor) -> None:
        """Undo what was done since for these pages (int64 ``[n]``). Reads the device."""
        pool = self._pool
        physical_pages = pool._tables.physical_of(virtual_pages)
        is_bound = physical_pages > 0
        if not self._is_exact:
            pool._settle_chain()
            pool.free(virtual_pages[is_bound] * pool.page_size)
            return
        if self._read() != self._values:
            # Something was taken, so all of these were free before.
            pool._tables.unbind(virtual_pages[is_bound], physical_pages[is_bound])
        for name, value in zip(self._names, self._values, strict=True):
            setattr(pool, name, value)
        pool.holes.go_back_to(self._holes)
        if pool._ids is not None and self._first_id is not None:
            pool._ids.go_back_to(self._first_id)


@contextmanager
def all_or_nothing(virtual_pages: torch.Tensor, *pools: MultiEndedAllocator) -> Iterator[None]:
    """Around an alloc that takes places in ``pools`` for ``virtual_pages`` (int64 ``[n]``): whatever it raises, nothing was taken.

    Where numbers come late from the device (strategy ``"device"`` on CUDA, shortly after a flush) the pages are freed instead, so that they
    are holes, and ids are at the back of the list.
    """
    before = [_Before(pool) for pool in pools]
    try:
        yield
    except BaseException:
        for pool in before:
            pool.go_back(virtual_pages)
        raise
