"""Virtual ids whose number is on its way: what is promised are those that are certainly free, and a request for more waits."""

from __future__ import annotations

from typing import cast

import torch

from allocator.device_release import DeviceReleasingBand
from allocator.free_lists import FreeVirtualIds
from allocator.late_lists import LateFreeVirtualIds


class LateIds(DeviceReleasingBand):
    """What END pools and floats share of it."""

    def _all_ids_free(self) -> FreeVirtualIds:
        return LateFreeVirtualIds(self.min_page_index, self.num_pages, self.device, self._numbers)

    @property
    def _late_ids(self) -> LateFreeVirtualIds | None:
        return cast("LateFreeVirtualIds | None", self._ids)

    def _ids_are_late(self) -> bool:
        ids = self._late_ids
        return ids is not None and ids.is_late

    def _may_lack_ids(self, count: int) -> bool:
        """Whether ``count`` ids are more than certainly free, and more may be."""
        return self._ids is not None and self._ids_are_late() and count > len(self._ids)

    def _settle_ids(self, more: int) -> None:
        """The host knows now that so many ids are free beyond those that certainly were."""
        if (ids := self._late_ids) is not None:
            ids.settle(more)

    def _append_late_ids(self, virtual_pages: torch.Tensor, count: torch.Tensor, least: int) -> None:
        """The first ``count`` (int64 ``[]``, at least ``least``) of these are free from now on."""
        if (ids := self._late_ids) is not None:
            ids.append_late(virtual_pages, count, least)

    def _make_sure_of(self, num_pages: int) -> bool:
        if self._may_lack_ids(num_pages):
            self._settle()
        return super()._make_sure_of(num_pages)

    def _pages_for_growth(self, count: int) -> torch.Tensor | None:
        if self._may_lack_ids(count):
            self._settle()
        return super()._pages_for_growth(count)
