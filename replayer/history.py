"""The last events that touched some pages, for the report of a failure. Reads the trace again; a replay that holds pays nothing."""

from __future__ import annotations

from collections import deque
from pathlib import Path

import numpy as np

from recorder.trace import COMPOSITE, Chunk, EventKind, Header, TraceReader

#: Which of an event's lists name token ids (others name pages, lengths or places), by kind; slot 3 is the result.
_TOKEN_LISTS = {
    EventKind.ALLOC: (3,),
    EventKind.ALLOC_EXTEND: (2, 3),
    EventKind.ALLOC_DECODE: (2, 3),
    EventKind.FREE: (0,),
    EventKind.FREE_SEGMENT: (0,),
    EventKind.FORWARD_BEGIN: (0, 1),
    EventKind.SET_INFLIGHT_FORWARD: (0,),
    EventKind.FREE_SWA: (0,),
    EventKind.FREE_SWA_SEGMENT: (0,),
    EventKind.FREE_FULL: (0,),
    EventKind.FREE_FULL_SEGMENT: (0,),
    EventKind.ALLOC_EXTEND_SWA_TAIL: (2, 3),
    EventKind.SET_FULL_TO_SWA_MAPPING: (0,),
}
_PAGE_LISTS = {
    EventKind.ALLOC_WITH_VIRTUAL: (0,),
    EventKind.BIND: (0,),
    EventKind.UNBIND: (0,),
    EventKind.SLOT_ALLOC: (3,),
    EventKind.SLOT_FREE: (0,),
    EventKind.LEASE_BEGIN: (1,),
    EventKind.BACKUP_BEGIN: (2,),
    EventKind.LOAD_BACK_BEGIN: (2,),
}


def last_events(path: Path, pool: str, pages: list[int], before: int, most: int = 6) -> list[tuple[int, str]]:
    """``(event, kind)`` of the last ``most`` events up to ``before`` that name a token of these virtual pages in ``pool``."""
    found: deque[tuple[int, str]] = deque(maxlen=most)
    wanted = np.array(sorted(set(pages)), dtype=np.int64)
    with TraceReader(path) as reader:
        numbers, page_size = _pools(reader.header, pool)
        for chunk in reader.chunks():
            if chunk.first_seq > before:
                break
            for index in _touching(chunk, numbers, page_size, wanted):
                seq = chunk.first_seq + index
                if seq <= before:
                    found.append((seq, EventKind(int(chunk.kind[index])).name.lower()))
    return list(found)


def _pools(header: Header, name: str) -> tuple[list[int], int]:
    """Numbers of the pools whose events name pages of this one by its ids, and its page size. Calls on a composite name tokens by the ids
    that its token pools share."""
    for number, pool in enumerate(header.pools):
        if pool.name == name:
            shared = header.level == COMPOSITE and pool.kind != "mamba"
            return [number, -1] if shared else [number], pool.page_size
    return [], 1


def _touching(chunk: Chunk, pools: list[int], page_size: int, pages: np.ndarray) -> list[int]:
    """Indices of the chunk's events that name one of ``pages`` (ascending)."""
    hits: set[int] = set()
    for lists, divisor in ((_TOKEN_LISTS, page_size), (_PAGE_LISTS, 1)):
        for kind, slots in lists.items():
            events = np.flatnonzero((chunk.kind == kind) & np.isin(chunk.pool, pools))
            if not len(events):
                continue
            for slot in slots:
                column = chunk.lists(slot)
                places = np.flatnonzero(np.isin(column.values // divisor, pages))
                owners = np.searchsorted(column.offsets, places, side="right") - 1
                hits.update(np.intersect1d(owners, events).tolist())
    return sorted(hits)
