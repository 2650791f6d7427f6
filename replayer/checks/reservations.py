"""Places without ids: reserved, bound, released; and what may be asked of an allocator about them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from replayer.checks.contents import write_new_pages
from replayer.checks.mapping import check_places, check_rows
from replayer.checks.partition import check_frontiers, check_inside
from replayer.content import IntArray
from replayer.failure import CheckFailure
from replayer.hazards import Hazards
from replayer.oracle import PageRecords, TraceContradiction, shown
from replayer.pool_state import PoolState


class Reservations(ABC):
    """The part of `replayer.checks.Checks` about ``alloc_physical``, ``bind``, ``unbind`` and ``free_physical``."""

    chain: Sequence[PoolState]
    total_bytes: int
    compares_recorded: bool

    def __init__(self, hazards: Hazards) -> None:
        self.hazards = hazards
        self._handing_over: dict[str, IntArray] = {}
        self._promised = 0

    @abstractmethod
    def on(self, check: str) -> bool:
        """Whether a check was asked for."""

    @abstractmethod
    def hold(self, check: str, times: int = 1) -> None:
        """Count checks that held."""

    @abstractmethod
    def _fail(self, failure: CheckFailure) -> None:
        """Raise it if its check was asked for."""

    def before_bind(self, state: PoolState, pages: IntArray, physical: IntArray) -> None:
        loose = (state.placed_virtual[physical] < 0) & ~state.reserved[physical]
        if loose.any():
            raise TraceContradiction(
                f"bind names physical pages {shown(physical[loose])} that are neither live nor reserved"
            )
        if len(np.unique(physical)) != len(physical) or len(np.unique(pages)) != len(pages):
            raise TraceContradiction("bind names one page twice")
        if state.oracle.live[pages].any():
            raise TraceContradiction(
                f"bind names virtual pages {shown(pages[state.oracle.live[pages]])} that are live"
            )

    def bound(self, state: PoolState, pages: IntArray, physical: IntArray) -> None:
        """``bind``: reserved places get their ids, or places change owner (an ``unbind`` of the old one follows). A place that a load or a
        transfer has filled keeps what it brought."""
        old = state.placed_virtual[physical]
        fresh = old < 0
        state.oracle.hand_over(pages[~fresh], old[~fresh])
        state.placed_virtual[physical] = pages
        state.placed_physical[pages] = physical
        state.changes += 1
        if (~fresh).any():
            self._handing_over[state.name] = old[~fresh]
        if fresh.any():
            self._bound_reserved(state, pages[fresh], physical[fresh])
        if self.on("C1"):
            check_rows(state, pages)
            self.hold("C1", len(pages))

    @staticmethod
    def _bound_reserved(state: PoolState, pages: IntArray, physical: IntArray) -> None:
        state.reserved[physical] = False
        state.reserved_count -= len(physical)
        state.oracle.start_pages(pages, state.page_size)
        brought = [state.arrived.pop(place, None) for place in physical.tolist()]
        came = np.array([record is not None for record in brought])
        records = PageRecords.joined([record for record in brought if record is not None], state.page_size)
        state.oracle.adopt(pages[came], records)
        write_new_pages(state, pages[~came])

    def before_unbind(self, state: PoolState, pages: IntArray) -> None:
        waiting = self._handing_over.get(state.name, np.empty(0, dtype=np.int64))
        if not np.array_equal(np.sort(waiting), np.sort(pages)):
            raise TraceContradiction(
                f"unbind names virtual pages {shown(pages)}, but {shown(waiting)} gave their places away"
            )

    def unbound(self, state: PoolState, pages: IntArray) -> None:
        self._handing_over.pop(state.name, None)
        state.placed_physical[pages] = -1
        self._require_unmapped(state, pages, "unbound")
        self.hold("C1", len(pages))

    def reserved(
        self,
        state: PoolState,
        need: int,
        tokens: IntArray | None,
        recorded: IntArray | None,
        *,
        comparable: bool,
    ) -> None:
        """``alloc_physical``: places without ids. ``recorded``: the engine's answer, None for a refusal; ``comparable`` says that there is
        one and that it should be ours.

        Raises:
            CheckFailure: C1, C2, C5, C10, C13 or C15.
        """
        if tokens is None and need <= self._promised:
            self._fail(CheckFailure("C10", f"refused to reserve {need} tokens", state.name, [], "served",
                                    f"None, though {self._promised} were promised before the call"))  # fmt: skip
        self.hold("C10")
        if tokens is not None:
            self._took(state, need, tokens)
        if not comparable or not self.compares_recorded:
            return
        same = (tokens is None) == (recorded is None) and (
            tokens is None or recorded is None or np.array_equal(tokens, recorded)
        )
        if not same:
            self._fail(CheckFailure("C15", "the reserved places are not the engine's", state.name, [],
                                    "None" if recorded is None else shown(recorded),
                                    "None" if tokens is None else shown(tokens)))  # fmt: skip
        self.hold("C15")

    def _took(self, state: PoolState, need: int, tokens: IntArray) -> None:
        size = state.page_size
        physical = tokens[::size] // size
        if len(tokens) != need or not np.array_equal(tokens, _tokens_of(physical, size)[: len(tokens)]):
            raise CheckFailure(
                "C13", f"reserved tokens {shown(tokens)} are not {need // size} whole page(s)", state.name
            )
        inside = (physical >= state.min_page_index) & (physical < state.num_pages)
        if not inside.all():
            raise CheckFailure(
                "C5", f"reserved physical page(s) {shown(physical[~inside])}, outside the pool", state.name
            )
        taken = (state.placed_virtual[physical] >= 0) | state.reserved[physical]
        if taken.any() or len(np.unique(physical)) != len(physical):
            self._fail(CheckFailure("C2", f"reserved physical page(s) {shown(physical)}: not {need} free tokens", state.name,
                                    [int(page) for page in state.placed_virtual[physical[taken]] if page > 0]))  # fmt: skip
        self.hazards.judge_handed_out(state, physical)
        for place in physical.tolist():
            state.arrived.pop(place, None)
        state.reserved[physical] = True
        state.reserved_count += len(physical)
        state.awaiting_load += len(physical)
        state.changes += 1
        if self.on("C1"):
            check_places(state, physical)
            self.hold("C1", len(physical))
        if self.on("C5"):
            check_inside(state, physical)
            check_frontiers(self.chain, self.total_bytes)
            self.hold("C5")

    def before_release_physical(
        self, state: PoolState, tokens: IntArray, *, reserved_only: bool
    ) -> tuple[IntArray, IntArray]:
        """``free_physical`` and ``cancel_physical_reservation``: whole taken places, each once; the places and the pages bound to them.

        Raises:
            TraceContradiction: other places.
        """
        size = state.page_size
        physical = tokens[::size] // size
        inside = (physical > 0) & (physical < state.num_pages)
        whole = len(tokens) == len(physical) * size and np.array_equal(tokens, _tokens_of(physical, size))
        if not whole or not inside.all() or len(np.unique(physical)) != len(physical):
            raise TraceContradiction(
                f"physical tokens {shown(tokens)} of pool {state.name!r} are not whole pages, each once"
            )
        taken = state.reserved[physical]
        if not reserved_only and not state.header.is_id_owner:
            # Where a pool owns its ids, a page with an id is freed by that id, or the id would be lost.
            taken = taken | (state.placed_virtual[physical] >= 0)
        if not taken.all():
            raise TraceContradiction(
                f"physical pages {shown(physical[~taken])} of pool {state.name!r} are not reserved"
            )
        if reserved_only and len(physical) > state.awaiting_load:
            raise TraceContradiction(
                f"{len(physical)} reserved page(s) of pool {state.name!r} are cancelled, but {state.awaiting_load} wait for their load"
            )
        virtual = state.placed_virtual[physical]
        bound = virtual >= 0
        state.awaiting_load -= len(physical) if reserved_only else 0
        state.changes += 1
        state.reserved_count -= int(state.reserved[physical].sum())
        state.reserved[physical] = False
        for place in physical.tolist():
            state.arrived.pop(place, None)
        state.oracle.end_pages(virtual[bound])
        state.placed_physical[virtual[bound]] = -1
        state.placed_virtual[physical] = -1
        return physical, virtual[bound]

    def released(self, state: PoolState, physical: IntArray, virtual: IntArray) -> None:
        """The places name nothing any more, or what was moved there since; nor do their pages.

        Raises:
            CheckFailure: C1.
        """
        if self.on("C1"):
            check_places(state, physical)
            self._require_unmapped(state, virtual, "released")
            self.hold("C1", len(physical))

    def _require_unmapped(self, state: PoolState, pages: IntArray, what: str) -> None:
        rows = state.rows("virtual_to_physical", pages)
        if (rows != -1).any():
            self._fail(
                CheckFailure(
                    "C1",
                    f"{what} virtual page(s) {shown(pages)} are still mapped",
                    state.name,
                    pages.tolist(),
                )
            )


def _tokens_of(pages: IntArray, size: int) -> IntArray:
    tokens: IntArray = (pages[:, None] * size + np.arange(size)).reshape(-1)
    return tokens
