"""The device work of a flush whose numbers come later: plan (an urgent one, or one that is not), and move. `TorchFlush` does it in torch
operations, anywhere, and is the reference; `allocator.kernels.flush.TritonFlush` does the same in Triton kernels, on CUDA. Nothing here
asks the device anything, and how much is launched depends only on lengths that the host knows.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from typing import Any

import torch

from allocator.device_plan import count_moves, first_blocked, live_places, unfilled_and_vacated, window_pages
from allocator.error_log import ErrorLog, Fault
from allocator.errors import ConfigurationError
from allocator.tables import PageTables
from allocator.unsettled import FAR

#: ``torch`` or ``triton``: who does the device work, in place of what `flush_ops_class` would choose.
FLUSH_OPS_ENV = "KVTAPE_FLUSH_OPS"


@dataclass(frozen=True)
class Window:
    """The pages next to the watermark that an urgent flush vacates. Place ``x`` of it is page ``mark - 1 - x`` of a pool that grows up,
    ``mark + 1 + x`` of one that grows down.

    Attributes:
        mark: the page past place 0; int64 ``[]`` where only the device knows it.
        size: places that are looked at, at least one.
        extent: places that are in the window, int64 ``[]`` on the device and at most ``size``; None for all of them.
        low, high: where the pool's pages begin and end.
    """

    mark: int | torch.Tensor
    size: int
    extent: torch.Tensor | None
    grows_up: bool
    low: int
    high: int


@dataclass(frozen=True)
class PackPlan:
    """``src_pages[i]`` moves to ``dst_pages[i]`` (int64 ``[rows]`` each) for the first ``moves`` (int64 ``[]``); what the other rows hold
    does not matter. As many holes must lie beyond the window as it has live pages: ``is_wrong`` (bool ``[1]``) if not, or, where that has
    been written down already, ``log`` and ``ok`` as `ErrorLog.adopt` takes them."""

    src_pages: torch.Tensor
    dst_pages: torch.Tensor
    moves: torch.Tensor
    is_wrong: torch.Tensor | None = None
    log: torch.Tensor | None = None
    ok: torch.Tensor | None = None


@dataclass(frozen=True)
class Holes:
    """The holes of a flush that is not urgent.

    Attributes:
        ascending: int64 ``[n]``, not empty: the holes, then rows that hold anything larger.
        count: how many holes there are, int64 ``[]`` on the device.
    """

    ascending: torch.Tensor
    count: torch.Tensor


@dataclass(frozen=True)
class PartPlan:
    """What a flush that is not urgent does, and the state after it. In a frozen pool, where nothing moves, it does not matter.

    Attributes:
        src_pages, dst_pages: int64 ``[rows]`` each; what is past the first ``moves`` does not matter.
        moves, touching: pages that move, and holes given back because they touch the watermark; int64 ``[]``.
        holes: int64, as long as the list was: the holes that are left, ascending, the pages that the moves vacate, and anything.
        unfilled, free: how many of ``holes`` are holes without the vacated pages, and with them; int64 ``[]``.
        mark: the watermark, int64 ``[]``.
    """

    src_pages: torch.Tensor
    dst_pages: torch.Tensor
    moves: torch.Tensor
    touching: torch.Tensor
    holes: torch.Tensor
    unfilled: torch.Tensor
    free: torch.Tensor
    mark: torch.Tensor


class TorchFlush:
    """Plan and move for one pool, in torch operations.

    Args:
        tables: the pool's tables; they are read and written.
        kvcache: moves whole physical pages, see `allocator.kv_store.KVCache`.
        errors: where contradictions go, and what freezes the pool.
        page_size: slots in a page.
        numbers: int64 0, 1, 2, ..., at least one more than there are pages.
    """

    def __init__(
        self, *, tables: PageTables, kvcache: Any, errors: ErrorLog, page_size: int, numbers: torch.Tensor
    ) -> None:
        self._tables, self._kvcache, self._errors = tables, kvcache, errors
        self._page_size, self._numbers = page_size, numbers

    def plan(self, window: Window, ascending: torch.Tensor, rows: int) -> PackPlan:
        """Match the window's live pages, nearest the watermark first, with the holes, farthest from it first.

        Args:
            ascending: int64 ``[n]`` of holes; what is none is `FAR` behind them in a pool that grows up, -1 before them otherwise.
            rows: how many moves there can be, at most ``n`` and ``window.size``.
        """
        inverse, grows_up = self._tables.physical_to_virtual, window.grows_up
        farthest = ascending[:rows] if grows_up else ascending.flip(0)[:rows]
        if isinstance(window.mark, int):
            low = window.mark - window.size if grows_up else window.mark + 1
            high = low + window.size
            owners = inverse[low:high]
            sources = live_places(owners.flip(0) if grows_up else owners)
            is_beyond = ascending < low if grows_up else ascending >= high
            at = sources.places(self._numbers[1 : rows + 1])
            src_pages = (high - 1) - at if grows_up else at + low
        else:
            place, mark = self._numbers[: window.size], window.mark
            extent = window.size if window.extent is None else window.extent
            pages = window_pages(place, mark, grows_up=grows_up, low=window.low, high=window.high)
            sources = live_places(torch.where(place < extent, torch.take(inverse, pages), -1))
            is_hole = (ascending < FAR) & (ascending >= 0)
            place_of_hole = (mark - 1) - ascending if grows_up else ascending - (mark + 1)
            is_beyond = is_hole & (place_of_hole >= extent)
            src_pages = pages[sources.places(self._numbers[1 : rows + 1]).clamp(max=window.size - 1)]
        is_wrong = self._is_contradiction(is_beyond, sources.count)
        return PackPlan(src_pages, farthest, sources.count, is_wrong=is_wrong)

    def plan_in_part(
        self,
        window: Window,
        holes: Holes,
        rows: int,
        written: torch.Tensor | None = None,
        is_void: torch.Tensor | None = None,
    ) -> PartPlan:
        """Give back the holes that touch the watermark, and match the window's live pages, nearest it first, with the holes, farthest from
        it first, until they meet.

        Args:
            window: with ``mark`` on the device, and without ``extent``.
            rows: how many moves there can be, at most as many as rows of holes.
            written: virtual token ids that the running forward has yet to write: the first of their pages and those behind it stay.
            is_void: bool ``[]``, whether there are no such ids after all; None if there are.
        """
        mark, grows_up, numbers = window.mark, window.grows_up, self._numbers
        assert isinstance(mark, torch.Tensor) and window.extent is None
        ascending, count, capacity = holes.ascending, holes.count, holes.ascending.shape[0]

        def place_of(pages: torch.Tensor) -> torch.Tensor:
            return (mark - 1) - pages if grows_up else pages - (mark + 1)

        row = numbers[:capacity]
        is_hole = row < count
        descending = ascending[(count - 1 - row).clamp(0, capacity - 1)]
        nearest = descending if grows_up else ascending
        farthest = (ascending if grows_up else descending)[:rows]
        touching = torch.count_nonzero(is_hole & (place_of(nearest) == row))
        moves, src_pages = torch.zeros_like(count), numbers[:0]
        if rows:
            pages = window_pages(
                numbers[: window.size], mark, grows_up=grows_up, low=window.low, high=window.high
            )
            owners = torch.take(self._tables.physical_to_virtual, pages)
            at = live_places(owners).places(numbers[1 : rows + 1])
            targets = torch.where(is_hole[:rows], place_of(farthest), -1)
            moves = count_moves(at, targets, self._blocked_from(written, is_void, mark, window))
            src_pages = pages[at.clamp(max=window.size - 1)]
        left = unfilled_and_vacated(
            ascending, count, src_pages, numbers, touching=touching, moves=moves, grows_up=grows_up
        )
        free = count - touching
        after = mark - touching if grows_up else mark + touching
        return PartPlan(src_pages, farthest, moves, touching, left, free - moves, free, after)

    def _blocked_from(
        self, written: torch.Tensor | None, is_void: torch.Tensor | None, mark: torch.Tensor, window: Window
    ) -> torch.Tensor | int:
        """The first place of the window that the running forward will write, else the window's size."""
        if written is None:
            return window.size
        pages = written.to(torch.int64)
        if self._page_size > 1:
            pages = torch.div(pages, self._page_size, rounding_mode="floor")
        blocked = first_blocked(self._tables.physical_of(pages), mark, window.grows_up, window.size)
        return blocked if is_void is None else torch.where(is_void, window.size, blocked)

    def note(self, plan: PackPlan) -> None:
        """Write down a contradiction that planning found; it freezes the pool before anything moves."""
        if plan.is_wrong is not None:
            self._note(plan.is_wrong)
        else:
            assert plan.log is not None and plan.ok is not None
            self._errors.adopt(plan.log, plan.ok)

    def note_contradiction(self, is_beyond: torch.Tensor, live: torch.Tensor) -> None:
        """As many holes (``is_beyond``: bool, one for each) must lie beyond a window that is vacated as ``live`` pages inside."""
        self._note(self._is_contradiction(is_beyond, live))

    @staticmethod
    def _is_contradiction(is_beyond: torch.Tensor, live: torch.Tensor) -> torch.Tensor:
        return (torch.count_nonzero(is_beyond) != live).reshape(1)

    def _note(self, is_wrong: torch.Tensor) -> None:
        nothing = torch.full((1,), -1, dtype=torch.int64, device=is_wrong.device)
        self._errors.note(Fault.CONTRADICTION, is_wrong, nothing, nothing)

    def move(self, moves: torch.Tensor, src_pages: torch.Tensor, dst_pages: torch.Tensor) -> torch.Tensor:
        """Move the first ``moves`` (int64 ``[]``) of the pairs (int64 ``[rows]``, no page in both), bytes and tables, and return the
        sources, 0 in rows that did not move. Once a fault has frozen the pool, none does."""
        src_pages, dst_pages = self._first(moves, src_pages, dst_pages)
        inverse = self._tables.physical_to_virtual
        virtual_pages = inverse.index_select(0, src_pages)
        self._kvcache.move_physical_pages(dst_pages, src_pages, self._page_size)
        self._tables.bind(virtual_pages, dst_pages)
        # The padding page stays mapped; the row past the table, which padding rows clear instead, is -1 already.
        inverse.index_fill_(0, torch.where(src_pages > 0, src_pages, self._tables.num_pages), -1)
        return src_pages

    #: Sizes of windows of which each is launched otherwise.
    window_sizes: tuple[int, ...] = (1,)

    def prewarm(self, *, grows_up: bool, low: int, high: int) -> None:
        """Launch once whatever a flush may launch, for kernels are compiled and loaded at their first launch. Nothing moves and nothing is
        written down.

        Args:
            low, high: where the pool's pages begin and end.
        """
        device = self._tables.physical_to_virtual.device

        def number(value: int) -> torch.Tensor:
            return torch.full((), value, dtype=torch.int64, device=device)

        for size in sorted({min(size, high - low) for size in self.window_sizes}):
            mark = low + size if grows_up else high - 1 - size
            holes = torch.full((size,), FAR if grows_up else -1, dtype=torch.int64, device=device)
            for window in (
                Window(mark, size, None, grows_up, low, high),
                Window(number(mark), size, number(0), grows_up, low, high),
            ):
                plan = self.plan(window, holes, size)
                self.move(number(0), plan.src_pages, plan.dst_pages)
            no_holes = Holes(torch.full_like(holes, FAR), number(0))
            self.plan_in_part(Window(number(mark), size, None, grows_up, low, high), no_holes, size)

    def _first(
        self, moves: torch.Tensor, src_pages: torch.Tensor, dst_pages: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Pairs past the first ``moves`` become the padding page onto itself, which leaves bytes and tables as they are."""
        is_move = (self._numbers[: src_pages.shape[0]] < moves) & self._errors.ok
        return torch.where(is_move, src_pages, 0), torch.where(is_move, dst_pages, 0)


def flush_ops_class(device: str | torch.device) -> type[TorchFlush]:
    """Who does the device work of a pool on ``device``: the kernels on CUDA if triton is installed, else torch operations.

    Raises:
        ConfigurationError: the environment variable `FLUSH_OPS_ENV` asks for something else, or for kernels without triton.
    """
    asked = os.environ.get(FLUSH_OPS_ENV, "")
    if asked not in ("", "torch", "triton"):
        raise ConfigurationError(f"{FLUSH_OPS_ENV} is {asked!r}; known: torch, triton")
    has_triton = importlib.util.find_spec("triton") is not None
    if asked == "triton" and not has_triton:
        raise ConfigurationError(f"{FLUSH_OPS_ENV} asks for triton, which is not installed")
    if asked == "triton" or (not asked and has_triton and torch.device(device).type == "cuda"):
        from allocator.kernels.flush import TritonFlush

        return TritonFlush
    return TorchFlush
