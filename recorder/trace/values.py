"""Value codecs: the ids of many lists, laid end to end, as a small msgpack list.

Besides the plain columns of columns.py:

    ["scaled", factor, V]                element = factor * V
    ["runs", stride, gaps, counts]       runs of `counts` ids, `stride` apart; a run starts `gaps` after the
                                         end of the run before it (the first one after 0)
    ["paged", page, V, offsets, counts]  segments of consecutive ids within one page: V has their pages

Every codec is lossless for any int64 ids (arithmetic modulo 2**64); which one is used is the writer's choice
and changes sizes only. Decoding has no Python loop over elements.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np

from .columns import (
    Int64Array,
    check_integer,
    column_length,
    decode_column,
    encode_column,
    trial_size,
)
from .errors import DamagedTrace, UnknownForm
from .limits import MAX_CODEC_DEPTH

_COLUMN_FORMS: Final = frozenset({"const", "plain", "delta"})


_STEPS = np.arange(1 << 16, dtype=np.int64)
_KEPT_STEPS: Final = 1 << 21
_BLOCK_IDS: Final = 1 << 17
_PROBE: Final = 64


def steps(total: int) -> Int64Array:
    """int64[total]: 0, 1, 2, ... Read-only; kept between calls: filling it costs as much as using it."""
    global _STEPS
    if total > _KEPT_STEPS:
        return np.arange(total, dtype=np.int64)
    if total > len(_STEPS):
        _STEPS = np.arange(min(_KEPT_STEPS, max(total, 2 * len(_STEPS))), dtype=np.int64)
        _STEPS.flags.writeable = False
    return _STEPS[:total]


@dataclass
class Segments:
    """Ids as segments: for each i the `counts[i]` ids `starts[i], starts[i] + 1, ...` (counts None: one
    each).
    """

    starts: Int64Array
    counts: Int64Array | None

    def expand(self, total: int) -> Int64Array:
        """int64[total]: the ids. `total` is the sum of the counts."""
        return self.starts if self.counts is None else expand(self.starts, self.counts, 1, total)


def expand(starts: Int64Array, counts: Int64Array, stride: int, total: int) -> Int64Array:
    """int64[total]: for each i, `counts[i]` ids `starts[i], starts[i] + stride, ...`. `total` is the sum of
    counts.
    """
    before = np.cumsum(counts) - counts
    if stride != 1:
        out = np.repeat(starts - before * np.int64(stride), counts)
        out += steps(total) * np.int64(stride)
        return out
    if total <= 2 * _BLOCK_IDS:
        out = np.repeat(starts - before, counts)
        out += steps(total)
        return out
    # In pieces that stay in the processor's cache: one pass over memory instead of three.
    out = np.empty(total, dtype=np.int64)
    cuts = np.searchsorted(before, np.arange(0, total, _BLOCK_IDS), side="right") - 1
    cuts = np.unique(np.append(cuts, len(starts)))
    for low, high in pairwise(cuts.tolist()):
        begin = int(before[low])
        end = int(before[high]) if high < len(before) else total
        piece = np.repeat(starts[low:high] - before[low:high] + begin, counts[low:high])
        np.add(piece, steps(end - begin), out=out[begin:end])
    return out


def list_starts(lengths: Int64Array) -> Int64Array:
    """int64[m]: where each list begins when they lie end to end."""
    return np.cumsum(lengths) - lengths


def encode_values(values: Int64Array, lengths: Int64Array, page_size: int) -> list[Any]:
    """The smallest form found for `values` (int64[sum of lengths])."""
    if len(values) < 2 or bool((values == values[0]).all()):
        return encode_column(values)
    if page_size > 1:
        if not any(bool(_in_page(part, page_size).any()) for part in (values[:_PROBE], values)):
            return ["scaled", page_size, encode_values(values // page_size, lengths, 1)]
        paged = _paged(values, lengths, page_size)
        if paged is not None:
            return paged
    candidates = [encode_column(values)]
    runs = _runs(values)
    if runs is not None:
        candidates.append(runs)
    return min(candidates, key=trial_size) if len(candidates) > 1 else candidates[0]


def _in_page(values: Int64Array, page_size: int) -> Int64Array:
    """values % page_size: a division takes several times as long as a mask."""
    if page_size & (page_size - 1):
        return values % page_size
    return values & np.int64(page_size - 1)


def _paged(values: Int64Array, lengths: Int64Array, page_size: int) -> list[Any] | None:
    """Segments within pages, when there are at most half as many segments as ids.

    A segment ends with its list too, so that the reader can put lists in another order without expanding
    them.
    """
    ends = (values[1:] - values[:-1] != 1) | (_in_page(values[1:], page_size) == 0)
    begins = list_starts(lengths)
    ends[begins[(begins > 0) & (begins < len(values))] - 1] = True
    breaks = np.flatnonzero(ends) + 1
    if (len(breaks) + 1) * 2 > len(values):
        return None
    starts = np.concatenate((np.zeros(1, dtype=np.int64), breaks))
    counts = np.diff(np.append(starts, len(values)))
    first = values[starts]
    pages = first // page_size
    ones = np.zeros(0, dtype=np.int64)
    return [
        "paged",
        page_size,
        encode_values(pages, ones, 1),
        encode_column(first - pages * page_size),
        encode_column(counts),
    ]


def _runs(values: Int64Array) -> list[Any] | None:
    """Runs with stride 1, when there are at most half as many runs as ids."""
    breaks = np.flatnonzero(np.diff(values) != 1) + 1
    if (len(breaks) + 1) * 2 > len(values):
        return None
    positions = np.concatenate((np.zeros(1, dtype=np.int64), breaks))
    counts = np.diff(np.append(positions, len(values)))
    gaps = values[positions]
    gaps[1:] -= values[breaks - 1] + 1
    return ["runs", 1, encode_column(gaps), encode_column(counts)]


def decode_values(codec: Any, total: int, what: str, depth: int = 0) -> Segments:
    """Segments of an encoded value codec, together `total` ids. Raises DamagedTrace."""
    if not isinstance(codec, list) or not codec or depth > MAX_CODEC_DEPTH:
        raise DamagedTrace(f"the ids of {what} are in no known form")
    form = codec[0]
    if isinstance(form, str) and form in _COLUMN_FORMS:
        return Segments(decode_column(codec, what, count=total, limit=total), None)
    if form == "scaled" and len(codec) == 3:
        factor = check_integer(codec[1], f"the factor of {what}")
        ids = decode_values(codec[2], total, what, depth + 1).expand(total)
        return Segments(ids * np.int64(factor), None)
    if form == "runs" and len(codec) == 4:
        stride = check_integer(codec[1], f"the stride of {what}")
        counts = _counts(codec[3], total, what)
        starts = decode_column(codec[2], f"{what} gaps", count=len(counts), limit=total)
        spans = counts * np.int64(stride)
        starts[1:] += spans[:-1]
        np.cumsum(starts, out=starts)
        return (
            Segments(starts, counts) if stride == 1 else Segments(expand(starts, counts, stride, total), None)
        )
    if form == "paged" and len(codec) == 5:
        page_size = check_integer(codec[1], f"the page size of {what}", 1)
        counts = _counts(codec[4], total, what)
        offsets = decode_column(codec[3], f"{what} offsets", count=len(counts), limit=total)
        pages = decode_values(codec[2], len(counts), what, depth + 1).expand(len(counts))
        return Segments(pages * np.int64(page_size) + offsets, counts)
    raise UnknownForm(f"the ids of {what} are in the unknown form {form!r:.40}")


def _counts(column: Any, total: int, what: str) -> Int64Array:
    """Run lengths: each from 1 to `total`, together `total`."""
    column_length(column, f"{what} counts", total)
    counts = decode_column(column, f"{what} counts", limit=total)
    if len(counts) and (int(counts.min()) < 1 or int(counts.max()) > total):
        raise DamagedTrace(f"a run of {what} has an impossible length")
    if int(counts.sum()) != total:
        raise DamagedTrace(f"the runs of {what} hold {int(counts.sum())} ids where {total} are claimed")
    return counts
