"""What a trace's header says about a paged cache of transformers' continuous batching. No paths, no prompts."""

from __future__ import annotations

from pathlib import PurePath
from typing import Any, Final

from recorder.engines.blocks import page_shape, plain
from recorder.trace import Header, PoolHeader, Provenance

DIRECTIONS: Final = ("down", "up")
"""Of the first pool and the second; a third one floats between them. transformers' own pools have none: a sector goes to any."""
TRASH_SECTORS: Final = 2

BATCHING_SETTINGS: Final = (
    "page_size",
    "num_blocks",
    "max_batch_tokens",
    "max_memory_percent",
    "max_requests_per_batch",
    "max_blocks_per_request",
    "allow_block_sharing",
    "use_async_batching",
    "scheduler_type",
    "cpu_offload_space",
)
CACHE_SETTINGS: Final = ("num_sectors", "bytes_per_sector", "max_batch_tokens", "use_prefix_sharing")


def header_of(cache: Any, batching: Any, tensor_parallel: tuple[int, int], version: str) -> Header:
    """Header for a `PagedAttentionCache`: a pool for each attention type, all in the one tensor.

    Args:
        batching: its `ContinuousBatchingConfig`.
        tensor_parallel: (rank, size).
    """
    rank, size = tensor_parallel
    allocators = list(cache.cache_allocators.values())
    shapes = [page_shape(int(one.tokens_per_page), int(one.bytes_per_block)) for one in allocators]
    floor = max(page_size * entry for page_size, entry in shapes)
    total = int(cache.cache_tensor.numel())
    return Header(
        engine="transformers",
        engine_version=version,
        allocator=type(cache).__name__,
        settings={
            # The ids are the engine's choice: a replay maps them to those its own allocator gives.
            "placement": "free",
            **plain(batching, BATCHING_SETTINGS),
            **plain(cache, CACHE_SETTINGS),
        },
        pools=[
            _pool(one, position, shape, floor, total)
            for position, (one, shape) in enumerate(zip(allocators, shapes, strict=True))
        ],
        total_bytes=total,
        device=str(cache.device),
        model=_model(cache.config),
        rank={"tp": rank, "pp": 0, "dp": 0, **({"tp_size": size} if size > 1 else {})},
        provenance=Provenance(
            kind="recorded",
            how=f"kvtape's hook on the block pool of transformers {version}'s continuous batching; "
            "a block lives until it goes back to the pool",
        ),
        extra={"trash_sectors": TRASH_SECTORS},
    )


def _pool(allocator: Any, position: int, shape: tuple[int, int], floor: int, total: int) -> PoolHeader:
    page_size, entry = shape
    pages = total // (page_size * entry)
    extra: dict[str, Any] = {
        "block_tokens": int(allocator.tokens_per_page),
        "block_bytes": int(allocator.bytes_per_block),
        "blocks_per_sector": int(allocator.blocks_per_sector),
        # The engine keeps the first sectors for padding; a replay keeps one page.
        "first_block": TRASH_SECTORS * int(allocator.blocks_per_sector),
        **plain(allocator, ("head_dim", "num_key_value_heads", "sliding_window")),
    }
    dtype = getattr(allocator, "cache_dtype", None)
    if dtype is not None:
        extra["dtype"] = str(dtype).removeprefix("torch.")
    return PoolHeader(
        name=str(allocator.layer_type),
        kind="tokens",
        grow_direction=DIRECTIONS[position] if position < len(DIRECTIONS) else "float",
        page_size=page_size,
        entry_bytes=entry,
        layer_num=len(allocator.layer_indices),
        num_pages=pages,
        min_page_index=_ceil(_ceil(floor, entry), page_size),
        num_virtual_ids=pages,
        extra=extra,
    )


def _ceil(count: int, unit: int) -> int:
    return -(-count // unit)


def _model(config: Any) -> str:
    """Last component of the model's path: where it lies is nobody's business."""
    name = getattr(config, "_name_or_path", None)
    return PurePath(name).name if isinstance(name, str) else ""
