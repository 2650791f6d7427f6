"""Our classes with everything that SGLang 0.5.23 asks of its own: what `allocator.sglang_plugin` puts in their place.

SGLang's slot allocator and its cache components stay as they are, and so do the constructors of its composites, whose answers are kvtape's
(`allocator.sglang_composites`). They call methods and read fields of the sub-pools that are nobody else's business; those names are
answered here. A pool is asked for without a strategy, so the one that was chosen stands in a class attribute.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from typing import Any, ClassVar, cast

import torch

from allocator.band import Band
from allocator.composites.accounting import band_violations
from allocator.device_end import DeviceMultiEndedAllocator
from allocator.device_middle import DeviceFloatMultiEndedAllocator
from allocator.device_release import DeviceReleasingBand
from allocator.end import MultiEndedAllocator
from allocator.errors import ConfigurationError, PageAlignmentError
from allocator.lookup import DEFAULT_STRATEGY, DEVICE_STRATEGY
from allocator.middle import FloatMultiEndedAllocator

log = logging.getLogger("kvtape")

#: Where the ``device`` strategy knows whether a number has arrived.
DEVICES = ("cpu", "cuda")


class SglangMultiEndedAllocator(MultiEndedAllocator):
    """An END pool for SGLang. Takes the arguments of its class of the same purpose.

    Raises:
        ConfigurationError: decode context parallelism, or ``strategy="device"`` on a device that is neither a CPU nor CUDA.
    """

    #: Of pools that are asked for without one.
    chosen_strategy: ClassVar[str] = DEFAULT_STRATEGY
    #: SGLang's kernel that turns virtual into physical token ids in one launch, a static method; None: `PageTables.translate`.
    translate_token_ids: Callable[..., torch.Tensor] | None = None
    #: Pages that one launch of the kernel that moves them copies at most; None: any number.
    max_pages_per_move: ClassVar[int | None] = None

    def __new__(cls, **arguments: Any) -> SglangMultiEndedAllocator:
        made = super().__new__(cls, **{"strategy": cls.chosen_strategy, **arguments})
        return cast(SglangMultiEndedAllocator, made)

    def __init__(self, *, kvcache: Any, shards_under_dcp: bool = False, **arguments: Any) -> None:
        arguments.setdefault("strategy", self.chosen_strategy)
        name = arguments.get("sub_pool_name", "")
        if shards_under_dcp and _context_parallel_size() > 1:
            raise ConfigurationError(
                "decode context parallelism is not supported: start the server without KVTAPE_ALLOCATOR",
                pool=name,
            )
        device = torch.device(arguments["device"]).type
        if arguments["strategy"] == DEVICE_STRATEGY and device not in DEVICES:
            raise ConfigurationError(
                f"strategy {DEVICE_STRATEGY!r} is for {' and '.join(DEVICES)}, not {device}: choose another KVTAPE_ALLOCATOR",
                pool=name,
            )
        #: What a recording says that it recorded.
        self.implementation = f"kvtape {arguments['strategy']}"
        self._given_kvcache = kvcache
        super().__init__(kvcache=_moved_in_parts(kvcache, self.max_pages_per_move), **arguments)
        # Lists of static pools; None says that there are none.
        self.free_pages = self.release_pages = None
        self.shards_under_dcp = shards_under_dcp
        log.info(
            "kvtape: the sub-pool %r is allocated by kvtape, strategy %s: %s",
            self.sub_pool_name, self.strategy, self.allocator_state_str(),
        )  # fmt: skip

    @classmethod
    def _class_for(cls, strategy: str) -> type[MultiEndedAllocator]:
        return _ON_DEVICE.get(cls, cls) if strategy == DEVICE_STRATEGY else cls

    # -- what SGLang's other files call

    def get_kvcache(self) -> Any:
        return self._given_kvcache

    @property
    def size_full(self) -> int:
        return self.size

    def prewarm_compaction(self) -> None:
        """Move the padding page onto itself, so that the kernel which moves pages is loaded before the memory is full. SGLang's scheduler
        asks for it when the pools are made (``Scheduler.init_model_worker``)."""
        if torch.device(self.device).type != "cuda":
            return
        padding = torch.zeros(2, dtype=torch.int64, device=self.device)
        self._kvcache.move_physical_pages(padding, padding, self.page_size)
        torch.cuda.current_stream().synchronize()

    def translate_kv_loc(self, virt_tokens: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        return self._translate(virt_tokens, out, None)

    def translate_write_loc(
        self, widened_loc: torch.Tensor, *, out: torch.Tensor | None = None, out_width: int | None = None
    ) -> torch.Tensor:
        """Virtual to physical ids of tokens that are about to be written, as `translate_kv_loc`. With ``out_width`` the rows of ``out``
        behind them, up to that many, become 0."""
        return self._translate(widened_loc, out, out_width)

    def _translate(
        self, tokens: torch.Tensor, out: torch.Tensor | None, out_width: int | None
    ) -> torch.Tensor:
        if self.translate_token_ids is not None:
            return self.translate_token_ids(
                loc=tokens,
                v2p=self.virtual_to_physical,
                page_size=self.page_size,
                out=out,
                out_width=out_width,
            )
        return self._tables.translate(tokens, self.page_size, out, out_width)

    def _page_reps(self, free_index: torch.Tensor, start_pos: int) -> torch.Tensor:
        """One token of every page of a segment that starts at a page border."""
        if start_pos % self.page_size:
            raise PageAlignmentError(
                f"a segment starts at position {start_pos}, not at a border of {self.page_size}-token pages",
                pool=self.sub_pool_name,
            )
        return free_index[:: self.page_size]

    def _flush_targets(self) -> tuple[Band, ...]:
        neighbour = self._growth_side_neighbor()
        return () if neighbour is None else (neighbour,)

    def _ask_float_for_room(self, need_tokens: int) -> None:
        open_side_for = getattr(self._growth_side_neighbor(), "open_side_for", None)
        if open_side_for is not None:
            open_side_for({self: -(-need_tokens // self.page_size)})

    def _byte_accounting_violations(self) -> list[str]:
        """What does not add up, in words; empty if all does. SGLang asks when it is idle."""
        return band_violations(self)


class SglangFloatMultiEndedAllocator(FloatMultiEndedAllocator, SglangMultiEndedAllocator):
    """A float for SGLang."""

    @classmethod
    def _class_for(cls, strategy: str) -> type[MultiEndedAllocator]:
        return _ON_DEVICE.get(cls, cls) if strategy == DEVICE_STRATEGY else cls

    def _available_tokens(self, extra_gap_bytes: int = 0) -> int:
        return self.schedulable_available_size() if extra_gap_bytes else self.available_size()


class _ExactInSglang(DeviceReleasingBand):
    """Answers for whoever of SGLang's asks a sub-pool directly: its slot allocator, its cache components and its host tier.

    They add sizes up and compare them, and go on without window places that they are told are not there. So sizes are exact, and a lack of
    room is told on the spot: asked while a flush's numbers are on their way, it is waited for if bounds do not answer, which
    `blocking_reads` counts.
    """

    def available_size(self) -> int:
        self._settle_chain()
        return super().available_size()

    def schedulable_available_size(self) -> int:
        self._settle_chain()
        return super().schedulable_available_size()

    def alloc_with_virtual(self, virtual_pages: torch.Tensor) -> None:
        if not self._is_promised and virtual_pages.shape[0] * self.page_size > self._certain_size():
            self._settle_chain()
        super().alloc_with_virtual(virtual_pages)


class SglangDeviceMultiEndedAllocator(_ExactInSglang, SglangMultiEndedAllocator, DeviceMultiEndedAllocator):
    """An END pool for SGLang, strategy ``device``."""

    def prewarm_compaction(self) -> None:
        """What SGLang's pool does, and kvtape's own kernels."""
        DeviceMultiEndedAllocator.prewarm_compaction(self)
        super().prewarm_compaction()


class SglangDeviceFloatMultiEndedAllocator(
    _ExactInSglang, SglangFloatMultiEndedAllocator, DeviceFloatMultiEndedAllocator
):
    """A float for SGLang, strategy ``device``."""


_ON_DEVICE: dict[type[MultiEndedAllocator], type[MultiEndedAllocator]] = {
    SglangMultiEndedAllocator: SglangDeviceMultiEndedAllocator,
    SglangFloatMultiEndedAllocator: SglangDeviceFloatMultiEndedAllocator,
}


class _MovedInParts:
    """A pool's memory that moves at most so many pages in one launch: SGLANG_COMPACTION_MAX_PAGES_PER_MOVE."""

    def __init__(self, kvcache: Any, most: int) -> None:
        self._kvcache, self._most = kvcache, most
        zero_pages = getattr(kvcache, "zero_physical_pages", None)
        if zero_pages is not None:
            self.zero_physical_pages = zero_pages

    def move_physical_pages(self, dst_pages: torch.Tensor, src_pages: torch.Tensor, page_size: int) -> None:
        if dst_pages.shape[0] <= self._most:
            self._kvcache.move_physical_pages(dst_pages, src_pages, page_size)
            return
        for dst, src in zip(dst_pages.split(self._most), src_pages.split(self._most), strict=True):
            self._kvcache.move_physical_pages(dst, src, page_size)


def _moved_in_parts(kvcache: Any, most: int | None) -> Any:
    return kvcache if most is None else _MovedInParts(kvcache, most)


def _context_parallel_size() -> int:
    """Ranks among which SGLang shards the tokens of a sequence while decoding."""
    parallel = importlib.import_module("sglang.srt.runtime_context").get_parallel()
    return int(parallel.attn_dcp_size)
