"""Where SGLang's versions keep what the stand-ins replace."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

#: 0.5.20 and later: one module for the sub-pools, one for each composite above them.
SUB_POOLS = "sglang.srt.mem_cache.allocator.unified_sub_pool"
COMPOSITES = (
    "sglang.srt.mem_cache.allocator.unified_hybrid_swa",
    "sglang.srt.mem_cache.allocator.unified_mamba",
)
#: Up to 0.5.18: all of them in one.
ALL_IN_ONE = "sglang.srt.mem_cache.multi_ended_allocator"


def has_kv_loc_plan() -> bool:
    """Whether a forward's write ids come physical, from a plan (0.5.20 and later), or virtual, to be translated by the backend."""
    return importlib.util.find_spec("sglang.srt.mem_cache.kv_loc_plan") is not None


def sub_pool_module() -> ModuleType:
    try:
        return importlib.import_module(SUB_POOLS)
    except ModuleNotFoundError:
        return importlib.import_module(ALL_IN_ONE)


def composite_modules() -> list[ModuleType]:
    try:
        return [importlib.import_module(name) for name in COMPOSITES]
    except ModuleNotFoundError:
        return [importlib.import_module(ALL_IN_ONE)]
