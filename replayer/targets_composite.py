"""Composites by name: what a trace of level ``composite`` is driven against.

``kvtape`` is this project's own, ``sglang`` SGLang's (where installed), ``module:End`` and ``module:End,module:Float`` are our composites
over sub-pools of these classes, and ``module:Composite`` is any class that takes the arguments of
`allocator.UnifiedSWATokenToKVPoolAllocator` or of one of its siblings.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from recorder.trace import Header, ImpossibleEvent, PoolHeader
from replayer.content import KVStore
from replayer.errors import UsageError
from replayer.targets import TargetOptions, loaded_classes, not_made, prepare
from replayer.targets_sglang_composite import MEMBERS, build_sglang_composite

#: Names a composite must have to be driven.
REQUIRED = (
    "alloc", "alloc_extend", "alloc_decode", "free", "free_segment", "free_group_begin", "free_group_end", "available_size",
    "flush_opportunistic", "set_latest_forward_done_event", "set_inflight_forward", "set_disagg_move_gate", "clear",
    "translate_kv_indices_for_transfer",
)  # fmt: skip
REQUIRED_WITH_WINDOW = ("free_swa", "free_swa_segment", "free_full", "free_full_segment", "ensure_capacity", "alloc_extend_swa_tail",
                        "set_full_to_swa_mapping", "translate_swa_indices_for_transfer")  # fmt: skip
#: Slots of a state pool where the header does not say how many there may be.
DEFAULT_SLOTS = 1 << 30


def build_composite(
    header: Header, options: TargetOptions, buffer: Any, stores: dict[str, KVStore]
) -> tuple[Any, Any, dict[str, Any]]:
    """A fresh composite of the header's pools, its slot allocator (None without a state pool), and its sub-pools by name.

    Raises:
        UsageError: a class that is not there or does not fit.
        ImpossibleEvent: pools that make no composite, or whose sizes do not follow from the header's bytes.
    """
    pools = {pool.name: pool for pool in header.pools}
    _require_members(pools)
    if options.allocator == "sglang":
        made, slots = build_sglang_composite(header, stores, maxima=_maxima(header), slots=_slots(header))
    else:
        made, slots = _build(header, options, buffer, stores)
    wanted = REQUIRED + (REQUIRED_WITH_WINDOW if "swa" in pools else ())
    missing = [name for name in (*wanted, *(MEMBERS[name] for name in pools)) if not hasattr(made, name)]
    if missing:
        raise UsageError(f"{type(made).__name__} lacks {', '.join(missing)}, which a replay drives or reads")
    members = {name: getattr(made, MEMBERS[name]) for name in pools}
    for name, member in members.items():
        prepare(member, pools[name], header)
    return made, slots, members


def _build(
    header: Header, options: TargetOptions, buffer: Any, stores: dict[str, KVStore]
) -> tuple[Any, Any]:
    """Ours, or one that takes the same arguments; and its slot allocator."""
    from allocator import AllocatorError, UnifiedMambaSlotAllocator

    pools = {pool.name: pool for pool in header.pools}
    full = pools["full"]
    arguments: dict[str, Any] = {
        "unified_buffer": buffer,
        "kvcache": SimpleNamespace(
            full_kv_pool=stores["full"], swa_kv_pool=stores.get("swa"), mamba_pool=stores.get("mamba")
        ),
        "device": options.device,
        "page_size": full.page_size,
        "lazy_compaction": full.lazy_compaction,
        **_maxima(header),
    }
    if len(pools) == 3:
        arguments["mamba_kvcache"] = stores["mamba"]
    chosen, classes = _class_for(pools, options)
    slots = None
    try:
        made = chosen(**arguments, **classes)
        if "mamba" in pools:
            slots = UnifiedMambaSlotAllocator(made.mamba_allocator, _slots(header), options.device)
    except AllocatorError as error:
        raise UsageError(f"{options.allocator}: {error}") from None
    except (TypeError, AttributeError, KeyError) as error:
        raise UsageError(
            f"{chosen.__module__}:{chosen.__name__} does not fit as a composite: {error}"
        ) from None
    except Exception as error:
        if options.allocator == "kvtape":
            raise
        raise not_made(chosen, error) from None
    return made, slots


def _require_members(pools: dict[str, PoolHeader]) -> None:
    """
    Raises:
        ImpossibleEvent: pools that make no composite.
    """
    names = set(pools)
    if names not in ({"full", "swa"}, {"full", "mamba"}, {"full", "swa", "mamba"}):
        raise ImpossibleEvent(
            f"a composite joins full with swa, with mamba or with both; the header has pools {', '.join(sorted(names))}"
        )
    full, swa, mamba = pools["full"], pools.get("swa"), pools.get("mamba")
    fits = full.is_id_owner and full.kind != "mamba"
    if swa is not None:
        fits &= not swa.is_id_owner and swa.num_virtual_ids == full.num_virtual_ids
        fits &= swa.page_size == full.page_size and swa.kind != "mamba"
    if mamba is not None:
        fits &= mamba.is_id_owner and mamba.page_size == 1 and mamba.kind == "mamba"
    if len(pools) == 3 and swa is not None and mamba is not None:
        fits &= (mamba.grow_direction, swa.grow_direction, full.grow_direction) == ("up", "float", "down")
    else:
        fits &= {pool.grow_direction for pool in pools.values()} == {"up", "down"}
    if not fits:
        raise ImpossibleEvent(
            "the header's pools make no composite: swa is looked up by the ids of full and has its page size, mamba has ids of its own "
            "and pages of one slot, and the pools grow towards each other, with swa floating where there are three"
        )


def _class_for(pools: dict[str, PoolHeader], options: TargetOptions) -> tuple[type[Any], dict[str, Any]]:
    """The composite's class, and the arguments that say what its sub-pools are and how they look up."""
    from allocator import (
        FloatMultiEndedAllocator,
        MultiEndedAllocator,
        UnifiedMambaSWATokenToKVPoolAllocator,
        UnifiedMambaTokenToKVPoolAllocator,
        UnifiedSWATokenToKVPoolAllocator,
    )

    own = {
        frozenset({"full", "swa"}): UnifiedSWATokenToKVPoolAllocator,
        frozenset({"full", "mamba"}): UnifiedMambaTokenToKVPoolAllocator,
        frozenset({"full", "swa", "mamba"}): UnifiedMambaSWATokenToKVPoolAllocator,
    }[frozenset(pools)]
    end_class, float_class = loaded_classes(options.allocator)
    if not hasattr(end_class, "flush_for_allocation"):  # what every sub-pool has, and no composite
        named_strategy = {"strategy": options.strategy} if options.strategy != "batched" else {}
        return end_class, named_strategy
    classes: dict[str, Any] = {"strategy": options.strategy}
    if end_class is not MultiEndedAllocator:
        classes["end_class"] = end_class
    if len(pools) == 3 and float_class is not FloatMultiEndedAllocator:
        classes["float_class"] = float_class
    return own, classes


def _maxima(header: Header) -> dict[str, int]:
    """SGLang's two arguments about the most tokens of each side; for three pools they are a must, without a window there are none."""
    if not any(pool.name == "swa" for pool in header.pools):
        return {}
    names = ("full_max_total_num_tokens", "swa_max_total_num_tokens")
    given = {name: header.settings[name] for name in names if name in header.settings}
    for name, value in given.items():
        if type(value) is not int or not 0 <= value < 1 << 48:
            raise ImpossibleEvent(f"the header's {name} is {value!r}, not a number of tokens")
    if len(given) == 1:
        raise ImpossibleEvent(f"the header has {next(iter(given))} without its counterpart")
    if not given and len(header.pools) == 3:
        sizes = {pool.name: pool.num_pages * pool.page_size for pool in header.pools}
        return {names[0]: sizes["full"], names[1]: sizes["swa"]}
    return given


def _slots(header: Header) -> int:
    slots = header.settings.get("max_state_slots", DEFAULT_SLOTS)
    if type(slots) is not int or not 0 <= slots <= DEFAULT_SLOTS:
        raise ImpossibleEvent(f"the header's max_state_slots is {slots!r}, not a number of slots")
    return slots
