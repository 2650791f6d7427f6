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
from replayer.checks.answers import Answers
from replayer.checks.capacity import check_capacities, check_gate, check_remembered
from replayer.checks.contents import check_contents, sweep_contents, write_new_pages, write_new_tokens
from replayer.checks.flushes import FlushChecks
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
from replayer.checks.room import check_refused
from replayer.content import IntArray, Mask, same_ids
from replayer.failure import CheckFailure
from replayer.hazards import Hazards
from replayer.ids import owner_of
from replayer.oracle import Growth, shown
from replayer.pool_state import Extent, PoolState

if TYPE_CHECKING:
    import torch

    from replayer.calling import FlushRecord
    from replayer.logprob import Probe

#: Batches of moves kept for the report of a failure.
RECENT_MOVES = 256
_DIRECTIONS = {"up": 0, "float": 1, "down": 2}


class Checks(FlushChecks):
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
        self._promised = 0
        self._since_check = 0
        self._states_compared = 0
        #: Of the chain when it was looked at last, low byte end to high; after which changes; and both sizes of each pool then.
        self.extents: list[Extent] = []
        self._changes_seen: list[int] = []
        self._sizes: list[tuple[int, int]] = []
        self._left: dict[str, IntArray] = {}
        self._answers = Answers()
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
