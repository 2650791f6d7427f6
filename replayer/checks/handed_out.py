"""The ids that an alloc answered: how many, which, and whether they were free."""

from __future__ import annotations

import numpy as np

from replayer.content import IntArray, same_ids
from replayer.failure import CheckFailure
from replayer.oracle import shown
from replayer.pool_state import PoolState


def require_count(state: PoolState, tokens: IntArray, expected: int, what: str) -> None:
    """C13: as many ids as were asked for.

    Raises:
        CheckFailure: C13.
    """
    if len(tokens) != expected:
        raise CheckFailure(
            "C13",
            f"{what} answered another number of ids than was asked for",
            state.name,
            expected=f"{expected} ids",
            found=f"{len(tokens)} ids",
        )


def require_equal(state: PoolState, found: IntArray, expected: IntArray, what: str) -> None:
    """C13: the ids are the request's next tokens.

    Raises:
        CheckFailure: C13.
    """
    if not same_ids(found, expected):
        where = (
            int(np.argmax(found != expected))
            if len(found) == len(expected)
            else min(len(found), len(expected))
        )
        raise CheckFailure(
            "C13",
            f"{what} answered ids that are not the request's next tokens, from number {where} on",
            state.name,
            sorted({int(token) // state.page_size for token in found[where : where + 4]}),
            expected=shown(expected[where:]),
            found=shown(found[where:]),
        )


def require_fresh(state: PoolState, pages: IntArray) -> None:
    """C3: virtual pages of the table, none of which lives, each once.

    Raises:
        CheckFailure: C3.
    """
    oracle = state.oracle
    if not len(pages):
        return
    low, high = int(pages.min()), int(pages.max())
    if low < state.min_page_index or high >= oracle.num_virtual_ids:
        raise CheckFailure("C3", f"handed out virtual pages {low}..{high}, outside {state.min_page_index}..{oracle.num_virtual_ids - 1}",
                           state.name, [low, high])  # fmt: skip
    live = oracle.live[pages]
    if np.count_nonzero(live):
        twice = pages[live]
        raise CheckFailure(
            "C3", f"handed out virtual page(s) {shown(twice)}, which are live", state.name, twice.tolist()
        )
    if oracle.named_twice(pages):
        raise CheckFailure(
            "C3", f"handed out one virtual page twice in {shown(pages)}", state.name, pages.tolist()
        )
