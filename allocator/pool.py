"""`UnifiedKVPool`: the one byte buffer that all sub-pools share.

Every sub-pool addresses the whole buffer in its own unit: page *i* is bytes ``[i * page_bytes, (i + 1) * page_bytes)``. Which part of
it a pool really owns is the allocators' business; the buffer only knows sizes and gives views.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from allocator.errors import ConfigurationError, LayoutError
from allocator.specs import RowPart, SubPoolSpec

#: Physical token ids are narrowed to int32 by attention kernels (SGLang 0.5.23, ``unified_memory_pool.py``).
MAX_SLOTS = 2**31


class UnifiedKVPool:
    """``total_bytes`` of uint8 on ``device``, zeroed, and the sub-pools' views of it.

    ``device="meta"`` lays everything out without memory: sizes and arithmetic work, bytes do not exist.

    Args:
        total_bytes: size of the buffer.
        sub_pool_specs: one END pool ``"down"`` and/or one ``"up"``, any number of ``"float"`` between them.
        device: torch device of the buffer.
        page_size: tokens in a page of the token pools; state pools have pages of one slot.
        enable_memory_saver: accepted for SGLang's signature; only False is supported.

    Raises:
        ConfigurationError: two pools of one name, two ends growing the same way, no end at all.
        LayoutError: a pool for which the buffer holds no page beyond the reserved low end.
    """

    def __init__(
        self,
        *,
        total_bytes: int,
        sub_pool_specs: Sequence[SubPoolSpec],
        device: str | torch.device,
        enable_memory_saver: bool = False,
        page_size: int = 1,
    ) -> None:
        if page_size < 1:
            raise ConfigurationError(f"page_size must be at least 1, not {page_size}")
        if enable_memory_saver:
            raise ConfigurationError("the memory saver is SGLang's and is not supported here")
        names = [spec.name for spec in sub_pool_specs]
        if len(set(names)) != len(names):
            raise ConfigurationError(f"sub-pool names must be unique; got {names}")
        by_direction = {
            d: [s for s in sub_pool_specs if s.grow_direction == d] for d in ("up", "float", "down")
        }
        if (
            len(by_direction["up"]) > 1
            or len(by_direction["down"]) > 1
            or not (by_direction["up"] or by_direction["down"])
        ):
            raise ConfigurationError(
                "a buffer has two ends: at most one pool grows up and one down, and at least one of them is there; "
                f"got {[(s.name, s.grow_direction) for s in sub_pool_specs]}"
            )
        self.device = device
        self.total_bytes = total_bytes
        self.page_size = page_size
        #: Low byte end to high byte end: this order is also the allocators' neighbourhood.
        self.sub_pool_specs: list[SubPoolSpec] = [
            *by_direction["up"],
            *by_direction["float"],
            *by_direction["down"],
        ]
        self._specs = {spec.name: spec for spec in self.sub_pool_specs}
        self.reserved_floor_bytes = _reserved_floor_bytes(self.sub_pool_specs, page_size)
        for spec in self.sub_pool_specs:
            self._check_room(spec)
        self._raw = torch.zeros(total_bytes, dtype=torch.uint8, device=device)

    def spec(self, name: str) -> SubPoolSpec:
        return self._specs[name]

    def max_slots(self, name: str) -> int:
        return self.total_bytes // self._specs[name].entry_bytes()

    def min_slot_index(self, name: str) -> int:
        return -(-self.reserved_floor_bytes // self._specs[name].entry_bytes())

    def page_size_of(self, name: str) -> int:
        """Slots in one page of this pool: the buffer's page size, 1 for state pools."""
        return 1 if self._specs[name].is_state else self.page_size

    def pages(self, name: str) -> torch.Tensor:
        """The whole buffer as this pool's pages: uint8 ``[num_pages, page_bytes]``, a view."""
        page_bytes = self._specs[name].entry_bytes() * self.page_size_of(name)
        num_pages = self.total_bytes // page_bytes
        return self._raw[: num_pages * page_bytes].view(num_pages, page_bytes)

    def layer_views(self, name: str, part: RowPart) -> list[torch.Tensor]:
        """Rows of one part, per layer ``[num_slots, *part.shape]`` of ``part.dtype``, indexed by physical slot id; views.

        Raises:
            LayoutError: entries whose size is no multiple of the dtype's, so that no such view exists.
        """
        spec = self._specs[name]
        entry, item = spec.entry_bytes(), part.dtype.itemsize
        if entry % item:
            raise LayoutError(f"an entry of {entry} bytes cannot be viewed as {part.dtype}", pool=name)
        page = self.page_size_of(name)
        num_slots = self.max_slots(name) // page * page
        typed = self._raw[: num_slots * entry].view(part.dtype)
        inner = [1]
        for size in reversed(part.shape[1:]):
            inner.insert(0, inner[0] * size)
        return [
            typed.as_strided(
                (num_slots, *part.shape),
                (entry // item, *inner),
                (part.offset + layer * part.layer_stride) // item,
            )
            for layer in range(spec.layer_num)
        ]

    def _check_room(self, spec: SubPoolSpec) -> None:
        page = self.page_size_of(spec.name)
        slots, first = self.max_slots(spec.name), self.min_slot_index(spec.name)
        if slots // page <= -(-first // page):
            raise LayoutError(
                f"{self.total_bytes} bytes hold {slots} slots, of which the first {first} are the sink for padding writes: "
                f"not one page of {page} is left; a larger buffer is needed",
                pool=spec.name,
            )
        if slots >= MAX_SLOTS:
            raise LayoutError(f"{slots} slots do not fit the int32 ids of attention kernels", pool=spec.name)


def _reserved_floor_bytes(specs: Sequence[SubPoolSpec], page_size: int) -> int:
    """Low bytes kept as a sink for padding writes: slot 0 of every pool, and all of page 0 where pages are handed out whole."""
    return max(spec.entry_bytes() * (1 if spec.is_state else page_size) for spec in specs)
