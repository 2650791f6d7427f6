"""SGLang's own composites: over sub-pools wired from a trace header, or over a buffer of the caller's.

As in `replayer.targets_sglang`, nothing of SGLang is imported before something is built, and the classes run as SGLang ships them.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from recorder.trace import Header
from replayer.errors import UsageError
from replayer.targets_sglang import (
    POOL_MODULE,
    HeaderBuffer,
    import_sglang,
    install_cpu_stand_ins,
    install_single_rank,
)

WINDOW_MODULE = "sglang.srt.mem_cache.allocator.unified_hybrid_swa"
STATE_MODULE = "sglang.srt.mem_cache.allocator.unified_mamba"


def build_sglang_composite(
    header: Header, stores: Mapping[str, Any], *, maxima: Mapping[str, int], slots: int
) -> tuple[Any, Any]:
    """A fresh composite of SGLang's for the header's pools, and its slot allocator (None without a state pool), on the CPU.

    Args:
        stores: by pool name what moves its pages and, if pages are to be zeroed when they are handed out, has ``zero_physical_pages``.
        maxima: ``full_max_total_num_tokens`` and ``swa_max_total_num_tokens``, or nothing; with three pools they are a must.
        slots: states that may be live.

    Raises:
        UsageError: SGLang is not installed here, does not import, has no composites (before 0.5.20), or refuses these pools.
    """
    (full,) = (pool for pool in header.pools if pool.name == "full")
    buffer = HeaderBuffer(header, import_sglang(POOL_MODULE).SubPoolSpec)
    try:
        made = join_sglang_pools(
            buffer, stores, page_size=full.page_size, lazy_compaction=full.lazy_compaction, **maxima
        )
    except (AssertionError, RuntimeError, ValueError) as error:
        raise UsageError(f"SGLang refuses these pools as a composite: {error}") from None
    for name, store in stores.items():
        # SGLang zeroes pages for its own two token pools only, which it knows by their class.
        getattr(made, MEMBERS[name])._zero_pages_on_alloc = hasattr(store, "zero_physical_pages")
    return made, sglang_slots(made, slots)


def join_sglang_pools(
    buffer: Any, stores: Mapping[str, Any], *, page_size: int, lazy_compaction: bool, **maxima: int
) -> Any:
    """SGLang's composite of the pools that ``stores`` names, of whichever sub-pool classes stand in its modules now.

    Args:
        buffer: SGLang's ``UnifiedKVPool``, or what answers for its sizes and specs.
        stores: by pool name (``full``, ``swa``, ``mamba``) what moves its pages.
        maxima: as in `build_sglang_composite`.

    Raises:
        UsageError: SGLang is not installed here or does not import.
    """
    window, states = import_sglang(WINDOW_MODULE), import_sglang(STATE_MODULE)
    install_cpu_stand_ins()
    install_single_rank()
    kvcache = SimpleNamespace(
        full_kv_pool=stores["full"], swa_kv_pool=stores.get("swa"), mamba_pool=stores.get("mamba"),
        attach_allocators=lambda **allocators: None,
    )  # fmt: skip
    arguments: dict[str, Any] = {
        "unified_buffer": buffer, "kvcache": kvcache, "device": "cpu", "page_size": page_size, "lazy_compaction": lazy_compaction,
        **maxima,
    }  # fmt: skip
    if "swa" not in stores:
        return states.UnifiedMambaTokenToKVPoolAllocator(**arguments)
    if "mamba" not in stores:
        return window.UnifiedSWATokenToKVPoolAllocator(**arguments)
    return window.UnifiedMambaSWATokenToKVPoolAllocator(mamba_kvcache=stores["mamba"], **arguments)


def sglang_slots(composite: Any, most: int) -> Any:
    """SGLang's slot allocator over a composite's state pool, None if it has none. ``most``: states that may be live."""
    states = getattr(composite, "mamba_allocator", None)
    return (
        None if states is None else import_sglang(POOL_MODULE).UnifiedMambaSlotAllocator(states, most, "cpu")
    )


#: Pools of a composite, and where it keeps their allocators.
MEMBERS = {"full": "full_attn_allocator", "swa": "swa_attn_allocator", "mamba": "mamba_allocator"}
