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
