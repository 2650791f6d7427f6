"""Whether the token ids an alloc answered are what the call asked for, and what they mean for the oracle. See `replayer.checks.decoding`
for ``alloc_decode``."""

from __future__ import annotations

import numpy as np

from replayer.checks.handed_out import require_count, require_equal, require_fresh
from replayer.content import IntArray
from replayer.oracle import Growth, TraceContradiction
from replayer.pool_state import PoolState
from replayer.tokens import Tokens

_NONE: IntArray = np.empty(0, dtype=np.int64)


def whole_pages_growth(state: PoolState, tokens: IntArray, need: int) -> Growth:
    """``alloc``: whole fresh pages, token after token.

    Raises:
        CheckFailure: C3 or C13.
    """
    size = state.page_size
    pages = tokens[::size] // size
    require_count(state, tokens, need, "alloc")
    require_equal(state, tokens, _tokens_of(pages, size)[:need], "alloc")
    require_fresh(state, pages)
    state.oracle.start_pages(pages, size)
    state.oracle.predecessor[pages[1:]] = pages[:-1]
    return Growth(pages, pages, Tokens.none())


def extend_growth(
    state: PoolState, tokens: IntArray, prefix: IntArray, seq: IntArray, last: IntArray
) -> Growth:
    """``alloc_extend``: the rest of the page each request's last token lies in, then fresh pages; see `allocator.sequences`.

    Raises:
        CheckFailure: C3 or C13.
        TraceContradiction: ``last_loc`` names no live token, or one at another position.
    """
    size, oracle = state.page_size, state.oracle
    new, whole, loose = [], [], []
    require_count(state, tokens, int((seq - prefix).sum()), "alloc_extend")
    begin = 0
    chains = []
    for had, has, last_token in zip(prefix.tolist(), seq.tolist(), last.tolist(), strict=True):
        answered = tokens[begin : begin + has - had]
        begin += has - had
        if had:
            _require_token(state, last_token, had - 1)
        tail = min(has, -(-had // size) * size) - had
        require_equal(
            state, answered[:tail], last_token + 1 + np.arange(tail), "alloc_extend in the tail page"
        )
        if tail:
            page = last_token // size
            oracle.fill(np.array([page]), np.array([last_token % size + 1 + tail]))
            loose.append(answered[:tail])
        rest = answered[tail:]
        pages = rest[::size] // size
        require_equal(state, rest, _tokens_of(pages, size)[: len(rest)], "alloc_extend in new pages")
        if len(pages):
            filled = len(rest) // size
            new.append(pages)
            whole.append(pages[:filled])
            loose.append(rest[filled * size :])
            chains.append((pages, last_token // size if had else -1, len(rest) - (len(pages) - 1) * size))
    fresh = np.concatenate(new) if new else _NONE
    require_fresh(state, fresh)
    oracle.start_pages(fresh, size)
    for pages, before, in_last in chains:
        oracle.predecessor[pages[1:]] = pages[:-1]
        oracle.predecessor[pages[0]] = before
        oracle.filled[pages[-1]] = in_last
    in_part = np.concatenate(loose) if loose else _NONE
    return Growth(fresh, np.concatenate(whole) if whole else _NONE, Tokens.split(in_part, size))


def _tokens_of(pages: IntArray, size: int) -> IntArray:
    tokens: IntArray = pages if size == 1 else (pages[:, None] * size + np.arange(size)).reshape(-1)
    return tokens


def _require_token(state: PoolState, token: int, position: int) -> None:
    page, offset = divmod(token, state.page_size)
    oracle = state.oracle
    # Within a page: a page that came back from the host may hold less than was handed out of it.
    gap = (
        position % state.page_size != state.page_size - 1
        and offset >= oracle.filled[page % oracle.num_virtual_ids]
    )
    if not 0 <= page < oracle.num_virtual_ids or not oracle.live[page] or gap:
        raise TraceContradiction(f"last_loc {token} of pool {state.name!r} is not a live token")
    if offset != position % state.page_size:
        raise TraceContradiction(
            f"last_loc {token} of pool {state.name!r} cannot be position {position} of a request"
        )
