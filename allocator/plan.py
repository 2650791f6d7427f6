"""Which page moves where in one flush of an END pool. Pure host code: lists of integers in, lists of integers out.

Words: the *frontier* is the watermark side of the band, the *origin* the buffer's end where the pool starts. Live pages nearest the
frontier move into the holes nearest the origin, one by one, until the two cursors meet; then the band is packed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass


def boundary_holes(holes: Sequence[int], watermark: int, grows_up: bool) -> int:
    """How many of the ascending ``holes`` touch the watermark and are given back by moving it alone."""
    count, total = 0, len(holes)
    if grows_up:
        while count < total and holes[total - 1 - count] == watermark - 1 - count:
            count += 1
    else:
        while count < total and holes[count] == watermark + 1 + count:
            count += 1
    return count


@dataclass(frozen=True)
class FlushPlan:
    """``src_pages[i]`` moves to ``dst_pages[i]``."""

    src_pages: list[int]
    dst_pages: list[int]


def plan_moves(
    holes: Sequence[int],
    watermark: int,
    *,
    grows_up: bool,
    pending: Collection[int],
    write_set: Callable[[], Collection[int]],
    max_moves: int | None,
) -> FlushPlan:
    """Match live pages at the frontier with holes at the origin.

    Args:
        holes: interior holes, ascending (none touches the watermark).
        watermark: next free page in the direction of growth.
        grows_up: direction of the pool.
        pending: pages waiting for a reader; neither live nor hole, stepped over.
        write_set: pages that the running forward will write. The first of them at the frontier stops the walk: moving it would
            copy bytes that are about to change. Called at most once, and only if some page could move (it costs a read).
        max_moves: upper bound, None for no bound.
    """
    src_pages: list[int] = []
    dst_pages: list[int] = []
    if not holes or max_moves == 0:
        return FlushPlan(src_pages, dst_pages)
    step = -1 if grows_up else 1
    candidate = watermark + step
    near = len(holes) - 1 if grows_up else 0  # the hole nearest the frontier that the walk has not passed
    far = 0 if grows_up else len(holes) - 1  # the hole nearest the origin that is not filled yet
    unfilled = len(holes)
    blocked: Collection[int] | None = None
    while unfilled:
        hole_ahead = holes[near] if 0 <= near < len(holes) else None
        if candidate == hole_ahead:
            near += step
            candidate += step
            continue
        if candidate in pending:
            candidate += step
            continue
        target = holes[far]
        if (candidate - target) * step > 0:
            break  # the cursors met: the band is packed, a further move would carry a hole back to the frontier
        if blocked is None:
            blocked = write_set()
        if candidate in blocked:
            break
        src_pages.append(candidate)
        dst_pages.append(target)
        if len(src_pages) == max_moves:
            break
        far -= step
        unfilled -= 1
        candidate += step
    return FlushPlan(src_pages, dst_pages)
