"""What a trace's header says about a block pool of vLLM, read off its cache configuration and the engine's. No paths, no prompts."""

from __future__ import annotations

from pathlib import PurePath
from typing import Any, Final

from recorder.engines.blocks import page_shape, plain
from recorder.trace import Header, PoolHeader, Provenance

POOL_NAME: Final = "blocks"
NOMINAL_TOKEN_BYTES: Final = 1024
"""Bytes per token where no cache configuration says them; only byte figures depend on it."""

SCHEDULER_SETTINGS: Final = (
    "max_num_seqs",
    "max_num_active_seqs",
    "max_num_batched_tokens",
    "max_num_scheduled_tokens",
    "long_prefill_token_threshold",
    "enable_chunked_prefill",
    "policy",
    "async_scheduling",
    "scheduler_reserve_full_isl",
    "watermark",
    "disable_hybrid_kv_cache_manager",
)
CACHE_SETTINGS: Final = (
    "block_size",
    "cache_dtype",
    "gpu_memory_utilization",
    "num_gpu_blocks_override",
    "prefix_caching_hash_algo",
    "prefix_cache_retention_interval",
    "mamba_cache_mode",
    "kv_sharing_fast_prefill",
    "sliding_window",
)
MODEL_SETTINGS: Final = ("max_model_len",)
SPECULATIVE_SETTINGS: Final = ("method", "num_speculative_tokens")


def header_of(pool: Any, cache: Any, engine: Any, on_host: bool, version: str) -> Header:
    """Header for one block pool.

    Args:
        pool: a `BlockPool`.
        cache: its `KVCacheConfig`, None if it was made without one.
        engine: the `VllmConfig` of the scheduler that owns it, None without a scheduler.
        on_host: blocks of host memory, for offloading.
    """
    tokens, block_bytes, note = _block(pool, cache)
    page_size, entry_bytes = page_shape(tokens, block_bytes)
    if page_size != tokens:
        note["page_note"] = f"a block holds {tokens} tokens; it is written as a page of {page_size}"
    groups = _groups(cache)
    return Header(
        engine="vllm",
        engine_version=version,
        allocator=type(pool).__name__,
        settings={
            # The ids are the engine's choice: a replay maps them to those its own allocator gives.
            "placement": "free",
            "prefix_caching": bool(pool.enable_caching),
            "hash_block_size": int(pool.hash_block_size),
            **plain(getattr(engine, "scheduler_config", None), SCHEDULER_SETTINGS),
            **plain(getattr(engine, "cache_config", None), CACHE_SETTINGS),
            **plain(getattr(engine, "model_config", None), MODEL_SETTINGS),
            **plain(getattr(engine, "speculative_config", None), SPECULATIVE_SETTINGS),
        },
        pools=[
            PoolHeader(
                name=POOL_NAME,
                kind="tokens",
                grow_direction="down",
                page_size=page_size,
                entry_bytes=entry_bytes,
                layer_num=max((group["layers"] for group in groups), default=1),
                num_pages=int(pool.num_gpu_blocks),
                # Block 0 is the null block: handed to nobody.
                min_page_index=1,
                num_virtual_ids=int(pool.num_gpu_blocks),
                extra={"block_tokens": tokens, "block_bytes": block_bytes, "groups": groups},
            )
        ],
        total_bytes=int(pool.num_gpu_blocks) * page_size * entry_bytes,
        device="cpu" if on_host else str(getattr(getattr(engine, "device_config", None), "device_type", "")),
        model=_model(engine),
        rank=_rank(engine),
        provenance=Provenance(
            kind="recorded",
            how=f"kvtape's hook on the block pool of vLLM {version}; a block lives until it is released unhashed or evicted",
        ),
        extra=note,
    )


def _block(pool: Any, cache: Any) -> tuple[int, int, dict[str, Any]]:
    """(tokens, bytes, notes) of a block. All groups of layers share the blocks, so a block has the same bytes whosever it is."""
    sizes = {int(group.kv_cache_spec.block_size) for group in getattr(cache, "kv_cache_groups", ())}
    tokens = sizes.pop() if len(sizes) == 1 else int(pool.hash_block_size)
    tensors = getattr(cache, "kv_cache_tensors", None)
    if tensors and cache.num_blocks == pool.num_gpu_blocks:
        # Every tensor places its layers in one backing allocation, of which each says the size.
        return tokens, max(int(tensor.size) for tensor in tensors) // int(pool.num_gpu_blocks), {}
    note = f"nominal: no cache configuration was seen for this pool; {NOMINAL_TOKEN_BYTES} bytes a token were put in"
    return tokens, tokens * NOMINAL_TOKEN_BYTES, {"entry_bytes": note}


def _groups(cache: Any) -> list[dict[str, Any]]:
    """What the groups of layers are that share the pool."""
    groups = []
    for group in getattr(cache, "kv_cache_groups", ()):
        spec = group.kv_cache_spec
        known = plain(spec, ("block_size", "page_size_bytes", "num_kv_heads", "head_size", "sliding_window"))
        dtype = getattr(spec, "dtype", None)
        if dtype is not None:
            known["dtype"] = str(dtype).removeprefix("torch.")
        groups.append({"kind": type(spec).__name__, "layers": len(group.layer_names), **known})
    return groups


def _model(engine: Any) -> str:
    """Last component of the model's path: where it lies is nobody's business."""
    name = getattr(getattr(engine, "model_config", None), "model", None)
    return PurePath(name).name if isinstance(name, str) else ""


def _rank(engine: Any) -> dict[str, Any]:
    """One pool serves all tensor- and pipeline-parallel ranks of an engine core: their ranks are 0, with sizes above one."""
    parallel = getattr(engine, "parallel_config", None)
    data_parallel = getattr(parallel, "data_parallel_index", None)
    if not isinstance(data_parallel, int):
        data_parallel = getattr(parallel, "data_parallel_rank", 0)
    rank: dict[str, Any] = {"tp": 0, "pp": 0, "dp": int(data_parallel or 0)}
    for short, name in (("tp", "tensor"), ("pp", "pipeline"), ("dp", "data")):
        size = getattr(parallel, f"{name}_parallel_size", 1)
        if isinstance(size, int) and size > 1:
            rank[f"{short}_size"] = size
    return rank
