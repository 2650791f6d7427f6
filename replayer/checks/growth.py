"""Whether the token ids an alloc answered are what the call asked for, and what they mean for the oracle."""

from __future__ import annotations

import numpy as np

from replayer.content import IntArray, same_ids
from replayer.failure import CheckFailure
from replayer.oracle import Growth, TraceContradiction, shown
from replayer.pool_state import PoolState

_NONE: IntArray = np.empty(0, dtype=np.int64)


def whole_pages_growth(state: PoolState, tokens: IntArray, need: int) -> Growth:
    """``alloc``: whole fresh pages, token after token.

    Raises:
        CheckFailure: C3 or C13.
    """
    size = state.page_size
    pages = tokens[::size] // size
    _require_count(state, tokens, need, "alloc")
    _require_equal(state, tokens, _tokens_of(pages, size)[:need], "alloc")
    _require_fresh(state, pages)
    state.oracle.start_pages(pages, size)
    state.oracle.predecessor[pages[1:]] = pages[:-1]
    return Growth(pages, pages, _NONE)


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
    _require_count(state, tokens, int((seq - prefix).sum()), "alloc_extend")
    begin = 0
    chains = []
    for had, has, last_token in zip(prefix.tolist(), seq.tolist(), last.tolist(), strict=True):
        answered = tokens[begin : begin + has - had]
        begin += has - had
        if had:
            _require_token(state, last_token, had - 1)
        tail = min(has, -(-had // size) * size) - had
        _require_equal(
            state, answered[:tail], last_token + 1 + np.arange(tail), "alloc_extend in the tail page"
        )
        if tail:
            page = last_token // size
            oracle.fill(np.array([page]), np.array([last_token % size + 1 + tail]))
            loose.append(answered[:tail])
        rest = answered[tail:]
        pages = rest[::size] // size
        _require_equal(state, rest, _tokens_of(pages, size)[: len(rest)], "alloc_extend in new pages")
        if len(pages):
            filled = len(rest) // size
            new.append(pages)
            whole.append(pages[:filled])
            loose.append(rest[filled * size :])
            chains.append((pages, last_token // size if had else -1, len(rest) - (len(pages) - 1) * size))
    fresh = np.concatenate(new) if new else _NONE
    _require_fresh(state, fresh)
    oracle.start_pages(fresh, size)
    for pages, before, in_last in chains:
        oracle.predecessor[pages[1:]] = pages[:-1]
        oracle.predecessor[pages[0]] = before
        oracle.filled[pages[-1]] = in_last
    return Growth(fresh, np.concatenate(whole) if whole else _NONE, np.concatenate(loose) if loose else _NONE)


def decode_growth(state: PoolState, tokens: IntArray, seq: IntArray, last: IntArray) -> Growth:
    """``alloc_decode``: the next token of each request, in the page of its last one or first in a fresh page.

    Raises:
        CheckFailure: C3 or C13.
    """
    size, oracle = state.page_size, state.oracle
    offsets = (seq - 1) % size
    crosses = offsets == 0
    _require_count(state, tokens, len(seq), "alloc_decode")
    if not crosses.any():
        _require_equal(state, tokens, last + 1, "alloc_decode")
        oracle.fill(last // size, offsets + 1)
        return Growth(_NONE, _NONE, tokens)
    stays = ~crosses
    _require_equal(state, tokens[stays], last[stays] + 1, "alloc_decode")
    oracle.fill(last[stays] // size, offsets[stays] + 1)
    fresh = tokens[crosses] // size
    _require_equal(state, tokens[crosses], fresh * size, "alloc_decode in a new page")
    _require_fresh(state, fresh)
    oracle.start_pages(fresh, 1)
    oracle.predecessor[fresh] = np.where(seq[crosses] > 1, last[crosses] // size, -1)
    return Growth(fresh, _NONE, tokens)


def _tokens_of(pages: IntArray, size: int) -> IntArray:
    tokens: IntArray = pages if size == 1 else (pages[:, None] * size + np.arange(size)).reshape(-1)
    return tokens


def _require_count(state: PoolState, tokens: IntArray, expected: int, what: str) -> None:
    if len(tokens) != expected:
        raise CheckFailure(
            "C13",
            f"{what} answered another number of ids than was asked for",
            state.name,
            expected=f"{expected} ids",
            found=f"{len(tokens)} ids",
        )


def _require_equal(state: PoolState, found: IntArray, expected: IntArray, what: str) -> None:
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


def _require_fresh(state: PoolState, pages: IntArray) -> None:
    oracle = state.oracle
    if not len(pages):
        return
    low, high = int(pages.min()), int(pages.max())
    if low < state.min_page_index or high >= oracle.num_virtual_ids:
        raise CheckFailure("C3", f"handed out virtual pages {low}..{high}, outside {state.min_page_index}..{oracle.num_virtual_ids - 1}",
                           state.name, [low, high])  # fmt: skip
    if oracle.live[pages].any():
        twice = pages[oracle.live[pages]]
        raise CheckFailure(
            "C3", f"handed out virtual page(s) {shown(twice)}, which are live", state.name, twice.tolist()
        )
    if len(pages) > 1 and len(np.unique(pages)) != len(pages):
        raise CheckFailure(
            "C3", f"handed out one virtual page twice in {shown(pages)}", state.name, pages.tolist()
        )


def require_last_tokens(state: PoolState, seq: IntArray, last: IntArray) -> None:
    """Every request that has tokens continues one that is live.

    Raises:
        TraceContradiction: otherwise.
    """
    pages, offsets = np.divmod(last, state.page_size)
    oracle, begins = state.oracle, seq <= 1
    try:
        # In a new page it does not matter how much the last one holds: less than was handed out of it, if it came back from the host.
        follows = (offsets < oracle.filled[pages]) | ((seq - 1) % state.page_size == 0)
        continues = (oracle.live[pages] & follows) | begins
    except IndexError:
        continues = np.zeros(1, dtype=np.bool_)
    if not continues.all():
        raise TraceContradiction(f"last_loc names tokens of pool {state.name!r} that are not live")
    wrong = last[~begins & (offsets != (seq - 2) % state.page_size)]
    if len(wrong):
        raise TraceContradiction(
            f"last_loc {shown(wrong)} of pool {state.name!r} cannot be the last but one of the lengths given"
        )


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
