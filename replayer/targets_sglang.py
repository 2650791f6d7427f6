"""SGLang's own allocator classes, wired from a trace header: what kvtape is measured against.

Nothing of SGLang is imported before `build_sglang_pools` is called. The classes run as SGLang ships them. What they reach for and a
machine without CUDA does not have is put in place by `install_cpu_stand_ins`: a current stream, and the two paged kernels.
"""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch

from recorder.trace import Header, PoolHeader
from replayer.errors import UsageError

ALLOCATOR_MODULE = "sglang.srt.mem_cache.allocator.unified_sub_pool"
#: Where the class is before 0.5.20: two ends only, both owning their ids, whole traces do not run on it.
OLDER_ALLOCATOR_MODULE = "sglang.srt.mem_cache.multi_ended_allocator"
PAGED_MODULE = "sglang.srt.mem_cache.allocator.paged"
POOL_MODULE = "sglang.srt.mem_cache.unified_memory_pool"
CONTEXT_MODULE = "sglang.srt.runtime_context"


def sglang_version() -> str | None:
    """The version of SGLang installed in this environment, None if there is none. Imports nothing of it."""
    if importlib.util.find_spec("sglang") is None:
        return None
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("sglang")
    except PackageNotFoundError:
        return "unknown"


def build_sglang_pools(
    header: Header, *, kvcache_for: Callable[[str], Any], older: bool = False
) -> dict[str, Any]:
    """Fresh allocators of SGLang, by pool name, in the header's order, neighbours bound, on the CPU.

    Args:
        kvcache_for: pool name to the object that moves its pages: ``move_physical_pages(dst, src, page_size)`` and, if pages are to
            be zeroed when they are handed out, ``zero_physical_pages(pages)``. Before 0.5.20: ``move_kv_cache(dst, src)`` of tokens.
        older: whether a version before 0.5.20 will do as well, which knows fewer calls and no floats.

    Raises:
        UsageError: SGLang is not installed here, does not import, or refuses these pools.
    """
    allocators = _allocators(older)
    buffer = HeaderBuffer(header, import_sglang(POOL_MODULE).SubPoolSpec)
    install_cpu_stand_ins(allocators)
    made = {pool.name: _build(allocators, pool, buffer, kvcache_for(pool.name)) for pool in header.pools}
    if "move_cap" in header.settings:
        for allocator in made.values():
            allocator._lazy_max_moves_per_call = int(header.settings["move_cap"])
    chain = [made[name] for name in buffer.chain]
    for low, high in pairwise(chain):
        if not hasattr(low, "bind_high_peer"):
            low.bind_peer(high)
            high.bind_peer(low)
            continue
        # For two ends this is what their bind_peer does; floats have to be bound this way.
        low.bind_high_peer(high)
        high.bind_low_peer(low)
    return made


def _build(allocators: Any, pool: PoolHeader, buffer: HeaderBuffer, kvcache: Any) -> Any:
    is_float = pool.grow_direction == "float"
    chosen = allocators.FloatMultiEndedAllocator if is_float else allocators.MultiEndedAllocator
    arguments: dict[str, Any] = {}
    if not pool.is_id_owner:
        arguments["virtual_num_pages"] = pool.num_virtual_ids
    try:
        made = chosen(
            kvcache=kvcache,
            unified_buffer=buffer,
            sub_pool_name=pool.name,
            device="cpu",
            is_id_owner=pool.is_id_owner,
            page_size=pool.page_size,
            lazy_compaction=pool.lazy_compaction and not is_float,
            **arguments,
        )
    except (AssertionError, RuntimeError) as error:
        raise UsageError(f"SGLang refuses pool {pool.name!r}: {error}") from None
    # SGLang zeroes pages for its own two token pools only, which it knows by their class.
    made._zero_pages_on_alloc = hasattr(kvcache, "zero_physical_pages")
    return made


class HeaderBuffer:
    """What an allocator reads of SGLang's ``UnifiedKVPool``: sizes and specs. The bytes themselves, up to the memory of a whole GPU,
    are not needed to decide where a page goes."""

    def __init__(self, header: Header, spec_base: type[Any]) -> None:
        self.total_bytes = header.total_bytes
        pools = header.pools
        # The sink for padding writes: a slot of every pool, and all of page 0 of the token pools.
        page_size = max(pool.page_size for pool in pools)
        self._reserved_floor = max(
            pool.entry_bytes * (1 if pool.kind == "mamba" else page_size) for pool in pools
        )
        self._specs = {pool.name: _spec(pool, spec_base) for pool in pools}
        self._entry_bytes = {pool.name: pool.entry_bytes for pool in pools}
        order = {"up": 0, "float": 1}
        #: Pool names from the low byte end to the high one.
        self.chain = [pool.name for pool in sorted(pools, key=lambda pool: order.get(pool.grow_direction, 2))]

    def spec(self, name: str) -> Any:
        return self._specs[name]

    def max_slots(self, name: str) -> int:
        return self.total_bytes // self._entry_bytes[name]

    def mha_spec(self, name: str) -> Any:
        """The same; a composite asks it for its ``store_dtype``."""
        return self._specs[name]

    def min_slot_index(self, name: str) -> int:
        return -(-self._reserved_floor // self._entry_bytes[name])


def _spec(pool: PoolHeader, spec_base: type[Any]) -> Any:
    """A sub-pool spec of SGLang's kind that knows the size of an entry; the allocators ask for nothing else of its layout."""
    entry_bytes = pool.entry_bytes
    answers = {
        "entry_bytes": lambda self: entry_bytes,
        "get_dtype": lambda self: torch.uint8,
        "store_dtype": torch.uint8,
    }
    of_entry_bytes = type("HeaderSubPoolSpec", (spec_base,), answers)
    direction = pool.grow_direction if pool.grow_direction in ("up", "float") else "down"
    return of_entry_bytes(name=pool.name, layer_num=pool.layer_num, grow_direction=direction)


def _allocators(older: bool) -> Any:
    """The module that has the allocators; the one before 0.5.20 only if ``older`` and there is no other."""
    try:
        return import_sglang(ALLOCATOR_MODULE)
    except UsageError:
        if not older or sglang_version() is None:
            raise
        return import_sglang(OLDER_ALLOCATOR_MODULE)


def import_sglang(module: str) -> Any:
    """A module of SGLang's; warnings of what it imports on the way are its business.

    Raises:
        UsageError: it cannot be imported, in words that say what to do.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # quantization kernels that miss CUDA, and other things no allocator uses
            return importlib.import_module(module)
    except ImportError as error:
        raise UsageError(
            f"SGLang's allocators cannot be imported here ({error}). An environment that has them is built by "
            "tools/build_sglang_env.sh DIR from kvtape's repository; run DIR/bin/kvtape then"
        ) from None


# -- stand-ins where there is no CUDA


def install_cpu_stand_ins(allocators: Any = None) -> None:
    """Put in place what SGLang's allocators call and only CUDA has. Does nothing where CUDA is there, and nothing twice.

    They stay, since an allocator needs them for as long as it is called; `remove_cpu_stand_ins` takes them away.

    Args:
        allocators: the module that has the allocators; None for the one that 0.5.20 and later have.
    """
    if torch.cuda.is_available() or _replaced:
        return
    allocators = allocators or import_sglang(ALLOCATOR_MODULE)
    naive = import_sglang(PAGED_MODULE).alloc_extend_naive
    _replace(torch.cuda, "current_stream", _current_stream)
    _replace(allocators, "alloc_extend_kernel", _PagedKernel(_extend_with(naive)))
    _replace(allocators, "alloc_decode_kernel", _PagedKernel(_decode_with(naive)))


def remove_cpu_stand_ins() -> None:
    """Give back what `install_cpu_stand_ins` replaced, and take back what `install_single_rank` said."""
    while _replaced:
        owner, name, original = _replaced.pop()
        setattr(owner, name, original)
    while _told:
        _told.pop().clear_stamp()


def install_single_rank() -> None:
    """Say that there is one rank, where no server has said how many: SGLang's composites ask whenever they count tokens.

    It stays said for the process; `remove_cpu_stand_ins` takes it back.
    """
    parallel = import_sglang(CONTEXT_MODULE).get_parallel()
    try:
        parallel.attn_dcp_size  # noqa: B018 - it raises where nobody has said
    except (ValueError, RuntimeError):
        parallel.override_permanently(attn_dcp_size=1, attn_dcp_rank=0)
        _told.append(parallel)


#: SGLang's parallel contexts that `install_single_rank` has spoken to.
_told: list[Any] = []


_replaced: list[tuple[Any, str, Any]] = []


def _replace(owner: Any, name: str, stand_in: Any) -> None:
    _replaced.append((owner, name, getattr(owner, name)))
    setattr(owner, name, stand_in)


@contextmanager
def without_profiler_ranges() -> Iterator[None]:
    """Inside the block SGLang's allocators open no ``torch.profiler.record_function`` range, which each of their methods otherwise
    does, whether anybody profiles or not."""
    allocators = import_sglang(ALLOCATOR_MODULE)
    original = allocators.record_function
    allocators.record_function = _NoRange
    try:
        yield
    finally:
        allocators.record_function = original


class _NoRange:
    def __init__(self, name: str) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *exception: object) -> None: ...


class _ProgramOrder:
    """The stream of a CPU: everything is done in the order it is called, so a wait has nothing to hold back. Waits on an event are
    passed on to it, for whoever counts or orders them."""

    def wait_event(self, event: Any) -> None:
        event.wait()

    def wait_stream(self, stream: Any) -> None: ...

    def synchronize(self) -> None: ...


_PROGRAM_ORDER = _ProgramOrder()


def _current_stream(device: Any = None) -> _ProgramOrder:
    return _PROGRAM_ORDER


class _PagedKernel:
    """A Triton kernel's call shape, ``kernel[grid](...)``, over a plain function."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __getitem__(self, grid: Sequence[int]) -> Callable[..., None]:
        return self._function


def _extend_with(naive: Callable[..., None]) -> Callable[..., None]:
    def alloc_extend(
        prefix_lens: torch.Tensor,
        seq_lens: torch.Tensor,
        last_loc: torch.Tensor,
        free_pages: torch.Tensor,
        out_indices: torch.Tensor,
        batch_power_of_2: int,
        page_size: int,
    ) -> None:
        naive(prefix_lens, seq_lens, last_loc, free_pages, out_indices, page_size, out_indices.device)

    return alloc_extend


def _decode_with(naive: Callable[..., None]) -> Callable[..., None]:
    def alloc_decode(
        seq_lens: torch.Tensor,
        last_loc: torch.Tensor,
        free_pages: torch.Tensor,
        out_indices: torch.Tensor,
        batch_power_of_2: int,
        page_size: int,
    ) -> None:
        # A decode step is an extension by one token.
        naive(seq_lens - 1, seq_lens, last_loc, free_pages, out_indices, page_size, out_indices.device)

    return alloc_decode
