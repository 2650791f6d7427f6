"""Whether sizes of pools add up, in words: what an engine asks for when it is idle."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from allocator.mapped import MappedBand


def band_violations(pool: MappedBand) -> list[str]:
    """What does not add up in one pool; empty if all does. Reads a float's inverse table."""
    low, high = pool._byte_low_frontier(), pool._byte_high_frontier()
    name = pool.sub_pool_name
    found = []
    if not pool._is_frontier_transparent() and not 0 <= low <= high <= pool.total_bytes:
        found.append(f"[{name}] band [{low}, {high}) of {pool.total_bytes} bytes")
    if pool.grow_direction == "float":
        first, end = pool._band_pages()
        mapped = int(torch.count_nonzero(pool.physical_to_virtual[first:end] >= 0))
        # A page reserved for a load is bound some time before the load is queued, and counts as reserved until then.
        unmapped = end - first - mapped - len(pool.holes)
        if not 0 <= unmapped <= pool._reserved_for_load:
            found.append(f"[{name}] span of {end - first} pages != {mapped} mapped + {len(pool.holes)} holes")
    elif pool.lazy_compaction:
        band, live = pool._allocated_pages(), pool._live_pages_lazy
        holes, pending = len(pool.holes), len(pool._pending)
        if band != live + holes + pending:
            found.append(f"[{name}] band of {band} pages != {live} live + {holes} holes + {pending} pending")
    return found


def chain_violations(chain: Iterable[MappedBand]) -> list[str]:
    """The same of all pools of a buffer, from its low end up, and bands that overlap."""
    pools = list(chain)
    found = [line for pool in pools for line in band_violations(pool)]
    end = 0
    for pool in pools:
        if pool._is_frontier_transparent():
            continue
        low = pool._byte_low_frontier()
        if low < end:
            found.append(f"[{pool.sub_pool_name}] starts at byte {low}, and the pool below it ends at {end}")
        end = max(end, pool._byte_high_frontier())
    return found
