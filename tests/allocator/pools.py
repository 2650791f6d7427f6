"""Small pools for the allocator's own tests."""

from __future__ import annotations

from typing import Any

import torch

from allocator import (
    FloatMultiEndedAllocator,
    MHASubPoolSpec,
    MultiEndedAllocator,
    UnifiedKVPool,
    kv_store_for,
)


def two_ends(
    *,
    page_size: int = 4,
    lazy: bool = True,
    total_bytes: int = 64 * 256,
    strategy: str = "batched",
    end_class: type[MultiEndedAllocator] = MultiEndedAllocator,
    assertions: str = "log",
    device: str = "cpu",
    **spec: Any,
):
    """``full`` growing down and ``swa`` growing up in one buffer of ``total_bytes``; entries of 64 and 128 bytes."""
    specs = [
        MHASubPoolSpec(
            name=name,
            layer_num=layers,
            grow_direction=direction,
            head_num=1,
            head_dim=16,
            store_dtype=torch.float16,
            **spec,
        )
        for name, layers, direction in (("full", 1, "down"), ("swa", 2, "up"))
    ]
    buffer = UnifiedKVPool(total_bytes=total_bytes, sub_pool_specs=specs, device=device, page_size=page_size)
    made = {
        each.name: end_class(
            kvcache=kv_store_for(buffer, each.name), unified_buffer=buffer, sub_pool_name=each.name, device=device, is_id_owner=True,
            page_size=page_size, lazy_compaction=lazy, strategy=strategy, assertions=assertions,
        )
        for each in specs
    }  # fmt: skip
    made["full"].bind_peer(made["swa"])
    made["swa"].bind_peer(made["full"])
    return made["full"], made["swa"]


def whole_state(allocator: MultiEndedAllocator) -> dict[str, Any]:
    """Everything a call could change."""
    ids = allocator.free_virtual_ids
    return {
        "v2p": allocator.virtual_to_physical.tolist(),
        "p2v": allocator.physical_to_virtual.tolist(),
        "ids": None if ids is None else ids.tolist(),
        "holes": sorted(allocator._free_phys_pages.tolist()),
        "pending": sorted(allocator._pending_reuse_pages_cpu),
        "watermark": allocator.watermark_physical,
        "span": (allocator.low_wm_page, allocator.high_wm_page)
        if isinstance(allocator, FloatMultiEndedAllocator)
        else None,
        "live": allocator.allocated_count(),
        "available": allocator.available_size(),
        "group": None if allocator.free_group is None else [t.tolist() for t in allocator.free_group],
    }
