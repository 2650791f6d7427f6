"""What flushes did and cost: pages moved and synchronisations, of every flush of the pools that are watched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from types import TracebackType
from typing import Any

from replayer.ledger import SyncLedger


@dataclass(frozen=True)
class Flush:
    """One flush; of an eager pool one compaction at a free. ``moved`` may still be on its way from the device until `int` asks."""

    pool: str
    urgent: bool
    moved: Any
    device_to_host: int
    host_to_device: int
    waits: int


class FlushLog:
    """Counts flushes of the allocators it watches, also those that an alloc of the other pool makes. A context manager."""

    def __init__(self, device: str) -> None:
        self._ledger = SyncLedger(device)
        self._flushes: list[Flush] = []

    def watch(self, allocator: Any) -> None:
        """Wrap the flush of this instance; of an eager pool, whose frees compact, the compaction."""
        self._ledger.host(*getattr(allocator, "pinned_host_tensors", ()), pinned=True)
        if allocator.lazy_compaction:
            flush = allocator._flush
            allocator._flush = lambda *, urgent: self._counted(
                allocator.sub_pool_name, urgent, lambda: flush(urgent=urgent)
            )
            return
        compact, move = allocator._compact_now, allocator._move
        moved: list[int] = []

        def counting_move(src_list: list[int], dst_list: list[int]) -> Any:
            moved.append(len(src_list))
            return move(src_list, dst_list)

        def compacted(freed_pages: Any) -> int:
            moved.clear()
            compact(freed_pages)
            return sum(moved)

        allocator._move = counting_move
        allocator._compact_now = lambda freed_pages: self._counted(
            allocator.sub_pool_name, False, lambda: compacted(freed_pages)
        )

    def _counted(self, pool: str, urgent: bool, flush: Callable[[], Any]) -> Any:
        with self._ledger.call("flush") as counted:
            moved = flush()
        self._flushes.append(
            Flush(pool, urgent, moved, counted.device_to_host, counted.host_to_device, counted.waits)
        )
        return moved

    def summary(self) -> dict[str, Any]:
        """Counts, and synchronisations per flush: least, median, most and total of each kind."""
        flushes = self._flushes
        moves = [int(flush.moved) for flush in flushes]
        return {
            "count": len(flushes),
            "urgent": sum(flush.urgent for flush in flushes),
            "that_moved": sum(count > 0 for count in moves),
            "urgent_that_moved": sum(
                count > 0 and flush.urgent for count, flush in zip(moves, flushes, strict=True)
            ),
            "pages_moved": sum(moves),
            "pages_moved_most": max(moves, default=0),
            "syncs": {
                kind: _spread([getattr(flush, kind) for flush in flushes])
                for kind in ("device_to_host", "host_to_device", "waits")
            },
        }

    def __enter__(self) -> FlushLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ledger.close()


def _spread(counts: list[int]) -> dict[str, float]:
    if not counts:
        return {"min": 0, "median": 0, "max": 0, "total": 0}
    return {"min": min(counts), "median": median(counts), "max": max(counts), "total": sum(counts)}
