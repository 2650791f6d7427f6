"""Moving, zeroing and addressing the KV bytes of one sub-pool.

This is the object an allocator gets as ``kvcache``. The allocator itself only calls ``move_physical_pages`` and, where it exists,
``zero_physical_pages``, so anything with these two methods can stand here (a stamp store, a counter, SGLang's own pools).
"""

from __future__ import annotations

from typing import Protocol

import torch

from allocator.errors import ConfigurationError
from allocator.pool import UnifiedKVPool

#: A move gathers its sources into a temporary; this bounds it. An urgent flush of a 57 GiB pool would otherwise need gigabytes.
MAX_MOVE_BYTES = 256 * 2**20


class KVCache(Protocol):
    """What an allocator needs of the thing that holds the bytes. Page ids are int64 tensors ``[n]`` of physical pages."""

    def move_physical_pages(
        self, dst_pages: torch.Tensor, src_pages: torch.Tensor, page_size: int
    ) -> None: ...


class UnifiedPagePool:
    """KV bytes of one sub-pool as whole pages of the shared buffer."""

    def __init__(
        self, *, unified_buffer: UnifiedKVPool, sub_pool_name: str, page_size: int | None = None
    ) -> None:
        self.unified_buffer = unified_buffer
        self.sub_pool_name = sub_pool_name
        self.spec = unified_buffer.spec(sub_pool_name)
        self.page_size = unified_buffer.page_size_of(sub_pool_name)
        if page_size is not None and page_size != self.page_size:
            raise ConfigurationError(
                f"page_size {page_size}, but the buffer has pages of {self.page_size}", pool=sub_pool_name
            )
        self._pages = unified_buffer.pages(sub_pool_name)

    @property
    def raw_pages(self) -> torch.Tensor:
        """The bytes, for whoever moves pages by a kernel: uint8 ``[num_pages, page_bytes]``, contiguous, a view of the shared buffer."""
        return self._pages

    def move_physical_pages(self, dst_pages: torch.Tensor, src_pages: torch.Tensor, page_size: int) -> None:
        """Copy whole pages ``src_pages[i] -> dst_pages[i]`` (int64 ``[n]``, disjoint sets of physical page ids)."""
        if page_size != self.page_size:
            raise ConfigurationError(
                f"ids of {page_size}-slot pages, but a page holds {self.page_size}", pool=self.sub_pool_name
            )
        step = max(1, MAX_MOVE_BYTES // self._pages.shape[1])
        for start in range(0, src_pages.shape[0], step):
            stop = start + step
            self._pages.index_copy_(
                0, dst_pages[start:stop], self._pages.index_select(0, src_pages[start:stop])
            )

    def layer_views(self) -> dict[str, list[torch.Tensor]]:
        """Row views by part name and layer (``k``/``v``, ``kv``, ``conv0``.../``temporal``), indexed by physical slot id."""
        return {
            part.name: self.unified_buffer.layer_views(self.sub_pool_name, part) for part in self.spec.parts()
        }


class UnifiedTokenPool(UnifiedPagePool):
    """KV rows of tokens. Pages are zeroed when they are handed out: kernels that load whole pages give rows past the sequence
    a zero weight, and 0 x NaN is NaN, which a neighbour's fp32 state read as bf16 may well be (sgl-project/sglang#33974)."""

    def zero_physical_pages(self, pages: torch.Tensor) -> None:
        """Zero whole pages (int64 ``[n]`` of physical page ids)."""
        self._pages.index_fill_(0, pages, 0)


class UnifiedMHATokenToKVPool(UnifiedTokenPool):
    """Per-layer ``k_buffer[l]`` and ``v_buffer[l]``: ``[num_slots, head_num, head_dim]``, indexed by physical token id."""

    def __init__(
        self, *, unified_buffer: UnifiedKVPool, sub_pool_name: str, page_size: int | None = None
    ) -> None:
        super().__init__(unified_buffer=unified_buffer, sub_pool_name=sub_pool_name, page_size=page_size)
        views = self.layer_views()
        self.k_buffer, self.v_buffer = views["k"], views["v"]


class UnifiedMLATokenToKVPool(UnifiedTokenPool):
    """Per-layer ``kv_buffer[l]``: ``[num_slots, 1, kv_lora_rank + qk_rope_head_dim]``, indexed by physical token id."""

    def __init__(
        self, *, unified_buffer: UnifiedKVPool, sub_pool_name: str, page_size: int | None = None
    ) -> None:
        super().__init__(unified_buffer=unified_buffer, sub_pool_name=sub_pool_name, page_size=page_size)
        self.kv_buffer = self.layer_views()["kv"]


class UnifiedMambaPool(UnifiedPagePool):
    """Recurrent states: per layer ``conv_state[i][l]`` and ``temporal_state[l]``, indexed by physical slot id. Never zeroed here:
    a state is written whole before it is read."""

    def __init__(
        self, *, unified_buffer: UnifiedKVPool, sub_pool_name: str, page_size: int | None = None
    ) -> None:
        super().__init__(unified_buffer=unified_buffer, sub_pool_name=sub_pool_name, page_size=page_size)
        views = self.layer_views()
        self.temporal_state = views.pop("temporal")
        self.conv_state = list(views.values())


def kv_store_for(unified_buffer: UnifiedKVPool, sub_pool_name: str) -> UnifiedPagePool:
    """The store that fits the sub-pool's spec."""
    spec = unified_buffer.spec(sub_pool_name)
    by_kind: dict[str, type[UnifiedPagePool]] = {
        "mha": UnifiedMHATokenToKVPool,
        "mla": UnifiedMLATokenToKVPool,
        "mamba": UnifiedMambaPool,
        "opaque": UnifiedPagePool if spec.is_state else UnifiedTokenPool,
    }
    return by_kind[spec.kind](unified_buffer=unified_buffer, sub_pool_name=sub_pool_name)
