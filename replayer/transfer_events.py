"""Events about places that are used from outside: leases, and copies to and from the host."""

from __future__ import annotations

import numpy as np
import torch

from replayer.content import IntArray
from replayer.errors import UsageError
from replayer.event_arguments import EventArguments
from replayer.failure import CheckFailure
from replayer.host_copies import CopyEvent, HostCopy
from replayer.oracle import TraceContradiction, shown
from replayer.pool_state import PoolState


class TransferEvents(EventArguments):
    """One method per kind of event, named after it: ``(pool, index in the chunk)``."""

    def _lease_begin(self, state: PoolState, index: int) -> None:
        places = self._places(state, index, 1, "a lease")
        hold = self.hazards.leases.begin(self._value[index], state, places)
        self.hazards.judge_transfer_target(state, places[hold.virtual < 0])
        self._gate_follows()

    def _lease_end(self, state: PoolState, index: int) -> None:
        if self.checks is None:
            self.hazards.leases.end(self._value[index], state, on=lambda check: False)
            return
        count = self.hazards.leases.end(self._value[index], state, on=self.checks.on)
        self.checks.hold("C8", count)
        self.checks.hold("C9", count)
        self._gate_follows()

    def _gate_follows(self) -> None:
        """Where leases shut the engine's gate, one that begins or ends turns it."""
        if self.hazards.leases_shut_gates and self.checks is not None:
            self.checks.gate_turned()

    def _backup_begin(self, state: PoolState, index: int) -> None:
        self._host_copy_begin(state, index, is_load=False)

    def _load_back_begin(self, state: PoolState, index: int) -> None:
        self._host_copy_begin(state, index, is_load=True)

    def _host_copy_begin(self, state: PoolState, index: int, *, is_load: bool) -> None:
        what = "a load" if is_load else "a backup"
        places, slots = self._places(state, index, 2, what), self._must(1, index)
        if self.checks is None:
            # Nothing is simulated; the allocator hears of the copy all the same.
            copy = self.hazards.copies.begin(self._value[index], state, places, places, is_load=is_load)
        else:
            reserved = places[state.placed_virtual[places] < 0]
            if not is_load and len(reserved):
                raise TraceContradiction(
                    f"a backup names reserved physical page(s) {shown(reserved)} of pool {state.name!r}, which hold nothing yet"
                )
            copy = self.hazards.copies.begin(self._value[index], state, places, slots, is_load=is_load)
            if is_load:
                self.hazards.judge_transfer_target(state, places)
        if is_load:
            self._load_queued(state)
        self._tell_of_copy(state, copy)

    def _tell_of_copy(self, state: PoolState, copy: HostCopy) -> None:
        """SGLang hands the allocator the copy's done event; moves and frees are ordered behind it, and a load ends reservations."""
        tell = getattr(self._told_of_copies(state), "set_hicache_transfer_done_event", None)
        if tell is not None:
            key = (state.name, copy.hold.number, "load" if copy.is_load else "backup")
            self._call("set_hicache_transfer_done_event", tell, key, CopyEvent(self.hazards.copies, copy))

    def _told_of_copies(self, state: PoolState) -> object:
        """Whose ``set_hicache_transfer_done_event`` is called."""
        return state.allocator

    def _load_queued(self, state: PoolState) -> None:
        """Reservations of ``alloc_physical`` are over, by SGLang's rule all of them."""
        state.awaiting_load = 0

    def _host_copy_done(self, state: PoolState, index: int) -> None:
        self.hazards.copies.done(self._value[index], None if self.chunk.pool[index] < 0 else state)
        if self.checks is None:
            self.hazards.log.clear()
            return
        self._judge_log()
        self.checks.hold("C6")
        self.checks.hold("C8")

    def _host_free(self, state: PoolState, index: int) -> None:
        if self.checks is not None:
            self.hazards.copies.host.free(state, self._must(0, index))

    # -- places

    def _places(self, state: PoolState, index: int, virtual_slot: int, what: str) -> IntArray:
        """The allocator's own physical pages that an event means, each of them taken: those recorded, or where ids are mapped those of
        its virtual pages.

        Raises:
            TraceContradiction: pages that are not taken, or not those of the virtual pages named beside them.
            CheckFailure: C8, the allocator exports other places for these virtual pages.
        """
        recorded, named = self._must(0, index), self._ids(virtual_slot, index)
        if len(recorded) and not 0 < recorded.min() <= recorded.max() < state.num_pages:
            raise TraceContradiction(f"{what} names physical pages outside pool {state.name!r}")
        if len(np.unique(recorded)) != len(recorded):
            raise TraceContradiction(f"{what} names one physical page twice in {shown(recorded)}")
        if named is not None and len(named) != len(recorded):
            raise TraceContradiction(f"{what} names {len(recorded)} physical and {len(named)} virtual pages")
        if self.checks is None:
            return recorded[:0]  # nothing is followed
        places = recorded if self.ids.identity else self._own_places(state, named, what)
        virtual = state.placed_virtual[places]
        loose = (virtual < 0) & ~state.reserved[places]
        if loose.any() and named is None:
            raise TraceContradiction(
                f"{what} names physical page(s) {shown(places[loose])} of pool {state.name!r}, which hold no page and are not reserved"
            )
        if named is not None and self.ids.identity:
            self._require_exported(state, recorded, named, what)
        if named is not None:
            own = named[named >= 0] if self.ids.identity else virtual
            self._check_export(state, own)
        return places

    def _own_places(self, state: PoolState, named: IntArray | None, what: str) -> IntArray:
        if named is None or (named < 0).any():
            raise UsageError(
                f"event {self.seq}: {what} on physical pages of the engine's, which mean nothing to an allocator that places otherwise: "
                "replay with --ids recorded, or --until this event"
            )
        pages = self.ids.pages(state, named)
        state.oracle.require_live(pages, what)
        places: IntArray = state.placed_physical[pages]
        return places

    @staticmethod
    def _require_exported(state: PoolState, recorded: IntArray, named: IntArray, what: str) -> None:
        live = named[named >= 0]
        state.oracle.require_live(live, what)
        expected = np.where(named >= 0, state.placed_physical[np.maximum(named, 0)], recorded)
        loose = (named < 0) & ~(state.reserved[recorded] & (state.placed_virtual[recorded] < 0))
        if loose.any():
            raise TraceContradiction(
                f"{what} names physical page(s) {shown(recorded[loose])} of pool {state.name!r} without a virtual page, "
                "and they are not reserved"
            )
        wrong = expected != recorded
        if wrong.any():
            as_places = (
                " (a virtual id was exported as if it were a place)"
                if (recorded == named)[wrong].all()
                else ""
            )
            raise TraceContradiction(
                f"{what} names physical page(s) {shown(recorded[wrong])} for virtual page(s) {shown(named[wrong])} of pool "
                f"{state.name!r}, which are at {shown(expected[wrong])}{as_places}"
            )

    def _check_export(self, state: PoolState, pages: IntArray) -> None:
        """What the allocator itself answers when these pages are exported."""
        assert self.checks is not None
        if not len(pages):
            return
        tokens = self._on_device(torch.from_numpy(pages * state.page_size))
        found = self._exported(state, tokens).cpu().numpy() // state.page_size
        expected = state.placed_physical[pages]
        if self.checks.on("C8") and not np.array_equal(found, expected):
            wrong = found != expected
            raise CheckFailure(
                "C8",
                f"exports other places than those of virtual page(s) {shown(pages[wrong])}",
                state.name,
                pages[wrong][:16].tolist(),
                expected=f"physical page(s) {shown(expected[wrong])}",
                found=shown(found[wrong]),
            )

    def _exported(self, state: PoolState, tokens: torch.Tensor) -> torch.Tensor:
        """Physical token ids for a transfer."""
        answer: torch.Tensor = self._call("translate_kv_loc", state.allocator.translate_kv_loc, tokens)
        return answer
