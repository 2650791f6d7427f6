"""What must be true of a pool, told from the calls alone: which virtual pages live, who they are, what their tokens hold.

Written without looking at an allocator: it knows ids, generations and contents, and nothing about where a page lies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from replayer.content import IntArray, Mask, Words, offset_words, page_words, same_ids, written_words
from replayer.tokens import Tokens

_NO_WORD = np.uint64(0)


class TraceContradiction(Exception):
    """An event that cannot have happened in this state (frees what is not live, ids out of range): the trace's fault.
    The driver adds file, event and reason."""


@dataclass
class Growth:
    """Tokens that an event brought to life.

    ``new_pages``: virtual pages not live before, int64 ``[m]``. ``whole_pages``: those of them that are filled to the end.
    ``loose``: the tokens that lie in none of these.
    """

    new_pages: IntArray
    whole_pages: IntArray
    loose: Tokens


@dataclass
class PageRecords:
    """What some pages hold, apart from the pages: stamps of offset 0, uint64 ``[n]``; tokens written, int64 ``[n]``; times a forward
    has written each token, uint8 ``[n, page_size]``."""

    words: Words
    filled: IntArray
    times_written: npt.NDArray[np.uint8]

    def kept(self, rows: IntArray | Mask) -> PageRecords:
        return PageRecords(self.words[rows], self.filled[rows], self.times_written[rows])

    def replaced(self, rows: Mask, others: PageRecords) -> PageRecords:
        """These, with the rows where ``rows`` is true taken from ``others``."""
        return PageRecords(
            np.where(rows, others.words, self.words),
            np.where(rows, others.filled, self.filled),
            np.where(rows[:, None], others.times_written, self.times_written),
        )

    @staticmethod
    def joined(records: Sequence[PageRecords], page_size: int) -> PageRecords:
        """Records end to end."""
        nothing = PageRecords(
            np.empty(0, dtype=np.uint64),
            np.empty(0, dtype=np.int64),
            np.empty((0, page_size), dtype=np.uint8),
        )
        parts = (nothing, *records)
        return PageRecords(
            np.concatenate([part.words for part in parts]),
            np.concatenate([part.filled for part in parts]),
            np.concatenate([part.times_written for part in parts]),
        )


class PoolOracle:
    """One pool's virtual pages (the id space its table is indexed by).

    Attributes, each with one row per virtual page:
        live: bool.
        generation: int64, counts the times the page was handed out.
        filled: int64, tokens written so far (a prefix of the page).
        predecessor: int64, the page before this one in its request, -1 unknown.
        times_written: uint8 ``[num_virtual_ids, page_size]``, forwards that have written each token.

    ``endings`` goes up whenever pages end: what lived before and saw the same number lives still.
    """

    def __init__(self, number: int, name: str, num_virtual_ids: int, page_size: int) -> None:
        self.number, self.name = number, name
        self.num_virtual_ids, self.page_size = num_virtual_ids, page_size
        self._offsets = offset_words(page_size)
        self._numbers_in_page = np.arange(page_size)
        self.generation = np.zeros(num_virtual_ids, dtype=np.int64)
        self.endings = 0
        self.clear()

    def clear(self) -> None:
        count = self.num_virtual_ids
        self.endings += 1
        self._rows = np.zeros(count, dtype=np.int64)
        self._numbers = np.arange(count, dtype=np.int64)
        self.live = np.zeros(count, dtype=np.bool_)
        self.filled = np.zeros(count, dtype=np.int64)
        self.predecessor = np.full(count, -1, dtype=np.int64)
        self.times_written = np.zeros((count, self.page_size), dtype=np.uint8)
        self._times_written = self.times_written.reshape(-1)
        #: By virtual page: whether a row of ``times_written`` may be anything but zeros.
        self._is_written = np.zeros(count, dtype=np.bool_)
        self._words = np.zeros(count, dtype=np.uint64)
        self.live_count = 0

    def resize(self, num_virtual_ids: int) -> None:
        self.num_virtual_ids = num_virtual_ids
        self.generation = np.resize(self.generation, num_virtual_ids)
        self.clear()

    # -- events

    def start_pages(self, pages: IntArray, filled: IntArray | int) -> None:
        """Virtual pages come to life with ``filled`` tokens each."""
        generations = self.generation[pages] + 1
        self.generation[pages] = generations
        self._words[pages] = page_words(self.number, pages, generations)
        self.live[pages] = True
        self.filled[pages] = filled
        self.times_written[pages] = 0
        self._is_written[pages] = False
        self.predecessor[pages] = -1
        self.live_count += len(pages)

    def fill(self, pages: IntArray, upto: IntArray) -> None:
        """Pages that live already hold tokens up to ``upto`` now."""
        np.maximum.at(self.filled, pages, upto)

    def end_pages(self, pages: IntArray) -> None:
        self.live[pages] = False
        self.live_count -= len(pages)
        self.endings += 1

    def hand_over(self, new_pages: IntArray, old_pages: IntArray) -> None:
        """``new_pages[i]`` takes over the place, and so the contents, of ``old_pages[i]``, which dies."""
        self.generation[new_pages] += 1
        for column in (self._words, self.filled, self.times_written, self._is_written):
            column[new_pages] = column[old_pages]
        self.live[new_pages] = True
        self.live[old_pages] = False
        self.endings += 1

    def written(self, tokens: Tokens) -> Words:
        """A forward has written these tokens: their stamps from now on, uint64 ``[n]``."""
        self._times_written[tokens.ids] += 1
        self._is_written[tokens.pages] = True
        return self.words_of(tokens)

    def adopt(self, pages: IntArray, records: PageRecords) -> None:
        """Pages that live hold from now on what was recorded of others: their bytes came back from the host, or from a transfer."""
        self._words[pages] = records.words
        self.filled[pages] = records.filled
        self.times_written[pages] = records.times_written
        self._is_written[pages] = True

    # -- expectations

    def records_of(self, pages: IntArray) -> PageRecords:
        """What pages hold now."""
        return PageRecords(
            self._words[pages].copy(), self.filled[pages].copy(), self.times_written[pages].copy()
        )

    def contents_of(self, records: PageRecords) -> Words:
        """Stamps of whole recorded pages, uint64 ``[n, page_size]``; tokens not there are 0."""
        words: Words = records.words[:, None] + self._offsets + written_words(records.times_written)
        words[self._numbers_in_page >= records.filled[:, None]] = 0
        return words

    def words_of(self, tokens: Tokens) -> Words:
        """Stamps of single tokens: uint64 ``[n]``."""
        words: Words = self._words[tokens.pages] + self._offsets[tokens.offsets]
        written = self._times_written[tokens.ids]
        if np.count_nonzero(written):
            words += written_words(written)
        return words

    def whole_page_words(self, pages: IntArray) -> Words:
        """Stamps of pages that are filled to the end and that no forward has written: uint64 ``[n, page_size]``."""
        words: Words = self._words[pages][:, None] + self._offsets
        return words

    def page_contents(self, pages: IntArray) -> Words:
        """Stamps of whole pages, uint64 ``[n, page_size]``; tokens not there yet are 0."""
        words = self.whole_page_words(pages)
        written = np.flatnonzero(self._is_written[pages])
        if len(written):
            words[written] += written_words(self.times_written[pages[written]])
        filled = self.filled[pages]
        part = np.flatnonzero(filled < self.page_size)
        if len(part):
            words[part] = np.where(self._numbers_in_page < filled[part, None], words[part], _NO_WORD)
        return words

    def named_twice(self, pages: IntArray) -> bool:
        """Whether a page of this table is among ``pages`` more than once."""
        if len(pages) < 2:
            return False
        if len(pages) > self.num_virtual_ids:
            return True
        numbers = self._numbers[: len(pages)]
        self._rows[pages] = numbers  # of a page named twice the last row stays
        return not same_ids(self._rows[pages], numbers)

    def live_pages(self) -> IntArray:
        return np.flatnonzero(self.live)

    def owner_of_word(self, word: int, offset: int) -> int | None:
        """Which virtual page a stamp found at ``offset`` belongs to, whatever its generation is now; None if to none."""
        for times in range(3):
            base = (
                np.uint64(word) - self._offsets[offset] - written_words(np.array([times], dtype=np.uint8))[0]
            )
            matches = np.flatnonzero(self._words == base)
            if len(matches):
                return int(matches[0])
        return None

    # -- judging what the trace says

    def require_pages(self, pages: IntArray, what: str) -> None:
        """Ids are pages of this table, and not the padding page.

        Raises:
            TraceContradiction: otherwise.
        """
        if len(pages) and (int(pages.min()) <= 0 or int(pages.max()) >= self.num_virtual_ids):
            bad = pages[(pages <= 0) | (pages >= self.num_virtual_ids)]
            raise TraceContradiction(
                f"{what} names virtual page(s) {shown(bad)}, outside 1..{self.num_virtual_ids - 1} of pool {self.name!r}"
            )

    def require_live(self, pages: IntArray, what: str) -> None:
        """Every page lives and is named once (C13).

        Raises:
            TraceContradiction: otherwise.
        """
        self.require_pages(pages, what)
        live = self.live[pages]
        if np.count_nonzero(live) < len(pages):
            dead = pages[~live]
            raise TraceContradiction(
                f"C13: {what} names virtual page(s) {shown(dead)} of pool {self.name!r}, which are not live"
            )
        if self.named_twice(pages):
            unique, counts = np.unique(pages, return_counts=True)
            raise TraceContradiction(
                f"C13: {what} names virtual page(s) {shown(unique[counts > 1])} of pool {self.name!r} more than once"
            )


def shown(ids: IntArray, most: int = 8) -> str:
    """A few ids as text."""
    text = ", ".join(str(int(number)) for number in ids[:most])
    return text if len(ids) <= most else f"{text}, ... ({len(ids)} in all)"
