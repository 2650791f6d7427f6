"""Events about places without ids and ids from elsewhere: reserve, bind, unbind, release."""

from __future__ import annotations

from replayer.blame import ids_in
from replayer.errors import UsageError
from replayer.event_arguments import EventArguments
from replayer.oracle import TraceContradiction
from replayer.pool_state import PoolState


class ReservationEvents(EventArguments):
    """One method per kind of event, named after it: ``(pool, index in the chunk)``."""

    #: Allocs and reservations that were refused.
    refused: int

    @staticmethod
    def _require_guest(state: PoolState, what: str) -> None:
        """Ids come to a pool from outside only where another pool owns them; an owner's would be in its free list still."""
        if state.header.is_id_owner:
            raise TraceContradiction(f"{what} brings ids to pool {state.name!r}, which hands out its own")

    def _bind(self, state: PoolState, index: int) -> None:
        self._require_guest(state, "bind")
        pages, physical = self._must(0, index), self._must(1, index)
        state.oracle.require_pages(pages, "bind")
        if not self.ids.identity:
            raise UsageError(
                f"event {self.seq} binds physical pages of the engine's, which mean nothing to an allocator that places otherwise: "
                "replay with --ids recorded, or --until this event"
            )
        if len(pages) != len(physical) or (
            len(physical) and not 0 < physical.min() <= physical.max() < state.num_pages
        ):
            raise TraceContradiction("bind needs as many physical pages, inside the pool, as virtual ones")
        if self.checks is not None:
            self.checks.before_bind(state, pages, physical)
        self._call(
            "bind",
            state.allocator.bind,
            self._on_device(self._tensor(0, index)),
            self._on_device(self._tensor(1, index)),
        )
        if self.checks is not None:
            self.checks.bound(state, pages, physical)

    def _unbind(self, state: PoolState, index: int) -> None:
        pages = self.ids.pages(state, self._must(0, index))
        tensor = self._pages_tensor(0, index, pages)
        if self.checks is not None:
            self.checks.before_unbind(state, pages)
        if hasattr(state.allocator, "unbind"):
            self._call("unbind", state.allocator.unbind, tensor)
        else:
            self._call("unbind", state.allocator.virtual_to_physical.index_fill_, 0, tensor, -1)
        if self.checks is not None:
            self.checks.unbound(state, pages)

    def _alloc_physical(self, state: PoolState, index: int) -> None:
        if self._value[index] < 0 or self._value[index] % state.page_size:
            raise TraceContradiction(
                f"{self._value[index]} tokens are no multiple of the page size {state.page_size}"
            )
        if self.checks is not None:
            self.checks.before_alloc(state)
        result = self._call("alloc_physical", state.allocator.alloc_physical, self._value[index])
        tokens = ids_in(result, "alloc_physical", state.name)
        if tokens is None:
            self.refused += 1
        if self.checks is not None:
            self._judge_log()
            known = self.ids.identity and self._result_kind[index] in (1, 2)
            self.checks.reserved(state, self._value[index], tokens, self._ids(3, index), comparable=known)

    def _release_physical(self, state: PoolState, index: int, method: str) -> None:
        tokens = self._must(0, index)
        if len(tokens):
            state.require_may_compact(len(tokens) // state.page_size if method.startswith("cancel") else 0)
        if self.checks is None:
            self._call(method, getattr(state.allocator, method), self._on_device(self._tensor(0, index)))
            self.hazards.log.clear()
            return
        released = self.checks.before_release_physical(
            state, tokens, reserved_only=method.startswith("cancel")
        )
        self._call(method, getattr(state.allocator, method), self._on_device(self._tensor(0, index)))
        self._judge_log()
        self.checks.released(state, *released)

    def _free_physical(self, state: PoolState, index: int) -> None:
        self._release_physical(state, index, "free_physical")

    def _cancel_physical(self, state: PoolState, index: int) -> None:
        self._release_physical(state, index, "cancel_physical_reservation")
