"""Checks of a composite: what its pools can hand out together, and which window page goes with which full page.

The arithmetic of what fits is written again from SGLang's rules for the three layouts, over the bands as they are. Pairs follow from the
calls: a virtual page is paired while the oracle of the window pool holds it live.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Any

import numpy as np

from replayer.checks.capacity import float_gaps
from replayer.checks.held_back import already_over
from replayer.checks.joint_reads import check_joint_translation, check_sides
from replayer.checks.options import CheckOptions
from replayer.checks.suite import Checks
from replayer.content import IntArray
from replayer.failure import CheckFailure
from replayer.hazards import Hazards, ReplayEvent
from replayer.oracle import Growth, shown
from replayer.pool_state import PoolState

if TYPE_CHECKING:
    from replayer.calling import FlushRecord
    from replayer.logprob import Probe


class JointChecks(Checks):
    """`Checks` of all members after each call, and those of the composite."""

    def __init__(
        self,
        pools: dict[str, PoolState],
        hazards: Hazards,
        options: CheckOptions,
        total_bytes: int,
        probe: Probe | None,
        composite: Any,
    ) -> None:
        super().__init__(pools, hazards, options, total_bytes, probe)
        self.composite = composite
        self.full, self.swa, self.mamba = pools["full"], pools.get("swa"), pools.get("mamba")
        self._before: list[tuple[int, int, int]] = []
        self._together = False
        self._all_over: dict[str, list[ReplayEvent]] = {}

    # -- around calls

    def before_joint(self) -> None:
        """What the composite promises, and what its members hold, before a call that may be refused."""
        self._together = True
        self._promised = int(self.composite.available_size())
        self._before = [_holdings(state) for state in self.chain]

    def before_alloc(self, state: PoolState) -> None:
        self._together = False
        super().before_alloc(state)

    def _refused_alone(self, state: PoolState, need: int) -> None:
        if not self._together:
            super()._refused_alone(state, need)

    def gate_turned(self) -> None:
        super().gate_turned()
        if self.on("C10"):
            self.check_joint()

    def refused(self, need_full: int, need_swa: int) -> None:
        """A refused alloc has changed nothing on any member, and could not have been served.

        Raises:
            CheckFailure: C4 or C10.
        """
        for state, before in zip(self.chain, self._before, strict=True):
            found = _holdings(state)
            if found != before and self.on("C4"):
                raise CheckFailure(
                    "C4",
                    "a refused call has changed what the pool holds",
                    state.name,
                    expected="live tokens {}, free ids {}, live pages of its band {}".format(*before),
                    found="live tokens {}, free ids {}, live pages of its band {}".format(*found),
                )
        if self.on("C10") and self.swa is not None and self._could_fit(need_full, need_swa):
            self._fail(
                CheckFailure(
                    "C10",
                    f"refused {need_full} tokens and {need_swa} window tokens together",
                    self.full.name,
                    expected="served",
                    found="None, though both fit"
                    + (" once the pools are packed" if self._may_move() else ""),
                )
            )
        self.hold("C4", len(self.chain))
        self.hold("C10")

    def capacity_ensured(self, answer: bool, need_full: int, need_swa: int) -> None:
        """What ``ensure_capacity`` said against what is there now.

        Raises:
            CheckFailure: C10.
        """
        fits = self._fits(need_full, need_swa, packed=False)
        if (answer and not fits) or (not answer and self._could_fit(need_full, need_swa)):
            self._fail(
                CheckFailure(
                    "C10",
                    f"ensure_capacity({need_full}, {need_swa}) is not what the bands leave",
                    self.full.name,
                    expected=str(not answer),
                    found=str(answer),
                )
            )
        self.hold("C10")

    def paired(self, grown: Growth, window_pages: IntArray) -> None:
        """New tokens have come to life on the full side, and ``window_pages`` of the new pages got a window page with them.

        Raises:
            CheckFailure: C1 and what placing pages raises.
        """
        swa = self.swa
        if swa is None:
            return
        without = np.setdiff1d(grown.new_pages, window_pages)
        self._require_unpaired(swa, without)
        filled = self.full.oracle.filled
        swa.oracle.start_pages(window_pages, filled[window_pages])
        swa.oracle.predecessor[window_pages] = self.full.oracle.predecessor[window_pages]
        loose = grown.loose.kept(swa.oracle.live[grown.loose.pages])
        tails = np.setdiff1d(loose.pages, grown.new_pages)
        swa.oracle.fill(tails, filled[tails])
        whole = window_pages[np.isin(window_pages, grown.whole_pages)]
        self.new_pages(swa, Growth(window_pages, whole, loose))

    def _require_unpaired(self, swa: PoolState, pages: IntArray) -> None:
        rows = swa.rows("virtual_to_physical", pages)
        if self.on("C13") and (rows != -1).any():
            raise CheckFailure(
                "C13",
                f"virtual page(s) {shown(pages[rows != -1])} got window pages they were not to have",
                swa.name,
                pages[rows != -1].tolist(),
                "-1",
                shown(rows[rows != -1]),
            )

    def released_by_pairing(self, pages: IntArray, places: IntArray) -> None:
        """Pages whose free was queued were paired again: the window page they were queued with is not theirs any more.

        Raises:
            CheckFailure: C13.
        """
        assert self.swa is not None
        owners = self.swa.rows("physical_to_virtual", places)
        stays = owners == pages
        if self.on("C13") and stays.any():
            raise CheckFailure(
                "C13",
                "the window page that a queued free was about is still there after its id was paired anew",
                self.swa.name,
                pages[stays].tolist(),
                f"physical page(s) {shown(places[stays])} released",
                "owned by the id still",
            )
        self.hold("C13", len(pages))

    def kept_pairs(self, pages: IntArray) -> None:
        """Pages paired again after their free was queued keep the new pair when the group closes.

        Raises:
            CheckFailure: C13.
        """
        if not len(pages):
            return
        assert self.swa is not None
        rows, expected = (
            self.swa.rows("virtual_to_physical", pages),
            self.swa.placed_physical[pages],
        )
        if self.on("C13") and not np.array_equal(rows, expected):
            raise CheckFailure(
                "C13",
                "a pair made after the free was queued was released with it",
                self.swa.name,
                pages[rows != expected].tolist(),
                shown(expected[rows != expected]),
                shown(rows[rows != expected]),
            )
        self.hold("C13", len(pages))

    def before_flush_together(self) -> None:
        """What is known to be over before a flush of all members."""
        self._all_over = {state.name: already_over(state) for state in self.chain}
        self._judged_before = self.hazards.judged_through

    def flushed_together(self, result: int, moves: dict[str, int]) -> None:
        """A flush of all members that moved so many pages of each tells their sum; a float tells besides how many pages it gave back
        without moving any.

        Raises:
            CheckFailure: C4, C12 and what a look at each pool finds.
        """
        for state in self.chain:
            self._over = self._all_over[state.name]
            self.flushed(state, False, moves[state.name], moves[state.name])
        moved = sum(moves.values())
        told_more = any(state.is_float for state in self.chain)
        if result != moved and not (told_more and result > moved):
            self._fail(CheckFailure("C4", "a flush of all pools returned another number than it moved", self.full.name, [],
                                    f"{moved} pages moved", f"returned {result}"))  # fmt: skip
        self.hold("C4")

    # -- after events

    def _check_chain(self, new_flushes: list[FlushRecord]) -> None:
        moved = [batch for name in ("full", "swa") for batch in self._moved.get(name, [])]
        super()._check_chain(new_flushes)
        if moved and self.on("C1"):
            pages = np.unique(np.concatenate(moved))
            check_joint_translation(self.composite, self.full, self.swa, pages[self.full.oracle.live[pages]])
        if self.on("C10"):
            self.check_joint()

    def sweep(self, seq: int) -> None:
        super().sweep(seq)
        if self.on("C1") and not self._handing_over:
            check_joint_translation(self.composite, self.full, self.swa, self.full.oracle.live_pages())

    def check_joint(self) -> None:
        """C10: ``available_size()`` of the composite equals a fresh recomputation.

        Raises:
            CheckFailure: C10.
        """
        if self.swa is None:
            expected = int(
                self.full.allocator.schedulable_available_size()
            )  # compared with the bands already
        else:
            most = min(state.holes() + _index_room(state) for state in (self.full, self.swa))
            size = self.full.page_size
            expected = size * bisect_left(
                range(1, most + 1), True, key=lambda n: not self._fits(n * size, n * size, packed=False)
            )
        found = int(self.composite.available_size())
        if found != expected:
            raise CheckFailure(
                "C10", "available_size() of the composite is not what the bands leave for all its pools together",
                self.full.name, [], f"{expected} tokens", f"{found} tokens",
            )  # fmt: skip
        if self.swa is not None:
            check_sides(self.composite, {"full": self.full, "swa": self.swa})
        self.hold("C10")

    def prepared(self, states: PoolState, slots: int) -> None:
        """Room was asked for so many states: it is there, unless a flush of the neighbour would not open it either.

        Raises:
            CheckFailure: C10.
        """
        found = int(states.allocator.available_size())
        if found < slots <= int(states.allocator.schedulable_available_size()):
            self._fail(CheckFailure("C10", f"prepare_mamba_allocation({slots}) has made no room that a flush would make", states.name, [],
                                    f"{slots} slots available", f"{found}"))  # fmt: skip
        self.hold("C10")

    # -- what fits

    def _could_fit(self, full_tokens: int, swa_tokens: int) -> bool:
        """Whether a composite must serve so much: it fits as everything lies, or once both ends are packed and nothing stands against
        that. How a float in the middle is moved is SGLang's own, and nothing is asked of it."""
        if self._fits(full_tokens, swa_tokens, packed=False):
            return True
        if not self._may_move():
            return False
        if self.swa is not None and self.swa.is_float:
            return self._fits_with_ends_packed(full_tokens, swa_tokens)
        return self._fits(full_tokens, swa_tokens, packed=True)

    def _may_move(self) -> bool:
        return not any(
            not (state.lazy or state.is_float) or state.awaiting_load or not self.hazards.may_move(state.name)
            for state in self.chain
        )

    def _fits(self, full_tokens: int, swa_tokens: int, *, packed: bool) -> bool:
        """Whether so many tokens of both sides fit, as everything lies or with every hole and every waiting page packed away."""
        assert self.swa is not None
        full, swa = self.full, self.swa
        pages = {
            state.name: -(-tokens // state.page_size)
            for state, tokens in ((full, full_tokens), (swa, swa_tokens))
        }
        ids = full.oracle.num_virtual_ids - full.min_page_index
        if pages[full.name] > ids - full.oracle.live_count:
            return False
        if not swa.is_float and pages[swa.name] > ids - swa.live_count():
            return False  # places that are reserved will need ids as well
        kept = {
            state.name: state.live_count() if packed else state.band()[1] - state.band()[0]
            for state in self.chain
        }
        beyond = {
            state.name: max(0, pages[state.name] - (0 if packed else state.holes())) for state in (full, swa)
        }
        if any(
            beyond[state.name] > state.num_pages - state.min_page_index - kept[state.name]
            for state in (full, swa)
        ):
            return False
        if not swa.is_float:
            taken = sum((kept[state.name] + beyond[state.name]) * state.page_bytes for state in (full, swa))
            return taken <= self._buffer_between()
        states = self.chain[0]
        return self._fits_beside_float(beyond[full.name], beyond[swa.name], states.band()[1], full.band()[0])

    def _fits_with_ends_packed(self, full_tokens: int, swa_tokens: int) -> bool:
        """Beside a float that stays as it is, with the holes of both ends packed away; pages that wait for a forward count as taken."""
        assert self.swa is not None
        full, swa, states = self.full, self.swa, self.chain[0]
        full_pages, swa_pages = -(-full_tokens // full.page_size), -(-swa_tokens // swa.page_size)
        span = full.band()[1] - full.band()[0] - full.holes()
        room = full.num_pages - full.min_page_index - span
        ids = full.oracle.num_virtual_ids - full.min_page_index - full.oracle.live_count
        if full_pages > min(room, ids) or swa_pages > _index_room(swa):
            return False
        beyond = max(0, swa_pages - swa.holes())
        return self._fits_beside_float(
            full_pages, beyond, states.band()[1] - states.holes(), full.band()[0] + full.holes()
        )

    def _buffer_between(self) -> int:
        """Bytes that two ends share: from the first page of the one that grows up to the end of the last of the other."""
        low, high = self.chain
        return high.num_pages * high.page_bytes - low.min_page_index * low.page_bytes

    def _fits_beside_float(
        self, full_beyond: int, swa_beyond: int, states_end: int, full_begins: int
    ) -> bool:
        states, swa, full = self.chain
        floor, full_low = states_end * states.page_bytes, full_begins * full.page_bytes
        low, high = swa.band()
        is_empty = high - low == swa.holes()
        if full_beyond * full.page_bytes > full_low - (floor if is_empty else high * swa.page_bytes):
            return False
        return swa_beyond <= max(float_gaps(swa, floor, full_low - full_beyond * full.page_bytes))


def _index_room(state: PoolState) -> int:
    low, high = state.band()
    return state.num_pages - state.min_page_index - (high - low)


def _holdings(state: PoolState) -> tuple[int, int, int]:
    """What a pool holds, whatever lies where: live tokens and free ids by its own account, and what its band, holes and waiting pages
    leave."""
    ids = state.allocator.free_virtual_ids
    low, high = state.band()
    return (
        int(state.allocator.allocated_count()),
        -1 if ids is None else len(ids),
        high - low - state.holes() - state.pending(),
    )
