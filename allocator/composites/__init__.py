"""The allocators an engine talks to: two or three pools of one buffer behind one surface of token ids.

A composite owns the pools' allocators (`allocator.end.MultiEndedAllocator`, `allocator.middle.FloatMultiEndedAllocator`), judges a request
on the bytes that all of them need together, and takes an alloc back if one of them fails. Names, arguments and answers are those of
SGLang 0.5.23's classes of the same names (``unified_hybrid_swa.py`` and ``unified_mamba.py`` in ``mem_cache/allocator``, and
``mem_cache/unified_memory_pool.py``). What counts by the scheduler's rules (``create_prefill_budget``, ``max_new_tokens_for_memory``) is
the engine's and is not here.
"""

from allocator.composites.mamba import UnifiedMambaTokenToKVPoolAllocator
from allocator.composites.mamba_swa import UnifiedMambaSWATokenToKVPoolAllocator
from allocator.composites.paired import UnifiedSWAAllocatorBase
from allocator.composites.state_slots import UnifiedMambaSlotAllocator
from allocator.composites.swa import UnifiedSWATokenToKVPoolAllocator

__all__ = [
    "UnifiedMambaSWATokenToKVPoolAllocator",
    "UnifiedMambaSlotAllocator",
    "UnifiedMambaTokenToKVPoolAllocator",
    "UnifiedSWAAllocatorBase",
    "UnifiedSWATokenToKVPoolAllocator",
]
