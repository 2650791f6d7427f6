"""Frees of a composite: both sides, one of them, one by one and in groups. Which window page goes with a full page is settled when a free
is queued (sgl-project/sglang#36135, #36381, #36646)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from replayer.checks.joint import JointChecks
from replayer.content import IntArray
from replayer.drive import Driver
from replayer.errors import UsageError
from replayer.oracle import TraceContradiction, shown
from replayer.pool_state import PoolState

_NONE: IntArray = np.empty(0, dtype=np.int64)


@dataclass
class _Queued:
    """One free that waits: full pages, and the window pages (with their generations) that go with them."""

    full: IntArray
    window: IntArray
    generations: IntArray


class CompositeFrees(Driver):
    """The release half of `replayer.composite_drive.CompositeDriver`."""

    composite: Any
    full: PoolState
    swa: PoolState | None
    joint: JointChecks | None
    _queued: list[_Queued] | None = None

    # -- both sides

    def _joint_free(self, state: PoolState, index: int) -> None:
        tokens = self._must(0, index)
        own = self._live(np.unique(tokens // self.full.page_size))
        window = own if self.swa is None else own[self.swa.oracle.live[own]]
        self._free_together(
            "free", self._own_tokens(index, tokens), own, window if self.swa is not None else _NONE
        )

    def _joint_free_segment(self, state: PoolState, index: int) -> None:
        tokens, own = self._segment(index)
        if self.swa is not None and self.checks is not None:
            self._require_paired(own, "free_segment")
        window = own if self.swa is not None else _NONE
        self._free_together("free_segment", tokens, own, window, start_pos=self._value[index])

    # -- one side

    def _joint_free_full(self, state: PoolState, index: int) -> None:
        tokens = self._must(0, index)
        own = self._live(np.unique(tokens // self.full.page_size))
        self._require_no_window(own, "free_full")
        self._free_together("free_full", self._own_tokens(index, tokens), own, _NONE)

    def _joint_free_full_segment(self, state: PoolState, index: int) -> None:
        tokens, own = self._segment(index)
        self._require_no_window(own, "free_full_segment")
        self._free_together("free_full_segment", tokens, own, _NONE, start_pos=self._value[index])

    def _joint_free_swa(self, state: PoolState, index: int) -> None:
        swa, tokens = self._require_window("free_swa"), self._must(0, index)
        pages = np.unique(tokens // self.full.page_size)
        pages = pages[pages != 0]  # the padding page, which stands for no window page
        own = self.ids.pages(self.full, pages)
        swa.oracle.require_pages(own, "free_swa")
        self._free_window("free_swa", self._own_tokens(index, tokens), own[swa.oracle.live[own]])

    def _joint_free_swa_segment(self, state: PoolState, index: int) -> None:
        self._require_window("free_swa_segment")
        tokens, own = self._segment(index, full_side=False)
        if self.checks is not None:
            self._require_paired(own, "free_swa_segment")
        self._free_window("free_swa_segment", tokens, own, start_pos=self._value[index])

    def _free_window(self, name: str, tokens: torch.Tensor, window: IntArray, **arguments: Any) -> None:
        """The window side goes at once, in a group too."""
        assert self.swa is not None
        if len(window):
            self.swa.require_may_compact()
            self._order_eager()
        if self.checks is not None:
            self.checks.before_free(self.swa, window)
        self._call_free(name, getattr(self.composite, name), tokens, **arguments)
        self._freed_together(_NONE, window)

    def _free_together(
        self, name: str, tokens: torch.Tensor, own: IntArray, window: IntArray, **arguments: Any
    ) -> None:
        if self._queued is None:
            self._require_may_compact(own, window)
            self._order_eager()
        if self.checks is not None:
            self.checks.before_free(self.full, own)
            if self.swa is not None:
                self.checks.before_free(self.swa, window)
        method = getattr(self.composite, name, None)
        if method is None:
            raise TraceContradiction(f"a composite without a window has no {name}")
        self._call_free(name, method, tokens, **arguments)
        if self._queued is None:
            self._freed_together(own, window)
            return
        generations = _NONE if self.swa is None else self.swa.oracle.generation[window].copy()
        self._queued.append(_Queued(own, window, generations))
        if self.checks is None:
            self.hazards.log.clear()
            return
        self._judge_log()
        self.checks.queued(self.full, own)
        if self.swa is not None:
            self.checks.queued(self.swa, window)

    def _require_may_compact(self, own: IntArray, window: IntArray) -> None:
        if len(own):
            self.full.require_may_compact()
        if self.swa is not None and len(window):
            self.swa.require_may_compact()

    def _freed_together(self, own: IntArray, window: IntArray) -> None:
        if self.checks is None:
            self.hazards.log.clear()
            return
        sides = [(self.full, own)] if self.swa is None else [(self.swa, window), (self.full, own)]
        for state, pages in sides:
            if state.lazy or state.is_float:
                self.checks.freed(state, pages)
            else:  # several frees in one call, each of which moves pages, also pages that the next one frees
                state.releasing = np.zeros(state.oracle.num_virtual_ids, dtype=np.bool_)
                state.releasing[pages] = True
        self._judge_log()
        for state, pages in sides:
            if state.releasing is not None:
                state.releasing = None
                self.checks.freed(state, pages)
            self.checks.after_free(state, pages)

    # -- groups

    def _joint_free_group_begin(self, state: PoolState, index: int) -> None:
        if self._queued is not None:
            raise TraceContradiction("a free group of the composite is open already; free groups do not nest")
        self._queued = []
        self._call("free_group_begin", self.composite.free_group_begin)

    def _joint_free_group_end(self, state: PoolState, index: int) -> None:
        if self._queued is None:
            raise TraceContradiction("no free group of the composite is open")
        self._before_release()
        self._call("free_group_end", self.composite.free_group_end)
        self._released_group()
        self._queued = None

    def _joint_flush_deferred_full_frees(self, state: PoolState, index: int) -> None:
        method = getattr(self.composite, "flush_deferred_full_frees", None)
        if method is None:
            raise UsageError(
                f"event {self.seq} calls flush_deferred_full_frees, which {type(self.composite).__name__} lacks: replay with another "
                "--allocator, or --until this event"
            )
        self._before_release()
        self._call("flush_deferred_full_frees", method)
        self._released_group()

    def _before_release(self) -> None:
        """What is queued is about to be freed."""
        queued = self._queued or []
        window = np.concatenate([_NONE, *(entry.window for entry in queued)])[self._claimed(queued)]
        self._require_may_compact(np.concatenate([_NONE, *(entry.full for entry in queued)]), window)
        if queued:
            self._order_eager()

    def _released_group(self) -> None:
        """What was queued is free now; the window pages that changed hands since are not."""
        queued = self._queued or []
        full = np.concatenate([_NONE, *(entry.full for entry in queued)])
        window = np.concatenate([_NONE, *(entry.window for entry in queued)])
        claimed = self._claimed(queued)
        if self._queued is not None:
            self._queued = []
        self._freed_together(full, window[claimed])
        if self.joint is not None and self.swa is not None:
            left = window[~claimed]
            self.joint.kept_pairs(left[self.swa.oracle.live[left]])

    def _claimed(self, queued: list[_Queued]) -> Any:
        """Which of the queued window pages are still what they were when they were queued."""
        window = np.concatenate([_NONE, *(entry.window for entry in queued)])
        generations = np.concatenate([_NONE, *(entry.generations for entry in queued)])
        if self.swa is None:
            return np.ones(len(window), dtype=np.bool_)
        oracle = self.swa.oracle
        return oracle.live[window] & (oracle.generation[window] == generations)

    # -- pairs

    def _joint_set_full_to_swa_mapping(self, state: PoolState, index: int) -> None:
        swa = self._require_window("set_full_to_swa_mapping")
        tokens, slots, size = self._must(0, index), self._must(1, index), self.full.page_size
        if not self.ids.identity:
            raise UsageError(
                f"event {self.seq} pairs ids with physical pages of the engine's, which mean nothing to an allocator that places "
                "otherwise: replay with --ids recorded, or --until this event"
            )
        pages, places = tokens[::size] // size, slots[::size] // size
        offsets = np.arange(len(tokens)) % size
        if len(tokens) != len(slots) or (tokens % size != offsets).any() or (slots % size != offsets).any():
            raise TraceContradiction(
                "set_full_to_swa_mapping pairs whole pages with whole pages, from a page border on"
            )
        if len(places) and not 0 < places.min() <= places.max() < swa.num_pages:
            raise TraceContradiction(f"it names physical pages outside pool {swa.name!r}")
        again = _NONE
        if self.checks is not None:
            self.full.oracle.require_live(pages, "set_full_to_swa_mapping")
            queued = self._queued or []
            waiting = np.concatenate([_NONE, *(entry.window for entry in queued)])[self._claimed(queued)]
            again = pages[np.isin(pages, waiting)]
            paired = pages[swa.oracle.live[pages] & ~np.isin(pages, waiting)]
            if len(paired):
                raise TraceContradiction(f"C13: virtual page(s) {shown(paired)} have a window page already")
            free = ~swa.reserved[places]
            if free.any():
                raise TraceContradiction(
                    f"physical page(s) {shown(places[free])} of pool {swa.name!r} are not reserved"
                )
            self.checks.before_free(swa, again)
        left = swa.placed_physical[again]
        self._call(
            "set_full_to_swa_mapping", self.composite.set_full_to_swa_mapping,
            self._on_device(self._tensor(0, index)), self._on_device(self._tensor(1, index)),
        )  # fmt: skip
        if self.joint is None:
            return
        if len(again):
            self.joint.freed(swa, again)
            self.joint.released_by_pairing(again, left)
        self.joint.before_bind(swa, pages, places)
        self.joint.bound(swa, pages, places)
        self._judge_log()

    # -- what a trace may name

    def _require_window(self, what: str) -> PoolState:
        if self.swa is None:
            raise TraceContradiction(f"{what} is about window pages, and the composite has none")
        return self.swa

    def _live(self, recorded: IntArray) -> IntArray:
        """Full pages about to be freed, as this allocator numbers them."""
        own = self.ids.pages(self.full, recorded)
        self.full.oracle.require_pages(own, "free")
        if self.checks is not None:
            self.full.oracle.require_live(own, "free")
            self._require_not_queued(self.full, own)
        return own

    def _segment(self, index: int, *, full_side: bool = True) -> tuple[torch.Tensor, IntArray]:
        """Tokens, and full pages, of a segment that begins at a page border."""
        tokens, start, size = self._must(0, index), self._value[index], self.full.page_size
        if start % size or (len(tokens) and tokens[0] % size):
            raise TraceContradiction(f"a segment starts at position {start}, no border of {size}-token pages")
        recorded = tokens[::size] // size
        own = self._live(recorded) if full_side else self.ids.pages(self.full, recorded)
        return self._own_tokens(index, tokens), own

    def _own_tokens(self, index: int, tokens: IntArray) -> torch.Tensor:
        if self.ids.identity:
            return self._on_device(self._tensor(0, index))
        return self._on_device(torch.from_numpy(self.ids.tokens(self.full, tokens)))

    def _require_paired(self, own: IntArray, what: str) -> None:
        assert self.swa is not None
        self.swa.oracle.require_live(own, what)

    def _require_no_window(self, own: IntArray, what: str) -> None:
        if self.swa is None or self.checks is None:
            return
        paired = own[self.swa.oracle.live[own]]
        if len(paired):
            raise TraceContradiction(
                f"C13: {what} names virtual page(s) {shown(paired)}, whose window pages would be left without an owner"
            )

    def _require_not_queued(self, state: PoolState, pages: IntArray) -> None:
        queued = self._queued or []
        if state is self.swa:
            held = np.concatenate([_NONE, *(entry.window for entry in queued)])[self._claimed(queued)]
        else:
            held = np.concatenate([_NONE, *(entry.full for entry in queued)]) if state is self.full else _NONE
        hit = pages[np.isin(pages, held)]
        if len(hit):
            raise TraceContradiction(
                f"C13: free names virtual page(s) {shown(hit)} of pool {state.name!r}, which the composite's free group holds already"
            )

    # -- calls on one member

    def _freeing(self, state: PoolState, recorded_pages: IntArray) -> IntArray:
        if self.checks is not None:
            own = self.ids.pages(state, recorded_pages)
            state.oracle.require_pages(own, "free")
            self._require_not_queued(state, own)
            if state is self.full:
                self._require_no_window(own, "free of the full side alone")
        return super()._freeing(state, recorded_pages)

    def _release_physical(self, state: PoolState, index: int, method: str) -> None:
        if self.checks is not None and state is self.swa:
            places = self._must(0, index)[:: state.page_size] // state.page_size
            virtual = state.placed_virtual[places[(places > 0) & (places < state.num_pages)]]
            self._require_not_queued(state, virtual[virtual >= 0])
        super()._release_physical(state, index, method)

    def _free_group_begin(self, state: PoolState, index: int) -> None:
        if not state.is_state:
            raise TraceContradiction("frees of tokens are grouped by the composite, not by its members")
        super()._free_group_begin(state, index)

    def _clear(self, state: PoolState, index: int) -> None:
        raise TraceContradiction("the pools of a composite are cleared together")
