"""Keys and values of a hybrid model: two token pools that share one buffer from its two ends, each with virtual ids of its own.

``full`` holds the layers that see everything and grows down, ``window`` those with sliding-window attention and grows up. When one of them
is short of room, the other one is flushed urgently: its pages move between two tokens of requests that are running.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from allocator import MHASubPoolSpec, MultiEndedAllocator, UnifiedKVPool, UnifiedMHATokenToKVPool
from replayer.parity.flushes import FlushLog
from replayer.parity.language_model import ModelShape

FULL, WINDOW = "full", "window"


@dataclass(frozen=True)
class Layout:
    """How a model's layers are given to the pools: layers whose number divided by three leaves 2 see everything, as in
    SGLang's and Gemma's patterns; all others the last ``window`` tokens, or everything as well if it is None."""

    page_size: int
    window: int | None

    def pool_of(self, layer: int) -> str:
        return FULL if layer % 3 == 2 else WINDOW


@dataclass(frozen=True)
class Allocation:
    """How pools are made: of ``tokens`` tokens' bytes, all layers; compacting lazily, by a strategy, or at once."""

    tokens: int
    strategy: str = "batched"
    lazy: bool = True
    store_class: Callable[..., UnifiedMHATokenToKVPool] = UnifiedMHATokenToKVPool


@dataclass(frozen=True)
class PoolView:
    """One pool: its allocator, its bytes, and how far back its layers look (None: to the beginning)."""

    name: str
    window: int | None
    allocator: MultiEndedAllocator
    store: UnifiedMHATokenToKVPool

    def first_position_read(self, query: int) -> int:
        """The first position that a token at position ``query`` sees."""
        return 0 if self.window is None else max(0, query - self.window + 1)


class KVPools:
    """Both pools, and the calls that go to both of them."""

    def __init__(self, shape: ModelShape, layout: Layout, allocation: Allocation, log: FlushLog) -> None:
        self.page_size, self.device = layout.page_size, shape.device
        layers = {
            name: [layer for layer in range(shape.layers) if layout.pool_of(layer) == name]
            for name in (WINDOW, FULL)
        }
        specs = [
            MHASubPoolSpec(
                name=name,
                layer_num=len(layers[name]),
                grow_direction=direction,
                head_num=shape.kv_heads,
                head_dim=shape.head_dim,
                store_dtype=shape.dtype,
            )
            for name, direction in ((WINDOW, "up"), (FULL, "down"))
        ]
        buffer = UnifiedKVPool(
            total_bytes=allocation.tokens * sum(spec.entry_bytes() for spec in specs),
            sub_pool_specs=specs,
            device=shape.device,
            page_size=layout.page_size,
        )
        self.total_bytes = buffer.total_bytes
        by_name: dict[str, PoolView] = {}
        for spec in specs:
            store = allocation.store_class(unified_buffer=buffer, sub_pool_name=spec.name)
            made = MultiEndedAllocator(
                kvcache=store,
                unified_buffer=buffer,
                sub_pool_name=spec.name,
                device=shape.device,
                is_id_owner=True,
                page_size=layout.page_size,
                lazy_compaction=allocation.lazy,
                strategy=allocation.strategy,
            )
            window = layout.window if spec.name == WINDOW else None
            by_name[spec.name] = PoolView(spec.name, window, made, store)
        self.full, self.window = by_name[FULL], by_name[WINDOW]
        self.views = (self.full, self.window)
        self.window.allocator.bind_high_peer(self.full.allocator)
        self.full.allocator.bind_low_peer(self.window.allocator)
        for view in self.views:
            log.watch(view.allocator)
        self._places = {
            layer: (by_name[name], index) for name in layers for index, layer in enumerate(layers[name])
        }

    def layer(self, layer: int) -> tuple[PoolView, int]:
        """The pool that holds a layer of the model, and the layer's number in it."""
        return self._places[layer]

    def grow(
        self, begins: list[int], ends: list[int], last: dict[str, list[int]]
    ) -> dict[str, list[int]] | str:
        """Room for requests that grow from ``begins`` to ``ends`` tokens, in both pools or in neither.

        Args:
            begins, ends: tokens, one a request.
            last: by pool, the virtual id of each request's last token so far, -1 if there is none.

        Returns:
            By pool the new virtual token ids, request after request; the name of the pool that is short, if one is.
        """
        prefix, lens = torch.tensor(begins), torch.tensor(ends)
        ids: dict[str, list[int]] = {}
        decode = all(end == begin + 1 and begin > 0 for begin, end in zip(begins, ends, strict=True))
        for view in self.views:
            last_loc = torch.tensor(last[view.name], device=self.device)
            seq_lens = lens.to(self.device)
            if decode:
                found = view.allocator.alloc_decode(seq_lens, lens, last_loc)
            else:
                found = view.allocator.alloc_extend(
                    prefix.to(self.device), prefix, seq_lens, lens, last_loc, sum(ends) - sum(begins)
                )
            if found is None:
                for name, got in ids.items():
                    self.free(name, [token // self.page_size for token in got if token % self.page_size == 0])
                return view.name
            ids[view.name] = found.tolist()
        return ids

    def free(self, name: str, pages: list[int]) -> None:
        """Give virtual pages back."""
        if pages:
            view = self.full if name == FULL else self.window
            tokens = torch.tensor(pages, device=self.device) * self.page_size
            view.allocator.free(tokens)

    def forward_launched(self, done: Any, written: dict[str, torch.Tensor]) -> None:
        """A forward is on its way that writes these virtual token ids (int64 ``[tokens]``, by pool)."""
        for view in self.views:
            view.allocator.set_inflight_forward(done, written[view.name])
            view.allocator.set_latest_forward_done_event(done)

    def flush_opportunistic(self) -> None:
        """Pack what can be packed without waiting for the forward."""
        for view in self.views:
            view.allocator.flush_opportunistic()

    def live_tokens(self) -> int:
        """Tokens' room that is taken, of both pools, for tests that look for leaks."""
        return sum(view.allocator.allocated_count() for view in self.views)
