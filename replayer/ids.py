"""Recorded ids and the allocator's own.

An allocator with the engine's placement rule hands out the recorded ids, so a trace can be driven as it is. Any other one answers with
ids of its own; they are matched page by page as they are handed out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from replayer.content import IntArray
from replayer.oracle import TraceContradiction, shown

if TYPE_CHECKING:
    from replayer.pool_state import PoolState


def owner_of(states: Sequence[PoolState], state: PoolState) -> PoolState:
    """The pool whose ids ``state`` is indexed by: itself, or the owner with as many ids; a header does not name it."""
    if state.header.is_id_owner:
        return state
    owners = [other for other in states if other.header.is_id_owner]
    # Slots of states have ids of their own, however many there are.
    owners = [other for other in owners if not other.is_state] or owners
    alike = [other for other in owners if other.header.num_virtual_ids == state.header.num_virtual_ids]
    return (alike or owners or [state])[0]


class IdMap:
    """``identity``: recorded ids are the allocator's. Otherwise one table a pool, recorded page to own page, -1 unknown."""

    def __init__(self, states: Sequence[PoolState], *, identity: bool) -> None:
        self.identity = identity
        self._own: dict[str, IntArray] = {}
        for state in states:
            # A pool indexed by another pool's ids shares that pool's table.
            home = owner_of(states, state)
            if home.name not in self._own:
                self._own[home.name] = np.full(home.header.num_virtual_ids + 1, -1, dtype=np.int64)
            self._own[state.name] = self._own[home.name]

    def share(self, guest: PoolState, owner: PoolState) -> None:
        """``guest`` is indexed by the ids of ``owner``."""
        self._own[guest.name] = self._own[owner.name]

    def learn(self, state: PoolState, recorded: IntArray, own: IntArray) -> None:
        """An alloc that answered ``recorded`` in the engine answered ``own`` here (token ids, same length)."""
        if len(recorded) != len(own):
            raise TraceContradiction(
                f"the engine answered {len(recorded)} token ids, the allocator {len(own)}"
            )
        pages = recorded // state.page_size
        table = self._own[state.name]
        if len(pages) and not 0 <= pages.min() <= pages.max() < len(table):
            raise TraceContradiction(f"the engine answered ids outside pool {state.name!r}")
        table[pages] = own // state.page_size

    def pages(self, state: PoolState, recorded: IntArray) -> IntArray:
        """Own pages of recorded virtual pages.

        Raises:
            TraceContradiction: a page that was never handed out.
        """
        if self.identity:
            return recorded
        table = self._own[state.name]
        if len(recorded) and not 0 <= recorded.min() <= recorded.max() < len(table):
            raise TraceContradiction(f"page ids outside pool {state.name!r}")
        own = table[recorded]
        if (own < 0).any():
            raise TraceContradiction(
                f"pages {shown(recorded[own < 0])} of pool {state.name!r} were never handed out"
            )
        mapped: IntArray = own
        return mapped

    def tokens(self, state: PoolState, recorded: IntArray) -> IntArray:
        """Own token ids of recorded ones; -1 (no token) stays -1."""
        if self.identity:
            return recorded
        known = recorded >= 0
        own = np.full(len(recorded), -1, dtype=np.int64)
        pages, offsets = np.divmod(recorded[known], state.page_size)
        own[known] = self.pages(state, pages) * state.page_size + offsets
        return own
