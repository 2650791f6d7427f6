"""`UnifiedMambaSlotAllocator`: recurrent states, one slot for a request, out of the state pool of a composite."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from allocator.end import MultiEndedAllocator
from allocator.errors import ConfigurationError


class UnifiedMambaSlotAllocator:
    """Slots of the state pool. Ids are virtual, as those of tokens, and stay what they are when a state moves.

    Public names and answers follow SGLang 0.5.23's class of the same name (``mem_cache/unified_memory_pool.py``). One difference: a group
    begun while another is open gives back what that one has left, where SGLang's forgets those slots.

    Args:
        mea: the allocator of the state pool, ``composite.mamba_allocator``.
        max_size: slots that may be live, the padding slot 0 not counted.
        device: where `free_slots` lives.

    Raises:
        ConfigurationError: pages of more than one slot.
    """

    def __init__(self, mea: MultiEndedAllocator, max_size: int, device: str | torch.device) -> None:
        if mea.page_size != 1:
            raise ConfigurationError(
                f"a state pool has pages of one slot, not of {mea.page_size}", pool=mea.sub_pool_name
            )
        self._multi_ended_allocator = mea
        self._max_size = max_size
        self._device = device
        self._group: Iterator[torch.Tensor] | None = None

    # -- ids

    @property
    def virtual_to_physical(self) -> torch.Tensor:
        """int64 ``[num_virtual_ids + 1]``, see `allocator.mapped.MappedBand.virtual_to_physical`."""
        return self._multi_ended_allocator.virtual_to_physical

    def translate(self, virtual_ids: torch.Tensor) -> torch.Tensor:
        """Physical slots of virtual ones, any shape, int64; -1 where nothing is mapped."""
        return self.virtual_to_physical[virtual_ids]

    def is_slot_allocated(self, slot: int) -> bool:
        """Whether this virtual slot is live; reads the device."""
        return self._multi_ended_allocator.is_slot_allocated(int(slot))

    def allocator_state_str(self) -> str:
        return self._multi_ended_allocator.allocator_state_str()

    # -- sizes, in slots

    @property
    def size(self) -> int:
        return self._max_size

    def available_size(self) -> int:
        """Slots that are not live. That is bookkeeping for a check of leaks: whether bytes are there for them is another question."""
        return self._max_size - self._multi_ended_allocator.allocated_count()

    def schedulable_available_size(self) -> int:
        """Slots that `alloc` can hand out, what it gains by flushing the neighbour included."""
        return self._multi_ended_allocator.schedulable_available_size()

    @property
    def free_slots(self) -> torch.Tensor:
        """int64, physical slots past the watermark, ascending."""
        pool = self._multi_ended_allocator
        if pool.grow_direction == "up":
            span = pool.watermark_physical, pool.num_pages
        else:
            span = pool.min_page_index, pool.watermark_physical + 1
        return torch.arange(span[0], max(span), dtype=torch.int64, device=self._device)

    # -- alloc and free

    def alloc(self, need_size: int) -> torch.Tensor | None:
        """``need_size`` virtual slots, int64 ``[need_size]``, or None if short. What a group holds goes first, one by one."""
        if need_size == 1 and self._group is not None:
            slot = next(self._group, None)
            if slot is not None:
                return slot
        return self._multi_ended_allocator.alloc(need_size)

    def free(self, free_index: torch.Tensor | None) -> None:
        """Free virtual slots (int64 ``[n]``).

        Raises:
            NotAllocatedError, DuplicateFreeError: nothing was freed.
        """
        self._multi_ended_allocator.free(free_index)

    def clear(self) -> None:
        self._group = None
        self._multi_ended_allocator.clear()

    def alloc_group_begin(self, num_reqs: int) -> None:
        """Take ``num_reqs`` slots in one go, for so many `alloc` of 1. If there are not so many, each is asked for when it is."""
        self.alloc_group_end()
        taken = self._multi_ended_allocator.alloc(num_reqs) if num_reqs > 0 else None
        if taken is not None:
            self._group = iter(taken.split(1))

    def alloc_group_end(self) -> None:
        """Give back what the group has left."""
        unused = [] if self._group is None else list(self._group)
        self._group = None
        if unused:
            self._multi_ended_allocator.free(torch.cat(unused))
