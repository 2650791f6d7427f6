"""`Checks`: which check runs when, and how often each one held.

After each call, what it changed is checked: pages handed out, freed, moved. After a flush (or every event, or every n-th) the counts,
borders and capacities of all pools follow, which costs the same whatever the pools' size. Every ``sweep_every`` events and at the end a
sweep looks at everything, to find damage outside what should have changed.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from recorder.trace import StateRow
from replayer.checks.allocs import AllocChecks
from replayer.checks.capacity import check_capacities, check_gate, check_remembered
from replayer.checks.contents import check_contents, sweep_contents
from replayer.checks.held_back import check_held_back, note_moved
from replayer.checks.mapping import check_places, check_rows, check_sink, check_translation, sweep_tables
from replayer.checks.options import DIGEST_EVERY, SWEEP_EVERY, SWEEP_WORK, CheckOptions
from replayer.checks.partition import (
    check_counts,
    check_free_ids,
    check_frontiers,
    check_given_up,
    check_inside,
    check_reported,
    sweep_free_ids,
    sweep_partition,
)
from replayer.checks.progress import check_eager, check_flushed
from replayer.checks.recorded import check_state
from replayer.content import IntArray, Mask
from replayer.failure import CheckFailure
from replayer.hazards import Hazards
from replayer.ids import owner_of
from replayer.oracle import shown
from replayer.pool_state import Extent, PoolState

if TYPE_CHECKING:
    from replayer.calling import FlushRecord
    from replayer.logprob import Probe

#: Batches of moves kept for the report of a failure.
RECENT_MOVES = 256
_DIRECTIONS = {"up": 0, "float": 1, "down": 2}


class Checks(AllocChecks):
    def __init__(
        self,
        pools: dict[str, PoolState],
        hazards: Hazards,
        options: CheckOptions,
        total_bytes: int,
        probe: Probe | None,
    ) -> None:
        super().__init__(hazards)
        self.pools, self.options = pools, options
        self.total_bytes, self.probe = total_bytes, probe
        self.chain: Sequence[PoolState] = sorted(
            pools.values(), key=lambda state: _DIRECTIONS.get(state.allocator.grow_direction, 2)
        )
        self.held: Counter[str] = Counter()
        self._enabled = options.enabled
        self.states: dict[int, StateRow] = {}
        self.last_sweep = -1
        self.compares_recorded = True
        hazards.enabled = options.enabled
        self._moved: dict[str, list[IntArray]] = {}
        self._vacated: dict[str, list[IntArray]] = {}
        self._flushes_seen = 0
        self._flushes_probed = 0
        self._since_check = 0
        self._states_compared = 0
        #: Of the chain when it was looked at last, low byte end to high; after which changes; and both sizes of each pool then.
        self.extents: list[Extent] = []
        self._changes_seen: list[int] = []
        self._sizes: list[tuple[int, int]] = []
        self._left: dict[str, IntArray] = {}
        self._recent: deque[tuple[int, str, IntArray, IntArray, IntArray]] = deque(maxlen=RECENT_MOVES)

        self._sweep_every = options.sweep_every or (1 if options.every == 1 else SWEEP_EVERY)
        self._saves_work = options.every == 1 and options.sweep_every is None
        self._work = 0

    def on(self, check: str) -> bool:
        return check in self._enabled

    def hold(self, check: str, times: int = 1) -> None:
        """Count a check that held, if it was asked for."""
        if check in self._enabled:
            self.held[check] += times

    # -- around calls

    def moved(self, seq: int, state: PoolState, src_pages: IntArray, dst_pages: IntArray) -> None:
        """The allocator moved pages; follow it, and judge it against running forwards, gates and leases."""
        for pages in (src_pages, dst_pages):
            if len(pages) and not state.min_page_index <= pages.min() <= pages.max() < state.num_pages:
                self._fail(
                    CheckFailure("C5", f"moved physical pages {shown(pages)}, outside the pool", state.name)
                )
                return
        virtual = state.placed_virtual[src_pages]
        if np.count_nonzero(virtual < 0) and self.on("C1"):
            raise CheckFailure(
                "C1",
                f"moved physical page(s) {shown(src_pages[virtual < 0])}, which hold no live page",
                state.name,
            )
        taken = self._still_taken(state, dst_pages)
        if (taken.any() or state.reserved[dst_pages].any()) and self.on("C2"):
            places = dst_pages[taken | state.reserved[dst_pages]]
            raise CheckFailure("C2", f"moved pages onto physical page(s) {shown(places)}, which are live", state.name,
                               [int(page) for page in state.placed_virtual[places] if page > 0])  # fmt: skip
        self.hazards.judge_moves(state, src_pages, dst_pages)
        note_moved(state, self.hazards.latest_unfired(state.name), len(src_pages))
        state.changes += 1
        self.hold("C7", len(src_pages))
        self.hold("C8", len(dst_pages))
        self.hold("C9")
        state.placed_virtual[src_pages] = -1
        state.placed_virtual[dst_pages] = virtual
        state.placed_physical[virtual] = dst_pages
        self._recent.append((seq, state.name, virtual, src_pages, dst_pages))
        self._moved.setdefault(state.name, []).append(virtual)
        self._vacated.setdefault(state.name, []).append(src_pages)

    @staticmethod
    def _still_taken(state: PoolState, places: IntArray) -> Mask:
        """Which places hold a live page. Those of pages that the running call frees may be given up by now: then they are."""
        owners = state.placed_virtual[places]
        taken: Mask = owners >= 0
        if state.releasing is not None:
            left = taken & state.releasing[np.maximum(owners, 0)]
            state.placed_physical[owners[left]] = -1
            state.placed_virtual[places[left]] = -1
            taken &= ~left
        return taken

    def recent_moves(self, failure: CheckFailure) -> list[dict[str, int]]:
        """The last moves of the pages a failure names, as far back as is remembered."""
        found = []
        for seq, name, virtual, src, dst in self._recent:
            if name == failure.pool:
                for row in np.flatnonzero(np.isin(virtual, failure.pages)):
                    found.append(
                        {"event": seq, "page": int(virtual[row]), "src": int(src[row]), "dst": int(dst[row])}
                    )
        return found[-8:]

    def queued(self, state: PoolState, pages: IntArray) -> None:
        """A free inside a group frees nothing yet."""
        if self.on("C1"):
            check_rows(state, pages)
            self.hold("C1", len(pages))

    def recorded_number(self, state: PoolState, name: str, found: int, expected: int) -> None:
        if not self.compares_recorded:
            return
        if found != expected:
            self._fail(CheckFailure("C15", f"{name} returned another number than in the engine", state.name, [], str(expected),
                                    str(found)))  # fmt: skip
        self.hold("C15")

    def before_free(self, state: PoolState, pages: IntArray) -> None:
        """The last chance to look at what these pages hold."""
        if self.on("C6") and len(pages):
            check_contents(state, pages)
            self.hold("C6", len(pages))
        self.hold("C13", len(pages))

    def freed(self, state: PoolState, pages: IntArray) -> None:
        placed = state.placed_physical[pages]
        places = self._left[state.name] = placed[placed >= 0]
        state.placed_physical[pages] = -1
        state.placed_virtual[places] = -1
        state.oracle.end_pages(pages)
        state.changes += 1

    def after_free(self, state: PoolState, pages: IntArray) -> None:
        if self.on("C1"):
            rows = state.rows("virtual_to_physical", pages)
            if np.count_nonzero(rows != -1):
                raise CheckFailure("C1", f"freed virtual page(s) {shown(pages[rows != -1])} are still mapped", state.name,
                                   pages[rows != -1].tolist(), "-1", shown(rows[rows != -1]))  # fmt: skip
            check_places(state, self._left.pop(state.name))
            self.hold("C1", len(pages))

    # -- after events

    def after_event(self, seq: int, flushes: list[FlushRecord]) -> None:
        """What is due after event ``seq``; ``flushes`` is the replay's growing list of flushes."""
        self._flushed_now, self._just_flushed = self._just_flushed, None
        fresh = len(flushes) != self._flushes_seen
        if (
            not fresh
            and not self._moved
            and not self.options.every
            and seq - self.last_sweep < self._sweep_every
        ):
            if seq in self.states:
                self._compare_state(seq)
            return
        if seq < self.options.first:
            self._flushes_seen = len(flushes)
            self._moved.clear()
            self._vacated.clear()
            self.states.pop(seq, None)
            return
        new_flushes = flushes[self._flushes_seen :]
        self._flushes_seen = len(flushes)
        self._since_check += 1
        if fresh or self._moved or (self.options.every and self._since_check >= self.options.every):
            self._since_check = 0
            self._check_chain(new_flushes)
        if seq - self.last_sweep >= self._sweep_every and self._affords_sweep():
            self.everything(seq)
        if seq in self.states:
            self._compare_state(seq)

    def _affords_sweep(self) -> bool:
        if not self._saves_work:
            return True
        self._work += SWEEP_WORK
        if self._work < sum(
            state.num_pages + state.oracle.num_virtual_ids + state.oracle.live_count * state.page_size
            for state in self.chain
        ):
            return False
        self._work = 0
        return True

    def _compare_state(self, seq: int) -> None:
        row = self.states.pop(seq)
        if self.on("C15") and seq >= self.options.first:
            # A digest costs time with the pool's size. Tables that went apart stay apart, so one in a few is enough to notice, and
            # the second pass, which checks every event, takes them all.
            self._states_compared += 1
            digests = self.options.every == 1 or self._states_compared % DIGEST_EVERY == 0 or not self.states
            same = self.compares_recorded
            if check_state(self.pools, row, digests=digests and same, same_placement=same):
                self.hold("C15")

    def _check_chain(self, new_flushes: list[FlushRecord]) -> None:
        for name, batches in self._moved.items():
            state = self.pools[name]
            virtual = batches[0] if len(batches) == 1 else np.unique(np.concatenate(batches))
            virtual = virtual[state.oracle.live[virtual]]
            if self.on("C1"):
                check_rows(state, virtual)
                check_places(state, np.concatenate(self._vacated[name]))
                check_translation(state, virtual)
                self.hold("C1", len(virtual))
            if self.on("C5") and len(virtual):
                check_inside(state, state.placed_physical[virtual])
            if self.on("C6"):
                check_contents(state, virtual)
                self.hold("C6", len(virtual))
        self._probe_if_due(new_flushes)
        self._moved.clear()
        self._vacated.clear()
        flushed = {record.pool for record in new_flushes}
        before, changes_before = self.extents, self._changes_seen
        self.extents = [state.extent() for state in self.chain]
        self._changes_seen = [state.changes for state in self.chain]
        looked_at = 0
        for at, state in enumerate(self.chain):
            if (
                before
                and self.extents[at] == before[at]
                and state.changes == changes_before[at]
                and state.name not in flushed
                and not self.options.every
            ):
                continue  # nothing about this pool is another than at the last look
            looked_at += 1
            if state is not self._flushed_now:  # which was looked at right after its flush
                self._check_pool(state)
            self._try(check_reported, state)
            if self.on("C9"):
                check_gate(state, self.hazards)
        for check in ("C2", "C4", "C9"):
            self.hold(check, looked_at)
        if self.extents != before:
            self._sizes.clear()
            if self.on("C5"):
                check_frontiers(self.chain, self.total_bytes)
            self.hold("C5")
        self._check_sizes()
        self._judge_flushes(new_flushes)

    def _check_sizes(self) -> None:
        if not self.on("C10"):
            return
        self.hold("C10", len(self.chain))
        if self._sizes:
            for state, sizes in zip(self.chain, self._sizes, strict=True):
                check_remembered(state, sizes)
            return
        self._sizes = check_capacities(self.chain, self.extents, self.total_bytes)
        for state, sizes in zip(self.chain, self._sizes, strict=True):
            state.known_available = sizes[0]

    def _check_pool(self, state: PoolState) -> None:
        """Borders, lists and counts of one pool, causes before consequences; what it costs follows what changed."""
        self._try(check_eager, state)
        self._try(check_given_up, state)
        if not self._handing_over:
            self._try(check_free_ids, state)
        self._try(check_counts, state)
        if self.on("C8"):
            check_held_back(state, self.hazards)

    def _judge_flushes(self, records: list[FlushRecord]) -> None:
        """C12 for the last flush of each pool, the budget for all of them."""
        for name, record in {record.pool: record for record in records}.items():
            if self.on("C12") and self.pools[name] is not self._flushed_now:
                check_flushed(
                    self.pools[name], urgent=record.urgent, moves=record.moves, hazards=self.hazards
                )
                self.hold("C12")
        limit = self.options.max_syncs
        if limit is None or not self.on("C11"):
            return
        for record in records:
            syncs = record.device_to_host + record.host_to_device + record.waits
            if syncs > limit:
                raise CheckFailure(
                    "C11",
                    f"a flush that moved {record.moves} page(s) synchronised {syncs} times",
                    record.pool,
                    expected=f"at most {limit}",
                    found=f"{record.device_to_host} device-to-host, {record.host_to_device} host-to-device, {record.waits} waits",
                )
            self.hold("C11")

    def _probe_if_due(self, new_flushes: list[FlushRecord]) -> None:
        if self.probe is None or not self.on("C14") or not any(record.moves for record in new_flushes):
            return
        self._flushes_probed += 1
        if self._flushes_probed % self.options.logprob_every == 1 or self.options.logprob_every == 1:
            for name, batches in self._moved.items():
                self.probe.sample(self.pools[name], self._owner_of(name), np.concatenate(batches))
                self.hold("C14")

    def _owner_of(self, name: str) -> PoolState:
        return owner_of(list(self.pools.values()), self.pools[name])

    def _try(self, check: object, state: PoolState) -> None:
        try:
            check(state)  # type: ignore[operator]
        except CheckFailure as failure:
            self._fail(failure)

    def _fail(self, failure: CheckFailure) -> None:
        if self.on(failure.check):
            raise failure

    def everything(self, seq: int) -> None:
        """The chain and a sweep, whatever changed and whether anything flushed."""
        self._flushed_now = None
        self.extents = []
        self._check_chain([])
        self.sweep(seq)

    def sweep(self, seq: int) -> None:
        """Every row, page, id and byte."""
        if self._handing_over:
            return  # between bind and unbind a place has two names
        for state in self.chain:
            if self.on("C1"):
                self.hold("C1", sweep_tables(state))
                check_translation(state, state.oracle.live_pages())
                check_sink(state)
            if self.on("C2") or self.on("C4") or self.on("C5"):
                self._try(sweep_partition, state)
                self._try(check_reported, state)
                self.hold("C2")
                self.hold("C4")
                self.hold("C5")
            if self.on("C3") and not state.allocator.free_group:
                self.hold("C3", sweep_free_ids(state))
            if self.on("C6"):
                self.hold("C6", sweep_contents(state))
        if self.on("C13"):
            self._answers.sweep()
        leased = self.hazards.leases.look(on=self.on)
        self.hold("C8", leased)
        self.hold("C9", leased)
        self.last_sweep = seq
