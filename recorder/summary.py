"""Figures about a trace, gathered chunk by chunk without expanding any list of ids."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from .trace import (
    COMPOSITE,
    Chunk,
    EventKind,
    Header,
    MarkCode,
    PoolHeader,
    Provenance,
    Recovery,
    ResultKind,
    StateBatch,
    TraceReader,
)
from .trace.schema import RESULT_SLOT

_ALLOCATING = (
    EventKind.ALLOC,
    EventKind.ALLOC_EXTEND,
    EventKind.ALLOC_DECODE,
    EventKind.ALLOC_PHYSICAL,
    EventKind.ALLOC_EXTEND_SWA_TAIL,
    EventKind.SLOT_ALLOC,
)
_DEEPEST = 20
_FREEING = (
    EventKind.FREE,
    EventKind.FREE_SEGMENT,
    EventKind.FREE_PHYSICAL,
    EventKind.FREE_FULL,
    EventKind.FREE_FULL_SEGMENT,
    EventKind.SLOT_FREE,
)
_COMPOSITE = -1
"""Key of the figures of calls on a composite, which name no pool."""


@dataclass
class PoolFigures:
    """What the calls on one pool add up to. Ids are counted as given; a free may name a page by one of its ids."""

    tokens_allocated: int = 0
    allocs_refused: int = 0
    ids_freed: int = 0
    pages_freed: int = 0
    flushes_urgent: int = 0
    flushes_other: int = 0
    pages_moved: int = 0


@dataclass
class Summary:
    """Everything `kvtape info` says about one trace."""

    path: Path
    size: int
    header: Header
    events: int = 0
    chunks: int = 0
    states: int = 0
    dropped: int = 0
    request_ids: int = 0
    reason: str = ""
    first_us: int | None = None
    last_us: int | None = None
    nested: int = 0
    kinds: dict[tuple[int, int], int] = field(default_factory=dict)
    marks: dict[int, int] = field(default_factory=dict)
    pools: dict[int, PoolFigures] = field(default_factory=dict)
    ended: str = ""
    recovery: Recovery | None = None

    def pool_name(self, pool: int) -> str:
        """Name of pool number `pool`; "-" for events of none."""
        return "-" if pool < 0 else self.header.pools[pool].name


def summarize(path: Path) -> Summary:
    """Read a trace and add it up. Raises what TraceReader raises."""
    with TraceReader(path) as reader:
        summary = Summary(path, reader.size, reader.header)
        for item in reader.items():
            if isinstance(item, StateBatch):
                summary.states += len(item)
            else:
                _add(summary, item)
        summary.ended, summary.recovery = reader.ended, reader.recovered
        if reader.footer is not None:
            summary.dropped += reader.footer.dropped_at_end
            summary.reason = reader.footer.reason
        return summary


def _add(summary: Summary, chunk: Chunk) -> None:
    summary.events += len(chunk)
    summary.chunks += 1
    summary.dropped += int(chunk.drops[:, 1].sum())
    summary.request_ids += len(chunk.request_ids)
    first, last = int(chunk.time_us.min()), int(chunk.time_us.max())
    summary.first_us = first if summary.first_us is None else min(summary.first_us, first)
    summary.last_us = last if summary.last_us is None else max(summary.last_us, last)
    summary.nested += int(np.count_nonzero(chunk.depth))
    pairs, counts = np.unique(
        chunk.kind.astype(np.int64) * (1 << 16) + chunk.pool.astype(np.int64) + 1, return_counts=True
    )
    for pair, count in zip(pairs.tolist(), counts.tolist(), strict=True):
        key = (pair >> 16, (pair & 0xFFFF) - 1)
        summary.kinds[key] = summary.kinds.get(key, 0) + count
    codes, counts = np.unique(chunk.value[chunk.kind == EventKind.MARK], return_counts=True)
    for code, count in zip(codes.tolist(), counts.tolist(), strict=True):
        summary.marks[code] = summary.marks.get(code, 0) + count
    allocated, given = chunk.list_lengths(RESULT_SLOT), chunk.list_lengths(0)
    derived = chunk.list_lengths(1)
    for pool in np.unique(chunk.pool).tolist():
        if pool >= 0 or summary.header.level == COMPOSITE:
            figures = summary.pools.setdefault(pool, PoolFigures())
            _add_pool(figures, chunk, chunk.pool == pool, allocated, given, derived)


def _add_pool(
    figures: PoolFigures, chunk: Chunk, here: Any, allocated: Any, given: Any, derived: Any
) -> None:
    allocs = here & np.isin(chunk.kind, _ALLOCATING)
    frees = here & np.isin(chunk.kind, _FREEING)
    flushes = here & (chunk.kind == EventKind.FLUSH)
    figures.tokens_allocated += int(allocated[allocs].sum())
    figures.allocs_refused += int(np.count_nonzero(chunk.result_kind[allocs] == ResultKind.NULL))
    figures.ids_freed += int(given[frees].sum())
    figures.pages_freed += int(derived[here & (chunk.kind == EventKind.FREE)].sum())
    figures.flushes_urgent += int(np.count_nonzero(chunk.value[flushes] == 1))
    figures.flushes_other += int(np.count_nonzero(chunk.value[flushes] == 0))
    moved = flushes & (chunk.result_kind == ResultKind.INTEGER)
    figures.pages_moved += int(chunk.result_value[moved].sum())


def summary_to_map(summary: Summary) -> dict[str, Any]:
    """The figures as plain JSON values."""
    header = summary.header
    span = None if summary.first_us is None or summary.last_us is None else summary.last_us - summary.first_us
    kinds: dict[str, dict[str, int]] = {}
    for (kind, pool), count in sorted(summary.kinds.items()):
        kinds.setdefault(EventKind(kind).name, {})[summary.pool_name(pool)] = count
    return {
        "file": str(summary.path),
        "bytes": summary.size,
        "bytes_per_event": round(summary.size / summary.events, 3),
        "format": f"{header.format[0]}.{header.format[1]}",
        "uuid": header.uuid,
        "producer": header.producer,
        "engine": header.engine,
        "engine_version": header.engine_version,
        "allocator": header.allocator,
        "model": header.model,
        "device": header.device,
        "rank": json_value(header.rank),
        "level": header.level,
        "clock_unit": header.clock_unit,
        "drop_policy": header.drop_policy,
        "settings": json_value(header.settings),
        "total_bytes": header.total_bytes,
        "provenance": _record(header.provenance),
        "extra": json_value(header.extra),
        "pools": [
            {**_record(pool), **_record(summary.pools.get(number, PoolFigures()))}
            for number, pool in enumerate(header.pools)
        ],
        "composite": _record(summary.pools[_COMPOSITE]) if _COMPOSITE in summary.pools else None,
        "events": summary.events,
        "chunks": summary.chunks,
        "states": summary.states,
        "dropped": summary.dropped,
        "nested": summary.nested,
        "request_ids": summary.request_ids,
        "first_us": summary.first_us,
        "last_us": summary.last_us,
        "span_us": span,
        "kinds": kinds,
        "marks": {_mark_name(code): count for code, count in sorted(summary.marks.items())},
        "ended": summary.ended,
        "reason": summary.reason,
        "recovery": None if summary.recovery is None else _record(summary.recovery),
    }


def _record(record: Provenance | PoolHeader | PoolFigures | Recovery) -> dict[str, Any]:
    return {item.name: json_value(getattr(record, item.name)) for item in fields(record)}


def json_value(value: Any, depth: int = 0) -> Any:
    """`value` of a header as JSON has it: what JSON has no form for becomes text, and deep nesting is cut off."""
    if depth > _DEEPEST:
        return "..."
    if isinstance(value, dict):
        return {
            key if isinstance(key, str) else str(json_value(key, depth)): json_value(item, depth + 1)
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [json_value(item, depth + 1) for item in value]
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    return value


def _mark_name(code: int) -> str:
    try:
        return MarkCode(code).name.lower()
    except ValueError:
        return str(code)
