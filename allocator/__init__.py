"""A GPU KV-cache allocator with batched compaction: one buffer, several pools, pages that move while requests keep their ids.

The classes stand where SGLang 0.5.23's classes of the same names stand. The flush is `allocator.end.MultiEndedAllocator._flush`.
"""

from allocator.composites import (
    UnifiedMambaSlotAllocator,
    UnifiedMambaSWATokenToKVPoolAllocator,
    UnifiedMambaTokenToKVPoolAllocator,
    UnifiedSWATokenToKVPoolAllocator,
)
from allocator.end import MultiEndedAllocator
from allocator.errors import AllocatorError
from allocator.kv_store import (
    KVCache,
    UnifiedMambaPool,
    UnifiedMHATokenToKVPool,
    UnifiedMLATokenToKVPool,
    UnifiedPagePool,
    UnifiedTokenPool,
    kv_store_for,
)
from allocator.lookup import DEFAULT_STRATEGY, STRATEGIES
from allocator.middle import FloatMultiEndedAllocator
from allocator.pool import UnifiedKVPool
from allocator.specs import MambaSubPoolSpec, MHASubPoolSpec, MLASubPoolSpec, OpaqueSubPoolSpec, SubPoolSpec

__all__ = [
    "DEFAULT_STRATEGY",
    "STRATEGIES",
    "AllocatorError",
    "FloatMultiEndedAllocator",
    "KVCache",
    "MHASubPoolSpec",
    "MLASubPoolSpec",
    "MambaSubPoolSpec",
    "MultiEndedAllocator",
    "OpaqueSubPoolSpec",
    "SubPoolSpec",
    "UnifiedKVPool",
    "UnifiedMHATokenToKVPool",
    "UnifiedMLATokenToKVPool",
    "UnifiedMambaPool",
    "UnifiedMambaSWATokenToKVPoolAllocator",
    "UnifiedMambaSlotAllocator",
    "UnifiedMambaTokenToKVPoolAllocator",
    "UnifiedPagePool",
    "UnifiedSWATokenToKVPoolAllocator",
    "UnifiedTokenPool",
    "kv_store_for",
]
