"""``alloc_decode``: what it is asked for, and whether the answer is that. Engines ask once a token, so this is what a replay does most."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from replayer.checks.handed_out import require_count, require_equal, require_fresh
from replayer.content import IntArray, Mask
from replayer.oracle import Growth, TraceContradiction, shown
from replayer.pool_state import PoolState
from replayer.tokens import Tokens

_NONE: IntArray = np.empty(0, dtype=np.int64)


@dataclass(slots=True)
class DecodeStep:
    """One more token for each of ``n`` requests.

    ``seq_lens``: lengths with that token; ``last_loc``: the token before it, which is what makes ``following`` its id where it stays in
    the page, and ``last_pages`` the page of that one; ``offsets``: where in its page it lies; ``crosses``: whether that is a new page, for
    ``new_pages`` of them. int64 or bool ``[n]``.
    """

    seq_lens: IntArray
    last_loc: IntArray
    last_pages: IntArray
    following: IntArray
    offsets: IntArray
    crosses: Mask
    new_pages: int

    @classmethod
    def asked(cls, seq_lens: IntArray, last_loc: IntArray, page_size: int) -> DecodeStep:
        """
        Raises:
            TraceContradiction: the two lists differ in length, or a length is below 1.
        """
        if len(seq_lens) != len(last_loc) or np.count_nonzero(seq_lens < 1):
            raise TraceContradiction("its seq_lens and last_loc differ in length, or a length is below 1")
        offsets = (seq_lens - 1) % page_size
        crosses = offsets == 0
        new_pages = int(np.count_nonzero(crosses))
        return cls(seq_lens, last_loc, last_loc // page_size, last_loc + 1, offsets, crosses, new_pages)

    def require_last_tokens(self, state: PoolState) -> None:
        """Every request that has tokens continues one that is live.

        Raises:
            TraceContradiction: otherwise.
        """
        oracle, last, pages = state.oracle, self.last_loc, self.last_pages
        try:
            # In a new page (offset 0) it does not matter how much the last one holds: less than was handed out of it, if it came back
            # from the host.
            live = oracle.live[pages] & (oracle.filled[pages] >= self.offsets)
        except IndexError:
            live = np.zeros(len(last), dtype=np.bool_)
        continues = live & (last >= 0) & (self.following % state.page_size == self.offsets)
        if np.count_nonzero(continues) < len(last):
            self._judge_one_by_one(state)

    def _judge_one_by_one(self, state: PoolState) -> None:
        """Requests that begin have no last token; what is wrong with the others is told apart."""
        oracle, last, pages, begins = state.oracle, self.last_loc, self.last_pages, self.seq_lens == 1
        inside = (pages >= 0) & (pages < oracle.num_virtual_ids)
        known = np.where(inside, pages, 0)
        given = (last % state.page_size < oracle.filled[known]) | self.crosses
        if not (begins | (inside & oracle.live[known] & given)).all():
            raise TraceContradiction(f"last_loc names tokens of pool {state.name!r} that are not live")
        wrong = last[~begins & (self.following % state.page_size != self.offsets)]
        if len(wrong):
            raise TraceContradiction(
                f"last_loc {shown(wrong)} of pool {state.name!r} cannot be the last but one of the lengths given"
            )

    def growth(self, state: PoolState, tokens: IntArray) -> Growth:
        """The answer, and what it means: the next token of each request, in the page of its last one or first in a fresh page.

        Raises:
            CheckFailure: C3 or C13.
        """
        size, oracle, offsets = state.page_size, state.oracle, self.offsets
        require_count(state, tokens, len(offsets), "alloc_decode")
        if not self.new_pages:
            require_equal(state, tokens, self.following, "alloc_decode")
            oracle.fill(self.last_pages, offsets + 1)
            return Growth(_NONE, _NONE, Tokens(tokens, self.last_pages, offsets))
        pages = tokens // size
        crosses, stays = self.crosses, ~self.crosses
        require_equal(state, tokens[stays], self.following[stays], "alloc_decode")
        oracle.fill(pages[stays], offsets[stays] + 1)
        fresh = pages[crosses]
        require_equal(state, tokens[crosses], fresh * size, "alloc_decode in a new page")
        require_fresh(state, fresh)
        oracle.start_pages(fresh, 1)
        begins = self.seq_lens[crosses] == 1
        oracle.predecessor[fresh] = self.last_pages[crosses]
        if np.count_nonzero(begins):
            oracle.predecessor[fresh[begins]] = -1
        return Growth(fresh, _NONE, Tokens(tokens, pages, offsets))
