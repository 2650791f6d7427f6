"""Allocators by name: what a trace is driven against.

``kvtape`` is this project's own, ``sglang`` SGLang's classes (where installed), and ``module:Class`` any class that takes the
arguments of `allocator.MultiEndedAllocator`; ``module:End,module:Float`` names the one for floats too.
"""

from __future__ import annotations

import importlib
import itertools
import math
import re
from dataclasses import dataclass
from typing import Any

from recorder.trace import COMPOSITE, Header, ImpossibleEvent, PoolHeader
from replayer.content import ByteStore, KVStore, StampStore, StoreLog, ZeroingByteStore, ZeroingStampStore
from replayer.errors import UsageError
from replayer.pool_state import PoolState

#: Above this, ``--kv auto`` keeps stamps instead of rows: growing and comparing rows costs a thousand times more than stamps.
FULL_KV_BYTES = 4 * 2**20
#: A header's sizes are a claim; what a replay would reserve for them is bounded.
MAX_HARNESS_BYTES = 4 * 2**30
#: Layers of the deepest model that is worth believing.
MAX_LAYERS = 4096
#: Names an allocator must have to be driven and looked into (SGLang 0.5.23's).
REQUIRED = (
    "alloc", "alloc_extend", "alloc_decode", "free", "_flush", "flush_for_allocation", "flush_opportunistic", "available_size",
    "virtual_to_physical", "physical_to_virtual", "translate_kv_loc", "num_pages", "min_page_index", "_free_phys_pages",
    "_pending_reuse", "_pending_reuse_pages_cpu", "set_latest_forward_done_event", "set_inflight_forward", "moves_blocked",
    "schedulable_available_size", "allocated_count", "_lazy_max_moves_per_call", "lazy_compaction", "page_size",
)  # fmt: skip


@dataclass(frozen=True)
class TargetOptions:
    """What to drive: allocator name, lookup strategy, device, and how KV is kept (``auto``, ``stamp``, ``full``)."""

    allocator: str = "kvtape"
    strategy: str = "batched"
    device: str = "cpu"
    kv: str = "auto"


@dataclass(frozen=True)
class Target:
    """What is driven: pools by name, in the header's order, and for a trace of level ``composite`` the composite that joins them and
    the slot allocator of its state pool, if it has one."""

    pools: dict[str, PoolState]
    composite: Any = None
    slots: Any = None

    @property
    def allocators(self) -> list[Any]:
        """All objects under test."""
        found = [self.composite, self.slots, *(state.allocator for state in self.pools.values())]
        return [each for each in found if each is not None]


def build_pools(header: Header, options: TargetOptions, log: StoreLog) -> dict[str, PoolState]:
    """The pools of `build_target`."""
    return build_target(header, options, log).pools


def build_target(header: Header, options: TargetOptions, log: StoreLog) -> Target:
    """Fresh pools as the header describes them, in the header's order.

    Raises:
        UsageError: an allocator, strategy or device that does not exist.
        ImpossibleEvent: a header that describes pools which cannot be laid out, or too large to replay.
    """
    check_claims(header)
    _check_device(options.device)
    full = options.kv == "full" or (options.kv == "auto" and header.total_bytes <= FULL_KV_BYTES)
    if full and header.total_bytes > MAX_HARNESS_BYTES:
        raise UsageError(
            f"--kv full needs the buffer's {header.total_bytes} bytes; the most is {MAX_HARNESS_BYTES}. Use --kv stamp"
        )
    buffer = build_buffer(header, options.device if full else "meta")

    def store_for(pool: PoolHeader) -> KVStore:
        is_state = buffer.spec(pool.name).is_state
        if full:
            return (ByteStore if is_state else ZeroingByteStore)(pool.name, buffer, log)
        made = StampStore if is_state else ZeroingStampStore
        return made(pool.name, pool.num_pages, pool.page_size, options.device, log)

    stores = {pool.name: store_for(pool) for pool in header.pools}
    composite = slots = None
    if header.level == COMPOSITE:
        from replayer.targets_composite import build_composite

        composite, slots, allocators = build_composite(header, options, buffer, stores)
    elif options.allocator == "sglang":
        from replayer.targets_sglang import build_sglang_pools

        allocators = build_sglang_pools(header, kvcache_for=lambda name: stores[name])
    else:
        allocators = build_allocators(header, options, buffer, stores)
    pools = {
        pool.name: PoolState(number, pool, allocators[pool.name], stores[pool.name])
        for number, pool in enumerate(header.pools)
    }
    return Target(pools, composite, slots)


def _check_device(device: str) -> None:
    import torch

    try:
        torch.zeros(1, device=device)
        usable = torch.device(device).type != "meta"
        reason = "it holds no bytes"
    except (RuntimeError, AssertionError) as error:  # torch without CUDA asserts
        usable, reason = False, str(error).splitlines()[0]
    if not usable:
        raise UsageError(f"device {device!r} cannot be used: {reason}")


def build_buffer(header: Header, device: str) -> Any:
    """The shared buffer of the header's pools; on ``"meta"`` without memory.

    Raises:
        ImpossibleEvent: pools that cannot be laid out.
        UsageError: a device that does not exist.
    """
    from allocator import AllocatorError, UnifiedKVPool

    page_size = max(pool.page_size for pool in header.pools)
    try:
        return UnifiedKVPool(
            total_bytes=header.total_bytes,
            sub_pool_specs=[spec_of(pool) for pool in header.pools],
            device=device,
            page_size=page_size,
        )
    except AllocatorError as error:
        raise ImpossibleEvent(f"the header's pools cannot be laid out: {error}") from None


def spec_of(pool: PoolHeader) -> Any:
    """The sub-pool's layout as the header has it; only the entry's size where it has none."""
    import torch

    from allocator import (
        AllocatorError,
        MambaSubPoolSpec,
        MHASubPoolSpec,
        MLASubPoolSpec,
        OpaqueSubPoolSpec,
        SubPoolSpec,
    )

    direction = pool.grow_direction if pool.grow_direction in ("up", "float") else "down"
    common: dict[str, Any] = {"name": pool.name, "layer_num": pool.layer_num, "grow_direction": direction}
    layout = pool.layout

    def dtype(name: str) -> torch.dtype:
        found = getattr(torch, str(layout[name]).removeprefix("torch."), None)
        if not isinstance(found, torch.dtype):
            raise KeyError(name)
        return found

    spec: SubPoolSpec
    try:
        if pool.kind == "mha":
            spec = MHASubPoolSpec(
                head_num=layout["head_num"], head_dim=layout["head_dim"], v_head_dim=layout.get("v_head_dim"),
                store_dtype=dtype("dtype"), **common,
            )  # fmt: skip
        elif pool.kind == "mla":
            spec = MLASubPoolSpec(
                kv_lora_rank=layout["kv_lora_rank"],
                qk_rope_head_dim=layout["qk_rope_head_dim"],
                store_dtype=dtype("dtype"),
                **common,
            )
        else:
            shapes = (
                layout["conv_state_shapes"] if "conv_state_shapes" in layout else [layout["conv_state_shape"]]
            )
            spec = MambaSubPoolSpec(
                conv_state_shapes=tuple(tuple(shape) for shape in shapes), conv_dtype=dtype("conv_dtype"),
                temporal_state_shape=tuple(layout["temporal_state_shape"]), temporal_dtype=dtype("temporal_dtype"), **common,
            )  # fmt: skip
        if spec.entry_bytes() == pool.entry_bytes:
            return spec
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, AllocatorError):
        pass  # no usable layout; the size of an entry is what the allocator's decisions depend on
    try:
        return OpaqueSubPoolSpec(
            opaque_entry_bytes=pool.entry_bytes, opaque_is_state=pool.kind == "mamba", **common
        )
    except AllocatorError as error:
        raise ImpossibleEvent(f"pool {pool.name!r}: {error}") from None


def check_claims(header: Header) -> None:
    """Refuse a header whose sizes are senseless or would take more memory than `MAX_HARNESS_BYTES`.

    Raises:
        ImpossibleEvent: such a header.
    """
    if not header.pools:
        raise ImpossibleEvent("the header names no pool")
    reserved = 0
    for pool in header.pools:
        if (
            not 1 <= pool.layer_num <= MAX_LAYERS
            or not 1 <= pool.page_size <= 256
            or pool.entry_bytes < 1
            or pool.num_pages < 1
            or pool.num_virtual_ids < 1
        ):
            raise ImpossibleEvent(
                f"pool {pool.name!r} claims {pool.layer_num} layers, page size {pool.page_size}, "
                f"{pool.entry_bytes} bytes an entry, {pool.num_pages} pages, "
                f"{pool.num_virtual_ids} ids: page sizes are 1 to 256, layers 1 to {MAX_LAYERS}, and nothing is empty"
            )
        slots = (
            max(
                pool.num_pages,
                pool.num_virtual_ids,
                header.total_bytes // (pool.entry_bytes * pool.page_size),
            )
            * pool.page_size
        )
        reserved += 32 * slots
    if reserved > MAX_HARNESS_BYTES:
        raise ImpossibleEvent(
            f"replaying pools of this size would take {reserved} bytes of memory; the most is {MAX_HARNESS_BYTES}"
        )


def build_allocators(
    header: Header, options: TargetOptions, buffer: Any, stores: dict[str, KVStore]
) -> dict[str, Any]:
    """Allocators with `MultiEndedAllocator`'s arguments, one a pool, wired as neighbours. ``stores`` are their ``kvcache``.

    Raises:
        UsageError: a class that is not there or does not fit.
        ImpossibleEvent: page counts that do not follow from the header's bytes.
    """
    from allocator import AllocatorError

    end_class, float_class = loaded_classes(options.allocator)
    made: dict[str, Any] = {}
    for pool in header.pools:
        is_float = pool.grow_direction == "float"
        arguments: dict[str, Any] = {
            "kvcache": stores[pool.name],
            "unified_buffer": buffer,
            "sub_pool_name": pool.name,
            "device": options.device,
            "is_id_owner": pool.is_id_owner,
            "virtual_num_pages": None if pool.is_id_owner else pool.num_virtual_ids,
            "page_size": pool.page_size,
            "lazy_compaction": pool.lazy_compaction and not is_float,
        }
        if options.allocator == "kvtape" or options.strategy != "batched":
            arguments["strategy"] = options.strategy
        chosen = float_class if is_float else end_class
        try:
            made[pool.name] = chosen(**arguments)
        except AllocatorError as error:
            raise UsageError(f"{options.allocator}: {error}") from None
        except TypeError as error:
            raise UsageError(
                f"{chosen.__module__}:{chosen.__name__} does not take MultiEndedAllocator's arguments: {error}"
            ) from None
        except Exception as error:
            if options.allocator in ("kvtape", "sglang"):
                raise
            raise not_made(chosen, error) from None
        prepare(made[pool.name], pool, header)
    chain = [made[spec.name] for spec in buffer.sub_pool_specs]
    for low, high in itertools.pairwise(chain):
        low.bind_high_peer(high)
        high.bind_low_peer(low)
    return made


def not_made(chosen: type[Any], error: Exception) -> UsageError:
    """What a user is told whose class raises when it is made."""
    return UsageError(
        f"{chosen.__module__}:{chosen.__name__} could not be made: {type(error).__name__}: {' '.join(str(error).split())}"
    )


def prepare(made: Any, pool: PoolHeader, header: Header) -> None:
    """Look at an allocator that was made for a pool, and give it the header's settings.

    Raises:
        UsageError: it lacks what a replay drives or reads.
        ImpossibleEvent: page counts that do not follow from the header's bytes.
    """
    _check_surface(made, pool)
    if "move_cap" in header.settings:
        made._lazy_max_moves_per_call = _move_cap(header)


def _move_cap(header: Header) -> int:
    cap = header.settings["move_cap"]
    if not isinstance(cap, int) or cap < 0:
        raise ImpossibleEvent(f"the header's move_cap is {cap!r}, not a number of pages")
    return cap


def loaded_classes(name: str) -> tuple[type[Any], type[Any]]:
    """The classes for ends and for floats that ``--allocator`` names.

    Raises:
        UsageError: a class that is not there.
    """
    from allocator import FloatMultiEndedAllocator, MultiEndedAllocator

    if name == "kvtape":
        return MultiEndedAllocator, FloatMultiEndedAllocator
    parts = name.split(",")
    if len(parts) > 2 or not all(re.fullmatch(r"[\w.]*\w:\w+", part) for part in parts):
        raise UsageError(
            f"--allocator {name!r}: kvtape, sglang, MODULE:CLASS or MODULE:CLASS,MODULE:FLOAT_CLASS"
        )
    loaded = [_load(part) for part in parts]
    return loaded[0], loaded[1] if len(loaded) == 2 else FloatMultiEndedAllocator


def _load(name: str) -> type[Any]:
    module_name, class_name = name.split(":", 1)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever a module of somebody else's does when it is imported
        raise UsageError(
            f"--allocator {name!r}: cannot import {module_name!r} ({error}); is its folder in PYTHONPATH?"
        ) from None
    loaded = getattr(module, class_name, None)
    if not isinstance(loaded, type):
        raise UsageError(f"--allocator {name!r}: module {module_name!r} has no class {class_name!r}")
    return loaded


def _check_surface(made: Any, pool: PoolHeader) -> None:
    missing = [name for name in REQUIRED if not hasattr(made, name)]
    if missing:
        raise UsageError(f"{type(made).__name__} lacks {', '.join(missing)}, which a replay drives or reads")
    if made.num_pages != pool.num_pages or made.min_page_index != pool.min_page_index:
        raise ImpossibleEvent(
            f"pool {pool.name!r}: {made.num_pages} pages from {made.min_page_index} follow from the header's bytes, "
            f"but it claims {pool.num_pages} from {pool.min_page_index}"
        )


def bytes_text(count: float) -> str:
    """``count`` bytes for people."""
    if count < 1024:
        return f"{count:.0f} B"
    power = min(4, int(math.log(count, 1024)))
    return f"{count / 1024**power:.1f} {'KMGT'[power - 1]}iB"
