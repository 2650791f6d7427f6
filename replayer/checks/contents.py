"""C6: KV bytes at the places the mapping gives, against the stamps the oracle expects."""

from __future__ import annotations

import numpy as np

from replayer.content import IntArray
from replayer.failure import CheckFailure
from replayer.oracle import shown
from replayer.pool_state import Latest, PoolState
from replayer.tokens import Tokens

#: Pages compared at once in a sweep, so that its memory does not grow with the pool.
PAGES_AT_ONCE = 4096


def check_contents(state: PoolState, virtual_pages: IntArray) -> None:
    """Bytes of some live pages, where they were placed.

    Raises:
        CheckFailure: C6, naming the first page and what it holds instead.
    """
    words = state.oracle.page_contents(virtual_pages)
    wrong = state.store.differing(state.placed_physical[virtual_pages], words)
    if np.count_nonzero(wrong):
        raise _failure(state, virtual_pages, words, wrong)


def sweep_contents(state: PoolState) -> int:
    """All live pages; their number.

    Raises:
        CheckFailure: C6.
    """
    pages = state.oracle.live_pages()
    step = max(1, PAGES_AT_ONCE // (1 if state.store.form == "stamp" else max(1, state.page_bytes // 4096)))
    for start in range(0, len(pages), step):
        check_contents(state, pages[start : start + step])
    return len(pages)


def write_new_pages(state: PoolState, pages: IntArray) -> None:
    """Put the stamps of new pages whose tokens came to life all at once."""
    if len(pages):
        state.store.write_pages(state.placed_physical[pages], state.oracle.whole_page_words(pages))


def write_new_tokens(state: PoolState, tokens: Tokens) -> None:
    """Put the stamps of tokens that came to life; the rest of a page stays as the allocator handed it out."""
    if len(tokens):
        state.latest = Latest(tokens, state.places_of(tokens), state.oracle.endings, state.changes)
        state.store.write_tokens(state.latest.places, state.oracle.words_of(tokens))


def _failure(state: PoolState, pages: IntArray, words: np.ndarray, wrong: np.ndarray) -> CheckFailure:
    row, offset = (int(axis[0]) for axis in np.nonzero(wrong))
    page, place = int(pages[row]), int(state.placed_physical[pages[row]])
    found_words = state.store.found_words(np.array([place]))
    expected = (
        "zero bytes, the token is not written yet"
        if words[row, offset] == 0
        else f"the stamp of virtual page {page}"
    )
    if found_words is None:
        found = "other bytes"
    elif found_words[0, offset] == 0:
        found = "zero bytes"
    else:
        owner = state.oracle.owner_of_word(int(found_words[0, offset]), offset)
        if owner is None:
            found = "a stamp of no page that lives now (an earlier generation, or another offset)"
        elif owner == page:
            found = "its own stamp from before or after another write by a forward"
        else:
            found = f"the stamp of virtual page {owner}"
    return CheckFailure(
        "C6",
        f"virtual page {page} at physical page {place}, token offset {offset} ({int(wrong.sum())} token(s) wrong, "
        f"pages {shown(pages[wrong.any(axis=1)])})",
        state.name,
        [int(number) for number in pages[wrong.any(axis=1)][:16]],
        expected=expected,
        found=found,
    )
