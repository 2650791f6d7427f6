"""Allocators with a fault that a random program should find."""

from __future__ import annotations

import torch

from allocator import MultiEndedAllocator


class LosesAHole(MultiEndedAllocator):
    """The last of several freed pages is forgotten."""

    def _release_physical(self, physical_pages: torch.Tensor) -> None:
        super()._release_physical(physical_pages[:-1] if physical_pages.shape[0] > 1 else physical_pages)


class LosesBytes(MultiEndedAllocator):
    """Tables are right, the bytes of a batch's last page stay where they were."""

    def _move(self, src_list: list[int], dst_list: list[int]) -> torch.Tensor:
        src_pages = super()._move(src_list, dst_list)
        if self._zero_pages is not None:
            self._zero_pages(torch.tensor(dst_list[-1:]))
        return src_pages


class Raises(MultiEndedAllocator):
    """The second flush of a pool ends in an error."""

    _flushes = 0

    def _flush(self, *, urgent: bool) -> int:
        self._flushes += 1
        if self._flushes == 2:
            raise ZeroDivisionError("the second flush")
        return super()._flush(urgent=urgent)


class Unsteady(MultiEndedAllocator):
    """Refuses every hundredth alloc of the process, whatever it is."""

    asked = 0

    def alloc(self, need_size: int) -> torch.Tensor | None:
        Unsteady.asked += 1
        if Unsteady.asked % 100 == 0:
            raise RuntimeError("unlucky")
        return super().alloc(need_size)


class TakesHighestHole(MultiEndedAllocator):
    """Correct in every way, but places otherwise than SGLang's."""

    def take_physical_pages(self, num_pages: int) -> torch.Tensor | None:
        taken = super().take_physical_pages(num_pages)
        return None if taken is None else taken.flip(0)


class AnswersFloats(MultiEndedAllocator):
    """An alloc answers a tensor that names no ids."""

    def alloc(self, need_size: int) -> torch.Tensor | None:
        tokens = super().alloc(need_size)
        return None if tokens is None else tokens.float()


class FlushTellsNothing(MultiEndedAllocator):
    """A flush does not say how many pages it moved."""

    def flush_opportunistic(self) -> int:
        super().flush_opportunistic()
        return None  # type: ignore[return-value]


class SizeRaises(MultiEndedAllocator):
    """With three holes the pool cannot say any more what is available."""

    def available_size(self) -> int:
        if len(self._free_phys_pages) > 2:
            raise IndexError("three holes")
        return super().available_size()


class HandsOutIdsBeyondTheTable(MultiEndedAllocator):
    """Ids that no table has."""

    def alloc(self, need_size: int) -> torch.Tensor | None:
        tokens = super().alloc(need_size)
        return None if tokens is None else tokens + 2**62


class CannotBeMade(MultiEndedAllocator):
    """Its constructor raises."""

    def __init__(self, **_: object) -> None:
        raise RuntimeError("no buffer\nof that size")
