"""One pool of a replay: the allocator under test, the bytes, the oracle, and the placement seen last."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from recorder.trace import PoolHeader
from replayer.content import IntArray, KVStore, Mask
from replayer.oracle import PageRecords, PoolOracle, TraceContradiction
from replayer.tokens import Tokens

if TYPE_CHECKING:
    from replayer.hazards import ReplayEvent


class Extent(NamedTuple):
    """What a pool says about its band: pages ``[low, high)``, how many of them are holes or wait, whether pages may be moved, and the pages
    that it could number."""

    low: int
    high: int
    holes: int
    pending: int
    blocked: bool
    num_pages: int


class Latest(NamedTuple):
    """Tokens that came to life last, their places (physical token ids, int64 ``[n]``), and when that was: they live while
    `PoolOracle.endings` is the same, and lie there while `PoolState.changes` is."""

    tokens: Tokens
    places: IntArray
    endings: int
    changes: int


class PoolState:
    """Everything about one pool, by name.

    ``placed_virtual`` (by physical page) and ``placed_physical`` (by virtual page) are the placement as last verified from calls and
    moves; they are compared with the allocator's tables, row by row where something changed and whole in sweeps.
    ``held_by``: number of the forward that may still read a place, by physical page. ``leased``: leases on a place. ``arrived``: what
    a load or a transfer has brought to reserved places, for the pages that will be bound to them.
    """

    def __init__(self, number: int, header: PoolHeader, allocator: Any, store: KVStore) -> None:
        self.number, self.name, self.header = number, header.name, header
        self.allocator, self.store = allocator, store
        self.page_size: int = allocator.page_size
        self.page_bytes: int = header.entry_bytes * self.page_size
        self.is_float = header.grow_direction == "float"
        self.is_state = header.kind == "mamba"
        self.lazy: bool = allocator.lazy_compaction
        self.move_cap = int(allocator._lazy_max_moves_per_call)
        self.store_device = str(allocator.device)
        self.oracle = PoolOracle(number, header.name, allocator.num_virtual_ids, self.page_size)
        self._views: dict[str, tuple[torch.Tensor, IntArray]] = {}
        self.clear()

    def clear(self) -> None:
        self.num_pages: int = self.allocator.num_pages
        self.min_page_index: int = self.allocator.min_page_index
        self.placed_virtual = np.full(self.num_pages + 1, -1, dtype=np.int64)
        self.placed_physical = np.full(self.oracle.num_virtual_ids + 1, -1, dtype=np.int64)
        self.placed_virtual[0] = self.placed_physical[0] = 0
        self.held_by = np.full(self.num_pages + 1, -1, dtype=np.int64)
        self._marks = np.zeros(self.num_pages + 1, dtype=np.bool_)
        self.leased = np.zeros(self.num_pages + 1, dtype=np.int64)
        self.reserved = np.zeros(self.num_pages + 1, dtype=np.bool_)
        self.reserved_count = 0
        self.last_forward = -1
        #: Pages of ``alloc_physical`` since a load was queued last, less those cancelled: nothing moves until there are none.
        self.awaiting_load = 0
        self.arrived: dict[int, PageRecords] = {}
        #: Pages moved away while a forward had not finished: its event, and how many. See `replayer.checks.held_back`.
        self.held_back: dict[ReplayEvent, int] = {}
        #: Counts what calls have changed about pages; after which of these, and which forwards, a flush was looked at last.
        self.changes = 0
        #: ``available_size()`` as it was compared last, in tokens; None where it is not compared.
        self.known_available: int | None = None
        self.flush_seen: tuple[int, int] | None = None
        #: The next forward writes these as a rule.
        self.latest: Latest | None = None
        #: The band when it was looked at last.
        self.last_band: tuple[int, int] | None = None
        #: By virtual page: what the running call frees, where it compacts between one free and the next.
        self.releasing: Mask | None = None

    def arrive(self, places: IntArray, records: PageRecords) -> None:
        """Contents came to reserved places that have no page yet."""
        for row, place in enumerate(places.tolist()):
            self.arrived[place] = records.kept(np.array([row]))

    def require_may_compact(self, waiting: int = 0) -> None:
        """An eager pool moves pages at every free; while more than ``waiting`` reserved places wait for their load it must not.

        Raises:
            TraceContradiction: a free now.
        """
        if not self.lazy and not self.is_float and self.awaiting_load > waiting:
            raise TraceContradiction(
                f"pool {self.name!r} compacts at every free, and {self.awaiting_load} reserved page(s) that wait for a load must not move"
            )

    # -- tables, on the host

    def table(self, name: str) -> IntArray:
        """One of the allocator's tables, whole; a view on a CPU."""
        table: torch.Tensor = getattr(self.allocator, name)
        return self._view(name, table) if table.device.type == "cpu" else table.cpu().numpy()

    def _view(self, name: str, table: torch.Tensor) -> IntArray:
        """A table in host memory; its view is made again only when the allocator has another tensor for it."""
        seen = self._views.get(name)
        if seen is not None and seen[0] is table:
            return seen[1]
        view: IntArray = table.detach().numpy()
        self._views[name] = table, view
        return view

    def rows(self, name: str, pages: IntArray) -> IntArray:
        """Some rows of a table, reading no more than those."""
        table: torch.Tensor = getattr(self.allocator, name)
        if table.device.type == "cpu":
            return self._view(name, table)[pages]
        return table[torch.from_numpy(pages).to(table.device)].cpu().numpy()

    def taken(self, places: IntArray) -> Mask:
        """Which physical pages hold a live page, or are reserved for one."""
        taken: Mask = self.placed_virtual[places] >= 0
        if self.reserved_count:
            taken |= self.reserved[places]
        return taken

    def count_common(self, places: IntArray, others: IntArray) -> int:
        """How many of ``places`` (physical pages, each once) are among ``others`` (any order, repeats allowed)."""
        self._marks[others] = True
        common = int(np.count_nonzero(self._marks[places]))
        self._marks[others] = False
        return common

    def physical_tokens(self, tokens: IntArray) -> IntArray:
        """Where virtual tokens are, by the placement seen last."""
        pages, offsets = np.divmod(tokens, self.page_size)
        placed: IntArray = self.placed_physical[pages] * self.page_size + offsets
        return placed

    def places_of(self, tokens: Tokens) -> IntArray:
        """Where tokens are, by the placement seen last: physical token ids, int64 ``[n]``."""
        latest = self.latest
        if latest is not None and latest.tokens is tokens and latest.changes == self.changes:
            return latest.places
        places: IntArray = self.placed_physical[tokens.pages] * self.page_size + tokens.offsets
        return places

    # -- sizes the allocator reports about itself

    def holes(self) -> int:
        count: int = self.allocator._free_phys_pages.shape[0]
        return count

    def pending(self) -> int:
        return len(self.allocator._pending_reuse_pages_cpu)

    def band(self) -> tuple[int, int]:
        """Physical pages ``[low, high)`` from the allocator's watermarks."""
        if self.is_float:
            return self.allocator.low_wm_page, self.allocator.high_wm_page
        if self.allocator.grow_direction == "up":
            return self.min_page_index, self.allocator.watermark_physical
        return self.allocator.watermark_physical + 1, self.num_pages

    def extent(self) -> Extent:
        low, high = self.band()
        allocator = self.allocator
        return Extent(low, high, self.holes(), self.pending(), allocator.moves_blocked(), allocator.num_pages)

    def live_count(self) -> int:
        """Pages that hold something, by the calls alone."""
        return self.oracle.live_count + self.reserved_count
