"""What a composite answers when a recurrent state needs the bytes of tokens."""

from __future__ import annotations

from allocator.composites.members import Composite
from allocator.end import MultiEndedAllocator


class StateDonor(Composite):
    """A composite with a state pool, ``mamba_allocator``."""

    mamba_allocator: MultiEndedAllocator

    def mamba_full_cache_donor(self) -> StateDonor:
        """Who gives up full tokens for states: this one."""
        return self

    def full_tokens_before_mamba_recheck(self, target_size: int) -> int:
        """Full tokens that have to be freed, at the least, before ``target_size`` states can be there; asking sooner is for nothing.

        Up to a byte less than a whole state may be there already beyond the states that are counted.
        """
        self._settle()
        missing = target_size - self.mamba_allocator.schedulable_available_size()
        if missing <= 0:
            return 0
        least_bytes = (missing - 1) * self.mamba_allocator.entry_bytes_per_page + 1
        return -(-least_bytes // self.full_attn_allocator.entry_bytes)
