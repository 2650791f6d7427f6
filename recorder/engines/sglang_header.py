"""What a trace's header says about SGLang's sub-pools, read off the allocators and the server's arguments. No paths, no prompts."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Final

from recorder.trace import Header, PoolHeader, Provenance

SAME_PLACEMENT: Final = ("0.5.23",)
"""Versions that put pages where kvtape's allocator puts them. 0.5.18 takes the holes of a down pool in another order."""

SERVER_SETTINGS: Final = (
    "page_size",
    "mem_fraction_static",
    "max_total_tokens",
    "max_running_requests",
    "chunked_prefill_size",
    "max_prefill_tokens",
    "context_length",
    "schedule_policy",
    "attention_backend",
    "kv_cache_dtype",
    "dtype",
    "swa_full_tokens_ratio",
    "mamba_full_memory_ratio",
    "disable_overlap_schedule",
    "disable_radix_cache",
    "enable_unified_memory",
    "disaggregation_mode",
    "speculative_algorithm",
    "load_format",
)
"""Server arguments that decide what the allocators are asked; plain values only."""


@dataclass(frozen=True)
class Engine:
    """Whose allocators these are. `same_placement`: they put pages where kvtape's own allocator does."""

    name: str
    version: str
    same_placement: bool


def header_of(allocators: list[Any], engine: Engine, *, served: bool) -> Header:
    """Header for the sub-pools of one buffer, in the order they were made. `served`: by a server, whose arguments mean something."""
    arguments = _server_arguments() if served else None
    return Header(
        engine=engine.name,
        engine_version=engine.version,
        allocator=type(allocators[0]).__name__,
        settings={
            "placement": "engine" if engine.same_placement else "free",
            "move_cap": int(allocators[0]._lazy_max_moves_per_call),
            **_implementation(allocators[0]),
            **_plain_settings(arguments),
        },
        pools=[_pool(allocator) for allocator in allocators],
        total_bytes=int(allocators[0].unified_buffer.total_bytes),
        device=str(allocators[0].device),
        model=_model(arguments),
        rank=_rank(arguments),
        provenance=Provenance(
            kind="recorded" if arguments is not None else "driven",
            how=f"kvtape's hook on the sub-pool allocators of {engine.name} {engine.version}".strip(),
        ),
    )


def _implementation(allocator: Any) -> dict[str, str]:
    """Whose class this is, where it stands in the place of SGLang's and says so."""
    name = getattr(allocator, "implementation", None)
    return {"allocator": name} if isinstance(name, str) else {}


def _pool(allocator: Any) -> PoolHeader:
    kind, layout, note = _layout(allocator.spec)
    extra: dict[str, Any] = dict(note)
    if getattr(allocator, "pool_page_size", allocator.page_size) != allocator.page_size:
        extra["pool_page_size"] = int(allocator.pool_page_size)  # decode context parallelism
    return PoolHeader(
        name=str(allocator.sub_pool_name),
        kind=kind,
        grow_direction=str(allocator.grow_direction),
        page_size=int(allocator.page_size),
        entry_bytes=int(allocator.entry_bytes),
        layer_num=int(allocator.spec.layer_num),
        num_pages=int(allocator.num_pages),
        min_page_index=int(allocator.min_page_index),
        num_virtual_ids=int(
            getattr(allocator, "num_virtual_ids", allocator.virtual_to_physical.shape[0] - 1)
        ),
        is_id_owner=bool(allocator.is_id_owner),
        lazy_compaction=bool(allocator.lazy_compaction),
        layout=layout,
        extra=extra,
    )


def _layout(spec: Any) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """(kind, layout, notes) of a sub-pool's spec."""
    name = type(spec).__name__
    drafted = getattr(spec, "draft_region", None) is not None
    note = {"layout_note": "a draft region lies in each entry; its layout is left out"} if drafted else {}
    if name == "MHASubPoolSpec":
        layout = {"head_num": spec.head_num, "head_dim": spec.head_dim, "dtype": _dtype(spec.store_dtype)}
        if spec.v_head_dim not in (None, spec.head_dim):
            layout["v_head_dim"] = spec.v_head_dim
        return "mha", {} if drafted else layout, note
    if name == "MLASubPoolSpec":
        layout = {
            "kv_lora_rank": spec.kv_lora_rank,
            "qk_rope_head_dim": spec.qk_rope_head_dim,
            "dtype": _dtype(spec.store_dtype),
        }
        return "mla", {} if drafted else layout, note
    if name == "MambaSubPoolSpec":
        layout = {
            "conv_state_shapes": [list(shape) for shape in spec.conv_state_shapes],
            "conv_dtype": _dtype(spec.conv_dtype),
            "temporal_state_shape": list(spec.temporal_state_shape),
            "temporal_dtype": _dtype(spec.temporal_dtype),
        }
        return "mamba", {} if drafted else layout, note
    return "tokens", {}, {"spec": name}


def _dtype(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _server_arguments() -> Any:
    """The server's arguments in this process, None where there is no server."""
    for module, name in (
        ("sglang.srt.runtime_context", "get_server_args"),
        ("sglang.srt.server_args", "get_global_server_args"),  # before 0.5.20
    ):
        try:
            return getattr(importlib.import_module(module), name)()
        except Exception:  # another version, or not set: an allocator without a server
            continue
    return None


def _plain_settings(arguments: Any) -> dict[str, Any]:
    if arguments is None:
        return {}
    values = {name: getattr(arguments, name, None) for name in SERVER_SETTINGS}
    return {name: value for name, value in values.items() if isinstance(value, (bool, int, float, str))}


def _model(arguments: Any) -> str:
    """Last component of the model's path: where it lies is nobody's business."""
    path = getattr(arguments, "model_path", None)
    return PurePath(path).name if isinstance(path, str) else ""


def _rank(arguments: Any) -> dict[str, Any]:
    """tp, pp and dp rank, with sizes where they are more than one."""
    rank: dict[str, Any] = {"tp": 0, "pp": 0, "dp": 0}
    try:
        parallel = importlib.import_module("sglang.srt.runtime_context").get_parallel()
        for name in rank:
            rank[name] = int(getattr(parallel, f"{name}_rank", 0) or 0)
    except Exception:  # before 0.5.20
        try:
            groups = importlib.import_module("sglang.srt.distributed.parallel_state")
            rank["tp"] = int(groups.get_tensor_model_parallel_rank())
        except Exception:  # no group: one process
            rank["tp"] = 0
    for name in ("tp", "pp", "dp"):
        size = getattr(arguments, f"{name}_size", 1)
        if isinstance(size, int) and size > 1:
            rank[f"{name}_size"] = size
    return rank
