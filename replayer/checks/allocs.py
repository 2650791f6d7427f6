"""What is checked around calls that hand pages out: promises, answers, and the places of new pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from replayer.checks.answers import Answers
from replayer.checks.contents import write_new_pages, write_new_tokens
from replayer.checks.flushes import FlushChecks
from replayer.checks.mapping import check_places
from replayer.checks.partition import check_frontiers, check_inside
from replayer.checks.room import check_refused
from replayer.content import IntArray, same_ids
from replayer.failure import CheckFailure
from replayer.hazards import Hazards
from replayer.oracle import Growth, shown
from replayer.pool_state import PoolState

if TYPE_CHECKING:
    import torch


class AllocChecks(FlushChecks):
    """The part of `replayer.checks.Checks` about these calls."""

    def __init__(self, hazards: Hazards) -> None:
        super().__init__(hazards)
        self._answers = Answers()

    def before_alloc(self, state: PoolState) -> None:
        # What an END pool says it could have after a flush of its neighbour, an alloc must get by that flush. A float asks one side only.
        promise = "available_size" if state.is_float else "schedulable_available_size"
        self._promised = getattr(state.allocator, promise)()

    def alloc_answered(
        self,
        state: PoolState,
        need: int,
        tokens: IntArray | None,
        recorded: IntArray | None,
        known: int,
        *,
        identity: bool,
    ) -> None:
        """C10: a request within the size the allocator promised is served. C15: the answer is the engine's."""
        if tokens is None:
            ids_left = state.oracle.num_virtual_ids - state.min_page_index - state.oracle.live_count
            if need <= self._promised and need // state.page_size <= ids_left:
                self._fail(CheckFailure("C10", f"refused {need} tokens", state.name, [], "served",
                                        f"None, though {self._promised} were promised before the call"))  # fmt: skip
            if self.on("C12") and need // state.page_size <= ids_left:
                self._refused_alone(state, need)
            if known == 2 and not identity:
                self._fail(
                    CheckFailure(
                        "C10",
                        f"refused {need} tokens that the engine had room for",
                        state.name,
                    )
                )
        self.hold("C10")
        if not identity or known not in (1, 2) or not self.compares_recorded:
            return
        if (tokens is None) != (known == 1) or (
            tokens is not None and recorded is not None and not same_ids(tokens, recorded)
        ):
            self._fail(
                CheckFailure(
                    "C15",
                    "the answer is not the engine's. An allocator with another placement rule is replayed with --ids mapped",
                    state.name,
                    [] if tokens is None else (np.unique(tokens // state.page_size)[:16]).tolist(),
                    expected="None" if known == 1 or recorded is None else shown(recorded),
                    found="None" if tokens is None else shown(tokens),
                )
            )
            if known == 2 and tokens is None:
                raise CheckFailure(
                    "C15", "the trace cannot be followed without ids that the engine had", state.name
                )
        self.hold("C15")

    def _refused_alone(self, state: PoolState, need: int) -> None:
        """A pool's own alloc was refused: its neighbours had no more to give."""
        check_refused(self.chain, self.chain.index(state), need, self.hazards, self.total_bytes)

    def answered(self, seq: int, state: PoolState, tensor: torch.Tensor, tokens: IntArray) -> None:
        """An alloc answered ``tensor``; sweeps look whether it is still what it was (C13)."""
        if self.on("C13"):
            self._answers.note(seq, state, tensor, tokens)

    def new_pages(self, state: PoolState, grown: Growth) -> None:
        """Pages handed out: their rows, their places, and then the stamps of the tokens in them."""
        if len(grown.new_pages):
            self.place(state, grown.new_pages)
        write_new_pages(state, grown.whole_pages)
        write_new_tokens(state, grown.loose)

    def placed(self, state: PoolState, pages: IntArray) -> None:
        """`new_pages` for whole pages under ids that another pool handed out."""
        self.place(state, pages)
        write_new_pages(state, pages)

    def place(self, state: PoolState, pages: IntArray) -> None:
        if not len(pages):
            return
        physical = state.rows("virtual_to_physical", pages)
        lowest, highest = int(physical.min()), int(physical.max())
        if lowest < 0:
            without = pages[physical < 0]
            raise CheckFailure("C1", f"handed out virtual page(s) {shown(without)} without a place", state.name,
                               without.tolist(), "a physical page", "-1")  # fmt: skip
        if lowest < state.min_page_index or highest >= state.num_pages:
            outside = (physical < state.min_page_index) | (physical >= state.num_pages)
            raise CheckFailure("C5", f"handed out physical page(s) {shown(physical[outside])}, outside the pool", state.name,
                               pages[outside].tolist(), f"{state.min_page_index} to {state.num_pages - 1}")  # fmt: skip
        taken = state.taken(physical)
        if np.count_nonzero(taken) and self.on("C2"):
            raise CheckFailure("C2", f"handed out physical page(s) {shown(physical[taken])}, which are live", state.name,
                               [int(page) for page in state.placed_virtual[physical[taken]] if page > 0])  # fmt: skip
        self.hazards.judge_handed_out(state, physical)
        state.placed_virtual[physical] = pages
        state.placed_physical[pages] = physical
        state.changes += 1
        if self.on("C1"):
            check_places(state, physical)
            self.hold("C1", len(pages))
        if self.on("C5"):
            low, high = state.band()
            if lowest < low or highest >= high:
                check_inside(state, physical)
            check_frontiers(self.chain, self.total_bytes)
            self.hold("C5")
